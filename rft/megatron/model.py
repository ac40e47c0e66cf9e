"""A Hugging Face config -> this rank's megatron-core `GPTModel`s (the parts of its pipeline stage,
its shards of them).

Two layer specs: our own, of torch modules and `PackedAttention`, which runs on any device; and
Transformer Engine's, taken on CUDA where it is installed. Weights are uninitialised memory:
`weights.load_hf` must fill them. The last stage gives hidden states [1, T, H] and not logits (T/tp
of them under sequence parallel): `logprobs` multiplies them with `output_weight`, tile by tile.
"""

from typing import Any

import numpy as np
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rft.data.prefixes import Computed
from rft.ground.adapters import Lora, beside
from rft.ground.families import rope_of, sums_to_one, window_of, windowed
from rft.ground.names import Dims, Latent, bind
from rft.megatron.attention import (
    BitwiseAttention,
    KernelAttention,
    KernelPacking,
    PackedAttention,
    Packing,
    plan,
)
from rft.megatron.elementwise import gated, root_mean_square
from rft.megatron.kernels import WGRAD, fused, uses_transformer_engine
from rft.megatron.lora_layers import add_adapters, submodules
from rft.megatron.mesh import Mesh
from rft.megatron.rope import Rotary, inverse_frequencies, scale_yarn


class Norm(nn.Module):
    """RMSNorm in fp32.

    Marks its weight, whose gradient megatron must sum over the shards of a sequence-parallel rank.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=_device(config))
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return root_mean_square(x, self.weight, self.eps)


class Gated(MegatronModule):
    """The activation of a gated MLP, where megatron asks its specification for one."""

    def forward(self, both: Tensor) -> Tensor:
        return gated(both)


class WholeLinear(nn.Module):
    """In place of latent attention's projections to low ranks, whole on every shard.

    megatron cuts them by columns where there is no Transformer Engine, and then sums no gradient of
    the rotated key that all heads share. The mark makes it sum that of a sequence-parallel rank.
    """

    def __init__(self, config: TransformerConfig, rows: int):
        super().__init__()
        size = (rows, config.hidden_size)
        self.weight = nn.Parameter(
            torch.empty(size, dtype=config.params_dtype, device=_device(config))
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(input_, self.weight), None


class BiasedRouter(TopKRouter):
    """Chooses experts by score + correction bias, and weighs them by score alone.

    The bias is a parameter that no gradient changes, and not megatron's buffer: so it is loaded,
    sent and saved as weights are. It stays fp32, as in published files.
    """

    def __init__(self, config: TransformerConfig, **given: Any):
        super().__init__(config=config, **given)
        bias = torch.zeros(self.num_experts, dtype=torch.float32, device=_device(config))
        self.expert_bias = nn.Parameter(bias, requires_grad=False)


class CopyingRow(RowParallelLinear):
    """An expert's second layer, where it has a bias: megatron adds that in place, to what may be a
    view that autograd lets nobody change, and marks it for sums over ranks that have other experts.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bias.sequence_parallel = False  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


class OutputLayer(ColumnParallelLinear):
    """Holds the weight of megatron's output layer, under its name and marks, and hands the hidden
    states on.

    It stays a module that is called, for DDP's hooks wait there for a weight that is still being
    gathered.
    """

    def __init__(self, replaced: ColumnParallelLinear):
        super().__init__(
            replaced.input_size,
            replaced.output_size,
            config=replaced.config,
            init_method=replaced.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=replaced.tp_group,
        )
        self.weight = replaced.weight

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        return input_, None


