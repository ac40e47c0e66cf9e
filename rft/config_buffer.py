"""Keys of the section `buffer`: tasks that go in, and experiences on their way to the trainer."""

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING


@dataclass
class FormatConfig:
    prompt_type: str = "messages"  # plaintext | messages
    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt_key: Optional[str] = None
    system_prompt: Optional[str] = None
    messages_key: str = "messages"
    workflow_key: Optional[str] = None  # tasks: column that names the workflow of a row; null in it: the set's
    reward_fn_key: Optional[str] = None  # tasks: the same for its reward


@dataclass
class TaskSelectorConfig:
    selector_type: Optional[str] = None  # sequential | shuffle | random | offline_easy2hard | difficulty_based
    seed: Optional[int] = None  # default: the run's
    feature_keys: list[str] = field(default_factory=list)  # columns of numbers, larger is easier: docs/explore.md
    kwargs: dict[str, Any] = field(default_factory=dict)  # of difficulty_based


@dataclass
class RowFormatConfig(FormatConfig):
    tools_key: Optional[str] = None  # column of tools for the chat template: a list of objects, or that as JSON text
    chosen_key: str = "chosen"  # dpo: the better answer, of the prompt's type, as is the worse one
    rejected_key: str = "rejected"
    enable_concatenated_multi_turn: bool = False  # messages: learn every answer of a dialogue; false: the last one
    chat_template: Optional[str] = None  # default: model.custom_chat_template


@dataclass
class RolloutArgs:
    temperature: Optional[float] = None  # default: 1.0 for training, 0.0 for evaluation
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: Optional[int] = None  # default: model.max_response_tokens


@dataclass
class TasksetConfig:
    name: Optional[str] = None
    storage_type: str = "file"  # file | sql: a table of an SQLite file
    path: str = MISSING  # .jsonl, .parquet, or a directory of them; sql: the SQLite file
    subset_name: Optional[str] = None  # a directory in path; sql: the table
    split: str = "train"
    shuffle: bool = True  # training sets only; the order depends on (seed, epoch)
    task_selector: TaskSelectorConfig = field(
        default_factory=TaskSelectorConfig
    )  # training sets only; wins over shuffle
    repeat_times: Optional[int] = None
    format: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: RolloutArgs = field(default_factory=RolloutArgs)
    default_workflow_type: Optional[str] = None
    default_reward_fn_type: Optional[str] = None
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ExplorerInputConfig:
    taskset: Optional[TasksetConfig] = None
    tasksets: list[TasksetConfig] = field(default_factory=list)  # instead of taskset: several, mixed by their sizes
    eval_tasksets: list[TasksetConfig] = field(default_factory=list)
    default_workflow_type: str = "single_turn"
    default_eval_workflow_type: Optional[str] = None
    default_reward_fn_type: str = "exact_match"


@dataclass
class ReplayBufferConfig:
    enable: bool = False  # queue: steps take groups by priority, and a group may be trained on again
    reuse_cooldown_time: Optional[float] = None  # seconds until a group may be trained on again; default: never
    priority_fn: str = "linear_decay"  # or linear_decay_use_count_control_randomization (decay_limit_randomization)
    priority_fn_args: dict[str, Any] = field(default_factory=dict)  # decay: 2.0, use_count_limit: 3, sigma: 0.0
    capacity: int = 10_000  # groups kept; of more than these the lowest priority goes, counted


@dataclass
class ExperienceBufferConfig:
    name: str = "experience_buffer"
    storage_type: str = "queue"  # queue: durable journal | sql: a database that several machines share | file
    path: Optional[str] = None  # queue: the journal's directory, or X.jsonl for a copy | sql: URL | file: the data
    split: str = "train"
    shuffle: bool = True  # supervised rows; experiences keep their order
    max_read_timeout: float = 1800.0  # seconds; afterwards the incomplete batch is returned
    lease_s: float = 60.0  # sql: a process that is silent for so long no longer holds what it took
    max_experience_mb: float = 32.0  # sql: a group with a larger experience fails, counted
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    format: RowFormatConfig = field(default_factory=RowFormatConfig)


@dataclass
class TrainerInputConfig:
    experience_buffer: ExperienceBufferConfig = field(default_factory=ExperienceBufferConfig)
    auxiliary_buffers: dict[str, ExperienceBufferConfig] = field(default_factory=dict)  # by name: rows beside rollouts


@dataclass
class BufferConfig:
    batch_size: int = 1  # tasks per step
    train_batch_size: Optional[int] = None  # experiences per step; default batch_size x repeat_times
    total_epochs: int = 1
    total_steps: Optional[int] = None  # wins over total_epochs
    explorer_input: ExplorerInputConfig = field(default_factory=ExplorerInputConfig)
    trainer_input: TrainerInputConfig = field(default_factory=TrainerInputConfig)
