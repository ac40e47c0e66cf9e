"""Rules of the run as a whole: its names, synchronization, devices, engines, explorer and monitor.

In: a config as it is composed (`GIVEN`), then a filled one. Nothing is looked at but the config
itself.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import get_args

from rft.config import TRAINING, Config, arguments, engine_arguments, get, is_bitwise, nearest
from rft.monitor.sinks import SERVICES, Mode
from rft.preflight.rules import Rule, among, tasksets
from rft.preflight.rules_data import BUFFER, REPLAY, has_buffer
from rft.preflight.rules_trainer import TYPE
from rft.sync import style
from rft.trainer.feed import is_supervised

# modes of a trainer without engines, and of engines without a trainer
APART = ("train", "explore", "serve")
AUXILIARY = "explorer.auxiliary_models"
ARGUMENTS = "explorer.rollout_model.engine_args"
APART_BY = "trainer_engine=close, which is near in fp32: 1e-4"
NAME = re.compile(r"[\w.@-]{1,64}")  # it stands in addresses
FORBIDDEN = re.compile(r"[\x00-\x1f\\*?\"<>|]")
SHARED, MOST_SHARED = 0.5, 0.6  # of a card's memory, for an engine beside a trainer
COLOCATED = {  # what taking turns needs of other keys, and why
    "mode": ("both", "only a run with trainer and engines has something to share"),
    "synchronizer.sync_style": ("fixed", "trainer and engines take turns, step by step"),
    "synchronizer.sync_interval": (1, "the engines are woken by new weights"),
    "synchronizer.max_staleness": (
        0,
        "the engines sleep while the trainer works, so no rollout may be ahead",
    ),
    "synchronizer.sync_method": ("nccl", "the weights do not leave the card"),
    "synchronizer.kv": ("recompute", "nothing is kept of the cache while the engines sleep"),
    "cluster.ray_address": (None, "the engines must be on the trainer's own machine"),
}
DETERMINISTIC = {
    "synchronizer.sync_interval": 1,
    "synchronizer.sync_offset": 0,
}
ORDER = "sums over ranks come in another order than the engine's"
BITWISE = {  # what the same bits need of other keys, and why
    "deterministic": (True, "a group must be sampled from the version that is trained"),
    "explorer.rollout_model.tensor_parallel_size": (1, ORDER),
    "trainer.megatron.tensor_model_parallel_size": (1, ORDER),
    "trainer.megatron.pipeline_model_parallel_size": (1, "it was never compared"),
    "trainer.megatron.context_parallel_size": (1, ORDER),
    "model.lora_configs": ([], "an engine multiplies by an adapter in another order"),
    "model.min_response_tokens": (0, "the engine hides the end token, which the trainer counts"),
}
BITWISE_ON_CPU = {
    "trainer.dtype": ("fp32", "bf16 is rounded at other places"),
    "explorer.rollout_model.dtype": ("fp32", "bf16 is rounded at other places"),
    "explorer.rollout_model.enforce_eager": (True, "a compiled layer is not the trainer's"),
    "cluster.threads_per_rank": (1, "a row that two threads share is cut by how many there are"),
    "cluster.threads_per_engine": (1, "a row that two threads share is cut by how many there are"),
}
# of vLLM's arguments: they change which rows are computed together, and no row
HARMLESS = ("max_num_batched_tokens", "block_size")


def _names(c: Config) -> Iterator[str]:
    """They become directories: <checkpoint_root_dir>/<project>/<name>[/<stage_name>], and in it
    explorers/<explorer.name>.
    """
    for key in ("project", "name", "explorer.name"):
        value = str(get(c, key))
        parts = value.split("/")
        if FORBIDDEN.search(value) or any(
            part in ("", ".", "..") or part != part.strip() for part in parts
        ):
            yield f"{key}={value!r} is no name of a directory: use letters, digits, - and _"
    if (stage := c.stage_name) is not None and (
        stage in ("", ".", "..") or "/" in stage or FORBIDDEN.search(stage)
    ):
        yield (
            f"stages: stage_name={stage!r} is no name of a directory: use letters, digits, - and _"
        )


GIVEN = (  # asked before anything is filled in
    Rule("name", _names, reads="project stage_name explorer.name"),
    Rule(
        "synchronizer.sync_style",
        lambda c: c.synchronizer.sync_style not in (*style.STYLES, *style.ALIASES),
        lambda c: nearest(c.synchronizer.sync_style, style.STYLES, "synchronizer.sync_style"),
    ),
)


def _method(c: Config) -> Iterator[str]:
    method = c.synchronizer.sync_method
    if c.mode in APART and method != "checkpoint" and not is_supervised(c.algorithm):
        other = "engine" if c.mode == "train" else "trainer"
        yield (
            f"synchronizer.sync_method={method} with mode={c.mode}: there is no {other} here; set "
            "synchronizer.sync_method=checkpoint, or leave it out"
        )


def _least_staleness(c: Config) -> int:
    return style.least_staleness(c.synchronizer.sync_interval, c.synchronizer.sync_offset)


ALL_BYTES = "set synchronizer.sync=full, or leave it out"


def _no_delta(key: str, test: Callable[[Config], bool], why: str, more: str = "") -> Rule:
    return Rule(
        f"synchronizer.sync {key}{more}",
        lambda c: c.synchronizer.sync == "delta" and test(c),
        lambda c: f"synchronizer.sync=delta with {key}={get(c, key)}: {why}; {ALL_BYTES}",
    )


SYNC = (
    Rule(
        "explorer.version mode",
        lambda c: c.explorer.version is not None and c.mode not in ("bench", "serve"),
        "explorer.version={explorer.version} with mode={mode}: a version that was kept is served "
        "or evaluated; set mode=serve or mode=bench, or leave it out",
    ),
    Rule(f"synchronizer.sync_method mode {TYPE}", _method),
    Rule(
        "synchronizer.sync_method synchronizer.lora_sync",
        lambda c: (
            c.synchronizer.sync_method == "checkpoint" and c.synchronizer.lora_sync == "merged"
        ),
        "synchronizer.sync_method=checkpoint with lora_sync=merged: a checkpoint of this run "
        "holds the adapter alone; set synchronizer.sync_method=nccl, or "
        "synchronizer.lora_sync=adapter",
    ),
    Rule(
        "synchronizer.receive synchronizer.sync_method cluster.colocate",
        lambda c: c.synchronizer.receive == "direct" and c.synchronizer.sync_method != "nccl",
        "synchronizer.receive=direct with sync_method={synchronizer.sync_method}: only streams "
        "can be received while engines pause; set synchronizer.receive=staged",
    ),
    _no_delta(
        "synchronizer.sync_method",
        # a stage that only trains, or only explores, has no streams, and delta says nothing to it
        lambda c: c.mode == "both" and c.synchronizer.sync_method != "nccl",
        "only streams go to engines that say what they have",
        " mode",
    ),
    _no_delta(
        "synchronizer.receive",
        lambda c: c.synchronizer.receive != "staged",
        "no engine keeps the version before, in which something could be changed",
        " cluster.colocate",
    ),
    _no_delta(
        "device",
        lambda c: c.device == "cuda",
        "buckets of a GPU are packed there, and go in full",
    ),
    Rule(
        "synchronizer.max_staleness synchronizer.sync_interval synchronizer.sync_offset mode",
        lambda c: c.mode == "both" and int(c.synchronizer.max_staleness or 0) < _least_staleness(c),
        lambda c: (
            f"synchronizer.max_staleness={c.synchronizer.max_staleness} with "
            f"sync_interval={c.synchronizer.sync_interval} and "
            f"sync_offset={c.synchronizer.sync_offset} can never be kept: set max_staleness to at "
            f"least {_least_staleness(c)}, leave it out, or set sync_interval or sync_offset lower"
        ),
    ),
)


def _only_deterministic(key: str, only: str | int) -> Rule:
    return Rule(
        f"{key} deterministic",
        lambda c: c.deterministic and get(c, key) != only,
        lambda c: (
            f"deterministic=true with {key}={get(c, key)}: it is only kept with "
            f"{key}={only}, set that"
        ),
    )


def _only_bitwise(key: str, only: object, why: str, kinds: str) -> Rule:
    above = "trainer.dtype" if key.endswith("rollout_model.dtype") else ""  # whose default it has
    fix = "leave it out" if only == [] else f"set {key}={str(only).lower()}"
    return Rule(
        f"{key} trainer_engine device mode {above}",
        lambda c: is_bitwise(c) and c.device in kinds.split() and get(c, key) != only,
        lambda c: (
            f"trainer_engine=bitwise with {key}={_said(get(c, key))}: {why}; {fix}, or {APART_BY}"
        ),
    )


def _said(value: object) -> str:
    return "[...]" if isinstance(value, list) else str(value).lower()


def _drawn_otherwise(c: Config) -> Iterator[str]:
    """Log-probabilities are those of the distribution that was sampled from."""
    for key, taskset, is_eval in () if not is_bitwise(c) else tasksets(c):
        for name, off in (("top_p", 1.0), ("top_k", -1)):
            if not is_eval and getattr(taskset.rollout_args, name) not in (None, off):
                yield (
                    f"{key}.rollout_args.{name} with trainer_engine=bitwise: the engine leaves out "
                    f"words that the trainer counts; leave it out, or {APART_BY}"
                )


def _other_kernels(c: Config) -> Iterator[str]:
    for name in sorted(set(get(c, ARGUMENTS)) - set(HARMLESS)) if is_bitwise(c) else ():
        yield (
            f"{ARGUMENTS}.{name} with trainer_engine=bitwise: of vLLM's arguments only "
            f"{', '.join(HARMLESS)} are known to change no row; leave it out, or {APART_BY}"
        )


def _only_colocated(key: str, only: str | int | None, why: str) -> Rule:
    fix = "leave that out" if only is None else f"set {key}={only}"
    return Rule(
        f"{key} cluster.colocate",
        lambda c: c.cluster.colocate and get(c, key) != only,
        lambda c: (
            f"cluster.colocate=true with {key}={get(c, key)}: {why}; {fix}, or colocate=false"
        ),
    )


SHARE = "explorer.rollout_model.gpu_memory_utilization"
DEVICES = (
    Rule(
        "device deterministic trainer_engine",
        lambda c: c.deterministic and c.device != "cpu" and c.trainer_engine != "bitwise",
        "deterministic=true with device={device}: it is only kept with device=cpu, set that, or "
        "trainer_engine=bitwise, which takes kernels of one order there",
    ),
    *(_only_deterministic(key, only) for key, only in DETERMINISTIC.items()),
    *(_only_bitwise(key, only, why, "cpu cuda") for key, (only, why) in BITWISE.items()),
    *(_only_bitwise(key, only, why, "cpu") for key, (only, why) in BITWISE_ON_CPU.items()),
    Rule("buffer.explorer_input trainer_engine mode", _drawn_otherwise),
    Rule(f"{ARGUMENTS} trainer_engine mode", _other_kernels),
    *(_only_colocated(key, only, why) for key, (only, why) in COLOCATED.items()),
    Rule(
        f"{SHARE} device cluster.colocate",
        lambda c: (
            c.cluster.colocate
            and c.device != "cpu"
            and c.explorer.rollout_model.gpu_memory_utilization > MOST_SHARED
        ),
        f"{SHARE}={{{SHARE}:g}} with cluster.colocate=true: it is the engine's share while "
        "it decodes, and weights, gradients and optimizer state of the trainer stay on the "
        f"card; set it to at most {MOST_SHARED}, or leave it out for {SHARED}",
    ),
)


def _variables(c: Config) -> Iterator[str]:
    explorer = c.explorer
    given = [f"env_vars.{name}" for name in explorer.env_vars]
    for one in [*given, *(f"passed_variables.{name}" for name in explorer.passed_variables)]:
        name = one.partition(".")[2]
        if name.startswith("RFT_") or not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield f"explorer.{one}: give names of variables of your own; RFT_ are rft's"


def _is_no_address(c: Config) -> bool:
    try:
        ipaddress.ip_address(c.explorer.listen_address)
    except ValueError:
        return True
    return False


OVER = "explorer.over_rollout.ratio"
OVER_IS = f"{OVER}={{{OVER}:g}}"
EXPLORER = (
    Rule(
        "explorer.reward_timeout explorer.max_timeout",
        lambda c: c.explorer.reward_timeout > c.explorer.max_timeout,
        "explorer.reward_timeout={explorer.reward_timeout:g} is longer than "
        "max_timeout={explorer.max_timeout:g}, which a task has for everything: lower it",
    ),
    Rule("explorer.env_vars explorer.passed_variables", _variables),
    Rule(
        f"{OVER} {BUFFER}.storage_type {REPLAY}.enable mode {TYPE}",
        lambda c: (
            c.explorer.over_rollout.ratio > 0
            and has_buffer(c)
            and (
                c.buffer.trainer_input.experience_buffer.storage_type == "sql"
                or c.buffer.trainer_input.experience_buffer.replay_buffer.enable
            )
        ),
        f"{OVER_IS} needs a queue without a replay buffer, whose steps wait for certain tasks: "
        f"set it to 0, or {BUFFER}.storage_type=queue and {REPLAY}.enable=false",
    ),
    Rule(
        f"{OVER} mode",
        lambda c: c.explorer.over_rollout.ratio > 0 and c.mode != "both",
        f"{OVER_IS} with mode={{mode}}: no step waits for tasks here; set it to 0",
    ),
    Rule(
        f"{OVER} synchronizer.sync_style",
        lambda c: c.explorer.over_rollout.ratio > 0 and c.synchronizer.sync_style == "fixed",
        f"{OVER_IS} with synchronizer.sync_style=fixed, in which every step takes all its tasks: "
        "set sync_style to dynamic_by_explorer, trainer_driven or fully_async",
    ),
    Rule(
        f"{OVER} deterministic",
        lambda c: c.explorer.over_rollout.ratio > 0 and c.deterministic,
        f"{OVER_IS} with deterministic=true: who is late is a matter of time; set it to 0",
    ),
    Rule(
        "explorer.listen_address",
        _is_no_address,
        "explorer.listen_address={explorer.listen_address} is no IP address: give 127.0.0.1 "
        "for this machine alone, or one of its own addresses, or 0.0.0.0 for all",
    ),
)


def _auxiliary(c: Config) -> Iterator[str]:
    for number, one in enumerate(c.explorer.auxiliary_models):
        key = f"{AUXILIARY}.{number}"
        if not NAME.fullmatch(one.name):
            yield f"{key}.name={one.name!r}: use letters, digits and . @ - _, at most 64"
    names = [one.name for one in c.explorer.auxiliary_models]
    if double := next((name for name in names if names.count(name) > 1), None):
        yield f"{AUXILIARY}: the name `{double}` is used twice: give each model its own"


def _arguments(c: Config) -> Iterator[str]:
    for number, one in enumerate(c.explorer.auxiliary_models):
        yield from engine_arguments.problems(f"{AUXILIARY}.{number}.engine_args", one.engine_args)


def _speculation(c: Config) -> Iterator[str]:
    """A trainer of the same run compares; another one's learns from what nobody has looked at."""
    name = engine_arguments.speculation(get(c, ARGUMENTS))
    if name and c.mode not in TRAINING:
        yield (
            f"{ARGUMENTS}.{name} with mode={c.mode}: there is no trainer here to compare the "
            "engines' log-probabilities with; use mode=both, or leave it out"
        )


