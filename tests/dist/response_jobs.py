"""What the ranks of test_responses.py do: steps whose loss, or
whose advantages, are of whole responses.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from critic_jobs import mesh_of
from jobs import part_of, pieces_of
from rows import CUTS, make_rows
from torch import Tensor

from rft.algorithm.fields import Fields
from rft.algorithm.losses import token_loss
from rft.algorithm.ratios import Correction
from rft.config import (
    AlgorithmConfig,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutCorrectionConfig,
    TrainerConfig,
)
from rft.data.packing import BY_TOKENS, PackingPolicy, Row
from rft.megatron.mesh import Mesh
from rft.megatron.network import Reference
from rft.megatron.policy import Policy
from rft.trainer.models import Models

COUNT = 14
GROUPS = [number // 2 for number in range(COUNT)]
PENALTY = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.2}, "kl_loss_fn": "none"}
ADVANTAGES = {
    "clipb": AlgorithmConfig(
        advantage_fn="clipb",
        advantage_fn_args={"mu": 0.3},
        proximal_logprobs=True,
        kl_loss_fn="none",
    ),
    "reinforceplusplus": AlgorithmConfig(advantage_fn="reinforceplusplus", **PENALTY),
    "rloo": AlgorithmConfig(advantage_fn="rloo", **PENALTY),
}


def squared_drift(logprobs: Tensor, fields: Fields) -> tuple[Tensor, dict[str, Tensor]]:
    """At every token the square of its response's mean log-ratio: the gradient of each token goes
    through all of them.
    """
    drift = fields.mean(logprobs - fields.old)
    return drift**2, {"drift/mean": drift}


def rows() -> list[Row]:
    """With a reward at the last token, and responses that the policy finds likelier than the
    engine, or less likely.
    """
    rng, found = np.random.default_rng(6), []
    for row in make_rows(COUNT):
        reward = np.zeros(len(row.tokens), dtype=np.float32)
        reward[-1] = rng.normal()
        shift = row.trained * np.float32(rng.normal() * 0.3)
        found.append(replace(row, behaviour=row.behaviour + shift, scores={"reward": reward}))
    return found


LOSSES = {
    "drift": squared_drift,
    "gspo": token_loss("gspo", {"clip_range_low": 0.2, "clip_range_high": 0.2}),
    "masked": token_loss("ppo", {"enable_sequence_masking": True}),
    "corrected": token_loss(
        "ppo", {}, correction=Correction("sequence", 1.5, "geometric", 0.7, 1.4)
    ),
    "outliers": token_loss("ppo", {}, correction=Correction("token", mask="second_moment")),
}


def steps(path: str, cut: str = "tokens-packed", **layout: Any) -> dict[str, Any]:
    """The gradient of each loss, and the advantages of each
    algorithm that needs what the models say.
    """
    found: dict[str, Any] = {}
    with mesh_of(**layout) as (mesh, sizes):
        for name, loss in LOSSES.items():
            policy = policy_on(mesh, sizes, path)
            part = part_of(policy, rows(), cut=CUTS[cut])
            if name in ("corrected", "outliers"):
                mask = RolloutCorrectionConfig(
                    rollout_rs="second_moment" if name == "outliers" else "none"
                )
                algorithm = replace(
                    ADVANTAGES["clipb"], advantage_fn="grpo", rollout_correction=mask
                )
                part = Models(policy, None, None, algorithm).score(part)[0]
            metrics = policy.train_step(part, loss, lambda: None)
            found[name] = {"metrics": [metrics], "moments": pieces_of(policy, "exp_avg/")}
        policy = policy_on(mesh, sizes, path)
        reference = Reference(path, TrainerConfig(megatron=sizes, dtype="fp32"), mesh)
        with torch.no_grad():  # a reference that is not the policy
            for parameter in reference.model[0].parameters():
                parameter.mul_(1.05)
        for name, algorithm in ADVANTAGES.items():
            found[name] = advantages(policy, reference, algorithm, CUTS[cut])
    return found


def policy_on(mesh: Mesh, sizes: MegatronConfig, path: str) -> Policy:
    trainer = TrainerConfig(megatron=sizes, dtype="fp32", grad_clip=1e9)
    return Policy(ModelConfig(model_path=path), trainer, OptimizerConfig(), mesh, 0, 10)


def advantages(
    policy: Policy, reference: Reference, algorithm: AlgorithmConfig, cut: PackingPolicy = BY_TOKENS
) -> dict[str, Any]:
    models = Models(
        policy, reference if algorithm.kl_penalty_fn != "none" else None, None, algorithm
    )
    part, moments = models.score(part_of(policy, rows(), cut=cut), GROUPS)
    values: dict[tuple[int, int], float] = {}
    if policy.mesh.is_last_stage:
        for packed in part:
            for row, start, stop in zip(
                packed.rows, packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True
            ):
                places = [t for t in range(start, stop) if packed.weight[t]]
                values |= {(int(row), int(t - start)): float(packed.advantage[t]) for t in places}
    return {"values": values, "moments": moments}
