"""A supervised run with the keys that change how a step is
computed, and one whose steps are not finite.
"""

from pathlib import Path

import pytest

from rft.ground.experience import Batch, decode

from runs import checkpoints, is_one_line, metrics, step_rows, train, write_assets

RANKS = "trainer.num_ranks=2"

# `test_loop` has a supervised stage, `tests/dist` recompute, SGD and steps that are not finite
pytestmark = pytest.mark.verify


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("supervised") / "assets")


def overrides(root: Path, assets: Path, *more: str) -> list[str]:
    return [
        "experiment=sft",
        "name=run",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={root}",
        RANKS,
        f"model.model_path={assets / 'model'}",
        "buffer.train_batch_size=8",
        f"buffer.trainer_input.experience_buffer.path={assets / 'train.jsonl'}",
        *more,
    ]


def test_what_was_asked_for_is_what_runs(tmp_path: Path, assets: Path) -> None:
    asked = [
        "trainer.total_steps=4",
        "trainer.profiler=torch",
        "trainer.profile_steps=[2,3]",
        "trainer.use_dynamic_bsz=false",
        "trainer.recompute_granularity=full",
        "trainer.peak_tflops=1",
        "algorithm.optimizer.optimizer_type=sgd",
        "algorithm.optimizer.lr_scheduler_type=wsd",
        "+trainer.trainer_config.actor_rollout_ref.model.use_remove_padding=false",
    ]
    with train(*overrides(tmp_path, assets, *asked)) as run:
        told = run.wait_for(r"^trainer: .*").group(0)
        assert (run.end(), run.errors()) == (0, "")
    assert (
        "rft's own layers (on a CPU)" in told
        and "SGD of torch" in told
        and "full recompute" in told
    )
    job = tmp_path / "rft" / "run"
    assert [path.name for path in (job / "profile").iterdir()] == ["steps_2_3_rank_0.json"]
    rows = step_rows(job)
    assert len(rows) == 4 and all(
        row["skipped_steps"] == 0 and row["perf/hfu"] > row["perf/mfu"] > 0 for row in rows
    )
    assert "use_remove_padding: false" in (job / "resolved.yaml").read_text()


def test_steps_that_are_not_finite_end_the_run_with_their_batch(
    tmp_path: Path, assets: Path
) -> None:
    """The first step's learning rate throws the weights away; every gradient after it overflows."""
    given = [
        "trainer.num_ranks=1",
        "trainer.total_steps=50",
        "algorithm.optimizer.lr=1e30",
        "trainer.max_skipped_steps=3",
        "trainer.max_restarts=0",
    ]
    with train(*overrides(tmp_path, assets, *given)) as run:
        assert run.end() == 10
        job = tmp_path / "rft" / "run"
        saved = job / "failed_batches" / "step_00000004.msgpack"
        assert is_one_line(
            run.errors(), "failed while judging the step", "3 steps in a row", str(saved)
        ), run.errors()
    assert len(decode(saved.read_bytes(), Batch).experiences) == 8
    assert [row["skipped_steps"] for row in metrics(job)] == [0, 1, 2]


def test_the_collector_passes_over_what_a_rank_has_loaded(
    tmp_path: Path, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved where most of the rank's objects are passed over."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "verify" / "planted"))
    is_saved = "(gc := __import__('gc')).get_freeze_count() > 10 * len(gc.get_objects())"
    monkeypatch.setenv("RFT_PLANTED", f"rft.trainer.saving:SaveTimes.is_due={is_saved}")
    with train(*overrides(tmp_path, assets, "trainer.total_steps=2")) as run:
        assert (run.end(), run.errors()) == (0, "")
    assert checkpoints(tmp_path / "rft" / "run") == [1, 2]
