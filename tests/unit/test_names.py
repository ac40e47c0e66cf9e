"""The table of rules as arithmetic: shards made by the layout equations, and what is refused."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.config import ConfigError, MegatronConfig
from rft.config.layout import check_bias_updates, check_layout
from rft.data.packing import Cost
from rft.ground.names import (
    RULES,
    SUPPORTED,
    Dims,
    bind,
    file_shapes,
    fused_name,
    hf_names,
    hf_shape,
    is_expert,
    read_hf_config,
    rope_of,
    segments,
)

HF: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "intermediate_size": 16,
    "vocab_size": 21,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def dims(**changes: Any) -> Dims:
    return Dims.of(HF | changes)


def written(
    kind: Any,
    names: tuple[str, ...],
    whole: list[np.ndarray],
    d: Dims,
    rank: int,
    size: int,
    rows: int,
) -> np.ndarray:
    """The shard that `segments` describes."""
    shape = (
        (rows, *whole[0].shape[1:])
        if kind != "row"
        else (whole[0].shape[0], whole[0].shape[1] // size)
    )
    out = np.full(shape, -1.0)
    for s in segments(kind, names[0], d, rank, size):
        source = np.take(whole[s.part], range(s.start, s.stop), axis=s.dim)
        if s.dim == 0:
            out[s.local : s.local + len(source)] = source
        else:
            out[:, s.local : s.local + source.shape[1]] = source
    return out


# (key/value groups, tensor-parallel size): the packed rows must divide, check_layout refuses the
# others
LEGAL = [
    (g, t)
    for g in (1, 2, 4, 8)
    for t in (1, 2, 4, 8)
    if (dims().heads + 2 * g) * dims().head_size % t == 0
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("groups", "size"), LEGAL)
def test_qkv_shards_are_chunks_of_the_packed_groups(groups: int, size: int, bias: bool) -> None:
    d = dims(num_key_value_heads=groups)
    n, hd = d.heads // groups, d.head_size
    names = bind(
        "decoder.layers.0.self_attention.linear_qkv." + ("bias" if bias else "weight"), 0
    ).hf
    q, k, v = (
        np.random.default_rng(i).normal(size=hf_shape("qkv", i, name, d))
        for i, name in enumerate(names)
    )
    parts = [q.reshape(groups, n * hd, -1), k.reshape(groups, hd, -1), v.reshape(groups, hd, -1)]
    packed = np.concatenate(parts, axis=1).reshape(groups * (n + 2) * hd, -1)
    for rank, chunk in enumerate(np.split(packed, size)):
        found = written("qkv", names, [q, k, v], d, rank, size, len(chunk))
        assert np.array_equal(found.reshape(chunk.shape), chunk)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_other_shards_follow_their_equations(size: int) -> None:
    d = dims()
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, d.ffn, d.hidden))
    down = rng.normal(size=(d.hidden, d.ffn))
    embedding = rng.normal(size=(d.vocab, d.hidden))
    padded = np.concatenate([embedding, np.full((d.padded_vocab(size) - d.vocab, d.hidden), -1.0)])
    for t in range(size):
        wanted = np.concatenate([np.split(gate, size)[t], np.split(up, size)[t]])
        assert np.array_equal(
            written("gate_up", ("gate", "up"), [gate, up], d, t, size, len(wanted)), wanted
        )
        assert np.array_equal(
            written("row", ("down_proj",), [down], d, t, size, 0), np.split(down, size, axis=1)[t]
        )
        rows = np.split(padded, size)[t]
        assert np.array_equal(
            written("vocab", ("embed",), [embedding], d, t, size, len(rows)), rows
        )


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_cover_every_element_once(size: int) -> None:
    for groups in (1, 2, 4, 8):
        d = dims(num_key_value_heads=groups, head_dim=4)
        for rule in RULES:
            if (
                rule.kind == "replicated"
                or is_expert(rule.hf[0])
                or (d.heads + 2 * groups) * d.head_size % size
            ):
                continue
            counts = [
                np.zeros(hf_shape(rule.kind, part, name, d), dtype=int)
                for part, name in enumerate(rule.hf)
            ]
            for rank in range(size):
                for s in segments(rule.kind, rule.hf[0], d, rank, size):
                    counts[s.part][(slice(None),) * s.dim + (slice(s.start, s.stop),)] += 1
            assert all((count == 1).all() for count in counts), rule


def test_names_bind_with_the_stage_offset_and_for_both_specs() -> None:
    assert bind("decoder.layers.1.mlp.linear_fc1.weight", 2).hf == (
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
    )
    local = bind("decoder.layers.0.pre_mlp_layernorm.weight", 0)
    assert local == bind("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", 0)
    assert bind("decoder.layers.0.input_layernorm.weight", 0) == bind(
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", 0
    )
    assert bind("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", 3, 4).hf == (
        "model.layers.3.mlp.experts.5.down_proj.weight",
    )
    assert bind("decoder.layers.0.mlp.experts.linear_fc1.weight1", 3, 4) == bind(
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", 3, 4
    )
    with pytest.raises(KeyError, match="shared_experts"):
        bind("decoder.layers.0.mlp.shared_experts.linear_fc3.weight", 0)


def test_every_family_has_its_own_tensors() -> None:
    names = {family: set(hf_names(dims(), family)) for family in SUPPORTED}
    assert (
        "model.layers.3.self_attn.q_proj.bias"
        in names["Qwen2ForCausalLM"] - names["LlamaForCausalLM"]
    )
    assert (
        "model.layers.0.self_attn.q_norm.weight"
        in names["Qwen3ForCausalLM"] - names["Qwen2ForCausalLM"]
    )
    assert "lm_head.weight" in names["LlamaForCausalLM"]
    assert "lm_head.weight" not in hf_names(dims(tie_word_embeddings=True), "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("sizes", "ranks", "text"),
    [
        ({"tensor_model_parallel_size": 3}, 3, "8 attention heads"),
        ({"pipeline_model_parallel_size": 3}, 3, "4 layers"),
        ({"tensor_model_parallel_size": 2}, 3, "num_ranks=3"),
        ({"context_parallel_size": 2, "pipeline_model_parallel_size": 2}, 2, "num_ranks=2"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(
    sizes: dict[str, int], ranks: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        check_layout(HF, MegatronConfig(**sizes), ranks)
    assert "trainer." in str(error.value)


def test_indivisible_groups_and_ffn_are_refused() -> None:
    with pytest.raises(ConfigError, match="30 rows of queries"):
        check_layout(HF | {"num_key_value_heads": 1}, MegatronConfig(4), 4)
    with pytest.raises(ConfigError, match="3 key/value heads"):
        check_layout(
            HF | {"num_attention_heads": 12, "num_key_value_heads": 3}, MegatronConfig(2), 2
        )
    with pytest.raises(ConfigError, match="intermediate_size 15"):
        check_layout(HF | {"intermediate_size": 15}, MegatronConfig(2), 2)
    check_layout(HF, MegatronConfig(4, 2, 2), 16)


MOE = HF | {"num_experts": 6, "moe_intermediate_size": 12, "architectures": ["Qwen3MoeForCausalLM"]}


@pytest.mark.parametrize(
    ("hf", "sizes", "ranks", "text"),
    [
        (
            HF,
            {"expert_model_parallel_size": 2},
            2,
            "expert_model_parallel_size=2 needs a model with experts",
        ),
        (HF, {"expert_tensor_parallel_size": 1}, 1, "leave it and expert_tensor_parallel_size out"),
        (
            MOE,
            {"expert_model_parallel_size": 4},
            4,
            "expert_model_parallel_size=4 does not divide the model's 6 experts",
        ),
        (
            MOE,
            {"expert_model_parallel_size": 2},
            3,
            "num_ranks=3 is no multiple of expert tensor x expert",
        ),
        (
            MOE,
            {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 5},
            10,
            "moe_intermediate_size 12",
        ),
        (MOE, {"tensor_model_parallel_size": 2}, 2, "sequence_parallel=false"),
        (
            MOE,
            {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "expert_tensor_parallel_size": 1,
            },
            2,
            "needs expert_model_parallel_size > 1",
        ),
        (
            HF,
            {"virtual_pipeline_model_parallel_size": 2},
            1,
            "needs pipeline_model_parallel_size > 1",
        ),
        (
            HF,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            2,
            "4 layers",
        ),
    ],
)
def test_layouts_of_experts_and_virtual_stages_that_cannot_be_are_refused(
    hf: dict[str, Any], sizes: dict[str, Any], ranks: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        check_layout(hf, MegatronConfig(**sizes), ranks)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"use_sliding_window": True}, "sliding"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_only_layers": [1]}, "dense layers among those of experts"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_a_model_that_is_not_implemented_is_refused(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF | changes), encoding="utf-8")
    with pytest.raises(ConfigError, match=text):
        read_hf_config(tmp_path)


MIXTURE = {"vocab_size": 32000, "num_experts_per_tok": 8, "norm_topk_prob": True, **HF}
GLM_AIR = MIXTURE | {
    "architectures": ["Glm4MoeForCausalLM"],
    **{"hidden_size": 4096, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
    **{"intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"vocab_size": 151552, "attention_bias": True, "use_qk_norm": False, "topk_group": 1},
    **{"partial_rotary_factor": 0.5, "n_group": 1, "num_nextn_predict_layers": 1},
}
DEEPSEEK = MIXTURE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    **{"hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
    **{"n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3},
    **{
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
    },
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128, "vocab_size": 129280},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "head_dim": None},
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_parameters": None},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        **{"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
KIMI = DEEPSEEK | {
    **{"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64},
    **{"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"vocab_size": 163840},
}
MISTRAL = HF | {
    "architectures": ["MistralForCausalLM"],
    **{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None},
    **{"intermediate_size": 14336, "vocab_size": 32000, "num_hidden_layers": 32},
    "sliding_window": None,
}
MIXTRAL = MISTRAL | {
    **{"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
}
GPT_OSS = HF | {
    "architectures": ["GptOssForCausalLM"],
    **{"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
    **{"intermediate_size": 2880, "num_hidden_layers": 24, "vocab_size": 201088},
    **{"num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True},
    **{"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12},
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
        **{"rope_theta": 150000, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
}
QWEN2_MOE = MIXTURE | {
    "architectures": ["Qwen2MoeForCausalLM"],
    **{"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": None},
    **{"intermediate_size": 5632, "moe_intermediate_size": 1408, "num_hidden_layers": 24},
    **{"shared_expert_intermediate_size": 5632, "num_experts": 60, "vocab_size": 151936},
}


@pytest.mark.parametrize(
    ("hf", "has_adapter", "text"),
    [(MOE, False, "GLM-4.5, DeepSeek-V3"), (GLM_AIR, True, "leave one of the two out")],
)
def test_biases_that_would_not_move_are_refused(
    hf: dict[str, Any], has_adapter: bool, text: str
) -> None:
    check_bias_updates(0.0, Dims.of(hf), has_adapter)
    check_bias_updates(1e-3, Dims.of(GLM_AIR), False)
    with pytest.raises(ConfigError, match=text):
        check_bias_updates(1e-3, Dims.of(hf), has_adapter)


@pytest.mark.parametrize(
    ("hf", "billions"),
    [  # as published, without layers for multi-token prediction
        pytest.param(MISTRAL, 7.242, id="Mistral-7B"),
        pytest.param(MIXTRAL, 46.70, id="Mixtral-8x7B"),
        pytest.param(QWEN2_MOE, 14.316, id="Qwen1.5-MoE-A2.7B"),
        pytest.param(GLM_AIR, 106.85, id="GLM-4.5-Air"),
        pytest.param(GPT_OSS, 20.915, id="gpt-oss-20b"),
        pytest.param(DEEPSEEK, 671.03, id="DeepSeek-V3"),
        pytest.param(KIMI, 1026.4, id="Kimi-K2"),
    ],
)
def test_published_models_have_as_many_parameters(
    tmp_path: Path, hf: dict[str, Any], billions: float
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    found = read_hf_config(tmp_path)
    shapes = hf_names(Dims.of(found), found["architectures"][0])
    assert sum(map(prod, shapes.values())) == pytest.approx(billions * 1e9, rel=1e-4)


@pytest.mark.parametrize(
    ("hf", "changes", "text"),
    [
        (DEEPSEEK, {"quantization_config": {"quant_method": "fp8"}}, r"\(fp8\).* make a bf16 copy"),
        (DEEPSEEK, {"topk_method": "greedy"}, "correction bias where it is noaux_tc"),
        (DEEPSEEK, {"rope_interleave": False}, "rotates neighbouring numbers"),
        (DEEPSEEK, {"topk_group": 2}, "best 4 experts, and the model by their best 2"),
        (DEEPSEEK, {"norm_topk_prob": False}, "divides weights of these experts"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK, {"rope_scaling": {"type": "linear", "factor": 2}}, "default and yarn"),
        (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4"}}, r"\(mxfp4\)"),
        (GPT_OSS, {"layer_types": ["chunked_attention"] * 24}, "sliding-window"),
        (GPT_OSS, {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        (GPT_OSS, {"rms_norm_eps": 1e-6}, "vLLM computes 1e-5"),
        (GPT_OSS, {"rope_parameters": {"rope_theta": 1.5e5}}, "beta_fast and beta_slow"),
        (GLM_AIR, {"scoring_func": "softmax"}, "scoring_func=softmax"),
        (MISTRAL, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (MISTRAL, {"rope_parameters": {"rope_type": "dynamic"}}, "longest sequence of a batch"),
        (MISTRAL, {"rope_parameters": {"rope_type": "longrope"}}, "longest sequence of a batch"),
        (MISTRAL, {"rope_parameters": {"rope_type": "yarn"}}, "without factor and original_max"),
        (MISTRAL, {"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "without factor"),
        (
            MISTRAL,
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "rope_type llama3 without low_freq_factor and high_freq_factor",
        ),
        (MIXTRAL, {"num_experts_per_tok": 1}, "no router learns"),
        (QWEN2_MOE, {"decoder_sparse_step": 25}, "no layer that has them"),
        (QWEN2_MOE, {"use_sliding_window": True}, "sliding"),
        (
            MISTRAL,
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0}
                | {"original_max_position_embeddings": 4096},
            },
            "rope_scaling beside other rope_parameters, which transformers forgets",
        ),
    ],
)
def test_what_a_family_has_not_is_refused_with_its_reason(
    tmp_path: Path, hf: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf | changes), encoding="utf-8")
    with pytest.raises(ConfigError, match=text):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("hf", "name"),
    [
        (MISTRAL, "hidden_size"),
        (MISTRAL, "rms_norm_eps"),
        (MISTRAL, "sliding_window"),
        (MIXTRAL, "rope_theta"),
        (MIXTRAL, "num_experts_per_tok"),
        (GLM_AIR, "first_k_dense_replace"),
        (DEEPSEEK, "routed_scaling_factor"),
        (DEEPSEEK, "kv_lora_rank"),
        (QWEN2_MOE, "num_experts"),
    ],
)
def test_what_transformers_would_take_of_its_own_must_be_said(
    tmp_path: Path, hf: dict[str, Any], name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    assert read_hf_config(tmp_path) == hf
    gone = (name, "rope_parameters") if name == "rope_theta" else (name,)
    less = {key: value for key, value in hf.items() if key not in gone}
    (tmp_path / "config.json").write_text(json.dumps(less), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"config.json has no {name}: write there what"):
        read_hf_config(tmp_path)


def test_rotary_parameters_may_be_there_in_both_spellings(tmp_path: Path) -> None:
    """As long as they say the same."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    both = MISTRAL | {"rope_parameters": rope, "rope_scaling": {"type": "linear", **rope}}
    (tmp_path / "config.json").write_text(json.dumps(both), encoding="utf-8")
    read_hf_config(tmp_path)


