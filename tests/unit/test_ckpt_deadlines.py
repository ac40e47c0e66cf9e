"""Agents that are stopped, exports that hang, copies that never end: the training waits for none of
them without a deadline.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from states import PATIENCE, Hand, OneRank, State, managed, plain, save, trainer_config, until

from rft.checkpoint import fence, sharding
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.records import Drop
from rft.checkpoint.stager import PAGE, Slot, SlotPool, Stager, windows_of
from rft.checkpoint.wire import BACKLOG, Outbox, Wire
from rft.ground.device import choose
from rft.ground.streams import Copies, HostCopier

Stop = Callable[[int], int]
MANY = 3 * BACKLOG  # saves, of which an agent that takes nothing is told only the first


def within(patience_s: float, work: Callable[[], object]) -> None:
    """Do `work` in a thread, as nothing that hangs may hold up the test; raises what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience_s)
    assert not thread.is_alive(), "it still waits"
    if errors:
        raise errors[0]


def large() -> State:
    """With so much small state that a `Begin` does not fit into a socket."""
    state = plain()
    state.small = bytes(2**20)
    return state


def train(manager: CheckpointManager, state: State, steps: range) -> None:
    for step in steps:
        manager.save(step, state, {"seen": step})
        manager.before_update()


@pytest.fixture
def stop() -> Iterator[Stop]:
    """Stops an agent, until the end of the test at the latest; then it ends, as its trainer has."""
    stopped: list[int] = []

    def stop_it(pid: int) -> int:
        stopped.append(os.pidfd_open(pid))
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        return pid

    yield stop_it
    for descriptor in stopped:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)
        select.select([descriptor], [], [], PATIENCE)  # or it writes where a directory is removed
        os.close(descriptor)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "when_busy",
    ["wait", *(pytest.param(one, marks=pytest.mark.verify) for one in ("skip", "newest_wins"))],
)
def test_training_goes_on_beside_a_stopped_agent_which_is_killed_and_replaced(
    memory_path: Path, stop: Stop, when_busy: str
) -> None:
    state, config = large(), trainer_config(when_busy=when_busy, staging_patience_s=2.0)
    with managed(memory_path / "c", state, config=config) as manager:
        save(manager, 1, state)
        stopped = stop(manager._link.pid)
        within(PATIENCE, lambda: train(manager, state, range(2, 8)))
        until(lambda: manager.metrics()["checkpoint/agent_deaths"] >= 1, "it is killed")
        until(lambda: manager._link.state == "ready", "there is another one")
        assert has_ended(stopped)
        lock = fence.lock_path(memory_path / "c" / "control", manager.epoch, 0)
        assert manager._link.pid != stopped and fence.holder(lock) == manager._link.pid
        if when_busy != "newest_wins":
            # staged before it was missed, and told to the next agent
            manager.wait(2), manager.wait(3)
        until(
            lambda: not any(outcome.open for outcome in manager._outcomes.values()),
            "every save is reported",
        )
        save(manager, 8, state)


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
def test_saves_that_a_stopped_agent_cannot_take_are_reported_failed_and_continued_it_saves_again(
    memory_path: Path, stop: Stop, when_busy: str
) -> None:
    state, config = large(), trainer_config(when_busy=when_busy)
    with managed(memory_path / "c", state, config=config) as manager:
        save(manager, 1, state)
        # what one save waits for a slot; the agent itself is given longer
        manager._stager.slots.patience_s = 0.1
        stop(manager._link.pid)
        within(PATIENCE, lambda: train(manager, state, range(2, MANY)))
        for step in range(4, MANY):
            within(
                PATIENCE,
                lambda step=step: pytest.raises(RuntimeError, manager.wait, step).match("failed"),
            )
        os.kill(manager._link.pid, signal.SIGCONT)
        manager.wait(2), manager.wait(3)
        manager._stager.slots.patience_s = PATIENCE
        save(manager, MANY, state)
        metrics = manager.metrics()
        assert metrics["checkpoint/failed"] == MANY - 4 and metrics["checkpoint/agent_deaths"] == 0


@pytest.fixture
def hand(memory_path: Path) -> Iterator[Hand]:
    found = Hand(memory_path / "hand")
    yield found
    found.close()


