"""Which tokens of a dialogue are learned: the assistant's words and the token that ends its turn, by any chat template.

In: messages, which of them are answers to learn, the tokenizer and perhaps tools. Out: ids, and the spans [start, end) of
them that have loss. A template that marks the answers itself ({% generation %}) gives all of them by the tokenizer's own mask.
For any other the place of an answer follows from prefixes: it begins where the conversation before it ends, ready for the
assistant, and ends with the end of the turn. Prompts and answers become ids each for itself, as in a rollout, so a span is
exact whatever the tokenizer joins.

Invariant: the ids are those of the template's own text, and a template whose text does not go on from its own prompt is
refused rather than masked wrongly.
"""

import re
from typing import Any

from rft.buffer.render import chat_text, end_of_turn, render_messages
from rft.config import ConfigError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Spans = list[tuple[int, int]]
Messages = list[dict[str, Any]]


class Dialogues:
    """`spans` of any number of dialogues that have tokenizer and template in common."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = chat_template
        self.end = end_of_turn(tokenizer, chat_template)
        self._end_text = tokenizer.convert_ids_to_tokens(self.end)
        self.marks_answers = bool(GENERATION.search(chat_template or tokenizer.chat_template or ""))

    def every_answer(self, messages: Messages, tools: Messages | None = None) -> tuple[list[int], Spans]:
        """Ids of the whole dialogue, learned in every assistant's turn."""
        if not self.marks_answers:
            return self.answers(messages, answers_of(messages), tools)
        made = self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self.template, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        spans = spans_of(made["assistant_masks"])
        if not spans:
            raise ConfigError("the chat template has {% generation %}, but marks no token of this dialogue: correct it")
        return list(made["input_ids"]), spans

    def last_answer(self, messages: Messages, tools: Messages | None = None) -> tuple[list[int], Spans]:
        """Ids of the whole dialogue, learned in its last turn only."""
        last, words = len(messages) - 1, messages[-1]["content"]
        try:
            return self.answers(messages, [last], tools)
        except ConfigError:
            if not isinstance(words, str):
                raise
        # Where the template writes a last answer otherwise than behind its own prompt, what a rollout sees is learned.
        prompt = render_messages(self.tokenizer, messages[:-1], self.template, tools)
        ids = [*prompt, *self._ids(words), self.end]
        return ids, [(len(prompt), len(ids))]

    def answers(self, messages: Messages, learned: list[int], tools: Messages | None = None) -> tuple[list[int], Spans]:
        """Ids up to the end of the last of the answers `learned`, given by their numbers."""
        text = chat_text(self.tokenizer, messages, self.template, False, tools=tools)
        ids: list[int] = []
        spans: Spans = []
        at = 0
        for number in learned:
            start = self._start(text, messages, number, tools)
            stop, ends = self._stop(text, messages, number, start, tools)
            ids += self._ids(text[at:start])
            first, at = len(ids), stop
            ids += self._ids(text[start:stop])
            if not ends and number == learned[-1]:
                ids.append(self.end)  # a template without an end of turn: a rollout would end with this
            spans.append((first, len(ids)))
        return ids, spans

    def _start(self, text: str, messages: Messages, number: int, tools: Messages | None) -> int:
        before = chat_text(self.tokenizer, messages[:number], self.template, True, tools=tools)
        if not text.startswith(before):
            raise ConfigError(
                f"the chat template does not write message {number + 1}, an answer, behind the prompt that it makes of the "
                "messages before it: give a template that marks answers with {% generation %} as format.chat_template, or "
                "set format.enable_concatenated_multi_turn=false"
            )
        return len(before)

    def _stop(self, text: str, messages: Messages, number: int, start: int, tools: Messages | None) -> tuple[int, bool]:
        """Where the answer that begins at `start` ends, and whether by the token that ends a turn."""
        following = next((n for n in answers_of(messages) if n > number), None)
        limit = len(text) if following is None else self._start(text, messages, following, tools)
        found = text.find(self._end_text, start, limit)
        if found >= 0:
            return found + len(self._end_text), True
        after = chat_text(self.tokenizer, messages[: number + 1], self.template, False, tools=tools)
        stop = len(after) if text.startswith(after) else limit
        return start + len(text[start:stop].rstrip()), False

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def answers_of(messages: Messages) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def spans_of(mask: list[int]) -> Spans:
    """Runs of ones. The first token of all is nobody's prediction, and so in none."""
    edges = [at for at in range(1, len(mask) + 1) if bool(at < len(mask) and mask[at]) != bool(at > 1 and mask[at - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))
