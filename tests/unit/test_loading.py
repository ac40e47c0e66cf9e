"""The order that a commit loads in, and tensors that have less memory than their shape."""

import dataclasses
import random

import pytest
import torch
from test_parts import FAMILIES

from rft.ground.names import hf_names
from rft.sync.loading import (
    PartTensor,
    expert_by_expert,
    in_layer_order,
    layer_order,
    stacked,
)

ROWS, COLUMNS = 12, 16


@pytest.mark.parametrize("architecture", FAMILIES)
def test_modules_follow_each_other_in_the_order_of_the_model(architecture: str) -> None:
    names = list(hf_names(dataclasses.replace(FAMILIES[architecture], layers=11), architecture))
    random.Random(0).shuffle(names)
    names.sort(key=layer_order)
    assert names[0] == "model.embed_tokens.weight"
    tied = FAMILIES[architecture].tied
    assert names[-2:][tied] == "model.norm.weight" and (tied or names[-1] == "lm_head.weight")
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers) and max(layers) == 10
    modules = [module_of(name) for name in names]
    runs = [one for number, one in enumerate(modules) if [one] != modules[number - 1 : number]]
    assert len(runs) == len(set(runs)), "no module is left and entered again"


def module_of(name: str) -> str:
    """vLLM's, of a Hugging Face name."""
    module = name.rpartition(".")[0].partition(".experts.")[0]
    for fused in ("qkv", "gate_up"):
        for one in fused.replace("qkv", "q_k_v").split("_"):
            module = module.replace(f".{one}_proj", f".{fused}_proj")
    return module


# --- of all experts together ----------------------------------------------------------------------


def experts(count: int, layer: int = 0) -> list[str]:
    return [f"model.layers.{layer}.mlp.experts.{n}.up_proj.weight" for n in range(count)]


@pytest.mark.parametrize("gap", [0, 3])
def test_experts_that_lie_at_equal_distances_become_one(gap: int) -> None:
    memory = torch.randn(12, ROWS * COLUMNS + gap)
    tensors = {
        name: memory[n, : ROWS * COLUMNS].view(ROWS, COLUMNS) for n, name in enumerate(experts(12))
    }
    name = "model.norm.weight"
    given = dict(in_layer_order({name: memory, **dict(reversed(tensors.items()))}, together=True))
    assert list(given) == [experts(1)[0], name]
    one = given[experts(1)[0]]
    assert one.data_ptr() == memory.data_ptr() and torch.equal(
        one, torch.stack(list(tensors.values()))
    )
    assert list(in_layer_order(tensors)) == list(tensors.items()), "only where that is asked for"


def test_experts_that_lie_elsewhere_stay_by_themselves() -> None:
    apart = {name: torch.randn(ROWS, COLUMNS) for name in experts(3)}
    assert dict(in_layer_order(apart, together=True)) == apart
    memory = torch.randn(3, ROWS, COLUMNS)
    parts = [PartTensor("e", (ROWS, 2 * COLUMNS), 1, [n], [memory[n]]) for n in (0, 0, 1)]
    assert stacked(parts) is None, "not of the same columns"
    assert stacked([parts[0], memory[1]]) is None and stacked([memory[0], parts[1]]) is None


# --- a part ---------------------------------------------------------------------------------------


def part_of(whole: torch.Tensor, dim: int, *ends: int) -> PartTensor:
    """What lies between these ends, a piece between each two."""
    pieces = [whole.narrow(dim, a, b - a).clone() for a, b in zip(ends, ends[1:], strict=False)]
    return PartTensor("some.weight", whole.shape, dim, ends[:-1], pieces)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ends", [(4, 8), (2, 4, 5, 12)])
