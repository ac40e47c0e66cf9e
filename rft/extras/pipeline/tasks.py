"""The task pipeline: raw data files in, the rows of a stage's taskset out, once, before the stage
begins.

    inputs ──► chunks ──► worker processes: operators in order
            ──► all rows for an operator that needs them all ──► ... ──► output
         or, where an operator is one of Data-Juicer's:
                 ──► its service, which reads and writes files ──► output

In: a stage's config. Out: the file that the stage reads, and one line for the user. Invariants: an
operator that raises, hangs or returns nonsense ends the pipeline, named with its rows, and no
output is there; order is that of the inputs, whoever was faster; no process is left.
"""

import asyncio
import shutil
import signal
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rft.config import Config, ConfigError, FormatConfig, TaskPipelineConfig, job_dir
from rft.data.files import count_rows, load_rows
from rft.extras.pipeline.data_juicer import JuicerClient, JuicerError, JuicerServer
from rft.extras.pipeline.operators import TASK_OPERATORS, build, is_whole
from rft.extras.pipeline.output import TaskOutput, destination, inputs
from rft.extras.pipeline.worker_process import (
    TASKS,
    Done,
    OperatorFailed,
    OperatorProcess,
    Setup,
    Work,
)

CHUNK = 64  # rows at most
Row = dict[str, Any]
Result = TypeVar("Result")
Report = list[tuple[str, int]]  # (operator, rows behind it)


class TaskPipelineFailed(RuntimeError):
    """There is no output. `code`: of the process."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(f"task pipeline {message}")
        self.code = code


def is_pending(config: Config) -> bool:
    """Whether this stage's rows have still to be made.

    Raises ConfigError for an output that is not this pipeline's.
    """
    output = TaskOutput.of(config)
    return output is not None and not output.is_made()


def is_delegated(given: TaskPipelineConfig) -> bool:
    """Whether a Data-Juicer service does it all: its file is given,
    or an operator that rft does not have.
    """
    return bool(given.config_path) or any(
        operator.name not in TASK_OPERATORS and ":" not in operator.name
        for operator in given.operators
    )


def run(config: Config, say: Callable[[str], None]) -> None:
    """Make the rows of this stage.

    Raises ConfigError for data that cannot be read, else TaskPipelineFailed.
    """
    given, output = config.data_processor.task_pipeline, TaskOutput.of(config)
    assert output is not None, "asked for by is_pending"
    try:
        if is_delegated(given):
            came, rows, report = _unless_stopped(_delegated(config, output))
        else:
            rows = read(inputs(config), _meaning(config))
            came = len(rows)
            rows, report = _unless_stopped(_local(config, rows))
    except (OperatorFailed, JuicerError) as error:
        raise TaskPipelineFailed(f"failed: {error}") from error
    if given.top_k >= 0:
        rows = rows[: given.top_k]
    made = named_columns(given)
    rows = [_kept(row, number, given.target_fields, made) for number, row in enumerate(rows)]
    least = config.buffer.batch_size if config.mode != "train" else 1
    told = ", ".join(f"{name} {count}" for name, count in report)
    if len(rows) < least:
        raise TaskPipelineFailed(
            f"failed: of {came} rows it left {len(rows)}, and one step takes {least} ({told})"
        )
    output.write(rows, {"rows_in": came, "rows_out": len(rows), "operators": report})
    say(f"task pipeline: {came} rows in, {len(rows)} out ({told}) -> {output.file}")


def read(files: list[Path], format_: FormatConfig | None = None) -> list[Row]:
    """All rows, file by file. `format_`: what their columns mean."""
    count_rows(files, f"{TASKS}.inputs")  # refuses the first bad line
    return [row for file in files for row in load_rows([file], f"{TASKS}.inputs", format_)]


def _meaning(config: Config) -> FormatConfig | None:
    """To who reads what comes out."""
    found = destination(config)
    return found[1].format if found else None


def _unless_stopped(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it; SIGINT and SIGTERM end it cleanly, whoever listens to them otherwise."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stopped: list[int] = []

    async def run() -> Result:
        job, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
        for number in before:
            loop.add_signal_handler(
                number, lambda received=number: (stopped.append(received), job.cancel())
            )
        return await job

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        raise TaskPipelineFailed(
            f"stopped by {signal.Signals(stopped[0]).name}", 128 + stopped[0]
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _local(config: Config, rows: list[Row]) -> tuple[list[Row], Report]:
    given = config.data_processor.task_pipeline
    operators = build(TASKS, given.operators, config.service.data_juicer)
    setup = Setup(
        key=TASKS,
        operators=[(operator.name, dict(operator.args)) for operator in given.operators],
        service=asdict(config.service.data_juicer),
    )
    size = max(1, min(CHUNK, ceil(len(rows) / given.num_process)))
    count = max(1, min(given.num_process, ceil(len(rows) / size)))
    hands = [OperatorProcess(setup, given.timeout) for _ in range(count)]
    report: Report = []
    try:
        await _all(hand.start() for hand in hands)
        for numbers in segments([is_whole(operator) for operator in operators]):
            whole = is_whole(operators[numbers[0]])
            rows, counts = await _segment(
                hands[:1] if whole else hands, rows, len(rows) if whole else size, numbers
            )
            report += [
                (given.operators[number].name, count)
                for number, count in zip(numbers, counts, strict=True)
            ]
    finally:
        await asyncio.gather(*(hand.close() for hand in hands))
    return rows, report


def segments(whole: list[bool]) -> list[list[int]]:
    """Numbers of operators that run together: one that needs all rows is alone, those between go
    chunk by chunk.
    """
    found: list[list[int]] = []
    for number, alone in enumerate(whole):
        if found and not alone and not whole[found[-1][-1]]:
            found[-1].append(number)
        else:
            found.append([number])
    return found


async def _segment(
    hands: list[OperatorProcess], rows: list[Row], size: int, numbers: list[int]
) -> tuple[list[Row], list[int]]:
    """`rows` through the operators `numbers`; also how many were left behind each of them."""
    starts = list(range(0, len(rows), max(1, size)))
    results: dict[int, Done] = {}
    waiting = iter(starts)  # shared: each hand takes the next chunk

    async def work(hand: OperatorProcess) -> None:
        for start in waiting:
            chunk = rows[start : start + size]
            try:
                results[start] = await hand.run(
                    Work(payload=msgspec.json.encode(chunk), chosen=numbers)
                )
            except OperatorFailed as error:
                raise OperatorFailed(
                    error.operator, f"rows {start} to {start + len(chunk) - 1}: {error.reason}"
                ) from error

    await _all(work(hand) for hand in hands)
    counts = [0] * len(numbers)
    for done in results.values():
        for position, count in enumerate(done.counts):
            counts[position] += count
    made = [row for start in starts for row in msgspec.json.decode(results[start].payload)]
    return made, counts


async def _all(jobs: Any) -> None:
    """All of them, or the first failure, with the others cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    # no `except*`: in Python 3.11.2, which Debian 12 has, what is raised in one comes as a group
    except ExceptionGroup as failed:
        wrong, others = failed.split(OperatorFailed)
        if wrong is None or others is not None:
            raise
        raise wrong.exceptions[0] from None


