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
    partial               only the first part of a head's numbers is rotated
    biases                of the output projection, the router and the experts, which clamp, too
    sinks                 of each head a score that no key has, in the sum of its softmax
    fused                 files have all experts of a layer in one tensor, transposed
    mla, q_lora           latent attention; queries come through a low rank as well
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rft.ground.errors import ConfigError, refuse_all

SUPPORTED: dict[str, frozenset[str]] = {
    "LlamaForCausalLM": frozenset(),
    "Qwen2ForCausalLM": frozenset({"qkv_bias"}),
    "Qwen3ForCausalLM": frozenset({"qk_norm"}),
    "Qwen3MoeForCausalLM": frozenset({"qk_norm", "experts"}),
    "MistralForCausalLM": frozenset({"window"}),
    "MixtralForCausalLM": frozenset({"window", "experts", "w123"}),
    "Qwen2MoeForCausalLM": frozenset({"experts", "gated_shared"}),
    "Glm4MoeForCausalLM": frozenset({"experts", "sigmoid", "shared", "partial"}),
    # of Kimi-K2 as well
    "DeepseekV3ForCausalLM": frozenset({"experts", "sigmoid", "shared", "mla"}),
    "GptOssForCausalLM": frozenset({"qkv_bias", "window", "experts", "biases", "sinks", "fused"}),
}
FULL, SLIDING = "full_attention", "sliding_attention"
# what a config.json must say: of every model, of those with a feature (and, behind a minus, without
# another). Where it is not there, transformers takes a number of its own
SAID = {
    "": "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size "
    "rms_norm_eps max_position_embeddings",
    "window -w123": "sliding_window",
    "experts": "num_experts_per_tok",
    "experts -w123 -biases": "moe_intermediate_size",
    "gated_shared": "shared_expert_intermediate_size",
    "sigmoid": "n_shared_experts first_k_dense_replace",
    "mla": "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "routed_scaling_factor n_group topk_group",
}
OTHER_THETA = ("w123", "sinks")  # than 10000, where none is given
ROPE_TYPES = {  # with what each needs
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings",
}
_BY_LENGTH = "its angles follow the longest sequence of a batch, which trainer and engine differ in"
ROPE_REASONS = {"dynamic": _BY_LENGTH, "longrope": _BY_LENGTH}


def architecture_of(hf: dict[str, Any]) -> str:
    """The one supported name in `architectures`; raises ConfigError for any other model."""
    name = family_of(hf)
    if name not in SUPPORTED:
        raise ConfigError(
            f"model.model_path: architecture {name} is not supported; use one of "
            f"{', '.join(sorted(SUPPORTED))}"
        )
    return name


def family_of(hf: dict[str, Any]) -> str:
    """As `architecture_of`, of any model."""
    return str((hf.get("architectures") or ["<none>"])[0])


def num_experts(hf: dict[str, Any]) -> int:
    """Of every layer that has any; 0 where MLPs are dense. transformers 5 writes it under another
    name than version 4.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next((hf[name] for name in names if hf.get(name)), 0))


def routing_of(hf: dict[str, Any]) -> tuple[int, int, int]:
    """(layers that have experts, experts that a token takes, experts): what routes are of; zeros
    where MLPs are dense.
    """
    experts = num_experts(hf)
    if not experts:
        return 0, 0, 0
    layers = int(hf["num_hidden_layers"]) - len(dense_layers(hf))
    return layers, int(hf["num_experts_per_tok"]), experts


def route_bytes(hf: dict[str, Any]) -> int:
    """Of a token, in an experience."""
    layers, chosen, experts = routing_of(hf)
    return layers * chosen * (1 if experts < 2**8 else 2)


def expert_width(hf: dict[str, Any]) -> int:
    """Of one expert's MLP; 0 where there are none."""
    by_it = features_of(hf).isdisjoint(("w123", "biases"))
    key = "moe_intermediate_size" if by_it else "intermediate_size"
    return int(hf[key]) if num_experts(hf) else 0


def sums_to_one(hf: dict[str, Any]) -> bool:
    """Whether the weights of the chosen experts are divided by their sum."""
    always = not features_of(hf).isdisjoint(("w123", "biases"))
    return always or bool(hf.get("norm_topk_prob"))


