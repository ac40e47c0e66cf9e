"""Which buffer a run has, by `storage_type`.

In: the section `buffer.trainer_input.experience_buffer` and what else a buffer has to know. Out: a class and its arguments, for
whoever starts it as an actor. All of them have the methods of `ExperienceBuffer`, so nobody else asks which one it is.

    queue  a journal in a directory, held by one process                    rft.buffer.experience_buffer
    file   the same, with a copy as JSON lines, for a train run to read     rft.buffer.experience_file
    sql    tables in a database, for processes on several machines          rft.buffer.sql_buffer
"""

from pathlib import Path
from typing import Any

from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.experience_file import is_file
from rft.config import ExperienceBufferConfig
from rft.config_explorer import OverRolloutConfig


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
) -> tuple[type, tuple[Any, ...]]:
    """`owner` names the run to others that share the buffer."""
    sizes = (tasks_per_step, repeat_times, max_staleness, total_steps)
    if config.storage_type == "sql":
        from rft.buffer.sql_buffer import SqlBuffer

        return SqlBuffer, (config, owner, *sizes)
    return ExperienceBuffer, (config, journal_of(config, job), *sizes, seed, over_rollout)
