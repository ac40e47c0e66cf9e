"""A policy that is saved and loaded again trains on as if it had never stopped: every layout, every bit, real ranks."""

from pathlib import Path
from typing import Any

import pytest

from rft.tools.toy import write_model

from ranks import Ranks

SHAPE = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one-bf16": (1, {"dtype": "bf16"}),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "cp2": (2, {"context_parallel_size": 2}),
    "dp2": (2, {}),
    "dp2-bf16": (2, {"dtype": "bf16"}),
    "tp2-pp2": (4, TP2 | PP2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models of one shape with different weights."""
    root = tmp_path_factory.mktemp("resume")
    first, second = (write_model(root / str(seed), "qwen3", seed=seed, tied=True, **SHAPE) for seed in (1, 2))
    return str(first), str(second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_is_bitwise(ranks: Ranks, models: tuple[str, str], tmp_path: Path, layout: str) -> None:
    world, sizes = LAYOUTS[layout]
    results = ranks.run("resume_jobs:resumed", world, path=models[0], other=models[1], root=str(tmp_path), **sizes)
    for rank, result in enumerate(results):
        read, loop = result["loop"]
        assert read == loop
        found, wanted = result["steps"]
        assert found["metrics"] == wanted["metrics"], f"rank {rank}: loss or gradient norm"
        assert found["pieces"].keys() == wanted["pieces"].keys()
        differing = [key for key, value in wanted["pieces"].items() if found["pieces"][key] != value]
        assert differing == [], f"rank {rank}"
        assert found["small"] == wanted["small"], f"rank {rank}: counters or generators"
        assert found["draws"] == wanted["draws"], f"rank {rank}: generators"
    assert {key.split("/")[0] for key, *_ in wanted["pieces"]} >= {"model", "exp_avg", "exp_avg_sq"}
