"""Model-only saves come out of the same staged slot as full ones, and on their own."""

from pathlib import Path

import pytest
import torch
from states import State, load, managed, save

from rft.checkpoint.catalog import committed
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.reader import Checkpoint
from rft.checkpoint.storage import open_storage


def state() -> State:
    return State(
        {"exp_avg/w": torch.zeros(50, 30), "model/w": torch.zeros(50, 30, dtype=torch.bfloat16)},
        b"x",
    )


@pytest.mark.parametrize("full", [True, False], ids=["with-a-full-one", "alone"])
def test_weights_are_a_checkpoint_of_their_own(tmp_path: Path, full: bool) -> None:
    root, source = tmp_path / "checkpoints", state()
    with managed(root, source) as manager:
        for step in (1, 2, 3):
            save(manager, step, source.fill(step), full=full, weights=True)
    storage = open_storage(root)
    assert committed(storage, "weights") == [
        "weights/v_00000002",
        "weights/v_00000003",
    ]  # the last two serve the engines
    assert len(committed(storage)) == (3 if full else 0)
    with Checkpoint(storage, "weights/v_00000003") as checkpoint:
        assert list(checkpoint.tensors) == ["model/w"]
        checkpoint.verify()
        values = torch.from_numpy(checkpoint.whole("model/w").view("i2")).view(torch.bfloat16)
        assert torch.equal(values, source.tensors["model/w"])
    if full:
        assert load(root, loaded := state()) and torch.equal(
            loaded.tensors["exp_avg/w"], source.tensors["exp_avg/w"]
        )


def test_damage_to_the_weights_leaves_the_full_checkpoint_alone(tmp_path: Path) -> None:
    root, source = tmp_path / "checkpoints", state().fill(5)
    with managed(root, source) as manager:
        save(manager, 1, source, weights=True)
    (file,) = (root / "weights" / "v_00000001").glob("*.bin")
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    with (
        Checkpoint(open_storage(root), "weights/v_00000001") as checkpoint,
        pytest.raises(Damaged, match="chunk 0"),
    ):
        checkpoint.verify()
    assert load(root, state()) is not None
