"""Rows of data files for the trainer: the batch source of `storage_type: file`, and of every auxiliary buffer.

In: rows of a schema (`row_formats`: sft, cpt or pairs for dpo). Out: the `Batch` of a step, which depends only on (rows, seed,
step): a resume at any step goes on exactly there, without a repeat and without a gap, and the checkpoint's step is the whole
position. A pair is two experiences, chosen then rejected, side by side.

All rows are tokenised once, at the start; those longer than `max_len` are left out, counted and reported, never cut.
"""

import logging
from typing import Any

from rft.buffer.by_step import ByStep
from rft.buffer.data_files import check_rows, data_files, load_rows
from rft.buffer.row_formats import PER_ROW, Reader, Sequence, row_needs
from rft.buffer.selectors import shuffled
from rft.config import ConfigError, ExperienceBufferConfig
from rft.experience import Batch, Experience

logger = logging.getLogger(__name__)
PAIR = ("chosen", "rejected")


def check_supervised(
    config: ExperienceBufferConfig, key_path: str, train_batch_size: int = 1, schema: str = "sft"
) -> int:
    """Refuse rows that cannot be read, before anything starts; returns their number.

    `key_path` is the config key of their path, e.g. `buffer.trainer_input.experience_buffer.path`.
    """
    key = key_path.removesuffix(".path")
    if config.path is None:
        raise ConfigError(f"{key}.path: storage_type=file needs the path of the rows")
    rows = check_rows(data_files(config.path, config.split, None, key), row_needs(config.format, key, schema), key)
    if train_batch_size % PER_ROW[schema]:
        raise ConfigError(f"buffer.train_batch_size={train_batch_size}: a pair is two experiences; give an even number")
    if rows < rows_per_step(train_batch_size, schema):
        raise ConfigError(
            f"{key}.path: {config.path} has {rows} rows, fewer than one step takes "
            f"(buffer.train_batch_size={train_batch_size}): lower it or add rows"
        )
    return rows


def rows_per_step(train_batch_size: int, schema: str) -> int:
    """`train_batch_size` counts experiences."""
    return train_batch_size // PER_ROW[schema]


class SupervisedRows(ByStep):
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
        schema: str = "sft",
        expert: bool = False,
    ) -> None:
        if config.path is None:
            raise ConfigError(f"{key_path}.path: storage_type=file needs the path of the rows")
        rows = load_rows(data_files(config.path, config.split, None, key_path), key_path)
        self.name = config.name
        self.shuffle = config.shuffle
        self.seed = seed
        self.schema = schema
        self.expert = expert
        self.batch_size = rows_per_step(train_batch_size, schema)
        self.num_rows = len(rows)
        self._rows: list[tuple[int, list[Sequence]]] = []  # number of the row, what it became
        self.too_long = self.too_short = longest = 0
        reader = Reader(tokenizer, config.format, schema, chat_template)
        for index, raw in enumerate(rows):
            made = self._read(reader, raw, f"{key_path}: row {index + 1} of {config.path}")
            length = max((len(one.tokens) for one in made), default=0)
            longest = max(longest, length)
            self.too_long += length > max_len
            self.too_short += not made
            if 0 < length <= max_len:
                self._rows.append((index, made))
        self._report(f"{key_path}: of the {self.num_rows} rows of {config.path}", max_len, longest)
        self.steps_per_epoch = len(self._rows) // self.batch_size
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"{key_path}.path: {config.path} has {len(self._rows)} rows of at most {max_len} tokens, fewer "
                f"than buffer.train_batch_size={train_batch_size}: lower it, add rows, or raise "
                f"model.max_model_len"
            )
        self.total_steps = total_steps if total_steps is not None or epochs is None else epochs * self.steps_per_epoch
        self._order: tuple[int, list[int]] = (-1, [])  # of the epoch last used

    @staticmethod
    def _read(reader: Reader, raw: dict[str, Any], where: str) -> list[Sequence]:
        try:
            return reader(raw)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def _report(self, rows: str, max_len: int, longest: int) -> None:
        if self.too_long:
            logger.warning(
                "%s %d have more than %d tokens (the longest %d) and are left out",
                rows,
                self.too_long,
                max_len,
                longest,
            )
        if self.too_short:
            logger.warning("%s %d have fewer than two tokens and are left out", rows, self.too_short)

    def take(self, step: int) -> Batch:
        """The batch of `step`; empty when the run is over."""
        if self.total_steps is not None and step >= self.total_steps:
            return Batch(step=step, experiences=[])
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            count = len(self._rows)
            self._order = (epoch, shuffled(count, self.seed, epoch) if self.shuffle else list(range(count)))
        chosen = self._order[1][index * self.batch_size : (index + 1) * self.batch_size]
        return Batch(step=step, experiences=[one for i in chosen for one in self._experiences(epoch, *self._rows[i])])

    def state(self) -> dict[str, int | None]:
        """Counts for the log and for metrics; a resume needs none of them."""
        return {
            "rows": self.num_rows,
            "too_long": self.too_long,
            "too_short": self.too_short,
            "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.total_steps,
            "seed": self.seed,
        }

    def _experiences(self, epoch: int, row: int, made: list[Sequence]) -> list[Experience]:
        task = f"{self.name}/{epoch}/{row}"
        return [
            Experience(
                tokens=list(one.tokens),
                prompt_length=one.prompt_length,
                action_mask=one.mask,
                expert=self.expert,
                task=f"{task}/{PAIR[number]}" if self.schema == "dpo" else task,
            )
            for number, one in enumerate(made)
        ]
