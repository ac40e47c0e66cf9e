"""Rows as other tools write them: numbers in .csv files, objects in .parquet files, pairs in the
forms of TRL, calls of tools as OpenAI has them, columns inside columns.
"""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rft.config import (
    ConfigError,
    ExperienceBufferConfig,
    FormatConfig,
    RowFormatConfig,
    TasksetConfig,
)
from rft.data.chat import Dialogues
from rft.data.files import data_files
from rft.data.supervised import SupervisedRows, check_supervised
from rft.data.taskset import TaskDefaults, Taskset, check_taskset, for_journal, from_journal
from rft.ground.experience import Task
from rft.tools.toy import character_tokenizer

TASKS = "buffer.explorer_input.taskset.path"
ROWS = "buffer.trainer_input.experience_buffer.path"
DEFAULTS = TaskDefaults("single_turn", "exact_match", 2, 8, 1.0)
# a template that shows tools and their calls
TOOLS = (
    "{% for t in tools or [] %}({{ t | tojson }}){% endfor %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED = {"role": "user", "content": "2+2="}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return character_tokenizer()


def said(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def tasks(path: Path, spoken: bool = True, **form: Any) -> list[Task]:
    """`spoken`: the workflow speaks the prompt."""
    config = TasksetConfig(path=str(path), shuffle=False, format=FormatConfig(**form))
    check_taskset(config, TASKS, prompt=spoken)
    return list(Taskset(config, DEFAULTS))


def learned(tokenizer: Any, path: Path, schema: str = "sft", **form: Any) -> list[tuple[str, str]]:
    """Of every sequence: what is read, and what is learned."""
    config = ExperienceBufferConfig(
        name="rows", storage_type="file", path=str(path), format=RowFormatConfig(**form)
    )
    config.shuffle = False
    size = 2 if schema == "dpo" else 1
    count = check_supervised(config, ROWS, size, schema)
    source = SupervisedRows(config, tokenizer, size, 0, 2000, schema=schema)
    made = [one for step in range(count) for one in source.batch(step).experiences]
    return [
        (
            tokenizer.decode(one.tokens[: one.prompt_length]),
            tokenizer.decode(one.tokens[one.prompt_length :]),
        )
        for one in made
    ]


# --- tables ---------------------------------------------------------------------------------------


def test_a_cell_of_a_csv_is_the_text_that_is_written_there(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,response\n12,007\n1e3,1.50\n", encoding="utf-8")
    found = tasks(path, prompt_type="plaintext")
    assert [(one.prompt, one.truth) for one in found] == [
        ("12", "007"),
        ("1e3", "1.50"),
    ]


def test_cells_of_a_csv_without_a_name_do_not_move_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,response\nfirst, and second,3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="more cells than the first line has names.*quotes"):
        tasks(path, prompt_type="plaintext")


def test_objects_of_a_table_have_no_fields_of_other_rows(tmp_path: Path, tokenizer: Any) -> None:
    """Arrow has one type for all rows, and null for what a row lacks."""
    path = parquet(
        tmp_path / "a.parquet",
        *(
            {
                "messages": [ASKED, called(name, **{name: 1}), said("4")],
                "response": "4",
                "tools": [{"name": name, "properties": {name: {"type": "number"}}}],
            }
            for name in ("f", "g")
        ),
    )
    form = {"prompt_type": "messages", "tools_key": "tools"}
    for name, task in zip("fg", tasks(path, spoken=False, **form), strict=True):
        assert task.tools == [{"name": name, "properties": {name: {"type": "number"}}}]
        assert task.prompt[1] == called(name, **{name: 1}) | {"content": ""}
    read = learned(tokenizer, path, tools_key="tools", chat_template=TOOLS)
    assert all("null" not in prompt for prompt, _ in read)
    assert '{"name": "g", "arguments": {"g": 1}}' in read[1][0]


def test_pictures_beside_a_prompt_are_left_alone(tmp_path: Path) -> None:
    import datasets

    told = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "response": datasets.Value("string"),
            "image": datasets.Image(),
        }
    )
    row = {"prompt": "2+2=", "response": "4", "image": {"bytes": b"\x89PNG", "path": None}}
    table = pyarrow.Table.from_pylist([row], schema=told.arrow_schema)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    (task,) = tasks(tmp_path / "a.parquet", prompt_type="plaintext")
    assert task.raw["image"]["bytes"] == b"\x89PNG"
    assert for_journal(task)


