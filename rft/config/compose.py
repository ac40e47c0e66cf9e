"""Composition: from a command line to one checked config per stage.

    overrides ──► Hydra over the defaults of the schema ──► every value in its type
              ──► stages merged over the global keys, interpolations resolved ──► `Config`s

In: words of a command line, or what Hydra made of them. Out: plain configs by the keys of the
schema, then `Config` objects, which are read-only from there on: `save` writes `resolved.yaml`, and
ranks and actors `load` only that file. Invariant: what is refused is refused with every problem
that can be seen at this point, each named by its key; what is left can be read (`drafted`,
`Draft`), so that the rules over several keys tell theirs as well.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from rft.config.hints import nearest
from rft.config.keys import known_keys, leaf_keys
from rft.config.schema import Config
from rft.config.validate import (
    Place,
    completed,
    examined,
    meant,
    normalized,
    parsed,
    removed,
    unknown,
    with_own_references,
    without_unknown,
)
from rft.ground import redact
from rft.ground.errors import ConfigError, Problem, refuse_all
from rft.ground.shipped import shipped

CONFIG_DIR = str(shipped("configs"))
REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # to another key
# of a group that has a default; what Hydra advises is of a file, and these are words
DOUBLE = re.compile(r"Multiple values for .* use 'override ([^:]+): (\S+)'")
OPENED = re.compile(r"(\\*)\$\{")  # an interpolation; a text again by one more backslash
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
    refuse_all(problem.sentence for problem in _refused_words(arguments).values())


def compose(overrides: list[str]) -> DictConfig:
    """The config that these overrides mean, every key there and each value in its type.

    Raises ConfigError with everything that can be said about them.
    """
    raw, problems = drafted(overrides)
    refuse_all(problem.sentence for problem in problems)
    return raw


def drafted(arguments: list[str], told: Sequence[Problem] = ()) -> tuple[DictConfig, list[Problem]]:
    """(what the overrides in a command line mean, without those that cannot be read; a problem for
    each of these, after those that are `told` already).

    Raises ConfigError where Hydra composes nothing out of them, or a word is no override at all:
    then nobody knows what the others are for.
    """
    register_schema()
    refused, flags = _refused_words(arguments), _flag_values(arguments)
    problems = [*told, *refused.values()]
    words = [
        word for word in arguments if not (word.startswith("-") or word in flags or word in refused)
    ]
    try:
        with hydra.initialize_config_dir(CONFIG_DIR, version_base="1.3"):
            raw = hydra.compose("train", words)
    except (HydraException, OmegaConfBaseException) as error:
        said = (problem.sentence for problem in problems)
        raise ConfigError(*said, explain(error.__cause__ or error)) from error
    data, wrong = examined(OmegaConf.to_container(raw, resolve=False))  # type: ignore[arg-type]
    problems += wrong
    if any("=" not in word for word in refused):
        refuse_all(problem.sentence for problem in problems)
    return completed(data), problems


def _refused_words(arguments: list[str]) -> dict[str, Problem]:
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
            refused[word] = Problem(
                "",
                f"`{word}` is no override: write section.key=value, or --config FILE for a file of "
                "them",
            )
        elif "=" in word and not ("/" in key or key in known or key.startswith(free)):
            refused[word] = Problem(meant(key) or "", unknown(key))
        elif "=" in word and not _is_read(word):
            fix = f"give it in quotes, '{key}=\"a b\"'"
            fix = "write $HOME for the ~" if "=~" in word else fix
            refused[word] = Problem(key, f"{key}: Hydra cannot read its value: {fix}")
    return refused


def _is_read(word: str) -> bool:
    """Whether Hydra's grammar has it."""
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def _flag_values(arguments: list[str]) -> set[str]:
    """Values of Hydra's own flags, which are no overrides: `--config-dir DIR` and its like."""
    return {value for flag, value in zip(arguments, arguments[1:], strict=False) if flag in VALUED}


