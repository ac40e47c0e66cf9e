"""A whole run whose groups go through the experience pipeline,
on tasks that a task pipeline has made.
"""

import json
from pathlib import Path

import pytest

from rft.buffer.progress import GroupFailed
from rft.extras.pipeline.output import recorded_groups

import runs

STEPS = 3
ADDED = "{stats_key:pass_rate,op_type:ADD,weight:0.5}"
SHAPING = f"{{name:reward_shaping_mapper,args:{{reward_shaping_configs:[{ADDED}]}}}}"


@pytest.mark.verify
def test_a_run_with_both_pipelines(tmp_path: Path) -> None:
    assets = runs.write_assets(tmp_path / "assets")
    raw = assets / "train.jsonl"
    chosen = tmp_path / "chosen.jsonl"
    arguments = runs.overrides(
        tmp_path,
        "pipelines",
        assets,
        f"trainer.total_steps={STEPS}",
        f"buffer.explorer_input.taskset.path={chosen}",
        f"data_processor.task_pipeline.inputs=[{raw}]",
        "data_processor.task_pipeline.num_process=1",
        "data_processor.task_pipeline.operators=[{name:dedupe,args:{fields:[prompt]}}]",
        f"data_processor.experience_pipeline.operators=[{{name:pass_rate_calculator}},{SHAPING},{{name:dapo_dynamic_sampling}}]",
        "data_processor.experience_pipeline.save_input=true",
    )
    with runs.train(*arguments) as run:
        assert run.end(timeout=runs.START_S) == 0, run.errors()
    assert "task pipeline:" in "\n".join(run.lines) and len(chosen.read_text().splitlines()) <= len(
        raw.read_text().splitlines()
    )
    job = tmp_path / "rft" / "pipelines"
    history = runs.History(job / "buffer" / "experience_buffer")
    history.check_exactly_once(STEPS)
    assert all(len(lease.groups) == runs.TASKS for lease in history.progress.leases.values()), (
        "every step is full"
    )
    dropped = [
        one for one in history.of(GroupFailed) if one.reason == "dropped by dapo_dynamic_sampling"
    ]
    assert len(dropped) == history.progress.num_failed
    came = {
        one.group: one.experiences
        for one in recorded_groups(job / "buffer" / "explorer_output.jsonl")
    }
    for lost in dropped:
        assert len({one.reward for one in came[lost.group]}) == 1
    rows = runs.step_rows(job)
    assert [row["reward/zero_signal_groups"] for row in rows] == [0.0] * STEPS, (
        "groups that teach nothing are replaced"
    )
    told = {name for row in rows for name in row if name.startswith("experience_pipeline/")}
    assert {
        "experience_pipeline/stored_groups_count",
        "experience_pipeline/reward_diff/mean",
    } <= told, told
    assert json.loads((tmp_path / "chosen.jsonl.pipeline.json").read_text())["rows_in"] > 0
