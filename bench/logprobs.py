"""Log-probabilities, entropies and their gradients in tiles, beside the same with all logits in
memory.

    python -m bench.logprobs [--quick]

In: nothing but the machine. Out: a table per hidden size and one last line of JSON. Each variant
lives in a child process of its own and takes its turn in random order; one call is a forward and a
backward of sum_t u_t logprob_t, all tokens trained.

    whole    logits once, kept as probabilities for backward, in place wherever it can be: the
             leanest and quickest unchunked
    eager    torch.log_softmax under autograd; three to four tensors of the logits' size, so only
             timed, at few tokens
    tiles    rft.megatron.logprobs, which makes the logits a second time in backward

    s        processor time of a child with one thread: its wall clock on a free core. (On shared
             cores two threads wait at
             the end of every kernel for whichever is not running, which measures the neighbours.)
    extra    highest resident memory during a call less that before it; gradients count, inputs and
             weight do not
    ratio    time of tiles / time of the quicker of the others in the same round
"""

import argparse
import gc
import os
import random
import re
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import report

VOCAB = 150_000
TOKENS = 8_192
QUICK_TOKENS = 512  # of the timed rounds of --quick; memory is always taken at all tokens
ROUNDS = 10
MEMORY_BAR = 0.15
TIME_BARS = {256: 1.2, 1_024: 1.35}
GRADIENT_BAR = 1e-5  # relative L2 distance, per tensor
WHOLE, EAGER, TILES = "whole", "eager", "tiles"


@dataclass(frozen=True)
class Problem:
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: Tensor
    upstream: Tensor

    @classmethod
    def make(cls, size: int, tokens: int) -> "Problem":
        made = torch.Generator().manual_seed(0)
        return cls(
            torch.randn(tokens, size, generator=made).requires_grad_(),
            torch.randn(VOCAB, size, generator=made).div_(size**0.5).requires_grad_(),
            torch.randint(0, VOCAB, (tokens,), generator=made),
            torch.rand(tokens, generator=made) * 0.5 + 0.75,
            torch.randn(tokens, generator=made),
        )

    def head(self, tokens: int) -> "Problem":
        """The first tokens of it, with the same weight."""
        hidden = self.hidden.detach()[:tokens].clone().requires_grad_()
        return Problem(
            hidden,
            self.weight,
            self.labels[:tokens],
            self.temperature[:tokens],
            self.upstream[:tokens],
        )


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        z = torch.mm(hidden / temperature[:, None], weight.t())
        chosen = z.gather(1, labels[:, None]).squeeze(1)
        top = z.amax(1, keepdim=True)
        p = torch.softmax(z.sub_(top), 1)
        log_total = -p.amax(1).log()
        entropy = log_total - z.mul_(p).sum(1)
        del z
        ctx.save_for_backward(hidden, weight, labels, temperature, p)
        ctx.mark_non_differentiable(entropy)
        return chosen - top.squeeze(1) - log_total, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, labels, temperature, p = ctx.saved_tensors
        scale = upstream / temperature
        grad = p.mul_(-scale[:, None])
        grad.scatter_add_(1, labels[:, None], scale[:, None])
        return grad @ weight, grad.t() @ hidden, None, None


def whole(given: Problem) -> tuple[Tensor, Tensor]:
    return _Whole.apply(given.hidden, given.weight, given.labels, given.temperature)


def eager(given: Problem) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax((given.hidden @ given.weight.t()) / given.temperature[:, None], -1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, given.labels[:, None]).squeeze(1), entropy


def tiles(given: Problem) -> tuple[Tensor, Tensor]:
    from rft.megatron.logprobs import label_logprobs

    assert dist.group.WORLD is not None
    return label_logprobs(
        given.hidden, given.weight, given.labels, given.temperature, VOCAB, dist.group.WORLD
    )


VARIANTS = {WHOLE: whole, EAGER: eager, TILES: tiles}


def call(name: str, given: Problem) -> list[Tensor]:
    """Log-probabilities, entropies and both gradients."""
    given.hidden.grad = given.weight.grad = None
    logprobs, entropy = VARIANTS[name](given)
    (logprobs * given.upstream).sum().backward()
    found = [logprobs.detach(), entropy.detach(), given.hidden.grad, given.weight.grad]
    given.hidden.grad = given.weight.grad = None
    return found  # type: ignore[return-value]


def resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def prepare() -> None:
    from rft.megatron import cpu_port

    cpu_port.install()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def serve(name: str, size: int, connection: Connection) -> None:
    """In the child: for each (tokens, threads) asked for, (seconds, extra bytes) of one call, until
    it is ended.
    """
    prepare()
    given = Problem.make(size, TOKENS)
    call(name, given.head(64))
    while True:
        tokens, threads = connection.recv()
        torch.set_num_threads(threads)
        part = given.head(tokens)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size starts anew
        before = resident("VmRSS")
        started = time.process_time()
        found = call(name, part)
        elapsed = time.process_time() - started
        connection.send((elapsed, resident("VmHWM") - before))
        del found


