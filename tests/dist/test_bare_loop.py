"""The bare megatron-core loop that `bench.train_step` measures
against does the same work as the policy.
"""

from pathlib import Path
from typing import Any

import pytest

from bench.train_step_rows import ROWS_OF_EMBEDDING
from rft.tools.toy import write_model

from ranks import Ranks


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sp": True}], ids=["alone", "tp2-sp"])
def test_both_sides_give_the_same_steps(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """The second and third show that clipping and update are the same too: the weights that they
    see are the result.
    """
    path = write_model(tmp_path / "model", hidden=48, layers=2, ffn=64, vocab=ROWS_OF_EMBEDDING)
    steps = ranks.run(
        "bare_jobs:compare", layout.get("tp", 1), path=str(path), clip=0.1, lr=1e-2, **layout
    )[0]
    for found in steps:
        assert found["microbatches"] > 1
        for what in ("loss", "grad_norm"):
            ours, theirs = found[what]
            assert ours == pytest.approx(theirs, rel=1e-3), what
    assert steps[0]["grad_norm"][0] != pytest.approx(steps[1]["grad_norm"][0], rel=1e-2)
