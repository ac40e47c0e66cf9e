"""Parts of a run that can be told where to die: each kills itself with SIGKILL at a named point of
its own work.

Nothing is simulated: these are the real engine, vLLM worker, synchronizer and trainer rank, each
with a place in which it ends. Ray and vLLM load this module by name, in processes of their own
(`fault_world` puts it on their path).
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.host_card import ForeignCard
from bench.nccl_like import NcclLike, nccl_like
from rft.ground.rounds import STREAM, Round
from rft.rollout.engine import RolloutEngine
from rft.sync.connection import PeerConnection
from rft.sync.links import BucketLink, host_link, join_link
from rft.sync.members import Members
from rft.sync.receiver import Receiver
from rft.sync.sender import WeightSender
from rft.sync.synchronizer import Synchronizer, reason
from rft.sync.transport import NCCL
from rft.sync.worker import WorkerExtension


@dataclass
class Doom:
    """`pid` is killed when `point` is met for the `count`-th time (from 1); 0: whoever meets it."""

    point: str
    count: int = 1
    pid: int = 0

    def meet(self, point: str) -> None:
        if point != self.point:
            return
        self.count -= 1
        if self.count == 0:
            os.kill(self.pid or os.getpid(), signal.SIGKILL)


NEVER = Doom("")


# --- a rollout engine -----------------------------------------------------------------------------


class MortalEngine(RolloutEngine):
    """Points: "before X" and "after X", where X is a call to vLLM, as `pause_generation`; see also
    `MortalWorker`.
    """

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "worker_extension_cls": "mortal.MortalWorker"}

    async def start(self, version: int = 0) -> dict[str, Any]:
        facts = await super().start(version)
        self.llm = MortalCalls(self.llm)
        return facts

    async def pids(self) -> tuple[int, int]:
        """Of this actor and of the process that holds the model."""
        (core,) = self.llm.engine_core.resources.engine_manager.processes
        return os.getpid(), core.pid

    async def die_at(self, doom: Doom) -> None:
        self.llm.doom = doom

    async def die_loading(self, doom: Doom) -> None:
        """The process with the model dies when so many tensors of the next round are in it."""
        await self.llm.collective_rpc("die_loading", args=(doom.count,))

    async def die_passing_on(self, doom: Doom) -> None:
        """The process with the model dies in the middle of so many messages to another engine."""
        await self.llm.collective_rpc("die_passing_on", args=(doom.count,))


class MortalCalls:
    """vLLM, with a point before and after every call that is awaited."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.doom = NEVER

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.llm, name)
        if name not in CALLS:
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            self.doom.meet(f"before {name}")
            answer = await found(*arguments, **named)
            self.doom.meet(f"after {name}")
            return answer

        return call


CALLS = (
    "pause_generation",
    "collective_rpc",
    "update_weight_version",
    "resume_generation",
)


class MortalWorker(WorkerExtension):
    """`RFT_FAULT_WAY`: "sockets", or "nccl", where packed buckets are passed on over what stands in
    for that.
    """

    def rft_relay(self, cluster: str | None) -> bytes:
        streamed, counting = self.weight_transfer_engine, threading.Lock()  # type: ignore[attr-defined]
        self.passing_on = NEVER

        def meet() -> None:
            self.passing_on.meet("message")

        if os.environ["RFT_FAULT_WAY"] == NCCL:
            streamed.receiver = streamed.readers[STREAM] = over_nccl(streamed.receiver, meet)
        offer = super().rft_relay(cluster)
        relay = streamed.receiver.relay
        relay.meeting.opens = False
        serve = relay.listener._serve

        def mortal(wire: PeerConnection, hello: dict[str, Any]) -> None:
            if "group" not in hello:
                halve(wire, meet, counting)
            serve(wire, hello)

        relay.listener._serve = mortal
        return offer

    def die_passing_on(self, messages: int) -> None:
        self.passing_on = Doom("message", messages)

    def die_loading(self, tensors: int) -> None:
        streamed = self.weight_transfer_engine  # type: ignore[attr-defined]
        source, doom = streamed._source, Doom("load", tensors)

        def mortal(coming: Round) -> Iterator[Any]:
            return met(source(coming))

        def met(pairs: Iterator[Any]) -> Iterator[Any]:
            for pair in pairs:
                doom.meet("load")
                yield pair

        streamed._source = mortal