class ValueHead(nn.Module):
    """In place of a critic's output layer: one number per token, in fp32, from a weight [1, H] that
    every shard has whole.

    Under sequence parallelism a rank sees its rows only; the mark makes megatron sum their
    gradients.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.value = nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=_device(config))
        )
        self.value.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        return nn.functional.linear(input_.float(), self.value.float()), None


def output_weight(model: GPTModel) -> Tensor:
    """This rank's rows of the output layer [V'/tp, H], on the last stage: the embedding's where the
    two are tied.
    """
    tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight


def _device(config: TransformerConfig) -> Any:
    return "cpu" if config.use_cpu_initialization else None


def transformer_config(
    hf: dict[str, Any], mesh: Mesh, dtype: torch.dtype, more: dict[str, Any]
) -> TransformerConfig:
    """The fields of megatron's config that this model and mesh decide; everything random is off,
    and everything fused but for what Transformer Engine's layers have, unless in `more`.
    """
    dims, window, on_cpu = Dims.of(hf), window_of(hf), mesh.device.kind == "cpu"
    fields: dict[str, Any] = dict(
        num_layers=dims.layers,
        hidden_size=dims.hidden,
        num_attention_heads=dims.heads,
        num_query_groups=dims.groups,
        kv_channels=dims.head_size,
        ffn_hidden_size=dims.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=float(hf["rms_norm_eps"]),
        qk_layernorm=not dims.features.isdisjoint(("qk_norm", "mla")),
        add_bias_linear=False,
        add_qkv_bias="qkv_bias" in dims.features,
        window_size=(window - 1, 0) if window else None,  # how many before a query it sees
        window_attn_skip_freq=windowed(hf),
        softmax_type="learnable" if "sinks" in dims.features else "vanilla",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        context_parallel_size=mesh.cp,
        sequence_parallel=mesh.sequence_parallel,
        # Losses carry their global weights, so nothing may be averaged over microbatches or
        # data-parallel ranks.
        calculate_per_token_loss=True,
        virtual_pipeline_model_parallel_size=mesh.vpp if mesh.vpp > 1 else None,
        **_experts(hf, mesh),
        # Only p2p of equal shapes: all microbatches of a step are padded to one length.
        variable_seq_lengths=False,
        # Not of virtual stages: of two messages between the same two ranks in one batch, which two
        # stages have, each would be taken for the other.
        batch_p2p_comm=not on_cpu and mesh.vpp == 1,
        deallocate_pipeline_outputs=True,
    )
    if uses_transformer_engine(mesh.device):
        fields |= fused(experts=bool(dims.experts))
    elif not dims.experts and not more.get("bias_activation_fusion"):
        fields["use_te_activation_func"] = True  # that of the specification: `Gated`
    if "biases" in dims.features:
        fields |= {"add_bias_linear": True, "activation_func": quick_gelu, "glu_linear_offset": 1.0}
        fields["activation_func_clamp_value"] = float(hf.get("swiglu_limit") or 7.0)
    made = MLATransformerConfig if "mla" in dims.features else TransformerConfig
    fields |= _latent(hf, dims.latent) if "mla" in dims.features else {}
    # never here: see `kernels.fuse_weight_gradients`
    config = made(**(fields | more | {WGRAD: False}))
    scale_yarn(config, hf)
    return config


def _latent(hf: dict[str, Any], latent: Latent) -> dict[str, Any]:
    """Sizes, and how yarn scales the softmax."""
    rope = rope_of(hf)
    has_yarn = rope["rope_type"] == "yarn"
    return {
        "q_lora_rank": latent.query or None,
        "kv_lora_rank": latent.key_value,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "rope_type": "yarn" if has_yarn else "rope",
        "rotary_scaling_factor": float(rope["factor"]) if has_yarn else 1.0,
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
        # megatron's kernel for latent attention computes angles by itself
        "apply_rope_fusion": False,
    }


def _experts(hf: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """A router as transformers has it: fp32 softmax over all experts, the best k, their sum made 1
    if asked. No auxiliary loss: it would pull the policy to where no reward is.
    """
    dims = Dims.of(hf)
    if not dims.experts:
        return {}
    return {
        "num_moe_experts": dims.experts,
        "moe_ffn_hidden_size": dims.expert_ffn,
        "moe_router_topk": int(hf["num_experts_per_tok"]),
        # after the choice: their sum is 1
        "moe_router_pre_softmax": not sums_to_one(hf),
        **(_sigmoid(hf) if "sigmoid" in dims.features else {}),
        "moe_layer_freq": [int(dims.has_experts(layer)) for layer in range(dims.layers)],
        "moe_shared_expert_intermediate_size": dims.shared_ffn or None,
        "moe_shared_expert_gate": "gated_shared" in dims.features,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": uses_transformer_engine(mesh.device),
        # The other one exchanges unequal numbers of tokens, on streams of the GPU.
        "moe_token_dispatcher_type": "allgather" if mesh.device.kind == "cpu" else "alltoall",
        "expert_model_parallel_size": mesh.place.ep,
        "expert_tensor_parallel_size": mesh.place.etp,
    }


def _sigmoid(hf: dict[str, Any]) -> dict[str, Any]:
    """Scores that are divided by the sum of the chosen ones and scaled, those chosen from a few
    groups of experts.
    """
    groups = int(hf.get("n_group") or 1)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor") or 1.0),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": int(hf["topk_group"]) if groups > 1 else None,
    }


def block_spec(
    config: TransformerConfig, mesh: Mesh, dims: Dims, lora: Lora | None, number: int
) -> TransformerBlockSubmodules:
    """Of part `number` of this pipeline stage."""
    with_engine = uses_transformer_engine(mesh.device)
    first = get_transformer_layer_offset(config, vp_stage=number if mesh.vpp > 1 else None)
    mixed = [
        dims.has_experts(first + layer) for layer in range(config.num_layers // mesh.pp // mesh.vpp)
    ]
    made = _engine_layer if with_engine else _own_layer
    kinds = {kind: made(config, kind) for kind in set(mixed)}
    if mesh.bitwise:
        kinds[False].submodules.self_attention.submodules.core_attention = BitwiseAttention
    if "sigmoid" in dims.features and True in kinds:
        submodules(kinds[True].submodules.mlp).router = BiasedRouter
    if "biases" in dims.features and not with_engine:
        submodules(submodules(kinds[True].submodules.mlp).experts).linear_fc2 = CopyingRow
    for has_experts, layer in kinds.items() if lora else ():
        add_adapters(layer.submodules, has_experts, lora, dims, mesh.place)
    # The block takes its final norm from here; given only layer specs it would take torch's, which
    # refuses sequence parallel.
    return TransformerBlockSubmodules(
        layer_specs=[kinds[kind] for kind in mixed],
        layer_norm=LayerNormImpl if with_engine else Norm,
    )


def _engine_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    """Of Transformer Engine's modules."""
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    layer.submodules.self_attention.submodules.core_attention = KernelAttention
    return layer


