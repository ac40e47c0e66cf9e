"""What each tensor-parallel worker takes of a stream: nothing is lost, nothing comes twice, both
ends cut alike, and bytes fit.
"""

import dataclasses
import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec
import pytest
import torch

from rft.ground import device as devices
from rft.ground import host_memory
from rft.ground.names import RULES, SUPPORTED, Dims, Latent, applies, hf_names, segments
from rft.ground.protocols import Block
from rft.ground.rounds import InFile, Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync import receiver as receivers
from rft.sync.buckets import Staging
from rft.sync.connection import PeerRefused
from rft.sync.origins import packed
from rft.sync.plan import (
    WHOLE,
    Share,
    StreamPart,
    StreamPlan,
    WeightStream,
    needed,
    obstacle,
    part_of,
)
from rft.sync.readers import HandedBuckets
from rft.sync.receiver import Receiver
from rft.sync.sender import WeightSender

DENSE = Dims(hidden=32, heads=8, groups=2, head_size=4, ffn=64, vocab=91, layers=2, tied=True)
FAMILIES = {
    "LlamaForCausalLM": dataclasses.replace(DENSE, tied=False, groups=8),
    "Qwen2ForCausalLM": DENSE,
    "Qwen3ForCausalLM": dataclasses.replace(DENSE, groups=1, vocab=130, tied=False),
    "Qwen3MoeForCausalLM": dataclasses.replace(DENSE, experts=4, expert_ffn=16, tied=False),
    "MixtralForCausalLM": dataclasses.replace(DENSE, experts=4, expert_ffn=16, tied=False),
    "Qwen2MoeForCausalLM": dataclasses.replace(
        DENSE, experts=4, expert_ffn=16, shared_ffn=32, tied=False
    ),
}
MIXTURE = dataclasses.replace(DENSE, experts=4, expert_ffn=16, tied=False)
OTHERS = {
    "MistralForCausalLM": DENSE,
    "GptOssForCausalLM": MIXTURE,
    "Glm4MoeForCausalLM": dataclasses.replace(
        MIXTURE, shared_ffn=16, dense=frozenset({0}), more=frozenset({"dense", "qkv_bias"})
    ),
    "DeepseekV3ForCausalLM": dataclasses.replace(
        MIXTURE,
        groups=8,
        shared_ffn=16,
        latent=Latent(query=8, key_value=16, nope=4, rope=4, value=4),
        more=frozenset({"q_lora"}),
    ),
}
BUCKET = 512


def shares(dims: Dims, workers: int) -> list[Share]:
    return [
        Share(worker=worker, workers=workers, kv_heads=dims.groups) for worker in range(workers)
    ]


def blocks_of(dims: Dims, architecture: str, tp: int, etp: int) -> list[list[Block]]:
    """Per rank of a trainer with these sizes, as Megatron's shards lie in the HF tensors."""
    found: list[list[Block]] = [[] for _ in range(max(tp, etp))]
    kinds = {}
    for rule in RULES:
        if applies(rule, SUPPORTED[architecture], dims.tied):
            for layer in range(dims.layers):
                for expert in range(max(1, dims.experts)):
                    for part, name in enumerate(rule.hf):
                        kinds[name.format(layer=layer, expert=expert)] = rule, part
    for name, shape in hf_names(dims, architecture).items():
        rule, part = kinds[name]
        size = etp if ".experts." in name else tp
        for rank in range(1 if rule.kind == "replicated" else size):
            for cut in segments(rule.kind, name, dims, rank, size):
                if cut.part == part:
                    found[rank].append(Block(name, "float32", shape, cut.dim, cut.start, cut.stop))
    return found


