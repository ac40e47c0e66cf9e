"""How new weights reach a real vLLM engine while it decodes, and what happens when they do not."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from fault_world import HERE, actor
from miniature import TOLERANCE, Trainer, answer, ask, assert_sampled_from, reference_logprobs
from mortal import Doom, MortalSynchronizer
from msgspec.structs import replace

from bench.host_card import HostCard
from rft.ground.protocols import ActorHandle
from rft.sync import origins
from rft.sync.connection import PeerConnection, PeerRefused, handshake
from rft.sync.links import IpcLink
from rft.sync.synchronizer import Synchronizer


@pytest.fixture(scope="module")
def buffer(ray_session: None) -> Any:
    """The part of the experience buffer that the synchronizer talks to."""

    class Buffer:  # local: travels by value, Ray's workers cannot import test modules
        def __init__(self) -> None:
            self.versions: list[int] = []

        async def published(self, version: int, run_epoch: int) -> None:
            self.versions.append(version)

        async def seen(self) -> list[int]:
            return self.versions

    return ray.remote(Buffer).remote()


def synchronizer_of(engine: Any, buffer: Any, **settings: Any) -> Any:
    """A synchronizer actor that leads this engine."""
    actor = (
        ray.remote(Synchronizer)
        .options(max_concurrency=100, num_cpus=0.01)
        .remote(ActorHandle(buffer), 30.0, **settings)
    )
    ray.get(actor.join.remote("engine_0", ActorHandle(engine)))
    return actor


@pytest.fixture(scope="module")
def synchronizer(engine: Any, buffer: Any) -> Any:
    return synchronizer_of(engine, buffer)


# --- new weights ----------------------------------------------------------------------------------


def test_weights_arrive_while_responses_are_being_made(
    first_weights: Any, synchronizer: Any, buffer: Any, model_dirs: tuple[Path, Path]
) -> None:
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    running = [
        ask(first_weights, n=4, temperature=0.7, max_tokens=900, min_tokens=900, seed=seed)
        for seed in range(2)
    ]
    # when it is done, the long ones have as many tokens
    answer(ask(first_weights, max_tokens=20, min_tokens=20))
    trainer.start(1)
    numbers = trainer.wait()
    assert (
        ray.get(synchronizer.wait_for.remote(0)) == 1
        and ray.get(first_weights.weight_version.remote()) == 1
    )
    assert ray.get(buffer.seen.remote())[-1] == 1 and numbers["sync/engines"] == 1
    for made in [one for reference in running for one in answer(reference)]:
        assert [span.version for span in made.versions] == [0, 1]
        assert made.versions[0].start == 0 and made.versions[0].end == made.versions[1].start
        assert made.versions[1].end == len(made.tokens) == 900
        split = made.versions[1].start
        assert_sampled_from(model_dirs[0], made, 0.7, stop=split, min_tokens=900)
        assert_sampled_from(model_dirs[1], made, 0.7, start=split, min_tokens=900)


def test_requests_near_their_end_end_before_weights_change(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    def near(engine: Any, most: int, tokens: int) -> tuple[int, int]:
        from rft.rollout import engine_weights as here

        before = here.MOST_STEPS, here.TOKENS_PER_STEP
        here.MOST_STEPS, here.TOKENS_PER_STEP = most, tokens
        return before

    def asked(tokens: int) -> Any:
        return ask(first_weights, n=4, temperature=0.7, max_tokens=tokens, min_tokens=tokens)

    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    # for the engine 900 steps are few here, and a spared token is worth one
    before = ray.get(first_weights.__ray_call__.remote(near, 900, 1))
    try:
        running = asked(900)
        answer(ask(first_weights, max_tokens=300, min_tokens=300))
        trainer.start(1)
        trainer.wait()
    finally:
        ray.get(first_weights.__ray_call__.remote(near, *before))
    for made in answer(running):
        assert len(made.tokens) == 900 and [span.version for span in made.versions] == [0]
        assert_sampled_from(model_dirs[0], made, 0.7, min_tokens=900)
    assert {one.versions[0].version for one in answer(asked(20))} == {1}


def test_no_token_comes_from_cached_keys_of_old_weights(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    prompt = [10 + i % 80 for i in range(400)]  # several cache blocks
    answer(ask(first_weights, prompt=prompt, max_tokens=5))
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    trainer.start(1)
    trainer.wait()
    made = answer(ask(first_weights, prompt=prompt, max_tokens=20, seed=1))[0]
    expected = reference_logprobs(model_dirs[1], prompt, made.tokens, 1.0)
    assert (torch.tensor(made.logprobs) - expected).abs().max() < TOLERANCE
    assert {span.version for span in made.versions} == {1}


@pytest.mark.usefixtures("over_sockets")
def test_a_flipped_bit_is_refused_named_and_sent_again(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    flip_once(trainer.publishers[1], message=3)
    trainer.start(5)
    assert trainer.wait()["sync/again"] == 1
    assert_sampled_from(model_dirs[1], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)


def flip_once(publisher: Any, message: int) -> None:
    """One bit of one message of payload changes on its way, after it was hashed."""
    listener = publisher.origin.sender.listener
    serve = listener._serve

    def through(wire: PeerConnection, hello: dict[str, Any]) -> None:
        send, left = wire.send, iter([False] * message + [True])

        def flipping(data: memoryview) -> None:
            if len(data) > 1024 and next(left, False):
                wrong = bytearray(data)
                wrong[17] ^= 1
                data = memoryview(wrong)
            send(data)

        wire.send = flipping  # type: ignore[method-assign]
        serve(wire, hello)

    listener._serve = through


def test_workers_of_a_run_on_one_machine_are_there_for_that_machine_alone(
    first_weights: Any,
) -> None:
    (offer,) = ray.get(first_weights.worker_offers.remote())
    assert offer.endpoint["host"] == "127.0.0.1"
    nobody = {**offer.endpoint, "secret": "guessed"}
    with pytest.raises(PeerRefused, match="wrong secret"):
        handshake(nobody, {}, "a stranger", 10.0)


def test_staging_memory_is_not_the_models(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    """What the next round brings lands where the last one lay, while the engine serves: nothing of
    it may be seen.
    """
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    trainer.start(1)
    trainer.wait()
    before = answer(ask(first_weights, max_tokens=30, seed=4))[0]
    other = Trainer(synchronizer, model_dirs[0]).connect()
    ray.get(first_weights.init_weights.remote(other.info()))
    for publisher in other.publishers:
        publisher.origin.sender.open(2)  # type: ignore[union-attr]
    assert ray.get(first_weights.stage.remote(other.round(2))).bytes > 0
    after = answer(ask(first_weights, max_tokens=30, seed=4))[0]
    assert after == before
    assert {span.version for span in after.versions} == {1}


def test_a_trainer_that_dies_while_it_sends_changes_nothing(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    trainer.publishers[1].origin.sender.close()  # type: ignore[union-attr]
    trainer.start(5)
    with pytest.raises(
        RuntimeError, match=r"no engine could take version 5: .*nobody at 127.0.0.1"
    ):
        trainer.wait()
    made = answer(ask(first_weights, max_tokens=20, seed=1))[0]
    assert {span.version for span in made.versions} == {0}
    assert_sampled_from(model_dirs[0], made, 1.0)
    again = Trainer(synchronizer, model_dirs[1]).connect()
    again.start(5)
    again.wait()
    assert_sampled_from(model_dirs[1], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)


def test_an_engine_that_comes_late_gets_what_is_offered(
    first_weights: Any, buffer: Any, model_dirs: tuple[Path, Path]
) -> None:
    empty = (
        ray.remote(Synchronizer)
        .options(max_concurrency=100, num_cpus=0.01)
        .remote(ActorHandle(buffer), 30.0)
    )
    trainer = Trainer(empty, model_dirs[1]).connect()
    trainer.start(7)  # nobody is there: the round waits
    ray.get(empty.join.remote("engine_0", ActorHandle(first_weights)))
    trainer.wait()
    generation, members = ray.get(empty.members.remote(-1))
    assert list(members) == ["engine_0"] and ray.get(first_weights.weight_version.remote()) == 7
    ray.get(empty.leave.remote("engine_0", "test"))
    assert ray.get(empty.members.remote(generation))[1] == {}
    trainer.start_offered(8)
    # after the round of 7: it takes 8, which is not published
    ray.get(empty.join.remote("engine_0", ActorHandle(first_weights)))
    assert list(ray.get(empty.members.remote(generation + 1))[1]) == ["engine_0"]
    assert (
        ray.get(first_weights.weight_version.remote()) == 8
        and ray.get(empty.wait_for.remote(0)) == 7
    )
    assert_sampled_from(model_dirs[1], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)


def test_weights_without_staging_memory(
    first_weights: Any, buffer: Any, model_dirs: tuple[Path, Path]
) -> None:
    direct = synchronizer_of(first_weights, buffer, direct=True)
    trainer = Trainer(direct, model_dirs[1]).connect()
    trainer.start(3)
    assert trainer.wait()["sync/bytes"] > 0
    assert_sampled_from(model_dirs[1], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)


@pytest.mark.usefixtures("over_sockets")
def test_a_direct_round_that_breaks_poisons_until_a_whole_one(
    first_weights: Any, buffer: Any, model_dirs: tuple[Path, Path]
) -> None:
    direct = synchronizer_of(first_weights, buffer, direct=True)
    ray.get(direct.leave.remote("engine_0", "this test leads it"))
    trainer = Trainer(direct, model_dirs[1]).connect()
    cut(trainer.publishers[1], message=40)
    ray.get(first_weights.init_weights.remote(trainer.info()))
    first: Any = trainer.publishers[0].origin.sender
    second: Any = trainer.publishers[1].origin.sender
    first.open(3)
    loading = first_weights.commit.remote(trainer.round(3, direct=True))
    # All of the first rank is there before anything of the second: what comes until the cut
    # completes tensors, and those are loaded.
    with first.window._changed:
        assert first.window._changed.wait_for(lambda: first.window.seconds > 0, timeout=30.0)
    second.open(3)
    with pytest.raises(RuntimeError, match="version 3 was not installed.*the other end closed"):
        ray.get(loading)
    with pytest.raises(RuntimeError, match="holds mixed weights"):
        answer(ask(first_weights, max_tokens=5))
    ray.get(direct.join.remote("engine_0", ActorHandle(first_weights)))
    again = Trainer(direct, model_dirs[1]).connect()
    again.start(3)
    again.wait()
    assert_sampled_from(model_dirs[1], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)


def cut(publisher: Any, message: int) -> None:
    """Every wire of this rank ends with its n-th message of payload."""
    listener = publisher.origin.sender.listener
    serve = listener._serve

    def through(wire: PeerConnection, hello: dict[str, Any]) -> None:
        send, left = wire.send, iter([False] * message + [True])

        def cutting(data: memoryview) -> None:
            if len(data) > 1024 and next(left, False):
                wire.close()
            send(data)

        wire.send = cutting  # type: ignore[method-assign]
        serve(wire, hello)

    listener._serve = through


def test_kept_keys_serve_who_is_under_way_and_nobody_else(
    first_weights: Any, buffer: Any, model_dirs: tuple[Path, Path]
) -> None:
    keeping = synchronizer_of(first_weights, buffer, kv="keep")
    trainer = Trainer(keeping, model_dirs[0]).connect()
    trainer.start(1)
    trainer.wait()
    prompt = [10 + i % 80 for i in range(350)]
    answer(ask(first_weights, prompt=prompt, max_tokens=5))
    assert ray.get(first_weights.stats.remote())["cached"] == 0
    answer(ask(first_weights, prompt=prompt, max_tokens=5))
    cached = ray.get(first_weights.stats.remote())["cached"]
    assert cached == 320, "a second request of one version finds the first one's keys"
    running = ask(first_weights, max_tokens=900, min_tokens=900, seed=2)
    answer(ask(first_weights, max_tokens=20, min_tokens=20))
    other = Trainer(keeping, model_dirs[1]).connect()
    other.start(2)
    other.wait()
    made = answer(ask(first_weights, prompt=prompt, max_tokens=20, seed=1))[0]
    assert ray.get(first_weights.stats.remote())["cached"] == cached, "and of another version none"
    expected = reference_logprobs(model_dirs[1], prompt, made.tokens, 1.0)
    assert (torch.tensor(made.logprobs) - expected).abs().max() < TOLERANCE
    under_way = answer(running)[0]
    assert [span.version for span in under_way.versions] == [1, 2] and len(under_way.tokens) == 900


def test_a_round_of_another_plan_is_refused(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    trainer.start(6)
    trainer.wait()
    other = replace(trainer.round(7), digest="0000")
    with pytest.raises(
        RuntimeError, match="round follows plan 0000, this engine was connected with"
    ):
        ray.get(first_weights.stage.remote(other))
    with pytest.raises(RuntimeError, match="asked to install .* staged is None"):
        ray.get(first_weights.commit.remote(other))
    assert {
        span.version for span in answer(ask(first_weights, max_tokens=20, seed=1))[0].versions
    } == {6}


def test_a_model_that_is_not_the_engines_is_refused_by_name(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    trainer = Trainer(synchronizer, model_dirs[1])
    for publisher in trainer.publishers:
        publisher.origin.source.parts = [(renamed(b), t) for b, t in publisher.origin.source.parts]  # type: ignore[attr-defined]
    with pytest.raises(
        RuntimeError,
        match=r"not those of the model of engine_0.*layers.0.mlp.gate_proj.weight is missing",
    ):
        trainer.connect()


def renamed(block: Any) -> Any:
    return dataclasses.replace(block, name=block.name.replace("gate_proj", "gate"))


@pytest.mark.usefixtures("over_sockets")
def test_a_trainer_of_another_kind_of_device_is_refused_by_name(
    first_weights: Any,
    synchronizer: Any,
    model_dirs: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its packed buckets are nothing for this engine, which says so, lives and serves on."""
    with monkeypatch.context() as packed:
        packed.setattr(origins, "host_links", lambda *_: lambda wire: IpcLink(wire, HostCard()))
        trainer = Trainer(synchronizer, model_dirs[1]).connect()
    trainer.start(2)
    told = r"trainer rank 0 is on .*\(packed\), engine_0/0 is on cpu .*\(host\): set device=cpu"
    with pytest.raises(RuntimeError, match=f"no engine could take version 2: .*{told}"):
        trainer.wait()
    made = answer(ask(first_weights, max_tokens=20, seed=1))[0]
    assert {span.version for span in made.versions} == {0}
    assert_sampled_from(model_dirs[0], made, 1.0)


