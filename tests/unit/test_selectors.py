"""Which tasks come in which order, what a selector learns, and that
a restart forgets nothing of it (W37).
"""

import asyncio
import json
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.buffer.ledger import Ledger
from rft.config import (
    ConfigError,
    ExperienceBufferConfig,
    ExplorerConfig,
    FormatConfig,
    ModelConfig,
    TaskSelectorConfig,
    TasksetConfig,
)
from rft.data import selectors
from rft.data.selectors import DifficultyBased, Rows
from rft.data.taskset import Mixture, TaskDefaults, Taskset
from rft.ground.experience import Experience, Task, decode
from rft.ground.protocols import ActorHandle
from rft.rollout import workflows
from rft.rollout.context import WorkflowContext
from rft.rollout.explorer import Explorer
from tests.unit.test_over_rollout import Actor
from tests.unit.virtual_clock import run

DEFAULTS = TaskDefaults("single_turn", "exact_match", 1, 8, 1.0)
ROWS, SIZE = 24, 4


def taskset(directory: Path, kind: str, name: str = "t", rows: int = ROWS, **given: Any) -> Taskset:
    path = directory / f"{name}.jsonl"
    lines = [
        {"prompt": f"{name}{n}", "response": "1", "rate": (n * 7 % rows) / rows, "strong": 1.0}
        for n in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {key: given.pop(key) for key in ("feature_keys", "kwargs", "seed") if key in given}
    config = TasksetConfig(
        name=name,
        path=str(path),
        format=FormatConfig(prompt_type="plaintext"),
        task_selector=TaskSelectorConfig(selector_type=kind, **options),
    )
    return Taskset(
        config, DEFAULTS, **{"seed": 3, "epochs": None, "batch_size": SIZE, "lag": 1, **given}
    )


def rows_of(tasks: Any, count: int) -> list[int]:
    return [next(tasks).row for _ in range(count)]


def test_fixed_orders(tmp_path: Path) -> None:
    assert rows_of(taskset(tmp_path, "sequential"), ROWS + 2) == [*range(ROWS), 0, 1]
    epochs = rows_of(taskset(tmp_path, "shuffle"), 2 * ROWS)
    assert (
        sorted(epochs[:ROWS]) == sorted(epochs[ROWS:]) == list(range(ROWS))
        and epochs[:ROWS] != epochs[ROWS:]
    )
    assert rows_of(taskset(tmp_path, "shuffle", seed=4), ROWS) != epochs[:ROWS]
    easy = rows_of(taskset(tmp_path, "offline_easy2hard", feature_keys=["rate"]), 2 * ROWS)
    assert easy[:ROWS] == easy[ROWS:] == sorted(range(ROWS), key=lambda n: -(n * 7 % ROWS))


def test_random_batches_have_no_row_twice_and_are_independent(tmp_path: Path) -> None:
    found = rows_of(taskset(tmp_path, "random"), ROWS)
    assert (
        all(len(set(found[at : at + SIZE])) == SIZE for at in range(0, ROWS, SIZE))
        and len(set(found)) < ROWS
    )
    tasks = taskset(tmp_path, "random")
    ids = [next(tasks).id for _ in range(4 * ROWS)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "random", "offline_easy2hard"])
def test_a_cursor_goes_on_with_any_order(tmp_path: Path, kind: str) -> None:
    features = {"feature_keys": ["rate"]} if kind == "offline_easy2hard" else {}
    whole = rows_of(taskset(tmp_path, kind, **features), 70)
    for stop in (0, 1, 5, 24, 25, 50):
        first, second = taskset(tmp_path, kind, **features), taskset(tmp_path, kind, **features)
        rows_of(first, stop)
        second.seek(json.loads(json.dumps(first.cursor)))
        assert rows_of(pickle.loads(pickle.dumps(second)), 70 - stop) == whole[stop:]


# --- learning -------------------------------------------------------------------------------------


def test_the_belief_is_the_counts_that_were_told() -> None:
    """By hand: 10 trials each; what was believed fades by a half, towards Beta(1, 1), when new
    trials of the row come.
    """
    made = DifficultyBased(Rows(4, 2, 0, 0), m=10, lamb=0.5)
    made.row(0, 0, 0), made.row(0, 1, 1)
    made.tell(0, 2, 0.8)
    made.tell(1, 3, 7.0)  # a reward above 1 is a success, no more
    made.row(0, 0, 2)
    assert made.learned == 0  # batch 1 is drawn without what batch 0 told: that may still run
    made.row(0, 0, 4)
    assert made.learned == 1
    np.testing.assert_allclose((made.alpha[2], made.beta[2]), (1 + 8, 1 + 2))
    np.testing.assert_allclose((made.alpha[3], made.beta[3]), (11, 1))
    made.tell(2, 2, 0.5)
    made.row(0, 0, 6)
    np.testing.assert_allclose(
        (made.alpha[2], made.beta[2]), (0.5 * 9 + 0.5 + 5, 0.5 * 3 + 0.5 + 5)
    )


