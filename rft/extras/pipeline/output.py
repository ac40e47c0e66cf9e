"""What pipelines write: where a task pipeline puts its rows, and how it knows them again; and the
record of what came into the experience pipeline, `save_input`.

The output. In: the stage's config. Out: the file of the rows, beside it a note of what made them,
and the answer whether there is still work to do. Invariants: the file is whole or not there; a file
that something else made is never overwritten and never taken for ours.

The record. In: groups as they were sampled, before any operator. Out: JSON lines {"group",
"prompt", "experiences"}, one per group, with all tokens, log-probabilities and versions;
`recorded_groups` gives them back. A group that ran again after a crash is there twice, and its last
line counts. Invariant: every line is whole: what a killed process left half written is cut off by
the next one.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rft.config import Config, ConfigError, ExperienceBufferConfig, TasksetConfig
from rft.data.files import data_files
from rft.extras.pipeline.worker_process import TASKS
from rft.ground import durable
from rft.ground.columns import listed, unpacked
from rft.ground.experience import Experience, Record

# keys that change how rows are made, and not which
NOT_OF_THE_RESULT = ("num_process", "timeout", "output")


def destination(config: Config) -> tuple[str, TasksetConfig | ExperienceBufferConfig] | None:
    """(key, section) of what reads the output in this stage; None:
    nothing does, or there is no pipeline.
    """
    given = config.data_processor.task_pipeline
    if not (given.inputs or given.operators or given.config_path) or config.mode == "bench":
        return None
    rows = config.buffer.trainer_input.experience_buffer
    if config.mode == "train":
        return (
            ("buffer.trainer_input.experience_buffer", rows)
            if rows.storage_type == "file"
            else None
        )
    taskset = config.buffer.explorer_input.taskset
    if taskset is None:
        raise ConfigError(
            f"{TASKS}: mode={config.mode} has no taskset that its output could become; set its path"
        )
    return "buffer.explorer_input.taskset", taskset


def place(config: Config) -> None:
    """Let the stage read what the pipeline writes."""
    found, path = destination(config), config.data_processor.task_pipeline.output.path
    if found is not None and path is not None:
        found[1].path = path


@dataclass(frozen=True)
class TaskOutput:
    path: Path  # as the config has it
    digest: str  # of what makes it

    @classmethod
    def of(cls, config: Config) -> "TaskOutput | None":
        found = destination(config)
        if found is None:
            return None
        key, reader = found
        if not reader.path:
            raise ConfigError(
                f"{TASKS}.output.path: nothing says where the rows go; set it, or {key}.path"
            )
        path = Path(str(reader.path))
        if path.suffix in (".json", ".parquet"):
            raise ConfigError(
                f"{TASKS}.output.path: {path} would be JSON lines; name it .jsonl, or give a "
                "directory"
            )
        return cls(path, digest(config))

    @property
    def file(self) -> Path:
        return self.path if self.path.suffix == ".jsonl" else self.path / "output.jsonl"

    @property
    def note(self) -> Path:
        return self.path.with_name(self.path.name + ".pipeline.json")

    def is_made(self) -> bool:
        """Whether it is there, from this very config; raises ConfigError for one that is there from
        anything else.
        """
        if not self.file.exists() and not (self.path.is_dir() and any(self.path.iterdir())):
            return False
        if self.file.exists() and self.note.exists():
            if json.loads(self.note.read_text(encoding="utf-8")).get("digest") == self.digest:
                return True
            why = "was made by a pipeline of other inputs or operators"
        else:
            why = "already exists"
        raise ConfigError(
            f"{TASKS}.output.path: {self.path} {why}, and is not overwritten: choose another, or "
            "move it away"
        )

    def write(self, rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
        """The note first: without the rows it means nothing."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        note = {"digest": self.digest, **report}
        durable.put(self.note, json.dumps(note, indent=1).encode() + b"\n")
        durable.put(self.file, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def inputs(config: Config) -> list[Path]:
    """The data files that the inputs mean."""
    key, found = f"{TASKS}.inputs", []
    for path in config.data_processor.task_pipeline.inputs:
        try:
            found += data_files(path, "train", None, key)
        except ConfigError as error:  # of a section that has a path and a split
            raise ConfigError(
                str(error).replace(f"{key}.path", key).replace(f"{key}.split", key)
            ) from error
    return found


def digest(config: Config) -> str:
    """Of everything that decides which rows come out: the keys, and the contents of the inputs and
    of files that the keys name, like `config_path` and `samples`.
    """
    pipeline = config.data_processor.task_pipeline
    given = {
        name: value for name, value in asdict(pipeline).items() if name not in NOT_OF_THE_RESULT
    }
    words = [pipeline.config_path, *(v for one in pipeline.operators for v in one.args.values())]
    named = [Path(word) for word in words if isinstance(word, str) and os.path.isfile(word)]
    found = xxhash.xxh3_128(json.dumps(given, sort_keys=True, default=str).encode())
    for file in [*inputs(config), *named]:
        with file.open("rb") as data:
            while block := data.read(2**20):
                found.update(block)
    return found.hexdigest()


class RecordedGroup(Record, kw_only=True):
    """Holds a group as it was sampled."""

    group: int
    prompt: str
    experiences: list[Experience]


_recorded_encoder = msgspec.json.Encoder(enc_hook=listed)
_recorded_decoder = msgspec.json.Decoder(RecordedGroup, dec_hook=unpacked)


class GroupRecorder:
    def __init__(self, path: str) -> None:
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.file = place.open("ab")
        size = self.file.tell()
        if size:
            os.truncate(place, whole_lines(place, size))

    def write(self, group: int, prompt: str, experiences: list[Experience]) -> None:
        recorded = RecordedGroup(group=group, prompt=prompt, experiences=experiences)
        self.file.write(_recorded_encoder.encode(recorded) + b"\n")
        self.file.flush()


def whole_lines(path: Path, size: int, step: int = 2**16) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as data:
        while size:
            start = max(0, size - step)
            data.seek(start)
            if (found := data.read(size - start).rfind(b"\n")) >= 0:
                return start + found + 1
            size = start
    return 0


def recorded_groups(path: str | Path) -> Iterator[RecordedGroup]:
    """Every group once, in the order of their last lines."""
    found: dict[int, RecordedGroup] = {}
    with Path(path).open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                recorded = _recorded_decoder.decode(line)
                found.pop(recorded.group, None)
                found[recorded.group] = recorded
    yield from found.values()
