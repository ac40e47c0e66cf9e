"""Which tokens of a step are too far from the policy that sampled them, judged over all of them:
M2PO (Zheng et al. 2026, arXiv:2510.01161, algorithm 1).

In: microbatches with `proximal` log-probabilities and final advantages, on the ranks that compute
losses; all other ranks take part in the sums with nothing. Out: the same with the score `kept`, 1
or 0 per token, and what the second moment was and is. Invariant: which tokens are kept does not
depend on how the batch was cut: only sums over the whole step decide.

With d = proximal - behaviour of the tokens that are pushed still further (A > 0 and d > 0, or
A < 0 and d < 0: where PPO clips), the largest d^2 are left out until the mean of the rest is no
more than the budget. All counts stay as they were. Equal d^2 are kept or left out together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rft.algorithm.ratios import LOG_RATIO_LIMIT
from rft.data.packing import Packed

Summed = Callable[[list[float]], list[float]]
MASK = "second_moment"  # what algorithm.rollout_correction.rollout_rs calls it
PROBES = 64  # cutoffs tried per round: 2^31 bit patterns are told apart in six


def judged(
    part: Sequence[Packed], budget: float, counts: bool, summed: Summed
) -> tuple[Sequence[Packed], dict[str, float]]:
    """`counts`: whether this rank's tokens enter the sums (others may hold the same); `summed` adds
    up over all ranks.
    """
    squares = [_squares(packed) for packed in part if "proximal" in packed.scores]
    mine = np.concatenate([np.zeros(0, np.float32), *squares]) if counts else np.zeros(0)
    mine = np.sort(mine[mine >= 0])
    before = np.concatenate([[0.0], np.cumsum(mine, dtype=np.float64)])

    def below(cutoffs: np.ndarray) -> np.ndarray:
        """[2, cutoffs]: of the whole step, how many are not larger, and their sum."""
        ends = np.searchsorted(mine, cutoffs, side="right")
        found = summed([*ends.astype(np.float64), *before[ends]])
        return np.array(found).reshape(2, len(cutoffs))

    largest = np.float32(LOG_RATIO_LIMIT**2)
    count, total = below(np.array([largest]))[:, 0]
    cutoff = largest if total <= budget * count else _cutoff(below, budget, largest)
    rest, kept = below(np.array([cutoff]))[:, 0]
    of_part = iter(squares)
    return [
        replace(packed, scores=packed.scores | {"kept": (next(of_part) <= cutoff).astype("f4")})
        if "proximal" in packed.scores
        else packed
        for packed in part
    ], {
        "importance/second_moment": total / max(count, 1.0),
        "importance/second_moment_kept": kept / max(rest, 1.0),
    }


def _squares(packed: Packed) -> np.ndarray:
    """d^2 [T] in float32, -1 where the token is not judged."""
    with np.errstate(invalid="ignore"):  # two infinities: no number, and not judged
        gap = packed.scores["proximal"].astype(np.float32) - packed.behaviour.astype(np.float32)
    gap = np.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    is_judged = (packed.weight != 0) & (packed.advantage * np.sign(gap) > 0)
    if "expert" in packed.scores:
        is_judged &= packed.scores["expert"] == 0
    return np.where(is_judged, gap * gap, np.float32(-1))


def _cutoff(
    below: Callable[[np.ndarray], np.ndarray], budget: float, largest: np.float32
) -> np.float32:
    """The largest float32 such that the mean of what is not larger keeps to the budget; -1 where
    none does. The bits of floats that are not negative are in the order of their values.
    """
    fits, too_large = -1, int(largest.view(np.int32))
    while too_large - fits > 1:
        bits = np.unique(np.linspace(fits, too_large, PROBES + 2).astype(np.int64)[1:-1])
        bits = bits[(bits > fits) & (bits < too_large)]
        counts, sums = below(bits.astype(np.int32).view(np.float32))
        fitting = bits[sums <= budget * counts]
        # a mean grows with its cutoff; one over nothing fits
        fits = int(fitting.max(initial=fits))
        too_large = int(bits[bits > fits].min(initial=too_large))
    return np.float32(-1) if fits < 0 else np.int32(fits).view(np.float32)
