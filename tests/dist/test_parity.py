"""The same step on every mesh, against one rank, and one rank against transformers and plain autograd."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from rows import make_rows
from safetensors.torch import load_file

from rft.algorithm.losses import token_loss
from rft.names import Dims, bind, hf_shape, read_hf_config, segments

LAYOUTS = {
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sp": True}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2, "sp": True}),
    "dp2-pp2": (4, {"pp": 2}),
    "tp4": (4, {"tp": 4, "sp": True}),  # more shards than key/value heads
}
FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "qwen3-untied")


def hf_weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}


def hf_model(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def gradients(path: Path, results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """HF-shaped gradients of the first step: Adam's first moment is (1 - beta1) * gradient then. A tied copy is left out."""
    hf = read_hf_config(path)
    dims = Dims.of(hf)
    local: dict[tuple[str, tuple[int, ...]], dict[int, np.ndarray]] = {}
    shapes = {}
    for result in results:
        for key, offset, flat, shape, replica, values in result["moments"]:
            if replica == 0:
                local.setdefault((key, offset), {})[flat[0]] = values
                shapes[key, offset] = shape
    found: dict[str, np.ndarray] = {}
    for (key, offset), parts in local.items():
        name = key.removeprefix("exp_avg.")
        if dims.tied and name == "output_layer.weight":
            continue
        rule = bind(name, 0)
        value = np.concatenate([parts[start] for start in sorted(parts)]) / (1 - 0.9)
        shape = shapes[key, offset]
        dim = 1 if rule.kind == "row" else 0
        total = int(np.prod(shape))
        size = total // value.size
        value = value.reshape([n // size if i == dim else n for i, n in enumerate(shape)])
        rank = offset[dim] // value.shape[dim] if offset else 0
        for s in segments(rule.kind, rule.hf[0], dims, rank, size):
            whole = found.setdefault(rule.hf[s.part], np.zeros(hf_shape(rule.kind, s.part, rule.hf[s.part], dims)))
            cut = [slice(None)] * value.ndim
            cut[s.dim] = slice(s.local, s.local + s.stop - s.start)
            place = [slice(None)] * value.ndim
            place[s.dim] = slice(s.start, s.stop)
            whole[tuple(place)] = value[tuple(cut)]
    return found


@pytest.fixture(scope="module")
def alone(ranks: Ranks, checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """One step at one rank, per family."""
    return {name: ranks.run("jobs:train", 1, path=str(checkpoints[name]))[0] for name in ("qwen2", "qwen3-untied")}


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(ranks: Ranks, checkpoints: dict[str, Path], family: str) -> None:
    model = hf_model(checkpoints[family])
    rows = make_rows(12)
    found = dict(ranks.run("jobs:score", 1, path=str(checkpoints[family]))[0])
    assert sorted(found) == list(range(12))
    for index, row in enumerate(rows):
        ids = torch.from_numpy(row.tokens)
        with torch.no_grad():
            wanted = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1]
        assert np.abs(wanted.gather(1, ids[1:, None]).squeeze(1).numpy() - found[index]).max() < 1e-5


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2", "tp2-sp"), ("llama", "pp2"), ("qwen3", "cp2"), ("qwen3", "tp4")]
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


@pytest.mark.parametrize("family", ["qwen2", "qwen3-untied"])
def test_gradient_is_that_of_the_weighted_sum(alone: dict[str, Any], checkpoints: dict[str, Path], family: str) -> None:
    """Against autograd through transformers, row by row: no factor of microbatches, ranks or tokens is hidden anywhere."""
    model = hf_model(checkpoints[family])
    loss = torch.zeros(())
    for row in make_rows(24):
        ids = torch.from_numpy(row.tokens)
        logprobs = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1].gather(1, ids[1:, None])[
            :, 0
        ]
        fields = SimpleNamespace(
            behaviour=torch.from_numpy(row.behaviour[1:]), advantage=torch.from_numpy(row.advantage[1:])
        )
        losses, _ = token_loss("ppo", {})(logprobs, fields)
        loss = loss + (losses * torch.from_numpy(row.weight[1:])).sum()
    loss.backward()
    metrics = alone[family]["metrics"][0]
    assert alone[family]["micros"] > 2
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    found = gradients(checkpoints[family], [alone[family]])
    wanted = {name: p.grad.numpy() for name, p in model.named_parameters()}
    assert_gradients_match(found, wanted)
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum((g**2).sum() for g in wanted.values())), rel=1e-5)


