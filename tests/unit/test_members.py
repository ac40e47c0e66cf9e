"""Every reachable state of the synchronizer's state machine, for two engines, two trainers and two
versions each.
"""

from collections.abc import Iterator
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.sync.members import (
    COMMITTING,
    CONNECTING,
    GONE,
    IDLE,
    PATIENCE,
    STAGING,
    START,
    Mark,
    Members,
)


class World:
    """The machine, and what the outside really has: bytes in engines, and calls under way."""

    def __init__(
        self, engines: tuple[str, ...], versions: tuple[int, ...], epochs: tuple[int, ...]
    ) -> None:
        self.engines, self.versions, self.epochs = engines, versions, epochs
        self.members = Members()
        # engine -> what its task is doing: step, epoch, mark
        self.calls: dict[str, tuple[str, int, Mark | None]] = {}
        self.real: dict[str, Mark | None] = {}  # what an engine's memory holds; None: nothing whole
        self.joins = dict.fromkeys(engines, 0)
        self.fresh: set[str] = set()  # engines that connected since the groups changed last
        self.lives = 1  # of the machine that there may be yet
        self.is_new = False  # this is another one than the first
        self.led = -1  # the newest trainer
        self.asked = -1  # the newest version that it has told of
        # what the buffer has heard is published, which explorers and trainer count on
        self.heard: Mark | None = None

    def copy(self) -> "World":
        world, state = World(self.engines, self.versions, self.epochs), self.members
        world.members = replace(
            state, all={n: replace(m) for n, m in state.all.items()}, round=set(state.round)
        )
        world.calls, world.real, world.joins = dict(self.calls), dict(self.real), dict(self.joins)
        world.fresh, world.lives, world.is_new = set(self.fresh), self.lives, self.is_new
        world.led, world.asked, world.heard = self.led, self.asked, self.heard
        return world

    def key(self) -> tuple:
        state = self.members
        return (
            state.epoch,
            state.offered,
            state.target,
            state.published,
            tuple(sorted(state.round)),
            tuple((n, astuple(m)[:-1]) for n, m in sorted(state.all.items())),
            tuple(sorted(self.calls.items())),
            tuple(sorted(self.real.items())),
            tuple(self.joins.values()),
            tuple(sorted(self.fresh)),
            (self.lives, self.is_new, self.led, self.asked, self.heard),
        )


def moves(world: World) -> Iterator[tuple[str, ...]]:
    """Everything that can happen next, whoever does it."""
    state = world.members
    for epoch in world.epochs:
        if epoch > state.epoch and epoch in (world.led, world.led + 1):
            yield "trainer", epoch
    if state.epoch == world.led >= 0:
        concluded = state.target is not None and state.published == state.target
        if state.target is None or concluded or state.is_hopeless():
            newest = state.offered[1] if state.offered else world.asked - 1
            for version in world.versions:
                if version > newest:
                    yield "publish", version
                    if state.target is not None or (world.is_new and world.asked >= 0):
                        yield "offer", version
        if state.is_over() and not concluded:
            yield ("conclude",)
    for name in world.engines:
        alive = name in state.alive()
        if not alive and world.joins[name] < 2 and name not in world.calls:
            yield "join", name
        if alive:
            yield "die", name
        if name in world.calls:
            step = world.calls[name][0]
            if step == "connect":
                yield from (("connected", name), ("unreachable", name), ("broken", name))
                yield ("passed over", name)
            elif step == "stage":
                yield from (
                    ("staged", name),
                    ("missed", name),
                    ("unreachable", name),
                    ("passed over", name),
                    ("broken", name),
                )
            else:
                yield from (("committed", name), ("damaged", name), ("broken", name))
        elif alive and state.next_step(name) in ("connect", "take"):
            yield "act", name
    if world.lives and state.epoch >= 0:
        # an installation under way ends, in one of these ways, before its engine is heard
        for end in ("committed", "damaged", "broken"):
            for told in (True, False):
                yield "recover", end, told
    if world.engines[1:] and any(m.connected is not None for m in state.all.values()):
        yield ("regroup",)


