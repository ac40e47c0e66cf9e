"""A checkpoint of any layout loads into any other, every bit, optimizer included; nothing was
gathered when it was saved.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import by_layout, cover

from rft.tools.toy import write_model

from ranks import Ranks

# A vocabulary that needs padding, differently for different sizes, and fewer key/value heads than
# the largest one has ranks.
SHAPE = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp4": (4, {"tp": 4}),
    "pp4": (4, {"pp": 4}),
    "dp4": (4, {}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "tp2-dp2": (4, {"tp": 2}),
    "pp2-dp2": (4, {"pp": 2}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, {"ep": 2}),
    "tp2-ep2-etp1": (2, {"tp": 2, "ep": 2, "etp": 1, "sp": True}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "tp2-ep2": (4, {"tp": 2, "ep": 2, "sp": True}),
    "pp2-vpp2-ep2": (4, {"pp": 2, "vpp": 2, "ep": 2}),
}


FULL = pytest.mark.verify


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "layouts", "names"),
    [
        ("qwen3", True, "bf16", LAYOUTS, cover(LAYOUTS, **by_layout(LAYOUTS))),
        ("qwen3_moe", False, "bf16", EXPERTS, cover(EXPERTS, **by_layout(EXPERTS))),
        pytest.param("qwen3", True, "bf16", LAYOUTS, [*LAYOUTS], marks=FULL),
        pytest.param("qwen3_moe", False, "bf16", EXPERTS, [*EXPERTS], marks=FULL),
        pytest.param("qwen2", False, "fp32", LAYOUTS, [*LAYOUTS], marks=FULL),
    ],
    ids=["qwen3-sample", "qwen3_moe-sample", "qwen3", "qwen3_moe", "qwen2"],
)
def test_every_layout_loads_every_other(
    ranks: Ranks,
    tmp_path: Path,
    family: str,
    tied: bool,
    dtype: str,
    layouts: dict[str, tuple[int, dict[str, Any]]],
    names: list[str],
) -> None:
    path = str(write_model(tmp_path / "model", family, tied=tied, **SHAPE))
    truth = str(tmp_path / "truth.npz")
    (tensors,) = ranks.run(
        "reshard_jobs:origin", 1, path=path, root=str(tmp_path / "origin"), dtype=dtype
    )
    assert {key.split("/")[0] for key in tensors} == {"model", "exp_avg", "exp_avg_sq"} | (
        {"master"} if dtype == "bf16" else set()
    )
    np.savez(truth, **tensors)
    common = {"path": path, "truth": truth, "dtype": dtype}
    saved = {name: str(tmp_path / name) for name in names}
    for name in names:
        world, sizes = layouts[name]
        ranks.run(
            "reshard_jobs:through",
            world,
            source=str(tmp_path / "origin"),
            target=saved[name],
            **common,
            **sizes,
        )
    for name in names:
        world, sizes = layouts[name]
        compared = ranks.run(
            "reshard_jobs:load_all", world, sources=list(saved.values()), **common, **sizes
        )
        assert sum(compared) >= len(saved) * sum(value.size for value in tensors.values())
