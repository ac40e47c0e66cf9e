"""Secrets: found by the names of variables and keys, and
absent from everything that a run writes.
"""

import argparse
import asyncio
import errno
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft import config as configs
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import Config, ConfigError, ExperienceBufferConfig, MonitorConfig, known_keys
from rft.data.taskset import for_journal, from_journal
from rft.extras import sweep
from rft.extras.sweep import trial_records
from rft.ground import redact
from rft.ground.experience import Sampling, Task
from rft.monitor import logs, sinks, trace
from rft.rollout.explorer import one_line
from rft.tools import report, sweep_report, timeline, toy
from rft.tools.places import InputError, find_run
from rft.tools.view import tokenizer_of

SECRETS = {
    "WANDB_API_KEY": "planted-wandb-0001",
    "HF_TOKEN": "planted-hf-0002",
    "MLFLOW_TRACKING_PASSWORD": "planted-mlflow-0003",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+0004",
    "MY_SERVICE_SECRET": "planted-service-0005",
    "DB_PASSWORD": "planted-db-0006",
}
TEXT = "; ".join(SECRETS.values())


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def assert_clean(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    for path in files:
        data = path.read_bytes()
        for value in SECRETS.values():
            assert value.encode() not in data, f"{value} is in {path}"


def test_values_of_the_environment_are_taken_out_of_text() -> None:
    assert redact.text(f"login with {SECRETS['HF_TOKEN']}!") == f"login with {redact.HIDDEN}!"
    assert "planted" not in redact.text(TEXT)


def test_passwords_in_addresses_are_taken_out_and_the_rest_stays() -> None:
    assert redact.text("see http://me:hunter2@host:1/x") == f"see http://{redact.HIDDEN}@host:1/x"
    assert redact.text("see http://host:1/a@b") == "see http://host:1/a@b"


@pytest.mark.parametrize(
    "name",
    [
        *("GITHUB_PAT", "DB_PASS", "SMTP_PWD", "KEYFILE_PASSPHRASE", "SLACK_WEBHOOK_URL"),
        *("AZURE_STORAGE_CONNECTION_STRING", "AWS_ACCESS_KEY_ID", "SENTRY_DSN", "DATABASE_URL"),
    ],
)
def test_variables_are_known_by_their_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "correct horse battery")
    assert redact.text("x correct horse battery y") == f"x {redact.HIDDEN} y"


@pytest.mark.parametrize(
    ("line", "hidden"),
    [
        ("postgresql://rft:p@ss/word@db.example/rft", "p@ss"),
        ("postgresql://rft:s3cr3t@db/rft", "s3cr3t"),
        ("redis://:only_pw@host", "only_pw"),
        ("s3://AKIA:SECRET@bucket/x", "SECRET"),
        ("postgresql+psycopg://db/rft?user=rft&password=hunter2", "hunter2"),
        ("GET https://api/x?api_key=sk-123456789&x=1", "sk-123456789"),
        ("Authorization: Bearer sk-ant-abcdefghijklmnop", "sk-ant"),
        ("{'Authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
        ("authorization=plain-words-1", "plain-words-1"),
        ("curl -H 'authorization: bearer abc.def-123'", "abc.def-123"),
        ("AccountName=x;AccountKey=QUJDREVGR0g=;EndpointSuffix=y", "QUJDREVGR0g"),
        ("Server=a;Pwd=letmein99;", "letmein99"),
        ("https://hooks.slack.com/services/T000/B000/XXXXsecret", "XXXXsecret"),
        ("https://discord.com/api/webhooks/123/abcdef", "abcdef"),
    ],
)
def test_secrets_are_known_by_their_form(line: str, hidden: str) -> None:
    found = redact.text(f"before {line} behind")
    assert hidden not in found and found.startswith("before ") and found.endswith(" behind")


@pytest.mark.parametrize(
    "line",
    [
        "see http://host:1/a@b",
        "max_tokens=4096 eos_token=151643 stop_token=end_of_turn",
        "the bearer of this letter, bearer certificates",
        "reward_fn_key=answer_of_it format.prompt_key=question",
        "password=${oc.env:DB_PASSWORD} token=5",
        "key=value_of_it secretary=somebody",
        "https://hub.example/webhooks",
    ],
)
def test_what_only_looks_like_it_stays(line: str) -> None:
    assert redact.text(line) == line


def test_records_hide_lists_numbers_and_other_keys() -> None:
    found = {
        "openai_key": "plain-1",
        "auth": "x1",
        "headers": {"Authorization": "x2"},
        "token": ["a-secret", "b-secret"],
        "password": 12345678,
        "pass_rate": 0.5,
        "tokens": [1, 2],
        "connection_string": "",
    }
    hidden = redact.HIDDEN
    assert redact.record(found) == found | {
        "openai_key": hidden,
        "auth": hidden,
        "headers": {"Authorization": hidden},
        "token": [hidden, hidden],
        "password": hidden,
    }


def test_short_values_and_other_names_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "abc")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("KEYBOARD", "qwertz")
    assert redact.text("abc false qwertz") == "abc false qwertz"


