"""The cases of a grid of ranks that `make test` runs show all of its values, and what they cost."""

from itertools import combinations, product
from typing import Any

from tests.dist.grids import by_layout, cover, sampled

AXES = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True)}
GRID = list(product(*AXES.values()))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "dp2": (2, {}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp8": (8, {"cp": 8}),
}


def named(case: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(AXES, case, strict=True))


def pairs_of(cases: list[Any], *axes: str) -> set[Any]:
    shown = [[(name, named(case)[name]) for name in axes] for case in cases]
    return {pair for case in shown for pair in combinations(case, 2)}


def test_every_value_is_seen() -> None:
    assert len(cover(GRID, named)) == 3
    assert [set(values) for values in zip(*cover(GRID, named), strict=True)] == [
        set(values) for values in AXES.values()
    ]


def test_every_pair_of_axes_that_interact_is_seen() -> None:
    some = cover(GRID, named, ["a", "b"])
    assert pairs_of(some, "a", "b") == pairs_of(GRID, "a", "b") and len(some) == 6
    every = cover(GRID, named, AXES)
    assert pairs_of(every, *AXES) == pairs_of(GRID, *AXES) and 6 <= len(every) < len(GRID)


def test_the_cheaper_of_two_covers_is_taken() -> None:
    layouts = {name: LAYOUTS[name] for name in ("tp2", "tp2-pp2", "pp2")}
    assert cover(layouts, **by_layout(layouts)) == ["tp2-pp2"]
    dear = layouts | {"tp2-pp2": (8, {"tp": 2, "pp": 2})}
    assert cover(dear, lambda name: dear[name][1], cost=lambda name: dear[name][0]) == [
        "tp2",
        "pp2",
    ]


def test_data_parallelism_and_a_single_rank_are_seen_and_too_many_ranks_are_not_started() -> None:
    assert cover(LAYOUTS, **by_layout(LAYOUTS)) == ["one", "dp2", "tp2-pp2"]


def test_the_rest_is_marked_verify_and_nothing_is_left_out() -> None:
    found = sampled(GRID, named)
    assert [param.values for param in found] == GRID
    bare = [param.values for param in found if not param.marks]
    assert bare == cover(GRID, named)
    marked = [mark.name for param in found for mark in param.marks]
    assert marked == ["verify"] * (len(GRID) - len(bare))
