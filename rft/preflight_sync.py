"""What a config asks of weight synchronization: style, interval, offset, staleness. Called by `preflight`.

In: a config whose other sections may not be checked yet (`fill_sync`), then a filled one (`check_sync`). Out: every name is one
of rft's own, `sync_method` and `max_staleness` are set; or a ConfigError for the first thing that cannot work.
"""

import shutil
from math import prod

from rft.adapters import adapter_names, lora_of
from rft.config import Config, ConfigError, nearest
from rft.feed import is_supervised
from rft.names import Dims, architecture_of, hf_names, read_hf_config
from rft.sync import style

HELD = 2  # versions in the object store at most: the one that engines have, and the next
ITEM_BYTES = {"fp32": 4, "bf16": 2}  # of trainer.dtype
SHARED_MEMORY = "/dev/shm"  # where Ray's object store lies
METHODS = {"online": "nccl", "offline": "checkpoint"}  # names that other systems use
APART = ("train", "explore", "serve")  # modes of a trainer without engines, and of engines without a trainer


def fill_sync(config: Config) -> None:
    """Aliases become rft's names, and the staleness follows from the style unless it is given."""
    sync = config.synchronizer
    sync.sync_method = sync.sync_method or ("checkpoint" if config.mode in APART else "nccl")
    sync.sync_method = METHODS.get(sync.sync_method, sync.sync_method)
    sync.sync_style = style.ALIASES.get(sync.sync_style, sync.sync_style)
    if sync.sync_style not in style.STYLES:
        raise ConfigError(nearest(sync.sync_style, style.STYLES, "synchronizer.sync_style"))
    shared = config.buffer.trainer_input.experience_buffer.storage_type == "sql" and config.mode in APART
    if sync.max_staleness is None and not shared:  # over several processes only the age that is asked for is kept
        sync.max_staleness = style.default_staleness(sync.sync_style, sync.sync_interval, sync.sync_offset)


def check_sync(config: Config) -> None:
    sync = config.synchronizer
    if config.mode in APART and sync.sync_method != "checkpoint" and not is_supervised(config.algorithm):
        other = "engine" if config.mode == "train" else "trainer"
        raise ConfigError(
            f"synchronizer.sync_method={sync.sync_method} with mode={config.mode}: there is no {other} here; set "
            "synchronizer.sync_method=checkpoint, or leave it out"
        )
    _check_store(config)
    if sync.sync_method == "checkpoint" and sync.lora_sync == "merged":
        raise ConfigError(
            "synchronizer.sync_method=checkpoint with lora_sync=merged: a checkpoint of this run holds the adapter alone; set "
            "synchronizer.sync_method=nccl, or synchronizer.lora_sync=adapter"
        )
    if sync.receive == "direct" and sync.sync_method != "nccl":
        raise ConfigError(
            f"synchronizer.receive=direct with sync_method={sync.sync_method}: only streams can be received while engines pause; "
            "set synchronizer.receive=staged"
        )
    least = style.least_staleness(sync.sync_interval, sync.sync_offset)
    if config.mode == "both" and int(sync.max_staleness or 0) < least:
        raise ConfigError(
            f"synchronizer.max_staleness={sync.max_staleness} with sync_interval={sync.sync_interval} and "
            f"sync_offset={sync.sync_offset} can never be kept: set max_staleness to at least {least}, leave it out, or set "
            "sync_interval or sync_offset lower"
        )


def stored_bytes(config: Config) -> int:
    """What weight synchronization needs of Ray's object store: by `memory`, the versions that are there at a time."""
    if config.synchronizer.sync_method != "memory":
        return 0
    hf = read_hf_config(config.model.model_path)
    dims, architecture = Dims.of(hf), architecture_of(hf)
    lora = lora_of(config.model.lora_configs, dims) if config.synchronizer.lora_sync == "adapter" else None
    shapes = adapter_names(dims, architecture, lora) if lora else hf_names(dims, architecture)
    one = sum(prod(shape) for shape in shapes.values()) * ITEM_BYTES[config.trainer.dtype]
    return HELD * (one + one // 16)  # a bucket's pieces are aligned, and the store has headers


def _check_store(config: Config) -> None:
    """Ray would go on without room in shared memory, at a tenth of the speed."""
    needed = stored_bytes(config)
    free = shutil.disk_usage(SHARED_MEMORY).free if needed and not config.cluster.ray_address else needed
    if needed > free:
        raise ConfigError(
            f"synchronizer.sync_method=memory holds {HELD} versions of the weights, {needed / 1e9:.2f} GB, in {SHARED_MEMORY}, "
            f"where {free / 1e9:.2f} GB are free: make it larger, or set synchronizer.sync_method=nccl"
        )
