"""Where metrics go: the console and the job's own files always, TensorBoard, Weights & Biases or
MLflow as configured.

    monitor.log(metrics, step) ──► Console, RunFiles (metrics.jsonl), TensorBoard | Wandb | MLflow
    monitor.table(name, rows, step) ──► RunFiles (samples.jsonl), TensorBoard | Wandb | MLflow
    monitor.histograms(values, step)
            ──► quantiles as metrics to all, histograms where the service has them

One process of the run owns the monitor; `step` is always the policy version. Invariants: what
cannot be built is refused when it is built, naming the key and the fix; an API key reaches the
service's client and no file or log; a sink that fails later is counted (`left_out`, and the metric
`monitor/left_out`), and neither the other sinks nor the caller hear of it.
"""

import difflib
import functools
import hashlib
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TextIO, get_args

from rft.config import ConfigError, MonitorConfig, arguments
from rft.ground import redact
from rft.ground.protocols import MetricSink
from rft.monitor import left_out
from rft.monitor.console import Console
from rft.monitor.metrics import with_other_names
from rft.monitor.mlflow import MLflow
from rft.monitor.run_record import RunFiles, RunRecord

Mode = Literal["offline", "online", "disabled"]
AGAIN_S = 30.0  # between two tries to go on with files that could not be written


class Monitor:
    """All sinks of a run as one."""

    def __init__(self, sinks: Sequence[MetricSink], other_names: bool = False) -> None:
        self.sinks = list(sinks)
        self.other_names = other_names  # of the same metrics in other systems

    def log(self, metrics: dict[str, float], step: int) -> None:
        metrics = with_other_names(metrics) if self.other_names else metrics
        if lost := left_out.count():
            metrics = metrics | {"monitor/left_out": float(lost)}
        self._each(lambda sink: sink.log(metrics, step))

    def table(self, name: str, rows: Iterable[dict[str, Any]], step: int) -> None:
        found = redact.record(list(rows))
        self._each(lambda sink: sink.table(name, found, step))

    def histograms(self, values: dict[str, list[float]], step: int) -> None:
        self._each(lambda sink: sink.histograms(values, step))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, work: Callable[[MetricSink], None]) -> None:
        for sink in self.sinks:
            try:
                work(sink)
            except Exception as error:  # of whatever service: records are not the run
                left_out.note(f"calls of {type(sink).__name__}", error)

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoard:
    """Event files under `<job>/monitor/tensorboard`; events after the
    resumed step are purged by the reader. A file that could not be written goes on in a new one.
    """

    def __init__(self, job_dir: Path, project: str, name: str, resume_step: int) -> None:
        module = _needs("torch.utils.tensorboard", "tensorboard", "tensorboard")
        purge_step = resume_step + 1 if resume_step > 0 else 0
        self._summary = _needs("tensorboard.compat.proto.summary_pb2", "tensorboard", "tensorboard")
        directory = str(job_dir / "monitor" / "tensorboard")
        self._begun = functools.partial(module.SummaryWriter, directory, max_queue=1000)
        self._writer: Any = None
        self._tried = 0.0
        try:
            self._writer = self._begun(purge_step=purge_step)
        except OSError as error:
            left_out.note("calls of TensorBoard", error)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """All in one event: each would have to be handed to the writer's thread on its own."""
        found = self._summary.Summary()
        for name, value in metrics.items():
            found.value.add(tag=name, simple_value=value)
        self._send(lambda writer: writer.file_writer.add_summary(found, step))

    def table(self, name: str, rows: Iterable[dict[str, Any]], step: int) -> None:
        self._send(lambda writer: writer.add_text(name, markdown(list(rows)), step))

    def histograms(self, values: dict[str, list[float]], step: int) -> None:
        import numpy as np

        for name, found in values.items():
            self._send(
                lambda writer, name=name, found=found: writer.add_histogram(
                    name, np.array(found), step
                )
            )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _send(self, call: Callable[[Any], None]) -> None:
        """Its writer's thread ends at the first error, and says so at every later call."""
        if self._writer is None:
            if time.monotonic() < self._tried + AGAIN_S:
                raise OSError("TensorBoard's file could not be written")
            self._tried = time.monotonic()
            self._writer = self._begun()
        try:
            call(self._writer)
        except OSError:
            self._writer = None
            raise


