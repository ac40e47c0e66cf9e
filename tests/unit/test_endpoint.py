"""The real `openai` client against the endpoint over an engine that answers as it is told: what is
recorded is what was sampled.
"""

import asyncio
import json
import random
import re
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from rft.agents.endpoint import chat_format, connections, registry, replies, server
from rft.agents.endpoint.server import OpenAIEndpoint
from rft.ground.experience import Completion, Experience, Sampling, VersionSpan, encode
from rft.rollout.engine_weights import RequestRefused
from rft.rollout.served import ServedGroup
from rft.rollout.workflows import check
from tests.unit.scripted import END, TOKEN, TOKENIZER, Kept, Pool, listening, policy
from tests.unit.test_explorer import tasks

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {}},
    },
}
TOOLS = (  # shows tools, calls and their results, as Qwen's template does
    "{% if tools %}{{ '<|system|>' + tools[0].function.name + '<|end|>' }}{% endif %}"
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ "
    "m.role[0] + ':' if m.role == 'tool' }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<tool_call>' + (c.function | tojson) + "
    "'</tool_call>' }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


CLIENTS: list[AsyncOpenAI] = []  # of the scenario that runs


def client(
    endpoint: OpenAIEndpoint, session: str = "", key: str = TOKEN, **more: Any
) -> AsyncOpenAI:
    base = endpoint.base_url(session) if session else f"{endpoint.url}/v1"
    CLIENTS.append(AsyncOpenAI(base_url=base, api_key=key, max_retries=0, **more))
    return CLIENTS[-1]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def run(
    scenario: Callable[[OpenAIEndpoint, Pool], Awaitable[Any]],
    tmp_path: Path,
    script: Callable[[str, int], Any] = lambda p, n: "ok",
    **more: Any,
) -> Any:
    async def whole() -> Any:
        pool = Pool(script)
        async with asyncio.timeout(60), listening(pool, tmp_path, **more) as endpoint:
            try:
                return await scenario(endpoint, pool)
            finally:
                await asyncio.gather(*(one.close() for one in CLIENTS))
                CLIENTS.clear()

    return asyncio.run(whole())


def exact(experience: Experience, pool: Pool) -> None:
    """Ids, log-probabilities and versions are the engine's, and everything before an answer is the
    prompt it was sampled from.
    """
    check(tasks(1)[0], [experience])
    known = {
        tuple(asked.prompt): made for asked, made in zip(pool.asked, pool.answered, strict=True)
    }
    at, found = experience.prompt_length, 0
    while at < len(experience.tokens):
        if not experience.action_mask[at - experience.prompt_length]:
            at += 1
            continue
        made = known[tuple(experience.tokens[:at])]
        start, end = at - experience.prompt_length, at - experience.prompt_length + len(made.tokens)
        assert experience.tokens[at : at + len(made.tokens)].tolist() == made.ids
        assert list(experience.logprobs[start:end]) == list(made.logprobs) and all(
            experience.action_mask[start:end]
        )
        assert (made.versions[0].version, start, end) in [
            (s.version, s.start, s.end) for s in experience.versions
        ]
        at, found = at + len(made.tokens), found + 1
    assert found == experience.metrics.get("turns", 1)


def test_a_conversation_is_one_sequence_of_the_sampled_ids(tmp_path: Path) -> None:
    """The second answer was cut by its length, so that the template's end of turn is no sampled
    token; spaces that the client drops are in the ids all the same.
    """

    def script(prompt: str, n: int) -> Any:
        return (" two ", "length") if "b?" in prompt and "c?" not in prompt else " one "

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> Experience:
        session = endpoint.registry.open()
        asked, said = client(endpoint, session.id, endpoint.registry.key(session.id)), []
        for version, text in enumerate(("a?", "b?", "c?")):
            pool.version = version
            said.append(user(text))
            made = await asked.chat.completions.create(model="gpt-4o", messages=said)
            assert made.system_fingerprint == f"version-{version}"
            said.append(assistant(made.choices[0].message.content.strip()))
        made = session.experiences()
        assert len(made) == 1 and endpoint.registry.counts["branches"] == 0
        exact(made[0], pool)
        return made[0]

    made = run(scenario, tmp_path, script)
    turns = TOKENIZER.decode(made.tokens).split("<|user|>")
    assert turns[1:] == [
        f"{text}<|end|><|assistant|> {word} <|end|>"
        for text, word in (("a?", "one"), ("b?", "two"), ("c?", "one"))
    ]
    assert [span.version for span in made.versions] == [0, 1, 2]
    assert sum(made.action_mask) == len(" one ") + 1 + len(" two ") + len(" one ") + 1


def test_changed_history_begins_anew_and_an_earlier_point_goes_on_from_its_ids(
    tmp_path: Path,
) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        ask = client(endpoint, session.id).chat.completions.create
        first = (await ask(model="m", messages=[user("a")])).choices[0].message.content
        await ask(model="m", messages=[user("a"), assistant(first), user("b")])
        # back to an earlier point
        await ask(model="m", messages=[user("a"), assistant(first), user("other")])
        await ask(model="m", messages=[user("a"), assistant("never said"), user("b")])  # changed
        await ask(
            model="m", messages=[user("a"), assistant(first), user("c")], temperature=0.5
        )  # sampled in another way
        made = session.experiences()
        assert [len(line.calls) for line in session.lines] == [2, 1, 1, 1] and session.branches == 3
        for one in made:
            exact(one, pool)
        assert (
            made[1].prompt_ids == pool.asked[2].prompt
        )  # shared: in the prompt, not trained twice
        assert "never said" in TOKENIZER.decode(made[2].prompt_ids)
        assert [one.temperature for one in made] == [1.0, 1.0, 1.0, 0.5]
        assert sum(sum(one.action_mask) for one in made) == sum(
            len(one.tokens) for one in pool.answered
        )

    run(scenario, tmp_path, lambda p, n: f"answer to {p[-20:-14]}")


def test_several_choices_and_two_requests_at_a_time_are_trained_once_each(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        ask = client(endpoint, session.id).chat.completions.create
        made = await ask(model="m", messages=[user("a")], n=2)
        assert [one.message.content for one in made.choices] == ["0", "1"]
        pool.gate.clear()
        history = [user("a"), assistant("1"), user("b")]
        both = [asyncio.create_task(ask(model="m", messages=history)) for _ in range(2)]
        while len(pool.asked) < 3:
            await asyncio.sleep(0)
        pool.gate.set()
        await asyncio.gather(*both)
        lines = session.lines
        # the second of the two has a line of its own
        assert [len(line.calls) for line in lines] == [1, 2, 1]
        trained = sum(sum(one.action_mask) for one in session.experiences())
        assert trained == sum(len(one.tokens) for one in pool.answered)

    run(scenario, tmp_path, lambda p, n: str(n))


def test_requests_at_a_time_have_seeds_of_their_own(tmp_path: Path) -> None:
    """As those behind each other have: else votes on one question were one answer."""

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open(sampling=Sampling(seed=7))
        api = client(endpoint, session.id)
        ask = {"model": "m", "messages": [user("a")]}
        pool.gate.clear()
        both = [asyncio.create_task(api.chat.completions.create(**ask)) for _ in range(2)]
        while len(pool.asked) < 2:
            await asyncio.sleep(0)
        pool.gate.set()
        await asyncio.gather(*both)
        await api.chat.completions.create(**ask)
        assert [one.sampling.seed for one in pool.asked] == [7, 8, 9]

    run(scenario, tmp_path)


def test_a_long_conversation_is_kept_once(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        api, said = client(endpoint, session.id), []
        for text in ("a?", "b?", "c?"):
            said.append(user(text))
            made = await api.chat.completions.create(model="m", messages=said)
            said.append(assistant(made.choices[0].message.content))
        first, second, third = (call.messages for call in session.calls)
        assert [len(one) for one in (first, second, third)] == [2, 4, 6]
        for before, after in ((first, second), (second, third)):
            assert all(a is b for a, b in zip(before, after, strict=False))

    run(scenario, tmp_path)


def test_one_answer_per_experience_where_that_is_wanted(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        ask = client(endpoint, session.id).chat.completions.create
        await ask(model="m", messages=[user("a")])
        await ask(model="m", messages=[user("a"), assistant("ok"), user("b")])
        session.feedback.turns = [0.25, 1.0]
        alone = session.experiences(merge=False)
        assert [(one.reward, one.turn) for one in alone] == [(0.25, 0), (1.0, 1)]
        assert [one.prompt_ids for one in alone] == [asked.prompt for asked in pool.asked]
        for one in alone:
            exact(one, pool)
        [whole] = session.experiences()
        assert whole.reward == 1.25 and len(whole.token_rewards) == whole.response_length
        ends = [at for at, reward in enumerate(whole.token_rewards) if reward]
        assert [
            (whole.token_rewards[at], whole.tokens[whole.prompt_length + at]) for at in ends
        ] == [
            (0.25, END),
            (1.0, END),
        ]

    run(scenario, tmp_path)


def test_tools_make_a_round(tmp_path: Path) -> None:
    """The model calls, the client answers, and the call stands
    in the sequence as it was sampled.
    """
    called = '<tool_call>{"name":  "weather", "arguments": {"town": "Bern"}}</tool_call>'

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        ask, said = client(endpoint, session.id).chat.completions.create, [user("rain?")]
        made = (await ask(model="m", messages=said, tools=[WEATHER])).choices[0]
        assert made.finish_reason == "tool_calls" and made.message.content == "so"
        [call] = made.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "weather",
            {"town": "Bern"},
        )
        said += [
            made.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "dry"},
        ]
        made = (await ask(model="m", messages=said, tools=[WEATHER])).choices[0]
        assert (made.message.content, made.finish_reason) == ("no", "stop")
        [one] = session.experiences()
        exact(one, pool)
        assert (
            f"<|assistant|>so{called}<|end|><|user|>t:dry<|end|><|assistant|>no"
            in TOKENIZER.decode(one.tokens.tolist())
        )
        assert TOKENIZER.decode(one.tokens.tolist()).startswith("<|system|>weather")

    run(scenario, tmp_path, lambda p, n: "no" if "dry" in p else "so" + called, template=TOOLS)


def test_a_stream_is_the_reply_in_parts(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        ask = client(endpoint, session.id).chat.completions.create
        stream = await ask(
            model="m", messages=[user("a")], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "long " * 20 and len(chunks) > 4
        assert (
            chunks[-2].choices[0].finish_reason == "stop"
            and chunks[-1].usage.completion_tokens == 101
        )
        await ask(model="m", messages=[user("a"), assistant(text), user("b")])
        assert len(session.lines) == 1
        # before the stream begins
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await ask(model="m", messages=[user("a" * 600)], stream=True)

    run(scenario, tmp_path, lambda p, n: "long " * 20)


def test_lengths_stops_and_probabilities_are_openais(tmp_path: Path) -> None:
    """Only max_model_len counts: what is not asked for in tokens may take all that the prompt
    leaves (row D10).
    """

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        api = client(endpoint, session.id)
        made = await api.chat.completions.create(
            model="m",
            messages=[user("a")],
            stop=["STOP", "X"],
            logprobs=True,
            temperature=0.7,
            top_p=0.9,
        )
        room = 64 - len(pool.asked[0].prompt)
        sampling = pool.asked[0].sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (room, 0.7, 0.9)
        assert pool.asked[0].stop == ["STOP", "X"] and made.choices[0].message.content == "a"
        rows = made.choices[0].logprobs.content
        assert [row.logprob for row in rows] == session.lines[0].logprobs and rows[1].token == "S"
        for name in ("max_tokens", "max_completion_tokens"):
            await api.chat.completions.create(model="m", messages=[user("a")], **{name: 7})
            assert pool.asked[-1].sampling.max_tokens == 7
        plain = await api.completions.create(model="m", prompt="other", max_tokens=5, logprobs=0)
        assert plain.choices[0].logprobs.token_logprobs == pool.answered[-1].logprobs.tolist()
        text = await api.completions.create(model="m", prompt="once", max_tokens=5)
        assert text.choices[0].text == "aSTOPb" and pool.asked[-1].prompt == TOKENIZER.encode(
            "once"
        )
        ids = [*pool.asked[-1].prompt, *pool.answered[-1].ids, 7, 8]
        await api.completions.create(model="m", prompt=ids)
        exact(session.experiences()[-1], pool)
        assert session.lines[-1].tokens[: len(ids)] == ids and len(session.lines[-1].calls) == 2
        with pytest.raises(
            openai.BadRequestError, match="64 tokens, and the prompt has"
        ) as refused:
            await api.chat.completions.create(model="m", messages=[user("a" * 61)])
        assert refused.value.code == "context_length_exceeded" and session.too_long is not None

    run(scenario, tmp_path, lambda p, n: "aSTOPb", context=64)


FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
KEEP = {"type": "function", "function": {"name": "keep"}}


@pytest.mark.parametrize(
    ("more", "form"),
    [
        ({}, {}),
        ({"tools": [FIND], "tool_choice": "auto"}, {}),
        ({"tools": [FIND], "tool_choice": "none"}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"json": {"a": 1}},
        ),
    ],
)
def test_the_form_of_an_answer_reaches_the_engine(
    tmp_path: Path, more: dict[str, Any], form: dict[str, Any]
) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        api = client(endpoint, endpoint.registry.open().id).chat.completions
        await api.create(model="m", messages=[user("a")], extra_body=more)
        assert pool.asked[-1].sampling.structured == form

    run(scenario, tmp_path, lambda p, n: "b")


def test_a_call_that_is_asked_for_is_one_of_the_tools(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        api = client(endpoint, endpoint.registry.open().id).chat.completions
        chosen: Any = {"type": "function", "function": {"name": "keep"}}
        for choice, names, once in (
            ("required", ["find", "keep"], False),
            (chosen, ["keep"], True),
        ):
            await api.create(
                model="m",
                messages=[user("a")],
                extra_body={"tools": [FIND, KEEP], "tool_choice": choice},
            )
            told = json.loads(pool.asked[-1].sampling.structured["structural_tag"])["format"]
            begins = [tag["begin"] for tag in told["tags"]]
            assert begins == [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names]
            assert (told["at_least_one"], told["stop_after_first"]) == (True, once)

    run(scenario, tmp_path, lambda p, n: "b")


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "schema: an object"),
        ({"tool_choice": "required"}, "required .with tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of tools"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "x"}}],
                "response_format": {"type": "json_object"},
            },
            "calls no tool",
        ),
        ({"n": 0}, "n=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"messages": []}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "only text is served, images",
        ),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "list of parts"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "list of parts"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls is a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "x"}]}]}, "function is"),
        ({"extra_body": {"stream_options": True}}, "stream_options is an object"),
        ({"extra_body": {"chat_template_kwargs": [1]}}, "chat_template_kwargs is an object"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "has tokenize: give var"),
        ({"extra_body": {"chat_template_kwargs": {"documents": 5}}}, "template does not take"),
        ({"extra_body": {"tool_choice": {"function": "x"}}}, "function is an object"),
        ({"tools": [{"type": "function", "name": "x"}]}, "each of tools is"),
        ({"functions": [{"name": "x"}]}, "old name of tools"),
        ({"temperature": 2.5}, "between 0 and 2"),
        ({"stop": [3]}, "stop"),
        ({"max_tokens": "many"}, "max_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, more: dict[str, Any], names: str
) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        with pytest.raises(openai.BadRequestError, match=names):
            await client(endpoint, endpoint.registry.open().id).chat.completions.create(
                **{"model": "m", "messages": [user("a")], "extra_body": {}, **more}
            )
        assert not pool.asked and endpoint.registry.counts["refused"] == 1

    run(scenario, tmp_path)