def _own_layer(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    if config.use_te_activation_func:
        submodules(parts.mlp).activation_func = Gated
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = Norm
        other = "kv_layernorm" if config.multi_latent_attention else "k_layernorm"
        setattr(attention, other, Norm)
    return layer


def build(
    hf: dict[str, Any],
    mesh: Mesh,
    dtype: torch.dtype,
    more: dict[str, Any],
    is_critic: bool = False,
    lora: Lora | None = None,
) -> list[GPTModel]:
    """This rank's parts of the model, in the model's order, uninitialised: one, or as many as there
    are virtual stages.

    `more`: fields of megatron's config (`overrides.transformer`). The last stage of a critic gives
    values [1, T, 1].
    """
    config = transformer_config(hf, mesh, dtype, more)
    return [_part(hf, config, mesh, number, is_critic, lora) for number in range(mesh.vpp)]


def _part(
    hf: dict[str, Any],
    config: TransformerConfig,
    mesh: Mesh,
    number: int,
    is_critic: bool,
    lora: Lora | None,
) -> GPTModel:
    dims = Dims.of(hf)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, mesh, dims, lora, number),
        vocab_size=dims.padded_vocab(mesh.tp),
        max_sequence_length=int(hf["max_position_embeddings"]),
        pre_process=mesh.is_first_stage and number == 0,
        post_process=mesh.is_last_stage and number == mesh.vpp - 1,
        vp_stage=number if mesh.vpp > 1 else None,
        parallel_output=True,
        share_embeddings_and_output_weights=dims.tied and not is_critic,
        position_embedding_type="rope",
        rotary_base=int(rope_of(hf)["rope_theta"]),
    )
    if model.post_process:
        model.output_layer = ValueHead(config) if is_critic else OutputLayer(model.output_layer)
    if "mla" in dims.features:
        _replace_latent(model, dims.latent)
    _mark_shards(model, dims)
    frequencies = inverse_frequencies(hf).to(mesh.device.torch)
    model.rotary_pos_emb = Rotary(config)
    model.inverse_frequencies = frequencies
    return model.to(device=mesh.device.torch)


