"""Expert rows beside rollouts: how many of them, how much they weigh, and the rows of such a step.

In: the experiences of one step, of which `Experience.expert` marks those that no policy sampled.
Out: rows that can be packed, all with the score `expert`. Invariant: rollouts and expert rows are
each divided by their own counts over the whole step, so neither the ratio of the two nor how the
batch is cut changes what mu means.
"""

from dataclasses import replace
from math import ceil, cos, pi
from typing import Any

import numpy as np

from rft.algorithm import credit
from rft.config import AlgorithmConfig, Config
from rft.data.packing import Row
from rft.ground.experience import Experience

DEFAULTS: dict[str, Any] = {"expert_data_ratio": 0.5, "sft_dataset_name": "sft_dataset"}


# of a loss in other systems, which divide each microbatch by them; here the counts are of the batch
COUNTS = (
    "use_dynamic_bsz",
    "ppo_mini_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "ngpus_trainer",
    "train_batch_size_usual",
    "train_batch_size_expert",
)


def is_mixed(algorithm: AlgorithmConfig) -> bool:
    return algorithm.sample_strategy == "mix"


def argument(algorithm: AlgorithmConfig, name: str) -> Any:
    """Of `sample_strategy_args`."""
    return algorithm.sample_strategy_args.get(name, DEFAULTS[name])


def expert_rows(algorithm: AlgorithmConfig, batch: int) -> int:
    """ceil(expert_data_ratio * batch): how many of a batch's experiences are expert rows."""
    return ceil(round(argument(algorithm, "expert_data_ratio") * batch, 9))


def batch_for(algorithm: AlgorithmConfig, rollouts: int) -> int:
    """The smallest batch that has room for so many rollouts beside its expert rows."""
    batch = rollouts
    while batch - expert_rows(algorithm, batch) < rollouts:
        batch += 1
    return batch


def rollouts_per_step(config: Config) -> int | None:
    """How many rollouts fill a step, beside its expert rows; None: groups do."""
    if config.buffer.step_counts != "experiences":
        return None
    batch = int(config.buffer.train_batch_size or 1)
    return batch - (expert_rows(config.algorithm, batch) if is_mixed(config.algorithm) else 0)


def share(algorithm: AlgorithmConfig, step: int) -> float:
    """mu of the step that trains on policy version `step`.

    `mix`: the same in every one. `mix_chord`: from 0 to mu_peak in mu_warmup_steps, then by half a
    cosine to mu_valley in mu_decay_steps.
    """
    given = algorithm.policy_loss_fn_args
    if algorithm.policy_loss_fn == "mix":
        return float(given.get("mu", 0.1))
    warmup, decay = int(given.get("mu_warmup_steps", 0)), int(given.get("mu_decay_steps", 0))
    peak, valley = float(given.get("mu_peak", 0.1)), float(given.get("mu_valley", 0.1))
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + cos(pi * (step - warmup) / decay)) / 2


def modes(algorithm: AlgorithmConfig) -> tuple[str, str]:
    """How the loss is aggregated over rollouts, and over expert rows."""
    given, usual = algorithm.policy_loss_fn_args, str(algorithm.loss_agg_mode)
    if not is_mixed(algorithm):
        return usual, usual
    of_rollouts, of_experts = (
        str(given.get(f"{kind}_loss_agg_mode") or usual) for kind in ("grpo", "sft")
    )
    return of_rollouts, of_experts


def rows(
    experiences: list[Experience], algorithm: AlgorithmConfig, step: int, longest: int = 1
) -> tuple[credit.CreditedStep, list[Row]]:
    """Rollouts first, then expert rows; `longest` as in `credit.rows`."""
    mu, (mode, of_experts) = share(algorithm, step), modes(algorithm)
    rollouts, experts = split(experiences)
    judged = credit.judge(rollouts, algorithm.advantage_fn, algorithm.advantage_fn_args, step)
    found = credit.rows(replace(judged, advantages=(1 - mu) * judged.advantages), mode, longest)
    taught = credit.CreditedStep(experts, np.full(len(experts), mu))
    whole = [_marked(row, 0.0) for row in found] + [
        _marked(row, 1.0) for row in credit.rows(taught, of_experts, longest)
    ]
    both = np.concatenate([judged.advantages, taught.advantages])
    return replace(judged, experiences=judged.experiences + experts, advantages=both), whole


def metrics(
    experiences: list[Experience], algorithm: AlgorithmConfig, step: int
) -> dict[str, float]:
    return {
        "sample/expert_rows": float(len(split(experiences)[1])),
        "loss/mu": share(algorithm, step),
    }


def split(experiences: list[Experience]) -> tuple[list[Experience], list[Experience]]:
    return [e for e in experiences if not e.expert], [e for e in experiences if e.expert]


def _marked(row: Row, expert: float) -> Row:
    return replace(
        row, scores=row.scores | {"expert": np.full(len(row.tokens), expert, dtype=np.float32)}
    )
