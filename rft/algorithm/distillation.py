"""Advantages of single tokens from a teacher, made where its log-probabilities lie.

In: microbatches with the score `teacher`, on the ranks that compute losses; all other ranks take part in the sums with nothing.
Out: the microbatches with `advantage`, and its mean over all trained tokens of the step. Nothing is whitened: the size of an
advantage is the size of the disagreement.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rft.algorithm.advantages import TOKEN_ADVANTAGES
from rft.config import AlgorithmConfig
from rft.packing import Packed

Summed = Callable[[list[float]], list[float]]


def credited(
    part: list[Packed], algorithm: AlgorithmConfig, counts: bool, summed: Summed
) -> tuple[list[Packed], dict[str, float]]:
    """`counts`: whether this rank's tokens enter the means (others may hold the same); `summed` adds up over all ranks."""
    function = TOKEN_ADVANTAGES[str(algorithm.advantage_fn)].function
    found, sums = list(part), np.zeros(3)
    for number, packed in enumerate(part):
        if "teacher" not in packed.scores:
            continue
        advantage, _ = function(packed, np.zeros(packed.length), **algorithm.advantage_fn_args)
        found[number] = replace(packed, advantage=advantage.astype(np.float32))
        trained = packed.weight != 0
        gap = packed.scores.get("proximal", packed.behaviour) - packed.scores["teacher"]
        sums += [trained.sum(), advantage[trained].sum(), gap[trained].sum(dtype=np.float64)]
    count, advantages, gaps = summed((sums if counts else np.zeros(3)).tolist())
    return found, {"advantage/mean": advantages / max(count, 1.0), "kl/teacher": gaps / max(count, 1.0)}
