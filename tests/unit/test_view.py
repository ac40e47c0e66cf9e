"""`rft view` shows what is stored: from a queue that is in use, from a file, token by token."""

from pathlib import Path

import msgspec
import pytest

from rft.buffer.journal import Journal
from rft.buffer.progress import Stored
from rft.buffer.store import read_experiences
from rft.config import ConfigError
from rft.ground.columns import listed
from rft.ground.experience import Experience, VersionSpan, encode
from rft.tools.view import View, tokenizer_of


def made(reward: float, answer: list[int], **more: object) -> Experience:
    count = len(answer)
    given = {
        "logprobs": [-0.5] * count,
        "action_mask": [1] * count,
        "task": "sums/0/1",
        "reward_outcome": "ok",
    } | more
    return Experience(tokens=[5, 6, 7, *answer], prompt_length=3, reward=reward, **given)


@pytest.fixture
def view(assets: Path) -> View:
    spans = [VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2)]
    found = [
        made(0.0, [8, 9]),
        made(1.0, [9], reward_outcome="timeout"),
        made(
            0.5, [10, 11, 12], versions=spans, action_mask=[1, 1, 0], token_rewards=[0.0, 0.5, 0.0]
        ),
    ]
    return View(found, tokenizer_of(assets, str(assets / "model")))


def test_a_queue_in_use_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    queue = tmp_path / "buffer" / "experience_buffer"
    journal = Journal(queue)
    groups = [[made(0.0, [8]), made(1.0, [9])], [made(0.5, [10, 11])]]
    for number, group in enumerate(groups):
        journal.append([encode(Stored(group=number, experiences=encode(group)))])
    journal.sync()
    with next(queue.glob("*.log")).open("ab") as log:
        log.write(b"torn")
    before = sorted((path.name, path.stat().st_size) for path in queue.iterdir())
    found = list(read_experiences(tmp_path))
    assert [one.group for one in found] == [0, 0, 1] and [one.reward for one in found] == [
        0.0,
        1.0,
        0.5,
    ]
    assert before == sorted((path.name, path.stat().st_size) for path in queue.iterdir())
    journal.close()


def test_a_file_of_experiences_is_read_exactly(tmp_path: Path) -> None:
    one = made(0.25, [8, 9], metrics={"right": 0.25})
    (tmp_path / "a.jsonl").write_bytes(msgspec.json.encode(one, enc_hook=listed) + b"\n")
    assert list(read_experiences(tmp_path / "a.jsonl")) == [one]


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [("gone", None, "neither"), ("bad.jsonl", "{\n", "line 1"), ("dir", "", "no queue")],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, text: str | None, fix: str
) -> None:
    if text == "":
        (tmp_path / name).mkdir()
    elif text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=fix):
        list(read_experiences(tmp_path / name))


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({}, [0, 1, 2]),
        ({"least": 0.5}, [1, 2]),
        ({"most": 0.5}, [0, 2]),
        ({"outcome": "timeout"}, [1]),
        ({"words": "SUMS"}, [0, 1, 2]),
        ({"words": "nothing like it"}, []),
        ({"order": "newest"}, [2, 1, 0]),
        ({"order": "reward"}, [1, 2, 0]),
        ({"order": "length"}, [2, 0, 1]),
    ],
)
def test_the_list_is_what_was_asked_for(
    view: View, wanted: dict[str, object], numbers: list[int]
) -> None:
    found = view.listed({"wanted": wanted})
    assert [row["number"] for row in found["rows"]] == numbers
    assert found["matching"] == len(numbers) and found["total"] == 3


def test_every_token_has_its_mask_logprob_version_and_reward(view: View) -> None:
    tokens = view.one({"number": 2})["tokens"]
    assert [token["id"] for token in tokens] == [10, 11, 12]
    assert [token["trained"] for token in tokens] == [True, True, False]
    assert [token["version"] for token in tokens] == [3, 4, None]
    assert [token["reward"] for token in tokens] == [0.0, 0.5, 0.0]
    assert all(token["logprob"] == -0.5 for token in tokens)
    with pytest.raises(ConfigError, match="no 3"):
        view.one({"number": 3})


def test_without_a_model_it_says_which_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        tokenizer_of(tmp_path, None)
