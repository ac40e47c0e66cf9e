"""How far healthy runs are from the limits of the gates, and faulty ones beyond them.

    python -m tests.verify.drill [--out docs/truth.png] [--seeds 10]

In: nothing; the runs of `drill_jobs`: undisturbed ones, one per seed, and one per planted fault.
Out: a picture of the four gates that have a limit other than 0 (a row each: every step of every run
as the share of the limit that it takes up), a table of the same, and one line of JSON.
"""

import argparse
import json
import tempfile
from pathlib import Path

from bench import report
from rft.monitor.run_record import RunRecord
from rft.tools.curves import GRID, INK, MUTED
from rft.trainer.gates import ERROR, GATES, GRADIENT, UNGIVEN
from tests.dist.ranks import Ranks

Shares = dict[str, list[float]]
HERE = Path(__file__).parent
LEAST = 1e-7  # of a limit: what is less is drawn there
CLIPPED, WEIGHT = "clip_frac", "drift/lost_weight"
ROWS = {ERROR: "engine", CLIPPED: "clipped", GRADIENT: "gradient", WEIGHT: "weights"}
NONE = {ERROR: 1.0}  # where nothing is wrong; elsewhere 0


def limits() -> dict[str, float]:
    """Of runs in fp32, by the config's defaults."""
    from rft.config import DriftConfig

    given = DriftConfig()
    found = {gate.metric: float(getattr(given, gate.limit, None) or gate.most) for gate in GATES}
    in_fp32 = {metric: one for metric, (one, _) in UNGIVEN.items()}
    return {metric: found[metric] for metric in ROWS} | in_fp32


def shares(root: Path) -> Shares:
    """Of every gate's limit, what each step of the run takes up."""
    record = RunRecord(root)
    found: Shares = {}
    for metric, limit in limits().items():
        none = NONE.get(metric, 0.0)
        values = [value for _, value in record.series(metric)]
        found[metric] = [abs(value - none) / (limit - none) for value in values]
    return found


def draw(
    healthy: list[dict[str, list[float]]], faulty: dict[str, dict[str, list[float]]]
) -> object:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, (metric, name) in enumerate(ROWS.items()):
        values = [max(one, LEAST) for run in healthy for one in run[metric]]
        axes.scatter(values, [row] * len(values), s=14, color=MUTED, alpha=0.35, linewidths=0)
        tops = {fault: max(run[metric], default=0.0) for fault, run in faulty.items()}
        passed = sorted((top, fault) for fault, top in tops.items() if top > 1)
        for number, (top, fault) in enumerate(passed):
            axes.scatter([top], [row], s=26, color="#c92a2a", linewidths=0, zorder=3)
            side = 1 if number % 2 else -1
            axes.annotate(
                fault,
                (top, row),
                xytext=(0, side * (9 + 9 * (number // 2))),
                textcoords="offset points",
                ha="center",
                va="center",
                fontsize=6,
                color=INK,
            )
        axes.text(LEAST * 0.6, row, name, ha="right", va="center", fontsize=10, color=INK)
    axes.axvline(1, color=INK, linewidth=1.2)
    axes.text(1, -0.62, "limit", ha="center", fontsize=8, color=INK)
    axes.set_xscale("log")
    axes.set_ylim(len(ROWS) - 0.3, -0.7)
    axes.set_yticks([])
    axes.set_xlabel("share of the gate's limit that a step takes up", color=INK, fontsize=9)
    axes.set_title(
        f"grey: every step of {len(healthy)} undisturbed runs; red: the worst step with a fault",
        fontsize=9,
        color=INK,
        loc="left",
    )
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/truth.png"))
    parser.add_argument("--seeds", type=int, default=10, help="undisturbed runs")
    given = parser.parse_args()
    ranks = Ranks(HERE, HERE.parent / "dist")
    with tempfile.TemporaryDirectory(prefix="rft-drill-") as directory:
        root = Path(directory)
        model = str(root / "model")
        ranks.run("drill_jobs:write", 1, path=model)
        [faults] = ranks.run("drill_jobs:faults", 1)

        def run(name: str, **more: object) -> Shares:
            ranks.run("drill_jobs:drilled", 1, path=model, root=str(root / name), **more)
            return shares(root / name)

        healthy = [run(f"seed {seed}", seed=seed) for seed in range(given.seeds)]
        faulty = {fault: run(fault, fault=fault) for fault in faults}
    ranks.stop()
    draw(healthy, faulty).savefig(given.out)  # type: ignore[attr-defined]
    worst = {name: max(one for run in healthy for one in run[m]) for m, name in ROWS.items()}
    rows = [[name, f"{limits()[metric]:g}", f"{worst[name]:.2g}"] for metric, name in ROWS.items()]
    report.table(f"{given.seeds} undisturbed runs", ["gate", "limit", "the most of it"], rows)
    print(json.dumps({"drill": {"seeds": given.seeds, "most": worst}}))


if __name__ == "__main__":
    main()
