"""Many engines as one, while they come and go: a request goes to the engine with the fewest
sequences in flight.

    follow(synchronizer) ──admitted engines──► members ◄── generate(request): the least busy one
                                                  │          └── it died or refuses: another one
                                                  └──► slots: as many as the engines can use

In: `GenerateRequest`s from workflows; engines by name, all at once (`engines`: they are fixed, and
a death is the caller's failure) or as the synchronizer admits them (`follow`). Out:
`Completion`s. Invariants: a sample is of one engine; when that dies, those that it had finished and
`look` has seen are there, and another one is asked for the rest; an engine that died or refused is
asked again only after the synchronizer has admitted it anew; when the caller of a request gives up
(is cancelled), the engine is told to stop working on it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import msgspec

from rft.ground.experience import Completion, GenerateRequest, decode, encode
from rft.ground.protocols import ActorHandle
from rft.rollout.engine import EngineDied, EngineUnavailable, RolloutEngine

EngineHandle = ActorHandle[RolloutEngine]
LOOK_S = 5.0  # for an engine to say how idle it was: one that is alive does at once


class EngineSource(Protocol):
    """Who says which engines there are; `rft.sync.synchronizer` does."""

    async def members(self, seen: int = -1) -> tuple[int, dict[str, EngineHandle]]:
        """(generation, engines by name) once the generation is another than `seen`."""


@dataclass(eq=False)
class Member:
    """An engine that was admitted. `out`: why it gets no new requests, empty while it does."""

    name: str
    handle: EngineHandle
    load: int = 0  # sequences in flight
    out: str = ""
    is_dead: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    clocks: tuple[float, float] | None = None  # its idle seconds and all, at the last look

    def take(self, count: int) -> None:
        self.load += count
        self.idle.set() if self.load == 0 else self.idle.clear()


@dataclass(eq=False)
class PooledRequest:
    """A request that an engine works on. `here`: samples of the caller's that are there, by number:
    this request's, and those of others for the rest.
    """

    request: GenerateRequest
    member: Member
    here: dict[int, Completion]
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def known(self) -> list[int]:
        """Places of its own samples that are there."""
        first = self.request.first
        return [n - first for n in self.here if 0 <= n - first < self.request.n]

    def take(self, made: dict[int, Completion]) -> None:
        """Samples by their places."""
        self.here |= {self.request.first + place: one for place, one in made.items()}


class ResizableSemaphore:
    """Permissions to work, as many as the engines that serve can use: a semaphore whose size may
    change.

    Holders take one, wait for their turn in the order in which they came, and give it back.
    Invariant: no slot is given while `taken` is at or above `size`; when the size falls, holders
    keep theirs and the next ones wait for longer.
    """

    def __init__(self, each: int, engines: int):
        self.each = each  # per engine
        self.size = each * engines
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> int:
        return max(0, self.size - self.taken)

    def resize(self, engines: int) -> None:
        self.size = self.each * engines
        self._grant()

    async def acquire(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given in the same turn of the loop
                self.release()
            raise

    def release(self) -> None:
        self.taken -= 1
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self.taken < self.size:
            turn = self._waiting.popleft()
            if not turn.done():  # the others have given up
                self.taken += 1
                turn.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()


class EnginePool:
    def __init__(self, engines: dict[str, EngineHandle]):
        self.members: dict[str, Member] = {}
        self.generation = -1  # of the admitted engines, as the synchronizer counts
        self.is_fixed = bool(engines)
        self.requeued = 0  # requests that ran again on another engine
        self.deaths = 0
        self._newest = 0  # group that asked for anything
        self._leaving: set[str] = set()  # they finish what they have
        self._under_way: dict[str, PooledRequest] = {}  # by request id
        self._slots: WeakSet[ResizableSemaphore] = WeakSet()
        self._serving = asyncio.Event()
        self._alone_since = time.monotonic()
        self._reasons: dict[str, str] = {}  # of those that do not serve
        for name, handle in engines.items():
            self.add(name, handle)

    # --- who serves -------------------------------------------------------------------------------

    async def follow(self, synchronizer: ActorHandle[EngineSource]) -> None:
        """Take over who is admitted, change by change; never returns."""
        while True:
            self._apply(*await synchronizer.ask(EngineSource.members, self.generation))

    def add(self, name: str, handle: EngineHandle) -> None:
        """Give it requests from now on; under a known name it takes the place of the one before."""
        self.members[name] = Member(name, handle)
        self.members[name].idle.set()
        self._changed()

    def remove(self, name: str) -> None:
        """Give it no more requests; those that it has go on, for as long as it does."""
        member = self.members.pop(name)
        self._leave(member, member.out or f"{name} is no longer admitted")

    async def drain(self, name: str) -> None:
        """Give it no more requests, whoever admits it; return when it has none left."""
        self._leaving.add(name)
        if member := self.members.get(name):
            self._leave(member, f"{name} was asked to leave")
            await member.idle.wait()

    def open(self) -> list[Member]:
        """Those that get requests."""
        return [member for member in self.members.values() if not member.out]

    def slots(self, each: int) -> ResizableSemaphore:
        """`each` slots per engine that serves, now and later."""
        slots = ResizableSemaphore(each, len(self.open()))
        self._slots.add(slots)
        return slots

    def absence(self) -> str:
        """Since when nobody serves, and why; empty while somebody does."""
        if self.open():
            return ""
        why = "; ".join(self._reasons.values()) or "none was admitted before"
        return (
            f"no engine has been admitted for {time.monotonic() - self._alone_since:.1f} s ({why})"
        )

    def stats(self) -> dict[str, float]:
        return {
            "pool/engines": float(len(self.open())),
            "pool/running": float(sum(member.load for member in self.open())),
            "pool/requeued": float(self.requeued),
            "pool/deaths": float(self.deaths),
        }

    async def idleness(self) -> dict[str, float]:
        """Which part of the time since the last call the engines decoded nothing, by their own
        clocks: of all of them together, and of the idlest. Of one that is new, or does not answer,
        nothing is known.
        """
        looks = await asyncio.gather(*map(self._look, self.open()))
        spans = [(idle, whole) for idle, whole in filter(None, looks) if whole > 0]
        if not spans:
            return {}
        idle, whole = map(sum, zip(*spans, strict=True))
        return {
            "explorer/engine_idle_frac": idle / whole,
            "explorer/engine_idle_frac_max": max(idle / whole for idle, whole in spans),
        }

    async def _look(self, member: Member) -> tuple[float, float] | None:
        """Seconds since the last look in which it was idle, and all of them."""
        from ray.exceptions import RayActorError

        try:
            async with asyncio.timeout(LOOK_S):
                now = await member.handle.ask(RolloutEngine.idleness)
        except (RayActorError, TimeoutError):  # who asks it for tokens hears of its end
            return None
        before, member.clocks = member.clocks, now
        return None if before is None else (now[0] - before[0], now[1] - before[1])

    def _apply(self, generation: int, admitted: dict[str, EngineHandle]) -> None:
        """What is listed was admitted, known ones maybe anew: whatever they were out for, they are
        asked again.
        """
        self._leaving &= set(admitted)
        for name in [name for name in self.members if name not in admitted]:
            self.remove(name)
        for name, handle in admitted.items():
            known = self.members.get(name)
            if name in self._leaving or (known and known.is_dead and known.handle == handle):
                continue
            if known and known.handle == handle:
                known.out = ""
            else:
                self.add(name, handle)
        self.generation = generation
        self._changed()

    def _leave(self, member: Member, reason: str) -> None:
        member.out = self._reasons[member.name] = reason
        self._changed()

    def _changed(self) -> None:
        open_ = self.open()
        for member in open_:
            self._reasons.pop(member.name, None)
        if open_:
            self._serving.set()
        elif self._serving.is_set():
            self._serving.clear()
            self._alone_since = time.monotonic()
        for slots in self._slots:
            slots.resize(len(open_))

    # --- serving ----------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, here: dict[int, Completion] | None = None
    ) -> list[Completion]:
        """n completions; waits for an engine if none serves, for as long as the caller likes.

        `here`: samples that are there, by number; the others are added to it as they are heard of.
        Of fixed engines it raises EngineUnavailable, naming the engine, when that died or refuses.
        """
        here = {} if here is None else here
        if request.group is None:
            request = msgspec.structs.replace(request, group=self._newest)
        self._newest = max(self._newest, request.group)
        parts = missing(request, here)
        if len(parts) == 1:
            await self._complete(parts[0], here)
        elif parts:
            await _together([self._complete(part, here) for part in parts])
        return [here[number] for number in range(request.first, request.first + request.n)]

    async def _complete(self, request: GenerateRequest, here: dict[int, Completion]) -> None:
        from ray.exceptions import RayActorError

        while True:
            await self._serving.wait()
            member, asked = min(self.open(), key=lambda member: member.load), self.generation
            try:
                return await self._ask(member, request, here)
            except RayActorError as error:
                lost = EngineDied(f"{member.name} died while it served {request.request_id}")
                lost.__cause__ = error
            except EngineUnavailable as error:
                lost = error
            if self.is_fixed:
                raise lost
            self._lost(member, lost, asked)
            self.requeued += 1
            if (parts := missing(request, here)) != [request]:
                return await _together([self._complete(part, here) for part in parts])

    async def abort(self, request_id: str) -> None:
        """Stop a running request; its `generate` returns what there is, with stop "abort".

        Unknown ids are finished ones.
        """
        asked = self._under_way.get(request_id)
        if asked is not None:
            await asked.member.handle.ask(RolloutEngine.abort, request_id)

    async def look(self, before: float) -> None:
        """Ask engines which samples are finished of requests that began before that time, of the
        loop's clock, and have others that are not.
        """
        slow: dict[Member, dict[str, PooledRequest]] = {}
        for name, asked in self._under_way.items():
            if asked.request.n > 1 and asked.began < before:
                slow.setdefault(asked.member, {})[name] = asked
        await asyncio.gather(*(self._look_at(*one) for one in slow.items()))

    async def _look_at(self, member: Member, slow: dict[str, PooledRequest]) -> None:
        from ray.exceptions import RayActorError

        known = {name: asked.known() for name, asked in slow.items()}
        try:
            async with asyncio.timeout(LOOK_S):
                answer = await member.handle.ask(RolloutEngine.finished, known)
        except (RayActorError, TimeoutError):  # who asks it for tokens hears of its end
            return
        for name, made in decode(answer, dict[str, dict[int, Completion]]).items():
            slow[name].take(made)

    async def _ask(
        self, member: Member, request: GenerateRequest, here: dict[int, Completion]
    ) -> None:
        member.take(request.n)
        asked = self._under_way[request.request_id] = PooledRequest(request, member, here)
        try:
            answer = await member.handle.ask(RolloutEngine.generate, encode(request))
            asked.take(dict(enumerate(decode(answer, list[Completion]))))
        except asyncio.CancelledError:
            member.handle.ask(RolloutEngine.abort, request.request_id)
            raise
        finally:
            member.take(-request.n)
            del self._under_way[request.request_id]

    def _lost(self, member: Member, error: EngineUnavailable, asked: int) -> None:
        """Ask it no more until it is admitted anew; a refusal from before its last admission says
        nothing of now.
        """
        is_new_death = isinstance(error, EngineDied) and not member.is_dead
        if is_new_death:
            member.is_dead = True
            self.deaths += 1
        if is_new_death or (asked == self.generation and not member.out):
            self._leave(member, str(getattr(error, "cause", None) or error).splitlines()[0])


def missing(request: GenerateRequest, here: dict[int, Completion]) -> list[GenerateRequest]:
    """What is to be asked for: the request itself, or its parts whose samples are not there."""
    parts: list[GenerateRequest] = []
    for number in range(request.first, request.first + request.n):
        if number in here:
            continue
        if parts and parts[-1].first + parts[-1].n == number:
            parts[-1].n += 1
        else:
            name = f"{request.request_id}/from {number}"
            parts.append(msgspec.structs.replace(request, request_id=name, first=number, n=1))
    return [request] if parts and parts[0].n == request.n else parts


async def _together(work: list[Coroutine[Any, Any, None]]) -> None:
    """All of it, or the first that is raised, with nothing left running."""
    jobs = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*jobs)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
