"""What the ranks of test_reshard.py do: load a checkpoint into a layout, save it again, compare
every element with the truth.
"""

from typing import Any

import numpy as np
import torch
from jobs import part_of, policy_on
from resume_jobs import manager_at, save_and_wait
from rows import make_rows

from rft.algorithm.losses import token_loss
from rft.checkpoint.sharding import Claim, claim_of
from rft.config import TrainerConfig
from rft.megatron.policy import Policy


def origin(path: str, root: str, dtype: str) -> dict[str, np.ndarray]:
    """Train two steps at one rank, save, and return every whole tensor as its bytes."""
    with policy_on(path, dtype=dtype) as policy:
        for step in range(2):
            policy.train_step(
                part_of(policy, make_rows(16, seed=step)), token_loss("ppo", {}), lambda: None
            )
        save_and_wait(manager_at(root, policy.mesh, TrainerConfig(dtype=dtype)), 2, policy, {})
        truth: dict[str, np.ndarray] = {}
        for piece in policy.snapshot().pieces:
            claim = claim_of(piece)
            whole = truth.setdefault(
                claim.key, np.zeros(claim.global_shape, dtype=f"u{piece.tensor.element_size()}")
            )
            inside, chosen = _part(whole, claim)
            inside[chosen] = _words(piece.tensor)
        return truth


def through(path: str, source: str, target: str, truth: str, dtype: str, **layout: Any) -> int:
    """Load `source`, compare, save as `target`. Elements compared on this rank."""
    with policy_on(path, dtype=dtype, seed=99, **layout) as policy:
        compared = load_and_compare(policy, source, truth, dtype)
        save_and_wait(manager_at(target, policy.mesh, TrainerConfig(dtype=dtype)), 2, policy, {})
        return compared


def load_all(path: str, sources: list[str], truth: str, dtype: str, **layout: Any) -> int:
    with policy_on(path, dtype=dtype, seed=99, **layout) as policy:
        return sum(load_and_compare(policy, source, truth, dtype) for source in sources)


def load_and_compare(policy: Policy, source: str, truth: str, dtype: str) -> int:
    """Every element of every piece of this rank is that of the
    truth, after all of it was something else.
    """
    with torch.no_grad():
        for piece in policy.snapshot().pieces:
            piece.tensor.fill_(7)
    policy.step = 0
    manager_at(source, policy.mesh, TrainerConfig(dtype=dtype)).load(policy)
    assert policy.step == 2 and policy.optimizer.updates == 2
    wanted = np.load(truth)
    compared = 0
    for piece in policy.snapshot().pieces:
        inside, chosen = _part(wanted[piece.key], claim_of(piece))
        assert np.array_equal(inside[chosen], _words(piece.tensor)), f"{piece.key} of {source}"
        compared += piece.tensor.numel()
    return compared


def _words(tensor: torch.Tensor) -> np.ndarray:
    return (
        tensor.detach()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .view(f"u{tensor.element_size()}")
    )


def _part(whole: np.ndarray, claim: Claim) -> tuple[np.ndarray, np.ndarray]:
    """The claimed box as a view of the whole, and which of its elements are claimed: counted one by
    one, not by `boxes`.
    """
    numbers = np.arange(int(np.prod(claim.shape))).reshape(claim.shape)
    start, stop = claim.flat or (0, numbers.size)
    inside = whole[
        tuple(slice(low, low + n) for low, n in zip(claim.offset, claim.shape, strict=True))
    ]
    return inside, (numbers >= start) & (numbers < stop)
