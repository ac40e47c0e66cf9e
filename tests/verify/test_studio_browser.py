"""The config studio as a user meets it: a real browser, a real server, and a file that `rft train
--config` takes.
"""

import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import browser
import pytest

from rft.tools.toy import write_arithmetic, write_model

WIDTH, HEIGHT = 1360, 1560
FIRST = "return document.querySelectorAll('.field').length > 5 && state.answer !== null"
SETTLED = "return state.answer.now[arguments[0]] === arguments[1]"
STUDIO = "import sys; from rft.tools import studio; sys.exit(studio.main(['--port', '0']))"
CONFIG = "import sys; from rft.tools import config; sys.exit(config.main(sys.argv[1:]))"
pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]


@contextmanager
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-c", STUDIO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[2], server
        server.terminate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served() as (where, _):
        yield where


def test_a_config_is_put_together(address: str, tmp_path: Path) -> None:
    write_model(
        tmp_path / "model",
        hidden=64,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=128,
        context=64,
    )
    write_arithmetic(tmp_path, num_eval=16)
    with browser.browsing(WIDTH, HEIGHT) as page:
        page.open(address)
        page.until(FIRST)
        assert page.run("return document.getElementById('save').disabled"), "two keys are missing"
        for key, text in (
            ("model.model_path", str(tmp_path / "model")),
            ("buffer.explorer_input.taskset.path", str(tmp_path / "train.jsonl")),
            ("model.max_prompt_tokens", "16"),
            ("model.max_response_tokens", "8"),
            ("cluster.gpu_per_node", "8"),
            ("explorer.rollout_model.engine_num", "2"),
            ("checkpoint_root_dir", str(tmp_path / "runs")),
        ):
            page.type(f"input[name='{key}']", text)
            page.until(SETTLED, key, text)
        page.until("return state.answer.ready && !document.getElementById('save').disabled")
        shown = page.run("return document.getElementById('plan').innerText")
        assert "1 x 8 = 8: 2 for engines, 6 for the trainer" in shown and "memory per rank" in shown
        beginner = page.picture(tmp_path / "beginner.png")
        file = tmp_path / "made.yaml"
        file.write_text(
            page.run("return document.getElementById('yaml').textContent"), encoding="utf-8"
        )
        page.type("input[name='buffer.batch_size']", "0")
        page.until("return state.answer.problems.length === 1")
        assert page.run(
            "return document.querySelector('[data-key=\"buffer.batch_size\"] .said').textContent"
        )
        assert page.run("return document.getElementById('save').disabled")
        page.click("#expert")
        page.type("#find", "recompute_granularity")
        assert page.run("return document.querySelectorAll('.field').length") == 1
        page.run(
            "document.getElementById('find').value = ''; state.part = 'Explorer & Synchronizer'; "
            "draw()"
        )
        expert = page.picture(tmp_path / "expert.png")
    for data in (beginner, expert):
        assert struct.unpack(">I", data[16:20])[0] == WIDTH and len(data) > 50_000
    told = subprocess.run(
        [sys.executable, "-c", CONFIG, "--config", str(file)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "engine_num: 2" in told.stdout


def test_the_recipe_changes_what_is_asked(address: str) -> None:
    with browser.browsing(WIDTH, HEIGHT) as page:
        page.open(address)
        page.until(FIRST)
        assert not page.run("return visible('critic.optim.lr')")
        page.run(
            "const one = document.getElementById('recipe'); one.value = 'ppo'; "
            "one.dispatchEvent(new Event('change'))"
        )
        page.until(
            "return state.answer !== null && state.answer.now['algorithm.algorithm_type'] === 'ppo'"
        )
        assert page.run("return visible('critic.optim.lr')")


def test_an_answer_takes_nothing_from_who_is_typing(address: str) -> None:
    with browser.browsing(WIDTH, HEIGHT) as page:
        page.open(address)
        page.until(FIRST)
        for change in ("name", "buffer.explorer_input.taskset.format.prompt_type"):  # other fields
            text = {"name": "mine"}.get(change, "messages")
            page.run(
                "const one = document.querySelector(\"input[name='model.model_path']\"); "
                "one.focus(); one.value = '/mod'; set(arguments[0], arguments[1])",
                change,
                text,
            )
            page.until(SETTLED, change, text)
            page.ask("POST", f"/element/{page.find(':focus')}/value", {"text": "els"})
            found = page.run("return [document.activeElement.name, document.activeElement.value]")
            assert found == ["model.model_path", "/models"], change


def test_no_file_is_made_of_what_the_fields_said_before() -> None:
    hidden = "['copy', 'save'].map((id) => document.getElementById(id).disabled)"
    with served() as (address, server), browser.browsing(WIDTH, HEIGHT) as page:
        page.open(address)
        page.until(FIRST)
        assert page.run(f"set('name', 'second'); return {hidden}") == [True, True]
        page.until("return !document.getElementById('copy').disabled")
        server.terminate()
        server.wait()
        page.run("set('name', 'third')")
        page.until(
            "return document.getElementById('problems').innerText.includes('start it again')"
        )
        assert page.run(f"return {hidden}") == [True, True]
