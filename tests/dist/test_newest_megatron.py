"""The newest megatron-core, in front of the path of fresh rank processes: one step on every kind of
mesh is that of one rank.

Its wheel is built for Python 3.12; what is used of it is plain Python and runs on 3.11. `make test`
fetches it, as pinned in requirements/newest-megatron.txt.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grids import by_layout, sampled
from test_parity import LAYOUTS, assert_gradients_match, gradients

from ranks import Ranks

ROOT = Path(__file__).parents[2]
NEWEST = Path(sys.prefix) / "newest-megatron"
PINNED = ROOT / "requirements" / "newest-megatron.txt"


def newest_megatron() -> Path:
    if not NEWEST.exists():
        pytest.skip(f"{NEWEST} is missing; `make test` fetches it")
    return NEWEST


@pytest.fixture(scope="module")
def newest() -> Iterator[Ranks]:
    pool = Ranks(newest_megatron())
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def alone(newest: Ranks, checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """One step at one rank, per family."""
    return {
        name: newest.run("jobs:train", 1, path=str(checkpoints[name]))[0]
        for name in ("qwen3-untied", "moe")
    }


def test_it_is_the_pinned_one(newest: Ranks) -> None:
    pinned = re.search(r"^megatron-core==(\S+)", PINNED.read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned
    version, file = newest.run("jobs:megatron", 1)[0]
    assert version.split("+")[0] == pinned[1] and file.startswith(str(NEWEST))


@pytest.mark.parametrize(
    ("family", "layout"),
    sampled(
        [("qwen3-untied", layout) for layout in ("tp2-sp", "pp2", "cp2", "pp2-vpp2")]
        + [("moe", "ep2")],
        **by_layout(LAYOUTS),
    ),
)
def test_one_step_is_that_of_one_rank(
    newest: Ranks, checkpoints: dict[str, Path], alone: dict[str, Any], family: str, layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    results = newest.run("jobs:train", world, path=str(checkpoints[family]), **sizes)
    assert_same_step(results, alone[family])


@pytest.mark.parametrize("family", ["qwen3-untied", "moe"])
def test_one_rank_steps_as_with_the_oldest(
    ranks: Ranks, checkpoints: dict[str, Path], alone: dict[str, Any], family: str
) -> None:
    """The parity tests tie the oldest to transformers; this ties the newest to the oldest."""
    assert_same_step([alone[family]], ranks.run("jobs:train", 1, path=str(checkpoints[family]))[0])


def assert_same_step(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for name, value in wanted["metrics"][0].items():
        assert found[0]["metrics"][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert_gradients_match(gradients(found), gradients([wanted]))