def test_what_is_inside_reads_as_of_the_whole(dim: int, ends: tuple[int, ...]) -> None:
    whole = torch.randn(ROWS, COLUMNS)
    part = part_of(whole, dim, *ends)
    assert (part.shape, part.dtype, part.numel()) == (whole.shape, whole.dtype, whole.numel())
    for start in range(ends[0], ends[-1]):
        for stop in range(start, ends[-1] + 1):
            cut = part.narrow(dim, start, stop - start)
            wanted = whole.narrow(dim, start, stop - start)
            target = torch.full_like(wanted, torch.nan)
            target.copy_(cut)
            assert cut.shape == wanted.shape and torch.equal(target, wanted)
            assert torch.equal(cut[1:3, 1:2], wanted[1:3, 1:2])
    inside = part.unsqueeze(0).unbind()[0].detach().narrow(dim, ends[0], 2)
    assert torch.equal(inside, whole.narrow(dim, ends[0], 2))
    rows = part[3] if dim == 1 else part[:, 3]
    assert torch.equal(
        rows[ends[0] : ends[-1]], (whole[3] if dim == 1 else whole[:, 3])[ends[0] : ends[-1]]
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_not_here_is_an_error_whoever_asks(dim: int) -> None:
    part = part_of(torch.randn(ROWS, COLUMNS), dim, 4, 8)
    said = rf"here is \[4, 8\) of dim {dim} of some.weight \[12, 16\]"
    for start, size in ((3, 2), (7, 2), (8, 1), (0, 4)):
        with pytest.raises(IndexError, match=rf"\[{start}, {start + size}\), and {said}"):
            part.narrow(dim, start, size)
    target = torch.zeros(ROWS, COLUMNS)
    for use in (
        lambda: target.copy_(part),
        lambda: torch.empty(ROWS, COLUMNS, device="meta").copy_(part),
        lambda: part + 1,
        lambda: part.to(torch.float64),
        lambda: torch.cat([target, part]),
        lambda: part.unbind(dim),
        lambda: part.chunk(2, dim),
    ):
        with pytest.raises(IndexError, match="here is"):
            use()
    for use in (part.numpy, part.tolist):
        with pytest.raises(RuntimeError):
            use()
    assert not target.any()


def test_a_tensor_that_came_in_pieces_is_whole() -> None:
    whole = torch.randn(ROWS, COLUMNS)
    part = part_of(whole, 1, 0, 3, 16)
    assert torch.equal(part, whole) and torch.equal(part + 1, whole + 1)
    assert torch.equal(part.chunk(2, dim=1)[1], whole[:, 8:])


def test_stacked_parts_are_cut_and_copied_like_one() -> None:
    whole, memory = torch.randn(5, ROWS, COLUMNS), torch.zeros(5, ROWS * 6 + 4)
    parts = []
    for expert, room in zip(whole, memory, strict=True):
        pieces = [room[: ROWS * 2].view(ROWS, 2), room[ROWS * 2 : ROWS * 6].view(ROWS, 4)]
        pieces[0].copy_(expert[:, 4:6])
        pieces[1].copy_(expert[:, 6:10])
        parts.append(PartTensor("e", expert.shape, 1, [4, 6], pieces))
    one = stacked(parts)
    assert one is not None and one.shape == whole.shape
    target = torch.zeros(5, ROWS, 6).copy_(one.narrow(2, 4, 6))
    assert torch.equal(target, whole[:, :, 4:10])


def test_an_expert_of_a_fused_file_is_put_together_again() -> None:
    """Gate and up come in any order, experts between each other; the rest passes."""
    stem, given, wanted = "model.layers.0.mlp.experts.", [], {}
    for expert in range(3):
        fused = {"gate_up_proj": (6, 8), "gate_up_proj_bias": (8,), "down_proj": (4, 6)}
        for name, shape in fused.items():
            whole = torch.rand(shape)
            wanted[f"{stem}{expert}.{name}"] = whole
            kind = "bias" if "bias" in name else "weight"
            parts = ("down",) if "down" in name else ("gate", "up")
            for column, part in enumerate(parts):
                own = whole[..., column :: len(parts)]
                own = own.T if own.ndim > 1 else own
                given.append((f"{stem}{expert}.{part}_proj.{kind}", own.contiguous()))
    other = "model.layers.0.mlp.router.weight", torch.rand(3, 6)
    random.Random(0).shuffle(given)
    found = dict(expert_by_expert(iter([*given, other])))
    assert found.pop(other[0]) is other[1]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