def check_stage_overrides(raw: DictConfig, overrides: list[str]) -> None:
    """Refuse keys of the command line that would do nothing, because every stage sets them for
    itself.
    """
    refuse_all(problem.sentence for problem in idle_overrides(raw, overrides))


def idle_overrides(raw: DictConfig, overrides: list[str]) -> list[Problem]:
    """Those that every stage sets for itself."""
    stages = [
        stage for stage in raw.stages if isinstance(stage, DictConfig)
    ]  # others are refused later, by name
    problems = []
    for line in overrides if stages else []:
        key = line.split("=", 1)[0].lstrip("+~")
        inner = re.sub(r"^stages\.\d+\.", "", key)
        if OmegaConf.select(raw, f"every_stage.{inner}") is not None:
            said = (
                f"{key}: every_stage.{inner} wins over it, so it would do nothing: set "
                f"every_stage.{inner}"
            )
            problems.append(Problem("", said))
        elif all(OmegaConf.select(stage, key) is not None for stage in stages):
            names = " or ".join(f"stages.{number}.{key}" for number in range(len(stages)))
            said = (
                f"{key} is set by every stage for itself, so the command line's would do nothing: "
                f"set {names}, or "
                f"+every_stage.{key}"
            )
            problems.append(Problem("", said))
    return problems