def test_calls_are_those_of_the_pattern_however_many_have_no_end() -> None:
    """They are looked for where all sessions are answered."""
    pattern = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
    parts = ("<tool_call>", "</tool_call>", '{"name": "f"}', "{", "}", " ", "a", "\n")
    dice = random.Random(7)
    for _ in range(3000):
        said = "".join(dice.choices(parts, k=10))
        calls, rest = chat_format._calls_in(said)
        assert (calls, rest) == (pattern.findall(said), pattern.sub("", said))
    many = "<tool_call>{}" * 50_000
    assert chat_format.answer_message(many, True, "id")["content"] == many


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, 1.5])
def test_a_count_is_a_number_that_counts(value: float) -> None:
    with pytest.raises(chat_format.ApiError, match="max_tokens"):
        chat_format.read({"prompt": "x", "max_tokens": value}, Sampling())


@pytest.mark.parametrize("prompt", ["x", [4, 5]])
def test_a_list_of_one_prompt_is_that_prompt(prompt: Any) -> None:
    """LangChain and lm-eval send it so; of more than one there would be several answers."""
    assert chat_format.read({"prompt": [prompt]}, Sampling()).prompt == prompt
    with pytest.raises(chat_format.ApiError, match="several requests"):
        chat_format.read({"prompt": [prompt, prompt]}, Sampling())


