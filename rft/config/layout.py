"""What a config asks of a model's shapes: mesh sizes that divide them, and an adapter for some of
its layers.

In: sections of the config, and the sizes of the model's config.json. Out: nothing, a `Lora` or a
number; or a `ConfigError` that names the key and the fix. Loads neither torch nor megatron.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from rft.config.schema import Config, LoraConfig, MegatronConfig, SynchronizerConfig
from rft.ground.adapters import ATTENTION, Lora, adapter_names, fused
from rft.ground.errors import ConfigError, refuse_all
from rft.ground.families import route_bytes
from rft.ground.names import DTYPES, ITEM_BYTES, Dims, architecture_of, hf_names, read_hf_config

MOST_RANK = 512  # of an adapter in vLLM
MOST_KEPT = 8  # versions of the adapter in an engine
BASES = 2  # versions that an agent holds to make the next from: the last, and the last full one
HELD = 2  # versions in the object store at most: the one that engines have, and the next
TOKEN = 8  # bytes that an experience has of a token: its id and log-probability


def check_layout(hf: dict[str, Any], megatron: MegatronConfig, num_ranks: int) -> None:
    """Raise ConfigError when this model cannot be cut that way, naming
    each key and the values that would work.
    """
    dims = Dims.of(hf)
    refuse_all(
        [*_sizes(dims, megatron), *_expert_sizes(dims, megatron)]
        or _ranks(dims, megatron, num_ranks)
    )


def check_bias_updates(rate: float, dims: Dims, has_adapter: bool) -> None:
    """Raise ConfigError where `trainer.moe_router_bias_update_rate` would move nothing."""
    key = f"trainer.moe_router_bias_update_rate={rate:g}"
    if rate and "sigmoid" not in dims.features:
        raise ConfigError(
            f"{key}: the model's routers have no correction bias (GLM-4.5, DeepSeek-V3 and Kimi-K2 "
            "have one); leave it out"
        )
    if rate and has_adapter:
        raise ConfigError(
            f"{key}: with model.lora_configs everything but the adapter stays as it is; leave one "
            "of the two out"
        )


def _sizes(dims: Dims, megatron: MegatronConfig) -> Iterator[str]:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    key = f"trainer.megatron.tensor_model_parallel_size={tp}"
    packed_rows = (dims.heads + 2 * dims.groups) * dims.head_size
    if dims.heads % tp:
        yield (
            f"{key} does not divide the model's {dims.heads} attention heads; use "
            f"{_divisors(dims.heads)}"
        )
    elif dims.groups % tp and tp % dims.groups:
        yield (
            f"{key} neither divides nor is a multiple of the model's {dims.groups} key/value heads"
        )
    elif packed_rows % tp:
        yield (
            f"{key} does not divide the model's {packed_rows} rows of queries, keys and values; "
            "use a smaller one"
        )
    elif (not dims.experts or dims.dense) and dims.ffn % tp:
        yield (
            f"{key} does not divide the model's intermediate_size {dims.ffn}; use "
            f"{_divisors(dims.ffn)}"
        )
    elif dims.shared_ffn % tp:
        yield (
            f"{key} does not divide the width {dims.shared_ffn} of the model's shared expert; use "
            f"{_divisors(dims.shared_ffn)}"
        )
    vpp = megatron.virtual_pipeline_model_parallel_size or 1
    if vpp > 1 and pp == 1:
        yield (
            f"trainer.megatron.virtual_pipeline_model_parallel_size={vpp} needs "
            "pipeline_model_parallel_size > 1; leave it out"
        )
    elif dims.layers % (pp * vpp):
        yield (
            f"trainer.megatron.pipeline_model_parallel_size={pp} "
            + (f"x virtual_pipeline_model_parallel_size={vpp} " if vpp > 1 else "")
            + (
                f"does not divide the model's {dims.layers} layers; the product may be "
                f"{_divisors(dims.layers)}"
            )
        )
    if dims.heads % dims.groups:
        yield (
            f"model.model_path: {dims.heads} heads are no multiple of {dims.groups} key/value heads"
        )


def _expert_sizes(dims: Dims, megatron: MegatronConfig) -> Iterator[str]:
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    key = f"trainer.megatron.expert_model_parallel_size={ep}"
    if not dims.experts:
        if ep > 1 or megatron.expert_tensor_parallel_size is not None:
            yield (
                f"{key} needs a model with experts; leave it and expert_tensor_parallel_size out"
            )
        return
    if dims.experts % ep:
        yield (
            f"{key} does not divide the model's {dims.experts} experts; use "
            f"{_divisors(dims.experts)}"
        )
    if dims.expert_ffn % etp:
        yield (
            f"trainer.megatron.expert_tensor_parallel_size={etp} does not divide the model's "
            f"{'' if 'w123' in dims.features else 'moe_'}intermediate_size "
            f"{dims.expert_ffn}; use {_divisors(dims.expert_ffn)}"
        )
    if etp > 1 and "biases" in dims.features:
        yield (
            f"trainer.megatron.expert_tensor_parallel_size={etp} cuts the model's experts, which "
            "have biases that Megatron does not cut; set it to 1, and the experts' parallelism > 1"
        )
    # megatron would then reduce the experts' gradients like those of dense layers
    if etp != tp and ep == 1:
        yield (
            f"trainer.megatron.expert_tensor_parallel_size={etp} differs from "
            f"tensor_model_parallel_size={tp}: "
            "that needs expert_model_parallel_size > 1; leave it out"
        )
    if tp > 1 and not megatron.sequence_parallel:
        yield (
            "trainer.megatron.sequence_parallel=false: a model with experts needs it where "
            "tensor_model_parallel_size > 1; "
            "set it to true"
        )


def _ranks(dims: Dims, megatron: MegatronConfig, num_ranks: int) -> Iterator[str]:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp, ep = megatron.context_parallel_size, megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    if num_ranks % (tp * pp * cp):
        yield (
            f"trainer.num_ranks={num_ranks} is no multiple of tensor x pipeline x context = {tp} x "
            f"{pp} x {cp} = {tp * pp * cp}; "
            f"set it to {tp * pp * cp} or a multiple, or lower trainer.megatron.*_size"
        )
    elif dims.experts and num_ranks % (etp * ep * pp):
        yield (
            f"trainer.num_ranks={num_ranks} is no multiple of expert tensor x expert x pipeline = "
            f"{etp} x {ep} x {pp} = "
            f"{etp * ep * pp}; set it to {etp * ep * pp} or a multiple, or lower "
            "trainer.megatron.expert_model_parallel_size"
        )


def lora_of(configs: list[LoraConfig], dims: Dims) -> Lora | None:
    """The adapter that `model.lora_configs` asks for; raises ConfigError for one that cannot be."""
    if not configs:
        return None
    for feature, what in (("mla", "latent attention"), ("biases", "projections of gpt-oss")):
        if feature in dims.features:
            raise ConfigError(
                f"model.lora_configs: {what} cannot have adapters in rft; leave it out, which "
                "trains all weights"
            )
    asked, layers = configs[0], fused(dims)
    # experts have as many adapters as there are experts: only who names them gets these
    linear = [part for parts in (ATTENTION if dims.experts else layers).values() for part in parts]
    targets = linear if asked.target_modules == ["all-linear"] else asked.target_modules
    refuse_all(_adapter_problems(configs, targets, layers))
    taken = {name: parts for name, parts in layers.items() if parts[0] in targets}
    return Lora(
        asked.lora_rank,
        asked.lora_alpha,
        frozenset(taken),
        tuple(part for parts in taken.values() for part in parts),
    )


def _adapter_problems(
    configs: list[LoraConfig], targets: list[str], layers: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    key, asked = "model.lora_configs", configs[0]
    known = [part for parts in layers.values() for part in parts]
    if len(configs) > 1:
        yield f"{key} has {len(configs)} entries; a policy is trained with one adapter: leave one"
    if asked.lora_rank < 1 or asked.lora_alpha <= 0:
        yield (
            f"{key}[0]: lora_rank={asked.lora_rank} and lora_alpha={asked.lora_alpha:g} must be "
            "greater than 0"
        )
    if set(targets) - set(known) or not targets:
        yield f"{key}[0].target_modules={targets}: use all-linear or some of {', '.join(known)}"
        return
    for parts in layers.values():
        if 0 < len(set(parts) & set(targets)) < len(parts):
            yield (
                f"{key}[0].target_modules={targets}: {', '.join(parts)} are one layer in "
                "Megatron; give all of them or none"
            )


def sync_of(asked: str | None, lora: Lora | None, dims: Dims, device: str) -> str | None:
    """How engines get this adapter (`synchronizer.lora_sync`): "adapter" where vLLM can add it,
    "merged" elsewhere.
    """
    key = "synchronizer.lora_sync"
    if lora is None:
        if asked:
            raise ConfigError(
                f"{key}={asked}: the policy has no adapter; leave it out, or give "
                "model.lora_configs"
            )
        return None
    reasons = []
    if lora.rank > MOST_RANK:
        reasons.append(
            f"vLLM has adapters up to rank {MOST_RANK}, model.lora_configs says {lora.rank}"
        )
    if dims.experts and device == "cpu":
        reasons.append("on a CPU vLLM has no adapters in a model with experts")
    if dims.experts and not lora.layers <= ATTENTION.keys():
        reasons.append("in a model with experts engines add adapters to attention alone")
    if asked == "adapter" and reasons:
        raise ConfigError(f"{key}=adapter: {'; '.join(reasons)}; set {key}=merged")
    tried = not dims.experts  # with experts on a GPU it is there for who asks for it
    return asked or ("adapter" if tried and not reasons else "merged")


def versions_kept(synchronizer: SynchronizerConfig) -> int:
    """Adapters that an engine holds at the same time; 0: it gets merged weights.

    While a rollout may still be used, `max_staleness` versions come after its own; one more is for
    evaluations, for which no step waits.
    """
    return (
        min(int(synchronizer.max_staleness or 0) + 2, MOST_KEPT)
        if synchronizer.lora_sync == "adapter"
        else 0
    )


def _divisors(number: int) -> str:
    return ", ".join(str(i) for i in range(1, min(number, 64) + 1) if number % i == 0)


def batch_bytes(config: Config) -> int:
    """Columns of a step's experiences, each as long as the model may see, with their routes."""
    tokens = int(config.buffer.train_batch_size or 0) * int(config.model.max_model_len or 0)
    told = config.explorer.rollout_model.enable_return_routed_experts is not False
    if config.model.tinker.enable or not told or not Path(config.model.model_path).is_dir():
        return tokens * TOKEN
    return tokens * (TOKEN + route_bytes(read_hf_config(config.model.model_path)))


def stored_bytes(config: Config) -> int:
    """What weight synchronization needs of Ray's object store: by `memory`, the versions that are
    there at a time.
    """
    if config.synchronizer.sync_method != "memory":
        return 0
    hf = read_hf_config(config.model.model_path)
    dims, architecture = Dims.of(hf), architecture_of(hf)
    lora = (
        lora_of(config.model.lora_configs, dims)
        if config.synchronizer.lora_sync == "adapter"
        else None
    )
    shapes = adapter_names(dims, architecture, lora) if lora else hf_names(dims, architecture)
    item = ITEM_BYTES[DTYPES[str(config.trainer.dtype)]]
    one = sum(prod(shape) for shape in shapes.values()) * item
    return HELD * (one + one // 16)  # a bucket's pieces are aligned, and the store has headers
