"""One flat YAML file as the whole config: `rft train --config FILE [section.key=value ...]`.

In: a file with rft's keys, or with those of Trinity-RFT, whose sections and names are mostly the
same. Out: the file as a recipe that Hydra composes like any other (`experiment=from_file`), so that
overrides, `-m` and `--cfg job` work with it, and one line for each key that means something else
here. Interpolations of keys that are kept (`${oc.env:VAR,default}`, `${model.model_path}`) are
resolved with the rest of the config, after the overrides.

Invariant: no key is ignored. It is rft's, or it is translated, or it is refused by name
(`rft.config.trinity`).
"""

import os
import sys
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rft import config as configs
from rft.config import ConfigError
from rft.config.foreign import UNSET, is_empty_section, leaves
from rft.config.trinity import KEYS, RENAMED
from rft.config.trinity_flows import asked_of_environments
from rft.ground.errors import Problem, problems_of

FLAG, RECIPE = "--config", "from_file"
QUEUE = "buffer.trainer_input.experience_buffer"


def registered(arguments: list[str]) -> list[str]:
    """The command line with `--config FILE` replaced by a recipe that holds the file's keys; raises
    ConfigError for every key and value of the file that cannot be taken.
    """
    words, problems = read_file(arguments)
    if problems:
        said = [problem.sentence for problem in problems]
        raise ConfigError(*said, *problems_of(configs.check_overrides, words))
    return words


def read_file(arguments: list[str]) -> tuple[list[str], list[Problem]]:
    """(the command line as `registered` gives it, a problem for each key and value of the file that
    cannot be taken and that the recipe does not have).
    """
    given, rest = _file_of(arguments)
    if given is None:
        return arguments, []
    if clash := next((a for a in rest if a.split("=")[0].lstrip("+~") == "experiment"), None):
        raise ConfigError(
            f"{FLAG} {given} with {clash}: a file is a whole config, as a recipe is; give one of "
            "the two"
        )
    found = Flat(given)
    ConfigStore.instance().store(
        group="experiment",
        name=RECIPE,
        node=OmegaConf.create(found.config),
        package="_global_",
        provider="rft",
    )
    if is_first() and not found.problems:
        for note in found.notes:
            print(f"rft: {given}: {note}", file=sys.stderr)
    return [f"experiment={RECIPE}", *rest], found.problems


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


class Flat:
    """`config`: nested, with rft's keys only.

    `notes`: a line per key or value that is called otherwise, or means nothing, here; `problems`:
    one for each key and value that cannot be taken, which `config` does not have.
    """

    def __init__(self, path: str) -> None:
        self.path, self.notes, self._problems = path, list[str](), list[Problem]()
        self._loaded = read(path)
        self._ends = set(configs.leaf_keys())
        raw: Any = OmegaConf.to_container(self._loaded, resolve=False)
        asked_of_environments(raw)
        self.config, wrong = configs.examined(self._translated(raw, "", ""))
        self.problems = [Problem(key, f"{path}: {said}") for key, said in (*self._problems, *wrong)]

    def _translated(self, node: dict[str, Any], prefix: str, where: str) -> dict[str, Any]:
        """`prefix`: of the keys in the schema; `where`: of the same keys in the file, where they
        are in a list.
        """
        out: dict[str, Any] = {}
        base = prefix if prefix.startswith(configs.TASKSET_KEY) else ""
        for name, value in leaves(
            node, lambda key: key in self._ends or key in KEYS or key in LISTS, prefix
        ):
            place = where + name.removeprefix(prefix)
            if name in LISTS and isinstance(value, list | None):
                items = [self._item(name, number, item) for number, item in enumerate(value or [])]
                self._put(out, name, items, place)
            elif name in self._ends:
                self._keep(out, name.removeprefix(base), value, name, place)
            elif name in KEYS:
                self._use(out, name, value, place, base)
            elif not is_empty_section(name, value, (*configs.known_keys(), *KEYS)):
                self._refuse(configs.meant(name), configs.unknown(name))
        return out

    def _item(self, name: str, number: int, item: Any) -> Any:
        if not isinstance(item, dict):
            self._refuse(name, f"{name}.{number} is {item!r}: give a section of keys")
            return {}
        return self._translated(item, LISTS[name], f"{name}.{number}.")

    def _keep(self, out: dict[str, Any], to: str, value: Any, name: str, place: str) -> None:
        if name == f"{QUEUE}.path" and isinstance(value, str) and self._is_backup(value, place):
            self._note(
                place,
                value,
                "the queue keeps its own journal in the run's directory, which can be replayed",
            )
            return
        here, why = self._renamed(name, value)
        if here != value:
            self._note(place, value, f"it is {here} here" + (f": {why}" if why else ""))
        self._put(out, to, here, place)

    def _renamed(self, name: str, value: Any) -> tuple[Any, str]:
        return (
            RENAMED.get(name, {}).get(value, (value, "")) if isinstance(value, str) else (value, "")
        )

    def _is_backup(self, value: str, place: str) -> bool:
        """A database beside a queue: what the reference writes there is a second copy.

        One as JSON lines is written here too.
        """
        kind = OmegaConf.select(
            self._loaded, place.removesuffix("path") + "storage_type", default="queue"
        )
        return kind == "queue" and ("://" in value or value.endswith(".db"))

    def _use(self, out: dict[str, Any], name: str, value: Any, place: str, base: str) -> None:
        """A key that rft does not have."""
        key, value = KEYS[name], self._resolved(place, value, name)
        if value is None:
            return
        if key.to is not None and key.to.startswith(base):
            here, _ = self._renamed(key.to, key.convert(value))
            if here is not UNSET:
                self._note(place, value, f"it is {key.to}={here} here")
                self._put(out, key.to.removeprefix(base), here, place)
        elif key.to is None and key.takes(value):
            if value:  # what is off here, as it is there, need not be said
                self._note(place, value, key.why)
        else:
            self._refuse(key.to, f"{place}={value} is refused: {key.instead}")

    def _resolved(self, place: str, value: Any, name: str) -> Any:
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return OmegaConf.select(self._loaded, place)
        except OmegaConfBaseException as error:
            self._refuse(KEYS[name].to, configs.explain(error))
            return None

    def _refuse(self, key: str | None, sentence: str) -> None:
        self._problems.append(Problem(key or "", sentence))

    def _note(self, place: str, value: Any, why: str) -> None:
        self.notes.append(f"{place}={value}: {why}")

    def _put(self, out: dict[str, Any], key: str, value: Any, place: str) -> None:
        *sections, word = key.split(".")
        for section in sections:
            out = out.setdefault(section, {})
        if out.setdefault(word, value) != value:
            self._refuse(
                key, f"{place}={value} contradicts another key: both are {key}, set only one"
            )


LISTS = {
    "stages": "",
    "buffer.explorer_input.tasksets": configs.TASKSET_KEY + ".",
    "buffer.explorer_input.eval_tasksets": configs.TASKSET_KEY + ".",
}  # and the prefix of their items' keys


def read(path: str) -> DictConfig:
    try:
        found = OmegaConf.load(Path(path))
    except OSError as error:
        raise ConfigError(f"{FLAG} {path}: {error.strerror}; give a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"{FLAG} {path} is no YAML: {text}") from error
    if not isinstance(found, DictConfig):
        raise ConfigError(
            f"{FLAG} {path}: a config is a section of keys, and this is a {type(found).__name__}"
        )
    return found
