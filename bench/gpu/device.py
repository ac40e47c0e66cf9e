"""Stage 1: what rft does with a card beside the computation, with torch alone.

    python -m bench.gpu.device ipc|nccl|copier|checksum|allocator|guard cuda|cpu

In: a kind of device. Out: see `bench.gpu.checks`. On "cpu" two things stand in: memory that two
processes map for that of a card (`bench.host_card`), and NCCL's semantics over sockets
(`bench.nccl_like`) under rft's own `NcclLink`.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed

from bench.gpu.checks import Checks, main
from bench.host_card import HostCard
from bench.nccl_like import nccl_like
from rft.checkpoint.stager import Slot
from rft.ground import device as devices
from rft.ground.protocols import Block
from rft.ground.rounds import TrainerInfo
from rft.ground.streams import Beside, Copies, enter_thread, settle
from rft.sync import plan as plans
from rft.sync.buckets import Checksum
from rft.sync.communicator import nccl
from rft.sync.links import BucketLink, IpcLink, host_nccl, join_nccl
from rft.sync.receiver import Receiver
from rft.sync.sender import WeightSender
from rft.sync.transport import IPC, NCCL

WAIT_S, END_S = 60.0, 5.0
LAYERS = 12
FLIPS = 2
ROUNDS = 20  # of the copier
SEED = 2**63 + 17
MEBI = 2**20


class Faulty:
    """A link that flips a bit of so many buckets after they were hashed, or lets none go."""

    flips = 0
    hangs = False

    def __init__(self, link: BucketLink):
        self.link = link

    def send(self, size: int, fill: Callable[[torch.Tensor], bytes]) -> bytes:
        def faulty(message: torch.Tensor) -> bytes:
            if Faulty.hangs:
                threading.Event().wait()
            digest = fill(message)
            if Faulty.flips:
                Faulty.flips -= 1
                message[17] ^= 1
            return digest

        return self.link.send(size, faulty)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


class Versions:
    """`WeightSource`: of each version other values, the same in every process."""

    def __init__(self, device: torch.device):
        self.device, self.version = device, 0
        self.width = 1024 if device.type == "cuda" else 64

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {f"layers.{n}.up": (4 * self.width, self.width) for n in range(LAYERS)}

    def blocks(self) -> list[Block]:
        return [Block(n, "bfloat16", s, 0, 0, s[0]) for n, s in self.shapes.items()]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        for tensor in self.values().values():
            yield tensor.to(self.device)

    def values(self) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(self.version)
        return {
            n: torch.randn(s, generator=made).to(torch.bfloat16) for n, s in self.shapes.items()
        }


def links(way: str, device: torch.device, sends: bool) -> Callable[..., BucketLink]:
    """One end's, for this way, whatever rft would choose."""
    make = nccl_like if device.type == "cpu" else nccl
    if way == IPC:
        return lambda wire, alone=False: IpcLink(wire, card(device))
    if sends:
        return lambda wire: host_nccl(wire, "127.0.0.1", device, make)
    return lambda wire, alone: join_nccl(wire, device, make)


def card(device: torch.device) -> Any:
    return HostCard() if device.type == "cpu" else devices.SharedCard(device)


def serve(orders: Connection, way: str, kind: str) -> None:
    """The sender's process. Orders: ("open", version), ("close",), ("flip",), ("hang",)."""
    device = devices.choose(kind, index=1 if (way, kind) == (NCCL, "cuda") else 0)
    device.activate()
    make, weights = links(way, device.torch, sends=True), Versions(device.torch)
    sender = WeightSender(
        weights,
        1,
        WAIT_S,
        make_link=lambda wire: Faulty(make(wire)),
        device=str(device.torch),
    )
    plan = plans.build([weights.blocks()], 8 * MEBI if kind == "cuda" else 4096)
    sender.follow(plan, 0)
    orders.send((plans.encode(plan), sender.endpoint))
    while True:
        order, *given = orders.recv()
        if order == "open":
            weights.version = given[0]
            sender.open(weights.version)
        elif order == "close":
            sender.close_version()
        elif order == "flip":
            Faulty.flips = FLIPS
        else:
            Faulty.hangs = True
        orders.send(None)


class Peer:
    """The sender's process, and the receiver that has joined it."""

    def __init__(self, way: str, device: devices.Device):
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, way, device.kind), daemon=True)
        self.process.start()
        plan, endpoint = self.orders.recv()
        self.weights = Versions(device.torch)
        self.receiver = Receiver(0, device.torch, links(way, device.torch, sends=False))
        self.receiver.connect(
            TrainerInfo(plan=plan, streams=[endpoint], epoch=1, timeout=WAIT_S, engine="engine_0")
        )

    def ask(self, *order: Any) -> None:
        self.orders.send(order)
        self.orders.recv()

    def differing(self, version: int) -> int:
        """Tensors of a round that are not what was sent, to the bit."""
        self.ask("open", version)
        self.weights.version = version
        expected = self.weights.values()
        found = {n: t.cpu() for n, t in self.receiver.tensors(version)}
        self.ask("close")
        return sum(not torch.equal(found.pop(n), t) for n, t in expected.items()) + len(found)

    def ended_after(self, version: int, act: Callable[[], Any]) -> float:
        """Seconds from `act`, in a round in which nothing moves, until the receiver knows."""
        self.ask("hang")
        self.ask("open", version)
        acted: list[float] = []

        def later() -> None:
            acted.append(time.monotonic())
            act()

        threading.Timer(1.0, later).start()  # it waits for the first bucket by then, or soon after
        try:
            list(self.receiver.tensors(version))
        except Exception as error:
            print(f"it ended with {type(error).__name__}: {error}", flush=True)
            return time.monotonic() - acted[0] if acted else float("nan")
        raise AssertionError("a round in which nothing was sent has ended well")

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def link(way: str, checks: Checks) -> None:
    checks.device.activate()
    peer = Peer(way, checks.device)
    checks.most("tensors that differ", max(map(peer.differing, (1, 2))), 0)
    peer.ask("flip")
    checks.most("tensors that differ after wrong bits", peer.differing(3), 0)
    sent_again = peer.receiver.again
    checks.tell("buckets sent again", sent_again, f"{FLIPS}", sent_again == FLIPS)
    checks.most("seconds until a kill -9 is known", peer.ended_after(4, peer.process.kill), END_S)
    peer.close()
    peer = Peer(way, checks.device)
    checks.most(
        "seconds until closing ends a wait", peer.ended_after(1, peer.receiver.close), END_S
    )
    peer.close()


