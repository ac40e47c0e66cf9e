"""The `rft` command about itself: its help, its completion in a real shell, and what it says of a
key.
"""

import importlib
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft import cli
from rft.config.keys import tables
from rft.ground.errors import ConfigError
from rft.tools import COMMANDS, completion, explain
from rft.tools import config as config_tool
from rft.tools.explain import in_full, stages

WORDS = [word for group in COMMANDS.values() for word in group]


def rft(*words: str, **more: str) -> "subprocess.CompletedProcess[str]":
    code = "from rft.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", more.pop("before", "") + code, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **more},
    )


def test_help_is_an_answer_and_has_every_word() -> None:
    done = rft("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: rft COMMAND")
    assert {*re.findall(r"^  rft ([\w-]+)", done.stdout, re.MULTILINE)} == {*WORDS, "config"}
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 120
    assert {*cli.TOOLS} == {*WORDS} - {"train"}
    assert rft("--version").stdout.startswith("rft 0.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "usage: rft COMMAND"),
        (("chekpt",), "did you mean `rft ckpt`?"),
        (("zzz",), "`zzz`; `rft --help`"),
    ],
)
def test_a_word_that_there_is_not(words: tuple[str, ...], said: str) -> None:
    done = rft(*words)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--help",), ("config", "--all")])
