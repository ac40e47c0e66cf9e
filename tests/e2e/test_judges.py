"""Every judge asks a real auxiliary engine, in one run: by a rubric, by comparing a group, and as a
reward behind an address.
"""

import json
import socket
from pathlib import Path

import pytest
from judge_model import CRITERIA, SCORES, has_sign, write_judge

from rft.buffer.progress import Stored
from rft.ground.experience import Experience, decode
from rft.tools.toy import character_tokenizer

from runs import REPEATS, TASKS, History, overrides, step_rows, train, write_assets

STEPS = 3
TASKSET = "buffer.explorer_input.taskset"
RUBRIC = [{"description": CRITERIA[0], "weight": 3}, CRITERIA[1]]
KINDS = {  # of one step's tasks: the columns that make them what they are
    "rubric": {"flow": "rubric_judge", "rubric": RUBRIC},
    "ruler": {"flow": "ruler"},
    "remote": {"flow": "single_turn"},
    # the judge never gives three entries
    "unclear": {"flow": "rubric_judge", "rubric": [*CRITERIA, "is short"]},
}


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_rewards_are_what_the_judge_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets, judge = write_assets(tmp_path / "assets"), write_judge(tmp_path / "judge")
    sums = [json.loads(line) for line in (assets / "train.jsonl").read_text().splitlines()]
    rows = [
        row | columns for row, columns in zip(sums, list(KINDS.values()) * len(sums), strict=False)
    ]
    (assets / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("RFT_ENDPOINT_TOKEN", "known-before-the-start")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    remote = (
        f"{{url: 'http://127.0.0.1:{port}/v1', model: judge, key_variable: "
        f"RFT_ENDPOINT_TOKEN, seconds: 50}}"
    )
    command = [
        f"trainer.total_steps={STEPS}",
        f"{TASKSET}.path={assets / 'judged.jsonl'}",
        f"{TASKSET}.format.workflow_key=flow",
        f"{TASKSET}.task_selector.selector_type=sequential",
        f"explorer.auxiliary_models=[{{name: judge, model_path: {judge}, kv_cache_gb: 0.25}}]",
        f"+{TASKSET}.workflow_args.judge=judge",
        "buffer.explorer_input.default_reward_fn_type=remote_judge",
        f"+{TASKSET}.reward_fn_args={remote}",
        f"explorer.proxy_port={port}",
        "explorer.reward_timeout=60",
    ]
    with train(*overrides(tmp_path, "judged", assets, *command)) as run:
        assert (run.end(), run.errors()) == (0, "")
    job, tokenizer = tmp_path / "rft" / "judged", character_tokenizer()
    metrics = step_rows(job)
    assert [row["reward/failed_frac"] for row in metrics] == [1 / len(KINDS)] * STEPS, (
        "what is unclear is no reward"
    )
    assert all(row["grad_norm"] > 0 and not row["skipped"] for row in metrics)
    groups = [
        decode(one.experiences, list[Experience])
        for one in History(job / "buffer" / "experience_buffer").of(Stored)
    ]
    assert len(groups) >= STEPS * TASKS and {len(group) for group in groups} == {REPEATS}
    for group in groups:
        kind = list(KINDS)[int(group[0].task.split("/")[-1]) % len(KINDS)]
        said = [
            tokenizer.decode(one.tokens[one.prompt_length :], skip_special_tokens=True)
            for one in group
        ]
        if kind == "unclear":
            assert {one.reward_outcome for one in group} == {"error"} and {
                one.reward for one in group
            } == {0.0}
            assert all(
                "must be a list of 3; it has 2 entries" in one.info["reward_message"]
                for one in group
            )
            continue
        assert {one.reward_outcome for one in group} == {"ok"}
        signed = [has_sign(text) for text in said]
        wanted = {
            "rubric": [0.75 if one else 0.25 for one in signed],
            "ruler": SCORES,
            "remote": [1.0 if one else 0.25 for one in signed],
        }[kind]
        assert [one.reward for one in group] == wanted, (kind, said)
        if kind == "rubric":
            assert [one.metrics["rubric/0"] for one in group] == signed
