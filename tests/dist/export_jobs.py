"""What the ranks of test_export_ranks.py do: train, save, and let the agent export; or load what
was imported.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import gathered, policy_on
from resume_jobs import as_bytes, manager_at, save_and_export, train

from rft.config import TrainerConfig


def exported(path: str, root: str, **layout: Any) -> dict[str, torch.Tensor]:
    """The weights as rank 0 gathers them, after a save whose agent wrote <root>/hf."""
    with policy_on(path, **layout) as policy:
        train(policy, range(2))
        save_and_export(
            manager_at(root, policy.mesh, TrainerConfig()), 2, policy, path, str(Path(root) / "hf")
        )
        return gathered(policy)


def untrained(path: str, root: str, **layout: Any) -> dict[str, torch.Tensor]:
    """As `exported`, before the first step."""
    with policy_on(path, **layout) as policy:
        save_and_export(
            manager_at(root, policy.mesh, TrainerConfig()), 0, policy, path, str(Path(root) / "hf")
        )
        return gathered(policy)


def taken_over(path: str, root: str, **layout: Any) -> dict[str, Any]:
    """A policy of other weights loads the newest checkpoint at
    `root` and trains a step from there.
    """
    with policy_on(path, **layout) as policy:
        loop = manager_at(root, policy.mesh, TrainerConfig()).load(policy)
        updates = policy.optimizer.updates
        weights = {name: as_bytes(value) for name, value in gathered(policy).items()}
        moments = sum(
            float(p.tensor.abs().sum())
            for p in policy.snapshot().pieces
            if p.key.startswith("exp_avg/")
        )
        metrics = train(policy, range(policy.step, policy.step + 1))[0]
        return {
            "loop": loop,
            "weights": weights,
            "updates": updates,
            "moments": moments,
            "finite": np.isfinite(metrics["loss"]),
        }
