"""The tasksets of a run: tasks from rows, in the order of a selector, with a cursor that continues
anywhere; and several training sets as one.

In: a taskset's config and rows. Out: `Task`s, and `cursor`, a small JSON object that says which
task comes next; `seek(cursor)` in a new process goes on exactly there; a selector that learns needs
`recall` of what it was told as well. Training sets leave out the last short batch of an epoch
(shuffled, other rows in every epoch); evaluation sets are read once, whole, in order.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import msgspec

from rft.config import (
    TASKSET_KEY,
    BufferConfig,
    ConfigError,
    ExplorerInputConfig,
    ModelConfig,
    TaskSelectorConfig,
    TasksetConfig,
)
from rft.data import selectors
from rft.data import source as task_source
from rft.data.chat import row_prompt, row_tools
from rft.ground import redact
from rft.ground.errors import problems_of, refuse_all
from rft.ground.experience import Sampling, Task, decode, encode


@dataclass(frozen=True)
class TaskDefaults:
    """What a task gets where its taskset's config says nothing."""

    workflow: str
    reward: str
    repeat_times: int
    max_tokens: int | None
    temperature: float
    min_tokens: int = 0


def train_defaults(
    config: ExplorerInputConfig, model: ModelConfig, repeat_times: int
) -> TaskDefaults:
    """Defaults of the training taskset; `repeat_times` is the algorithm's."""
    return TaskDefaults(
        config.default_workflow_type,
        config.default_reward_fn_type,
        repeat_times,
        model.max_response_tokens,
        1.0,
        model.min_response_tokens,
    )


def eval_defaults(config: ExplorerInputConfig, model: ModelConfig) -> TaskDefaults:
    """Defaults of evaluation tasksets: one greedy answer per task."""
    return TaskDefaults(
        config.default_eval_workflow_type or config.default_workflow_type,
        config.default_reward_fn_type,
        1,
        model.max_response_tokens,
        0.0,
        model.min_response_tokens,
    )


def check_taskset(
    config: TasksetConfig,
    key_path: str,
    batch_size: int = 1,
    prompt: bool = True,
    answer: bool = True,
) -> int:
    """Refuse a taskset that cannot be read, before anything starts; returns its number of rows.
    Raises ConfigError for its files or their first wrong row, and for all that its selector does
    not take.

    `key_path` is the config key of its path, e.g. `buffer.explorer_input.taskset.path`;
    `batch_size` the rows that it must have at least (1 for evaluation). `prompt`, `answer`: whether
    something reads those of a row.
    """
    key = key_path.removesuffix(".path")
    of_selector = problems_of(selectors.check_selector, config.task_selector, key)
    try:
        rows = task_source.check(config, key, prompt, answer)
    except ConfigError as error:
        raise ConfigError(*error.problems, *of_selector) from None
    refuse_all(of_selector)
    task_source.features(config, key)
    if rows < batch_size:
        raise ConfigError(
            f"{key}.path: {config.path} has {rows} rows, fewer than one step takes "
            f"(buffer.batch_size={batch_size}): lower buffer.batch_size or add rows"
        )
    return rows


class Epochs:
    """A place in passes over `_length` tasks each: what a cursor says."""

    _length: int
    _epoch = 0
    _index = 0

    def __len__(self) -> int:
        return self._length

    @property
    def cursor(self) -> dict[str, int]:
        """Which task comes next."""
        return {"epoch": self._epoch, "index": self._index}

    def _go_to(self, cursor: dict[str, int], who: str, what: str) -> None:
        if not 0 <= cursor["index"] <= self._length or cursor["epoch"] < 0:
            raise ConfigError(
                f"{who} cannot continue at {cursor}: an epoch has {self._length} tasks. "
                f"{what} changed since the checkpoint?"
            )
        self._epoch, self._index = cursor["epoch"], cursor["index"]


