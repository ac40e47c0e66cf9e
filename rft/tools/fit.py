"""Does a run fit a machine? How much memory and disk it will want, from its config and the model's
config.json, before anything is loaded; and whether that is there.

In: a filled config, and what two processes of this machine have told of its devices. Out: bytes per
trainer rank by what they are for, bytes per engine, bytes of a checkpoint; and the findings of `rft
doctor` and `rft studio` about them. Weights, gradients, optimizer state, staging and cache follow
from the layout; activations are an estimate of one microbatch. Loads no torch.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rft import config as configs
from rft.algorithm import recipe
from rft.config import Config, is_remote
from rft.config.layout import lora_of, stored_bytes
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
from rft.preflight.inputs_models import SHARED_MEMORY
from rft.run.cluster import engine_cards

OK, WARN, FAIL = "ok", "warn", "fail"
FULL = 0.9  # of a memory: what is planned beyond this will not fit
GRADIENT, MASTER = 4, 4  # bytes: gradients are summed in fp32, and bf16 weights have an fp32 copy
MOMENTS = {"adam": 8, "sgd": 0}
# activations of one layer that are kept for the backward pass, in units of tokens x hidden size
PER_LAYER = 34
PROCESS = int(1.2e9)  # a rank or an engine of its own, with torch, before it holds anything


@dataclass(frozen=True)
class Finding:
    level: str
    what: str
    said: str
    fix: str = ""


def checked(what: str, said: str, fits: bool, fix: str, otherwise: str = FAIL) -> Finding:
    """A finding that is ok, or else tells what to do."""
    return Finding(OK, what, said) if fits else Finding(otherwise, what, said, fix)


# --- what it will want ----------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlan:
    parameters: int  # of the whole model
    trained: int  # of those, or the adapter's
    weights: int  # bytes of one rank from here on
    gradients: int
    optimizer: int
    beside: int  # reference and critic
    activations: int
    staging: int  # host memory, of two checkpoints on their way
    checkpoint: int  # bytes of one, all ranks together
    export: int  # of the model for Hugging Face
    engine: int  # one engine worker: weights, their successor, and the cache on a CPU

    @property
    def rank(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.beside + self.activations


def plan(config: Config) -> MemoryPlan:
    hf = read_hf_config(config.model.model_path)
    dims, architecture = Dims.of(hf), architecture_of(hf)
    lora = lora_of(config.model.lora_configs, dims)
    shapes = hf_names(dims, architecture)
    adapter = adapter_names(dims, architecture, lora) if lora else None
    megatron, item = config.trainer.megatron, ITEM_BYTES[DTYPES[str(config.trainer.dtype)]]
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    total, mine = count(shapes), held(shapes, config)
    trained, mine_trained = (count(adapter), held(adapter, config)) if adapter else (total, mine)
    # the distributed optimizer cuts over these
    shards = max(1, int(config.trainer.num_ranks or 1) // (tp * pp))
    state = (MASTER if item < MASTER else 0) + MOMENTS[config.algorithm.optimizer.optimizer_type]
    critic = int(recipe.needs_critic(config.algorithm)) * (
        mine * (item + GRADIENT) + mine * state // shards
    )
    reference = int(recipe.needs_reference(config.algorithm)) * mine * item
    if config.model.teacher_model_path:
        teacher = read_hf_config(config.model.teacher_model_path)
        reference += held(hf_names(Dims.of(teacher), architecture_of(teacher)), config) * item
    tokens = int(config.trainer.max_token_len_per_gpu or 0)
    kept = 2 if config.trainer.recompute_granularity == "full" else PER_LAYER
    saved = (
        mine_trained * max(item, MASTER)
        + mine_trained * MOMENTS[config.algorithm.optimizer.optimizer_type] // shards
    )
    saved += int(critic > 0) * saved
    stored = trained * (
        max(item, MASTER) + MOMENTS[config.algorithm.optimizer.optimizer_type]
    )  # copies are stored once
    stored += int(critic > 0) * stored
    budget = config.trainer.checkpoint.host_memory_gb
    rollout, synchronizer = config.explorer.rollout_model, config.synchronizer
    workers, versions = rollout.tensor_parallel_size, 1 if synchronizer.receive == "direct" else 2
    return MemoryPlan(
        parameters=total,
        trained=trained,
        weights=mine * item,
        gradients=mine_trained * GRADIENT,
        optimizer=mine_trained * state // shards,
        beside=critic + reference,
        activations=tokens * dims.hidden * -(-dims.layers // pp) * kept * item // 2 // tp,
        staging=2 * saved if budget is None else min(int(budget * 1e9), 2 * saved),
        checkpoint=stored,
        export=trained * item,
        engine=total * ITEM_BYTES[DTYPES[str(rollout.dtype)]] * versions // workers
        + int(rollout.kv_cache_gb * 1e9),
    )


def count(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes.values())


def held(shapes: dict[str, tuple[int, ...]], config: Config) -> int:
    """Parameters of one rank: matrices are cut by tensor ranks, layers
    by stages, experts by their own ranks.
    """
    megatron = config.trainer.megatron
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    experts = (megatron.expert_tensor_parallel_size or tp) * megatron.expert_model_parallel_size
    found = 0
    for name, shape in shapes.items():
        cut = experts if is_expert(name) else tp if len(shape) > 1 else 1
        found += prod(shape) // cut // (pp if ".layers." in name else 1)
    return found


# --- whether it is there --------------------------------------------------------------------------


def of_config(config: Config, met: dict[str, Any] | str) -> Iterator[Finding]:
    """What is left to say when the config itself has been accepted; `met`: what the first of two
    processes told of its device, or why they have not met.
    """
    if is_remote(config):
        said = (
            f"{config.model.tinker.base_model}: "
            "its weights and whatever is computed with them are at the Tinker service"
        )
        yield Finding(OK, "model", said)
        yield from monitor(config)
        return
    wanted, gpus = plan(config), config.cluster.gpu_per_node
    yield _layout(config, wanted)
    yield cores(config)
    on_cpu = not isinstance(met, str) and met["backend"] == "gloo"
    if gpus and config.device != "cpu" and on_cpu:
        said = f"cluster.gpu_per_node={gpus}, and this machine shows none"
        yield Finding(WARN, "GPUs", said, "look again on a node that has them, or set device=cpu")
    if config.mode in ("both", "train"):
        yield rank_memory(wanted, 0 if isinstance(met, str) or on_cpu else int(met["memory"]))
    yield host_memory(config, wanted, on_cpu)
    if (needed := stored_bytes(config)) > 0:
        said = f"{gigabytes(needed)} of {SHARED_MEMORY} for sync_method=memory"
        yield Finding(OK, "object store", said)
    yield disk(config, wanted)
    yield from monitor(config)


def _layout(config: Config, wanted: MemoryPlan) -> Finding:
    layout, trained = config.trainer.megatron, ""
    if wanted.trained != wanted.parameters:
        trained = f", of which {short(wanted.trained)} are trained"
    said = (
        f"{short(wanted.parameters)} parameters{trained}; "
        f"tp{layout.tensor_model_parallel_size} pp{layout.pipeline_model_parallel_size} "
        f"cp{layout.context_parallel_size} on {config.trainer.num_ranks} rank(s) divides it"
    )
    return Finding(OK, "model", said)


def cores(config: Config) -> Finding:
    there, cluster = len(os.sched_getaffinity(0)), config.cluster
    ranks = int(config.trainer.num_ranks or 0) if config.mode in ("both", "train") else 0
    engines = engine_cards(config) if config.mode != "train" else 0
    wanted = ranks * cluster.threads_per_rank + engines * cluster.threads_per_engine
    fix = "it runs, slower: lower cluster.threads_per_rank, trainer.num_ranks or engine_num"
    said = f"{wanted} threads compute, {there} cores are there"
    return checked("cores", said, wanted <= there, fix, WARN)


def rank_memory(wanted: MemoryPlan, there: int) -> Finding:
    """`there`: bytes of a device; 0: not known, or none."""
    parts = {
        "weights": wanted.weights,
        "gradients": wanted.gradients,
        "optimizer": wanted.optimizer,
        "reference and critic": wanted.beside,
        "activations, about": wanted.activations,
    }
    said = f"{gigabytes(wanted.rank)}: " + ", ".join(
        f"{name} {gigabytes(size)}" for name, size in parts.items() if size
    )
    fix = (
        "more trainer.megatron.*_size, "
        "trainer.recompute_granularity=full or a lower max_token_len_per_gpu"
    )
    if not there:
        return Finding(OK, "memory per rank", said)
    said += f"; a device has {gigabytes(there)}"
    return checked("memory per rank", said, wanted.rank <= FULL * there, fix)


def host_memory(config: Config, wanted: MemoryPlan, on_cpu: bool) -> Finding:
    """Staging always lies in the host's memory; on CPUs everything does."""
    ranks = int(config.trainer.num_ranks or 1) if config.mode in ("both", "train") else 0
    engines = engine_cards(config) if config.mode != "train" else 0
    needed = ranks * (PROCESS + wanted.staging) + engines * PROCESS
    if on_cpu:
        needed += ranks * wanted.rank + engines * wanted.engine
    there = available()
    fix = (
        "lower trainer.checkpoint.host_memory_gb, "
        "explorer.rollout_model.kv_cache_gb or the number of parts"
    )
    said = f"{gigabytes(needed)} wanted, {gigabytes(there)} available"
    return checked("host memory", said, needed <= FULL * there, fix)


