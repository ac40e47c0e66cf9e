"""What a row of a data file means to a trainer: its columns, and the token sequences that it becomes.

    sft   prompt and response, or messages that end with the assistant   one sequence, loss on the answer (or all answers)
    cpt   text in the column of the prompt                               one sequence, loss on all tokens after the first
    dpo   prompt, and a chosen and a rejected answer of its type          two sequences: chosen, rejected

In: a raw row and the format section of its buffer. Out: `Sequence`s. Invariant: a prompt has the ids that a rollout of it
would have, and an answer those that the chat template writes, up to the token that ends the turn.
"""

from array import array
from dataclasses import dataclass
from typing import Any

from rft.buffer.data_files import Needs, parsed
from rft.buffer.dialogue import Dialogues, Messages, Spans
from rft.buffer.taskset import clean_messages, row_prompt
from rft.config import ConfigError, RowFormatConfig

PER_ROW = {"sft": 1, "cpt": 1, "dpo": 2}  # sequences that a row becomes


@dataclass(frozen=True)
class Sequence:
    tokens: "array[int]"
    learned: Spans  # of tokens, [start, end)

    @property
    def prompt_length(self) -> int:
        return self.learned[0][0]

    @property
    def mask(self) -> list[int]:
        """1 for each token behind the prompt that is learned."""
        found = [0] * (len(self.tokens) - self.prompt_length)
        for start, stop in self.learned:
            found[start - self.prompt_length : stop - self.prompt_length] = [1] * (stop - start)
        return found


def row_needs(config: RowFormatConfig, key: str, schema: str = "sft") -> Needs:
    """The columns of a row, after a look whether this format has a meaning for `schema`."""
    form = f"{key}.format"
    if config.prompt_type not in ("plaintext", "messages"):
        raise ConfigError(f"{form}.prompt_type is {config.prompt_type!r}: use plaintext or messages")
    messages = config.prompt_type == "messages"
    if config.enable_concatenated_multi_turn and not (messages and schema == "sft"):
        raise ConfigError(
            f"{form}.enable_concatenated_multi_turn=true is for sft with prompt_type=messages: leave it out"
        )
    if schema == "cpt":
        if messages or config.system_prompt or config.system_prompt_key or config.tools_key:
            raise ConfigError(
                f"{form}: cpt learns plain text: set prompt_type=plaintext, without system_prompt(_key) and tools_key"
            )
        return Needs({"prompt_key": config.prompt_key})
    tools = {"tools_key": config.tools_key} if config.tools_key else {}
    pair = {"chosen_key": config.chosen_key, "rejected_key": config.rejected_key}
    if messages:
        prompt = {"messages_key": config.messages_key}
        return Needs({}, prompt, pair, tools) if schema == "dpo" else Needs({}, answers=prompt, tools=tools)
    text = {"prompt_key": config.prompt_key} | (pair if schema == "dpo" else {"response_key": config.response_key})
    if config.system_prompt_key:
        text["system_prompt_key"] = config.system_prompt_key
    return Needs(text, tools=tools)


class Reader:
    """Makes sequences out of rows. `chat_template` is the model's, for a format that has none of its own."""

    def __init__(self, tokenizer: Any, config: RowFormatConfig, schema: str, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.schema = schema
        self.template = config.chat_template or chat_template
        self.dialogues = Dialogues(tokenizer, self.template)

    def __call__(self, raw: dict[str, Any]) -> list[Sequence]:
        """Of one row; a text of fewer than two tokens has nothing to learn and becomes no sequence."""
        if self.schema == "cpt":
            ids = list(self.tokenizer.encode(raw[self.config.prompt_key]))
            return [sequence(ids, [(1, len(ids))])] if len(ids) > 1 else []
        keys = self.config
        if self.schema == "dpo":
            return [self._answered(raw, raw[column]) for column in (keys.chosen_key, keys.rejected_key)]
        if keys.prompt_type == "messages":
            messages, tools = clean_messages(parsed(raw[keys.messages_key])), self._tools(raw)
            learn = self.dialogues.every_answer if keys.enable_concatenated_multi_turn else self.dialogues.last_answer
            return [sequence(*learn(messages, tools))]
        return [self._answered(raw, raw[keys.response_key])]

    def _answered(self, raw: dict[str, Any], answer: Any) -> Sequence:
        """The row's prompt with this answer behind it: a text, a message, or several messages."""
        if self.config.prompt_type == "messages":
            prompt = clean_messages(parsed(raw[self.config.messages_key]))
            return self._dialogue(prompt, clean_messages(parsed(answer)), self._tools(raw))
        said = row_prompt(raw, self.config)
        if isinstance(said, str):
            if not (self.template or self.tokenizer.chat_template):
                prompt_ids = list(self.tokenizer.encode(said))
                ids = [*prompt_ids, *self.tokenizer.encode(str(answer), add_special_tokens=False), self.dialogues.end]
                return sequence(ids, [(len(prompt_ids), len(ids))])
            said = [{"role": "user", "content": said}]
        return self._dialogue(said, [{"role": "assistant", "content": str(answer)}], self._tools(raw))

    def _dialogue(self, prompt: Messages, answer: Messages, tools: Messages | None) -> Sequence:
        if len(answer) == 1:
            return sequence(*self.dialogues.last_answer([*prompt, *answer], tools))
        learned = [len(prompt) + n for n, message in enumerate(answer) if message["role"] == "assistant"]
        return sequence(*self.dialogues.answers([*prompt, *answer], learned, tools))

    def _tools(self, raw: dict[str, Any]) -> Messages | None:
        given = parsed(raw.get(self.config.tools_key)) if self.config.tools_key else None
        return without_nulls(given) if given else None


def sequence(ids: list[int], learned: Spans) -> Sequence:
    return Sequence(array("I", ids), learned)


def without_nulls(value: Any) -> Any:
    """Arrow gives every object the fields of all others: those that a tool does not have are null."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
