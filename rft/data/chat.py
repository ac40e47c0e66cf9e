"""Chats as token ids: the one place where chat templates are applied, so that rollouts and SFT see
the same tokens; and which tokens of a dialogue are learned, by any chat template.

Prompts. In: a task (or messages) and the model's tokenizer. Out: the ids of the prompt, ready for
the assistant to go on, and the id with which the assistant ends its turn. A plain prompt becomes
one user message where there is a chat template.

Dialogues. In: messages, which of them are answers to learn, the tokenizer and perhaps tools. Out:
ids, and the spans [start, end) of them that have loss: the assistant's words and the token that
ends its turn. A template that marks the answers itself ({% generation %}) gives all of them by the
tokenizer's own mask. For any other the place of an answer follows from prefixes: it begins where
the conversation before it ends, ready for the assistant, and ends with the end of the turn. Prompts
and answers become ids each for itself, as in a rollout, so a span is exact whatever the tokenizer
joins.

Invariant: the ids are those of the template's own text, and a template whose text does not go on
from its own prompt is refused rather than masked wrongly.
"""

import importlib
import json
import re
from typing import Any

from rft.config import ConfigError, FormatConfig, ModelConfig, RowFormatConfig
from rft.data.files import MISSING, at, content_problem, parsed, prompt_columns
from rft.ground import hubs
from rft.ground.experience import Task

_ANSWER = "[[answer]]"  # stands for an assistant's words when the end of its turn is looked up
HALF = re.compile("[\ud800-\udfff]")
WORD = re.compile(r"\w+")
# what a message says beside its content; of thoughts each template has a name of its own
SAID = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARKED = (
    "give a template that marks answers with {% generation %} as format.chat_template, or set "
    "format.enable_concatenated_multi_turn=false"
)
Spans = list[tuple[int, int]]
Messages = list[dict[str, Any]]


def row_prompt(raw: dict[str, Any], config: FormatConfig) -> str | list[dict[str, Any]]:
    """The prompt of a row: its messages; or its text, as messages where there is a system prompt.
    Empty where the row has none, which only a workflow that reads rows itself can use.
    """
    found = {name: at(raw, column) for name, column in prompt_columns(config).items()}
    said = next(((n, value) for n, value in found.items() if value not in (MISSING, None)), None)
    name, value = said or ("", "")
    if name == "messages_key" or isinstance(value, list):
        value = clean_messages(parsed(value))
    if name == "messages_key":
        return value
    system = at(raw, config.system_prompt_key) if config.system_prompt_key else config.system_prompt
    if system is None or not value:
        return value
    messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
    if messages[0]["role"] == "system":  # a row's own wins
        return messages
    # an empty one of a task says that there is none, not even a workflow's own
    is_said = system or isinstance(config, RowFormatConfig)
    return [{"role": "system", "content": system}, *messages] if is_said else messages


def row_tools(raw: dict[str, Any], config: FormatConfig) -> list[dict[str, Any]]:
    """The tools of a row: a list of objects, or that as JSON text; none where it says nothing."""
    found = parsed(at(raw, config.tools_key)) if config.tools_key else None
    return [] if found is MISSING else list(found or [])


