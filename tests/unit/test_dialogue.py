"""Which tokens of a dialogue are learned, by six chat templates: the whole text, with what is
learned in curly brackets.
"""

from typing import Any

import pytest
from chat_templates import CHATML, MISTRAL, QWEN, STYLES, shown, tokenizer_of

from rft.config import ConfigError
from rft.data.chat import (
    Dialogues,
    clean_messages,
    render_follow_up,
    render_messages,
    spans_of,
)

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]
EVERY = {
    "qwen": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{b<|im_end|>}\n"
    "<|im_start|>user\nc<|im_end|>\n"
    "<|im_start|>assistant\n{<think></think>d<|im_end|>}",
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{b<|eot_id|>}<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{d<|eot_id|>}",
    "chatml": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{b<|im_end|>}\n"
    "<|im_start|>user\nc<|im_end|>\n"
    "<|im_start|>assistant\n{d<|im_end|>}\n",
    "mistral": "<s>[INST] a[/INST]{ b</s>}[INST] c[/INST]{ d</s>}",
    "deepseek": "<bos><User>a<Assistant>{b<eos>}<User>c<Assistant>{d<eos>}",
    # a rollout never ends with <|end|>, which stands behind earlier answers
    "harmony": "<|start|>user<|message|>a<|end|><|start|>assistant{<|message|>b}<|end|>"
    "<|start|>user<|message|>c<|end|><|start|>assistant{<|message|>d<|return|>}",
}


