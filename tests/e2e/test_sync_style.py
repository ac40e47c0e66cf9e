"""A style of synchronization through the whole loop, with a real engine and rollouts of very
different lengths.
"""

from pathlib import Path

import pytest
from long_tailed import LONG, SHORT

from rft.buffer.progress import Leased, Stored
from rft.ground.experience import Experience, decode
from rft.tools.toy import write_arithmetic, write_model

from runs import MODEL, REPOSITORY, History, metrics, overrides, step_rows, train

STEPS, INTERVAL, OFFSET = 12, 2, 1
MAX_STALENESS = 4  # what fully_async makes of them: interval - 1 + offset + 2 batches
EVALUATED = {6, 12}  # and so published as well
PUBLISHED = {0, 3, 5, 7, 9, 11} | EVALUATED

# `tests/unit/test_sync_styles.py` has every style, interval and offset
pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]


def test_fully_async_with_an_interval_an_offset_and_stragglers(tmp_path: Path) -> None:
    """No token is older than the bound, the journal knows of each one which of the published
    versions sampled it, and an evaluation is never of an older version than its name says, though
    the style alone would not have published that one.
    """
    assets = tmp_path / "assets"
    write_model(assets / "model", context=1024, **MODEL)
    write_arithmetic(assets, digits=1, num_eval=16)
    short = "format: {prompt_type: plaintext}, rollout_args: {max_tokens: 4}"
    held_out = f"{{name: held_out, path: {assets / 'eval.jsonl'}, {short}}}"
    command = [
        f"trainer.total_steps={STEPS}",
        "model.max_response_tokens=512",
        "explorer.eval_on_startup=false",
        "synchronizer.sync_style=fully_async",
        f"synchronizer.sync_interval={INTERVAL}",
        f"synchronizer.sync_offset={OFFSET}",
        "synchronizer.max_staleness=null",
        "trainer.save_hf_checkpoint=never",
        "buffer.explorer_input.taskset.default_workflow_type="
        f"{REPOSITORY / 'tests' / 'e2e' / 'long_tailed.py'}:run",
        f"buffer.explorer_input.eval_tasksets=[{held_out}]",
        f"explorer.eval_interval={min(EVALUATED)}",
    ]
    with train(*overrides(tmp_path, "style", assets, *command)) as run:
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / "style"
    rows = step_rows(job)
    assert max(row["staleness/token_max"] for row in rows) <= MAX_STALENESS
    assert all(row["staleness/unversioned_tokens"] == 0 for row in rows)
    evaluations = {row["step"]: row for row in metrics(job) if "eval/held_out/accuracy" in row}
    assert set(evaluations) == EVALUATED
    for step, row in evaluations.items():
        assert (
            step
            <= row["eval/held_out/oldest_version"]
            <= row["eval/held_out/newest_version"]
            <= STEPS
        )
    assert evaluations[STEPS]["eval/held_out/newest_version"] == STEPS
    history = History(job / "buffer" / "experience_buffer")
    history.check_exactly_once(STEPS)
    check_versions(history)


def check_versions(history: History) -> None:
    groups = {
        record.group: decode(record.experiences, list[Experience]) for record in history.of(Stored)
    }
    lengths, mixed, ages = set(), 0, set()
    for lease in history.of(Leased):
        for experience in (made for group in lease.groups for made in groups[group]):
            lengths.add(experience.response_length)
            sampled = [
                span.version for span in experience.versions for _ in range(span.start, span.end)
            ]
            assert len(sampled) == experience.response_length and sampled == sorted(sampled)
            assert set(sampled) <= PUBLISHED and max(sampled) <= lease.step
            mixed += len(set(sampled)) > 1
            ages |= {lease.step - version for version in sampled}
    assert lengths == {SHORT, LONG}
    assert max(ages) <= MAX_STALENESS and len(ages) > 1 and mixed, "the run is to cross versions"