@pytest.mark.parametrize("hf", [MISTRAL, MIXTRAL, QWEN2_MOE, GLM_AIR, GPT_OSS, DEEPSEEK])
def test_a_token_costs_the_matrices_that_it_meets(hf: dict[str, Any]) -> None:
    found, met = Dims.of(hf), 0.0
    share = hf["num_experts_per_tok"] / found.experts if found.experts else 1.0
    for name, shape in hf_names(found, found.family).items():
        if len(shape) == 2 and name != "model.embed_tokens.weight":
            met += prod(shape) * (share if is_expert(name) else 1)
    assert Cost.of(hf).linear == pytest.approx(2 * met, rel=1e-9)


def test_experts_of_fused_files_lie_where_their_names_say() -> None:
    """Every element of a file's tensor is one expert's, and its shape is that of files."""
    found = Dims.of(GPT_OSS | {"hidden_size": 6, "intermediate_size": 4, "num_local_experts": 2})
    shapes, parts = file_shapes(found, found.family), hf_names(found, found.family)
    stem = "model.layers.3.mlp.experts."
    assert shapes[f"{stem}gate_up_proj"] == (2, 6, 8) and shapes[f"{stem}down_proj"] == (2, 4, 6)
    assert fused_name(f"{stem}1.up_proj.bias") == (f"{stem}gate_up_proj_bias", 1, "up")
    assert sum(map(prod, shapes.values())) == sum(map(prod, parts.values()))


def test_no_directory_and_no_json_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="parse"):
        read_hf_config(tmp_path)


def test_rope_is_read_in_both_spellings() -> None:
    assert rope_of(HF) == {"rope_type": "default", "rope_theta": 1e6}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_of(old) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
