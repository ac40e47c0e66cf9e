"""Whether two deterministic runs are one and the same, bit by bit, and how to kill one of them at
given steps.

In: the arguments of a run that is left alone and of one that is not. Out: nothing, or an assertion
that names the first step at which their curves or the experiences they trained on differ.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from rft.buffer.progress import Stored
from rft.ground.experience import Experience, decode

from runs import START_S, History, Run, metrics, overrides, train

# What a run takes depends on the machine, and whether it was killed; all else must be the same
# number. Pool, runners and sessions count since their own process began.
OWN = (
    "time",
    "recovery/",
    "sync/",
    "pool/",
    "explorer/engine_idle",
    "rollout/",
    "endpoint/",
    "checkpoint/",
    "perf/",
    "tokens_per_s",
    "sample/replayed",
)
DETECTED_S = 5.0  # a death is said
RANK, EVERYTHING = "rank", "everything"


def deterministic(root: Path, name: str, assets: Path, *more: str) -> list[str]:
    """A small deterministic run that evaluates now and then, and whose ranks may come back."""
    evaluation = (
        f"{{name: held_out, path: {assets / 'eval.jsonl'}, format: {{prompt_type: plaintext}}}}"
    )
    return overrides(
        root,
        name,
        assets,
        "deterministic=true",
        "trainer.max_restarts=100",
        "explorer.eval_interval=3",
        f"buffer.explorer_input.eval_tasksets=[{evaluation}]",
        "algorithm.optimizer.lr_scheduler_type=linear",
        "algorithm.optimizer.lr=1e-3",
        *more,
    )


def run_whole(arguments: list[str]) -> None:
    with train(*arguments) as run:
        assert (run.end(), run.errors()) == (0, "")


def run_killed(arguments: list[str], kills: list[tuple[int, str]]) -> None:
    """Run to a good end, but kill -9 RANK or EVERYTHING when each of these steps was told; after
    the latter start it again.
    """
    left = list(kills)
    while left:
        with train(*arguments) as run:
            _lose_ranks(run, left)
            if left:
                run.wait_step(left.pop(0)[0])
                run.kill_everything()
            else:
                assert (run.end(), run.errors()) == (0, "")
                return
    run_whole(arguments)


def _lose_ranks(run: Run, left: list[tuple[int, str]]) -> None:
    """Kill the trainer rank as often as comes next in `left`; the rest of the run lives on, and
    starts it again.
    """
    killed: set[psutil.Process] = set()
    while left and left[0][1] == RANK:
        run.wait_step(left.pop(0)[0])
        killed = kill_rank(run, killed)


def kill_rank(run: Run, killed: Iterable[psutil.Process] = ()) -> set[psutil.Process]:
    """Kill -9 the rank that is there now; returns it with those `killed` before.

    A line that was read may be of one that was killed, just before its successor is started: that
    one is waited for.
    """
    deadline = time.monotonic() + START_S
    while True:
        family = run.family()
        for process in family:
            if process not in killed and " -m rft.run.rank " in f" {' '.join(_command(process))} ":
                process.kill()
                return {*killed, process}
        assert time.monotonic() < deadline, "no rank was started again"
        psutil.wait_procs(family, timeout=0.1)


def lose_actor(run: Run, actor: str, within_s: float = DETECTED_S) -> str:
    """Kill -9 it; returns what is said of that once another process is in its place."""
    killed = run.find(f"ray::{actor}")
    killed.kill()
    said = run.wait_for("it comes back", within_s, keep=True).string
    await_process(run, f"ray::{actor}", killed)
    return said


def await_process(run: Run, title: str, killed: psutil.Process | None = None) -> psutil.Process:
    """Another process than the one that was killed, once it has this title."""
    deadline = time.monotonic() + START_S
    while not (found := [one for one in run.find_all(title) if one != killed]):
        assert run.process.poll() is None and time.monotonic() < deadline, f"no {title} came back"
        psutil.wait_procs(run.family(), timeout=0.1)
    return found[0]


def await_file(run: Run, path: Path) -> None:
    """Until something in the run has made `path`."""
    deadline = time.monotonic() + START_S
    while not path.exists():
        assert run.process.poll() is None and time.monotonic() < deadline, f"{path} did not come"
        psutil.wait_procs(run.family(), timeout=0.1)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def curve(job: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl, in the order written, without what is this run's own."""
    return [
        {name: v for name, v in row.items() if not name.startswith(OWN)} for row in metrics(job)
    ]


def trained(job: Path, steps: int) -> list[list[Experience]]:
    """The experiences of every step; fails unless each step has
    one batch and no experience is in two.
    """
    history = History(job / "buffer" / "experience_buffer")
    history.check_exactly_once(steps)
    stored = {
        record.group: decode(record.experiences, list[Experience]) for record in history.of(Stored)
    }
    return [
        [e for group in history.progress.leases[step].groups for e in stored[group.number]]
        for step in range(steps)
    ]


def assert_same(job: Path, reference: Path, steps: int) -> None:
    """One step after the other, so that a failure names the first that differs."""
    found, wanted = trained(job, steps), trained(reference, steps)
    for step in range(steps):
        assert found[step] == wanted[step], f"step {step} was trained on something else"
    assert_same_curve(job, reference)


def assert_same_curve(job: Path, reference: Path) -> None:
    assert [row["step"] for row in curve(job)] == [row["step"] for row in curve(reference)]
    for mine, theirs in zip(curve(job), curve(reference), strict=True):
        assert mine == theirs, f"step {mine['step']} has other metrics"