def step(world: World, move: tuple) -> None:
    state, (what, *rest) = world.members, move
    name = rest[0] if rest else ""
    if what == "trainer":
        state.trainer(rest[0])
        world.fresh.clear()
        world.led, world.asked = rest[0], world.asked if rest[0] == world.led else -1
    elif what in ("publish", "offer"):
        getattr(state, what)(rest[0])
        world.asked = rest[0]
    elif what == "recover":
        recover(world, *rest)
    elif what == "regroup":
        state.regroup()
        world.fresh.clear()
    elif what == "conclude":
        before = state.published
        mark = state.conclude()
        world.heard = mark
        assert before is None or mark[0] > before[0] or mark[1] >= before[1], (
            "published went back within an epoch"
        )
        holders = [
            n for n in state.alive() if world.real.get(n) is not None and world.real[n] >= mark
        ]
        assert holders, "published, and nobody holds it"
    elif what == "join":
        state.join(name)
        world.joins[name] += 1
        world.real[name] = state.start
    elif what == "die":
        state.leave(name, "killed")
        world.calls.pop(name, None)  # its task is cancelled
        world.real[name] = None
    elif what == "act":
        if state.next_step(name) == "connect":
            state.connect(name)
            world.calls[name] = ("connect", state.epoch, None)
            world.fresh.add(name)
        else:
            assert name in world.fresh, f"{name} takes weights by the ways of an older group"
            mark = state.begin(name)
            world.calls[name] = ("stage", mark[0], mark)
    else:
        finish(world, what, name)


def recover(world: World, end: str, is_told: bool) -> None:
    """The machine is lost, and with it all calls; a new one asks the engines. `is_told`: what the
    buffer knows.
    """
    for name, (what, _, mark) in world.calls.items():
        if what == "commit" and end != "broken":
            world.real[name] = mark if end == "committed" else None
    alive = list(world.members.alive())
    held = {name: None if world.real[name] == START else world.real[name] for name in alive}
    world.members = Members()
    world.members.recover(held, world.heard if is_told else None)
    world.members.recover(held, world.heard)  # the call came twice
    world.calls.clear()
    world.fresh.clear()
    world.lives, world.is_new = world.lives - 1, True
    state = world.members
    serve = [name for name in alive if held[name] and held[name] >= (world.heard or held[name])]
    if is_told and world.heard:
        assert state.admitted() == serve, "one that could serve waits for the trainer"
    marks = [mark for mark in (world.heard if is_told else None, *held.values()) if mark]
    with pytest.raises(ValueError, match="cannot connect"):
        state.trainer(max((epoch for epoch, _ in marks), default=0) - 1)


def finish(world: World, what: str, name: str) -> None:
    """The call that an engine's task waits for ends."""
    state = world.members
    _, epoch, mark = world.calls.pop(name)
    if what == "connected":
        state.connected(name, epoch)
    elif what == "staged":
        if state.staged(name, mark):
            world.calls[name] = ("commit", epoch, mark)
    elif what == "missed":
        state.missed(name, mark, "over")
    elif what == "committed":
        world.real[name] = mark
        state.committed(name, mark)
    elif what in ("unreachable", "passed over"):
        before = state.all[name].failures
        state.unreachable(name, epoch, "lost", others=what == "passed over")
        if what == "passed over":
            assert state.all[name].failures == before, "it is punished for another's fault"
    elif what == "damaged":
        world.real[name] = None
        state.broken(name, epoch, "mixed", damaged=True)
    else:
        state.broken(name, epoch, "raised")


def check(world: World) -> None:
    state = world.members
    for name in state.admitted():
        assert state.published is not None and world.real[name] is not None, (
            f"{name} serves without weights"
        )
        assert world.real[name] >= state.published, (
            f"{name} serves older weights than those published"
        )
        assert world.heard is None or world.real[name] >= world.heard, (
            f"{name} serves older weights than those that others have been told of"
        )
    for name, member in state.all.items():
        assert member.held == world.real[name] or member.held is None, (
            f"{name} is believed to hold what it does not"
        )
        assert member.state in (IDLE, CONNECTING, STAGING, COMMITTING, GONE)
        assert (member.taking is not None) == (member.state in (STAGING, COMMITTING))
        assert member.connected in (None, state.epoch)
    for name in state.round:
        assert name in state.alive(), "the round waits for the dead"
        waits = name in world.calls or state.next_step(name) in ("connect", "take")
        assert waits, f"the round waits for {name}, which has nothing to do"