def distances(size: int, connection: Connection) -> None:
    """In the child: how far every result of tiles is from that of whole, by relative L2."""
    prepare()
    given = Problem.make(size, QUICK_TOKENS)
    pairs = zip(call(TILES, given), call(WHOLE, given), strict=True)
    connection.send([float((a - b).norm() / b.norm()) for a, b in pairs])


class Child:
    """A process that answers over a pipe; leaving the block ends it."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        context = get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, there), daemon=True)
        self.process.start()
        there.close()

    def ask(self, tokens: int, threads: int = 1) -> tuple[float, int]:
        self.connection.send((tokens, threads))
        return self.connection.recv()  # type: ignore[no-any-return]

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def rounds_of(size: int, tokens: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each variant, round by round, and extra bytes at all tokens."""
    timed = [WHOLE, EAGER, TILES] if tokens < TOKENS else [WHOLE, TILES]
    children = {name: Child(serve, name, size) for name in timed}
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    extra: dict[str, int] = {}
    try:
        for _ in range(ROUNDS):
            for name in random.sample(timed, len(timed)):
                elapsed, extra[name] = children[name].ask(tokens)
                seconds[name].append(elapsed)
        for name in (WHOLE, TILES):
            if tokens < TOKENS:
                _, extra[name] = children[name].ask(
                    TOKENS, os.cpu_count() or 1
                )  # quicker, and nobody looks at the clock
    finally:
        for child in children.values():
            child.end()
    return seconds, {name: extra[name] for name in (WHOLE, TILES)}


def enough_memory(size: int) -> bool:
    """Two tensors of the logits' size, the weight in every
    child and one gradient, with some air.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    needed = 4 * VOCAB * (2 * TOKENS + 4 * size) + 2**30
    return found is not None and int(found[1]) * 1024 > needed


def measure(size: int, tokens: int) -> tuple[dict[str, float | None], bool]:
    """The ratios at one hidden size and whether they reach the bars."""
    names = [f"memory_{size}", f"time_{size}", f"gradient_{size}"]
    if not enough_memory(size):
        print(f"\nhidden {size}: too little memory for all logits of {TOKENS} tokens; not measured")
        return dict.fromkeys(names), False
    check = Child(distances, size)
    apart = check.connection.recv()
    check.end()
    seconds, extra = rounds_of(size, tokens)
    baseline = min(
        (name for name in seconds if name != TILES), key=lambda name: report.median(seconds[name])
    )
    paired = [ours / theirs for ours, theirs in zip(seconds[TILES], seconds[baseline], strict=True)]
    memory, slower = extra[TILES] / extra[WHOLE], report.median(paired)
    rows = []
    for name, values in seconds.items():
        low, high = report.spread(values)
        rows.append(
            [
                name,
                f"{report.median(values):.2f}",
                f"{low:.2f}..{high:.2f}",
                f"{extra[name] / 2**20:.0f}" if name in extra else "-",
            ]
        )
    title = (
        f"hidden {size}, vocabulary {VOCAB:,}, {tokens:,} tokens timed, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    report.table(title, ["s", "median", "middle half", f"extra MiB at {TOKENS:,} tokens"], rows)
    low, high = report.spread(paired)
    print(
        f"tiles / {baseline} in the same round: {slower:.2f} ({low:.2f}..{high:.2f}; bar "
        f"{TIME_BARS[size]}); memory "
        f"{memory:.3f} (bar {MEMORY_BAR}); logprobs, entropy, gradients apart by "
        f"{', '.join(f'{a:.0e}' for a in apart)}"
    )
    meets = memory <= MEMORY_BAR and slower <= TIME_BARS[size] and max(apart) <= GRADIENT_BAR
    return dict(zip(names, [round(memory, 4), round(slower, 3), max(apart)], strict=True)), meets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"under ten minutes: rounds of {QUICK_TOKENS} tokens"
    )
    arguments = parser.parse_args()
    tokens = QUICK_TOKENS if arguments.quick else TOKENS
    ratios: dict[str, float | None] = {}
    met = []
    for size in TIME_BARS:
        found, meets = measure(size, tokens)
        ratios |= found
        met.append(meets)
    config = {
        "vocab": VOCAB,
        "tokens_memory": TOKENS,
        "tokens_timed": tokens,
        "dtype": "float32",
        "threads": 1,
        "quick": arguments.quick,
        "bars": {"memory": MEMORY_BAR, "time": TIME_BARS, "gradient": GRADIENT_BAR},
    }
    counts = {"rounds": ROUNDS, "hidden_sizes": len(TIME_BARS)}
    report.last_line("logprobs", ratios, counts, config, report.versions("torch"), all(met))


if __name__ == "__main__":
    main()
