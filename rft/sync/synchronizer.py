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
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from rft.buffer.experience_buffer import ExperienceBuffer
from rft.ground import rounds
from rft.ground.protocols import ActorHandle
from rft.ground.rounds import (
    InSave,
    Installed,
    Location,
    Received,
    Round,
    TrainerInfo,
    WorkerOffer,
)
from rft.monitor import trace
from rft.rollout.engine import RolloutEngine
from rft.rollout.pool import EngineHandle
from rft.sync import plan as plans
from rft.sync.fanout import Rings, Shape
from rft.sync.members import Mark, Members
from rft.sync.plan import StreamPlan
from rft.sync.stored_versions import Deposits, Refusal, Saved, SavedVersions

log = logging.getLogger(__name__)
Endpoints = Sequence[dict[str, Any]]
STEPS = ("connect", "take", "end")
RECEIVE_SHARE = 0.8  # of sync_timeout: who receives gives up first, and can say what was missing


class Superseded(RuntimeError):
    """A newer trainer has attached."""


class Synchronizer:
    """Runs as one Ray actor; every method is a coroutine on its event loop.

    `kv` and `direct` go to the engines with a trainer and with each round.
    """

    def __init__(
        self,
        buffer: ActorHandle[ExperienceBuffer] | None,
        timeout: float,
        kv: str = "recompute",
        direct: bool = False,
    ):
        self.buffer = buffer
        self.timeout = timeout
        self.kv = kv
        self.direct = direct
        self.resting = False  # engines sleep until the next version is published
        self.handles: dict[str, EngineHandle] = {}
        self.reports: dict[str, Installed] = {}  # of each engine's last round
        self.lost: list[tuple[str, str]] = []  # engines to be replaced, and why
        self._state = Members()
        self._rings = Rings()
        self._offers: dict[str, list[WorkerOffer]] = {}
        self._connected_in: dict[str, int] = {}  # generation of the rings, by engine
        self._generation = 0
        self._admitted: list[str] = []
        self._trainer: TrainerInfo | None = None
        self._plan: StreamPlan | None = None  # of its streams
        # digest and place of what is not in the trainer's streams
        self._located: dict[Mark, tuple[str, Location]] = {}
        self._deposits = Deposits()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        self._broken: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    # --- engines come and go ----------------------------------------------------------------------

    async def join(self, name: str, handle: EngineHandle) -> None:
        """A started engine is here; it gets its weights as soon as a trainer offers some."""
        offers = await handle.ask(RolloutEngine.worker_offers)
        self._state.join(name)
        self.handles[name], self._offers[name] = handle, offers
        self._regroup(lambda: self._rings.join(name, shape_of(offers)))
        if self.resting:
            await self._put_to_sleep(name, handle)
        self._tasks[name] = asyncio.create_task(self._keep_up(name, handle))
        self._tasks[name].add_done_callback(self._settle)
        await self._tell()

    async def leave(self, name: str, reason: str) -> None:
        """An engine is gone, or shall get no more requests."""
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
        await self._until(lambda: self._generation != seen, None)
        return self._generation, {name: self.handles[name] for name in self._admitted}

    async def failures(self, seen: int = 0) -> list[tuple[str, str]]:
        """(name, reason) of engines that live and take no weights any more, once there are more
        than `seen`.
        """
        await self._until(lambda: len(self.lost) > seen, None)
        return self.lost

    # --- the trainer ------------------------------------------------------------------------------

    async def connect(
        self, plan: StreamPlan, streams: Endpoints, epoch: int, method: str = rounds.STREAM
    ) -> None:
        """A trainer of `epoch` serves these streams from now on; engines connect when they need
        weights. Method "memory": it has no streams, and deposits what they would bring.
        """
        await self.attach(epoch, method, plan, streams)
        self._deposits.begin([len(stream.buckets) for stream in plan.streams])
        await self._check_plan(plan)
        await self._tell()

    async def attach(
        self, epoch: int, method: str, plan: StreamPlan | None = None, streams: Endpoints = ()
    ) -> None:
        """A trainer of `epoch` leads from now on."""
        self._state.trainer(epoch)
        self._located.clear()
        self._plan = plan
        self._trainer = TrainerInfo(
            epoch=epoch,
            timeout=self.timeout * RECEIVE_SHARE,
            method=method,
            plan=None if plan is None else plans.encode(plan),
            streams=list(streams),
            kv=self.kv,
            direct=self.direct,
        )
        await self._tell()

    async def _check_plan(self, plan: StreamPlan) -> None:
        """Raises what the engines have against it; one that is gone has nothing."""
        from ray.exceptions import RayActorError

        encoded = plans.encode(plan)
        asked = [handle.ask(RolloutEngine.check_plan, encoded) for handle in self.handles.values()]
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, RayActorError):
                raise answer

    async def offer(self, version: int, epoch: int) -> None:
        """The trainer holds `version` still: engines that have
        none, or too old ones, may take it.
        """
        if epoch == self._state.epoch:
            self._state.offer(version)
            await self._tell()

    async def deposit(
        self, version: int, epoch: int, stream: int, number: int, data: Any, digest: str
    ) -> None:
        """One bucket of a trainer rank's stream of `version`.

        It becomes an object that lives as long as somebody wants it.
        """
        import ray

        if epoch == self._state.epoch:
            mine = await asyncio.to_thread(ray.put, data)
            await self._deposits.put((epoch, version), stream, number, (mine, digest))

    async def publish_deposited(self, version: int, epoch: int) -> dict[str, float]:
        """As `publish`, when every rank has deposited its stream of `version`."""
        location = await self._deposits.complete((epoch, version), self.timeout)
        assert self._plan is not None
        return await self.publish(version, epoch, self._plan.digest, location)

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
        state = self._state
        if epoch is not None and epoch != state.epoch:
            raise Superseded(
                f"version {version} comes from epoch {epoch}, the engines follow epoch "
                f"{state.epoch}"
            )
        if self._trainer is None:
            raise RuntimeError(f"version {version} cannot be published: no trainer is connected")
        mark, began = (state.epoch, version), time.monotonic()
        self.resting = False
        self.reports.clear()
        if location is not None:
            self._located[mark] = digest, location
        state.publish(version)
        self._regroup(lambda: self._rings.settle(state.round if self._is_passed_on() else ()))
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
        self._located = {other: at for other, at in self._located.items() if other >= mark}
        if self.buffer is not None:
            await self.buffer.ask(ExperienceBuffer.published, version, state.epoch)
        await self._tell()
        return rounds.numbers_of(
            self.reports.values(), time.monotonic() - began, len(state.admitted())
        )

    async def rest(self) -> dict[str, float]:
        """The trainer takes its turn on the devices: all engines finish what they have been asked,
        and sleep until the next round wakes them. One that cannot is left out, and is to be
        replaced.
        """
        began, self.resting = time.monotonic(), True
        found = await asyncio.gather(
            *(self._put_to_sleep(*each) for each in list(self.handles.items()))
        )
        reports = [report for report in found if report is not None]
        return {
            "rest_s": time.monotonic() - began,
            "frozen": float(sum(report["frozen"] for report in reports)),
            "answered_asleep": float(sum(report["answered_asleep"] for report in reports)),
        }

    async def probe(self, request: bytes) -> list[bytes]:
        """What every admitted engine answers to the same request; one
        that dies meanwhile has no answer.
        """
        asked = [self.handles[name].ask(RolloutEngine.generate, request) for name in self._admitted]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, bytes)]

    async def follow(self, root: str) -> int | None:
        """Serve what a trainer elsewhere saves at `root`, now and from now on; returns the version
        that is served at once.

        None: nothing is saved yet, and engines serve what they were started with. Raises when there
        are saves, but no good one.
        """
        saves = SavedVersions(
            root, functools.partial(self._publish_saved, root), patience=self.timeout
        )
        served = await saves.first()
        if served is None:
            self._state.serve_start()
            await self._tell()
        self._tasks["saved versions"] = asyncio.create_task(saves.follow())
        self._tasks["saved versions"].add_done_callback(self._settle)
        return served

    async def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Return the published version once it is at least `version`;
        TimeoutError after `timeout` seconds.
        """

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
        await self.attach(self._state.epoch + 1, rounds.CHECKPOINT)
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
                    await engine.ask(RolloutEngine.init_weights, self._info(name))
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
        coming = self._round(mark)
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

    def _is_passed_on(self) -> bool:
        """Whether engines pass on to each other what they take: from streams into staging memory,
        which stays.
        """
        trainer = self._trainer
        return trainer is not None and trainer.method == rounds.STREAM and not self.direct

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

    def _info(self, name: str) -> TrainerInfo:
        """The trainer, as this engine is to take its weights."""
        assert self._trainer is not None
        seats = self._rings.seats(name, self._offers)
        alone = self._is_passed_on() and not seats
        return replace(self._trainer, engine=name, seats=seats, alone=alone)

    def _round(self, mark: Mark) -> Round:
        trainer = self._trainer
        assert trainer is not None
        streamed = self._plan.digest if self._plan else ""
        digest, location = self._located.get(mark, (streamed, None))
        return Round(
            version=mark[1],
            epoch=mark[0],
            digest=digest,
            timeout=trainer.timeout,
            direct=self.direct,
            location=location,
        )

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
            await self.leave(name, why)
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
            await self.leave(name, late)
        if not self._state.is_over():
            raise TimeoutError(late)

    async def _tell(self) -> None:
        """The state has changed: whoever waits looks again."""
        admitted = self._state.admitted()
        if admitted != self._admitted:
            self._admitted, self._generation = admitted, self._generation + 1
        async with self._changed:
            self._changed.notify_all()

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


def shape_of(offers: Sequence[WorkerOffer]) -> Shape | None:
    """Of an engine; None where it cannot be in a ring."""
    shapes = {(*offer.shape, offer.kind) for offer in offers}
    return shapes.pop() if len(shapes) == 1 else None


def reason(error: BaseException | None) -> str:
    """What happened, in one line: of an error that came through
    Ray, what the remote method raised.
    """
    inner = getattr(error, "cause", None) or error
    return (str(inner).splitlines() or [type(inner).__name__])[0]
