"""Advantages of single tokens, made where the critic's values lie: no rank ever sees the tokens of
another.

In: microbatches whose `scores` hold the `reward` of every token and what models said (values, what
a KL penalty compares), on the ranks that compute losses; all other ranks take part in the sums with
nothing. Out: the microbatches with `advantage` and the score `returns`, and their moments over the
step. Invariant: the moments, and the rewards of responses, are sums over all trained tokens of the
step, so that advantages do not depend on how the batch was cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rft.algorithm import recipe
from rft.algorithm.advantages import ADVANTAGES, Columns
from rft.algorithm.ratios import estimate
from rft.algorithm.token_advantages import TOKEN_ADVANTAGES, whitened
from rft.config import AlgorithmConfig
from rft.data.packing import Packed

Summed = Callable[[list[float]], list[float]]


def is_needed(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages are finished here, and not at rank 0."""
    return algorithm.advantage_fn in TOKEN_ADVANTAGES or is_penalised(algorithm)


def is_penalised(algorithm: AlgorithmConfig) -> bool:
    """Whether a KL penalty comes off rewards from which advantages of responses are made: those
    wait for it.
    """
    return algorithm.kl_penalty_fn != "none" and algorithm.advantage_fn in ADVANTAGES


def credited(
    part: Sequence[Packed],
    algorithm: AlgorithmConfig,
    counts: bool,
    summed: Summed,
    groups: Sequence[int] = (),
    penalty_coef: float | None = None,
    others: Sequence[tuple[int, float]] = (),
) -> tuple[Sequence[Packed], dict[str, float]]:
    """`counts`: whether this rank's tokens enter the moments (others may hold the same); `summed`
    adds up over all ranks.

    `groups`: of every row of the step, whose numbers `Packed.rows` are; `others`: (group, reward)
    of responses that they are compared with, and that are no rows. Ranks without the scores that
    are needed give nothing.
    """
    coef = recipe.penalty_coef(algorithm).value if penalty_coef is None else penalty_coef
    kind = TOKEN_ADVANTAGES.get(str(algorithm.advantage_fn))
    has_scores = all(name in packed.scores for packed in part for name in _needed(algorithm))
    given = {}
    if kind is not None and kind.measured is not None:
        given = _spread(part if has_scores else [], kind.measured, counts, summed)
    penalties = [_penalty(packed, algorithm) for packed in part] if has_scores else []
    # A step in which nothing is trained has no rows, and so no rewards; its collectives are made
    # all the same.
    rewards = [
        packed.scores.get("reward", np.zeros(packed.length, np.float32)) - coef * penalty
        for packed, penalty in zip(part, penalties, strict=False)
    ]
    if kind is None:
        function = _of_responses(part, rewards, algorithm, counts, summed, groups, others)
    else:
        function = partial(kind.function, **algorithm.advantage_fn_args, **given)
    found, columns = [], [np.zeros((0, 4))]
    for packed, reward, penalty in zip(part, rewards, penalties, strict=False):
        advantage, returns = function(packed, reward)
        found.append((packed, advantage, {"returns": returns.astype(np.float32)}))
        value = packed.scores.get("value", np.zeros(packed.length))
        columns.append(np.stack([advantage, returns, value, penalty], axis=1)[packed.weight != 0])
    moments = _moments(np.concatenate(columns)[: None if counts else 0], summed, algorithm)
    if not has_scores:
        return part, moments
    mean, variance = moments["advantage/mean"], moments["advantage/std"] ** 2
    return [
        replace(
            packed,
            scores=packed.scores | score,
            advantage=(
                whitened(advantage, packed.weight != 0, mean, variance)
                if kind is not None and kind.is_whitened
                else advantage
            ).astype(np.float32),
        )
        for packed, advantage, score in found
    ], moments


def distilled(
    part: Sequence[Packed], algorithm: AlgorithmConfig, counts: bool, summed: Summed
) -> tuple[Sequence[Packed], dict[str, float]]:
    """Advantages of single tokens from a teacher, of the score `teacher`, and their mean over all
    trained tokens of the step. Nothing is whitened: the size of an advantage is the size of the
    disagreement.

    `counts`: whether this rank's tokens enter the means (others may hold the same); `summed` adds
    up over all ranks.
    """
    function = TOKEN_ADVANTAGES[str(algorithm.advantage_fn)].function
    taught, sums = list(part), np.zeros(3)
    for number, packed in enumerate(part):
        if "teacher" not in packed.scores:
            continue
        advantage, _ = function(packed, np.zeros(packed.length), **algorithm.advantage_fn_args)
        taught[number] = replace(packed, advantage=advantage.astype(np.float32))
        trained = packed.weight != 0
        gap = packed.scores.get("proximal", packed.behaviour) - packed.scores["teacher"]
        sums += [trained.sum(), advantage[trained].sum(), gap[trained].sum(dtype=np.float64)]
    count, advantages, gaps = summed((sums if counts else np.zeros(3)).tolist())
    return taught, {
        "advantage/mean": advantages / max(count, 1.0),
        "kl/teacher": gaps / max(count, 1.0),
    }


