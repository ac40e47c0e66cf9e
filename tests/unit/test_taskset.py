"""Tasksets: order and cursor by (seed, epoch), formats and defaults, and refusals that name file,
line, key and fix.
"""

import json
import pickle
import socket
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rft.config import (
    BufferConfig,
    ConfigError,
    ExplorerInputConfig,
    FormatConfig,
    ModelConfig,
    RolloutArgs,
    TasksetConfig,
)
from rft.data.chat import end_of_turn, render_prompt
from rft.data.taskset import (
    TaskDefaults,
    Taskset,
    build_tasksets,
    check_taskset,
    eval_defaults,
    train_defaults,
)
from rft.ground.experience import Sampling, Task, decode, encode
from rft.tools.toy import character_tokenizer

KEY = "buffer.explorer_input.taskset.path"
DEFAULTS = TaskDefaults("single_turn", "exact_match", 4, 32, 1.0)
PLAIN = FormatConfig(prompt_type="plaintext")


def write(path: Path, count: int = 10) -> TasksetConfig:
    rows = [{"prompt": f"{n}+{n}=", "response": str(2 * n), "level": n} for n in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return TasksetConfig(path=str(path), format=FormatConfig(prompt_type="plaintext"))


def ids(taskset: Taskset) -> list[str]:
    return [task.id for task in taskset]


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_tasks_carry_prompt_truth_defaults_and_the_whole_row(tmp_path: Path, name: str) -> None:
    config = write(tmp_path / name)
    config.shuffle = False
    config.workflow_args, config.reward_fn_args = {"a": 1}, {"b": 2}
    task = next(Taskset(config, DEFAULTS))
    assert (task.id, task.taskset, task.prompt, task.truth) == (
        "taskset/0/0",
        "taskset",
        "0+0=",
        "0",
    )
    assert (task.workflow, task.reward, task.repeat_times) == ("single_turn", "exact_match", 4)
    assert (task.workflow_args, task.reward_args) == ({"a": 1}, {"b": 2})
    assert task.sampling == Sampling(temperature=1.0, max_tokens=32)
    assert task.raw == {"prompt": "0+0=", "response": "0", "level": 0}
    assert decode(encode(task), Task) == task


def test_the_sets_own_values_win_over_the_defaults(tmp_path: Path) -> None:
    config = write(tmp_path / "train.jsonl")
    config.default_workflow_type, config.default_reward_fn_type, config.repeat_times = (
        "math",
        "math_verify",
        2,
    )
    config.rollout_args = RolloutArgs(temperature=0.0, top_p=0.9, top_k=5, max_tokens=7)
    task = next(Taskset(config, DEFAULTS))
    assert (task.workflow, task.reward, task.repeat_times) == ("math", "math_verify", 2)
    assert task.sampling == Sampling(temperature=0.0, top_p=0.9, top_k=5, max_tokens=7)


def test_evaluation_defaults_are_one_greedy_answer_by_the_evaluation_workflow() -> None:
    given = ExplorerInputConfig(
        default_workflow_type="a", default_eval_workflow_type="b", default_reward_fn_type="r"
    )
    model = ModelConfig(model_path="m", max_response_tokens=9, min_response_tokens=2)
    assert train_defaults(given, model, 8) == TaskDefaults("a", "r", 8, 9, 1.0, 2)
    assert eval_defaults(given, model) == TaskDefaults("b", "r", 1, 9, 0.0, 2)
    given.default_eval_workflow_type = None
    assert eval_defaults(given, model).workflow == "a"


def test_the_order_depends_on_seed_and_epoch_only(tmp_path: Path) -> None:
    config = write(tmp_path / "train.jsonl", 50)
    first, again, other = (ids(Taskset(config, DEFAULTS, seed, epochs=2)) for seed in (1, 1, 2))
    assert first == again != other
    rows = [name.split("/")[2] for name in first]
    assert (
        sorted(rows[:50]) == sorted(rows[50:])
        and rows[:50] != rows[50:]
        and rows[:50] != sorted(rows[:50])
    )


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 9, 15, 16])
def test_a_cursor_continues_exactly_in_a_new_process(tmp_path: Path, stop: int) -> None:
    config = write(tmp_path / "train.jsonl", 9)
    whole = ids(Taskset(config, DEFAULTS, 3, epochs=2, batch_size=4))
    taskset = Taskset(config, DEFAULTS, 3, epochs=2, batch_size=4)
    head = [next(taskset).id for _ in range(stop)]
    cursor = json.loads(json.dumps(taskset.cursor))
    fresh = Taskset(config, DEFAULTS, 3, epochs=2, batch_size=4)
    fresh.seek(cursor)
    assert head + ids(fresh) == whole
    assert len(whole) == 16


