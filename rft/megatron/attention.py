"""Core attention over packed sequences with torch's own SDPA: runs on any device, with context
parallelism.

Packed tokens [T] are scattered into right-padded batches [b, heads, L, d], attended causally, and
gathered back; one batch per class of similar lengths, so that one long sequence does not pad all
short ones. Padding tokens attend to nothing and come out as 0. With context parallelism every rank
holds two chunks of each sequence: keys and values are gathered with megatron's own operation
(gloo's backward in `torch.distributed.nn` breaks on sub-groups) and masked by position. The index
arrays of a microbatch are built once and serve all layers. Where rows share prefixes
(`rft.data.prefixes`) the queries of a row are its last tokens only, its keys are its whole path.
"""

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rft.data.context_parallel import cp_positions
from rft.data.prefixes import Computed
from rft.ground.device import attention_dtype


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


@dataclass(frozen=True)
class KernelPacking:
    """The same for Transformer Engine's kernels, and, where rows share prefixes, which tokens are
    the keys of each row's whole path, int64 [K].
    """

    sequences: PackedSeqParams
    keys: Tensor | None


def plan(computed: Computed, cp_rank: int, cp: int, device: torch.device) -> dict[str, Any]:
    """`batches` and `gather` of a `Packing` for the tokens that this rank computes."""
    bounds = computed.bounds
    starts, sizes = bounds[:-1].astype(np.int64), np.diff(bounds).astype(np.int64)
    reach = np.diff(computed.key_bounds).astype(np.int64)
    gather = np.full(computed.length, -1, dtype=np.int64)
    batches: list[PaddedBatch] = []
    done = 0
    for chosen in _classes(sizes, reach):
        width = int(sizes[chosen].max())
        slots = np.arange(width)
        used = slots < sizes[chosen, None]  # [b, Lq]
        queries = np.where(used, starts[chosen, None] + slots, starts[chosen, None])
        gather[queries[used]] = done + np.flatnonzero(used)
        done += used.size
        keys, mask = queries, None
        if cp > 1:
            keys, allowed = _cp_keys(queries, used, sizes[chosen], computed.length, cp_rank, cp)
            mask = torch.from_numpy(allowed[:, None]).to(device)
        elif computed.source is not None:
            keys = _path_keys(computed.source, computed.key_bounds[chosen], reach[chosen])
            if (sizes[chosen] < reach[chosen]).any():
                mask = _behind(reach[chosen] - sizes[chosen], width, keys.shape[1], device)
        batches.append(
            PaddedBatch(
                queries=torch.from_numpy(queries.reshape(-1)).to(device),
                keys=torch.from_numpy(keys.reshape(-1)).to(device),
                mask=mask,
                shape=(len(chosen), width, keys.shape[1]),
            )
        )
    gather[gather < 0] = done
    return {"batches": tuple(batches), "gather": torch.from_numpy(gather).to(device)}


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


def _behind(before: np.ndarray, rows: int, columns: int, device: torch.device) -> Tensor:
    """What is added to the scores [b, 1, rows, columns] of queries that come behind `before` keys:
    0, or -inf for keys behind the query's own.
    """
    keys = torch.arange(columns, device=device)
    last = torch.from_numpy(before).to(device)[:, None] + torch.arange(rows, device=device)
    hidden = keys > last[..., None]
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
    return mask[:, None]


def _cp_keys(
    queries: np.ndarray, used: np.ndarray, sizes: np.ndarray, length: int, cp_rank: int, cp: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keys of all ranks side by side [b, cp * Lq] and which of them each query may see [b, Lq, cp *
    Lq].

    Gathered token j of rank r stands at r * length + j. A query without a token sees key 0, or its
    softmax would be NaN.
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
    mask = key_positions[:, None, :] <= positions[cp_rank][:, :, None]
    mask[:, :, 0] |= ~used
    return keys, mask


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
        key, value, kind = key.squeeze(1), value.squeeze(1), attn_mask_type
        if thd.keys is not None:
            key, value = key.index_select(0, thd.keys), value.index_select(0, thd.keys)
            kind = BehindPrefix.padding_causal_bottom_right
        out = self.kernel(query.squeeze(1), key, value, None, kind, packed_seq_params=thd.sequences)
        return out.reshape(len(out), 1, -1)


class PackedAttention(nn.Module):
    """megatron's core_attention: query [T, 1, heads, d], key and value
    [T, 1, groups, d] -> [T, 1, heads * d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ):
        super().__init__()
        self.scale = softmax_scale
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
        tokens, _, heads, size = query.shape
        # padding only: 0, but connected, so that backward runs on every rank alike
        if not packed_seq_params.batches:
            return (query * 0).view(tokens, 1, heads * size) + 0 * (key.sum() + value.sum())
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.cp > 1:
            both = torch.cat([k, v], dim=1).contiguous()
            k, v = gather_from_sequence_parallel_region(both, group=self.cp_group).chunk(2, dim=1)
        outputs = [self._attend(q, k, v, batch) for batch in packed_seq_params.batches]
        outputs.append(q.new_zeros(1, heads * size))
        gather = packed_seq_params.gather
        assert gather is not None
        return torch.cat(outputs).index_select(0, gather).view(tokens, 1, heads * size)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: PaddedBatch) -> Tensor:
        b, rows, columns = batch.shape
        heads, groups, size = q.shape[1], k.shape[1], q.shape[2]
        query = q.index_select(0, batch.queries).view(b, rows, heads, size).transpose(1, 2)
        key = k.index_select(0, batch.keys).view(b, columns, groups, size).transpose(1, 2)
        value = v.index_select(0, batch.keys).view(b, columns, groups, size).transpose(1, 2)
        dtype = attention_dtype(q)
        out = F.scaled_dot_product_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            attn_mask=_of_type(batch.mask, dtype),
            is_causal=batch.mask is None,
            scale=self.scale,
            enable_gqa=heads != groups,
        )
        return out.to(q.dtype).transpose(1, 2).reshape(b * rows, heads * size)


def _of_type(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """One that is added has the type of the scores."""
    return mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
