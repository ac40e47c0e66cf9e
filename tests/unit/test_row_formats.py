"""Rows of every schema as token sequences, and rows that cannot be read: each is refused with file,
line, key and fix.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import QWEN, shown, tokenizer_of

from rft.config import ConfigError, ExperienceBufferConfig, RowFormatConfig
from rft.data.supervised import Reader, SupervisedRows, check_supervised
from rft.tools.toy import character_tokenizer

KEY = "buffer.trainer_input.experience_buffer.path"
ASKED, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOLS = [{"name": "add", "takes": "x"}, {"name": "halve", "takes": "y", "slow": True}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return character_tokenizer()


def buffer(path: Path, **form: Any) -> ExperienceBufferConfig:
    return ExperienceBufferConfig(
        name="rows", storage_type="file", path=str(path), format=RowFormatConfig(**form)
    )


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(tokenizer: Any, raw: dict[str, Any], schema: str = "sft", **form: Any) -> list[str]:
    made = Reader(tokenizer, RowFormatConfig(**form), schema)(raw)
    return [shown(tokenizer, list(one.tokens), one.learned) for one in made]


def test_the_systems_words_come_from_the_row_or_from_the_config(tokenizer: Any) -> None:
    raw = {"prompt": "a", "response": "b", "sys": "r"}
    form = {"prompt_type": "plaintext", "system_prompt": "c"}
    (found,) = read(tokenizer, raw, **form)
    assert found == "<|system|>c<|end|><|user|>a<|end|><|assistant|>{b<|end|>}"
    (found,) = read(tokenizer, raw, **form, system_prompt_key="sys")
    assert found.startswith("<|system|>r<|end|>"), "the column wins (F39)"


def test_text_and_messages_of_one_dialogue_are_the_same_tokens() -> None:
    tokenizer = tokenizer_of(QWEN)
    text = read(tokenizer, {"prompt": "a", "response": "b"}, prompt_type="plaintext")
    assert (
        text
        == read(tokenizer, {"messages": [ASKED, SAID]})
        == read(tokenizer, {"messages": json.dumps([ASKED, SAID])})
    )
    assert text == [
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{<think></think>b<|im_end|>}"
    ]


def test_without_a_chat_template_text_is_text(tokenizer: Any) -> None:
    bare = character_tokenizer()
    bare.chat_template = None
    assert read(bare, {"prompt": "a", "response": "b"}, prompt_type="plaintext") == ["a{b<|end|>}"]
    assert read(
        tokenizer,
        {"messages": [ASKED, SAID]},
        chat_template="{{ messages | map(attribute='content') | join('-') }}-",
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("written", [lambda tools: tools, json.dumps], ids=["list", "text"])
def test_tools_of_a_row_reach_the_chat_template(
    tmp_path: Path, name: str, written: Callable[..., Any]
) -> None:
    path = saved(tmp_path / name, [{"messages": [ASKED, SAID], "tools": written(TOOLS)}])
    config = buffer(
        path,
        tools_key="tools",
        chat_template="{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    assert check_supervised(config, KEY) == 1
    tokenizer = character_tokenizer()
    (one,) = SupervisedRows(config, tokenizer, 1, 0, 1000).take(0).experiences
    text = tokenizer.decode(one.tokens)
    assert json.loads(text[: text.index("]") + 1]) == TOOLS, "a tool has no field of another"


def test_every_answer_of_a_dialogue_is_learned_where_that_is_asked_for(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = saved(
        tmp_path / "a.jsonl", [{"messages": [ASKED, SAID, {"role": "user", "content": "cd"}, SAID]}]
    )
    config = buffer(path, enable_concatenated_multi_turn=True)
    assert check_supervised(config, KEY) == 1
    (one,) = SupervisedRows(config, tokenizer, 1, 0, 64).take(0).experiences
    assert (
        tokenizer.decode(one.tokens[: one.prompt_length].tolist())
        == "<|user|>a<|end|><|assistant|>"
    )
    assert one.action_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 1]


def test_cpt_learns_every_token_after_the_first(tmp_path: Path, tokenizer: Any) -> None:
    path = saved(tmp_path / "a.jsonl", [{"text": word} for word in ("abc", "d", "efghijkl", "mn")])
    config = buffer(path, prompt_type="plaintext", prompt_key="text")
    config.shuffle = False
    assert check_supervised(config, KEY, schema="cpt") == 4
    rows = SupervisedRows(config, tokenizer, 2, 0, 6, schema="cpt")
    assert [
        (tokenizer.decode(e.tokens.tolist()), e.prompt_length, list(e.action_mask))
        for e in rows.take(0).experiences
    ] == [
        ("abc", 1, [1, 1]),
        ("mn", 1, [1]),
    ]
    assert (rows.too_long, rows.too_short) == (1, 1)


def test_a_row_with_a_token_that_the_model_has_not_is_named(tmp_path: Path, tokenizer: Any) -> None:
    """At the start, and not when its step comes."""
    path = saved(tmp_path / "a.jsonl", [{"text": word} for word in ("abc", "def", "xyz")])
    config = buffer(path, prompt_type="plaintext", prompt_key="text")
    largest = max(tokenizer.encode("xyz"))
    SupervisedRows(config, tokenizer, 2, 0, 6, schema="cpt", vocab=largest + 1)
    with pytest.raises(
        ConfigError, match=f"row 3 of .*gives token {largest}.*vocab_size={largest}:"
    ):
        SupervisedRows(config, tokenizer, 2, 0, 6, schema="cpt", vocab=largest)


@pytest.mark.parametrize(
    "answers",
    [lambda text: [{"role": "assistant", "content": text}], None],
    ids=["messages", "text"],
)
def test_a_pair_is_two_neighbours_and_a_batch_counts_both(
    tmp_path: Path, tokenizer: Any, answers: Callable[[str], Any] | None
) -> None:
    made = answers or (lambda text: text)
    prompt = {"messages": [ASKED]} if answers else {"prompt": "a"}
    words = [("b", "c"), ("d", "e" * 90), ("f", "gh"), ("i", "j")]
    path = saved(
        tmp_path / "a.jsonl",
        [{**prompt, "good": made(good), "bad": made(bad)} for good, bad in words],
    )
    config = buffer(
        path,
        prompt_type="messages" if answers else "plaintext",
        chosen_key="good",
        rejected_key="bad",
    )
    config.shuffle = False
    assert check_supervised(config, KEY, 4, "dpo") == 4
    rows = SupervisedRows(config, tokenizer, 4, 0, 64, schema="dpo")
    assert rows.steps_per_epoch == 1 and rows.too_long == 1, "a pair is left out whole"
    found = [(e.task, tokenizer.decode(e.response_ids)) for e in rows.take(0).experiences]
    assert found == [
        ("rows/0/0/chosen", "b<|end|>"),
        ("rows/0/0/rejected", "c<|end|>"),
        ("rows/0/2/chosen", "f<|end|>"),
        ("rows/0/2/rejected", "gh<|end|>"),
    ]
    assert {tokenizer.decode(e.prompt_ids) for e in rows.take(0).experiences} == {
        "<|user|>a<|end|><|assistant|>"
    }


def test_an_answer_of_several_messages_is_learned_in_each_of_the_assistants(tokenizer: Any) -> None:
    raw = {"messages": [ASKED], "chosen": [SAID, ASKED, SAID], "rejected": json.dumps([SAID])}
    chosen, rejected = read(tokenizer, raw, "dpo")
    assert (
        chosen == "<|user|>a<|end|><|assistant|>{b<|end|>}<|user|>a<|end|><|assistant|>{b<|end|>}"
    )
    assert rejected == "<|user|>a<|end|><|assistant|>{b<|end|>}"


PAIR = {"messages": [ASKED], "chosen": [SAID], "rejected": [SAID]}
TEXT = {"prompt_type": "plaintext"}
BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [  # schema, row, format, what is said
    (
        "dpo",
        {**PAIR, "chosen": [ASKED]},
        {},
        r"format.chosen_key: .*a.jsonl line 2: 'chosen' ends with role 'user'",
    ),
    (
        "dpo",
        {**PAIR, "rejected": "b"},
        {},
        r"format.rejected_key: .* line 2: 'rejected' must be a list of messages",
    ),
    (
        "dpo",
        {"messages": [ASKED], "chosen": [SAID]},
        {},
        r"format.rejected_key: .* line 2 has no 'rejected'",
    ),
    (
        "dpo",
        {"prompt": "a", "chosen": "b", "rejected": ["c"]},
        TEXT,
        r"format.rejected_key: .*'rejected', which must be text",
    ),
    (
        "dpo",
        {"prompt": "a", "chosen": "b", "rejcted": "c"},
        TEXT,
        r"did you mean 'rejcted'\? Set .*format.rejected_key",
    ),
    ("cpt", {"text": "a"}, TEXT, r"format.prompt_key: .* line 2 has no 'prompt'"),
    ("cpt", {"prompt": ["a"]}, TEXT, r"format.prompt_key: .* which must be text"),
    (
        "sft",
        {"prompt": "a", "response": None},
        TEXT,
        r"format.response_key: .* has null as 'response', which must be text",
    ),
    ("sft", {"messages": "[{]"}, {}, r"format.messages_key: .* must be a list of messages"),
    (
        "sft",
        {"messages": [ASKED, SAID], "t": [1]},
        {"tools_key": "t"},
        r"format.tools_key: .* line 2: 't' must be a list of tools",
    ),
    (
        "sft",
        {"messages": [ASKED, SAID], "t": "add"},
        {"tools_key": "t"},
        r"must be a list of tools, each an object",
    ),
]
GOOD: dict[str, dict[str, Any]] = {
    "dpo": {**PAIR, "prompt": "a"},
    "cpt": {"prompt": "abc"},
    "sft": {"prompt": "a", "response": "b", "messages": [ASKED, SAID]},
}


@pytest.mark.parametrize(
    ("schema", "row", "form", "said"), BAD, ids=[f"{row[0]}-{n}" for n, row in enumerate(BAD)]
)
def test_a_row_that_cannot_be_read_is_refused(
    tmp_path: Path, schema: str, row: dict[str, Any], form: dict[str, Any], said: str
) -> None:
    good = GOOD[schema] | (
        {"chosen": "b", "rejected": "c"} if schema == "dpo" and form == TEXT else {}
    )
    config = buffer(saved(tmp_path / "a.jsonl", [good, row]), **form)
    with pytest.raises(ConfigError, match=said):
        check_supervised(config, KEY, schema=schema)


def test_values_of_parquet_are_looked_at_too(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.parquet", [{"messages": [ASKED, SAID]}, {"messages": [SAID, ASKED]}])
    with pytest.raises(
        ConfigError,
        match=r"format.messages_key: .*a.parquet row 2: 'messages' ends with role 'user'",
    ):
        check_supervised(buffer(path), KEY)
    path = saved(
        tmp_path / "b.parquet",
        [{"prompt": "a", "response": "b"}, {"prompt": None, "response": "b"}],
    )
    with pytest.raises(
        ConfigError, match=r"format.prompt_key: .*b.parquet row 2 has null as 'prompt'"
    ):
        check_supervised(buffer(path, prompt_type="plaintext"), KEY)


def test_files_without_rows_or_of_another_encoding_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(
        ConfigError, match=r"experience_buffer.path: no rows in .*a.jsonl: the file is empty"
    ):
        check_supervised(buffer(tmp_path / "a.jsonl", prompt_type="plaintext"), KEY, schema="cpt")
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a", "response": "\xe4"}\n')
    with pytest.raises(
        ConfigError,
        match=r"line 1 is not UTF-8 \(byte 30 of the line is 0xe4\): save the file as UTF-8",
    ):
        check_supervised(buffer(tmp_path / "a.jsonl", prompt_type="plaintext"), KEY)


@pytest.mark.parametrize(
    ("schema", "form", "said"),
    [
        ("cpt", {}, "cpt learns plain text: set prompt_type=plaintext"),
        ("cpt", {**TEXT, "system_prompt": "a"}, "without system_prompt"),
        (
            "dpo",
            {"enable_concatenated_multi_turn": True},
            "is for sft with prompt_type=messages: leave it out",
        ),
        (
            "sft",
            {**TEXT, "enable_concatenated_multi_turn": True},
            "is for sft with prompt_type=messages",
        ),
        ("sft", {"prompt_type": "chat"}, "prompt_type is 'chat': use plaintext or messages"),
    ],
)
def test_a_format_that_means_nothing_is_refused(
    tmp_path: Path, schema: str, form: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_supervised(
            buffer(saved(tmp_path / "a.jsonl", [GOOD[schema]]), **form), KEY, schema=schema
        )


def test_half_a_pair_is_no_batch_and_a_dialogue_that_cannot_be_masked_is_named(
    tmp_path: Path, tokenizer: Any
) -> None:
    config = buffer(saved(tmp_path / "a.jsonl", [PAIR] * 3))
    with pytest.raises(
        ConfigError, match="train_batch_size=3: a pair is two experiences; give an even number"
    ):
        check_supervised(config, KEY, 3, "dpo")
    moving = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}"
    path = saved(tmp_path / "b.jsonl", [{"messages": [ASKED, SAID, ASKED, SAID]}])
    config = buffer(path, enable_concatenated_multi_turn=True, chat_template=moving)
    with pytest.raises(
        ConfigError,
        match=r"experience_buffer: row 1 of .*b.jsonl: the chat template does not write message 2",
    ):
        SupervisedRows(config, tokenizer, 1, 0, 64)
