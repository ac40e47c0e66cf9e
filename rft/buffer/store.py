"""Where the experiences of a run are: which buffer it has, by `storage_type`, and what one has
stored, for whoever wants to read it.

    queue  a journal in a directory, held by one process
            rft.buffer.experience_buffer
    file   the same, with a copy as JSON lines, for a train run to read
            rft.buffer.experience_file
    sql    tables in a database, for processes on several machines
            rft.buffer.sql_buffer

In: the section `buffer.trainer_input.experience_buffer` and what else a buffer has to know. Out: a
class and its arguments, for whoever starts it as an actor. All of them have the methods of
`ExperienceBuffer`, so nobody else asks which one it is.

Reading. In: a job directory, whose queue may be in use, or a JSON-lines file of experiences. Out:
experiences in the order in which they were stored, each with the group that it belongs to.
Invariant: nothing is locked, and nothing is written.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rft.buffer import experience_file
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.experience_file import is_file
from rft.buffer.journal import payloads
from rft.buffer.progress import Stored, decode_record
from rft.config import ConfigError, ExperienceBufferConfig
from rft.config.explorer import OverRolloutConfig
from rft.ground.experience import Experience, decode

DEBUGGED = "experiences.jsonl"  # where `rft debug` leaves what it has seen


def journal_of(config: ExperienceBufferConfig, job: Path) -> str:
    """The directory of a queue's journal."""
    given = None if is_file(config.path) else config.path
    return given or str(job / "buffer" / config.name)


def buffer_of(
    config: ExperienceBufferConfig,
    job: Path,
    owner: str,
    tasks_per_step: int,
    repeat_times: int,
    max_staleness: int | None,
    total_steps: int | None,
    seed: int,
    over_rollout: OverRolloutConfig | None = None,
    experiences_per_step: int | None = None,
    life: str = "",
) -> tuple[type, tuple[Any, ...]]:
    """`owner` names the run to others that share the buffer, `life` this start of it."""
    sizes = (tasks_per_step, repeat_times, max_staleness, total_steps)
    if config.storage_type == "sql":
        from rft.buffer.sql_buffer import SqlBuffer

        return SqlBuffer, (config, owner, *sizes, experiences_per_step, life)
    return ExperienceBuffer, (
        *(config, journal_of(config, job), *sizes, seed, over_rollout),
        experiences_per_step,
        life,
    )


def read_experiences(source: Path) -> Iterator[Experience]:
    """Raises ConfigError for what is neither, naming the file and the line that cannot be read."""
    if source.is_dir():
        queues = sorted({path.parent for path in source.glob("buffer/*/*.log")})
        file = source / DEBUGGED
        if not queues and not file.is_file():
            raise ConfigError(
                f"{source}: no queue in {source / 'buffer'}: "
                "give the job directory of a run with rollouts"
            )
        for queue in queues:
            yield from stored_experiences(queue)
        if not queues:
            yield from experience_lines(file)
    elif source.is_file():
        yield from experience_lines(source)
    else:
        raise ConfigError(f"{source} is neither a job directory nor a file of experiences")


def stored_experiences(queue: Path) -> Iterator[Experience]:
    """Read what a queue has stored, group by group; each once, also where the queue is in use."""
    seen = set[int]()
    for payload in payloads(queue):
        record = decode_record(payload)
        if isinstance(record, Stored) and record.group not in seen:
            seen.add(record.group)
            for experience in decode(record.experiences, list[Experience]):
                experience.group = record.group
                yield experience


def experience_lines(file: Path) -> Iterator[Experience]:
    return chain.from_iterable(experience_file.read(file, "experiences"))
