"""How a stage ends: which of several failures is the cause, what a killed rank's peers do not hide,
that nobody is left, and who is none of its business.
"""

import json
import os
import queue
import signal
import socket
import subprocess
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rft.checkpoint import fence
from rft.config import Config
from rft.ground.errors import REFUSED
from rft.run import actors, cluster, elastic, launch, modes, supervisor
from rft.run.cluster import start_patiently
from rft.run.parts import ActorSpec, engine_spec
from rft.run.restarts import Restarts
from rft.run.supervisor import EXIT_CODES, Event, kind, root_cause
from rft.sync import transfer
from rft.trainer import control


def failed(part: str) -> Event:
    return Event(part, "working", "something")


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        (["trainer rank 0", "engine_1"], "engine_1"),  # a round failed because the engine was gone
        (["explorer", "trainer rank 0", "engine_0"], "engine_0"),
        (["engine_0", "trainer rank 0"], "engine_0"),
        (["explorer", "buffer"], "buffer"),
        (["explorer", "ray"], "ray"),
        (["trainer rank 0", "explorer"], "explorer"),  # an evaluation that all tasks failed in
        (["trainer rank 3"], "trainer rank 3"),
        (["synchronizer", "trainer launcher"], "synchronizer"),
    ],
)
def test_the_part_that_died_first_is_named(
    monkeypatch: pytest.MonkeyPatch, order: list[str], cause: str
) -> None:
    monkeypatch.setattr(supervisor, "SETTLE_S", 0.05)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    first, *rest = map(failed, order)
    for event in (*rest, Event("ranks"), Event("user", signal=signal.SIGTERM)):
        events.put(event)
    found = root_cause(first, events)
    assert found.part == cause and kind(found) in EXIT_CODES


def record(directory: Path, number: int, cause: str, time: int) -> None:
    path = directory / f"failure_rank_{number}.json"
    path.write_text(
        json.dumps({"part": f"trainer rank {number}", "phase": "train", "cause": cause})
    )
    os.utime(path, (time, time))


def test_a_killed_rank_is_the_cause_whatever_its_peers_met(tmp_path: Path) -> None:
    record(tmp_path, 0, "Connection closed by peer", time=1)
    (tmp_path / "phase_rank_1").write_text("wait_batch".ljust(64))
    ended = {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: -signal.SIGABRT}
    expected = {"part": "trainer rank 1", "phase": "wait_batch", "cause": "killed by SIGKILL"}
    assert elastic.root_cause(tmp_path, ended) == expected


def test_of_ranks_that_raised_the_first_is_the_cause(tmp_path: Path) -> None:
    record(tmp_path, 0, "Connection closed by peer", time=2)
    record(tmp_path, 1, "KeyError: 'x'", time=1)
    assert (
        elastic.root_cause(tmp_path, {0: 1, 1: 1, 2: -signal.SIGABRT})["cause"] == "KeyError: 'x'"
    )


def test_a_rank_that_says_nothing_is_still_named(tmp_path: Path) -> None:
    expected = {"part": "trainer rank 2", "phase": "starting", "cause": "ended with exit code 3"}
    assert elastic.root_cause(tmp_path, {2: 3, 3: 1}) == expected


def test_ranks_that_fail_are_started_again_with_a_word_and_the_first_cause_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier start left is taken for nobody's failure in a later one."""
    monkeypatch.setattr(elastic, "PAUSE_S", 0.0)
    causes, lines = ["ValueError: row 3 is bad", "", ""], list[str]()

    def start() -> None:
        if cause := causes.pop(0):
            record(tmp_path, 0, cause, time=1)
            (tmp_path / "phase_rank_0").write_text("train")
        code = 1 if cause else -signal.SIGKILL
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="N/A")
        raise ChildFailedError("ranks", {0: failure})

    found = elastic.until_ended(start, Restarts(2), tmp_path, lines.append)
    assert lines == [
        "trainer rank 0 failed while train: ValueError: row 3 is bad; the ranks are started again "
        "(1 of 2 within an hour)",
        "trainer rank 0 failed while starting: killed by SIGKILL; the ranks are started again "
        "(2 of 2 within an hour)",
    ]
    assert found is not None and (found["part"], found["phase"]) == ("trainer rank 0", "train")
    assert "3 times within an hour; the first cause: trainer rank 0 failed" in found["cause"]
    assert "ValueError: row 3 is bad; the last: trainer rank 0" in found["cause"]

    causes.append("KeyError: 'x'")
    found = elastic.until_ended(start, Restarts(0), tmp_path, lines.append)
    assert found is not None and found["cause"] == "KeyError: 'x'" and len(lines) == 2


