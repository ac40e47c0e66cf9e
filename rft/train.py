"""Entry point: `python -m rft.train experiment=NAME section.key=value ...` composes a config and runs its stages.

In: a recipe, or a file (`--config FILE`, `rft.config_file`), and Hydra's command line over `configs/`. Out: exit code 0, 2 for a
config that cannot run (one message naming key and fix), or the code of the part that failed. Under an outer torchrun or srun this
process becomes a trainer rank, not a supervisor (`rft.outer`). Nothing runs at import: child processes import this module again.
"""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rft import config as configs
from rft import config_file, plugins
from rft.config import Config, ConfigError
from rft.sweep import arguments as sweeps

VALUED = (  # Hydra's own flags that take a value
    "--config-dir", "--config-name", "--config-path", "-cd", "-cn", "-cp", "--cfg", "-c", "--package", "-p", "--info", "-i",
    "--experimental-rerun",
)  # fmt: skip
CONFIG_DIR = str(Path(__file__).resolve().parent.parent / "configs")


def main() -> None:
    if __package__ in (None, ""):
        sys.exit("rft: run `python -m rft.train ...`; as a file, rft/megatron would hide megatron-core")
    show_schema()
    try:
        sys.argv[1:] = config_file.registered(sys.argv[1:])
        check_overrides(sys.argv[1:])
        if sweeps.is_multirun(sys.argv[1:]):
            sweeps.check(sys.argv[1:])
        check_composition(sys.argv[1:])
    except ConfigError as error:
        sys.exit(refuse(error))
    try:
        composed()
    except KeyboardInterrupt:  # before the supervisor listens: nothing has been started
        sys.exit(130)


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="train")
def composed(raw: DictConfig) -> float | None:
    """Runs with the composed config; ends the process with the run's exit code. A trial of a sweep returns its objective."""
    from rft import outer, stages

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from rft.sweep.job import run_trial

        return run_trial(raw)
    try:
        stages.check_overrides(raw, list(HydraConfig.get().overrides.task))
        code = outer.join(raw) if outer.launched() else run(raw)
    except ConfigError as error:
        code = refuse(error)
    sys.exit(code)


def run(raw: DictConfig) -> int:
    """Check everything, then run all stages in order and the recipe's closing function; returns the exit code."""
    from rft import launch

    stages = prepared_stages(raw)
    code = launch.run_stages(stages)
    if code == 0 and stages[0].finish:
        imported(stages[0].finish)(stages)
    return code


def prepared_stages(raw: DictConfig) -> list[Config]:
    """Stage configs, filled and checked; the recipe's `prepare` has written what they point to."""
    from rft import preflight
    from rft import stages as handing_over

    raw = raw.copy()
    rename_if_taken(raw)
    stages = configs.stage_configs(raw)
    if stages[0].prepare:
        imported(stages[0].prepare)(stages[0])
    plugin_dirs = plugins.load(stages[0].plugin_dirs)
    for config in stages:
        config.plugin_dirs = plugin_dirs
        preflight.check(preflight.fill(config))
    handing_over.check(stages)
    return stages


def rename_if_taken(raw: DictConfig) -> None:
    """continue_from_checkpoint=false never writes into an earlier run: the run gets a time in its name (row A13)."""
    directory = Path(raw.checkpoint_root_dir) / raw.project / raw.name
    taken = directory.is_dir() and any(directory.iterdir())
    if taken and not raw.continue_from_checkpoint:
        raw.name = f"{raw.name}_{datetime.now():%Y%m%d%H%M%S}"


def imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"prepare/finish={path}: {error}; give an importable `module:function`") from error


def check_overrides(arguments: list[str]) -> None:
    """Name the nearest key for a misspelt override, with or without Hydra's `+`, before Hydra composes anything."""
    keys = set(configs.known_keys())
    groups = {p.name for p in Path(CONFIG_DIR).iterdir() if p.is_dir()} | {"hydra"}
    free = tuple(f"{key}." for key in configs.leaf_keys()) + ("hydra.",)  # what is inside is checked with the config
    flags = _flag_values(arguments)
    for argument in arguments:
        if "=" not in argument and not argument.startswith(("-", "~")) and argument not in flags:
            raise ConfigError(
                f"`{argument}` is no override: write section.key=value, or --config FILE for a file of them"
            )
        key = argument.split("=", 1)[0].lstrip("+~").split("@")[0]
        if argument.startswith("-") or "=" not in argument or "/" in key or key in keys or key in groups:
            continue
        if key.startswith(free):
            continue
        raise ConfigError(configs.unknown(key))


def check_composition(arguments: list[str]) -> None:
    """Compose once before Hydra's own main does, only to say in one line what its traceback says in twenty."""
    if sweeps.is_multirun(arguments) or {"--help", "-h", "--info", "--hydra-help"} & set(arguments):
        return
    overrides = [a for a in arguments if not a.startswith("-") and "=" in a and a not in _flag_values(arguments)]
    compose(overrides)


@functools.cache
def show_schema() -> None:
    """Hydra checks what it composes against this; once is enough."""
    ConfigStore.instance().store(name="rft_schema", node=Config)


def compose(overrides: list[str]) -> DictConfig:
    """The config that these overrides mean, with everything that can be said about them as a ConfigError."""
    show_schema()
    try:
        with hydra.initialize_config_dir(CONFIG_DIR, version_base="1.3"):
            return hydra.compose("train", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        inside = re.match(r"Could not override '([\w.]+)'", str(error))
        raise ConfigError(configs.explain(error.__cause__ or error, inside[1] if inside else "")) from error
    except (
        AssertionError,
        AttributeError,
    ) as error:  # what OmegaConf has to say of a key inside a section that is None
        said = next((o for o in overrides if o.lstrip("+").startswith(configs.TASKSET_KEY)), None)
        if said is None:
            raise
        raise ConfigError(
            f"{said}: nothing here has a taskset to change; take a recipe, like experiment=grpo"
        ) from error


def _flag_values(arguments: list[str]) -> set[str]:
    """Values of Hydra's own flags, which are no overrides: `--config-dir DIR` and its like."""
    return {value for flag, value in zip(arguments, arguments[1:], strict=False) if flag in VALUED}


def refuse(error: ConfigError) -> int:
    print(f"rft: config refused: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
