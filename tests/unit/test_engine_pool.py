"""The engine pool against engines that come, refuse, die and leave while it serves; the
synchronizer is one list of names.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.ground.protocols import ActorHandle
from rft.rollout.engine import EngineDied, EngineUnavailable
from rft.rollout.engine_weights import IdleClock, Turns, steps_worth_waiting
from rft.rollout.pool import EnginePool, ResizableSemaphore


class Handle:
    """Calls the coroutines of `target` as Ray calls an actor's."""

    def __init__(self, target: Any):
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return Remote(getattr(self.target, name))


class Remote:
    def __init__(self, method: Callable[..., Awaitable[Any]]):
        self.remote = lambda *arguments: asyncio.ensure_future(method(*arguments))


class Engine:
    """Answers when it may go on, or fails for as long as there are `errors`."""

    def __init__(self, name: str, at_once: bool = True):
        self.name = name
        self.handle = ActorHandle(Handle(self))
        self.asked: list[str] = []
        self.groups: list[int | None] = []
        self.parts: list[tuple[int, int]] = []  # first sample and how many
        self.aborted: list[str] = []
        self.errors: list[Exception] = []
        self.going_on = asyncio.Event()
        self.done: dict[int, Completion] = {}  # samples by place, while others are under way
        self.looks: list[dict[str, list[int]]] = []
        self.clocks = (0.0, 0.0)
        if at_once:
            self.going_on.set()

    async def generate(self, request: bytes) -> bytes:
        asked = decode(request, GenerateRequest)
        self.asked.append(asked.request_id)
        self.groups.append(asked.group)
        self.parts.append((asked.first, asked.n))
        await self.going_on.wait()
        if self.errors:
            raise self.errors.pop()
        return encode([Completion(tokens=[1], logprobs=[0.0], versions=[], stop="stop")] * asked.n)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def finished(self, asked: dict[str, list[int]]) -> bytes:
        self.looks.append(asked)
        if self.errors:
            raise self.errors[0]
        new = {n: one for n, one in self.done.items()}
        return encode({name: new for name in asked} if self.done else {})

    async def idleness(self) -> tuple[float, float]:
        if self.errors:
            raise self.errors.pop()
        return self.clocks

    def fail(self, error: Exception, times: int = 100) -> None:
        """What it works on, and later requests."""
        self.errors = [error] * times
        self.going_on.set()


class Members:
    """The synchronizer's long poll."""

    def __init__(self) -> None:
        self.generation = 0
        self.admitted: dict[str, Any] = {}
        self.changed = asyncio.Condition()

    async def members(self, seen: int) -> tuple[int, dict[str, Any]]:
        async with self.changed:
            await self.changed.wait_for(lambda: self.generation != seen)
            return self.generation, dict(self.admitted)

    async def admit(self, pool: EnginePool, *engines: Engine) -> None:
        """These and no others; return when the pool knows."""
        async with self.changed:
            self.generation += 1
            self.admitted = {engine.name: engine.handle for engine in engines}
            self.changed.notify_all()
        while pool.generation != self.generation:
            await asyncio.sleep(0)


def request(name: str, n: int = 1, group: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prompt=[1], n=n, sampling=Sampling(), stop_token_ids=[0], group=group
    )


def scenario(test: Callable[[EnginePool, Members], Awaitable[None]]) -> None:
    """Run `test` with a pool that follows a synchronizer."""

    async def run() -> None:
        pool, synchronizer = EnginePool({}), Members()
        following = asyncio.create_task(pool.follow(ActorHandle(Handle(synchronizer))))
        async with asyncio.timeout(20):
            await test(pool, synchronizer)
        following.cancel()

    asyncio.run(run())


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_the_least_busy_engine_is_asked() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first, second = Engine("engine_0", at_once=False), Engine("engine_1", at_once=False)
        await synchronizer.admit(pool, first, second)
        jobs = [
            asyncio.ensure_future(pool.generate(request(str(i), n=8 if i == 0 else 2)))
            for i in range(5)
        ]
        await turns()
        assert first.asked == ["0"] and second.asked == ["1", "2", "3", "4"]
        second.going_on.set()
        await asyncio.gather(*jobs[1:])
        assert {member.name: member.load for member in pool.open()} == {
            "engine_0": 8,
            "engine_1": 0,
        }
        first.going_on.set()
        assert len(await jobs[0]) == 8

    scenario(test)