def test_a_row_is_the_same_before_and_after_a_resume(tmp_path: Path) -> None:
    odd = {
        "day": datetime.date(2020, 1, 1),
        "at": datetime.datetime(2020, 1, 1, 12),
        "price": decimal.Decimal("1.50"),
        "data": b"\xff\x00",
        "inside": [{"n": None, "took": datetime.timedelta(days=1)}],
    }
    path = parquet(tmp_path / "a.parquet", {"prompt": "q", "response": "1", **odd})
    (task,) = tasks(path, prompt_type="plaintext")
    assert from_journal(for_journal(task)) == task
    assert (task.raw["price"], task.raw["data"]) == ("1.50", b"\xff\x00")


# --- pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"chosen": [ASKED, said("4")], "rejected": [ASKED, said("5")]}, {}),
        (  # the columns of ultrafeedback_binarized
            {
                "prompt": "2+2=",
                "messages": [ASKED, said("4")],
                "chosen": [ASKED, said("4")],
                "rejected": [ASKED, said("5")],
            },
            {},
        ),
        (
            {"prompt": [ASKED], "chosen": [said("4")], "rejected": [said("5")]},
            {"prompt_type": "messages", "messages_key": "prompt"},
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_pairs_may_be_whole_dialogues(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], form: dict[str, Any], suffix: str
) -> None:
    write = lines if suffix == ".jsonl" else parquet
    found = learned(tokenizer, write(tmp_path / f"a{suffix}", row), "dpo", **form)
    asked = "<|user|>2+2=<|end|><|assistant|>"
    assert found == [(asked, "4<|end|>"), (asked, "5<|end|>")]


def test_what_dialogues_of_a_pair_begin_with_is_the_prompt(tmp_path: Path, tokenizer: Any) -> None:
    again = [ASKED, said("4"), {"role": "user", "content": "3+3="}]
    row = {"chosen": [*again, said("6")], "rejected": [*again, said("7")]}
    (better, worse) = learned(tokenizer, lines(tmp_path / "a.jsonl", row), "dpo")
    assert better[0] == worse[0] and better[0].endswith("3+3=<|end|><|assistant|>")
    assert (better[1], worse[1]) == ("6<|end|>", "7<|end|>")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"messages": [ASKED, said("4")], "chosen": [said("4")], "rejected": [said("5")]},
            "the prompt ends with the assistant's words",
        ),
        ({"chosen": [said("4")], "rejected": [said("5")]}, "there is no prompt"),
        (
            {"messages": [ASKED], "chosen": [ASKED, said("4")], "rejected": [said("5")]},
            "must both be the assistant's answer, or both whole dialogues",
        ),
        (
            {
                "chosen": [ASKED, said("4")],
                "rejected": [{"role": "user", "content": "?"}, said("5")],
            },
            "are the same up to it",
        ),
    ],
)
def test_a_pair_without_one_prompt_is_refused(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], why: str
) -> None:
    path = lines(tmp_path / "a.jsonl", row)
    with pytest.raises(ConfigError, match=rf"format\.messages_key: .*line 1: .*{why}"):
        learned(tokenizer, path, "dpo")


# --- dialogues ------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_call_of_a_tool_needs_no_words(
    tmp_path: Path, tokenizer: Any, content: dict[str, Any]
) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, called("f", x=1) | content]})
    ((prompt, answer),) = learned(tokenizer, path, chat_template=TOOLS)
    assert prompt == "<|user|>2+2=<|end|><|assistant|>"
    assert answer == '[{"name": "f", "arguments": {"x": 1}}]<|end|>'


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [ASKED, called("f")]}, "the row has tool_calls, and the chat template shows"),
        ({"messages": [ASKED, said("4")], "tools": [{"name": "f"}]}, "the row has tools, and the"),
    ],
)
def test_what_the_template_does_not_write_is_refused_with_its_row(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], why: str
) -> None:
    path = lines(tmp_path / "a.jsonl", row)
    form = {"tools_key": "tools"} if "tools" in row else {}
    with pytest.raises(ConfigError, match=rf"row 1 of .*a\.jsonl: {why}"):
        learned(tokenizer, path, **form)