class Taskset(Epochs):
    """Iterator over the tasks of `epochs` passes (None: without end), by batches of `batch_size`.

    `train=False` reads every row once, in order. The length is that of one epoch. `lag`: how many
    batches may be under way beyond the one that is drawn, which a selector that learns has to know.
    `is_part`: of a mixture, which cuts its own batches.
    """

    def __init__(
        self,
        config: TasksetConfig,
        defaults: TaskDefaults,
        seed: int = 0,
        epochs: int | None = 1,
        batch_size: int = 1,
        train: bool = True,
        key_path: str = TASKSET_KEY,
        lag: int = 1,
        is_part: bool = False,
    ) -> None:
        self._rows: Sequence[dict[str, Any]] = task_source.load(config, key_path)
        self.name = config.name or (
            "taskset" if train else task_source.files_of(config, key_path)[0].stem
        )
        self.config = config
        self.defaults = defaults
        self.seed = seed
        self.epochs = epochs
        whole = is_part or not train
        self._length = len(self._rows) if whole else len(self._rows) // batch_size * batch_size
        if self._length == 0:
            raise ConfigError(
                f"{key_path}.path: {config.path} has {len(self._rows)} rows, "
                f"fewer than buffer.batch_size={batch_size}: lower buffer.batch_size or add rows"
            )
        self._sampling = self._make_sampling(key_path)
        self._epoch, self._index = 0, 0
        self._make_selector = partial(
            selectors.build,
            config.task_selector if train else TaskSelectorConfig(),
            train and config.shuffle,
            len(self._rows),
            batch_size,
            seed,
            lag,
            partial(task_source.features, config, key_path),
        )

    @cached_property
    def _selector(self) -> selectors.RowOrder:
        """Made where it is used, not where it is sent from: a plug-in's is known there by its name
        only.
        """
        return self._make_selector()

    @staticmethod
    def count(config: TasksetConfig, key_path: str = TASKSET_KEY) -> int:
        """Rows of a taskset, counted without loading it."""
        return task_source.count(config, key_path)

    def __iter__(self) -> "Taskset":
        return self

    def __next__(self) -> Task:
        if self._index == self._length:
            self._epoch, self._index = self._epoch + 1, 0
        if self.epochs is not None and self._epoch >= self.epochs:
            raise StopIteration
        draw = self._draw()
        row = self._selector.row(self._epoch, self._index, draw)
        self._index += 1
        return self._task(row, draw)

    def at(self, row: int) -> Task:
        """The task of one row, whatever the order."""
        if not 0 <= row < len(self._rows):
            raise ConfigError(
                f"taskset {self.name!r} has rows 0 to {len(self._rows) - 1}, and no {row}"
            )
        return self._task(row, self._draw())

    def seek(self, cursor: dict[str, int]) -> None:
        """Continue at a cursor of this or an earlier process."""
        self._go_to(
            cursor, f"taskset {self.name!r}", f"Was {self.config.path} or buffer.batch_size"
        )

    def _draw(self) -> int:
        """Which task of all epochs comes next."""
        return self._epoch * self._length + self._index

    # What a selector learns, if it does

    @property
    def learns(self) -> bool:
        return self._selector.learns

    def is_waiting(self) -> bool:
        """Whether the next task depends on one that still runs."""
        return self._selector.is_waiting(self._draw())

    def tell(self, task: Task, value: float | None) -> None:
        """The mean reward of a task, or None when it failed."""
        self._selector.tell(task.draw, task.row, value)

    def lesson(self, task: Task, value: float) -> list[Any] | None:
        """What a buffer keeps of a task, and gives to `recall`: [taskset, draw, row, value], at
        times with what was learned of all tasks before a draw, [..., draw, belief].
        """
        if not self.learns:
            return None
        return [self.name, task.draw, task.row, value, *(self._selector.belief(task.draw) or ())]

    def recall(self, told: list[list[Any]], running: list[Task]) -> None:
        """Of earlier processes: the lessons that were kept, and the tasks that are to run again."""
        ours = [lesson for lesson in told if lesson[0] == self.name]
        if any(lesson[2] >= len(self._rows) for lesson in ours):
            raise ConfigError(
                f"taskset {self.name!r} has {len(self._rows)} rows, and its selector has learned "
                f"of more: give {self.config.path} as it was, or begin a new run (another name)"
            )
        self._selector.recall(
            [(draw, row, value) for _, draw, row, value, *_ in ours],
            [task.draw for task in running if task.taskset == self.name],
        )
        for lesson in ours:
            if len(lesson) > 4:
                self._selector.believe(lesson[5])

    def _make_sampling(self, key_path: str) -> Sampling:
        args = self.config.rollout_args
        max_tokens = self.defaults.max_tokens if args.max_tokens is None else args.max_tokens
        if max_tokens is None:
            raise ConfigError(
                f"set model.max_response_tokens (or {key_path}.rollout_args.max_tokens): "
                "nothing says how long a response may be"
            )
        temperature = self.defaults.temperature if args.temperature is None else args.temperature
        return Sampling(
            temperature=temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            max_tokens=max_tokens,
            min_tokens=self.defaults.min_tokens,
        )

    def _task(self, row: int, draw: int) -> Task:
        config, defaults, raw = self.config, self.defaults, self._rows[row]
        truth = task_source.truth(raw, config.format)
        # a row may come twice in an epoch
        again = selectors.repeats(config.task_selector)
        workflow, reward = (
            raw.get(key) if key else None
            for key in (config.format.workflow_key, config.format.reward_fn_key)
        )
        for name in (workflow, reward):
            if why := task_source.not_allowed(name, config.format):
                raise ConfigError(f"taskset {self.name}: row {row + 1} has {why}")
        return Task(
            id=f"{self.name}/{self._epoch}/{row}" + (f"/{draw}" if again else ""),
            taskset=self.name,
            row=row,
            epoch=self._epoch,
            draw=draw,
            prompt=row_prompt(raw, config.format),
            truth=truth,
            workflow=workflow or config.default_workflow_type or defaults.workflow,
            reward=reward or config.default_reward_fn_type or defaults.reward,
            reward_args=dict(config.reward_fn_args),
            workflow_args=dict(config.workflow_args),
            repeat_times=config.repeat_times or defaults.repeat_times,
            sampling=self._sampling,
            tools=row_tools(raw, config.format),
            raw=raw,
        )