def test_what_engines_do_not_sample_at_is_greedy(tmp_path: Path) -> None:
    """vLLM samples at 0.01 where less is asked for: log-probabilities of another distribution than
    the recorded temperature says.
    """

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        api = client(endpoint, session.id)
        for asked, sampled in ((1e-6, 0.0), (0.009, 0.0), (0.01, 0.01), (2, 2.0)):
            await api.chat.completions.create(model="m", messages=[user("a")], temperature=asked)
            assert pool.asked[-1].sampling.temperature == sampled
            made = session.experiences()[-1]
            assert all(made.action_mask) == bool(sampled)
            assert made.temperature == (sampled or 1.0)

    run(scenario, tmp_path)


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    """As models write it in JSON, and agents send it back; no tokenizer takes it."""

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        key, url = endpoint.registry.key(endpoint.registry.open().id), endpoint.url
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(headers=headers) as http:
            body = '{"messages": [{"role": "user", "content": "a\\ud83d b"}], "model": "\\uDE00"}'
            made = await http.post(f"{url}/v1/chat/completions", content=body)
            assert (made.status_code, made.json()["model"]) == (200, "\ufffd")
            body = '{"prompt": "a\\ud83d\\ude00\\ud83d"}'
            assert (await http.post(f"{url}/v1/completions", content=body)).status_code == 200
        assert [TOKENIZER.decode(one.prompt).count("<|pad|>") for one in pool.asked] == [1, 2]

    run(scenario, tmp_path)


