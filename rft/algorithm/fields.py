"""What a loss may look at. Pure functions on tensors; importing this loads no torch.

Masks, weights and global counts belong to the caller, so a loss cannot depend on how a batch was
cut. A loss that needs a sum over a whole response asks `Fields.sums` for it: a response may be cut
over context-parallel ranks, and only there it is whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rft.data.packing import Packed

    Losses = tuple[Tensor, dict[str, Tensor]]  # one per token [T] before masking; metrics [T]
    TokenLoss = Callable[[Tensor, "Fields"], Losses]

# those that a loss may look at
SCORES = ("proximal", "reference", "value", "returns", "margin", "expert", "kept")


@dataclass(frozen=True)
class Fields:
    """What a token loss may look at, each [T]; `mask` is True where a token is trained.

    None: this run has no such thing.
    """

    behaviour: "Tensor"  # log-probabilities that the engine recorded
    advantage: "Tensor"
    weight: "Tensor"
    mask: "Tensor"
    proximal: "Tensor | None" = None  # log-probabilities of the policy at the start of the step
    reference: "Tensor | None" = None  # those of the frozen model
    value: "Tensor | None" = None  # what the critic said before the step
    returns: "Tensor | None" = None
    entropy: "Tensor | None" = None  # of the current policy, with gradient
    margin: "Tensor | None" = None  # of the pair that the response belongs to: see `dpo`
    expert: "Tensor | None" = None  # 1 where no policy sampled the token
    kept: "Tensor | None" = None  # 0 where the step leaves the token out: see `outliers`
    # int64: number of the token's sequence in this microbatch, the same on all its ranks
    sequence: "Tensor | None" = None
    sequences: int = 0  # how many numbers there are, that of padding included
    # adds up over the ranks that hold parts of a sequence, with gradient
    reduced: "Callable[[Tensor], Tensor] | None" = None

    @classmethod
    def of(
        cls,
        packed: "Packed",
        tensor: "Callable[[np.ndarray], Tensor]",
        reduced: "Callable[[Tensor], Tensor] | None" = None,
    ) -> "Fields":
        """Those of a microbatch. `tensor`: how an array comes to where the loss is computed."""
        import numpy as np

        lengths, count = np.diff(packed.cu_seqlens), len(packed.cu_seqlens) - 1
        sequence = np.repeat(
            np.arange(count + 1), [*lengths, packed.length - int(packed.cu_seqlens[-1])]
        )
        weight = tensor(packed.weight)
        scores = {name: tensor(packed.scores[name]) for name in SCORES if name in packed.scores}
        return cls(
            tensor(packed.behaviour),
            tensor(packed.advantage),
            weight,
            weight != 0,
            **scores,
            sequence=tensor(sequence),
            sequences=count + 1,
            reduced=reduced,
        )

    @property
    def old(self) -> "Tensor":
        """Log-probabilities that the policy's ratio is taken against."""
        return self.behaviour if self.proximal is None else self.proximal

    def sums(self, *values: "Tensor") -> tuple["Tensor", ...]:
        """At every token, each of `values` [T] summed over the trained tokens of its whole
        sequence. One reduction for all.
        """
        import torch

        assert self.sequence is not None, "this microbatch does not say where its sequences are"
        trained = torch.stack([value.where(self.mask, value.new_zeros(())) for value in values])
        found = trained.new_zeros(len(values), self.sequences).index_add(1, self.sequence, trained)
        if self.reduced is not None:
            found = self.reduced(found)
        return tuple(found[:, self.sequence].unbind())

    def mean(self, value: "Tensor") -> "Tensor":
        """At every token, the mean of `value` over the trained tokens of its sequence; 0 where
        there are none.
        """
        total, count = self.sums(value, self.mask.to(value.dtype))
        mean: Tensor = total / count.clamp(min=1)
        return mean
