"""The explorer against anything that a user's workflow may do: a failing task costs its group, an
engine's death does not.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rft.config import (
    Config,
    ExplorerConfig,
    FormatConfig,
    ModelConfig,
    RolloutModelConfig,
    TasksetConfig,
)
from rft.ground.experience import (
    EvalResult,
    Experience,
    GenerateRequest,
    Sampling,
    Task,
    VersionSpan,
    decode,
    encode,
)
from rft.ground.protocols import ActorHandle
from rft.rollout import evaluation, workflows
from rft.rollout import explorer as exploring
from rft.rollout.context import Shared, TokenLimits
from rft.rollout.engine import EngineDied
from rft.rollout.explorer import Explorer
from rft.rollout.reward_pool import WORKER
from rft.rollout.runner import AllTasksFail, GroupCancelled
from rft.run import parts
from rft.tools.toy import character_tokenizer


class Remote:
    """A method of `target` called as Ray calls an actor's."""

    def __init__(self, method: Callable[..., Awaitable[Any]]):
        self.remote = lambda *arguments: asyncio.ensure_future(method(*arguments))


class Buffer:
    """Admits everything; remembers what became of every group."""

    def __init__(self) -> None:
        self.stored: dict[int, list[Experience]] = {}
        self.failed: dict[int, str] = {}
        self.issued = 0
        self.asked: list[int] = []  # tasks of each call
        self.is_done = False
        self.readmitted: list[int] = []

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return Remote(found) if asyncio.iscoroutinefunction(found) else found

    async def attach_explorer(self, name: str) -> dict[str, Any]:
        return {"cursor": None, "reissue": [], "run_epoch": 0, "heard": -1}

    async def let_go(self, name: str) -> None: ...

    async def admit_some(
        self,
        name: str,
        tasks: list[tuple[bytes, dict[str, Any]]],
        most: list[int | None],
        heard: int | None,
    ) -> list[int]:
        """Up to three: what it leaves comes again."""
        self.asked.append(len(tasks))
        first, self.issued = self.issued, self.issued + min(3, len(tasks))
        return list(range(first, self.issued))

    async def readmit(self, name: str, group: int) -> list[bytes]:
        self.readmitted.append(group)
        return []

    async def put_some(self, puts: list[tuple[int, bytes, list[Any] | None]]) -> None:
        self.stored |= {
            group: decode(experiences, list[Experience]) for group, experiences, _ in puts
        }

    async def abandon(self, group: int, reason: str) -> None:
        self.failed[group] = reason

    async def input_done(self, name: str) -> None:
        self.is_done = True


class Tasks(list[Task]):
    """A taskset."""

    name = "tasks"
    learns = False
    cursor: dict[str, Any] = {}

    def seek(self, cursor: dict[str, Any]) -> None: ...


class Tokenizer:
    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def tasks(count: int) -> Tasks:
    return Tasks(
        Task(id=f"tasks/0/{i}", taskset="tasks", row=i, prompt="p", sampling=Sampling())
        for i in range(count)
    )


def made(reward: float = 1.0) -> list[Experience]:
    return [
        Experience(
            tokens=[1, 2],
            prompt_length=1,
            action_mask=[1],
            logprobs=[0.0],
            versions=[],
            temperature=1.0,
            reward=reward,
        )
    ]


def explorer(
    behaviour: Callable[[Task], Any], monkeypatch: pytest.MonkeyPatch, count: int = 1, **config: Any
) -> Any:
    """An explorer over `count` tasks whose workflow is `behaviour`
    (a result, or an exception to raise).
    """

    async def run(task: Task, context: Any) -> list[Experience]:
        outcome = behaviour(task)
        if asyncio.iscoroutine(outcome):
            return await outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(workflows, "run", run)
    settings = ExplorerConfig(
        **{"max_retry_times": 1, "max_timeout": 30.0, "runner_per_model": 8, **config}
    )
    actor = Explorer(
        settings,
        ModelConfig(),
        tasks(count),
        [tasks(count)],
        {"engine_0": None},
        ActorHandle(Buffer()),
        batch_size=2,
    )
    actor.shared.tokenizer = Tokenizer()
    actor.prepared.set()
    return actor


