"""The tests of rft's own layers, again over the stand-in for Transformer Engine, with both versions
of megatron-core that are supported; and checkpoints that go from one kind of layers to the other.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_parity
from grids import by_layout, cover
from test_parity import (  # noqa: F401
    INTERACT,
    LAYOUTS,
    MATRIX,
    alone,
    axes_of_matrix,
    reference,
    test_gradient_is_that_of_the_weighted_sum,
    test_import_export_and_blocks_keep_every_byte,
    test_logprobs_are_those_of_transformers,
    test_logprobs_do_not_depend_on_the_mesh,
    test_pieces_cover_the_model_once_and_copies_are_equal,
)

from ranks import Ranks

pytestmark = pytest.mark.verify


# gloo gathers parts of one size only; experts that are cut, too, have tokens of unequal numbers
GATHERED = [case for case in MATRIX if LAYOUTS[case[1]] != LAYOUTS["tp2-ep2"]]


@pytest.mark.parametrize(
    ("family", "layout", "variant"),
    cover(GATHERED, **by_layout(LAYOUTS, axes_of_matrix), interact=INTERACT),
)
def test_layouts_give_the_same_gradient_and_the_same_steps(
    ranks: Ranks,
    checkpoints: dict[str, Path],
    reference: dict[str, dict[str, Any]],  # noqa: F811
    family: str,
    layout: str,
    variant: str,
) -> None:
    body = test_parity.test_every_layout_gives_the_same_gradient_and_the_same_steps
    body(ranks, checkpoints, reference, family, layout, variant)


@pytest.fixture(scope="module")
def own() -> Iterator[Ranks]:
    """Ranks with rft's own layers, on a CPU."""
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.mark.parametrize(
    ("family", "there", "back"),
    [
        ("qwen3", {"tp": 2, "sp": True}, {"pp": 2}),
        ("moe", {"ep": 2}, {"tp": 2, "ep": 2, "etp": 1, "sp": True}),
    ],
)
def test_a_checkpoint_goes_from_layers_to_layers(
    ranks: Ranks,
    own: Ranks,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    family: str,
    there: dict[str, Any],
    back: dict[str, Any],
) -> None:
    """Weights and both moments, every bit: saved by rft's own layers, loaded and saved by
    Transformer Engine's in another layout, and loaded by rft's own in a third.
    """
    path, truth = str(checkpoints[family]), str(tmp_path / "truth.npz")
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    (tensors,) = own.run("reshard_jobs:origin", 1, path=path, root=first, dtype="bf16")
    np.savez(truth, **tensors)
    size = sum(value.size for value in tensors.values())
    common = {"path": path, "truth": truth, "dtype": "bf16"}
    moved = {"source": first, "target": second} | common | there
    assert sum(ranks.run("reshard_jobs:through", 2, **moved)) >= size
    found = own.run("reshard_jobs:load_all", 2, sources=[second], **common, **back)
    assert sum(found) >= size
