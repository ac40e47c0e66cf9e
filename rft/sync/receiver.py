"""The engine end of the weight stream, without vLLM: streams (or files) in, whole Hugging Face tensors out.

    stream 0 ──thread─┐
    stream 1 ──thread─┼─► inbox ──► assemble blocks ──► (name, tensor), each name once
    ...               ┘   (checksum verified in the thread, memory fresh per bucket)

`rft.sync.install` is the part that lives in vLLM and consumes the tensors; vLLM finds it through `register`, the package's
`vllm.general_plugins` entry point. Invariants: a tensor is handed out only when all its bytes have come and their checksums
fit; whatever a receiving thread meets is raised to the consumer; after a failed round every link is closed.
"""

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rft.monitor import logs
from rft.protocols import Block
from rft.sync import plan as plans
from rft.sync.plan import Bucket, Plan
from rft.sync.sender import CHECKSUM_BYTES, bucket_seed, checksum, digest_key, link_name
from rft.sync.transport import RECEIVER, Link, join_store

BACKEND = "rft"


def register() -> None:
    """Entry point `vllm.general_plugins`: make "rft" a weight transfer backend. Called in every vLLM process, repeatedly."""
    if "RFT_LOG_FILE" in os.environ and multiprocessing.parent_process() is not None:
        logs.die_with_parent()  # vLLM's own processes outlive an engine actor that was killed
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rft.sync.install", "StreamedWeights")


class WorkerExtension:
    """Methods that vLLM adds to its workers, for `collective_rpc`; `rft.rollout.engine` names this class to vLLM."""

    def rft_weight_state(self) -> dict[str, Any]:
        """What this worker holds; see `rft.sync.install.StreamedWeights.state`."""
        return self.weight_transfer_engine.state()  # type: ignore[attr-defined, no-any-return]

    def rft_install_adapter(self, update: dict[str, Any], order: dict[str, Any]) -> dict[str, Any]:
        """A round of the adapter alone, between two steps; `order` is that of `rft.sync.adapter_install`. Returns the state."""
        return self.weight_transfer_engine.install_adapter(update, order)  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class _Arrival:
    stream: int
    bucket: int
    data: torch.Tensor


