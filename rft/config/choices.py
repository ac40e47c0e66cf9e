"""Defaults that depend on the device: what each becomes where a user left it out, and why.

In: a config whose `device` is decided. Out: the same config with these keys set (`fill_choices`,
called by `rft.preflight.fill`), and, for the start of a run, each of them with the reason
(`explained`). Invariants: what the user gave is never replaced; a reason is said of the value that
is in force, never of one that it would have been.

To add one: a function of a config that yields `Choice`s, and its name in CHOOSERS, after those
whose keys it reads. It is asked again by `explained`, so it may look at the filled config only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from rft.config.derived import TRAINING
from rft.config.explorer import EngineConfig
from rft.config.schema import Config
from rft.ground.device import default_dtype, quickest_dtype

ROLLOUT = "explorer.rollout_model"
# Requests that an engine decodes at a time. vLLM's own numbers are 256 on small cards and 1024 on
# those of 70 GB and more.
FEWEST_SEQUENCES, MOST_SEQUENCES = 256, 1024
RUNNERS_ON_CPU = 8
AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """What `key` is where nobody gave it, on this device; `why` in words that end a line."""

    key: str
    value: Any
    why: str


def fill_choices(config: Config) -> None:
    """Set every key of the choosers below that is still None, and `auto` to what it means here."""
    if config.trainer.dtype == AUTO:
        config.trainer.dtype = quickest_dtype(config.device)
    for choose in CHOOSERS:
        for choice in choose(config):
            section, name = _place(config, choice.key)
            if getattr(section, name) is None:
                setattr(section, name, choice.value)


def explained(config: Config) -> list[Choice]:
    """Of a filled config: every key that the device may decide, the value in force, and why."""
    found = []
    for choose in CHOOSERS:
        for choice in choose(config):
            section, name = _place(config, choice.key)
            value = getattr(section, name)
            why = (
                choice.why if value == choice.value else f"set; the default here is {choice.value}"
            )
            found.append(Choice(choice.key, value, why))
    return found


def start_lines(config: Config) -> list[str]:
    """For the start of a run: on GPUs what was decided for the parts that it has, and what it
    costs; on a CPU what was asked of it that it does not have.
    """
    parts = {"trainer": config.mode in TRAINING, "explorer": config.mode != "train"}
    found = [one for one in explained(config) if parts[one.key.split(".")[0]]]
    if config.device != "cuda":
        return list(_emulated(found))
    said = [f"{one.key}={_word(one.value)}" for one in found]
    width = max(map(len, said), default=0)
    lines = [f"  {key:<{width}}  {one.why}" for key, one in zip(said, found, strict=True)]
    return [*lines, *_cost_of_recompute(config)]


def _emulated(found: list[Choice]) -> Iterator[str]:
    keys = [one.key for one in found if one.key.endswith(".dtype") and one.value == "bf16"]
    if keys and quickest_dtype("cpu") != "bf16":
        yield (
            f"  bf16 in {', '.join(keys)}: this CPU does not multiply it (no avx512_bf16, no "
            "amx_bf16) and emulates that, ten times slower than fp32; leave it out, or set "
            "trainer.dtype=auto"
        )


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cost_of_recompute(config: Config) -> Iterator[str]:
    """`max_staleness` of 1 or more: requests are under way whenever weights change."""
    sync, rollout = config.synchronizer, config.explorer.rollout_model
    if config.mode != "both" or sync.kv != "recompute" or not sync.max_staleness:
        return
    each, longest = int(rollout.max_num_seqs or 0), int(config.model.max_model_len or 0)
    yield (
        f"  synchronizer.kv=recompute: at every publication each engine computes the keys and "
        f"values of its requests under way again, up to max_num_seqs x max_model_len = {each} x "
        f"{longest} = {each * longest:,} tokens; kv=keep spares that, and they go on over old ones"
    )


def _place(config: Config, key: str) -> tuple[Any, str]:
    """The section that has the key, and the key's name there."""
    *sections, name = key.split(".")
    return reduce(_part, sections, config), name


def _part(section: Any, name: str) -> Any:
    return section[int(name)] if isinstance(section, list) else getattr(section, name)


# --- trainer --------------------------------------------------------------------------------------


def of_trainer(config: Config) -> Iterator[Choice]:
    why = (
        "Transformer Engine's quick attention takes bf16 alone, and engines' too"
        if config.device == "cuda"
        else "fp32 agrees with the engines to 1e-4, and not every CPU multiplies bf16"
    )
    yield Choice("trainer.dtype", default_dtype(config.device), why)


# --- engines --------------------------------------------------------------------------------------


def of_engines(config: Config) -> Iterator[Choice]:
    for key, engine in engines(config):
        yield Choice(f"{key}.dtype", config.trainer.dtype, "as trainer.dtype")
        yield _graphs(config, key)
        yield _sequences(config, key, engine)
    yield _runners(config)


def engines(config: Config) -> Iterator[tuple[str, EngineConfig]]:
    """(key, section) of every model that has engines."""
    yield ROLLOUT, config.explorer.rollout_model
    for number, model in enumerate(config.explorer.auxiliary_models):
        yield f"explorer.auxiliary_models.{number}", model


def _graphs(config: Config, key: str) -> Choice:
    if config.device == "cuda":
        return Choice(
            f"{key}.enforce_eager",
            False,
            "CUDA graphs: launching kernels one by one takes longer than a decoding step of a "
            "model up to 14B",
        )
    why = "a CPU has no graphs, and compiling is half a minute of a start, with a C++ compiler"
    return Choice(f"{key}.enforce_eager", True, why)


def groups_in_flight(config: Config) -> int | None:
    """Groups that `max_staleness` admits at a time, over all engines; None: nothing limits them."""
    staleness = config.synchronizer.max_staleness
    if config.mode != "both" or staleness is None:
        return None
    buffer, groups = config.buffer, config.buffer.batch_size
    if buffer.step_counts == "experiences" and buffer.train_batch_size:
        groups = -(-buffer.train_batch_size // _repeats(config))
    return (staleness + 1) * groups


def _sequences(config: Config, key: str, engine: EngineConfig) -> Choice:
    name = f"{key}.max_num_seqs"
    groups = groups_in_flight(config)
    if config.device != "cuda" or key != ROLLOUT or groups is None:
        return Choice(name, FEWEST_SEQUENCES, "fits any card")
    wanted = -(-groups * _repeats(config) // (engine.engine_num or 1))
    value = min(max(wanted, FEWEST_SEQUENCES), MOST_SEQUENCES)
    return Choice(
        name,
        value,
        f"max_staleness admits {wanted} sequences per engine; {FEWEST_SEQUENCES} to "
        f"{MOST_SEQUENCES} fit a card",
    )


def _runners(config: Config) -> Choice:
    """Groups in flight per engine. More than are admitted would change nothing; the number is not
    divided by the engines, because those that stay take over the groups of one that died.
    """
    name, groups = "explorer.runner_per_model", groups_in_flight(config)
    if config.device != "cuda":
        return Choice(name, RUNNERS_ON_CPU, "a CPU decodes few sequences at a time")
    sequences, repeats = int(config.explorer.rollout_model.max_num_seqs or 1), _repeats(config)
    filling = -(-sequences // repeats)
    if groups is not None and groups < filling:
        return Choice(name, groups, f"max_staleness admits {groups} groups")
    return Choice(name, filling, f"x repeat_times={repeats} fills max_num_seqs={sequences}")


def _repeats(config: Config) -> int:
    return int(config.algorithm.repeat_times or 1)


CHOOSERS = (of_trainer, of_engines)
