"""Log-probabilities of labels and entropies over a vocabulary cut across tensor-parallel ranks,
with their gradients.

In: hidden states h [T, H] of the last layer, this rank's rows W [V'/tp, H] of the output layer, and
per token t the label y, the temperature and whether it is trained. Out, in fp32 and the same on
every rank of the group:

    z = h W^T / temperature        log p = z - log sum exp z        logprob = log p[y]
            entropy = -sum p log p

    d logprob / d z = onehot(y) - p                d entropy / d z = -p (log p + entropy)

No tensor of all tokens by all of the vocabulary ever exists: z is made in tiles of some columns for
all tokens, and again in backward, where a tile gives its rows of W's gradient in one product and
its share of h's. (Tiles of columns, not of tokens: those would add up W's whole gradient once per
tile.) What is done to a tile beside the products are few passes: softmax over its own columns,
which backward scales by the tile's share of the whole. Forward keeps running sums and reduces them
over ranks once. Columns of the padding beyond the true vocabulary are never computed, nor is a
token that is not trained.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from rft.ground.device import logit_columns
from rft.megatron import bitwise

APART = 1e-2  # of a norm; the noise of fp32 is below 1e-5, that of the TF32 of a GPU below 2e-3


class _Sums:
    """Per token over the columns seen so far: the top z, sum e^(z
    - top), sum (z - top) e^(z - top).
    """

    def __init__(self, top: Tensor, total: Tensor, weighted: Tensor) -> None:
        self.top, self.total, self.weighted = top, total, weighted

    @classmethod
    def none(cls, like: Tensor) -> "_Sums":
        # The lowest finite number and not -inf: it is multiplied by sums of 0.
        return cls(
            torch.full_like(like, torch.finfo(like.dtype).min),
            torch.zeros_like(like),
            torch.zeros_like(like),
        )

    @classmethod
    def of(cls, z: Tensor, spare: Tensor) -> "_Sums":
        """Destroys z; `spare` is memory of its size."""
        top = z.amax(1)
        # One kernel for what would be three passes over z, one of them a slow exp; the largest p is
        # 1 / total.
        p = torch.softmax(z.sub_(top[:, None]), 1, out=spare)
        total = p.amax(1).reciprocal_()
        return cls(top, total, z.mul_(p).sum(1) * total)

    def normaliser(self) -> Tensor:
        return self.top + self.total.log()

    def raise_to(self, top: Tensor) -> None:
        shift = self.top - top
        factor = shift.exp()
        self.weighted = factor * (self.weighted + shift * self.total)
        self.total = factor * self.total
        self.top = top

    def add(self, other: "_Sums") -> None:
        top = torch.maximum(self.top, other.top)
        self.raise_to(top)
        other.raise_to(top)
        self.total += other.total
        self.weighted += other.weighted


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local: Tensor,
        temperature: Tensor,
        width: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        """`local`: the label as a row of `weight`, anything outside if another rank has it;
        `width`: rows not padding.
        """
        temperature = temperature.to(_precise(hidden))
        sums = _Sums.none(temperature)
        chosen = torch.zeros_like(temperature)
        spare = _buffer(temperature, len(hidden), width)
        ctx.normalisers = []  # of each tile
        for columns, z in _tiles(hidden, weight, temperature, width):
            inside, index = _within(local, columns)
            chosen += torch.where(inside, z.gather(1, index).squeeze(1), 0.0)
            tile = _Sums.of(z, _shaped(spare, z.shape))
            ctx.normalisers.append(tile.normaliser())
            sums.add(tile)
        if group.size() > 1:
            top = sums.top.clone()
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            sums.raise_to(top)
            parts = torch.stack([sums.total, sums.weighted, chosen])
            dist.all_reduce(parts, group=group)
            sums.total, sums.weighted, chosen = parts.unbind()
        normaliser = sums.normaliser()
        entropy = sums.total.log() - sums.weighted / sums.total
        ctx.save_for_backward(hidden, weight, local, temperature, normaliser, entropy)
        ctx.width = width
        ctx.set_materialize_grads(False)
        return chosen - normaliser, entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, local, temperature, normaliser, entropy = ctx.saved_tensors
        linear = torch.zeros_like(temperature) if of_logprob is None else of_logprob / temperature
        curved = None if of_entropy is None else of_entropy / temperature
        grad_hidden = torch.zeros(hidden.shape, dtype=temperature.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        if grad_weight is not None:
            grad_weight[ctx.width :] = 0
        spare = _buffer(temperature, len(hidden), ctx.width)
        tiles = _tiles(hidden, weight, temperature, ctx.width)
        for own, (columns, z) in zip(ctx.normalisers, tiles, strict=True):
            p, share = torch.softmax(z, 1, out=_shaped(spare, z.shape)), (own - normaliser).exp()
            if curved is None:
                grad = p.mul_((-share * linear)[:, None])
            else:
                slope = z.add_((entropy - normaliser)[:, None]).mul_((-share * curved)[:, None])
                grad = p.mul_(slope.sub_((share * linear)[:, None]))
            inside, index = _within(local, columns)
            grad.scatter_add_(1, index, torch.where(inside, linear, 0.0)[:, None])
            grad = grad.to(weight.dtype)
            if grad_hidden.dtype == weight.dtype:
                grad_hidden.addmm_(grad, weight[columns])
            else:
                grad_hidden += grad @ weight[columns]
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[columns])
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


class _BitwiseLogprobs(_LabelLogprobs):
    """Of whole rows of logits, as an engine computes them; the gradient is that of tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local: Tensor,
        temperature: Tensor,
        width: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        _, entropy = _LabelLogprobs.forward(ctx, hidden, weight, local, temperature, width, group)
        return bitwise.label_logprobs(hidden, weight[:width], local, temperature), entropy


