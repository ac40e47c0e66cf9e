"""What the ranks of test_pairs.py do: a step on pairs of
responses, with a reference beside the policy.
"""

from dataclasses import replace
from typing import Any

from critic_jobs import mesh_of, pieces_of
from jobs import part_of
from rows import CUTS, make_rows

from rft.algorithm import recipe
from rft.config import AlgorithmConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rft.data.packing import Row
from rft.megatron.network import Reference
from rft.megatron.policy import Policy
from rft.trainer.models import Models

BETA, SMOOTHING = 0.5, 0.1
DPO = AlgorithmConfig(
    algorithm_type="dpo",
    policy_loss_fn="dpo",
    policy_loss_fn_args={"beta": BETA, "label_smoothing": SMOOTHING},
    kl_loss_fn="none",
    proximal_logprobs=True,
)


def paired(count: int) -> list[Row]:
    """Rows 2k and 2k + 1 are a pair; of other lengths, so that packing parts them."""
    return [
        replace(row, weight=row.trained / count, advantage=0 * row.trained)
        for row in make_rows(count)
    ]


def step(path: str, other: str, variants: list[str], **layout: Any) -> dict[str, Any]:
    """The first gradient, for a way to cut a batch; `few`: of so few rows that ranks go without."""
    found: dict[str, Any] = {}
    with mesh_of(**layout) as (mesh, sizes):
        trainer = TrainerConfig(megatron=sizes, grad_clip=1e9)
        for name in variants:
            cut = CUTS["tokens-packed" if name == "few" else name]
            policy = Policy(ModelConfig(model_path=path), trainer, OptimizerConfig(), mesh, 0, 10)
            models = Models(policy, Reference(other, trainer, mesh), None, DPO)
            part, scored = models.score(
                part_of(policy, paired(2 if name == "few" else 24), cut=cut)
            )
            metrics = models.train_step(part, recipe.policy_loss(DPO), lambda: None)
            found[name] = {
                "metrics": [scored | metrics],
                "moments": pieces_of(models, "exp_avg/"),
                "micros": len(part),
            }
            models.close()
    return found
