"""One flat YAML file as the whole config: `rft train --config FILE [section.key=value ...]`.

In: a file with rft's keys, or with those of Trinity-RFT, whose sections and names are mostly the
same. Out: the file as a recipe that Hydra composes like any other (`experiment=from_file`), so that
overrides, `-m` and `--cfg job` work with it, and one line for each key that means something else
here. Interpolations of keys that are kept (`${oc.env:VAR,default}`, `${model.model_path}`) are
resolved with the rest of the config, after the overrides. What is refused of a file, here or by a
rule that comes later, is said with the line of its key (`located`).

Invariant: no key is ignored. It is rft's, or it is translated, or it is refused by name
(`rft.config.trinity`).
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rft import config as configs
from rft.config import ConfigError, verl_words
from rft.config import verl as verl_keys
from rft.config.foreign import UNSET, Note, is_empty_section, leaves
from rft.config.trinity import KEYS, NOTHING, RENAMED
from rft.config.trinity_defaults import OTHERWISE, TYPE, fill
from rft.config.trinity_flows import asked_of_environments
from rft.ground.errors import Late, Problem, after, problems_of, refuse_all

FLAG, RECIPE = "--config", "from_file"
DEFAULTS_KEY = "defaults"  # of a file only: whose defaults left-out keys have
QUEUE = "buffer.trainer_input.experience_buffer"


def registered(arguments: list[str]) -> list[str]:
    """The command line with `--config FILE` replaced by a recipe that holds the file's keys; raises
    ConfigError for every key and value of the file that cannot be taken.
    """
    words, problems = read_file(arguments)
    refuse_all(
        (
            *(problem.sentence for problem in problems),
            *(problems_of(configs.check_overrides, words) if problems else ()),
        )
    )
    return words


def lines(found: "Flat") -> Iterator[str]:
    """What the start of a run says of its file."""
    yield from (f"rft: {found.path}: {note.line}" for note in found.notes)
    if found.taken:
        taken = ", ".join(f"{one.place}={one.theirs}" for one in found.taken)
        said = "left out, so as in Trinity-RFT (rft's with `defaults: rft`)"
        yield f"rft: {found.path}: {said}: {taken}"


def read_file(
    arguments: list[str], say: Callable[["Flat"], Iterable[str]] = lines
) -> tuple[list[str], list[Problem]]:
    """(the command line as `registered` gives it, a problem for each key and value of the file that
    cannot be taken and that the recipe does not have). `say`: what to print of one without.
    """
    if verl_words.FLAG in arguments:
        return _read_verl(arguments, verl_words.lines if say is lines else say)
    given, rest = _file_of(arguments)
    if given is None:
        return arguments, []
    if clash := next((a for a in rest if a.split("=")[0].lstrip("+~") == "experiment"), None):
        raise ConfigError(
            f"{FLAG} {given} with {clash}: a file is a whole config, as a recipe is; give one of "
            "the two"
        )
    found = Flat(given, rest)
    _read[:] = [found.marks]
    words = _stored(found.config, rest)
    if is_first() and not found.problems:
        for line in say(found):
            print(line, file=sys.stderr)
    return words, found.problems


def _read_verl(
    arguments: list[str], say: Callable[[Any], Iterable[str]]
) -> tuple[list[str], list[Problem]]:
    """As `read_file`, of a veRL command line behind its flag."""
    theirs, rest = verl_words.split(arguments)
    if clash := next((a for a in rest if a.startswith((FLAG, "experiment="))), None):
        raise ConfigError(f"{verl_words.FLAG} with {clash}: each is a whole config; give one")
    run = verl_words.read(theirs)
    _read[:] = [_marks_of(run, file, theirs) for file in verl_words.files(theirs)]
    if is_first() and not run.problems:
        for line in say(run):
            print(line, file=sys.stderr)
    return _stored(run.config, rest), run.problems


def _stored(config: dict[str, Any], rest: list[str]) -> list[str]:
    """Words that mean `config`, and the others over it."""
    ConfigStore.instance().store(
        group="experiment",
        name=RECIPE,
        node=OmegaConf.create(config),
        package="_global_",
        provider="rft",
    )
    return [f"experiment={RECIPE}", *rest]


def _marks_of(run: verl_words.VerlRun, path: str, words: list[str]) -> "Marks":
    """Of a file of veRL's keys; what a word says behind it is not the file's."""
    is_told = any(f"{verl_words.FLAG} {path}" in one.sentence for one in run.problems)
    marks = Marks(path, "") if is_told else read(path)[1]
    for word in words:
        marks.lines.pop(word.partition("=")[0].lstrip("+~"), None)
    marks.moved = run.said_by
    return marks


_read: list["Marks"] = []  # of the files of this process's command line


def located(error: ConfigError) -> ConfigError:
    """The error with the file and the line of each key that stands in the file of `--config`, in
    the order of its lines.
    """
    for marks in reversed(_read):
        error = marks.in_order(error)
    return error


def is_first() -> bool:
    """Whether this is the one process, of those of an outer launcher, that speaks for all."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _file_of(arguments: list[str]) -> tuple[str | None, list[str]]:
    """(file, the other arguments); Hydra's own --config-name and the like are not meant."""
    for number, argument in enumerate(arguments):
        if argument == FLAG:
            if number + 1 == len(arguments):
                raise ConfigError(f"{FLAG} needs a file: {FLAG} run.yaml")
            return arguments[number + 1], arguments[:number] + arguments[number + 2 :]
        if argument.startswith(FLAG + "="):
            return argument.removeprefix(FLAG + "="), arguments[:number] + arguments[number + 1 :]
    return None, arguments


