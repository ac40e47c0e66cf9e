"""`rft view` shows what is stored: from a queue that is in use, from a file, token by token."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from rft.buffer.journal import Journal
from rft.buffer.progress import Stored
from rft.buffer.store import read_experiences
from rft.config import ConfigError
from rft.ground.columns import listed
from rft.ground.experience import Experience, VersionSpan, encode
from rft.tools import local_page, toy
from rft.tools import view as view_tool
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


@pytest.mark.parametrize("cut_at", [(-1,), (0,), (20,), (0, 1), (-1, 15, 40)])
def test_a_queue_that_is_cut_while_it_is_read_gives_each_group_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_at: tuple[int, ...]
) -> None:
    """`cut_at`: after so many groups; -1: between two looks at the directory."""
    queue, places, found = tmp_path / "buffer" / "queue", dict[int, int](), list[int]()
    journal, look = Journal(queue, segment_bytes=600), Path.glob

    def stored(group: int) -> bytes:
        return encode(Stored(group=group, experiences=encode([made(0.5, [8])])))

    def store(count: int) -> None:
        for group in range(len(places), len(places) + count):
            places[group] = journal.position
            journal.append([stored(group)])

    def cut() -> None:
        """What lies before some file: of that every second group stays."""
        end = journal.cut(journal.position)
        assert end is not None
        old = [group for group, at in places.items() if 0 <= at < end]
        journal.install(journal.write_base(end, map(stored, old[::2])))
        places.update({group: -1 for group in old[1::2]})
        store(10)

    def looked(path: Path, pattern: str) -> list[Path]:
        there = list(look(path, pattern))
        if path == queue and -1 in pending:
            pending.remove(-1)
            cut()
        return there

    pending = list(cut_at)
    store(60)
    monkeypatch.setattr(Path, "glob", looked)
    for one in read_experiences(tmp_path):
        found.append(one.group)
        if len(found) - 1 in pending:
            pending.remove(len(found) - 1)
            cut()
    journal.close()
    assert not pending and len(found) == len(set(found))
    needed = {group for group, at in places.items() if at >= 0 and group < 60}
    assert set(found) >= needed and len(needed) < 40


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


def test_a_logprob_that_is_no_number_is_told(assets: Path) -> None:
    """Somebody looks for the reason of a loss that is not finite."""
    found = [made(1.0, [8, 9, 10], logprobs=[-math.inf, math.nan, -0.5])]
    one = View(found, tokenizer_of(assets, str(assets / "model"))).one({"number": 0})
    assert [token["logprob"] for token in one["tokens"]] == ["-inf", "nan", -0.5]
    json.dumps(one, allow_nan=False)


def test_without_a_model_it_says_which_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        tokenizer_of(tmp_path, None)


@pytest.mark.parametrize("text", ["model: [", "model: {model_path: 5"])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "resolved.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"resolved\.yaml cannot be read: "):
        tokenizer_of(tmp_path, None)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    toy.write_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="--model: .* has no tokenizer that can be read"):
        tokenizer_of(tmp_path, str(tmp_path))


def test_a_port_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    for port in (-1, 65536):
        assert local_page.serve("rft view", port, view_tool.PAGE, {}) == 2
        assert f"port {port}: there are 0 to 65535; give" in capsys.readouterr().err
