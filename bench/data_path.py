"""How long a step's experiences take from the durable journal to the tensors of eight ranks.

    python -m bench.data_path [--quick] [--against CHECKOUT]

In: nothing; 1,024 experiences of 4,096 and of 32,768 tokens (a quarter of them the prompt, the same
for eight) in a journal; eight ranks, two and two of them tensor-parallel. Out: a table and a last
line of JSON. In turn, this checkout and the one before experiences were columns (8c2d7f2, out of
the history, or CHECKOUT): nothing is read ahead, and the journal's pages are forgotten before each
step.

    seconds   from the call to the buffer until all ranks have their tensors: read, decode, judge,
              pack, send; the median of all steps but the first
    read ahead  the same with this checkout, while what comes before it has been trained on: what
              a step of `STEP_S` seconds waits. 1.5 billion parameters on eight cards at 400 TFLOP/s
              take as long for 4.2 million tokens
    memory    by how much rank 0, which holds a step, and the buffer grew, over the bytes of the
              columns: ids and log-probabilities, four each

The bars, at 4,096 tokens: 0.15 of the seconds, 2 % of a step, 2 times the columns. The longer ones
are told.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import report
from bench.data_path_ranks import PROMPT_SHARE, ROWS

BEFORE = "8c2d7f2"
RANKS, STEPS = 8, 4
SIZES, QUICK_SIZES = (4096, 32_768), (4096,)
ROUNDS, QUICK_ROUNDS = 3, 1
BAR, WAITS_BAR, MEMORY_BAR = 0.15, 0.02, 2.0
STEP_S = 12.0
ROUND_S = 3600.0
HERE = Path(__file__).resolve().parents[1]


def round_of(checkout: Path, tokens: int, top: Path) -> dict[str, Any]:
    """What rank 0 of a run with this code tells."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(dir=top) as where:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [sys.executable, str(HERE / "bench" / "data_path_ranks.py")]
        given = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        ranks = [
            subprocess.Popen(
                [*command, where, str(tokens), str(STEPS)],
                env={**given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                cwd=top,
            )
            for rank in range(RANKS)
        ]
        try:  # the others end with rank 0, or fail with it
            told, _ = ranks[0].communicate(timeout=ROUND_S)
            codes = [rank.wait(timeout=60) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        raise RuntimeError(f"ranks of {checkout} ended with {codes}")
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    assert Path(found["rft"]).is_relative_to(checkout), found["rft"]
    return found


def before(top: Path) -> Path:
    """The code of `BEFORE`, out of this repository's history."""
    place = top / BEFORE
    place.mkdir()
    packed = subprocess.run(
        ["git", "archive", BEFORE, "rft"], cwd=HERE, check=True, capture_output=True
    )
    subprocess.run(["tar", "x"], cwd=place, input=packed.stdout, check=True)
    return place


def columns_bytes(tokens: int) -> int:
    return ROWS * 4 * (tokens + tokens - tokens // PROMPT_SHARE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", type=Path, help="another checkout")
    arguments = parser.parse_args()
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as directory:
        top = Path(directory)
        other = arguments.against.resolve() if arguments.against else before(top)
        for tokens in QUICK_SIZES if arguments.quick else SIZES:
            found: dict[str, list[dict[str, Any]]] = {"before": [], "this": []}
            for _ in range(rounds):
                for name, checkout in (("before", other), ("this", HERE)):
                    found[name].append(round_of(checkout, tokens, top))
            seconds = {}
            for name, told in found.items():
                taken = [second for one in told for second in one["seconds"][1:]]
                seconds[name] = report.median(taken)
                low, high = report.spread(taken)
                memory = [
                    report.median([one[part] for one in told]) / columns_bytes(tokens)
                    for part in ("rank", "buffer")
                ]
                if name == "this":
                    ratios[f"memory over columns at {tokens}"] = round(sum(memory), 2)
                cells = [f"{seconds[name]:.2f}", f"{low:.2f} - {high:.2f}"]
                rows.append([f"{tokens} {name}", *cells, *(f"{one:.2f}" for one in memory)])
            waits = report.median([second for one in found["this"] for second in one["ahead"]])
            rows.append([f"{tokens} read ahead", f"{waits:.3f}", "", "", ""])
            ratios[f"waits of a step at {tokens}"] = round(waits / (STEP_S + waits), 3)
            ratios[f"seconds at {tokens}"] = round(seconds["this"] / seconds["before"], 3)
    report.table(
        f"{ROWS} experiences to {RANKS} ranks, {rounds} rounds of {STEPS - 1} steps",
        ["tokens", "seconds", "middle half", "rank 0 over columns", "buffer over columns"],
        rows,
    )
    short = SIZES[0]
    report.last_line(
        "data_path",
        ratios,
        {"rounds": rounds, "steps": STEPS - 1},
        {
            "bar": BAR,
            "waits_bar": WAITS_BAR,
            "memory_bar": MEMORY_BAR,
            "load": round(os.getloadavg()[0], 1),
        },
        report.versions("msgspec", "numpy", "torch"),
        ratios[f"seconds at {short}"] <= BAR
        and ratios[f"waits of a step at {short}"] <= WAITS_BAR
        and ratios[f"memory over columns at {short}"] <= MEMORY_BAR,
    )


if __name__ == "__main__":
    main()
