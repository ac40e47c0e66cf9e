"""An agent with the real `openai` client trains the toy through the real loop; then clients are
served what that run has saved.
"""

import json
import os
import signal
import stat
from pathlib import Path

import httpx
import openai
import pytest

from rft.buffer.progress import Stored
from rft.ground.experience import Experience, decode

from runs import REPEATS, REPOSITORY, TASKS, History, overrides, step_rows, train, write_assets

STEPS = 3
TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32
AGENT = REPOSITORY / "tests" / "e2e" / "openai_agent.py"
ROOM = ("model.max_prompt_tokens=48", "model.max_response_tokens=16")

# `tests/unit/test_agents.py` and `test_endpoint.py` have agents and what the endpoint records
pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def agents(root: Path, name: str, assets: Path, *more: str) -> list[str]:
    return overrides(
        root,
        name,
        assets,
        *ROOM,
        "buffer.explorer_input.default_workflow_type=agent",
        f"+buffer.explorer_input.taskset.workflow_args.agent={AGENT}:agent",
        f"trainer.total_steps={STEPS}",
        *more,
    )


def experiences(job: Path) -> list[list[Experience]]:
    history = History(job / "buffer" / "experience_buffer")
    return [decode(record.experiences, list[Experience]) for record in history.of(Stored)]


def test_an_openai_client_trains_the_policy(tmp_path: Path) -> None:
    assets = write_assets(tmp_path / "assets")
    judge = (
        f"explorer.auxiliary_models=[{{name: judge, model_path: {assets / 'model'}, "
        f"kv_cache_gb: 0.25}}]"
    )
    args = "+buffer.explorer_input.taskset.workflow_args.args.judge=judge"
    with train(*agents(tmp_path, "agents", assets, judge, args)) as run:
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / "agents"
    rows = step_rows(job)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and all(
        row["grad_norm"] > 0 for row in rows
    )
    fresh = [row["logprob_diff/max"] for row in rows if row["staleness/max"] == 0]
    assert fresh and max(fresh) < TOLERANCE, (
        "what the endpoint recorded is what the trainer computes of the same ids"
    )
    groups = experiences(job)
    assert len(groups) == STEPS * TASKS and {len(group) for group in groups} == {REPEATS}
    for one in (one for group in groups for one in group):
        assert one.metrics["turns"] == 2 and one.turn == 0 and one.reward_outcome == "ok"
        sampled = sum(one.action_mask)
        assert 2 <= sampled <= 12 and sampled < one.response_length, (
            "both answers, and the question between them"
        )
        assert sum(span.end - span.start for span in one.versions) == sampled
    assert {one.sample for one in groups[0]} == set(range(REPEATS))
    assert not (job / "endpoint.json").exists()
    told = "".join(
        path.read_text(errors="replace") for path in (job / "logs").rglob("*") if path.is_file()
    )
    assert "api_key" not in told and "Bearer" not in told


def test_clients_are_served_and_what_they_rewarded_is_trained_on(tmp_path: Path) -> None:
    """One engine. Conversations are rewarded, the service ends, a trainer learns from them, and the
    service goes on with what that has saved: while it runs (row W39), and from the first answer on
    when it starts again.
    """
    assets, apart = write_assets(tmp_path / "assets"), tmp_path / "rft" / "served" / "live"
    serve = [
        "experiment=serve",
        "name=served",
        f"checkpoint_root_dir={tmp_path}",
        "device=cpu",
        "monitor=none",
        *ROOM,
        f"model.model_path={assets / 'model'}",
        f"algorithm.repeat_times={REPEATS}",
        "explorer.rollout_model.kv_cache_gb=0.25",
    ]
    with train(*serve) as run:
        run.wait_for(r"^serving the model as given at http://127\.0\.0\.1:")
        job = tmp_path / "rft" / "served"
        assert stat.S_IMODE((job / "endpoint.json").stat().st_mode) == 0o600
        talk(job, "version-0", groups=TASKS * 2)
        run.process.send_signal(signal.SIGTERM)
        assert (run.end(), run.errors()) == (0, "")
    assert {len(group) for group in experiences(job)} == {REPEATS}
    # a journal has one writer at a time
    live = [*serve, f"buffer.trainer_input.experience_buffer.path={apart}"]
    with train(*live) as service:
        service.wait_for("^serving the model as given")
        with train(
            *overrides(tmp_path, "served", assets, *ROOM, "mode=train", "trainer.total_steps=50")
        ) as run:
            assert (run.end(), run.errors()) == (0, "")
        assert [row["step"] for row in step_rows(job)] == [1, 2]
        with client(job) as api:
            while api.chat.completions.create(**ASKED).system_fingerprint != "version-2":
                pass
        service.process.send_signal(signal.SIGINT)
        assert (service.end(), service.errors()) == (0, "")
    with train(*live) as service:
        service.wait_for("^serving saved version 2 at")
        talk(job, "version-2", groups=1)
        service.process.send_signal(signal.SIGTERM)
        assert service.end() == 0


ASKED = {"model": "gpt-4o", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 6}


def client(job: Path, session: str = "") -> openai.OpenAI:
    told = json.loads((job / "endpoint.json").read_text())
    return openai.OpenAI(
        base_url=told["base_url"],
        api_key=told["api_key"] + (f":{session}" if session else ""),
        max_retries=0,
    )


def talk(job: Path, version: str, groups: int) -> None:
    """So many tasks, each answered by `REPEATS` sessions that get different rewards."""
    for group in range(groups):
        for number in range(REPEATS):
            with client(job, f"{version}.{os.getpid()}.{group}.{number}") as api:
                made = api.chat.completions.create(**ASKED)
                assert made.system_fingerprint == version
                feedback = {"reward": number / REPEATS, "task": f"task {group}"}
                headers = {"Authorization": f"Bearer {api.api_key}"}
                told = (
                    httpx.post(f"{api.base_url}feedback", json=feedback, headers=headers)
                    .raise_for_status()
                    .json()
                )
            assert told["stored"] == (number == REPEATS - 1)
