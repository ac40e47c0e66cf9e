"""`rft init`: what it writes for each kind of answer, what it refuses, and that a refusal leaves
nothing.

tests/verify/test_init_runs.py starts what it writes.
"""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft import config as configs
from rft import preflight
from rft.config import Config
from rft.ground.shipped import shipped
from rft.tools import init
from rft.tools.config import composed
from rft.tools.init_files import REWARDS
from rft.tools.toy import write_model

ROWS = [{"question": "What is 7 * 8?", "answer": "56"}, {"question": "15 % of 80?", "answer": 12}]


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    place = tmp_path / "assets"
    write_model(place / "model", hidden=16, layers=1, heads=1, kv_heads=1, head_dim=16, ffn=16)
    (place / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), "utf-8")
    return place


def answered(assets: Path, **others: str) -> list[str]:
    """Options of a whole set of answers."""
    given = {
        "model": str(assets / "model"),
        "data": str(assets / "tasks.jsonl"),
        "reward": "own",
        "machine": "here",
        "hours": "0.5",
    } | others
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def begun(place: Path, *words: str) -> Path:
    assert init.main([str(place), *words]) == 0
    return place


def config_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """As a start in that directory reads it; everything a look at it can refuse is looked at."""
    monkeypatch.chdir(place)
    drafts = configs.stage_drafts(composed(["--config", "config.yaml", "device=cpu"]))
    preflight.prepare(drafts, at_start=False)
    return drafts[0].config


