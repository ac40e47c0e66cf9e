"""How a vLLM engine takes new weights: the half of `rft.rollout.engine` that the synchronizer
speaks to.

    init_weights(TrainerInfo) ──► workers connect to the trainer
    stage(Round)              ──► workers receive, decoding goes on
    commit(Round)             ──► pause keep ─► install, all workers ─► label ─► resume

Invariant: an engine whose weights are neither wholly old nor wholly new (`poisoned`) answers no
request until a full round commits. How the key-value cache outlives a commit is told with the
streams (`kv`): "recompute" drops it, also of requests in flight, but lets those end first that are
near their end (`steps_worth_waiting`); "keep" keeps it for these, and salts the prefix cache by a
number that one installation has, so that no new request meets it, also when a version comes again
after a resume with other weights. `Turns` is the gate that requests pass, closed while weights are
installed and while the engine sleeps; `IdleClock` counts for how long nothing is decoded.
"""

import asyncio
import functools
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from msgspec.structs import replace

from rft.config import ModelConfig
from rft.ground.experience import decode, encode
from rft.ground.names import Dims, architecture_of, hf_names, read_hf_config
from rft.ground.rounds import (
    BROKEN,
    DAMAGED,
    MISSED,
    UNREACHABLE,
    AdapterOrder,
    AtPath,
    Holding,
    InSave,
    Installed,
    Received,
    Round,
    RoundFailed,
    TrainerInfo,
    WorkerOffer,
    WorkerState,
)
from rft.monitor import trace
from rft.rollout.adapter_serving import AdapterServing, ServedAdapter
from rft.rollout.worker_channel import WorkerChannel, within_reach

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's words for the parts of an engine that sleep
# of vLLM's sleep: 2 would forget the weights, and a round that fails leaves the old ones to be
# served
LEVEL = 1
LOAD_S = 900.0  # a large model from a slow disk
# a step of decoding takes about as long as computing so many tokens of a prompt: measured 600 on a
# CPU; on GPUs it reads all weights, in the time in which an H100 computes 300 (989 TFLOP/s in bf16,
# 3.35 TB/s)
TOKENS_PER_STEP = 512
MOST_STEPS, MOST_S = 64, 30.0  # that new weights wait; seconds where steps are slow beyond reason
P, T = ParamSpec("P"), TypeVar("T")


class EngineUnavailable(RuntimeError):
    """This engine does not serve; another one may."""


class RequestRefused(ValueError):
    """vLLM does not take what was asked for, whichever engine is asked."""


class EngineDied(EngineUnavailable):
    """The engine's processes or its actor are gone; the message names the engine and the cause."""


def tells_its_death(
    method: Callable[Concatenate["EngineWeights", P], Awaitable[T]],
) -> Callable[Concatenate["EngineWeights", P], Awaitable[T]]:
    """What vLLM raises becomes an error of ours: who asked from another process loads its type, and
    vLLM's own would load all of vLLM, which takes seconds.
    """

    @functools.wraps(method)
    async def call(engine: "EngineWeights", *args: P.args, **named: P.kwargs) -> T:
        try:
            return await method(engine, *args, **named)
        except Exception as error:
            kind = type(error)
            if kind.__module__.partition(".")[0] != "vllm":
                raise
            refused = RequestRefused if isinstance(error, ValueError) else RuntimeError
            ours = EngineDied if kind.__name__ == "EngineDeadError" else refused
            what = f"{engine.name}, {method.__name__}: {first_line(error)}"
            raise ours(what) from error

    return call


