"""HF -> Megatron -> HF, byte for byte, in every layout of the four families: as facts in one
process, and on real ranks.
"""

import itertools
from pathlib import Path

import pytest
from grids import cover

from rft.config import ConfigError, MegatronConfig
from rft.config.layout import check_layout
from rft.ground.names import read_hf_config

from ranks import Ranks

SIZES = {
    "tp": (1, 2, 4),
    "pp": (1, 2),
    "vpp": (1, 2),
    "ep": (1, 2),
    "etp": (None, 1),
    "spec": (0, 1),
}
SINGLE = {"llama": "llama", "qwen2": "qwen2-one-file", "qwen3": "qwen3", "moe": "moe"}


def legal(path: Path) -> list[tuple[int, ...]]:
    hf = read_hf_config(path)
    found = {}
    for tp, pp, vpp, ep, etp, spec in itertools.product(*SIZES.values()):
        sizes = MegatronConfig(tp, pp, 1, True, vpp if vpp > 1 else None, ep, etp)
        try:
            check_layout(hf, sizes, tp * pp * ep)
        except ConfigError:
            continue
        found[tp, pp, vpp, ep, etp or tp, spec] = None
    return list(found)


def some(layouts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Every pair of sizes that is legal, once."""
    places = range(len(layouts[0]))
    return cover(layouts, lambda layout: dict(enumerate(layout)), places)


WHOLE = pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.verify)], ids=["pairs", "all"]
)


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 18), ("qwen2", 18), ("qwen3", 18), ("moe", 48)]
)
@WHOLE
def test_every_layout_keeps_every_byte(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, count: int, whole: bool
) -> None:
    """Among them: fewer key/value heads (2) than shards (4), tied embeddings on two stages, a
    padded vocabulary (91).
    """
    path = checkpoints[SINGLE[family]]
    layouts = legal(path)
    assert len(layouts) == count
    layouts = layouts if whole else some(layouts)
    assert ranks.run("layouts_jobs:round_trip", 1, path=str(path), layouts=layouts)[0] == []


@WHOLE
@pytest.mark.parametrize("family", SINGLE)
def test_copies_of_a_shard_share_what_is_sent(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, whole: bool
) -> None:
    """Two and three of each rank, as data or context parallelism makes them, and fewer copies of
    experts than of the rest.
    """
    path = checkpoints[SINGLE[family]]
    layouts = [(*layout, times) for layout in legal(path) if layout[-1] == 0 for times in (1, 2, 3)]
    layouts = layouts if whole else some(layouts)
    assert ranks.run("layouts_jobs:dealt", 1, path=str(path), layouts=layouts)[0] == []


@pytest.mark.parametrize(
    ("family", "world", "sizes"),
    [
        ("llama", 1, {}),
        ("qwen2", 4, {"tp": 2, "pp": 2, "vpp": 2}),
        pytest.param("qwen3", 8, {"tp": 4, "pp": 2, "sp": True}, marks=pytest.mark.verify),
        pytest.param(
            "moe",
            8,
            {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "sp": True},
            marks=pytest.mark.verify,
        ),
        ("moe", 4, {"tp": 2, "ep": 4, "etp": 1, "sp": True}),
    ],
)
def test_ranks_hold_what_the_equations_say(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, world: int, sizes: dict[str, int]
) -> None:
    assert (
        ranks.run("layouts_jobs:real", world, path=str(checkpoints[family]), **sizes)
        == [[]] * world
    )
