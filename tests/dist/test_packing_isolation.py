"""What a sequence is packed with changes nothing about it: through the whole model, on real ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks import Ranks

LAYOUTS = {
    "alone": (1, {}),
    "cp2": (2, {"cp": 2}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2, "sp": True}),
    "cp4": (4, {"cp": 4}),
}
COMPANIES = 12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_do_not_depend_on_the_company(ranks: Ranks, checkpoints: dict[str, Path], layout: str) -> None:
    """Random neighbours, before and after; an unseen position, mask or key of theirs would show by far."""
    world, sizes = LAYOUTS[layout]
    found = ranks.run(
        "packing_jobs:in_company", world, path=str(checkpoints["qwen3"]), seed=world, count=COMPANIES, **sizes
    )[-1]
    assert len(found) == COMPANIES + 1 and len(found[0]) > 30
    for other in found[1:]:
        assert np.abs(other - found[0]).max() < 1e-5


@pytest.mark.parametrize("layout", ["alone", "cp2", "tp2-sp"])
def test_neighbours_without_weight_add_no_gradient(ranks: Ranks, checkpoints: dict[str, Path], layout: str) -> None:
    world, sizes = LAYOUTS[layout]
    found: list[Any] = ranks.run(
        "packing_jobs:gradient_of_one", world, path=str(checkpoints["qwen3"]), seed=world, count=3, **sizes
    )[0]
    loss, norm = found[0]
    assert norm > 0
    for other_loss, other_norm in found[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-5)
