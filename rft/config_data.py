"""Keys of the sections `data_processor` and `service`: what happens to tasks before a run and to experiences in it."""

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING


@dataclass
class OperatorConfig:
    name: str = MISSING  # of rft's table, or your own: package.module:Class, path/to/file.py:Class
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class TaskOutputConfig:
    path: Optional[str] = None  # .jsonl, or a directory; default: the path that the stage reads its rows from


@dataclass
class TaskPipelineConfig:
    inputs: list[str] = field(default_factory=list)  # data files, or directories of them; empty: no task pipeline
    operators: list[OperatorConfig] = field(default_factory=list)  # in order: docs/pipelines.md
    num_process: int = 4  # worker processes
    target_fields: list[str] = field(default_factory=list)  # columns that the output keeps; empty: all
    output: TaskOutputConfig = field(default_factory=TaskOutputConfig)
    top_k: int = -1  # rows that the output keeps, the first ones; -1: all
    timeout: float = 600.0  # seconds of one operator for one chunk of rows; of a Data-Juicer service for everything
    config_path: Optional[str] = None  # Data-Juicer's own file of operators, instead of `operators`
    priority_weights: dict[str, float] = field(default_factory=dict)  # by which a Data-Juicer service orders its output


@dataclass
class ExperiencePipelineConfig:
    operators: list[OperatorConfig] = field(default_factory=list)  # in order, on every group: docs/pipelines.md
    timeout: float = 60.0  # seconds of one operator for one group; then its process is killed and the group given up
    max_dropped_groups: Optional[int] = None  # in a row, then the run ends; default: 20 batches, at least 200
    save_input: bool = False  # write down every group as the operators get it, in a file that can be read back
    input_save_path: Optional[str] = None  # that file, .jsonl; default: <job>/buffer/explorer_output.jsonl


@dataclass
class DataProcessorConfig:
    task_pipeline: TaskPipelineConfig = field(default_factory=TaskPipelineConfig)
    experience_pipeline: ExperiencePipelineConfig = field(default_factory=ExperiencePipelineConfig)


@dataclass
class DataJuicerConfig:
    server_url: Optional[str] = None  # of a service that runs, like http://127.0.0.1:5005
    auto_start: bool = False  # start one here, and end it with the run
    port: Optional[int] = None  # of the one that is started; default, and if that is taken: a free one
    command: Optional[str] = None  # that starts it, with {port}; default: the server of the package trinity-rft
    start_timeout: float = 120.0  # seconds until it answers
    timeout: float = 600.0  # seconds for one answer


@dataclass
class ServiceConfig:
    data_juicer: DataJuicerConfig = field(default_factory=DataJuicerConfig)
