"""How much memory and disk a run will want, from its config and the model's config.json, before
anything is loaded.

In: a filled config. Out: bytes per trainer rank by what they are for, bytes per engine worker,
bytes of a checkpoint; and what of it lies in the memory of one host. Weights, gradients, optimizer
state, staging and cache follow from the layout; activations, logits and processes are estimates,
which `bench.plan` holds against measured runs. Whether it is there, say `rft.tools.fit` and, of
what is no estimate, the rules; `rft.tools.planner` asks it of every layout. Loads no torch.

Activations of one layer that are kept for the backward pass, in bytes per token: q, k the widths of
all query heads and of all key/value heads, I the MLP width that a token passes through, b bytes of
an element. Transformer Engine's layers, after Korthikanti et al. 2022 (arXiv:2205.05198) for gated
MLPs and fused kernels; rft's own, counted by torch's hooks for saved tensors:

    Transformer Engine   b (4h + 2q + 2k + 3I)             with norms of q and k  b (q + k) more
    rft's own            b (4h + q + 5I) + 8 (h + q + k)   with norms of q and k  3bq + 5k more
    per chosen expert    2bh more: what is sent to it, and what comes back

A stage of a pipeline keeps as many microbatches as there are stages behind it. On a CPU the heap
holds more than is in use at a time (HEAP, measured).
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any

from rft.algorithm import recipe
from rft.config import TRAINING, AuxiliaryModelConfig, Config, EngineConfig, is_remote
from rft.config.choices import engines as engines_of
from rft.config.layout import BASES, HELD, lora_of, stored_bytes
from rft.ground.adapters import Lora, adapter_names
from rft.ground.device import tile_columns
from rft.ground.families import window_of, windowed
from rft.ground.names import (
    DTYPES,
    ITEM_BYTES,
    WHOLE,
    Dims,
    architecture_of,
    hf_names,
    is_expert,
    read_hf_config,
)
from rft.preflight.save_costs import state_bytes
from rft.run.cards import engine_cards
from rft.sync import transfer

GIB = 2**30  # as vLLM counts
GRADIENT = 4  # bytes: gradients are summed in fp32
HEAP = 1.2  # of what a CPU's ranks keep for the backward pass: temporaries, and holes between
WIDE = 6  # rows of the hidden size, in fp32, around the logits: states, their gradients, copies
HEAD = "lm_head.weight"
# processes before they hold anything: a rank and its checkpoint agent, an engine and its front, and
# the others of a run, without and with engines (Ray, explorer, buffer, synchronizer)
RANK, ENGINE, LAUNCHER, ACTORS = int(0.9e9), int(1.3e9), int(0.35e9), int(1.5e9)
LIBRARIES = int(0.07e9)  # of a rank's, which all ranks of a host share
SPARE = int(0.45e9)  # a rank that has imported everything, and waits: 0.34 to 0.39 beside others
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
    logits: int  # tiles of them, and hidden states around them
    transfer: int  # to engines
    staging: int  # host memory, of two checkpoints on their way
    checkpoint: int  # bytes of one, all ranks together
    export: int  # of the model for Hugging Face
    engine_weights: int  # one engine worker from here on
    engine_cache: int  # on a CPU
    received: int  # weights that wait in host memory until they are installed
    served: int  # by all ranks together: what engines got last, from which changes are told
    kept: int  # a version that all agents together keep: the weights

    @property
    def engine(self) -> int:
        return self.engine_weights + self.engine_cache + self.received

    @property
    def rank(self) -> int:
        return sum(self.on_rank.values())

    @property
    def on_rank(self) -> dict[str, int]:
        """What a rank holds at its peak, by what it is for."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "reference and critic": self.beside,
            ACTIVATIONS: self.activations,
            "logits": self.logits,
            "transfer of weights": self.transfer,
        }
        return {name: size for name, size in parts.items() if size}


@dataclass(frozen=True)
class Tensors:
    """Those of a model that are cut and copied alike."""

    expert: bool
    cut: bool  # others are whole on every tensor-parallel rank, like vectors
    layered: bool
    head: bool  # as large as the embedding, and, where there are stages, never on its own


