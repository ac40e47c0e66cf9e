"""States in the memory of agents whose ranks are killed: back bit by bit, of one step, on every
rank, or not at all.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from states import (
    PATIENCE,
    Hand,
    Ranks,
    State,
    equal,
    large,
    managed,
    plain,
    save,
    trainer_config,
    until,
    whole,
)

from rft.checkpoint import fence, kept
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.memory import Memory
from rft.checkpoint.records import CHUNK
from rft.ground import durable, host_memory
from rft.ground.process import adopt_orphans

TRAINER = Path(__file__).with_name("kept_trainer.py")
WORLD = 2


@pytest.fixture
def root(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a job whose ranks somebody would start again."""
    monkeypatch.setattr(kept, "RELEASE_S", PATIENCE)  # agents get a core when they get one
    adopt_orphans()
    root = memory_path / "c"
    lock = root / "control" / fence.OWNER
    lock.parent.mkdir(parents=True)
    descriptor = durable.lock(lock)
    yield root
    if descriptor is not None:
        os.close(descriptor)
    until(lambda: fence.living_agents(root / "control") == [], "no agent is left")


def kill(root: Path, epoch: int = 1, world: int = WORLD, parts: str = "") -> None:
    """Let ranks come to step 3, and kill them all."""
    command = [sys.executable, str(TRAINER), str(root), str(world), str(epoch)]
    command += [parts] * bool(parts)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"staged\n"
        trainer.kill()
    assert fence.await_agents(root / "control", PATIENCE, lambda line: None) == []


def of_ranks(act: Any, world: int = WORLD) -> list[Any]:
    ranks = Ranks(world)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: act(ranks.member(rank)), range(world)))


def resumed(root: Path, epoch: int) -> list[tuple[CheckpointManager, State, Any]]:
    """Managers of every rank that have loaded, with what they found."""

    def act(member: Any) -> tuple[CheckpointManager, State, Any]:
        config, state = trainer_config(memory_interval=1), whole()
        manager = CheckpointManager(root, member, config, epoch=epoch, log_dir=root.parent)
        return manager, state, manager.load(state)

    return of_ranks(act)


@contextmanager
def started(found: list[tuple[CheckpointManager, State, Any]]) -> Iterator[None]:
    with ThreadPoolExecutor(len(found)) as pool, ExitStack() as ends:
        for manager, _, _ in found:
            ends.callback(manager.close, PATIENCE)
        list(pool.map(lambda one: one[0].start(one[1]), found))
        yield


def old_agents(root: Path) -> list[str]:
    names = [path.name for path in fence.living_agents(root / "control")]
    return [name for name in names if name.startswith("e0001")]


def change(root: Path, at: int) -> None:
    """A byte of each slot of the first agent."""
    agent = fence.holder(fence.lock_path(root / "control", 1, 0))
    for link in Path(f"/proc/{agent}/fd").iterdir():
        if "rft-checkpoint-slot" in os.readlink(link):
            with link.open("r+b") as slot:
                slot.seek(at)
                slot.write(b"\xff")


def lose_the_disk(root: Path) -> None:
    """Its bytes: whoever reads them finds damage."""
    for path in root.glob("step_*/*.bin"):
        path.write_bytes(b"")


def test_all_ranks_go_on_from_what_was_staged_last_and_read_no_disk(root: Path) -> None:
    kill(root)
    lose_the_disk(root)
    found = resumed(root, 2)
    for manager, state, loop in found:
        assert loop is not None and loop["step"] == 3 and loop["seen"] == 3
        assert equal(state, whole().fill(3)) and state.local == b"3"
        assert (manager.newest, manager.requested, manager.remembered) == (1, None, 3)
    with started(found):
        assert [manager.in_memory for manager, _, _ in found] == [3, 3]
        for manager, _, _ in found:
            until(lambda link=manager._link: link.state == "ready", "its agent is there")
        for step in (4, 5, 6):  # in both slots, one after the other
            for manager, state, _ in found:
                manager.save(step, state.fill(step), {}, full=False, memory=True)
                manager.before_update()
        until(lambda: old_agents(root) == [], "their slots are written")
        assert found[0][0].metrics()["checkpoint/memory_skipped"] == 0
        until(lambda: [one.in_memory for one, _, _ in found] == [6, 6], "the newest is complete")