@pytest.mark.parametrize(("given", "made"), [('{"x": 1}', '{"x": 1}'), ("", "{}")])
def test_content_in_parts_is_one_text_and_arguments_in_json_are_an_object(
    tmp_path: Path, tokenizer: Any, given: str, made: str
) -> None:
    """As OpenAI has both, and as what an agent sends is shown to the model."""
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]
    call = {"type": "function", "function": {"name": "f", "arguments": given}}
    rows = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    path = lines(tmp_path / "a.jsonl", {"messages": rows})
    ((prompt, answer),) = learned(tokenizer, path, chat_template=TOOLS)
    assert prompt == "<|user|>2+2=<|end|><|assistant|>"
    assert answer == f'[{{"name": "f", "arguments": {made}}}]<|end|>'


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": [{"type": "image", "image": "a.png"}]}, "content that is no text.*a.png"),
        ({"content": 4}, "content that is no text: 4"),
        ({"content": None}, 'needs "role" and "content" in each message'),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}, "arguments in JSON"),
        ({"tool_calls": ["f"]}, "a call that is none of a function"),
    ],
)
def test_messages_that_no_template_writes_are_refused(
    tmp_path: Path, tokenizer: Any, message: dict[str, Any], why: str
) -> None:
    row = {"messages": [ASKED, {"role": "assistant", **message}]}
    with pytest.raises(ConfigError, match=rf"messages_key: .*line 1: 'messages' .*{why}"):
        learned(tokenizer, lines(tmp_path / "a.jsonl", row), chat_template=TOOLS)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_column_of_tools_that_no_row_has_is_refused(
    tmp_path: Path, tokenizer: Any, suffix: str
) -> None:
    """Else a wrong name would mean a model that is shown no tools."""
    write = lines if suffix == ".jsonl" else parquet
    path = write(
        tmp_path / f"a{suffix}", {"messages": [ASKED, said("4")], "tools": [{"name": "f"}]}
    )
    with pytest.raises(ConfigError, match=r"format\.tools_key: .* (no 'tool'|has a 'tool')"):
        learned(tokenizer, path, tools_key="tool", chat_template=TOOLS)
    with pytest.raises(ConfigError, match=r"format\.tools_key: .* (no 'tool'|has a 'tool')"):
        tasks(path, spoken=False, tools_key="tool")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_a_task_that_shows_its_answer_is_refused(tmp_path: Path, suffix: str, name: str) -> None:
    """Rows to learn (OpenR1's, Tulu's) hold the dialogue with its answer."""
    write = lines if suffix == ".jsonl" else parquet
    path = write(tmp_path / f"a{suffix}", {name: [ASKED, said("4")], "response": "4"})
    form = {"prompt_key": name} if name == "prompt" else {"prompt_type": "messages"}
    with pytest.raises(ConfigError, match="row 1|line 1") as refused:
        tasks(path, **form)
    assert f"'{name}' ends with the assistant's words, so the model" in str(refused.value)
    assert tasks(path, spoken=False, **form), "an agent may do with it what it likes"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_prompt_and_completion_may_be_messages(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    """As TRL has them; Arrow gives every call the arguments of all others."""
    write = lines if suffix == ".jsonl" else parquet
    rows = [
        {"prompt": [ASKED], "completion": [called(name, **{name: 1}), said("4")]}
        for name in ("f", "g")
    ]
    form = {"prompt_type": "messages", "messages_key": "prompt", "response_key": "completion"}
    form["chat_template"] = TOOLS
    for name, (prompt, answer) in zip(
        "fg", learned(tokenizer, write(tmp_path / f"a{suffix}", *rows), **form), strict=True
    ):
        assert prompt == "<|user|>2+2=<|end|><|assistant|>"
        call = json.dumps({"name": name, "arguments": {name: 1}})
        assert answer == f"[{call}]<|end|><|assistant|>4<|end|>"
    (one,) = learned(
        tokenizer,
        write(
            tmp_path / f"b{suffix}",
            {"prompt": [ASKED, said("3"), ASKED], "completion": [said("4")]},
        ),
        **form,
        enable_concatenated_multi_turn=True,
    )
    assert one[1].startswith("3<|end|>") and one[1].endswith("4<|end|>")
    for bad, told in (
        ({"prompt": [ASKED, said("4")], "completion": [said("4")]}, "prompt' ends with the assist"),
        ({"prompt": [ASKED], "completion": [ASKED]}, "completion' ends with role 'user'"),
    ):
        with pytest.raises(ConfigError, match=told):
            learned(tokenizer, write(tmp_path / f"c{suffix}", bad), **form)


def test_rows_of_sharegpt_are_told_what_they_have(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [{"from": "human", "value": "2+2="}]})
    with pytest.raises(ConfigError, match="in each; the first has 'from', 'value'"):
        tasks(path, prompt_type="messages")