class Receiver:
    """Joins the streams of one trainer epoch and turns each round into tensors. One per engine worker."""

    def __init__(self, worker: int, device: torch.device, backend: str):
        self.worker = worker
        self.device = device
        self.backend = backend
        self.plan: Plan | None = None
        self.epoch = -1
        self.timeout = 0.0
        self._links: list[Link] = []

    def connect(self, info: dict[str, Any]) -> None:
        """Leave the last epoch's streams, if any, and join these. `info`: plan, streams, epoch, timeout, engine."""
        plan, epoch = plans.decode(info["plan"]), int(info["epoch"])
        if epoch <= self.epoch:
            raise ValueError(f"weight streams of epoch {epoch} cannot be joined: epoch {self.epoch} was here before")
        if len(info["streams"]) != len(plan.streams):
            raise ValueError(f"the plan has {len(plan.streams)} streams, the trainer offers {len(info['streams'])}")
        self.close()
        self.plan, self.epoch, self.timeout = plan, epoch, float(info["timeout"])
        for index, endpoint in enumerate(info["streams"]):
            self._links.append(self._join(index, endpoint, f"{info['engine']}/{self.worker}"))

    def _join(self, index: int, endpoint: dict[str, Any], peer: str) -> Link:
        assert self.plan is not None
        store = join_store(endpoint["host"], endpoint["port"], self.timeout)
        theirs = store.get(digest_key(self.epoch)).decode()
        if theirs != self.plan.digest:
            raise ValueError(f"stream {index} follows plan {theirs}, this engine was told {self.plan.digest}")
        return Link(store, link_name(self.epoch, index, peer), RECEIVER, self.backend, endpoint["host"], self.timeout)

    def check(self, update: dict[str, Any]) -> None:
        """Refuse a round of another plan or epoch before any byte of it is taken."""
        if self.plan is None or not self._links:
            raise RuntimeError("no weight streams are connected: connect with a new epoch first")
        if update["digest"] != self.plan.digest:
            raise ValueError(
                f"round follows plan {update['digest']}, this engine was connected with {self.plan.digest}"
            )
        if update["epoch"] != self.epoch:
            raise ValueError(f"round belongs to epoch {update['epoch']}, this engine was connected in {self.epoch}")

    def tensors(self, version: int, window: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """One round: every tensor of the plan, in order of completion. `window`: most buckets per stream in memory."""
        assert self.plan is not None
        inbox: queue.SimpleQueue[_Arrival | Exception] = queue.SimpleQueue()
        room = [threading.Semaphore(window or len(stream.buckets)) for stream in self.plan.streams]
        for index in range(len(self.plan.streams)):
            arguments = (version, index, inbox, room[index])
            threading.Thread(target=self._receive, args=arguments, name=f"stream-{index}", daemon=True).start()
        deadline = time.monotonic() + self.timeout
        assembly = Assembly(self.plan, self.device)
        for _ in range(sum(len(stream.buckets) for stream in self.plan.streams)):
            try:
                arrival = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"weights of version {version} incomplete after {self.timeout} s") from None
            if isinstance(arrival, Exception):
                raise arrival
            yield from assembly.add(arrival.stream, arrival.bucket, arrival.data)
            room[arrival.stream].release()
        assembly.check_complete()

    def _receive(self, version: int, index: int, inbox: "queue.SimpleQueue[Any]", room: threading.Semaphore) -> None:
        """Body of one stream's thread: the consumer gets every verified bucket, or the exception that ended the stream."""
        assert self.plan is not None
        stream, link = self.plan.streams[index], self._links[index]
        try:
            for number, bucket in enumerate(stream.buckets):
                if not room.acquire(timeout=self.timeout):
                    raise TimeoutError(f"bucket {number} of stream {index} found no room in {self.timeout} s")
                data = torch.empty(bucket.nbytes + CHECKSUM_BYTES, dtype=torch.uint8, device=self.device)
                link.receive(data)
                self._verify(version, index, number, bucket, data)
                inbox.put(_Arrival(index, number, data))
        except Exception as error:
            error.add_note(f"stream {index}, from trainer rank {stream.rank}")
            inbox.put(error)

    def _verify(self, version: int, index: int, number: int, bucket: Bucket, data: torch.Tensor) -> None:
        assert self.plan is not None
        seed = bucket_seed(self.plan.digest, version, index, number)
        if checksum(data[: bucket.nbytes], seed) != data[bucket.nbytes :].cpu().numpy().tobytes():
            blocks = self.plan.streams[index].blocks
            names = f"{blocks[bucket.pieces[0].block].name} .. {blocks[bucket.pieces[-1].block].name}"
            raise ValueError(
                f"checksum of bucket {number} of stream {index} ({names}) is wrong: its bytes are not those of version {version}"
            )

    def close(self) -> None:
        """Drop all links; senders that still send fail at once. Only a new epoch can follow."""
        links, self._links = self._links, []
        for link in links:
            link.close()


class Assembly:
    """Puts buckets together to tensors: whole ones are views of their bucket, cut ones are copied to their place."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan = plan
        self.device = device
        self.partial: dict[str, torch.Tensor] = {}
        self.missing: dict[str, int] = {}

    def add(self, stream: int, number: int, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this bucket completes."""
        blocks, bucket = self.plan.streams[stream].blocks, self.plan.streams[stream].buckets[number]
        for piece in bucket.pieces:
            block = blocks[piece.block]
            rows = piece.stop - piece.start
            stop = piece.offset + rows * plans.row_bytes(block)
            values = data[piece.offset : stop].view(getattr(torch, block.dtype)).view(rows, *block.block_shape[1:])
            if values.shape == block.shape:
                yield block.name, values
                continue
            place(self._whole(block), block, piece.start, values)
            self.missing[block.name] -= values.numel()
            if not self.missing[block.name]:
                del self.missing[block.name]
                yield block.name, self.partial.pop(block.name)

    def _whole(self, block: Block) -> torch.Tensor:
        if block.name not in self.partial:
            whole = torch.empty(block.shape, dtype=getattr(torch, block.dtype), device=self.device)
            self.partial[block.name], self.missing[block.name] = whole, whole.numel()
        return self.partial[block.name]

    def check_complete(self) -> None:
        if self.missing:
            raise RuntimeError(f"tensors still incomplete after the last bucket: {sorted(self.missing)}")


def place(whole: torch.Tensor, block: Block, start: int, values: torch.Tensor) -> None:
    """Write rows [start, ...) of `block` where they belong in the whole tensor."""
    if block.dim == 0:
        whole[block.start + start : block.start + start + len(values)] = values
    else:
        whole[start : start + len(values), block.start : block.stop] = values


def file_tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face directory's safetensors files."""
    from safetensors import safe_open

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} holds no *.safetensors")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                yield name, opened.get_tensor(name)
