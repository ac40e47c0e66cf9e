"""What a model's config.json says: its family, the features that set it apart, and all that rft
does not train, refused by name.

In: a Hugging Face config. Out: features (words that `rft.ground.names` gives tensors by, and
`rft.megatron.model` fields of Megatron's config), rotary parameters, sizes that families spell
differently; or one ConfigError with every reason. Neither torch nor megatron. Invariant: a config
that passes is computed as transformers and vLLM do, with nothing left out.

    qkv_bias, qk_norm     of the projections q, k and v; of each head's queries and keys
    window                attention sees the last `sliding_window` tokens, where config.json has it
    experts               a mixture of them; `dense`: in some layers an MLP instead
    w123                  Mixtral's names: `block_sparse_moe`, and w1, w2, w3 for gate, down, up
    sigmoid               the router scores by sigmoid, and chooses by score + correction bias
    shared, gated_shared  an expert that every token takes; times a gate of its own
    mla, q_lora           latent attention; queries come through a low rank as well
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.ground.errors import ConfigError, refuse_all

SUPPORTED: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": frozenset(),
    "Qwen2ForCausalLM": frozenset({"qkv_bias"}),
    "Qwen3ForCausalLM": frozenset({"qk_norm"}),
    "Qwen3MoeForCausalLM": frozenset({"qk_norm", "experts"}),
    "MistralForCausalLM": frozenset({"window"}),
}
ROPE_TYPES = ("default", "linear", "llama3")
_BY_LENGTH = "its angles follow the longest sequence of a batch, which trainer and engine differ in"
ROPE_REASONS = {"dynamic": _BY_LENGTH, "longrope": _BY_LENGTH}


def architecture_of(hf: dict[str, Any]) -> str:
    """The one supported name in `architectures`; raises ConfigError for any other model."""
    name = (hf.get("architectures") or ["<none>"])[0]
    if name not in SUPPORTED:
        raise ConfigError(
            f"model.model_path: architecture {name} is not supported; use one of "
            f"{', '.join(sorted(SUPPORTED))}"
        )
    return name


def num_experts(hf: dict[str, Any]) -> int:
    """Of every layer that has any; 0 where MLPs are dense. transformers 5 writes it under another
    name than version 4.
    """
    return int(hf.get("num_experts") or hf.get("num_local_experts") or 0)


def window_of(hf: dict[str, Any]) -> int | None:
    """How many tokens a query sees, its own included; None: all before it."""
    return hf.get("sliding_window") if "window" in SUPPORTED[architecture_of(hf)] else None


def rope_of(hf: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and the type's own numbers: transformers 5 nests them, version 4
    spread them.
    """
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    return rope


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model directory, checked to be a model that rft can train."""
    file = Path(path) / "config.json"
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.model_path={path}: cannot read config.json ({error.strerror}); "
            "give the directory of a Hugging Face checkpoint"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"model.model_path={path}: config.json does not parse: {error}"
        ) from error
    architecture_of(hf)
    refuse_all(
        f"model.model_path: config.json has {one}; use another model" for one in _refused(hf)
    )
    return hf


def _refused(hf: dict[str, Any]) -> Iterator[str]:
    """What is asked for and not computed, each with its reason."""
    features, rope = SUPPORTED[architecture_of(hf)], rope_of(hf)
    if (kind := rope["rope_type"]) not in ROPE_TYPES:
        known = f"known: {', '.join(ROPE_TYPES)}"
        yield f"rope_type {kind}, which is not supported ({ROPE_REASONS.get(kind, known)})"
    if rotated_share(hf) != 1.0:
        yield f"partial_rotary_factor {rotated_share(hf)}, which this family has not"
    layer_types = set(hf.get("layer_types") or []) - {"full_attention"}
    if hf.get("use_sliding_window") or layer_types:
        yield "layers of sliding-window attention, which this family's have not in rft"
    if hf.get("quantization_config"):
        method = dict(hf["quantization_config"]).get("quant_method", "quantised")
        yield (
            f"quantization_config ({method}): rft trains bf16 and fp32 weights; take or make a "
            "bf16 copy of the checkpoint, without this entry"
        )
    if hf.get("mlp_bias"):
        yield "mlp_bias, which no family of rft has"
    if hf.get("attention_bias") and "qkv_bias" not in features:
        yield "attention_bias, which this family has not in rft"
    if hf.get("norm_topk_prob") and hf.get("num_experts_per_tok") == 1:
        yield "norm_topk_prob with one expert per token: its weight is always 1, and never learns"
    if hf.get("mlp_only_layers") or int(hf.get("decoder_sparse_step") or 1) != 1:
        yield "dense layers among those of experts, which this family has not in rft"
    if hf.get("hidden_act", "silu") != "silu":
        yield f"hidden_act={hf['hidden_act']}: rft computes silu"


def rotated_share(hf: dict[str, Any]) -> float:
    """Of a head's numbers, which part the rotary embedding turns."""
    return float(rope_of(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)))
