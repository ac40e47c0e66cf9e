"""What failures cost a whole run: one in ten steps, each of a part that a seed has drawn.

    python -m bench.effective [--model 135m] [--tasks N] [--hands N] [--seed S] [--quick]

    ten calm steps ── ten steps, in one of them a part dies ── ten more, another ... ── ten calm

In: nothing; one run of mode=both as a user starts it (Ray, vLLM, two Megatron ranks of a thread
each): GRPO on random weights of SmolLM2-135M's shapes, or the quickstart's, with spare ranks, every
state kept in memory, the disk far away, and restart budgets that never end. A failure is SIGKILL of
a rank, all ranks, the engine, the explorer, the buffer or a checkpoint agent: hands of all six in
an order that is drawn, as are the step of the ten and the moment in it.

    clean        a step's seconds: the median of all calm ones
    effective    clean seconds of the steps with failures / the seconds that they took
    lost         seconds of the ten steps around a failure, less ten clean ones; of the calm ten:
                 what chance gives and takes
    again        steps that had been told before the failure, and were told again

Out: tables, and one last line of JSON. Bar: effective at least 0.90, 135M, clean steps of at least
20 s, each part twice. `--tasks`: of a step, so many that it takes its 20 s and little more on this
machine, for in a longer one a failure weighs less. Elsewhere seconds are told, and what they would
come to at 20 s a step. That is a projection: what ranks lose of their own work (steps again, the
one under way) is taken for so much longer, rollouts that are made again are not. A part that died
unasked is a problem, and told.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from bench import report
from bench.chaos_faults import PARTS, found, title
from bench.chaos_run import REPOSITORY, RESTARTS, ChaosRun, exactly_once
from bench.recovery import RANKS, SHAPES, VOCABULARY
from rft.tools.toy import write_arithmetic, write_model

OF_RANKS = ("rank", "all ranks")
NONE = "none"
KINDS = (*OF_RANKS, "engine", "explorer", "buffer", "checkpoint agent")
EACH, FIRST = 10, 3  # steps per failure, and of the begin, which are slower
EVERY, BAR, STEP_S = 2, 0.90, 20.0  # `EVERY`: times each part is killed, for the bar
LOOK_S = 0.05
GIVEN_UP_S = 1200.0  # for ten steps, or for the run's end
BACK = re.compile(r"^trainer: back from ")

# shapes; tasks of a step; the most tokens of an answer, and of a rank's microbatch
MODELS: dict[str, tuple[dict[str, int], int, int, int]] = {
    "quickstart": ({}, 32, 8, 8192),
    "135m": (SHAPES | {"vocab": VOCABULARY}, 16, 32, 2048),
}
Steps = list[tuple[float, int]]  # when which was told


@dataclass
class Failure:
    """In that step of its ten, after that share of it; `rank`: that one, where it is of one."""

    part: str
    step: int
    share: float
    rank: int
    at: float = 0.0


class Cost(NamedTuple):
    """Of ten steps. `thrown`: steps of the ranks' work that went with them."""

    part: str
    seconds: float
    again: int
    thrown: float


