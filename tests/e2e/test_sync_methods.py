"""Weights that reach a real vLLM engine by another way than streams, and a whole run that does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from miniature import answer, ask, assert_sampled_from
from saving import SavingTrainer

from rft.checkpoint.catalog import committed, read_manifest
from rft.checkpoint.storage import WEIGHTS, open_storage
from rft.ground.protocols import ActorHandle
from rft.ground.rounds import InSave
from rft.sync.synchronizer import Synchronizer

from runs import History, checkpoints, overrides, step_rows, train, write_assets

STEPS = 4
SHORT = [
    f"trainer.total_steps={STEPS}",
    "synchronizer.max_staleness=0",
    "trainer.save_hf_checkpoint=never",
]
TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32

pytestmark = pytest.mark.timeout(600)


def synchronizer_of(engine: Any, name: str | None = None, **more: Any) -> Any:
    actor = (
        ray.remote(Synchronizer)
        .options(max_concurrency=100, num_cpus=0.01, name=name)
        .remote(None, 30.0, **more)
    )
    ray.get(actor.join.remote("engine_0", ActorHandle(engine)))
    return actor


def damage(directory: Path) -> None:
    """One bit of rank 1's bytes changes on the disk."""
    file = directory / "r00001.bin"
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)


def assert_serves(engine: Any, path: Path, version: int) -> None:
    made = answer(ask(engine, max_tokens=20, seed=1))[0]
    assert {span.version for span in made.versions} == {version}
    assert_sampled_from(path, made, 1.0)


# --- checkpoint -----------------------------------------------------------------------------------


