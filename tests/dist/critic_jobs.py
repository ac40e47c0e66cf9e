"""What the ranks of test_critic.py do: a policy with a critic
beside it, used, trained, saved and loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jobs import TIMEOUT_S, made_up, part_of
from resume_jobs import as_bytes, manager_at, save_and_wait
from rows import make_group_rows, make_rows

from rft.algorithm import recipe
from rft.checkpoint.sharding import claim_of
from rft.config import (
    AlgorithmConfig,
    CriticConfig,
    CriticOptimizerConfig,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
)
from rft.data.packing import PackingPolicy, Row
from rft.data.updates import RowPacking, Update, UpdateRule, planned
from rft.ground import device as devices
from rft.megatron.learner import Critic
from rft.megatron.mesh import Mesh
from rft.megatron.network import Reference
from rft.megatron.policy import Policy
from rft.trainer.models import Models

BEFORE, AFTER, WARMUP = 2, 2, 1  # steps on either side of a save; those of the critic alone
PPO = AlgorithmConfig(
    algorithm_type="ppo",
    advantage_fn="ppo",
    policy_loss_fn="ppo",
    advantage_fn_args={"gamma": 0.95, "lam": 0.9},
    proximal_logprobs=True,
    kl_loss_fn="k2",
    kl_loss_fn_args={"kl_coef": 0.1},
    kl_penalty_fn="k1",
    kl_penalty_fn_args={"kl_coef": 0.1},
    entropy_loss_fn="default",
    entropy_loss_fn_args={"entropy_coef": 0.01},
)


@contextmanager
def mesh_of(
    tp: int = 1, pp: int = 1, cp: int = 1, sp: bool = False, vpp: int | None = None, ep: int = 1
) -> Iterator[tuple[Mesh, MegatronConfig]]:
    device = devices.choose("cpu")
    device.activate()
    sizes = MegatronConfig(tp, pp, cp, sp, vpp, ep)
    mesh = Mesh(sizes, device, TIMEOUT_S)
    try:
        yield mesh, sizes
    finally:
        mesh.close()


def models_on(
    mesh: Mesh,
    sizes: MegatronConfig,
    path: str,
    other: str,
    seed: int = 0,
    dtype: str = "fp32",
    optimizer: dict[str, Any] = {"lr": 1e-3},  # noqa: B006
) -> Models:
    """`other` is the reference and what the critic begins as, with a head that is not 0, or it
    would hide everything.
    """
    trainer = TrainerConfig(megatron=sizes, dtype=dtype, grad_clip=1e9)
    critic_config = CriticConfig(optim=CriticOptimizerConfig(**optimizer), grad_clip=1e9)
    policy = Policy(
        ModelConfig(model_path=path), trainer, OptimizerConfig(**optimizer), mesh, seed, 10
    )
    reference = Reference(other, trainer, mesh)
    critic = Critic(other, trainer, critic_config, mesh, 10)
    set_head(critic)
    return Models(policy, reference, critic, PPO, WARMUP, critic_config.cliprange_value)


def set_head(critic: Critic) -> None:
    """To the same numbers on every mesh."""
    for shard in critic._shards:
        if shard.bound.hf == ("score.weight",):
            with torch.no_grad():
                shard.parameter.copy_(torch.from_numpy(head(critic.dims.hidden)))


def head(hidden: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(1, hidden)).astype(np.float32) / 4


def rewarded(count: int | None, seed: int = 0) -> list[Row]:
    """Rows with a reward, and log-probabilities of an engine that is not quite the policy; None:
    those of groups.
    """
    rng = np.random.default_rng(seed)
    rows = make_group_rows(seed) if count is None else make_rows(count, seed)
    for row in rows:
        row.scores["reward"] = np.zeros(len(row.tokens), dtype=np.float32)
        row.scores["reward"][-1] = rng.normal()
    return rows


def values(path: str, rows: int | None = 12, share: bool = False, **layout: Any) -> dict[str, Any]:
    """Of a new critic, and of one with a head: per row index, one
    value before each token but the first.
    """
    with mesh_of(**layout) as (mesh, sizes):
        Policy(
            ModelConfig(model_path=path),
            TrainerConfig(megatron=sizes),
            OptimizerConfig(),
            mesh,
            0,
            10,
        ).close()
        critic = Critic(path, TrainerConfig(megatron=sizes), CriticConfig(), mesh, 10)
        given = make_group_rows() if rows is None else make_rows(rows)
        part = part_of(critic, given, cut=PackingPolicy(share=share))
        new = max(
            (float(np.abs(found).max(initial=0)) for found in critic.score(part)), default=0.0
        )
        set_head(critic)
        return {"new": new, "values": by_row(part, critic.score(part))}


def by_row(part: list[Any], scores: list[np.ndarray]) -> list[tuple[int, np.ndarray]]:
    found = []
    for packed, given in zip(part, scores, strict=True):
        bounds = packed.cu_seqlens.tolist()
        if len(given):
            found += [
                (int(r), given[a : b - 1])
                for r, a, b in zip(packed.rows, bounds, bounds[1:], strict=False)
            ]
    return found


def step(path: str, other: str, rows: int = 24, **layout: Any) -> dict[str, Any]:
    """Scores of a step, then a step of the critic alone and one of both: metrics, moments after the
    first, weights after both.
    """
    with mesh_of(**layout) as (mesh, sizes):
        models = models_on(mesh, sizes, path, other)
        part, scored = models.score(part_of(models.policy, rewarded(rows)))
        loss = recipe.policy_loss(PPO)
        waits: list[int] = []
        first = models.train_step(part, loss, lambda: waits.append(1))
        pieces = pieces_of(models, "critic.exp_avg/")
        of_policy = pieces_of(models, "exp_avg/")
        second = models.train_step(part, loss, lambda: waits.append(2))
        assert waits == [1, 2] and (models.policy.step, models.critic.step) == (1, 2)
        scores = {
            name: by_row(part, [p.scores.get(name, np.zeros(0, np.float32)) for p in part])
            for name in ("value", "returns", "reference", "proximal")
        }
        scores["advantage"] = (
            by_row(part, [p.advantage for p in part]) if mesh.is_last_stage else []
        )
        return {
            "scored": scored,
            "metrics": [first, second],
            "scores": scores,
            "moments": pieces,
            "untouched": of_policy,
            "after": pieces_of(models, "critic.model/"),
            "policy": pieces_of(models, "model/"),
            "second": pieces_of(models, "exp_avg/"),
            "micros": len(part),
        }


def cut(
    models: Models, rows: list[Row], step: int, share: bool = False
) -> tuple[list[Any], list[Update]]:
    """Two epochs in mini-batches, dealt anew in each: this rank's part, and the updates."""
    mesh, rule = models.policy.mesh, UpdateRule(2, 9, shuffle=True)
    how = PackingPolicy(share=share)
    packing = RowPacking(mesh.dp, 128, models.policy.multiple, cut=how)
    parts, updates = planned(rows, rule, step, packing, ("seq-mean-token-mean",) * 2)
    return mesh.scatter_parts(parts if mesh.rank == 0 else None), updates


