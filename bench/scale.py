"""What weight sync costs a run of 8, 64, 512 and 4,096 GPUs: the product's own planning, with ranks
that are facts only.

    python -m bench.scale --sync [--quick]

In: real sizes of models, a layout per number of GPUs: one half trains, the other generates. Out: a
row for each, and one last line of JSON. Blocks are those of `rft.megatron.weights`, dealt over
copies as there; plan and parts are `rft.sync.plan`'s; who takes what from whom is
`rft.sync.fanout`'s. Nothing is allocated and nothing travels: bytes, groups and Python's seconds
are counted, seconds of a round come from a model (`round_seconds`) and were not measured.

    blocks         of all ranks together: lines of the plan
    links          communicators of an engine worker: a pair for every stream that it is head of,
                   and its group; at a rank that owns a norm: a pair for every worker of its head
    out, in        bytes of a round that leave the busiest trainer rank, that come to a worker;
                   `over`: bytes out / bytes that the rank owns, as workers share norms
    memory         of transfer, declared: buffers of the links and NCCL's own (`rft.sync.transfer`)
    layer          one vLLM layer's own part of a worker: what a commit holds beside that
    plan           bytes of the plan as it goes to an engine, and Python's seconds: a rank's list of
                   blocks, build and encode at rank 0, decode and all parts at a worker, parts at a
                   trainer rank
    round          from: every broadcast begins before the last one has reached everybody; to: none
                   does

A row with * does not fit its cards (weights, gradients and optimizer state; or an engine's
weights): it is planned all the same, so that growth can be seen from 8 GPUs on.
"""

import argparse
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import linear_regression
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from bench import report
from bench.gpu.models import experts, shape
from rft.ground.names import (
    RULES,
    SUPPORTED,
    Dims,
    Place,
    applies,
    architecture_of,
    hf_names,
    is_expert,
)
from rft.ground.protocols import Block
from rft.megatron import weights
from rft.sync import plan as plans
from rft.sync.fanout import comes_from_trainer
from rft.sync.plan import Share, StreamPart, StreamPlan
from rft.sync.transfer import at_rank, at_worker, message_bytes

# config.json of the models, as published. Kimi-K2 has another attention (MLA), which rft does not
# have: the sizes are its own, attention is grouped.
MODELS: dict[str, dict[str, Any]] = {
    "8B": {"architectures": ["Qwen3ForCausalLM"], **shape(4096, 36, 32, 8, 128, 12288)},
    "70B": {"architectures": ["LlamaForCausalLM"], **shape(8192, 80, 64, 8, 128, 28672, 128256)},
    "235B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **shape(4096, 94, 64, 4, 128, 12288),
        **experts(128, 8, 1536),
    },
    "1T": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **shape(7168, 61, 64, 8, 128, 18432, 163840),
        **experts(384, 8, 2048),
    },
}


@dataclass(frozen=True)
class Halves:
    """A trainer of tp x pp x dp ranks, experts over ep of them, and engines of `workers`."""

    tp: int
    pp: int
    dp: int
    ep: int
    engines: int
    workers: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        experts = f" EP{self.ep}" if self.ep > 1 else ""
        trainer = f"TP{self.tp} PP{self.pp} DP{self.dp}{experts}"
        return f"{trainer} | {self.engines} x TP{self.workers}"


GPUS = (8, 64, 512, 4096)
LAYOUTS: dict[str, tuple[Halves, ...]] = {  # a half of the GPUs each
    "8B": tuple(Halves(4, 1, n, 1, 4 * n, 1) for n in (1, 8, 64, 512)),
    "70B": (
        Halves(4, 1, 1, 1, 1, 4),
        Halves(8, 2, 2, 1, 4, 8),
        Halves(8, 4, 8, 1, 32, 8),
        Halves(8, 4, 64, 1, 256, 8),
    ),
    "235B": (
        Halves(4, 1, 1, 4, 1, 4),
        Halves(4, 2, 4, 8, 4, 8),
        Halves(4, 2, 32, 16, 32, 8),
        Halves(4, 2, 256, 32, 256, 8),
    ),
    "1T": (
        Halves(4, 1, 1, 4, 1, 4),
        Halves(8, 1, 4, 32, 1, 32),
        Halves(8, 1, 32, 64, 8, 32),
        Halves(8, 1, 256, 128, 64, 32),
    ),
}
QUICK = ("70B", "235B")
CARD = 80e9  # bytes
# vLLM's layers that hold several of a checkpoint's
MERGED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
DTYPE = torch.bfloat16