def test_a_rank_that_dies_before_its_first_step_finds_the_state_again(root: Path) -> None:
    kill(root)
    lose_the_disk(root)
    code = f"""
import os, sys
sys.path.insert(0, {str(TRAINER.parent)!r})
from test_ckpt_memory import Path, resumed, started
with started(found := resumed(Path({str(root)!r}), 2)):
    assert all(loop["step"] == 3 for _, _, loop in found)
    os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=4 * PATIENCE)
    assert ended.returncode == -signal.SIGKILL
    assert fence.await_agents(root / "control", PATIENCE, lambda line: None) == []
    found = resumed(root, 3)
    assert [loop["step"] for _, _, loop in found] == [3, 3]
    assert all(equal(state, whole().fill(3)) for _, state, _ in found)
    with started(found):
        pass


def test_a_part_that_is_missing_or_changed_is_no_state_and_the_disk_is_read(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill(root)
    lost = fence.holder(fence.lock_path(root / "control", 1, 1))
    psutil.Process(lost).kill()
    until(lambda: len(fence.living_agents(root / "control")) == 1, "one is gone")
    found = resumed(root, 2)
    assert [loop["step"] for _, _, loop in found] == [1, 1]
    with started(found):
        until(lambda: old_agents(root) == [], "what nobody goes on from is given back")


def test_a_changed_byte_is_found(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    kill(root)
    change(root, 2**20)
    found = resumed(root, 2)
    assert [loop["step"] for _, _, loop in found] == [1, 1]
    assert all(equal(state, whole().fill(1)) for _, state, _ in found)
    assert "chunk 0 was changed" in caplog.text
    with started(found):
        pass


def test_a_changed_byte_without_a_checkpoint_is_no_start_at_step_0(root: Path) -> None:
    kill(root, world=1)
    for name in ("LATEST", *(path.name for path in root.glob("step_*"))):
        (root / name).rename(root.parent / name)
    change(root, CHUNK + 7)
    state = whole()
    manager = CheckpointManager(
        root, Ranks(1).member(0), trainer_config(memory_interval=1), epoch=2, log_dir=root.parent
    )
    with pytest.raises(FileNotFoundError, match="step 3 in the memory .* no checkpoint in"):
        manager.load(state)
    assert not equal(state, whole())  # that is why
    fence.take_epoch(root / "control")
    fence.end_rest(root / "control")


def test_agents_rest_no_longer_than_somebody_may_come(root: Path) -> None:
    kill(root)
    control = root / "control"
    assert len(fence.living_agents(control)) == WORLD and fence.busy_agents(control) == []
    fence.take_epoch(control)
    fence.end_rest(control)
    until(lambda: fence.living_agents(control) == [], "told that nobody comes")


def test_agents_are_ended_by_ranks_of_their_host_whose_numbers_are_others_now(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(root)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(WORLD))
    for rank in (2, 3):
        memory = Memory(root / "control")
        memory.look()
        memory.end(rank, 2 * WORLD)
    until(lambda: fence.living_agents(root / "control") == [], "ended")


def test_saves_to_disk_and_versions_go_on_beside(root: Path, memory_path: Path) -> None:
    state, config = plain(), trainer_config(memory_interval=1, versions="all")
    with managed(root, state, config=config) as manager:
        for step in range(1, 8):
            full = step % 3 == 0
            manager.save(step, state.fill(step), {}, full=full, version=True, memory=True)
            manager.before_update()
            manager.wait(step)
        assert manager.in_memory == 7
        numbers = manager.metrics()
        assert numbers["checkpoint/versions"] == 7 and numbers["checkpoint/committed"] == 2
        assert numbers["checkpoint/memory_skipped"] == 0


def test_a_state_is_not_waited_for_while_the_disk_has_both_slots(
    root: Path, memory_path: Path
) -> None:
    hand, state = Hand(memory_path / "hand"), plain()
    config = trainer_config(memory_interval=1)
    with managed(root, state, config=config, agent=hand.command) as manager:
        save(manager, 1, state.fill(1))
        hand.hold("sync")
        for step in (2, 3):
            manager.save(step, state.fill(step), {})
            manager.before_update()
        manager.save(4, state.fill(4), {}, full=False, memory=True)
        manager.before_update()
        assert manager.in_memory == 3
        until(lambda: manager.metrics()["checkpoint/memory_skipped"] == 1, "it was left out")
        hand.await_arrival()
        hand.let_go("sync")
        for step in (2, 3):
            manager.wait(step)
        assert manager.metrics()["checkpoint/failed"] == 0
    hand.close()


def test_all_ranks_leave_the_same_states_out_while_a_disk_is_busy(
    root: Path, memory_path: Path
) -> None:
    """One rank's disk hangs; the other's would have a slot."""
    hand, ranks = Hand(memory_path / "hand"), Ranks(WORLD)
    config, states = trainer_config(memory_interval=1), [whole() for _ in range(WORLD)]
    agents: list[dict[str, Any]] = [{"agent": hand.command}, {}]
    managers = [CheckpointManager(root, ranks.member(n), config, **agents[n]) for n in range(WORLD)]
    found = list(zip(managers, states, [None] * WORLD, strict=True))

    def save_all(step: int, full: bool = False) -> None:
        def act(one: tuple[CheckpointManager, State, Any]) -> None:
            one[0].save(step, one[1].fill(step), {}, full=full, memory=True)
            one[0].before_update()

        list(pool.map(act, found))

    with started(found), ThreadPoolExecutor(WORLD) as pool:
        save_all(1)
        hand.hold("sync")
        save_all(2, full=True)
        save_all(3)
        save_all(4)
        until(managers[1]._stager.slots.is_free, "the quick disk has its part")
        save_all(5)
        for one in managers:
            one._stager.await_done()
        assert [one.in_memory for one in managers] == [3, 3]
        hand.let_go("sync")
        for one in managers:
            one.wait(2)
        save_all(6)
        until(lambda: [one.in_memory for one in managers] == [6, 6], "both have the newest")
    hand.close()


def test_a_save_that_one_rank_would_skip_is_skipped_by_all(
    root: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or others would keep a state that is nowhere else, and let go of the last common one."""
    hand, ranks = Hand(memory_path / "hand"), Ranks(WORLD)
    config, states = trainer_config(memory_interval=1, when_busy="skip"), [whole(), whole()]
    agents: list[dict[str, Any]] = [{"agent": hand.command}, {}]
    managers = [CheckpointManager(root, ranks.member(n), config, **agents[n]) for n in range(WORLD)]
    found = list(zip(managers, states, [None] * WORLD, strict=True))

    def save_all(step: int) -> list[bool]:
        def act(one: tuple[CheckpointManager, State, Any]) -> bool:
            begun = one[0].save(step, one[1].fill(step), {})
            one[0].before_update()
            return begun

        return list(pool.map(act, found))

    with started(found), ThreadPoolExecutor(WORLD) as pool:
        for step in (1, 2):
            assert save_all(step) == [True, True]
            for one in managers:
                one.wait(step)
        hand.hold("sync")
        assert save_all(3) == [True, True], "the slot of 1 is given back for it"
        assert save_all(4) == [True, True]
        monkeypatch.setattr(managers[1]._states, "patience_s", lambda *_: PATIENCE)  # it has room
        assert save_all(5) == [False, False]
        assert [one.in_memory for one in managers] == [4, 4]
        assert [one.metrics()["checkpoint/skipped"] for one in managers] == [1, 1]
        hand.let_go("sync")
        for one in managers:
            one.wait(4)
        assert save_all(6) == [True, True]
    hand.close()


