"""What the ranks of test_lora.py do: train an adapter, save
it, export it, go on in another layout.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import part_of, pieces_of, policy_on, score_with, weights_of
from replay_jobs import rows_for
from resume_jobs import save_and_export, train
from rows import make_rows

from rft.algorithm.losses import token_loss
from rft.checkpoint.manager import CheckpointManager
from rft.config import TrainerConfig
from rft.megatron.lora_layers import initial_A
from rft.megatron.policy import Policy
from rft.megatron.weights import shards


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
            save(policy, path, root)
        return {
            "metrics": metrics,
            "sent": sent(policy),
            "adapter": pieces_of(policy, "model/"),
            "keys": {p.key for p in policy.snapshot().pieces},
            "merged": weights_of(policy),
            "frozen": all(torch.equal(p, before) for p, before in frozen),
            "scores": score_with(policy, 6),
        }


def save(policy: Policy, path: str, root: str) -> None:
    assert policy.lora is not None
    about = {"layout": policy.mesh.layout(), "adapter": policy.lora.as_peft(path)}
    manager = CheckpointManager(root, policy.mesh, TrainerConfig(), about=about)
    save_and_export(manager, policy.step, policy, path, str(Path(root) / "adapter"))


def sent(policy: Policy) -> list[tuple[Any, np.ndarray]]:
    """What goes to engines that add the adapter by themselves."""
    source = policy.adapter_source()
    return [
        (block, value.float().numpy().copy())
        for block, value in zip(source.blocks(), source.read_blocks(), strict=True)
    ]


def pushed(
    path: str, lora: dict[str, Any], root: str = "", routed: bool = False, **layout: Any
) -> dict[str, Any]:
    """What an adapter with a B of its own computes and shows, and its first gradient. `routed`: of
    rows that say which experts they went through. With `root`: saved there after the step.
    """
    with policy_on(path, lora=lora, **layout) as policy:
        push(policy)
        found = {
            "scores": score_with(policy, 6),
            "merged": weights_of(policy),
            "adapter": pieces_of(policy, "model/"),
            "sent": sent(policy),
        }
        part = part_of(policy, rows_for(policy, shared=False) if routed else make_rows(24))
        metrics = policy.train_step(part, token_loss("ppo", {}), lambda: None)
        found |= {"metrics": [metrics], "moments": pieces_of(policy, "exp_avg/")}
        if root:
            save(policy, path, root)
            found |= {"trained": weights_of(policy), "saved": pieces_of(policy, "model/")}
        return found


@torch.no_grad()
def push(policy: Policy) -> None:
    """B is no longer 0, and the same in every layout."""
    for shard in shards(policy.model, policy.dims, policy.mesh.place):
        if shard.bound.hf[0].endswith("lora_B.weight"):
            for cut in shard.segments:
                whole = initial_A(shard.bound.hf[cut.part], shard.shapes[cut.part], 5)
                length = cut.stop - cut.start
                part = whole.narrow(cut.dim, cut.start, length)
                shard.parameter.narrow(cut.dim, cut.local, length).copy_(part)
    policy.optimizer.begin()


def first_scores(path: str, lora: dict[str, Any] | None, **layout: Any) -> list[Any]:
    with policy_on(path, lora=lora, **layout) as policy:
        return score_with(policy, 6)


def resumed(
    path: str, lora: dict[str, Any], root: str, steps: int = 3, **layout: Any
) -> dict[str, np.ndarray]:
    """The merged model of a policy of other adapters that loaded the checkpoint."""
    with policy_on(path, lora=lora, seed=9, **layout) as policy:
        manager = CheckpointManager(
            root, policy.mesh, TrainerConfig(), about={"layout": policy.mesh.layout()}
        )
        manager.load(policy)
        assert policy.step == policy.optimizer.updates == steps
        part_of(policy, make_rows(2))
        return weights_of(policy)