def cut_by_vllm(name: str, value: torch.Tensor, share: Share) -> torch.Tensor:
    """As vLLM's layers describe what they hold; not by rft's table."""
    layer, worker, workers = name.split(".")[-2], share.worker, share.workers
    if layer in ("embed_tokens", "lm_head"):
        rows = torch.arange(math.ceil(len(value) / 64) * 64).chunk(workers)[worker]
        return value[rows[rows < len(value)]]
    if layer in ("q_proj", "gate_proj", "up_proj", "w1", "w3"):
        return value.chunk(workers)[worker]
    if layer in ("k_proj", "v_proj"):
        copies = max(1, workers // share.kv_heads)
        return value.chunk(workers // copies)[worker // copies]
    if layer in ("o_proj", "down_proj", "w2") and value.dim() == 2:
        return value.chunk(workers, dim=1)[worker]
    return value


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_every_tensor_of_every_family_is_cut_as_vllm_does(architecture: str, workers: int) -> None:
    dims = (FAMILIES | OTHERS)[architecture]
    for share in shares(dims, workers):
        for name, shape in hf_names(dims, architecture).items():
            value = torch.arange(math.prod(shape)).view(shape)
            dim, start, stop = needed(name, shape, share)
            part = value.narrow(dim, start, stop - start)
            assert torch.equal(part, cut_by_vllm(name, value, share)), name


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_workers_together_use_every_element(architecture: str, workers: int) -> None:
    dims = FAMILIES[architecture]
    for name, shape in hf_names(dims, architecture).items():
        uses = torch.zeros(shape, dtype=torch.int32)
        for share in shares(dims, workers):
            dim, start, stop = needed(name, shape, share)
            assert 0 <= start <= stop <= shape[dim]
            uses.narrow(dim, start, stop - start).add_(1)
        copies = workers
        if ".k_proj." in name or ".v_proj." in name:
            copies = max(1, workers // dims.groups)
        elif any(part in name for part in ("proj.", "embed", "lm_head", ".w1.", ".w2.", ".w3.")):
            copies = 1
        assert uses.eq(copies).all(), name


@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (2, 2), (4, 1), (2, 4), (8, 2)])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_parts_bring_what_is_needed_and_nothing_else(
    architecture: str, workers: int, tp: int, etp: int
) -> None:
    dims = FAMILIES[architecture]
    plan = plans.build(blocks_of(dims, architecture, tp, etp), BUCKET)
    for share in shares(dims, workers):
        came = {
            name: torch.zeros(shape, dtype=torch.int32)
            for name, shape in hf_names(dims, architecture).items()
        }
        for index, stream in enumerate(plan.streams):
            part = part_of(plan, index, share)
            assert [stream.blocks[number].name for number in part.sources] == [
                b.name for b in part.stream.blocks
            ]
            assert all(
                bucket.nbytes <= max(b.nbytes for b in stream.buckets)
                for bucket in part.stream.buckets
            )
            assert part.payload == sum(
                4 * math.prod(block.block_shape) for block in part.stream.blocks
            )
            for block in part.stream.blocks:
                came[block.name].narrow(block.dim, block.start, block.stop - block.start).add_(1)
        for name, count in came.items():
            dim, start, stop = needed(name, tuple(count.shape), share)
            wanted = torch.zeros_like(count)
            wanted.narrow(dim, start, stop - start).add_(1)
            assert torch.equal(count, wanted), name


def test_one_worker_takes_the_streams_as_they_are() -> None:
    plan = plans.build(blocks_of(DENSE, "Qwen2ForCausalLM", 2, 2), BUCKET)
    for index, stream in enumerate(plan.streams):
        part = part_of(plan, index, WHOLE)
        assert (part.stream, part.digest) == (stream, plan.digest)
        assert part.sources == tuple(range(len(stream.blocks)))


def test_a_block_that_is_cut_the_other_way_comes_whole() -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    rows = [[Block(name, "float32", (8, 8), 0, 0, 4)], [Block(name, "float32", (8, 8), 0, 4, 8)]]
    plan = plans.build(rows, BUCKET)
    for index, blocks in enumerate(rows):
        assert part_of(plan, index, Share(worker=1, workers=2, kv_heads=2)).stream.blocks == tuple(
            blocks
        )


def test_adapters_come_whole() -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert needed(name, (32, 8), Share(worker=1, workers=2, kv_heads=2)) == (0, 0, 32)


def test_digests_differ_between_streams_and_shares() -> None:
    plan = plans.build(blocks_of(DENSE, "Qwen2ForCausalLM", 2, 2), BUCKET)
    other = plans.build(blocks_of(DENSE, "Qwen2ForCausalLM", 2, 2), 2 * BUCKET)
    asked = [
        Share(worker=0, workers=4, kv_heads=2),
        Share(worker=1, workers=4, kv_heads=2),
        Share(worker=0, workers=2, kv_heads=1),
    ]
    digests = [part_of(p, 0, share).digest for p in (plan, other) for share in asked]
    assert len(set(digests)) == len(digests)
    across = part_of(plan, 1, Share(worker=0, workers=2, kv_heads=2)).stream.blocks
    assert {block.name for block in across} == {"model.embed_tokens.weight"}, (
        "which vLLM and Megatron pad differently"
    )


@pytest.mark.parametrize(
    ("changes", "workers", "text"),
    [
        ({}, 3, "does not divide the model's 8 heads; use 1, 2, 4, 8"),
        (
            {"heads": 12, "groups": 4},
            6,
            "neither divides nor is a multiple of the model's 4 key/value heads; use 1, 2, 4",
        ),
        ({"ffn": 68}, 8, "does not divide the width 68 of the model's MLPs; use 1, 2, 4"),
        (
            {"experts": 8, "expert_ffn": 12},
            8,
            "does not divide the width 12 of the model's experts; use 1, 2, 4",
        ),
        (
            {"heads": 6, "ffn": 96},
            6,
            "does not divide the model's vocabulary, which vLLM pads to 128 rows; use 1, 2",
        ),
        ({"experts": 2, "expert_ffn": 16}, 4, "is more than the model's 2 experts; use 1, 2"),
    ],
)
def test_sizes_that_vllm_cannot_cut_are_refused(
    changes: dict[str, int], workers: int, text: str
) -> None:
    assert obstacle(dataclasses.replace(DENSE, **changes), workers) == text  # type: ignore[arg-type]
    assert obstacle(dataclasses.replace(DENSE, **changes), 2) is None  # type: ignore[arg-type]


# --- over the wire --------------------------------------------------------------------------------


class Values:
    """WeightSource of given blocks, whose values are their place in the whole tensor."""

    def __init__(self, blocks: list[Block], whole: dict[str, torch.Tensor]):
        self._blocks, self.whole = blocks, whole

    def blocks(self) -> list[Block]:
        return self._blocks

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (
            self.whole[b.name].narrow(b.dim, b.start, b.stop - b.start).contiguous()
            for b in self._blocks
        )


class Late(Values):
    """Of a rank that stops in the middle, until another one's bytes are all there."""

    other: WeightSender

    def read_blocks(self) -> Iterator[torch.Tensor]:
        window, last = self.other.window, len(self._blocks) - 1
        for at, block in enumerate(super().read_blocks()):
            if at == last:
                with window._changed:
                    assert window._changed.wait_for(lambda: window.seconds > 0, timeout=5.0)
            yield block


def received(
    share: Share, first: type[Values] = Values
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """A trainer of two ranks, a worker: (what the model is, what
    the worker has in whole shapes, bytes).
    """
    architecture, dims = "Qwen3MoeForCausalLM", FAMILIES["Qwen3MoeForCausalLM"]
    by_rank = blocks_of(dims, architecture, 2, 2)
    whole = {name: torch.randn(shape) for name, shape in hf_names(dims, architecture).items()}
    plan = plans.build(by_rank, BUCKET)
    sources = [kind(blocks, whole) for kind, blocks in zip((first, Values), by_rank, strict=True)]
    senders = [WeightSender(source, 1, 10.0) for source in sources]
    if isinstance(sources[0], Late):
        sources[0].other = senders[1]
    for index, sender in enumerate(senders):
        sender.follow(plan, index)
        sender.open(1)
    receiver = Receiver(share.worker, torch.device("cpu"), share=share)
    try:
        receiver.connect(
            TrainerInfo(
                plan=plans.encode(plan),
                streams=[sender.endpoint for sender in senders],
                epoch=1,
                timeout=10.0,
                engine="engine_0",
            )
        )
        found = receiver.stage(Round(version=1))
        assert memory_of(found) == receiver.payload
        for sender in senders:
            sender.close_version()
        assert sum(sender.sent for sender in senders) == receiver.payload
        return whole, found, receiver.payload
    finally:
        receiver.close()
        for sender in senders:
            sender.close()


def memory_of(staged: dict[str, torch.Tensor]) -> int:
    """Bytes, once each."""
    pieces = chain(*(getattr(one, "pieces", [one]) for one in staged.values()))
    return sum({piece.data_ptr(): piece.nbytes for piece in pieces}.values())


def assert_has_its_part(
    found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], share: Share
) -> None:
    for name, value in whole.items():
        dim, start, stop = needed(name, tuple(value.shape), share)
        assert (name in found) == (start < stop)
        if name in found:
            assert found[name].shape == value.shape
            there, wanted = (
                tensor.narrow(dim, start, stop - start) for tensor in (found[name], value)
            )
            assert torch.equal(there, wanted), name


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_is_needed_arrives_in_its_place(workers: int) -> None:
    total = 0
    for share in shares(FAMILIES["Qwen3MoeForCausalLM"], workers):
        whole, found, payload = received(share)
        total += payload
        assert_has_its_part(found, whole, share)
    once = sum(value.nbytes for value in whole.values())
    assert once <= total < 1.5 * once


def test_a_slow_rank_does_not_hold_up_the_bytes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "spare_cores", lambda: 1)
    (share,) = shares(FAMILIES["Qwen3MoeForCausalLM"], 1)
    whole, found, _ = received(share, Late)
    assert_has_its_part(found, whole, share)