# Mistral's own rules: ids of calls have nine letters, and who speaks alternates, but for tools.
MISTRAL = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('must alternate') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% for id in [m.tool_call_id or '123456789'] + (m.tool_calls or []) | map(attribute='id') "
    "| list %}{% if id | length != 9 or not id.isalnum() %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}{% endfor %}"
    "{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}<|end|>{% endfor %}"
)


def test_mistrals_templates_take_calls_and_their_results(tmp_path: Path) -> None:
    """Also behind an answer that the client replaced: the template does not take the mark that
    stands for the call before it, and the conversation is rendered anew.
    """

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        api, said = client(endpoint, session.id), [user("a")]
        for _ in range(2):
            made = await api.chat.completions.create(model="m", messages=said, tools=[WEATHER])
            (call,) = made.choices[0].message.tool_calls
            said += [
                made.choices[0].message,
                {"role": "tool", "tool_call_id": call.id, "content": "5"},
            ]
        assert len(session.lines) == 1
        exact(session.experiences()[0], pool)
        said += [assistant("five"), user("sure?")]
        await api.chat.completions.create(model="m", messages=said, tools=[WEATHER])
        assert len(session.lines) == 2 and endpoint.registry.counts["branches"] == 1

    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    run(scenario, tmp_path, lambda p, n: call, template=MISTRAL, context=2048)


