"""Does a run fit a machine? Whether what it will want (`rft.preflight.memory_plan`) is there.

In: a filled config, and what two processes of this machine have told of its devices. Out: the
findings of `rft doctor` and `rft studio` about memory, cores and disk. Loads no torch.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft import config as configs
from rft.config import TRAINING, Config, is_remote
from rft.config.layout import batch_bytes, stored_bytes
from rft.ground.host_memory import available
from rft.preflight.inputs_models import SHARED_MEMORY
from rft.preflight.memory_plan import MemoryPlan, gigabytes, listed, on_host, plan
from rft.run.cards import engine_cards
from rft.sync import transfer

OK, WARN, FAIL = "ok", "warn", "fail"
FULL = 0.9  # of a memory: what is planned beyond this will not fit


@dataclass(frozen=True)
class Finding:
    level: str
    what: str
    said: str
    fix: str = ""


def checked(what: str, said: str, fits: bool, fix: str, otherwise: str = FAIL) -> Finding:
    """A finding that is ok, or else tells what to do."""
    return Finding(OK, what, said) if fits else Finding(otherwise, what, said, fix)


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
    if config.mode in TRAINING:
        yield rank_memory(wanted, 0 if isinstance(met, str) or on_cpu else int(met["memory"]))
    yield host_memory(config, wanted, on_cpu)
    yield from weight_transfer(config)
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
    ranks = int(config.trainer.num_ranks or 0) if config.mode in TRAINING else 0
    engines = engine_cards(config) if config.mode != "train" else 0
    wanted = ranks * cluster.threads_per_rank + engines * cluster.threads_per_engine
    fix = "it runs, slower: lower cluster.threads_per_rank, trainer.num_ranks or engine_num"
    said = f"{wanted} threads compute, {there} cores are there"
    return checked("cores", said, wanted <= there, fix, WARN)


def rank_memory(wanted: MemoryPlan, there: int) -> Finding:
    """`there`: bytes of a device; 0: not known, or none."""
    said = f"{gigabytes(wanted.rank)}: {listed(wanted.on_rank)}"
    fix = (
        "more trainer.megatron.*_size, "
        "trainer.recompute_granularity=full or a lower max_token_len_per_gpu"
    )
    if not there:
        return Finding(OK, "memory per rank", said)
    said += f"; a device has {gigabytes(there)}"
    return checked("memory per rank", said, wanted.rank <= FULL * there, fix)


def weight_transfer(config: Config) -> Iterator[Finding]:
    """Of GPUs, as the links between ranks and engines are made."""
    ends = transfer.of_config(config)
    if ends is not None:
        most = max(end.bytes() for end in ends)
        fix = (
            "lower synchronizer.bucket_bytes or NCCL_BUFFSIZE, or use more engines: fewer ranks "
            "then send to each"
        )
        said = str(transfer.told(config))
        yield checked("weight transfer", said, most <= transfer.BOUND, fix, WARN)


def host_memory(config: Config, wanted: MemoryPlan, on_cpu: bool) -> Finding:
    """Staging always lies in the host's memory; on CPUs everything does."""
    parts = on_host(config, wanted, on_cpu)
    needed, there = sum(parts.values()), available()
    fix = (
        "lower trainer.checkpoint.host_memory_gb, explorer.rollout_model.kv_cache_gb or the number "
        "of parts, or set synchronizer.receive=direct"
    )
    said = f"{gigabytes(needed)} wanted ({listed(parts)}), {gigabytes(there)} available"
    return checked("host memory", said, needed <= FULL * there, fix)


def disk(config: Config, wanted: MemoryPlan) -> Finding:
    if config.mode not in TRAINING:
        return Finding(OK, "disk", f"{configs.job_dir(config)} can be written")
    trainer, steps = config.trainer, int(config.trainer.total_steps or 0)
    saves = 1 + (steps // trainer.save_interval if trainer.save_interval else 0)
    most = trainer.max_checkpoints_to_keep + trainer.checkpoint.keep_best
    kept = min(saves, most or saves) + 1  # and the one being written
    exports = {"never": 0, "last": 1, "always": saves}[trainer.save_hf_checkpoint]
    needed = exports * wanted.export
    needed += 0 if trainer.checkpoint.storage else kept * wanted.checkpoint + wanted.kept
    batch = batch_bytes(config)
    needed += kept * (trainer.save_interval or 0) * batch
    free = shutil.disk_usage(nearest_there(configs.job_dir(config))).free
    fix = (
        "lower trainer.max_checkpoints_to_keep, "
        "or set checkpoint_root_dir or trainer.checkpoint.storage"
    )
    said = (
        f"{configs.checkpoint_root(config)}: {kept} checkpoints of "
        f"{gigabytes(wanted.checkpoint)}, {exports} export(s), and at most "
        f"{gigabytes(batch)} of experiences for each step since the oldest; "
        f"{gigabytes(free)} free"
    )
    if wanted.kept:
        said += f"; versions of at most {gigabytes(wanted.kept)} as long as there is room"
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


def short(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
