"""Experiences as JSON lines: written beside a queue, mended after a crash, dumped, read back equal,
and trained on.
"""

import asyncio
import json
import random
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from rft.buffer import experience_file
from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.progress import StepSize
from rft.config import ConfigError, ExperienceBufferConfig
from rft.ground.columns import listed
from rft.ground.experience import Experience, VersionSpan, encode
from rft.tools import buffer as tool
from tests.unit.sql_world import buffer as sql_buffer


def experience(seed: int) -> Experience:
    draw, length = random.Random(seed), 5
    made = Experience(
        tokens=[draw.randrange(2**18) for _ in range(3 + length)],
        prompt_length=3,
        action_mask=[1, 1, 0, 1, 1],
        logprobs=[-draw.random() / 3 for _ in range(length)],
        reward=draw.gauss(0, 1e-7),
        reward_outcome="ok",
        sample=seed % 2,
        versions=[VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=5)],
        task="sums/0/1",
        turn=1,
        token_rewards=[draw.random() for _ in range(length)],
        temperature=0.7,
        info={"a": [1, "ü"]},
        metrics={"x": 0.1},
    )
    made.as_columns()
    return made


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


def queue(directory: Path, copy: Path | None) -> ExperienceBuffer:
    config = ExperienceBufferConfig(path=str(copy) if copy else None)
    return ExperienceBuffer(config, str(directory), 2, 2, None, None)


async def store(buffer: object, seeds: range) -> list[list[Experience]]:
    groups = []
    for seed in seeds:
        number = await buffer.admit("e", b"t", {})  # type: ignore[attr-defined]
        rows = [experience(2 * seed), experience(2 * seed + 1)]
        await buffer.put(number, encode(rows))  # type: ignore[attr-defined]
        groups.append([msgspec.structs.replace(row, group=number, timeline=1) for row in rows])
    return groups


def test_a_copy_is_read_back_equal_and_trains_as_the_queue_does(tmp_path: Path) -> None:
    async def test() -> None:
        buffer = queue(tmp_path / "journal", tmp_path / "copy.jsonl")
        await buffer.attach_trainer(0, 1)
        groups = await store(buffer, range(5))
        assert list(experience_file.read(tmp_path / "copy.jsonl")) == groups
        source = experience_file.ExperienceFile(str(tmp_path / "copy.jsonl"), StepSize(2), None)
        for step in range(2):
            assert source.take(step).experiences == opened(await buffer.take(step)).experiences
        assert source.take(2) == msgspec.structs.replace(source.take(0), step=2), (
            "an epoch has whole steps only"
        )
        assert (
            experience_file.ExperienceFile(str(tmp_path / "copy.jsonl"), StepSize(2), 2)
            .take(2)
            .experiences
            == []
        )
        await buffer.shutdown()

    run(test)


@pytest.mark.parametrize("lost", [0, 1, 200, 5000, 10**6])
def test_what_a_crash_left_out_of_the_copy_is_mended(tmp_path: Path, lost: int) -> None:
    async def test() -> None:
        path = tmp_path / "copy.jsonl"
        buffer = queue(tmp_path / "journal", path)
        await buffer.attach_trainer(0, 1)
        groups = await store(buffer, range(6))
        await buffer.shutdown()
        whole = path.read_bytes()
        path.write_bytes(whole[: max(0, len(whole) - lost)])
        buffer = queue(tmp_path / "journal", path)
        groups += await store(buffer, range(6, 8))
        await buffer.shutdown()
        assert list(experience_file.read(path)) == groups

    run(test)


def test_dump_writes_what_a_journal_or_a_database_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path / 'b.db'}"

    async def test() -> list[list[list[Experience]]]:
        found = []
        journal = queue(tmp_path / "run" / "buffer" / "experience_buffer", None)
        (tmp_path / "run" / "supervisor.log").touch()  # every run has one
        shared = sql_buffer(url)
        await shared.attach_explorer("e")
        for buffer in (journal, shared):
            await buffer.attach_trainer(0, 1)
            found.append(await store(buffer, range(3)))
            await buffer.take(0)
            await buffer.shutdown()
        return found

    expected = asyncio.run(test())
    out = tmp_path / "out.jsonl"
    for source, groups in zip((str(tmp_path / "run"), url), expected, strict=True):
        assert tool.main(["dump", source, "-o", str(out)]) == 0
        assert list(experience_file.read(out)) == groups
    assert capsys.readouterr().out.count("3 groups") == 2
    assert tool.main(["dump", url, "-o", str(out), "--name", "other"]) == 1
    assert "no buffer other: it has experience_buffer" in capsys.readouterr().err
    assert tool.main(["dump", f"{url}x", "-o", str(out)]) == 1
    assert "b.dbx: there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "b.dbx").exists(), "who reads makes nothing"
    sqlite3.connect(tmp_path / "b.dbx").executescript("create table mine (a)")
    assert tool.main(["dump", f"{url}x", "-o", str(out)]) == 1
    assert "no run has stored anything there" in capsys.readouterr().err
    found = sqlite3.connect(tmp_path / "b.dbx").execute("select name from sqlite_master")
    assert found.fetchall() == [("mine",)]


@pytest.mark.parametrize(
    ("source", "output", "why"),
    [
        ("nowhere", "a.jsonl", "no run with a queue"),
        (".", "a.txt", "ends in .jsonl"),
        ("postgresql://me:sesame@127.0.0.1:1/a", "a.jsonl", "cannot be used"),
        ("oracle://a", "a.jsonl", "storage_type=sql needs"),
    ],
)
def test_dump_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, output: str, why: str
) -> None:
    assert tool.main(["dump", source, "-o", str(tmp_path / output)]) == 1
    said = capsys.readouterr().err
    assert why in said and said.startswith("rft buffer: ") and "sesame" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": "a"}, "no experience"),
        ({"prompt_length": 8}, "prompt_length=8 of 8 tokens"),
        ({"action_mask": [1]}, "action_mask has 1 numbers for 5"),
        ({"logprobs": [0.0]}, "logprobs has 1 numbers for 5"),
        ({"reward": None}, "no experience"),
        ({"token_rewards": [1e999] * 5}, "no experience"),
        ({"tokens": None}, "no experience"),
    ],
)
def test_a_line_that_cannot_be_trained_on_is_refused_with_its_number(
    tmp_path: Path, change: dict[str, object], why: str
) -> None:
    good = json.loads(msgspec.json.encode(experience(1), enc_hook=listed))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(
        ConfigError, match=r"experience_buffer\.path: .*a\.jsonl, line 2: "
    ) as refused:
        experience_file.count_steps(path, StepSize(1))
    assert why in str(refused.value)
    path.write_bytes(b"\xff\xfe not text\n")
    with pytest.raises(ConfigError, match="line 1: no experience"):
        experience_file.count_steps(path, StepSize(1))


def test_tokens_without_log_probabilities_are_refused_where_something_compares(
    tmp_path: Path,
) -> None:
    """They would be taken for 0: tokens that were sure."""
    good = json.loads(msgspec.json.encode(experience(1), enc_hook=listed))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"logprobs": []}) + "\n")
    assert experience_file.count_steps(path, StepSize(1))[1] == 1
    with pytest.raises(ConfigError, match="line 2: no logprobs of its 5 tokens"):
        experience_file.count_steps(path, StepSize(1), sampled=True)
    untrained = good | {"logprobs": [], "action_mask": [0] * 5}
    path.write_text(json.dumps(good) + "\n" + json.dumps(untrained) + "\n")
    assert experience_file.count_steps(path, StepSize(1), sampled=True)[1] == 1
