"""Every layout in one process: ranks as facts, their parameters as the equations say, filled and
shown by the real code.

`Part` stands for a megatron model of one rank (its names and shapes, none of its groups); `real`
proves that it is like one.
"""

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from jobs import policy_on
from safetensors.torch import load_file

from bench import scale
from rft.ground.names import (
    RULES,
    SUPPORTED,
    Dims,
    Place,
    WeightRule,
    applies,
    architecture_of,
    hf_shape,
    is_expert,
    read_hf_config,
)
from rft.megatron import weights
from rft.sync.plan import coverage_errors


class Part:
    """Parameters of layers [first, stop) of one rank, named for the own spec (0) or Transformer
    Engine's (1).
    """

    def __init__(
        self,
        hf: dict[str, Any],
        place: Place,
        layers: range,
        is_first: bool,
        is_last: bool,
        spec: int,
    ):
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(layer_number=layers.start + 1)])
        self.shapes = dict(_parameters(hf, place, layers, is_first, is_last, spec))

        self.made = [
            (name, torch.nn.Parameter(torch.full(shape, torch.nan)))
            for name, shape in self.shapes.items()
        ]

    def modules(self) -> list[torch.nn.Module]:
        return []  # no adapters

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self.made


def _parameters(
    hf: dict[str, Any], place: Place, layers: range, is_first: bool, is_last: bool, spec: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    dims, features = Dims.of(hf), SUPPORTED[architecture_of(hf)]
    for rule in RULES:
        name = rule.megatron[min(spec, len(rule.megatron) - 1)]
        if spec and dims.experts and rule.hf[0].endswith("post_attention_layernorm.weight"):
            name = rule.megatron[0]  # not fused into a layer of experts
        if name == "output_layer.weight" and dims.tied and is_last and not is_first:
            # the copy of the embedding on the last stage
            yield name, local_shape(rule, dims, place)
        if not applies(rule, features, dims.tied):
            continue
        if "{layer}" not in name:
            here = {"embedding": is_first}.get(name.split(".")[0], is_last)
            numbers: Any = [(0, 0)] if here else []
        else:
            experts = range(dims.experts // place.ep) if is_expert(rule.hf[0]) else range(1)
            numbers = itertools.product(range(len(layers)), experts)
        for layer, expert in numbers:
            yield name.format(layer=layer, expert=expert), local_shape(rule, dims, place)


def local_shape(rule: WeightRule, dims: Dims, place: Place) -> tuple[int, ...]:
    whole = [hf_shape(rule.kind, part, name, dims) for part, name in enumerate(rule.hf)]
    size = place.etp if is_expert(rule.hf[0]) else place.tp
    if rule.kind == "replicated":
        return whole[0]
    if rule.kind == "row":
        return (whole[0][0], whole[0][1] // size)
    rows = dims.padded_vocab(size) if rule.kind == "vocab" else sum(shape[0] for shape in whole)
    return (rows // size, *whole[0][1:])


def chunks(layers: int, pp: int, vpp: int, rank: int) -> list[range]:
    """Layers of each part of a pipeline stage: megatron deals
    them out stage by stage, part by part.
    """
    each = layers // (pp * vpp)
    return [range((part * pp + rank) * each, (part * pp + rank + 1) * each) for part in range(vpp)]


def ranks_of(
    hf: dict[str, Any], tp: int, pp: int, vpp: int, ep: int, etp: int, spec: int, times: int = 1
) -> Iterator[tuple[Place, list[Part]]]:
    """As many ranks as it takes that every shard and every expert is
    on one of them, or so many times that.
    """
    for stage in range(pp):
        found = chunks(Dims.of(hf).layers, pp, vpp, stage)
        count = math.lcm(tp, ep * etp) * times
        for number in range(count):
            place = Place(
                tp,
                number % tp,
                ep,
                number // etp % ep,
                etp,
                number % etp,
                copy=number // tp,
                copies=count // tp,
                expert_copy=number // (ep * etp),
                expert_copies=count // (ep * etp),
            )
            parts = [
                Part(
                    hf,
                    place,
                    part,
                    stage == 0 and index == 0,
                    stage == pp - 1 and index == vpp - 1,
                    spec,
                )
                for index, part in enumerate(found)
            ]
            yield place, parts


def round_trip(path: str, layouts: list[tuple[int, ...]]) -> list[str]:
    """What went wrong, per layout (tp, pp, vpp, ep, etp, spec): all parameters are filled, all HF
    elements shown once.
    """
    hf = read_hf_config(path)
    wanted = load_file(f"{path}/model.safetensors")
    problems = []
    for layout in layouts:
        shown = {name: torch.full(value.shape, torch.nan) for name, value in wanted.items()}
        for place, parts in ranks_of(hf, *layout):
            weights.load_hf(parts, path, hf, place)  # type: ignore[arg-type]
            if any(value.isnan().any() for part in parts for _, value in part.named_parameters()):
                problems.append(f"{layout}: {place} is not filled")
            for slab in weights.shared(weights.slabs(parts, hf, place), place):  # type: ignore[arg-type]
                block = slab.block
                view = shown[block.name].narrow(block.dim, block.start, block.stop - block.start)
                if not view.isnan().all():
                    problems.append(f"{layout}: {block.name} is shown twice")
                view.copy_(slab.read())
        problems += [
            f"{layout}: {name} differs"
            for name, value in wanted.items()
            if not torch.equal(shown[name], value)
        ]
    return problems


def dealt(path: str, layouts: list[tuple[int, ...]]) -> list[str]:
    """What is wrong, per layout, with how the copies of a shard share it: coverage and balance."""
    hf = read_hf_config(path)
    problems = []
    for layout in layouts:
        sent: list[Any] = []
        totals: dict[Any, list[int]] = {}
        largest: dict[Any, int] = {}
        for number, (place, parts) in enumerate(ranks_of(hf, *layout)):
            held = weights.slabs(parts, hf, place)  # type: ignore[arg-type]
            given = weights.shared(held, place)
            sent += [slab.block for slab in given]
            stage = number // (place.tp * place.copies)
            for group, expert in (
                ((stage, place.tp_rank), False),
                ((stage, place.ep_rank, place.etp_rank), True),
            ):
                sizes = [
                    math.prod(s.block.block_shape)
                    for s in given
                    if s.shard.bound.is_expert == expert
                ]
                totals.setdefault((group, expert), []).append(sum(sizes))
                largest[group, expert] = max([largest.get((group, expert), 0), *sizes])
        problems += [f"{layout}: {error}" for error in coverage_errors(sent)]
        problems += [
            f"{layout}: copies of {group} send {found}"
            for group, found in totals.items()
            if max(found) - min(found) > largest[group]
        ]
    return problems


def real(path: str, **layout: Any) -> list[str]:
    """Names and shapes in which this rank's megatron models and their `Part`s differ."""
    with policy_on(path, **layout) as policy:
        mesh, hf = policy.mesh, policy.hf_config
        found = chunks(policy.dims.layers, mesh.pp, mesh.vpp, mesh.pp_rank)
        differences = []
        for index, (model, layers) in enumerate(zip(policy.model, found, strict=True)):
            first, last = (
                mesh.is_first_stage and index == 0,
                mesh.is_last_stage and index == mesh.vpp - 1,
            )
            wanted = Part(hf, mesh.place, layers, first, last, 0).shapes
            held = {name: tuple(value.shape) for name, value in model.named_parameters()}
            differences += [str(item) for item in set(wanted.items()) ^ set(held.items())]
            on_paper = set(scale.parameters(hf, mesh.place, len(layers), first, last))
            copies = {"output_layer.weight"} if policy.dims.tied else set()
            differences += sorted(on_paper ^ (set(held) - copies))
        return differences
