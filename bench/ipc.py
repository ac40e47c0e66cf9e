"""Weight sync between two processes on one GPU, beside the device's own copy of the same bytes.

    python -m bench.ipc [--quick] [--billions 1.5]

In: nothing; a decoder of so many parameters, in bf16, of random bytes, in a sender process. Out: a
table and one last line of JSON. In every round, in turn:

    copy     one `copy_` of all bytes from one place of the card to another, in this process
    ours     `WeightSender` in the other process, `Receiver` here, an IPC link between them: packed,
             checksums of both ends
             compared, whole Hugging Face tensors in memory of the card at the end (the way of
             `synchronizer.receive=direct`)

On a machine without a GPU the same program runs over the stand-in of `bench.host_card`, with a
small model: it then shows that the protocol works and what it costs there, says so, and claims
nothing.
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench import report
from bench.host_card import HostCard
from rft.ground import device as devices
from rft.ground.protocols import Block
from rft.ground.rounds import TrainerInfo
from rft.sync import plan as plans
from rft.sync.links import IpcLink
from rft.sync.receiver import Receiver
from rft.sync.sender import WeightSender

ROUNDS, QUICK_ROUNDS = 20, 10
BUCKET, BUCKET_ON_HOST = 256 * 2**20, 4 * 2**20
BILLIONS, BILLIONS_ON_HOST = 1.5, 0.02
BAR = 0.7  # of the copy's speed, on a GPU
TIMEOUT_S = 120.0


def shapes(parameters: float) -> dict[str, tuple[int, int]]:
    """Layers of one width, until there are so many parameters."""
    hidden = 4096 if parameters >= 1e9 else 512
    found = {"model.embed_tokens.weight": (32000, hidden)}
    count, layer = 32000 * hidden, 0
    while count < parameters:
        at = f"model.layers.{layer}."
        found |= {
            f"{at}self_attn.qkv_proj.weight": (3 * hidden, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, hidden),
            f"{at}mlp.gate_up_proj.weight": (6 * hidden, hidden),
            f"{at}mlp.down_proj.weight": (hidden, 3 * hidden),
        }
        count, layer = count + 13 * hidden * hidden, layer + 1
    return found


class Weights:
    """`WeightSource` on one device."""

    def __init__(self, parameters: float, device: torch.device):
        self.tensors = {
            name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device).view(
                torch.bfloat16
            )
            for name, shape in shapes(parameters).items()
        }

    def blocks(self) -> list[Block]:
        return [
            Block(name, "bfloat16", tuple(t.shape), 0, 0, t.shape[0])
            for name, t in self.tensors.items()
        ]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors.values())


def bucket_of(device: torch.device) -> int:
    return BUCKET_ON_HOST if device.type == "cpu" else BUCKET


def memory_of(device: torch.device) -> Any:
    return HostCard() if device.type == "cpu" else devices.SharedCard(device)


def send(orders: Connection, parameters: float, kind: str) -> None:
    """The sender process: opens and closes the versions that it is told."""
    torch.set_num_threads(1)
    device = devices.choose(kind).torch
    weights = Weights(parameters, device)
    sender = WeightSender(
        weights,
        1,
        TIMEOUT_S,
        make_link=lambda wire: IpcLink(wire, memory_of(device)),
        device=str(device),
    )
    plan = plans.build([weights.blocks()], bucket_of(device))
    sender.follow(plan, 0)
    orders.send((plans.encode(plan), sender.endpoint))
    while (version := orders.recv()) is not None:
        sender.open(version)
        orders.send(None)
        orders.recv()
        sender.close_version()
        orders.send(None)


class Bench:
    def __init__(self, parameters: float, device: torch.device):
        context = multiprocessing.get_context("spawn")
        self.device = device
        self.orders, theirs = context.Pipe()
        self.process = context.Process(
            target=send, args=(theirs, parameters, device.type), daemon=True
        )
        self.process.start()
        plan, endpoint = self.orders.recv()
        self.receiver = Receiver(0, device, lambda wire, alone: IpcLink(wire, memory_of(device)))
        self.receiver.connect(
            TrainerInfo(plan=plan, streams=[endpoint], epoch=1, timeout=TIMEOUT_S, engine="bench")
        )
        self.size = sum(2 * rows * columns for rows, columns in shapes(parameters).values())
        self.source, self.target = (
            torch.zeros(self.size, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self.version = 0

    def copy(self) -> float:
        began = time.perf_counter()
        self.target.copy_(self.source)
        devices.settle(self.device)
        return time.perf_counter() - began

    def ours(self) -> float:
        self.version += 1
        self._order(self.version)
        began = time.perf_counter()
        got = sum(tensor.nbytes for _, tensor in self.receiver.tensors(self.version))
        devices.settle(self.device)
        took = time.perf_counter() - began
        assert got == self.size
        self._order("close")
        return took

    def _order(self, order: Any) -> None:
        self.orders.send(order)
        self.orders.recv()

    def close(self) -> None:
        self.receiver.close()
        self.orders.send(None)
        self.process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}"
    )
    parser.add_argument(
        "--billions",
        type=float,
        help=f"parameters; default {BILLIONS}, without a GPU {BILLIONS_ON_HOST}",
    )
    options = parser.parse_args()
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    torch.set_num_threads(1)
    device = devices.choose().torch
    real = device.type != "cpu"
    billions = options.billions or (BILLIONS if real else BILLIONS_ON_HOST)
    if not real:
        print(
            "no GPU here: host memory that two processes map stands for the card, and nothing is "
            "claimed"
        )
    bench = Bench(billions * 1e9, device)
    found: dict[str, list[float]] = {"copy": [], "ours": []}
    bench.copy(), bench.ours()  # first use of memory
    for _ in range(rounds):
        found["copy"].append(bench.copy())
        found["ours"].append(bench.ours())
    bench.close()
    rows = [
        [w, f"{report.median(s):.4f}", f"{bench.size / report.median(s) / 1e9:.2f}"]
        for w, s in found.items()
    ]
    report.table(f"{bench.size / 1e6:.0f} MB, {rounds} rounds", ("way", "seconds", "GB/s"), rows)
    ratios = [copy / ours for copy, ours in zip(found["copy"], found["ours"], strict=True)]
    low, high = report.spread(ratios)
    print(f"ours/copy: {report.median(ratios):.3f} ({low:.3f} to {high:.3f}), bar {BAR} on a GPU")
    report.last_line(
        "ipc",
        {"ours/copy": round(report.median(ratios), 3)},
        {"rounds": rounds},
        {
            "bucket": bucket_of(device),
            "billions": billions,
            "device": torch.cuda.get_device_name(device) if real else "stand-in",
        },
        report.versions("torch", "xxhash"),
        real and rounds >= 10 and report.median(ratios) >= BAR,
    )


if __name__ == "__main__":
    main()