def test_a_cursor_that_does_not_fit_the_data_is_refused(tmp_path: Path) -> None:
    taskset = Taskset(write(tmp_path / "train.jsonl", 9), DEFAULTS)
    with pytest.raises(ConfigError, match="changed since the checkpoint"):
        taskset.seek({"epoch": 0, "index": 10})


def test_training_drops_the_last_short_batch_and_evaluation_keeps_it_in_order(
    tmp_path: Path,
) -> None:
    config = write(tmp_path / "train.jsonl", 10)
    assert len(Taskset(config, DEFAULTS, batch_size=4)) == 8
    evaluation = Taskset(config, DEFAULTS, batch_size=4, train=False)
    assert len(evaluation) == 10
    assert [task.row for task in evaluation] == list(range(10))
    with pytest.raises(ConfigError, match="fewer than buffer.batch_size=11"):
        Taskset(config, DEFAULTS, batch_size=11)


def test_without_epochs_the_tasks_never_end(tmp_path: Path) -> None:
    taskset = Taskset(write(tmp_path / "train.jsonl", 3), DEFAULTS, epochs=None)
    assert [next(taskset).epoch for _ in range(10)] == [0] * 3 + [1] * 3 + [2] * 3 + [3]


def test_system_prompts_make_messages_and_the_rows_own_wins(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"q": "hi", "response": "yo", "s": "from row"}\n')
    config = TasksetConfig(
        path=str(path), format=FormatConfig("plaintext", "q", system_prompt="literal")
    )
    user = {"role": "user", "content": "hi"}
    assert next(Taskset(config, DEFAULTS)).prompt == [
        {"role": "system", "content": "literal"},
        user,
    ]
    config.format.system_prompt_key = "s"
    assert next(Taskset(config, DEFAULTS)).prompt == [
        {"role": "system", "content": "from row"},
        user,
    ]


def test_messages_come_without_the_empty_fields_that_arrow_adds(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    messages: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "a", "name": "bob"}],
        [{"role": "user", "content": "b"}],
    ]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": m} for m in messages]), path
    )
    config = TasksetConfig(path=str(path), shuffle=False)
    assert check_taskset(config, KEY) == 2
    tasks = list(Taskset(config, DEFAULTS))
    assert [task.prompt for task in tasks] == messages
    assert [task.truth for task in tasks] == [None, None]


def test_a_directory_gives_the_files_of_the_split_and_subset(tmp_path: Path) -> None:
    write(tmp_path / "train-00000-of-00002.parquet", 3)
    write(tmp_path / "train-00001-of-00002.parquet", 4)
    write(tmp_path / "test.parquet", 5)
    write(tmp_path / "hard" / "part-1.jsonl", 2)
    write(tmp_path / "hard" / "part-2.jsonl", 4)
    config = TasksetConfig(path=str(tmp_path), format=PLAIN)
    for split, subset, count in (("train", None, 7), ("test", None, 5), ("train", "hard", 6)):
        config.split, config.subset_name = split, subset
        assert (
            check_taskset(config, KEY)
            == Taskset.count(config)
            == count
            == len(Taskset(config, DEFAULTS))
        )
    assert [task.prompt for task in Taskset(config, DEFAULTS, train=False)] == [
        f"{n}+{n}=" for n in (0, 1, 0, 1, 2, 3)
    ]
    config.split, config.subset_name = "validation", None
    with pytest.raises(ConfigError, match=r"taskset\.split: no .* of split 'validation'"):
        check_taskset(config, KEY)
    config.subset_name = "easy"
    with pytest.raises(ConfigError, match=r"taskset\.subset_name: no directory 'easy' .*'hard'"):
        check_taskset(config, KEY)


def test_a_json_array_is_read_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text('[{"prompt": "a", "response": "b"},\n {"prompt": "c", "response": "d"}]')
    config = TasksetConfig(path=str(path), format=PLAIN)
    assert check_taskset(config, KEY) == 2
    assert {task.truth for task in Taskset(config, DEFAULTS)} == {"b", "d"}
    path.write_text('[{"prompt": "a"},\n')
    with pytest.raises(ConfigError, match="train.json line 2 is malformed JSON"):
        check_taskset(config, KEY)


