"""Families of models beyond those of `test_parity`: each against transformers, on one rank and cut,
and byte for byte through a trainer in bf16.

`make test` scores each family's toy once; the rest is `make verify`'s.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rows import make_rows
from safetensors.torch import load_file, save_file
from test_parity import (
    assert_gradient_of_transformers,
    assert_gradients_match,
    expert_by_expert,
    gradients,
    hf_model,
    hf_weights,
)

from rft.tools.toy import write_model

from ranks import Ranks

SHARDS = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]
SMALL = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "tp4": (4, {"tp": 4}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp2-cp2-pp2": (8, {"tp": 2, "cp": 2, "pp": 2, "sp": True}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-sp": DENSE["tp2-sp"],
    "ep2": (2, {"ep": 2}),
    "tp2-ep2-etp1": (2, {"tp": 2, "ep": 2, "etp": 1, "sp": True}),
    "pp2-vpp2-ep2": (4, {"pp": 2, "vpp": 2, "ep": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "dp2": DENSE["dp2"],
}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 12}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# toy -> what sets it apart, and the layouts that it is cut in
TOYS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, dict[str, Any]]]]] = {
    "mistral": ({"family": "mistral", "more": {"sliding_window": 11}}, DENSE),
    "mixtral": ({"family": "mixtral"}, EXPERTS),
    "qwen2-moe": ({"family": "qwen2_moe"}, EXPERTS),
    # weights of experts that do not sum to 1, no biases, and MLPs in two of the four layers
    "qwen2-moe-mixed": (
        {
            "family": "qwen2_moe",
            "more": {"norm_topk_prob": False, "qkv_bias": False, "mlp_only_layers": [0, 2]},
        },
        {"pp2-vpp2-ep2": EXPERTS["pp2-vpp2-ep2"], "tp2-sp": DENSE["tp2-sp"]},
    ),
    "glm4-moe": ({"family": "glm4_moe", "more": {"attention_bias": True}}, EXPERTS),
    "glm4-moe-groups": (
        {
            "family": "glm4_moe",
            "experts_per_token": 4,
            "more": {"use_qk_norm": False, "n_group": 4, "topk_group": 2},
        },
        {"tp2-ep2-etp1": EXPERTS["tp2-ep2-etp1"]},
    ),
    "deepseek": ({"family": "deepseek_v3", "more": LATENT}, EXPERTS),
    "deepseek-yarn": (  # queries of full rank
        {
            "family": "deepseek_v3",
            "experts_per_token": 4,
            "more": LATENT
            | {"q_lora_rank": None, "n_group": 4, "topk_group": 2}
            | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
        },
        {"tp2-ep2-etp1": EXPERTS["tp2-ep2-etp1"]},
    ),
    "gpt-oss": (
        {"family": "gpt_oss", "more": {"sliding_window": 9, "swiglu_limit": 0.5}},
        {name: EXPERTS[name] for name in ("ep2", "tp2-ep2-etp1", "pp2-vpp2-ep2", "cp2-ep2", "dp2")},
    ),
    "mistral-yarn": ({"family": "mistral", "more": {"rope_parameters": YARN}}, {}),
}
Model = Callable[[str], Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("families")
    return lambda toy: write_model(root / toy, tied=False, **(SMALL | TOYS[toy][0]))


def cut(*toys: str) -> list[Any]:
    """Every toy in every layout that it has."""
    return [(toy, layout) for toy in toys or TOYS for layout in TOYS[toy][1]]


@pytest.mark.parametrize("toy", TOYS)
def test_logprobs_are_those_of_transformers(ranks: Ranks, model: Model, toy: str) -> None:
    reference = hf_model(model(toy))
    found = dict(ranks.run("jobs:score", 1, path=str(model(toy)))[0])
    for index, row in enumerate(make_rows(12)):
        ids = torch.from_numpy(row.tokens)
        with torch.no_grad():
            wanted = torch.log_softmax(reference(ids[None]).logits[0] / row.temperature, -1)[:-1]
        wanted = wanted.gather(1, ids[1:, None]).squeeze(1)
        assert np.abs(wanted.numpy() - found[index]).max() < 1e-5


@pytest.mark.verify
@pytest.mark.parametrize("toy", TOYS)
def test_gradient_is_that_of_transformers(ranks: Ranks, model: Model, toy: str) -> None:
    result = ranks.run("jobs:train", 1, path=str(model(toy)))
    assert_gradient_of_transformers(result, model(toy))


@pytest.fixture(scope="module")
def alone(ranks: Ranks, model: Model) -> Callable[[str], dict[str, Any]]:
    """One rank's first gradients: packed, and of rows that share prefixes or are computed whole."""
    kept: dict[str, dict[str, Any]] = {}

    def of(toy: str) -> dict[str, Any]:
        if toy not in kept:
            variants = ["tokens-packed", "unrolled", "shared"]
            kept[toy] = ranks.run("jobs:matrix", 1, path=str(model(toy)), variants=variants)[0]
        return kept[toy]

    return of


