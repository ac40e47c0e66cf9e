"""Attention and rotary embedding of Transformer Engine in torch, as far as packed sequences go.

Sequences lie one after the other in [T, heads, d]. Under context parallelism a rank has chunks
`rank` and `2 * cp - 1 - rank` of the 2 * cp chunks of each sequence, and `cu_seqlens` count the
tokens of all ranks. What TE asserts, or silently takes for granted, is asserted here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .layers import TransformerEngineBaseModule, _Gather


def _chunks(length: int, rank: int, cp: int) -> Tensor:
    """Positions, in a sequence of this length, of the tokens of a rank."""
    if cp == 1:
        return torch.arange(length)
    assert length % (2 * cp) == 0, f"a sequence of {length} tokens cannot be cut into {2 * cp}"
    size = length // (2 * cp)
    first, second = rank * size, (2 * cp - 1 - rank) * size
    return torch.cat([torch.arange(first, first + size), torch.arange(second, second + size)])


def _lengths(cu_seqlens: Tensor) -> list[int]:
    assert cu_seqlens.dtype == torch.int32 and cu_seqlens.dim() == 1 and int(cu_seqlens[0]) == 0
    lengths = cu_seqlens.diff().tolist()
    assert min(lengths) >= 0
    return lengths


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: Any,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Any = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        assert attention_dropout == 0 and not window_size and softmax_type == "vanilla"
        size = dist.get_world_size(tp_group) if tp_group is not None else tp_size
        self.scale, self.cp_comm_type = softmax_scale, cp_comm_type
        self.heads = num_attention_heads // size
        groups = num_gqa_groups or num_attention_heads
        assert groups % size == 0, "GQA groups must be divisible by the tensor-parallel size"
        self.groups = groups // size
        self.cp_group = None
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: Any = None,
    ) -> None:
        self.cp_group = cp_group

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Any = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor:
        assert query_layer is not None and key_layer is not None and value_layer is not None
        assert qkv_format == "thd" and attention_mask is None
        assert attn_mask_type in ("padding_causal", "padding_causal_bottom_right")
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None
        assert cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None
        behind = attn_mask_type == "padding_causal_bottom_right"
        assert behind or torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert all(item.dim() == 3 for item in (query_layer, key_layer, value_layer))
        assert query_layer.shape[1] == self.heads and key_layer.shape[1] == self.groups
        cp = dist.get_world_size(self.cp_group) if self.cp_group is not None else 1
        rank = dist.get_rank(self.cp_group) if self.cp_group is not None else 0
        lengths, keys = _lengths(cu_seqlens_q), _lengths(cu_seqlens_kv)
        for longest, given in ((max_seqlen_q, lengths), (max_seqlen_kv, keys)):
            assert isinstance(longest, int) and longest >= max(given)
        if behind:
            assert cp == 1, "queries behind longer keys have no context parallelism"
            return self._behind(query_layer, key_layer, value_layer, lengths, keys)
        return self._packed(query_layer, key_layer, value_layer, lengths, rank, cp)

    def _behind(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], keys: list[int]
    ) -> Tensor:
        """The last query of a sequence sees all its keys, the one before all but the last."""
        assert sum(lengths) <= q.shape[0] and sum(keys) <= k.shape[0]
        outputs, start, first = [], 0, 0
        for length, reach in zip(lengths, keys, strict=True):
            assert length <= reach, "a sequence has more queries than keys"
            last = torch.arange(reach - length, reach)
            mask = torch.arange(reach)[None, :] <= last[:, None]
            own = slice(first, first + reach)
            outputs.append(self._attend(q[start : start + length], k[own], v[own], mask))
            start, first = start + length, first + reach
        outputs.append(q.new_full((q.shape[0] - start, self.heads, v.shape[-1]), torch.nan))
        return torch.cat(outputs).flatten(1)

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], rank: int, cp: int
    ) -> Tensor:
        local = q.shape[0]
        assert sum(lengths) <= local * cp, "cu_seqlens go beyond the tokens"
        if cp > 1:
            k, v = _Gather.apply(k, self.cp_group), _Gather.apply(v, self.cp_group)
        outputs, start = [], 0
        for length in lengths:
            own = _chunks(length, rank, cp)
            places = [_chunks(length, r, cp) for r in range(cp)]
            rows = [r * local + start + torch.arange(len(p)) for r, p in enumerate(places)]
            row, place = torch.cat(rows), torch.cat(places)
            mask = place[None, :] <= own[:, None]
            outputs.append(self._attend(q[start : start + len(own)], k[row], v[row], mask))
            start += len(own)
        # real TE leaves tokens behind the last sequence as they were in memory
        outputs.append(q.new_full((local - start, self.heads, v.shape[-1]), torch.nan))
        return torch.cat(outputs).flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if not len(q):
            return q
        times = self.heads // self.groups
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        scale = self.scale if self.scale is not None else q.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """`freqs` [S, 1, 1, d] are angles of positions from 0 on, at least as many as the longest
    sequence has.
    """
    assert start_positions is None and not interleaved
    if tensor_format == "sbhd":
        return _rotate(t, freqs[: t.shape[0]])
    assert tensor_format == "thd" and cu_seqlens is not None and t.dim() == 3
    lengths = _lengths(cu_seqlens)
    assert max(lengths) <= freqs.shape[0], "a sequence is longer than the angles"
    places = torch.cat([_chunks(length, cp_rank, cp_size) for length in lengths])
    assert len(places) == t.shape[0], "cu_seqlens do not cover the tokens"
    return _rotate(t, freqs[places].squeeze(1))


def _rotate(t: Tensor, angles: Tensor) -> Tensor:
    turned, rest = t.float().split([angles.shape[-1], t.shape[-1] - angles.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    crossed = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * angles.cos() + crossed * angles.sin(), rest], dim=-1).to(t.dtype)


COMPUTED = {
    "pytorch": {"DotProductAttention": DotProductAttention},
    "pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
}
