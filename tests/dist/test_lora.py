"""Adapters: the same in every layout, merged into what is shown, alone in what is saved and
exported, in PEFT's names.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from grids import by_layout, sampled
from rows import make_rows
from safetensors.torch import load_file, save_file
from test_families import EXPERTS as EXPERT_LAYOUTS
from test_families import SMALL, TOYS
from test_parity import assert_gradients_match, gradients, hf_model, hf_weights

from rft.checkpoint.sharding import boxes
from rft.config import ConfigError, LoraConfig
from rft.config.layout import lora_of
from rft.ground.adapters import adapter_names
from rft.ground.names import Dims, architecture_of, read_hf_config
from rft.sync.plan import coverage_errors
from rft.tools.toy import write_model

from ranks import Ranks

LORA = {"lora_rank": 4, "lora_alpha": 8.0}
ATTENTION = LORA | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
MLP = {"w123": ["w1", "w2", "w3"], "": ["gate_proj", "up_proj", "down_proj"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp4-sp": (4, {"tp": 4, "sp": True}),
}
# gloo gathers no unequal parts, which the dispatcher of GPUs does between the shards of experts
GATHERS = {"override_transformer_config": {"moe_token_dispatcher_type": "allgather"}}
# of the experts of a toy of test_families, or of those of `checkpoints`
MIXTURES: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    "moe": EXPERT_LAYOUTS
    | {
        "tp2-ep2": (4, {"tp": 2, "ep": 2, "sp": True}),
        "ep2-etp2": (4, {"ep": 2, "etp": 2}),
        "pp2": (2, {"pp": 2}),
    },
    "mixtral": {"ep2": EXPERT_LAYOUTS["ep2"]},
    "qwen2-moe": {"tp2-sp": EXPERT_LAYOUTS["tp2-sp"]},
    "qwen2-moe-mixed": {"pp2-vpp2-ep2": EXPERT_LAYOUTS["pp2-vpp2-ep2"]},
    "glm4-moe": {"tp2-ep2-etp1": EXPERT_LAYOUTS["tp2-ep2-etp1"]},
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
    found, merged, weights = whole(results), results[0]["merged"], hf_weights(path)
    layers = [
        name.removesuffix(".lora_A.weight") for name in found if name.endswith("lora_A.weight")
    ]
    for layer in layers:
        name = layer.removeprefix("base_model.model.") + ".weight"
        delta = found[f"{layer}.lora_B.weight"] @ found[f"{layer}.lora_A.weight"]
        weights[name] += torch.from_numpy(lora["lora_alpha"] / lora["lora_rank"] * delta)
        assert np.allclose(weights[name].numpy(), merged[name], atol=1e-6), name
    with TemporaryDirectory() as other:
        shutil.copy(path / "config.json", other)
        save_file(weights, Path(other) / "model.safetensors", {"format": "pt"})
        model = hf_model(Path(other))
    with torch.no_grad():
        scores = dict(results[-1]["scores"])
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


def on_experts(path: Path, *more: str) -> dict[str, Any]:
    features = Dims.of(read_hf_config(path)).features
    return LORA | {"target_modules": MLP["w123" if "w123" in features else ""] + list(more)}


Mixture = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def mixture(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """A model with experts, and an adapter for them."""
    root = tmp_path_factory.mktemp("mixtures")

    def of(toy: str) -> tuple[Path, dict[str, Any]]:
        if toy == "moe":
            return checkpoints[toy], on_experts(checkpoints[toy], *ATTENTION["target_modules"])
        path = write_model(root / toy, tied=False, **(SMALL | TOYS[toy][0]))
        return path, on_experts(path)

    return of


@pytest.fixture(scope="module")
def pushed(ranks: Ranks, mixture: Mixture) -> Callable[[str], dict[str, Any]]:
    """One rank's."""
    kept: dict[str, dict[str, Any]] = {}

    def of(toy: str) -> dict[str, Any]:
        if toy not in kept:
            path, lora = mixture(toy)
            kept[toy] = ranks.run("lora_jobs:pushed", 1, path=str(path), lora=lora)[0]
        return kept[toy]

    return of


