"""The experiences that a run has stored, for whoever wants to read them.

In: a job directory, whose queue may be in use, or a JSON-lines file of experiences. Out: experiences in the order in which they
were stored, each with the group that it belongs to. Invariant: nothing is locked, and nothing is written.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from rft.buffer import experience_file
from rft.buffer.journal import payloads
from rft.buffer.progress import Stored, decode_record
from rft.config import ConfigError
from rft.experience import Experience, decode

DEBUGGED = "experiences.jsonl"  # where `rft debug` leaves what it has seen


def experiences(source: Path) -> Iterator[Experience]:
    """Raises ConfigError for what is neither, naming the file and the line that cannot be read."""
    if source.is_dir():
        queues, file = sorted({path.parent for path in source.glob("buffer/*/*.log")}), source / DEBUGGED
        if not queues and not file.is_file():
            raise ConfigError(
                f"{source}: no queue in {source / 'buffer'}: give the job directory of a run with rollouts"
            )
        for queue in queues:
            yield from stored(queue)
        if not queues:
            yield from lines(file)
    elif source.is_file():
        yield from lines(source)
    else:
        raise ConfigError(f"{source} is neither a job directory nor a file of experiences")


def stored(queue: Path) -> Iterator[Experience]:
    for payload in payloads(queue):
        record = decode_record(payload)
        if isinstance(record, Stored):
            for experience in decode(record.experiences, list[Experience]):
                experience.group = record.group
                yield experience


def lines(file: Path) -> Iterator[Experience]:
    return chain.from_iterable(experience_file.read(file, "experiences"))
