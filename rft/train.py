"""Entry point: `python -m rft.train experiment=NAME section.key=value ...` composes a config and
runs its stages.

In: a recipe, or a file (`--config FILE`, `rft.config.file`), and Hydra's command line over
`configs/`. Out: exit code 0, 2 for a config that cannot run (one message naming key and fix), or
the code of the part that failed. Under an outer torchrun or srun this process becomes a trainer
rank, not a supervisor (`rft.run.outer`). Nothing runs at import: child processes import this module
again.
"""

import sys
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rft import config as configs
from rft.config import Config, ConfigError
from rft.config import file as config_file
from rft.config.compose import CONFIG_DIR
from rft.extras import sweep as sweeps
from rft.ground import plugins
from rft.ground.errors import problems_of, refuse, refuse_all
from rft.ground.plugins import imported

ASKING = {"--help", "-h", "--info", "--hydra-help"}  # Hydra answers, and composes nothing


def main() -> None:
    if __package__ in (None, ""):
        sys.exit(
            "rft: run `python -m rft.train ...`; as a file, rft/megatron would hide megatron-core"
        )
    configs.register_schema()
    try:
        words = sys.argv[1:] = config_file.registered(sys.argv[1:])
        if sweeps.is_multirun(words):
            from rft.run.outer import launched

            configs.check_overrides(words)
            sweeps.check_arguments(words, launched())
        elif ASKING.intersection(words):
            configs.check_overrides(words)
        else:
            configs.check_composition(words)
    except ConfigError as error:
        sys.exit(refuse(error))
    try:
        composed()
    except KeyboardInterrupt:  # before the supervisor listens: nothing has been started
        sys.exit(130)


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="train")
def composed(raw: DictConfig) -> float | None:
    """Runs with the composed config; ends the process with the run's exit code.

    A trial of a sweep returns its objective.
    """
    from rft.run import outer

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        from rft.extras.sweep.job import run_trial

        return run_trial(raw)
    try:
        configs.check_stage_overrides(raw, list(HydraConfig.get().overrides.task))
        code = outer.join(raw, prepared_stages, checked) if outer.launched() else run(raw)
    except ConfigError as error:
        code = refuse(error)
    sys.exit(code)


def run(raw: DictConfig) -> int:
    """Check everything, then run all stages in order and the recipe's
    closing function; returns the exit code.
    """
    from rft.run import launch

    stages = prepared_stages(raw)
    code = launch.run_stages(stages, checked)
    if code == 0 and stages[0].finish:
        imported(stages[0].finish)(stages)
    return code


def prepared_stages(raw: DictConfig) -> list[Config]:
    """Stage configs, filled and checked; the recipe's `prepare` has written what they point to."""
    from rft import preflight
    from rft.run import stages as handing_over

    raw = configs.normalized(raw)
    rename_if_taken(raw)
    stages = configs.stage_configs(raw)
    if stages[0].prepare:
        imported(stages[0].prepare)(stages[0])
    plugin_dirs = plugins.load(stages[0].plugin_dirs)
    for config in stages:
        config.plugin_dirs = plugin_dirs
    refuse_all((*problems_of(preflight.prepare, stages), *problems_of(handing_over.check, stages)))
    return stages


def checked(config: Config) -> None:
    """Refuse a filled config that cannot run."""
    from rft import preflight

    preflight.check(config)


def rename_if_taken(raw: DictConfig) -> None:
    """continue_from_checkpoint=false never writes into an earlier run: the run gets a time in its
    name (row A13).
    """
    directory = Path(raw.checkpoint_root_dir) / raw.project / raw.name
    taken = directory.is_dir() and any(directory.iterdir())
    key = "continue_from_checkpoint"
    if taken and not configs.converted(key, raw[key]):
        raw.name = f"{raw.name}_{datetime.now():%Y%m%d%H%M%S}"


if __name__ == "__main__":
    main()
