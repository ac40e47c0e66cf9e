"""How little of a packed step is padding, and how equally its cost is spread: ours beside padded
batches of the same rows.

    python -m bench.packing [--quick]

In: nothing; lengths are drawn anew in every round. Out: a table per layout and model, and one last
line of JSON. Each round hands the same rows to every way of cutting a step; ours are the
microbatches of `rft.data.packing` as the pipeline gets them: sliced for context parallelism, padded
for sequence parallelism and, with pipeline stages, to the longest of the rank.

    real/padded   tokens of the rows / tokens that are computed, over all ranks
    DP cost       of a rank: linear * computed tokens + attention * (computed length)^2 of each row;
                  max/mean over ranks
    lockstep      sum over i of the dearest i-th microbatch / mean rank cost: where ranks meet in
                  every microbatch (experts)
    ms            of the way itself; ours also builds, slices and pads all arrays, the others only
                  count

    padded          as the rows come, as many as fit padded to their longest; microbatches dealt out
                    in turn
    padded, sorted  the same after sorting by length: the least padding that padded batches can have
    packed, dealt   packed without a look at cost: as the rows come, as many as fit; microbatches
                    dealt out in turn
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import report
from rft.data.context_parallel import slice_cp
from rft.data.packing import Cost, Packed, Row, pack

ROUNDS, QUICK_ROUNDS = 30, 10
ROWS, DP, MAX_TOKENS = 512, 4, 16384
MEDIAN, SIGMA, LONGEST = 400, 1.0, 8192
BARS = {"real/padded": 0.97, "dp_cost_max/mean": 1.05}
MODELS = {
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
}


@dataclass(frozen=True)
class Layout:
    pp: int = 1
    cp: int = 1
    multiple: int = 1

    @property
    def name(self) -> str:
        return f"pp{self.pp} cp{self.cp} tp{self.multiple}"


LAYOUTS = (Layout(), Layout(multiple=8), Layout(pp=2), Layout(cp=2), Layout(pp=2, cp=4, multiple=8))
Cell = tuple[float, float]  # computed tokens and cost of one microbatch
Cut = list[list[Cell]]  # [rank][microbatch]


def draw(seed: int) -> list[int]:
    found = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, ROWS)
    return [int(n) for n in np.clip(found, 1, LONGEST)]


def rows_of(lengths: list[int]) -> list[Row]:
    tokens, trained = np.zeros(LONGEST, dtype=np.int32), np.ones(LONGEST, dtype=bool)
    zeros = np.zeros(LONGEST, dtype=np.float32)
    return [Row(tokens[:n], trained[:n], *(zeros[:n] for _ in range(3))) for n in lengths]


def ours(lengths: list[int], cost: Cost, layout: Layout) -> Cut:
    parts = pack(rows_of(lengths), DP, MAX_TOKENS, layout.multiple, cost)
    seen = sorted(int(row) for part in parts for packed in part for row in packed.rows)
    assert seen == list(range(len(lengths))), "a row is missing or there twice"
    assert len({len(part) for part in parts}) == 1, "ranks differ in microbatches"
    assert all(packed.length <= MAX_TOKENS for part in parts for packed in part), "over the budget"
    return [computed(part, cost, layout) for part in parts]


def computed(part: list[Packed], cost: Cost, layout: Layout) -> list[Cell]:
    """What one rank computes, all context-parallel ranks together: they hold equally much."""
    sliced = [slice_cp(packed, 0, layout.cp, layout.multiple) for packed in part]
    if layout.pp > 1:
        longest = max(packed.length for packed in sliced)
        sliced = [slice_cp(packed, 0, 1, layout.multiple, longest) for packed in sliced]
    lengths = [np.diff(packed.cu_seqlens).astype(np.float64) * layout.cp for packed in sliced]
    return [
        cell(packed.length * layout.cp, n, cost) for packed, n in zip(sliced, lengths, strict=True)
    ]


def cell(tokens: float, lengths: np.ndarray, cost: Cost) -> Cell:
    return float(tokens), cost.linear * tokens + cost.attention * float((lengths**2).sum())


def padded(lengths: list[int], cost: Cost, _layout: Layout) -> Cut:
    """Greedy: a row joins unless the padded microbatch would outgrow the budget."""
    batches: list[list[int]] = [[]]
    for n in lengths:
        if (len(batches[-1]) + 1) * max([n, *batches[-1]]) > MAX_TOKENS:
            batches.append([])
        batches[-1].append(n)
    return dealt([cell(len(b) * max(b), np.full(len(b), float(max(b))), cost) for b in batches])


def padded_sorted(lengths: list[int], cost: Cost, layout: Layout) -> Cut:
    return padded(sorted(lengths), cost, layout)


def packed_dealt(lengths: list[int], cost: Cost, layout: Layout) -> Cut:
    batches: list[list[int]] = [[]]
    for n in lengths:
        if sum(batches[-1]) + n > MAX_TOKENS:
            batches.append([])
        batches[-1].append(n)
    return dealt(
        [cell(sum(b), np.array(b, dtype=np.float64), cost) for b in batches], pipeline=layout.pp > 1
    )


def dealt(cells: list[Cell], pipeline: bool = False) -> Cut:
    """In turn; ranks that are dealt one fewer compute nothing then.

    Pipeline stages pad to the longest, as ours do.
    """
    cut = [cells[rank::DP] for rank in range(DP)]
    longest = [max(tokens for tokens, _ in part) if pipeline else 0.0 for part in cut]
    return [
        [(max(tokens, top), value) for tokens, value in part]
        for part, top in zip(cut, longest, strict=True)
    ]


WAYS: dict[str, Callable[[list[int], Cost, Layout], Cut]] = {
    "padded": padded,
    "padded, sorted": padded_sorted,
    "packed, dealt": packed_dealt,
    "rft": ours,
}


def measure(way: str, lengths: list[int], cost: Cost, layout: Layout) -> dict[str, float]:
    start = time.perf_counter()
    cut = WAYS[way](lengths, cost, layout)
    took = time.perf_counter() - start
    ranks = [sum(value for _, value in part) for part in cut]
    mean = sum(ranks) / DP
    deepest = max(len(part) for part in cut)
    lockstep = sum(max(part[i][1] for part in cut if i < len(part)) for i in range(deepest))
    return {
        "real/padded": sum(lengths) / sum(tokens for part in cut for tokens, _ in part),
        "dp_cost_max/mean": max(ranks) / mean,
        "lockstep": lockstep / mean,
        "dearest": max(ranks),
        "microbatches": float(deepest),
        "ms": took * 1e3,
    }


def compare(model: str, layout: Layout, rounds: int) -> dict[str, Any]:
    """All ways on the same rows, round by round; the table, and what the bars look at."""
    cost = Cost.of(MODELS[model])
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(rounds):
        lengths = draw(seed)
        for way in WAYS:
            found[way].append(measure(way, lengths, cost, layout))

    def column(way: str, what: str) -> list[float]:
        return [one[what] for one in found[way]]

    table = []
    for way in WAYS:
        share, spread, lock = (
            column(way, what) for what in ("real/padded", "dp_cost_max/mean", "lockstep")
        )
        against = [
            a / b for a, b in zip(column(way, "dearest"), column("padded", "dearest"), strict=True)
        ]
        table.append(
            [
                way,
                f"{report.median(share):.4f}",
                f"{min(share):.4f}",
                f"{report.median(spread):.4f}",
                f"{max(spread):.4f}",
                f"{report.median(lock):.3f}",
                f"{report.median(against):.3f}",
                f"{report.median(column(way, 'microbatches')):.0f}",
                f"{report.median(column(way, 'ms')):.1f}",
            ]
        )
    header = [
        "",
        "real/padded",
        "worst",
        "DP cost",
        "worst",
        "lockstep",
        "dearest / padded",
        "microbatches",
        "ms",
    ]
    report.table(f"{model} {layout.name}, {rounds} rounds", header, table)
    return {
        "real/padded": [
            report.median(column("rft", "real/padded")),
            min(column("rft", "real/padded")),
        ],
        "dp_cost_max/mean": [
            report.median(column("rft", "dp_cost_max/mean")),
            max(column("rft", "dp_cost_max/mean")),
        ],
        "padded_real/padded": report.median(column("padded", "real/padded")),
        "padded_dp_cost_max/mean": report.median(column("padded", "dp_cost_max/mean")),
        "dearest/padded_dearest": report.median(
            [
                a / b
                for a, b in zip(column("rft", "dearest"), column("padded", "dearest"), strict=True)
            ]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}"
    )
    rounds = QUICK_ROUNDS if parser.parse_args().quick else ROUNDS
    ratios = {
        f"{model} {layout.name}": compare(model, layout, rounds)
        for model in MODELS
        for layout in LAYOUTS
    }
    print(
        "lists in the last line: median and worst; every layout and model must reach both bars in "
        "its worst round"
    )
    meets = all(
        found["real/padded"][1] >= BARS["real/padded"]
        and found["dp_cost_max/mean"][1] <= BARS["dp_cost_max/mean"]
        for found in ratios.values()
    )
    rounded = {
        name: {what: np.round(value, 4).tolist() for what, value in found.items()}
        for name, found in ratios.items()
    }
    config = {
        "rows": ROWS,
        "dp": DP,
        "max_tokens": MAX_TOKENS,
        "median": MEDIAN,
        "sigma": SIGMA,
        "longest": LONGEST,
        "bars": BARS,
        "cores": os.cpu_count(),
    }
    counts = {"rounds": rounds, "layouts": len(LAYOUTS), "models": len(MODELS)}
    report.last_line(
        "packing",
        rounded,
        counts,
        config,
        report.versions("numpy"),
        meets and rounds >= QUICK_ROUNDS,
    )


if __name__ == "__main__":
    main()
