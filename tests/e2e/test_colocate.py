"""Trainer and engine on the same cores, taking turns, through
the whole loop as a user starts it.
"""

from pathlib import Path

import pytest

from rft.buffer.progress import Leased, Stored
from rft.ground.experience import Experience, decode

from runs import History, metrics, overrides, step_rows, train, write_assets

STEPS = 4

pytestmark = pytest.mark.timeout(500)


@pytest.mark.verify  # `test_turns` has the engine's part
def test_the_engine_sleeps_through_every_step_of_the_trainer(tmp_path: Path) -> None:
    """Between the moment in which the engine says that it sleeps and the round that wakes it lies
    the whole step, and it answers nothing: every token is of the version that is trained next, also
    those of evaluations in every step.
    """
    assets = write_assets(tmp_path / "assets")
    held_out = (
        f"{{name: held_out, path: {assets / 'eval.jsonl'}, format: {{prompt_type: plaintext}}}}"
    )
    command = [
        "cluster.colocate=true",
        f"trainer.total_steps={STEPS}",
        "explorer.eval_interval=1",
        "trainer.save_hf_checkpoint=never",
        f"buffer.explorer_input.eval_tasksets=[{held_out}]",
        "synchronizer.max_staleness=null",
    ]
    with train(*overrides(tmp_path, "turns", assets, *command)) as run:
        run.wait_step(1)
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / "turns"
    rows = step_rows(job)
    assert len(rows) == STEPS
    for row in rows:  # these three are there only if the engines were put to sleep in this step
        assert row["sync/rest_s"] >= 0 and row["sync/frozen"] == row["sync/answered_asleep"] == 0
        assert row["staleness/token_max"] == 0 == row["staleness/unversioned_tokens"]
    evaluations = {row["step"]: row for row in metrics(job) if "eval/held_out/accuracy" in row}
    assert set(evaluations) == set(range(STEPS + 1))
    for step, row in evaluations.items():
        assert row["eval/held_out/oldest_version"] == row["eval/held_out/newest_version"] == step
    history = History(job / "buffer" / "experience_buffer")
    history.check_exactly_once(STEPS)
    groups = {
        record.group: decode(record.experiences, list[Experience]) for record in history.of(Stored)
    }
    for lease in history.of(Leased):
        made = [
            span.version for group in lease.groups for one in groups[group] for span in one.versions
        ]
        assert set(made) == {lease.step}