@pytest.mark.parametrize(("kills", "told"), [(1, ""), (2, "killed by SIGKILL")])
def test_a_killed_launcher_is_started_again_within_the_budget_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, told: str
) -> None:
    """Real processes that kill themselves stand for launchers that others kill."""
    lines, left = list[str](), kills
    monkeypatch.setattr(launch, "say", lines.append)

    def start() -> "subprocess.Popen[bytes]":
        nonlocal left
        left -= 1
        return subprocess.Popen(["sh", "-c", "kill -9 $$" if left >= 0 else "exit 0"])

    config = Config(checkpoint_root_dir=str(tmp_path))
    config.trainer.max_restarts = 1
    stage = launch.StageRun(config, queue.SimpleQueue())
    stage.log_dir, stage.ranks = tmp_path, start()
    stage._watch_ranks(start)
    event = stage.events.get_nowait()
    assert lines == [
        "trainer launcher: killed by SIGKILL; it is started again (1 of 1 within an hour)"
    ]
    assert (event.part, told in event.cause) == ("trainer launcher" if told else "ranks", True)
    assert ("2 times within an hour" in event.cause) == bool(told)

    stage._stopped, left = True, 1  # by us: nobody starts it again
    stage.ranks = start()
    stage._watch_ranks(start)
    assert stage.events.get_nowait().part == "trainer launcher" and len(lines) == 1