def test_a_reader_that_has_seen_enough_is_no_error(words: tuple[str, ...]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    code = "from rft.cli import main; main()"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (cli.CLOSED, "")


def test_every_tool_answers_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for module in cli.TOOLS.values():
        try:
            code = importlib.import_module(f"rft.tools.{module}").main(["--help"])
        except SystemExit as end:
            code = end.code
        assert not code and "usage: rft" in capsys.readouterr().out, module


def test_a_missing_package_is_named() -> None:
    """Help needs none, `rft config` a few small ones."""
    blocked = (
        "import sys\n"
        "class Lacking:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in {0!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
        "sys.meta_path.insert(0, Lacking())\n"
    )
    heavy = {"torch", "transformers", "ray", "vllm", "megatron", "msgspec", "xxhash", "pyarrow"}
    done = rft("config", "experiment=quickstart", before=blocked.format(heavy))
    assert done.returncode == 0 and "name: quickstart" in done.stdout
    assert (
        rft(
            "--help", before=blocked.format({*heavy, "hydra", "omegaconf", "pydantic", "yaml"})
        ).returncode
        == 0
    )
    said = rft("config", "--explain", "trainer.grad_clip", before=blocked.format({"numpy"})).stdout
    assert said.startswith("trainer.grad_clip: ") and "has no package `numpy`" in said
    lacking = rft("config", "experiment=quickstart", before=blocked.format({"hydra"}))
    assert lacking.returncode == 1 and "wants the package `hydra`" in lacking.stderr
    assert "Traceback" not in lacking.stderr


# --- completion -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bash", "zsh"])
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    if not shutil.which(request.param):
        pytest.skip(f"there is no {request.param} here")
    place = tmp_path_factory.mktemp(request.param)
    (place / "script").write_text(completion.script(request.param), encoding="utf-8")
    (place / "a_model").mkdir()
    yield request.param, place


def completed(shell: tuple[str, Path], line: str) -> list[str]:
    """What the shell's own function answers, as the shell hands the line to it."""
    name, place = shell
    ask = '_rft; printf "%s\\n" "${COMPREPLY[@]}"'
    if name == "zsh":
        ask = f"autoload -U compinit && compinit -D; . ./script; emulate sh -c '{ask}'"
    else:
        ask = f". ./script; {ask}"
    done = subprocess.run(
        [name, *(["-f"] if name == "zsh" else ["--norc"]), "-c", ask],
        cwd=place,
        env={**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def test_a_shell_completes(shell: tuple[str, Path]) -> None:
    # bash has cut the word at its last `=` already, zsh has not
    stem = "" if shell[0] == "bash" else "experiment="
    assert completed(shell, "rft en") == ["engines", "environment"]
    assert completed(shell, "rft ckpt ver") == ["verify"]
    assert "--tensors" in completed(shell, "rft ckpt show --")
    assert completed(shell, "rft engines runs/x --a") == ["--add"]
    assert completed(shell, "rft train experim") == ["experiment="]
    assert completed(shell, "rft train experiment=quick") == [
        f"{stem}quickstart",
        f"{stem}quickstart_moe",
    ]
    assert "trainer.total_steps=" in completed(shell, "rft train experiment=grpo trainer.to")
    found = completed(shell, "rft config trainer.dtype=")
    assert [one.rpartition("=")[2] for one in found] == ["fp32", "bf16", "auto"]
    assert completed(shell, "/usr/bin/rft completion z") == ["zsh"]
    for line in ("rft train model.model_path=a_", "rft train --config a_"):
        paths = completed(shell, line)  # which bash completes itself
        assert [one.rpartition("=")[2] for one in paths] == ["a_model"] * (shell[0] == "zsh")


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("rft report ru", "rft report runs/"),
        ("rft view one", r"rft view one\ two.jsonl"),
        ("rft train model.model_path=ru", "rft train model.model_path=runs/"),
        ("rft train --config pl", "rft train --config plain.yaml"),
        ("rft config experiment=quickstart_", "rft config experiment=quickstart_moe"),
    ],
)
def test_bash_completes_what_is_typed(typed: str, becomes: str, tmp_path: Path) -> None:
    """On a terminal, by readline."""
    (tmp_path / "runs" / "rft").mkdir(parents=True)
    for name in ("one two.jsonl", "plain.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "script").write_text(completion.script("bash"), encoding="utf-8")
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        cwd=tmp_path,
        env=os.environ | {"PS1": "ready>", "TERM": "dumb"},
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    try:
        heard = until(terminal, "ready>")
        os.write(terminal, b". ./script; PS1=again\\>\n")
        heard = until(terminal, "again>", heard)
        os.write(terminal, f"{typed}\t".encode())
        assert becomes in until(terminal, becomes, heard)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def until(terminal: int, wanted: str, heard: str = "") -> str:
    """What it says until then, or in half a minute."""
    while wanted not in heard and select.select([terminal], [], [], 30.0)[0]:
        heard += os.read(terminal, 4096).decode()
    return heard


# --- one key --------------------------------------------------------------------------------------


def explained(key: str, *words: str) -> str:
    return explain.explained(key, config_tool.composed([*words]))


def test_what_is_said_of_a_key() -> None:
    said = explained("trainer.dtype", "device=cpu")
    assert "fp32 | bf16 | auto, or null; default null" in said
    assert "here: fp32 (cpu): fp32 agrees with the engines to 1e-4" in said
    assert "here: bf16, which these words say" in explained("trainer.dtype", "trainer.dtype=bf16")
    assert "here: bf16 (cuda): " in explained("trainer.dtype", "device=cuda")
    lr = explained("algorithm.optimizer.lr")
    assert "Trinity-RFT 0.6.0: the same name and meaning" in lr and "> 0; default 1e-06" in lr
    assert "veRL: actor_rollout_ref.actor.optim.lr (default there 1e-06)" in lr
    kept = explained("explorer.runner_per_model")
    assert "default there 8, and by the device here" in kept
    assert "veRL, these together: data.train_batch_size" in explained("buffer.batch_size")
    both = explained("trainer.total_steps", "experiment=quickstart")
    assert "in stage sft_warmup: 500" in both and "in stage rft: 200" in both


def test_every_key_can_be_explained() -> None:
    found = stages(config_tool.composed(["experiment=quickstart"]))
    for _, table in tables():
        for one in table:
            assert in_full(one, found).startswith(f"{one.key}: ")


def test_a_key_that_there_is_not() -> None:
    for key, said in (
        ("batch_size", "did you mean `buffer.batch_size`? Others like it: buffer.train_batch_size"),
        ("actor_rollout_ref.actor.optim.lr", "a key of veRL: set algorithm.optimizer.lr"),
        ("algorithm.optimizer.clip_grad", "trainer.grad_clip"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            explained(key)