class Mixture(Epochs):
    """Several training sets as one: an epoch takes every row of each, mixed in proportion to their
    sizes.

    Which set a position of an epoch belongs to depends on (seed, epoch) only, so the cursor is that
    position; every set keeps the order that its own selector gives it. As with one set, the last
    short batch of an epoch is left out.
    """

    def __init__(self, sets: list[Taskset], seed: int, epochs: int | None, batch_size: int):
        self.sets = sets
        self.name = "+".join(one.name for one in sets)
        self.seed, self.epochs = seed, epochs
        self._places = [number for number, one in enumerate(sets) for _ in range(len(one))]
        self._length = len(self._places) // batch_size * batch_size
        if self._length == 0:
            raise ConfigError(
                f"buffer.explorer_input.tasksets have {len(self._places)} rows together, "
                f"fewer than buffer.batch_size={batch_size}: lower buffer.batch_size or add rows"
            )
        self.seek({"epoch": 0, "index": 0})

    def __iter__(self) -> "Mixture":
        return self

    def __next__(self) -> Task:
        if self._index == self._length:
            self.seek({"epoch": self._epoch + 1, "index": 0})
        if self.epochs is not None and self._epoch >= self.epochs:
            raise StopIteration
        self._index += 1
        return next(self.sets[self._order[self._index - 1]])

    def seek(self, cursor: dict[str, int]) -> None:
        """Continue at a cursor of this or an earlier process."""
        self._go_to(cursor, f"tasksets {self.name!r}", "Were the files or buffer.batch_size")
        self._order = [
            self._places[at] for at in selectors.shuffled(len(self._places), self.seed, self._epoch)
        ]
        taken = Counter(self._order[: self._index])
        for number, one in enumerate(self.sets):
            one.seek({"epoch": self._epoch, "index": taken[number]})

    # What their selectors learn

    @property
    def learns(self) -> bool:
        return any(one.learns for one in self.sets)

    def is_waiting(self) -> bool:
        return self._index < self._length and self.sets[self._order[self._index]].is_waiting()

    def tell(self, task: Task, value: float | None) -> None:
        for one in self.sets:
            if one.name == task.taskset:
                one.tell(task, value)

    def lesson(self, task: Task, value: float) -> list[Any] | None:
        return next(one for one in self.sets if one.name == task.taskset).lesson(task, value)

    def recall(self, told: list[list[Any]], running: list[Task]) -> None:
        for one in self.sets:
            one.recall(told, running)


def build_tasksets(
    buffer: BufferConfig,
    model: ModelConfig,
    seed: int,
    total_steps: int | None,
    repeat_times: int = 1,
    max_staleness: int | None = None,
) -> tuple[Taskset | Mixture | None, list[Taskset]]:
    """The training set or sets, endless where `total_steps` ends
    the run, and the evaluation tasksets.
    """
    given, size = buffer.explorer_input, buffer.batch_size
    defaults = train_defaults(given, model, repeat_times)
    epochs = buffer.total_epochs if total_steps is None else None
    lag = 1 if max_staleness is None else max_staleness
    taskset: Taskset | Mixture | None = None
    if given.taskset is not None:
        taskset = Taskset(given.taskset, defaults, seed, epochs, size, lag=lag)
    elif given.tasksets:
        sets = [
            Taskset(
                one,
                defaults,
                seed,
                None,
                size,
                key_path=f"{TASKSET_KEY}s.{number}",
                lag=lag,
                is_part=True,
            )
            for number, one in enumerate(given.tasksets)
        ]
        taskset = Mixture(sets, seed, epochs, size)
    evaluations = [
        Taskset(
            config,
            eval_defaults(given, model),
            train=False,
            key_path=f"buffer.explorer_input.eval_tasksets.{number}",
        )
        for number, config in enumerate(given.eval_tasksets)
    ]
    return taskset, evaluations


def for_journal(task: Task) -> bytes:
    """The task as it is kept on disk: of a secret among its arguments only the name of the variable
    that has it.
    """
    args = {
        "reward_args": redact.named(task.reward_args),
        "workflow_args": redact.named(task.workflow_args),
    }
    return encode(msgspec.structs.replace(task, **args))


def from_journal(data: bytes) -> Task:
    """The task again. Raises ConfigError when the environment lacks a secret of it."""
    task = decode(data, Task)
    try:
        args = {
            "reward_args": redact.restored(task.reward_args),
            "workflow_args": redact.restored(task.workflow_args),
        }
    except KeyError as error:
        raise ConfigError(
            f"{task.id} was begun with a secret in the variable {error.args[0]}, which is not set: "
            "set it, or give the same reward_fn_args and workflow_args as before"
        ) from error
    return msgspec.structs.replace(task, **args)
