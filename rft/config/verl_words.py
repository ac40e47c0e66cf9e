"""A whole veRL command line as the config: `rft train --verl data.train_files=... ...`.

In: the words behind `--verl`, as they stand in veRL's own scripts: `key=value`, `+key=value`,
`~key`, a YAML file of veRL's keys, `--config-name` of one of its own trainers; words before the
flag, and behind `--`, are rft's own. Out: a recipe that Hydra composes like any other, a line for
each reason why keys change nothing here, and one for each of veRL's defaults that is not rft's.

Invariant: no key is ignored: it is translated, taken with a line, or refused by name, all in one
start (`rft.config.verl`, `rft.config.verl_run`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rft import config as configs
from rft.config import Config, ConfigError, get, verl_newer
from rft.config.foreign import Note, leaves, nested, put
from rft.config.verl import Translation
from rft.config.verl_joints import JOINTS, VerlKeys
from rft.config.verl_run import DEFAULTS, EVERY, FREE, OPEN, SKIPPED
from rft.ground.errors import Problem

FLAG = "--verl"
MEGATRON = {"actor_rollout_ref.actor.strategy": "megatron"}
DAPO = {"reward_model.reward_manager": "dapo", "trainer.project_name": "verl-dapo"}
TRAINERS = {  # its own configs, and what they set
    "ppo_trainer": {},
    "ppo_megatron_trainer": MEGATRON,
    "dapo_trainer": DAPO,
    "dapo_megatron_trainer": MEGATRON | DAPO,
}
ENGINES = {"dp": {}, "megatron": MEGATRON}  # what the word model_engine= may be


@dataclass
class VerlRun:
    """`config`: nested, with rft's keys only; `notes`: what means nothing here; `taken`: keys that
    are left out and have veRL's default, which is not rft's; `problems`: one for each key and value
    that cannot be taken, which `config` does not have; `said_by`: veRL's key of a key of rft.
    """

    config: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    taken: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    said_by: dict[str, str] = field(default_factory=dict)


def lines(run: VerlRun) -> Iterator[str]:
    """What the start of a run says."""
    yield from (f"rft: {note.line}" for note in run.notes)
    if run.taken:
        said = ", ".join(f"{one.place}={one.theirs}" for one in run.taken)
        yield f"rft: left out, so as in veRL: {said}"


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(veRL's words, rft's own)."""
    at = arguments.index(FLAG)
    theirs, ours = arguments[at + 1 :], arguments[:at]
    if "--" in theirs:
        end = theirs.index("--")
        theirs, ours = theirs[:end], ours + theirs[end + 1 :]
    return theirs, ours


def read(words: list[str]) -> VerlRun:
    """What veRL's words mean."""
    run = VerlRun()
    tree, trainer = _tree(words, run)
    by_name = verl_newer.listed(dict(_resolved(tree, run)))
    given = by_name.given
    defaults = DEFAULTS | trainer
    ask = VerlKeys({key: value for key, value in given.items() if value is not None}, defaults)
    theirs = {key: value for key, value in given.items() if not key.startswith(OPEN)}
    said = Translation(EVERY, free=FREE_OF_RUN, skipped=SKIPPED).take(nested(theirs))
    left = {key: value for key, value in defaults.items() if key not in ask.given}
    filled = Translation(EVERY).take(nested(left))
    values = {to: value for to, value in filled.values.items() if to not in said.values}
    for to, value in values.items():
        run.taken += _left_out([filled.said_by[to]], {to: value}, defaults)
    run.notes, run.said_by = [*said.notes, *by_name.notes], said.said_by
    for joint in JOINTS:
        reads = joint.reads.split()
        try:
            made = dict(joint.make(ask))
            run.notes += joint.notes(ask)
            for to, value in made.items():
                said.set(to, value, next(filter(ask.given.__contains__, reads), reads[0]))
            missing = [name for name in reads if name not in ask.given and name in defaults]
            run.taken += _left_out(missing, made, defaults)
        except (ConfigError, TypeError, ValueError) as error:
            key = joint.sets.split()[0]
            run.problems.append(Problem(key, _sentence(error, joint.reads)))
    run.problems += [one for one in said.problems if one not in run.problems]
    _say_as_given(run, by_name)
    values |= said.values
    for to, value in values.items():
        put(run.config, to.split("."), value)
    run.config, wrong = configs.examined(run.config)
    run.problems += wrong
    return run


def _say_as_given(run: VerlRun, names: verl_newer.Listed) -> None:
    """Sentences, and lines of a file, are of the names that were written."""
    run.notes = [one._replace(place=names.as_given(one.place)) for one in run.notes]
    run.problems = [one._replace(sentence=names.as_given(one.sentence)) for one in run.problems]
    run.said_by = {to: names.called.get(name, name) for to, name in run.said_by.items()}


FREE_OF_RUN = {**Translation({}).free, **FREE}


