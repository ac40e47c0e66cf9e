"""A group's prompt once: a training step whose rows share prefixes, beside the same step unrolled.

    python -m bench.prefix [--quick | --rounds N] [--dtype fp32|bf16] [--only CASE ...]

In: nothing; random weights of SmolLM2-135M's shapes (30 layers, hidden 576, vocabulary 49,152, 9
heads over 3), one thread. Every round draws tokens anew and gives them to both ways in random
order: `Policy.train_step` of packed rows, in one process. Out: a table and one last line of JSON.

    3R, R        groups of 8 responses of R tokens behind a prompt of three times and of once R
    agent        4 rollouts of 4 equal turns behind one another, every turn a sample
    apart        groups whose rows begin differently: sharing is on, and there is nothing to share
    told         responses of 2,048 tokens, one round, without a bar: rows of 16,384 tokens, whose
                 layers are computed again in backward, for otherwise they do not fit into 24 GiB;
                 20 minutes, and some 45 behind the longer prompt

    busy         processor seconds of a step; ratios are unrolled / shared, in the same round
    ideal        the same ratio of FLOPs: products of all computed tokens, attention by what each
                 sees, the head by the labels
"""

import argparse
import os
import random
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from rft.algorithm.losses import token_loss
from rft.config import MegatronConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rft.data.packing import Cost, Packed, PackingPolicy, Row, pack
from rft.ground import device as devices
from rft.tools.toy import write_model

ROUNDS = 10
GROUP, TURNS, ROLLOUTS = 8, 4, 4
BUDGET = 16384
TIMEOUT_S = 600.0
SHAPES = {
    **{"hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn": 1536},
    **{"vocab": 49152, "context": 8192},
}
HEAD_PRODUCTS = 4 / 3  # logits are made again in backward: four products where others have three


@dataclass(frozen=True)
class Case:
    name: str
    rows: Callable[
        [np.random.Generator], list[tuple[np.ndarray, int, int]]
    ]  # tokens, prompt, group
    bar: float | None
    groups: int = 1  # of a step
    quick: bool = False

    @property
    def is_told(self) -> bool:
        return self.bar is None


def drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(10, SHAPES["vocab"], count)


def responses(prompt: int, length: int, apart: bool = False) -> Any:
    def rows(rng: np.random.Generator) -> list[tuple[np.ndarray, int]]:
        shared = drawn(rng, prompt)
        return [
            (
                np.concatenate([drawn(rng, prompt) if apart else shared, drawn(rng, length)]),
                prompt,
            )
            for _ in range(GROUP)
        ]

    return rows


