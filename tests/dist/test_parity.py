"""The same step on every mesh, against one rank, and one rank
against transformers and plain autograd.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from grids import by_layout, sampled
from rows import RATES, SHARED, VARIANTS, make_rows
from safetensors.torch import load_file

from rft.algorithm.fields import Fields
from rft.algorithm.losses import token_loss
from rft.checkpoint.sharding import assign, boxes

from ranks import Ranks

LAYOUTS = {
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sp": True}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2, "sp": True}),
    "cp2-pp2": (4, {"cp": 2, "pp": 2}),
    "dp2-pp2": (4, {"pp": 2}),
    "tp4": (4, {"tp": 4, "sp": True}),  # more shards than key/value heads
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2-cp2-pp2": (8, {"tp": 2, "cp": 2, "pp": 2, "sp": True}),
}
EXPERTS = {
    "ep2": (2, {"ep": 2}),
    "tp2-ep2": (4, {"tp": 2, "ep": 2, "sp": True}),
    "tp2-ep2-etp1": (2, {"tp": 2, "ep": 2, "etp": 1, "sp": True}),
    "pp2-vpp2-ep2": (4, {"pp": 2, "vpp": 2, "ep": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "tp2-sp": LAYOUTS["tp2-sp"],
    "dp2": LAYOUTS["dp2"],
}
CASES = [("qwen2", layout) for layout in LAYOUTS] + [
    ("qwen3-untied", layout) for layout in ("tp4", "tp2-pp2")
]
CASES += [("moe", layout) for layout in EXPERTS]
LAYOUTS |= EXPERTS | {"tp2-dp2": (4, {"tp": 2, "sp": True})}
# context-parallel ranks share no prefixes
MATRIX = [
    (family, layout, variant)
    for family, layout in CASES
    for variant in VARIANTS
    if variant != "unrolled" and not (variant == "shared" and "cp" in LAYOUTS[layout][1])
]
# sp, etp and the family are seen once; of the others it may matter what they are met with
INTERACT = ("tp", "pp", "cp", "dp", "vpp", "ep", "variant")
FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "qwen3-untied", "moe")


def hf_weights(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in sorted(path.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def hf_model(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def gradients(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """HF-shaped gradients of the first step: Adam's first moment is (1 - beta1) * gradient then."""
    found: dict[str, np.ndarray] = {}
    for claim, values in (piece for result in results for piece in result["moments"]):
        whole = found.setdefault(
            claim.key.removeprefix("exp_avg/"), np.full(claim.global_shape, np.nan)
        )
        for box in boxes(claim):
            cut = tuple(slice(low, low + n) for low, n in zip(box.offset, box.shape, strict=True))
            part = values[box.start : box.start + whole[cut].size].reshape(box.shape) / (1 - 0.9)
            assert (
                not claim.stored or np.isnan(whole[cut]).all() or np.array_equal(whole[cut], part)
            )
            whole[cut] = part
    assert not any(np.isnan(value).any() for value in found.values())
    return found


