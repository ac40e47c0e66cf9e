"""Agents that are killed, stopped or stuck, trainers that are
killed, and two hundred saves in a row.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from states import PATIENCE, Hand, State, equal, load, managed, plain, save, trainer_config, until

from rft.checkpoint import fence
from rft.checkpoint.manager import CheckpointManager

TRAINER = Path(__file__).with_name("lone_trainer.py")


@pytest.fixture
def hand(memory_path: Path) -> Iterator[Hand]:
    found = Hand(memory_path / "hand")
    yield found
    found.close()


def begin(manager: CheckpointManager, step: int, state: State) -> None:
    manager.save(step, state.fill(step), {"seen": step})
    manager.before_update()


@pytest.mark.parametrize("moment", ["write", "sync"])
def test_a_killed_agent_is_reported_and_its_staged_save_is_not_lost(
    memory_path: Path, hand: Hand, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, state = memory_path / "c", plain()
    with managed(root, state, agent=hand.command) as manager:
        hand.hold(moment)
        begin(manager, 1, state)
        begin(manager, 2, state)
        os.kill(hand.await_arrival(), signal.SIGKILL)
        until(lambda: manager.metrics()["checkpoint/agent_deaths"] == 1, "the death is counted")
        assert "checkpoint agent of rank 0 died (exit code -9)" in caplog.text
        hand.let_go(moment)
        begin(manager, 3, state)
        for step in (1, 2, 3):
            manager.wait(step)
        assert manager.metrics()["checkpoint/failed"] == 0
        until(lambda: manager.metrics()["checkpoint/agent_ok"], "the new agent is ready")
    found = plain()
    assert load(root, found) == {"seen": 3, "step": 3} and equal(found, plain().fill(3))


def kill_at_random(root: Path, rounds: int) -> None:
    """Kill the agent after a random number of looks at the clock; every save must still be
    committed, and be right.
    """
    chance, state = random.Random(5), plain(64)
    with managed(root, state, config=trainer_config(max_checkpoints_to_keep=rounds)) as manager:
        for step in range(1, rounds + 1):
            begin(manager, step, state)
            for _ in range(int(10 ** chance.uniform(0, 4.5))):
                os.sched_yield()
            os.kill(manager._link.pid, signal.SIGKILL)
            manager.wait(step)
            until(
                lambda deaths=step: manager.metrics()["checkpoint/agent_deaths"] == deaths,
                "the death is counted",
            )
            save(manager, 10_000 + step, state)
            found = plain(64)
            assert load(root, found) == {"seen": 10_000 + step, "step": 10_000 + step} and equal(
                found, state
            )
        assert manager.metrics()["checkpoint/failed"] == 0


def test_agents_killed_at_random_moments(memory_path: Path) -> None:
    kill_at_random(memory_path / "c", 6)


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_agents_killed_at_very_many_random_moments(memory_path: Path) -> None:
    kill_at_random(memory_path / "c", 200)


def test_a_save_over_several_windows_whose_agent_dies_fails_and_the_next_one_works(
    memory_path: Path, hand: Hand
) -> None:
    import torch

    state = State({f"model/w{i}": torch.zeros(1024, 300) for i in range(12)})
    with managed(
        memory_path / "c", state, config=trainer_config(host_memory_gb=0.0085), agent=hand.command
    ) as manager:
        hand.hold("sync")  # of the last window's file: two windows were given back by then
        begin(manager, 1, state)
        os.kill(hand.await_arrival(), signal.SIGKILL)
        hand.let_go("sync")
        with pytest.raises(RuntimeError, match="died over a save that does not fit into one slot"):
            manager.wait(1)
        for step in (2, 3):
            save(manager, step, state.fill(step))
    assert load(memory_path / "c", state) == {"seen": 3, "step": 3}


def test_a_stopped_agent_is_silent_until_it_is_continued(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = plain()
    with managed(memory_path / "c", state) as manager:
        save(manager, 1, state)
        os.kill(manager._link.pid, signal.SIGSTOP)
        until(lambda: manager._link.state == "silent", "the agent is missed")
        assert manager.metrics()["checkpoint/agent_ok"] == 0
        begin(manager, 2, state)
        os.kill(manager._link.pid, signal.SIGCONT)
        until(lambda: manager._link.state == "ready", "the agent is back")
        manager.wait(2)
        assert manager.metrics()["checkpoint/agent_deaths"] == 0
    assert "is silent" in caplog.text and "is back" in caplog.text


def test_an_agent_whose_disk_hangs_is_stalled_and_not_started_again(
    memory_path: Path, hand: Hand
) -> None:
    state = plain()
    with managed(memory_path / "c", state, agent=hand.command) as manager:
        manager._link.stalled_s = 0.2
        hand.hold("sync")
        begin(manager, 1, state)
        pid = hand.await_arrival()
        until(lambda: manager._link.state == "stalled", "the disk is missed")
        assert manager._link.pid == pid and manager.metrics()["checkpoint/agent_deaths"] == 0
        hand.let_go("sync")
        until(lambda: manager._link.state == "ready", "the agent goes on")
        manager.wait(1)


def test_an_agent_that_cannot_start_is_given_up_and_training_goes_on(memory_path: Path) -> None:
    state = plain()
    with managed(
        memory_path / "c", state, agent=(sys.executable, "-c", "raise SystemExit(3)")
    ) as manager:
        until(lambda: manager._link.state == "broken", "no further try")
        for step in (1, 2, 3):
            begin(manager, step, state)
            with pytest.raises(RuntimeError, match="the agent cannot run"):
                manager.wait(step)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_killed_trainers_staged_save_is_committed_and_no_agent_stays(
    memory_path: Path, hand: Hand, comes_back: bool
) -> None:
    root, state = memory_path / "c", plain()
    hand.hold("sync")
    command = [
        sys.executable,
        str(TRAINER),
        str(root),
        str(PATIENCE if comes_back else 1.0),
        str(hand.directory),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "staged\n"
        agent = hand.await_arrival()
        # cores are shared among sessions, then by niceness
        assert os.getsid(agent) == os.getsid(trainer.pid)
        assert psutil.Process(agent).nice() > psutil.Process(trainer.pid).nice()
        os.killpg(trainer.pid, signal.SIGKILL)  # as who starts ranks does
    if comes_back:
        assert fence.living_agents(root / "control") != []
        hand.let_go("sync")
    until(lambda: fence.living_agents(root / "control") == [], "the agent ends")
    until(lambda: has_ended(agent), "its process too")
    assert load(root, state) == ({"seen": 1, "step": 1} if comes_back else None)
    assert not comes_back or equal(state, plain().fill(1))


def has_ended(pid: int) -> bool:
    """Gone, or dead and not yet collected by whoever has inherited it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def held_by(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads and mappings of shared memory."""
    process = psutil.Process(pid)
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return (
        process.num_fds(),
        process.num_threads(),
        sum("memfd:rft-checkpoint" in line for line in maps),
    )


def stays_flat(root: Path, saves: int) -> None:
    state = plain(64)
    with managed(root, state, config=trainer_config(max_checkpoints_to_keep=2)) as manager:
        for step in range(1, 11):
            save(manager, step, state.fill(step))
        both = (os.getpid(), manager._link.pid)
        before = {pid: held_by(pid) for pid in both}
        resident = {pid: psutil.Process(pid).memory_info().rss for pid in both}
        for step in range(11, saves + 11):
            save(manager, step, state.fill(step))
        until(
            lambda: all(
                now <= then
                for pid in both
                for now, then in zip(held_by(pid), before[pid], strict=True)
            ),
            f"no more than at the start: {before}",
        )
        grown = {pid: psutil.Process(pid).memory_info().rss - resident[pid] for pid in both}
        assert max(grown.values()) < 4 * 2**20 + saves * 2**12, grown


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_two_hundred_saves_leave_nothing_behind(memory_path: Path) -> None:
    stays_flat(memory_path / "c", 200)
