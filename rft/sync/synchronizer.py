"""Who holds which policy version: leads every engine to the trainer's weights and tells when all of
them have a version.

    trainer rank 0 ── connect, offer, publish ─►┐
            ┌─► init_weights, stage, commit ── engines (one task each)
                      rest                      │                │   sleep
    supervisor     ── join, leave ─────────────►│ Members (pure) │
    explorer       ◄─ admitted (long poll) ─────┘                └─► published ── experience buffer
    trainer ranks  ── deposit (method memory)
    supervisor     ── follow (no trainer here: `rft.sync.stored_versions` looks for what one has
                   saved)

`rft.sync.members` is the state machine; here is what it needs of the outside. Every engine has a
task of its own that brings it to the target as fast as it can: none waits for another. Engines may
come and go at any time; one is admitted when it has confirmed the published version with the plan's
digest. Where they share devices with the trainer, `rest` puts them to sleep until the next version
is published, and until then none is given anything to do. Invariants: what is published
is a version that every engine of its round has confirmed; a trainer of a lower epoch can neither
connect nor publish; every change wakes who waits, nothing is polled.

It may die at any time. Ray then begins a new process of it, which knows nothing, and sends calls
that were under way to that one: every call may come twice. Nobody is answered before the supervisor
has told it which engines live (`recover`); these say what they hold, the buffer says what is
published, and so the same engines serve as before. A trainer hears from `lead` that it is to
connect again, and its `publish` waits for that.
"""

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from rft.buffer.calls import answered
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.ground import rounds
from rft.ground.protocols import ActorHandle
from rft.ground.rounds import (
    Holding,
    InSave,
    Installed,
    Location,
    Received,
    WorkerOffer,
)
from rft.monitor import trace
from rft.rollout.engine import RolloutEngine
from rft.rollout.pool import EngineHandle
from rft.sync import plan as plans
from rft.sync.fanout import Rings, shape_of
from rft.sync.lead import Endpoints, Lead, NotConnected, Superseded, is_reborn, reason
from rft.sync.members import START, Mark, Members
from rft.sync.plan import StreamPlan
from rft.sync.stored_versions import Deposits, Refusal, Saved, SavedVersions, VersionLost

log = logging.getLogger(__name__)
STEPS = ("connect", "take", "end")
MEET_S = 60.0  # for an engine to say what it holds, behind an installation that is under way
RECEIVE_SHARE = 0.8  # of sync_timeout: who receives gives up first, and can say what was missing


