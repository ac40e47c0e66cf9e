"""What every benchmark ends with: a table, then one last line of JSON (see section 11 of the
design).

In: measured numbers. Out: text on stdout; `last_line` alone decides how the line looks.
"""

import importlib.metadata
import json
import statistics
from collections.abc import Sequence
from typing import Any


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the neighbours; of ten values, p95 lies just below the largest."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The middle half."""
    return quantile(values, 0.25), quantile(values, 0.75)


def versions(*packages: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """First column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip(), flush=True)


def last_line(
    bench: str,
    ratios: dict[str, Any],
    counts: dict[str, Any],
    config: dict[str, Any],
    baseline_versions: dict[str, str],
    meets: bool,
) -> None:
    """`ratios`: a number per claim, None where it could not be taken.

    Always the last thing that a benchmark prints.
    """
    found = {
        "bench": bench,
        "ratios": ratios,
        "counts": counts,
        "config": config,
        "baseline_versions": baseline_versions,
        "meets": meets,
    }
    print(json.dumps(found), flush=True)