def copier(checks: Checks) -> None:
    """What is copied is what was there at `begin`, though the next step is asked for at once."""
    checks.device.activate()
    size = 256 * MEBI if not checks.fake else MEBI
    slot, copies = Slot(0, size, checks.device), checks.device.copier()
    target = slot.bytes[:size]
    weights = torch.randint(0, 255, (size,), dtype=torch.uint8, device=checks.device.torch)
    wrong = 0
    for _ in range(ROUNDS):
        weights.mul_(5).add_(3)  # still under way as the copy is asked for
        wanted = weights.clone()
        copies.begin()
        copies.copy(Copies([target], [weights]))
        copies.fence()
        weights.mul_(7).add_(1)
        copies.finish()
        wrong += not torch.equal(target, wanted.cpu())
    checks.most(f"of {ROUNDS} copies wrong", wrong, 0)
    slot.close()


def checksum(checks: Checks) -> None:
    checks.device.activate()
    made = torch.Generator().manual_seed(1)
    differ, blind = 0, 0
    on_device, on_host = Checksum(checks.device.torch), Checksum(torch.device("cpu"))
    on_device.make()
    on_host.make()
    for size in (8, 4096, 3 * MEBI + 8, 32 * MEBI):
        data = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=made)
        there, here = (
            on_device.of(data.to(checks.device.torch), SEED),
            on_host.of(data, SEED),
        )
        differ += there != here
        for place in (0, size // 2, size - 1):
            data[place] ^= 1
            blind += on_device.of(data.to(checks.device.torch), SEED) == here
            data[place] ^= 1
    checks.most("sizes whose sums differ", differ, 0)
    checks.most("flipped bits that were not seen", blind, 0)


def allocator(checks: Checks) -> None:
    """Under the setting that ranks have."""
    begin_under(devices.rank_environment("cuda", 1, 1, None, os.environ))
    checks.device.activate()
    own = torch.zeros(4 * MEBI, dtype=torch.uint8, device=checks.device.torch)
    shared = card(checks.device.torch).room(4 * MEBI)
    if not checks.fake:
        checks.true("torch's own memory expands", expands(own))
        checks.true("shared memory does not", not expands(shared))
    checks.tell("bytes of each", (own.nbytes, shared.nbytes))


def begin_under(variables: Mapping[str, str]) -> None:
    """Libraries read them as they are loaded: this process begins again, with them."""
    if not variables.items() <= os.environ.items():
        words = [sys.executable, "-m", "bench.gpu.device", *sys.argv[1:]]
        os.execve(sys.executable, words, os.environ | variables)


def expands(memory: torch.Tensor) -> bool:
    """Whether its segment does, as the allocator tells."""
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= memory.data_ptr() < segment["address"] + segment["total_size"]:
            return bool(segment["is_expandable"])
    raise LookupError("this memory is in no segment of torch's")


def guard(checks: Checks) -> None:
    """Threads begin on card 0, whatever the first one has chosen."""
    begin_under({"TORCH_CUDA_CHECK_STRAY_CONTEXT": "error"})
    device = devices.choose(checks.device.kind, index=0 if checks.fake else 1)
    device.activate()
    memory, errors = card(device.torch), []

    def work() -> None:
        try:
            enter_thread(device.torch)
            with Beside(device.torch):
                data = torch.zeros(MEBI, dtype=torch.uint8, device=device.torch)
                checksum = Checksum(device.torch)
                checksum.make()
                checksum.of(data, SEED)
            memory.share(memory.room(MEBI))
            copies = device.copier()
            copies.begin()
            copies.copy(Copies([torch.empty(MEBI, dtype=torch.uint8)], [data]))
            copies.fence()
            copies.finish()
            settle(device.torch)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    checks.tell("errors of the thread", errors, "none", not errors)
    strays = [] if checks.fake else [n for n in (0,) if torch._C._cuda_hasPrimaryContext(n)]
    checks.tell("other cards with a context", strays, "none", not strays)


CHECKS: dict[str, Callable[[Checks], None]] = {
    "ipc": lambda checks: link(IPC, checks),
    "nccl": lambda checks: link(NCCL, checks),
    "copier": copier,
    "checksum": checksum,
    "allocator": allocator,
    "guard": guard,
}

if __name__ == "__main__":
    main(CHECKS)