NAMES = re.compile(r"(?<![\w./-])(?:[a-z_]\w*(?:\.\w+|\[\d+\])+|[a-z_]\w*(?=[=:`]))")


class Marks:
    """The line of every key of a YAML file, and what a sentence about a key says of its place.

    `moved`: keys of rft that come from another place in the file; `stages`: names of the stages.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.moved, self.stages = path, dict[str, str](), list[str]()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        self.lines = dict(_lines(node, "")) if node is not None else {}

    def at(self, place: str, sentence: str) -> str:
        """The sentence behind the file, the line and, if it is not in it, the key's whole path."""
        line = self._line(place)
        named = "" if not place or place in sentence else f" {place}"
        return after(f"{self.path}:{line}{named}: " if line else f"{self.path}: ", sentence)

    def in_order(self, error: ConfigError) -> ConfigError:
        said = [self.located(one) for one in error.problems]
        return ConfigError(*sorted(said, key=self._line_of))

    def _line_of(self, sentence: str) -> int:
        found = re.match(r":(\d+)", sentence.removeprefix(self.path))
        return (
            int(found.group(1)) if found else len(self.lines) + max(self.lines.values(), default=0)
        )

    def located(self, sentence: str) -> str:
        """A sentence of a rule, which names the keys that it is about."""
        if sentence.startswith(tuple(f"{one.path}:" for one in (self, *_read))):
            return sentence
        names = [re.sub(r"\[(\d+)\]", r".\1", name) for name in NAMES.findall(sentence)]
        stage = sentence.partition(": ")[0]
        if stage in self.stages:
            own = f"stages.{self.stages.index(stage)}"
            names = [one for name in names for one in (f"{own}.{name}", name)]
        names = [self._there(name) for name in names]
        place = next((name for name in names if name in self.lines), None)
        return self.at(place, sentence) if place else sentence

    def _there(self, name: str) -> str:
        """Where the file says what rft's key, or the nearest section of it, is."""
        place = name
        while place and place not in self.moved:
            place = place.rpartition(".")[0]
        return self.moved.get(place if name not in self.lines else name, name)

    def _line(self, place: str) -> int | None:
        """Of the key, or of the nearest section of it that there is."""
        while place and place not in self.lines:
            place = place.rpartition(".")[0]
        return self.lines.get(place)