def test_a_request_of_no_group_is_as_young_as_the_newest() -> None:
    """As it was without groups: behind what was there, and before what comes."""

    async def test(pool: EnginePool, synchronizer: Members) -> None:
        engine = Engine("engine_0")
        await synchronizer.admit(pool, engine)
        for group in (None, 5, None, 3, None, 7):
            await pool.generate(request(f"after {len(engine.asked)}", group=group))
        assert engine.groups == [0, 5, 5, 3, 5, 7]

    scenario(test)


@pytest.mark.parametrize(
    ("error", "deaths"),
    [
        (RayActorError(), 1),
        (EngineDied("engine_0: EngineCore was killed"), 1),
        (EngineUnavailable("mixed weights"), 0),
    ],
    ids=["actor", "core", "poisoned"],
)
def test_requests_of_an_engine_that_fails_run_again_on_another(
    error: Exception, deaths: int
) -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first, second = Engine("engine_0", at_once=False), Engine("engine_1")
        second.going_on.clear()
        await synchronizer.admit(pool, first, second)
        jobs = [asyncio.ensure_future(pool.generate(request(str(i)))) for i in range(6)]
        await turns()
        assert first.asked == ["0", "2", "4"] and second.asked == ["1", "3", "5"]
        second.going_on.set()
        first.fail(error)
        await asyncio.gather(*jobs)
        assert first.asked == ["0", "2", "4"] and sorted(second.asked) == [
            "0",
            "1",
            "2",
            "3",
            "4",
            "5",
        ]
        await pool.generate(request("later"))
        assert "later" not in first.asked, "asked again without having been admitted anew"
        expected = {
            "pool/engines": 1.0,
            "pool/running": 0.0,
            "pool/requeued": 3.0,
            "pool/deaths": float(deaths),
        }
        assert pool.stats() == expected

    scenario(test)


def test_a_refusal_ends_with_the_next_admission_and_a_death_with_the_next_actor() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first, second = Engine("engine_0"), Engine("engine_1")
        first.fail(EngineUnavailable("engine_0 holds mixed weights"))
        second.fail(RayActorError())
        await synchronizer.admit(pool, first, second)
        waiting = asyncio.ensure_future(pool.generate(request("0")))
        await turns()
        assert not waiting.done() and pool.open() == []
        assert "(engine_0 holds mixed weights" in pool.absence()
        assert "; engine_1 died while it served 0" in pool.absence()
        second.errors.clear()  # nobody may learn of it: its actor is gone
        await synchronizer.admit(pool, second)
        await turns()
        assert not waiting.done() and pool.open() == []
        first.errors.clear()
        await synchronizer.admit(pool, first, second)
        await waiting
        assert [member.name for member in pool.open()] == ["engine_0"]
        again = Engine("engine_1")
        await synchronizer.admit(pool, first, again)
        assert {member.handle.actor.target for member in pool.open()} == {
            first,
            again,
        } and pool.absence() == ""

    scenario(test)


def test_a_refusal_from_before_the_last_admission_does_not_keep_an_engine_out() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first = Engine("engine_0", at_once=False)
        await synchronizer.admit(pool, first)
        job = asyncio.ensure_future(pool.generate(request("0")))
        await turns()
        # it left and came back between two answers of the long poll
        await synchronizer.admit(pool, first)
        first.fail(EngineUnavailable("of before"), times=1)
        await job
        assert first.asked == ["0", "0"] and pool.requeued == 1

    scenario(test)


def test_a_request_waits_for_an_engine_and_says_why_there_is_none() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        assert "none was admitted before" in pool.absence()
        waiting = asyncio.ensure_future(pool.generate(request("0")))
        first = Engine("engine_0")
        await synchronizer.admit(pool, first)
        await waiting
        await synchronizer.admit(pool)
        assert "(engine_0 is no longer admitted)" in pool.absence()
        waiting = asyncio.ensure_future(pool.generate(request("1")))
        await turns()
        assert not waiting.done() and first.asked == ["0"]
        await synchronizer.admit(pool, first)
        await waiting

    scenario(test)