def assert_gradients_match(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    scale = max(np.linalg.norm(value) for value in wanted.values())
    for name, value in wanted.items():
        # A key bias has no gradient in exact arithmetic (softmax ignores a shift), so noise is measured on the model's scale.
        error = np.linalg.norm(found[name] - value)
        assert error <= 1e-4 * np.linalg.norm(value) + 1e-6 * scale, f"{name}: {error / np.linalg.norm(value)}"


@pytest.mark.parametrize("family", ["qwen2", "qwen3-untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_step_is_the_same_on_every_mesh(
    ranks: Ranks, checkpoints: dict[str, Path], alone: dict[str, Any], layout: str, family: str
) -> None:
    world, sizes = LAYOUTS[layout]
    results = ranks.run("jobs:train", world, path=str(checkpoints[family]), **sizes)
    reference = alone[family]
    wanted = reference["metrics"][0]
    assert all(result["metrics"] == results[0]["metrics"] for result in results), "ranks report different metrics"
    for name, value in results[0]["metrics"][0].items():
        assert value == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    assert results[0]["metrics"][0]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert_gradients_match(gradients(checkpoints[family], results), gradients(checkpoints[family], [reference]))
    assert results[0]["weights"].keys() == reference["weights"].keys()
    for name, value in reference["weights"].items():
        # Adam's first step is lr * sign(gradient): elements whose gradient is noise may go either way, the others not.
        moved = np.abs(results[0]["weights"][name] - value) > 1e-5
        assert moved.mean() < 0.01 or name.endswith("k_proj.bias"), f"{name}: {moved.mean()} of the elements differ"


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "tp2-sp"),
        ("qwen2", "tp2-pp2"),
        ("qwen3", "pp2"),
        ("qwen3-untied", "tp4"),
        ("qwen2", "tp4"),
        ("qwen3", "dp2-pp2"),
    ],
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
    assembled = {name: np.full(value.shape, np.nan, dtype=np.float32) for name, value in wanted.items()}
    for result in results:
        for (name, dtype, shape, dim, start, stop), value in result["blocks"]:
            assert dtype == "float32" and shape == tuple(wanted[name].shape)
            place = (slice(None),) * dim + (slice(start, stop),)
            assert np.isnan(assembled[name][place]).all(), f"{name} is sent twice"
            assembled[name][place] = value
    assert all(np.array_equal(assembled[name], value.numpy()) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("world", "sizes"),
    [(1, {}), (1, {"dtype": "bf16"}), (2, {"tp": 2, "sp": True}), (2, {}), (2, {"dtype": "bf16"}), (2, {"pp": 2})],
    ids=["one", "one-bf16", "tp2", "dp2", "dp2-bf16", "pp2"],
)
def test_restored_state_continues_bit_for_bit(
    ranks: Ranks, checkpoints: dict[str, Path], world: int, sizes: dict[str, Any]
) -> None:
    assert all(ranks.run("jobs:resume", world, path=str(checkpoints["qwen3"]), **sizes))


@pytest.mark.parametrize("layout", ["tp2-pp2", "dp2-pp2", "tp2-cp2", "tp4"])
def test_pieces_have_one_writer_and_equal_replicas(ranks: Ranks, checkpoints: dict[str, Path], layout: str) -> None:
    world, sizes = LAYOUTS[layout]
    holders: dict[tuple[Any, ...], list[tuple[int, np.ndarray]]] = {}
    for pieces in ranks.run("jobs:state", world, path=str(checkpoints["qwen3"]), **sizes):
        for key, offset, flat, _, replica, values in pieces:
            holders.setdefault((key, offset, flat), []).append((replica, values))
    for address, copies in holders.items():
        assert sorted(replica for replica, _ in copies).count(0) == 1, address
        assert all(np.array_equal(values, copies[0][1]) for _, values in copies), address


@pytest.mark.parametrize("layout", ["tp2-pp2", "dp2"])
def test_bf16_learns_the_same_up_to_rounding(ranks: Ranks, checkpoints: dict[str, Path], layout: str) -> None:
    world, sizes = LAYOUTS[layout]
    path = str(checkpoints["qwen3"])
    wanted = ranks.run("jobs:train", 1, path=path, loss="sft")[0]["metrics"][0]
    found = ranks.run("jobs:train", world, path=path, loss="sft", dtype="bf16", **sizes)[0]["metrics"][0]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}], ids=["dp2", "pp2"])
def test_a_step_that_is_not_finite_changes_nothing_anywhere(
    ranks: Ranks, checkpoints: dict[str, Path], sizes: dict[str, Any]
) -> None:
    for result in ranks.run("jobs:skip", 2, path=str(checkpoints["llama"]), **sizes):
        assert result["same"] and result["skipped"] == 1
        assert result["after"]["skipped"] == 0 and np.isfinite(result["after"]["grad_norm"])


def test_more_ranks_than_rows(ranks: Ranks, checkpoints: dict[str, Path]) -> None:
    """A rank whose microbatch is padding only takes part and adds nothing."""
    path = str(checkpoints["qwen3"])
    wanted = ranks.run("jobs:train", 1, path=path, rows=1)[0]["metrics"]
    for sizes in ({}, {"tp": 2, "sp": True}):
        found = ranks.run("jobs:train", 4, path=path, rows=1, **sizes)[0]["metrics"]
        assert found[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=1e-5)


def test_control_plane(ranks: Ranks) -> None:
    results = ranks.run("jobs:control_plane", 4)
    assert all(result[0] == {"a": [1, None], "b": b"x"} for result in results)
    assert [result[1] for result in results] == [[0, 1, 2, 3], None, None, None]
    assert sorted(row for result in results for row in result[2]) == list(range(9))
