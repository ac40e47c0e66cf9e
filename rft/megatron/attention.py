"""Core attention over packed sequences with torch's own SDPA: runs on any device, with context
parallelism.

Packed tokens [T] are scattered into right-padded batches [b, heads, L, d], attended causally, and
gathered back; one batch per class of similar lengths, so that one long sequence does not pad all
short ones. Padding tokens attend to nothing and come out as 0. With context parallelism every rank
holds two chunks of each sequence: keys and values are gathered with megatron's own operation
(gloo's backward in `torch.distributed.nn` breaks on sub-groups) and masked by position. The index
arrays of a microbatch are built once and serve all layers. Where rows share prefixes
(`rft.data.prefixes`) the queries of a row are its last tokens only, its keys are its whole path,
and a batch is of one block of queries, with the keys that those may see.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from rft.data.context_parallel import cp_positions
from rft.data.prefixes import Computed
from rft.ground.device import attention_dtype
from rft.megatron.bitwise import Attended

BLOCK = 128  # queries that go with the same keys, where their rows share a prefix


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences of similar length.

    Indices count local tokens (queries) and gathered tokens (keys).
    """

    # int64 [b * Lq]; slots without a token repeat some valid index, their output is dropped
    queries: Tensor
    keys: Tensor  # int64 [b * Lk]
    # bool [b, 1, Lq, Lk], or what is added to the scores; None: plain causal
    mask: Tensor | None
    shape: tuple[int, int, int]  # b, Lq, Lk
    # the same for layers that see a window of the last tokens; None: it is no narrower than these
    windowed: Tensor | None = None


@dataclass
class Packing(PackedSeqParams):
    """What megatron hands through to every layer as `packed_seq_params`; `qkv_format` keeps its
    hands off q, k and v.
    """

    batches: tuple[PaddedBatch, ...] = ()
    gather: Tensor | None = (
        # int64 [T]: place of each local token in all batches' outputs, one row of 0 at the end
        None
    )
    # float32 [T, 1, 1, d]: rotary angles of the tokens that this rank holds
    frequencies: Tensor | None = None
    thd: "KernelPacking | None" = None
    # [T, layers, top_k]: which experts the tokens go through that a router of this rank sees; None:
    # those that it chooses
    routes: Tensor | None = None
    # float32 [T]: of how many rows each of these is a token, 0: padding; None: nobody asks
    rows: Tensor | None = None


@dataclass(frozen=True)
class KernelPacking:
    """The same for Transformer Engine's kernels, and, where rows share prefixes, which tokens are
    the keys of each row's whole path, int64 [K].
    """

    sequences: PackedSeqParams
    keys: Tensor | None


def plan(
    computed: Computed, cp_rank: int, cp: int, device: torch.device, window: int | None = None
) -> dict[str, Any]:
    """`batches` and `gather` of a `Packing` for the tokens that this rank computes. `window`: how
    many tokens a query sees in layers that have one, itself included.
    """
    bounds = computed.bounds
    starts, sizes = bounds[:-1].astype(np.int64), np.diff(bounds).astype(np.int64)
    reach = np.diff(computed.key_bounds).astype(np.int64)
    gather = np.full(computed.length, -1, dtype=np.int64)
    batches: list[PaddedBatch] = []
    done = 0
    for chosen, first, last in _blocks(sizes, reach):
        width = last - first
        slots = np.arange(first, last)
        used = slots < sizes[chosen, None]  # [b, Lq]
        queries = np.where(used, starts[chosen, None] + slots, starts[chosen, None])
        gather[queries[used]] = done + np.flatnonzero(used)
        done += used.size
        keys, mask, windowed = queries, None, None
        before = reach[chosen] - sizes[chosen] + first
        narrow = window is not None and int(reach[chosen].max()) * cp > window
        if cp > 1:
            keys, apart = _cp_keys(queries, used, sizes[chosen], computed.length, cp_rank, cp)
            mask = _allowed(apart >= 0, used, device)
            windowed = _allowed((apart >= 0) & (apart < window), used, device) if narrow else None
        elif computed.source is not None:
            seen = np.minimum(reach[chosen], before + width)
            keys = _path_keys(computed.source, computed.key_bounds[chosen], seen)
            if before.any():
                mask = _behind(before, width, keys.shape[1], device)
        if narrow and cp == 1:
            windowed = _behind(before, width, keys.shape[1], device, window)
        batches.append(
            PaddedBatch(
                queries=torch.from_numpy(queries.reshape(-1)).to(device),
                keys=torch.from_numpy(keys.reshape(-1)).to(device),
                mask=mask,
                shape=(len(chosen), width, keys.shape[1]),
                windowed=windowed,
            )
        )
    gather[gather < 0] = done
    return {"batches": tuple(batches), "gather": torch.from_numpy(gather).to(device)}


