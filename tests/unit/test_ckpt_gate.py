"""Run epochs and `save_strategy`: numbers are taken once, agents are waited for, one writer at a
time, no gate stays shut.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from states import PATIENCE, Hand, Ranks, State, plain, trainer_config

from rft.checkpoint import fence
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.writer import Gate
from rft.ground import durable

TAKE = "import sys; from pathlib import Path; from rft.checkpoint.fence import take_epoch\n"
TAKE += "for _ in range(50): print(take_epoch(Path(sys.argv[1])))"
HOLD = "import sys; from pathlib import Path; from rft.checkpoint.fence import hold\n"
HOLD += "hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_two_attempts_never_share_an_epoch(memory_path: Path) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TAKE, str(memory_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    taken = [
        int(line)
        for process in running
        for line in process.communicate(timeout=PATIENCE)[0].split()
    ]
    assert sorted(taken) == list(range(1, 151)) and fence.newest_epoch(memory_path) == 150


def test_files_that_are_no_number_are_no_epoch(memory_path: Path) -> None:
    fence.take_epoch(memory_path)
    for name in (".nfs0000", "2~", "0", "-7", "\u0663", "9" * 40, "README"):
        (memory_path / "epochs" / name).touch()
    assert fence.newest_epoch(memory_path) == 1 and fence.take_epoch(memory_path) == 2


def test_who_holds_a_lock_is_known_on_a_full_disk_too(memory_path: Path) -> None:
    path = fence.lock_path(memory_path, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_text("4711")  # of the agent before
    full = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    with subprocess.Popen(
        [sys.executable, "-c", full + HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert durable.signed_by(path) == "" and fence.holder(path) == process.pid
        assert process.stdin is not None
        process.stdin.close()
        process.wait(PATIENCE)
    assert fence.holder(path) == 0


def test_an_agents_lock_lasts_as_long_as_the_agent_and_await_agents_returns_then(
    memory_path: Path,
) -> None:
    path = fence.lock_path(memory_path, 1, 0)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert durable.is_locked(path) and fence.living_agents(memory_path) == [path]
        with pytest.raises(BlockingIOError):
            fence.hold(path)
        said: list[str] = []
        assert fence.await_agents(memory_path, 0.0, said.append) == [path] and path.exists()
        with ThreadPoolExecutor(1) as pool:
            words = threading.Event()
            waiting = pool.submit(fence.await_agents, memory_path, PATIENCE, lambda _: words.set())
            assert words.wait(PATIENCE) and not waiting.done()
            process.kill()
            assert waiting.result(PATIENCE) == []
    assert not durable.is_locked(path) and not path.exists()


def test_an_older_attempt_publishes_nothing_more(memory_path: Path) -> None:
    hand, state = Hand(memory_path / "hand"), plain()
    control, root = memory_path / "control", memory_path / "c"
    fence.take_epoch(control)
    manager = CheckpointManager(
        root, Ranks(1).member(0), trainer_config(), epoch=1, control=control, agent=hand.command
    )
    manager.start(state)
    hand.hold("sync")
    manager.save(1, state, {})
    manager.before_update()
    hand.await_arrival()
    assert fence.take_epoch(control) == 2
    hand.let_go("sync")
    with pytest.raises(RuntimeError, match="attempt 2 of this job has begun"):
        manager.wait(1)
    manager.close(PATIENCE)
    hand.close()
    assert not (root / "step_00000001").exists()


@pytest.fixture
def writers(memory_path: Path) -> Iterator["Writers"]:
    with ExitStack() as stack:
        yield Writers(memory_path, stack)


class Writers:
    """Three ranks of one job, each with a real agent."""

    def __init__(self, directory: Path, stack: ExitStack):
        self.directory, self.stack = directory, stack
        self.hand = Hand(directory / "hand")
        stack.callback(self.hand.close)

    def start(self, strategy: str) -> list[tuple[CheckpointManager, State]]:
        ranks, config = Ranks(3), trainer_config(save_strategy=strategy)
        made = []
        for rank in range(3):
            state = State({f"model/w{rank}": plain(64, count=1).tensors["model/w0"]})
            root = self.directory / "c"
            made.append(
                (
                    CheckpointManager(root, ranks.member(rank), config, agent=self.hand.command),
                    state,
                )
            )
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda pair: pair[0].start(pair[1]), made))
        for manager, _ in made:
            self.stack.callback(manager.close, PATIENCE)
        return made

    def save(self, made: list[tuple[CheckpointManager, State]], step: int) -> None:
        for manager, state in made:
            manager.save(step, state.fill(step), {})
            manager.before_update()


@pytest.mark.parametrize("strategy", ["single_thread", "single_process"])
def test_one_writes_at_a_time_and_a_killed_one_makes_room(writers: Writers, strategy: str) -> None:
    hand, made = writers.hand, writers.start(strategy)
    hand.set("log")
    for step in (1, 2):
        hand.hold("write")
        writers.save(made, step)
        first = hand.await_arrival()
        os.kill(first, signal.SIGKILL)
        second = hand.await_arrival()
        assert second != first
        assert Gate(writers.directory / "c/control", strategy, 0.0)._try() is None, (
            "who writes has the gate"
        )
        hand.let_go("write")
        for manager, _ in made:
            manager.wait(step)
        depth, most = -1, 0  # the dead one's write never ended
        for sign in (hand.directory / "log").read_text():
            depth += 1 if sign == "+" else -1
            most = max(most, depth)
        assert most == 1 and depth == 0
        hand.set("log")
    assert sum(manager.metrics()["checkpoint/agent_deaths"] for manager, _ in made) == 2


@pytest.mark.parametrize("strategy", ["unrestricted", "single_node"])
def test_all_of_one_node_write_together(writers: Writers, strategy: str) -> None:
    made = writers.start(strategy)
    writers.hand.hold("write")
    writers.save(made, 1)
    assert len({writers.hand.await_arrival() for _ in made}) == 3
    writers.hand.let_go("write")
    for manager, _ in made:
        manager.wait(1)


def test_single_node_lets_one_node_in(memory_path: Path) -> None:
    def gate(node: str, patience: float = 0.0) -> Gate:
        return Gate(memory_path, "single_node", patience, node)

    with gate("a").passed():
        with gate("a").passed():
            assert gate("b")._try() is None
        assert gate("b")._try() is None
    held = gate("b")._try()
    assert held is not None and gate("a")._try() is None
    for descriptor in held:
        os.close(descriptor)


def test_a_holder_that_hangs_is_passed_loudly(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = Gate(memory_path, "unrestricted", 0.0)
    with free.passed(), free.passed():
        assert not caplog.text, "row I9: nobody waits"
    with (
        Gate(memory_path, "single_process", 1.0).passed(),
        Gate(memory_path, "single_process", 0.0).passed(),
    ):
        assert "waited 0 s for another writer, going on" in caplog.text


def test_an_exception_inside_opens_the_gate(memory_path: Path) -> None:
    gate = Gate(memory_path, "single_thread", 0.0)
    with pytest.raises(OSError), gate.passed():
        raise OSError("disk")
    held = gate._try()
    assert held is not None
    os.close(held[0])
