"""Weights that reach a real vLLM engine by another way than streams, and whole runs that do so."""

from pathlib import Path
from typing import Any

import pytest
import ray
from miniature import answer, ask, assert_sampled_from
from saving import SavingTrainer

from rft.checkpoint.commit import read_manifest
from rft.checkpoint.storage import open_storage
from rft.sync.synchronizer import Synchronizer, brought_by

pytestmark = pytest.mark.timeout(600)


def synchronizer_of(engine: Any) -> Any:
    actor = ray.remote(Synchronizer).options(max_concurrency=100, num_cpus=0.01).remote(None, 30.0)
    ray.get(actor.join.remote("engine_0", engine))
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


# --- checkpoint ------------------------------------------------------------------------------------------------------


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
        assert ray.get(synchronizer.version.remote()) == 1
    ray.get(synchronizer.leave.remote("engine_0", "test"))
    ray.get(synchronizer.join.remote("engine_0", first_weights))  # the trainer is gone, what it published is not
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
        with pytest.raises(RuntimeError, match=r"no engine could take version 2: .*r00001.bin was changed: chunk 0"):
            ray.get(synchronizer.publish.remote(2, 1, brought_by(str(root), "weights/v_00000002", seal)))
        assert ray.get(synchronizer.version.remote()) == 1
        assert_serves(first_weights, model_dirs[1], 1)
        trainer.publish(3)
        assert_serves(first_weights, model_dirs[1], 3)


def test_engines_without_a_trainer_follow_what_one_saves_elsewhere(
    first_weights: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """W20: with a save there, no request meets the weights that the engine was started with."""
    root = tmp_path / "root"
    early = synchronizer_of(first_weights)
    assert ray.get(early.follow.remote(str(root))) is None
    assert list(ray.get(early.members.remote(0))[1]) == ["engine_0"], "nothing is saved: it serves what it has"
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