@pytest.fixture(scope="module")
def alone(ranks: Ranks, checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """One step at one rank, per family."""
    return {
        name: ranks.run("jobs:train", 1, path=str(checkpoints[name]))[0]
        for name in ("qwen2", "qwen3-untied", "moe")
    }


@pytest.fixture(scope="module")
def reference(ranks: Ranks, checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Everything that is compared, of one rank, per family."""
    return {
        name: ranks.run("jobs:matrix", 1, path=str(checkpoints[name]), variants=VARIANTS)[0]
        for name in ("qwen2", "qwen3-untied", "moe")
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(
    ranks: Ranks, checkpoints: dict[str, Path], family: str
) -> None:
    model = hf_model(checkpoints[family])
    rows = make_rows(12)
    found = dict(ranks.run("jobs:score", 1, path=str(checkpoints[family]))[0])
    assert sorted(found) == list(range(12))
    for index, row in enumerate(rows):
        ids = torch.from_numpy(row.tokens)
        with torch.no_grad():
            wanted = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1]
        assert (
            np.abs(wanted.gather(1, ids[1:, None]).squeeze(1).numpy() - found[index]).max() < 1e-5
        )


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2", "tp2-sp"), ("llama", "pp2"), ("qwen3", "cp2"), ("qwen3", "tp4")],
)
def test_logprobs_do_not_depend_on_the_mesh(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, layout: str
) -> None:
    path = str(checkpoints[family])
    alone = dict(ranks.run("jobs:score", 1, path=path)[0])
    world, sizes = LAYOUTS[layout]
    found = dict(ranks.run("jobs:score", world, path=path, **sizes)[-1])
    assert sorted(found) == sorted(alone)
    assert max(np.abs(found[i] - alone[i]).max() for i in alone) < 1e-5


@pytest.mark.parametrize("family", ["qwen2", "qwen3-untied", "moe"])
def test_gradient_is_that_of_the_weighted_sum(
    alone: dict[str, Any], checkpoints: dict[str, Path], family: str
) -> None:
    assert_gradient_of_transformers([alone[family]], checkpoints[family])


def assert_gradient_of_transformers(results: list[dict[str, Any]], path: Path) -> None:
    """Against autograd through transformers, row by row: no factor of microbatches, ranks or tokens
    is hidden anywhere.
    """
    model = hf_model(path)
    loss = torch.zeros(())
    for row in make_rows(24):
        ids = torch.from_numpy(row.tokens)
        logprobs = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1].gather(
            1, ids[1:, None]
        )[:, 0]
        weight = torch.from_numpy(row.weight[1:])
        fields = Fields(
            torch.from_numpy(row.behaviour[1:]),
            torch.from_numpy(row.advantage[1:]),
            weight,
            weight != 0,
        )
        losses, _ = token_loss("ppo", {})(logprobs, fields)
        loss = loss + (losses * torch.from_numpy(row.weight[1:])).sum()
    loss.backward()
    metrics = results[0]["metrics"][0]
    assert results[0]["micros"] > 2
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    found, wanted = gradients(results), gradients_in_files(model)
    assert_gradients_match(found, wanted)
    assert metrics["grad_norm"] == pytest.approx(
        np.sqrt(sum((g**2).sum() for g in wanted.values())), rel=1e-5
    )


def gradients_in_files(model: Any) -> dict[str, np.ndarray]:
    """Written as weights would be: transformers fuses and renames in memory what its files hold
    tensor by tensor. What has no gradient is left out.
    """
    for parameter in model.parameters():
        parameter.data = parameter.grad
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        found = hf_weights(Path(directory))
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    named = [(n, g.numpy()) for n, g in found.items() if n.rpartition(".")[2] not in buffers]
    return {n: g for name, value in named for n, g in expert_by_expert(name, value)}


def expert_by_expert(name: str, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A file's tensor of all experts as rft has them, each as a matrix of its own."""
    stem, _, last = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    if last.removesuffix("_bias") not in parts:
        return [(name, value)]
    parts, kind = parts[last.removesuffix("_bias")], "bias" if "_bias" in last else "weight"

    def turned(part: Any) -> Any:
        return part if kind == "bias" else part.T

    return [
        (f"{stem}.{number}.{part}.{kind}", turned(expert[..., column :: len(parts)]))
        for number, expert in enumerate(value)
        for column, part in enumerate(parts)
    ]


def assert_gradients_match(
    found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], limit: float = 1e-5
) -> None:
    """Per tensor, relative L2. A key bias has no gradient in exact arithmetic (softmax ignores a
    shift): its noise is held against the model's largest gradient instead.
    """
    assert found.keys() == wanted.keys()
    scale = max(np.linalg.norm(value) for value in wanted.values())
    for name, value in wanted.items():
        size = scale if name.endswith("k_proj.bias") else np.linalg.norm(value)
        assert np.linalg.norm(found[name] - value) <= limit * size, (
            f"{name}: {np.linalg.norm(found[name] - value) / size}"
        )


def axes_of_matrix(case: tuple[str, str, str]) -> dict[str, Any]:
    """Four shards meet every layout and variant as two do: they are an axis of their own."""
    shards = {"tp": 2, "tp4": True} if case[1] == "tp4" else {}
    return {"family": case[0], "variant": case[2]} | shards


@pytest.mark.parametrize(
    ("family", "layout", "variant"),
    sampled(MATRIX, **by_layout(LAYOUTS, axes_of_matrix), interact=INTERACT),
)
def test_every_layout_gives_the_same_gradient_and_the_same_steps(
    ranks: Ranks,
    checkpoints: dict[str, Path],
    reference: dict[str, dict[str, Any]],
    family: str,
    layout: str,
    variant: str,
) -> None:
    """However the batch is cut: by tokens or by rows, packed or padded, and so small that ranks
    have nothing to train on; and where what rows begin with alike is computed once.
    """
    world, sizes = LAYOUTS[layout]
    path = checkpoints[family]
    results = ranks.run("jobs:matrix", world, path=str(path), variants=[variant], **sizes)
    found = [result[variant] for result in results]
    if variant in RATES:
        assert_same_weights(variant, found[0], reference[family][variant], hf_weights(path))
        return
    few = "few" if variant.startswith("few") else "tokens-packed"
    wanted = reference[family]["unrolled" if variant in SHARED else few]
    assert all(part["metrics"] == found[0]["metrics"] for part in found), (
        "ranks report different metrics"
    )
    for name, value in found[0]["metrics"][0].items():
        assert value == pytest.approx(wanted["metrics"][0][name], rel=1e-4, abs=1e-6), name
    assert_gradients_match(gradients(found), gradients([wanted]))


def assert_same_weights(
    optimizer: str,
    found: dict[str, np.ndarray],
    wanted: dict[str, np.ndarray],
    start: dict[str, torch.Tensor],
) -> None:
    """Adam makes a whole step of a gradient that is only noise: held against the step of all
    parameters together.
    """
    if optimizer == "sgd":
        for name, value in wanted.items():
            assert np.linalg.norm(found[name] - value) <= 1e-5 * np.linalg.norm(value), name
        return
    noise = sum(np.sum((found[n] - v) ** 2.0) for n, v in wanted.items() if "k_proj.bias" not in n)
    moved = sum(np.sum((v - start[n].numpy()) ** 2.0) for n, v in wanted.items())
    assert np.sqrt(noise / moved) <= 1e-3


@pytest.mark.parametrize(
    ("family", "layout"),
    sampled(
        [
            ("llama", "tp2-sp"),
            ("qwen2", "tp2-pp2"),
            ("qwen3", "pp2"),
            ("qwen3-untied", "tp4"),
            ("qwen2", "tp4"),
            ("qwen3", "dp2-pp2"),
            ("qwen3", "pp2-vpp2"),
            ("moe", "tp2-ep2"),
            ("moe", "pp2-vpp2-ep2"),
            ("qwen3", "dp2"),
            ("qwen3", "cp2"),
            ("qwen2", "tp2-dp2"),
            ("moe", "dp2"),
        ],
        **by_layout(LAYOUTS, lambda case: {"family": case[0]}),
    ),
)
def test_import_export_and_blocks_keep_every_byte(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    wanted = hf_weights(checkpoints[family])
    results = ranks.run("jobs:convert", world, path=str(checkpoints[family]), **sizes)
    exported = results[0]["export"]
    assert exported.keys() == wanted.keys()
    assert all(np.array_equal(exported[name], value.numpy()) for name, value in wanted.items())
    assert not any(result["export"] for result in results[1:])
    assert all(result["blocks"] for result in results), "every rank sends"
    assembled = {
        name: np.full(value.shape, np.nan, dtype=np.float32) for name, value in wanted.items()
    }
    for result in results:
        for (name, dtype, shape, dim, start, stop), value in result["blocks"]:
            assert dtype == "float32" and shape == tuple(wanted[name].shape)
            place = (slice(None),) * dim + (slice(start, stop),)
            assert np.isnan(assembled[name][place]).all(), f"{name} is sent twice"
            assembled[name][place] = value
    assert all(np.array_equal(assembled[name], value.numpy()) for name, value in wanted.items())


@pytest.mark.parametrize(
    "layout", sampled(["tp2-pp2", "dp2-pp2", "tp2-cp2", "tp4"], **by_layout(LAYOUTS))
)
def test_pieces_cover_the_model_once_and_copies_are_equal(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    states = ranks.run("jobs:state", world, path=str(checkpoints["qwen3"]), **sizes)
    # raises unless every element has one owner
    assign([[claim for claim, _ in pieces] for pieces in states])
    copies: dict[Any, np.ndarray] = {}
    for claim, values in (piece for pieces in states for piece in pieces):
        assert np.array_equal(values, copies.setdefault(claim, values)), claim


@pytest.mark.parametrize("layout", ["tp2-pp2", "dp2"])
def test_bf16_learns_the_same_up_to_rounding(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    path = str(checkpoints["qwen3"])
    wanted = ranks.run("jobs:train", 1, path=path, loss="sft")[0]["metrics"][0]
    found = ranks.run("jobs:train", world, path=path, loss="sft", dtype="bf16", **sizes)[0][
        "metrics"
    ][0]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=["dp2", "pp2"])
def test_a_step_that_is_not_finite_changes_nothing_anywhere(
    ranks: Ranks, checkpoints: dict[str, Path], sizes: dict[str, Any]
) -> None:
    for result in ranks.run("jobs:skip", 2, path=str(checkpoints["llama"]), **sizes):
        assert result["same"] and result["skipped"] == 1
        assert result["after"]["skipped"] == 0 and np.isfinite(result["after"]["grad_norm"])


def test_a_step_with_nothing_to_learn_changes_nothing(
    ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    """Moments of the steps before, and weight decay, would move the weights on without data."""
    decay = {"weight_decay": 0.1}
    for result in ranks.run("jobs:untaught", 2, path=str(checkpoints["llama"]), optimizer=decay):
        assert result["same"] and result["at"] == (3, 1)
        assert [(told["num_tokens"], told["skipped"]) for told in result["told"]] == [(0, 0)] * 2


def test_control_plane(ranks: Ranks) -> None:
    results = ranks.run("jobs:control_plane", 4)
    assert all(result[0] == {"a": [1, None], "b": b"x"} for result in results)
    assert [result[1] for result in results] == [[0, 1, 2, 3], None, None, None]
    assert sorted(row for result in results for row in result[2]) == list(range(9))


def test_sockets_of_the_ranks_are_a_star_and_no_mesh(ranks: Ranks) -> None:
    few, many = ranks.run("jobs:sockets", 4), ranks.run("jobs:sockets", 16)
    assert all(met == done for met, done in [*few, *many]), "connections after the start"
    first, *others = [now - max(few[min(1, n)]) for n, (_, now) in enumerate(many)]
    assert first <= 2 * 12 + 4  # a star, and the store's
    assert max(others) <= 4  # a tree


def test_groups_of_one_rank_share_a_thread_for_their_sockets(ranks: Ranks) -> None:
    """And the mesh's own has another: each wakes its rank a hundred times a second."""
    [alone], pair = ranks.run("jobs:socket_threads", 1), ranks.run("jobs:socket_threads", 2)
    assert alone <= 2 and max(pair) < 12, (alone, pair)


def test_a_barrier_names_itself_and_who_is_late(ranks: Ranks) -> None:
    first, _, last = ranks.run("jobs:late", 3)
    assert first.startswith("barrier 'room' at rank 0") and "Ranks 1 failed" in first
    assert last.startswith("barrier 'room' at rank 2")