def test_saved_weights_are_read_while_responses_are_being_made(
    first_weights: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    synchronizer = synchronizer_of(first_weights)
    with SavingTrainer(tmp_path / "root", model_dirs[1], synchronizer, epoch=1) as trainer:
        running = ask(first_weights, n=2, temperature=0.7, max_tokens=900, min_tokens=900, seed=3)
        answer(ask(first_weights, max_tokens=20, min_tokens=20))
        numbers = trainer.publish(1)
        assert numbers["sync/engines"] == 1 and numbers["sync/bytes"] > 0
        for made in answer(running):
            assert [span.version for span in made.versions] == [0, 1] and len(made.tokens) == 900
            split = made.versions[1].start
            assert_sampled_from(model_dirs[0], made, 0.7, stop=split, min_tokens=900)
            assert_sampled_from(model_dirs[1], made, 0.7, start=split, min_tokens=900)
        assert ray.get(synchronizer.wait_for.remote(0)) == 1
    ray.get(synchronizer.leave.remote("engine_0", "test"))
    # the trainer is gone, what it published is not
    ray.get(synchronizer.join.remote("engine_0", ActorHandle(first_weights)))
    ray.get(synchronizer.members.remote(2), timeout=60)
    assert_serves(first_weights, model_dirs[1], 1)


def test_a_damaged_save_is_refused_by_name_and_the_old_version_serves_on(
    first_weights: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    synchronizer, root = synchronizer_of(first_weights), tmp_path / "root"
    with SavingTrainer(root, model_dirs[1], synchronizer, epoch=1) as trainer:
        trainer.publish(1)
        damage(trainer.save(2))
        seal = read_manifest(open_storage(root), "weights/v_00000002").seal
        with pytest.raises(
            RuntimeError, match=r"no engine could take version 2: .*r00001.bin was changed: chunk 0"
        ):
            location = InSave(root=str(root), path="weights/v_00000002")
            ray.get(synchronizer.publish.remote(2, 1, seal, location))
        assert ray.get(synchronizer.wait_for.remote(0)) == 1
        assert_serves(first_weights, model_dirs[1], 1)
        trainer.publish(3)
        assert_serves(first_weights, model_dirs[1], 3)


def test_all_of_every_save_is_loaded(
    first_weights: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """What a commit may leave out, because it has not changed, is known of streams alone."""
    synchronizer = synchronizer_of(first_weights)
    for version, which in enumerate((1, 0, 1, 0), 1):
        root, path = tmp_path / str(version), model_dirs[which]
        with SavingTrainer(root, path, synchronizer, epoch=version) as trainer:
            trainer.publish(version)
            assert_serves(first_weights, path, version)


def test_engines_without_a_trainer_follow_what_one_saves_elsewhere(
    first_weights: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """W20: with a save there, no request meets the weights that the engine was started with."""
    root = tmp_path / "root"
    early = synchronizer_of(first_weights)
    assert ray.get(early.follow.remote(str(root))) is None
    assert list(ray.get(early.members.remote(0))[1]) == ["engine_0"], (
        "nothing is saved: it serves what it has"
    )
    ray.get(early.leave.remote("engine_0", "test"))
    with SavingTrainer(root, model_dirs[1], None, epoch=1) as trainer:
        trainer.save(4)
        damage(trainer.save(5))
        late = synchronizer_of(first_weights)
        assert ray.get(late.members.remote())[1] == {}, "before it has looked, nobody serves"
        assert ray.get(late.follow.remote(str(root))) == 4
        assert_serves(first_weights, model_dirs[1], 4)
        trainer.save(6)
        assert ray.get(late.wait_for.remote(6)) == 6
        assert_serves(first_weights, model_dirs[1], 6)
        ray.kill(late)
        held = ray.get(first_weights.holding.remote())
        anew = (
            ray.remote(Synchronizer)
            .options(max_concurrency=100, num_cpus=0.01)
            .remote(None, 30.0, root=str(root))
        )
        ray.get(anew.recover.remote({"engine_0": ActorHandle(first_weights)}))
        assert list(ray.get(anew.members.remote())[1]) == ["engine_0"]
        assert ray.get(anew.follow.remote(str(root))) == 6
        assert ray.get(first_weights.holding.remote()) == held, "it was installed again"
        trainer.save(7)
        assert ray.get(anew.wait_for.remote(7)) == 7
        assert_serves(first_weights, model_dirs[1], 7)


def test_a_version_that_was_kept_is_served_by_its_number(
    first_weights: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Newer ones are there, by the same trainer and by a later attempt; and it is a patch."""
    root = tmp_path / "root"
    with SavingTrainer(root, model_dirs[1], None, epoch=1) as trainer:
        for version in (4, 5, 6):
            trainer.save(version)
    with SavingTrainer(root, model_dirs[0], None, epoch=2) as trainer:
        trainer.save(8)
    storage = open_storage(root)
    assert committed(storage, WEIGHTS) == ["weights/v_00000006", "weights/v_00000008"]
    assert read_manifest(storage, "versions/v_00000005").base == (4, "e0001n0000")
    for version, which in ((5, 1), (8, 0), (4, 1)):
        one = synchronizer_of(first_weights, root=str(root), version=version)
        assert ray.get(one.follow.remote(str(root))) == version
        assert_serves(first_weights, model_dirs[which], version)
        ray.get(one.leave.remote("engine_0", "test"))
    patch = InSave(root=str(root), path="versions/v_00000005")
    # without a synchronizer, as mode=bench does
    ray.get(first_weights.load_weights_from.remote(patch, 5), timeout=60)
    assert_serves(first_weights, model_dirs[1], 5)
    with pytest.raises(RuntimeError, match="of version 5, not the one that was announced"):
        ray.get(first_weights.load_weights_from.remote(patch, 6), timeout=60)
    assert_serves(first_weights, model_dirs[1], 5)
    none = synchronizer_of(first_weights, root=str(root), version=7)
    with pytest.raises(Exception, match="has no weights of version 7"):
        ray.get(none.follow.remote(str(root)))


# --- memory ---------------------------------------------------------------------------------------


def test_what_ranks_left_in_memory_is_taken_also_when_they_are_gone(
    first_weights: Any, model_dirs: tuple[Path, Path]
) -> None:
    """Weights that change after `release`, and a process that ends, are no harm to who has not
    taken them yet.
    """
    synchronizer = synchronizer_of(first_weights, name="depository")
    context = ray.get_runtime_context()
    script = Path(__file__).with_name("depositing.py")
    command = [
        sys.executable,
        str(script),
        context.gcs_address,
        context.namespace,
        "depository",
        str(model_dirs[1]),
        "8",
    ]
    made = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert made.returncode == 0, made.stderr
    assert_serves(first_weights, model_dirs[1], 8)
    ray.get(synchronizer.leave.remote("engine_0", "test"))
    ray.get(first_weights.load_weights_from.remote(str(model_dirs[0]), 0))
    ray.get(synchronizer.join.remote("engine_0", ActorHandle(first_weights)))
    generation, members = 0, {}
    while not members:
        generation, members = ray.get(synchronizer.members.remote(generation), timeout=60)
    assert_serves(first_weights, model_dirs[1], 8)


# --- a whole run ---------------------------------------------------------------------------------


def check_run(job: Path) -> None:
    """Every step trained on what the version before it has sampled, and trainer and engine agree
    about its probabilities.
    """
    rows = step_rows(job)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["staleness/token_max"] for row in rows) == 0
    assert max(row["logprob_diff/max"] for row in rows) < TOLERANCE
    assert all(row["staleness/unversioned_tokens"] == 0 for row in rows)
    History(job / "buffer" / "experience_buffer").check_exactly_once(STEPS)


@pytest.mark.verify  # above, an engine reads what a trainer saves; `test_outer` has a run by memory
def test_a_run_by_checkpoint(tmp_path: Path) -> None:
    command = ["synchronizer.sync_method=checkpoint", "trainer.save_interval=2"]
    with train(
        *overrides(tmp_path, "saving", write_assets(tmp_path / "assets"), *SHORT, *command)
    ) as run:
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / "saving"
    check_run(job)
    storage = open_storage(job / "checkpoints")
    found = [f"weights/v_{step:08d}" for step in (STEPS - 1, STEPS)]
    assert committed(storage, WEIGHTS) == found, "the two newest stay"
    assert checkpoints(job) == [2, 4]
    full, weights = (read_manifest(storage, path) for path in ("step_00000004", found[-1]))
    assert full.id == weights.id, "one staging for both"