GOOD = b'{"prompt": "a", "response": "b"}\n'
REFUSED = [
    (b"", r"taskset\.path: no rows .* the file is empty"),
    (b"\n\n", r"taskset\.path: no rows"),
    (GOOD + b'{"prompt": "a", \n', r"taskset\.path: .*train.jsonl line 2 is malformed JSON"),
    (GOOD + b'{"prompt": "a"} {"x": 1}\n', r"line 2 is malformed JSON"),
    (GOOD + b"\n" + b"[1, 2]\n", r"line 3 is no JSON object but b'\[1, 2\]"),
    (
        GOOD + b'{"prompt": "\xe9", "response": ""}\n',
        r"taskset\.path: .*line 2 is not UTF-8 \(byte 13 of the line is 0xe9",
    ),
    (b"\xef\xbb\xbf" + GOOD, r"line 1 begins with a byte-order mark"),
    (
        GOOD + b'{"promt": "a", "response": "b"}\n',
        (
            r"taskset\.format\.prompt_key: .*line 2 has no 'prompt'; there are 'promt', "
            r"'response'. "
            r"did you mean 'promt'"
        ),
    ),
    (
        b'{"prompt": "a", "answer": "b"}\n',
        r"taskset\.format\.response_key: .*line 1 has no 'response'",
    ),
    (
        b'{"prompt": null, "response": "b"}\n',
        r"taskset\.format\.prompt_key: .*line 1 has null as 'prompt'",
    ),
    (b'{"prompt": ["a"], "response": "b"}\n', r"which must be text"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_bad_rows_are_refused_with_file_line_key_and_fix(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        check_taskset(TasksetConfig(path=str(path), format=PLAIN), KEY)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"message": []},
            r"format\.messages_key: .*line 1 has no 'messages'.*did you mean 'message'",
        ),
        ({"messages": "hi"}, "must be a list of messages.*prompt_type=plaintext"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, '"role" and "content" in each'),
    ],
)
def test_bad_messages_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=message):
        check_taskset(TasksetConfig(path=str(path)), KEY)


