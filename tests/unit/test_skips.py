"""Steps that are not finite: counted over resumes, their batches on disk, and the end of a run that
has nothing else.
"""

from pathlib import Path

import pytest

from rft.ground.experience import Batch, Experience, decode
from rft.trainer.reporting import KEPT, NotFinite, SkippedSteps

GOOD = {"loss": 0.5, "grad_norm": 1.0, "skipped": 0.0}
BAD = {"loss": float("nan"), "grad_norm": float("inf"), "skipped": 1.0}


def experiences(step: int) -> list[Experience]:
    return [
        Experience(
            tokens=[1, 2, step],
            prompt_length=1,
            action_mask=[1, 1],
            logprobs=[-0.5, -1.5],
            reward=0.25,
        )
    ]


def skips(root: Path, limit: int = 3, lead: bool = True) -> tuple[SkippedSteps, list[str]]:
    waited: list[str] = []
    return SkippedSteps(root / "failed_batches", limit, lead, waited.append), waited


def test_the_batch_of_a_skipped_step_can_be_replayed(tmp_path: Path) -> None:
    found, _ = skips(tmp_path)
    assert found.after(6, GOOD, experiences(5)) == {"skipped_steps": 0}
    assert found.after(7, BAD, experiences(6)) == {"skipped_steps": 1}
    (file,) = (tmp_path / "failed_batches").iterdir()
    assert file.name == "step_00000007.msgpack"
    assert decode(file.read_bytes(), Batch) == Batch(step=6, experiences=experiences(6))


def test_only_so_many_in_a_row_end_the_run_on_every_rank_alike(tmp_path: Path) -> None:
    messages = []
    for lead in (True, False):
        found, waited = skips(tmp_path, lead=lead)
        for step, metrics in enumerate([BAD, BAD, GOOD, BAD, BAD], start=1):
            found.after(step, metrics, experiences(step))
        assert not waited
        with pytest.raises(NotFinite) as ended:
            found.after(6, BAD, experiences(6))
        assert waited, "nobody may end before the batch is on disk"
        messages.append(str(ended.value))
    assert messages[0] == messages[1]
    assert "step 6 (loss nan, gradient norm inf)" in messages[0]
    assert str(tmp_path / "failed_batches" / "step_00000006.msgpack") in messages[0]


def test_a_resume_goes_on_counting(tmp_path: Path) -> None:
    first, _ = skips(tmp_path)
    first.after(1, BAD, [])
    first.after(2, BAD, [])
    second, _ = skips(tmp_path)
    second.restore(first.state())
    with pytest.raises(NotFinite):
        second.after(3, BAD, [])
    assert second.total == 3


def test_without_a_limit_the_run_goes_on_and_keeps_the_newest(tmp_path: Path) -> None:
    found, _ = skips(tmp_path, limit=0)
    for step in range(1, KEPT + 4):
        found.after(step, BAD, experiences(step))
    names = sorted(p.name for p in (tmp_path / "failed_batches").iterdir())
    assert (
        len(names) == KEPT
        and names[-1] == f"step_{KEPT + 3:08d}.msgpack"
        and names[0] == "step_00000004.msgpack"
    )