class EngineWeights:
    """`adapters`: that workers hold at most, where the policy comes as adapters; 0: it does not.
    `cluster`: the address of the Ray that the run is in; None: its own, on one machine.
    """

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        workers: int,
        adapters: int,
        cluster: str | None = None,
    ):
        self.name = name
        self.cluster = cluster
        self.model = model
        self.llm: AsyncLLM | None = None
        self.adapters = AdapterServing(name, model, adapters) if adapters else None
        self.channel = WorkerChannel(workers)
        self.offers: list[WorkerOffer] = []  # of its workers, by their number
        self.turns = Turns(name)
        self._served: dict[str, ServedAdapter | None] = {}  # by requests that are under way
        self.poisoned: str | None = None
        self._version = 0
        self._installations = 0  # of whole weights, since the start
        self._holding = Holding()  # but for what sleeps
        self._installing = asyncio.Lock()
        self._kv = "recompute"
        self._room_s = 600.0  # for requests of old adapters to end, before a new one has a place
        self._round = asyncio.Lock()
        self._staging = False

    @property
    def is_changing(self) -> bool:
        """Weights come or go between two steps, which has deadlines of its own."""
        return self.turns.asleep or self._round.locked() and not self._staging

    async def check_plan(self, plan: dict[str, Any]) -> None:
        """Raises ValueError listing what this engine's model and the plan of a trainer's streams do
        not have in common.
        """
        hf = read_hf_config(self.model.model_path)
        ours = (
            self.adapters.tensors if self.adapters else hf_names(Dims.of(hf), architecture_of(hf))
        )
        theirs = {
            block["name"]: tuple(block["shape"])
            for stream in plan["streams"]
            for block in stream["blocks"]
        }
        problems = [f"{name} is missing" for name in ours if name not in theirs]
        problems += [f"{name} is not of this model" for name in theirs if name not in ours]
        problems += [
            f"{name} is {list(theirs[name])}, here {list(shape)}"
            for name, shape in ours.items()
            if name in theirs and theirs[name] != tuple(shape)
        ]
        if problems:
            raise ValueError(
                f"the trainer's weights are not those of the model of {self.name}, "
                f"{self.model.model_path}: " + "; ".join(problems)
            )

    async def open_workers(self) -> None:
        """Workers stage beside the decoding from now on, and are there for those of other
        engines.
        """
        assert self.llm is not None
        await self.llm.collective_rpc("rft_listen", args=await self.channel.open())
        answers = await self.llm.collective_rpc("rft_relay", args=(self.cluster,))
        self.offers = [decode(answer, WorkerOffer) for answer in answers]

    async def worker_offers(self) -> list[WorkerOffer]:
        return self.offers

    @tells_its_death
    async def disband(self, generation: int) -> None:
        """Workers wait no more for groups of `generation` or before, which will not come
        together.
        """
        assert self.llm is not None, "disband before start"
        self._met(generation + 1)  # the one after it is there, though not for this engine
        await self.llm.collective_rpc("rft_disband", args=(generation,))

    def _met(self, generation: int) -> None:
        known = self._holding.generation
        self._holding = replace(self._holding, generation=max(known, generation))

    @tells_its_death
    async def init_weights(self, info: TrainerInfo) -> None:
        """Join the trainer's weight streams."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        assert self.llm is not None, "init_weights before start"
        if info.plan is not None:
            await self.check_plan(info.plan)
        async with self._round:
            self._kv, self._room_s = info.kv, info.timeout
            self._met(max((seat.generation for seat in info.seats), default=0))
            try:
                await self.llm.init_weight_transfer_engine(
                    WeightTransferInitRequest(init_info={"info": encode(info)})
                )
            except Exception as error:
                lost = [state.lost for state in await self._states() if state.unreachable]
                raise RoundFailed(
                    f"{self.name} did not join the weight streams: {first_line(error)}",
                    UNREACHABLE if lost else BROKEN,
                    max(lost, default=""),
                ) from error

    @tells_its_death
    async def stage(self, coming: Round) -> Received:
        """Receive a round beside the decoding. Returns the first worker's report, or that of a
        worker for which the trainer has moved on (`missed`). Of a `direct` round nothing is
        received before `commit`.
        """
        assert self.llm is not None, "stage before start"
        if coming.direct:
            return Received()
        async with self._round, within_reach(coming) as here:
            self._staging = True
            try:
                first, *_ = await self.channel.stage(here)
            finally:
                self._staging = False
        if first.error and first.blame != MISSED:
            raise RoundFailed(
                f"{self.name} did not receive version {coming.version}: {first.error}",
                first.blame,
                first.lost,
            )
        return first

    @tells_its_death
    async def commit(self, coming: Round) -> Installed:
        """Install what was staged (or, direct, receive it now); see `_install`."""
        with trace.overlapping("install weights", version=coming.version):
            return await self._install(coming)

    @tells_its_death
    async def load_weights_from(self, place: str | InSave, version: int) -> Installed:
        """Install the safetensors of a Hugging Face directory, or the weights of a committed save,
        as `version`: the same round, from files.
        """
        if isinstance(place, str):
            return await self._install(Round(version=version, location=AtPath(path=place)))
        coming = Round(version=version, timeout=LOAD_S, location=place)
        if (staged := await self.stage(coming)).error:
            raise RoundFailed(f"{self.name}: {staged.error}", staged.blame)
        return await self._install(coming)

    async def weight_version(self) -> int:
        return self._version

    async def idleness(self) -> tuple[float, float]:
        """Seconds in which no request was decoded, and all seconds, since this engine was made."""
        return self.turns.idle.seconds()

    async def holding(self) -> Holding:
        """What a new synchronizer must know. While weights are installed nobody can say what they
        will be, so this waits for the end of that, and for nothing else.
        """
        async with self._installing:
            mark = None if self.poisoned else self._holding.mark
            return replace(self._holding, mark=mark, asleep=self.turns.asleep)

    def _holds(self, coming: Round) -> None:
        """The whole of a round is in. Of one of no trainer's nothing can be said to others."""
        self._version, self.poisoned = coming.version, None
        self._installations += 1
        mark = (coming.epoch, coming.version) if coming.epoch >= 0 else None
        self._holding = replace(self._holding, mark=mark, digest=coming.digest)

    @tells_its_death
    async def sleep(self, patience: float) -> dict[str, Any]:
        """Leave the devices to the trainer until the next round wakes this engine; see
        `Turns`.
        """
        assert self.llm is not None, "sleep before start"
        async with self._round:
            return await self.turns.sleep(self.llm, patience)

    async def _install(self, coming: Round) -> Installed:
        """From pause to resume. In-flight requests freeze and go on under the new weights, but for
        those that are let end first.

        Raises RoundFailed; then the engine serves the old version again if every worker still holds
        exactly those weights, and is `poisoned` (and stays paused) if not.
        """
        assert self.llm is not None, "commit before start"
        if self.adapters:
            return await self._install_adapter(coming)
        version = coming.version
        async with self._round, self._installing, self.turns.opened_behind():
            decodes = self._served and not self.turns.asleep and not self.poisoned
            if decodes and self._kv != "keep":
                await self._let_end()
            began = time.monotonic()
            self.turns.close()
            await pause(self.llm, clear_cache=self._kv != "keep")
            paused = time.monotonic()
            try:
                await self.turns.wake(self.llm, WEIGHTS)
                states = await self._ask("rft_install", _as_staged(coming))
                installed = _confirmed(version, states)
                await self.llm.update_weight_version(str(version))
                self._holds(coming)
            except Exception as error:
                self.poisoned = await self._damage(error)
                lost = not self.poisoned and any(s.unreachable for s in await self._states())
                blame = DAMAGED if self.poisoned else UNREACHABLE if lost else BROKEN
                what = f"{self.name}: version {version} was not installed: {first_line(error)}"
                raise RoundFailed(what, blame) from error
            finally:
                if self.poisoned is None:
                    await self.turns.wake(self.llm, CACHE)
                    await self.llm.resume_generation()
            done = time.monotonic()
        return replace(installed, pause_s=done - began, install_s=done - paused)

    async def _let_end(self) -> None:
        """Wait for the requests that are nearest to their end, where that takes less than to
        compute again what they have; no new one begins meanwhile.
        """
        assert self.llm is not None
        tokens, left = defaultdict[str, int](int), defaultdict[str, int](int)
        for one in self.llm.output_processor.request_states.values():
            name = (one.parent_req or one).external_req_id
            made = one.detokenizer.num_output_tokens()
            tokens[name] += made + (0 if tokens[name] else one.prompt_len)  # the prompt is shared
            # what has not begun has all before it, and nothing to lose
            left[name] = max(left[name], one.max_tokens_param - made if made else MOST_STEPS + 1)
        steps = steps_worth_waiting((left[name], tokens[name]) for name in tokens)
        near = {name for name in tokens if left[name] <= steps}
        self.turns.hold()
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_S):
                while near & self._served.keys():
                    await self.turns.one_ends()

    async def _install_adapter(self, coming: Round) -> Installed:
        """The adapter alone: nothing pauses, and what fails
        leaves the version before to be served.
        """
        assert self.llm is not None and self.adapters is not None
        version = coming.version

        async def ask(order: AdapterOrder) -> Installed:
            states = await self._ask("rft_install_adapter", _as_staged(coming), order)
            seconds = max(state.install_s for state in states)  # between two steps
            return replace(
                _confirmed(version, states),
                pause_s=seconds,
                install_s=seconds,
                adapters=states[0].adapters,
            )

        async with self._round, self.turns.opened_behind():
            # requests of old adapters may have to make room first
            await self.turns.wake(self.llm, WEIGHTS, CACHE)
            try:
                installed = await self.adapters.install(version, ask, self._room_s)
            except Exception as error:
                # busy with rollouts is not broken
                blame = UNREACHABLE if isinstance(error, TimeoutError) else BROKEN
                raise RoundFailed(
                    f"{self.name}: version {version} was not installed: {first_line(error)}", blame
                ) from error
            self._holds(coming)
        return installed

    async def _ask(self, method: str, *records: Any) -> list[WorkerState]:
        """Call `rft.sync.worker.WorkerExtension` in every worker, between two steps."""
        assert self.llm is not None
        answers = await self.llm.collective_rpc(
            method, args=tuple(encode(record) for record in records)
        )
        return [decode(answer, WorkerState) for answer in answers]

    async def _states(self) -> list[WorkerState]:
        return await self._ask("rft_weight_state")

    async def _damage(self, error: Exception) -> str | None:
        """None when every worker still holds the weights from before the round, else why the engine
        is unusable.
        """
        if self.poisoned:
            return self.poisoned
        try:
            states = await self._states()
        except Exception as unreachable:  # not swallowed: it becomes the reason to refuse requests
            return f"{first_line(error)}; workers do not answer: {first_line(unreachable)}"
        versions = {state.version for state in states}
        before = len(versions) == 1 and versions <= {None, self._version}
        intact = before and not any(state.mixed for state in states)
        return None if intact else first_line(error)


