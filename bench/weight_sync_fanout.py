"""One version to one, two and four engines over links of one rate: what the chain costs in time,
and what it spares the trainer.

In: a model directory, root and iproute2. Two sender processes hold the model as tensor-parallel
ranks do; each of them and each engine worker is in a network namespace of its own, whose cable is
limited in both directions to `RATE`, as a machine's card would be. Out: seconds of every round,
from a version's opening to the last engine's last byte, and the bytes that went into and out of
the namespace of rank 0. Ways:

    chain    engines pass on what they have (`rft.sync.fanout`)
    direct   every engine takes everything from the ranks
"""

import ctypes
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from bench.weight_sync_model import Shards, shapes
from bench.weight_sync_transport import BUCKET, TIMEOUT_S
from rft.ground.rounds import HOST, Round, TrainerInfo, WorkerOffer
from rft.sync import plan as plans
from rft.sync.fanout import Rings
from rft.sync.receiver import Receiver
from rft.sync.relay import Relay
from rft.sync.sender import WeightSender

SENDERS, ENGINES = 2, (1, 2, 4)
RATE = "800mbit"
CABLE, CLONE_NEWNET = "cable", 0x40000000
LIMIT = f"qdisc add dev {{}} root tbf rate {RATE} burst 1mb latency 100ms"
TOOLS = ("ip", "tc", "nsenter")


def obstacle() -> str | None:
    """Why this cannot be measured here."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: iproute2, util-linux)"
    return None if os.geteuid() == 0 else "network namespaces want root"


# --- the processes --------------------------------------------------------------------------------


def be_alone(pipe: Connection, address: str) -> None:
    """A network of this process's own; returns when its cable is there."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    pipe.send(os.getpid())
    pipe.recv()
    for words in ("link set lo up", f"addr add {address}/24 dev {CABLE}", f"link set {CABLE} up"):
        subprocess.run(["ip", *words.split()], check=True)
    subprocess.run(["tc", *LIMIT.format(CABLE).split()], check=True)
    pipe.send("up")


def be_switch(pipe: Connection) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "add", "switch", "type", "bridge"], check=True)
    subprocess.run(["ip", "link", "set", "switch", "up"], check=True)
    pipe.send(os.getpid())
    pipe.recv()


def be_sender(pipe: Connection, address: str, rank: int, model: Path) -> None:
    be_alone(pipe, address)
    torch.set_num_threads(1)
    sender = WeightSender(Shards(shapes(model), rank, SENDERS, 1), 1, TIMEOUT_S, address)
    pipe.send((sender.source.blocks(), sender.endpoint))
    sender.follow(pipe.recv(), rank)
    while (version := pipe.recv()) is not None:
        before = traffic()
        sender.open(version)
        pipe.send("open")
        pipe.recv()
        sender.close_version()
        pipe.send([now - then for now, then in zip(traffic(), before, strict=True)])


def be_engine(pipe: Connection, address: str, name: str) -> None:
    be_alone(pipe, address)
    torch.set_num_threads(1)
    receiver = Receiver(0, torch.device("cpu"))
    receiver.relay = Relay(address)
    pipe.send(WorkerOffer(shape=(1, 1), endpoint=receiver.relay.endpoint))
    while (order := pipe.recv()) is not None:
        if isinstance(order, TrainerInfo):
            receiver.connect(order)
        else:
            receiver.stage(Round(version=order))
        pipe.send(time.monotonic())


def traffic() -> tuple[int, int]:
    """Bytes into and out of this namespace, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (numbers,) = [line.split(":")[1].split() for line in lines if line.strip().startswith(CABLE)]
    return int(numbers[0]), int(numbers[8])


# --- who leads them -------------------------------------------------------------------------------


class Machines:
    """The processes, each behind its cable."""

    def __init__(self, model: Path, held: ExitStack):
        self.context, self.held = mp.get_context("spawn"), held
        self.held_open = self._start(be_switch)  # it lives until this is closed
        self.switch = self.held_open.recv()
        self.count = 0
        self.senders = [self._behind(be_sender, rank, model) for rank in range(SENDERS)]
        self.engines = {
            name: self._behind(be_engine, name)
            for name in (f"engine_{number}" for number in range(max(ENGINES)))
        }
        offered = [pipe.recv() for pipe in self.senders]
        self.plan = plans.build([blocks for blocks, _ in offered], BUCKET)
        self.streams = [endpoint for _, endpoint in offered]
        self.offers = {name: [pipe.recv()] for name, pipe in self.engines.items()}
        for pipe in self.senders:
            pipe.send(self.plan)
        self.version = 0

    def _start(self, body: Any, *arguments: Any) -> Connection:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=body, args=(theirs, *arguments), daemon=True)
        process.start()
        self.held.callback(process.kill)
        return ours

    def _behind(self, body: Any, *arguments: Any) -> Connection:
        self.count += 1
        pipe = self._start(body, f"10.78.0.{self.count}", *arguments)
        port, pid = f"port{self.count}", pipe.recv()
        ends = f"{port} netns {self.switch} type veth peer name {CABLE} netns {pid}"
        subprocess.run(["ip", "link", "add", *ends.split()], check=True)
        at_switch = ["nsenter", f"--target={self.switch}", "--net"]
        for words in (
            f"ip link set {port} master switch",
            f"ip link set {port} up",
            f"tc {LIMIT.format(port)}",
        ):
            subprocess.run([*at_switch, *words.split()], check=True)
        pipe.send("go")
        assert pipe.recv() == "up"
        return pipe

    def connect(self, count: int, chain: bool) -> None:
        """The first so many engines, in a ring or not."""
        rings, self.taking = Rings(), list(self.engines)[:count]
        for name in self.taking:
            rings.join(name, (1, 1, HOST))
        rings.settle(self.taking if chain else ())
        for name in self.taking:
            info = TrainerInfo(
                epoch=1,
                timeout=TIMEOUT_S,
                plan=plans.encode(self.plan),
                streams=self.streams,
                engine=name,
                seats=rings.seats(name, self.offers),
            )
            self.engines[name].send(info)
        for name in self.taking:
            self.engines[name].recv()

    def round(self) -> dict[str, Any]:
        """Seconds, and bytes into and out of rank 0."""
        self.version += 1
        began = time.monotonic()
        for pipe in self.senders:
            pipe.send(self.version)
        for name in self.taking:
            self.engines[name].send(self.version)
        for pipe in self.senders:
            pipe.recv()
        ended = max(self.engines[name].recv() for name in self.taking)
        for pipe in self.senders:
            pipe.send("close")
        (into, out), *_ = [pipe.recv() for pipe in self.senders]
        return {"seconds": ended - began, "into": into, "out": out}


def measured(model: Path, rounds: int) -> dict[str, Any]:
    """`own`: bytes of rank 0; for each way and number of engines, what `round` gave, round by
    round.
    """
    with ExitStack() as held:
        machines = Machines(model, held)
        own = machines.plan.streams[0].nbytes
        found: dict[str, Any] = {"own": own}
        for way, count in [*(("chain", count) for count in ENGINES), ("direct", max(ENGINES))]:
            machines.connect(count, way == "chain")
            machines.round()  # the first one allocates
            found[f"{way} {count}"] = [machines.round() for _ in range(rounds)]
        return found