def test_training_does_not_wait_for_a_disk_that_hangs_and_saves_again_when_it_is_back(
    memory_path: Path, hand: Hand
) -> None:
    state, config = plain(), trainer_config(staging_patience_s=0.5)
    with managed(memory_path / "c", state, config=config, agent=hand.command) as manager:
        hand.hold("sync")
        within(PATIENCE, lambda: train(manager, state, range(1, 5)))
        for step in (3, 4):
            with pytest.raises(RuntimeError, match="the agent or its disk has hung for 0.5 s"):
                manager.wait(step)
        assert manager.metrics()["checkpoint/agent_deaths"] == 0  # it might get on yet
        hand.let_go("sync")
        manager.wait(1), manager.wait(2)
        save(manager, 5, state)


def test_an_agent_whose_disk_hangs_for_good_is_replaced_and_the_save_written_again(
    memory_path: Path, hand: Hand
) -> None:
    state, config = plain(), trainer_config(agent_deadline_s=1.0)
    with managed(memory_path / "c", state, config=config, agent=hand.command) as manager:
        hand.hold("sync")
        train(manager, state, range(1, 2))
        hanging = hand.await_arrival()
        until(lambda: manager.metrics()["checkpoint/agent_deaths"] >= 1, "it is killed")
        hand.let_go("sync")
        until(lambda: manager.status.committed == 1, "the next one has written it")
        assert has_ended(hanging)


@pytest.mark.verify
def test_an_agent_that_waits_for_its_rate_has_not_hung(memory_path: Path) -> None:
    state = plain()
    slow = trainer_config(staging_patience_s=0.6, rate_limit_mb=0.1)  # a save takes twice that
    with managed(memory_path / "c", state, config=slow) as manager:
        train(manager, state, range(1, 5))
        for step in range(1, 5):
            manager.wait(step)


def test_closing_does_not_wait_for_a_stopped_agent(memory_path: Path, stop: Stop) -> None:
    state = large()
    with managed(memory_path / "c", state) as manager:
        save(manager, 1, state)
        stop(manager._link.pid)
        train(manager, state, range(2, 4))
        within(PATIENCE, lambda: manager.close(0.1))


def test_after_one_wait_in_vain_no_save_waits_for_a_slot_until_one_is_back() -> None:
    slots = SlotPool([Slot(0, PAGE, choose("cpu"))])
    slot = slots.lease(0.0)
    assert slot is not None and slots.lease(0.01) is None
    within(PATIENCE, lambda: slots.lease(1e6))
    slots.give_back(0)
    assert slots.lease(0.0) is slot
    waiting: list[Slot | None] = []
    thread = threading.Thread(target=lambda: waiting.append(slots.lease(PATIENCE)))
    thread.start()
    slots.give_back(0)
    thread.join(PATIENCE)
    assert waiting == [slot]
    slot.close()


def test_nobody_waits_for_an_agent_that_has_been_silent_for_long_enough() -> None:
    idle, asked = [0.0], []

    def idle_s() -> float:
        asked.append(idle[-1])
        return idle.pop() if len(idle) > 1 else idle[0]

    slots = SlotPool([Slot(0, PAGE, choose("cpu"))], 30.0, idle_s)
    slot = slots.lease(1e6)
    assert slot is not None
    idle[:] = [30.0, 29.999, 29.99]  # it is still waited for, and asked again
    within(PATIENCE, lambda: slots.lease(1e6))
    assert asked == [29.99, 29.999, 30.0]
    idle[:] = [0.0]
    within(PATIENCE, lambda: slots.lease(1e6))  # nor again, until a slot has come back
    slots.give_back(0)
    assert slots.lease(1e6) is slot
    slot.close()


