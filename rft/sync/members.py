"""Who holds which version, and what each engine does next: the synchronizer's state machine, pure.
No I/O, no clock, no Ray.

A mark is (epoch, version); marks are compared as pairs, so the versions of a trainer that came back
from an older checkpoint count as newer than those of the trainer before it. Three marks lead:
`offered` can be taken from the trainer now, `target` is what it asked all engines to take,
`published` is what they all hold. Every engine is in one state:

    state        event          then         and
    -            join           idle         not connected, holds nothing, or `start`
    -            recover        idle         not connected, holds what it says: the state machine
                                             before this one, which led it there, is lost
    any          leave          gone         its round goes on without it
    any          trainer        idle         (a new epoch) not connected; what it holds stays, and
                                             is served until the first round
    any          regroup        idle, or as it is   not connected, as soon as it is idle
    idle         connect        connecting
    connecting   connected      idle         connected to the epoch
    idle         begin          staging      with the offered mark, if it holds less than the target
    staging      staged         committing
    staging      missed         idle         the offer was over: waits for the next one, its round
                                             goes on without it, unless there is a newer one already
    committing   committed      idle         holds the mark
    connecting, staging, committing
                 unreachable    idle         not connected; for the third time in a row as `missed`,
                                             unless another engine was to blame
                 broken         idle         not connected; for the third time in a row gone, and to
                                             be replaced
    committing   damaged        idle         as broken, and it holds nothing: its weights are mixed

Invariants (tests/unit/test_members.py walks through every reachable state): an engine is admitted
to requests only when it holds at least the published mark; something is published only when every
engine of the round holds it, is gone or has missed it, and at least one holds it; of one epoch,
`published` never goes back, over the lives of this state machine too; what belongs to an older
epoch changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Mark = tuple[int, int]  # epoch, version
PATIENCE = 3  # failures in a row
# what every engine was started with, where that is to be served until there is something newer
START = (-1, 0)

IDLE, CONNECTING, STAGING, COMMITTING, GONE = "idle", "connecting", "staging", "committing", "gone"


@dataclass
class EngineMember:
    """One engine.

    `taking`: the mark that it stages or commits; `missed`: an offer that it will not try again.
    """

    state: str = IDLE
    connected: int | None = None  # epoch
    held: Mark | None = None
    taking: Mark | None = None
    missed: Mark | None = None
    failures: int = 0
    stale: bool = False  # its connections are those of an older group
    reason: str = ""  # of its last failure


@dataclass
class Members:
    epoch: int = -1
    offered: Mark | None = None
    target: Mark | None = None
    published: Mark | None = None
    all: dict[str, EngineMember] = field(default_factory=dict)
    round: set[str] = field(default_factory=set)  # engines that the target waits for
    start: Mark | None = None  # what an engine holds as it joins

    # A new state machine, in the place of one that is lost

    def recover(self, held: Mapping[str, Mark | None], published: Mark | None = None) -> None:
        """Engines are here, and hold what they say. `published`: what is known of that; else it is
        the newest mark that any of them holds, so that none serves an older one.

        The trainer of the newest epoch that anybody knows may connect again, and no older one. An
        engine that is here already stays as it is.
        """
        marks = [mark for mark in (published, *held.values()) if mark is not None]
        if self.epoch < 0 and self.published is None and marks:
            self.published = published or max(marks)
            self.epoch = max(epoch for epoch, _ in marks) - 1
        for name in [name for name in held if name not in self.alive()]:
            self.all[name] = EngineMember(held=held[name] or self.start)
            if self.is_led():
                self.round.add(name)

    # Events of the trainer

    def trainer(self, epoch: int) -> None:
        """A trainer attaches. Raises ValueError for one that is older than the last."""
        if epoch <= self.epoch:
            raise ValueError(
                f"a trainer of epoch {epoch} cannot connect: epoch {self.epoch} has been here"
            )
        self.epoch, self.offered, self.target = epoch, None, None
        self.round = set()
        for member in self.alive().values():
            member.connected = member.missed = member.taking = None
            member.state, member.failures, member.stale = IDLE, 0, False

    def offer(self, version: int) -> None:
        """`version` can be taken now, by whoever needs weights; one that is told of after a newer
        one is over: calls may come in another order than they were made.
        """
        self.offered = max(self.offered or START, (self.epoch, version))

    def publish(self, version: int) -> None:
        """All engines shall take `version`."""
        self.offered = self.target = (self.epoch, version)
        # who holds it already has confirmed it to the state machine before this one
        self.round = {n for n, member in self.alive().items() if not self._holds_target(member)}
        for member in self.alive().values():
            member.missed = None

    def serve_start(self) -> None:
        """Nothing was ever published: engines serve what they were started with."""
        assert self.published is None and self.target is None
        self.start = self.published = START
        for member in self.alive().values():
            member.held = START

    def conclude(self) -> Mark:
        """The round is over: its target is published."""
        assert self.is_over() and self.target is not None
        self.published, self.round = self.target, set()
        return self.published

    def regroup(self) -> None:
        """Engines take their bytes from each other in another way: whoever is idle connects again
        before it takes any; the others end what they do as it is.
        """
        for member in self.alive().values():
            member.stale = member.state != IDLE
            if member.state == IDLE:
                member.connected = None

    # Events of an engine

    def join(self, name: str) -> None:
        if name in self.alive():
            raise ValueError(f"{name} is here already")
        self.all[name] = EngineMember(held=self.start)

    def leave(self, name: str, reason: str) -> None:
        """Gone for good; one that comes back under the name joins as a new one."""
        if name in self.all:
            self.all[name] = EngineMember(state=GONE, reason=reason)
            self.round.discard(name)

    def connect(self, name: str) -> None:
        self._from(name, IDLE).state = CONNECTING

    def connected(self, name: str, epoch: int) -> None:
        if epoch == self.epoch:
            member = self._from(name, CONNECTING)
            member.connected = epoch
            self._rest(member)

    def begin(self, name: str) -> Mark:
        member = self._from(name, IDLE)
        assert self.offered is not None
        member.state, member.taking = STAGING, self.offered
        return self.offered

    def staged(self, name: str, mark: Mark) -> bool:
        """Whether it shall commit: not when a newer trainer has attached meanwhile."""
        if not self._takes(name, mark):
            return False
        self._from(name, STAGING).state = COMMITTING
        return True

    def missed(self, name: str, mark: Mark, reason: str) -> None:
        if self._takes(name, mark):
            member = self._from(name, STAGING)
            member.taking, member.reason = None, reason
            self._rest(member)
            if mark == self.offered:  # a newer one it can take
                self._pass_over(name)

    def committed(self, name: str, mark: Mark) -> None:
        """It holds `mark`, also when the trainer of that mark is not the newest any more."""
        member = self.all[name]
        if member.state == GONE:
            return
        member.held = mark
        if self._takes(name, mark):
            member.taking, member.failures, member.reason = None, 0, ""
            self._rest(member)
            if self.target is not None and mark >= self.target:
                self.round.discard(name)

    def unreachable(self, name: str, epoch: int, reason: str, others: bool = False) -> None:
        """It did not get its bytes. Whose fault that is, is not known, unless it is that of
        `others`.
        """
        if epoch == self.epoch and self._failed(name, reason, counted=not others):
            self.all[name].failures = 0
            self._pass_over(name)

    def broken(self, name: str, epoch: int, reason: str, damaged: bool = False) -> None:
        """It could not take them. `damaged`: and its weights are mixed."""
        if self.all[name].state == GONE:
            return
        if damaged:
            self.all[name].held = None
        if epoch == self.epoch and self._failed(name, reason):
            self.leave(name, reason)

    # Questions

    def alive(self) -> dict[str, EngineMember]:
        return {name: member for name, member in self.all.items() if member.state != GONE}

    def admitted(self) -> list[str]:
        """Engines that requests may go to."""
        if self.published is None:
            return []
        return [
            n for n, m in self.alive().items() if m.held is not None and m.held >= self.published
        ]

    def next_step(self, name: str) -> str:
        """What this engine shall do: "connect", "take", "" (wait) or "end"."""
        member = self.all[name]
        if member.state == GONE:
            return "end"
        wanted = self.target or self.published
        if member.state != IDLE or self.offered is None or wanted is None or self.has_missed(name):
            return ""
        if member.held is not None and member.held >= wanted:
            return ""
        return "connect" if member.connected != self.epoch else "take"

    def has_missed(self, name: str) -> bool:
        """Whether it will not try again to take what is offered."""
        member = self.all[name]
        return member.missed is not None and member.missed == self.offered

    def is_led(self) -> bool:
        """A round is under way."""
        return self.target is not None and self.target != self.published

    def is_over(self) -> bool:
        """Nobody is waited for any more, and somebody holds the target."""
        return (
            self.target is not None
            and not self.round
            and any(self._holds_target(m) for m in self.alive().values())
        )

    def is_hopeless(self) -> bool:
        """Engines are here, and none of them will ever take this target."""
        here = self.alive().values()
        return (
            self.target is not None
            and not self.round
            and bool(here)
            and all(m.missed for m in here)
        )

    def where(self) -> str:
        """What is known of every engine, for people."""
        if not self.all:
            return "no engine is here"
        told = []
        for name, member in self.all.items():
            held = f"version {member.held[1]}" if member.held else "no version"
            told.append(
                f"{name} is {member.state}, holds {held}"
                + (f" ({member.reason})" if member.reason else "")
            )
        return "; ".join(told)

    def _holds_target(self, member: EngineMember) -> bool:
        return self.target is not None and member.held is not None and member.held >= self.target

    def _takes(self, name: str, mark: Mark) -> bool:
        return self.all[name].taking == mark and mark[0] == self.epoch

    def _pass_over(self, name: str) -> None:
        self.all[name].missed = self.offered
        self.round.discard(name)

    def _failed(self, name: str, reason: str, counted: bool = True) -> bool:
        """Count it; True when patience has come to its end."""
        member = self.all[name]
        if member.state == GONE:
            return False
        member.state, member.connected, member.taking = IDLE, None, None
        member.failures, member.reason, member.stale = member.failures + counted, reason, False
        return member.failures >= PATIENCE

    def _rest(self, member: EngineMember) -> None:
        member.state = IDLE
        if member.stale:
            member.connected, member.stale = None, False

    def _from(self, name: str, state: str) -> EngineMember:
        member = self.all[name]
        assert member.state == state, f"{name} is {member.state}, not {state}"
        return member