def several(
    path: str, other: str, rows: int | None = 24, share: bool = False, **layout: Any
) -> dict[str, Any]:
    """A step of two epochs in mini-batches, dealt anew in each, without a warm-up: metrics, and
    weights of both models afterwards.
    """
    plain = {"lr": 0.05, "optimizer_type": "sgd"}  # Adam would make large what is noise
    with mesh_of(**layout) as (mesh, sizes):
        models = models_on(mesh, sizes, path, other, optimizer=plain)
        models.critic_warmup = 0
        part, updates = cut(models, rewarded(rows), 0, share)
        assert any(packed.shared.any() for packed in part) is share
        part, scored = models.score(part)
        loss, waits = recipe.policy_loss(PPO, several=True), list[int]()
        metrics = models.train_step(part, loss, lambda: waits.append(1), updates)
        assert waits == [1] and (models.policy.step, models.critic.step) == (1, 1)
        assert models.policy.optimizer.updates == models.critic.optimizer.updates == len(updates)
        return {
            "metrics": scored | metrics,
            "policy": pieces_of(models, "model/"),
            "critic": pieces_of(models, "critic.model/"),
        }


def pieces_of(models: Models, kind: str) -> list[tuple[Any, ...]]:
    found = models.snapshot().pieces
    return [(claim_of(p), p.tensor.float().numpy().copy()) for p in found if p.key.startswith(kind)]


