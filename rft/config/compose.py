"""Composition: from a command line to one checked config per stage.

    overrides ──► Hydra over the defaults of the schema ──► every value in its type
              ──► stages merged over the global keys, interpolations resolved ──► `Config`s

In: words of a command line, or what Hydra made of them. Out: plain configs by the keys of the
schema, then `Config` objects, which are read-only from there on: `save` writes `resolved.yaml`, and
ranks and actors `load` only that file. Invariant: what is refused is refused with every problem
that can be seen at this point, each named by its key.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from rft.config.keys import known_keys, leaf_keys
from rft.config.schema import Config
from rft.config.validate import normalized, parsed, unknown
from rft.ground import redact
from rft.ground.errors import ConfigError, refuse_all

CONFIG_DIR = str(Path(__file__).resolve().parents[2] / "configs")
VALUED = (  # Hydra's own flags that take a value
    "--config-dir",
    "--config-name",
    "--config-path",
    "-cd",
    "-cn",
    "-cp",
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--info",
    "-i",
    "--experimental-rerun",
)


@functools.cache
def register_schema() -> None:
    """Give Hydra the defaults that it composes over.

    Sections are open: which keys there are is said here, for all at once, and not by Hydra for the
    first that it meets.
    """
    base = OmegaConf.create(asdict(Config()))
    for name in base:
        if OmegaConf.is_config(base._get_node(name)):
            OmegaConf.set_struct(base[name], False)
    ConfigStore.instance().store(name="rft_schema", node=base)


# --- the command line -----------------------------------------------------------------------------


def check_overrides(arguments: list[str]) -> None:
    """Name the nearest key for every misspelt override, with or without Hydra's `+`, before Hydra
    composes anything.
    """
    refuse_all(_refused_words(arguments).values())


def check_composition(arguments: list[str]) -> None:
    """Compose once before Hydra's own main does, to say in one line a problem what its traceback
    says in twenty.
    """
    values = _flag_values(arguments)
    compose([word for word in arguments if not word.startswith("-") and word not in values])


def compose(overrides: list[str]) -> DictConfig:
    """The config that these overrides mean, every key there and each value in its type.

    Raises ConfigError with everything that can be said about them.
    """
    register_schema()
    refused = _refused_words(overrides)
    try:
        with hydra.initialize_config_dir(CONFIG_DIR, version_base="1.3"):
            raw = hydra.compose("train", [word for word in overrides if word not in refused])
        composed = normalized(raw)
    except ConfigError as error:
        raise ConfigError(*refused.values(), *error.problems) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(*refused.values(), explain(error.__cause__ or error)) from error
    refuse_all(refused.values())
    return composed


def _refused_words(arguments: list[str]) -> dict[str, str]:
    """What to say of each word of a command line that is no override of a key that there is."""
    groups = {path.name for path in Path(CONFIG_DIR).iterdir() if path.is_dir()} | {"hydra"}
    known = groups.union(known_keys())
    # what is inside is checked with the config
    free = (*(f"{key}." for key in leaf_keys()), "hydra.")
    flags = _flag_values(arguments)
    refused = {}
    for word in arguments:
        key = word.split("=", 1)[0].lstrip("+~").split("@")[0]
        if word in flags or word.startswith("-"):
            continue
        if "=" not in word and not word.startswith("~"):
            refused[word] = (
                f"`{word}` is no override: write section.key=value, or --config FILE for a file of "
                "them"
            )
        elif "=" in word and not ("/" in key or key in known or key.startswith(free)):
            refused[word] = unknown(key)
    return refused


def _flag_values(arguments: list[str]) -> set[str]:
    """Values of Hydra's own flags, which are no overrides: `--config-dir DIR` and its like."""
    return {value for flag, value in zip(arguments, arguments[1:], strict=False) if flag in VALUED}