def test_records_lose_what_their_keys_say() -> None:
    found = redact.record(
        {"api_key": "short", "rows": [{"text": TEXT, "tokens": 3}], "max_tokens": 8, "password": ""}
    )
    assert (
        found["api_key"] == redact.HIDDEN
        and found["rows"][0]["tokens"] == 3
        and found["max_tokens"] == 8
    )
    assert found["password"] == "" and "planted" not in json.dumps(found)


def test_no_key_of_the_schema_is_taken_for_a_secret() -> None:
    assert [key for key in known_keys() if redact.is_secret_key(key.rsplit(".", 1)[-1])] == []


def test_a_secret_of_the_config_reaches_the_processes_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("MONITOR_MONITOR_ARGS_API_KEY", "ALGORITHM_ADVANTAGE_FN_ARGS_PLACE"):
        monkeypatch.setenv(redact.PASSED_ON + key, "")  # taken back after the test
    config = Config(name="x")
    config.model.model_path = "m"
    config.monitor.monitor_args = {"api_key": "only-in-the-config", "base_url": "http://x"}
    config.algorithm.advantage_fn_args = {
        "place": f"https://host/?key={SECRETS['DB_PASSWORD']}",
        "token": SECRETS["HF_TOKEN"],
    }
    configs.save(config, tmp_path / "resolved.yaml")
    text = (tmp_path / "resolved.yaml").read_text()
    assert "only-in-the-config" not in text and "planted" not in text
    assert "${oc.env:HF_TOKEN}" in text, "one that has a variable already needs no second one"
    assert configs.load(tmp_path / "resolved.yaml") == config
    assert redact.inherited()["RFT_SECRET_MONITOR_MONITOR_ARGS_API_KEY"] == "only-in-the-config"
    assert redact.text("only-in-the-config") == redact.HIDDEN, (
        "and is a secret like all others from now on"
    )