def test_copies_that_may_come_later_come_when_they_are_told_or_waited_for(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rft.checkpoint.stager.LATE_S", 9 * PATIENCE)
    state = plain(count=1)
    manager = CheckpointManager(memory_path / "c", OneRank(), trainer_config())
    manager.start(state)
    for step, go_on in ((1, manager.copy_now), (2, manager.before_update)):
        manager.save(step, state.fill(step), {"seen": step}, later=True)
        copying = manager._stager.current
        assert not copying.done.wait(0.1), "nobody has said so"
        within(PATIENCE, go_on)
        assert copying.done.wait(PATIENCE)
        manager.wait(step)
    manager.save(3, state.fill(3), {"seen": 3}, later=True)
    manager.close()
    again = CheckpointManager(memory_path / "c", OneRank(), trainer_config(), epoch=2)
    loop = again.load(plain(count=1))
    assert loop is not None and loop["seen"] == 3


class Hanging(HostCopier):
    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def copy(self, copies: Copies) -> None:
        self.let_go.wait(PATIENCE)


def test_a_copy_that_hangs_is_an_error_that_names_it() -> None:
    piece = plain(count=1).snapshot().pieces
    regions = sharding.place([sharding.claim_of(piece[0])])
    slot, copier = Slot(0, PAGE, choose("cpu")), Hanging()
    windows = windows_of(regions, PAGE, sharding.extent(regions))
    stager = Stager(SlotPool([slot]), regions, windows, copier, deadline_s=0.1)
    copying = stager.start(
        "e0001n0000", [piece[0].tensor], lambda window: None, lambda identity, why: None
    )
    with pytest.raises(
        TimeoutError, match="thread checkpoint-copy has not copied the last save within 0.2 s"
    ):
        within(PATIENCE, stager.await_copies)
    copier.let_go.set()
    assert copying.done.wait(PATIENCE)
    slot.close()


def test_sending_to_an_end_that_takes_nothing_never_waits_and_all_arrives_in_order() -> None:
    ours, theirs = socket.socketpair()
    outbox, reader = Outbox(Wire.of_trainer(ours)), Wire.of_agent(theirs)
    sent = [Drop(id=str(number), why="x" * 2**20) for number in range(2 * BACKLOG)]
    assert not outbox.is_full()
    within(PATIENCE, lambda: [outbox.send(message) for message in sent])
    assert outbox.is_full()
    assert [reader.receive() for _ in sent] == sent and not outbox.is_full()
    outbox.close(), ours.close(), theirs.close()


def program(path: Path) -> tuple[str, ...]:
    """An agent that can be made unable to start: by removing the file."""
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m rft.checkpoint.agent "$1"\n')
    path.chmod(0o755)
    return (str(path),)


@pytest.mark.parametrize("lost", ["program", "interpreter"])
def test_exports_and_saves_of_an_agent_that_cannot_be_started_again_fail(
    memory_path: Path, stop: Stop, lost: str
) -> None:
    state, agent = plain(), program(memory_path / "agent")
    with managed(memory_path / "c", state, agent=agent) as manager:
        save(manager, 1, state)
        if lost == "program":
            os.unlink(agent[0])
        else:
            Path(agent[0]).write_text("#!/bin/sh\nexit 7\n")
        stop(manager._link.pid)
        manager.export(1, "nowhere", str(memory_path / "hf"))
        train(manager, state, range(2, 4))
        os.kill(manager._link.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="Hugging Face export failed: the agent cannot run"):
            within(PATIENCE, manager.wait_exports)
        train(manager, state, range(4, 8))
        for step in range(2, 8):
            with pytest.raises(RuntimeError, match="the agent cannot run"):
                within(PATIENCE, lambda step=step: manager.wait(step))
        manager.export(1, "nowhere", str(memory_path / "other"))
        with pytest.raises(RuntimeError, match="the agent cannot run"):
            within(PATIENCE, manager.wait_exports)


def test_an_export_that_writes_nothing_is_killed_at_the_deadline(memory_path: Path) -> None:
    state, source = plain(), memory_path / "model"
    source.mkdir()
    os.mkfifo(source / "config.json")  # and nobody writes
    with managed(memory_path / "c", state, config=trainer_config(agent_deadline_s=4.0)) as manager:
        save(manager, 1, state)
        manager.export(1, str(source), str(memory_path / "hf"))
        with pytest.raises(
            RuntimeError,
            match=r"export failed: nothing was written to .*hf for 4 s.*rft ckpt export",
        ):
            within(PATIENCE, manager.wait_exports)
        assert psutil.Process(manager._link.pid).children(recursive=True) == []


def test_an_export_that_is_not_heard_of_is_not_waited_for(memory_path: Path, stop: Stop) -> None:
    state = plain()
    with managed(memory_path / "c", state) as manager:
        save(manager, 1, state)
        stop(manager._link.pid)
        manager.export(1, "nowhere", str(memory_path / "hf"))
        manager.config.agent_deadline_s = 0.1  # of this side; the agent's was told at the start
        with pytest.raises(RuntimeError, match="nothing was heard of .*hf for 0.2 s"):
            within(PATIENCE, manager.wait_exports)
        os.kill(manager._link.pid, signal.SIGCONT)