def _blocks(sizes: np.ndarray, reach: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
    """Sequences of one class, and which of their queries: all, or, of those with more keys, blocks
    that need fewer keys than all. A kernel with a mask computes what the mask hides.
    """
    for chosen in _classes(sizes, reach):
        width = int(sizes[chosen].max())
        step = BLOCK if (sizes[chosen] < reach[chosen]).any() else width
        for first in range(0, width, step):
            there = chosen[sizes[chosen] > first]
            yield there, first, min(first + step, int(sizes[there].max()))


def _classes(sizes: np.ndarray, reach: np.ndarray) -> list[np.ndarray]:
    """Sequences grouped so that padding to the longest of a group at most doubles the short ones,
    in their queries and in their keys; those with more keys than queries apart.
    """
    rounded = [np.ceil(np.log2(np.maximum(n, 8))) for n in (sizes, reach)]
    classes = np.stack([*rounded, sizes < reach])
    found = np.unique(classes[:, sizes > 0], axis=1)
    return [np.flatnonzero((classes == one[:, None]).all(0) & (sizes > 0)) for one in found.T]


def _path_keys(source: np.ndarray, starts: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """The tokens of each row's whole path [b, Lk], the first again where it is shorter."""
    slots = np.arange(int(reach.max()))
    found: np.ndarray = source[
        np.where(slots < reach[:, None], starts[:, None] + slots, starts[:, None])
    ]
    return found


def _behind(
    before: np.ndarray, rows: int, columns: int, device: torch.device, window: int | None = None
) -> Tensor:
    """What is added to the scores [b, 1, rows, columns] of queries that come behind `before` keys:
    0, or -inf for keys behind the query's own, and for those that its window has left.
    """
    keys = torch.arange(columns, device=device)
    last = torch.from_numpy(before).to(device)[:, None] + torch.arange(rows, device=device)
    hidden = keys > last[..., None]
    if window is not None:  # slots without a token see the last keys, or their softmax were NaN
        hidden |= keys <= last.clamp(max=columns - 1)[..., None] - window
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
    return mask[:, None]


def _cp_keys(
    queries: np.ndarray, used: np.ndarray, sizes: np.ndarray, length: int, cp_rank: int, cp: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys of all ranks side by side [b, cp * Lq] and how far before each query they stand [b, Lq,
    cp * Lq], below 0 for those that come later or are padding.

    Gathered token j of rank r stands at r * length + j.
    """
    width = queries.shape[1]
    positions = np.zeros((cp, len(sizes), width), dtype=np.int64)
    for rank in range(cp):
        for i, n in enumerate(sizes.tolist()):
            positions[rank, i, :n] = cp_positions(np.array([0, n]), rank, cp)
    keys = np.concatenate([queries + rank * length for rank in range(cp)], axis=1)
    key_positions = np.concatenate(
        [np.where(used, positions[rank], 1 << 40) for rank in range(cp)], axis=1
    )
    return keys, positions[cp_rank][:, :, None] - key_positions[:, None, :]


def _allowed(mask: np.ndarray, used: np.ndarray, device: torch.device) -> Tensor:
    """A query without a token sees key 0, or its softmax would be NaN."""
    mask[:, :, 0] |= ~used
    return torch.from_numpy(mask[:, None]).to(device)


class BehindPrefix(enum.Enum):
    """Transformer Engine's name for queries that are the last of their keys; megatron's own
    enumeration of masks has none.
    """

    padding_causal_bottom_right = enum.auto()


class KernelAttention(nn.Module):
    """Transformer Engine's attention, as `PackedAttention`: positions are already in query and key,
    so megatron need not know where sequences begin.
    """

    def __init__(self, config: TransformerConfig, **given: Any):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__()
        self.kernel = TEDotProductAttention(config=config, **given)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Tensor:
        thd = packed_seq_params.thd
        assert thd is not None
        query, key, value = (one.view(len(one), *one.shape[-2:]) for one in (query, key, value))
        kind = attn_mask_type
        if thd.keys is not None:
            key, value = key.index_select(0, thd.keys), value.index_select(0, thd.keys)
            kind = BehindPrefix.padding_causal_bottom_right
        out = self.kernel(query, key, value, None, kind, packed_seq_params=thd.sequences)
        return out.reshape(len(out), 1, -1)


class PackedAttention(nn.Module):
    """megatron's core_attention: query [T, 1, heads, d], key [T, 1, groups, d] and value [T, 1,
    groups, e] -> [T, 1, heads * e].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ):
        super().__init__()
        self.scale = softmax_scale
        self.is_windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.sinks = config.softmax_type == "learnable"
        if self.sinks:  # under megatron's name
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = "cpu" if config.use_cpu_initialization else None
            empty = torch.empty(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = nn.Parameter(empty)
        self.cp_group = pg_collection.cp
        self.cp = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Tensor:
        # latent attention has left out the dimension of 1
        q, k, v = (each.view(len(each), *each.shape[-2:]) for each in (query, key, value))
        tokens, heads, size = len(q), q.shape[1], v.shape[2]
        # padding only: 0, but connected, so that backward runs on every rank alike
        if not packed_seq_params.batches:
            nothing = (q[..., :1] * 0).expand(tokens, heads, size).reshape(tokens, 1, -1)
            return nothing + 0 * (sum(p.sum() for p in self.parameters()) + key.sum() + value.sum())
        if self.cp > 1:
            both = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
            widths = k.shape[1] * k.shape[2], v.shape[1] * size
            k, v = (
                part.unflatten(1, (k.shape[1], -1))
                for part in gather_from_sequence_parallel_region(both, group=self.cp_group).split(
                    widths, dim=1
                )
            )
        outputs = [self._attend(q, k, v, batch) for batch in packed_seq_params.batches]
        outputs.append(q.new_zeros(1, heads * size))
        gather = packed_seq_params.gather
        assert gather is not None
        return torch.cat(outputs).index_select(0, gather).view(tokens, 1, heads * size)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: PaddedBatch) -> Tensor:
        b, rows, columns = batch.shape
        heads, groups = q.shape[1], k.shape[1]
        query = q.index_select(0, batch.queries).view(b, rows, heads, -1).transpose(1, 2)
        key = k.index_select(0, batch.keys).view(b, columns, groups, -1).transpose(1, 2)
        value = v.index_select(0, batch.keys).view(b, columns, groups, -1).transpose(1, 2)
        dtype = attention_dtype(q)
        windowed = self.is_windowed and batch.windowed is not None
        mask = batch.windowed if windowed else batch.mask
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        mask = _of_type(mask, dtype)
        if self.sinks:
            out = self._with_sinks(query, key, value, mask)
        else:
            out = self._plain(query, key, value, mask)
        return out.to(q.dtype).transpose(1, 2).reshape(b * rows, -1)

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and query.is_cuda:
            # of torch's kernels there for a mask, the only one that knows groups keeps all scores
            times = query.shape[1] // key.shape[1]
            key, value = (one.repeat_interleave(times, 1) for one in (key, value))
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def _with_sinks(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """A head's sink is the score of one more key, whose value is 0: queries have one more
        number, 1, which meets it there and 0 in all other keys.
        """
        b, heads, rows, size = query.shape
        scale, times = self.scale or size**-0.5, heads // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        sink = (self.softmax_offset.to(query.dtype) / scale).view(1, heads, 1, 1)
        own = F.pad(sink, (size, 0)).expand(b, -1, -1, -1)
        if mask is None:
            mask = query.new_ones(1, 1, rows, key.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(
            F.pad(query, (0, 1), value=1.0),
            torch.cat([F.pad(key, (0, 1)), own], dim=2),
            F.pad(value, (0, 0, 0, 1)),
            attn_mask=F.pad(mask, (0, 1), value=mask.dtype == torch.bool),
            scale=scale,
        )


class BitwiseAttention(PackedAttention):
    """As engines attend that are to have the same bits."""

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        rows, columns = query.shape[2], key.shape[2]
        hidden = query.new_ones(1, rows, columns, dtype=torch.bool).triu(1)
        if mask is not None:
            hidden = mask[:, 0] < 0
        scale = self.scale or query.shape[-1] ** -0.5
        out: Tensor = Attended.apply(query, key, value, hidden, scale)
        return out


def _of_type(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """One that is added has the type of the scores."""
    return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
