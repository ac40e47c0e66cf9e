"""Adapters: the same in every layout, merged into what is shown, alone in what is saved and
exported, in PEFT's names.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grids import by_layout, sampled
from rows import make_rows
from safetensors.torch import load_file

from rft.checkpoint.sharding import boxes
from rft.config import ConfigError, LoraConfig
from rft.config.layout import lora_of
from rft.ground.adapters import adapter_names
from rft.ground.names import Dims, architecture_of, read_hf_config
from rft.sync.plan import coverage_errors

from ranks import Ranks

LORA = {"lora_rank": 4, "lora_alpha": 8.0}
ATTENTION = LORA | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp4-sp": (4, {"tp": 4, "sp": True}),
}


def whole(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """HF tensors of the adapter, from the pieces of all ranks."""
    found: dict[str, np.ndarray] = {}
    for claim, values in (piece for result in results for piece in result["adapter"]):
        tensor = found.setdefault(
            claim.key.removeprefix("model/"), np.full(claim.global_shape, np.nan, dtype=np.float32)
        )
        for box in boxes(claim):
            cut = tuple(slice(low, low + n) for low, n in zip(box.offset, box.shape, strict=True))
            tensor[cut] = values
    return found


@pytest.fixture(scope="module")
def alone(ranks: Ranks, checkpoints: dict[str, Path]) -> dict[str, Any]:
    return {
        name: ranks.run("lora_jobs:tuned", 1, path=str(checkpoints[name]), lora=lora)[0]
        for name, lora in (("qwen2", LORA), ("moe", ATTENTION))
    }


def test_it_begins_as_the_base_model_and_only_the_adapter_learns(
    ranks: Ranks, checkpoints: dict[str, Path], alone: dict[str, Any]
) -> None:
    path = str(checkpoints["qwen2"])
    base, first = (
        ranks.run("lora_jobs:first_scores", 1, path=path, lora=lora)[0] for lora in (None, LORA)
    )
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(base, first, strict=True))
    assert alone["qwen2"]["frozen"]
    hf = read_hf_config(path)
    dims, architecture = Dims.of(hf), architecture_of(hf)
    lora = lora_of([LoraConfig(**LORA)], dims)  # type: ignore[arg-type]
    assert lora is not None
    found = whole([alone["qwen2"]])
    assert {name: value.shape for name, value in found.items()} == adapter_names(
        dims, architecture, lora
    )
    assert all("lora_" in key for key in alone["qwen2"]["keys"])
    assert all(np.abs(value).max() > 0 for value in found.values())


@pytest.mark.parametrize(("family", "lora"), [("qwen2", LORA), ("moe", ATTENTION)])
def test_what_it_computes_and_what_it_shows_is_the_formula(
    checkpoints: dict[str, Path], alone: dict[str, Any], family: str, lora: dict[str, Any]
) -> None:
    assert_formula([alone[family]], checkpoints[family], lora)


def assert_formula(results: list[dict[str, Any]], path: Path, lora: dict[str, Any]) -> None:
    """transformers with W + alpha/r B A, for each projection by
    itself, from the adapter's own tensors.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found, merged = whole(results), results[0]["merged"]
    layers = [
        name.removesuffix(".lora_A.weight") for name in found if name.endswith("lora_A.weight")
    ]
    with torch.no_grad():
        for layer in layers:
            name = layer.removeprefix("base_model.model.") + ".weight"
            delta = found[f"{layer}.lora_B.weight"] @ found[f"{layer}.lora_A.weight"]
            weight = model.get_parameter(name)
            weight += torch.from_numpy(lora["lora_alpha"] / lora["lora_rank"] * delta)
            assert np.allclose(weight.numpy(), merged[name], atol=1e-6), name
        scores = dict(results[0]["scores"])
        for index, row in enumerate(make_rows(6)):
            ids = torch.from_numpy(row.tokens)
            wanted = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1]
            assert (
                np.abs(wanted.gather(1, ids[1:, None]).squeeze(1).numpy() - scores[index]).max()
                < 1e-5
            )