def shared_width(hf: dict[str, Any]) -> int:
    """Of the expert that every token takes; 0 where there is none."""
    features = features_of(hf)
    if "shared" in features:
        return int(hf["moe_intermediate_size"]) * int(hf["n_shared_experts"])
    return int(hf["shared_expert_intermediate_size"]) if "gated_shared" in features else 0


def features_of(hf: dict[str, Any]) -> frozenset[str]:
    """What sets this model apart, by its family and its config.json."""
    family = family_of(hf)
    is_glm = family == "Glm4MoeForCausalLM"
    more = {
        "dense": bool(dense_layers(hf)),
        "q_lora": family == "DeepseekV3ForCausalLM" and hf.get("q_lora_rank"),
        "qk_norm": is_glm and hf.get("use_qk_norm"),
        "qkv_bias": (family == "Qwen2MoeForCausalLM" and hf.get("qkv_bias", True))
        or (is_glm and hf.get("attention_bias")),
    }
    return SUPPORTED.get(family, frozenset()) | {name for name, has in more.items() if has}


def dense_layers(hf: dict[str, Any]) -> frozenset[int]:
    """Those of a mixture that have an MLP in place of experts."""
    layers, step = range(int(hf["num_hidden_layers"])), int(hf.get("decoder_sparse_step") or 1)
    between = {layer for layer in layers if (layer + 1) % step}
    between |= set(layers[: int(hf.get("first_k_dense_replace") or 0)])
    return (
        frozenset(between | set(hf.get("mlp_only_layers") or []))
        if num_experts(hf)
        else frozenset()
    )


def window_of(hf: dict[str, Any]) -> int | None:
    """How many tokens a query sees, its own included; None: all before it."""
    return hf.get("sliding_window") if "window" in features_of(hf) else None


def windowed(hf: dict[str, Any]) -> list[int] | None:
    """1 for every layer that has the window, 0 for the others; None: all have it."""
    if "sinks" not in features_of(hf):
        return None
    layers = range(int(hf["num_hidden_layers"]))
    kinds = hf.get("layer_types") or [(FULL, SLIDING)[(layer + 1) % 2] for layer in layers]
    return [int(kind == SLIDING) for kind in kinds]