# the model of a round's seconds
LINK = 400e9 / 8  # bytes a second, each way: every GPU has a NIC of its own
CHUNK = 512 * 2**10  # NCCL passes a broadcast on in pieces of so many bytes (4 MiB in 8 steps)
HOP = 10e-6  # of a piece, from one GPU to the next, beside its bytes
LAUNCH = 100e-6  # of a bucket: pack or place, checksum, its word on the wire

BARS = {"memory_mib": 512, "plan_s": 10.0, "over": 1.05, "links_beyond": 2, "exponent": 1.02}
BOUNDED = ("8B", "70B", "235B")  # of 1T the memory is told
# Growth of each is held against that of R + E: the exponent, of which 1 is as fast.
COUNTED = ("links_worker", "links_source", "members", "groups", "plan_bytes", "memory")

# seconds of a round, [pub] in reports of their authors; none was measured here
PUBLISHED = (
    (
        "Perplexity",
        "1T Kimi-K2, FP8",
        "256 -> 128 H200",
        "1.3",
        "arXiv 2510.27656",
        ("1T", 512),
    ),
    ("Perplexity", "235B", "128 -> 32 H200", "2", "arXiv 2510.27656", "235B 512"),
    ("checkpoint-engine", "1T Kimi-K2, FP8", "256 H20", "16.04", "its README", "1T 512"),
    ("checkpoint-engine", "235B", "8 H800", "6.22", "its README", "235B 8"),
    ("vLLM RDT V3 + SkyRL", "1T Kimi-K2", "48 nodes", "7.53", "vLLM blog 2026-08-22", "1T 512"),
    ("vLLM RDT V3 + SkyRL", "235B", "4 nodes H100", "3.49", "vLLM blog 2026-08-22", "235B 64"),
    (
        "miles, RDMA",
        "1T Kimi-K2",
        "32 + 32 nodes",
        "7.23",
        "p2p-weight-transfer.md",
        ("1T", 512),
    ),
    ("miles, RDMA", "235B", "H100", "3.16", "p2p-weight-transfer.md", "235B 64"),
    (
        "NeMo-RL reshard",
        "671B DeepSeek-V3",
        "H100",
        "2.39-2.83",
        "nccl-reshard-refit.md",
        ("1T", 512),
    ),
    ("prime-rl NIXL", "GLM-5.2", "64 + 32 H200", "2.84, pause 5.2", "prime-rl PR#3341", "1T 64"),
    (
        "verl full / delta",
        "235B",
        "-",
        "246-266 / 11.4-14.9",
        "delta_weight_sync.md",
        ("235B", 64),
    ),
    (
        "verl delta",
        "8B",
        "2 + 2 nodes A100",
        "38.58 -> 2.24",
        "delta_weight_sync.md",
        ("8B", 64),
    ),
)


# --- the trainer's ranks, as facts ----------------------------------------------------------------


class PaperRank:
    """Stands for the megatron model of one rank: the names of its parameters, one of which has no
    memory.
    """

    def __init__(self, hf: dict[str, Any], place: Place, layers: range, is_first: bool, last: bool):
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=layers.start + 1)])
        self.names = list(parameters(hf, place, len(layers), is_first, last))

    def modules(self) -> list[torch.nn.Module]:
        return []  # no adapters

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        empty = torch.nn.Parameter(torch.empty(0, dtype=DTYPE, device="meta"))
        return [(name, empty) for name in self.names]


def parameters(
    hf: dict[str, Any], place: Place, layers: int, is_first: bool, is_last: bool
) -> Iterator[str]:
    """Names of what a rank holds of `layers` layers; a tied embedding's copy is not among them."""
    dims, features = Dims.of(hf), SUPPORTED[architecture_of(hf)]
    for rule in RULES:
        name = rule.megatron[0]
        if not applies(rule, features, dims.tied):
            continue
        if "{layer}" not in name:
            if is_first if name.startswith("embedding") else is_last:
                yield name
            continue
        held = dims.experts // place.ep if is_expert(rule.hf[0]) else 1
        for layer in range(layers):
            for expert in range(held):
                yield name.format(layer=layer, expert=expert)