async def explored(actor: Explorer) -> Buffer:
    await actor.explore()
    await actor.finished()
    return actor.buffer.actor  # type: ignore[return-value]


def test_one_that_comes_back_has_not_finished_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mode explore waits for its end, and asks the new process as soon as there is one."""

    async def scenario() -> None:
        actor = explorer(lambda _: made(), monkeypatch, count=3)
        actor.prepared.clear()
        waiting, buffer = asyncio.create_task(actor.finished()), actor.buffer.actor

        async def is_let_go(name: str) -> bool:
            return True

        buffer.is_let_go = Remote(is_let_go)
        await actor.resume()
        async with asyncio.timeout(20.0):
            await waiting
        assert buffer.is_done and len(buffer.stored) == 3
        await actor.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("silent", "given"),
    [
        ("attach_explorer", []),
        ("admit_some", []),
        ("put_some", [made()]),
        ("abandon", [GroupCancelled("its step went on")]),
        ("input_done", []),
    ],
)
def test_a_buffer_that_lives_and_does_not_answer_breaks_the_explorer(
    monkeypatch: pytest.MonkeyPatch, silent: str, given: list[Any]
) -> None:
    """As one whose disk hangs: its supervisor ends the run with what `watch` raises."""
    monkeypatch.setattr(exploring, "STORE_S", 0.05)

    async def for_ever(*_: Any) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        actor = explorer(lambda _: given[0] if given else made(), monkeypatch)
        actor.patience_s = 0.05
        setattr(actor.buffer.actor, silent, for_ever)
        await actor.explore()
        async with asyncio.timeout(20.0):
            with pytest.raises(RuntimeError, match=f"BufferSilent: .*did not answer '{silent}'"):
                await actor.watch()
        await actor.shutdown()

    asyncio.run(scenario())


def test_attempts_are_numbered_unless_the_workflow_says_which_is_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def behaviour(task: Task) -> list[Experience]:
        found = [made()[0], made()[0], made()[0]]
        if task.row == 1:
            found[1].turn, found[2].sample = 1, 1
        return found

    async def scenario() -> Buffer:
        return await explored(explorer(behaviour, monkeypatch, count=2))

    stored = asyncio.run(scenario()).stored
    places = {group: [(e.sample, e.turn) for e in rows] for group, rows in stored.items()}
    assert places == {0: [(0, 0), (1, 0), (2, 0)], 1: [(0, 0), (0, 1), (1, 0)]}


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (KeyError("answer"), "KeyError: 'answer'"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (AssertionError(), "AssertionError"),
        (TimeoutError("their own"), "TimeoutError: their own"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else "",
)
def test_whatever_a_workflow_raises_costs_its_group_only(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, reason: str
) -> None:
    async def scenario() -> Buffer:
        return await explored(
            explorer(lambda t: raised if t.row == 1 else made(), monkeypatch, count=3)
        )

    buffer = asyncio.run(scenario())
    assert sorted(buffer.stored) == [0, 2] and list(buffer.failed) == [1] and buffer.is_done
    assert reason in buffer.failed[1] and "\n" not in buffer.failed[1]


def test_tasks_that_are_not_admitted_at_once_are_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> list[str]:
        actor = explorer(lambda _: made(), monkeypatch, count=8)
        actor.at_most = 5
        stored = (await explored(actor)).stored
        assert stored.keys() == set(range(8))
        return [stored[group][0].task for group in range(8)]

    assert asyncio.run(scenario()) == [task.id for task in tasks(8)]


def test_as_many_are_asked_for_as_runners_are_free_and_then_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> list[int]:
        go = asyncio.Event()

        async def behaviour() -> list[Experience]:
            await go.wait()
            return made()

        actor = explorer(lambda _: behaviour(), monkeypatch, count=40, runner_per_model=16)
        actor.at_most = 100
        await actor.explore()
        while len(actor.buffer.actor.asked) < 7:
            await asyncio.sleep(0)
        go.set()
        assert len((await explored(actor)).stored) == 40
        return actor.buffer.actor.asked[:7]

    # the buffer admits three of what it is asked for
    assert asyncio.run(scenario()) == [16, 13, 10, 7, 4, 1, 2]


def test_a_task_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[str] = []

    def behaviour(task: Task) -> Any:
        attempts.append(task.id)
        return KeyError("once") if len(attempts) == 1 else made()

    async def scenario() -> Buffer:
        return await explored(explorer(behaviour, monkeypatch))

    buffer = asyncio.run(scenario())
    assert len(attempts) == 2 and list(buffer.stored) == [0] and not buffer.failed


def test_one_that_hangs_is_cancelled_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever() -> list[Experience]:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> Buffer:
        return await explored(explorer(lambda t: forever(), monkeypatch, max_timeout=0.05))

    assert asyncio.run(scenario()).failed == {
        0: "TimeoutError: no result in 0.05 s (explorer.max_timeout)"
    }


def test_when_all_fail_the_explorer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        actor = explorer(lambda t: KeyError("answer"), monkeypatch, count=20)
        await actor.explore()
        with pytest.raises(
            AllTasksFail, match="8 tasks in a row failed, the last with KeyError: 'answer'"
        ):
            await actor.watch()

    asyncio.run(scenario())


def test_a_dead_engine_loses_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group stays unfinished, so a run that goes on does it again; and it is tried once, not
    against a corpse.
    """
    calls: list[str] = []

    def behaviour(task: Task) -> Any:
        calls.append(task.id)
        return EngineDied("engine_0 died")

    async def scenario() -> Buffer:
        actor = explorer(behaviour, monkeypatch)
        await actor.explore()
        with pytest.raises(RuntimeError, match="engine_0 died"):
            await actor.watch()
        return actor.buffer.actor

    buffer = asyncio.run(scenario())
    assert not buffer.failed and not buffer.stored and len(calls) == 1