@pytest.mark.parametrize(
    ("family", "layout"),
    sampled(
        [*(("qwen2", name) for name in LAYOUTS), ("moe", "tp2-sp")],
        **by_layout(LAYOUTS, lambda case: {"family": case[0]}),
    ),
)
def test_it_is_the_same_in_every_layout(
    ranks: Ranks, checkpoints: dict[str, Path], alone: dict[str, Any], family: str, layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    lora = ATTENTION if family == "moe" else LORA
    results = ranks.run("lora_jobs:tuned", world, path=str(checkpoints[family]), lora=lora, **sizes)
    for step, wanted in zip(results[0]["metrics"], alone[family]["metrics"], strict=True):
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    wanted, found = whole([alone[family]]), whole(results)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.linalg.norm(found[name] - value) <= 1e-3 * np.linalg.norm(value), name
    assert_sent_once(results, found, names_of(checkpoints[family], lora))


def names_of(path: Path, lora: dict[str, Any]) -> list[str]:
    hf = read_hf_config(path)
    adapter = lora_of([LoraConfig(**lora)], Dims.of(hf))
    assert adapter is not None
    return list(adapter_names(Dims.of(hf), architecture_of(hf), adapter))


def assert_sent_once(
    results: list[dict[str, Any]], wanted: dict[str, np.ndarray], order: list[str]
) -> None:
    """What the ranks stream to engines that add the adapter by themselves: every element, from one
    rank, and nothing else.
    """
    sent = [(block, value) for result in results for block, value in result["sent"]]
    assert coverage_errors([block for block, _ in sent]) == []
    assert {block.name for block, _ in sent} == set(order)
    for block, value in sent:
        assert value.shape == block.block_shape and block.shape == wanted[block.name].shape
        part = [slice(None)] * len(block.shape)
        part[block.dim] = slice(block.start, block.stop)
        assert np.array_equal(value, wanted[block.name][tuple(part)]), block
    for result in results:
        positions = [order.index(block.name) for block, _ in result["sent"]]
        assert positions == sorted(positions), "who receives from several ranks needs one order"


RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full"},
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
}


@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recomputed_layers_under_a_frozen_embedding_still_learn(
    ranks: Ranks, checkpoints: dict[str, Path], alone: dict[str, Any], kind: str
) -> None:
    path = str(checkpoints["qwen2"])
    found = ranks.run("lora_jobs:tuned", 1, path=path, lora=LORA, trainer=RECOMPUTE[kind])[0]
    for step, wanted in zip(found["metrics"], alone["qwen2"]["metrics"], strict=True):
        assert (
            step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
            and wanted["grad_norm"] > 0
        )


def test_a_checkpoint_is_the_adapter_alone_loads_elsewhere_and_exports_for_peft(
    ranks: Ranks, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path, root = str(checkpoints["qwen3"]), str(tmp_path / "run")
    results = ranks.run("lora_jobs:tuned", 2, path=path, lora=LORA, root=root, tp=2, sp=True)
    elsewhere = ranks.run("lora_jobs:resumed", 2, path=path, lora=LORA, root=root, pp=2)[0]
    assert all(
        np.array_equal(elsewhere[name], value) for name, value in results[0]["merged"].items()
    )
    with pytest.raises(AssertionError, match="model.lora_configs says"):
        ranks.run("lora_jobs:resumed", 1, path=path, lora=LORA | {"lora_alpha": 4.0}, root=root)
    directory = tmp_path / "run" / "adapter"
    assert sorted(p.name for p in directory.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    exported, wanted = load_file(directory / "adapter_model.safetensors"), whole(results)
    assert exported.keys() == wanted.keys()
    assert all(np.array_equal(exported[name].numpy(), value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("configs", "experts", "text"),
    [
        ([LoraConfig(), LoraConfig()], False, "2 entries"),
        ([LoraConfig(lora_rank=0)], False, "lora_rank=0"),
        ([LoraConfig(target_modules=["q_proj"])], False, "q_proj, k_proj, v_proj are one layer"),
        ([LoraConfig(target_modules=["lm_head"])], False, "use all-linear or some of q_proj"),
        ([LoraConfig(target_modules=["down_proj"])], True, "experts have no adapters"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(
    checkpoints: dict[str, Path], configs: list[LoraConfig], experts: bool, text: str
) -> None:
    dims = Dims.of(read_hf_config(checkpoints["moe" if experts else "qwen3"]))
    with pytest.raises(ConfigError, match=text):
        lora_of(configs, dims)