def place_of(layout: Halves, number: int) -> Place:
    """Of rank `number` of a stage; experts are not cut."""
    count = layout.tp * layout.dp
    return Place(
        layout.tp,
        number % layout.tp,
        layout.ep,
        number % layout.ep,
        1,
        0,
        copy=number // layout.tp,
        copies=layout.dp,
        expert_copy=number // layout.ep,
        expert_copies=count // layout.ep,
    )


def blocks_of(hf: dict[str, Any], layout: Halves) -> list[list[Block]]:
    """Of every rank what it sends.

    Ranks that hold the same deal it out alike, so this is asked once for all of them.
    """
    dims = Dims.of(hf)
    layers, names = dims.layers // layout.pp, list(hf_names(dims, architecture_of(hf)))
    found: list[list[Block]] = [[] for _ in range(layout.ranks)]
    count = layout.tp * layout.dp
    for stage in range(layout.pp):
        here = range(stage * layers, (stage + 1) * layers)
        for first in range(math.lcm(layout.tp, layout.ep)):
            place = place_of(layout, first)
            part: Any = PaperRank(hf, place, here, stage == 0, stage == layout.pp - 1)
            held = weights.in_order(weights.shards([part], dims, place), names, {})
            senders = weights.senders(held, place)
            alike = range(first, count, math.lcm(layout.tp, layout.ep))
            places = {number: place_of(layout, number) for number in alike}
            owners = {
                False: {place.copy: number for number, place in places.items()},
                True: {place.expert_copy: number for number, place in places.items()},
            }
            for slab, sender in zip(held, senders, strict=True):
                number = owners[slab.shard.bound.is_expert].get(sender)
                if number is not None:
                    found[stage * count + number].append(slab.block)
    return found


# --- one row --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperRow:
    """What is counted of a model on so many GPUs."""

    model: str
    gpus: int
    layout: Halves
    counts: dict[str, float]

    @property
    def fits(self) -> bool:
        dims = MODELS[self.model]
        weight = sum(math.prod(s) for s in hf_names(Dims.of(dims), architecture_of(dims)).values())
        # of a weight: itself and its gradient in 2 + 4 bytes, 12 of the optimizer spread over ranks
        layout = self.layout
        held = weight / layout.tp / layout.pp / layout.ep * min(layout.tp, layout.ep)
        trainer = 6 * held + 12 * weight / layout.ranks
        return max(trainer, 2 * weight / layout.workers) < 0.9 * CARD