def rope_of(hf: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta`, `rope_type` and the type's own numbers: transformers 5 nests them, version 4
    spread them.
    """
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
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
        f"model.model_path: config.json has {one}. Use another model, or see docs/models.md"
        for one in _refused(hf)
    )
    return hf


def has_latent_attention(path: str | Path) -> bool:
    """A model directory of any family, also of those that rft does not train."""
    file = Path(path) / "config.json"
    return file.exists() and "kv_lora_rank" in json.loads(file.read_text(encoding="utf-8"))


def _refused(hf: dict[str, Any]) -> Iterator[str]:
    """What is asked for and not computed, each with its reason."""
    if unsaid := ", ".join(_unsaid(hf)):
        yield f"no {unsaid}: write there what the model was made with"
        return
    features, rope = features_of(hf), rope_of(hf)
    if rope_of({**hf, "rope_parameters": None}) != rope and hf.get("rope_scaling"):
        yield (
            "rope_scaling beside other rope_parameters, which transformers forgets then, rope_theta"
            " too: write everything into rope_parameters"
        )
    if (kind := rope["rope_type"]) not in ROPE_TYPES:
        known = f"known: {', '.join(ROPE_TYPES)}"
        yield f"rope_type {kind}, which is not supported ({ROPE_REASONS.get(kind, known)})"
    if absent := [name for name in ROPE_TYPES.get(kind, "").split() if not rope.get(name)]:
        yield f"rope_type {kind} without {' and '.join(absent)}"
    if kind == "yarn" and rope.get("attention_factor") is not None:
        yield "rope_type yarn with an attention_factor: rft has the one that follows from factor"
    if "mla" in features:
        yield from _latent_refused(hf)
    if rotated_share(hf) != 1.0 and "partial" not in features:
        yield f"partial_rotary_factor {rotated_share(hf)}, which this family has not"
    layer_types = set(hf.get("layer_types") or []) - {FULL}
    if "sinks" in features:
        layer_types -= {SLIDING}
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
    if sums_to_one(hf) and hf.get("num_experts_per_tok") == 1:
        yield "one expert per token and norm_topk_prob: its weight is 1, and no router learns"
    if hf.get("mlp_only_layers") and "experts" not in features:
        yield "dense layers among those of experts, and no experts"
    elif len(dense_layers(hf)) == int(hf["num_hidden_layers"]):
        yield "experts, and no layer that has them"
    if "sigmoid" in features:
        yield from _router_refused(hf)
    if "biases" in features and not {"beta_fast", "beta_slow"} <= rope.keys():
        yield "no beta_fast and beta_slow of yarn, which vLLM wants in this family"
    if "biases" in features and float(hf.get("rms_norm_eps", 1e-5)) != 1e-5:
        yield f"rms_norm_eps={hf['rms_norm_eps']}: vLLM computes 1e-5 in this family"
    if "biases" in features and float(hf.get("swiglu_alpha", 1.702)) != 1.702:
        yield f"swiglu_alpha={hf['swiglu_alpha']}: Megatron computes 1.702"
    if hf.get("hidden_act", "silu") != "silu":
        yield f"hidden_act={hf['hidden_act']}: rft computes silu"


def fits(features: frozenset[str], of: str) -> bool:
    """Whether they have all words of `of`, and none of those behind a minus."""
    return all((word.removeprefix("-") in features) != word.startswith("-") for word in of.split())


def _unsaid(hf: dict[str, Any]) -> Iterator[str]:
    features = SUPPORTED[family_of(hf)]
    for of, names in SAID.items():
        yield from (name for name in names.split() if name not in hf and fits(features, of))
    if "experts" in features and not num_experts(hf):
        yield "num_experts"
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if "rope_theta" not in {**hf, **rope} and not features.isdisjoint(OTHER_THETA):
        yield "rope_theta"


def rotated_share(hf: dict[str, Any]) -> float:
    """Of a head's numbers, which part the rotary embedding turns."""
    usual = 0.5 if "partial" in features_of(hf) else 1.0
    return float(rope_of(hf).get("partial_rotary_factor", hf.get("partial_rotary_factor", usual)))


def _latent_refused(hf: dict[str, Any]) -> Iterator[str]:
    kind, heads = rope_of(hf)["rope_type"], hf["num_attention_heads"]
    if kind not in ("default", "yarn"):
        yield f"rope_type {kind} with latent attention, for which rft has default and yarn"
    if hf.get("rope_interleave") is False:
        yield "rope_interleave=false: Megatron rotates neighbouring numbers in latent attention"
    if hf.get("num_key_value_heads", heads) not in (heads, None):
        yield f"num_key_value_heads other than its {heads} heads, with latent attention"
    if (method := hf.get("topk_method")) != "noaux_tc":
        yield (
            f"topk_method={method}: vLLM reads the router's correction bias where it is noaux_tc; "
            "set it, if the weights have that bias"
        )
    if not num_experts(hf) or int(hf.get("moe_layer_freq") or 1) != 1:
        yield "latent attention without experts in every layer behind the first dense ones"


def _router_refused(hf: dict[str, Any]) -> Iterator[str]:
    """Of routers that score by sigmoid. megatron-core divides the weights by their sum whenever it
    chooses several, and takes a group's best k / groups experts for it where others take two.
    """
    chosen, groups = int(hf["num_experts_per_tok"]), int(hf.get("topk_group") or 1)
    if not sums_to_one(hf):
        yield "norm_topk_prob=false, and Megatron divides weights of these experts by their sum"
    if int(hf.get("n_group") or 1) > 1 and chosen // groups != 2:
        yield (
            f"num_experts_per_tok={chosen} of topk_group={groups} groups: Megatron ranks groups by "
            f"their best {chosen // groups} experts, and the model by their best 2"
        )
    if (kind := hf.get("scoring_func", "sigmoid")) != "sigmoid":
        yield f"scoring_func={kind}: rft computes sigmoid in this family"
