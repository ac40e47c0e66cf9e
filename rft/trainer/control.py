"""Rank 0's end of the control plane: batches from the buffer actor, evaluations from the explorer
actor.

In: Ray actor handles, found by name in the run's namespace. Out: plain blocking calls for the
training loop. Other ranks, and runs without an explorer, hold the same objects without handles, on
which every call does nothing. Every wait has a deadline, and `stop`, from any thread, ends those
that can be long. An actor that dies is started again, and asked again what it was asked
(`rft.run.actors`); one that does not come back raises here, and the supervisor names it.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from rft.buffer import delivery
from rft.buffer.calls import AGAIN_S, BufferBroken
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import ExplorerConfig
from rft.ground.experience import (
    Batch,
    Completion,
    EvalResult,
    Experience,
    GenerateRequest,
    decode,
    encode,
)
from rft.ground.protocols import RETURN_S, ActorHandle

if TYPE_CHECKING:
    # loaded where there is one: it takes a third of a second
    from rft.rollout.explorer import ExplorerHandle

START_S = 900.0  # an engine may have to read a large model from a slow disk
REPLY_S = 60.0  # an actor that is alive answers bookkeeping calls within milliseconds
# the buffer's own max_read_timeout ends a take; this is only in case it cannot
READ_MARGIN_S = RETURN_S
# numbers that only one step tells
ONCE = ("experience_pipeline/", "explorer/engine_idle_frac")


def connect(address: str, namespace: str) -> None:
    """Join the supervisor's Ray as a driver of our own: if this rank dies, the actors live on."""
    import ray

    with our_sigterm():
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)


def disconnect() -> None:
    """At a good end.

    Left to the end of the interpreter, Ray would first wait half a second for its own lines.
    """
    import ray

    ray.shutdown()


@contextlib.contextmanager
def our_sigterm() -> Iterator[None]:
    """`ray.init` puts its own SIGTERM handler in place, which just exits: keep ours."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def cause(error: BaseException) -> str:
    """In one line what went wrong: of an error that came through Ray, what the remote method raised
    or how its process ended.
    """
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

    if isinstance(error, ActorDiedError | ActorUnavailableError):
        created = isinstance(error, ActorUnavailableError) or not error.actor_init_failed
        return "its process died (killed, or out of memory)" if created else _lines(error)[-1]
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return cause(error.cause)
    name = type(error).__name__
    return f"{name}: {_lines(error)[0]}" if _lines(error) else name


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()]


def actor(name: str) -> ActorHandle[Any]:
    """The actor of that name in the run's namespace; raises ValueError when there is none."""
    import ray

    return ActorHandle(ray.get_actor(name))


class QueueSource:
    """`feed.BatchSource` over the experience buffer actor."""

    def __init__(
        self,
        buffer: ActorHandle[ExperienceBuffer],
        max_read_timeout: float,
        max_age: int | None = None,
        beat: Callable[[], Any] = lambda: None,
        beat_s: float = math.inf,
    ):
        """`max_age`: in versions, of the oldest token of a group that is taken; the buffer drops
        what is older, and counts it. `beat`: called every `beat_s` while a batch is waited for.
        """
        self.buffer = buffer
        self.beat, self.beat_s = beat, beat_s
        self.take_timeout = max_read_timeout + READ_MARGIN_S
        self.max_age = max_age
        self._seen: dict[delivery.PartKey, list[Experience]] = {}  # of the next step
        self._looking: Any = None  # Ray's reference to what is waited for
        self._told: list[BufferCall] = []  # of which nothing was heard yet
        self._position: int | None = None  # of the journal, behind the last step that was consumed
        self._oldest: int | None = None  # version of a token, when that was last told

    def attach(self, step: int, run_epoch: int) -> dict[str, Any]:
        """Tell the buffer where this trainer stands: leases from `step`
        on are handed out again as they were.
        """
        return self._call(ExperienceBuffer.attach_trainer, step, run_epoch)

    def take(self, step: int) -> Batch:
        oldest = None if self.max_age is None else max(step - self.max_age, 0)
        seen, self._seen = self._seen, {}
        known = [list(seen)] if seen else []
        self._hear()
        asked = BufferCall(self.buffer, ExperienceBuffer.take, (step, "trainer", oldest, *known))
        return delivery.opened(asked.answer(self.take_timeout, self.beat, self.beat_s), seen)

    def begin_look(self, step: int) -> None:
        self._looking = self.buffer.ask(ExperienceBuffer.look, step)

    def look(self) -> Batch:
        import ray

        return delivery.opened(ray.get(self._looking, timeout=self.take_timeout), self._seen)

    def look_away(self) -> None:
        import ray

        ray.cancel(self._looking)

    def consumed(self, step: int) -> None:
        self._position = self._call(ExperienceBuffer.consumed, step)

    def saved(self, step: int) -> None:
        self._tell(ExperienceBuffer.saved, step)

    def stop(self) -> None:
        """Let a `take` that waits, and every later one, return an empty batch; from any thread,
        does not wait.
        """
        self.buffer.ask(ExperienceBuffer.stop)

    def wants_weights(self, interval: int) -> bool:
        return self._call(ExperienceBuffer.wants_weights, interval)

    def mark(self) -> int:
        """Nothing is asked behind a step that was consumed: a resume there needs no more."""
        if self._position is None:
            self._position = self._call(ExperienceBuffer.position)
        return self._position

    def retain(self, loop: dict[str, Any]) -> int | None:
        """The oldest version is as it was told for the checkpoint before."""
        self._tell(ExperienceBuffer.retain, loop["journal"], loop["step"])
        return self._oldest

    def close(self) -> None:
        self._hear()

    def _tell(self, method: Callable[..., Any], *arguments: Any) -> None:
        """No step waits for the buffer to do so: the next call does, and raises what went wrong."""
        self._told.append(BufferCall(self.buffer, method, arguments))

    def _hear(self) -> None:
        told, self._told = self._told, []
        for asked in told:
            found = asked.answer(RETURN_S)
            self._oldest = found if asked.method is ExperienceBuffer.retain else self._oldest

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self._hear()
        return BufferCall(self.buffer, method, arguments).answer(RETURN_S)


