"""One update of our trainer beside a bare megatron-core loop, and beside TRL's GRPO update of the
same batch.

    python -m bench.train_step [--quick | --rounds N] [--trl-env DIRECTORY | --bare]

TRL wants another transformers than vLLM, so it lives in an environment of its own; without it that
part does not meet:

    python3.11 -m venv .venv-cpu/trl && .venv-cpu/trl/bin/python -m pip install --no-deps -r
    requirements/trl.txt

In: nothing; a toy model of 2.4M parameters and, anew in every round, 32 completions of log-normal
lengths (about 7,000 tokens with their prompts, the longest about 1,000). Out: a table per case and
one last line of JSON. In every round the sides take the same rows in random order, each side in
processes that live through all rounds. On a machine with a GPU one rank trains random weights of
Qwen3-0.6B's shapes, in batches of 64 rows; there `--bare`, without TRL, is what has a bar.

    rft     Policy.train_step, loss `ppo`: packed rows as arrays -> tensors, gradients, metrics,
            update
    bare    GPTModel, DDP, the distributed optimizer and megatron's schedule on the same packed
            microbatches as tensors, with
            the cross entropy of megatron (see `bench.train_step_bare`); in the same processes as
            rft
    trl     GRPOTrainer.training_step for every microbatch, then clipping and optimizer (see
            `bench.train_step_trl`); padded as
            TRL pads, with the quickest of its microbatch sizes and of fp32 weights under autocast
            or bf16 weights

    s       wall clock of the slowest rank; ratios are of this, in the same round
    busy    processor time of all ranks: on cores that others use too it says more
"""

import argparse
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench import report
from bench.gpu import models
from bench.train_step_ranks import BARE, RFT, Case, serve
from bench.train_step_rows import ROWS_OF_EMBEDDING, Shape, save_batch
from rft.ground import device as devices
from rft.tools.toy import write_model

TRL = "trl"
ROUNDS, QUICK_ROUNDS = 40, 15
CASES = ((1, 2), (2, 1))  # ranks, threads of each
BARE_BAR, TRL_BAR, SAME_BAR = 1.05, 0.8, 5e-3
# on a card: shapes of Qwen3-0.6B, whose vocabulary TP2 would pad
CARD_CASES = ((1, 1),)
CARD_SHAPE = Shape(rows=64, prompt=256, median=600.0, longest=2048, budget=8192)
CARD_BARE_BAR = 1 / 0.98
TRL_SIZES, TRL_WEIGHTS, TRL_TRIES = (4, 8, 16, 32), ("fp32", "bf16"), 2
TRL_SCRIPT = Path(__file__).with_name("train_step_trl.py")