def test_what_is_written_is_a_run(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    place = begun(tmp_path / "first", *answered(assets))
    assert f"pytest {place}" in capsys.readouterr().out
    config = config_of(place, monkeypatch)
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None and taskset.path == str(assets / "tasks.jsonl")
    assert (taskset.format.prompt_key, taskset.format.response_key) == ("question", "answer")
    assert config.name == "first" and config.model.model_path == str(assets / "model")
    assert config.model.max_prompt_tokens == config.model.max_response_tokens == 128
    assert taskset.default_reward_fn_type == "rewards.py:reward"
    assert not list(tmp_path.glob(".*")), "the draft is gone"
    assert os.access(place / "run.sh", os.X_OK)
    assert "timeout --foreground --signal=TERM 0.5h" in (place / "run.sh").read_text("utf-8")


IN_FULL = [
    name if name in ("own", "math") else pytest.param(name, marks=pytest.mark.verify)
    for name in REWARDS
]


@pytest.mark.parametrize("reward", IN_FULL)
def test_its_reward_test_passes_and_can_fail(reward: str, assets: Path, tmp_path: Path) -> None:
    place = begun(tmp_path / "first", *answered(assets, reward=reward))
    assert passes(place)
    text = (place / "rewards.py").read_text("utf-8")
    (place / "rewards.py").write_text(text.replace("return {", "return {} and {"), "utf-8")
    assert not passes(place)


def passes(place: Path) -> bool:
    root = {"PYTHONPATH": str(shipped("launch").parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(place)]
    return subprocess.run(command, env=os.environ | root, capture_output=True).returncode == 0


def test_defaults_make_a_model_and_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = begun(tmp_path / "toys", "--yes", "--machine", "here")
    config = config_of(place, monkeypatch)
    assert (place / config.model.model_path / "model.safetensors").is_file()
    (held_out,) = config.buffer.explorer_input.eval_tasksets
    assert held_out.name == "held_out" and config.explorer.eval_interval == 25
    (tmp_path / "empty").mkdir()
    begun(tmp_path / "empty", "--yes", "--machine", "here")


def test_chat_messages_and_hubs(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"role": "user", "content": "What is 7 * 8?"}]
    (assets / "chat.json").write_text(json.dumps([{"messages": chat, "response": "56"}]), "utf-8")
    place = begun(tmp_path / "chat", *answered(assets, data=str(assets / "chat.json")))
    taskset = config_of(place, monkeypatch).buffer.explorer_input.taskset
    assert taskset is not None and taskset.format.prompt_type == "messages"
    hub = begun(tmp_path / "hub", *answered(assets, model="org/name@main", data="org/rows"))
    written = yaml.safe_load((hub / "config.yaml").read_text("utf-8"))
    assert written["model"]["model_path"] == "org/name@main"
    assert written["buffer"]["explorer_input"]["taskset"] == {"path": "org/rows"}


# --- machines -------------------------------------------------------------------------------------


def stand_in(place: Path, name: str, prints: str = "") -> None:
    """A program that tells how it was called."""
    place.mkdir(exist_ok=True)
    said = f"printf '%s\\n' {shlex.quote(prints)}" if prints else 'printf "%s\\n" "$PWD" "$@"'
    (place / name).write_text(f"#!/bin/sh\n{said}\n", "utf-8")
    (place / name).chmod(0o755)


def test_slurm_where_it_answers(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    stand_in(tmp_path / "bin", "sbatch")
    (tmp_path / "bin" / "sinfo").symlink_to("/bin/false")  # installed, and no cluster behind it
    assert init.machine_here() == "here"
    (tmp_path / "bin" / "sinfo").unlink()
    stand_in(tmp_path / "bin", "sinfo", "gpu:h100:8(S:0-1)\n(null)")
    assert init.machine_here() == "slurm"
    place = begun(tmp_path / "job", *answered(assets, machine="slurm"))
    done = subprocess.run([place / "run.sh", "seed=1"], capture_output=True, text=True, check=True)
    where, *words = done.stdout.split()
    assert where == str(place)
    script = str(shipped("launch") / "slurm.sh")
    assert words == [
        *("--nodes=1", "--time=0:30:00", "--job-name=job", "--gpus-per-node=8"),
        *(script, "--config", "config.yaml", "seed=1"),
    ]


def test_torchrun_starts_its_script(assets: Path, tmp_path: Path) -> None:
    place = begun(tmp_path / "ranks", *answered(assets, machine="torchrun"))
    stand_in(tmp_path / "bin", "python")
    environment = {**os.environ, "PYTHON": str(tmp_path / "bin" / "python"), "RANKS": "2"}
    done = subprocess.run([place / "run.sh"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    where, *words = done.stdout.split()
    assert where == str(place) and "--nproc-per-node=2" in words
    assert words[-3:] == ["trainer.num_ranks=2", "--config", "config.yaml"]


def test_pods_have_the_files_of_the_run(assets: Path, tmp_path: Path) -> None:
    paths = {"model": "/runs/model", "data": "/runs/tasks.jsonl", "machine": "kubernetes"}
    place = begun(tmp_path / "My_Run", *answered(assets, **paths))
    parts = [
        part
        for file in ("trainer.yaml", "engines.yaml")
        for part in yaml.safe_load_all((place / file).read_text("utf-8"))
    ]
    pods = [part["spec"]["template"]["spec"] for part in parts if "template" in part["spec"]]
    assert len(pods) == 2
    for pod in pods:
        assert {"name": "job", "configMap": {"name": "rft-my-run"}} in pod["volumes"]
        assert {"name": "job", "mountPath": "/job"} in pod["containers"][0]["volumeMounts"]
    (job,) = (part["spec"] for part in parts if part["kind"] == "Job")
    assert job["activeDeadlineSeconds"] == 1800
    words = job["template"]["spec"]["containers"][0]["args"]
    assert words == ["--config", "/job/config.yaml", "trainer.num_ranks=8"]
    written = yaml.safe_load((place / "config.yaml").read_text("utf-8"))
    reward = written["buffer"]["explorer_input"]["default_reward_fn_type"]
    assert reward == "/job/rewards.py:reward"
    script = (place / "run.sh").read_text("utf-8")
    subprocess.run(["bash", "-n", place / "run.sh"], check=True)
    assert "create configmap rft-my-run --from-file=config.yaml --from-file=rewards.py" in script


# --- refusals -------------------------------------------------------------------------------------


def test_what_is_there_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    (place / "notes").write_text("mine", "utf-8")
    before = place.stat().st_mtime_ns
    for there in (place, place / "notes"):
        assert init.main([str(there), "--yes"]) == 2
        assert "is there already" in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == ["notes"]
    assert (place / "notes").read_text("utf-8") == "mine" and place.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_all_that_is_wrong_is_said_at_once(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (assets / "odd.jsonl").write_text('{"text": "a", "answer": "b"}\n', "utf-8")
    wrong = {
        "model": str(assets),
        "data": str(assets / "odd.jsonl"),
        "reward": "mathh",
        "machine": "slurn",
        "hours": "-1",
    }
    assert init.main([str(tmp_path / "a b"), *answered(assets, **wrong)]) == 2
    said = capsys.readouterr().err
    assert "6 problems" in said
    for part in (
        "its name is that of the run",
        "has no config.json",
        "no column is a prompt: there are text, answer",
        "did you mean `math`",
        "did you mean `slurm`",
        "--hours -1: give a number",
    ):
        assert part in said
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "/none"}, "--model /none: does not exist"),
        ({"data": "none.jsonl"}, "refused: --data: none.jsonl does not exist"),
        ({"reward": "none"}, "--reward none: is unknown; there are own"),
        ({"hours": "nan"}, "--hours nan"),
        ({"machine": "kubernetes", "model": "toy"}, "--model toy: pods do not see it"),
    ],
)
def test_an_answer_that_cannot_be_used(
    wrong: dict[str, str], said: str, assets: Path, tmp_path: Path, capsys: Any
) -> None:
    assert init.main([str(tmp_path / "new"), *answered(assets, **wrong)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_data_that_cannot_be_read(assets: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("torn.jsonl", "torn.json", "torn.csv", "torn.parquet"):
        (tmp_path / name).write_text('{"question": "1+1", "ans')
        words = answered(assets, data=str(tmp_path / name))
        assert init.main([str(tmp_path / "new"), *words]) == 2, name
        said = capsys.readouterr().err
        assert "refused: --data" in said and name in said
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_made(assets: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    assert init.main([str(tmp_path / "file" / "new"), *answered(assets)]) == 2
    assert "name a directory that can be written" in capsys.readouterr().err


def test_a_directory_that_is_there_stays_the_same_one(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may be in it; a link to it stays one."""
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    before = (tmp_path / "here").stat().st_ino
    monkeypatch.chdir(tmp_path / "here")
    begun(Path(), *answered(assets))
    files = sorted(path.name for path in Path().iterdir())
    assert files == ["config.yaml", "rewards.py", "run.sh", "test_rewards.py"]
    assert (tmp_path / "here").stat().st_ino == before
    assert 'name: "here"' in Path("config.yaml").read_text("utf-8")
    for path in Path().iterdir():
        path.unlink()
    begun(tmp_path / "link", *answered(assets))
    assert (tmp_path / "link").is_symlink() and Path("run.sh").exists()


@pytest.mark.parametrize("name", ["0x10", "1e5", "null", "true", "1_000"])
def test_a_name_stays_what_it_is(
    name: str, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config_of(begun(tmp_path / name, *answered(assets)), monkeypatch).name == name


def test_what_a_start_would_refuse_is_refused_here(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that the first ones do not show, and a model of another kind."""
    with (assets / "tasks.jsonl").open("a", encoding="utf-8") as rows:
        rows.write('{"question": "and this?"}\n')
    told = json.loads((assets / "model" / "config.json").read_text("utf-8"))
    told |= {"model_type": "bert", "architectures": ["BertModel"]}
    (assets / "model" / "config.json").write_text(json.dumps(told), "utf-8")
    assert init.main([str(tmp_path / "new"), *answered(assets)]) == 2
    said = capsys.readouterr().err
    assert "line 3 has no 'answer'" in said and "BertModel" in said
    assert [path.name for path in tmp_path.iterdir()] == ["assets"]


# --- questions ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_questions_are_asked_and_asked_again(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    said = [str(assets / "model"), str(assets / "tasks.jsonl"), "mat", "here", "", "math"]
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in said)))
    place = begun(tmp_path / "talked")
    told = capsys.readouterr()
    assert "--reward mat: is unknown; did you mean `math`" in told.err
    assert told.out.count("[8]") == 1 and told.out.count("[own]") == 2
    assert "rft's own `math`" in (place / "rewards.py").read_text("utf-8")
    monkeypatch.setattr(sys, "stdin", Terminal("org/name\n"))  # and then nothing more
    assert init.main([str(tmp_path / "left")]) == 130
    assert not (tmp_path / "left").exists()


def test_nobody_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert init.main([str(tmp_path / "new"), "--model", "toy"]) == 2
    said = capsys.readouterr().err
    assert "--data, --reward, --machine, --hours: not said" in said
