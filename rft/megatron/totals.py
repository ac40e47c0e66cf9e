"""Sums and maxima of one step over tokens, microbatches and ranks, reduced once.

In: scores (log-probabilities or values) and fields of each microbatch on the last pipeline stage.
Out: the loss to differentiate, and at the end a dictionary of floats that is the same on every
rank. Names ending in ":max" are maxima over the trained tokens, all others means over them. In a
step with expert rows, names that begin with "expert/" are means over the tokens of those, and all
others over the rest. Of a policy's loss also the sums of weights and of weighted advantages, and
how far its gradient is from the one that every policy loss has where nothing has moved (`_pulled`).
Invariant: sums stay where the scores are until the step ends; the host waits for no device between
two microbatches.
"""

from dataclasses import fields as fields_of
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rft.algorithm.fields import Fields

if TYPE_CHECKING:
    from rft.algorithm.fields import TokenLoss
    from rft.megatron.mesh import Mesh

MAX, EXPERT = ":max", "expert/"


class Totals:
    """`counts`: whether what this rank adds is counted (one rank of each tensor-parallel group on
    the last stage). `lacking`: fields that no microbatch has. `advised`: scores are
    log-probabilities, which advantages push.
    """

    def __init__(
        self,
        token_loss: "TokenLoss",
        counts: bool,
        lacking: tuple[str, ...] = (),
        device: torch.device | None = None,
        advised: bool = False,
    ):
        self.advised = advised
        self.token_loss = token_loss
        self.counts = counts
        # Earlier pipeline stages never see a token's loss, yet must take part in the reduction: one
        # empty call names all.
        nothing, own = (
            torch.zeros(1),
            {"sequence": torch.zeros(1).long(), "sequences": 1, "reduced": None},
        )
        example = (
            {field.name: nothing for field in fields_of(Fields) if field.name not in lacking}
            | {"mask": nothing > 0}
            | own
        )
        names = sorted(token_loss(nothing, Fields(**example))[1])
        self.means = [name for name in names if not name.endswith(MAX)]
        self.tops = [name for name in names if name.endswith(MAX)]
        self.sums = torch.zeros(3 + len(self.means), dtype=torch.float64, device=device)
        # weights, weighted advantages times log-probabilities, squares of the former, and of what
        # the gradient lacks of them
        self.pushes = torch.zeros(4, dtype=torch.float64, device=device)
        self.maxima = torch.full((len(self.tops),), -torch.inf, dtype=torch.float64, device=device)

    def add(self, scores: Tensor, fields: Fields) -> Tensor:
        """The microbatch's weighted loss, with gradient; its metrics are added up."""
        losses, metrics = self.token_loss(scores, fields)
        nothing = torch.zeros((), dtype=losses.dtype, device=losses.device)
        loss = torch.where(fields.mask, losses * fields.weight, nothing).sum()
        if self.counts:
            with torch.no_grad():
                self._count(loss, metrics, fields)
            if self.advised and scores.requires_grad:
                scores.register_hook(partial(self._pulled, fields))
        return loss

    def _pulled(self, fields: Fields, gradient: Tensor) -> None:
        """At the log-probabilities, on its way into the model. Of a policy loss it is -weight *
        advantage where the policy is the one that sampled: REINFORCE (Williams 1992).
        """
        weight = fields.weight.where(fields.mask, 0.0).double()
        push = weight * fields.advantage
        values = (weight, push * fields.behaviour, push**2, (gradient + push) ** 2)
        self.pushes += torch.stack([value.sum() for value in values])

    def _count(self, loss: Tensor, metrics: dict[str, Tensor], fields: Fields) -> None:
        """Of a microbatch without trained tokens, nothing but zeros."""
        sampled = fields.mask if fields.expert is None else fields.mask & (fields.expert == 0)
        expert = fields.mask & ~sampled
        self.sums[:3] += torch.stack([loss.double(), fields.mask.sum(), expert.sum()])
        if self.means:
            values = torch.stack([metrics[name] for name in self.means]).double()
            over = [expert if name.startswith(EXPERT) else sampled for name in self.means]
            self.sums[3:] += values.where(torch.stack(over), 0.0).sum(1)
        if self.tops:
            values = torch.stack([metrics[name] for name in self.tops]).double()
            tops = values.where(sampled, -torch.inf).amax(1)
            self.maxima = torch.maximum(self.maxima, tops)

    def reduce(self, mesh: "Mesh") -> dict[str, float]:
        """Over all ranks, once per step.

        A step without trained tokens has means and maxima of 0.
        """
        there = torch.cat([self.pushes, self.sums, self.maxima]).cpu()
        count = len(self.pushes) + len(self.sums)
        reduced, maxima = there[:count], there[count:]
        mesh.reduce(reduced, maxima)
        weight, push, squares, apart, loss, tokens, expert, *sums = reduced.tolist()
        metrics = {"loss": loss, "num_tokens": tokens}
        if squares:
            metrics |= {"loss/weight": weight, "loss/advantage": push}
            metrics["drift/gradient"] = sqrt(apart / squares)
        for name, total in zip(self.means, sums, strict=True):
            metrics[name] = total / max(expert if name.startswith(EXPERT) else tokens - expert, 1.0)
        tops = maxima.tolist() if tokens > expert else [0.0] * len(self.tops)
        return metrics | {
            name.removesuffix(MAX): top for name, top in zip(self.tops, tops, strict=True)
        }
