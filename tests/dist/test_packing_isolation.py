"""What a sequence is packed with changes nothing about it:
through the whole model, on real ranks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import by_layout, sampled

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


@pytest.mark.parametrize("layout", sampled(LAYOUTS, **by_layout(LAYOUTS)))
def test_logprobs_do_not_depend_on_the_company(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str
) -> None:
    """Random neighbours, before and after; an unseen position,
    mask or key of theirs would show by far.
    """
    world, sizes = LAYOUTS[layout]
    found = ranks.run(
        "packing_jobs:in_company",
        world,
        path=str(checkpoints["qwen3"]),
        seed=world,
        count=COMPANIES,
        **sizes,
    )[-1]
    assert len(found) == COMPANIES + 1 and len(found[0]) > 30
    for other in found[1:]:
        assert np.abs(other - found[0]).max() < 1e-5


@pytest.mark.parametrize("layout", ["alone", "cp2", "tp2-sp"])
def test_neighbours_without_weight_add_no_gradient(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    found: list[Any] = ranks.run(
        "packing_jobs:gradient_of_one",
        world,
        path=str(checkpoints["qwen3"]),
        seed=world,
        count=3,
        **sizes,
    )[0]
    loss, norm = found[0]
    assert norm > 0
    for other_loss, other_norm in found[1:]:
        assert other_loss == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(
            norm, rel=1e-5
        )


@pytest.mark.parametrize("layout", ["alone", "tp2-sp"])
def test_long_answers_behind_a_shared_prompt_are_as_alone(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str
) -> None:
    """In blocks, each with the keys that its queries may see."""
    world, sizes = LAYOUTS[layout]
    (shared, norm), (unrolled, other_norm) = (
        ranks.run(
            "packing_jobs:behind_prefixes",
            world,
            path=str(checkpoints["qwen3"]),
            share=share,
            **sizes,
        )[0]
        for share in (True, False)
    )
    for one, other in zip(shared, unrolled, strict=True):
        assert np.abs(one - other).max() < 1e-5
    assert norm == pytest.approx(other_norm, rel=1e-5)


EMPTY = {  # name: world, layout, lengths of the rows, budget
    "cp4-short": (4, {"cp": 4}, [2, 3, 2], 64),  # eight chunks of one token: some hold only padding
    "dp2-pp2": (4, {"pp": 2}, [30], 64),
    "dp2-cp2": (4, {"cp": 2}, [40], 64),
    "dp2-tp2-sp": (4, {"tp": 2, "sp": True}, [40], 64),
    # two microbatches each, three of them padding
    "dp4-too-long": (4, {}, [60, 60, 60, 60, 60], 32),
}


@pytest.mark.parametrize("case", EMPTY)
def test_ranks_without_a_real_token_take_part_and_add_nothing(
    ranks: Ranks, checkpoints: dict[str, Path], case: str
) -> None:
    world, sizes, lengths, budget = EMPTY[case]
    arguments = {"path": str(checkpoints["qwen3"]), "lengths": lengths, "max_tokens": budget}
    alone = ranks.run("packing_jobs:step", 1, **arguments)[0]
    found = ranks.run("packing_jobs:step", world, **arguments, **sizes)
    assert min(result["held"] for result in found) == 0 or (
        found[0]["micros"],
        alone["micros"],
    ) == (2, 5)
    assert alone["grad_norm"] > 0
    for result in found:
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert result["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)
