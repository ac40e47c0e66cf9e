"""Entry point: `python -m rft.train experiment=NAME section.key=value ...` composes a config and
runs its stages.

In: a recipe, or a file (`--config FILE`, `rft.config.file`), and Hydra's command line over
`configs/`. Out: exit code 0, 2 for a config that cannot run (one message naming key and fix), or
the code of the part that failed. Under an outer torchrun or srun this process becomes a trainer
rank, not a supervisor (`rft.run.outer`). Nothing runs at import: child processes import this module
again.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rft import config as configs
from rft.config import Config, ConfigError, Draft
from rft.config import file as config_file
from rft.config.compose import CONFIG_DIR
from rft.extras import sweep as sweeps
from rft.ground import plugins
from rft.ground.errors import Problem, problems_of, refuse, refuse_all, unreadable
from rft.ground.plugins import imported
from rft.ground.process import raise_open_files

HANDED = ("mode", "model", "trainer.save_hf_checkpoint")  # keys of what a stage gives to the next
ASKING = {"--help", "-h", "--info", "--hydra-help"}  # Hydra answers, and composes nothing


def main() -> None:
    if __package__ in (None, ""):
        sys.exit(
            "rft: run `python -m rft.train ...`; as a file, rft/megatron would hide megatron-core"
        )
    configs.register_schema()
    raise_open_files()
    try:
        if sweeps.is_multirun(sys.argv[1:]):
            from rft.run.outer import launched

            words = sys.argv[1:] = config_file.registered(sys.argv[1:])
            configs.check_overrides(words)
            sweeps.check_arguments(words, launched())
        elif ASKING.intersection(sys.argv[1:]):
            sys.argv[1:] = config_file.registered(sys.argv[1:])
            configs.check_overrides(sys.argv[1:])
        else:
            sys.argv[1:] = readable(sys.argv[1:])
    except ConfigError as error:
        sys.exit(refuse(config_file.located(error)))
    try:
        composed()
    except KeyboardInterrupt:  # before the supervisor listens: nothing has been started
        sys.exit(130)


def readable(arguments: list[str]) -> list[str]:
    """The words for Hydra, which all can be read: a problem is said in a line before Hydra says it
    in a traceback.

    Raises ConfigError with what cannot be read, and with everything else that is wrong.
    """
    words, told = config_file.read_file(arguments)
    raw, told = configs.drafted(words, told)
    told += configs.idle_overrides(raw, [word for word in words if not word.startswith("-")])
    if told and config_file.is_first():
        started_stages(raw, told)
    refuse_all(problem.sentence for problem in told)
    return words


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
        code = outer.join(raw, started_stages, checked) if outer.launched() else run(raw)
    except ConfigError as error:
        code = refuse(config_file.located(error))
    sys.exit(code)


def run(raw: DictConfig) -> int:
    """Check everything, then run all stages in order and the recipe's closing function; returns the
    exit code.
    """
    from rft.preflight.rules_data import notes
    from rft.preflight.rules_machine import warnings
    from rft.run import launch

    stages = started_stages(raw)
    for line in warnings(stages[0]):
        print(f"rft: warning: {line}", file=sys.stderr)
    for stage in stages:
        for line in notes(stage):
            print(f"rft: {line}", file=sys.stderr)
    return launch.run_stages(stages, checked)


def started_stages(raw: DictConfig, told: Sequence[Problem] = ()) -> list[Config]:
    """Stages that can start on this machine; `told` as below."""
    from rft.preflight.rules_machine import missing_here

    return prepared_stages(raw, told, missing_here)


def prepared_stages(
    raw: DictConfig,
    told: Sequence[Problem] = (),
    lacks: Callable[[list[Config]], Iterable[str]] = lambda stages: (),
) -> list[Config]:
    """Stage configs, filled and checked; the recipe's `prepare` has written what they point to.

    `told`: what cannot be read of the config, and is left out of `raw`; `lacks`: what the machine
    has not. Raises ConfigError with these and with everything else that is wrong.
    """
    from rft import preflight
    from rft.run import stages as handing_over

    data, wrong = configs.examined(OmegaConf.to_container(raw, resolve=False))  # type: ignore[arg-type]
    raw, told = configs.completed(data), [*told, *wrong]
    drafts = configs.stage_drafts(raw, told)
    if not any(draft.problems for draft in drafts) and rename_if_taken(raw):
        drafts = configs.stage_drafts(raw)
    stages, unread = [draft.config for draft in drafts], list[str]()
    problems = list(problems_of(_prepare, drafts))
    model = stages[0].model.model_path
    if problems or not (unreadable(model) or Path(model).exists()):
        unread += preflight.WRITTEN if stages[0].prepare else ()
    if of_plugins := problems_of(_load_plugins, stages):
        problems, unread = [*problems, *of_plugins], [*unread, *preflight.NAMING]
    for draft in drafts:
        draft.unread += unread
    problems += problems_of(preflight.prepare, drafts)
    if not any(key.startswith(HANDED) for draft in drafts for key in draft.refused):
        problems += problems_of(handing_over.check, stages)
    refuse_all((*problems, *lacks(stages)))
    return stages


def _prepare(drafts: list[Draft]) -> None:
    """Write what the config points to; nothing where a value of it is still wrong."""
    config = drafts[0].config
    if config.prepare and not any(draft.problems for draft in drafts):
        imported(config.prepare)(config)


def _load_plugins(stages: list[Config]) -> None:
    plugin_dirs = plugins.load(stages[0].plugin_dirs)
    for config in stages:
        config.plugin_dirs = plugin_dirs


def checked(config: Config) -> None:
    """Refuse a filled config that cannot run."""
    from rft import preflight

    preflight.check(config)


def rename_if_taken(raw: DictConfig) -> bool:
    """continue_from_checkpoint=false never writes into an earlier run: the run gets a time in its
    name (row A13), and the answer is true. The same launch has the same run, whichever of its
    starts this is.
    """
    directory = Path(raw.checkpoint_root_dir) / raw.project / raw.name
    key = "continue_from_checkpoint"
    if configs.converted(key, raw[key]) or unreadable(directory):  # then it is refused later
        return False
    is_taken = directory.is_dir() and any(directory.iterdir())
    if is_taken:
        from rft.run import owners

        raw.name = owners.own_run(directory) or f"{raw.name}_{datetime.now():%Y%m%d%H%M%S}"
    return is_taken


if __name__ == "__main__":
    main()