@pytest.mark.verify
@pytest.mark.parametrize("toy", TOYS)
def test_shared_prefixes_give_the_same_gradient(alone: Any, toy: str) -> None:
    found = alone(toy)
    assert_gradients_match(gradients([found["shared"]]), gradients([found["unrolled"]]))


@pytest.mark.verify
@pytest.mark.parametrize(("toy", "layout"), cut())
def test_every_layout_gives_the_same_gradient(
    ranks: Ranks, model: Model, alone: Any, toy: str, layout: str
) -> None:
    world, sizes = TOYS[toy][1][layout]
    variants = ["tokens-packed", *(["shared"] if "cp" not in sizes else [])]
    results = ranks.run("jobs:matrix", world, path=str(model(toy)), variants=variants, **sizes)
    for variant in variants:
        found = [result[variant] for result in results]
        wanted = alone(toy)[variant]
        assert_gradients_match(gradients(found), gradients([wanted]))
        for name, value in found[0]["metrics"][0].items():
            assert value == pytest.approx(wanted["metrics"][0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.verify
@pytest.mark.parametrize(("toy", "layout"), cut())
def test_a_checkpoint_in_bf16_keeps_every_byte(
    ranks: Ranks, model: Model, tmp_path: Path, toy: str, layout: str
) -> None:
    """There and back, as sent and as exported: what is fp32 in a file stays so."""
    path = in_bf16(model(toy), tmp_path / "model")
    wanted = hf_weights(path)
    world, sizes = TOYS[toy][1][layout]
    given = {"path": str(path), "root": str(tmp_path), "dtype": "bf16"} | sizes
    sent = ranks.run("export_jobs:untrained", world, **given)[0]
    ahead = {name for name in wanted if name.startswith(f"model.layers.{SMALL['layers']}.")}
    inside = {n: v for name in wanted for n, v in expert_by_expert(name, wanted[name])}
    assert sent.keys() == inside.keys() - ahead
    exported = hf_weights(tmp_path / "hf")
    assert exported.keys() == wanted.keys()
    for found, asked in ((sent, inside), (exported, wanted)):
        for name, value in found.items():
            assert value.dtype == asked[name].dtype and torch.equal(value, asked[name]), name


def in_bf16(source: Path, target: Path) -> Path:
    """The checkpoint as it is published, with a layer for multi-token prediction where config.json
    has one.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model.save_pretrained(target)
    if getattr(model.config, "num_nextn_predict_layers", 0):
        prefix = f"model.layers.{SMALL['layers']}."
        ahead = {f"{prefix}eh_proj.weight": torch.randn(48, 96, dtype=torch.bfloat16)}
        ahead[f"{prefix}mlp.gate.e_score_correction_bias"] = torch.randn(8)
        whole, (first, last) = target / "model.safetensors", (target / one for one in SHARDS)
        names = dict.fromkeys(load_file(whole), first.name) | dict.fromkeys(ahead, last.name)
        whole.rename(first)
        save_file(ahead, last, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": names}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target