def check_stage_overrides(raw: DictConfig, overrides: list[str]) -> None:
    """Refuse keys of the command line that would do nothing, because every stage sets them for
    itself.
    """
    stages = [
        stage for stage in raw.stages if isinstance(stage, DictConfig)
    ]  # others are refused later, by name
    problems = []
    for line in overrides if stages else []:
        key = line.split("=", 1)[0].lstrip("+~")
        inner = re.sub(r"^stages\.\d+\.", "", key)
        if OmegaConf.select(raw, f"every_stage.{inner}") is not None:
            problems.append(
                f"{key}: every_stage.{inner} wins over it, so it would do nothing: set "
                f"every_stage.{inner}"
            )
        elif all(OmegaConf.select(stage, key) is not None for stage in stages):
            names = " or ".join(f"stages.{number}.{key}" for number in range(len(stages)))
            problems.append(
                f"{key} is set by every stage for itself, so the command line's would do nothing: "
                f"set {names}, or "
                f"+every_stage.{key}"
            )
    refuse_all(problems)


def explain(error: Exception) -> str:
    """One line out of an OmegaConf or Hydra exception."""
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    text = " ".join(str(error).split("\n\n")[0].split("full_key:")[0].split())
    return f"{key}: {text}" if key else text


# --- stages ---------------------------------------------------------------------------------------


def stage_configs(raw: DictConfig) -> list[Config]:
    """One full config per stage: each stage's keys are merged, key by key, over the global ones,
    and `every_stage` over that. No stages: one config.
    """
    base = normalized(raw)
    stages, over = list(base.stages), base.every_stage.copy()
    base.stages, base.every_stage = [], {}
    if strange := next(
        (key for key in ("stages", "every_stage", "stage_name") if key in over), None
    ):
        raise ConfigError(
            f"every_stage.{strange}: a stage has none; give keys of a stage, like "
            "every_stage.trainer.total_steps"
        )
    if not stages:
        return [to_config(base)]
    if strange := next(
        (stage for stage in stages if not isinstance(stage, DictConfig) or "stages" in stage), None
    ):
        raise ConfigError(
            f"stages: {strange} is no section of keys, or has stages of its own: give each a "
            "stage_name and its keys"
        )
    names = [str(stage.get("stage_name")) for stage in stages]
    if len(set(names)) != len(names) or "None" in names:
        raise ConfigError(f"stages: every stage needs its own stage_name, got {names}")
    problems: list[str] = []
    configs = []
    for stage in stages:
        try:
            configs.append(to_config(OmegaConf.merge(base, stage, over)))  # type: ignore[arg-type]
        except ConfigError as error:
            problems += error.problems
    refuse_all(problems)
    return configs


def to_config(raw: DictConfig | dict[str, Any]) -> Config:
    """A `Config` out of plain data by its keys, interpolations resolved; raises ConfigError for
    everything that is wrong or missing.
    """
    full = normalized(raw if isinstance(raw, DictConfig) else OmegaConf.create(raw))
    texts = list(_texts(OmegaConf.to_container(full, resolve=False), ""))
    missing = sorted(key for key, text in texts if text == MISSING)
    problems = [f"{key} is not set: give it a value" for key in missing]
    for key in (key for key, text in texts if "${" in text):
        try:
            OmegaConf.select(full, key, throw_on_missing=True)
        except OmegaConfBaseException as error:  # of a key that is not set, that is said already
            if not (missing and isinstance(error, InterpolationToMissingValueError)):
                problems.append(explain(error))
    refuse_all(problems)
    return parsed(OmegaConf.to_container(full, resolve=True))  # type: ignore[arg-type]


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every text in plain data."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(value, f"{key}.{name}".lstrip("."))


# --- the file of a run ----------------------------------------------------------------------------


def save(config: Config, path: Path) -> None:
    """Write the resolved config that ranks and actors read; of a secret only the name of the
    variable that brings it to them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = OmegaConf.to_yaml(OmegaConf.create(redact.passed_on(asdict(config))))
    path.write_text(text, encoding="utf-8")


def load(path: str | Path) -> Config:
    return to_config(OmegaConf.load(path))  # type: ignore[arg-type]
