"""When weights are published: the table of every style, and what follows from it in simulated runs
of every combination.
"""

import itertools
from collections.abc import Collection

import pytest
from sync_simulation import Pace, Simulation, Standstill

from rft.config import SynchronizerConfig
from rft.sync import style
from rft.sync.style import DYNAMIC, FIXED, FULLY_ASYNC, STYLES, TRAINER_DRIVEN, Cadence, is_due

INTERVALS, OFFSETS, MORE = range(1, 5), range(4), range(3)
PACES = {
    "even": Pace(),
    "slow rollouts": Pace(rollout=4.0),
    "slow training": Pace(train=4.0),
    "slow pushes": Pace(push=3.0),
}


def published(
    name: str, interval: int, offset: int, steps: int, staleness: int, asked: Collection[int] = ()
) -> list[int]:
    """Steps after which a trainer publishes whose explorers ask after the steps `asked`."""
    found, version = [], 0
    for step in range(1, steps + 1):
        if is_due(name, step, version, interval, offset, staleness, asked=step in asked):
            found.append(step)
            version = step
    return found


@pytest.mark.parametrize("name", [FIXED, TRAINER_DRIVEN, FULLY_ASYNC])
@pytest.mark.parametrize(
    ("interval", "offset", "expected"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6, 7, 8]),
        (2, 0, [2, 4, 6, 8]),
        (3, 0, [3, 6]),
        (1, 1, [2, 3, 4, 5, 6, 7, 8]),
        (2, 1, [3, 5, 7]),
        (3, 2, [5, 8]),
        (4, 3, [7]),
    ],
)
def test_intervals_are_counted_from_the_offset(
    name: str, interval: int, offset: int, expected: list[int]
) -> None:
    """At every staleness that the config lets pass; whether anybody asks changes nothing."""
    least = style.least_staleness(interval, offset)
    for staleness in (least, least + 1, least + 5):
        assert published(name, interval, offset, 8, staleness) == expected
        assert published(name, interval, offset, 8, staleness, asked={1, 2, 3}) == expected


def test_an_explorer_is_answered_after_the_step_that_runs_when_it_asks() -> None:
    assert published(DYNAMIC, 4, 0, 12, 11, asked={2, 3, 9}) == [2, 3, 9]
    assert published(DYNAMIC, 4, 2, 12, 11, asked={2, 3, 9}) == [3, 9]


@pytest.mark.parametrize("name", STYLES)
def test_no_style_lets_the_run_stand_still(name: str) -> None:
    """Nobody asks, or the interval is longer than the staleness allows (a run that began with other
    keys): still published.
    """
    assert published(name, 100, 0, 9, 2) == [3, 6, 9]
    assert published(name, 100, 50, 9, 0) == list(range(1, 10))


def test_what_is_published_already_is_not_due() -> None:
    assert not is_due(FIXED, 4, 4, 1, 0, 0)
    assert not is_due(DYNAMIC, 4, 4, 1, 0, 0, asked=True)


def test_defaults_of_the_styles() -> None:
    """Synchronous, one step off, two steps between versions; and how far each style lets rollouts
    go ahead of that.
    """
    assert [style.default_staleness(FIXED, i, o) for i, o in ((1, 0), (1, 1), (2, 0), (2, 1))] == [
        0,
        1,
        1,
        2,
    ]
    assert [style.default_staleness(TRAINER_DRIVEN, i, o) for i, o in ((1, 0), (3, 0), (3, 1))] == [
        1,
        5,
        6,
    ]
    assert [style.default_staleness(FULLY_ASYNC, i, o) for i, o in ((1, 0), (3, 0), (3, 1))] == [
        2,
        4,
        5,
    ]
    for name, interval, offset in itertools.product(STYLES, INTERVALS, OFFSETS):
        assert style.default_staleness(name, interval, offset) >= style.least_staleness(
            interval, offset
        )


def test_only_the_style_in_which_explorers_ask_asks_them() -> None:
    asked: list[int] = []
    for name in STYLES:
        sync = SynchronizerConfig(sync_style=name, sync_interval=3, max_staleness=9)
        Cadence(sync, lambda interval: not asked.append(interval)).is_due(1)
    assert asked == [3]


# --- simulated runs -------------------------------------------------------------------------------


