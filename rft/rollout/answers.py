"""What engines have answered to a group that is not finished, kept answer by answer: whoever begins
the group again asks for what is missing, and its workflow hears the rest again.

    workflow, agent ── complete(request) ──► answered before? ──► that
                                             otherwise ──► engine pool ──► `AnswerKeeper`
                                 ──► one call of the buffer for all that come at about the same time

In: requests of runs of a task, each run under its own name; of a group that was begun before, what
its buffer has kept. Out: completions. A request is known by the run that asks, by what it asks
(ids, sampling, seed) and by how often that run has asked the same, so a workflow that does again
what it did before hears again what it heard; one that does something else is answered anew.

When an answer is durable: that to a turn of several before its workflow, or its agent, hears it, so
that nobody acts on what a restart could take back. The answer to a request that may be the only one
is kept only where its group is not stored `LOOK_S` later, and so is a sample whose siblings are
still under way: what ends at about the same moment is written once, with its group. Invariants: a
group that is stored is made of what was sampled once; what was given up halfway (stop "abort") is
never kept.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import xxhash

from rft.buffer.calls import CallBatcher
from rft.ground.experience import Completion, GenerateRequest, Record, decode, encode
from rft.rollout.pool import EnginePool

LOOK_S = 0.5  # between looks at what is answered, and not stored with its group yet
Kept = tuple[int, bytes, int | None]  # `ExperienceBuffer.answered`


class AnsweredSample(Record, kw_only=True):
    """Sample `sample` of the answer to a request of a group."""

    request: str  # `GroupAnswers.name`
    sample: int
    completion: Completion

    @property
    def version(self) -> int | None:
        """The oldest that sampled a token of it."""
        return min((span.version for span in self.completion.versions), default=None)


@dataclass(eq=False)
class OpenRequest:
    """A request. `here`: its samples that are there, by number; `told`: those that the buffer has,
    or is being told.
    """

    name: str
    here: dict[int, Completion]
    told: set[int]

    def new(self) -> list[AnsweredSample]:
        """Samples that nobody was told of; told now."""
        found = [
            AnsweredSample(request=self.name, sample=number, completion=made)
            for number, made in sorted(self.here.items())
            if number not in self.told and made.stop != "abort"
        ]
        self.told.update(one.sample for one in found)
        return found


class GroupAnswers:
    """Of one start of a group. `kept`: of the starts before, as the buffer gave it."""

    def __init__(self, group: int, keeper: "AnswerKeeper", kept: Iterable[bytes] = ()):
        self.group = group
        self.keeper = keeper
        self.kept: dict[str, dict[int, Completion]] = {}
        for encoded in kept:  # the later one is what the last start has heard
            for one in decode(encoded, list[AnsweredSample]):
                self.kept.setdefault(one.request, {})[one.sample] = one.completion
        self._asked = Counter[str]()
        self._under_way: set[OpenRequest] = set()
        self._late = list[tuple[float, AnsweredSample]]()  # when it was answered

    def name(self, run: str, request: GenerateRequest) -> str:
        """Of the next request like this one of this run."""
        asked = (request.prompt, request.n, request.sampling, request.stop)
        what = f"{run}/{xxhash.xxh3_128_hexdigest(encode(asked))}"
        self._asked[what] += 1
        return f"{what}/{self._asked[what]}"

    async def complete(
        self, pool: EnginePool, run: str, request: GenerateRequest, ahead: bool
    ) -> list[Completion]:
        """The samples of `request`; those that are kept are not asked for. `ahead`: they are
        durable on return.
        """
        name = self.name(run, request)
        here = self.kept.pop(name, {})
        self.keeper.again += len(here)
        at = OpenRequest(name, here, set(here))
        request = msgspec.structs.replace(request, group=self.group)
        self._under_way.add(at)
        try:
            with self.keeper.asking(ahead):
                made = await pool.generate(request, here)
                if ahead:
                    await self.keeper.tell(self.group, [*self._due(), *at.new()])
            return made
        finally:
            self._under_way.discard(at)
            now = asyncio.get_running_loop().time()
            self._late += [(now, one) for one in at.new()]

    async def keep(self) -> None:
        """Make durable what there is, also of requests that were cancelled."""
        await self.keeper.tell(self.group, self._due())

    def _due(self, before: float = float("inf")) -> list[AnsweredSample]:
        """What nobody was told of, of before that time."""
        found = [one for at, one in self._late if at < before]
        self._late = [late for late in self._late if late[0] >= before]
        return found

    def late(self, before: float) -> list[AnsweredSample]:
        """That, and finished samples of requests that are under way."""
        found = self._due(before)
        for request in self._under_way:
            found += request.new()
        return found


@dataclass(frozen=True)
class RunAnswers:
    """Of one run: an attempt's, a sibling's, a session's."""

    of: GroupAnswers
    pool: EnginePool
    run: str
    _ids: Counter[str] = field(default_factory=Counter)

    def part(self, name: str) -> "RunAnswers":
        return RunAnswers(self.of, self.pool, f"{self.run}/{name}")

    async def complete(self, request: GenerateRequest, ahead: bool = True) -> list[Completion]:
        return await self.of.complete(self.pool, self.run, request, ahead)

    def id(self, prompt: list[int]) -> str:
        """For the answer to these ids: the same when the run is begun again, so that what a program
        makes of it is, too.
        """
        what = xxhash.xxh3_128_hexdigest(f"{self.run}/{prompt}".encode())
        self._ids[what] += 1
        return f"{what}{self._ids[what]:x}"


class AnswerKeeper:
    """One per explorer. `call`: `ExperienceBuffer.answered`."""

    def __init__(self, call: Callable[[list[Kept]], Awaitable[None]]):
        self._call = call
        self._groups: dict[int, GroupAnswers] = {}
        self._asking = 0  # calls that return when their answers are durable
        self._send = CallBatcher(self._sent, lambda: self._asking)
        self.again = 0  # samples that no engine was asked for again

    def begin(self, group: int, kept: Iterable[bytes] = ()) -> GroupAnswers:
        """Of a group that begins, again or for the first time."""
        self._groups[group] = made = GroupAnswers(group, self, kept)
        return made

    def of(self, group: int) -> GroupAnswers:
        return self._groups[group]

    def end(self, group: int) -> None:
        """It is stored, or given up: the buffer keeps nothing more of it."""
        self._groups.pop(group, None)

    @contextmanager
    def asking(self, ahead: bool) -> Iterator[None]:
        """One more caller that waits until its answers are durable."""
        self._asking += ahead
        try:
            yield
        finally:
            self._asking -= ahead

    async def tell(self, group: int, answers: list[AnsweredSample]) -> None:
        """Return when they are durable."""
        if answers:
            await self._send((group, answers))

    async def follow(self, pool: EnginePool) -> None:
        """Keep what is not stored with its group soon; never returns."""
        while True:
            await asyncio.sleep(LOOK_S)
            before = asyncio.get_running_loop().time() - LOOK_S
            await pool.look(before)
            late = [(one.group, one.late(before)) for one in list(self._groups.values())]
            await asyncio.gather(*(self.tell(*told) for told in late))

    async def _sent(self, told: list[tuple[int, list[AnsweredSample]]]) -> None:
        by_group: dict[int, list[AnsweredSample]] = {}
        for group, answers in told:
            by_group.setdefault(group, []).extend(answers)
        await self._call([(group, encode(some), oldest(some)) for group, some in by_group.items()])


def oldest(answers: list[AnsweredSample]) -> int | None:
    """The oldest version that sampled a token of them."""
    return min((one.version for one in answers if one.version is not None), default=None)
