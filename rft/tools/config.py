"""`rft config [experiment=NAME | --config FILE] [section.key=value ...]`: the config that these
words mean, started by nothing; `rft config --explain KEY`: `rft.tools.explain`.

In: the command line of `rft train`. Out: YAML on stdout that `rft train --config` takes: by default
only the keys whose value differs from rft's own default, with `--all` every key; of a file, on
stderr, a table of what its keys are here and of the defaults of those that it leaves out. Nothing
is filled in and no model or data file is read, so it also works where the run will not start; `rft
doctor` says what would stop it. Invariant: secrets are not printed.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rft import config as configs
from rft.config import Config, ConfigError, TasksetConfig
from rft.config import file as config_file
from rft.config.keys import shown
from rft.ground import redact
from rft.ground.errors import refuse, refuse_all


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft config",
        usage="rft config [--all] [experiment=NAME | --config FILE] [section.key=value ...]\n"
        "       rft config [--all] --verl veRL's words\n"
        "       rft config --explain KEY [experiment=NAME | --config FILE] [section.key=value ...]",
        description="Print the composed config: what differs from the defaults.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--all", action="store_true", help="every key, also where the default holds"
    )
    parser.add_argument(
        "--explain",
        metavar="KEY",
        help="what a key takes and means, its default here and in other systems",
    )
    options, words = parser.parse_known_args(argv)
    try:
        if options.explain:
            from rft.tools.explain import explained

            print(explained(options.explain, composed(words)))
            return 0
        print(text(composed(words), options.all), end="")
    except ConfigError as error:
        return refuse(config_file.located(error))
    return 0


def composed(words: list[str]) -> DictConfig:
    """What `rft train` composes from the same words."""
    words, told = config_file.read_file(words, differences)
    if strange := next((word for word in words if word.startswith("-")), None):
        raise ConfigError(f"{strange}: only --config FILE and section.key=value are composed here")
    raw, problems = configs.drafted(words, told)
    refuse_all(problem.sentence for problem in problems)
    return raw


def differences(found: config_file.Flat) -> Iterator[str]:
    """A table of what the file's keys are here, and of those that it leaves out."""
    rows = [
        (note.place, shown(note.theirs), note.here or "as it is", note.why) for note in found.notes
    ]
    rows += [(f"{one.place} (left out)", shown(one.theirs), *one[2:]) for one in found.taken]
    if rows:
        from rft.tools.tables import table

        names = ("key", "theirs", "rft's", "why")
        yield "what its keys are here; a left-out key has what stands under `theirs`"
        yield table(dict(zip(names, row, strict=True)) for row in rows)


def text(raw: DictConfig, everything: bool, as_written: bool = False) -> str:
    """`as_written`: interpolations stay what they are, and so do those of secrets anyway."""
    written: Any = OmegaConf.to_container(raw, resolve=False)
    given = written if as_written else plain(raw)
    args, secrets = given["monitor"]["monitor_args"], written["monitor"]["monitor_args"]
    args.update(
        {
            name: value if "${" in str(value) else redact.HIDDEN
            for name, value in secrets.items()
            if value and redact.is_secret_key(name)
        }
    )
    if not everything:
        default = asdict(Config())
        taskset = asdict(TasksetConfig())
        tasks = given["buffer"]["explorer_input"]
        default["buffer"]["explorer_input"]["taskset"] = taskset if tasks["taskset"] else None
        for name in ("tasksets", "eval_tasksets"):
            tasks[name] = [changed(one, taskset) for one in tasks[name]]
        given = changed(given, default)
    return OmegaConf.to_yaml(OmegaConf.create({config_file.DEFAULTS_KEY: "rft"} | given))


def plain(raw: DictConfig) -> dict[str, Any]:
    """Values as they are after interpolation; as written where
    something of them is still missing.
    """
    try:
        return OmegaConf.to_container(raw, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        print(f"rft: not all of it can be resolved yet: {configs.explain(error)}", file=sys.stderr)
        return OmegaConf.to_container(raw, resolve=False)  # type: ignore[return-value]


def changed(given: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """The keys of `given` with another value than in `default`; a list is one value."""
    found = {}
    for key, value in given.items():
        there = default.get(key, MISSING)
        if isinstance(value, dict) and isinstance(there, dict) and value:
            value = changed(value, there)
            if value:
                found[key] = value
        elif value != there:
            found[key] = value
    return found