def simulated(name: str, interval: int, offset: int, more: int, pace: str, seed: int) -> Simulation:
    staleness = style.least_staleness(interval, offset) + more
    sync = SynchronizerConfig(
        sync_style=name, sync_interval=interval, sync_offset=offset, max_staleness=staleness
    )
    return Simulation(sync, seed, PACES[pace]).run()


def check_tokens(run: Simulation) -> None:
    """Every group in one step, or failed; no token older than it may be, and none of a version that
    was not published.
    """
    trained = [rollout.number for step in range(run.steps) for rollout in run.trained[step]]
    assert trained == sorted(set(trained)), "steps take groups in admission order, each once"
    assert set(trained) | run.failed == set(
        range(run.progress.next_group)
    ) and not run.failed & set(trained)
    assert all(len(groups) == run.tasks_per_step for groups in run.trained.values())
    for step, groups in run.trained.items():
        for rollout in groups:
            assert (
                step - max(rollout.versions) >= 0
                and step - min(rollout.versions) <= run.sync.max_staleness
            )
            assert rollout.versions <= set(run.published)


def check_versions(run: Simulation) -> None:
    """What was published is what the style says, counted here in another way than there."""
    sync, gaps = run.sync, itertools.pairwise(run.published)
    if sync.sync_style != DYNAMIC:
        regular = range(sync.sync_offset + sync.sync_interval, run.steps + 1, sync.sync_interval)
        assert run.published == [0, *regular]
        return
    assert sorted(run.asked) == list(range(1, run.steps + 1))
    assert all(answer == expected for answer, expected in run.asked.values())
    for before, version in gaps:
        asked = [
            step
            for step in range(before + 1, version + 1)
            if run.asked[step][0] and step > sync.sync_offset
        ]
        stands = version - before == sync.max_staleness + 1
        assert stands if not asked else asked == [version], (before, version, asked)


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("name", STYLES)
def test_no_token_is_too_old_in_any_combination(name: str, pace: str) -> None:
    for seed, (interval, offset, more) in enumerate(itertools.product(INTERVALS, OFFSETS, MORE)):
        run = simulated(name, interval, offset, more, pace, seed)
        check_tokens(run)
        check_versions(run)


def test_explorers_that_never_ask_get_weights_when_nothing_else_can_happen() -> None:
    sync = SynchronizerConfig(sync_style=DYNAMIC, sync_interval=2, max_staleness=3)
    run = Simulation(sync, seed=3)
    run.cadence = Cadence(sync, lambda interval: False)
    check_tokens(run.run())
    assert run.published == list(range(0, run.steps + 1, 4))
    run = Simulation(sync, seed=3)
    run.cadence = Cadence(
        SynchronizerConfig(sync_style=DYNAMIC, max_staleness=100), lambda interval: False
    )
    with pytest.raises(
        Standstill, match="step 4 with version 0 served: 0 groups run, 0 are stored, 0 slots"
    ):
        run.run()


def test_the_simulation_reaches_what_it_judges() -> None:
    """The bound is met exactly, groups cross versions, and an explorer that is slow asks every
    `sync_interval` steps' worth.
    """
    runs = [
        simulated(FULLY_ASYNC, 2, 1, more, "slow training", seed)
        for more in MORE
        for seed in range(3)
    ]
    ages = [
        (step - min(rollout.versions), run.sync.max_staleness, len(rollout.versions))
        for run in runs
        for step, groups in run.trained.items()
        for rollout in groups
    ]
    assert any(age == bound for age, bound, _ in ages) and any(
        versions > 1 for *_, versions in ages
    )
    slow = simulated(DYNAMIC, 3, 0, 2, "slow rollouts", 1)
    gaps = [version - before for before, version in itertools.pairwise(slow.published)]
    assert 3 <= sum(gaps) / len(gaps) <= 4


def test_in_step_by_default_and_a_step_off_with_an_offset() -> None:
    """fixed: with interval 1 every token is of the newest version; with an offset of 1 the batch
    before is under way.
    """
    for offset, oldest in ((0, 0), (1, 1)):
        staleness = style.default_staleness(FIXED, 1, offset)
        run = Simulation(
            SynchronizerConfig(sync_offset=offset, max_staleness=staleness), seed=5
        ).run()
        assert (
            max(step - min(r.versions) for step, groups in run.trained.items() for r in groups)
            == oldest
        )