def test_an_agent_that_rests_holds_states_and_no_versions(root: Path) -> None:
    """A restart is to need no more memory than the start did."""
    code = f"""
import sys, torch
sys.path.insert(0, {str(TRAINER.parent)!r})
from states import CheckpointManager, OneRank, Path, State, save, trainer_config
state = State({{"model/w": torch.zeros(2**25, dtype=torch.bfloat16)}})
config = trainer_config(memory_interval=1, versions="all")
manager = CheckpointManager(Path({str(root)!r}), OneRank(), config)
manager.start(state)
save(manager, 1, state, version=True)
print("kept", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"kept\n"
        pid = fence.holder(fence.lock_path(root / "control", 1, 0))
        assert anonymous(pid) > 2**26, "the version that the next is made from"
        trainer.kill()
    until(lambda: anonymous(pid) < 2**26, "it is let go")


def anonymous(pid: int) -> int:
    """Bytes of a process's own memory, its slots left aside."""
    (line,) = re.findall(r"Anonymous: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(line) * 1024


def test_an_agent_that_dies_costs_no_state(root: Path) -> None:
    state, config = plain(), trainer_config(memory_interval=1)
    with managed(root, state, config=config) as manager:
        save(manager, 1, state.fill(1))
        manager.save(2, state.fill(2), {}, full=False, memory=True)
        manager.before_update()
        os.kill(manager._link.pid, signal.SIGKILL)
        until(lambda: manager._link.deaths == 1, "its death is heard of")
        until(lambda: manager._link.state == "ready", "the next one is there")
        assert manager.in_memory == 2
        for step in (3, 4, 5):  # its slots come back from the next one
            manager.save(step, state.fill(step), {}, full=False, memory=True)
            manager.before_update()
        assert manager.metrics()["checkpoint/memory_skipped"] == 0


def test_a_budget_that_holds_no_whole_part_is_refused(root: Path) -> None:
    config = trainer_config(memory_interval=1, host_memory_gb=0.017)
    with pytest.raises(ValueError, match="memory_interval=1 keeps .* set at least 0.050"):
        CheckpointManager(root, Ranks(1).member(0), config).start(whole())


def slots_of(process: int) -> dict[int, int]:
    """Bytes of each slot that a process holds, by inode."""
    found = [
        link.stat()
        for link in Path(f"/proc/{process}/fd").iterdir()
        if "rft-checkpoint-slot" in os.readlink(link)
    ]
    return {one.st_ino: one.st_size for one in found}


@pytest.mark.parametrize(("parts", "left"), [("1.3", 5), ("2", 6)])
def test_what_memory_still_holds_of_a_checkpoint_is_not_read_from_disk(
    root: Path, parts: str, left: int
) -> None:
    kill(root, world=1, parts=parts)
    state, config = large(), trainer_config(memory=float(parts))
    total = sum(tensor.nbytes for tensor in state.tensors.values())
    before = slots_of(fence.holder(fence.lock_path(root / "control", 1, 0)))
    assert sum(before.values()) <= float(parts) * total
    [file] = root.glob("step_00000003/*.bin")
    with file.open("r+b") as disk:  # of six chunks, one lies in two slots of 30 MiB
        kept = disk.seek(3 * CHUNK) and disk.read(CHUNK)
        disk.truncate(0)
        disk.seek(3 * CHUNK)
        disk.write(kept if left < 6 else b"")
    manager = CheckpointManager(root, Ranks(1).member(0), config, epoch=2, log_dir=root.parent)
    loop = manager.load(state)
    assert loop is not None and loop["step"] == 3 and equal(state, large().fill(3))
    assert manager.read[0] == left * CHUNK
    with started([(manager, state, loop)]):
        mine = [os.fstat(slot.descriptor) for slot in manager._stager.slots.all]
        assert {one.st_ino: one.st_size for one in mine} == before  # with their pages
        until(lambda: old_agents(root) == [], "they are written from now on")
        save(manager, 4, state.fill(4))


def test_what_was_written_over_is_read_from_disk(root: Path) -> None:
    kill(root, world=1, parts="2")
    change(root, CHUNK + 7)
    state = large()
    manager = CheckpointManager(root, Ranks(1).member(0), trainer_config(), epoch=2)
    loop = manager.load(state)
    assert loop is not None and loop["step"] == 3 and equal(state, large().fill(3))
    assert manager.read[0] == 5 * CHUNK
    with started([(manager, state, loop)]):
        pass


def test_less_memory_is_taken_where_two_parts_do_not_fit(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = large()
    total = sum(tensor.nbytes for tensor in state.tensors.values())
    monkeypatch.setattr(host_memory, "available", lambda: int(1.6 * total))
    with managed(memory_path / "c", state) as manager:
        assert sum(slot.size for slot in manager._stager.slots.all) <= 1.3 * total
        save(manager, 1, state.fill(1))
    assert "trainer.checkpoint.memory=1.3, which takes 0.06 GB" in caplog.text
    with pytest.raises(ValueError, match=r"0.10 GB, and 0.08 GB are free: set .*memory=1.3"):
        CheckpointManager(memory_path / "d", Ranks(1).member(0), trainer_config(memory=2.0)).start(
            state
        )