def test_parquet_columns_are_checked_by_the_schema(tmp_path: Path) -> None:
    config = write(tmp_path / "train.parquet")
    assert check_taskset(config, KEY) == 10
    config.format = FormatConfig("plaintext", "promt")
    with pytest.raises(
        ConfigError,
        match=r"format\.prompt_key: .*train.parquet has no 'promt'.*did you mean 'prompt'",
    ):
        check_taskset(config, KEY)
    config.format = FormatConfig("plaintext", "level")
    with pytest.raises(ConfigError, match="column 'level' of .* is int64, but must be text"):
        check_taskset(config, KEY)
    (tmp_path / "train.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ConfigError, match="is not a parquet file"):
        check_taskset(config, KEY)


def test_a_wrong_path_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    with pytest.raises(
        ConfigError,
        match=r"taskset\.path: .*trian.jsonl does not exist; did you mean .*train.jsonl\?",
    ):
        check_taskset(TasksetConfig(path=str(tmp_path / "trian.jsonl"), format=PLAIN), KEY)
    (tmp_path / "train.txt").write_text("a,b")
    with pytest.raises(ConfigError, match="is no .jsonl, .json, .parquet, .csv, .arrow file"):
        check_taskset(TasksetConfig(path=str(tmp_path / "train.txt"), format=PLAIN), KEY)
    for content in ("prompt,response\n", ""):
        (tmp_path / "train.csv").write_text(content)
        with pytest.raises(ConfigError, match=r"taskset\.path: `datasets` cannot read .*train.csv"):
            check_taskset(TasksetConfig(path=str(tmp_path / "train.csv"), format=PLAIN), KEY)


def test_too_few_rows_and_other_storages_are_refused(tmp_path: Path) -> None:
    config = write(tmp_path / "train.jsonl", 3)
    with pytest.raises(
        ConfigError, match="3 rows, fewer than one step takes .*buffer.batch_size=4"
    ):
        check_taskset(config, KEY, batch_size=4)
    config.storage_type = "queue"
    with pytest.raises(ConfigError, match=r"taskset\.storage_type=queue: .*set file, or sql"):
        check_taskset(config, KEY)
    config.storage_type, config.format.prompt_type = "file", "chat"
    with pytest.raises(ConfigError, match=r"taskset\.format\.prompt_type is 'chat'"):
        check_taskset(config, KEY)


def test_json_values_stay_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    rows = [
        {"prompt": "when?", "response": "2020-01-01", "x": 1},
        {"prompt": "b", "response": 7, "x": {"y": "\u00e9"}},
    ]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    config = TasksetConfig(path=str(path), format=PLAIN, shuffle=False)
    assert check_taskset(config, KEY) == 2
    # as it travels to the explorer
    tasks = list(pickle.loads(pickle.dumps(Taskset(config, DEFAULTS))))
    assert [task.truth for task in tasks] == ["2020-01-01", "7"]
    assert [task.raw for task in tasks] == rows


def test_loading_opens_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"connection to {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("a.jsonl", "a.parquet"):
        assert len(Taskset(write(tmp_path / name), DEFAULTS)) == 10


def test_parquet_files_with_different_types_are_refused_when_loading(tmp_path: Path) -> None:
    write(tmp_path / "train-1.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["a"], "response": [["b"]]}), tmp_path / "train-2.parquet"
    )
    with pytest.raises(ConfigError, match="the same columns and types"):
        Taskset(TasksetConfig(path=str(tmp_path), format=PLAIN), DEFAULTS)


def test_a_response_length_must_be_said_somewhere(tmp_path: Path) -> None:
    config = write(tmp_path / "train.jsonl")
    with pytest.raises(ConfigError, match="model.max_response_tokens"):
        Taskset(config, TaskDefaults("w", "r", 1, None, 1.0))


def test_build_gives_an_endless_training_set_and_whole_evaluation_sets(tmp_path: Path) -> None:
    train, evaluation = write(tmp_path / "train.jsonl", 5), write(tmp_path / "eval.jsonl", 3)
    buffer = BufferConfig(
        batch_size=2, explorer_input=ExplorerInputConfig(taskset=train, eval_tasksets=[evaluation])
    )
    model = ModelConfig(model_path="m", max_response_tokens=4)
    taskset, (evals,) = build_tasksets(buffer, model, seed=0, total_steps=100)
    assert taskset is not None and taskset.epochs is None and len(taskset) == 4
    assert evals.name == "eval" and len(evals) == 3 and next(evals).sampling.temperature == 0
    taskset, _ = build_tasksets(buffer, model, seed=0, total_steps=None)
    assert taskset is not None and taskset.epochs == 1


def test_prompts_are_rendered_by_the_chat_template_ready_for_the_answer() -> None:
    tokenizer = character_tokenizer()
    text = Task(id="", taskset="", row=0, prompt="1+1=", sampling=Sampling())
    chat = Task(
        id="", taskset="", row=0, prompt=[{"role": "user", "content": "1+1="}], sampling=Sampling()
    )
    tokens = render_prompt(tokenizer, text)
    assert tokens == render_prompt(tokenizer, chat)
    assert tokenizer.decode(tokens) == "<|user|>1+1=<|end|><|assistant|>"
    assert tokenizer.decode(render_prompt(tokenizer, text, "{{ messages[0].content }}!")) == "1+1=!"
    assert tokens == tokenizer.apply_chat_template(
        chat.prompt, add_generation_prompt=True, return_dict=False
    )


def test_without_a_chat_template_plain_text_is_plain_and_messages_are_refused() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    text = Task(id="", taskset="", row=0, prompt="1+1=", sampling=Sampling())
    assert tokenizer.decode(render_prompt(tokenizer, text)) == "1+1="
    chat = Task(
        id="", taskset="", row=0, prompt=[{"role": "user", "content": "1+1="}], sampling=Sampling()
    )
    with pytest.raises(ConfigError, match="model.chat_template_path"):
        render_prompt(tokenizer, chat)


def test_the_end_of_a_turn_is_the_templates_special_token_else_eos() -> None:
    tokenizer = character_tokenizer()
    end, pad, user = (
        tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<|pad|>", "<|user|>")
    )
    assert end_of_turn(tokenizer) == end
    ends_with_user = "{% for m in messages %}{{ m.content }}{{ '<|user|>' }}{% endfor %}"
    assert end_of_turn(tokenizer, ends_with_user) == user
    assert end_of_turn(tokenizer, "{% for m in messages %}{{ m.content }}\n{% endfor %}") == end
    tokenizer.eos_token = "<|pad|>"
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) == pad