class BufferCall:
    """A call of the buffer that is under way; one that is broken is asked again."""

    def __init__(
        self,
        buffer: ActorHandle[ExperienceBuffer],
        method: Callable[..., Any],
        arguments: tuple[Any, ...],
    ):
        self.buffer, self.method, self.arguments = buffer, method, arguments
        self._reference = buffer.ask(method, *arguments)

    def answer(
        self,
        timeout: float,
        beat: Callable[[], Any] = lambda: None,
        beat_s: float = math.inf,
    ) -> Any:
        """`beat`: called every `beat_s` until it is there."""
        import ray

        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return ray.get(self._reference, timeout=min(left, beat_s))
            except ray.exceptions.GetTimeoutError:
                if left <= beat_s:
                    raise
                beat()
            except BufferBroken:
                if time.monotonic() + AGAIN_S > deadline:
                    raise
                time.sleep(AGAIN_S)
                self._reference = self.buffer.ask(self.method, *self.arguments)


def await_engines(
    explorer: "ExplorerHandle | None",
    hold: bool = False,
    agreed: Callable[[bool], bool] = lambda is_over: is_over,
    beat_s: float = START_S,
) -> None:
    """Return when every part of the run serves, on every rank: ranks start while engines and
    explorer load. `explorer`: rank 0's. `agreed`, `beat_s`: as of `Evaluations`.

    `hold`: an explorer that outlived the trainer before this one samples nothing more from weights
    that will go. Then call it after the buffer knows this trainer.
    """
    if explorer is None:  # without Ray, which ranks that only train never load
        while not agreed(True):
            pass
        return
    import ray

    from rft.rollout.explorer import Explorer

    opened, deadline = explorer.ask(Explorer.opened), time.monotonic() + START_S
    while not agreed(_is_there(opened, beat_s, deadline)):
        pass
    if hold:
        ray.get(explorer.ask(Explorer.hold), timeout=RETURN_S)


def _is_there(reference: Any, wait_s: float, deadline: float) -> bool:
    """Within `wait_s`; GetTimeoutError at the deadline."""
    import ray

    left = max(0.0, deadline - time.monotonic())
    try:
        ray.get(reference, timeout=min(wait_s, left))
    except ray.exceptions.GetTimeoutError:
        if left <= wait_s:
            raise
        return False
    return True


def sampled(
    explorer: "ExplorerHandle",
    served: Callable[[int], Any],
    version: int,
    requests: list[GenerateRequest],
) -> list[Completion]:
    """What engines of that version answer, one to each request; `served` as of `Evaluations`."""
    import ray

    from rft.rollout.explorer import Explorer

    asked = explorer.ask(Explorer.sample, [encode(one) for one in requests], served(version))
    found = ray.get(asked, timeout=START_S)
    return [decode(answer, list[Completion])[0] for answer in found]