def test_rows_that_were_not_drawn_learn_from_their_features() -> None:
    """Two rows at 0.35 between (0.1, 0.2) and (0.5, 0.6): halfway between the models, so row 2 is
    expected at 0.5 too.
    """
    features = [[0.1, 0.5], [0.2, 0.6], [0.4, 0.6]]
    made = DifficultyBased(Rows(3, 2, 0, 0, features), m=10, rho=0.2, lamb=0.0)
    made._update([(0, 0, 0.3), (1, 1, 0.4)])
    np.testing.assert_allclose((made.alpha[2], made.beta[2]), (1 + 2 * 0.5, 1 + 2 * 0.5))
    np.testing.assert_allclose(made.alpha[0], 1 + 0.2 * 10 * 0.3 + 0.8 * 10 * 0.3)


def test_it_draws_what_is_near_the_target() -> None:
    made = DifficultyBased(Rows(6, 2, 0, 0), tau=0.0, target_reward=0.5, m=100)
    for row, value in enumerate((0.0, 0.1, 0.45, 0.55, 0.9, 1.0)):
        made._update([(row, row, value)])
    assert sorted(made._draw(9)) == [2, 3]
    soft = DifficultyBased(Rows(6, 2, 0, 0), tau=0.05, target_reward=0.5, m=100)
    soft.alpha, soft.beta = made.alpha, made.beta
    often = Counter(row for batch in range(400) for row in soft._draw(batch))
    assert min(often[2], often[3]) > 5 * max(often[0], often[5])


def reward_of(task: Task) -> float:
    return (task.row * 5 % ROWS) / ROWS


async def answer(task: Task, context: Any) -> list[Experience]:
    """Takes its time, in another order than that of the tasks; some fail for good."""
    await context.sleep(task)
    if task.row % 11 == 3:
        raise KeyError("answer")
    return [
        Experience(
            tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[0.0], reward=reward_of(task)
        )
    ]


async def trained(
    directory: Path, tasks: Any, lasts: Any, first: int, last: int, epoch: int, settled: bool = True
) -> dict[int, int]:
    """Steps [first, last) of a run on this directory; the row of every draw.

    Ends like a kill, in the middle of something where it is not `settled`: nothing is told.
    """
    drawn: dict[int, int] = {}

    class Noting(Actor):
        def __getattr__(self, name: str) -> Any:
            method = super().__getattr__(name)
            if name != "admit_some":
                return method

            async def admit_some(explorer: str, tasks: list[tuple[bytes, Any]], *_: Any) -> Any:
                for task, _ in tasks:
                    drawn[decode(task, Task).draw] = decode(task, Task).row
                return await method.remote(explorer, tasks)

            return Actor(SimpleNamespace(admit_some=admit_some)).admit_some

    config = ExperienceBufferConfig(max_read_timeout=5000.0)
    buffer = ExperienceBuffer(
        config, str(directory), SIZE, 1, 1, 30, segment_bytes=2**12
    )  # small segments: it is compacted on the way
    await buffer.attach_trainer(first, epoch)
    settings = ExplorerConfig(max_retry_times=0, runner_per_model=64)
    exploring = Explorer(
        settings, ModelConfig(), tasks, [], {"engine_0": None}, ActorHandle(Noting(buffer)), SIZE
    )  # type: ignore[arg-type]
    exploring.max_failures = 10**6
    exploring.prepared.set()

    async def sleep(self: Any, task: Task) -> None:
        await asyncio.sleep(lasts(task))

    WorkflowContext.sleep = sleep  # type: ignore[attr-defined]
    try:
        await exploring.explore()
        for step in range(first, last):
            opened(await buffer.take(step))
            await buffer.consumed(step)
            await buffer.published(step + 1)
            await buffer.retain(await buffer.position(), step)
        if settled:
            await asyncio.sleep(60)  # of a clock that does not wait: all that can be learned is
    finally:
        del WorkflowContext.sleep  # type: ignore[attr-defined]
        await exploring.shutdown()
        await buffer.shutdown()
    return drawn


def learning(directory: Path) -> Taskset:
    kwargs = {"tau": 0.1, "target_reward": 0.5}
    return taskset(directory, "difficulty_based", kwargs=kwargs, feature_keys=["rate", "strong"])