def test_draining_lets_running_requests_finish_and_gives_no_new_ones() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first, second = Engine("engine_0", at_once=False), Engine("engine_1")
        await synchronizer.admit(pool, first)
        running = asyncio.ensure_future(pool.generate(request("0")))
        await turns()
        await synchronizer.admit(pool, first, second)
        drained = asyncio.ensure_future(pool.drain("engine_0"))
        await pool.generate(request("1"))
        # a new version: it is admitted for as long as it works
        await synchronizer.admit(pool, first, second)
        await pool.generate(request("2"))
        await turns()
        assert first.asked == ["0"] and not drained.done() and len(pool.open()) == 1
        first.going_on.set()
        await running
        await drained
        assert pool.requeued == 0
        await synchronizer.admit(pool, second)
        await synchronizer.admit(pool, second, Engine("engine_0"))  # the name is free again
        assert len(pool.open()) == 2
        await pool.drain("nobody")

    scenario(test)


def test_a_caller_that_gives_up_stops_the_engine() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first = Engine("engine_0", at_once=False)
        await synchronizer.admit(pool, first)
        job = asyncio.ensure_future(pool.generate(request("0")))
        await turns()
        await pool.abort("0")
        job.cancel()
        await turns()
        await pool.abort("0")  # finished: nobody is told
        assert first.aborted == ["0", "0"] and pool.open()[0].load == 0 and job.cancelled()

    scenario(test)


@pytest.mark.parametrize("error", [RayActorError(), EngineUnavailable("engine_0 ends")])
def test_fixed_engines_fail_their_caller(error: Exception) -> None:
    async def test() -> None:
        engine = Engine("engine_0")
        engine.fail(error)
        with pytest.raises(EngineUnavailable, match="engine_0"):
            await EnginePool({"engine_0": engine.handle}).generate(request("0"))

    asyncio.run(test())


def completion(token: int) -> Completion:
    return Completion(tokens=[token], logprobs=[0.0], versions=[], stop="stop")


def test_of_an_engine_that_dies_only_samples_that_were_not_finished_are_asked_for_again() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first, second = Engine("engine_0", at_once=False), Engine("engine_1")
        await synchronizer.admit(pool, first)
        here: dict[int, Completion] = {}
        job = asyncio.ensure_future(pool.generate(request("0", n=6), here))
        alone = asyncio.ensure_future(pool.generate(request("1")))
        await turns()
        now = asyncio.get_running_loop().time()
        await pool.look(now - 10)
        assert first.looks == [], "nothing is under way for so long"
        first.done = {1: completion(7), 4: completion(8)}
        await pool.look(now + 10)
        await pool.look(now + 10)
        assert first.looks == [{"0": []}, {"0": [1, 4]}] and sorted(here) == [1, 4]
        await synchronizer.admit(pool, first, second)
        first.fail(RayActorError())
        made = await job
        await alone
        assert [one.ids for one in made] == [[1], [7], [1], [1], [8], [1]]
        assert sorted(second.parts) == [(0, 1), (0, 1), (2, 2), (5, 1)]
        assert len(set(second.asked)) == 4 and not pool._under_way
        assert [member.load for member in pool.open()] == [0]

    scenario(test)


def test_samples_that_are_there_are_not_asked_for_and_a_caller_that_gives_up_ends_all_parts() -> (
    None
):
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first = Engine("engine_0", at_once=False)
        await synchronizer.admit(pool, first)
        both = {0: completion(5), 1: completion(6)}
        assert [one.ids for one in await pool.generate(request("0", n=2), both)] == [[5], [6]]
        assert first.asked == []
        job = asyncio.ensure_future(pool.generate(request("1", n=3), {1: completion(6)}))
        await turns()
        assert sorted(first.parts) == [(0, 1), (2, 1)]
        job.cancel()
        await turns()
        assert sorted(first.aborted) == sorted(first.asked) and job.cancelled()
        job = asyncio.ensure_future(pool.generate(request("2", n=3), {1: completion(6)}))
        await turns()
        first.fail(EngineUnavailable("mixed weights"), times=1)  # of both parts one
        await turns()
        assert not job.done()
        await synchronizer.admit(pool, Engine("engine_1"))
        assert len(await job) == 3

    scenario(test)


def test_slots_follow_the_engines() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        slots = pool.slots(2)
        first, second = Engine("engine_0"), Engine("engine_1")
        jobs = [asyncio.ensure_future(slots.acquire()) for _ in range(5)]
        for engines, given in (((), 0), ((first,), 2), ((first, second), 4), ((first,), 4)):
            await synchronizer.admit(pool, *engines)
            await turns()
            assert [job.done() for job in jobs] == [True] * given + [False] * (5 - given)
        for left in (3, 2):  # two were given up, and two are as many as one engine can use
            slots.release()
            await turns()
            assert slots.taken == left and not jobs[4].done()
        slots.release()
        await jobs[4]

    scenario(test)


