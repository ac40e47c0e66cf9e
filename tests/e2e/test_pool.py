"""Two engines: one is killed and comes back, one is added, one is
removed, and the run takes no notice.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rft.buffer.progress import Stored
from rft.ground.experience import Experience, decode

from runs import REPOSITORY, History, Run, checkpoints, overrides, step_rows, train, write_assets

NAME = "pool"
ENDLESS = 10_000  # steps: the test says when it is enough
GRACE_S = 60.0

# `test_failures` has a death of a real engine, `test_engines` all that can come of one
pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def job(root: Path) -> Path:
    return root / "rft" / NAME


@pytest.fixture(scope="module")
def command(root: Path) -> list[str]:
    return overrides(
        root, NAME, write_assets(root / "assets"), "explorer.rollout_model.engine_num=2"
    )


def engines(job: Path, *arguments: str) -> tuple[int, str]:
    """`rft engines JOB ARGUMENTS`: exit code and what it said."""
    code = "from rft.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "engines", str(job), *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    return done.returncode, done.stdout + done.stderr


def states(job: Path) -> dict[str, str]:
    code, said = engines(job)
    assert code == 0, said
    return {line.split()[0]: line.split()[1] for line in said.splitlines()[1:]}


def core_of(run: Run, engine: str) -> psutil.Process:
    """The process with this engine's model: the one that writes to its log."""
    found = [
        core
        for core in run.find_all("VLLM::EngineCore")
        if core.environ()["RFT_LOG_FILE"].endswith(f"{engine}.log")
    ]
    assert len(found) == 1, (engine, found)
    return found[0]


def further(run: Run, steps: int = 3) -> int:
    return run.wait_step(run.wait_step(0) + steps)


def test_engines_come_and_go_while_the_run_goes_on(command: list[str], job: Path) -> None:
    with train(*command, f"trainer.total_steps={ENDLESS}") as run:
        further(run)
        assert states(job) == {"engine_0": "serving", "engine_1": "serving"}
        kept, killed = core_of(run, "engine_1"), core_of(run, "engine_0")

        killed.kill()
        run.wait_for(
            r"^engine_0: EngineDied: engine_0: EngineCore.* SIGKILL; started again \(1 of 3\)$"
        )
        further(run)
        run.wait_for("^engine_0: serves$")
        further(run)
        assert states(job) == {"engine_0": "serving", "engine_1": "serving"}
        assert core_of(run, "engine_0") != killed

        assert engines(job, "--add", "1") == (
            0,
            "engine_2: starting; it gets requests when it holds the run's version\n",
        )
        run.wait_for("^engine_2: serves$")
        further(run)
        assert engines(job, "--remove", "engine_9")[0] == 1
        assert engines(job, "--remove", "engine_0")[0] == 0
        run.wait_for("^engine_0: removed$")
        step = further(run)
        assert states(job) == {"engine_1": "serving", "engine_2": "serving"}
        assert run.find_all("VLLM::EngineCore") == [kept, core_of(run, "engine_2")], (
            "the other engines were not left alone"
        )

        run.process.terminate()
        assert run.process.wait(GRACE_S) == 128 + signal.SIGTERM
        run.end()
        assert not (job / "control" / "supervisor.sock").exists()
        assert "no run is under way here" in engines(job)[1]
        assert not any("raylet" in line for line in run.lines), (
            "a paragraph of Ray's own among the lines"
        )
    serving = [row["pool/engines"] for row in step_rows(job) if "pool/engines" in row]
    assert {1.0, 2.0, 3.0} <= set(serving), (
        "nothing was trained while an engine was away, or none came"
    )
    assert step_rows(job)[-1]["step"] >= step
    assert checkpoints(job)[-1] == step_rows(job)[-1]["step"], (
        "no checkpoint of the step that was reached"
    )
    check_versions(History(job / "buffer" / "experience_buffer"))


def check_versions(history: History) -> None:
    for record in history.of(Stored):
        for experience in decode(record.experiences, list[Experience]):
            assert (
                sum(span.end - span.start for span in experience.versions)
                == experience.response_length
            )
            assert len(experience.logprobs) == experience.response_length


def test_and_its_history_is_whole(command: list[str], job: Path) -> None:
    """After the test above: three steps more, and then every task was trained once, every token
    with its version.
    """
    steps = step_rows(job)[-1]["step"] + 3
    with train(*command, f"trainer.total_steps={steps}") as run:
        assert (run.end(), run.errors()) == (0, "")
    assert [row["step"] for row in step_rows(job)] == list(range(1, steps + 1))
    assert max(row["staleness/max"] for row in step_rows(job)) <= 1
    history = History(job / "buffer" / "experience_buffer")
    history.check_exactly_once(steps)
    check_versions(history)


def test_the_last_restart_is_the_last(command: list[str], root: Path) -> None:
    """Two engines, one restart each: the run goes on without the first, and ends when the second is
    gone as well.
    """
    job = root / "rft" / "mortal"
    settings = [
        "explorer.rollout_model.max_restarts=1",
        f"trainer.total_steps={ENDLESS}",
        "name=mortal",
    ]
    with train(*command, *settings) as run:
        further(run)
        for engine in ("engine_0", "engine_1"):
            core_of(run, engine).kill()
            run.wait_for(rf"^{engine}: .*started again \(1 of 1\)$")
            run.wait_for(f"^{engine}: serves$")
            core_of(run, engine).kill()
            if engine == "engine_0":
                run.wait_for("^warning: engine_0 stays out: .* the run goes on without it$")
                further(run)
                assert states(job) == {"engine_0": "out", "engine_1": "serving"}
        assert run.end() == 11
        assert re.fullmatch(
            (
                r"rft: engine_1 failed while serving: .*SIGKILL, after 1 restarts .*no other "
                r"engine is "
                r"left; logs in .*\n"
            ),
            run.errors(),
        )
