"""How much memory and disk a run will want, from its config and the model's config.json, before
anything is loaded.

In: a filled config. Out: bytes per trainer rank by what they are for, bytes per engine worker,
bytes of a checkpoint; and what of it lies in the memory of one host. Weights, gradients, optimizer
state, staging and cache follow from the layout; activations and processes are estimates. Whether it
is there, say `rft.tools.fit` and, of what is no estimate, the rules. Loads no torch.
"""

from dataclasses import dataclass
from math import prod

from rft.algorithm import recipe
from rft.config import Config
from rft.config.layout import HELD, lora_of, stored_bytes
from rft.ground.adapters import adapter_names
from rft.ground.names import (
    DTYPES,
    ITEM_BYTES,
    Dims,
    architecture_of,
    hf_names,
    is_expert,
    read_hf_config,
)
from rft.run.cards import engine_cards
from rft.sync import transfer

GRADIENT, MASTER = 4, 4  # bytes: gradients are summed in fp32, and bf16 weights have an fp32 copy
MOMENTS = {"adam": 8, "sgd": 0}
# activations of one layer that are kept for the backward pass, in units of tokens x hidden size
PER_LAYER = 34
PROCESS = int(1.2e9)  # a rank or an engine of its own, with torch, before it holds anything
PROCESSES, ACTIVATIONS = "processes, about", "activations, about"
ESTIMATES = (PROCESSES, ACTIVATIONS)


@dataclass(frozen=True)
class MemoryPlan:
    parameters: int  # of the whole model
    trained: int  # of those, or the adapter's
    weights: int  # bytes of one rank from here on
    gradients: int
    optimizer: int
    beside: int  # reference and critic
    activations: int
    transfer: int  # to engines
    staging: int  # host memory, of two checkpoints on their way
    checkpoint: int  # bytes of one, all ranks together
    export: int  # of the model for Hugging Face
    engine_weights: int  # one engine worker from here on
    engine_cache: int  # on a CPU
    received: int  # weights that wait in host memory until they are installed
    served: int  # by all ranks together: what engines got last, from which changes are told

    @property
    def engine(self) -> int:
        return self.engine_weights + self.engine_cache + self.received

    @property
    def rank(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.beside
            + self.activations
            + self.transfer
        )


def plan(config: Config) -> MemoryPlan:
    hf = read_hf_config(config.model.model_path)
    dims, architecture = Dims.of(hf), architecture_of(hf)
    lora = lora_of(config.model.lora_configs, dims)
    shapes = hf_names(dims, architecture)
    adapter = adapter_names(dims, architecture, lora) if lora else None
    megatron, item = config.trainer.megatron, ITEM_BYTES[DTYPES[str(config.trainer.dtype)]]
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    total, mine = count(shapes), held(shapes, config)
    trained = count(adapter or shapes)
    mine_trained, mine_state = (held(adapter or shapes, config, once) for once in (False, True))
    state = (MASTER if item < MASTER else 0) + MOMENTS[config.algorithm.optimizer.optimizer_type]
    critic = int(recipe.needs_critic(config.algorithm)) * (
        mine * (item + GRADIENT) + held(shapes, config, once=True) * state
    )
    reference = int(recipe.needs_reference(config.algorithm)) * mine * item
    if config.model.teacher_model_path:
        teacher = read_hf_config(config.model.teacher_model_path)
        reference += held(hf_names(Dims.of(teacher), architecture_of(teacher)), config) * item
    tokens = int(config.trainer.max_token_len_per_gpu or 0)
    kept = 2 if config.trainer.recompute_granularity == "full" else PER_LAYER
    saved = (
        mine_trained * max(item, MASTER)
        + mine_state * MOMENTS[config.algorithm.optimizer.optimizer_type]
    )
    saved += int(critic > 0) * saved
    stored = trained * (
        max(item, MASTER) + MOMENTS[config.algorithm.optimizer.optimizer_type]
    )  # copies are stored once
    stored += int(critic > 0) * stored
    budget = config.trainer.checkpoint.host_memory_gb
    rollout, synchronizer = config.explorer.rollout_model, config.synchronizer
    workers = rollout.tensor_parallel_size
    ends = transfer.of_config(config)
    # adapters come whole, to every worker
    coming = trained if synchronizer.lora_sync == "adapter" else total // workers
    return MemoryPlan(
        parameters=total,
        trained=trained,
        weights=mine * item,
        gradients=mine_trained * GRADIENT,
        optimizer=mine_state * state,
        beside=critic + reference,
        activations=tokens * dims.hidden * -(-dims.layers // pp) * kept * item // 2 // tp,
        transfer=ends[0].bytes() if ends else 0,
        staging=2 * saved if budget is None else min(int(budget * 1e9), 2 * saved),
        checkpoint=stored,
        export=trained * item,
        engine_weights=total * ITEM_BYTES[DTYPES[str(rollout.dtype)]] // workers,
        engine_cache=int(rollout.kv_cache_gb * 1e9),
        received=0 if synchronizer.receive == "direct" else coming * item,
        served=trained * item if synchronizer.sync == "delta" else 0,
    )


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes.values())


def held(shapes: dict[str, tuple[int, ...]], config: Config, once: bool = False) -> int:
    """Parameters of one rank: matrices are cut by tensor ranks, layers by stages, experts by their
    own ranks. `once`: its share of them where ranks that hold the same ones share them out, as the
    distributed optimizer does.
    """
    megatron = config.trainer.megatron
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    experts = (megatron.expert_tensor_parallel_size or tp) * megatron.expert_model_parallel_size
    ranks, found = int(config.trainer.num_ranks or 1), 0
    for name, shape in shapes.items():
        cut = experts if is_expert(name) else tp if len(shape) > 1 else 1
        copies = max(1, ranks // (experts if is_expert(name) else tp) // pp) if once else 1
        found += prod(shape) // cut // copies // (pp if ".layers." in name else 1)
    return found


def on_host(config: Config, wanted: MemoryPlan, on_cpu: bool) -> dict[str, int]:
    """What of it lies in the memory of the host, if all parts are on one."""
    rollout = config.explorer.rollout_model
    ranks = int(config.trainer.num_ranks or 1) if config.mode in ("both", "train") else 0
    engines = engine_cards(config) if config.mode != "train" else 0
    receivers = int(rollout.engine_num or 1) if config.mode in ("both", "explore") else 0
    stored = stored_bytes(config)
    parts = {
        PROCESSES: (ranks + engines) * PROCESS,
        "staging of checkpoints": ranks * wanted.staging,
        "weights that engines have": wanted.served if ranks else 0,
        "weights that engines receive": receivers * rollout.tensor_parallel_size * wanted.received,
        # each engine hands one version to its workers, in a file in memory
        "versions of weights in memory": stored + receivers * stored // HELD,
    }
    if on_cpu:
        parts["trainer"] = ranks * (wanted.rank - wanted.activations)
        parts[ACTIVATIONS] = ranks * wanted.activations
        parts["engines"] = engines * (wanted.engine_weights + wanted.engine_cache)
    elif config.cluster.colocate:
        parts["engines that sleep"] = engines * wanted.engine_weights
    return {name: size for name, size in parts.items() if size}


def listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