def measure(model: str, gpus: int, layout: Halves) -> PaperRow:
    hf = MODELS[model]
    dims = Dims.of(hf)
    seconds: dict[str, float] = {}
    with timed(seconds, "list"):  # of one rank, as that does it
        part: Any = PaperRank(hf, place_of(layout, 0), range(dims.layers // layout.pp), True, True)
        weights.shared(weights.slabs([part], hf, place_of(layout, 0)), place_of(layout, 0))
    blocks = blocks_of(hf, layout)
    with timed(seconds, "build"):
        message = message_bytes(layout.ranks, layout.engines, layout.workers)
        plan = plans.build(blocks, message * layout.workers)
        encoded = msgspec.msgpack.encode(plans.encode(plan))
    shares = [
        Share(worker=worker, workers=layout.workers, kv_heads=dims.groups)
        for worker in range(layout.workers)
    ]
    with timed(seconds, "worker"):
        plan = plans.decode(msgspec.msgpack.decode(encoded))
        parts = [plans.part_of(plan, index, shares[0]) for index in range(len(plan.streams))]
    busiest = max(range(len(plan.streams)), key=lambda index: plan.streams[index].nbytes)
    with timed(seconds, "source"):
        sent = [plans.part_of(plan, busiest, share) for share in shares]
    last = [plans.part_of(plan, index, shares[-1]) for index in range(len(plan.streams))]
    counts = shape_of(layout, plan, (parts, last), sent) | {
        "blocks": sum(map(len, blocks)),
        "plan_bytes": len(encoded),
        "plan_s": sum(seconds.values()),
    }
    counts |= {f"{what}_s": took for what, took in seconds.items()}
    return PaperRow(model, gpus, layout, counts | round_seconds(layout, counts))


def shape_of(
    layout: Halves,
    plan: StreamPlan,
    both: tuple[list[StreamPart], list[StreamPart]],
    sent: list[StreamPart],
) -> dict[str, float]:
    """Groups, links and bytes of the first worker and the last, of which `both` are all parts, and
    of the busiest rank, which has `sent` these.
    """
    engines, grouped, parts = layout.engines, layout.engines > 1, both[0]
    taken = [[i for i, part in enumerate(found) if part.stream.blocks] for found in both]
    from_ranks = max(
        sum(comes_from_trainer(index, place, engines) for index in streams)
        for streams in taken
        for place in range(engines)
    )
    # every worker takes the norms
    normed = any(b.name.endswith("norm.weight") for stream in plan.streams for b in stream.blocks)
    to_workers = layout.workers if normed else sum(bool(part.stream.blocks) for part in sent)
    largest = max(bucket.nbytes for part in parts for bucket in part.stream.buckets)
    out = sum(part.payload for part in sent)
    return {
        "streams": len(plan.streams),
        "groups": layout.workers if grouped else 0,
        "members": layout.workers * engines if grouped else 0,
        "links_worker": from_ranks + grouped,
        "links_source": to_workers,
        "links_bar": max(layout.workers, math.ceil(layout.ranks / engines)),
        "out": out,
        "over": out / sent_once(plan, sent),
        "in": sum(part.payload for part in parts),
        "buckets": sum(len(part.stream.buckets) for part in parts),
        "memory": max(
            at_rank(layout.workers, largest).bytes({}),
            at_worker(layout.ranks, engines, largest).bytes({}),
        ),
        "layer": layer_bytes(parts),
    }


def sent_once(plan: StreamPlan, sent: list[StreamPart]) -> int:
    owned = next(stream for stream in plan.streams if stream.rank == sent[0].stream.rank)
    return sum(plans.row_bytes(block) * block.block_shape[0] for block in owned.blocks)


def layer_bytes(parts: list[StreamPart]) -> int:
    """Of the largest of vLLM's layers: projections that it has as one, and all experts of a block
    of them, are one.
    """
    found: Counter[str] = Counter()
    for part in parts:
        for block in part.stream.blocks:
            layer = block.name.rpartition(".")[0].partition(".experts.")[0]
            for several, one in MERGED.items():
                layer = layer.replace(several, one)
            found[layer] += plans.row_bytes(block) * block.block_shape[0]
    return max(found.values())


def round_seconds(layout: Halves, counts: dict[str, float]) -> dict[str, float]:
    """A model, not measured. Every link moves its bytes at its rate, and every bucket costs the two
    ends of it a launch; a broadcast goes along the ring of engines piece by piece.

    `low`: a bucket's broadcast begins while the last one is still on its way, so the way is waited
    for once. `high`: it begins when everybody has the last one. `tree`: `high`, if broadcasts went
    along two binary trees.
    """
    piece = CHUNK / LINK + HOP
    plain = max(counts["out"], counts["in"]) / LINK + counts["buckets"] * LAUNCH
    ring = (layout.engines - 1) * piece
    tree = 2 * math.ceil(math.log2(layout.engines)) * piece
    return {
        "round_low": plain + ring,
        "round_high": plain + counts["buckets"] * ring,
        "round_tree": plain + counts["buckets"] * tree,
    }


@contextmanager
def timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - begun


# --- what was found -------------------------------------------------------------------------------


def growths(rows: list[PaperRow]) -> dict[str, dict[str, float]]:
    """By model, of each quantity the exponent with which it grows with R + E; 1: as fast."""
    found: dict[str, dict[str, float]] = {}
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        sizes = [row.layout.ranks + row.layout.engines for row in mine]
        found[model] = {
            what: exponent(sizes, [row.counts[what] for row in mine]) for what in COUNTED
        }
    return found


def exponent(sizes: list[int], values: list[float]) -> float:
    """b of the best a x^b; what is 0 is left out, as a group is where there is one engine."""
    points = [
        (math.log(size), math.log(value))
        for size, value in zip(sizes, values, strict=True)
        if value
    ]
    return linear_regression(*zip(*points, strict=True)).slope


def failures(rows: list[PaperRow]) -> list[str]:
    """Bars that are missed, in words."""
    found = []
    for row in rows:
        counts = row.counts
        memory = BARS["memory_mib"] if row.model in BOUNDED else math.inf
        for what, value, bar in (
            (
                "communicators",
                max(counts["links_worker"], counts["links_source"]),
                counts["links_bar"] + BARS["links_beyond"],
            ),
            ("MiB of transfer", counts["memory"] / 2**20, memory),
            ("seconds of planning", counts["plan_s"], BARS["plan_s"]),
            ("bytes out / bytes owned", counts["over"], BARS["over"]),
        ):
            if value > bar:
                found.append(f"{row.model} on {row.gpus}: {value:.4g} {what}, the bar is {bar:g}")
    for model, powers in growths(rows).items():
        for what, power in powers.items():
            if power > BARS["exponent"]:
                found.append(f"{model}: {what} grows as (R + E)^{power:.2f}")
    return found


def show(rows: list[PaperRow]) -> None:
    body = []
    for row in rows:
        c = row.counts
        body.append(
            [
                f"{row.model} {row.gpus}{'' if row.fits else ' *'}",
                row.layout.name,
                f"{c['blocks']:.0f}",
                f"{c['groups']:.0f} x {row.layout.engines}",
                f"{c['links_worker']:.0f} / {c['links_source']:.0f}",
                f"{c['links_bar'] + BARS['links_beyond']:.0f}",
                f"{c['out'] / 1e9:.2f}",
                f"{c['over']:.3f}",
                f"{c['in'] / 1e9:.2f}",
                f"{c['memory'] / 2**20:.0f}",
                f"{c['layer'] / 2**20:.0f}",
                f"{c['plan_bytes'] / 1e6:.2f}",
                " ".join(f"{c[f'{what}_s']:.2f}" for what in ("list", "build", "worker", "source")),
                f"{c['round_low']:.2f} - {c['round_high']:.2f} ({c['round_tree']:.2f})",
            ]
        )
    header = [
        "model GPUs",
        "trainer | engines",
        "blocks",
        "groups",
        "links worker / rank",
        "bar",
        "out GB",
        "over",
        "in GB",
        "memory MiB",
        "layer MiB",
        "plan MB",
        "plan s: rank, rank 0, worker, source",
        "round s, model (tree)",
    ]
    report.table(
        "weight sync on paper; nothing here was measured but Python's seconds", header, body
    )
    by_shape = {f"{row.model} {row.gpus}": row.counts for row in rows}
    report.table(
        "seconds of a round: published by others, and the model's (not measured) of the nearest "
        "of our rows",
        ["system", "weights", "GPUs", "published", "model, ours", "of", "source"],
        [
            [
                system,
                what,
                where,
                published,
                f"{by_shape[ours]['round_low']:.2f} - {by_shape[ours]['round_high']:.2f}",
                f"{ours}, bf16",
                source,
            ]
            for system, what, where, published, source, ours in PUBLISHED
            if ours in by_shape
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sync", action="store_true", required=True, help="of weight sync")
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} only")
    is_quick = parser.parse_args().quick
    rows = [
        measure(model, gpus, layout)
        for model, layouts in LAYOUTS.items()
        if model in QUICK or not is_quick
        for gpus, layout in zip(GPUS, layouts, strict=True)
    ]
    show(rows)
    missed = failures(rows)
    for line in missed:
        print(f"missed: {line}")
    report.last_line(
        "scale",
        {
            "exponent of R+E": {
                model: {what: round(power, 3) for what, power in powers.items()}
                for model, powers in growths(rows).items()
            }
        },
        {
            f"{row.model} {row.gpus}": {name: round(v, 4) for name, v in row.counts.items()}
            for row in rows
        }
        | {"missed": len(missed)},
        {"bars": BARS, "link": LINK, "chunk": CHUNK, "hop": HOP, "launch": LAUNCH}
        | {"cores": os.cpu_count()},
        report.versions("torch", "msgspec"),
        not missed,
    )


if __name__ == "__main__":
    main()
