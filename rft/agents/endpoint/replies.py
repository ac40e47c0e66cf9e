"""What OpenAI's API answers with, whole or as a stream of chunks, as the objects of its own
library. Pure.

In: what was asked, and the answers (`SampledChoice`). Out: a reply's object, or its chunks in
order, and their JSON (`wire`). Invariants: the chunks of a stream put together are the reply; a
field that was not set is not sent.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from openai import BaseModel
from openai.types import Completion as TextCompletion
from openai.types import CompletionChoice, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_choice import Logprobs
from openai.types.shared import ErrorObject

from rft.agents.endpoint.chat_format import ApiError, Asked
from rft.ground.experience import Completion

PIECE = 16  # tokens of one chunk
# the fields of every object, in the order in which they are sent; others come behind them
ORDER = (
    *("index", "id", "object", "created", "model", "system_fingerprint", "role", "message"),
    *("delta", "text", "content", "tool_calls", "type", "function", "name", "arguments"),
    *("tokens", "token_logprobs", "token", "logprob", "bytes", "top_logprobs", "text_offset"),
    *("refusal", "logprobs", "finish_reason", "choices", "usage", "prompt_tokens"),
    *("completion_tokens", "total_tokens", "param", "code"),
)
RANK = {name: rank for rank, name in enumerate(ORDER)}


@dataclass(frozen=True)
class SampledChoice:
    """One answer. `tokens`: the text of each token, where probabilities are asked for."""

    made: Completion
    message: dict[str, Any]
    text: str
    tokens: list[str]

    @property
    def reason(self) -> Literal["tool_calls", "length", "stop"]:
        if self.message.get("tool_calls"):
            return "tool_calls"
        return "length" if self.made.stop == "length" else "stop"


def wire(sent: BaseModel) -> dict[str, Any]:
    """The JSON of one of OpenAI's objects."""
    found: dict[str, Any] = _ordered(sent.model_dump(exclude_unset=True, warnings=False))
    return found


def _ordered(value: Any) -> Any:
    if isinstance(value, list):
        return [_ordered(one) for one in value]
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=lambda name: RANK.get(name, len(RANK)))
    return {name: _ordered(value[name]) for name in names}


def reply(
    id: str, asked: Asked, choices: list[SampledChoice], prompt_tokens: int
) -> ChatCompletion | TextCompletion:
    head, usage = _head(id, asked, choices), _usage(choices, prompt_tokens)
    if asked.messages is None:
        texts = [
            _text(number, one.text, one.reason, logprobs=_of_text(one) if asked.logprobs else None)
            for number, one in enumerate(choices)
        ]
        return TextCompletion(**head, object="text_completion", choices=texts, usage=usage)
    said = [
        Choice(
            index=number,
            message=ChatCompletionMessage(**one.message),
            logprobs=_of_chat(one) if asked.logprobs else None,
            finish_reason=one.reason,
        )
        for number, one in enumerate(choices)
    ]
    return ChatCompletion(**head, object="chat.completion", choices=said, usage=usage)


def chunks(
    id: str, asked: Asked, choices: list[SampledChoice], prompt_tokens: int
) -> Iterator[ChatCompletionChunk | TextCompletion]:
    head = _head(id, asked, choices)

    def chunk(parts: list[Any], **usage: CompletionUsage) -> ChatCompletionChunk | TextCompletion:
        if asked.messages is None:
            return TextCompletion(**head, object="text_completion", choices=parts, **usage)
        return ChatCompletionChunk(**head, object="chat.completion.chunk", choices=parts, **usage)

    for number, choice in enumerate(choices):
        for part in (_texts if asked.messages is None else _deltas)(asked, number, choice):
            yield chunk([part])
    if asked.stream_usage:
        yield chunk([], usage=_usage(choices, prompt_tokens))


def listed(name: str, max_model_len: int) -> Model:
    """A row of /v1/models. `max_model_len` is vLLM's own field."""
    return Model(id=name, object="model", created=0, owned_by="rft", max_model_len=max_model_len)


def error(refused: ApiError) -> dict[str, Any]:
    kind = (
        "authentication_error"
        if refused.status == 401
        else "server_error"
        if refused.status >= 500
        else "invalid_request_error"
    )
    told = ErrorObject(message=str(refused), type=kind, param=refused.param, code=refused.code)
    return {"error": wire(told)}


def _head(id: str, asked: Asked, choices: list[SampledChoice]) -> dict[str, Any]:
    newest = max((span.version for one in choices for span in one.made.versions), default=0)
    return {
        "id": id,
        "created": int(time.time()),
        "model": asked.model,
        "system_fingerprint": f"version-{newest}",
    }


def _text(number: int, text: str, reason: str | None, **logprobs: Any) -> CompletionChoice:
    """Not validated: OpenAI's type knows no choice that is under way, and none that calls tools."""
    return CompletionChoice.construct(index=number, text=text, finish_reason=reason, **logprobs)


def _texts(asked: Asked, number: int, choice: SampledChoice) -> Iterator[CompletionChoice]:
    yield from (_text(number, piece, None) for piece in _pieces(choice, choice.text))
    logprobs = {"logprobs": _of_text(choice)} if asked.logprobs else {}
    yield _text(number, "", choice.reason, **logprobs)


def _deltas(asked: Asked, number: int, choice: SampledChoice) -> Iterator[ChunkChoice]:
    deltas = [
        {"role": "assistant", "content": ""},
        *({"content": piece} for piece in _pieces(choice, choice.message["content"] or "")),
        *(
            {"tool_calls": [{"index": index, **call}]}
            for index, call in enumerate(choice.message.get("tool_calls", ()))
        ),
    ]
    for delta in deltas:
        yield ChunkChoice(index=number, delta=ChoiceDelta(**delta), finish_reason=None)
    logprobs = {"logprobs": _of_chat(choice).model_dump()} if asked.logprobs else {}
    yield ChunkChoice(index=number, delta=ChoiceDelta(), finish_reason=choice.reason, **logprobs)


def _pieces(choice: SampledChoice, text: str) -> list[str]:
    size = max(1, -(-len(text) * PIECE // max(1, len(choice.made.tokens))))
    return [text[at : at + size] for at in range(0, len(text), size)]


def _of_text(choice: SampledChoice) -> Logprobs:
    """Of every sampled token, the end of the turn too: exactly what is recorded."""
    numbers = choice.made.logprobs.tolist()
    return Logprobs(tokens=choice.tokens, token_logprobs=numbers, top_logprobs=None, text_offset=[])


def _of_chat(choice: SampledChoice) -> ChoiceLogprobs:
    rows = [
        {"token": token, "logprob": number, "bytes": list(token.encode()), "top_logprobs": []}
        for token, number in zip(choice.tokens, choice.made.logprobs.tolist(), strict=True)
    ]
    return ChoiceLogprobs(content=rows, refusal=None)


def _usage(choices: list[SampledChoice], prompt_tokens: int) -> CompletionUsage:
    made = sum(len(one.made.tokens) for one in choices)
    return CompletionUsage(
        prompt_tokens=prompt_tokens, completion_tokens=made, total_tokens=prompt_tokens + made
    )
