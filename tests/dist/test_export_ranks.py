"""The agent's export of a sharded save is the gathered export; what `rft ckpt import` makes, ranks
resume from.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rft.tools.ckpt import main
from rft.tools.toy import write_model

from ranks import Ranks

SMALL = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2-pp2-tied": ("qwen3", 4, {"tp": 2, "pp": 2}),
    "tp4-untied": ("llama", 4, {"tp": 4}),
    "dp2-bf16-biases": ("qwen2", 2, {"dtype": "bf16"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("export")
    tied = {"qwen3": True, "qwen2": True, "llama": False}
    found = {name: write_model(root / name, name, tied=tied[name], **SMALL) for name in tied}
    return found | {"other": write_model(root / "other", "llama", seed=5, tied=False, **SMALL)}


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_a_gathered_export(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    family, world, sizes = LAYOUTS[layout]
    wanted = ranks.run(
        "export_jobs:exported", world, path=str(models[family]), root=str(tmp_path), **sizes
    )[0]
    found, before = tensors_of(tmp_path / "hf"), tensors_of(models[family])
    assert found.keys() == wanted.keys() == before.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert not any(
        torch.equal(found[name].float(), before[name]) for name in found if "proj.weight" in name
    ), "trained"
    dtype = "bfloat16" if "bf16" in layout else "float32"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype


def test_ranks_resume_from_an_import(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved by megatron with its optimizer at one layout, imported, taken over by ranks of another
    layout and other weights.
    """
    saved, job = tmp_path / "megatron", tmp_path / "job"
    arguments = {
        "path": str(models["llama"]),
        "root": str(saved),
        "optimizer": True,
        "dtype": "bf16",
    }
    wanted = ranks.run("torch_dist_jobs:saved", 1, **arguments)[0]["weights"]
    assert (
        main(["import", str(saved), str(job), "--model", str(models["llama"]), "--step", "7"]) == 0
    )
    assert "moments of 1 updates" in capsys.readouterr().out
    root = str(job / "checkpoints")
    found = ranks.run(
        "export_jobs:taken_over", 2, path=str(models["other"]), root=root, tp=2, dtype="bf16"
    )
    assert found[0]["weights"] == {
        name: value.view(torch.uint8).numpy().tobytes() for name, value in wanted.items()
    }
    for rank in found:
        assert (rank["loop"]["step"], rank["updates"], rank["finite"]) == (7, 1, True)
        assert rank["moments"] > 0