def test_a_run_that_was_killed_draws_what_an_unbroken_one_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through explorer, buffer and journal, which was cut on the way: the learned beliefs are the
    same bits, whatever took long.
    """
    monkeypatch.setattr(workflows, "run", answer)
    monkeypatch.setattr(selectors, "BELIEF_EVERY", 0)  # every 24 lessons, then
    whole, first, second = learning(tmp_path), learning(tmp_path), learning(tmp_path)

    async def scenario() -> tuple[Any, Any]:
        unbroken = await trained(tmp_path / "a", whole, lambda task: 1 + task.row % 5, 0, 20, 0)
        before = await trained(tmp_path / "b", first, lambda task: 1 + task.row % 3, 0, 9, 0, False)
        after = await trained(tmp_path / "b", second, lambda task: 2, 9, 20, 1)
        assert before and after and before == {draw: unbroken[draw] for draw in before}
        assert {draw: before[draw] for draw in before if draw in after} == {
            draw: after[draw] for draw in before if draw in after
        }
        return unbroken, before | after

    unbroken, broken = run(scenario())
    assert [unbroken[draw] for draw in range(20 * SIZE)] == [
        broken[draw] for draw in range(20 * SIZE)
    ]
    ours, theirs = whole._selector, second._selector
    assert (
        isinstance(ours, DifficultyBased)
        and isinstance(theirs, DifficultyBased)
        and ours.learned == theirs.learned > 15
    )
    assert (
        ours.alpha.tobytes() == theirs.alpha.tobytes()
        and ours.beta.tobytes() == theirs.beta.tobytes()
    )
    assert ours.alpha.max() > 3  # it did learn
    (told,) = Ledger(str(tmp_path / "b"), 2**12).progress.told.values()
    assert len(told) < 2.5 * ROWS, "what beliefs are made of is not kept"
    assert [len(lesson) for lesson in told].count(6) == 1


def test_a_belief_is_kept_only_with_a_task_of_the_batch_that_it_was_made_for() -> None:
    """With one before, a run could go on in front of a batch whose draw is to know less."""
    made = DifficultyBased(Rows(2, 2, 0, 0))
    made.recall([(n, n % 2, 0.5) for n in range(64)], [])
    made.row(0, 0, 64)
    assert made.belief(63) is None
    before, belief = made.belief(65) or (0, b"")
    assert before == 62 and made.belief(65) is None, "and then not again so soon"
    other = DifficultyBased(Rows(2, 2, 0, 0))
    other.believe(belief)
    assert other.alpha.tobytes() == made.alpha.tobytes() and made.alpha.max() > 2


# --- several sets ---------------------------------------------------------------------------------


def mixture(directory: Path, kind: str = "shuffle") -> Mixture:
    sets = [
        taskset(directory, kind, "small", 6, is_part=True),
        taskset(directory, kind, "large", 19, is_part=True),
    ]
    return Mixture(sets, 3, None, SIZE)


def test_an_epoch_of_several_sets_has_every_row_once_but_for_the_short_batch(
    tmp_path: Path,
) -> None:
    made = mixture(tmp_path)
    assert (len(made), made.name) == (24, "small+large")
    for _ in range(3):
        epoch = [next(made) for _ in range(24)]
        found = Counter((task.taskset, task.row) for task in epoch)
        assert max(found.values()) == 1 and len({task.taskset for task in epoch[:12]}) == 2
    assert [task.epoch for task in epoch] == [2] * 24


def test_a_cursor_goes_on_in_a_mixture(tmp_path: Path) -> None:
    one = mixture(tmp_path)
    whole = [next(one).id for _ in range(60)]
    for stop in (0, 1, 23, 24, 25, 40):
        first, second = mixture(tmp_path), mixture(tmp_path)
        for _ in range(stop):
            next(first)
        second.seek(json.loads(json.dumps(first.cursor)))
        assert [next(pickle.loads(pickle.dumps(second))).id] == [whole[stop]]
        assert [next(second).id for _ in range(60 - stop)] == whole[stop:]


def test_a_set_of_a_mixture_hears_of_its_own_tasks_only(tmp_path: Path) -> None:
    made = mixture(tmp_path, "difficulty_based")
    assert made.learns
    task = next(made)
    made.tell(task, 1.0)
    heard = {one.name: list(one._selector._heard) for one in made.sets}  # type: ignore[union-attr]
    assert heard.pop(task.taskset) == [(task.draw, task.row, 1.0)] and not any(heard.values())


def test_every_selector_of_the_reference_is_there() -> None:
    assert set(selectors.SELECTORS) == {
        "sequential",
        "shuffle",
        "random",
        "offline_easy2hard",
        "difficulty_based",
    }


def test_a_set_of_a_mixture_may_be_smaller_than_a_batch(tmp_path: Path) -> None:
    kind = "difficulty_based"
    small = taskset(tmp_path, kind, "small", 3, is_part=True, batch_size=8)
    large = taskset(tmp_path, kind, "large", 21, is_part=True, batch_size=8)
    made = Mixture([small, large], 3, None, 8)
    found = Counter()
    for _ in range(72):
        task = next(made)
        made.tell(task, 1.0)
        found[task.taskset, task.epoch] += 1
    assert [found["small", epoch] for epoch in range(3)] == [3, 3, 3]


def test_what_was_learned_of_rows_that_are_no_more_is_refused(tmp_path: Path) -> None:
    kind = "difficulty_based"
    lesson = ["t", 0, ROWS - 1, 1.0]
    taskset(tmp_path, kind).recall([lesson], [])
    with pytest.raises(ConfigError, match="'t' has 8 rows, and its selector has learned of more"):
        taskset(tmp_path, kind, rows=8).recall([lesson], [])