def both(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> tuple[str, str]:
    tokenizer = tokenizer_of(STYLES[name])
    dialogues = Dialogues(tokenizer)
    return (
        shown(tokenizer, *dialogues.every_answer(messages, tools)),
        shown(tokenizer, *dialogues.last_answer(messages, tools)),
    )


@pytest.mark.parametrize("name", STYLES)
def test_every_answer_or_the_last_one_is_learned_to_the_end_of_its_turn(name: str) -> None:
    every, last = both(name, TALK)
    assert every == EVERY[name]
    head, _, tail = EVERY[name].rpartition("{")
    assert last == head.replace("{", "").replace("}", "") + "{" + tail.rstrip("\n")


@pytest.mark.parametrize("name", STYLES)
def test_the_ids_are_those_of_the_whole_text(name: str) -> None:
    tokenizer = tokenizer_of(STYLES[name])
    whole = tokenizer.apply_chat_template(TALK, return_dict=False)
    ids, spans = Dialogues(tokenizer).every_answer(TALK)
    assert ids == whole[: len(ids)] and tokenizer.decode(whole[len(ids) :]).strip() == ""
    ids, ((start, stop),) = Dialogues(tokenizer).last_answer(TALK)
    assert ids == whole[:stop] and stop == len(ids)
    assert ids[:start] == render_messages(tokenizer, TALK[:-1]), "the prompt is that of a rollout"


def test_the_tokenizers_own_mask_and_prefixes_agree() -> None:
    """One template with and without its marks."""
    tokenizer = tokenizer_of(CHATML)
    ids, spans = Dialogues(tokenizer).every_answer(TALK)
    plain = CHATML.template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    dialogues = Dialogues(tokenizer, plain)
    assert not dialogues.marks_answers and dialogues.every_answer(TALK)[1] == spans
    beside = CHATML.template.replace(
        "{{ m.content }}<|im_end|>{% endgen", "{{ m.content[0] }}{% endgen", 1
    )
    marked = Dialogues(tokenizer, beside).every_answer(TALK)
    assert shown(tokenizer, *marked).count("<|im_end|>") == 2, "the template's own marks decide"


def test_thoughts_stay_where_the_template_writes_them() -> None:
    talk = [dict(message) for message in TALK]
    talk[1]["content"], talk[3]["content"] = "<think>e</think>b", "<think>f</think>d"
    assert both("qwen", talk)[0] == EVERY["qwen"].replace("<think></think>", "<think>f</think>")
    assert both("deepseek", talk)[0] == EVERY["deepseek"]


def test_tools_and_their_answers_are_not_learned() -> None:
    talk = [TALK[0], TALK[1], {"role": "tool", "content": "t"}, TALK[3]]
    every, last = both("qwen", talk, [{"name": "add", "takes": "x"}])
    assert every.startswith(
        "<|im_start|>system\nadd(x) <|im_end|>\n<|im_start|>user\na<|im_end|>\n"
    )
    assert every.count("{") == 2 and "tool\nt<|im_end|>" in every.split("}")[1]
    assert last.count("{") == 1


def test_a_call_that_ends_with_a_token_of_its_own_has_no_other_end() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    assert both("harmony", [TALK[0], call])[1].endswith(
        "<|start|>assistant{ to=add<|message|>{}<|call|>}"
    )


def test_calls_are_text_where_a_template_joins_texts() -> None:
    """As DeepSeek's do, to which an empty content beside a call is an answer of its own."""
    template = (
        "{% for m in messages %}{% if m.tool_calls %}<Assistant>{{ '<call>' + "
        "m.tool_calls[0].function.arguments }}<eos>{% endif %}{% if m.content is not none %}"
        "{{ '<Assistant>' if m.role == 'assistant' else '<User>' }}{{ m.content }}<eos>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<Assistant>{% endif %}"
    )
    called = {"function": {"name": "f", "arguments": '{"a": "x"}'}}
    (call,) = clean_messages([{"role": "assistant", "content": None, "tool_calls": [called]}])
    dialogues = Dialogues(tokenizer_of(STYLES["deepseek"]), template)
    found = shown(dialogues.tokenizer, *dialogues.every_answer([TALK[0], call, *TALK[2:]]))
    assert found == (
        '<User>a<eos><Assistant>{<call>{"a": "x"}<eos>}<User>c<eos><Assistant>{d<eos>}'
    )


def test_an_answer_that_is_written_otherwise_before_others_is_refused() -> None:
    """Its words have the end of a turn, so only the text of the dialogue up to it tells its end."""
    talk = [dict(message) for message in TALK]
    talk[1]["content"] = "b<|im_end|>"
    with pytest.raises(ConfigError, match="writes message 2, an answer, otherwise where others"):
        both("qwen", talk)


@pytest.mark.parametrize("role", ["human", "tool"])
def test_a_message_that_the_template_leaves_out_is_refused(role: str) -> None:
    known = "{% for m in messages if m.role in ('system', 'user', 'assistant') %}"
    template = CHATML.template.replace("{% for m in messages %}", known)
    tokenizer = tokenizer_of(CHATML)
    talk = [*TALK[:2], {"role": role, "content": "the longest word"}]
    with pytest.raises(ConfigError, match=f"leaves out what '{role}' says: write"):
        render_messages(tokenizer, talk, template)
    with pytest.raises(ConfigError, match=f"leaves out what '{role}' says: write"):
        render_follow_up(tokenizer, [{"role": role, "content": "42"}], template)
    assert render_messages(tokenizer, talk)


@pytest.mark.parametrize("name", STYLES)
def test_an_answer_of_weight_0_is_read_and_not_learned(name: str) -> None:
    talk = [dict(message, weight=1) for message in TALK]
    assert both(name, talk)[0] == EVERY[name]
    talk[1]["weight"] = 0
    assert both(name, talk)[0].rstrip() == both(name, TALK)[1].rstrip()
    talk[3]["weight"] = 0.0
    with pytest.raises(ConfigError, match="every answer has weight 0"):
        both(name, talk)


@pytest.mark.parametrize("said", ["thinking", "reasoning_content", "function_call"])
def test_what_a_template_does_not_write_of_an_answer_is_refused(said: str) -> None:
    talk = [*TALK[:3], TALK[3] | {said: "hm"}]
    with pytest.raises(ConfigError, match=f"has {said}, .* knows content alone.: rename it"):
        both("chatml", talk)
    # a variable of the template that has the word inside is none of a message
    inside = CHATML.template + "{% if enable_thinking %}{{ m.reasoning_content }}{% endif %}"
    dialogues = Dialogues(tokenizer_of(CHATML), inside)
    if said == "reasoning_content":
        assert dialogues.last_answer(talk)
    else:
        with pytest.raises(ConfigError, match=f"has {said}, .* knows reasoning_content"):
            dialogues.last_answer(talk)


def test_a_developer_is_the_system() -> None:
    said = [{"role": "developer", "content": "be brief"}, *TALK]
    assert clean_messages(said)[0] == {"role": "system", "content": "be brief"}


def test_a_template_that_rewrites_its_prompt_is_refused() -> None:
    """A system prompt that moves to the newest question: no prefix of the dialogue is the prompt
    that was answered.
    """
    moving = (
        "{% for m in messages %}{% if loop.last or m.role == 'assistant' %}!{% endif %}{{ "
        "m.content }}</s>{% endfor %}"
    )
    dialogues = Dialogues(tokenizer_of(MISTRAL), moving)
    with pytest.raises(
        ConfigError, match="message 2, an answer, .*chat_template, or set .*multi_turn=false"
    ):
        dialogues.every_answer(TALK)
    ids, spans = dialogues.last_answer(TALK)
    assert shown(dialogues.tokenizer, ids, spans) == "a</s>!b</s>!c</s>{d</s>}", (
        "a rollout's prompt, and the answer"
    )


def test_without_an_end_of_turn_in_the_template_the_last_answer_ends_with_eos() -> None:
    tokenizer = tokenizer_of(QWEN)
    bare = (
        "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{% if "
        "add_generation_prompt %}a: {% endif %}"
    )
    every, spans = Dialogues(tokenizer, bare).every_answer(TALK)
    assert shown(tokenizer, every, spans) == "u: a\na: {b}\nu: c\na: {d<|im_end|>}"


def test_runs_of_a_mask() -> None:
    assert spans_of([0, 1, 1, 0, 0, 1]) == [(1, 3), (5, 6)]
    assert spans_of([1, 1, 0]) == [(1, 2)], "nothing predicts the first token"
    assert spans_of([1]) == spans_of([]) == []