def _as_staged(coming: Round) -> Round:
    """What workers hold a staged round by: they know where it lay. Files are opened now."""
    return coming if isinstance(coming.location, AtPath) else replace(coming, location=None)


def _confirmed(version: int, states: list[WorkerState]) -> Installed:
    wrong = [state for state in states if state.version != version or state.mixed]
    if wrong:
        raise RuntimeError(f"workers do not hold version {version} after finish: {wrong}")
    first = states[0].received
    return Installed(
        version=version,
        digest=first.digest,
        bytes=sum(state.received.bytes for state in states),
        receive_s=first.receive_s,
        again=sum(state.received.again for state in states),
        load_s=max(state.load_s for state in states),
    )


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def steps_worth_waiting(requests: Iterable[tuple[int, int]]) -> int:
    """For how many more steps of decoding to put new weights off.

    `requests`: of each the tokens that the longest of its samples may still get, and those that all
    have, with the prompt, which are computed again where it has not ended. Out: the n of 0 to
    MOST_STEPS with the largest (tokens of requests that end within n steps) - n * TOKENS_PER_STEP.
    From lengths alone: nothing is timed.
    """
    best = spared = steps = 0
    for left, tokens in sorted(requests):
        if left > MOST_STEPS:
            break
        spared += tokens
        if spared - left * TOKENS_PER_STEP > best:
            best, steps = spared - left * TOKENS_PER_STEP, left
    return steps


