"""`rft chat`: which model is meant, and a conversation with a real (small, random) one."""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rft.tools import chat, ckpt, toy
from rft.tools.places import InputError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "toy"
    toy.write_model(directory, seed=0)
    return directory


def talked(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return chat.main([*words, "--max-tokens", "4"])


def test_a_conversation_and_a_new_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, answer = list[list[str]](), chat.answer

    def noted(model: Any, tokenizer: Any, turns: list[dict[str, str]], asked: Any) -> str:
        given.append([turn["content"] for turn in turns])
        return answer(model, tokenizer, turns, asked)

    monkeypatch.setattr(chat, "answer", noted)
    assert talked(monkeypatch, "1+2\n\n3+4\n5+6\n", str(model)) == 0
    said = capsys.readouterr().out.splitlines()
    assert given == [["1+2"], ["3+4"], ["3+4", said[1], "5+6"]] and said[0]


def test_the_newest_export_or_that_of_a_step_is_meant(tmp_path: Path) -> None:
    for step in (2, 10):
        made = tmp_path / "rft" / "one" / "huggingface" / f"step_{step:08d}"
        made.mkdir(parents=True)
    (made.parent / ".step_00000011.tmp").mkdir()
    assert chat.find_model(str(tmp_path)) == chat.find_model(f"{tmp_path}@10") == made
    assert chat.find_model(f"{made.parents[1]}@2").name == "step_00000002"
    with pytest.raises(InputError, match=r"no export of step 3; there are \[2, 10\]"):
        chat.find_model(f"{tmp_path}@3")
    shutil.copytree(tmp_path / "rft" / "one", tmp_path / "rft" / "two")
    with pytest.raises(InputError, match="holds 2 runs, give one: "):
        chat.find_model(str(tmp_path))


def test_what_is_no_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talked(monkeypatch, "", str(tmp_path)) == 1
    advised = re.search("`rft ckpt (export .*?)`", capsys.readouterr().err)
    assert advised and ckpt._parser().parse_args(advised[1].split()).to == "hf"
    assert talked(monkeypatch, "", str(tmp_path / "nowhere")) == 1
    assert "nowhere: no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_that_cannot_be_read_is_named(
    name: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / name).write_text("{")
    assert talked(monkeypatch, "", str(broken)) == 1
    assert capsys.readouterr().err.startswith(f"rft chat: {broken} cannot be read: ")


@pytest.mark.parametrize("words", [("--max-tokens", "0"), ("--temperature", "-1")])
def test_numbers_that_mean_nothing(model: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        chat.main([str(model), *words])