def over_nccl(receiver: Receiver, meet: Callable[[], None]) -> Receiver:
    """In its place: `meet` is called in the middle of everything that is broadcast from here."""

    class Mortal(NcclLike):
        def _write(self, wire: Any, data: Any) -> None:
            middle = len(data) // 2
            super()._write(wire, memoryview(data)[:middle])
            meet()
            super()._write(wire, memoryview(data)[middle:])

    def transport(store: Any, rank: int, size: int, *_: Any) -> NcclLike:
        return Mortal(store, rank, size)

    def link(wire: PeerConnection, alone: bool) -> BucketLink:
        return join_link(wire, card, receiver.device, transport, alone)

    card = ForeignCard()
    return Receiver(
        receiver.worker, receiver.device, link, receiver.share, transport=transport, memory=card
    )


def link_of_rank(wire: PeerConnection) -> BucketLink:
    """The other end of that."""
    return host_link(wire, ForeignCard(), "127.0.0.1", torch.device("cpu"), nccl_like)


# --- the synchronizer -----------------------------------------------------------------------------


class MortalSynchronizer(Synchronizer):
    """Points: "before X" and "after X", where X is an event of its state machine (`EVENTS`)."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._state = MortalMembers()

        self._story: list[str] = []

    async def pid(self) -> int:
        return os.getpid()

    async def die_at(self, doom: Doom) -> None:
        self._state.doom = doom

    async def story(self) -> list[str]:
        """What failed since the last time, and where each engine is now."""
        told, self._story = [*self._story, self._state.where()], []
        return told

    def _judge(self, name: str, epoch: int, error: Exception) -> None:
        super()._judge(name, epoch, error)
        self._story.append(f"{name}: {reason(error)}; rings {list(self._rings.rings.values())}")


class MortalMembers(Members):
    doom = NEVER


def _mortal(event: str) -> Callable[..., Any]:
    found = getattr(Members, event)

    def happen(self: MortalMembers, *arguments: Any) -> Any:
        self.doom.meet(f"before {event}")
        answer = found(self, *arguments)
        self.doom.meet(f"after {event}")
        return answer

    return happen


EVENTS = ("publish", "begin", "staged", "committed", "conclude")  # of a round, in this order
JOINING = ("join", "connect", "connected")  # of an engine that comes
for _event in EVENTS + JOINING:
    setattr(MortalMembers, _event, _mortal(_event))


# --- a trainer rank -------------------------------------------------------------------------------


class MortalSender(WeightSender):
    """Points: "handshake", "asked", "message" (any part of any message; only half of it is sent),
    "served", "opened", "closing".
    """

    doom = NEVER
    peer = ""  # whose messages count; "": everybody's
    _meeting = threading.Lock()

    def open(self, version: int) -> None:
        super().open(version)
        self.doom.meet("opened")

    def close_version(self) -> dict[str, float]:
        numbers = super().close_version()
        self.doom.meet("closing")
        return numbers

    def _admit(self, hello: dict[str, Any]) -> str:
        self.doom.meet("handshake")
        return super()._admit(hello)

    def _answer(self, *arguments: Any) -> None:
        self.doom.meet("asked")
        super()._answer(*arguments)
        self.doom.meet("served")

    def _serve(self, wire: PeerConnection, hello: dict[str, Any]) -> None:
        def meet() -> None:
            if hello["peer"].startswith(self.peer):
                self.doom.meet("message")

        halve(wire, meet, self._meeting)
        super()._serve(wire, hello)


def halve(wire: PeerConnection, meet: Callable[[], None], counting: Any) -> None:
    """Only half of every message is sent when its point is met; there is a thread per wire."""
    send = wire.send

    def halved(data: memoryview) -> None:
        middle = len(data) // 2
        send(data[:middle])
        with counting:
            meet()
        send(data[middle:])

    wire.send = halved  # type: ignore[method-assign]