def _sentence(error: Exception, reads: str) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    return f"{', '.join(reads.split())}: one of these has a value of another type ({error})"


def _left_out(names: list[str], values: dict[str, Any], defaults: dict[str, Any]) -> Iterator[Note]:
    """veRL's defaults of keys that were left out, where what they say is not rft's default."""
    ours, known = Config(), set(configs.leaf_keys())
    there = {to: get(ours, to) if to in known else None for to in values}
    others = {to: value for to, value in values.items() if value != there[to]}
    if names and others:
        here = ", ".join(to if "taskset" in to else f"{to}={value}" for to, value in others.items())
        own = ", ".join(str(there[to]) for to in others)
        theirs = ", ".join(str(defaults[name]) for name in names)
        yield Note(", ".join(names), theirs, here, f"rft's default: {own}")


# --- the words ------------------------------------------------------------------------------------


def files(words: list[str]) -> list[str]:
    return [word for word in words if "=" not in word and word.endswith((".yaml", ".yml"))]


def _tree(words: list[str], run: VerlRun) -> tuple[DictConfig, dict[str, Any]]:
    """(what was given, nested, references unresolved; what the trainer's config that it is for
    sets).
    """
    tree: Any = OmegaConf.create({})
    trainer, words = _trainer(words, run)
    if not words:
        run.problems.append(Problem("", f"{FLAG} needs veRL's words: {FLAG} FILE.yaml, or key=..."))
    for word in words:
        if files([word]):
            tree = OmegaConf.merge(tree, _file(word, run))
        else:
            _override(tree, word, run)
    return tree, trainer


def _trainer(words: list[str], run: VerlRun) -> tuple[dict[str, Any], list[str]]:
    """Hydra's flags, as veRL's scripts have them: what those of its own configs that are meant set;
    and the other words.
    """
    sets, rest, at = dict[str, Any](), list[str](), 0
    while at < len(words):
        flag, is_whole, value = words[at].partition("=")
        at += 1
        if flag == "model_engine":
            sets |= ENGINES.get(value, {})
            if value not in ENGINES:
                said = f"{flag}={value} is refused: the trainer is Megatron"
                run.problems.append(Problem("", f"{said}; use one of {', '.join(ENGINES)}"))
        elif not flag.startswith("--"):
            rest.append(words[at - 1])
        else:
            if not is_whole:
                value, at = (words[at] if at < len(words) else ""), at + 1
            sets |= _flagged(flag, value, run)
    return sets, rest


def _flagged(flag: str, value: str, run: VerlRun) -> dict[str, Any]:
    known = value.strip("'\"").removesuffix(".yaml")
    if flag == "--config-name" and known in TRAINERS:
        return TRAINERS[known]
    if flag not in ("--config-path", "--config-dir"):
        said = f"{flag}={value} is refused: give the file itself: {FLAG} FILE.yaml key=value"
        known_names = ", ".join(TRAINERS)
        run.problems.append(Problem("", f"{said}; known by name are {known_names}"))
    return {}


def _file(path: str, run: VerlRun) -> DictConfig:
    try:
        found = OmegaConf.load(Path(path))
    except OSError as error:
        run.problems.append(Problem("", f"{FLAG} {path}: {error.strerror}; give a YAML file"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        run.problems.append(Problem("", f"{FLAG} {path} is no YAML: {text}"))
    else:
        if isinstance(found, DictConfig):
            for word in ("defaults", "hydra"):  # how Hydra composes it, and no key of veRL
                found.pop(word, None)
            return found
        run.problems.append(Problem("", f"{FLAG} {path}: give a file of veRL's keys"))
    return OmegaConf.create({})


def _override(tree: DictConfig, word: str, run: VerlRun) -> None:
    try:
        one = OverridesParser.create().parse_override(word)
        if one.is_sweep_override():
            raise ConfigError(f"{word} is a sweep: give one value")
        if one.is_delete():
            parent, _, last = one.key_or_group.rpartition(".")
            node = OmegaConf.select(tree, parent) if parent else tree
            if node is not None:
                node.pop(last, None)
            return
        OmegaConf.update(tree, one.key_or_group, one.value(), force_add=True)
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        said = " ".join(str(error).split("\n")[0].split())
        run.problems.append(Problem("", f"`{word}` cannot be read: {said}; write key=value"))


def _resolved(tree: DictConfig, run: VerlRun) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that was given; a reference means a key of veRL's."""
    raw: Any = OmegaConf.to_container(tree, resolve=False)
    has_references = "${" in str(raw)
    whole: Any = OmegaConf.merge(OmegaConf.create(nested(DEFAULTS)), tree) if has_references else {}
    for name, value in leaves(raw, EVERY.__contains__):
        if "${" in str(value):
            try:
                value = OmegaConf.select(whole, name)
            except OmegaConfBaseException as error:
                run.problems.append(Problem("", configs.explain(error)))
                continue
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        yield name, None if value in ("None", "???") else value
