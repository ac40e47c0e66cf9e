"""What the rank of test_bitwise.py does: log-probabilities and gradients of a policy whose mesh is
bitwise, or not.
"""

from typing import Any

import numpy as np
from jobs import TIMEOUT_S, pieces_of
from rows import make_group_rows

from rft.algorithm.losses import token_loss
from rft.config import MegatronConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rft.data.packing import PackingPolicy, Row, stack
from rft.ground import device as devices
from rft.megatron.mesh import Mesh
from rft.megatron.policy import Policy


class Scorer:
    """A policy on one thread, as a rank of a run has it."""

    def __init__(self, path: str, bitwise: bool = True):
        device = devices.choose("cpu", 0, 1)
        device.activate()
        self.mesh = Mesh(MegatronConfig(), device, TIMEOUT_S, bitwise)
        given = TrainerConfig(megatron=MegatronConfig(), dtype="fp32", grad_clip=1e9)
        model = ModelConfig(model_path=path)
        self.policy = Policy(model, given, OptimizerConfig(), self.mesh, 0, 10)

    def part(self, rows: list[Row], tokens: int, share: bool) -> list[Any]:
        cut = PackingPolicy(share=share)
        return self.mesh.scatter_parts(stack(rows, 1, tokens, self.policy.multiple, cut=cut))

    def logprobs(self, rows: list[Row], tokens: int, share: bool) -> list[np.ndarray]:
        """Of each row's trained tokens."""
        found: list[Any] = [None] * len(rows)
        part = list(self.part(rows, tokens, share))
        for packed, scores in zip(part, self.policy.score(part, trained_only=True), strict=True):
            for number, start, stop in zip(
                packed.rows, packed.cu_seqlens, packed.cu_seqlens[1:], strict=False
            ):
                own = packed.weight[start:stop] != 0
                found[number] = scores[start:stop][own]
        return found


def packings(path: str) -> dict[str, list[np.ndarray]]:
    """The same rows in microbatches of many, of few and of one, and behind shared prefixes."""
    scorer = Scorer(path)
    try:
        rows = make_group_rows()
        longest = max(len(row.tokens) for row in rows)
        return {
            "many": scorer.logprobs(rows, 4096, False),
            "few": scorer.logprobs(rows, 2 * longest, False),
            "shared": scorer.logprobs(rows, 4096, True),
            "alone": [scorer.logprobs([row], 4096, False)[0] for row in rows],
        }
    finally:
        scorer.mesh.close()


def moments(path: str, bitwise: bool) -> list[np.ndarray]:
    """The first ones, after a step: the gradient, but for a factor."""
    scorer = Scorer(path, bitwise)
    try:
        part = scorer.part(make_group_rows(), 256, True)
        scorer.policy.train_step(part, token_loss("ppo", {}), lambda: None)
        return [values for _, values in pieces_of(scorer.policy, "exp_avg/")]
    finally:
        scorer.mesh.close()


def answers(path: str, rows: list[Row]) -> list[np.ndarray]:
    """What the trainer says of tokens that an engine has sampled."""
    scorer = Scorer(path)
    try:
        return scorer.logprobs(rows, 2048, True)
    finally:
        scorer.mesh.close()
