"""Supervised rows for the trainer: the batch source of `storage_type: file`.

In: rows with prompt and response, or with messages that end with the assistant's answer. Out: the `Batch` of a step,
which depends only on (rows, seed, step): a resume at any step goes on exactly there, and there is no state to save.
The loss is on the answer and the token that ends the turn, the same tokens a rollout would have made.

All rows are tokenised once, at the start; those longer than `max_len` are left out, counted and reported, never cut.
"""

import logging
from array import array
from typing import Any

from rft.buffer.data_files import Needs, check_rows, data_files, load_rows, task_needs
from rft.buffer.render import end_of_turn, render_messages, render_prompt
from rft.buffer.selectors import shuffled
from rft.buffer.taskset import clean_messages, row_prompt
from rft.config import ConfigError, ExperienceBufferConfig, FormatConfig
from rft.experience import Batch, Experience, Sampling, Task

logger = logging.getLogger(__name__)


def check_supervised(config: ExperienceBufferConfig, key_path: str, train_batch_size: int = 1) -> int:
    """Refuse supervised rows that cannot be read, before anything starts; returns their number.

    `key_path` is the config key of their path, e.g. `buffer.trainer_input.experience_buffer.path`.
    """
    key = key_path.removesuffix(".path")
    if config.path is None:
        raise ConfigError(f"{key}.path: storage_type=file needs the path of the rows")
    rows = check_rows(data_files(config.path, config.split, None, key), row_needs(config.format, key), key)
    if rows < train_batch_size:
        raise ConfigError(
            f"{key}.path: {config.path} has {rows} rows, fewer than one step takes "
            f"(buffer.train_batch_size={train_batch_size}): lower it or add rows"
        )
    return rows


def row_needs(config: FormatConfig, key_path: str) -> Needs:
    needs = task_needs(config, key_path)
    return Needs(needs.text, needs.messages, ends_with_assistant=True)


class SupervisedRows:
    """The batches of a supervised run: `epochs` passes, or `total_steps` steps; with neither, without end."""

    def __init__(
        self,
        config: ExperienceBufferConfig,
        tokenizer: Any,
        train_batch_size: int,
        seed: int,
        max_len: int,
        epochs: int | None = None,
        total_steps: int | None = None,
        chat_template: str | None = None,
        key_path: str = "buffer.trainer_input.experience_buffer",
    ) -> None:
        if config.path is None:
            raise ConfigError(f"{key_path}.path: storage_type=file needs the path of the rows")
        rows = load_rows(data_files(config.path, config.split, None, key_path), key_path)
        self.name = config.name
        self.shuffle = config.shuffle
        self.seed = seed
        self.batch_size = train_batch_size
        self.num_rows = len(rows)
        self._rows: list[tuple[int, array[int], int]] = []  # row, tokens, prompt length
        longest = 0
        end = end_of_turn(tokenizer, chat_template)
        for index, raw in enumerate(rows):
            prompt, response = tokenize(tokenizer, raw, config.format, chat_template)
            tokens = array("I", [*prompt, *response, end])
            longest = max(longest, len(tokens))
            if len(tokens) <= max_len:
                self._rows.append((index, tokens, len(prompt)))
        self.too_long = self.num_rows - len(self._rows)
        if self.too_long:
            logger.warning(
                "%s: %d of %d rows of %s have more than %d tokens (the longest %d) and are left out",
                key_path,
                self.too_long,
                self.num_rows,
                config.path,
                max_len,
                longest,
            )
        self.steps_per_epoch = len(self._rows) // train_batch_size
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"{key_path}.path: {config.path} has {len(self._rows)} rows of at most {max_len} tokens, fewer "
                f"than buffer.train_batch_size={train_batch_size}: lower it, add rows, or raise "
                f"model.max_model_len"
            )
        self.total_steps = total_steps if total_steps is not None or epochs is None else epochs * self.steps_per_epoch
        self._order: tuple[int, list[int]] = (-1, [])  # of the epoch last used

    def take(self, step: int) -> Batch:
        """The batch of `step`; empty when the run is over."""
        if self.total_steps is not None and step >= self.total_steps:
            return Batch(step=step, experiences=[])
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            count = len(self._rows)
            self._order = (epoch, shuffled(count, self.seed, epoch) if self.shuffle else list(range(count)))
        chosen = self._order[1][index * self.batch_size : (index + 1) * self.batch_size]
        return Batch(step=step, experiences=[self._experience(epoch, *self._rows[i]) for i in chosen])

    def wants_weights(self, interval: int) -> bool:
        """Nobody explores."""
        return False

    def consumed(self, step: int) -> None:
        """Nothing to note: the step number says it all (as for `mark`, `saved` and `retain`)."""

    def saved(self, step: int) -> None: ...

    def mark(self) -> int:
        return 0

    def retain(self, loop: dict[str, Any]) -> None:
        """All rows stay."""

    def state(self) -> dict[str, int | None]:
        """Counts for the log and for metrics; a resume needs none of them."""
        return {
            "rows": self.num_rows,
            "too_long": self.too_long,
            "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.total_steps,
            "seed": self.seed,
        }

    def _experience(self, epoch: int, row: int, tokens: "array[int]", prompt_length: int) -> Experience:
        return Experience(
            tokens=list(tokens),
            prompt_length=prompt_length,
            action_mask=[1] * (len(tokens) - prompt_length),
            task=f"{self.name}/{epoch}/{row}",
        )


def tokenize(
    tokenizer: Any, raw: dict[str, Any], config: FormatConfig, chat_template: str | None
) -> tuple[list[int], list[int]]:
    """The ids of a row's prompt, and of its answer without the end of the turn."""
    if config.prompt_type == "messages":
        *before, answer = clean_messages(raw[config.messages_key])
        prompt, response = render_messages(tokenizer, before, chat_template), answer["content"]
    else:
        task = Task(id="", taskset="", row=0, prompt=row_prompt(raw, config), sampling=Sampling())
        prompt, response = render_prompt(tokenizer, task, chat_template), str(raw[config.response_key])
    return prompt, list(tokenizer.encode(response, add_special_tokens=False))