def test_an_older_epoch_cannot_connect(synchronizer: Any, model_dirs: tuple[Path, Path]) -> None:
    old, new = Trainer(synchronizer, model_dirs[0]), Trainer(synchronizer, model_dirs[1])
    new.connect()
    plan, epoch = new.publishers[0].origin.plan, old.publishers[0].origin.epoch
    with pytest.raises(ValueError, match="cannot connect"):
        ray.get(synchronizer.connect.remote(plan, [], epoch))
    with pytest.raises(RuntimeError, match="comes from epoch"):
        ray.get(synchronizer.publish.remote(3, epoch))


def test_versions_may_go_back_after_a_resume(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    for version in (9, 4):
        trainer = Trainer(synchronizer, model_dirs[1]).connect()
        trainer.start(version)
        trainer.wait()
    assert (
        ray.get(first_weights.weight_version.remote())
        == ray.get(synchronizer.wait_for.remote(0))
        == 4
    )
    assert ray.get(synchronizer.wait_for.remote(4)) == 4
    with pytest.raises(TimeoutError, match="version 5 not published"):
        ray.get(synchronizer.wait_for.remote(5, 0.01))


def test_a_directory_of_weights_is_loaded_as_a_version(
    first_weights: Any, model_dirs: tuple[Path, Path]
) -> None:
    ray.get(first_weights.load_weights_from.remote(str(model_dirs[1]), 30))
    made = answer(ask(first_weights, max_tokens=20, seed=1))[0]
    assert {span.version for span in made.versions} == {30}
    assert_sampled_from(model_dirs[1], made, 1.0)
    with pytest.raises(RuntimeError, match="holds no"):
        ray.get(first_weights.load_weights_from.remote(str(model_dirs[1] / "nothing"), 31))
    assert ray.get(first_weights.weight_version.remote()) == 30


# --- a synchronizer that dies ---------------------------------------------------------------------


class KnowingBuffer:
    """What the synchronizer asks the buffer, and `told`: what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []  # (run epoch, version)

    async def published(self, version: int, run_epoch: int) -> None:
        self.told.append((run_epoch, version))

    async def stats(self) -> dict[str, Any]:
        epoch, version = self.told[-1] if self.told else (0, None)
        return {"published": version, "run_epoch": epoch}

    async def heard(self) -> list[tuple[int, int]]:
        return self.told


class Supervised:
    """A synchronizer that Ray starts again, and what the supervisor does then."""

    def __init__(self, engine: Any):
        self.engine = engine
        settings = {"max_concurrency": 1000, "num_cpus": 0.01}
        variables = {"PYTHONPATH": HERE}
        self.buffer = actor(KnowingBuffer).remote()
        again = {"max_restarts": -1, "max_task_retries": -1, "runtime_env": {"env_vars": variables}}
        mortal = ray.remote(MortalSynchronizer).options(**settings, **again)
        self.actor = mortal.remote(ActorHandle(self.buffer), 60.0)
        self.get(self.actor.join.remote("engine_0", ActorHandle(engine)))
        self.watch()

    def get(self, reference: Any) -> Any:
        return ray.get(reference, timeout=120)

    def watch(self) -> None:
        self.end = self.actor.watch.options(max_task_retries=0).remote()

    def doom(self, point: str) -> None:
        self.get(self.actor.die_at.remote(Doom(point)))

    def kill(self) -> None:
        os.kill(self.get(self.actor.pid.remote()), signal.SIGKILL)

    def heal(self) -> None:
        """Returns when it has died and is back."""
        assert ray.wait([self.end], timeout=60)[0], "it lives on"
        self.watch()
        self.get(self.actor.recover.remote({"engine_0": ActorHandle(self.engine)}))

    def members(self, seen: int = -1) -> tuple[int, dict[str, Any]]:
        return self.get(self.actor.members.remote(seen))

    def close(self) -> None:
        self.get(self.actor.leave.remote("engine_0", "the end of the test"))
        for handle in (self.actor, self.buffer):
            ray.kill(handle)


@pytest.fixture
def supervised(first_weights: Any) -> Iterator[Supervised]:
    made = Supervised(first_weights)
    yield made
    made.close()


@pytest.mark.parametrize(
    "points",
    [
        ("after begin", "after staged"),
        pytest.param(
            ("before publish", "before conclude", "after conclude"), marks=pytest.mark.verify
        ),
    ],
    ids=["staging and committing", "before and behind"],
)
def test_a_synchronizer_that_dies_in_any_round_comes_back_and_the_round_goes_on(
    first_weights: Any,
    supervised: Supervised,
    model_dirs: tuple[Path, Path],
    points: tuple[str, ...],
) -> None:
    supervised.kill()  # before anybody was here
    supervised.heal()
    generation, members = supervised.members()
    assert members == {} and generation > 1
    trainer = Trainer(supervised.actor, model_dirs[1]).connect()
    epoch = trainer.publishers[0].origin.epoch  # type: ignore[union-attr]
    trainer.start(1)
    trainer.wait()
    # between two rounds: nobody waits for the trainer
    before, _ = supervised.members(generation)
    asked = supervised.actor.members.remote(before)
    supervised.kill()
    supervised.heal()
    after, members = supervised.get(asked)
    assert after not in (generation, before) and list(members) == ["engine_0"]
    # an engine that comes again gets what is offered, though nothing is published here
    trainer.start_offered(2)
    supervised.get(supervised.actor.leave.remote("engine_0", "test"))
    ray.get(first_weights.load_weights_from.remote(str(model_dirs[0]), 0))
    supervised.get(supervised.actor.join.remote("engine_0", ActorHandle(first_weights)))
    members = {}
    while not members:
        after, members = supervised.members(after)
    assert ray.get(first_weights.weight_version.remote()) == 2
    for version, point in enumerate(points, 3):
        supervised.doom(point)
        trainer.start(version)
        supervised.heal()
        assert list(supervised.members()[1]) == ["engine_0"], point
        assert trainer.wait()["sync/engines"] == 1, point
        assert ray.get(first_weights.weight_version.remote()) == version
    told = supervised.get(supervised.buffer.heard.remote())
    assert told == sorted(told) and set(told) == {(epoch, v) for v in (1, *range(3, version + 1))}
    assert_sampled_from(model_dirs[1], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)


def by_memory(trainer: Trainer, synchronizer: Any) -> Trainer:
    """The same two ranks, which leave their weights in the object store."""
    for publisher in trainer.publishers:
        old = publisher.origin
        publisher.origin = origins.MemoryOrigin(
            old.mesh, old.source, ActorHandle(synchronizer), old.config, old.epoch
        )
    return trainer.connect()


@pytest.mark.verify
def test_what_was_left_with_a_synchronizer_that_died_is_left_again_or_given_up(
    first_weights: Any, supervised: Supervised, model_dirs: tuple[Path, Path]
) -> None:
    trainer = by_memory(Trainer(supervised.actor, model_dirs[1]), supervised.actor)
    supervised.doom("after begin")
    trainer.start(1)
    supervised.heal()
    trainer.everywhere(lambda publisher: publisher.wait())  # the weights are the same
    assert ray.get(first_weights.weight_version.remote()) == 1
    supervised.doom("after begin")
    trainer.start(2)
    with ThreadPoolExecutor(1) as beside:  # then they may change
        released = beside.submit(trainer.everywhere, lambda publisher: publisher.release())
        supervised.heal()
    released.result()
    trainer.start_offered(3)
    assert [publisher.last["sync/lost"] for publisher in trainer.publishers] == [1.0, 1.0]
    trainer.everywhere(lambda publisher: publisher.wait())
    assert ray.get(first_weights.weight_version.remote()) == 3
    assert [publisher.version for publisher in trainer.publishers] == [3, 3]
    versions = [version for _, version in supervised.get(supervised.buffer.heard.remote())]
    assert versions == [1, 3]
    assert_sampled_from(model_dirs[1], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)