def test_a_slot_is_not_lost_by_who_gives_up() -> None:
    async def test() -> None:
        slots = ResizableSemaphore(1, 1)
        await slots.acquire()
        early, late = asyncio.ensure_future(slots.acquire()), asyncio.ensure_future(slots.acquire())
        await turns()
        early.cancel()
        await turns()
        slots.release()
        late.cancel()  # it was given the slot, and does not know yet
        await turns()
        assert slots.taken == 0
        async with slots:
            assert slots.taken == 1
        assert slots.taken == 0

    asyncio.run(test())


def test_idleness_is_of_the_time_since_the_last_look_at_engines_that_answer() -> None:
    async def test(pool: EnginePool, synchronizer: Members) -> None:
        first, second = Engine("engine_0"), Engine("engine_1")
        await synchronizer.admit(pool, first, second)
        first.clocks, second.clocks = (9.0, 10.0), (30.0, 40.0)
        assert await pool.idleness() == {}  # how idle they were before is not this run's
        first.clocks, second.clocks = (10.0, 14.0), (30.0, 44.0)
        assert await pool.idleness() == {
            "explorer/engine_idle_frac": 1 / 8,
            "explorer/engine_idle_frac_max": 1 / 4,
        }
        first.fail(RayActorError(), times=1)
        first.clocks, second.clocks = (11.0, 18.0), (33.0, 48.0)
        assert (await pool.idleness())["explorer/engine_idle_frac"] == 3 / 4
        again = Engine("engine_0")
        again.clocks = (5.0, 5.0)
        await synchronizer.admit(pool, again, second)
        second.clocks = (33.0, 52.0)
        assert (await pool.idleness())["explorer/engine_idle_frac"] == 0.0

    scenario(test)


def test_an_engine_is_idle_while_no_request_is_under_way_and_while_all_are_frozen() -> None:
    now = [0.0]

    async def test() -> None:
        turns = Turns("engine_0")
        turns.idle = IdleClock(lambda: now[0])

        def after(seconds: float) -> float:
            now[0] += seconds
            return turns.idle.seconds()[0]

        assert after(1) == 1  # nothing was asked for
        async with turns.request():
            assert after(10) == 1
            async with turns.request():
                assert after(10) == 1
            assert after(10) == 1
            turns.close()  # weights are installed
            assert after(2) == 3
            turns.open()
            assert after(10) == 3
        turns.close()
        waits = asyncio.ensure_future(turns.request().__aenter__())
        assert after(4) == 7
        turns.open()
        await waits
        assert after(10) == 7 and turns.idle.seconds() == (7, now[0])

    asyncio.run(test())


def test_requests_that_are_let_end_still_work_and_no_new_one_begins() -> None:
    now = [0.0]

    async def test() -> None:
        turns = Turns("engine_0")
        turns.idle = IdleClock(lambda: now[0])
        first, second, third = turns.request(), turns.request(), turns.request()
        await first.__aenter__()
        await second.__aenter__()
        turns.hold()
        waits = asyncio.ensure_future(third.__aenter__())
        ends = asyncio.ensure_future(turns.one_ends())
        await asyncio.sleep(0)
        assert not ends.done() and not waits.done()
        await first.__aexit__(None, None, None)
        await ends
        now[0] = 5.0
        assert turns.idle.seconds() == (0.0, 5.0), "the second one is decoded"
        assert not waits.done()
        turns.close()
        now[0] = 6.0
        assert turns.idle.seconds() == (1.0, 6.0)
        turns.open()
        await waits

    asyncio.run(test())


@pytest.mark.parametrize(
    ("requests", "steps"),
    [
        ([], 0),
        ([(4, 4000), (4, 4000)], 4),  # 8,000 tokens for 4 x 512
        ([(4, 2048)], 0),  # as much as is spared
        ([(4, 2049)], 4),
        ([(1, 1000), (30, 8000)], 1),  # the second alone takes as long as it spares, and more
        ([(1, 1000), (10, 8000), (60, 9000)], 10),
        ([(64, 10**6)], 64),
        ([(65, 10**9)], 0),  # nobody waits so long for new weights
    ],
)
def test_new_weights_wait_for_requests_whose_tokens_take_longer_to_compute_again(
    requests: list[tuple[int, int]], steps: int
) -> None:
    assert steps_worth_waiting(reversed(requests)) == steps