def drawn(seed: int, hands: int) -> list[Failure]:
    """Never near the first or the last of the ten, so that what it costs is theirs."""
    dice = random.Random(seed)
    parts = [part for _ in range(hands) for part in dice.sample(KINDS, len(KINDS))]
    return [
        Failure(part, dice.choice((2, 3, 4)), dice.random(), dice.randrange(RANKS))
        for part in parts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.effective")
    parser.add_argument("--model", choices=MODELS, default="135m")
    parser.add_argument("--tasks", type=int, help="of a step")
    parser.add_argument("--hands", type=int, default=EVERY, help="times that each part is killed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--quick", action="store_true", help="each part once, quickstart's model")
    asked = parser.parse_args()
    name = "quickstart" if asked.quick else asked.model
    failures = drawn(asked.seed, 1 if asked.quick else asked.hands)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the run goes on
    top = Path(tempfile.mkdtemp(prefix="rft-effective-"))
    print(f"seed {asked.seed}; load {os.getloadavg()[0]:.1f}; logs in {top}", flush=True)
    steps, problems = whole(top, name, failures, asked.tasks or MODELS[name][1])
    say(name, steps, failures, problems, asked.seed)
    if not problems:
        shutil.rmtree(top)


def whole(top: Path, name: str, failures: list[Failure], tasks: int) -> tuple[Steps, list[str]]:
    """What the run has told of its steps, and what is wrong with it."""
    write_model(top / "model", **MODELS[name][0])
    write_arithmetic(top, num_eval=16)
    count = FIRST + EACH * (len(failures) + 2)
    run = ChaosRun(arguments(top, name, count, tasks), top / "run.log")
    try:
        for start, failure in enumerate(failures, start=1):
            reached(run, FIRST + EACH * start + failure.step)
            strike(run, failure)
        reached(run, count)
        code = run.process.wait(GIVEN_UP_S)
        problems = [f"exit code {code}"] if code else exactly_once(top / "rft" / "run", count)
        died = [line for _, line in run.lines if f" of {RESTARTS}" in line]
        if len(died) > len(failures):
            problems += ["more died than were killed:", *died]
        back = [line for _, line in run.lines if BACK.match(line)]
        print(*back, *problems, sep="\n", flush=True)
    finally:
        run.close()
    return run.steps(), problems


def arguments(top: Path, name: str, count: int, tasks: int) -> list[str]:
    _, _, answer, rows = MODELS[name]
    return [
        "experiment=grpo",
        "name=run",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={top}",
        f"model.model_path={top / 'model'}",
        "model.max_prompt_tokens=16",
        f"model.max_response_tokens={answer}",
        f"buffer.batch_size={tasks}",
        "buffer.total_epochs=1000000",
        f"buffer.explorer_input.default_reward_fn_type={REPOSITORY}/tests/e2e/letters.py:reward",
        f"buffer.explorer_input.taskset.path={top / 'train.jsonl'}",
        "explorer.rollout_model.kv_cache_gb=0.5",
        f"explorer.rollout_model.max_restarts={RESTARTS}",
        f"cluster.max_restarts={RESTARTS}",
        "cluster.threads_per_rank=1",
        f"trainer.num_ranks={RANKS}",
        f"trainer.max_restarts={RESTARTS}",
        f"trainer.max_token_len_per_gpu={rows}",
        f"trainer.total_steps={count}",
        f"trainer.save_interval={10**6}",
        "trainer.memory_interval=1",
        "trainer.spares=true",
    ]


def reached(run: ChaosRun, step: int) -> None:
    await_that(run, lambda: any(told >= step for _, told in run.steps()), f"step {step}")


def await_that(run: ChaosRun, is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + GIVEN_UP_S
    while not is_so():
        if run.process.poll() is not None or time.monotonic() > end:
            said = "\n".join(line for _, line in run.lines[-40:])
            raise SystemExit(f"it never came to {what}:\n{said}")
        time.sleep(LOOK_S)


def strike(run: ChaosRun, failure: Failure) -> None:
    """In the step that is under way."""
    (before, _), (last, step) = run.steps()[-2:]
    time.sleep(failure.share * (last - before))
    await_that(run, lambda: bool(hit(run, failure)), f"a living {failure.part}")
    killed, failure.at = hit(run, failure), time.monotonic()
    for one in killed:
        one.kill()
    print(f"  {failure.part}, {len(killed)} killed behind step {step}", flush=True)


def hit(run: ChaosRun, failure: Failure) -> list[psutil.Process]:
    """Whom it kills; nobody while they are not all there."""
    family = run.family()
    if failure.part not in OF_RANKS:
        return [one for one in [found(family, failure.part)] if one]
    ranks = [one for one in family if PARTS["rank"] in title(one)]
    whom = ranks if failure.part == "all ranks" else ranks[failure.rank :][:1]
    return whom if len(ranks) == RANKS else []


def costs(steps: Steps, failures: list[Failure]) -> tuple[float, list[Cost], float]:
    """A clean step's seconds; what each ten steps cost; the share that was effective."""
    first, again = dict[int, float](), list[float]()
    for when, step in steps:
        again += [when] if first.setdefault(step, when) < when else []
    starts = [FIRST + EACH * number for number in range(len(failures) + 2)]
    calm = [step for start in (starts[0], starts[-1]) for step in range(start, start + EACH)]
    clean = report.median([first[step + 1] - first[step] for step in calm])
    told = []
    for start, failure in zip(starts, [None, *failures, None], strict=True):
        begun, ended = first[start], first[start + EACH]
        made_again = sum(begun < when <= ended for when in again)
        thrown = 0.0
        if failure and failure.part in OF_RANKS:
            under_way = failure.at - max(when for when, _ in steps if when <= failure.at)
            thrown = made_again + min(1.0, under_way / clean)
        part = failure.part if failure else NONE
        told.append(Cost(part, ended - begun - EACH * clean, made_again, thrown))
    disturbed = first[starts[-1]] - first[starts[1]]
    return clean, told, EACH * len(failures) * clean / disturbed


def say(name: str, steps: Steps, failures: list[Failure], problems: list[str], seed: int) -> None:
    clean, told, effective = costs(steps, failures)
    rows, lost, later = [], dict[str, list[float]](), dict[str, float]()
    for part in (NONE, *KINDS):
        mine = [one for one in told if one.part == part]
        lost[part] = [round(one.seconds, 1) for one in mine]
        mean = sum(one.seconds for one in mine) / len(mine)
        later[part] = mean + sum(one.thrown for one in mine) / len(mine) * (STEP_S - clean)
        cells = [f"{mean:.1f}", f"{max(lost[part]):.1f}", str(max(one.again for one in mine))]
        rows.append([part, str(len(mine)), *cells, f"{later[part]:.1f}"])
    report.table(
        f"{name}, {clean:.2f} s a clean step: seconds lost per failure, one in {EACH} steps",
        ["killed", "times", "lost", "worst", "again", f"at {STEP_S:g} s, projected"],
        rows,
    )
    mean = sum(later[one.part] for one in failures) / len(failures)
    projected = EACH * STEP_S / (EACH * STEP_S + mean)
    print(f"effective {effective:.3f}; projected for steps of {STEP_S:g} s: {projected:.3f}")
    is_claimed = name == "135m" and clean >= STEP_S and min(map(len, lost.values())) >= EVERY
    report.last_line(
        "effective",
        {"effective": round(effective, 3), "projected": round(projected, 3)},
        {"failures": len(failures), "problems": len(problems), "load": round(os.getloadavg()[0])},
        {"model": name, "clean_s": round(clean, 3), "lost_s": lost, "seed": seed},
        report.versions("torch", "ray", "megatron-core"),
        is_claimed and effective >= BAR and not problems,
    )


if __name__ == "__main__":
    main()