def _parsers(c: Config) -> Iterator[str]:
    beside = ((f"{AUXILIARY}.{n}", one) for n, one in enumerate(c.explorer.auxiliary_models))
    for key, one in (("explorer.rollout_model", c.explorer.rollout_model), *beside):
        for word, known in engine_arguments.PARSERS.items():
            name = getattr(one, word)
            if name is not None and name not in known:
                yield nearest(name, known, f"{key}.{word}")


ENGINES = (
    Rule(AUXILIARY, _auxiliary),
    Rule(AUXILIARY, _arguments),
    Rule(f"explorer.rollout_model {AUXILIARY}", _parsers),
    Rule(ARGUMENTS, lambda c: engine_arguments.problems(ARGUMENTS, get(c, ARGUMENTS), True)),
    Rule(f"{ARGUMENTS} mode", _speculation),
    Rule(
        f"{AUXILIARY} cluster.colocate",
        lambda c: c.explorer.auxiliary_models and c.cluster.colocate,
        f"{AUXILIARY} with cluster.colocate=true: the cards are the trainer's and the "
        "policy's, in turns; leave one of them out",
    ),
)


def _monitor(c: Config) -> Iterator[str]:
    """A monitor is built by the first rank, when engines already run: what it will not take is said
    now.
    """
    kind, args = c.monitor.monitor_type, c.monitor.monitor_args
    known, modes = arguments.options(SERVICES[kind]), get_args(Mode)
    for name, value in args.items():
        if not arguments.takes(SERVICES[kind], name):
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            yield f"monitor.monitor_args.{name}: monitor_type={kind} does not take it; {takes}"
        elif kind == "wandb" and name == "mode":
            if value not in modes:
                yield f"monitor.monitor_args.mode={value}: use {', '.join(modes)}"
        elif name in known:
            yield from arguments.wrong_value(f"monitor.monitor_args.{name}", value, known[name])
    for name in arguments.missing(args, known):
        yield f"monitor.monitor_args.{name} is not set: monitor_type={kind} needs it"


MONITOR = (
    among("monitor.monitor_type", SERVICES),
    Rule("monitor.monitor_args monitor.monitor_type", _monitor),
)
