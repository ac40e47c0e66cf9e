"""What is saved is the state of one moment, whatever the trainer
does the instant `before_update` returns.
"""

import hashlib
from pathlib import Path

import pytest
import torch
from states import State, managed, trainer_config

from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.reader import Checkpoint
from rft.ground.streams import LARGE, Copies, HostCopier

FEW, ALL = 60, 1000


class Restless(State):
    """Scalars, views of one storage, a transposed matrix, tensors whose
    storage moves; large enough to be torn.
    """

    def __init__(self) -> None:
        self.shared = torch.zeros(2, 300_000)
        super().__init__(
            {
                "model/first": self.shared[0],
                "model/second": self.shared[1],
                "model/matrix": torch.zeros(256, 512).t(),
                "model/half": torch.zeros(200_000, dtype=torch.bfloat16),
                "optimizer/moved": torch.zeros(300_000),
                "optimizer/step": torch.zeros((), dtype=torch.int64),
                "optimizer/scale": torch.zeros(()),
                "optimizer/last": torch.zeros(300_000),
            }
        )

    def overwrite(self, value: int) -> None:
        """All of it, the end first: a copy that runs from the beginning is overtaken."""
        for tensor in reversed(self.tensors.values()):
            tensor.fill_(value)
        self.small = str(value).encode()

    def move(self) -> None:
        self.tensors["optimizer/moved"] = self.tensors["optimizer/moved"].clone()
        self.tensors["model/half"].data = self.tensors["model/half"].data.clone()

    def digest(self) -> dict[str, str]:
        return {
            key: digest_of(bytes(t.contiguous().view(-1).view(torch.uint8).numpy()))
            for key, t in self.tensors.items()
        }


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digests_in(manager: CheckpointManager, step: int) -> dict[str, str]:
    with Checkpoint(manager.storage, f"step_{step:08d}") as checkpoint:
        assert checkpoint.manifest.loop["seen"] == step
        assert checkpoint.receipts[0].small == {"rng": str(step).encode()}
        return {key: digest_of(checkpoint.whole(key).tobytes()) for key in checkpoint.tensors}


def torn(root: Path, saves: int, **config: object) -> int:
    """Number of checkpoints that differ from the state at their
    `save`; three are in flight at a time.
    """
    state, wanted = Restless(), {}
    found = 0
    with managed(
        root, state, config=trainer_config(max_checkpoints_to_keep=6, **config)
    ) as manager:
        for step in range(1, saves + 4):
            if step <= saves:
                state.overwrite(step)
                wanted[step] = state.digest()
                manager.save(step, state, {"seen": step})
                manager.before_update()
                state.overwrite(-step)
                state.move()
            if step > 3:
                manager.wait(step - 3)
                found += digests_in(manager, step - 3) != wanted.pop(step - 3)
        assert manager.metrics()["checkpoint/committed"] == saves
    return found


VARIANTS = [("lazy", None), ("eager", None), ("lazy", 0.0085)]


@pytest.mark.parametrize(("staging", "budget"), VARIANTS)
def test_no_checkpoint_is_torn(memory_path: Path, staging: str, budget: float | None) -> None:
    assert (
        torn(memory_path / "c", FEW // len(VARIANTS), staging=staging, host_memory_gb=budget) == 0
    )


@pytest.mark.verify
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("staging", "budget"), VARIANTS)
def test_no_checkpoint_of_a_thousand_is_torn(
    memory_path: Path, staging: str, budget: float | None
) -> None:
    assert (
        torn(memory_path / "c", -(-ALL // len(VARIANTS)), staging=staging, host_memory_gb=budget)
        == 0
    )


def test_the_mutator_tears_a_snapshot_that_nobody_protects(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointManager, "before_update", lambda self: 0.0)
    assert torn(memory_path / "c", 10, staging="lazy") > 0


def test_copies_go_where_they_belong_and_no_further() -> None:
    strided = torch.arange(8, dtype=torch.int16).view(2, 4).T
    learned = torch.nn.Parameter(torch.tensor(1.0))
    large = torch.arange(LARGE, dtype=torch.uint8)
    memory = torch.zeros(36 + LARGE + 4, dtype=torch.uint8)
    targets = [
        memory[36:-4],
        memory[12:28].view(torch.int16).view(4, 2),
        memory[28:32].view(torch.float)[0],
    ]
    HostCopier().copy(Copies(targets, [large, strided, learned]))
    copied = [0, 0, 4, 0, 1, 0, 5, 0, 2, 0, 6, 0, 3, 0, 7, 0, 0, 0, 128, 63]
    assert memory[:36].tolist() == [0] * 12 + copied + [0] * 4
    assert torch.equal(memory[36:-4], large) and memory[-4:].tolist() == [0] * 4
    assert not memory.requires_grad
