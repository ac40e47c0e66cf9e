"""OpenAI's chat format against a model's own: messages in, prompt text and back; no tokens are
counted here, no session known.

    request body ──► `Asked` (or `ApiError`, with OpenAI's status and field)        conversation
            ──► template ──► text
    text of a response ──► content and tool calls ──► the `choice` of a reply

In: JSON of `/v1/chat/completions` and `/v1/completions`. Out: what to sample and how, and the JSON
of a reply. Invariants: what would change the distribution that tokens are sampled from, and is not
recorded with them, is refused by name; two histories are the same (`canonical`) only if a model
would be shown the same of them.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rft.ground.experience import Sampling

# in the place of an answer, to find what a template writes behind it
MARK = "rft-answer-stands-here"
# as Hermes and Qwen models write it
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
# fields that change what is sampled without a trace in the log-probabilities, and the value that
# does not
REFUSED = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "best_of": 1,
    "suffix": "",
    "echo": False,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "structured_outputs": None,
    "min_p": 0,
}
MOST_CHOICES = 128


class ApiError(ValueError):
    """A request that cannot be answered.

    `status` of HTTP, `code` and `param` as OpenAI names them.
    """

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Asked:
    """One request. `messages` is None for `/v1/completions`, whose `prompt` is text or ids."""

    model: str
    sampling: Sampling  # max_tokens=0: as many as the context has room for
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_args: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    stop: list[str] = field(default_factory=list)
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False

    @property
    def frame(self) -> str:
        """What besides the messages decides how a template writes them."""
        return json.dumps([self.tools, self.template_args], sort_keys=True)


def read(body: Any, defaults: Sampling) -> Asked:
    """A request's JSON; `defaults` says how to sample where it does not."""
    if not isinstance(body, dict):
        raise ApiError("the body is no JSON object")
    for name, harmless in REFUSED.items():
        if body.get(name) not in (None, harmless):
            raise ApiError(
                f"{name} is not served: it changes what is sampled, and the recorded probabilities",
                name,
            )
    tools = [] if body.get("tool_choice") == "none" else _list(body, "tools")
    is_chat, n = "messages" in body, _number(body, "n", 1, int, 1, MOST_CHOICES)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise ApiError("stop is a text or a list of texts", "stop")
    if not is_chat and not isinstance(body.get("prompt"), str) and not _is_ids(body.get("prompt")):
        raise ApiError(
            "prompt is a text or a list of token ids; give several in several requests", "prompt"
        )
    return Asked(
        model=str(body.get("model") or ""),
        sampling=_sampling(body, defaults, _form(body) | _calls(body, tools)),
        messages=[_message(one) for one in _list(body, "messages")] if is_chat else None,
        prompt=body.get("prompt", ""),
        tools=tools,
        template_args=dict(body.get("chat_template_kwargs") or {}),
        n=int(n),
        stop=stop,
        logprobs=body.get("logprobs") not in (None, False),
        stream=bool(body.get("stream")),
        stream_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def _form(body: dict[str, Any]) -> dict[str, Any]:
    """What `response_format` asks for, by vLLM's names."""
    asked = body.get("response_format") or {}
    kind = asked.get("type", "text") if isinstance(asked, dict) else asked
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    told = asked.get("json_schema") if kind == "json_schema" else None
    if isinstance(told, dict) and isinstance(told.get("schema"), dict):
        return {"json": told["schema"]}
    raise ApiError(
        "response_format is {type: text}, {type: json_object}, or {type: json_schema, json_schema: "
        "{schema: an object}}",
        "response_format",
    )


def _calls(body: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What `tool_choice` asks for: calls as Hermes and Qwen models write them, and nothing else."""
    choice = body.get("tool_choice") or "auto"
    if choice in ("auto", "none"):
        return {}
    functions = [one.get("function") or {} for one in tools]
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        functions = [one for one in functions if one.get("name") == name]
        if not functions:
            raise ApiError(f"tool_choice names {name!r}, which is none of tools", "tool_choice")
    elif choice != "required" or not functions:
        raise ApiError(
            "tool_choice is auto, none, required (with tools), or {type: function, function: "
            "{name: one of tools}}",
            "tool_choice",
        )
    if _form(body):
        raise ApiError("response_format is of an answer that calls no tool", "response_format")
    form = {
        "type": "tags_with_separator",
        "tags": [_tag(one) for one in functions],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": isinstance(choice, dict) or body.get("parallel_tool_calls") is False,
    }
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def _tag(function: dict[str, Any]) -> dict[str, Any]:
    name = json.dumps(function.get("name"))
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": {name}, "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }


def _sampling(body: dict[str, Any], defaults: Sampling, form: dict[str, Any]) -> Sampling:
    most = (
        "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    )
    return Sampling(
        temperature=_number(body, "temperature", defaults.temperature, float, 0.0, 100.0),
        top_p=_number(body, "top_p", defaults.top_p, float, 1e-9, 1.0),
        top_k=int(_number(body, "top_k", defaults.top_k, int, -1, 2**31)),
        max_tokens=int(_number(body, most, 0, int, 1, 2**31)),
        min_tokens=int(_number(body, "min_tokens", 0, int, 0, 2**31)),
        seed=defaults.seed
        if body.get("seed") is None
        else int(_number(body, "seed", 0, int, -(2**62), 2**62)),
        structured=form or defaults.structured,
    )


def _number(
    body: dict[str, Any], name: str, default: float, kind: type, low: float, high: float
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (kind is int and value != int(value))
    ):
        raise ApiError(f"{name} is a number, not {value!r}", name)
    if not low <= value <= high:
        raise ApiError(f"{name}={value} must be between {low:g} and {high:g}", name)
    return kind(value)


def _list(body: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ApiError(f"{name} is a list of objects", name)
    if name == "messages" and not found:
        raise ApiError("messages is empty", name)
    return found


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """As templates take it: content is one text, and a tool call's arguments are an object."""
    if not isinstance(given.get("role"), str):
        raise ApiError("every message has a role", "messages")
    made = {
        "role": "system" if given["role"] == "developer" else given["role"],
        "content": _text(given.get("content")),
    }
    made |= {
        key: given[key] for key in ("name", "tool_call_id", "reasoning_content") if given.get(key)
    }
    if calls := given.get("tool_calls"):
        made["tool_calls"] = [_call(one) for one in calls]
    return made


def _text(content: Any) -> str:
    if isinstance(content, list):
        kinds = {part.get("type") for part in content if isinstance(part, dict)}
        if strange := kinds - {"text", "input_text", "output_text", "refusal"}:
            raise ApiError(
                f"a message's content has {sorted(map(str, strange))}: only text is served, images "
                "and sound are not",
                "messages",
            )
        return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    return "" if content is None else str(content)


def _call(given: dict[str, Any]) -> dict[str, Any]:
    function = given.get("function") or {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:  # the model wrote it so, and is shown it again
            arguments = {"": arguments}
    function = {"name": str(function.get("name")), "arguments": arguments}
    return {"id": str(given.get("id")), "type": "function", "function": function}


def canonical(message: dict[str, Any]) -> dict[str, Any]:
    """A message (as `_message` makes it) for comparison: clients may drop space around a text and
    the thoughts of an answer, and what they add is not shown.
    """
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": message["content"].strip()}


# --- templates ------------------------------------------------------------------------------------


def behind(render: Any, messages: list[dict[str, Any]], answer: int) -> str | None:
    """What a template writes behind message `answer`, up to where the next answer begins; None if
    that cannot be told apart.

    `render(messages)` is the text of a conversation. The answer's own text is not looked at: the
    ids that it was are known.
    """
    marked = [*messages[:answer], {"role": "assistant", "content": MARK}, *messages[answer + 1 :]]
    before, found, after = render(marked).partition(MARK)
    return after if found and MARK not in after else None


# --- replies --------------------------------------------------------------------------------------


class Parsed(NamedTuple):
    """What a parser finds in an answer; `calls`: None where it does not look for them."""

    words: str
    thoughts: str | None
    calls: list[tuple[str, Any]] | None


def answer_message(
    text: str, has_tools: bool, call_prefix: str, parsed: Parsed | None = None
) -> dict[str, Any]:
    """The assistant's message: what it says, and with tools what it calls. `parsed`: by a parser
    that the config names, before the rules of this module.
    """
    said = parsed or Parsed(text, None, None)
    thoughts = {"reasoning_content": said.thoughts} if said.thoughts else {}
    if said.calls is not None:
        calls, words = said.calls, said.words.strip()
    else:
        calls = _called(said.words) if has_tools else []
        words = TOOL_CALL.sub("", said.words).strip() if TOOL_CALL.search(said.words) else ""
    if not calls:
        return {"role": "assistant", "content": said.words, **thoughts}
    made = [
        {
            "id": f"{call_prefix}-{number}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": words or None, "tool_calls": made, **thoughts}


def remembered(message: dict[str, Any]) -> dict[str, Any]:
    """A reply's message as it comes back in the next request."""
    return canonical(_message(message))


def _called(text: str) -> list[tuple[str, Any]]:
    """(name, arguments) of each call: in tags, or, as Llama models write it, as the whole text."""
    written = TOOL_CALL.findall(text) or ([text.strip()] if text.strip().startswith("{") else [])
    calls = []
    for one in written:
        try:
            found = json.loads(one)
        except ValueError:  # no call, then; it stays in the text
            return []
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return []
        calls.append((found["name"], found.get("arguments", found.get("parameters", {}))))
    return calls


def cut(text: str, stop: list[str]) -> str:
    """`text` up to the first of the stop texts."""
    return min((text.partition(one)[0] for one in stop), key=len, default=text)
