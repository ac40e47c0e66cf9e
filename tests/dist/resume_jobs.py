"""What the ranks of test_resume_bitwise.py do: train, save, train on; load into another policy,
train on the same.
"""

from typing import Any

import numpy as np
import torch
from jobs import TIMEOUT_S, made_up, part_of
from rows import make_rows

from rft.algorithm.losses import token_loss
from rft.checkpoint.manager import CheckpointManager
from rft.config import MegatronConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rft.ground import device as devices
from rft.megatron.mesh import Mesh
from rft.megatron.policy import Policy

BEFORE, AFTER = 2, 2  # steps, on either side of the save
SCHEDULE = OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", lr_warmup_steps=2, weight_decay=0.1)


def manager_at(root: str, mesh: Mesh, trainer: TrainerConfig) -> CheckpointManager:
    return CheckpointManager(root, mesh, trainer, about={"layout": mesh.layout()})


def save_and_wait(
    manager: CheckpointManager, step: int, policy: Policy, loop: dict[str, Any]
) -> None:
    """Return when the checkpoint is committed and its agents have ended."""
    manager.start(policy)
    assert manager.save(step, policy, loop)
    manager.before_update()
    manager.wait(step)
    manager.close()


def save_and_export(
    manager: CheckpointManager, step: int, policy: Policy, path: str, target: str
) -> None:
    """Return when the agent's export of the checkpoint is there too."""
    manager.start(policy)
    assert manager.save(step, policy, {"step": step})
    manager.before_update()
    manager.wait(step)
    if policy.mesh.rank == 0:
        manager.export(step, path, target)
        manager.wait_exports()
    policy.mesh.barrier("exported")
    manager.close()


def resumed(
    path: str,
    other: str,
    root: str,
    dtype: str = "fp32",
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    sp: bool = False,
    vpp: int | None = None,
    ep: int = 1,
) -> dict[str, Any]:
    """Both ends as this rank saw them.

    The second policy expects a state, so it has no weights of its own, and another seed: all of it
    must be read. It may still begin as its own model.
    """
    sizes = MegatronConfig(tp, pp, cp, sp, vpp, ep)
    device = devices.choose("cpu")
    device.activate()
    mesh = Mesh(sizes, device, TIMEOUT_S)
    loop = {"step": BEFORE, "journal": 17, "recent_losses": [0.1, 1 / 3]}
    try:
        trainer = TrainerConfig(megatron=sizes, dtype=dtype)
        first = Policy(ModelConfig(model_path=path), trainer, SCHEDULE, mesh, 1, BEFORE + AFTER)
        train(first, range(BEFORE))
        save_and_wait(manager_at(root, mesh, trainer), BEFORE, first, loop)
        wanted = ending(first)
        first.close()
        model = ModelConfig(model_path=other)
        second = Policy(model, trainer, SCHEDULE, mesh, 2, BEFORE + AFTER, expects=True)
        read = manager_at(root, mesh, trainer).load(second)
        second.warm_up(made_up(second))  # nobody can tell afterwards
        found = ending(second)
        second.begin()
        begun = held(second)
        second.close()
        third = Policy(model, trainer, SCHEDULE, mesh, 2, BEFORE + AFTER)
        beginning = held(third)
        third.close()
        return {
            "loop": (read, loop),
            "steps": (found, wanted),
            "begun": (begun, beginning),
        }
    finally:
        mesh.close()


def ending(policy: Policy) -> dict[str, Any]:
    """Train the steps after the save: metrics, then every tensor as bytes, the small state, and
    what each generator says next.
    """
    metrics = train(policy, range(BEFORE, BEFORE + AFTER))
    snapshot, pieces = policy.snapshot(), held(policy)
    draws = (torch.rand(3).tolist(), np.random.random(3).tolist())
    return {
        "metrics": metrics,
        "pieces": pieces,
        "small": snapshot.small | snapshot.local,
        "draws": draws,
    }


def held(policy: Policy) -> dict[Any, bytes]:
    """Every tensor."""
    pieces = policy.snapshot().pieces
    return {(p.key, p.offset, p.shape, p.flat): as_bytes(p.tensor) for p in pieces}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def train(policy: Policy, steps: range) -> list[dict[str, float]]:
    """One step each on rows of its own.

    Every step draws from the generators: a loss with noise would, and must resume too.
    """
    losses = []
    for step in steps:
        assert policy.step == step
        torch.rand(1), np.random.random()
        losses.append(
            policy.train_step(
                part_of(policy, make_rows(16, seed=step)), token_loss("ppo", {}), lambda: None
            )
        )
    return losses
