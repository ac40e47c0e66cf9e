"""What the rank processes do for the packing tests: score rows that
share a microbatch with chosen others.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from jobs import part_of, policy_on
from rows import make_rows

from rft.algorithm.losses import token_loss
from rft.data.context_parallel import cp_index
from rft.data.packing import Packed, PackingPolicy, Row, pack
from rft.megatron.attention import BLOCK

LONGEST = 90  # several classes of length in the attention, several chunks under context parallelism


def companies(seed: int, count: int) -> list[list[Row]]:
    """Row 0 is always the same; the others, their number and their lengths are random.

    First of all, row 0 alone.
    """
    first = make_rows(1, seed=7, longest=LONGEST)[0]
    found = [[first]]
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        others = make_rows(
            int(rng.integers(1, 9)), seed=int(rng.integers(1 << 30)), longest=LONGEST
        )
        at = int(rng.integers(len(others) + 1))
        found.append([*others[:at], first, *others[at:]])
    return found


def place(rows: list[Row], first: Row) -> int:
    return next(i for i, row in enumerate(rows) if row is first)


def one_microbatch(policy: Any, rows: list[Row]) -> list[Packed]:
    """All rows together, on every data-parallel rank."""
    return pack(rows, 1, 1 << 20, policy.multiple)[0]


def logprobs(policy: Any, rows: list[Row], row: int) -> np.ndarray:
    """Of every token of `row` but the first; empty on all but the last stage."""
    part = one_microbatch(policy, rows)
    assert len(part) == 1 and len(part[0].rows) == len(rows)
    values = policy.score(part)[0]
    start, stop = part[0].cu_seqlens[row : row + 2].tolist()
    return values[start : stop - 1]


def in_company(path: str, seed: int, count: int, **layout: Any) -> list[np.ndarray]:
    """Log-probabilities of one row, alone and beside others."""
    with policy_on(path, **layout) as policy:
        cases = companies(seed, count)
        return [logprobs(policy, rows, place(rows, cases[0][0])) for rows in cases]


def gradient_of_one(path: str, seed: int, count: int, **layout: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of steps in which only one row has weight: alone, then beside rows
    that weigh nothing.
    """
    # the weights stay, so that the steps are comparable
    with policy_on(path, lr=0.0, **layout) as policy:
        found = []
        for rows in (cases := companies(seed, count)):
            silent = [
                row if row is cases[0][0] else replace(row, weight=row.weight * 0) for row in rows
            ]
            metrics = policy.train_step(
                one_microbatch(policy, silent), token_loss("ppo", {}), lambda: None
            )
            found.append((metrics["loss"], metrics["grad_norm"]))
        return found


def long_answers() -> list[Row]:
    """To one prompt, over more than one block of queries each."""
    rng = np.random.default_rng(0)
    prompt, found = rng.integers(5, 90, 21), []
    for length in (2 * BLOCK + 5, BLOCK + 1, BLOCK, 3):
        tokens = np.concatenate([prompt, rng.integers(5, 90, length)])
        flags = (np.arange(len(tokens)) >= len(prompt)).astype(np.float32)
        found.append(Row(tokens, flags, -flags, flags, flags / length, group=0))
    return found


def behind_prefixes(path: str, share: bool, **layout: Any) -> tuple[list[np.ndarray], float]:
    """Log-probabilities of rows in their order, and the norm of their gradient."""
    with policy_on(path, lr=0.0, **layout) as policy:
        cut = PackingPolicy(share=share)
        (packed,) = part = pack(long_answers(), 1, 1 << 20, policy.multiple, cut=cut)[0]
        (values,) = policy.score(part)
        bounds = zip(packed.rows, packed.cu_seqlens, packed.cu_seqlens[1:], strict=False)
        rows = dict(sorted((int(row), values[start : stop - 1]) for row, start, stop in bounds))
        metrics = policy.train_step(part, token_loss("ppo", {}), lambda: None)
        return list(rows.values()), metrics["grad_norm"]


def step(path: str, lengths: list[int], max_tokens: int, **layout: Any) -> dict[str, Any]:
    """Loss and gradient norm of one step over rows of these lengths, and how many of their tokens
    this rank held.
    """
    with policy_on(path, **layout) as policy:
        rows = [make_rows(1, seed=number, longest=LONGEST)[0] for number in range(len(lengths))]
        part = part_of(
            policy, [cut(row, n) for row, n in zip(rows, lengths, strict=True)], max_tokens
        )
        metrics = policy.train_step(part, token_loss("ppo", {}), lambda: None)
        held = sum(
            int((cp_index(packed, policy.mesh.cp_rank, policy.mesh.cp) >= 0).sum())
            for packed in part
        )
        return {
            "loss": metrics["loss"],
            "grad_norm": metrics["grad_norm"],
            "held": held,
            "micros": len(part),
        }


def cut(row: Row, length: int) -> Row:
    """The last tokens of a row: those that are trained."""
    arrays = {
        name: getattr(row, name)[-length:]
        for name in ("tokens", "trained", "behaviour", "advantage", "weight")
    }
    return replace(row, **arrays)
