"""Recomputed activations and overlapped reduction change the time and the memory of a step, not one
bit of its gradient.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import by_layout, sampled
from test_parity import LAYOUTS, gradients

from ranks import Ranks

FULL = {"recompute_granularity": "full"}
KINDS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "block": FULL | {"recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
CASES = [
    ("qwen3", layout, kind)
    for layout in ("tp2-sp", "pp2")
    for kind in ("full", "block", "core_attn", "mlp")
]
CASES += [("qwen3", "pp2-vpp2", "full"), ("moe", "ep2", "full"), ("moe", "ep2", "moe")]


@pytest.fixture(scope="module")
def plain(ranks: Ranks, checkpoints: dict[str, Path]) -> Any:
    """Gradients without recompute, by family and layout."""
    found: dict[tuple[str, str], Any] = {}

    def of(family: str, layout: str) -> Any:
        if (family, layout) not in found:
            world, sizes = LAYOUTS[layout]
            found[family, layout] = gradients(
                ranks.run("jobs:train", world, path=str(checkpoints[family]), **sizes)
            )
        return found[family, layout]

    return of


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("family", "layout", "kind"),
    sampled(CASES, **by_layout(LAYOUTS, lambda case: {"family": case[0], "kind": case[2]})),
)
def test_recompute_gives_the_same_gradient(
    ranks: Ranks, checkpoints: dict[str, Path], plain: Any, family: str, layout: str, kind: str
) -> None:
    world, sizes = LAYOUTS[layout]
    results = ranks.run(
        "jobs:train", world, path=str(checkpoints[family]), trainer=KINDS[kind], **sizes
    )
    assert_equal(gradients(results), plain(family, layout))


def test_recompute_is_what_megatron_was_told(ranks: Ranks, checkpoints: dict[str, Path]) -> None:
    """A key that reached nobody would pass the tests above."""
    path = str(checkpoints["qwen3"])
    assert ranks.run("jobs:forwards", 1, path=path)[0] == 1
    assert ranks.run("jobs:forwards", 1, path=path, trainer=FULL)[0] == 2
    assert ranks.run("jobs:forwards", 1, path=path, trainer=KINDS["core_attn"])[0] == 2
    assert ranks.run("jobs:forwards", 1, path=path, trainer=KINDS["mlp"])[0] == 1


@pytest.mark.parametrize("layout", ["dp2", "dp2-pp2"])
def test_overlapped_reduction_gives_the_same_gradient(
    ranks: Ranks, checkpoints: dict[str, Path], plain: Any, layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    flags = {"override_ddp_config": {"overlap_grad_reduce": True, "bucket_size": 20000}}
    built = ranks.run("jobs:ddp_config", 1, path=str(checkpoints["qwen3"]), megatron=flags)[0]
    assert (
        built["overlap_grad_reduce"]
        and built["bucket_size"] == 20000
        and built["grad_reduce_in_fp32"]
    )
    results = ranks.run(
        "jobs:train", world, path=str(checkpoints["qwen3"]), megatron=flags, **sizes
    )
    assert_equal(gradients(results), plain("qwen3", layout))


def test_a_step_takes_back_the_memory_of_its_gradients(
    ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    def run(**more: Any) -> dict[str, Any]:
        return ranks.run("jobs:train", 1, path=str(checkpoints["qwen3"]), steps=2, **more)[0]

    kept, given = run(), run(gives_back=True)
    assert kept["metrics"] == given["metrics"]
    assert_equal(gradients([given]), gradients([kept]))
