"""Rows of data files for the trainer: the batch source of `storage_type: file`, and of every
auxiliary buffer. What a row means to a trainer: its columns, and the token sequences that it
becomes.

    sft   prompt and response, as text or as messages, or messages that end with the assistant
            one sequence, loss on the answer (or all answers)
    cpt   text in the column of the prompt
            one sequence, loss on all tokens after the first
    dpo   prompt, and a chosen and a rejected answer of its type; or two whole dialogues, whose
          prompt is what they begin with alike
            two sequences: chosen, rejected

In: raw rows and the format section of their buffer. Out: `Sequence`s of a row; the `Batch` of a
step, which depends only on (rows, seed, step): a resume at any step goes on exactly there, without
a repeat and without a gap, and the checkpoint's step is the whole position. A pair is two
experiences, chosen then rejected, side by side. Invariant: a prompt has the ids that a rollout of
it would have, and an answer those that the chat template writes, up to the token that ends the
turn.

All rows are tokenised once, at the start; those longer than `max_len` are left out, counted and
reported, never cut.
"""

import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rft.config import ConfigError, ExperienceBufferConfig, RowFormatConfig
from rft.data import formats
from rft.data.chat import Dialogues, Messages, Spans, clean_messages, row_prompt, row_tools
from rft.data.files import (
    MISSING,
    Needs,
    at,
    check_formed,
    data_files,
    load_rows,
    pair_of,
    parsed,
)
from rft.data.selectors import shuffled
from rft.data.stateless import StatelessSource
from rft.ground.columns import Flags
from rft.ground.errors import refuse_all
from rft.ground.experience import Batch, Experience

logger = logging.getLogger(__name__)
PER_ROW = {"sft": 1, "cpt": 1, "dpo": 2}  # sequences that a row becomes
PAIR = ("chosen", "rejected")


@dataclass(frozen=True)
class Sequence:
    tokens: "array[int]"
    learned: Spans  # of tokens, [start, end)

    @property
    def prompt_length(self) -> int:
        return self.learned[0][0]

    @property
    def mask(self) -> Flags:
        """1 for each token behind the prompt that is learned."""
        found = np.zeros(len(self.tokens) - self.prompt_length, dtype=bool)
        for start, stop in self.learned:
            found[start - self.prompt_length : stop - self.prompt_length] = 1
        return found


def row_needs(config: RowFormatConfig, key: str, schema: str = "sft") -> Needs:
    """The columns of a row, after a look whether this format has a meaning for `schema`."""
    form = f"{key}.format"
    messages = formats.of(config, key).base == "messages"
    if config.enable_concatenated_multi_turn and not (messages and schema == "sft"):
        raise ConfigError(
            f"{form}.enable_concatenated_multi_turn=true is for sft "
            "with prompt_type=messages: leave it out"
        )
    if schema == "cpt":
        if messages or config.system_prompt or config.system_prompt_key or config.tools_key:
            raise ConfigError(
                f"{form}: cpt learns plain text: "
                "set prompt_type=plaintext, without system_prompt(_key) and tools_key"
            )
        return Needs({"prompt_key": config.prompt_column})
    tools = {"tools_key": config.tools_key} if config.tools_key else {}
    pair = {"chosen_key": config.chosen_key, "rejected_key": config.rejected_key}
    if messages:
        prompt = {"messages_key": config.messages_key}
        if schema == "dpo":
            return Needs({}, answers=pair, tools=tools, pairs=prompt)
        if config.response_key:
            answer = {"response_key": config.response_key}
            return Needs({}, messages=prompt, answers=answer, tools=tools, is_spoken=True)
        return Needs({}, answers=prompt, tools=tools)
    text = {"prompt_key": config.prompt_column} | (
        pair if schema == "dpo" else {"response_key": config.response_column}
    )
    if config.system_prompt_key:
        text["system_prompt_key"] = config.system_prompt_key
    return Needs(text, tools=tools)


