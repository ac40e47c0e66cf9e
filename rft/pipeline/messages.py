"""What a pipeline and its worker process say to each other. Pure records.

    pipeline ── Setup ──►  worker: makes its operators   ── Ready or Broken ──►
             ── Work ───►  for each of them ── Entered ──►, at the end ── Done or Broken ──►
             ── Close ──►  closes them                    ── Ready ──►

`payload` is an encoded list of experiences, or JSON of a list of rows: what `Setup.key` says.
"""

from typing import Any

from rft.experience import Record

EXPERIENCES, TASKS = "data_processor.experience_pipeline", "data_processor.task_pipeline"


class Setup(Record, tag="setup", kw_only=True):
    key: str  # EXPERIENCES or TASKS
    operators: list[tuple[str, dict[str, Any]]]  # name, args
    service: dict[str, Any]  # of DataJuicerConfig
    record: str | None = None  # file for what comes in


class Work(Record, tag="work", kw_only=True):
    payload: bytes
    group: int = -1
    prompt: str = ""  # of the task, as its data file has it
    texts: list[tuple[str, str]] = []  # prompt and response of every experience
    chosen: list[int] | None = None  # operators to apply; None: all


class Close(Record, tag="close"):
    pass


class Ready(Record, tag="ready"):
    pass


class Entered(Record, tag="entered"):
    """The clock of this operator starts."""

    operator: str


class Done(Record, tag="done", kw_only=True):
    payload: bytes
    metrics: list[tuple[str, dict[str, float]]]  # of every operator
    seconds: list[float]
    counts: list[int]  # items behind every operator
    dropped_by: str = ""  # the operator that left nothing


class Broken(Record, tag="broken", kw_only=True):
    operator: str
    message: str


Question = Setup | Work | Close
Answer = Ready | Entered | Done | Broken