def clean_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As templates take them, and as the endpoint of agents gives them: without the empty fields
    that Arrow adds where another row has them; content is one text, the arguments of a call an
    object. What is neither is left to a workflow that reads rows itself.
    """
    return [_clean(message) for message in messages]


def _clean(message: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None}
    if content_problem(found):
        return found
    if found["role"] == "developer":  # OpenAI's newer name, which few templates know
        found["role"] = "system"
    content = found.get("content", "")
    parts = content if isinstance(content, list) else [{"text": content}]
    found["content"] = "".join(part["text"] for part in parts)
    if calls := found.pop("tool_calls", None):  # of none, templates would write that there are some
        found["tool_calls"] = [_call(one) for one in calls]
    return found


def _call(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _call(call["function"])}
    arguments = call.get("arguments")
    said = isinstance(arguments, str)  # nothing at all, of a function without any
    return {**call, "arguments": json.loads(arguments or "{}")} if said else call


def _called_in_text(message: dict[str, Any]) -> dict[str, Any]:
    """A call as DeepSeek's templates take it: they join texts, and an empty content is another
    answer to them.
    """
    if not (calls := message.get("tool_calls")):
        return message
    found = {**message, "tool_calls": [_in_text(one) for one in calls]}
    return found if message.get("content") else {**found, "content": None}


def _in_text(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _in_text(call["function"])}
    return {**call, "arguments": json.dumps(call.get("arguments"), ensure_ascii=False)}


def import_tokenizers() -> None:
    """What a first tokenizer would wait for; these names are imported when they are asked for."""
    library = importlib.import_module("transformers")
    for name in ("AutoTokenizer", "PreTrainedTokenizerFast"):
        getattr(library, name)


def load_tokenizer(model: ModelConfig) -> Any:
    """The model's tokenizer, with the variables that its config gives to every template."""
    from transformers import AutoTokenizer

    hubs.bring(model.model_path, weights=False, code=model.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(
        model.model_path, trust_remote_code=model.trust_remote_code
    )
    if model.enable_thinking is not None:
        tokenizer.template_args = {"enable_thinking": model.enable_thinking}
    return tokenizer


def chat_text(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    **template_args: Any,
) -> str:
    """The conversation as the template writes it; `template_args` are its own, like `tools` or
    `enable_thinking`, and win over the model's.
    """
    if not (chat_template or tokenizer.chat_template):
        raise ConfigError(
            "these rows have chat messages or a system prompt, but the model's tokenizer has "
            "no chat template: set model.chat_template_path or model.custom_chat_template, "
            "or use format.prompt_type=plaintext without one"
        )
    text = text_of(
        _templated(
            tokenizer,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **template_args,
        )
    )
    _check_roles(text, messages)
    return text


def _check_roles(text: str, messages: list[dict[str, Any]]) -> None:
    """Templates leave out without a word what has a role that they do not know. An answer's words
    they may shorten, and a system prompt of one (`/no_think`) may be a sign to them.
    """
    for role, message in {m["role"]: m for m in reversed(messages)}.items():
        content = message.get("content")
        is_looked_at = isinstance(content, str) and role != "assistant"
        words = WORD.findall(content[:200]) if is_looked_at else []
        if len(words) > (role == "system") and max(words, key=len) not in text:
            raise ConfigError(
                f"the chat template leaves out what {role!r} says: write the row with roles that "
                "it has, or give another as model.chat_template_path"
            )


def text_of(given: str) -> str:
    """As UTF-8 can have it: halves of characters, which JSON can escape, are replaced."""
    return HALF.sub("\ufffd", given)


def _templated(tokenizer: Any, messages: list[dict[str, Any]], **args: Any) -> Any:
    """Raises ConfigError for what the template itself refuses, or cannot write."""
    from jinja2 import TemplateError

    args = getattr(tokenizer, "template_args", {}) | args
    try:
        try:
            return tokenizer.apply_chat_template(messages, **args)
        except TypeError:
            in_text = [_called_in_text(message) for message in messages]
            if in_text == messages:
                raise
            return tokenizer.apply_chat_template(in_text, **args)
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(f"the chat template does not take these messages: {error}") from error


def render_messages(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    chat_template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The ids of the conversation up to where the assistant begins to speak."""
    text = chat_text(tokenizer, messages, chat_template, tools=tools)
    # the template has written the special tokens
    return list(tokenizer.encode(text, add_special_tokens=False))


def render_prompt(tokenizer: Any, task: Task, chat_template: str | None = None) -> list[int]:
    """The ids of the task's prompt, ready for the assistant's answer.

    `chat_template` wins over the tokenizer's own.
    """
    if not task.prompt:
        raise ConfigError(
            f"task {task.id} has no prompt, and its workflow {task.workflow} speaks one: name its "
            f"column as format.prompt_key; the row has {', '.join(map(repr, task.raw))}"
        )
    template = chat_template or tokenizer.chat_template
    if task.tools and "tools" not in str(template):
        raise ConfigError(
            f"task {task.id} has tools (format.tools_key), and the chat template shows none: give "
            "one that does as model.chat_template_path, or use the workflow tool_use"
        )
    if not isinstance(task.prompt, str) or template:
        said = [{"role": "user", "content": task.prompt}]
        messages = said if isinstance(task.prompt, str) else task.prompt
        return render_messages(tokenizer, messages, chat_template, task.tools or None)
    return list(tokenizer.encode(text_of(task.prompt)))


def render_follow_up(
    tokenizer: Any, messages: list[dict[str, Any]], chat_template: str | None = None
) -> list[int]:
    """The ids behind an assistant's words: the end of its turn, `messages`, and where the assistant
    speaks again.

    They do not depend on those words, so a dialogue goes on from the very ids that were sampled.
    """
    if not (chat_template or tokenizer.chat_template):
        return list(
            tokenizer.encode(
                text_of("".join(f"\n{m['content']}\n" for m in messages)), add_special_tokens=False
            )
        )
    before = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    text = chat_text(tokenizer, [*before, *messages], chat_template)
    return list(tokenizer.encode(text.partition(_ANSWER)[2], add_special_tokens=False))


def end_of_turn(tokenizer: Any, chat_template: str | None = None) -> int:
    """The id that ends an assistant's turn: the template's special
    token behind its words, else the eos token.
    """
    if chat_template or tokenizer.chat_template:
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": _ANSWER},
        ]
        text = chat_text(tokenizer, messages, chat_template, add_generation_prompt=False)
        behind = tokenizer.encode(text.rpartition(_ANSWER)[2], add_special_tokens=False)
        if behind and behind[0] in special_ids(tokenizer):
            return behind[0]
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the model's tokenizer has no end-of-sequence token: "
            "set eos_token in tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}


class Dialogues:
    """`spans` of any number of dialogues that have tokenizer and template in common."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = chat_template
        self.end = end_of_turn(tokenizer, chat_template)
        self.special = special_ids(tokenizer)  # a call of a tool may end with one of its own
        self._end_text = tokenizer.convert_ids_to_tokens(self.end)
        self.marks_answers = bool(GENERATION.search(str(chat_template or tokenizer.chat_template)))

    def every_answer(
        self, messages: Messages, tools: Messages | None = None
    ) -> tuple[list[int], Spans]:
        """Ids of the whole dialogue, learned in every assistant's turn."""
        all_of_them = answers_of(messages)
        # OpenAI's and Mistral's way to say that an answer is read and not learned
        learned = [number for number in all_of_them if messages[number].get("weight") != 0]
        if not learned:
            raise ConfigError("every answer has weight 0: leave the row out")
        if not self.marks_answers or learned != all_of_them:
            return self.answers(messages, learned, tools)
        self._check_shown(messages, tools)
        chat_text(self.tokenizer, messages, self.template, False, tools=tools)  # refuses roles
        made = _templated(
            self.tokenizer,
            messages,
            tools=tools,
            chat_template=self.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        spans = spans_of(made["assistant_masks"])
        if not spans:
            raise ConfigError(
                "the chat template has {% generation %}, "
                "but marks no token of this dialogue: correct it"
            )
        return list(made["input_ids"]), spans

    def last_answer(
        self, messages: Messages, tools: Messages | None = None
    ) -> tuple[list[int], Spans]:
        """Ids of the whole dialogue, learned in its last turn only."""
        self._check_shown(messages, tools)
        last, words = len(messages) - 1, messages[-1].get("content")
        try:
            return self.answers(messages, [last], tools)
        except ConfigError:
            # of more than words only the template knows how it is written
            if not isinstance(words, str) or messages[-1].keys() != {"role", "content"}:
                raise
        # Where the template writes a last answer otherwise than behind its own prompt, what a
        # rollout sees is learned.
        text = chat_text(self.tokenizer, messages[:-1], self.template, tools=tools)
        prompt = self._ids(text)
        ids = [*prompt, *self._ids(behind_tag(text, words)), self.end]
        return ids, [(len(prompt), len(ids))]

    def answers(
        self, messages: Messages, learned: list[int], tools: Messages | None = None
    ) -> tuple[list[int], Spans]:
        """Ids up to the end of the last of the answers `learned`, given by their numbers."""
        self._check_shown(messages, tools)
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
            if not ends and number == learned[-1] and ids[-1] not in self.special:
                # a template without an end of turn: a rollout would end with this
                ids.append(self.end)
            spans.append((first, len(ids)))
        return ids, spans

    def _check_shown(self, messages: Messages, tools: Messages | None) -> None:
        """Refuse what the template would leave out without a word."""
        template = str(self.template or self.tokenizer.chat_template)
        there = {name for message in messages for name in SAID if message.get(name)}
        for name in (*(["tools"] if tools else []), *sorted(there)):
            if not re.search(rf"\b{name}\b", template):
                has = [one for one in SAID if re.search(rf"\b{one}\b", template)]
                raise ConfigError(
                    f"the row has {name}, and the chat template shows none (it knows "
                    f"{', '.join(has) or 'content alone'}): rename it, give one that does as "
                    "format.chat_template, or leave it out of the row"
                )

    def _start(self, text: str, messages: Messages, number: int, tools: Messages | None) -> int:
        before = chat_text(self.tokenizer, messages[:number], self.template, True, tools=tools)
        if not text.startswith(before):
            raise ConfigError(
                f"the chat template does not write message {number + 1}, "
                f"an answer, behind the prompt that it makes of the messages before it: {MARKED}"
            )
        return len(before)

    def _stop(
        self, text: str, messages: Messages, number: int, start: int, tools: Messages | None
    ) -> tuple[int, bool]:
        """Where the answer that begins at `start` ends, and
        whether by the token that ends a turn.
        """
        following = next((n for n in answers_of(messages) if n > number), None)
        limit = len(text) if following is None else self._start(text, messages, following, tools)
        found = text.find(self._end_text, start, limit)
        if found >= 0 and self._end_text not in str(messages[number]):
            return found + len(self._end_text), True
        after = chat_text(self.tokenizer, messages[: number + 1], self.template, False, tools=tools)
        stop = len(after)
        if not text.startswith(after):  # with more behind it, it has not the end of a last one
            stop = after.rfind(self._end_text, start)
            if stop < 0 or not text.startswith(after[:stop]):
                raise ConfigError(
                    f"the chat template writes message {number + 1}, an answer, otherwise where "
                    f"others follow it: {MARKED}"
                )
            return stop, False
        if found >= 0:  # the words have that token too
            return text.rindex(self._end_text, start, stop) + len(self._end_text), True
        return start + len(text[start:stop].rstrip()), False

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def behind_tag(prompt: str, words: str) -> str:
    """Without the tag (<think>) that the prompt ends with, where the words begin with it too."""
    tag = re.search(r"<\w+>\s*$", prompt)
    opened = tag[0].strip() if tag else ""
    if opened and words.lstrip().startswith(opened):
        return words.lstrip().removeprefix(opened).lstrip("\n")
    return words


def answers_of(messages: Messages) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def spans_of(mask: list[int]) -> Spans:
    """Runs of ones. The first token of all is nobody's prediction, and so in none."""
    edges = [
        at
        for at in range(1, len(mask) + 1)
        if bool(at < len(mask) and mask[at]) != bool(at > 1 and mask[at - 1])
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))
