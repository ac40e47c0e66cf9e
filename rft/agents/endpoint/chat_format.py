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

import xxhash

from rft.ground.experience import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, Sampling

# in the place of an answer, to find what a template writes behind it
MARK = "rft-answer-stands-here"
# as Hermes and Qwen models write it
CALL_BEGINS, CALL_ENDS = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\}\s*</tool_call>")
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
# arguments of the tokenizer's call of a template, which are no variables of it
NO_VARIABLES = {"messages", "conversation", "tools", "tokenizer", "chat_template", "tokenize"}
NO_VARIABLES |= {"add_generation_prompt", "continue_final_message", "padding", "truncation"}
NO_VARIABLES |= {"max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
NO_VARIABLES |= {"return_assistant_tokens_mask"}
PARTS = {"text", "input_text", "output_text", "refusal"}  # of a message's content
CALL_ID = 9  # letters and digits: Mistral's templates take no other length


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
    if body.get("functions"):
        raise ApiError("functions is the old name of tools: give tools", "functions")
    tools = [] if body.get("tool_choice") == "none" else _tools(body)
    is_chat, n = "messages" in body, _number(body, "n", 1, int, 1, MOST_CHOICES)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise ApiError("stop is a text or a list of texts", "stop")
    return Asked(
        model=str(body.get("model") or ""),
        sampling=_sampling(body, defaults, _form(body) | _calls(body, tools)),
        messages=[_message(one) for one in _list(body, "messages")] if is_chat else None,
        prompt="" if is_chat else _prompt(body),
        tools=tools,
        template_args=_template_args(body),
        n=int(n),
        stop=stop,
        # 0 of /v1/completions: of the sampled tokens alone, as always here
        logprobs=body.get("logprobs") is not None and body["logprobs"] is not False,
        stream=bool(body.get("stream")),
        stream_usage=bool(_object(body, "stream_options").get("include_usage")),
    )


def _tools(body: dict[str, Any]) -> list[dict[str, Any]]:
    found = _list(body, "tools")
    functions = [one.get("function") for one in found]
    if not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
        raise ApiError("each of tools is {type: function, function: {name: a text, ...}}", "tools")
    return found


def _template_args(body: dict[str, Any]) -> dict[str, Any]:
    found = _object(body, "chat_template_kwargs")
    if strange := sorted(NO_VARIABLES & set(found)):
        raise ApiError(
            f"chat_template_kwargs has {', '.join(strange)}: give variables of the chat template",
            "chat_template_kwargs",
        )
    return found


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
        name = _object(choice, "function", "tool_choice").get("name")
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
        temperature=_temperature(body, defaults),
        top_p=_number(body, "top_p", defaults.top_p, float, 1e-9, 1.0),
        top_k=int(_number(body, "top_k", defaults.top_k, int, -1, 2**31)),
        max_tokens=int(_number(body, most, 0, int, 1, 2**31)),
        min_tokens=int(_number(body, "min_tokens", 0, int, 0, 2**31)),
        seed=defaults.seed
        if body.get("seed") is None
        else int(_number(body, "seed", 0, int, -(2**62), 2**62)),
        structured=form or defaults.structured,
    )


def _temperature(body: dict[str, Any], defaults: Sampling) -> float:
    """What is lower than engines sample at asks for the likeliest tokens."""
    asked = _number(body, "temperature", defaults.temperature, float, 0.0, HIGHEST_TEMPERATURE)
    return asked if asked >= LOWEST_TEMPERATURE else 0.0


def _number(
    body: dict[str, Any], name: str, default: float, kind: type, low: float, high: float
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (kind is int and isinstance(value, float) and not value.is_integer())
    ):
        raise ApiError(f"{name} is a number, not {value!r}", name)
    if not low <= value <= high:
        raise ApiError(f"{name}={value} must be between {low:g} and {high:g}", name)
    return kind(value)


def _object(body: dict[str, Any], name: str, param: str | None = None) -> dict[str, Any]:
    found = body.get(name) or {}
    if not isinstance(found, dict):
        raise ApiError(f"{name} is an object, not {found!r:.100}", param or name)
    return found


def _list(body: dict[str, Any], name: str, param: str | None = None) -> list[dict[str, Any]]:
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ApiError(f"{name} is a list of objects", param or name)
    if name == "messages" and not found:
        raise ApiError("messages is empty", name)
    return found


def _prompt(body: dict[str, Any]) -> str | list[int]:
    """Clients for several give a list also of one."""
    match body.get("prompt"):
        case str(text) | [str(text)]:
            return text
        case [[*ids]] | [*ids] if ids and all(type(one) is int and one >= 0 for one in ids):
            return ids
    raise ApiError(
        "prompt is a text or a list of token ids; give several in several requests", "prompt"
    )


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
    if calls := _list(given, "tool_calls", "messages"):
        made["tool_calls"] = [_call(one) for one in calls]
    return made


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ApiError("a message's content is a text, or a list of parts with text", "messages")
    if strange := {str(part.get("type")) for part in content} - PARTS:
        raise ApiError(
            f"a message's content has {sorted(strange)}: only text is served, images and sound are "
            "not",
            "messages",
        )
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _call(given: dict[str, Any]) -> dict[str, Any]:
    function = _object(given, "function", "messages")
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
    text: str, has_tools: bool, answer: str, parsed: Parsed | None = None
) -> dict[str, Any]:
    """The assistant's message: what it says, and with tools what it calls, under ids that follow
    from that of the `answer`. `parsed`: by a parser that the config names, before the rules of this
    module.
    """
    said = parsed or Parsed(text, None, None)
    thoughts = {"reasoning_content": said.thoughts} if said.thoughts else {}
    if said.calls is not None:
        calls, words = said.calls, said.words.strip()
    else:
        written, outside = _calls_in(said.words) if has_tools else ([], "")
        calls = _called(said.words, written) if has_tools else []
        words = outside.strip() if written else ""
    if not calls:
        return {"role": "assistant", "content": said.words, **thoughts}
    made = [
        {
            "id": xxhash.xxh3_64_hexdigest(f"{answer} {number}".encode())[:CALL_ID],
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": words or None, "tool_calls": made, **thoughts}


def remembered(message: dict[str, Any]) -> dict[str, Any]:
    """A reply's message as it comes back in the next request."""
    return canonical(_message(message))


def _calls_in(text: str) -> tuple[list[str], str]:
    """What stands in tags, and the rest of the text; in time that is linear in its length, however
    many tags have no end.
    """
    calls, rest, at = [], "", 0
    while (begins := CALL_BEGINS.search(text, at)) and (
        ends := CALL_ENDS.search(text, begins.end())
    ):
        calls.append(text[begins.end() : ends.start() + 1])
        rest, at = rest + text[at : begins.start()], ends.end()
    return calls, rest + text[at:]


def _called(text: str, written: list[str]) -> list[tuple[str, Any]]:
    """(name, arguments) of each call: in tags, or, as Llama models write it, as the whole text."""
    calls = []
    for one in written or ([text.strip()] if text.strip().startswith("{") else []):
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