class Wandb:
    """A Weights & Biases run under `<job>/wandb`, offline unless `monitor_args.mode=online`."""

    def __init__(
        self,
        job_dir: Path,
        project: str,
        name: str,
        resume_step: int,
        mode: Mode = "offline",
        base_url: str | None = None,
        api_key: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> None:
        wandb = self._wandb = _needs("wandb", "wandb", "rft[monitor]")
        if mode not in get_args(Mode):
            raise ConfigError(f"monitor.monitor_args.mode={mode}: use {', '.join(get_args(Mode))}")
        secret = {k: v for k, v in (("base_url", base_url), ("api_key", api_key)) if v}
        of_run = {"entity": entity, "group": group, "tags": tags}
        # Meta data would hold the command line, and with it a key that was given there.
        settings = wandb.Settings(
            silent=mode != "online", console="off", x_disable_meta="api_key" in secret, **secret
        )
        job_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                dir=str(job_dir),
                mode=mode,
                settings=settings,
                config=RunRecord(job_dir).flattened_config(),
                # a resumed job is the same run; offline `wandb sync` appends, or lets it begin anew
                id=hashlib.sha256(str(job_dir.resolve()).encode()).hexdigest()[:16],
                resume="allow" if mode == "online" or resume_step > 0 else None,
                **{key: value for key, value in of_run.items() if value is not None},
            )
        except wandb.errors.Error as error:  # no key, a wrong one, or nobody answers
            raise ConfigError(
                f"monitor.monitor_args.mode={mode}: W&B does not begin a run "
                f"({' '.join(str(error).split())}): set WANDB_API_KEY, and "
                "monitor.monitor_args.base_url for a server of your own, or take mode=offline"
            ) from error
        # ours, so an evaluation may be logged after its step
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, name: str, rows: Iterable[dict[str, Any]], step: int) -> None:
        found = list(rows)
        columns = list(dict.fromkeys(key for row in found for key in row))
        # cells of a column share a type
        data = [[str(row.get(column, "")) for column in columns] for row in found]
        self._run.log({"step": step, name: self._wandb.Table(columns=columns, data=data)})

    def histograms(self, values: dict[str, list[float]], step: int) -> None:
        made = {f"histogram/{name}": self._wandb.Histogram(found) for name, found in values.items()}
        self._run.log({"step": step, **made})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # waits for its own process, which may still have lines to write


class Nowhere:
    """Nobody but the console and the job's own files."""

    def __init__(self, job_dir: Path, project: str, name: str, resume_step: int) -> None: ...

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def table(self, name: str, rows: Iterable[dict[str, Any]], step: int) -> None: ...

    def histograms(self, values: dict[str, list[float]], step: int) -> None: ...

    def close(self) -> None: ...


SERVICES: dict[str, Callable[..., MetricSink]] = {  # more arguments: the keys of monitor_args
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "none": Nowhere,
}


def build(
    config: MonitorConfig,
    job_dir: Path | str,
    project: str,
    name: str,
    total_steps: int | None = None,
    resume_step: int = 0,
    stream: TextIO | None = None,
) -> Monitor:
    """The monitor of one run.

    `resume_step`: policy version resumed at; below 1: a new start, old lines are dropped.
    """
    if config.monitor_type not in SERVICES:
        nearest = difflib.get_close_matches(config.monitor_type, SERVICES, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(
            f"monitor.monitor_type={config.monitor_type}: {hint}known are {', '.join(SERVICES)}"
        )
    job_dir, service = Path(job_dir), SERVICES[config.monitor_type]
    _refuse_unknown(config.monitor_args, service)
    # first: it may be refused, and then nothing else has been touched
    sink = service(job_dir, project, name, resume_step, **config.monitor_args)
    files = RunFiles(job_dir, resume_step)
    console = Console(name, total_steps, max(resume_step, 0), stream)
    # in this order: what is told is on record, and the last line says what was left out
    return Monitor([files, sink, console], config.other_names)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table; what would break a cell is escaped."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        columns,
        ["---"] * len(columns),
        *([_cell(row.get(column, "")) for column in columns] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _needs(module: str, package: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"monitor.monitor_type={package} cannot be imported ({error}): "
            f"pip install '{install}', or set monitor.monitor_type=none"
        ) from error


def _refuse_unknown(args: dict[str, Any], service: Callable[..., MetricSink]) -> None:
    known = arguments.options(service)
    for key in args:
        if not arguments.takes(service, key):
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise ConfigError(
                f"monitor.monitor_args.{key} is unknown: "
                f"{hint}known are {', '.join(known) or 'none'}"
            )