class Reader:
    """Makes sequences out of rows.

    `chat_template` is the model's, for a format that has none of its own.
    """

    def __init__(
        self, tokenizer: Any, config: RowFormatConfig, schema: str, chat_template: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.schema = schema
        self.template = config.chat_template or chat_template
        self.dialogues = Dialogues(tokenizer, self.template)

    def __call__(self, raw: dict[str, Any]) -> list[Sequence]:
        """Of one row; a text of fewer than two tokens has nothing
        to learn and becomes no sequence.
        """
        if self.schema == "cpt":
            ids = list(self.tokenizer.encode(at(raw, self.config.prompt_column)))
            return [sequence(ids, [(1, len(ids))])] if len(ids) > 1 else []
        keys, tools = self.config, row_tools(raw, self.config) or None
        if formats.has_messages(keys):
            return [sequence(*one) for one in self._of_messages(raw, tools)]
        if self.schema == "dpo":
            columns = (keys.chosen_key, keys.rejected_key)
            return [self._answered(raw, at(raw, column), tools) for column in columns]
        return [self._answered(raw, at(raw, keys.response_column), tools)]

    def _of_messages(
        self, raw: dict[str, Any], tools: Messages | None
    ) -> Iterator[tuple[list[int], Spans]]:
        if self.schema == "dpo":
            prompt, *answers = self._pair(raw)
            yield from (self._dialogue(prompt, answer, tools) for answer in answers)
            return
        messages = self._messages(raw, self.config.messages_key)
        every = self.config.enable_concatenated_multi_turn
        if column := self.config.response_key:  # what is learned stands in a column of its own
            answer = self._messages(raw, column)
            if not every:
                yield self._dialogue(messages, answer, tools)
                return
            messages += answer
        learn = self.dialogues.every_answer if every else self.dialogues.last_answer
        yield learn(messages, tools)

    def _pair(self, raw: dict[str, Any]) -> tuple[Messages, Messages, Messages]:
        chosen, rejected = (
            self._messages(raw, column)
            for column in (self.config.chosen_key, self.config.rejected_key)
        )
        said = parsed(at(raw, self.config.messages_key))
        prompt = None if said in (MISSING, None) else clean_messages(said)
        return pair_of(prompt, chosen, rejected)

    def _messages(self, raw: dict[str, Any], column: str) -> Messages:
        return clean_messages(parsed(at(raw, column)))

    def _answered(self, raw: dict[str, Any], answer: Any, tools: Messages | None) -> Sequence:
        """The row's prompt with this text behind it."""
        said = row_prompt(raw, self.config)
        if isinstance(said, str):
            if not (self.template or self.tokenizer.chat_template):
                prompt_ids = list(self.tokenizer.encode(said))
                ids = [
                    *prompt_ids,
                    *self.tokenizer.encode(str(answer), add_special_tokens=False),
                    self.dialogues.end,
                ]
                return sequence(ids, [(len(prompt_ids), len(ids))])
            said = [{"role": "user", "content": said}]
        words = [{"role": "assistant", "content": str(answer)}]
        return sequence(*self._dialogue(said, words, tools))

    def _dialogue(
        self, prompt: Messages, answer: Messages, tools: Messages | None
    ) -> tuple[list[int], Spans]:
        """`answer`: a message, or several."""
        if len(answer) == 1:
            return self.dialogues.last_answer([*prompt, *answer], tools)
        learned = [
            len(prompt) + n for n, message in enumerate(answer) if message["role"] == "assistant"
        ]
        return self.dialogues.answers([*prompt, *answer], learned, tools)


def sequence(ids: list[int], learned: Spans) -> Sequence:
    return Sequence(array("I", ids), learned)


def check_supervised(
    config: ExperienceBufferConfig, key_path: str, train_batch_size: int = 1, schema: str = "sft"
) -> int:
    """Refuse rows that cannot be read, before anything starts; returns their number.

    `key_path` is the config key of their path, e.g. `buffer.trainer_input.experience_buffer.path`.
    """
    key = key_path.removesuffix(".path")
    if config.path is None:
        raise ConfigError(f"{key}.path: storage_type=file needs the path of the rows")
    odd = [
        f"buffer.train_batch_size={train_batch_size}: a pair is two experiences; give an even "
        "number"
    ]
    odd = odd if train_batch_size % PER_ROW[schema] else []
    try:
        needs = row_needs(config.format, key, schema)
        files = data_files(config.path, config.split, config.subset_name, key)
        rows = check_formed(files, needs, key, config.format)
    except ConfigError as error:
        raise ConfigError(*error.problems, *odd) from None
    refuse_all(odd)
    if rows < rows_per_step(train_batch_size, schema):
        raise ConfigError(
            f"{key}.path: {config.path} has {rows} rows, fewer than one step takes "
            f"(buffer.train_batch_size={train_batch_size}): lower it or add rows"
        )
    return rows


def rows_per_step(train_batch_size: int, schema: str) -> int:
    """`train_batch_size` counts experiences."""
    return train_batch_size // PER_ROW[schema]


class SupervisedRows(StatelessSource):
    """The batches of a supervised run:

    `epochs` passes, or `total_steps` steps; with neither, without end.
    """

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
        vocab: int = 2**31,
    ) -> None:
        if config.path is None:
            raise ConfigError(f"{key_path}.path: storage_type=file needs the path of the rows")
        files = data_files(config.path, config.split, config.subset_name, key_path)
        rows = formats.translated(
            load_rows(files, key_path, config.format), config.format, key_path, str(config.path)
        )
        self.name = config.name
        self.shuffle = config.shuffle
        self.seed = seed
        self.schema = schema
        self.expert = expert
        self.batch_size = rows_per_step(train_batch_size, schema)
        self.num_rows = len(rows)
        self._rows: list[tuple[int, list[Sequence]]] = []  # number of the row, what it became
        self.too_long = self.too_short = longest = 0
        reader, self.vocab = Reader(tokenizer, config.format, schema, chat_template), vocab
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
                f"{key_path}.path: {config.path} has {len(self._rows)} rows of at most "
                f"{max_len} tokens, fewer than buffer.train_batch_size={train_batch_size}: "
                "lower it, add rows, or raise model.max_model_len"
            )
        self.total_steps = (
            total_steps
            if total_steps is not None or epochs is None
            else epochs * self.steps_per_epoch
        )
        self._order: tuple[int, list[int]] = (-1, [])  # of the epoch last used

    def _read(self, reader: Reader, raw: dict[str, Any], where: str) -> list[Sequence]:
        try:
            made = reader(raw)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        largest = max((max(one.tokens, default=0) for one in made), default=0)
        if largest >= self.vocab:
            raise ConfigError(
                f"{where}: the tokenizer gives token {largest}, and config.json of "
                f"model.model_path has vocab_size={self.vocab}: tokens were added to the one and "
                "not to the weights; resize the model's embeddings, or leave such rows out"
            )
        return made

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
            logger.warning(
                "%s %d have fewer than two tokens and are left out", rows, self.too_short
            )

    def batch(self, step: int) -> Batch:
        """The batch of `step`; empty when the run is over."""
        if self.total_steps is not None and step >= self.total_steps:
            return Batch(step=step, experiences=[])
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            count = len(self._rows)
            self._order = (
                epoch,
                shuffled(count, self.seed, epoch) if self.shuffle else list(range(count)),
            )
        chosen = self._order[1][index * self.batch_size : (index + 1) * self.batch_size]
        return Batch(
            step=step,
            experiences=[one for i in chosen for one in self._experiences(epoch, *self._rows[i])],
        )

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
                tokens=np.asarray(one.tokens).astype(np.int32),
                prompt_length=one.prompt_length,
                action_mask=one.mask,
                expert=self.expert,
                task=f"{task}/{PAIR[number]}" if self.schema == "dpo" else task,
            )
            for number, one in enumerate(made)
        ]