def test_the_journal_has_none_and_a_task_that_runs_again_has_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One given as a variable, one that only the config had, and one
    in the message of a task that failed.
    """
    only, variable = "only-in-the-config-0007", f"{redact.PASSED_ON}BUFFER_TOKEN"
    monkeypatch.setenv(variable, only)  # as `configs.save` passes it on
    args = {"api_key": SECRETS["HF_TOKEN"], "token": only, "more": [{"url": "http://x", "n": 3}]}
    made = Task(
        id="a/0/0",
        taskset="a",
        row=0,
        prompt="1+1=",
        sampling=Sampling(),
        reward_args=args,
        workflow_args={"key": only},
    )

    def buffer() -> ExperienceBuffer:
        return ExperienceBuffer(ExperienceBufferConfig(), str(tmp_path), 2, 1, None, None)

    async def before() -> None:
        first = buffer()
        await first.attach_explorer("e")
        assert [await first.admit("e", for_journal(made), {}) for _ in range(2)] == [0, 1]
        await first.abandon(1, one_line(RuntimeError(f"401 with {SECRETS['DB_PASSWORD']}")))
        await first.shutdown()

    async def after() -> list[Task]:
        second = buffer()
        started = await second.attach_explorer("e")
        await second.shutdown()
        return [from_journal(task) for _, task in started["reissue"]]

    asyncio.run(before())
    assert_clean(tmp_path)
    assert not any(
        only.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert asyncio.run(after()) == [made]
    monkeypatch.delenv(variable)
    with pytest.raises(configs.ConfigError, match=f"{variable}, which is not set"):
        asyncio.run(after())


def test_a_process_that_lacks_the_variable_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OmegaConf.save(
        {
            "name": "x",
            "model": {"model_path": "m"},
            "monitor": {"monitor_args": {"api_key": "${oc.env:NOT_THERE}"}},
        },
        tmp_path / "resolved.yaml",
    )
    with pytest.raises(configs.ConfigError, match="NOT_THERE"):
        configs.load(tmp_path / "resolved.yaml")


def test_tools_read_a_run_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no other shell than the run's."""
    variable = "RFT_SECRET_MONITOR_MONITOR_ARGS_API_KEY"
    monkeypatch.setenv(variable, "")  # taken back after the test
    toy.write_model(tmp_path / "model")
    trial = trial_records.claim(tmp_path / "sweep", ["seed=1"])
    trial.state, trial.stages = "finished", [""]
    trial.write()
    config = Config(name="x")
    config.model.model_path, config.sweep.objective = str(tmp_path / "model"), "reward"
    config.monitor.monitor_args = {"api_key": "only-in-the-config"}
    for place in (tmp_path, trial.directory):
        configs.save(config, place / "resolved.yaml")
    monkeypatch.delenv(variable)
    tokenizer_of(tmp_path, None)
    options = argparse.Namespace(objective=None, value=None, direction=None)
    assert sweep_report.judge(tmp_path / "sweep", options).objective == "reward"
    with pytest.raises(InputError, match="no checkpoints here"):
        find_run(str(tmp_path))


def test_tools_read_a_run_of_another_version(tmp_path: Path) -> None:
    """Which has fewer keys, or more; a damaged file is refused by its name."""
    resolved = tmp_path / "resolved.yaml"
    for text in ("name: x", "{trainer: {later: 1, checkpoint: {later: 2}}, buffer: {later: 3}}"):
        resolved.write_text(text)
        with pytest.raises(InputError, match="no checkpoints here"):
            find_run(str(tmp_path))
    resolved.write_text("trainer: 3\n")
    with pytest.raises(InputError, match=r"resolved.yaml cannot be read: trainer"):
        find_run(str(tmp_path))


def test_what_python_prints_and_logs_has_none() -> None:
    stream = io.StringIO()
    redacted = logs.Redacted(stream)
    print(TEXT, file=redacted)
    redacted.writelines([TEXT, "fine"])
    handler = logging.StreamHandler(redacted)
    handler.emit(logging.LogRecord("x", logging.ERROR, "f", 1, "key %s", (TEXT,), None))
    assert "planted" not in stream.getvalue() and "fine" in stream.getvalue()


NOISY = """
import os, sys, logging, warnings, subprocess
from pathlib import Path
from rft.config import LogConfig
from rft.monitor import logs
logs.redirect(Path(sys.argv[1]), LogConfig())
text = os.environ["HF_TOKEN"]
print(text); print(text, file=sys.stderr)
logging.getLogger("x").error("%s", text); warnings.warn(text)
if len(sys.argv) > 2:
    os.write(2, b"past python: " + text.encode())
raise RuntimeError(text)
"""


def test_the_log_of_a_process_has_none_not_even_in_a_traceback(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NOISY, str(tmp_path / "part.log")], check=False)
    text = (tmp_path / "part.log").read_text()
    assert text.count(redact.HIDDEN) == 5 and "RuntimeError" in text
    assert_clean(tmp_path)


def test_what_a_library_wrote_past_python_is_overwritten_at_the_end(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NOISY, str(tmp_path / "part.log"), "past"], check=False)
    size = (tmp_path / "part.log").stat().st_size
    with pytest.raises(AssertionError):
        assert_clean(tmp_path)
    assert redact.scrub(tmp_path) == [tmp_path / "part.log"]
    assert_clean(tmp_path)
    assert (tmp_path / "part.log").stat().st_size == size and redact.scrub(tmp_path) == []