class PoolNumbers:
    """The engine pool's numbers for the metrics of every step, as fresh as an explorer that is not
    waited for gives them; and those of the experience pipeline and of idle engines, of what was
    since they were told last.
    """

    def __init__(self, explorer: "ExplorerHandle | None"):
        self.explorer = explorer
        self.last: dict[str, float] = {}
        self.asked = self._ask() if explorer is not None else None

    def metrics(self) -> dict[str, float]:
        if self.explorer is not None:
            import ray

            if ray.wait([self.asked], timeout=0)[0]:
                self.last, self.asked = ray.get(self.asked), self._ask()
        told, self.last = (
            self.last,
            {name: value for name, value in self.last.items() if not name.startswith(ONCE)},
        )
        return told

    def _ask(self) -> Any:
        from rft.rollout.explorer import Explorer

        return self.explorer.ask(Explorer.stats)  # type: ignore[union-attr]


class Evaluations:
    """When to evaluate, and what came out. In-loop ones run beside training and are reported when
    they are ready.

    A version that is due is published, whatever the style of synchronization says, and its
    evaluation begins when the engines serve it: `served(version)` makes a Ray reference that is
    ready then. `alone`: training waits for evaluations, so that no answer mixes two versions
    (deterministic runs). `reported`: versions that an earlier attempt evaluated; one that was due
    and is not among them was lost with it, and is done at the start. `agreed`: what rank 0 says, on
    every rank, asked every `beat_s` where training waits: much less than ranks wait for each other.
    """

    def __init__(
        self,
        explorer: "ExplorerHandle | None",
        config: ExplorerConfig,
        report: Callable[[EvalResult], None],
        alone: bool,
        served: Callable[[int], Any] = lambda version: version,
        reported: Collection[int] = (),
        agreed: Callable[[bool], bool] = lambda is_over: is_over,
        beat_s: float = 600.0,
    ):
        self.explorer = explorer
        self.config = config
        self.report = report
        self.alone = alone
        self.served = served
        self.reported = reported
        self.agreed = agreed
        self.beat_s = beat_s
        self.pending: list[Any] = []
        self.newest: int | None = None
        self.stopped = False

    def stop(self) -> None:
        """Give up what is being evaluated, from any thread;
        whoever waits for it goes on without.
        """
        import ray

        self.stopped = True
        for reference in list(self.pending):
            ray.cancel(reference)

    def at_startup(self, version: int) -> None:
        """Evaluate the untrained policy, alone, then let the explorer go.

        After a resume only what was lost.
        """
        due = self.is_due(version) if version else self.config.eval_on_startup
        if due and version not in self.reported and not self.stopped:
            self._start(version)
        self._wait()
        if self.explorer is not None:
            import ray

            from rft.rollout.explorer import Explorer

            ray.get(self.explorer.ask(Explorer.explore), timeout=RETURN_S)

    def if_due(self, version: int) -> None:
        if self.is_due(version):
            self._start(version)
        if self.alone:
            self._wait()
        else:
            self._collect(0.0)

    def at_end(self, version: int) -> None:
        if self.newest != version and version not in self.reported:
            self._start(version)
        self._wait()

    def is_due(self, version: int) -> bool:
        """The same on every rank."""
        return self.config.eval_interval > 0 and version % self.config.eval_interval == 0

    def _start(self, version: int) -> None:
        if self.explorer is None:
            return
        from rft.rollout.explorer import Explorer

        # Ray calls `evaluate` when this is ready, and nobody waits for it meanwhile
        served = self.served(version)
        self.pending.append(self.explorer.ask(Explorer.evaluate, version, served))
        self.newest = version

    def _wait(self) -> None:
        """For those that run, on every rank: an evaluation may take longer than ranks wait for rank
        0 without a word of it.
        """
        while not self.agreed(self._collect(self.beat_s)):
            pass

    def _collect(self, wait_s: float) -> bool:
        """Report finished evaluations, oldest first, `wait_s` for all; whether none still runs."""
        if not self.pending:
            return True  # without Ray, which ranks that only train never load
        import ray

        until = time.monotonic() + wait_s
        while self.pending:
            left = max(0.0, until - time.monotonic())
            if not ray.wait([self.pending[0]], timeout=left)[0]:
                if wait_s:
                    self._ask()
                return False
            try:
                results: list[bytes] = ray.get(self.pending[0], timeout=RETURN_S)
            except ray.exceptions.TaskCancelledError:
                if not self.stopped:
                    raise
                results = []
            self.pending.pop(0)
            for result in results:
                self.report(decode(result, EvalResult))
        return True

    def _ask(self) -> None:
        """Tasks have limits of their own, and nobody knows how many come after each other: an
        explorer that answers gets on with them.
        """
        import ray

        from rft.rollout.explorer import Explorer

        ray.get(self.explorer.ask(Explorer.opened), timeout=RETURN_S)  # type: ignore[union-attr]
