"""Names of hubs in a config become what they mean: commits, and folders of this node.

In: a filled config, and the commits that its run began with. Out: models as folders of the cache,
with config and tokenizer in them and without weights, which are fetched when everything has been
checked (`rft.run.stages`); paths of data with their commit; `config.commits`. What a hub does not
give is refused last. Only a start asks a hub: elsewhere a name stays what it is, and what would
have to be read behind it is not looked at.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, OmegaConf

from rft.config import Config, ConfigError, is_remote, job_dir
from rft.data import remote
from rft.data.files import SUFFIXES
from rft.extras.pipeline.output import destination
from rft.ground import hubs
from rft.ground.errors import problems_of, unreadable
from rft.preflight.rules import Refusals, tasksets
from rft.preflight.rules_data import BESIDE
from rft.preflight.rules_trainer import BUFFER

MODELS = ("model_path", "ref_model_path", "teacher_model_path", "critic_model_path")
READ_AT_ONCE = 256 * 2**20  # bytes of data that are fetched to be told of together with the rest


@dataclass(frozen=True)
class DataPath:
    """Of a path of data in the config: `holder[at]`, or its attribute."""

    key: str
    holder: Any
    at: str | int = "path"
    split: str = "train"
    subset: str | None = None

    @property
    def path(self) -> str | None:
        return self.holder[self.at] if isinstance(self.at, int) else getattr(self.holder, self.at)

    def put(self, path: str) -> None:
        if isinstance(self.at, int):
            self.holder[self.at] = path
        else:
            setattr(self.holder, self.at, path)


def noted(configs: list[Config]) -> dict[str, str]:
    """The commits with which the runs of these stages began, which may have one model together."""
    found: dict[str, str] = {}
    for config in configs:
        if config.name == MISSING:
            continue
        job = job_dir(config)
        for place in (job, job / "explorers" / config.explorer.name):
            path = place / "resolved.yaml"
            if not unreadable(path) and path.is_file():  # else told by a rule
                found |= dict(OmegaConf.load(path).get("commits") or {})  # type: ignore[union-attr]
    return found


def look_up(
    c: Config, refusals: Refusals, pins: Mapping[str, str], at_start: bool
) -> dict[str, str]:
    """Give names their commits; those of data that is too large to be fetched while something may
    still be refused are not in `c.commits`, but returned.
    """
    pins = {**pins, **c.commits}
    c.commits = {}
    _models(c, refusals, pins, at_start)
    return _data(c, refusals, pins) if at_start else {}


def is_unread(c: Config, path: str | None) -> bool:
    """Whether these rows are somewhere else, and nobody has asked for them."""
    source = remote.source_of(path, SUFFIXES)
    return source is not None and source.revision not in c.commits.values()


def _models(c: Config, refusals: Refusals, pins: Mapping[str, str], at_start: bool) -> None:
    for key, holder, attribute in models(c):
        given = getattr(holder, attribute)
        if given in (None, MISSING) or refusals.has(key):
            continue
        if (name := hubs.name_of(given, "model")) is None:
            continue
        if not at_start:
            refusals.skipped.append(key)
            continue
        begun = name.at(pins[name.repository]) if name.repository in pins else name
        weights = key != "model.model_path" or not is_remote(c)
        try:
            found = hubs.find_model(begun, key, weights, holder.trust_remote_code)
        except ConfigError as error:
            refusals.told += [(key, sentence) for sentence in error.problems]
        else:
            c.commits[name.repository] = str(found.name.commit)
            setattr(holder, attribute, str(found.folder))


def models(c: Config) -> Iterator[tuple[str, Any, str]]:
    """(key, section, attribute) of every path of a model."""
    for attribute in MODELS:
        yield f"model.{attribute}", c.model, attribute
    for number, one in enumerate(c.explorer.auxiliary_models):
        yield f"explorer.auxiliary_models.{number}.model_path", one, "model_path"


def _data(c: Config, refusals: Refusals, pins: Mapping[str, str]) -> dict[str, str]:
    large: dict[str, str] = {}
    for place in data(c):
        if place.path == MISSING or (source := remote.source_of(place.path, SUFFIXES)) is None:
            continue
        begun = source.at(pins[source.repository]) if source.repository in pins else source
        try:
            looked = remote.look(begun, place.split, place.subset, place.key)
        except ConfigError as error:
            refusals.told += [("commits", sentence) for sentence in error.problems]
            continue
        place.put(str(source.at(looked.revision)))
        into = c.commits if looked.missing <= READ_AT_ONCE else large
        into[source.repository] = looked.revision
    return large


def data(c: Config) -> Iterator[DataPath]:
    """Every path of data files that this run reads, and does not make."""
    if problems_of(destination, c):  # told by a rule
        return
    _, made = destination(c) or ("", None)
    for key, taskset, _ in tasksets(c):
        if taskset is not made and taskset.storage_type == "file":
            yield DataPath(key, taskset, split=taskset.split, subset=taskset.subset_name)
    given, beside = c.buffer.trainer_input.experience_buffer, c.buffer.trainer_input
    buffers = [(BUFFER, given)] if given.storage_type == "file" and given is not made else []
    buffers += [(f"{BESIDE}.{name}", one) for name, one in beside.auxiliary_buffers.items()]
    for key, rows in buffers:
        yield DataPath(key, rows, split=rows.split)
    inputs = c.data_processor.task_pipeline.inputs
    for number in range(len(inputs)):
        yield DataPath("data_processor.task_pipeline.inputs", inputs, number)