def test_a_launcher_that_returns_goes_on_with_the_budget_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way: its deaths are among theirs."""
    monkeypatch.setattr(elastic, "PAUSE_S", 0.0)
    lines = list[str]()
    monkeypatch.setattr(launch, "say", lines.append)

    def dies() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sh", "-c", "kill -9 $$"])

    def ranks_die() -> None:
        record(tmp_path, 0, "ValueError: row 3 is bad", time=1)
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="N/A")
        raise ChildFailedError("ranks", {0: failure})

    kept = tmp_path / elastic.DEATHS
    rank_died = "trainer rank 0 failed while train: ValueError: row 3 is bad"
    assert Restarts(2, kept=kept).allow(rank_died)
    config = Config(checkpoint_root_dir=str(tmp_path))
    config.trainer.max_restarts = 2
    stage = launch.StageRun(config, queue.SimpleQueue())
    stage.log_dir, stage.ranks = tmp_path, dies()
    stage._watch_ranks(dies)
    event = stage.events.get_nowait()
    assert len(lines) == 1 and lines[0].endswith("(2 of 2 within an hour)")
    assert f"3 times within an hour; the first cause: {rank_died}; the last: " in event.cause

    kept.unlink()
    launcher_died = "trainer launcher failed while running the ranks: killed by SIGKILL"
    assert Restarts(1, kept=kept).allow(launcher_died)
    found = elastic.until_ended(ranks_die, Restarts(1, kept=kept), tmp_path, lines.append)
    assert found is not None and found["part"] == "trainer launcher" and len(lines) == 1
    assert f"2 times within an hour; the first cause: {launcher_died}" in found["cause"]


@pytest.mark.parametrize(("back_s", "left_s"), [(0.0, 300.0), (200.0, 100.0), (400.0, 0.0)])
def test_a_part_that_died_is_back_and_told_before_whoever_asks_it_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back_s: float, left_s: float
) -> None:
    """`back_s`: until the new process answers, of which the rest has `left_s`."""
    now, waited = [0.0], list[float]()

    class Handle:
        def ask(self, method: Any) -> str:
            return method.__name__

        ask_once = ask

    def wait(references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        now[0] += timeout
        return (references, []) if now[0] > back_s else ([], references)

    monkeypatch.setattr(actors.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(actors, "LOOK_S", 0.001 if back_s == 0.0 else 1.0)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", lambda reference, timeout: waited.append(timeout) or 1)
    config, told = Config(checkpoint_root_dir=str(tmp_path)), list[str]()
    made = actors.Actors(config, tmp_path, lambda *event: told.append(event[2]), print)
    made.ready, made.explorer = True, Handle()  # type: ignore[assignment]
    died = ray.exceptions.ActorUnavailableError("it died", None)
    lives = made._again("explorer", made.explorer, Restarts(1), died)
    if left_s:
        assert lives and waited[1:] == pytest.approx([left_s, left_s], abs=1.1)
    else:
        assert not lives and told == ["it was not back in 300 s"]
    assert actors.BACK_S + control.REPLY_S <= control.RETURN_S


def test_what_is_refused_is_not_tried_again(tmp_path: Path) -> None:
    def start() -> None:
        record(tmp_path, 1, "ConfigError: row 3 has no prompt", time=1)
        failure = ProcessFailure(local_rank=1, pid=1, exitcode=REFUSED, error_file="N/A")
        raise ChildFailedError("ranks", {1: failure})

    lines = list[str]()
    found = elastic.until_ended(start, Restarts(3), tmp_path, lines.append)
    assert found is not None and found["cause"] == "ConfigError: row 3 has no prompt"
    assert lines == []


def test_a_record_that_a_full_disk_cut_off_is_none(tmp_path: Path) -> None:
    """Rather than the launcher's own end, and the run's with it."""
    (tmp_path / "failure_rank_0.json").touch()
    (tmp_path / "phase_rank_0").write_text("training")
    expected = {"part": "trainer rank 0", "phase": "training", "cause": "ended with exit code 1"}
    assert elastic.root_cause(tmp_path, {0: 1}) == expected


def test_ray_gets_more_time_than_it_gives_itself_and_other_errors_end_at_once() -> None:
    tries: list[str] = []

    def start(**settings: object) -> None:
        tries.append("tried")
        if len(tries) < 3:
            raise Exception(
                "The current node timed out during startup. This could happen because ..."
            )

    start_patiently(start, num_cpus=1)
    assert len(tries) == 3

    def broken(**settings: object) -> None:
        tries.append("tried")
        raise ConnectionError("no such address")

    with pytest.raises(ConnectionError):
        start_patiently(broken)
    assert len(tries) == 4


def test_the_object_store_has_room_for_the_batches_on_their_way() -> None:
    """1,024 experiences of 32,768 tokens, an id and a log-probability each."""
    config = Config()
    config.buffer.train_batch_size, config.model.max_model_len = 1024, 32768
    batch = 1024 * 32768 * 8
    assert cluster.store_bytes(config) == cluster.OBJECT_STORE_BYTES + 2 * batch
    config.model.max_model_len = None  # nothing is sampled
    assert cluster.store_bytes(config) == cluster.OBJECT_STORE_BYTES


def test_the_last_metrics_of_a_run_are_its_last_line(tmp_path: Path) -> None:
    assert launch.last_line(tmp_path / "metrics.jsonl") == "none"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert launch.last_line(tmp_path / "metrics.jsonl") == '{"step": 2}'


EXPLORING = ["buffer", "engine_0", "synchronizer", "explorer"]


@pytest.mark.parametrize(
    ("mode", "storage", "parts", "begun"),
    [
        ("both", "queue", [*EXPLORING, "ranks"], ["open"]),
        ("train", "queue", ["buffer", "ranks"], []),
        ("train", "file", ["ranks"], None),
        ("explore", "queue", EXPLORING, ["follow", "published", "explore", "finished"]),
        ("serve", "queue", EXPLORING, ["follow", "base_url"]),
        ("bench", "queue", ["engine_0", "explorer"], ["evaluate_checkpoints"]),
    ],
)
def test_every_mode_starts_its_parts_and_no_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    storage: Any,
    parts: list[str],
    begun: list[str] | None,
) -> None:
    """Rows A5 to A9, and W26: ranks are processes that nobody calls.

    `begun`: what is asked once all serve, where there are actors.
    """
    started, asked = list[str](), list[str]()

    class Handle:
        def ask(self, method: Any, *arguments: Any) -> None:
            asked.append(method.__name__)

    class Alone(actors.Actors):
        def _create(self, spec: ActorSpec[Any], returns: bool = False) -> Any:
            started.append(spec.part)
            return Handle()

        def _thread(self, target: Any, *arguments: Any) -> None: ...
        def _listen(self) -> None: ...

    config = Config(name="a", mode=mode, checkpoint_root_dir=str(tmp_path), device="cpu")
    config.buffer.trainer_input.experience_buffer.storage_type = storage
    config.algorithm.sample_strategy = "default"
    config.algorithm.policy_loss_fn = config.algorithm.advantage_fn = "grpo"
    monkeypatch.setattr(cluster, "start", lambda config: "here")
    monkeypatch.setattr(actors.parts, "build_tasksets", lambda *_, **__: (None, []))
    monkeypatch.setattr(actors.EngineFleet, "run", lambda *_: None)
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: reference)
    monkeypatch.setattr(
        modes, "evaluate_checkpoints", lambda *_: asked.append("evaluate_checkpoints")
    )
    run = launch.StageRun(config, queue.SimpleQueue())
    alone = Alone(config, tmp_path, lambda *_: None, lambda line: None)
    run.supervisor = SimpleNamespace(  # type: ignore[assignment]
        start=lambda: alone.start() or True, guard=lambda: None
    )
    monkeypatch.setattr(run, "_start_ranks", lambda: started.append("ranks"))
    run._start()
    assert sorted(started) == sorted(parts)
    if begun is not None:
        alone._begin()
        assert asked == begun


@pytest.mark.parametrize("mode", ["both", "train", "explore", "serve", "bench"])
def test_the_agents_of_a_trainer_outlive_whoever_works_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    """Told that nobody comes, or named as what is left, only by the supervisor of their ranks."""
    said = list[str]()
    monkeypatch.setattr(launch, "say", said.append)
    config = Config(name="a", mode=mode, checkpoint_root_dir=str(tmp_path), shutdown_grace_s=1.0)
    stage, trains = launch.StageRun(config, queue.SimpleQueue()), mode in ("both", "train")
    control = fence.control_dir(stage.job)
    epoch = fence.take_epoch(control)
    (control / "states").mkdir()
    spared = list[int]()
    stage.supervisor = SimpleNamespace(  # type: ignore[assignment]
        close=lambda grace_s, spare: spared.extend(spare())
    )
    agent = fence.hold(fence.lock_path(control, epoch, 0))
    stage._close()
    os.close(agent)
    assert fence.is_over(control, epoch) == trains
    assert spared == [os.getpid()] * trains
    assert bool(said) == trains and all("still write what was staged" in line for line in said)


def test_actors_are_in_the_namespace_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row A15, in a private Ray and in one that is there."""
    told = list[dict[str, Any]]()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ray, "init", lambda **settings: told.append(settings))
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.0.0.1:6379")
    )
    config = Config(name="a", ray_namespace="mine")
    assert cluster.start(config) == "10.0.0.1:6379"
    config.cluster.ray_address = "10.0.0.1:6379"
    cluster.start(config)
    assert [one["namespace"] for one in told] == ["mine", "mine"]
    assert [one["address"] for one in told] == ["local", "10.0.0.1:6379"]


