"""A judge behind an OpenAI-compatible HTTP address: a response in, the number that the judge gives
it out; and what any judging model said: its answer in, the JSON value that was asked for out.

Invariant: a judge that does not answer in time, or not in the form asked for, raises: the outcome
is an error with its reason, and never a number. The key comes from the environment, by the name of
its variable, and stands in no message.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from rft.ground.experience import Task

PROMPT = """Judge a response to a task. {{"task": {task}, "reference": {truth}, "response": \
{response}}}
End with one JSON object and nothing behind it: {{"score": a number from 0 (useless) to 1 \
(perfect)}}"""
AGAIN_S = (0.5, 1.0, 2.0)  # before another try
RETRIED = (408, 409, 429, 500, 502, 503, 504)
MOST = 2**20  # bytes of an answer


def remote_judge(
    response: str,
    truth: str | None,
    task: Task,
    url: str = "",
    model: str = "",
    prompt: str = PROMPT,
    key_variable: str = "OPENAI_API_KEY",
    seconds: float = 8.0,
    retries: int = 2,
    max_tokens: int = 512,
) -> float:
    """The judge's `score`, 0 to 1. `url`: like http://127.0.0.1:8000/v1. `seconds`: for all tries
    together; keep it below explorer.reward_timeout.
    """
    if not url or not model:
        raise ValueError("remote_judge needs reward_fn_args.url and reward_fn_args.model")
    question = prompt.format(
        task=json.dumps(task.prompt), truth=json.dumps(truth), response=json.dumps(response)
    )
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    return share(
        entry(
            _asked(
                f"{url.rstrip('/')}/chat/completions",
                body,
                os.environ.get(key_variable, ""),
                seconds,
                retries,
            ),
            "score",
        )
    )


def _asked(url: str, body: dict[str, object], key: str, seconds: float, retries: int) -> str:
    """The text that the model answers.

    Tries again what may pass: no connection, too many requests, a server's own fault.
    """
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    deadline, problem = time.monotonic() + seconds, ""
    for wait in (*AGAIN_S, *[AGAIN_S[-1]] * retries)[: retries + 1]:
        try:
            with _opener().open(request, timeout=max(0.1, deadline - time.monotonic())) as answer:
                told = json.loads(answer.read(MOST))
            return str(told["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.reason}"
            if error.code not in RETRIED:
                raise RuntimeError(f"the judge at {url} refuses to answer: {problem}") from error
        except (OSError, http.client.HTTPException) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"the judge at {url} gave no chat completion: {type(error).__name__}"
            ) from error
        if time.monotonic() + wait >= deadline:
            break
        time.sleep(wait)
    raise RuntimeError(f"the judge at {url} gave no answer in {seconds:g} s: {problem}")


def _opener() -> urllib.request.OpenerDirector:
    """Without redirects: the key is for this address."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    return urllib.request.build_opener(Stay)


# --- what a judging model said ------------------------------------------------------------------


def entry(reply: str, key: str) -> Any:
    """What the last JSON object of `reply` that has `key` holds there.

    ValueError: there is none.
    """
    decoder, found, some = json.JSONDecoder(), None, False
    for place, character in enumerate(reply):
        if character != "{":
            continue
        try:
            value, _ = decoder.raw_decode(reply, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and key in value:
            found, some = value[key], True
    if not some:
        raise ValueError(
            f"the judge's answer has no JSON object with `{key}`: it ends in {reply[-200:]!r}"
        )
    return found


def entries(reply: str, key: str, count: int) -> list[Any]:
    """A list of exactly `count` entries under `key`."""
    found = entry(reply, key)
    if not isinstance(found, list) or len(found) != count:
        said = f"{len(found)} entries" if isinstance(found, list) else f"{found!r:.100}"
        raise ValueError(f"the judge's `{key}` must be a list of {count}; it has {said}")
    return found


def share(value: Any) -> float:
    """A score from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"the judge's score {value!r:.100} is no number from 0 to 1")
    return float(value)