def turns(length: int) -> Any:
    """Of a turn, the first half is what is seen, the other what is answered."""

    def rows(rng: np.random.Generator) -> list[tuple[np.ndarray, int]]:
        found, seen = [], drawn(rng, length // 2)
        for _ in range(ROLLOUTS):
            history = seen
            for turn in range(TURNS):
                if turn:
                    history = np.concatenate([history, drawn(rng, length // 2)])
                prompt = len(history)
                history = np.concatenate([history, drawn(rng, length // 2)])
                found.append((history, prompt))
        return found

    return rows


CASES = (
    Case("prompt 192, 8 x 64", responses(192, 64), 2.1, groups=2, quick=True),
    Case("prompt 64, 8 x 64", responses(64, 64), 1.45, groups=2, quick=True),
    Case("prompt 768, 8 x 256", responses(768, 256), 2.1),
    Case("prompt 256, 8 x 256", responses(256, 256), 1.45),
    Case("agent, 4 x 4 turns of 128", turns(128), 2.0),
    Case("apart, 8 x 128", responses(64, 64, apart=True), 0.98, quick=True),
    Case("prompt 2,048, 8 x 2,048", responses(2048, 2048), None),
    Case("prompt 6,144, 8 x 2,048", responses(6144, 2048), None),
)


def rows_of(case: Case, seed: int) -> list[Row]:
    made, rng = [], np.random.default_rng(seed)
    given = [(*row, group) for group in range(case.groups) for row in case.rows(rng)]
    for tokens, prompt, group in given:
        trained = np.zeros(len(tokens), dtype=np.float32)
        trained[prompt:] = 1
        weight = trained / np.float32(1000)
        made.append(Row(tokens, trained, trained * -10, trained, weight, group=group))
    return made


def flops(part: list[Packed], cost: Cost, hf: dict[str, Any]) -> float:
    """Of a forward pass, all else being the same multiple of it."""
    head = 2.0 * hf["hidden_size"] * hf["vocab_size"]
    total = 0.0
    for packed in part:
        lengths = np.diff(packed.cu_seqlens).astype(np.float64)
        total += (cost.linear - head) * packed.computed
        total += cost.attention * (lengths**2 - packed.shared.astype(np.float64) ** 2).sum()
        total += HEAD_PRODUCTS * head * np.count_nonzero(packed.weight)
    return total


class Trainer:
    """One policy, and a step of a case in either way."""

    def __init__(self, model: Path, dtype: str, recompute: bool):
        from rft.megatron.mesh import Mesh
        from rft.megatron.policy import Policy

        self.mesh = Mesh(MegatronConfig(), devices.choose("cpu", 0, 1), TIMEOUT_S)
        given = TrainerConfig(
            megatron=MegatronConfig(),
            dtype=dtype,
            grad_clip=1.0,
            recompute_granularity="full" if recompute else None,
        )
        optimizer = OptimizerConfig(lr=1e-6)
        model_config = ModelConfig(model_path=str(model))
        self.policy = Policy(model_config, given, optimizer, self.mesh, seed=0, total_steps=None)
        self.cost = Cost.of(self.policy.hf_config)
        self.loss = token_loss("ppo", {})

    def part(self, case: Case, seed: int, share: bool) -> list[Packed]:
        cut = PackingPolicy(share=share)
        return pack(rows_of(case, seed), 1, BUDGET, self.policy.multiple, self.cost, cut)[0]

    def busy(self, part: list[Packed]) -> float:
        began = time.process_time()
        self.policy.train_step(part, self.loss, lambda: None)
        return time.process_time() - began

    def round(self, case: Case, seed: int) -> dict[bool, float]:
        parts = {share: self.part(case, seed, share) for share in (False, True)}
        order = random.sample(sorted(parts), 2)
        return {share: self.busy(parts[share]) for share in order}


def measured(trainer: Trainer, case: Case, rounds: int) -> tuple[list[str], float, bool]:
    plain, shared = (trainer.part(case, 0, share) for share in (False, True))
    hf = trainer.policy.hf_config
    ideal = flops(plain, trainer.cost, hf) / flops(shared, trainer.cost, hf)
    if not case.is_told:
        trainer.round(case, 0)  # warms up
    found = [trainer.round(case, 1 + number) for number in range(rounds)]
    ratios = [one[False] / one[True] for one in found]
    ratio, (low, high) = report.median(ratios), report.spread(ratios)
    row = [
        case.name,
        f"{sum(p.computed for p in plain):,}",
        f"{sum(p.computed for p in shared):,}",
        *(f"{report.median([one[share] for one in found]):.2f}" for share in (False, True)),
        f"{ratio:.2f} ({low:.2f} to {high:.2f})",
        f"{ideal:.2f}",
        f"{ratio / ideal:.2f}",
        "-" if case.bar is None else f"{case.bar:.2f}",
    ]
    return row, ratio, case.bar is None or ratio >= case.bar


HEADER = (
    *("", "tokens", "shared", "busy, s", "shared, s", "ratio", "ideal", "share of it", "bar"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="responses of 64 tokens alone")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--only", nargs="*", help="cases whose names contain one of these")
    given = parser.parse_args()
    rounds = given.rounds or ROUNDS
    warnings.filterwarnings("ignore", category=FutureWarning)
    cases = [case for case in CASES if case.quick or not given.quick]
    if given.only:
        cases = [case for case in cases if any(word in case.name for word in given.only)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    devices.choose("cpu", 0, 1).activate()
    from rft.megatron import cpu_port

    cpu_port.install()
    with tempfile.TemporaryDirectory(prefix="rft-prefix-") as directory:
        model = Path(directory) / "model"
        write_model(model, "llama", **SHAPES)
        rows, ratios, good = [], {}, True
        for is_told in (False, True):
            if not (some := [case for case in cases if case.is_told == is_told]):
                continue
            trainer = Trainer(model, given.dtype, recompute=is_told)
            for case in some:
                row, ratio, meets = measured(trainer, case, 1 if is_told else rounds)
                rows, ratios[case.name], good = [*rows, row], round(ratio, 3), good and meets
                print(f"  {case.name}: {ratio:.2f}", flush=True)
            trainer.mesh.close()
    title = f"a step of one rank, one thread, {given.dtype}, {rounds} rounds (one without a bar)"
    report.table(title, HEADER, rows)
    report.last_line(
        "prefix",
        ratios,
        {"rounds": rounds},
        {"dtype": given.dtype, "group": GROUP, "budget": BUDGET},
        report.versions("torch", "megatron-core"),
        good and rounds >= ROUNDS and not given.only,
    )


if __name__ == "__main__":
    main()
