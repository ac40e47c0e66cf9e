"""Is `rft plan` right? Its layout beside all others that fit, measured; its memory beside that of
runs.

    python -m bench.plan [--quick] [--part layouts | memory] [--rounds N] [--case NAME]

In: nothing; models with random weights. Out: a table per case and one last line of JSON.

    layouts   On 2 and 4 gloo ranks of one thread, every layout that fits (without recomputing,
              which only adds work) trains the same rows, in an order that changes with every round;
              a round is one start of the ranks and a few steps, of which the quickest counts: other
              programs only add to it. `s` is the median over rounds, of the slowest rank; `busy`
              processor seconds of all ranks; chosen / best <= 1.10.
    memory    Five runs as a user starts them, three steps each, and the largest memory of a trainer
              rank with its checkpoint agent and staged checkpoints, and of an engine with its front
              (PSS: what processes share is divided among them), sampled; plan / measured within
              15 %. `--quick`: the first of them.
"""

import argparse
import random
import socket
import tempfile
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench import plan_memory, report
from bench.train_step_rows import Shape, rows_of
from rft.tools import planner
from rft.tools.layout_search import Candidate, Search
from rft.tools.toy import write_model

ROUNDS, QUICK_ROUNDS, STEPS = 5, 3, 3
BEST_BAR = 1.10
ANSWER_S = 600.0


@dataclass(frozen=True)
class Case:
    """`model`: arguments of `write_model`; `shape`: what a step trains on."""

    world: int
    model: dict[str, Any]
    shape: Shape


SMALL = {"hidden": 192, "layers": 4, "heads": 6, "kv_heads": 2, "head_dim": 32, "ffn": 512}
WIDE = {"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 1536}
MANY = Shape(rows=32, prompt=32, median=140.0, longest=512, budget=2048)
FEW = Shape(rows=4, prompt=16, median=40.0, sigma=0.2, longest=64, budget=128)
EXPERTS = SMALL | {"family": "qwen3_moe", "layers": 2}
CASES = {
    "2.4M, 6,000 tokens, 2 ranks": Case(2, SMALL, MANY),
    "2.4M, 6,000 tokens, 4 ranks": Case(4, SMALL, MANY),
    "17M, 230 tokens, 2 ranks": Case(2, WIDE | {"vocab": 4096}, FEW),
    "17M, 230 tokens, 4 ranks": Case(4, WIDE | {"vocab": 4096}, FEW),
    "experts, 6,000 tokens, 2 ranks": Case(2, EXPERTS, MANY),
}
QUICK_CASES = ("17M, 230 tokens, 2 ranks",)


def main() -> None:
    parser = argparse.ArgumentParser(description="Is `rft plan` right?")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=["layouts", "memory"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--case", choices=[*CASES], help="one of the cases of layouts")
    options = parser.parse_args()
    ratios: dict[str, Any] = {}
    meets = True
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        if options.part != "memory":
            rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
            names = [options.case] if options.case else QUICK_CASES if options.quick else CASES
            for name in names:
                ratios[name] = of_case(name, CASES[name], rounds, root)
                meets &= ratios[name] <= BEST_BAR
        if options.part != "layouts":
            found = plan_memory.measured(root, options.quick)
            ratios |= found
            meets &= all(abs(ratio - 1) <= plan_memory.BAR for ratio in found.values())
    bars = {"chosen/best": BEST_BAR, "plan/measured": plan_memory.BAR}
    versions = report.versions("torch", "megatron-core", "transformers")
    report.last_line("plan", ratios, {}, {"bars": bars}, versions, meets)


# --- layouts --------------------------------------------------------------------------------------


def searched(case: Case, model: Path) -> Search:
    """What `rft plan` finds for the case."""
    shape, rows = case.shape, case.shape.rows
    words = [
        "experiment=sft",
        f"model.model_path={model}",
        f"model.max_prompt_tokens={shape.prompt}",
        f"model.max_response_tokens={shape.longest}",
        f"buffer.train_batch_size={rows}",
        f"trainer.max_token_len_per_gpu={shape.budget}",
        f"trainer.num_ranks={case.world}",
        "device=cpu",
    ]
    mean = sum(len(row.tokens) for row in rows_of(shape, 0)) / rows
    options, words = planner.parser().parse_known_args([f"--length={mean}", *words])
    ((_, found),) = planner.searches(words, options, model)
    return found


def of_case(name: str, case: Case, rounds: int, root: Path) -> float:
    """chosen / best."""
    kind = "_".join(str(value) for value in case.model.values())
    model = write_model(root / f"model_{kind}", context=1024, tied=False, **case.model)
    found = searched(case, model)
    fitting = [one for one in found.fitting if not one.config.trainer.recompute_granularity]
    walls: dict[str, list[float]] = {one.name: [] for one in fitting}
    busy: dict[str, list[float]] = {one.name: [] for one in fitting}
    for _ in range(rounds):
        for one in random.sample(fitting, len(fitting)):
            wall, work = steps_of(one, case, model)
            walls[one.name].append(wall)
            busy[one.name].append(work)
    medians = {layout: report.median(values) for layout, values in walls.items()}
    best = min(medians, key=lambda layout: medians[layout])
    rows = [
        [
            one.name + (" <- chosen" if one is fitting[0] else ""),
            f"{one.seconds.total:.3f}",
            f"{medians[one.name]:.3f}",
            "-".join(f"{value:.3f}" for value in report.spread(walls[one.name])),
            f"{report.median(busy[one.name]):.3f}",
            f"{medians[one.name] / medians[best]:.2f}",
        ]
        for one in fitting
    ]
    header = ["layout", "planned s", "s", "middle half", "busy s", "/ best"]
    report.table(f"{name}, {rounds} rounds", header, rows)
    return medians[fitting[0].name] / medians[best]


def steps_of(one: Candidate, case: Case, model: Path) -> tuple[float, float]:
    """(seconds of the slowest rank, processor seconds of all) of the quickest step."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["bench.plan_ranks"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    ranks = []
    for rank in range(case.world):
        here, there = context.Pipe(duplex=False)
        sizes = one.config.trainer.megatron
        arguments = (rank, case.world, port, sizes, str(model), case.shape, STEPS, there)
        process = context.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        there.close()
        ranks.append((process, here))
    try:
        if not all(here.poll(ANSWER_S) for _, here in ranks):
            raise RuntimeError(f"{one.name}: a rank gave no answer in {ANSWER_S:.0f} s")
        found = [here.recv() for _, here in ranks]
    finally:
        for process, _ in ranks:
            process.join(5)
            process.kill()
    steps = [
        (max(wall for wall, _ in step), sum(work for _, work in step))
        for step in zip(*found, strict=True)
    ]
    return min(steps)


def run_rank(*arguments: Any) -> None:
    from bench.plan_ranks import measure

    measure(*arguments)


if __name__ == "__main__":
    main()