Numbers = dict[Tensors, int]  # parameters


def plan(config: Config) -> MemoryPlan:
    hf = read_hf_config(config.model.model_path)
    dims, architecture = Dims.of(hf), architecture_of(hf)
    lora = lora_of(config.model.lora_configs, dims)
    whole = numbers(dims, architecture)
    adapted = numbers(dims, architecture, lora) if lora else whole
    item = ITEM_BYTES[DTYPES[str(config.trainer.dtype)]]
    total, mine = sum(whole.values()), held(whole, config)
    trained = sum(adapted.values())
    mine_trained, mine_state = (held(adapted, config, once) for once in (False, True))
    state = state_bytes(item, config.algorithm.optimizer.optimizer_type)
    critics, frozen = beside(config, whole)
    critic = sum(
        held(one, config) * (item + GRADIENT) + held(one, config, once=True) * state
        for one in critics
    )
    reference = sum(held(one, config) * item for one in frozen)
    tokens = tokens_of_rank(config)
    saved = mine_trained * item + mine_state * state
    saved += sum(held(one, config) * item + held(one, config, True) * state for one in critics)
    # copies are stored once
    stored = (trained + sum(sum(one.values()) for one in critics)) * (item + state)
    checkpoint = config.trainer.checkpoint
    budget, others = checkpoint.host_memory_gb, 2 * saved * checkpoint.replicas  # of other nodes
    rollout, synchronizer = config.explorer.rollout_model, config.synchronizer
    workers = rollout.tensor_parallel_size
    ends = transfer.of_config(config)
    # adapters come whole, to every worker
    coming = trained if synchronizer.lora_sync == "adapter" else total // workers
    return MemoryPlan(
        parameters=total,
        trained=trained,
        weights=(mine + (mine_trained if lora else 0)) * item,
        gradients=mine_trained * GRADIENT,
        optimizer=mine_state * state,
        beside=critic + reference,
        activations=activations(hf, config, tokens),
        logits=logits(dims, config, tokens),
        transfer=ends[0].bytes() if ends else 0,
        staging=others
        + min(
            int((checkpoint.memory or 2) * saved),
            int(budget * 1e9) if budget is not None else 2 * saved,
        ),
        checkpoint=stored,
        export=trained * item,
        engine_weights=total * ITEM_BYTES[DTYPES[str(rollout.dtype)]] // workers,
        engine_cache=int(rollout.kv_cache_gb * GIB),
        received=0 if synchronizer.receive == "direct" else coming * item,
        served=trained * item if synchronizer.sync == "delta" else 0,
        kept=trained * item if config.trainer.checkpoint.versions != "none" else 0,
    )


def beside(config: Config, policy: Numbers) -> tuple[list[Numbers], list[Numbers]]:
    """(critics, models that are not trained), each as large as its own config.json says; as the
    policy where none is named, or one of a hub that is not here.
    """

    def of(path: str | None) -> Numbers:
        if not path or not os.access(Path(path, "config.json"), os.R_OK):
            return policy
        hf = read_hf_config(path)
        return numbers(Dims.of(hf), architecture_of(hf))

    model, algorithm = config.model, config.algorithm
    critics = [of(model.critic_model_path)] if recipe.needs_critic(algorithm) else []
    frozen = [of(model.ref_model_path)] if recipe.needs_reference(algorithm) else []
    return critics, frozen + ([of(model.teacher_model_path)] if model.teacher_model_path else [])