def explain(error: Exception) -> str:
    """One line out of an OmegaConf or Hydra exception."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return nearest(name, error.options, group)
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    text = " ".join(str(error).split("\n\n")[0].split("full_key:")[0].split())
    if double := DOUBLE.fullmatch(text):
        word = "=".join(double.groups())
        return f"+{word}: {double[1]} has a value; write {word}, without the +"
    return f"{key}: {text}" if key else text


# --- stages ---------------------------------------------------------------------------------------


@dataclass
class Draft:
    """A stage's config as far as it can be read: a key with a problem has its default there.

    `unread`: further keys whose values are not known, because of a problem that is told of another.
    """

    config: Config
    problems: list[Problem]
    unread: list[str] = field(default_factory=list)

    @property
    def refused(self) -> list[str]:
        """Keys of which nothing may be concluded."""
        return [*(problem.key for problem in self.problems if problem.key), *self.unread]


def stage_configs(raw: DictConfig) -> list[Config]:
    """One full config per stage: each stage's keys are merged, key by key, over the global ones,
    and `every_stage` over that. No stages: one config.
    """
    return _accepted(stage_drafts(normalized(raw)))


def to_config(raw: DictConfig | dict[str, Any]) -> Config:
    """A `Config` out of plain data by its keys, interpolations resolved; raises ConfigError for
    everything that is wrong or missing.
    """
    full = normalized(raw if isinstance(raw, DictConfig) else OmegaConf.create(raw))
    return _accepted([_draft(full)])[0]


def _accepted(drafts: list[Draft]) -> list[Config]:
    refuse_all(problem.sentence for draft in drafts for problem in draft.problems)
    return [draft.config for draft in drafts]


def stage_drafts(base: DictConfig, told: Sequence[Problem] = ()) -> list[Draft]:
    """As `stage_configs`, of a `completed` config: what cannot be read is left out and told.

    `told`: what was left out of it already. Raises ConfigError where nothing of a stage can be
    read.
    """
    base, problems = base.copy(), list(told)
    stages, over = dict(enumerate(base.stages)), base.every_stage
    base.stages, base.every_stage = [], {}
    for key in ("stages", "every_stage", "stage_name"):
        if key in over:
            del over[key]
            said = "a stage has none; give keys of a stage, like every_stage.trainer.total_steps"
            problems.append(Problem("", f"every_stage.{key}: {said}"))
    if not stages:
        return [_draft(base, problems)]
    names = [stage.get("stage_name") for stage in stages.values() if _is_stage(stage)]
    for number, stage in list(stages.items()):
        if not _is_stage(stage):
            said = "is no section of keys, or has stages of its own: give each a stage_name and its"
            problems.append(Problem("", f"stages: {stage} {said} keys"))
            del stages[number]
    if len(set(map(str, names))) != len(names) or None in names:
        said = f"stages: every stage needs its own stage_name, got {[str(name) for name in names]}"
        problems.append(Problem("", said))
    if not stages:
        refuse_all(problem.sentence for problem in problems)
    of_all = [one for one in problems if not one.key.startswith("stages.")]
    drafts = []
    for number, stage in stages.items():
        own = [one for one in problems if one.key.startswith(f"stages.{number}.")]
        merged: Any = OmegaConf.merge(base, stage, over)
        drafts.append(_draft(merged, [_of_stage(one) for one in (*of_all, *own)]))
    return drafts


def _is_stage(stage: Any) -> bool:
    return isinstance(stage, DictConfig) and "stages" not in stage


def _of_stage(problem: Problem) -> Problem:
    """With the key as it is in one stage."""
    return problem._replace(key=re.sub(r"^(every_stage|stages\.\d+)\.", "", problem.key))


def _draft(full: DictConfig, told: Sequence[Problem] = ()) -> Draft:
    """Interpolations are resolved as far as they can be."""
    given: Any = OmegaConf.to_container(full, resolve=False)
    data = with_own_references(given)
    full = OmegaConf.create(data) if data is not given else full
    texts = {".".join(map(str, place)): (place, text) for place, text in _texts(data)}
    missing = sorted(key for key, (_, text) in texts.items() if text == MISSING)
    problems = [Problem(key, f"{key} is not set: give it a value") for key in missing]
    problems = [*told, *(one for one in problems if one.key not in {key for key, _ in told})]
    unread = []
    for key, (place, text) in texts.items():
        if "${" not in text:
            continue
        if {one.key for one in problems}.intersection(REFERENCE.findall(text)):
            unread.append(key)
        try:
            OmegaConf.select(full, key, throw_on_missing=True)
        except OmegaConfBaseException as error:  # of a key that is not set, that is said already
            of_other = missing and isinstance(error, InterpolationToMissingValueError)
            if not (of_other or key in unread):
                problems.append(Problem(key, explain(error)))
            unread.append(key)
            removed(data, place)
    if any("${" in text for _, text in texts.values()):
        data = OmegaConf.to_container(OmegaConf.create(data), resolve=True)  # type: ignore[assignment]
    data, wrong = examined(data)
    return Draft(parsed(data), [*problems, *wrong], unread)


def _texts(node: Any, place: Place = ()) -> Iterator[tuple[Place, str]]:
    """(place, text) of every text in plain data."""
    if isinstance(node, str):
        yield place, node
    elif isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(value, (*place, name))


# --- the file of a run ----------------------------------------------------------------------------


def save(config: Config, path: Path) -> None:
    """Write the resolved config that ranks and actors read; of a secret only the name of the
    variable that brings it to them. Everything else is resolved: `load` gives each text as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = OmegaConf.to_yaml(OmegaConf.create(redact.passed_on(asdict(config), _escaped)))
    path.write_text(text, encoding="utf-8")


def _escaped(text: str) -> str:
    """What OmegaConf resolves to `text`: of backslashes before `${` it takes half."""
    return OPENED.sub(r"\1\1\\${", text)


def load(path: str | Path) -> Config:
    return _accepted([_draft(_written(path))])[0]


def as_written(path: str | Path) -> DictConfig:
    """As `save` wrote it, for who is no part of the run, and has none of its secrets: a value is
    resolved where it is read, and no other. Keys that another version had not are as usual, and
    those that only it had are left out.
    """
    return normalized(without_unknown(_written(path)))


def _written(path: str | Path) -> DictConfig:
    try:
        found = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, DictConfig):
        raise ConfigError(f"{path} cannot be read: it is no mapping")
    return found
