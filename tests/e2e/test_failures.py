"""Everything that can die, dies once, in one run that is started again with the same command each
time and ends whole.

Every test is one attempt at that run: it goes on from the newest checkpoint, loses a part, and must
end as promised. The last attempt ends well, and the journal and the metrics must show one unbroken
line of history.
"""

import os
import signal
from pathlib import Path

import pytest

from runs import History, Run, checkpoints, is_one_line, overrides, step_rows, train, write_assets

ENDLESS = 10_000  # steps: the last attempt says when it is enough
NAME = "mortal"
FURTHER = 6  # steps that an attempt makes before something happens to it
SAVE_INTERVAL = 5
GRACE_S = 20.0  # shutdown_grace_s; waited for twice as long, for these cores are shared
# Ray and the imports that are under way are not interrupted, and a busy machine is slow at them
LOADING_S = 90.0

# `test_resume_loop` has a run that survives its rank's and its engine's death, and its supervisor's
pytestmark = [pytest.mark.timeout(600), pytest.mark.verify]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failures")


@pytest.fixture(scope="module")
def job(root: Path) -> Path:
    return root / "rft" / NAME


@pytest.fixture(scope="module")
def command(root: Path) -> list[str]:
    """The same for every attempt."""
    return overrides(
        root,
        NAME,
        write_assets(root / "assets"),
        f"trainer.total_steps={ENDLESS}",
        f"trainer.save_interval={SAVE_INTERVAL}",
    )


def newest(job: Path) -> int:
    return max(checkpoints(job), default=0)


class Attempt:
    """The run, some steps further than its last checkpoint."""

    def __init__(self, command: list[str], job: Path):
        self.begin = newest(job)
        self.run = train(*command)

    def __enter__(self) -> Run:
        self.run.__enter__()
        step = self.run.wait_step(self.begin + 1)
        assert step == self.begin + 1, "it did not go on from the newest checkpoint"
        self.run.wait_step(self.begin + FURTHER)
        return self.run

    def __exit__(self, *error: object) -> None:
        self.run.__exit__(*error)


def check_failed(run: Run, expected: int, *words: str) -> None:
    code = run.end()
    assert (code, is_one_line(run.errors(), *words)) == (expected, True), (code, run.errors())
    assert not any("finished" in line for line in run.lines)


@pytest.mark.parametrize(
    ("title", "code", "words"),
    [
        ("VLLM::EngineCore", 11, ("engine_0 failed while serving", "EngineCore", "SIGKILL")),
        ("ray::Explorer", 12, ("explorer failed while exploring", "its process died")),
        ("ray::Synchronizer", 14, ("synchronizer failed while publishing", "its process died")),
        ("rft.run.rank ", 10, ("trainer rank 0 failed while", "killed by SIGKILL")),
        ("gcs_server", 1, ("ray failed while holding the parts: nobody answers at ",)),
    ],
    ids=["engine", "explorer", "synchronizer", "rank", "ray"],
)
def test_part_killed(
    command: list[str], job: Path, title: str, code: int, words: tuple[str, ...]
) -> None:
    parts = ("explorer.rollout_model", "trainer", "cluster")
    with Attempt([*command, *(f"{part}.max_restarts=0" for part in parts)], job) as run:
        run.find(title).kill()
        check_failed(run, code, *words)


def test_the_only_engine_is_started_again_and_a_signal_ends_at_a_step(
    command: list[str], job: Path
) -> None:
    """The actor dies instead of the process with the model. The signal finds the run as any other:
    the new engine serves, the ranks train.
    """
    with Attempt(command, job) as run:
        run.find("ray::RolloutEngine").kill()
        run.wait_for("^engine_0: serves$")
        step = run.wait_step(0)
        run.wait_step(step + 2)
        run.find("VLLM::EngineCore")  # there is one
        stop(run, job, signal.SIGTERM)


def stop(run: Run, job: Path, number: signal.Signals) -> None:
    """It ends with one line, at a step, and has saved that."""
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)  # as a terminal does
    else:
        run.process.send_signal(number)
    assert run.process.wait(2 * GRACE_S) == 128 + number
    check_failed(run, 128 + number, f"stopped by {number.name};", "run the same command again")
    assert newest(job) == step_rows(job)[-1]["step"], "no checkpoint of the step that was reached"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_signal_ends_at_a_step(command: list[str], job: Path, number: signal.Signals) -> None:
    with Attempt(command, job) as run:
        stop(run, job, number)


def test_signal_while_the_parts_load(command: list[str], job: Path) -> None:
    with train(*command) as run:
        run.wait_for("logs in")
        run.process.terminate()
        assert run.process.wait(LOADING_S) == 128 + signal.SIGTERM
        check_failed(run, 128 + signal.SIGTERM, "stopped by SIGTERM;")


def test_everything_killed_at_once(command: list[str], job: Path) -> None:
    with Attempt(command, job) as run:
        for process in run.family():
            process.send_signal(signal.SIGSTOP)  # nobody sees another one die
        run.kill_everything()


def test_it_ends_whole(command: list[str], job: Path) -> None:
    """The end of the story: after all these deaths every step was
    trained once, on groups of its own.
    """
    steps = max(History(job / "buffer" / "experience_buffer").progress.leases) + FURTHER
    with train(*command, f"trainer.total_steps={steps}") as run:
        assert (run.end(), run.errors()) == (0, "")
    assert [row["step"] for row in step_rows(job)] == list(range(1, steps + 1))
    history = History(job / "buffer" / "experience_buffer")
    history.check_exactly_once(steps)
    assert not history.progress.waiting
    assert max(row["staleness/max"] for row in step_rows(job)) <= 1