def tokens_of_rank(config: Config) -> int:
    """Of the largest microbatch: what it may hold, a sequence that is longer, or all of a step."""
    cp = config.trainer.megatron.context_parallel_size
    longest = int(config.model.max_model_len or 0)
    most = max(int(config.trainer.max_token_len_per_gpu or 0), -(-longest // cp))
    return min(most, -(-rows_of_rank(config) * longest // cp)) if longest else most


def rows_of_rank(config: Config) -> int:
    """Experiences of one update, of one data-parallel index."""
    megatron, ranks = config.trainer.megatron, int(config.trainer.num_ranks or 1)
    copies = ranks // (
        megatron.tensor_model_parallel_size
        * megatron.pipeline_model_parallel_size
        * megatron.context_parallel_size
    )
    rows = int(config.buffer.train_batch_size or config.buffer.batch_size)
    return -(-min(config.trainer.ppo_mini_batch_size or rows, rows) // max(1, copies))


def layer_bytes(hf: dict[str, Any], item: int, on_cpu: bool) -> tuple[int, int]:
    """(hidden states, which tensor parallelism cuts only together with sequence parallelism;
    everything else) of a token in one layer, kept for its backward pass: see above.
    """
    dims = Dims.of(hf)
    normed = "qk_norm" in dims.features
    q, k = dims.heads * dims.head_size, dims.groups * dims.head_size
    chosen = int(hf["num_experts_per_tok"]) if dims.experts else 0
    wide = dims.expert_ffn * chosen + dims.shared_ffn if dims.experts else dims.ffn
    wide += max(0, dims.ffn - wide) * len(dims.dense) // dims.layers
    sent = 2 * item * dims.hidden * chosen
    if on_cpu:
        normed_more = 3 * item * q + 5 * k if normed else 0
        inside = item * (q + 5 * wide) + 8 * (q + k) + normed_more
        return (4 * item + 8) * dims.hidden, inside + sent
    return 4 * item * dims.hidden, item * ((2 + normed) * (q + k) + 3 * wide) + sent


def activations(hf: dict[str, Any], config: Config, tokens: int) -> int:
    """Of the microbatches that the first stage of a pipeline has under way at a time."""
    megatron, item = config.trainer.megatron, ITEM_BYTES[DTYPES[str(config.trainer.dtype)]]
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    layers, on_cpu = -(-Dims.of(hf).layers // pp), config.device == "cpu"
    cut = tp if megatron.sequence_parallel else 1
    outside, inside = layer_bytes(hf, item, on_cpu)
    layer = outside // cut + inside // tp
    under_way = min(pp, microbatches(config, tokens))
    kept, trainer = under_way * layers * layer, config.trainer
    if trainer.recompute_granularity == "full":
        state, count = item * Dims.of(hf).hidden // cut, trainer.recompute_num_layers or 1
        if trainer.recompute_method == "block":  # so many layers, the others keep all
            kept = under_way * (count * state + (layers - count) * layer) + layer
        else:  # units of so many, one at a time
            kept = under_way * -(-layers // count) * state + count * layer
    return int(tokens * kept * (HEAP if on_cpu else 1))


def microbatches(config: Config, tokens: int) -> int:
    """Of a rank in one update, where all sequences are of full length."""
    longest = int(config.model.max_model_len or 0)
    cp = config.trainer.megatron.context_parallel_size
    return max(1, -(-rows_of_rank(config) * longest // max(1, tokens * cp)))


def logits(dims: Dims, config: Config, tokens: int) -> int:
    """Of the last stage: two tiles in fp32 and their gradient in the weights' type
    (`rft.megatron.logprobs`).
    """
    tp = config.trainer.megatron.tensor_model_parallel_size
    columns = min(dims.padded_vocab(tp) // tp, tile_columns(config.device, tokens))
    item = ITEM_BYTES[DTYPES[str(config.trainer.dtype)]]
    return tokens * (columns * (8 + item) + WIDE * 4 * dims.hidden)


def cached_bytes(hf: dict[str, Any], rollout: EngineConfig, tokens: float) -> int:
    """Keys and values of a sequence on one of an engine's workers. They share out heads, at least
    one each; latent attention has one row for all heads, which every worker holds.
    """
    dims, workers = Dims.of(hf), rollout.tensor_parallel_size
    row = dims.latent.key_value + dims.latent.rope
    row = row or 2 * -(-dims.groups // workers) * dims.head_size
    seen = min(tokens, window_of(hf) or tokens)
    kept = sum(seen if short else tokens for short in windowed(hf) or [1] * dims.layers)
    return int(row * kept * ITEM_BYTES[DTYPES[str(rollout.dtype)]])


def small_caches(config: Config) -> Iterator[str]:
    """What to say of engines on a CPU: vLLM wants room for one sequence of full length."""
    if config.device != "cpu" or config.mode == "train" or is_remote(config):
        return
    for key, engine in engines_of(config):
        model = engine if isinstance(engine, AuxiliaryModelConfig) else config.model
        longest = int(model.max_model_len or 0)
        wanted = cached_bytes(read_hf_config(model.model_path), engine, longest)
        if wanted > engine.kv_cache_gb * GIB:
            least = ceil(105 * wanted / GIB) / 100  # in whole blocks, and one more
            yield (
                f"{key}.kv_cache_gb={engine.kv_cache_gb:g} has no room for a sequence of "
                f"max_model_len={longest}: set it to {least:g}, or lower max_model_len"
            )


@cache
def numbers(dims: Dims, architecture: str, lora: Lora | None = None) -> Numbers:
    """Parameters of the model, or of the adapter."""
    shapes = adapter_names(dims, architecture, lora) if lora else hf_names(dims, architecture)
    found: Numbers = Counter()
    for name, shape in shapes.items():
        cut = len(shape) > 1 and name.split(".")[-2] not in WHOLE
        kind = Tensors(is_expert(name), cut, ".layers." in name, name == HEAD)
        found[kind] += prod(shape)
    return found


def held(numbers: Numbers, config: Config, once: bool = False) -> int:
    """Parameters of one rank: matrices are cut by tensor ranks, layers by stages, experts by their
    own ranks; the first stage has the embedding, the last one the head. `once`: its share of them
    where ranks that hold the same ones share them out, as the distributed optimizer does.
    """
    megatron = config.trainer.megatron
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    experts = (megatron.expert_tensor_parallel_size or tp) * megatron.expert_model_parallel_size
    ranks, found = int(config.trainer.num_ranks or 1), 0
    for kind, number in numbers.items():
        if pp > 1 and kind.head:
            continue
        cut = experts if kind.expert else tp if kind.cut else 1
        copies = max(1, ranks // (experts if kind.expert else tp) // pp) if once else 1
        found += number // cut // copies // (pp if kind.layered else 1)
    return found


def on_host(config: Config, wanted: MemoryPlan, on_cpu: bool) -> dict[str, int]:
    """What of it lies in the memory of the host, if all parts are on one."""
    rollout = config.explorer.rollout_model
    ranks = int(config.trainer.num_ranks or 1) if config.mode in TRAINING else 0
    engines = engine_cards(config) if config.mode != "train" else 0
    receivers = int(rollout.engine_num or 1) if config.mode in ("both", "explore") else 0
    stored = stored_bytes(config)
    parts = {
        PROCESSES: processes(ranks, engines, ranks * config.trainer.spares),
        "staging of checkpoints": ranks * wanted.staging,
        "versions that the next is made from": BASES * wanted.kept if ranks else 0,
        "weights that engines have": wanted.served if ranks else 0,
        "weights that engines receive": receivers * rollout.tensor_parallel_size * wanted.received,
        # each engine hands one version to its workers, in a file in memory
        "versions of weights in memory": stored + receivers * stored // HELD,
    }
    if on_cpu:
        passing = wanted.activations + wanted.logits
        parts["trainer"] = ranks * (wanted.rank - passing)
        parts[ACTIVATIONS] = ranks * passing
        parts["engines"] = engines * (wanted.engine_weights + wanted.engine_cache)
    elif config.cluster.colocate:
        parts["engines that sleep"] = engines * wanted.engine_weights
    return {name: size for name, size in parts.items() if size}


def processes(ranks: int, engines: int, spares: int = 0) -> int:
    """Bytes, before they hold anything of a model."""
    shared = max(0, ranks + spares - 1) * LIBRARIES
    own = ranks * RANK + spares * SPARE - shared
    return own + engines * ENGINE + (ACTORS if engines else LAUNCHER)


def listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
