"""A real engine that takes turns with the trainer: it sleeps, and wakes with the next weights."""

from pathlib import Path
from typing import Any

import pytest
import ray
from miniature import Trainer, answer, ask, assert_sampled_from

from rft.ground.protocols import ActorHandle
from rft.sync.synchronizer import Synchronizer


@pytest.fixture(scope="module")
def synchronizer(engine: Any, ray_session: None) -> Any:
    class Buffer:  # local: travels by value, Ray's workers cannot import test modules
        async def published(self, version: int, run_epoch: int) -> None: ...

    actor = ray.remote(Synchronizer).options(max_concurrency=100, num_cpus=0.01)
    handle = actor.remote(ActorHandle(ray.remote(Buffer).remote()), 60.0, direct=True)
    ray.get(handle.join.remote("engine_0", ActorHandle(engine)))
    return handle


@pytest.fixture
def served(first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]) -> Any:
    """The engine serves the first model as version 1, from its trainer."""
    trainer = Trainer(synchronizer, model_dirs[0]).connect()
    trainer.start(1)
    trainer.wait()
    return first_weights


def publish(synchronizer: Any, path: Path, version: int) -> None:
    trainer = Trainer(synchronizer, path).connect()
    trainer.start(version)
    trainer.wait()


def versions_of(made: Any) -> list[int]:
    return [span.version for span in made.versions]


def test_what_is_asked_of_a_sleeping_engine_is_made_of_the_weights_that_wake_it(
    served: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    numbers = ray.get(synchronizer.rest.remote())
    asked = ask(served, max_tokens=20, min_tokens=20, seed=1)
    assert ray.get(served.stats.remote())["asleep"], (
        "this was asked after the request, and is answered before"
    )
    assert numbers["frozen"] == numbers["answered_asleep"] == 0
    publish(synchronizer, model_dirs[1], 2)
    (made,) = answer(asked)
    assert versions_of(made) == [2] and not ray.get(served.stats.remote())["asleep"]
    assert_sampled_from(model_dirs[1], made, 1.0, min_tokens=20)
    again = ray.get(synchronizer.rest.remote())
    assert again["answered_asleep"] == 0, "not a token came while it slept"


def test_an_engine_finishes_what_it_was_asked_before_it_sleeps(
    served: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    asked = ask(served, max_tokens=600, min_tokens=600, seed=2)
    ray.get(served.stats.remote())  # asked after it, and answered: the request is there
    numbers = ray.get(synchronizer.rest.remote())
    assert numbers["frozen"] == 0
    publish(synchronizer, model_dirs[1], 2)
    (made,) = answer(asked)
    assert versions_of(made) == [1] and len(made.tokens) == 600
    assert_sampled_from(model_dirs[0], made, 1.0, min_tokens=600)


def test_what_is_not_finished_when_patience_ends_goes_on_with_the_new_weights(
    served: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    asked = ask(served, max_tokens=900, min_tokens=900, seed=3)
    # when it is done, the long one has as many tokens
    answer(ask(served, max_tokens=20, min_tokens=20))
    assert ray.get(served.sleep.remote(0.0))["frozen"] == 1
    publish(synchronizer, model_dirs[1], 2)
    (made,) = answer(asked)
    assert versions_of(made) == [1, 2] and len(made.tokens) == 900
    split = made.versions[1].start
    assert_sampled_from(model_dirs[0], made, 1.0, stop=split, min_tokens=900)
    assert_sampled_from(model_dirs[1], made, 1.0, start=split, min_tokens=900)
