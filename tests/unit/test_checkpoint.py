"""The checkpoint manager with a real agent: what is saved comes back, what is damaged is set aside,
what fails is said.
"""

import logging
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import (
    Hand,
    OneRank,
    State,
    equal,
    every_kind,
    load,
    managed,
    plain,
    save,
    trainer_config,
    until,
    write_cut,
)

from bench.faults.toy import Cut, begin, settings
from rft.checkpoint import catalog, commit, restore
from rft.checkpoint.catalog import committed
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.reader import Mismatch
from rft.checkpoint.records import Committed, Report, Retained
from rft.checkpoint.restore import RestoreRefused
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import open_storage
from rft.config import AlgorithmConfig
from rft.data.packing import Cost
from rft.run.assembly import restored, resume
from rft.trainer.control import QueueSource
from rft.trainer.feed import Feed
from rft.trainer.gates import Gates
from rft.trainer.reporting import SkippedSteps
from tests.unit.test_feed import Alone


@pytest.fixture
def hand(memory_path: Path) -> Iterator[Hand]:
    found = Hand(memory_path / "hand")
    yield found
    found.close()


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def steps(root: Path) -> list[str]:
    return committed(open_storage(root))


@pytest.mark.parametrize("staging", ["lazy", "eager"])
def test_load_gives_back_every_kind_of_tensor(memory_path: Path, staging: str) -> None:
    state = every_kind().fill(5)
    with managed(memory_path / "c", state, config=trainer_config(staging=staging)) as manager:
        save(manager, 7, state)
        assert manager.newest == 7 and isinstance(manager.poll()[0], Committed)
        written = sum(
            path.stat().st_size for path in (memory_path / "c" / "step_00000007").glob("*.bin")
        )
        assert manager.metrics()["checkpoint/bytes"] == written > 0
    found = every_kind()
    assert load(memory_path / "c", found) == {"seen": 7, "step": 7}
    assert equal(found, state) and found.local == b"5"


def test_a_checkpoint_of_weights_alone_leaves_the_list_of_checkpoints_alone(
    memory_path: Path,
) -> None:
    state = every_kind().fill(1)
    with managed(memory_path / "c", state) as manager:
        save(manager, 1, state, full=False, weights=True)
        assert manager.newest is None and steps(memory_path / "c") == []
        save(manager, 2, state, weights=True)
        assert manager.newest == 2
    assert sorted(p.name for p in (memory_path / "c/weights").glob("v_*")) == [
        "v_00000001",
        "v_00000002",
    ]


