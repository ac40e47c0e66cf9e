"""A policy that is saved and loaded again trains on as if it had never stopped: every layout, every
bit, real ranks.
"""

from pathlib import Path
from typing import Any

import pytest
from grids import by_layout, sampled

from rft.tools.toy import write_model

from ranks import Ranks

SHAPE = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
TP2 = {"tp": 2, "sp": True}
PP2 = {"pp": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one-bf16": (1, {"dtype": "bf16"}),
    "tp2": (2, TP2),
    "pp2": (2, PP2),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "dp2-bf16": (2, {"dtype": "bf16"}),
    "tp2-pp2": (4, TP2 | PP2),
    "pp2-vpp2": (2, PP2 | {"vpp": 2}),
    "experts-ep2": (2, {"ep": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Per family, two models of one shape with different weights."""
    root = tmp_path_factory.mktemp("resume")

    def pair(family: str) -> tuple[str, str]:
        first, second = (
            write_model(root / f"{family}-{seed}", family, seed=seed, tied=True, **SHAPE)
            for seed in (1, 2)
        )
        return str(first), str(second)

    return {family: pair(family) for family in ("qwen3", "qwen3_moe")}


@pytest.mark.parametrize("layout", sampled(LAYOUTS, **by_layout(LAYOUTS)))
def test_resume_is_bitwise(
    ranks: Ranks, models: dict[str, tuple[str, str]], tmp_path: Path, layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    path, other = models["qwen3_moe" if layout.startswith("experts") else "qwen3"]
    results = ranks.run(
        "resume_jobs:resumed", world, path=path, other=other, root=str(tmp_path), **sizes
    )
    for rank, result in enumerate(results):
        read, loop = result["loop"]
        assert read == loop
        found, wanted = result["steps"]
        assert found["metrics"] == wanted["metrics"], f"rank {rank}: loss or gradient norm"
        assert found["pieces"].keys() == wanted["pieces"].keys()
        differing = [
            key for key, value in wanted["pieces"].items() if found["pieces"][key] != value
        ]
        assert differing == [], f"rank {rank}"
        assert found["small"] == wanted["small"], f"rank {rank}: counters or generators"
        assert found["draws"] == wanted["draws"], f"rank {rank}: generators"
        begun, beginning = result["begun"]
        assert [key for key in beginning if begun[key] != beginning[key]] == [], f"rank {rank}"
    assert {key.split("/")[0] for key, *_ in wanted["pieces"]} >= {"model", "exp_avg", "exp_avg_sq"}