@pytest.mark.parametrize(
    "toy",
    [toy if toy == "moe" else pytest.param(toy, marks=pytest.mark.verify) for toy in MIXTURES],
)
def test_every_expert_has_an_adapter_of_its_own(
    mixture: Mixture, pushed: Callable[[str], dict[str, Any]], toy: str
) -> None:
    """Experts that all tokens take, and MLPs between, too."""
    path, lora = mixture(toy)
    assert_formula([pushed(toy)], path, lora)
    names = [name for name in hf_weights(path) if name.split(".")[-2] in lora["target_modules"]]
    found = gradients([pushed(toy)])
    assert found.keys() == {
        f"base_model.model.{name.removesuffix('weight')}{which}.weight"
        for name in names
        for which in ("lora_A", "lora_B")
    }
    assert sum(".experts." in name for name in names) >= 3 * 8 * 2
    unused = [name for name, value in found.items() if not np.linalg.norm(value)]
    assert all(".experts." in name for name in unused) and len(unused) < 0.5 * len(found)


@pytest.mark.parametrize(
    ("toy", "layout"),
    sampled(
        [(toy, layout) for toy, layouts in MIXTURES.items() for layout in layouts],
        **by_layout(MIXTURES["moe"], lambda case: {}),
    ),
)
def test_an_expert_learns_the_same_in_every_layout(
    ranks: Ranks,
    mixture: Mixture,
    pushed: Callable[[str], dict[str, Any]],
    toy: str,
    layout: str,
) -> None:
    path, lora = mixture(toy)
    world, sizes = MIXTURES[toy][layout]
    given: dict[str, Any] = {"path": str(path), "lora": lora, **sizes}
    if "ep" in sizes and sizes.get("etp", sizes.get("tp", 1)) > 1:
        given["megatron"] = GATHERS
    results, wanted = ranks.run("lora_jobs:pushed", world, **given), pushed(toy)
    assert_gradients_match(gradients(results), gradients([wanted]))
    norms = [one["metrics"][0]["grad_norm"] for one in (results[0], wanted)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    found = whole(results)
    assert all(np.array_equal(found[name], value) for name, value in whole([wanted]).items())
    for name, value in wanted["merged"].items():
        assert np.allclose(results[0]["merged"][name], value, atol=1e-6), name
    assert_sent_once(results, found, names_of(path, lora))


def test_adapters_of_experts_learn_along_the_routes_of_an_engine(
    ranks: Ranks, mixture: Mixture, pushed: Callable[[str], dict[str, Any]]
) -> None:
    path, lora = mixture("moe")
    given: dict[str, Any] = {"path": str(path), "lora": lora, "routed": True}
    wanted = ranks.run("lora_jobs:pushed", 1, **given)
    found = gradients(ranks.run("lora_jobs:pushed", 2, ep=2, **given))
    assert_gradients_match(found, gradients(wanted))
    free = gradients([pushed("moe")])
    name = "base_model.model.model.layers.3.mlp.experts.5.down_proj.lora_B.weight"
    assert np.linalg.norm(found[name] - free[name]) > 0.1 * np.linalg.norm(free[name])


def test_adapters_of_experts_are_saved_for_any_number_of_ranks_and_for_peft(
    ranks: Ranks, mixture: Mixture, tmp_path: Path
) -> None:
    path, lora = mixture("moe")
    root = str(tmp_path / "run")
    given: dict[str, Any] = {"path": str(path), "lora": lora, "root": root}
    results = ranks.run("lora_jobs:pushed", 2, ep=2, **given)
    (elsewhere,) = ranks.run("lora_jobs:resumed", 1, steps=1, **given)
    assert elsewhere.keys() == results[0]["trained"].keys()
    assert all(
        np.array_equal(elsewhere[name], value) for name, value in results[0]["trained"].items()
    )
    exported = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    saved = whole([{"adapter": result["saved"]} for result in results])
    assert sorted(exported) == sorted(names_of(path, lora))
    assert all(np.array_equal(exported[name].numpy(), value) for name, value in saved.items())


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
        ([LoraConfig(target_modules=["w1", "w3"])], True, "use all-linear or some of q_proj"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(
    checkpoints: dict[str, Path], configs: list[LoraConfig], experts: bool, text: str
) -> None:
    dims = Dims.of(read_hf_config(checkpoints["moe" if experts else "qwen3"]))
    with pytest.raises(ConfigError, match=text):
        lora_of(configs, dims)