def test_a_failed_evaluation_task_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(count: int) -> Explorer:
        return explorer(
            lambda t: KeyError("answer") if t.row < count else made(), monkeypatch, count=4
        )

    async def scenario() -> None:
        result = decode((await failing(1).evaluate(7))[0], EvalResult)
        assert (result.version, result.num_tasks) == (7, 4)
        assert result.metrics["accuracy"] == 0.75 and result.metrics["failed_frac"] == 0.25
        actor = failing(4)
        # the trainer that asked and the supervisor both hear of it
        for broken in (actor.evaluate(8), actor.watch()):
            with pytest.raises(
                AllTasksFail, match="all 4 tasks of tasks failed, the last with KeyError: 'answer'"
            ):
                await broken

    asyncio.run(scenario())


def test_encoding_is_what_the_buffer_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group, sample and task are stamped on every experience."""

    async def scenario() -> Buffer:
        return await explored(explorer(lambda t: made() + made(0.0), monkeypatch, count=2))

    stored = asyncio.run(scenario()).stored
    assert [(e.group, e.sample, e.task) for e in stored[1]] == [
        (1, 0, "tasks/0/1"),
        (1, 1, "tasks/0/1"),
    ]
    assert decode(encode(stored[1]), list[Experience]) == stored[1]


def test_hold_starts_anew_what_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored groups stay; sampled ones, and one that waits for a runner, are admitted again, and
    only once it may go on.
    """
    begun: list[int] = []

    async def behaviour(task: Task) -> list[Experience]:
        begun.append(task.row)
        if task.row and len(begun) <= 3:
            await asyncio.Event().wait()
        return made()

    async def scenario() -> Buffer:
        actor = explorer(behaviour, monkeypatch, count=4, runner_per_model=2)
        await actor.explore()
        # 0 is stored, 1 and 2 are sampled, 3 was admitted and waits for a runner
        while len(begun) < 3:
            await asyncio.sleep(0)
        await actor.hold()
        for _ in range(100):  # turns of the loop, in which nothing may happen
            await asyncio.sleep(0)
        assert begun == [0, 1, 2] and actor.buffer.actor.readmitted == []
        await actor.explore()
        await actor.finished()
        return actor.buffer.actor

    buffer = asyncio.run(scenario())
    assert sorted(buffer.stored) == [0, 1, 2, 3] and not buffer.failed
    assert begun == [0, 1, 2, 1, 2, 3] and buffer.readmitted == [1, 2, 3]