def _needed(algorithm: AlgorithmConfig) -> list[str]:
    """Scores of models that this rank must hold to take part with its tokens."""
    kind = TOKEN_ADVANTAGES.get(str(algorithm.advantage_fn))
    found = ["value"] if kind is not None and kind.needs_critic else []
    if kind is not None and kind.measured is not None:
        found += ["proximal", "entropy"]
    return found + ([] if algorithm.kl_penalty_fn == "none" else ["reference"])


def _spread(
    part: Sequence[Packed], measured: Callable[[Packed], np.ndarray], counts: bool, summed: Summed
) -> dict[str, float]:
    """Mean and unbiased deviation of what is measured, over all trained tokens of the step."""
    found = np.concatenate(
        [np.zeros(0), *(measured(packed)[packed.weight != 0] for packed in part if counts)]
    )
    count, total = summed([float(len(found)), float(found.sum())])
    mean = total / max(count, 1.0)
    (squares,) = summed([float(((found - mean) ** 2).sum())])
    return {"mean": mean, "std": float(np.sqrt(squares / max(count - 1, 1.0)))}


def _of_responses(
    part: Sequence[Packed],
    rewards: list[np.ndarray],
    algorithm: AlgorithmConfig,
    counts: bool,
    summed: Summed,
    groups: Sequence[int],
    others: Sequence[tuple[int, float]],
) -> Callable[[Packed, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """An advantage of responses, of rewards that only the ranks together know: every rank computes
    it, from the same numbers.
    """
    totals = np.zeros(len(groups))
    for packed, reward in zip(part, rewards, strict=False):
        if counts:
            sequence = np.repeat(packed.rows, np.diff(packed.cu_seqlens))
            np.add.at(totals, sequence, np.where(packed.weight != 0, reward, 0.0)[: len(sequence)])
    # of which no token is trained, so that nothing comes off; as exact as the rewards of rows
    beside = [float(np.float32(reward)) for _, reward in others]
    count = len(groups) + len(others)
    of_step = Columns(
        rewards=np.array([*summed(totals.tolist()), *beside]),
        groups=np.array([*groups, *(group for group, _ in others)], dtype=np.int64),
        samples=np.arange(count),
        turns=np.zeros(count, dtype=np.int64),
        logprobs=np.zeros(count),
        infos=[{}] * count,
    )
    judged = ADVANTAGES[str(algorithm.advantage_fn)].function(
        of_step, **algorithm.advantage_fn_args
    )

    def spread(packed: Packed, reward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        trained, sequence = packed.weight != 0, np.repeat(packed.rows, np.diff(packed.cu_seqlens))
        advantage, returns = np.zeros((2, packed.length))
        advantage[: len(sequence)] = judged.advantages[sequence]
        returns[: len(sequence)] = of_step.rewards[sequence]
        return advantage * trained, returns * trained

    return spread


def _penalty(packed: Packed, algorithm: AlgorithmConfig) -> np.ndarray:
    """KL of the old policy from the reference, per trained token."""
    name, arguments = algorithm.kl_penalty_fn, recipe.of_estimator(algorithm.kl_penalty_fn_args)
    if name == "none":
        return np.zeros(packed.length)
    import torch

    old, reference = packed.scores.get("proximal", packed.behaviour), packed.scores["reference"]
    given = [
        torch.from_numpy(np.where(packed.weight != 0, values, 0.0)) for values in (old, reference)
    ]
    found: np.ndarray = estimate(name, *given, given[0], **arguments).numpy()
    return found


def _moments(columns: np.ndarray, summed: Summed, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Of advantages, returns, values and penalties [N, 4].

    Deviations are summed around the mean, for exactness.
    """
    count, *sums = summed([float(len(columns)), *columns.sum(axis=0).tolist()])
    advantage, returns, value, penalty = (total / max(count, 1.0) for total in sums)
    given, wanted, said = columns[:, 0], columns[:, 1], columns[:, 2]
    deviations = [(given - advantage) ** 2, (wanted - returns) ** 2, (wanted - said) ** 2]
    of_advantage, of_returns, missed = summed([float(squares.sum()) for squares in deviations])
    found = {
        "advantage/mean": advantage,
        "advantage/std": float(np.sqrt(of_advantage / max(count - 1, 1.0))),
        "returns/mean": returns,
    }
    if recipe.needs_critic(algorithm):
        found["value/mean"] = value
        found["value/explained"] = (
            1.0 - missed / of_returns if of_returns > 0 else 0.0
        )  # share of the returns' variance
    return found if algorithm.kl_penalty_fn == "none" else found | {"kl/penalty": penalty}