@pytest.mark.parametrize("name", ["r00000.bin", "r00000.json", "MANIFEST.json"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(
    memory_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, state = memory_path / "c", plain()
    with managed(root, state) as manager:
        for step in (1, 2):
            save(manager, step, state.fill(step))
    flip_bit(root / "step_00000002" / name, 40)
    found = plain()
    assert load(root, found) == {"seen": 1, "step": 1} and equal(found, plain().fill(1))
    assert steps(root) == ["step_00000001"] and len(list(root.glob(".bad-step_00000002-*"))) == 1
    assert f"step_00000002/{name}" in caplog.text and "set aside as" in caplog.text


def test_nothing_left_is_an_error_and_an_empty_directory_is_a_start(memory_path: Path) -> None:
    root, state = memory_path / "c", plain()
    assert load(root, state) is None
    with managed(root, state) as manager:
        save(manager, 1, state)
    flip_bit(root / "step_00000001/r00000.bin", 0)
    with pytest.raises(FileNotFoundError, match="no good one is left.*chunk 0 differs"):
        load(root, state)
    with pytest.raises(FileNotFoundError, match="LATEST points nowhere"):
        load(root, state)


def test_a_new_job_begins_from_another_ones_checkpoint(memory_path: Path) -> None:
    """By its directory, or as the newest below; its own checkpoints come first; one that is damaged
    is refused, and nothing of the other job is touched.
    """
    theirs, state = memory_path / "theirs", plain()
    with managed(theirs, state) as manager:
        for step in (3, 8):
            save(manager, step, state.fill(step))
    for path, step in ((theirs, 8), (theirs / "step_00000003", 3), (f"{theirs}/", 8)):
        found, config = plain(), trainer_config()
        config.resume_from_path = str(path)
        mine = CheckpointManager(memory_path / f"of_{step}", OneRank(), config)
        assert mine.load(found) == {"step": step}, "nothing of the loop but the step"
        assert equal(found, plain().fill(step)) and mine.requested == mine.newest is None
    with managed(memory_path / "of_8", state.fill(9), config=config) as manager:
        save(manager, 9, state)
    again = CheckpointManager(memory_path / "of_8", OneRank(), config, epoch=2).load(found)
    assert again == {"seen": 9, "step": 9}
    flip_bit(theirs / "step_00000008" / "r00000.bin", 40)
    with pytest.raises(RestoreRefused, match="r00000.bin"):
        CheckpointManager(memory_path / "new", OneRank(), config).load(plain())
    assert steps(theirs) == ["step_00000003", "step_00000008"]
    config.resume_from_path = str(memory_path / "nowhere")
    with pytest.raises(RestoreRefused, match="no complete checkpoint"):
        CheckpointManager(memory_path / "new", OneRank(), config).load(plain())


def test_a_rank_goes_on_where_its_newest_checkpoint_stands(memory_path: Path) -> None:
    """With the losses, skipped steps and numbers of gates before it; where there is none, at 0."""
    root, state = memory_path / "c", plain().fill(6)
    feed = Feed(None, Alone(), AlgorithmConfig(), 1, 1, Cost())
    with managed(root, state) as manager:
        skips = SkippedSteps(memory_path, 0, True, print)
        assert resume(restored(manager, state), feed, skips, Gates(), 1) == (0, deque())
        judged = Gates(recent={"clipped": deque([0.4, 0.5]), "engine": deque([nan])}).state()
        loop = {"recent_losses": [0.5, 0.25], "skips": [2, 1], "gates": judged}
        manager.save(6, state, loop)
        manager.before_update()
        manager.wait(6)
    found, skips = plain(), SkippedSteps(memory_path, 0, True, print)
    again = CheckpointManager(root, OneRank(), trainer_config(), epoch=2)
    gates = Gates()
    assert resume(restored(again, found), feed, skips, gates, 2) == (6, deque([0.5, 0.25]))
    assert skips.state() == [2, 1] and equal(found, state)
    assert repr(gates.state()) == repr(judged)
    assert gates.after(7, {"clip_frac": 0.1})["drift/alarms"] == 1  # by the median of three


class Ended(QueueSource):
    """Of a buffer whose journal ends there."""

    def __init__(self, position: int):
        self.position = position

    def mark(self) -> int:
        return self.position

    def attach(self, step: int, run_epoch: int) -> dict[str, Any]:
        return {"replay": []}


def test_a_journal_that_ends_before_the_checkpoint_is_told_of(
    memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skips = SkippedSteps(memory_path, 0, True, print)
    for position, is_short in ((40, True), (100, False)):
        feed = Feed(Ended(position), Alone(), AlgorithmConfig(), 1, 1, Cost())
        assert resume({"step": 6, "journal": 100}, feed, skips, Gates(), 2)[0] == 6
        assert ("journal ends at 40, and this state" in capsys.readouterr().out) is is_short


def test_latest_is_a_hint_only(memory_path: Path) -> None:
    root, state = memory_path / "c", plain()
    with managed(root, state) as manager:
        save(manager, 1, state.fill(1))
    for word in (b'{"name": "step_00000099", "epoch": 9, "step": 99}', b"", b"\xff garbage"):
        (root / "LATEST").write_bytes(word)
        assert load(root, plain()) == {"seen": 1, "step": 1}


def test_foreign_files_are_left_alone(memory_path: Path) -> None:
    root, state = memory_path / "c", plain()
    (root / "step_00000009").mkdir(parents=True)
    (root / "step_00000009/notes.txt").write_text("mine")
    (root / "readme").write_text("mine")
    with managed(root, state) as manager:
        save(manager, 9, state.fill(3))
    assert load(root, plain()) == {"seen": 9, "step": 9}
    assert (root / "step_00000009/notes.txt").exists() and (root / "readme").exists()
    assert not (root / "step_00000009/MANIFEST.json").exists()


def test_another_model_is_refused_with_all_differences_and_nothing_is_set_aside(
    memory_path: Path,
) -> None:
    root = memory_path / "c"
    state = State(
        {
            "model/embedding": torch.zeros(10, 4),
            "model/norm": torch.zeros(4),
            "model/out": torch.zeros(4),
        }
    )
    with managed(root, state) as manager:
        save(manager, 1, state)
    other = {
        "model/embedding": torch.zeros(12, 4),
        "model/norm": torch.zeros(4, dtype=torch.bfloat16),
    }
    other |= {"model/out": torch.zeros(4), "model/a": torch.zeros(1), "model/b": torch.zeros(1)}
    with pytest.raises(Mismatch) as refusal:
        load(root, State(other))
    words = str(refusal.value)
    assert (
        "float32 [10, 4] there and float32 [12, 4] here" in words
        and "norm is float32 [4] there and bfloat16" in words
    )
    assert "2 tensors are missing there: model/a, model/b" in words and "2 differ" in words
    assert steps(root) == ["step_00000001"]


def test_retention_keeps_last_every_and_best(memory_path: Path) -> None:
    root, state = memory_path / "c", plain()
    config = trainer_config(
        max_checkpoints_to_keep=2, keep_every=4, keep_best=1, best_metric="eval/accuracy"
    )
    with managed(root, state, config=config) as manager:
        for step in range(1, 9):
            manager.score(step, {"eval/accuracy": {3: 0.9, 5: 0.1}.get(step, 0.5), "loss": 99.0})
            save(manager, step, state.fill(step))
        told: list[object] = []
        until(
            lambda: told.extend(manager.poll()) or len(steps(root)) == 4,
            "retention runs after the commit",
        )
        until(
            lambda: told.extend(manager.poll()) or sum(isinstance(r, Retained) for r in told) == 8,
            "told of what is left",
        )
    assert [r.oldest["step"] for r in told if isinstance(r, Retained)][-1] == 7, (
        "data behind what is kept beside the last two may go"
    )
    assert steps(root) == [f"step_{n:08d}" for n in (3, 4, 7, 8)]


def test_a_score_that_is_no_number_breaks_neither_save_nor_resume(memory_path: Path) -> None:
    state, config = plain(), trainer_config(best_metric="eval/x/accuracy", keep_best=1)
    with managed(memory_path / "c", state, config=config) as manager:
        for step, value in enumerate((0.3, float("nan"), 0.9, float("inf")), start=1):
            manager.score(step, {"eval/x/accuracy": value})
        save(manager, 5, state)
    again = CheckpointManager(memory_path / "c", OneRank(), config, epoch=2)
    assert again.load(state) is not None and again.scores == {1: 0.3, 3: 0.9}
    assert restore.scores_of({"scores": {"1": None, "2": 0.5}}) == {2: 0.5}  # of an older rft


def test_checkpoints_of_a_hundred_million_steps_are_found_in_order(memory_path: Path) -> None:
    root, state, config = memory_path / "c", plain(), trainer_config(max_checkpoints_to_keep=2)
    with managed(root, state, config=config) as manager:
        for step in (99_999_999, 100_000_000, 1_000_000_000):
            save(manager, step, state.fill(step % 7))
    assert catalog.committed(manager.storage) == ["step_100000000", "step_1000000000"]
    assert load(root, plain()) == {"seen": 10**9, "step": 10**9}
    assert catalog.step_of("step_012345678") is None and catalog.step_of("step_1234567") is None


def test_a_checkpoint_that_cannot_be_removed_keeps_no_other(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = memory_path / "c"
    whole = np.zeros((1, 1), dtype=np.float32)
    for step in (1, 2, 3):
        write_cut(
            root, whole, [[Claim("t", "float32", (1, 1), (0, 0), (1, 1), None)]], step
        ).close()
    heard: list[Report] = []
    told = settings(str(root), str(root / "control"), 0, 1, 1, [], 0)
    storage = open_storage(root)
    remove = storage.remove

    def refuse(path: str) -> None:
        if path == "step_00000001":
            raise PermissionError(1, "not yours", path)
        remove(path)

    monkeypatch.setattr(storage, "remove", refuse)
    asked = begin(storage, Cut(3), 0, 1, "e0001n0000", keep=1)
    commit.Committer(storage, told, heard.append)._retire(asked.outputs[0])
    assert steps(root) == ["step_00000001", "step_00000003"]
    assert heard == [Retained(oldest={"step": 3})], "what should be gone holds no data"


def test_a_state_larger_than_the_slots_goes_through_in_windows(memory_path: Path) -> None:
    state = State({f"model/w{i}": torch.zeros(1024, 300 + i) for i in range(12)})
    config = trainer_config(host_memory_gb=0.0085)
    with managed(memory_path / "c", state, config=config) as manager:
        assert len(manager._stager.windows) == 4
        for step in (1, 2, 3):
            save(manager, step, state.fill(step), weights=True)
    found = State({key: torch.zeros_like(t) for key, t in state.tensors.items()})
    assert load(memory_path / "c", found) == {"seen": 3, "step": 3} and equal(found, state)


def test_memory_too_small_for_one_tensor_is_refused_with_the_amount_needed(
    memory_path: Path,
) -> None:
    state = State({"model/large": torch.zeros(1024, 1024)})
    with pytest.raises(
        ValueError, match=r"host_memory_gb is too small: model/large.*at least 0.009"
    ):
        managed(memory_path / "c", state, config=trainer_config(host_memory_gb=0.007)).__enter__()


def busy(manager: object, hand: Hand, state: State) -> None:
    """Fill both slots: step 1 stands at a held disk, step 2 waits behind it."""
    hand.hold("sync")
    for step in (1, 2):
        manager.save(step, state.fill(step), {"seen": step})
        manager.before_update()
    hand.await_arrival()


def test_busy_skip_gives_the_save_up_and_says_so(memory_path: Path, hand: Hand) -> None:
    state = plain()
    config = trainer_config(when_busy="skip")
    with managed(memory_path / "c", state, config=config, agent=hand.command) as manager:
        busy(manager, hand, state)
        assert manager.save(3, state.fill(3), {"seen": 3}) is False
        assert manager.metrics()["checkpoint/skipped"] == 1 and manager.before_update() == 0
        hand.let_go("sync")
        manager.wait(1), manager.wait(2)
        with pytest.raises(RuntimeError, match="step 3 failed: skipped"):
            manager.wait(3)
        save(manager, 4, state.fill(4))
    assert steps(memory_path / "c") == ["step_00000001", "step_00000002", "step_00000004"]


def test_busy_newest_wins_gives_up_the_one_that_queues(memory_path: Path, hand: Hand) -> None:
    state = plain()
    config = trainer_config(when_busy="newest_wins")
    with managed(memory_path / "c", state, config=config, agent=hand.command) as manager:
        busy(manager, hand, state)
        assert manager.save(3, state.fill(3), {"seen": 3})
        manager.before_update()
        hand.let_go("sync")
        manager.wait(1), manager.wait(3)
        with pytest.raises(RuntimeError, match="given up for the newer save of step 3"):
            manager.wait(2)
    assert steps(memory_path / "c") == ["step_00000001", "step_00000003"]
    found = plain()
    load(memory_path / "c", found)
    assert equal(found, plain().fill(3))


def test_busy_wait_holds_the_update_back_until_a_slot_is_free(
    memory_path: Path, hand: Hand
) -> None:
    state = plain()
    with managed(memory_path / "c", state, agent=hand.command) as manager:
        busy(manager, hand, state)
        manager.save(3, state.fill(3), {"seen": 3})
        updated = threading.Event()
        waiting = threading.Thread(target=lambda: (manager.before_update(), updated.set()))
        waiting.start()
        assert not manager._stager.current.issued.is_set() and not updated.is_set()
        hand.let_go("sync")
        waiting.join(60)
        assert updated.is_set()
        state.fill(99)
        manager.wait(3)
    found = plain()
    assert load(memory_path / "c", found) == {"seen": 3, "step": 3} and equal(
        found, plain().fill(3)
    )


def test_a_full_disk_fails_the_save_and_not_the_training(memory_path: Path, hand: Hand) -> None:
    state = plain()
    with managed(memory_path / "c", state, agent=hand.command) as manager:
        hand.set("free", 1000)
        manager.save(1, state, {})
        with pytest.raises(
            RuntimeError, match=r"step 1 failed.*0.00 GB are free.*max_checkpoints_to_keep"
        ):
            manager.wait(1)
        hand.clear("free")
        save(manager, 2, state.fill(2))
        assert manager.metrics()["checkpoint/failed"] == 1
    assert steps(memory_path / "c")[-1] == "step_00000002"


def test_a_disk_that_fills_up_under_several_windows_leaves_both_slots_free(
    memory_path: Path, hand: Hand
) -> None:
    state = State({f"model/w{i}": torch.zeros(1024, 300) for i in range(12)})
    config = trainer_config(host_memory_gb=0.0085)
    with managed(memory_path / "c", state, config=config, agent=hand.command) as manager:
        for step in (1, 2):
            hand.set("full")
            manager.save(step, state, {})
            manager.before_update()
            with pytest.raises(RuntimeError, match="No space left"):
                manager.wait(step)
            hand.clear("full")
        save(manager, 3, state.fill(3))
    assert load(memory_path / "c", state) == {"seen": 3, "step": 3}


def test_a_directory_that_vanishes_fails_the_save_until_it_is_back(memory_path: Path) -> None:
    root, state = memory_path / "c", plain()
    with managed(root, state, control=memory_path / "control") as manager:
        save(manager, 1, state)
        shutil.rmtree(root)
        manager.save(2, state, {})
        with pytest.raises(RuntimeError, match="step 2 failed.*No such file"):
            manager.wait(2)
        assert not root.exists(), (
            "a mount that went away is not to be made anew on the disk below it"
        )
        root.mkdir()
        save(manager, 3, state)


def test_an_unwritable_directory_is_refused_at_the_start(memory_path: Path) -> None:
    with pytest.raises(OSError, match="/proc/nowhere"):
        managed(Path("/proc/nowhere"), plain(), control=memory_path / "control").__enter__()


def test_a_file_where_the_directory_should_be_is_refused_at_the_start(memory_path: Path) -> None:
    (memory_path / "c").write_text("")
    with pytest.raises(OSError, match="exists"):
        managed(memory_path / "c", plain(), control=memory_path / "control").__enter__()


def test_a_state_that_changes_its_size_fails_that_save_alone(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    state = plain()
    with managed(memory_path / "c", state) as manager:
        whole = state.tensors["model/w1"]
        for step in (1, 2, 3):
            state.tensors["model/w1"] = whole[:-1]
            manager.save(step, state, {})
            manager.before_update()
            with pytest.raises(RuntimeError, match="model/w1 has"):
                manager.wait(step)
        state.tensors["model/w1"] = whole
        save(manager, 4, state.fill(4))


def test_the_same_step_saved_again_is_another_directory(memory_path: Path) -> None:
    root, state = memory_path / "c", plain()
    for epoch in (1, 2):
        with managed(root, state, epoch) as manager:
            save(manager, 5, state.fill(epoch))
    assert len(steps(root)) == 2
    found = plain()
    assert load(root, found, 3) == {"seen": 5, "step": 5} and equal(found, plain().fill(2))


def test_a_save_is_found_whatever_else_is_there(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred thousand versions the others are not even listed."""
    root, state = memory_path / "c", plain()
    for epoch in (1, 2):
        with managed(root, state, epoch) as manager:
            save(manager, 5, state.fill(epoch))
            save(manager, 6, state)
    storage, asked, known = manager.storage, list[str](), {}
    for path in catalog.committed(storage):
        manifest = catalog.read_manifest(storage, path)
        known[manifest.step, manifest.id] = path
    real = storage.list
    monkeypatch.setattr(storage, "list", lambda path="": asked.append(path) or real(path))
    assert len(known) == 4 and {catalog.find(storage, "", one): one for one in known} == {
        path: one for one, path in known.items()
    }
    assert catalog.find(storage, "", (7, "e0001n0000")) is None and "" not in asked


def test_of_saves_that_ended_long_ago_nothing_is_kept(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rft.checkpoint.manager.KNOWN", 2)
    state = plain()
    with managed(memory_path / "c", state) as manager:
        for step in range(1, 7):
            save(manager, step, state)
        assert [one.step for one in manager._outcomes.values()] == [4, 5, 6]


def test_a_save_that_failed_and_its_second_try(memory_path: Path, hand: Hand) -> None:
    state = plain()
    with managed(memory_path / "c", state, agent=hand.command) as manager:
        hand.set("full")
        manager.save(1, state, {"seen": 1})
        manager.before_update()
        with pytest.raises(RuntimeError, match="No space left"):
            manager.wait(1)
        hand.clear("full")
        save(manager, 1, state)
        assert manager.newest == 1 and manager.metrics()["checkpoint/failed"] == 1


def test_a_save_that_cannot_be_encoded_fails_alone(memory_path: Path) -> None:
    state = plain()
    with managed(memory_path / "c", state) as manager:
        manager.save(1, state, {"table": {1: "an integer is no key of JSON"}})
        manager.before_update()
        with pytest.raises(RuntimeError, match="step 1 failed.*str keys"):
            manager.wait(1)
        save(manager, 2, state)
        assert manager.metrics()["checkpoint/agent_deaths"] == 0


def test_the_rate_limit_is_kept(memory_path: Path) -> None:
    state = plain()
    with managed(memory_path / "c", state, config=trainer_config(rate_limit_mb=0.25)) as manager:
        save(manager, 1, state)
        assert manager.status.seconds >= sum(t.nbytes for t in state.tensors.values()) / 0.25e6
