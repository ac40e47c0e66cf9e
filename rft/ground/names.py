"""The Hugging Face <-> Megatron table of rules: pure data and arithmetic, neither torch nor
megatron.

One `WeightRule` per parameter: its kind, its Megatron names (own/local layer spec first, then
Transformer Engine's) and its Hugging Face names. `segments` turns a rule into the places where a
tensor-parallel shard and the HF tensors overlap; import and the blocks of weight sync are two
readings of that one answer. `rft.config.layout` refuses models and mesh sizes that cannot work,
before anything heavy is imported.

Symbols: h hidden, d head size, Hq query heads, G key/value heads, n = Hq/G, I FFN width (of one
expert: Im), E experts, V vocabulary, V' padded vocabulary, T tensor-parallel size, t
tensor-parallel rank. Experts are cut by their own tensor parallelism, and spread over the ranks of
expert parallelism: expert x is number x - e*E/P of rank e of P.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from rft.ground.families import SUPPORTED as SUPPORTED
from rft.ground.families import architecture_of as architecture_of
from rft.ground.families import (
    dense_layers,
    expert_width,
    family_of,
    features_of,
    fits,
    num_experts,
    shared_width,
)
from rft.ground.families import read_hf_config as read_hf_config
from rft.ground.families import rope_of as rope_of

Kind = Literal["qkv", "gate_up", "column", "row", "vocab", "replicated"]
# bytes of an element, by the name that torch and Hugging Face give its type
ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # that name, by the one in a config
# [1, h]: a critic's, under the name that transformers gives the head of a scoring model
VALUE_HEAD = "score.weight"
# the padded vocabulary divides evenly by this times T; small, so that toy vocabularies stay small
VOCAB_MULTIPLE = 8


@dataclass(frozen=True)
class WeightRule:
    """`{layer}` and `{expert}` in a name are global numbers from 0.

    `megatron` lists alternatives, `hf` the parts in order, `of` the features that a family must
    have for it, or, behind a minus, must not.
    """

    kind: Kind
    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    of: str = ""

    def fits(self, features: frozenset[str]) -> bool:
        return fits(features, self.of)


_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_QKV = tuple(_H + f"self_attn.{part}_proj." for part in "qkv")
_GATE_UP = tuple(_H + f"mlp.{part}_proj." for part in ("gate", "up"))
_EM, _EH = _M + "mlp.experts.", _H + "mlp.experts.{expert}."
_FC1 = (_EM + "local_experts.{expert}.linear_fc1.weight", _EM + "linear_fc1.weight{expert}")
_FC2 = (_EM + "local_experts.{expert}.linear_fc2.weight", _EM + "linear_fc2.weight{expert}")
_CORE = _M + "self_attention.core_attention."
_SINKS = (_CORE + "softmax_offset", _CORE + "kernel.softmax_offset")
_SM = _M + "mlp.shared_experts."
_XH, _NAMED = _H + "block_sparse_moe.", "experts -w123"

_LATENT: tuple[tuple[Kind, tuple[str, ...], str, str], ...] = (
    ("column", ("linear_q_proj.weight",), "self_attn.q_proj.weight", "mla -q_lora"),
    ("replicated", ("linear_q_down_proj.weight",), "self_attn.q_a_proj.weight", "q_lora"),
    (
        "replicated",
        ("q_layernorm.weight", "linear_q_up_proj.layer_norm_weight"),
        "self_attn.q_a_layernorm.weight",
        "q_lora",
    ),
    ("column", ("linear_q_up_proj.weight",), "self_attn.q_b_proj.weight", "q_lora"),
    ("replicated", ("linear_kv_down_proj.weight",), "self_attn.kv_a_proj_with_mqa.weight", "mla"),
    (
        "replicated",
        ("kv_layernorm.weight", "linear_kv_up_proj.layer_norm_weight"),
        "self_attn.kv_a_layernorm.weight",
        "mla",
    ),
    ("column", ("linear_kv_up_proj.weight",), "self_attn.kv_b_proj.weight", "mla"),
)

RULES: tuple[WeightRule, ...] = (
    WeightRule("vocab", ("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",)),
    WeightRule(
        "replicated",
        (_M + "input_layernorm.weight", _M + "self_attention.linear_qkv.layer_norm_weight"),
        (_H + "input_layernorm.weight",),
    ),
    WeightRule(
        "qkv",
        (_M + "self_attention.linear_qkv.weight",),
        tuple(name + "weight" for name in _QKV),
        "-mla",
    ),
    *(
        WeightRule(kind, tuple(_M + "self_attention." + one for one in own), (_H + hf,), of)
        for kind, own, hf, of in _LATENT
    ),
    WeightRule(
        "qkv",
        (_M + "self_attention.linear_qkv.bias",),
        tuple(name + "bias" for name in _QKV),
        "qkv_bias",
    ),
    WeightRule(
        "replicated",
        (_M + "self_attention.q_layernorm.weight",),
        (_H + "self_attn.q_norm.weight",),
        "qk_norm",
    ),
    WeightRule(
        "replicated",
        (_M + "self_attention.k_layernorm.weight",),
        (_H + "self_attn.k_norm.weight",),
        "qk_norm",
    ),
    WeightRule(
        "row", (_M + "self_attention.linear_proj.weight",), (_H + "self_attn.o_proj.weight",)
    ),
    WeightRule(
        "replicated",
        (_M + "self_attention.linear_proj.bias",),
        (_H + "self_attn.o_proj.bias",),
        "biases",
    ),
    WeightRule("column", _SINKS, (_H + "self_attn.sinks",), "sinks"),
    WeightRule(
        "replicated",
        (_M + "pre_mlp_layernorm.weight", _M + "mlp.linear_fc1.layer_norm_weight"),
        (_H + "post_attention_layernorm.weight",),
    ),
    WeightRule(
        "gate_up",
        (_M + "mlp.linear_fc1.weight",),
        tuple(name + "weight" for name in _GATE_UP),
        "dense",
    ),
    WeightRule("row", (_M + "mlp.linear_fc2.weight",), (_H + "mlp.down_proj.weight",), "dense"),
    WeightRule(
        "replicated",
        (_M + "mlp.router.weight",),
        (_H + "mlp.gate.weight",),
        "experts -w123 -biases",
    ),
    WeightRule("replicated", (_M + "mlp.router.weight",), (_H + "mlp.router.weight",), "biases"),
    WeightRule("replicated", (_M + "mlp.router.bias",), (_H + "mlp.router.bias",), "biases"),
    WeightRule(
        "gate_up",
        (_EM + "local_experts.{expert}.linear_fc1.bias", _EM + "linear_fc1.bias{expert}"),
        (_EH + "gate_proj.bias", _EH + "up_proj.bias"),
        "biases",
    ),
    WeightRule(
        "replicated",
        (_EM + "local_experts.{expert}.linear_fc2.bias", _EM + "linear_fc2.bias{expert}"),
        (_EH + "down_proj.bias",),
        "biases",
    ),
    WeightRule(
        "replicated",
        (_M + "mlp.router.expert_bias",),
        (_H + "mlp.gate.e_score_correction_bias",),
        "sigmoid",
    ),
    WeightRule("gate_up", _FC1, (_EH + "gate_proj.weight", _EH + "up_proj.weight"), _NAMED),
    WeightRule("row", _FC2, (_EH + "down_proj.weight",), _NAMED),
    WeightRule("replicated", (_M + "mlp.router.weight",), (_XH + "gate.weight",), "w123"),
    WeightRule(
        "gate_up",
        _FC1,
        (_XH + "experts.{expert}.w1.weight", _XH + "experts.{expert}.w3.weight"),
        "w123",
    ),
    WeightRule("row", _FC2, (_XH + "experts.{expert}.w2.weight",), "w123"),
    WeightRule(
        "gate_up",
        (_SM + "linear_fc1.weight",),
        (_H + "mlp.shared_expert.gate_proj.weight", _H + "mlp.shared_expert.up_proj.weight"),
        "gated_shared",
    ),
    WeightRule(
        "row",
        (_SM + "linear_fc2.weight",),
        (_H + "mlp.shared_expert.down_proj.weight",),
        "gated_shared",
    ),
    WeightRule(
        "replicated",
        (_SM + "gate_weight",),
        (_H + "mlp.shared_expert_gate.weight",),
        "gated_shared",
    ),
    WeightRule(
        "gate_up",
        (_SM + "linear_fc1.weight",),
        (_H + "mlp.shared_experts.gate_proj.weight", _H + "mlp.shared_experts.up_proj.weight"),
        "shared",
    ),
    WeightRule(
        "row", (_SM + "linear_fc2.weight",), (_H + "mlp.shared_experts.down_proj.weight",), "shared"
    ),
    WeightRule("replicated", ("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    WeightRule("vocab", ("output_layer.weight",), ("lm_head.weight",)),
    WeightRule("replicated", ("output_layer.value",), (VALUE_HEAD,)),
)


@dataclass(frozen=True)
class Latent:
    """Ranks and sizes of latent attention: a head's query and key have `nope` numbers and `rope`
    that are rotated, of which the key's are the same in all heads; `query` 0: of no low rank.
    """

    query: int
    key_value: int
    nope: int
    rope: int
    value: int

    @classmethod
    def of(cls, hf: dict[str, Any]) -> "Latent":
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        return cls(*(int(hf[name] or 0) for name in (*names, "v_head_dim")))

    def shape(self, name: str, dims: "Dims") -> tuple[int, ...]:
        """Of the tensor of this name, which latent attention alone has."""
        rows = self.key_value + self.rope
        return {
            "q_proj": (dims.heads * dims.head_size, dims.hidden),
            "q_a_proj": (self.query, dims.hidden),
            "q_a_layernorm": (self.query,),
            "q_b_proj": (dims.heads * dims.head_size, self.query),
            "kv_a_proj_with_mqa": (rows, dims.hidden),
            "kv_a_layernorm": (self.key_value,),
            "kv_b_proj": (dims.heads * (self.nope + self.value), self.key_value),
            "o_proj": (dims.hidden, dims.heads * self.value),
        }[name.split(".")[-2]]


# matrices that tensor parallelism leaves whole, beside those of routers
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate")
NO_LATENT = Latent(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Dims:
    """The sizes that the layout equations need."""

    hidden: int
    heads: int
    groups: int
    head_size: int
    ffn: int
    vocab: int
    layers: int
    tied: bool
    experts: int = 0  # 0: every MLP is dense
    expert_ffn: int = 0
    shared_ffn: int = 0  # of the expert that every token takes
    dense: frozenset[int] = frozenset()  # layers of a mixture that have an MLP instead
    latent: Latent = NO_LATENT
    ahead: int = 0  # layers behind the last that predict further tokens: in files, in no model
    family: str = ""  # a key of `SUPPORTED`
    more: frozenset[str] = frozenset()  # features that not all of the family have

    @classmethod
    def of(cls, hf: dict[str, Any]) -> "Dims":
        heads, features = int(hf["num_attention_heads"]), features_of(hf)
        latent = Latent.of(hf) if "mla" in features else NO_LATENT
        size = latent.nope + latent.rope or hf.get("head_dim") or hf["hidden_size"] // heads
        return cls(
            family=family_of(hf),
            more=features - SUPPORTED.get(family_of(hf), frozenset()),
            latent=latent,
            hidden=int(hf["hidden_size"]),
            heads=heads,
            groups=int(hf.get("num_key_value_heads") or heads),
            head_size=int(size),
            ffn=int(hf["intermediate_size"]),
            vocab=int(hf["vocab_size"]),
            layers=int(hf["num_hidden_layers"]),
            tied=bool(hf.get("tie_word_embeddings", False)),
            experts=num_experts(hf),
            expert_ffn=expert_width(hf),
            shared_ffn=shared_width(hf),
            dense=dense_layers(hf),
            ahead=int(hf.get("num_nextn_predict_layers") or 0),
        )

    @property
    def features(self) -> frozenset[str]:
        return SUPPORTED.get(self.family, frozenset()) | self.more

    @property
    def value_size(self) -> int:
        """Of a head."""
        return self.latent.value or self.head_size

    def has_experts(self, layer: int) -> bool:
        return bool(self.experts) and layer not in self.dense

    def padded_vocab(self, tp: int) -> int:
        multiple = VOCAB_MULTIPLE * tp
        return -(-self.vocab // multiple) * multiple


@dataclass(frozen=True)
class ShardSlice:
    """Rows (dim 0) or columns (dim 1) [start, stop) of HF part
    `part` lie in the shard from `local` on.
    """

    part: int
    dim: int
    start: int
    stop: int
    local: int


@dataclass(frozen=True)
class BoundRule:
    """A rule applied to one Megatron parameter: its kind and the HF
    names with layer and expert filled in.
    """

    kind: Kind
    hf: tuple[str, ...]

    @property
    def is_expert(self) -> bool:
        """Of one expert: it is cut and copied by the sizes of the expert layers."""
        return is_expert(self.hf[0])


def is_expert(hf_name: str) -> bool:
    return ".experts." in hf_name


FUSED_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def fused_name(hf_name: str) -> tuple[str, int, str] | None:
    """Of an expert's tensor: the one of all experts that it is a part of in files, its expert, and
    which part it is: `gate` and `up`, whose columns alternate, or `down`. Weights are transposed.
    """
    if not (found := FUSED_EXPERT.fullmatch(hf_name)):
        return None
    stem, expert, part, kind = found.groups()
    fused = "down_proj" if part == "down" else "gate_up_proj"
    return f"{stem}.{fused}{'_bias' if kind == 'bias' else ''}", int(expert), part


def file_shapes(dims: "Dims", architecture: str) -> dict[str, tuple[int, ...]]:
    """As `hf_names`, under the names and with the shapes that files have."""
    shapes = hf_names(dims, architecture)
    if "fused" not in dims.features:
        return shapes
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if (fused := fused_name(name)) is None:
            found[name] = shape
        else:
            *columns, rows = reversed(shape)
            found[fused[0]] = (dims.experts, *columns, rows * (1 if fused[2] == "down" else 2))
    return found


def is_ahead(hf_name: str, dims: Dims) -> bool:
    """Of a layer for multi-token prediction: not trained, and carried through to an export."""
    found = re.match(r"model\.layers\.(\d+)\.", hf_name)
    return found is not None and 0 <= int(found[1]) - dims.layers < dims.ahead


@dataclass(frozen=True)
class Place:
    """One rank, as far as it decides which weights are there; pipeline stages show in the layers of
    a model.

    Experts: rank `ep_rank` of `ep` has every E/ep of them, cut `etp` ways. `copy` of `copies` ranks
    that hold the same shards, of dense layers (data and context parallelism) and of experts (which
    have fewer).
    """

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0
    copy: int = 0
    copies: int = 1
    expert_copy: int = 0
    expert_copies: int = 1

    def first_expert(self, dims: Dims) -> int:
        return self.ep_rank * (dims.experts // self.ep)

    def segments(self, bound: BoundRule, dims: Dims) -> list[ShardSlice]:
        rank, size = (self.etp_rank, self.etp) if bound.is_expert else (self.tp_rank, self.tp)
        return segments(bound.kind, bound.hf[0], dims, rank, size)

    def copy_of(self, bound: BoundRule) -> tuple[int, int] | None:
        """Which of how many ranks that hold this shard of the parameter this one is; None: a rank
        of another shard counts for it, as it does for what tensor parallelism does not cut.
        """
        rank = self.etp_rank if bound.is_expert else self.tp_rank
        if bound.kind == "replicated" and rank:
            return None
        if bound.is_expert:
            return self.expert_copy, self.expert_copies
        return self.copy, self.copies


LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
EXPERT = re.compile(
    r"(?<=mlp\.experts\.local_experts\.)\d+|(?<=mlp\.experts\.linear_fc[12]\.weight)\d+"
    r"|(?<=mlp\.experts\.linear_fc[12]\.bias)\d+"
)


def bind(
    name: str, first_layer: int, first_expert: int = 0, features: frozenset[str] = frozenset()
) -> BoundRule:
    """The rule for a Megatron parameter name whose layers and experts are numbered from
    `first_layer` and `first_expert` on (pipeline stages and expert-parallel ranks count from 0).

    `features`: of the model; they choose where families give one parameter several names.
    """
    numbers = {}
    for what, pattern, first in (("layer", LAYER, first_layer), ("expert", EXPERT, first_expert)):
        if match := pattern.search(name):
            numbers[what] = int(match[0]) + first
            name = f"{name[: match.start()]}{{{what}}}{name[match.end() :]}"
    found = [rule for rule in RULES if name in rule.megatron]
    for rule in [rule for rule in found if rule.fits(features)] or found:
        return BoundRule(rule.kind, tuple(part.format(**numbers) for part in rule.hf))
    raise KeyError(
        f"no rule for Megatron parameter {name.format(**numbers)}; add one to "
        "rft.ground.names.RULES"
    )


def hf_shape(kind: Kind, part: int, name: str, dims: Dims) -> tuple[int, ...]:
    """Shape of HF part number `part` of a rule; `name` tells weights from biases and norms of a
    head from the others.
    """
    if name == VALUE_HEAD:
        return (1, dims.hidden)
    if "mla" in dims.features and ".self_attn." in name:
        return dims.latent.shape(name, dims)
    ffn = dims.expert_ffn if is_expert(name) else dims.ffn
    if ".shared_expert" in name:
        ffn = dims.shared_ffn
    if kind == "replicated":
        if name.endswith("shared_expert_gate.weight"):
            return (1, dims.hidden)
        if name.endswith("e_score_correction_bias"):
            return (dims.experts,)
        if name.endswith(".router.bias"):
            return (dims.experts,)
        if name.endswith((".gate.weight", ".router.weight")):
            return (dims.experts, dims.hidden)
        return (
            (dims.head_size,)
            if name.endswith(("q_norm.weight", "k_norm.weight"))
            else (dims.hidden,)
        )
    if name.endswith(".sinks"):
        return (dims.heads,)
    if kind == "vocab":
        return (dims.vocab, dims.hidden)
    if kind == "row":
        return (dims.hidden, dims.heads * dims.head_size if "o_proj" in name else ffn)
    if kind == "qkv":
        rows = (dims.heads if part == 0 else dims.groups) * dims.head_size
    else:
        rows = ffn
    return (rows,) if name.endswith(".bias") else (rows, dims.hidden)


def segments(kind: Kind, name: str, dims: Dims, rank: int, size: int) -> list[ShardSlice]:
    """Where shard `rank` of `size` and the HF tensors of this rule overlap; padding rows of the
    vocabulary are in none.

    `rank` and `size` are those of the experts' own tensor parallelism where the name is an
    expert's.
    """
    if kind == "qkv":
        return _qkv_segments(dims, rank, size)
    if kind == "gate_up":
        rows = hf_shape(kind, 0, name, dims)[0] // size
        return [ShardSlice(part, 0, rank * rows, (rank + 1) * rows, part * rows) for part in (0, 1)]
    if kind == "row":
        columns = hf_shape(kind, 0, name, dims)[1] // size
        return [ShardSlice(0, 1, rank * columns, (rank + 1) * columns, 0)]
    if kind == "vocab":
        rows = dims.padded_vocab(size) // size
        start, stop = rank * rows, min((rank + 1) * rows, dims.vocab)
        return [ShardSlice(0, 0, start, stop, 0)] if start < stop else []
    whole = hf_shape(kind, 0, name, dims)[0]
    if kind == "column":
        rows = whole // size
        return [ShardSlice(0, 0, rank * rows, (rank + 1) * rows, 0)]
    return [ShardSlice(0, 0, 0, whole, 0)]


def _qkv_segments(dims: Dims, rank: int, size: int) -> list[ShardSlice]:
    """The packed rows of group g are [n*d of q | d of k | d of v]; the shard is a plain chunk of
    all G groups.

    That stays true for G < T, where a chunk may begin and end inside a group.
    """
    d, per_query = dims.head_size, dims.heads // dims.groups * dims.head_size
    group_rows = per_query + 2 * d
    rows = dims.groups * group_rows // size
    low, high = rank * rows, (rank + 1) * rows
    slices = []
    for group in range(dims.groups):
        start = group * group_rows
        for part, width, offset in ((0, per_query, 0), (1, d, per_query), (2, d, per_query + d)):
            first, last = max(low, start + offset), min(high, start + offset + width)
            if first < last:
                base = group * width - (start + offset)  # packed row -> row of the HF part
                slices.append(ShardSlice(part, 0, first + base, last + base, first - low))
    return sorted(slices, key=lambda s: (s.part, s.start))


def hf_names(dims: Dims, architecture: str) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this model must hold, with its shape, layer by layer in the
    model's order.
    """
    features = SUPPORTED[architecture] | dims.more
    rules = [rule for rule in RULES if applies(rule, features, dims.tied)]
    layered = [i for i, rule in enumerate(rules) if "{layer}" in rule.hf[0]]
    before, inside, after = (
        rules[: layered[0]],
        [rules[i] for i in layered],
        rules[layered[-1] + 1 :],
    )
    ordered = [(rule, 0) for rule in before]
    ordered += [
        (rule, layer)
        for layer in range(dims.layers)
        for rule in inside
        if in_layer(rule, dims, layer)
    ]
    ordered += [(rule, 0) for rule in after]
    names: dict[str, tuple[int, ...]] = {}
    for rule, layer in ordered:
        for expert in range(dims.experts if is_expert(rule.hf[0]) else 1):
            for part, pattern in enumerate(rule.hf):
                name = pattern.format(layer=layer, expert=expert)
                names[name] = hf_shape(rule.kind, part, name, dims)
    return names


def in_layer(rule: WeightRule, dims: Dims, layer: int) -> bool:
    """Of a mixture, a layer has either experts or an MLP."""
    if ".mlp." not in rule.megatron[0] or not dims.experts:
        return True
    return dims.has_experts(layer) != (rule.of == "dense")


def applies(rule: WeightRule, features: frozenset[str], tied: bool) -> bool:
    """Whether a model with these `SUPPORTED` features has the rule's HF tensors."""
    if rule.hf[0] == VALUE_HEAD:
        return False
    if rule.megatron[0] == "output_layer.weight":
        return not tied
    return rule.fits(features if "experts" in features else features | {"dense"})