def test_tools_that_a_template_does_not_show_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        api = client(endpoint, endpoint.registry.open().id)
        for _ in range(2):
            await api.chat.completions.create(model="m", messages=[user("a")], tools=[WEATHER])

    run(scenario, tmp_path)
    assert caplog.text.count("asked with tools, and its chat template shows none") == 1
    caplog.clear()
    run(scenario, tmp_path, template=TOOLS)
    assert "tools" not in caplog.text


def test_what_an_engine_refuses_is_the_clients_mistake(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        api = client(endpoint, endpoint.registry.open().id)

        async def refuses(request: Any) -> Any:
            raise RequestRefused("engine_0, generate: Grammar error: Invalid type: nonsense")

        pool.generate = refuses  # type: ignore[method-assign]
        ask = {"model": "m", "messages": [user("a")]}
        with pytest.raises(openai.BadRequestError, match="Invalid type: nonsense"):
            await api.chat.completions.create(**ask)
        with pytest.raises(openai.APIError, match="Invalid type: nonsense") as told:
            async for _ in await api.chat.completions.create(stream=True, **ask):
                pass
        assert told.value.type == "invalid_request_error"
        assert endpoint.registry.counts["refused"] == 2
        for ids in ([3, -1], [3, 91]):
            with pytest.raises(openai.BadRequestError, match="prompt is a|no token 91"):
                await api.completions.create(model="m", prompt=ids)

    run(scenario, tmp_path)


def test_what_could_not_be_stored_with_a_reward_is_refused(tmp_path: Path) -> None:
    """Else its group would be tried again for ever."""

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        api = client(endpoint, key=f"{TOKEN}:one")
        await api.chat.completions.create(model="m", messages=[user("a")])
        headers = {"Authorization": f"Bearer {TOKEN}:one", "Content-Type": "application/json"}
        async with httpx.AsyncClient(headers=headers) as http:
            told = [
                (await http.post(f"{endpoint.url}/feedback", content=body)).status_code
                for body in (
                    '{"reward": 1, "info": {"n": 100000000000000000000000}}',
                    '{"reward": 1, "info": {"half": "\\ud83d"}}',
                )
            ]
        assert told == [400, 200] and endpoint.registry.counts["groups"] == 1
        encode(next(iter(kept.groups.values())))

    kept = Kept()
    run(scenario, tmp_path, kept=kept)


def test_a_model_is_described_by_any_name(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        for name in ("policy", "org/gpt-4o"):
            assert (await client(endpoint).models.retrieve(name)).id == name

    run(scenario, tmp_path)


def test_a_key_opens_its_own_session_and_none_opens_nothing(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        one, other = endpoint.registry.open(), endpoint.registry.open()
        key = endpoint.registry.key(one.id)
        ask = {"model": "m", "messages": [user("a")]}
        for wrong in ("", "x", key[:-1], f"{other.id}:{key.partition(':')[2]}", f"x:{other.id}"):
            with pytest.raises(openai.AuthenticationError):
                await client(endpoint, key=wrong or "none").chat.completions.create(**ask)
        for kind in ({"session": other.id}, {"default_headers": {"X-Session-Id": other.id}}):
            with pytest.raises(openai.PermissionDeniedError):
                await client(endpoint, **{"key": key, **kind}).chat.completions.create(**ask)
        await client(endpoint, key=key).chat.completions.create(**ask)  # the key alone says which
        await client(endpoint, key=f"{TOKEN}:{other.id}").chat.completions.create(**ask)
        await client(endpoint, default_headers={"X-Session-Id": other.id}).chat.completions.create(
            **ask
        )
        assert (len(one.calls), len(other.calls)) == (1, 2)
        # only workflows open them here
        with pytest.raises(openai.NotFoundError, match="no session"):
            await client(endpoint, "another").chat.completions.create(**ask)
        endpoint.registry.close(one.id)
        with pytest.raises(openai.NotFoundError):
            await client(endpoint, key=key).chat.completions.create(**ask)
        async with httpx.AsyncClient(base_url=endpoint.url) as http:
            assert (await http.get("/health")).json() == {"status": "ok", "cause": ""}
            assert [(await http.get(path)).status_code for path in ("/metrics", "/v1/models")] == [
                401,
                401,
            ]
            assert (
                await http.post("/feedback", json={"session": other.id, "reward": 1})
            ).status_code == 401
            told = (await http.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})).text
        assert "rft_endpoint_answers 3" in told and TOKEN not in told
        file = tmp_path / "endpoint.json"
        assert (
            stat.S_IMODE(file.stat().st_mode) == 0o600
            and json.loads(file.read_text())["api_key"] == TOKEN
        )

    run(scenario, tmp_path)
    assert not (tmp_path / "endpoint.json").exists()


def test_many_sessions_at_a_time_do_not_meet(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        async def talk(number: int) -> None:
            session = endpoint.registry.open()
            api, said = client(endpoint, session.id), []
            for turn in range(3):
                said.append(user(f"{number}.{turn}"))
                made = await api.chat.completions.create(model="m", messages=said)
                said.append(assistant(made.choices[0].message.content))
            [one] = session.experiences()
            exact(one, pool)
            assert TOKENIZER.decode(one.tokens.tolist()).count(f">{number}.") == 3 and one.info == {
                "session": session.id
            }

        await asyncio.gather(*(talk(number) for number in range(10, 26)))

    run(scenario, tmp_path, lambda p, n: f"to {len(p)}")


def test_what_a_client_gave_up_is_not_recorded(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        pool.gate.clear()
        asking = asyncio.create_task(
            client(endpoint, session.id).chat.completions.create(model="m", messages=[user("a")])
        )
        while not pool.asked:
            await asyncio.sleep(0)
        asking.cancel()
        while not pool.given_up:
            await asyncio.sleep(0.001)
        assert not session.lines and endpoint.registry.open_[session.id].under_way == 0

    run(scenario, tmp_path)


def test_serving_keeps_what_got_its_reward(tmp_path: Path) -> None:
    kept = Kept()

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        async with httpx.AsyncClient(
            base_url=endpoint.url, headers={"Authorization": f"Bearer {TOKEN}"}
        ) as http:
            for name in ("a", "b", "c", "greedy"):
                more = {"temperature": 0} if name == "greedy" else {}
                await client(endpoint, name).chat.completions.create(
                    model="m", messages=[user(name)], **more
                )
            post = http.post
            alone = (
                await post(
                    "/feedback", json={"session": "a", "reward": 0.5, "metrics": {"stars": 4}}
                )
            ).json()
            assert alone == {"session": "a", "experiences": 1, "stored": True}
            assert (await post("/s/b/v1/feedback", json={"reward": 1, "task": "sums"})).json()[
                "stored"
            ] is False
            # given once
            assert (await post("/feedback", json={"session": "b", "reward": 0})).status_code == 404
            assert (
                await post("/feedback", json={"session": "c", "turn_rewards": [1, 2]})
            ).status_code == 400
            assert (
                await post("/feedback", content='{"session": "c", "reward": 1e999}')
            ).status_code == 400
            assert (await post("/feedback", json={"session": "c"})).status_code == 400
            assert (
                await post("/feedback", json={"session": "greedy", "reward": 1})
            ).status_code == 409
            whole = (
                await post(
                    "/feedback", json={"session": "c", "turn_rewards": [0.25], "task": "sums"}
                )
            ).json()
            assert whole["stored"] is True and sorted(kept.groups) == ["a", "sums"]
            unnamed = await client(endpoint).chat.completions.with_raw_response.create(
                model="m", messages=[user("x")]
            )
            name = unnamed.headers["X-Session-Id"]
            assert (
                await post("/feedback", json={"session": name, "reward": 1, "task": "half"})
            ).json()["stored"] is False
            assert (await post("/commit", json={"tasks": ["half"]})).json() == {"groups": 1}
            assert (await post("/commit")).json() == {"groups": 0}

    run(scenario, tmp_path, kept=kept, group_size=2)
    assert [(one.sample, one.reward) for one in kept.groups["sums"]] == [(0, 1.0), (1, 0.25)]
    assert kept.groups["a"][0].metrics["stars"] == 4 and len(kept.groups["half"]) == 1


def test_serving_counts_what_got_no_reward(tmp_path: Path) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        await client(endpoint, "lost").chat.completions.create(model="m", messages=[user("x")])
        while "lost" in endpoint.registry.open_:
            await asyncio.sleep(0.01)
        assert endpoint.registry.counts["expired"] == 1

    run(scenario, tmp_path, kept=Kept(), timeout=0.1)


def test_a_store_that_fails_loses_nothing_and_ends_nothing(tmp_path: Path) -> None:
    """Of a session alone, of a group, and of one that was late; and a client may store a group
    while the late ones are stored.
    """
    kept, refused = Kept(), set[str]()
    store, restarting = kept.store, asyncio.Event()
    restarting.set()

    async def failing(group: ServedGroup) -> None:
        if restarting.is_set():
            refused.add(group.task)
            raise RuntimeError("the buffer is restarting")
        await store(group)

    kept.store = failing  # type: ignore[method-assign]

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        async with httpx.AsyncClient(
            base_url=endpoint.url, headers={"Authorization": f"Bearer {TOKEN}"}
        ) as http:
            for name, task in (("a", None), ("b", "sums"), ("c", "sums"), ("d", "half")):
                await client(endpoint, name).chat.completions.create(
                    model="m", messages=[user(name)]
                )
                told = await http.post(
                    "/feedback",
                    json={"session": name, "reward": 1} | ({} if task is None else {"task": task}),
                )
                assert told.json() == {"session": name, "experiences": 1, "stored": False}
        while refused != {"a", "sums", "half"}:
            await asyncio.sleep(0.01)
        restarting.clear()
        while len(kept.groups) < 3:
            await asyncio.sleep(0.01)
        assert endpoint.registry.counts["store_failures"] >= 3

    with pytest.MonkeyPatch.context() as scaled:
        scaled.setattr(registry, "AGAIN_S", 0.05)
        run(scenario, tmp_path, kept=kept, group_size=2, timeout=0.5)
    assert {name: len(group) for name, group in kept.groups.items()} == {
        "a": 1,
        "sums": 2,
        "half": 1,
    }


@pytest.mark.parametrize("key", ["own", "run", "run with its name"])
def test_an_agents_key_posts_no_reward_unless_its_workflow_says_so(
    key: str, tmp_path: Path
) -> None:
    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        for may in (False, True):
            opened = endpoint.open_session(Sampling(), may_reward=may)
            keys = {
                "own": opened.access.api_key,
                "run": TOKEN,
                "run with its name": f"{TOKEN}:{opened.session.id}",
            }
            async with httpx.AsyncClient(
                base_url=endpoint.url, headers={"Authorization": f"Bearer {keys[key]}"}
            ) as http:
                said = {"session": opened.session.id}
                taken = await http.post("/feedback", json=said | {"reward": 1})
                for wrong in (1e9, -1e7, 10**400):
                    name = {"turn_rewards": [wrong]} if wrong < 0 else {"reward": wrong}
                    answer = await http.post("/feedback", json=said | name)
                    assert answer.status_code in (400, 403)
            refused = key == "own" and not may
            assert taken.status_code == (403 if refused else 200)
            assert opened.session.feedback.reward == (None if refused else 1.0)

    run(scenario, tmp_path)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What came until the connection was cut."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_who_connects_and_says_nothing_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of its time, or when others come; and a byte now and then is nothing."""
    monkeypatch.setattr(connections, "HEADER_S", 0.3)
    monkeypatch.setattr(connections, "IDLE_S", 0.2)
    monkeypatch.setattr(connections, "STRANGERS", 3)
    health = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        place = endpoint.url.removeprefix("http://").split(":")
        idle, idles = await asyncio.open_connection(*place)
        idles.write(health)
        assert b"200 OK" in await ended(idle), "and then it was cut"
        slow, slows = await asyncio.open_connection(*place)
        held = asyncio.create_task(ended(slow))
        while not held.done():
            slows.write(b"G")
            await asyncio.sleep(0.02)
        many = [await asyncio.open_connection(*place) for _ in range(8)]
        assert endpoint._gate is not None and len(endpoint._gate.strangers) <= 3
        await client(endpoint, endpoint.registry.open().id).chat.completions.create(
            model="m", messages=[user("a")]
        )
        assert [await ended(reader) for reader, _ in many] == [b""] * 8
        for _, writer in [*many, (idle, idles), (slow, slows)]:
            writer.close()

    run(scenario, tmp_path)


def test_its_end_is_soon_whoever_waits_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "END_S", 0.1)

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        pool.gate.clear()
        ask = client(endpoint, endpoint.registry.open().id).chat.completions.create
        asking = asyncio.create_task(ask(model="m", messages=[user("a")]))
        while not pool.asked:
            await asyncio.sleep(0)
        closing = asyncio.create_task(endpoint.close())
        await asyncio.sleep(0)
        assert not endpoint.file.exists() and not closing.done()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*endpoint.url.removeprefix("http://").split(":"))
        async with asyncio.timeout(20.0):
            await closing
            with pytest.raises(openai.APIConnectionError):
                await asking
        assert pool.given_up and not endpoint.registry.counts["answers"]

    run(scenario, tmp_path)


def test_an_auxiliary_model_answers_under_its_name_and_is_not_recorded(tmp_path: Path) -> None:
    judge = Pool(lambda p, n: "fine")

    async def scenario(endpoint: OpenAIEndpoint, pool: Pool) -> None:
        session = endpoint.registry.open()
        ask = {"messages": [user("a")]}
        api = client(endpoint, session.id)
        assert (await api.chat.completions.create(model="judge", **ask)).choices[
            0
        ].message.content == "fine"
        by_path = client(endpoint).with_options(base_url=endpoint.base_url(session.id, "judge"))
        assert (await by_path.chat.completions.create(model="gpt-4o", **ask)).choices[
            0
        ].message.content == "fine"
        assert not session.lines and not pool.asked and len(judge.asked) == 2
        assert [one.id async for one in api.models.list()] == ["policy", "judge"]
        alone = client(endpoint)  # the run's own key and no session: as a reward function asks
        assert (await alone.chat.completions.create(model="judge", **ask)).choices[
            0
        ].message.content == "fine"
        with pytest.raises(openai.NotFoundError, match="this key names no session"):
            await alone.chat.completions.create(model="policy", **ask)
        assert list(endpoint.registry.open_) == [session.id], "nothing is left to expire"

    run(scenario, tmp_path, others=(policy(judge, name="judge"),))


# --- OpenAI's own types ---------------------------------------------------------------------------

ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"tools": [{"type": "function", "function": {"name": "f"}}]}
USAGE = {"stream_options": {"include_usage": True}}
CALLS = (
    'so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    '<tool_call>{"name": "g"}</tool_call>'
)
SAID: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = [
    ({**ASKED, **USAGE}, [("It is four, I am rather sure of it.", "stop"), ("é", "length")]),
    ({**ASKED, **TOOL}, [(CALLS, "stop"), ('{"name": "f"}', "stop")]),
    ({"messages": ASKED["messages"], "logprobs": True}, [("aé", "stop")]),
    (
        {"model": "m", "prompt": "x", "logprobs": 1, **USAGE},
        [("A text of more than one piece.", "length")],
    ),
    (ASKED, [("", "stop")]),
    ({"prompt": "x", **TOOL}, [('{"name": "f"}', "stop")]),
]


