"""Which cases of a grid `make test` runs; the others are marked `verify`, so that no grid is
written down twice.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import combinations
from typing import Any

import pytest

MOST = 4  # ranks that `make test` starts

Layouts = dict[str, tuple[int, dict[str, Any]]]  # name: world size, sizes that are not 1
Axes = dict[str, Any]


def cover(
    cases: Iterable[Any], axes: Callable[[Any], Axes], interact: Collection[str] = (), cost: Any = 1
) -> list[Any]:
    """As few cases as show every value of every axis, and of the axes that `interact` every pair of
    values that there is.

    Greedy, the earlier case first: the case that shows most of what none has shown yet, or most for
    its cost, whichever ends cheaper. `cost`: of each case alike, or a function of it.
    """
    cases = list(cases)
    shown = [_shows(axes(case), interact) for case in cases]
    costs = [cost(case) if callable(cost) else cost for case in cases]
    covers = [_greedy(shown, weights) for weights in ([1] * len(cases), costs)]
    cheapest = min(covers, key=lambda taken: sum(costs[number] for number in taken))
    return [cases[number] for number in sorted(cheapest)]


def sampled(cases: Iterable[Any], *how: Any, **more: Any) -> list[Any]:
    """All cases as pytest parameters: those of their `cover` bare, the others marked `verify`."""
    cases = list(cases)
    taken = cover(cases, *how, **more)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in taken else pytest.mark.verify,
            id="-".join(map(str, case)) if isinstance(case, tuple) else str(case),
        )
        for case in cases
    ]


def by_layout(layouts: Layouts, more: Callable[[Any], Axes] = lambda case: {}) -> dict[str, Any]:
    """How to `cover` names of layouts, or tuples with one in second place: data parallelism is an
    axis too. `more`: the axes of the rest of a case. What wants more than `MOST` ranks shows
    nothing.
    """

    def of(case: Any) -> tuple[int, dict[str, Any]]:
        return layouts[case[1] if isinstance(case, tuple) else case]

    def axes(case: Any) -> Axes:
        world, sizes = of(case)
        if world > MOST:
            return {}
        dp = world // (sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1))
        own = {"dp": dp} if dp > 1 else {"world": 1} if world == 1 else {}
        return sizes | own | more(case)

    return {"axes": axes, "cost": lambda case: of(case)[0]}


def _greedy(shown: list[set[Any]], weights: list[int]) -> list[int]:
    missing, taken = set().union(*shown), []
    while missing:
        best = max(range(len(shown)), key=lambda n: len(shown[n] & missing) / weights[n])
        taken.append(best)
        missing -= shown[best]
    return taken


def _shows(axes: Axes, interact: Collection[str]) -> set[Any]:
    values = set(axes.items())
    pairs = combinations([(name, value) for name, value in values if name in interact], 2)
    return values | {frozenset(pair) for pair in pairs}
