"""How long rank 0 plans who stores what, of 1.5 million pieces, and how much memory that takes.

    python -m bench.save_plan [--pieces N]

In: claims as the ranks of a large run send them: 512 ranks, of which 8 are copies of one cut; every
fourth piece is a weight that 8 ranks hold, the others are flat ranges that one rank holds (masters
and moments of a distributed optimizer). Out: seconds of `sharding.planned`, the largest memory of
the process, which also makes the claims, a rank at a time; and one last line of JSON. Bars: 10 s, 1
GiB.
"""

import argparse
import resource
import time

from bench import report
from rft.checkpoint import sharding
from rft.checkpoint.sharding import Claim

PIECES, RANKS, COPIES = 1_500_000, 512, 8
ROWS, WIDTH = 128, 1024  # of a rank's box
KINDS = ("model", "master", "exp_avg", "exp_avg_sq")
SECONDS_BAR, MIB_BAR = 10.0, 1024.0


def claims_of(rank: int, count: int) -> list[Claim]:
    copy, cut = divmod(rank, RANKS // COPIES)
    whole, share = (ROWS * RANKS // COPIES, WIDTH), ROWS * WIDTH // COPIES
    found = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        flat = None if kind == "model" else (copy * share, (copy + 1) * share)
        found.append(
            Claim(
                f"{kind}/model.layers.{number // 4}.mlp.up_proj.weight",
                "bfloat16" if kind == "model" else "float32",
                whole,
                (cut * ROWS, 0),
                (ROWS, WIDTH),
                flat,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pieces", type=int, default=PIECES)
    pieces = parser.parse_args().pieces
    sent = [sharding.encode(claims_of(rank, pieces // RANKS)) for rank in range(RANKS)]
    began = time.perf_counter()
    positions = sharding.planned(sent)
    seconds = time.perf_counter() - began
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    stored = sum(map(len, positions))
    report.table(
        "planning a save",
        ["pieces", "stored", "seconds", "MiB"],
        [[f"{pieces:,}", f"{stored:,}", f"{seconds:.1f}", f"{mib:.0f}"]],
    )
    report.last_line(
        "save_plan",
        {"seconds": round(seconds, 2), "mib": round(mib)},
        {"pieces": pieces, "stored": stored},
        {"ranks": RANKS, "copies": COPIES, "bars": [SECONDS_BAR, MIB_BAR]},
        report.versions("msgspec"),
        pieces >= PIECES and seconds <= SECONDS_BAR and mib <= MIB_BAR,
    )


if __name__ == "__main__":
    main()