def _replace_latent(model: GPTModel, latent: Latent) -> None:
    """megatron takes no other classes than its own for these, so they are put there afterwards."""
    rows = {
        "linear_q_down_proj": latent.query,
        "linear_kv_down_proj": latent.key_value + latent.rope,
    }
    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.rotary_pos_emb = Rotary(attention.config)
        for name, size in rows.items():
            if isinstance(getattr(attention, name, None), ColumnParallelLinear):
                setattr(attention, name, WholeLinear(attention.config, size))


def _mark_shards(model: GPTModel, dims: Dims) -> None:
    """megatron marks weights as tensor-parallel only where it also initialises them; unmarked ones
    would count as copies on all but the first rank, and the gradient norm would miss their shards.
    """
    for name, parameter in model.named_parameters():
        if beside(name):  # they mark themselves
            continue
        bound = bind(name, 0, features=dims.features)
        # an expert's bias is on one rank alone, like the expert
        kind = "column" if bound.is_expert and bound.kind == "replicated" else bound.kind
        if kind == "replicated" and getattr(parameter, "tensor_model_parallel", False):
            parameter.tensor_model_parallel = False  # Transformer Engine marks all of its layers
        if kind != "replicated" and not hasattr(parameter, "partition_dim"):
            stride = 2 if kind == "gate_up" else 1
            set_tensor_model_parallel_attributes(parameter, True, 1 if kind == "row" else 0, stride)


def packing_of(
    computed: Computed,
    model: GPTModel,
    mesh: Mesh,
    routes: np.ndarray | None = None,
    rows: np.ndarray | None = None,
) -> Packing:
    """What every layer must know about a microbatch (already sliced for this context-parallel
    rank). `routes`, `rows`: of the tokens that are computed.
    """
    device, size = mesh.device.torch, model.config.window_size
    window = size[0] + 1 if size else None
    positions = computed.positions.astype(np.float32)
    positions[int(computed.bounds[-1]) :] = 0
    angles = torch.outer(mesh.device.bring(positions), model.inverse_frequencies)
    planned = (
        {"thd": _te_packing(computed, mesh)}
        if uses_transformer_engine(mesh.device)
        else plan(computed, mesh.cp_rank, mesh.cp, device, window)
    )
    return Packing(
        qkv_format="rows",
        frequencies=torch.cat([angles, angles], dim=-1)[:, None, None, :],
        routes=None if routes is None else _own(_signed(routes), mesh),
        rows=None if rows is None else _own(rows, mesh),
        **planned,
    )


def _signed(routes: np.ndarray) -> np.ndarray:
    """torch computes with no unsigned numbers of 16 bits, and -1 stands for none then."""
    return routes.view(np.int16) if routes.dtype == np.uint16 else routes


def _own(values: np.ndarray, mesh: Mesh) -> Tensor:
    """Of the tokens that a router of this rank sees."""
    if mesh.sequence_parallel:
        values = np.ascontiguousarray(np.array_split(values, mesh.tp)[mesh.tp_rank])
    return mesh.device.bring(values)


def _te_packing(computed: Computed, mesh: Mesh) -> KernelPacking:
    """Transformer Engine takes lengths over all context-parallel ranks and has no padding: the tail
    is one more sequence.
    """
    queries, keys, source = computed.bounds.tolist(), computed.key_bounds.tolist(), computed.source
    if padding := computed.length - queries[-1]:
        tail = np.arange(queries[-1], computed.length)
        if source is not None:
            source = np.concatenate([source[: keys[-1]], tail])
        queries, keys = [*queries, computed.length], [*keys, keys[-1] + padding]
    elif source is not None:
        source = source[: keys[-1]]
    bring = mesh.device.bring

    def lengths(bounds: list[int]) -> tuple[Tensor, int]:
        longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False)) * mesh.cp
        return bring(np.array(bounds, dtype=np.int32) * np.int32(mesh.cp)), longest

    cu_seqlens_q, max_seqlen_q = lengths(queries)
    cu_seqlens_kv, max_seqlen_kv = lengths(keys)
    return KernelPacking(
        PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
        ),
        None if source is None else bring(source),
    )