def available() -> int:
    """Of this machine, or of the container that this is."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (most := limit.read_text(encoding="ascii").strip()) != "max":
        free = min(free, int(most) - int(used.read_text(encoding="ascii")))
    return free


def disk(config: Config, wanted: MemoryPlan) -> Finding:
    if config.mode not in ("both", "train"):
        return Finding(OK, "disk", f"{configs.job_dir(config)} can be written")
    trainer, steps = config.trainer, int(config.trainer.total_steps or 0)
    saves = 1 + (steps // trainer.save_interval if trainer.save_interval else 0)
    most = trainer.max_checkpoints_to_keep + trainer.checkpoint.keep_best
    kept = min(saves, most or saves) + 1  # and the one being written
    exports = {"never": 0, "last": 1, "always": saves}[trainer.save_hf_checkpoint]
    needed = exports * wanted.export
    needed += 0 if trainer.checkpoint.storage else kept * wanted.checkpoint
    free = shutil.disk_usage(nearest_there(configs.job_dir(config))).free
    fix = (
        "lower trainer.max_checkpoints_to_keep, "
        "or set checkpoint_root_dir or trainer.checkpoint.storage"
    )
    said = (
        f"{configs.checkpoint_root(config)}: {kept} checkpoints of "
        f"{gigabytes(wanted.checkpoint)} and {exports} export(s), {gigabytes(free)} free"
    )
    return checked("disk", said, needed <= FULL * free, fix)


def nearest_there(path: Path) -> Path:
    return path if path.exists() else nearest_there(path.parent)


def monitor(config: Config) -> Iterator[Finding]:
    given = config.monitor
    if given.monitor_type != "wandb" or given.monitor_args.get("mode", "offline") != "online":
        return
    has_key = bool(
        given.monitor_args.get("api_key")
        or os.environ.get("WANDB_API_KEY")
        or Path("~/.netrc").expanduser().is_file()
    )
    said = "Weights & Biases, online" + ("" if has_key else ", without a key")
    fix = "set WANDB_API_KEY, run `wandb login`, or set monitor.monitor_args.mode=offline"
    yield checked("monitor", said, has_key, fix)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def short(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