def test_a_ray_that_is_gone_is_told_before_it_ends_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "LOOK_S", 0.01)
    monkeypatch.setenv(cluster.RECONNECT, "0")  # a head of others': half of that
    ending, failures = threading.Event(), list[tuple[str, ...]]()
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        config = Config(name="a", checkpoint_root_dir=str(tmp_path))
        made = actors.Actors(config, tmp_path, lambda *told: failures.append(told), print)
        made.address = address
        heard = threading.Thread(target=made._watch_ray)
        heard.start()
        head.accept()[0].close()  # it is asked, and lives
        assert not failures
    heard.join()
    ((part, phase, cause),) = failures
    assert (part, phase) == ("ray", "holding the parts") and kind(Event(part)) in EXIT_CODES
    assert cause.startswith(f"nobody answers at {address} (")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("that would end this process"))
    made.close(0.0)
    assert cluster.await_loss(address, False, threading.Event())
    ending.set()
    assert cluster.await_loss(address, True, ending) == ""


def test_an_actor_that_another_run_has_is_told_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken() -> None:
        raise ray.exceptions.ActorAlreadyExistsError("The name buffer is already taken")

    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=taken))
    monkeypatch.setattr(ray, "remote", lambda _: actor_class)
    config = Config(name="a", checkpoint_root_dir=str(tmp_path), ray_namespace="rft/a")
    config.cluster.ray_address = "10.0.0.1:6379"
    made = actors.Actors(config, tmp_path, lambda *_: None, print)
    told = "ray_namespace=rft/a: another run has its buffer there in the Ray at 10.0.0.1:6379"
    with pytest.raises(RuntimeError, match=f"^{told}; .* give this one a ray_namespace of its own"):
        made._create(ActorSpec("buffer", "buffer", partial(dict)))


def test_the_two_names_of_an_engine_are_one(tmp_path: Path) -> None:
    """W24: an engine by its other name takes weights in the same ways."""

    def made(kind: Any) -> tuple[Any, ...]:
        config = Config(name="a", checkpoint_root_dir=str(tmp_path), device="cuda")
        config.explorer.rollout_model.engine_type = kind
        config.explorer.rollout_model.gpu_memory_utilization = 0.5
        config.synchronizer.sync_method = "nccl"
        spec = engine_spec(config, "engine_0", "engine_0")
        engine = spec.make()
        return spec.make.func, spec.gpus, engine._arguments(), transfer.of_config(config)

    assert made("vllm") == made("vllm_async")
