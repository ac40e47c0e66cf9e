"""What the ranks of test_lora.py do: train an adapter, save
it, export it, go on in another layout.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import part_of, pieces_of, policy_on, score_with, weights_of
from resume_jobs import save_and_export, train
from rows import make_rows

from rft.checkpoint.manager import CheckpointManager
from rft.config import TrainerConfig


def tuned(path: str, lora: dict[str, Any], root: str = "", **layout: Any) -> dict[str, Any]:
    """Three steps. With `root`: then saved there, and the agent's export beside it."""
    with policy_on(path, lora=lora, **layout) as policy:
        frozen = [
            (p, p.detach().clone())
            for part in policy.model
            for p in part.parameters()
            if not p.requires_grad
        ]
        metrics = train(policy, range(3))
        if root:
            assert policy.lora is not None
            about = {"layout": policy.mesh.layout(), "adapter": policy.lora.as_peft(path)}
            manager = CheckpointManager(root, policy.mesh, TrainerConfig(), about=about)
            save_and_export(manager, 3, policy, path, str(Path(root) / "adapter"))
        source = policy.adapter_source()
        sent = [
            (block, value.float().numpy().copy())
            for block, value in zip(source.blocks(), source.read_blocks(), strict=True)
        ]
        return {
            "metrics": metrics,
            "sent": sent,
            "adapter": pieces_of(policy, "model/"),
            "keys": {p.key for p in policy.snapshot().pieces},
            "merged": weights_of(policy),
            "frozen": all(torch.equal(p, before) for p, before in frozen),
            "scores": score_with(policy, 6),
        }


def first_scores(path: str, lora: dict[str, Any] | None, **layout: Any) -> list[Any]:
    with policy_on(path, lora=lora, **layout) as policy:
        return score_with(policy, 6)


def resumed(path: str, lora: dict[str, Any], root: str, **layout: Any) -> dict[str, np.ndarray]:
    """The merged model of a policy of other adapters that loaded the checkpoint."""
    with policy_on(path, lora=lora, seed=9, **layout) as policy:
        manager = CheckpointManager(
            root, policy.mesh, TrainerConfig(), about={"layout": policy.mesh.layout()}
        )
        manager.load(policy)
        assert policy.step == policy.optimizer.updates == 3
        part_of(policy, make_rows(2))
        return weights_of(policy)