def test_an_answer_that_has_the_end_of_a_turn_inside_is_learned_whole(
    tmp_path: Path, tokenizer: Any
) -> None:
    words = "a<|end|>b"
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, said(words), ASKED, said(words)]})
    ((_, answer),) = learned(tokenizer, path)
    assert answer == f"{words}<|end|>"
    ((_, answers),) = learned(tokenizer, path, enable_concatenated_multi_turn=True)
    assert answers == f"{words}<|end|><|user|>2+2=<|end|><|assistant|>{words}<|end|>"
    ids, spans = Dialogues(tokenizer).every_answer([ASKED, said(words), ASKED, said(words)])
    assert [tokenizer.decode(ids[start:stop]) for start, stop in spans] == [f"{words}<|end|>"] * 2


def test_a_dialogue_that_begins_with_the_assistant_is_refused_with_its_row(
    tmp_path: Path, tokenizer: Any
) -> None:
    path = lines(tmp_path / "a.jsonl", {"messages": [said("4")]})
    with pytest.raises(ConfigError, match=r"row 1 of .*a\.jsonl: .*empty conversation"):
        learned(tokenizer, path)


def test_an_empty_list_of_calls_is_none(tmp_path: Path, tokenizer: Any) -> None:
    """Templates of Mistral ask whether there is a list."""
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    template += "{% if m.tool_calls is defined %}[TOOL_CALLS]{% endif %}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, said("4") | {"tool_calls": []}]})
    ((_, answer),) = learned(tokenizer, path, chat_template=template)
    assert answer == "4<|end|>"


def test_a_workflow_that_reads_rows_itself_gets_them_as_they_are(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    config = TasksetConfig(
        path=str(lines(tmp_path / "a.jsonl", {"prompt": prompt})), format=FormatConfig()
    )
    check_taskset(config, TASKS, prompt=False, answer=False)
    assert next(Taskset(config, DEFAULTS)).prompt == prompt


def test_a_thought_is_opened_once(tmp_path: Path, tokenizer: Any) -> None:
    """Templates of R1 and QwQ open it in the prompt, and leave thoughts out of what was said."""
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    template += "{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
    for words in ("<think>\nwell</think>4", "<think>well</think>4", "well</think>4"):
        path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, said(words)]})
        ((prompt, answer),) = learned(tokenizer, path, chat_template=template)
        assert prompt.endswith("<|assistant|><think>\n") and answer == "well</think>4<|end|>"


def test_a_template_that_raises_is_refused_with_the_row(tmp_path: Path, tokenizer: Any) -> None:
    """As those of Mistral and Gemma do where roles do not alternate."""
    template = "{{ raise_exception('roles must alternate') if messages[1:] and messages[0].role == "
    template += "messages[1].role }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, ASKED, said("4")]})
    with pytest.raises(ConfigError, match=r"row 1 of .*roles must alternate"):
        learned(tokenizer, path, chat_template=template)


def test_calls_are_not_dropped_where_the_template_rewrites_its_prompt(
    tmp_path: Path, tokenizer: Any
) -> None:
    """Only words can stand behind the prompt as they are."""
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, called("f") | {"content": ""}]})
    template = "{{ messages | length }}" + TOOLS
    with pytest.raises(ConfigError, match="row 1 of .*does not write message 2, an answer"):
        learned(tokenizer, path, chat_template=template)