def test_shutdown_while_held_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> Any:
        actor = explorer(lambda t: asyncio.Event().wait(), monkeypatch)
        await actor.explore()
        while not actor.sampling:
            await asyncio.sleep(0)
        await actor.hold()
        await actor.shared.rewards.start()
        async with asyncio.timeout(10):
            await actor.shutdown()
        return actor

    actor = asyncio.run(scenario())
    assert not actor.groups and not actor.sampling and not actor.buffer.actor.failed


class Pool:
    """Engines that remember what they were asked."""

    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> list[Any]:
        self.asked.append(request)
        return []


def seeds_of(
    seed: int | None, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> list[int | None]:
    """Of two tasks that ask twice each, in a run of this seed."""

    async def scenario() -> list[GenerateRequest]:
        actor = explorer(lambda t: made(), monkeypatch)
        actor.shared.seed, actor.shared.pool, actor.shared.stop_token = seed, Pool(), 0
        actor.shared.limits = TokenLimits(8, 16)
        monkeypatch.setattr(workflows, "run", ask_twice)
        for group, task in enumerate(tasks(2)):
            await actor.runner.run(group, task)
        return actor.shared.pool.asked

    async def ask_twice(task: Task, context: Any) -> list[Experience]:
        for _ in range(2):
            await context.generate([1], 1, sampling)
        return made()

    asked = asyncio.run(scenario())
    assert len({request.request_id for request in asked}) == 4
    return [request.sampling.seed for request in asked]


def test_a_deterministic_run_gives_every_request_its_own_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = seeds_of(0, monkeypatch, Sampling())
    assert (
        len(set(first)) == 4
        and all(0 <= seed < 2**63 for seed in first if seed is not None)
        and None not in first
    )
    assert seeds_of(0, monkeypatch, Sampling()) == first
    assert not set(seeds_of(1, monkeypatch, Sampling())) & set(first)
    assert seeds_of(0, monkeypatch, Sampling(seed=7)) == [7] * 4  # a workflow's own choice
    assert seeds_of(None, monkeypatch, Sampling()) == [None] * 4


def test_an_evaluation_takes_few_turns_beside_training_and_all_when_it_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, most = 0, 0
    held = asyncio.Event()

    async def behaviour(task: Task) -> list[Experience]:
        nonlocal running, most
        if task.repeat_times > 1:  # of training: under way until it is let go
            await held.wait()
            return made()
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        if task.row == 20:
            held.set()
        running -= 1
        return made()

    async def scenario() -> tuple[int, int]:
        nonlocal most
        actor = explorer(behaviour, monkeypatch, count=200)
        actor.prepared.set()
        group = msgspec.structs.replace(tasks(1)[0], repeat_times=80)
        training = asyncio.create_task(actor.runner.run(0, group))
        await asyncio.sleep(0)
        evaluating = asyncio.create_task(actor.evaluate(1))
        await held.wait()
        beside, most = most, 0
        await training
        await evaluating
        return beside, most

    beside, alone = asyncio.run(scenario())
    assert beside == 10 and alone > 100


def test_an_engine_that_is_free_between_two_batches_is_not_the_evaluations_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evaluation and next batch come with the same publication, the evaluation first. It has an
    eighth of what of training an engine decodes at a time, however much waits inside it, and all of
    the engine when nothing of training was there for as long as an evaluated task took.
    """
    running: set[int] = set()
    turn, ends = asyncio.Event(), asyncio.Event()

    async def behaviour(task: Task) -> list[Experience]:
        if task.repeat_times > 1:
            await ends.wait()
            return made()
        running.add(task.row)
        await turn.wait()
        running.discard(task.row)
        return made()

    async def idle() -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def wave() -> int:
        """What runs of the evaluation; it ends, and what may begins."""
        await idle()
        size = len(running)
        turn.set()
        turn.clear()
        await idle()
        return size

    async def scenario() -> list[int]:
        engine = RolloutModelConfig(max_num_seqs=90)
        actor = explorer(behaviour, monkeypatch, count=200, rollout_model=engine)
        group = msgspec.structs.replace(tasks(1)[0], repeat_times=800)
        ends.set()
        await actor.runner.run(0, group)  # the batch before
        ends.clear()
        evaluating = asyncio.create_task(actor.evaluate(1))
        await idle()
        training = asyncio.create_task(actor.runner.run(1, group))
        sizes = [await wave(), await wave()]
        ends.set()
        await training
        sizes += [await wave(), await wave()]
        await evaluating
        return sizes

    assert asyncio.run(scenario()) == [8, 10, 10, 172]


def test_an_evaluation_tells_which_versions_it_was_really_of() -> None:
    spans = [VersionSpan(version=6, start=0, end=1), VersionSpan(version=7, start=1, end=2)]
    assert evaluation.versions_of(
        [Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[1, 1], versions=spans)], 6
    ) == {
        "oldest_version": 6,
        "newest_version": 7,
    }
    assert evaluation.versions_of(made(), 5) == {"oldest_version": 5, "newest_version": 5}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"default_reward_fn_type": "gsm8k"}, True),
        ({"reward_fn_args": {"pattern": "(.*)"}}, False),
    ]
    + [({"default_reward_fn_type": "mine.py:reward"}, False)]
    + [({"format": FormatConfig(reward_fn_key="r")}, False)],
)
def test_the_config_says_whether_all_rewards_are_quick(
    given: dict[str, Any], expected: bool
) -> None:
    config = Config(name="a")
    config.buffer.explorer_input.taskset = TasksetConfig(path="t")
    assert parts.are_quick(config)
    config.buffer.explorer_input.eval_tasksets = [TasksetConfig(path="t", **given)]
    assert parts.are_quick(config) == expected


def test_no_reward_worker_is_started_before_one_is_foreseen_or_needed(tmp_path: Path) -> None:
    character_tokenizer().save_pretrained(tmp_path)
    task = msgspec.structs.replace(tasks(1)[0], truth="42", reward="exact_match")

    def workers() -> int:
        there = (one.as_dict(["cmdline"], ad_value=[]) for one in psutil.Process().children())
        return sum(WORKER in one["cmdline"] for one in there)

    async def started(quick: bool) -> list[int]:
        settings = ExplorerConfig(runner_per_model=1, reward_workers=2)
        shared = Shared(settings, ModelConfig(model_path=str(tmp_path)), {}, None)
        await shared.load(quick)
        counts = [workers()]
        for args in ({}, {"pattern": "(.*)"}):
            asked = msgspec.structs.replace(task, reward_args=args)
            assert (await shared.rewards.score([(asked, "42")]))[0].outcome == "ok"
            counts.append(workers())
        await shared.close()
        return [*counts, workers()]

    assert asyncio.run(started(quick=True)) == [0, 0, 2, 0]
    assert asyncio.run(started(quick=False)) == [2, 2, 2, 0]