# --- from where they are stored ------------------------------------------------------------------


def handed(file: Path, plan: StreamPlan, by_rank: list[Values]) -> Round:
    """All buckets in one file, as an engine's actor hands them to its workers."""
    streams, data = [], bytearray()
    for index, source in enumerate(by_rank):
        streams.append([])
        for bucket, digest in packed(plan, index, source, 1):
            streams[-1].append((len(data), len(bucket), digest))
            data += bucket.tobytes()
    file.write_bytes(data)
    location = InFile(path=str(file), streams=streams)
    return Round(version=1, epoch=1, digest=plan.digest, location=location)


@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_take_their_part_of_a_file_and_verify_it_together(
    workers: int, tp: int, etp: int, tmp_path: Path
) -> None:
    architecture, dims = "Qwen3MoeForCausalLM", FAMILIES["Qwen3MoeForCausalLM"]
    by_rank = blocks_of(dims, architecture, tp, etp)
    whole = {name: torch.randn(shape) for name, shape in hf_names(dims, architecture).items()}
    plan = plans.build(by_rank, BUCKET)
    coming = handed(tmp_path / "file", plan, [Values(blocks, whole) for blocks in by_rank])
    info = TrainerInfo(plan=plans.encode(plan), epoch=1, timeout=10.0)
    total = verified = 0
    for share in shares(dims, workers):
        reader = HandedBuckets(torch.device("cpu"), share)
        reader.connect(info)
        found = reader.stage(coming)
        assert_has_its_part(found, whole, share)
        assert memory_of(found) == reader.size(found)
        total, verified = total + reader.size(found), verified + reader.verified
    sizes = {name: value.nbytes for name, value in whole.items()}
    assert total == expected_bytes(sizes, dims, workers)
    assert verified == (tmp_path / "file").stat().st_size, "every bucket by one of them"