HOLDS = """
import os, sys, signal
from pathlib import Path
from rft.monitor import logs
attempt = logs.new_attempt(Path(sys.argv[1]))
os.write(os.open(attempt / "part.log", os.O_CREAT | os.O_WRONLY), os.environ["HF_TOKEN"].encode())
print("ready", flush=True)
signal.pause()
"""


def test_what_a_killed_attempt_left_is_scrubbed_at_the_next_start(tmp_path: Path) -> None:
    """And what a living one has is its own to end."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    attempts = [tmp_path / "logs" / f"attempt_{number}" for number in range(1, 5)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"ready\n"
        assert logs.new_attempt(tmp_path) == attempts[1]
        with pytest.raises(AssertionError):
            assert_clean(attempts[0])
        first.kill()
    assert logs.new_attempt(tmp_path) == attempts[2]
    assert_clean(tmp_path)
    (attempts[2] / "part.log").write_text(TEXT)
    logs.end_attempt(attempts[2])
    assert_clean(tmp_path)
    (attempts[0] / "part.log").write_text("it is not looked through again: " + TEXT)
    logs.end_attempt(logs.new_attempt(tmp_path))
    with pytest.raises(AssertionError):
        assert_clean(attempts[0])


def test_a_file_that_cannot_be_read_keeps_no_other_from_being_scrubbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A secret may lie across two parts of a file, too."""
    monkeypatch.setattr(redact, "AT_ONCE", 64)
    (tmp_path / "a.log").write_text("x" * 50 + SECRETS["HF_TOKEN"] + "y" * 90 + TEXT)
    (tmp_path / "b.log").write_text(TEXT)
    opened = Path.open

    def fails(path: Path, *mode: Any, **more: Any) -> Any:
        if path.name == "b.log":
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, *mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        assert redact.scrub(tmp_path) == [tmp_path / "a.log"]
    assert "b.log may hold secrets" in caplog.text and "Input/output error" in caplog.text
    assert redact.scrub(tmp_path) == [tmp_path / "b.log"]
    assert_clean(tmp_path)


def test_sinks_timeline_and_report_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir = logs.new_attempt(tmp_path)
    monkeypatch.setenv(trace.DIRECTORY, str(log_dir / "trace"))
    with sinks.build(MonitorConfig(), tmp_path, "p", "n", stream=io.StringIO()) as monitor:
        monitor.log({"loss": 1.0}, 1)
        monitor.table(
            "samples", [{"prompt": TEXT, "response": TEXT, "reward": 1.0, "api_key": "short"}], 1
        )
    trace.start("supervisor")
    trace.instant("ending", part="engine_0", phase="serving", cause=TEXT, signal=0)
    trace.stop()
    (tmp_path / "resolved.yaml").write_text(
        f"name: x\nmonitor:\n  monitor_args:\n    note: '{TEXT}'\n"
    )
    report.write(tmp_path)
    (tmp_path / "resolved.yaml").unlink()
    timeline.write(tmp_path)
    assert (tmp_path / "report.html").read_text().count(redact.HIDDEN) >= 3
    assert_clean(tmp_path)
    assert os.environ["HF_TOKEN"] == SECRETS["HF_TOKEN"]


@pytest.mark.parametrize(
    "argument",
    [
        "buffer.trainer_input.experience_buffer.path=postgresql://me:planted@db/rft",
        f"+monitor.monitor_args.place={SECRETS['HF_TOKEN']}",
        "+monitor.monitor_args.api_key=planted",
    ],
)
def test_a_sweep_writes_no_secret_down(argument: str) -> None:
    with pytest.raises(ConfigError, match="put this secret into the environment") as refused:
        sweep.check_arguments(["-m", argument], None)
    assert "planted" not in str(refused.value)
    key = argument.partition("=")[0]
    sweep.check_arguments(["-m", f"{key}=${{oc.env:DB_PASSWORD}}"], None)
