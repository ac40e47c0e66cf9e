"""Keys of the sections `data_processor` and `service`: what happens to tasks before a run and to
experiences in it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from rft.config.values import Bool, Float, FreePort, PosInt, Seconds, Section, Str, TopRows


@dataclass
class OperatorConfig(Section):
    name: Annotated[
        Str, "of rft's table, or your own: package.module:Class, path/to/file.py:Class"
    ] = MISSING
    args: Annotated[dict[str, Any], "its arguments"] = field(default_factory=dict)


@dataclass
class TaskOutputConfig(Section):
    path: Annotated[
        Str | None, ".jsonl, or a directory; default: the path that the stage reads its rows from"
    ] = None


@dataclass
class TaskPipelineConfig(Section):
    inputs: Annotated[list[Str], "data files, or directories of them; empty: no task pipeline"] = (
        field(default_factory=list)
    )
    operators: Annotated[list[OperatorConfig], "in order: docs/pipelines.md"] = field(
        default_factory=list
    )
    num_process: Annotated[PosInt, "worker processes"] = 4
    target_fields: Annotated[
        list[Str],
        "columns that the output keeps, beside those that arguments of operators name; empty: all",
    ] = field(default_factory=list)
    output: TaskOutputConfig = field(default_factory=TaskOutputConfig)
    top_k: Annotated[TopRows, "rows that the output keeps, the first ones; -1: all"] = -1
    timeout: Annotated[
        Seconds, "seconds of one operator for one chunk; of Data-Juicer for everything"
    ] = 600.0
    config_path: Annotated[
        Str | None, "Data-Juicer's own file of operators, instead of `operators`"
    ] = None
    priority_weights: Annotated[
        dict[str, Float], "by which a Data-Juicer service orders its output"
    ] = field(default_factory=dict)


@dataclass
class ExperiencePipelineConfig(Section):
    operators: Annotated[list[OperatorConfig], "in order, on every group: docs/pipelines.md"] = (
        field(default_factory=list)
    )
    timeout: Annotated[
        Seconds, "seconds of one operator for one group; then the group is given up"
    ] = 60.0
    max_dropped_groups: Annotated[
        PosInt | None, "in a row, then the run ends; default: 20 batches, at least 200"
    ] = None
    save_input: Annotated[
        Bool, "write down every group as the operators get it, in a file that can be read back"
    ] = False
    input_save_path: Annotated[
        Str | None, "that file, .jsonl; default: <job>/buffer/explorer_output.jsonl"
    ] = None


@dataclass
class DataProcessorConfig(Section):
    task_pipeline: TaskPipelineConfig = field(default_factory=TaskPipelineConfig)
    experience_pipeline: ExperiencePipelineConfig = field(default_factory=ExperiencePipelineConfig)


@dataclass
class DataJuicerConfig(Section):
    server_url: Annotated[Str | None, "of a service that runs, like http://127.0.0.1:5005"] = None
    auto_start: Annotated[Bool, "start one here, and end it with the run"] = False
    port: Annotated[
        FreePort | None, "of the one that is started; default, and if that is taken: a free one"
    ] = None
    command: Annotated[
        Str | None, "that starts it, with {port}; default: that of `make env-data-juicer`"
    ] = None
    start_timeout: Annotated[Seconds, "seconds until it answers"] = 120.0
    timeout: Annotated[Seconds, "seconds for one answer"] = 600.0


@dataclass
class ServiceConfig(Section):
    data_juicer: DataJuicerConfig = field(default_factory=DataJuicerConfig)
