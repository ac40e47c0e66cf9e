"""A real run with planted secrets, a rank that is killed, and a browser that looks at its report
without a network.
"""

import json
import re
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import browser
import listening
import pytest

from rft.ground import redact
from rft.tools import report, timeline

import runs

PLANTED = {
    "WANDB_API_KEY": "planted-wandb-0123456789abcdef",
    "MY_SERVICE_TOKEN": "planted-service-0123456789",
}
IN_CONFIG = "planted-in-the-config-42"
OF_EXPLORER = "planted-for-the-explorer-77"
PLAIN = "format: {prompt_type: plaintext}"
WIDTH, HEIGHT = 1360, 2800
pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]
REWARD = '''
import os, sys

def reward(response, truth, task, api_key="", **args):
    """One that is careless with what it was given."""
    assert "WANDB_API_KEY" not in os.environ
    print("calling with", api_key, os.environ["MY_SERVICE_TOKEN"], os.environ["MY_JUDGE_TOKEN"])
    print("and", api_key, file=sys.stderr)
    return {"letters": float(len(response) > 4)}
'''


@contextmanager
def process_table(run: runs.Run) -> Iterator[set[str]]:
    """Command lines of all processes of the run meanwhile, looked at again and again; but of the
    one that was started here, whose words are the user's own, and its children's have until they
    execute something.
    """
    found, over = set[str](), threading.Event()

    def line(pid: int) -> str:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return words.replace(b"\0", b" ").decode(errors="replace").strip()

    def look() -> None:
        own = line(run.process.pid)
        while not over.wait(0.1):
            for process in run.family():
                with suppress(OSError):  # it has ended
                    found.add(line(process.pid))
            found.discard(own)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its directory, after the run."""
    root = tmp_path_factory.mktemp("observed")
    assets = runs.write_assets(root / "assets")
    (root / "rewards.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PLANTED.items():
            patch.setenv(name, value)
        arguments = runs.overrides(
            root,
            "seen",
            assets,
            "trainer.total_steps=12",
            "trainer.save_interval=3",
            "trainer.max_restarts=1",
            "monitor=tensorboard",
            "monitor.detailed=true",
            "explorer.eval_interval=6",
            f"buffer.explorer_input.default_reward_fn_type={root / 'rewards.py'}:reward",
            f"+buffer.explorer_input.taskset.reward_fn_args.api_key={IN_CONFIG}",
            f"+explorer.env_vars.MY_JUDGE_TOKEN={OF_EXPLORER}",
            "explorer.passed_variables=[MY_SERVICE_TOKEN]",
            "explorer.rollout_model.enable_openai_api=true",
            (
                f"buffer.explorer_input.eval_tasksets=[{{name: held_out, path: "
                f"{assets / 'eval.jsonl'}, {PLAIN}}}]"
            ),
        )
        with runs.train(*arguments) as run, process_table(run) as lines:
            run.wait_step(5)
            sockets = listening.listening(run.family())
            run.find("rft.run.rank ").kill()
            assert run.end() == 0, run.errors()
            printed = "\n".join(run.lines) + run.errors()
        report.write(root / "rft" / "seen")
        timeline.write(root / "rft" / "seen")
        (root / "processes.json").write_text(json.dumps(sorted(lines)))
        (root / "sockets.json").write_text(json.dumps(sorted(sockets)))
        patch.setenv("RFT_SECRET_OF_THE_CONFIG", IN_CONFIG)
        assert redact.text(printed) == printed, "a secret was printed to the terminal"
    yield root / "rft" / "seen"


def test_what_listens_is_what_docs_security_says(job: Path) -> None:
    found = [
        listening.Socket(*one) for one in json.loads((job.parents[1] / "sockets.json").read_text())
    ]
    known = listening.rows()
    assert (listening.strange(found, known), listening.absent(found, known)) == ([], [])


def test_no_secret_is_in_any_file_of_the_run(job: Path) -> None:
    files = [path for path in job.rglob("*") if path.is_file()]
    named = {path.name for path in files}
    assert {
        "resolved.yaml",
        "report.html",
        "timeline.json",
        "rank_0.log",
        "explorer.log",
        "supervisor.log",
    } <= named
    secrets = [value.encode() for value in (*PLANTED.values(), IN_CONFIG, OF_EXPLORER)]
    found = [path for path in files if any(secret in path.read_bytes() for secret in secrets)]
    assert any(job / "buffer" in path.parents for path in files), "the journal among them"
    assert found == []
    assert "oc.env:RFT_SECRET_" in (job / "resolved.yaml").read_text()


def test_no_secret_is_in_any_log_of_rays(job: Path) -> None:
    """Which it leaves, readable for all, where it wants."""
    sessions = Path("/tmp/ray")
    began = (job / "resolved.yaml").stat().st_mtime
    files = [
        path
        for path in sessions.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_mtime >= began
    ]
    assert any("runtime_env" in path.name for path in files), "the log that had them"
    secrets = [value.encode() for value in (*PLANTED.values(), IN_CONFIG, OF_EXPLORER)]
    assert [path for path in files if any(one in path.read_bytes() for one in secrets)] == []


def test_no_secret_is_in_the_process_table(job: Path) -> None:
    lines = json.loads((job.parents[1] / "processes.json").read_text())
    for part in ("rft.run.rank", "ray::Explorer", "ray::RolloutEngine", "VLLM", "raylet"):
        assert any(part in line for line in lines), f"{part} was seen"
    secrets = (*PLANTED.values(), IN_CONFIG, OF_EXPLORER)
    assert [line for line in lines if any(secret in line for secret in secrets)] == []


def test_the_careless_reward_was_really_called_with_it(job: Path) -> None:
    """Else the test above has looked for what was never there."""
    assert "calling with" in (job / "logs" / "latest" / "explorer.log").read_text()


def test_the_timeline_has_every_part_and_the_rank_that_was_killed(job: Path) -> None:
    events = json.loads((job / "timeline.json").read_text())["traceEvents"]
    parts = {
        event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"
    }
    assert {
        "supervisor",
        "rank_0",
        "checkpoint_agent_0",
        "synchronizer",
        "explorer",
        "engine_0",
        "engine_0_worker_0",
    } <= parts
    done = {event["name"] for event in events}
    assert {
        "train",
        "wait_batch",
        "write",
        "round",
        "install weights",
        "receive weights",
        "evaluate",
        "requests",
    } <= done
    assert (
        sum(
            event["name"] == "process_name" and "rank_0 " in event["args"]["name"]
            for event in events
        )
        == 2
    )


def browse(page: Path, profile: Path, *arguments: str) -> str:
    command = [
        browser.program("chromium"),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=4000",
        "--proxy-server=127.0.0.1:9",
        "--enable-logging=stderr",
        *arguments,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"CONSOLE.*(Uncaught|Refused|Error)", done.stderr), done.stderr
    return done.stdout


def test_a_browser_without_a_network_draws_the_page(job: Path, tmp_path: Path) -> None:
    dom = browse(job / "report.html", tmp_path / "a", "--dump-dom")
    drawn = dom[dom.index("<main") : dom.index("</main>")]
    for words in (
        "Evaluation",
        "Where the time went",
        "The last steps, process by process",
        "Checkpoints",
        "Rollouts",
        "rank_0 was started again",
        "trainer.save_interval",
        ">finished<",
    ):
        assert words in drawn, words
    assert drawn.count("<svg") >= 10 and drawn.count("<path") >= 10 and drawn.count("<rect") >= 50
    assert "NaN" not in drawn and "undefined" not in drawn


def test_the_picture_is_not_empty(job: Path, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    browse(
        job / "report.html",
        tmp_path / "b",
        f"--window-size={WIDTH},{HEIGHT}",
        f"--screenshot={picture}",
    )
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (WIDTH, HEIGHT)
    assert len(data) > 100_000, "a page without curves is a quarter of that"
