"""Every read, write and free of the weight stream's memory on a GPU comes after what it must come
after: the product's sender, receiver, links and copier, over a model of streams, events, the
allocator and NCCL (`stream_order`). What a GPU has run is in docs/measured.md.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stream_order import CardMemory, Model, Pair, process

from rft.config import SynchronizerConfig
from rft.ground import streams
from rft.ground.protocols import Block
from rft.ground.rounds import Round, TrainerInfo
from rft.sync import buckets, communicator, links, origins, plan, receiver, sender
from rft.sync.buckets import Blocks
from rft.sync.communicator import nccl
from rft.sync.connection import PeerConnection
from rft.sync.plan import Share
from rft.sync.transfer import RECEIVED, SENT

LONG, BUCKET = 20.0, 4096
SHAPES = {"norm": (64,), "q_proj.weight": (64, 96), "down_proj.weight": (96, 64), "head": (300, 64)}
TRAINER, ENGINE = torch.device("cuda", 0), torch.device("cuda", 1)
WAYS = ("ipc", "nccl")
SUMS = 1024  # bytes, at most: of lanes, as they are added
# of torch's operations, which stand in for the kernel: places and two temporaries, of two lanes
SCRATCH = 6 * buckets.SLICE


class Weights:
    """`WeightSource` of card 0. A block of rows is put together for each reading, as Megatron's
    query, key and value are.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16, device=TRAINER)
            for name, shape in shapes.items()
        }

    def blocks(self) -> list[Block]:
        return [
            Block(name, "bfloat16", tuple(t.shape), 0, 0, len(t))
            for name, t in self.tensors.items()
        ]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (torch.cat([t[: len(t) // 2], t[len(t) // 2 :]]) for t in self.tensors.values())

    def learn(self) -> None:
        """On the stream that computes."""
        for tensor in self.tensors.values():
            tensor.add_(1)


class Run:
    """A trainer rank on card 0 and a worker of an engine on card 1."""

    def __init__(
        self,
        model: Model,
        way: str,
        share: Share = plan.WHOLE,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        size: int = BUCKET,
    ):
        self.model = model
        pair = Pair("a pair")
        self.weights = process(model, 0, partial(Weights, shapes))

        def end(device: torch.device, side: int, wire: PeerConnection, *_: Any) -> Any:
            if way == "ipc":
                return links.IpcLink(wire, CardMemory(device, streams.settle))
            return links.NcclLink(wire, side, device, pair, nccl)  # type: ignore[arg-type]

        make, join = partial(end, TRAINER, links.SENDER), partial(end, ENGINE, links.RECEIVER)
        self.sender = sender.WeightSender(
            self.weights, 1, LONG, make_link=make, device=str(TRAINER)
        )
        whole = plan.build([self.weights.blocks()], size)
        self.sender.follow(whole, 0)
        self.receiver = receiver.Receiver(0, ENGINE, join, share)
        self.info = TrainerInfo(
            plan=plan.encode(whole),
            streams=[self.sender.endpoint],
            epoch=1,
            timeout=LONG,
            engine="engine_0",
        )

    def round(self, version: int, direct: bool) -> None:
        """The trainer computes on while the version is open, and changes it after."""
        process(self.model, 0, self.weights.learn)
        process(self.model, 0, partial(self.sender.open, version))
        process(self.model, 1, partial(self._take, version, direct))
        process(self.model, 0, self.sender.close_version)
        process(self.model, 0, self.weights.learn)

    def _take(self, version: int, direct: bool) -> None:
        if direct:
            tensors: Any = self.receiver.tensors(version)
        else:
            staged = self.receiver.stage(Round(version=version))
            tensors = iter(list(staged.items()))
            del staged
        loaded = []
        for _, tensor in tensors:
            pieces = tensor.pieces if hasattr(tensor, "pieces") else [tensor]
            for piece in pieces:
                made = torch.empty(piece.shape, dtype=piece.dtype, device=ENGINE)
                made.copy_(piece, non_blocking=True)
                loaded.append(made)
            del tensor, pieces, piece
        torch.cuda.current_stream(ENGINE).synchronize()
        assert len(loaded) == len(self.weights.tensors)
        assert all(set(made.cpu().reshape(-1).tolist()) == {2.0 * version} for made in loaded)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model()
    made.install(monkeypatch)
    # a kernel of Triton's runs on no stand-in; torch's operations use the same memory, and more
    monkeypatch.setattr(buckets, "has_kernel", lambda device: False)
    return made


def races(model: Model, way: str, direct: bool = False, share: Share = plan.WHOLE) -> list[str]:
    run = Run(model, way, share)
    process(model, 1, partial(run.receiver.connect, run.info))
    try:
        for version in (1, 2):
            run.round(version, direct)
    finally:
        process(model, 1, run.receiver.close)
        process(model, 0, run.sender.close)
    return model.races


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_read_written_or_freed_too_early(model: Model, way: str, direct: bool) -> None:
    assert races(model, way, direct) == []


def test_parts_in_columns_neither(model: Model) -> None:
    assert races(model, "nccl", share=Share(worker=1, workers=2, kv_heads=2)) == []


def test_versions_that_are_left_elsewhere_are_read_on_one_stream(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has so many, and keeps the memory of each apart."""
    mesh = SimpleNamespace(rank=0, gather=lambda item: [item], broadcast=lambda item: item)
    weights = process(model, 0, partial(Weights, SHAPES))
    config = SynchronizerConfig(bucket_bytes=BUCKET)
    origin = origins.MemoryOrigin(mesh, weights, None, config, 1)  # type: ignore[arg-type]
    read = []

    def leave(version: int) -> None:
        read.append(sum(len(data) for data, _ in origins.packed(origin.plan, 0, weights, version)))

    monkeypatch.setattr(origin, "_leave", leave)
    monkeypatch.setattr(origin, "lead", lambda *_: None)
    process(model, 0, origin.connect)
    for version in range(3):
        process(model, 0, partial(origin.start, version, due=True))
        process(model, 0, origin.release)
        process(model, 0, weights.learn)
    assert len(set(read)) == 1 and len(read) == 3
    assert model.streams_of(0) == 1


# --- faults that are found ------------------------------------------------------------------------


def on_default(read: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        return read(*arguments)


def block_0_outside(patch: pytest.MonkeyPatch) -> None:
    """As the sender did once: it asked the first block which device it is on."""

    class Early(Blocks):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            on_default(self._seek, TRAINER, 0)

    patch.setattr(sender, "Blocks", Early)


def freed_under_who_uses_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buckets, "hand_over", lambda tensor: None)


def no_wait_before_reuse(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(links.NcclLink, "_await", lambda link: None)


def a_stream_that_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(communicator, "await_posted", lambda work: work.wait())


def no_wait_for_the_computation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda.Stream, "wait_stream", lambda stream, other: None)


FAULTS = {
    freed_under_who_uses_it: ("ipc", "freed on stream 1 of 1, default 1 still"),
    block_0_outside: ("nccl", "freed on default 0"),
    no_wait_before_reuse: ("nccl", "nccl of 0"),
    a_stream_that_waits: ("nccl", "in a queue that others share"),
    no_wait_for_the_computation: ("ipc", "on default 0 before"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_a_race(
    model: Model, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    way, words = FAULTS[fault]
    found = races(model, way, direct=fault is freed_under_who_uses_it)
    assert any(words in race for race in found), found


# --- the copier of checkpoints --------------------------------------------------------------------


def saved(model: Model, fenced: bool, finished: bool) -> list[str]:
    def compute() -> None:
        weights = torch.ones(1024, device=TRAINER)
        copier = streams.CudaCopier(TRAINER)
        target = torch.zeros(1024)
        torch.cuda.cudart().cudaHostRegister(target.data_ptr(), target.nbytes, 0)
        for _ in range(3):
            weights.add_(1)
            copier.begin()
            copier.copy(streams.Copies([target], [weights]))
            if fenced:
                copier.fence()
            weights.add_(1)
            if finished:
                copier.finish()
            target.sum()
        torch.cuda.default_stream(TRAINER).synchronize()
        copier.finish()

    process(model, 0, compute)
    return model.races


def test_a_copy_is_of_what_was_there_and_done_before_it_is_read(model: Model) -> None:
    assert saved(model, fenced=True, finished=True) == []


@pytest.mark.parametrize("fenced", [False, True])
def test_without_fence_or_end_a_copy_is_a_race(model: Model, fenced: bool) -> None:
    words = "read on host 0" if fenced else "written on default 0, read on stream"
    assert any(words in race for race in saved(model, fenced, finished=not fenced))


# --- memory ---------------------------------------------------------------------------------------


def layer(
    hidden: int, heads: int, ffn: int, experts: int = 0, rows: int = 0
) -> dict[str, tuple[int, ...]]:
    """What a rank has of one layer, and of the vocabulary, at a sixteenth of the widths."""
    found = {
        "q_proj": (heads, hidden),
        "o_proj": (hidden, heads),
        "norm": (hidden,),
        "embed_tokens": (rows, hidden),
    }
    for name in [f"experts.{n}." for n in range(experts)] or [""]:
        found |= {
            f"{name}gate_proj": (ffn, hidden),
            f"{name}up_proj": (ffn, hidden),
            f"{name}down_proj": (hidden, ffn),
        }
    return {f"{name}.weight": shape for name, shape in found.items()}


MODELS = {
    "8B": layer(256, 256, 896, rows=8016),
    "70B, of 8 ranks": layer(512, 64, 224, rows=1002),
    "235B, of 4 ranks, experts of 8": layer(256, 128, 96, 16, rows=2374),
}


@pytest.mark.parametrize("shapes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_alive_is_what_is_declared(
    model: Model, way: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Whatever the model: messages, what sums need, and of a rank one block that is not in one
    piece there, which this source has of every one.
    """
    run = Run(model, way, shapes=shapes, size=2**16)
    before = model.alive[0]
    largest = max(bucket.nbytes for bucket in run.sender.stream.buckets)
    block = max(plan.row_bytes(one) * one.block_shape[0] for one in run.weights.blocks())
    message = -(-largest // links.GRAIN) * links.GRAIN if way == "ipc" else largest
    process(model, 1, partial(run.receiver.connect, run.info))
    mine = model.peak[1]
    process(model, 0, partial(run.sender.open, 1))
    process(model, 1, partial(run.receiver.stage, Round(version=1)))
    process(model, 0, run.sender.close_version)
    assert model.peak[1] == mine, "all that a worker takes it takes as it connects"
    process(model, 1, run.receiver.close)
    process(model, 0, run.sender.close)
    assert mine <= (RECEIVED * largest if way == "nccl" else 0) + SCRATCH + SUMS
    assert model.peak[0] - before <= SENT * message + SCRATCH + block + SUMS
