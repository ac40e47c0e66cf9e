"""A loss, a correction or an advantage of whole responses does not depend on how responses are cut
over ranks and microbatches.
"""

from pathlib import Path
from typing import Any

import pytest
from grids import by_layout, sampled
from response_jobs import ADVANTAGES, LOSSES
from test_parity import assert_gradients_match, gradients

from ranks import Ranks

CASES = {
    "padded": (1, {"cut": "rows-padded"}),
    "cp2": (2, {"cp": 2}),
    "cp2-padded": (2, {"cp": 2, "cut": "tokens-padded"}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2, "sp": True}),
}


@pytest.fixture(scope="module")
def alone(ranks: Ranks, checkpoints: dict[str, Path]) -> dict[str, Any]:
    return ranks.run("response_jobs:steps", 1, path=str(checkpoints["qwen3"]))[0]


@pytest.mark.parametrize("case", sampled(CASES, **by_layout(CASES)))
def test_sums_over_a_response_are_those_of_one_rank(
    ranks: Ranks, checkpoints: dict[str, Path], alone: dict[str, Any], case: str
) -> None:
    world, layout = CASES[case]
    results = ranks.run("response_jobs:steps", world, path=str(checkpoints["qwen3"]), **layout)
    for name in LOSSES:
        found = [result[name] for result in results]
        for metric, value in found[0]["metrics"][0].items():
            assert value == pytest.approx(alone[name]["metrics"][0][metric], rel=1e-4, abs=1e-6), (
                f"{name}: {metric}"
            )
        assert_gradients_match(gradients(found), gradients([alone[name]]))
    for name in ADVANTAGES:
        values = {key: value for result in results for key, value in result[name]["values"].items()}
        assert values == pytest.approx(alone[name]["values"], abs=1e-4), name
        for result in results:
            assert result[name]["moments"] == pytest.approx(
                alone[name]["moments"], rel=1e-4, abs=1e-6
            ), name


def test_what_is_compared_has_both_sides(alone: dict[str, Any]) -> None:
    """Some responses are masked, some weighed, some tokens clipped, and not all."""
    said = {name: alone[name]["metrics"][0] for name in LOSSES}
    assert 0 < said["masked"]["sequence_masked_frac"] < 0.9 and 0 < said["gspo"]["clip_frac"] < 1
    assert 0 < said["corrected"]["importance/left_out_frac"] < 1
    assert 0 < said["outliers"]["importance/left_out_frac"] < 1
    assert any(alone["clipb"]["values"].values()) and 0.0 in alone["clipb"]["values"].values()