def expected_bytes(sizes: dict[str, int], dims: Dims, workers: int) -> int:
    """What all workers take together: more than once only what each of them needs."""

    def copies(name: str) -> int:
        if "norm" in name or ".gate." in name:
            return workers
        return max(1, workers // dims.groups) if ".k_proj." in name or ".v_proj." in name else 1

    return sum(copies(name) * size for name, size in sizes.items())


BIG = {
    "LlamaForCausalLM": Dims(8192, 64, 8, 128, 28672, 128256, 80, tied=False),
    "Qwen3MoeForCausalLM": Dims(4096, 64, 4, 128, 12288, 151936, 12, False, 128, 1536),
}


@pytest.mark.parametrize("architecture", BIG)
def test_a_worker_of_eight_pins_an_eighth_and_what_is_replicated(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of 70B parameters, and of some layers of one of 235B, in memory that is none."""
    dims, pinned = BIG[architecture], []

    def none(size: int, device: torch.device) -> torch.Tensor:
        pinned.append(size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    monkeypatch.setattr(devices, "staging_memory", none)
    shapes = hf_names(dims, architecture)
    share = Share(worker=7, workers=8, kv_heads=dims.groups)
    cuts = [(name, shape, needed(name, shape, share)) for name, shape in shapes.items()]
    blocks = tuple(Block(name, "bfloat16", shape, *cut) for name, shape, cut in cuts)
    stream = WeightStream(rank=0, blocks=blocks, buckets=())
    staging = Staging([stream], torch.device("meta"), kept=True, timeout=0.0)
    held = dict(found for block in blocks for found in staging.filled(block, block.block_shape[0]))
    sizes = {name: 2 * math.prod(shape) for name, shape in shapes.items()}
    assert len(held) == len(sizes)
    assert 8 * staging.payload == expected_bytes(sizes, dims, 8) < 1.01 * sum(sizes.values())
    held_bytes = [getattr(tensor, "pieces", [tensor])[0].nbytes for tensor in held.values()]
    assert staging.payload == sum(held_bytes)
    assert len(pinned) == 1 and pinned[0] - staging.payload < 64 * len(held), "of its exact size"


@pytest.mark.parametrize("direct", [False, True])
def test_memory_is_there_at_connect_or_the_worker_refuses(
    monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    taken: list[int] = []

    def counted(size: int, device: torch.device) -> torch.Tensor:
        taken.append(size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    monkeypatch.setattr(devices, "staging_memory", counted)
    blocks = blocks_of(DENSE, "Qwen2ForCausalLM", 1, 1)
    plan = plans.build(blocks, BUCKET)
    whole = {b.name: torch.randn(b.shape) for b in blocks[0]}
    size = sum(tensor.nbytes for tensor in whole.values())
    sender = WeightSender(Values(blocks[0], whole), 1, 10.0)
    sender.follow(plan, 0)
    sender.open(1)
    info = TrainerInfo(
        plan=plans.encode(plan), streams=[sender.endpoint], epoch=1, timeout=10.0, direct=direct
    )
    receiver = Receiver(0, torch.device("cpu"))
    try:
        receiver.connect(info)
        assert len(taken) == (not direct) and (direct or taken[0] >= size)
        if direct:
            assert all(torch.equal(one, whole[name]) for name, one in receiver.tensors(1))
        else:
            receiver.stage(Round(version=1))
        assert len(taken) == (not direct), "not in the middle of a round"
        monkeypatch.setattr(host_memory, "available", lambda: size - 1)
        again = Receiver(0, torch.device("cpu"))
        if direct:
            again.connect(info)
        said = rf"takes \d{{{len(str(size))}}} bytes .* and {size - 1} are free.*direct"
        for reader in (HandedBuckets(torch.device("cpu")), *([] if direct else [again])):
            with pytest.raises(RuntimeError, match=said):
                reader.connect(info)
        again.close()
        assert len(taken) == (not direct)
    finally:
        receiver.close()
        sender.close()


def test_locked_memory_is_given_back_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is unmapped, and not sooner. CUDA itself is not here."""
    locked: dict[int, int] = {}
    monkeypatch.setattr(devices, "_page_lock", lambda at, size, fix: locked.update({at: size}))
    monkeypatch.setattr(devices, "_page_unlock", lambda at: locked.pop(at))
    memory = devices.staging_memory(3 * 4096 + 64, torch.device("cuda"))
    assert locked == {memory.data_ptr(): 3 * 4096 + 64}
    part = memory[64:128].view(torch.float32).view(4, 4).fill_(1.0)
    del memory
    assert locked and part.sum() == 16
    del part
    assert not locked


# --- what is refused -----------------------------------------------------------------------------


def test_ends_that_would_cut_otherwise_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(plan: StreamPlan, index: int, share: Share) -> StreamPart:
        return msgspec.structs.replace(part_of(plan, index, share), digest="0" * 32)

    monkeypatch.setattr(receivers, "part_of", other)
    with pytest.raises(PeerRefused, match="engine_0/1 would cut its part of the blocks otherwise"):
        received(Share(worker=1, workers=2, kv_heads=2))