class Synchronizer:
    """Runs as one Ray actor; every method is a coroutine on its event loop.

    `kv` and `direct` go to the engines with a trainer and with each round. `root`: where there is
    no trainer here, what it follows; with `version` that one alone. `begins`: whence generations
    are counted, 0 in the first process of it, in others one that none before has come near.
    """

    def __init__(
        self,
        buffer: ActorHandle[ExperienceBuffer] | None,
        timeout: float,
        kv: str = "recompute",
        direct: bool = False,
        root: str | None = None,
        begins: Callable[[], int] = lambda: random.getrandbits(48) + 2 if is_reborn() else 0,
        version: int | None = None,
    ):
        self.buffer = buffer
        self.root, self.version = root, version
        self.timeout = timeout
        self.resting = False  # engines sleep until the next version is published
        self.handles: dict[str, EngineHandle] = {}
        self.reports: dict[str, Installed] = {}  # of each engine's last round
        self.lost: list[tuple[str, str]] = []  # engines to be replaced, and why
        self._state = Members()
        self._rings = Rings()
        self._offers: dict[str, list[WorkerOffer]] = {}
        self._connected_in: dict[str, int] = {}  # generation of the rings, by engine
        # of who is admitted, and of failures: not those of a process before this one
        self._generation = self._before = begins()
        self._admitted: list[str] = []
        self._lead = Lead(timeout * RECEIVE_SHARE, kv, direct)
        self._deposits = Deposits()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._broken: asyncio.Future[None] = asyncio.get_event_loop().create_future()
        self._told = asyncio.Event()  # which engines live
        self._recovering = asyncio.Lock()
        self._newest = Holding()  # of what they said then
        self._saves: SavedVersions | None = None
        self._following = asyncio.Lock()
        if not self._before:
            self._told.set()

    # --- engines come and go ----------------------------------------------------------------------

    async def join(self, name: str, handle: EngineHandle) -> None:
        """A started engine is here; it gets its weights as soon as a trainer offers some."""
        await self._ready()
        offers = await handle.ask(RolloutEngine.worker_offers)
        if self.handles.get(name) == handle:
            return
        if name in self.handles:
            await self.leave(name, "another one has its name")
        self._state.join(name)
        self._enter(name, handle, offers)
        await self._begin(name, handle)

    async def recover(self, engines: dict[str, EngineHandle]) -> None:
        """These are the engines that live. To a new process that is all that is known of the run;
        to another one, those that are not here join.
        """
        from ray.exceptions import RayActorError

        async with self._recovering:
            new = {n: handle for n, handle in engines.items() if self.handles.get(n) != handle}
            published = await self._published()
            asked = [_met(handle) for handle in new.values()]
            answers = zip(new, await asyncio.gather(*asked, return_exceptions=True), strict=True)
            found: dict[str, tuple[Holding, list[WorkerOffer]]] = {}
            for name, answer in answers:
                if not isinstance(answer, BaseException):
                    found[name] = answer
                elif not isinstance(answer, RayActorError):  # of a death the supervisor knows
                    self.lost.append((name, reason(answer)))
            for name in [n for n in found if self.handles.get(n) not in (None, new[n])]:
                await self._leave(name, "another one has its name")
            found = {n: answer for n, answer in found.items() if n not in self.handles}
            self._take_over({name: holding for name, (holding, _) in found.items()}, published)
            for name, (_, offers) in found.items():
                self._enter(name, new[name], offers)
            for name in found:
                await self._begin(name, new[name])
            self._told.set()
        await self._tell()
        if self.root is not None and self.handles:
            self._task("first look", self.follow(self.root))

    async def _published(self) -> Mark | None:
        """What the buffer knows, when nothing is known here. Where there is no trainer, the marks
        are not those of the buffer.
        """
        if self.buffer is None or self.root is not None or self._told.is_set():
            return None
        known = await answered(lambda: self.buffer.ask(ExperienceBuffer.stats))
        return None if known["published"] is None else (known["run_epoch"], known["published"])

    def _take_over(self, held: dict[str, Holding], published: Mark | None) -> None:
        said = held.values()
        self._state.recover({name: one.mark for name, one in held.items()}, published)
        self._newest = max((self._newest, *said), key=lambda one: one.mark or START)
        self._rings.pass_over(max((one.generation for one in said), default=-1) + 1)
        self.resting = self.resting or any(one.asleep for one in said)
        if held:
            log.warning("taken over, published %s: %s", self._state.published, self._state.where())

    def _enter(self, name: str, handle: EngineHandle, offers: list[WorkerOffer]) -> None:
        self.handles[name], self._offers[name] = handle, offers
        self._regroup(lambda: self._rings.join(name, shape_of(offers)))

    async def _begin(self, name: str, handle: EngineHandle) -> None:
        """The life of an engine that has entered."""
        if self.resting:
            await self._put_to_sleep(name, handle)
        self._task(name, self._keep_up(name, handle))
        await self._tell()

    def _task(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """A failure of it ends the run."""
        self._tasks[name] = asyncio.create_task(work)
        self._tasks[name].add_done_callback(self._settle)

    async def leave(self, name: str, reason: str) -> None:
        """An engine is gone, or shall get no more requests."""
        await self._ready()
        await self._leave(name, reason)

    async def _leave(self, name: str, reason: str) -> None:
        log.warning("%s leaves: %s", name, reason)
        trace.instant(f"{name} leaves", reason=reason)
        self._state.leave(name, reason)
        self._regroup(lambda: self._rings.leave(name))
        self.handles.pop(name, None)
        task = self._tasks.pop(name, None)
        # an engine's own task ends by itself
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        await self._tell()

    async def members(self, seen: int = -1) -> tuple[int, dict[str, EngineHandle]]:
        """(generation, handles by name) of the engines that requests may go to, once the generation
        is not `seen`.
        """
        await self._ready()
        await self._until(lambda: self._generation != seen, None)
        return self._generation, {name: self.handles[name] for name in self._admitted}

    async def failures(self, seen: int = 0) -> tuple[int, list[tuple[str, str]]]:
        """(name, reason) of engines that live and take no weights any more, once there are others
        than those `seen`, a number that comes with them.
        """
        known = seen - self._before if 0 <= seen - self._before <= len(self.lost) else 0
        await self._until(lambda: len(self.lost) > known, None)
        return self._before + len(self.lost), self.lost[known:]

    # --- the trainer ------------------------------------------------------------------------------

    async def connect(
        self, plan: StreamPlan, streams: Endpoints, epoch: int, method: str = rounds.STREAM
    ) -> None:
        """A trainer of `epoch` serves these streams from now on; engines connect when they need
        weights. Method "memory": it has no streams, and deposits what they would bring.
        """
        if await self._attach(epoch, method, plan, streams):
            self._deposits.begin([len(stream.buckets) for stream in plan.streams])
        await self._check_plan(plan)
        await self._tell()

    async def attach(self, epoch: int, method: str) -> None:
        """A trainer of `epoch` leads from now on."""
        await self._attach(epoch, method)

    async def _attach(
        self, epoch: int, method: str, plan: StreamPlan | None = None, streams: Endpoints = ()
    ) -> bool:
        """False: it is known already, as just this one."""
        await self._ready()
        trainer = self._lead.trainer_of(epoch, method, plan, streams)
        if trainer == self._lead.trainer:
            return False
        self._state.trainer(epoch)
        self._lead.attach(trainer, plan)
        await self._tell()
        return True

    async def lead(self, epoch: int) -> None:
        """Never returns while the trainer of `epoch` leads. Raises NotConnected where nobody has
        heard of it, Superseded when there is a newer one.
        """
        await self._ready()
        if self._lead.trainer is None or self._state.epoch < epoch:
            raise NotConnected(f"no trainer of epoch {epoch} is connected")
        await self._until(lambda: self._state.epoch != epoch, None)
        raise Superseded(f"a trainer of epoch {self._state.epoch} has attached")

    async def _check_plan(self, plan: StreamPlan) -> None:
        """Raises what the engines have against it; one that is gone has nothing."""
        from ray.exceptions import RayActorError

        encoded = plans.encode(plan)
        asked = [handle.ask(RolloutEngine.check_plan, encoded) for handle in self.handles.values()]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, RayActorError):
                raise answer

    async def offer(self, version: int, epoch: int) -> None:
        """The trainer holds `version` still: engines that have none, or older ones, may take it."""
        if self._lead.trainer is not None and epoch == self._state.epoch:
            self._state.offer(version)
            await self._tell()

    async def deposit(
        self, version: int, epoch: int, stream: int, number: int, data: Any, digest: str
    ) -> None:
        """One bucket of a trainer rank's stream of `version`.

        It becomes an object that lives as long as somebody wants it.
        """
        import ray

        await self.connected(version, epoch)
        if epoch == self._state.epoch:
            mine = await asyncio.to_thread(ray.put, data)
            await self._deposits.put((epoch, version), stream, number, (mine, digest))

    async def publish_deposited(self, version: int, epoch: int) -> dict[str, float]:
        """As `publish`, when every rank has deposited its stream of `version`."""
        await self.connected(version, epoch)
        mark, state = (epoch, version), self._state
        try:
            location = await self._deposits.complete(mark, self.timeout)
        except VersionLost:
            if state.published is None or state.published < mark:
                raise
            # it was published; only the answer is lost, and what ranks had left
            return rounds.numbers_of([], 0.0, len(state.admitted()))
        assert self._lead.plan is not None
        return await self.publish(version, epoch, self._lead.plan.digest, location)

    async def give_up(self, version: int, epoch: int) -> None:
        """A rank's deposits are lost with a process before this one, and its weights changed."""
        await self.connected(version, epoch)
        await self._deposits.give_up((epoch, version))

    async def publish(
        self,
        version: int,
        epoch: int | None = None,
        digest: str = "",
        location: Location | None = None,
    ) -> dict[str, float]:
        """Returns when every engine that is here, and at least one, serves `version`; those that
        cannot have been left out. `location`: of its bytes, which have this `digest`, if they are
        not in the trainer's streams.

        Raises when none can, when a newer trainer has attached, and TimeoutError naming who was
        waited for.
        """
        await self.connected(version, epoch)
        state = self._state
        if epoch is not None and epoch != state.epoch:
            raise Superseded(
                f"version {version} comes from epoch {epoch}, the engines follow epoch "
                f"{state.epoch}"
            )
        clock = asyncio.get_running_loop().time
        mark, began = (state.epoch, version), clock()
        self.resting = False
        self.reports.clear()
        if location is not None:
            self._lead.locate(mark, digest, location)
        state.publish(version)
        self._regroup(lambda: self._rings.settle(self._passing()))
        await self._tell()
        with trace.overlapping("round", version=version):
            done = await self._until(
                lambda: state.target != mark or state.is_over() or state.is_hopeless(), self.timeout
            )
        if state.target != mark:
            raise Superseded(f"version {version}: a trainer of epoch {state.epoch} has attached")
        if not done:
            await self._cut_off(
                f"version {version} was not installed everywhere in {self.timeout:g} s: "
                f"{self._state.where()}"
            )
        if not state.is_over():
            raise Refusal(f"no engine could take version {version}: {self._state.where()}")
        state.conclude()
        self._lead.forget(mark)
        if self.buffer is not None:
            told = (ExperienceBuffer.published, version, state.epoch)
            await answered(lambda: self.buffer.ask(*told))
        await self._tell()
        return rounds.numbers_of(self.reports.values(), clock() - began, len(state.admitted()))

    async def connected(self, version: int, epoch: int | None) -> None:
        """Wait, in a new process, until the trainer has connected again. Raises NotConnected."""

        def is_there() -> bool:
            return self._lead.trainer is not None and self._state.epoch >= (epoch or 0)

        if not is_there() and self._before:
            await self._until(is_there, self.timeout)
        if self._lead.trainer is None:
            raise NotConnected(f"version {version} cannot be published: no trainer is connected")

    async def rest(self) -> dict[str, float]:
        """The trainer takes its turn on the devices: all engines finish what they have been asked,
        and sleep until the next round wakes them. One that cannot is left out, and is to be
        replaced.
        """
        await self._ready()
        clock = asyncio.get_running_loop().time
        began, self.resting = clock(), True
        found = await asyncio.gather(
            *(self._put_to_sleep(*each) for each in list(self.handles.items()))
        )
        reports = [report for report in found if report is not None]
        return {
            "rest_s": clock() - began,
            "frozen": float(sum(report["frozen"] for report in reports)),
            "answered_asleep": float(sum(report["answered_asleep"] for report in reports)),
        }

    async def probe(self, request: bytes) -> list[bytes]:
        """What admitted engines answer to the same request; one that dies has no answer."""
        await self._ready()
        asked = [self.handles[name].ask(RolloutEngine.generate, request) for name in self._admitted]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, bytes)]

    async def follow(self, root: str) -> int | None:
        """Serve what a trainer elsewhere saves at `root`, now and from now on; returns the version
        that is served at once.

        None: nothing is saved yet, and engines serve what they were started with. Raises when there
        are saves, but no good one.
        """
        await self._ready()
        async with self._following:
            if self._saves is None:
                publish = functools.partial(self._publish_saved, root)
                saves = SavedVersions(root, publish, self.timeout, self.version)
                if await saves.first() is None and self._state.published is None:
                    self._state.serve_start()
                    await self._tell()
                self._saves = saves
                self._task("saved versions", saves.follow())
        served = self._state.published
        return None if served in (None, START) else served[1]

    async def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Return the published version once it is at least `version`; or TimeoutError."""

        def is_there() -> bool:
            return self._state.published is not None and self._state.published[1] >= version

        seconds = timeout if timeout is not None else self.timeout
        if not await self._until(is_there, seconds):
            raise TimeoutError(
                f"version {version} not published in {seconds} s: {self._state.where()}"
            )
        assert self._state.published is not None
        return self._state.published[1]

    async def watch(self) -> None:
        """Never returns while all is well: a failed round is raised
        to the trainer that asked for it.
        """
        await asyncio.shield(self._broken)

    async def shutdown(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    # --- inside -----------------------------------------------------------------------------------

    async def _publish_saved(self, root: str, saved: Saved) -> None:
        """Every save comes as a trainer of its own: of two the newer
        one counts, whatever versions they are.
        """
        epoch, newest = self._state.epoch + 1, self._newest
        # of a process before this one: the very same version is known by its digest
        if newest.mark and newest.mark >= (epoch, saved.version) and newest.digest != saved.digest:
            epoch = newest.mark[0] + 1
        await self.attach(epoch, rounds.CHECKPOINT)
        location = InSave(root=root, path=saved.path)
        await self.publish(saved.version, None, saved.digest, location)

    async def _keep_up(self, name: str, engine: EngineHandle) -> None:
        """One engine's life: connect and take, whenever the state
        machine says so, until it is gone.
        """
        while True:
            await self._until(
                lambda: self._state.next_step(name) in (("end",) if self.resting else STEPS), None
            )
            step, epoch = self._state.next_step(name), self._state.epoch
            if step == "end":
                return
            try:
                if step == "connect":
                    self._state.connect(name)
                    self._connected_in[name] = self._rings.generation
                    info = self._lead.info(name, self._rings.seats(name, self._offers))
                    await engine.ask(RolloutEngine.init_weights, info)
                    self._state.connected(name, epoch)
                else:
                    await self._take(name, engine)
            except Exception as error:  # not swallowed: it decides what becomes of the engine
                self._judge(name, epoch, error)
            if self._state.has_missed(name):
                self._regroup(lambda: self._rings.drop(name))
            await self._tell()

    async def _take(self, name: str, engine: EngineHandle) -> None:
        state = self._state
        mark = state.begin(name)
        coming = self._lead.round(mark)
        await self._tell()
        with trace.overlapping(f"{name} receives", version=mark[1]):
            staged: Received = await engine.ask(RolloutEngine.stage, coming)
        if staged.blame == rounds.MISSED:
            state.missed(name, mark, staged.error)
            return
        if not state.staged(name, mark):
            return
        with trace.overlapping(f"{name} installs", version=mark[1]):
            installed: Installed = await engine.ask(RolloutEngine.commit, coming)
        if (installed.version, installed.digest) != (coming.version, coming.digest):
            raise RuntimeError(
                f"confirmed {installed} instead of version {mark[1]}, plan {coming.digest}"
            )
        self.reports[name] = installed
        state.committed(name, mark)
        if self.resting:  # the others went to sleep meanwhile
            await self._put_to_sleep(name, engine)

    def _passing(self) -> Collection[str]:
        """Engines that pass on to each other what the round brings."""
        return self._state.round if self._lead.is_passed_on() else ()

    def _regroup(self, change: Callable[[], object]) -> None:
        """Change the rings; engines that are in others now connect anew, and no longer wait for
        somebody to come to those of before, who may have failed or be gone.
        """
        generation = self._rings.generation
        change()
        if self._rings.generation == generation:
            return
        self._state.regroup()
        for name, (_, _, kind) in self._rings.shapes.items():
            if kind == rounds.PACKED and name in self.handles:
                self.handles[name].ask(RolloutEngine.disband, generation)

    async def _put_to_sleep(self, name: str, engine: EngineHandle) -> dict[str, float] | None:
        try:
            async with asyncio.timeout(self.timeout):
                return await engine.ask(RolloutEngine.sleep, self.timeout * RECEIVE_SHARE)
        # not swallowed: it would keep the memory that the trainer counts on
        except Exception as error:
            from ray.exceptions import RayActorError

            late = isinstance(error, TimeoutError)
            why = f"{name} did not sleep" + (
                f" in {self.timeout:g} s" if late else f": {reason(error)}"
            )
            if not isinstance(error, RayActorError):  # of a death the supervisor knows
                self.lost.append((name, why))
            await self._leave(name, why)
            return None

    def _judge(self, name: str, epoch: int, error: Exception) -> None:
        from ray.exceptions import RayActorError

        text = reason(error)
        log.warning("%s, epoch %d: %s", name, epoch, text)
        if isinstance(error, RayActorError):  # the supervisor sees it too, and says so to `leave`
            self._state.leave(name, text)
            return
        cause = getattr(error, "cause", error)
        kind, lost = getattr(cause, "kind", rounds.BROKEN), getattr(cause, "lost", "")
        self._regroup(lambda: self._rings.fail(self._connected_in.get(name, -1), lost))
        if kind == rounds.UNREACHABLE:
            self._state.unreachable(name, epoch, text, others=bool(lost))
            return
        self._state.broken(name, epoch, text, damaged=kind == rounds.DAMAGED)
        if self._state.next_step(name) == "end":
            self.lost.append((name, text))

    async def _cut_off(self, late: str) -> None:
        """Engines that did not answer in time are left behind, with a picture of what they do;
        TimeoutError if that are all.
        """
        log.error("%s", late)
        for name in [name for name in self._state.round if name in self.handles]:
            self.handles[name].ask(RolloutEngine.dump_stacks)
            self.lost.append((name, late))
            await self._leave(name, late)
        if not self._state.is_over():
            raise TimeoutError(late)

    async def _tell(self) -> None:
        """The state has changed: whoever waits looks again."""
        admitted = self._state.admitted()
        if admitted != self._admitted:
            self._admitted, self._generation = admitted, self._generation + 1
        async with self._changed:
            self._changed.notify_all()

    async def _ready(self) -> None:
        await self._told.wait()

    async def _until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `ready()`; False when the time is over.

        Without a timeout it is the caller's, or the actor's, life.
        """
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(ready)
        except TimeoutError:
            return False
        return True

    def _settle(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None and not self._broken.done():
            self._broken.set_exception(task.exception() or RuntimeError("unreachable"))


SynchronizerHandle = ActorHandle[Synchronizer]


async def _met(handle: EngineHandle) -> tuple[Holding, list[WorkerOffer]]:
    async with asyncio.timeout(MEET_S):
        holding = await handle.ask(RolloutEngine.holding)
        return holding, await handle.ask(RolloutEngine.worker_offers)
