"""What of the config goes to megatron's own dataclasses beyond what rft decides: recompute, and
flags that are passed on.

In: `trainer.recompute_*` and the three `trainer.megatron.override_*_config` (verl's names). Out:
fields for megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig, or a
ConfigError. Only fields of `PASSED` are passed: they change how a step is computed, not what (but
for the optimizer's two, which say what decays). Every other one is refused by name, with the key to
use instead where there is one.

Nothing of megatron is imported: `preflight` asks before anything starts. Which fields the installed
version has, and of what type, is read from its source.
"""

import ast
import functools
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rft.config import TrainerConfig, nearest
from rft.ground.errors import refuse_all

TRANSFORMER, DDP, OPTIMIZER = (
    "override_transformer_config",
    "override_ddp_config",
    "override_optimizer_config",
)
SOURCES = {
    TRANSFORMER: (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    DDP: (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    OPTIMIZER: (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
PASSED = {
    TRANSFORMER: (
        "fp8",
        "fp8_recipe",
        "fp8_margin",
        "fp8_interval",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "fp8_wgrad",
        "fp8_dot_product_attention",
        "fp8_multi_head_attention",
        "tp_only_amax_red",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "disable_parameter_transpose_cache",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "deallocate_pipeline_outputs",
        "cp_comm_type",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "memory_efficient_layer_norm",
        "apply_rope_fusion",
        "fused_single_qkv_rope",
        "gradient_accumulation_fusion",
        "attention_softmax_in_fp32",
        "distribute_saved_activations",
        "deterministic_mode",
        "moe_token_dispatcher_type",
        "moe_enable_deepep",
        "moe_permute_fusion",
        "moe_router_fusion",
        "moe_flex_dispatcher_backend",
        "moe_deepep_num_sms",
        "moe_hybridep_num_sms",
    ),
    DDP: (
        "overlap_grad_reduce",
        "bucket_size",
        "pad_buckets_for_high_nccl_busbw",
        "nccl_ub",
        "disable_symmetric_registration",
    ),
    OPTIMIZER: ("decoupled_weight_decay", "apply_wd_to_qk_layernorm"),
}
_M, _A = "trainer.megatron.", "algorithm.optimizer."
INSTEAD = {  # fields that a key of rft decides
    **{
        name: _M + name
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "sequence_parallel",
            "virtual_pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )
    },
    **{
        name: f"trainer.{name}"
        for name in (
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "moe_router_bias_update_rate",
        )
    },
    "moe_router_enable_expert_bias": "trainer.moe_router_bias_update_rate",
    **dict.fromkeys(
        ("bf16", "fp16", "params_dtype", "pipeline_dtype", "autocast_dtype"), "trainer.dtype"
    ),
    "clip_grad": "trainer.grad_clip",
    "optimizer": _A + "optimizer_type",
    "lr": _A + "lr",
    "min_lr": _A + "min_lr_ratio",
    "weight_decay": _A + "weight_decay",
    "adam_beta1": _A + "betas",
    "adam_beta2": _A + "betas",
    "adam_eps": _A + "eps",
    "check_for_nan_in_grad": "trainer.max_skipped_steps",
    "check_for_large_grads": "trainer.max_skipped_steps",
}
ALWAYS = {  # fields with the value that they always have here
    "use_distributed_optimizer": True,
    "grad_reduce_in_fp32": True,
    "average_in_collective": False,
    "use_megatron_fsdp": False,
    "calculate_per_token_loss": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "perform_initialization": False,
}
BECAUSE = {
    "overlap_param_gather": "engines and checkpoints read the weights as soon as a step is "
    "done, so the gather cannot wait for the next forward pass",
    **dict.fromkeys(
        (
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
            "use_torch_optimizer_for_cpu_offload",
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
        ),
        "Megatron's HybridDeviceOptimizer keeps copies of the weights on the host that no "
        "checkpoint is loaded into, so a resumed run would go on from others; use more ranks, or "
        "recompute activations",
    ),
    **dict.fromkeys(
        (
            "use_precision_aware_optimizer",
            "main_grads_dtype",
            "main_params_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "store_param_remainders",
        ),
        "the optimizer's state would be in the kernels' own scaled form, which a checkpoint of "
        "another layout or version could not read bit by bit",
    ),
    "sgd_momentum": "sgd is plain here: it has no state",
    "tp_comm_overlap": "Transformer Engine wants buffers for it that rft does not make",
    "fp32_residual_connection": "pipeline stages exchange activations in trainer.dtype",
    **dict.fromkeys(
        ("fp8_param", "fp8_param_gather"),
        "weights leave for engines and checkpoints in trainer.dtype; fp8 alone computes in fp8",
    ),
}
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts")
# megatron's code for these asks Transformer Engine for its state of fp8
OF_ENGINE = ("layernorm", "moe_act")
FIELDS_OF_ENGINE = (  # rft's own layers would fail over them, or not look at them
    "fp8",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "masked_softmax_fusion",
    "persist_layer_norm",
    "memory_efficient_layer_norm",
    "moe_permute_fusion",
    "moe_router_fusion",
)
# a rank's tokens come in multiples of this: what the kernels of every recipe can take
FP8_TOKENS = 32
OF_TYPE: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
}


def transformer(trainer: TrainerConfig) -> dict[str, Any]:
    given = trainer.megatron.override_transformer_config
    # megatron takes one of the two
    overlapped = {"batch_p2p_comm": False} if given.get("overlap_p2p_comm") else {}
    return recompute(trainer) | overlapped | given


def ddp(trainer: TrainerConfig) -> dict[str, Any]:
    return dict(trainer.megatron.override_ddp_config)


def optimizer(trainer: TrainerConfig) -> dict[str, Any]:
    """megatron's optimizer must know how the model computes in fp8."""
    given = trainer.megatron.override_transformer_config
    recipe = {"fp8_recipe": given.get("fp8_recipe", "delayed")} if given.get("fp8") else {}
    return recipe | trainer.megatron.override_optimizer_config


def recompute(trainer: TrainerConfig) -> dict[str, Any]:
    """megatron's four fields; "full" alone means layer by layer."""
    kind = trainer.recompute_granularity
    if kind is None:
        return {}
    if kind == "selective":
        return {
            "recompute_granularity": kind,
            "recompute_modules": trainer.recompute_modules or ["core_attn"],
        }
    method, count = trainer.recompute_method or "uniform", trainer.recompute_num_layers or 1
    return {
        "recompute_granularity": kind,
        "recompute_method": method,
        "recompute_num_layers": count,
    }


def check(trainer: TrainerConfig, layers: int) -> None:
    """Raise ConfigError with everything that cannot be passed on.

    `layers`: of one pipeline stage, or of one part of it where stages are virtual.
    """
    refuse_all((*_recompute_problems(trainer, layers), *_field_problems(trainer)))


def _field_problems(trainer: TrainerConfig) -> Iterator[str]:
    for section in SOURCES:
        key, given = f"{_M}{section}", getattr(trainer.megatron, section)
        for name, value in given.items():
            problems = list(_check_field(section, name, value))
            yield from problems
            if name == "fp8" and value and trainer.dtype != "bf16" and not problems:
                yield f"{key}.fp8 with trainer.dtype={trainer.dtype}: set trainer.dtype=bf16"
            if name == "moe_router_fusion" and value is True and trainer.router_replay:
                yield (
                    f"{key}.moe_router_fusion with trainer.router_replay=true: that kernel takes "
                    "the experts that it chooses itself; leave it out, or set "
                    "trainer.router_replay=false"
                )
            moves_biases = trainer.moe_router_bias_update_rate > 0
            if name == "moe_router_fusion" and value is True and moves_biases:
                yield (
                    f"{key}.moe_router_fusion with trainer.moe_router_bias_update_rate: that "
                    "kernel tells nobody which experts it chose; leave one of the two out"
                )
            virtual = trainer.megatron.virtual_pipeline_model_parallel_size
            if name == "batch_p2p_comm" and value is True and virtual and virtual > 1:
                yield (
                    f"{key}.batch_p2p_comm with {_M}virtual_pipeline_model_parallel_size="
                    f"{virtual}: stages would take one message of a batch for another; leave it out"
                )


def refuse_transformer_engine(trainer: TrainerConfig, why: str) -> None:
    """Raise ConfigError for everything that needs it, where its layers are not used."""
    given = trainer.megatron.override_transformer_config
    asked = [f"{_M}{TRANSFORMER}.{name}" for name in FIELDS_OF_ENGINE if given.get(name)]
    asked += [
        f"trainer.recompute_modules={name}"
        for name in trainer.recompute_modules or ()
        if name in OF_ENGINE
    ]
    refuse_all(f"{one} needs CUDA and Transformer Engine, and {why}: leave it out" for one in asked)


def _recompute_problems(trainer: TrainerConfig, layers: int) -> Iterator[str]:
    kind, key = trainer.recompute_granularity, "trainer.recompute_"
    if kind not in (None, "selective", "full"):
        yield (nearest(str(kind), ("selective", "full"), f"{key}granularity"))
    for name, of in (("method", "full"), ("num_layers", "full"), ("modules", "selective")):
        value = getattr(trainer, f"recompute_{name}")
        if value is not None and kind != of:
            yield (f"{key}{name}={value} needs {key}granularity={of}: set that, or leave it out")
    if trainer.recompute_method not in (None, "uniform", "block"):
        yield (nearest(str(trainer.recompute_method), ("uniform", "block"), f"{key}method"))
    count = trainer.recompute_num_layers
    if count is not None and not 1 <= count <= layers:
        yield (f"{key}num_layers={count}: a pipeline stage has {layers} layers, give 1 to {layers}")
    elif count and kind == "full" and trainer.recompute_method != "block" and layers % count:
        yield (  # megatron would ask for layers behind the last
            f"{key}num_layers={count} with {key}method=uniform: it does not divide the {layers} "
            f"layers of a stage; give a number that does, or set {key}method=block"
        )
    for module in trainer.recompute_modules or ():
        if module not in RECOMPUTE_MODULES:
            yield (nearest(module, RECOMPUTE_MODULES, f"{key}modules"))


def _check_field(section: str, name: str, value: Any) -> Iterator[str]:
    key, known = f"{_M}{section}.{name}", installed(section)
    if name not in known and name not in PASSED[section]:
        yield nearest(name, PASSED[section], f"{_M}{section}")
    elif name in ALWAYS and value == ALWAYS[name]:
        return
    elif name in ALWAYS:
        yield (f"{key}={value}: rft always runs with {name}={ALWAYS[name]}, leave it out")
    elif name in BECAUSE:
        yield (f"{key} is not possible: {BECAUSE[name]}")
    elif name in INSTEAD:
        yield (f"{key}: rft decides this field, set {INSTEAD[name]}")
    elif name not in PASSED[section]:
        yield (
            f"{key}: this field follows from the model's config.json or is rft's own decision; "
            f"what is passed on: "
            f"{', '.join(PASSED[section])}"
        )
    elif name not in known:
        yield (f"{key}: the installed megatron-core has no such field; leave it out")
    else:
        yield from _check_type(key, value, known[name])


def _check_type(key: str, value: Any, annotation: ast.expr) -> Iterator[str]:
    """Of the plain types and literals that flags have; anything else is left to megatron."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Optional":
        if value is None:
            return
        annotation = annotation.slice
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        choices = [
            ast.literal_eval(node) for node in getattr(annotation.slice, "elts", [annotation.slice])
        ]
        if value not in choices:
            yield (nearest(str(value), choices, key))
    kinds = OF_TYPE.get(ast.unparse(annotation))
    if kinds and (not isinstance(value, kinds) or (bool not in kinds and isinstance(value, bool))):
        yield (f"{key}={value}: must be of type {ast.unparse(annotation)}")


@functools.cache
def installed(section: str) -> dict[str, ast.expr]:
    """Field -> its annotation, of megatron's dataclass behind `section`."""
    root = Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core")))
    found: dict[str, ast.expr] = {}
    for file, name in SOURCES[section]:
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                found |= {
                    n.target.id: n.annotation
                    for n in node.body
                    if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
    return found