async def _delegated(config: Config, output: TaskOutput) -> tuple[int, list[Row], Report]:
    """What the service makes of the inputs. It must see the same files as this process."""
    given, service = config.data_processor.task_pipeline, config.service.data_juicer
    came = count_rows(inputs(config), f"{TASKS}.inputs")
    server = (
        JuicerServer(service, job_dir(config) / "data_juicer.log") if service.auto_start else None
    )
    draft = output.path.absolute().with_name(f".{output.path.name}.data_juicer")
    shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed
    draft.mkdir(parents=True)
    try:
        if server is not None:
            await server.start()
        client = JuicerClient(server.address if server else str(service.server_url), given.timeout)
        session = None
        try:
            session = await client.create(asked(config, draft))
            await client.process_task(session)
        finally:
            await client.close(session)
        made = sorted(draft.glob("*.jsonl"))
        if not made:
            raise JuicerError(
                f"{client.url} wrote no .jsonl file into {draft}: does it run on another machine?"
            )
        rows = read(made)
    except ConfigError as error:
        raise JuicerError(f"the service wrote what cannot be read: {error}") from error
    finally:
        if server is not None:
            await asyncio.to_thread(server.stop)
        shutil.rmtree(draft, ignore_errors=True)
    return came, rows, [("data_juicer", len(rows))]  # what each of them left it does not tell


def asked(config: Config, directory: Path) -> dict[str, Any]:
    """The session of a task pipeline as the service understands it."""
    given = config.data_processor.task_pipeline
    return {
        "pipeline_type": "task",
        "operators": [{operator.name: dict(operator.args)} for operator in given.operators] or None,
        "config_path": given.config_path,
        "np": given.num_process,
        "inputs": [str(path.absolute()) for path in inputs(config)],
        "target_fields": list(given.target_fields),
        "output_dir": str(directory),
        "priority_weights": dict(given.priority_weights),
        "top_k": given.top_k,
    }


def named_columns(given: TaskPipelineConfig) -> set[str]:
    """Columns that operators read or make by their arguments (`chosen_key: chosen`): an output has
    what is made, although `target_fields`, which are of the inputs, cannot name it.
    """
    return {
        str(value)
        for one in given.operators
        for name, value in one.args.items()
        if name.endswith("_key")
    }


def _kept(row: Row, number: int, fields: list[str], made: set[str]) -> Row:
    if missing := [field for field in fields if field not in row]:
        raise TaskPipelineFailed(
            f"failed: row {number} of the output has no {missing[0]!r}, which "
            f"{TASKS}.target_fields asks for; it has " + ", ".join(row)
        )
    return {n: value for n, value in row.items() if n in (*fields, *made)} if fields else row
