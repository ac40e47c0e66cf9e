"""Whom the engines follow now: the trainer that leads, and where the versions are that it has
published.

    synchronizer ── attach, locate, forget ──► Lead ── info, round ──► what one engine is told

In: what the trainer says of itself. Out: `TrainerInfo`s and `Round`s for engines. Invariant: a mark
that is not located is in the trainer's streams.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from rft.ground import rounds
from rft.ground.rounds import GroupSeat, Location, Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.members import Mark
from rft.sync.plan import StreamPlan

Endpoints = Sequence[dict[str, Any]]


class Superseded(RuntimeError):
    """A newer trainer has attached."""


class NotConnected(RuntimeError):
    """This process has not heard of the trainer that asks: it is to connect (again)."""


class Lead:
    """`timeout`: of what engines wait for. `kv` and `direct` go to them with a trainer and with
    each round.
    """

    def __init__(self, timeout: float, kv: str, direct: bool):
        self.timeout = timeout
        self.kv = kv
        self.direct = direct
        self.trainer: TrainerInfo | None = None
        self.plan: StreamPlan | None = None  # of its streams
        # digest and place of what is not in the trainer's streams
        self._located: dict[Mark, tuple[str, Location]] = {}

    def trainer_of(
        self, epoch: int, method: str, plan: StreamPlan | None, streams: Endpoints
    ) -> TrainerInfo:
        return TrainerInfo(
            epoch=epoch,
            timeout=self.timeout,
            method=method,
            plan=None if plan is None else plans.encode(plan),
            streams=list(streams),
            kv=self.kv,
            direct=self.direct,
        )

    def attach(self, trainer: TrainerInfo, plan: StreamPlan | None) -> None:
        self.trainer, self.plan = trainer, plan
        self._located.clear()

    def locate(self, mark: Mark, digest: str, location: Location) -> None:
        self._located[mark] = digest, location

    def forget(self, before: Mark) -> None:
        self._located = {mark: at for mark, at in self._located.items() if mark >= before}

    def is_passed_on(self) -> bool:
        """Whether engines pass on to each other what they take: from streams into staging memory,
        which stays.
        """
        trainer = self.trainer
        return trainer is not None and trainer.method == rounds.STREAM and not self.direct

    def info(self, engine: str, seats: list[GroupSeat]) -> TrainerInfo:
        """The trainer, as this engine is to take its weights."""
        assert self.trainer is not None
        alone = self.is_passed_on() and not seats
        return replace(self.trainer, engine=engine, seats=seats, alone=alone)

    def round(self, mark: Mark) -> Round:
        streamed = self.plan.digest if self.plan else ""
        digest, location = self._located.get(mark, (streamed, None))
        return Round(
            version=mark[1],
            epoch=mark[0],
            digest=digest,
            timeout=self.timeout,
            direct=self.direct,
            location=location,
        )


def is_reborn() -> bool:
    """Whether this process is an actor that Ray has started again."""
    import ray

    if not ray.is_initialized():
        return False
    here = ray.get_runtime_context()
    return here.get_actor_id() is not None and bool(here.was_current_actor_reconstructed)


def reason(error: BaseException | None) -> str:
    """What happened, in one line: of an error that came through
    Ray, what the remote method raised.
    """
    inner = getattr(error, "cause", None) or error
    return (str(inner).splitlines() or [type(inner).__name__])[0]