def test_answers_are_on_the_wire_byte_for_byte_what_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Recorded before they were OpenAI's own objects."""
    monkeypatch.setattr("time.time", lambda: 1700000000.5)
    sent = []
    for body, said in SAID:
        asked, choices = chat_format.read(body, Sampling()), []
        for number, (text, stop) in enumerate(said):
            tokens = list(range(len(text)))
            spans = [VersionSpan(version=number + 2, start=0, end=len(tokens))]
            logprobs = [-one / 4 for one in tokens]
            made = Completion(tokens=tokens, logprobs=logprobs, versions=spans, stop=stop)
            message = chat_format.answer_message(text, bool(asked.tools), f"call-{number}")
            shown = list(text) if asked.logprobs else []
            choices.append(replies.SampledChoice(made, message, text, shown))
        sent.append(replies.reply("id-1", asked, choices, 7))
        sent += replies.chunks("id-1", asked, choices, 7)
    recorded = Path(__file__).parents[1] / "recorded" / "endpoint_wire.jsonl"
    assert [json.dumps(replies.wire(one)) for one in sent] == recorded.read_text().splitlines()


class Noting(dict[str, Any]):
    """A request that notes which of its fields are looked at."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)


# what vLLM's server takes and OpenAI's does not; of the other path's fields each is refused, too
VLLM = {"chat_template_kwargs", "guided_choice", "guided_json", "guided_regex", "min_p"}
VLLM |= {"min_tokens", "repetition_penalty", "structured_outputs", "top_k"}
CHAT_ONLY = {"max_completion_tokens", "messages", "response_format", "tool_choice", "tools"}
CHAT_ONLY |= {"functions"}
TEXT_ONLY = {"best_of", "echo", "suffix"}
# of OpenAI's, passed over: their service's own, other media, and an old name of tool_choice
PASSED_OVER = {"audio", "function_call", "metadata", "modalities", "moderation"}
PASSED_OVER |= {"parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_options"}
PASSED_OVER |= {"prompt_cache_retention", "reasoning_effort", "safety_identifier", "service_tier"}
PASSED_OVER |= {"store", "top_logprobs", "user", "verbosity", "web_search_options"}


@pytest.mark.parametrize(
    ("body", "theirs", "foreign", "passed_over"),
    [
        (ASKED, chat_params, VLLM | TEXT_ONLY, PASSED_OVER),
        ({"prompt": "x"}, text_params, VLLM | CHAT_ONLY, {"user"}),
    ],
    ids=["chat", "text"],
)
def test_a_request_has_openais_fields(
    body: dict[str, Any], theirs: Any, foreign: set[str], passed_over: set[str]
) -> None:
    """Each is read, refused or known to be passed over: a new one of theirs has to be decided."""
    noting = Noting(body)
    chat_format.read(noting, Sampling())
    known = {
        *theirs.CompletionCreateParamsBase.__annotations__,
        *theirs.CompletionCreateParamsStreaming.__annotations__,
    }
    assert (noting.read - known, known - noting.read) == (foreign, passed_over)
