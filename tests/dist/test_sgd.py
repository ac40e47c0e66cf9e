"""Plain SGD in megatron's distributed optimizer: by hand, on
every mesh, and without state to save.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import by_layout, sampled
from test_parity import gradients, hf_weights

from ranks import Ranks

SGD = {"optimizer_type": "sgd", "weight_decay": 0.1}
LR = 0.05
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "sp": True}),
    "cp2": (2, {"cp": 2}),
}


def test_one_step_is_minus_lr_times_the_gradient(
    ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    path = str(checkpoints["qwen3"])
    found = ranks.run("jobs:train", 1, path=path, lr=LR, optimizer=SGD)[0]
    by_adam = gradients(ranks.run("jobs:train", 1, path=path))
    for name, before in hf_weights(checkpoints["qwen3"]).items():
        decay = 0.1 if before.ndim > 1 else 0.0  # megatron decays matrices only
        wanted = before.numpy() - LR * (by_adam[name] + decay * before.numpy())
        assert np.abs(found["weights"][name] - wanted).max() < 1e-6, name
    clip = 1e-2  # row I12: the whole step is as long as the clipped gradient
    plain = SGD | {"weight_decay": 0.0}
    short = ranks.run("jobs:train", 1, path=path, lr=LR, optimizer=plain, clip=clip)[0]["weights"]
    start = hf_weights(checkpoints["qwen3"])
    moved = sum(np.sum((value - start[name].numpy()) ** 2.0) for name, value in short.items())
    assert np.sqrt(moved) == pytest.approx(LR * clip, rel=1e-3)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, **by_layout(LAYOUTS)))
def test_three_steps_are_the_same_on_every_mesh(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str
) -> None:
    """Unlike Adam's, whose first steps turn the noise of a gradient near 0 into a whole step."""
    path, world = str(checkpoints["qwen3"]), LAYOUTS[layout][0]
    wanted = ranks.run("jobs:train", 1, path=path, lr=LR, steps=3, optimizer=SGD)[0]["weights"]
    found = ranks.run(
        "jobs:train", world, path=path, lr=LR, steps=3, optimizer=SGD, **LAYOUTS[layout][1]
    )[0]["weights"]
    start = hf_weights(checkpoints["qwen3"])
    for name, value in wanted.items():
        moved = np.linalg.norm(value - start[name].numpy())
        assert moved > 0 and np.linalg.norm(found[name] - value) < 1e-3 * moved, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_there_is_nothing_to_save_but_weights(
    ranks: Ranks, checkpoints: dict[str, Path], dtype: str
) -> None:
    path = str(checkpoints["llama"])
    claims = [
        c
        for rank in ranks.run("jobs:state", 2, path=path, optimizer=SGD, dtype=dtype)
        for c, _ in rank
    ]
    kinds = {claim.key.split("/")[0] for claim in claims}
    assert kinds == ({"model"} if dtype == "fp32" else {"model", "master"})