class Ranks:
    """The rank processes of one case, which hold both rft and bare."""

    def __init__(self, case: Case):
        context = get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.pipes, self.processes = [], []
        for rank in range(case.world):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(case, rank, port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.facts: dict[str, Any] = [pipe.recv() for pipe in self.pipes][0]

    def ask(self, name: str, seed: int) -> tuple[float, float]:
        for pipe in self.pipes:
            pipe.send((name, seed))
        found = [pipe.recv() for pipe in self.pipes]
        return max(wall for wall, _ in found), sum(busy for _, busy in found)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Trl:
    """TRL's process, with the fastest of its settings once `tune` was called."""

    def __init__(self, python: Path, case: Case, batches: Path):
        self.shape, self.batches = case.shape, batches
        self.size, self.weights = TRL_SIZES[0], TRL_WEIGHTS[0]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "HF_HUB_OFFLINE": "1"
        }
        self.process = subprocess.Popen(
            [python, TRL_SCRIPT, case.model, str(case.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def step(self, seed: int, size: int, weights: str) -> tuple[float, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        batch = self.batches / f"{seed}.npz"
        save_batch(self.shape, seed, batch)
        self.process.stdin.write(
            json.dumps({"batch": str(batch), "size": size, "weights": weights}) + "\n"
        )
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"TRL's process ended with code {self.process.wait()}; run {TRL_SCRIPT} by hand to "
                "see why"
            )
        wall, busy = json.loads(answer)
        return wall, busy

    def tune(self) -> list[str]:
        """Try every setting in turn on the same rows; the first step of each warms up, then its
        best counts.
        """
        settings = [(size, weights) for weights in TRL_WEIGHTS for size in TRL_SIZES]
        found = dict.fromkeys(settings, float("inf"))
        for seed in range(1 + TRL_TRIES):
            for size, weights in random.sample(settings, len(settings)):
                _, busy = self.step(seed, size, weights)
                if seed:
                    found[size, weights] = min(found[size, weights], busy)
        self.size, self.weights = min(found, key=lambda setting: found[setting])
        return [
            f"{size} rows, {weights} weights {busy:.2f}" for (size, weights), busy in found.items()
        ]

    def ask(self, _name: str, seed: int) -> tuple[float, float]:
        return self.step(seed, self.size, self.weights)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def alternate(sides: dict[str, Ranks | Trl], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall clock and processor seconds of every side, round by
    round; round 0 warms up and is left out.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for seed in range(rounds + 1):
        for name in random.sample(list(sides), len(sides)):
            taken = sides[name].ask(name, seed)
            if seed:
                found[name].append(taken)
    return found


def show(
    case: Case, facts: dict[str, Any], found: dict[str, list[tuple[float, float]]]
) -> dict[str, float]:
    """The table of a case; ratio of ours to each of the others,
    by wall clock and by processor time.
    """
    ratios, rows = {}, []
    for name, taken in found.items():
        cells = [name]
        for at, what in enumerate(("wall", "busy")):
            values = [one[at] for one in taken]
            against = [
                ours[at] / theirs[at] for ours, theirs in zip(found[RFT], taken, strict=True)
            ]
            low, high = report.spread(against)
            cells += [
                f"{report.median(values):.2f}",
                f"{report.median(against):.3f}",
                f"{low:.3f}..{high:.3f}",
            ]
            if name != RFT:
                ratios[f"{name}_{what}"] = round(report.median(against), 4)
        rows.append(cells)
    title = (
        f"{case.name}: {facts['parameters']:,} parameters a rank, the first batch of "
        f"{facts['tokens']:,} tokens in "
        f"{facts['microbatches']} microbatches, {len(found[RFT])} rounds, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    report.table(
        title, ["", "s", "rft / it", "middle half", "busy s", "rft / it", "middle half"], rows
    )
    return ratios


def apart(facts: dict[str, Any]) -> float:
    """How far the first step of rft and bare are from each other, loss and gradient norm."""
    return max(abs(facts[what][0] / facts[what][1] - 1) for what in ("loss", "grad_norm"))


def measure(
    case: Case, rounds: int, trl: Path | None, root: Path
) -> tuple[dict[str, float], float]:
    """Ratios of one case, and how far the two Megatron sides are apart."""
    sides: dict[str, Ranks | Trl] = {}
    try:
        ranks = sides[RFT] = sides[BARE] = Ranks(case)
        if trl is not None:
            sides[TRL] = Trl(trl, case, root)
            print(f"trl, busy s of one update: {'; '.join(sides[TRL].tune())}", flush=True)
        found = alternate(sides, rounds)
    finally:
        for side in set(sides.values()):
            side.end()
    return show(case, ranks.facts, found), apart(ranks.facts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}"
    )
    parser.add_argument(
        "--trl-env", type=Path, default=Path(".venv-cpu/trl"), help="TRL's (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="so many; fewer than quick do not meet")
    parser.add_argument("--bare", action="store_true", help="without TRL")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    on_card = devices.cards_seen() > 0
    cases, shape = (CARD_CASES, CARD_SHAPE) if on_card else (CASES, Shape())
    bare_bar = CARD_BARE_BAR if on_card else BARE_BAR
    python = arguments.trl_env.absolute() / "bin" / "python"
    ratios: dict[str, Any] = {"trl_wall": None, "trl_busy": None}
    differ, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if on_card:
            model = models.write(root / "model", "qwen3_0_6b", "cuda")
        else:
            model = write_model(
                root / "model", "qwen3", layers=6, context=2048, vocab=ROWS_OF_EMBEDDING
            )
        dtype = "bf16" if on_card else devices.quickest_dtype("cpu")
        for world, threads in cases:
            case = Case(world, threads, dtype, shape, model)
            trl = python if world == 1 and python.exists() and not arguments.bare else None
            found, distance = measure(case, rounds, trl, root)
            ratios |= {
                f"{name}_tp{world}" if name.startswith(BARE) else name: value
                for name, value in found.items()
            }
            differ.append(distance)
    if not python.exists() and not arguments.bare:
        print(
            f"\nTRL is not installed in {arguments.trl_env}; its part is not measured and does not "
            "meet (see --help)"
        )
    bare = [ratios[f"{BARE}_wall_tp{world}"] for world, _ in cases]
    print(
        f"first step of rft and bare apart by {max(differ):.1e} (loss, gradient norm; bar "
        f"{SAME_BAR})"
    )
    print(
        f"{time.monotonic() - began:.0f} s; bars: rft / bare {bare_bar}, rft / trl {TRL_BAR}, of "
        "the wall clock"
    )
    meets = (
        rounds >= QUICK_ROUNDS
        and max(bare) <= bare_bar
        and max(differ) <= SAME_BAR
        and (arguments.bare or (ratios["trl_wall"] or 9.0) <= TRL_BAR)
    )
    config = {
        "dtype": dtype,
        "cases": cases,
        "shape": vars(shape),
        "quick": arguments.quick,
        "bars": {"bare": bare_bar, "trl": TRL_BAR, "apart": SAME_BAR},
        "cores": os.cpu_count(),
    }
    counts = {"rounds": rounds, "cases": len(cases), "apart": max(differ)}
    versions = report.versions("torch", "megatron-core") | trl_versions(python)
    report.last_line("train_step", ratios, counts, config, versions, meets)


def trl_versions(python: Path) -> dict[str, str]:
    """Of the other environment; nothing where it is missing."""
    if not python.exists():
        return {}
    names = ("trl", "transformers")
    code = (
        f"import importlib.metadata as m, json; print(json.dumps([m.version(n) for n in {names}]))"
    )
    found = json.loads(
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    )
    return {"trl": found[0], "trl's transformers": found[1]}


if __name__ == "__main__":
    main()
