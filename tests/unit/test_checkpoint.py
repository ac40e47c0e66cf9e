"""The checkpoint manager in one process: commit, verification, fall-back, retention. Layouts and kills: tests/dist."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.checkpoint.manager import CheckpointManager
from rft.protocols import Piece, Snapshot


class OneRank:
    rank, world = 0, 1

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item

    def barrier(self, name: str) -> None:
        pass


class Toy:
    """State of one fp32 and one bf16 tensor, an empty one, and a byte string."""

    def __init__(self, value: float):
        self.weight = torch.full((3, 5), value)
        self.half = torch.full((7,), value, dtype=torch.bfloat16)
        self.empty = torch.empty(0)
        self.small = str(value).encode()

    def snapshot(self) -> Snapshot:
        named = {"weight": self.weight, "half": self.half, "empty": self.empty}
        return Snapshot([Piece(k, t, tuple(t.shape), (0,) * t.dim()) for k, t in named.items()], {"rng": self.small})

    def restore(self, small: dict[str, bytes]) -> None:
        self.small = small["rng"]


def manager(root: Path, keep: int = 0, layout: int = 1) -> CheckpointManager:
    return CheckpointManager(root, OneRank(), {"tp": layout}, keep)


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_load_gives_back_what_was_saved(tmp_path: Path) -> None:
    manager(tmp_path).save(7, Toy(1.5), {"step": 7})
    restored = Toy(0.0)
    assert manager(tmp_path).load(restored) == {"step": 7}
    assert torch.equal(restored.weight, Toy(1.5).weight) and torch.equal(restored.half, Toy(1.5).half)
    assert restored.small == b"1.5"


def test_nothing_saved_is_a_fresh_start(tmp_path: Path) -> None:
    assert manager(tmp_path / "none").load(Toy(0.0)) is None


@pytest.mark.parametrize("file", ["r00000.bin", "r00000.json", "MANIFEST.json"])
def test_damage_falls_back_to_the_one_before_and_keeps_the_evidence(tmp_path: Path, file: str) -> None:
    for step in (1, 2):
        manager(tmp_path).save(step, Toy(float(step)), {"step": step})
    flip_bit(tmp_path / "step_00000002" / file, 0 if file == "MANIFEST.json" else 40)
    restored = Toy(0.0)
    assert manager(tmp_path).load(restored) == {"step": 1}
    assert restored.weight[0, 0] == 1.0
    assert len(list(tmp_path.glob(".bad-step_00000002-*"))) == 1


def test_only_damaged_checkpoints_is_an_error_not_a_restart_at_zero(tmp_path: Path) -> None:
    manager(tmp_path).save(1, Toy(1.0), {"step": 1})
    flip_bit(tmp_path / "step_00000001" / "r00000.bin", 3)
    with pytest.raises(FileNotFoundError, match="LATEST names step_00000001"):
        manager(tmp_path).load(Toy(0.0))


def test_a_half_written_directory_is_not_a_checkpoint(tmp_path: Path) -> None:
    manager(tmp_path).save(1, Toy(1.0), {"step": 1})
    half = manager(tmp_path).store.begin(2)
    (half / "r00000.bin").write_bytes(b"x")
    assert manager(tmp_path).load(Toy(0.0)) == {"step": 1}
    assert not half.exists()


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    kept = manager(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        kept.save(step, Toy(float(step)), {"step": step})
    assert kept.store.steps() == [3, 4] and kept.oldest == {"step": 3}


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    manager(tmp_path).save(1, Toy(1.0), {"attempt": 1})
    manager(tmp_path).save(1, Toy(2.0), {"attempt": 2})
    restored = Toy(0.0)
    assert manager(tmp_path).load(restored) == {"attempt": 2} and restored.weight[0, 0] == 2.0


def test_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    manager(tmp_path).save(1, Toy(1.0), {})
    with pytest.raises(ValueError, match="layout"):
        manager(tmp_path, layout=2).load(Toy(0.0))


def test_state_of_another_model_is_refused_and_left_alone(tmp_path: Path) -> None:
    other = Toy(1.0)
    other.weight = torch.zeros(4, 5)
    manager(tmp_path).save(1, other, {})
    with pytest.raises(ValueError, match="lacks 1 tensors of this rank, first weight"):
        manager(tmp_path).load(Toy(0.0))
    assert manager(tmp_path).store.steps() == [1]


def test_a_failed_write_fails_the_save_and_commits_nothing(tmp_path: Path) -> None:
    class Broken(Toy):
        def snapshot(self) -> Snapshot:
            raise OSError(28, "No space left on device")

    with pytest.raises(RuntimeError, match="rank 0 cannot write"):
        manager(tmp_path).save(3, Broken(1.0), {})
    assert manager(tmp_path).store.steps() == []