def reference(path: str, rows: int = 12, **layout: Any) -> dict[str, Any]:
    """Log-probabilities by a reference and by a policy of the same directory, and what a reference
    holds on to.
    """
    with mesh_of(**layout) as (mesh, sizes):
        trainer = TrainerConfig(megatron=sizes)
        policy = Policy(
            ModelConfig(model_path=path), trainer, OptimizerConfig(lr=1e-2), mesh, 0, 10
        )
        frozen = Reference(path, trainer, mesh)
        part = part_of(policy, make_rows(rows))
        fresh = by_row(part, policy.score(part))
        policy.train_step(
            part,
            recipe.policy_loss(AlgorithmConfig(policy_loss_fn="sft", kl_loss_fn="none")),
            lambda: None,
        )
        assert not any(
            parameter.requires_grad
            for part_of in frozen.model
            for parameter in part_of.parameters()
        )
        return {
            "fresh": fresh,
            "later": by_row(part, policy.score(part)),
            "reference": by_row(part, frozen.score(part)),
            "trained": by_row(part, frozen.score(part, trained_only=True)),
        }


def resumed(
    path: str,
    other: str,
    root: str,
    dtype: str = "fp32",
    is_cut: bool = False,
    **layout: Any,
) -> dict[str, Any]:
    """Both ends as this rank saw them.

    The second pair starts from other weights and another seed: all of it must be read.
    """
    with mesh_of(**layout) as (mesh, sizes):
        trainer = TrainerConfig(megatron=sizes, dtype=dtype)
        first = models_on(mesh, sizes, path, other, 1, dtype)
        train(first, range(BEFORE), is_cut)
        save_and_wait(manager_at(root, mesh, trainer), BEFORE, first, {"step": BEFORE})
        wanted = ending(first, is_cut)
        first.close()
        second = models_on(mesh, sizes, other, path, 2, dtype)
        second.reference.close()
        second.reference = Reference(other, trainer, mesh)
        manager_at(root, mesh, trainer).load(second)
        second.warm_up(made_up(second.policy))  # nobody can tell afterwards
        found = ending(second, is_cut)
        second.close()
        return {"found": found, "wanted": wanted}


def ending(models: Models, is_cut: bool = False) -> dict[str, Any]:
    metrics = train(models, range(BEFORE, BEFORE + AFTER), is_cut)
    snapshot = models.snapshot()
    pieces = {(p.key, p.offset, p.shape, p.flat): as_bytes(p.tensor) for p in snapshot.pieces}
    return {"metrics": metrics, "pieces": pieces, "small": snapshot.small | snapshot.local}


def train(models: Models, steps: range, is_cut: bool = False) -> list[dict[str, float]]:
    found = []
    for step in steps:
        rows = rewarded(16, seed=step)
        part, updates = cut(models, rows, step) if is_cut else (part_of(models.policy, rows), [])
        part, scored = models.score(part)
        loss = recipe.policy_loss(PPO, several=is_cut)
        found.append(scored | models.train_step(part, loss, lambda: None, updates))
    return found


def write(path: str, other: str, root: str, with_critic: bool, **layout: Any) -> None:
    """Train and save."""
    with mesh_of(**layout) as (mesh, sizes):
        models = models_on(mesh, sizes, path, other)
        if with_critic:
            train(models, range(BEFORE))
        else:
            models.critic = None
        save_and_wait(manager_at(root, mesh, TrainerConfig()), BEFORE, models, {"step": BEFORE})


def read(
    path: str, other: str, root: str, with_critic: bool = True, **layout: Any
) -> dict[str, Any]:
    """Load: pieces of this rank, what was said if the checkpoint
    was refused, and the steps of both.
    """
    with mesh_of(**layout) as (mesh, sizes):
        models = models_on(mesh, sizes, path, other)
        if not with_critic:
            models.critic = None
        try:
            manager_at(root, mesh, TrainerConfig()).load(models)
        except ValueError as error:
            return {"refused": str(error)}
        steps = (models.policy.step, models.critic.step if models.critic else None)
        return {"pieces": pieces_of(models, ""), "steps": steps}
