"""Keys of the section `buffer`: tasks that go in, and experiences on their way to the trainer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from omegaconf import MISSING

from rft.config.values import Bool, FinitePosFloat, Float, Int, PosInt, Seconds, Section, Str

TASKSET_KEY = "buffer.explorer_input.taskset"


@dataclass
class FormatConfig(Section):
    prompt_type: Annotated[
        Str | None,
        "plaintext | messages; default: plaintext where prompt_key or response_key is given, else "
        "messages, and for tasks what the rows have",
    ] = None
    prompt_key: Annotated[
        Str | None,
        "plaintext: column of the prompt, which tasks may also have as messages; a.b: in another "
        "column; default: prompt",
    ] = None
    response_key: Annotated[
        Str | None,
        "column of the answer, for rewards or to learn; a.b: in another column; default: response",
    ] = None
    system_prompt_key: Annotated[Str | None, "column of a system prompt for each row"] = None
    system_prompt: Annotated[Str | None, "the same for all rows"] = None
    messages_key: Annotated[Str, "messages: column of the chat messages"] = "messages"
    tools_key: Annotated[
        Str | None, "column of tools for the chat template: a list of objects, or that as JSON text"
    ] = None
    workflow_key: Annotated[
        Str | None, "tasks: column that names the workflow of a row; null in it: the set's"
    ] = None
    reward_fn_key: Annotated[Str | None, "tasks: the same for its reward"] = None
    allowed_functions: Annotated[
        list[Str],
        "tasks: functions of your own (package.module:function, path/to/file.py:function) that a "
        "row may name in these columns, beside the names that rft and plug-ins know",
    ] = field(default_factory=list)

    @property
    def prompt_column(self) -> str:
        return self.prompt_key or "prompt"

    @property
    def response_column(self) -> str:
        return self.response_key or "response"

    @property
    def columns(self) -> set[str]:
        """Those of what a model reads or is to write."""
        found = {self.prompt_column, self.response_column, self.messages_key}
        return found | {one for one in (self.system_prompt_key, self.tools_key) if one}


@dataclass
class TaskSelectorConfig(Section):
    selector_type: Annotated[
        Str | None, "sequential | shuffle | random | offline_easy2hard | difficulty_based"
    ] = None
    seed: Annotated[Int | None, "default: the run's"] = None
    feature_keys: Annotated[list[Str], "columns of numbers, larger is easier: docs/explore.md"] = (
        field(default_factory=list)
    )
    kwargs: Annotated[dict[str, Any], "of difficulty_based"] = field(default_factory=dict)


@dataclass
class RowFormatConfig(FormatConfig):
    chosen_key: Annotated[
        Str, "dpo: the better answer, of the prompt's type, as is the worse one"
    ] = "chosen"
    rejected_key: Annotated[Str, "dpo: the worse answer"] = "rejected"
    enable_concatenated_multi_turn: Annotated[
        Bool, "messages: learn every answer of a dialogue; false: the last one"
    ] = False
    chat_template: Annotated[Str | None, "default: model.custom_chat_template"] = None

    @property
    def columns(self) -> set[str]:
        return super().columns | {self.chosen_key, self.rejected_key}


@dataclass
class RolloutArgs(Section):
    temperature: Annotated[Float | None, "default: 1.0 for training, 0.0 for evaluation"] = None
    top_p: Annotated[
        Float, "only the likeliest tokens that have this share together; 1: every token"
    ] = 1.0
    top_k: Annotated[Int, "only so many of the likeliest tokens; -1: every token"] = -1
    max_tokens: Annotated[Int | None, "default: model.max_response_tokens"] = None


@dataclass
class TasksetConfig(Section):
    name: Annotated[Str | None, "of its metrics; default: made of its place in the config"] = None
    storage_type: Annotated[Str, "file | sql: a table of an SQLite file"] = "file"
    path: Annotated[
        Str, "file, directory, a hub's org/name@revision, URL: docs/data.md; sql: the SQLite file"
    ] = MISSING
    subset_name: Annotated[
        Str | None, "a directory in path, or what a hub's data set calls it; sql: the table"
    ] = None
    split: Annotated[Str, "which part of a directory or of a data set"] = "train"
    shuffle: Annotated[Bool, "training sets only; the order depends on (seed, epoch)"] = True
    task_selector: TaskSelectorConfig = field(default_factory=TaskSelectorConfig)
    repeat_times: Annotated[Int | None, "evaluation: answers per task; default: 1"] = None
    format: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: RolloutArgs = field(default_factory=RolloutArgs)
    default_workflow_type: Annotated[
        Str | None, "how its tasks are run; default: the section's"
    ] = None
    default_reward_fn_type: Annotated[
        Str | None, "what its answers are scored by; default: the section's"
    ] = None
    workflow_args: Annotated[dict[str, Any], "arguments of the workflow, of any name"] = field(
        default_factory=dict
    )
    reward_fn_args: Annotated[dict[str, Any], "arguments of the reward, of any name"] = field(
        default_factory=dict
    )


@dataclass
class ExplorerInputConfig(Section):
    taskset: Annotated[TasksetConfig | None, "the tasks to train on"] = None
    tasksets: Annotated[
        list[TasksetConfig], "instead of taskset: several, mixed by their sizes"
    ] = field(default_factory=list)
    eval_tasksets: Annotated[
        list[TasksetConfig], "sets that are evaluated, each with the keys of taskset"
    ] = field(default_factory=list)
    default_workflow_type: Annotated[Str, "how tasks are run: docs/explore.md"] = "single_turn"
    default_eval_workflow_type: Annotated[
        Str | None, "the same for eval_tasksets; default: default_workflow_type"
    ] = None
    default_reward_fn_type: Annotated[Str, "what answers are scored by: docs/explore.md"] = (
        "exact_match"
    )


@dataclass
class ReplayBufferConfig(Section):
    enable: Annotated[
        Bool, "queue: steps take groups by priority, and a group may be trained on again"
    ] = False
    reuse_cooldown_time: Annotated[
        Float | None, "seconds until a group may be trained on again; default: never"
    ] = None
    priority_fn: Annotated[Str, "or linear_decay_use_count_control_randomization"] = "linear_decay"
    priority_fn_args: Annotated[dict[str, Any], "decay: 2.0, use_count_limit: 3, sigma: 0.0"] = (
        field(default_factory=dict)
    )
    capacity: Annotated[
        Int, "groups kept; of more than these the lowest priority goes, counted"
    ] = 10000


@dataclass
class ExperienceBufferConfig(Section):
    name: Annotated[Str, "of the buffer; sql: of its tables"] = "experience_buffer"
    storage_type: Annotated[
        Literal["queue", "sql", "file"],
        "queue: durable journal | sql: a database that several machines share | file: of rows",
    ] = "queue"
    path: Annotated[
        Str | None,
        "queue: the journal's directory, or X.jsonl for a copy | sql: URL | file: the data",
    ] = None
    subset_name: Annotated[Str | None, "file: a directory in path"] = None
    split: Annotated[Str, "which part of a directory of data files"] = "train"
    shuffle: Annotated[Bool, "supervised rows; experiences keep their order"] = True
    max_read_timeout: Annotated[Seconds, "seconds; afterwards the incomplete batch is returned"] = (
        1800.0
    )
    lease_s: Annotated[
        Seconds, "sql: a process that is silent for so long no longer holds what it took"
    ] = 60.0
    max_experience_mb: Annotated[
        FinitePosFloat, "sql: a group with a larger experience fails, counted"
    ] = 32.0
    schema_type: Annotated[
        Literal["sft", "dpo", "experience"] | None, "what it holds; default: what reads it"
    ] = None
    total_epochs: Annotated[
        PosInt | None,
        "of an auxiliary buffer: passes over its rows, then the run ends; default: without end",
    ] = None
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    format: RowFormatConfig = field(default_factory=RowFormatConfig)


@dataclass
class TrainerInputConfig(Section):
    experience_buffer: ExperienceBufferConfig = field(default_factory=ExperienceBufferConfig)
    auxiliary_buffers: Annotated[
        dict[str, ExperienceBufferConfig],
        "by name: rows beside rollouts, read by sample_strategy=mix",
    ] = field(default_factory=dict)


@dataclass
class BufferConfig(Section):
    batch_size: Annotated[PosInt, "tasks per step"] = 1
    train_batch_size: Annotated[
        PosInt | None,
        "experiences per step, of whole groups; default: batch_size groups, of repeat_times each",
    ] = None
    step_counts: Annotated[
        Literal["groups", "experiences"] | None,
        "what fills a step: batch_size of the ones, or train_batch_size of the others; default: "
        "experiences where train_batch_size is given",
    ] = None
    total_epochs: Annotated[PosInt, "how often all tasks are gone through"] = 1
    total_steps: Annotated[PosInt | None, "wins over total_epochs"] = None
    explorer_input: ExplorerInputConfig = field(default_factory=ExplorerInputConfig)
    trainer_input: TrainerInputConfig = field(default_factory=TrainerInputConfig)
