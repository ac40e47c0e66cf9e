"""What the explorer can do, in one run: sets of two kinds, a selector that learns, runs that hang,
several answers to evaluate.
"""

import json
import sqlite3
from pathlib import Path

import pytest

from rft.buffer.progress import Leased, Stored
from rft.ground.experience import Experience, decode
from rft.tools.toy import write_arithmetic, write_model

from runs import MODEL, REPOSITORY, History, metrics, overrides, step_rows, train

STEPS, REPEATS = 4, 4
CODE = REPOSITORY / "tests" / "e2e" / "late_rewards.py"

pytestmark = [pytest.mark.timeout(300), pytest.mark.verify]


def test_hanging_runs_are_cut_and_the_rest_is_learned_from(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    write_model(assets / "model", **MODEL)
    train_file, _ = write_arithmetic(assets, digits=1, num_eval=8)
    rows = [json.loads(line) for line in train_file.read_text().splitlines()]
    with sqlite3.connect(assets / "sums.db") as connection:
        connection.execute("create table sums (prompt text, response text, rate real)")
        connection.executemany(
            "insert into sums values (?, ?, 0.5)", [(r["prompt"], r["response"]) for r in rows[:40]]
        )
    connection.close()
    plain = "format: {prompt_type: plaintext}"
    learning = "task_selector: {selector_type: difficulty_based, feature_keys: [rate]}"
    sets = f"[{{name: table, storage_type: sql, path: {assets / 'sums.db'}, {plain}, {learning}}}, "
    sets += f"{{name: file, path: {train_file}, {plain}}}]"
    held_out = (
        f"{{name: held_out, path: {assets / 'eval.jsonl'}, {plain}, repeat_times: 4, "
        f"rollout_args: {{temperature: 1.0}}}}"
    )
    command = [
        f"trainer.total_steps={STEPS}",
        f"algorithm.repeat_times={REPEATS}",
        "trainer.save_hf_checkpoint=never",
        "buffer.explorer_input.taskset=null",
        f"buffer.explorer_input.tasksets={sets}",
        f"buffer.explorer_input.eval_tasksets=[{held_out}]",
        "explorer.eval_on_startup=false",
        f"buffer.explorer_input.default_workflow_type={CODE}:Slow",
        f"buffer.explorer_input.default_reward_fn_type={CODE}:reward",
        "+explorer.env_vars.REWARD_PART=form",
        "explorer.runner_state_report_interval=0.5",
        "explorer.max_timeout=60",
        "synchronizer.sync_style=fully_async",
        "synchronizer.max_staleness=null",
        "explorer.over_rollout.ratio=0.5",
        "explorer.over_rollout.wait_after_min=1",
        "explorer.over_rollout.return_partial_tasks=true",
    ]
    with train(*overrides(tmp_path, "late", assets, *command)) as run:
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / "late"
    last = step_rows(job)[-1]
    assert last["rollout/finished_task_count"] > 0 and {
        "rollout/timeout_s",
        "rollout/cut_task_count",
    } <= set(last)
    history = History(job / "buffer" / "experience_buffer")
    history.check_exactly_once(STEPS)
    groups = {
        record.group: decode(record.experiences, list[Experience]) for record in history.of(Stored)
    }
    taken = [groups[number] for lease in history.of(Leased) for number in lease.groups]
    assert {e.task.split("/")[0] for group in taken for e in group} == {"table", "file"}
    assert all(
        e.metrics["form"] == 0.25 and e.reward_outcome == "ok" for group in taken for e in group
    )
    hanging = [group for group in taken if int(group[0].task.split("/")[2]) % 5 == 0]
    assert hanging and all(len(group) < REPEATS for group in hanging), (
        "one of every four tasks has a run that hangs"
    )
    told = [record.told for record in history.of(Stored) if record.told]
    assert told and "table" in {name for name, *_ in told}
    found = next(row for row in metrics(job) if "eval/held_out/accuracy" in row)
    assert {
        f"eval/held_out/{name}"
        for name in ("pass@1", "pass@4", "reward/best@2", "right/mean@4", "form/worst@4")
    } <= set(found)
    assert "tasks under way" in (next((job / "logs").glob("attempt_1/explorer.log"))).read_text()
