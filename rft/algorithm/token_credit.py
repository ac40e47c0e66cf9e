"""Advantages of single tokens, made where the critic's values lie: no rank ever sees the tokens of another.

In: microbatches whose `scores` hold `reward` and `value` (and what a KL penalty compares), on the ranks that compute losses;
all other ranks take part in the sums with nothing. Out: the microbatches with `advantage` and the score `returns`, and their
moments over the step. Invariant: the moments are those of all trained tokens of the step, so that whitening does not
depend on how the batch was cut.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rft.algorithm.advantages import TOKEN_ADVANTAGES
from rft.algorithm.advantages.gae import whitened
from rft.algorithm.kl import estimate
from rft.algorithm.recipe import penalty_coef
from rft.config import AlgorithmConfig
from rft.packing import Packed

Summed = Callable[[list[float]], list[float]]


def credited(
    part: list[Packed], algorithm: AlgorithmConfig, counts: bool, summed: Summed
) -> tuple[list[Packed], dict[str, float]]:
    """`counts`: whether this rank's tokens enter the moments (others may hold the same); `summed` adds up over all ranks."""
    if not all("value" in packed.scores for packed in part):
        return part, _moments(np.zeros((0, 4)), summed, algorithm)
    function = TOKEN_ADVANTAGES[str(algorithm.advantage_fn)].function
    found, columns = [], []
    for packed in part:
        trained, value = packed.weight != 0, packed.scores["value"]
        penalty = _penalty(packed, algorithm.kl_penalty_fn)
        # A step in which nothing is trained has no rows, and so no rewards; its collectives are made all the same.
        rewards = packed.scores.get("reward", np.zeros(packed.length, np.float32)) - penalty_coef(algorithm) * penalty
        advantage, returns = function(packed, rewards, **algorithm.advantage_fn_args)
        scores = packed.scores | {"returns": returns.astype(np.float32)}
        found.append(replace(packed, advantage=advantage, scores=scores))
        columns.append(np.stack([advantage, returns, value, penalty], axis=1)[trained])
    moments = _moments(np.concatenate(columns)[: None if counts else 0], summed, algorithm)
    mean, variance = moments["advantage/mean"], moments["advantage/std"] ** 2
    return [
        replace(p, advantage=whitened(p.advantage, p.weight != 0, mean, variance).astype(np.float32)) for p in found
    ], moments


def _penalty(packed: Packed, name: str) -> np.ndarray:
    """KL of the old policy from the reference, per trained token."""
    if name == "none":
        return np.zeros(packed.length)
    import torch

    old, reference = packed.scores.get("proximal", packed.behaviour), packed.scores["reference"]
    given = [torch.from_numpy(np.where(packed.weight != 0, values, 0.0)) for values in (old, reference)]
    found: np.ndarray = estimate(name, *given, given[0]).numpy()
    return found


def _moments(columns: np.ndarray, summed: Summed, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Of advantages, returns, values and penalties [N, 4]. Deviations are summed around the mean, for exactness."""
    count, *sums = summed([float(len(columns)), *columns.sum(axis=0).tolist()])
    advantage, returns, value, penalty = (total / max(count, 1.0) for total in sums)
    given, wanted, said = columns[:, 0], columns[:, 1], columns[:, 2]
    deviations = [(given - advantage) ** 2, (wanted - returns) ** 2, (wanted - said) ** 2]
    of_advantage, of_returns, missed = summed([float(squares.sum()) for squares in deviations])
    found = {
        "advantage/mean": advantage,
        "advantage/std": float(np.sqrt(of_advantage / max(count - 1, 1.0))),
        "returns/mean": returns,
        "value/mean": value,
        "value/explained": 1.0 - missed / of_returns if of_returns > 0 else 0.0,  # share of the returns' variance
    }
    return found if algorithm.kl_penalty_fn == "none" else found | {"kl/penalty": penalty}