def test_a_tokenizer_may_have_several_templates(tmp_path: Path) -> None:
    """One for dialogues with tools, as those of Hermes do."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": TOOLS}
    path = lines(tmp_path / "a.jsonl", {"messages": [ASKED, said("4")]})
    assert learned(tokenizer, path) == [("<|user|>2+2=<|end|><|assistant|>", "4<|end|>")]


def test_columns_inside_others_are_read_wherever_they_are_named(
    tmp_path: Path, tokenizer: Any
) -> None:
    row = {
        "x": {
            "prompt": "2+2=",
            "messages": [ASKED, said("4")],
            "system": "add",
            "tools": [{"name": "f"}],
            "response": "4",
        }
    }
    path = lines(tmp_path / "a.jsonl", row)
    text = {"prompt_type": "plaintext", "prompt_key": "x.prompt", "response_key": "x.response"}
    text["system_prompt_key"] = "x.system"
    assert tasks(path, **text)[0].prompt == [{"role": "system", "content": "add"}, ASKED]
    assert learned(tokenizer, path, **text)[0][0].startswith("<|system|>add<|end|>")
    chat = {"prompt_type": "messages", "messages_key": "x.messages", "tools_key": "x.tools"}
    assert tasks(path, spoken=False, **chat)[0].tools == [{"name": "f"}]
    ((prompt, answer),) = learned(tokenizer, path, chat_template=TOOLS, **chat)
    assert prompt.startswith('({"name": "f"})') and answer == "4<|end|>"


# --- numbers, letters, names ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"prompt": "q", "response": 123456789012345678901}', "64 bits as 'response'.*as text"),
        ('{"prompt": "q", "response": "1", "x": [18446744073709551616]}', "64 bits as 'x'"),
        ('{"prompt": "\\ud83d", "response": "1"}', "surrogates not allowed|malformed JSON"),
    ],
)
def test_what_no_journal_keeps_is_refused_before_a_run(
    tmp_path: Path, name: str, text: str, why: str
) -> None:
    file = tmp_path / name
    file.write_text(f"[{text}]" if name.endswith("json") else text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"taskset\.path: .*(line|row) 1 .*({why})"):
        tasks(file, prompt_type="plaintext")


def test_long_numbers_that_fit_and_digits_of_a_text_are_taken(tmp_path: Path) -> None:
    row = {"prompt": "9" * 40, "response": 2**64 - 1}
    (task,) = tasks(lines(tmp_path / "a.jsonl", row), prompt_type="plaintext")
    assert (task.prompt, task.truth) == ("9" * 40, "18446744073709551615")
    assert for_journal(task)


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_a_validation_file_is_no_part_of_the_training_set(tmp_path: Path, name: str) -> None:
    for file in ("rows.jsonl", f"{name}.jsonl"):
        lines(tmp_path / file, {"prompt": "q", "response": "1"})
    for split, found in (
        ("train", ["rows.jsonl"]),
        (name, [f"{name}.jsonl"]),
        ("validation", [f"{name}.jsonl"]),
    ):
        assert [one.name for one in data_files(str(tmp_path), split, None, "key")] == found


def test_a_split_may_have_a_longer_name(tmp_path: Path) -> None:
    """As ultrafeedback's have, which are of one set, and not rows of one kind; ultrachat's files
    have a hash, too, and a saved set has a directory of each.
    """
    shard, hashed = "-00000-of-00001", "-00000-of-00003-a3ecf92756993583"
    named = {
        "train_prefs": f"train_prefs{shard}.jsonl",
        "train_sft": f"train_sft{hashed}.jsonl",
        "train_gen": f"train_gen/data{shard}.jsonl",
    }
    for name in (*named.values(), f"test_sft{shard}.jsonl", f"test_gen/data{shard}.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines(tmp_path / name, {"prompt": "q", "response": "1"})
    for split, name in named.items():
        assert data_files(str(tmp_path), split, None, "key") == [tmp_path / name]


def test_what_datasets_keeps_beside_a_saved_set_is_no_part_of_it(tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": str(number), "response": "1"} for number in range(8)]
    made = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    made.save_to_disk(str(tmp_path / "set"))
    loaded = datasets.load_from_disk(str(tmp_path / "set"))["train"]
    loaded.map(lambda row: {"prompt": "another"})
    assert list((tmp_path / "set" / "train").glob("cache-*.arrow"))
    found = tasks(tmp_path / "set", prompt_type="plaintext")
    assert [one.prompt for one in found] == [row["prompt"] for row in rows]
