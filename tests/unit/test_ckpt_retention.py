"""Retention against a model of it, over random histories: the newest and the tagged stay, the rest
by the union of rules.
"""

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rft.checkpoint.catalog import Entry, expired, rolling
from rft.checkpoint.records import Retention

POLICIES = st.builds(
    Retention,
    last=st.integers(0, 4),
    every=st.integers(0, 5),
    best=st.integers(0, 3),
    best_is_lowest=st.booleans(),
    max_bytes=st.sampled_from([0, 0, 1, 40, 100]),
)


def entry(step: int, epoch: int = 1, size: int = 10, tagged: bool = False) -> Entry:
    return Entry(f"step_{step:08d}", epoch, step, size, tagged)


def left(entries: list[Entry], policy: Retention) -> list[int]:
    gone = expired(entries, policy)
    return [e.step for e in sorted(entries, key=lambda e: (e.epoch, e.step)) if e not in gone]


def test_rules_are_a_union() -> None:
    entries = [entry(step, tagged=step == 2) for step in range(1, 13)]
    policy = Retention(last=2, every=5, best=2, scores={3: 0.9, 7: 0.8, 8: 0.1, 99: 1.0})
    assert left(entries, policy) == [2, 3, 5, 7, 10, 11, 12]
    lowest = Retention(last=1, best=1, best_is_lowest=True, scores=policy.scores)
    assert left(entries, lowest) == [2, 8, 12]


def test_what_is_kept_beside_the_last_ones_holds_no_data() -> None:
    entries = [entry(step, tagged=step == 1) for step in (1, 5, 8, 9)]
    assert [e.step for e in rolling(entries, Retention(last=2, every=5))] == [8, 9]
    assert [e.step for e in rolling(entries, Retention(last=0))] == [1, 5, 8, 9]


def test_of_equal_scores_the_later_one_stays() -> None:
    assert left(
        [entry(s) for s in (1, 2, 3)], Retention(last=1, best=1, scores={1: 0.5, 2: 0.5})
    ) == [2, 3]


@pytest.mark.parametrize("first, third, kept", [(0.9, 0.5, 1), (0.3, 0.9, 3)])
@pytest.mark.parametrize("lowest", [False, True])
def test_a_score_that_is_no_number_pushes_nothing_out(
    first: float, third: float, kept: int, lowest: bool
) -> None:
    sign = -1 if lowest else 1
    scores = {1: sign * first, 2: nan, 3: sign * third, 4: sign * 0.4, 5: sign * inf}
    policy = Retention(last=1, best=1, best_is_lowest=lowest, scores=scores)
    assert left([entry(step) for step in range(1, 7)], policy) == [kept, 6]


def test_the_best_of_nothing_but_nan_is_none() -> None:
    policy = Retention(last=1, best=2, scores={1: nan, 2: nan})
    assert left([entry(step) for step in (1, 2, 3)], policy) == [3]


def test_last_zero_keeps_all_and_nothing_is_nothing() -> None:
    assert left([entry(s) for s in (1, 2, 3)], Retention(last=0)) == [1, 2, 3]
    assert expired([], Retention(last=1)) == []


def test_a_later_attempt_is_newer_whatever_its_step() -> None:
    assert left([entry(9, epoch=1), entry(4, epoch=2)], Retention(last=1)) == [4]


def test_the_byte_budget_takes_the_oldest_first_but_neither_the_newest_nor_tagged_ones() -> None:
    entries = [entry(step, tagged=step == 1) for step in range(1, 6)]
    assert left(entries, Retention(last=0, max_bytes=30)) == [1, 4, 5]
    assert left(entries, Retention(last=0, max_bytes=1)) == [1, 5]


class History(RuleBasedStateMachine):
    """Saves begun (up to 3 in flight), committed in any order, scored, tagged, retired; names are
    never made anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.epoch = 1
        self.flying: list[tuple[int, int]] = []
        self.there: dict[tuple[int, int], Entry] = {}
        self.scores: dict[int, float] = {}

    @precondition(lambda self: len(self.flying) < 3)
    @rule()
    def begin(self) -> None:
        self.step += 1
        self.flying.append((self.epoch, self.step))

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 2), size=st.integers(1, 30), policy=POLICIES)
    def commit_and_retire(self, which: int, size: int, policy: Retention) -> None:
        epoch, step = self.flying.pop(which % len(self.flying))
        self.there[epoch, step] = Entry(f"{epoch}/{step}", epoch, step, size)
        self.retire(policy)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def tag(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.there)))
        self.there[key] = replace(self.there[key], tagged=True)

    @rule(step=st.integers(1, 20), value=st.floats(0, 1))
    def score(self, step: int, value: float) -> None:
        self.scores[step] = value

    @rule(back=st.integers(0, 5))
    def die_and_come_back(self, back: int) -> None:
        self.epoch, self.step, self.flying = self.epoch + 1, max(0, self.step - back), []

    def retire(self, policy: Retention) -> None:
        policy = Retention(
            **{f: getattr(policy, f) for f in policy.__struct_fields__}
            | {"scores": dict(self.scores)}
        )
        before = dict(self.there)
        for gone in expired(list(self.there.values()), policy):
            del self.there[gone.epoch, gone.step]
        assert max(before) in self.there
        assert all(key in self.there for key, e in before.items() if e.tagged)
        newest = sorted(before)[-policy.last :] if policy.last else sorted(before)
        if not policy.max_bytes:
            assert set(newest) <= set(self.there)
            assert all(
                key in self.there for key in before if policy.every and key[1] % policy.every == 0
            )
            scored = [key for key in before if key[1] in self.scores]
            for key in set(scored) - set(self.there):
                better = [k for k in scored if self._beats(k[1], key[1], policy)]
                assert len(better) >= policy.best
        else:
            free = [
                e for e in self.there.values() if not e.tagged and (e.epoch, e.step) != max(before)
            ]
            assert sum(e.bytes for e in self.there.values()) <= policy.max_bytes or not free

    def _beats(self, one: int, other: int, policy: Retention) -> bool:
        if one == other:
            return False
        mine, theirs = self.scores[one], self.scores[other]
        return (mine <= theirs) if policy.best_is_lowest else (mine >= theirs)


History.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestHistory = History.TestCase


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 50), unique=True, max_size=12), POLICIES)
def test_retiring_again_removes_nothing_more(steps: list[int], policy: Retention) -> None:
    entries = [entry(step) for step in steps]
    gone = expired(entries, policy)
    assert expired([e for e in entries if e not in gone], policy) == []