def _tiles(
    hidden: Tensor, weight: Tensor, temperature: Tensor, width: int
) -> Iterator[tuple[slice, Tensor]]:
    """(columns, z [T, n]) from left to right; the next tile overwrites the memory of the last."""
    buffer = _buffer(temperature, len(hidden), width)
    step = _step(temperature, len(hidden), width)
    precise = hidden.dtype == buffer.dtype
    # a pass over h instead of one over z
    scaled = hidden / temperature[:, None] if precise else hidden
    for start in range(0, width, step):
        columns = slice(start, min(start + step, width))
        z = _shaped(buffer, (len(hidden), columns.stop - start))
        if precise:
            torch.mm(scaled, weight[columns].t(), out=z)
        else:
            torch.div(hidden @ weight[columns].t(), temperature[:, None], out=z)
        yield columns, z


def _step(like: Tensor, tokens: int, width: int) -> int:
    return max(1, min(width, logit_columns(like.device, tokens)))


def _buffer(like: Tensor, tokens: int, width: int) -> Tensor:
    return like.new_empty(tokens * _step(like, tokens, width))


def _shaped(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: shape[0] * shape[1]].view(shape)


def _within(local: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Which labels lie in these columns, and [T, 1] their
    places there (any place for the others).
    """
    index = local - columns.start
    last = columns.stop - columns.start - 1
    return (index >= 0) & (index <= last), index.clamp(0, last)[:, None]


def _precise(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    vocab: int,
    group: dist.ProcessGroup,
    sequence_parallel: bool = False,
    trained: Tensor | None = None,
    source: Tensor | None = None,
    to_the_bit: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [L] of `labels` [L] and entropies [L], both 0 but at the rows `trained`.

    `hidden` is [T, H] on every rank of `group`, or its T/tp rows with `sequence_parallel`; `weight`
    is this rank's shard, and `vocab` the true vocabulary size, without padding. `source` [L]: the
    row of `hidden` that predicts each label, some of them several; None: each its own, L = T.
    `to_the_bit`: as an engine's.
    """
    if sequence_parallel:
        whole = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=group
        )
    else:
        whole = copy_to_tensor_model_parallel_region(hidden, group=group)
    first = group.rank() * len(weight)
    width = max(0, min(len(weight), vocab - first))
    if source is not None:
        # its gradient adds up in the order of the labels, on any number of threads
        whole = whole.index_select(0, source if trained is None else source[trained])
    elif trained is not None:
        whole = whole[trained]
    compute = (_BitwiseLogprobs if to_the_bit else _LabelLogprobs).apply
    if trained is None:
        return compute(whole, weight, labels - first, temperature, width, group)
    found = compute(whole, weight, labels[trained] - first, temperature[trained], width, group)
    logprobs, entropy = (
        torch.zeros(len(labels), dtype=t.dtype, device=t.device).index_put((trained,), t)
        for t in found
    )
    return logprobs, entropy


def check_label_logprobs(group: dist.ProcessGroup, device: torch.device) -> None:
    """Before a policy learns: on a few random tokens, whether values and gradients are those of the
    closed form, in this group and on this device. A wrong gradient lowers no number of a run that
    anybody looks at. Raises RuntimeError.
    """
    tokens, width, rows = 6, 8, 10
    generator = torch.Generator().manual_seed(7)
    hidden, weight, pull = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        for shape in ((tokens, width), (rows * group.size(), width), (tokens,))
    )
    labels = torch.randint(len(weight), (tokens,), generator=generator)
    heat = torch.rand(tokens, generator=generator) + 0.5
    whole, mine = hidden.double(), slice(group.rank() * rows, (group.rank() + 1) * rows)
    logits = whole @ weight.double().T / heat[:, None]
    p, chosen = logits.softmax(1), torch.nn.functional.one_hot(labels, len(weight))
    slope = (chosen - p) * (pull / heat)[:, None]
    wanted = (p.log().gather(1, labels[:, None])[:, 0], slope @ weight.double(), slope.T @ whole)
    given = hidden.to(device).requires_grad_(), weight[mine].to(device).requires_grad_()
    found, _ = label_logprobs(
        *given, labels.to(device), heat.to(device), len(weight), group, sequence_parallel=False
    )
    slopes = torch.autograd.grad((found * pull.to(device)).sum(), given)
    for what, one, right in zip(
        ("log-probabilities", "gradients of hidden states", "gradients of the output layer"),
        (found.detach(), *slopes),
        (*wanted[:2], wanted[2][mine]),
        strict=True,
    ):
        error = float((one.double().cpu() - right).norm() / right.norm())
        if not error < APART:
            raise RuntimeError(
                f"{what} are off by {error:.1e} of their norm on {device}, before anything was "
                f"trained: they are computed wrongly here; docs/truth.md"
            )