class IdleClock:
    """For how long an engine has decoded nothing: no request is under way, or all are frozen
    (weights are installed, the devices are a trainer's). By its own process's monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began = self._since = clock()
        self._idle, self._works = 0.0, False

    def note(self, works: bool) -> None:
        """Whether anything is decoded from now on."""
        self.seconds()
        self._works = works

    def seconds(self) -> tuple[float, float]:
        """Idle ones and all, since this was made."""
        now = self._clock()
        self._idle += 0.0 if self._works else now - self._since
        self._since = now
        return self._idle, now - self._began


class Turns:
    """Says when an engine works, and when its devices are the trainer's.

    request ──► gate ──► under way ──► answered      sleep: under way are finished
            ─► gate closes ─► vLLM sleeps            wake:  weights ─► (new ones are installed)
                                                            ─► cache ─► gate opens

    On a GPU vLLM's sleep frees the card: the weights wait in host memory, the cache is dropped. On
    a CPU it frees nothing, but nobody computes, so the cores are the trainer's; all the rest is the
    same. Invariants: a request that has not passed the gate is not known to vLLM; nothing decodes
    between `sleep` and the last `wake`.
    """

    def __init__(self, name: str):
        self.name = name
        self.answered_asleep = 0  # requests; none, if all is right
        self._asleep: set[str] = set()
        self._under_way = 0
        self._frozen = False
        self._open = asyncio.Event()
        self._open.set()
        self._ended = asyncio.Event()
        self.idle = IdleClock()

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    def hold(self) -> None:
        """New requests wait from now on; those under way go on."""
        self._open.clear()

    def close(self) -> None:
        """New requests wait from now on, and those under way stand still."""
        self.hold()
        self._frozen = True
        self._note()

    def open(self) -> None:
        self._open.set()
        self._frozen = False
        self._note()

    @asynccontextmanager
    async def opened_behind(self) -> AsyncIterator[None]:
        """Whatever becomes of a change of weights: requests go on behind it."""
        try:
            yield
        finally:
            self.open()

    def _note(self) -> None:
        self.idle.note(self._under_way > 0 and not self._frozen)

    async def one_ends(self) -> None:
        """Until one more request has ended. One waits at a time."""
        self._ended.clear()
        await self._ended.wait()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait for the gate; under way until the block is left."""
        await self._open.wait()
        self._under_way += 1
        self._note()
        try:
            yield
        finally:
            self._under_way -= 1
            self._note()
            self.answered_asleep += self.asleep
            self._ended.set()

    async def sleep(self, llm: "AsyncLLM", patience: float) -> dict[str, Any]:
        """Sleep as soon as nothing is under way. What is not finished after `patience` seconds is
        frozen as it is, and goes on when the engine wakes: its tokens from then on are of the
        weights from then on, as its versions say.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                # one more may have come when this is told of the last one's end
                while self._under_way:
                    await self.one_ends()
        except TimeoutError:
            log.warning(
                "%s sleeps over %d requests that were not finished in %g s",
                self.name,
                self._under_way,
                patience,
            )
        self.close()
        if WEIGHTS not in self._asleep:
            await llm.sleep(level=LEVEL, mode="keep")
            self._asleep = {WEIGHTS, CACHE}
        return {
            "waited_s": time.monotonic() - began,
            "frozen": self._under_way,
            "answered_asleep": self.answered_asleep,
        }

    async def wake(self, llm: "AsyncLLM", *parts: str) -> None:
        """Wake those parts that sleep. With the last one vLLM goes on with what was frozen."""
        for part in parts:
            if part in self._asleep:
                await llm.wake_up([part])
                self._asleep.discard(part)


async def pause(llm: "AsyncLLM", clear_cache: bool) -> None:
    """vLLM's `pause_generation(mode="keep")` without its last line, which sleeps for 20 ms so that
    outputs of requests that are aborted reach their callers first. Here none is aborted.
    """
    if clear_cache:
        await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
