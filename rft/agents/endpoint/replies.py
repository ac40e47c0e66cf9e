"""The JSON that OpenAI's API answers with, whole or as a stream of events. Pure.

In: what was asked, and the answers (`SampledChoice`). Out: a reply's object, or its chunks in
order.
Invariant: the chunks of a stream put together are the reply.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rft.agents.endpoint.chat import ApiError, Asked
from rft.ground.experience import Completion

PIECE = 16  # tokens of one chunk


@dataclass(frozen=True)
class SampledChoice:
    """One answer.

    `pieces`: its text in parts; `tokens`: the text of each token, where probabilities are asked
    for.
    """

    made: Completion
    message: dict[str, Any]
    text: str
    tokens: list[str]

    @property
    def reason(self) -> str:
        return (
            "tool_calls"
            if self.message.get("tool_calls")
            else "length"
            if self.made.stop == "length"
            else "stop"
        )


def reply(
    id: str, asked: Asked, choices: list[SampledChoice], prompt_tokens: int
) -> dict[str, Any]:
    return {
        **_head(id, asked, choices),
        "choices": [_choice(asked, number, one) for number, one in enumerate(choices)],
        "usage": _usage(choices, prompt_tokens),
    }


def chunks(
    id: str, asked: Asked, choices: list[SampledChoice], prompt_tokens: int
) -> Iterator[dict[str, Any]]:
    head = _head(id, asked, choices, stream=True)
    for number, choice in enumerate(choices):
        for delta in _deltas(asked, choice):
            yield {**head, "choices": [{"index": number, **delta, "finish_reason": None}]}
        end: dict[str, Any] = {"delta": {}} if asked.messages is not None else {"text": ""}
        if asked.logprobs:
            end["logprobs"] = _logprobs(asked, choice)
        yield {**head, "choices": [{"index": number, **end, "finish_reason": choice.reason}]}
    if asked.stream_usage:
        yield {**head, "choices": [], "usage": _usage(choices, prompt_tokens)}


def error(refused: ApiError) -> dict[str, Any]:
    kind = (
        "authentication_error"
        if refused.status == 401
        else "server_error"
        if refused.status >= 500
        else "invalid_request_error"
    )
    return {
        "error": {
            "message": str(refused),
            "type": kind,
            "param": refused.param,
            "code": refused.code,
        }
    }


def _head(
    id: str, asked: Asked, choices: list[SampledChoice], stream: bool = False
) -> dict[str, Any]:
    kind = (
        "text_completion"
        if asked.messages is None
        else "chat.completion" + (".chunk" if stream else "")
    )
    newest = max((span.version for one in choices for span in one.made.versions), default=0)
    return {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
        "system_fingerprint": f"version-{newest}",
    }


def _choice(asked: Asked, number: int, choice: SampledChoice) -> dict[str, Any]:
    said = {"text": choice.text} if asked.messages is None else {"message": choice.message}
    found = _logprobs(asked, choice) if asked.logprobs else None
    return {"index": number, **said, "logprobs": found, "finish_reason": choice.reason}


def _deltas(asked: Asked, choice: SampledChoice) -> Iterator[dict[str, Any]]:
    text = choice.text if asked.messages is None else choice.message["content"] or ""
    size = max(1, -(-len(text) * PIECE // max(1, len(choice.made.tokens))))
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    if asked.messages is None:
        yield from ({"text": part} for part in parts)
        return
    yield {"delta": {"role": "assistant", "content": ""}}
    yield from ({"delta": {"content": part}} for part in parts)
    for index, call in enumerate(choice.message.get("tool_calls", ())):
        yield {"delta": {"tool_calls": [{"index": index, **call}]}}


def _logprobs(asked: Asked, choice: SampledChoice) -> dict[str, Any]:
    """Of every sampled token, the end of the turn too: exactly what is recorded."""
    numbers = choice.made.logprobs
    if asked.messages is None:
        return {
            "tokens": choice.tokens,
            "token_logprobs": list(numbers),
            "top_logprobs": None,
            "text_offset": [],
        }
    rows = zip(choice.tokens, numbers, strict=True)
    return {
        "content": [
            {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
            for t, p in rows
        ],
        "refusal": None,
    }


def _usage(choices: list[SampledChoice], prompt_tokens: int) -> dict[str, int]:
    made = sum(len(one.made.tokens) for one in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
    }
