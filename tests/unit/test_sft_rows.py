"""Supervised rows: the loss mask, the batch of a step by number, and rows that are too long."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rft.config import ConfigError, ExperienceBufferConfig, RowFormatConfig
from rft.data.supervised import SupervisedRows, check_supervised
from rft.ground.experience import Experience, decode, encode
from rft.tools.toy import character_tokenizer

KEY = "buffer.trainer_input.experience_buffer.path"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return character_tokenizer()


def write(
    path: Path, rows: list[dict[str, Any]], prompt_type: str = "plaintext"
) -> ExperienceBufferConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ExperienceBufferConfig(
        name="rows", storage_type="file", path=str(path), format=RowFormatConfig(prompt_type)
    )


def sums(path: Path, count: int) -> ExperienceBufferConfig:
    return write(path, [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(count)])


def parts(tokenizer: Any, experience: Experience) -> tuple[str, str]:
    """Text of the tokens without and with loss."""
    split = experience.prompt_length
    assert experience.action_mask.tolist() == [1] * experience.response_length
    return tokenizer.decode(experience.tokens[:split]), tokenizer.decode(experience.tokens[split:])


def test_the_loss_is_on_the_response_and_the_end_of_the_turn(
    tmp_path: Path, tokenizer: Any
) -> None:
    config = sums(tmp_path / "a.jsonl", 1)
    (experience,) = SupervisedRows(config, tokenizer, 1, 0, 64, epochs=1).take(0).experiences
    assert parts(tokenizer, experience) == ("<|user|>0+1=<|end|><|assistant|>", "1<|end|>")
    assert (experience.group, experience.task, experience.reward_outcome) == (
        -1,
        "rows/0/0",
        "none",
    )
    assert decode(encode(experience), Experience) == experience


def test_a_system_prompt_stands_in_front(tmp_path: Path, tokenizer: Any) -> None:
    config = sums(tmp_path / "a.jsonl", 1)
    config.format.system_prompt = "add"
    (experience,) = SupervisedRows(config, tokenizer, 1, 0, 64).take(0).experiences
    assert parts(tokenizer, experience)[0] == "<|system|>add<|end|><|user|>0+1=<|end|><|assistant|>"


def test_of_messages_only_the_last_answer_has_loss(tmp_path: Path, tokenizer: Any) -> None:
    words = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    rows = [{"messages": [{"role": role, "content": word} for role, word in words]}]
    config = write(tmp_path / "a.jsonl", rows, "messages")
    assert check_supervised(config, KEY) == 1
    (experience,) = SupervisedRows(config, tokenizer, 1, 0, 64).take(0).experiences
    assert parts(tokenizer, experience) == (
        "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>",
        "d<|end|>",
    )
    whole = tokenizer.apply_chat_template(rows[0]["messages"], return_dict=False)
    assert experience.tokens.tolist() == whole, "the same tokens as the template writes"


def test_every_epoch_takes_every_row_once_in_another_order(tmp_path: Path, tokenizer: Any) -> None:
    rows = SupervisedRows(sums(tmp_path / "a.jsonl", 12), tokenizer, 4, 7, 64, epochs=2)
    epochs = [
        [e.task for step in range(at, at + 3) for e in rows.take(step).experiences] for at in (0, 3)
    ]
    assert all(len(set(tasks)) == 12 for tasks in epochs)
    orders = [[task.split("/")[2] for task in tasks] for tasks in epochs]
    assert orders[0] != orders[1]
    assert {task.split("/")[1] for task in epochs[1]} == {"1"}
    assert rows.take(6).experiences == []
    assert rows.state()["total_steps"] == 6


def test_a_resume_at_any_step_goes_on_exactly_there(tmp_path: Path, tokenizer: Any) -> None:
    config = sums(tmp_path / "a.jsonl", 10)
    straight = SupervisedRows(config, tokenizer, 3, 1, 64, total_steps=8)
    batches = [straight.take(step) for step in range(9)]
    assert batches[8].experiences == []
    for step in (4, 0, 7, 3, 8):
        assert (
            SupervisedRows(config, tokenizer, 3, 1, 64, total_steps=8).take(step) == batches[step]
        )
    straight.begin_look(2)
    assert straight.look() == batches[2]
    assert straight.take(6) == batches[6], "whatever was looked for"
    other = SupervisedRows(config, tokenizer, 3, 2, 64, total_steps=8)
    assert [other.take(step) for step in range(8)] != batches[:8]
    trained = [e.task for batch in batches for e in batch.experiences]
    assert len(trained) == len(set(trained)) == 24


def test_without_shuffle_rows_come_in_order_of_the_file(tmp_path: Path, tokenizer: Any) -> None:
    config = sums(tmp_path / "a.jsonl", 5)
    config.shuffle = False
    rows = SupervisedRows(config, tokenizer, 2, 0, 64)
    tasks = [e.task for step in range(3) for e in rows.take(step).experiences]
    assert tasks == ["rows/0/0", "rows/0/1", "rows/0/2", "rows/0/3", "rows/1/0", "rows/1/1"]


def test_rows_that_are_too_long_are_left_out_and_reported_never_cut(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answers = ["1", "1" * 50, "2", "2" * 60, "123"]
    config = write(
        tmp_path / "a.jsonl", [{"prompt": "x", "response": answer} for answer in answers]
    )
    config.shuffle = False
    with caplog.at_level(logging.WARNING):
        rows = SupervisedRows(config, tokenizer, 3, 0, 8)
    assert (
        "of the 5 rows" in caplog.text
        and "2 have" in caplog.text
        and "more than 8 tokens (the longest 65)" in caplog.text
    )
    assert [parts(tokenizer, e)[1] for e in rows.take(0).experiences] == [
        "1<|end|>",
        "2<|end|>",
        "123<|end|>",
    ]
    assert rows.state()["too_long"] == 2
    with pytest.raises(
        ConfigError, match=r"2 rows of at most 7 tokens, fewer than buffer.train_batch_size=3"
    ):
        SupervisedRows(config, tokenizer, 3, 0, 7)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "must end with the assistant's answer"),
        ({"message": []}, r"experience_buffer\.format\.messages_key: .*did you mean 'message'"),
    ],
)
def test_rows_without_an_answer_are_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_supervised(write(tmp_path / "a.jsonl", [row], "messages"), KEY)


def test_too_few_rows_or_no_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"2 rows, fewer than one step takes \(buffer.train_batch_size=3\)"
    ):
        check_supervised(sums(tmp_path / "a.jsonl", 2), KEY, train_batch_size=3)
    with pytest.raises(ConfigError, match=r"experience_buffer\.path: storage_type=file needs"):
        check_supervised(ExperienceBufferConfig(storage_type="file"), KEY)