def _lines(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """(dotted key, line) of everything in a node of YAML."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from _lines(value, f"{prefix}{key.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield f"{prefix}{number}", item.start_mark.line + 1
            yield from _lines(item, f"{prefix}{number}.")


class Part(NamedTuple):
    """What is translated at a time: the file, a stage of it, or an item of a list.

    `out`: by rft's keys; `prefix`: of its keys in the tables; `where`: of the same keys in the
    file.
    """

    out: dict[str, Any]
    prefix: str = ""
    where: str = ""


class Flat:
    """`config`: nested, with rft's keys only.

    `notes`: what means something else here; `taken`: keys that are left out and have the other
    system's default, which is not rft's; `problems`: one for each key and value that cannot be
    taken, which `config` does not have.
    """

    def __init__(self, path: str, words: Sequence[str] = ()) -> None:
        self.path, self._problems = path, list[Problem]()
        self.notes, self.taken = list[Note](), list[Note]()
        self._loaded, self.marks = read(path)
        self._ends = {*configs.leaf_keys(), *configs.item_keys()}
        raw: Any = OmegaConf.to_container(self._loaded, resolve=False)
        asked_of_environments(raw)
        typed = [word.partition("=")[2] for word in words if word.startswith(f"{TYPE}=")]
        self._kind = typed[-1] if typed else None  # the algorithm of the command line, which wins
        self.is_theirs = self._vocabulary(raw.pop(DEFAULTS_KEY, None))
        self.marks.stages = [str(one.get("stage_name")) for one in _stages(raw)]
        self._beside = dict[str, Any]()  # keys of which only defaults are made
        found = self._translated(raw, Part({}))
        taken = fill(found, self._beside, self._kind, theirs=self.is_theirs)
        self.taken = [Note(*one) for one in taken]
        self.config, wrong = configs.examined(found)
        told = [(key, self.marks.at(self.marks.moved.get(key, key), said)) for key, said in wrong]
        self.problems = [*self._problems, *(Problem(key, said) for key, said in told)]

    def _vocabulary(self, word: Any) -> bool:
        """Whether a key that is left out has Trinity's default."""
        if word not in (None, "trinity", "rft"):
            said = (
                f"{DEFAULTS_KEY}={word}: keys that are left out have the defaults of trinity | rft"
            )
            self._refuse("", said, DEFAULTS_KEY)
        return word != "rft"

    def _translated(self, node: dict[str, Any], part: Part) -> dict[str, Any]:
        keys = (*configs.known_keys(), *KEYS)
        for name, value in leaves(
            node, lambda key: key in self._ends or key in KEYS or key in LISTS, part.prefix
        ):
            place = part.where + name.removeprefix(part.prefix)
            if name in LISTS and isinstance(value, list | dict | None):
                items = self._items(name, [] if value is None else value, place)
                self._put(part, name, items, place)
            elif name in self._ends:
                self._keep(part, value, name, place)
            elif name in KEYS:
                self._use(part, name, value, place)
            elif not is_empty_section(name, value, keys):
                is_section = any(key.startswith(f"{name}.") for key in keys)
                said = f"{place}={value}: give a section of keys" if is_section else None
                self._refuse(configs.meant(name), said or configs.unknown(name, place), place)
        return part.out

    def _items(self, name: str, found: list[Any] | dict[str, Any], place: str) -> Any:
        if isinstance(found, dict):
            return {word: self._item(name, f"{place}.{word}", one) for word, one in found.items()}
        return [self._item(name, f"{place}.{n}", one) for n, one in enumerate(found)]

    def _item(self, name: str, place: str, item: Any) -> Any:
        if not isinstance(item, dict):
            self._refuse(name, f"{place} is {item!r}: give a section of keys", place)
            return {}
        return self._translated(item, Part({}, LISTS[name], f"{place}."))

    def _keep(self, part: Part, value: Any, name: str, place: str) -> None:
        if name == f"{QUEUE}.path" and isinstance(value, str) and self._is_backup(value, place):
            why = "the queue keeps its own journal in the run's directory, which can be replayed"
            self.notes.append(Note(place, value, "", why))
            return
        if value is None and self.is_theirs:  # there it means that a key is left out
            return
        if name == verl_keys.BLOCK:
            self.notes += verl_keys.of_block(value).notes
        here, why = self._renamed(name, value)
        if self.is_theirs and name in OTHERWISE:
            known = self._resolved(place, value, name)
            other, why = OTHERWISE[name](known, self._around(place))
            here = here if other == known else other
        if here is UNSET or here != value:
            said = "left out" if here is UNSET else str(here)
            self.notes.append(Note(place, value, said, why))
        if here is not UNSET:
            self._put(part, name, here, place)

    def _around(self, place: str) -> DictConfig:
        """The file as a key at `place` means it: in a stage its sections are those of the stage."""
        raw: Any = OmegaConf.to_container(self._loaded, resolve=False)
        section, _, rest = place.partition(".")
        if section == "stages":
            raw |= OmegaConf.select(self._loaded, f"{section}.{rest.partition('.')[0]}")
        if self._kind:
            given = raw.get("algorithm")
            sections = given if isinstance(given, dict) else {}
            raw["algorithm"] = {**sections, "algorithm_type": self._kind}
        return OmegaConf.create(raw)

    def _renamed(self, name: str, value: Any) -> tuple[Any, str]:
        if not isinstance(value, str):
            return value, ""
        if value in NOTHING.get(name, ()):
            return None, "YAML's nothing is `null`"
        return RENAMED.get(name, {}).get(value, (value, ""))

    def _is_backup(self, value: str, place: str) -> bool:
        """A database beside a queue: what the reference writes there is a second copy.

        One as JSON lines is written here too.
        """
        kind = OmegaConf.select(
            self._loaded, place.removesuffix("path") + "storage_type", default="queue"
        )
        return kind == "queue" and ("://" in value or value.endswith(".db"))

    def _use(self, part: Part, name: str, value: Any, place: str) -> None:
        """A key that rft does not have."""
        key, value = KEYS[name], self._resolved(place, value, name)
        if value is None:
            return
        if key.to is not None and key.to.startswith(part.prefix) and key.takes(value):
            here, _ = self._renamed(key.to, key.convert(value))
            if here is not UNSET:
                self.notes.append(Note(place, value, f"{key.to}={here}", key.why))
                self._put(part, key.to, here, place)
        elif key.to is None and key.takes(value):
            self._beside[name] = value
            if value:  # what is off here, as it is there, need not be said
                self.notes.append(Note(place, value, "", key.why))
        else:
            self._refuse(key.to, f"{place}={value} is refused: {key.instead}", place, key.late)

    def _resolved(self, place: str, value: Any, name: str) -> Any:
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return OmegaConf.select(self._loaded, place)
        except OmegaConfBaseException as error:
            self._refuse(KEYS[name].to if name in KEYS else name, configs.explain(error), place)
            return None

    def _refuse(self, key: str | None, sentence: str, place: str, late: bool = False) -> None:
        said = self.marks.at(place, Late(sentence) if late else sentence)
        self._problems.append(Problem(key or "", said))

    def _put(self, part: Part, key: str, value: Any, place: str) -> None:
        self.marks.moved[part.where + key.removeprefix(part.prefix)] = place
        *sections, word = key.removeprefix(part.prefix).split(".")
        out = part.out
        for section in sections:
            out = out.setdefault(section, {})
        there = out.setdefault(word, value)
        if isinstance(there, dict) and isinstance(value, dict):  # one word of it came before
            clash = any(there.get(one, given) != given for one, given in value.items())
            there.update(value)
        else:
            clash = there != value
        if clash:
            said = f"{place}={value} contradicts another key: both are {key}, set only one"
            self._refuse(key, said, place)


LISTS = {
    "stages": "",
    "buffer.explorer_input.tasksets": configs.TASKSET_KEY + ".",
    "buffer.explorer_input.eval_tasksets": configs.TASKSET_KEY + ".",
    "buffer.trainer_input.auxiliary_buffers": QUEUE + ".",
    "explorer.auxiliary_models": "explorer.auxiliary_models.",
    "model.lora_configs": "model.lora_configs.",
}  # and dictionaries, of sections; with the prefix of their items' keys in the tables


def _stages(raw: Any) -> list[dict[str, Any]]:
    found = raw.get("stages") or []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def read(path: str) -> tuple[DictConfig, Marks]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = OmegaConf.load(io.StringIO(text))
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: {error.strerror}; give a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{FLAG} {path} is no YAML: {said}") from error
    if not isinstance(found, DictConfig):
        raise ConfigError(
            f"{FLAG} {path}: a config is a section of keys, and this is a {type(found).__name__}"
        )
    return found, Marks(path, text)