def explore(
    engines: tuple[str, ...],
    versions: tuple[int, ...],
    epochs: tuple[int, ...],
    serve_start: bool = False,
    lives: int = 1,
) -> int:
    """Walk through every state that can be reached; returns how many there are."""
    first = World(engines, versions, epochs)
    first.lives = lives
    if serve_start:
        first.members.serve_start()
    found, frontier = {first.key()}, [first]
    while frontier:
        world = frontier.pop()
        for move in moves(world):
            after = world.copy()
            step(after, move)
            check(after)
            if after.key() not in found:
                found.add(after.key())
                frontier.append(after)
    return len(found)


def test_one_engine_and_two_trainers_in_every_order() -> None:
    assert explore(("a",), (0, 1), (0, 1)) > 1500


@pytest.mark.parametrize("lives", [0, pytest.param(1, marks=pytest.mark.verify)])
def test_two_engines_and_one_round_in_every_order(lives: int) -> None:
    assert explore(("a", "b"), (0,), (0,), lives=lives) > 5_000


def test_engines_that_serve_what_they_were_started_with_until_there_is_a_version() -> None:
    assert explore(("a",), (0, 1), (0,), serve_start=True) > 300


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_two_engines_and_three_trainers_on_random_ways(data: st.DataObject) -> None:
    world = World(("a", "b"), (0, 1, 2), (0, 1, 2))
    for _ in range(80):
        possible = list(moves(world))
        if not possible:
            break
        step(world, data.draw(st.sampled_from(possible)))
        check(world)


def test_a_new_machine_knows_what_the_engines_say_and_no_more() -> None:
    members = Members()
    members.recover({"a": (2, 7), "b": (2, 6), "new": None}, None)
    assert members.admitted() == ["a"], "who knows whether 7 was published?"
    members.trainer(2)
    members.offer(7)
    assert [members.next_step(name) for name in members.all] == ["", "connect", "connect"]
    members.publish(7)
    assert members.round == {"b", "new"}, "who holds it already would never confirm it again"
    take(members, "b")
    take(members, "new")
    assert members.is_over() and members.conclude() == (2, 7)
    told = Members()
    told.recover({"a": (2, 7), "b": (2, 6), "new": None}, (2, 6))
    assert told.admitted() == ["a", "b"]


def test_an_older_trainer_cannot_come_back() -> None:
    members = Members()
    members.trainer(3)
    with pytest.raises(
        ValueError, match="a trainer of epoch 3 cannot connect: epoch 3 has been here"
    ):
        members.trainer(3)


def test_an_engine_that_has_just_started_is_not_admitted_before_it_has_the_published_weights() -> (
    None
):
    """W20: after a resume no engine serves what it was started with."""
    members = Members()
    members.join("a")
    assert members.admitted() == []
    members.trainer(1)
    members.publish(40)
    members.connect("a")
    members.connected("a", 1)
    mark = members.begin("a")
    assert members.admitted() == [] and members.staged("a", mark)
    members.committed("a", mark)
    members.conclude()
    members.join("b")
    assert members.admitted() == ["a"] and members.next_step("b") == "connect"


def test_without_any_version_engines_serve_what_they_have_and_later_ones_do_not() -> None:
    members = Members()
    members.join("a")
    members.serve_start()
    members.join("b")
    assert members.admitted() == ["a", "b"]
    members.trainer(0)
    members.publish(3)
    take(members, "a")
    members.leave("b", "killed")
    members.conclude()
    members.join("b")
    assert members.admitted() == ["a"] and members.next_step("b") == "connect"


def take(members: Members, name: str) -> None:
    members.connect(name)
    members.connected(name, members.epoch)
    mark = members.begin(name)
    assert members.staged(name, mark)
    members.committed(name, mark)


def test_an_engine_that_fails_three_times_leaves_the_round_to_the_others() -> None:
    members = Members()
    members.trainer(0)
    for name in ("a", "b"):
        members.join(name)
    members.publish(1)
    for _ in range(PATIENCE):
        members.connect("a")
        members.broken("a", 0, "raised")
    assert members.next_step("a") == "end" and members.round == {"b"}
