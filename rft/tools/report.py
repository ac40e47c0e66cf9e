"""`rft report RUN_DIR`: one page about a run, in one file that a browser opens without a network.

In: a run directory, finished or under way. Out: `<run>/report.html`: curves, where the time went,
the last steps process by process, checkpoints, failures and restarts, rollouts, and what the config
changes. Invariants: the page loads nothing (its own security policy forbids it), and what comes out
of the run, such as a rollout's text, is data in it and never markup.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rft.tools.report_data import gather

TEMPLATE = Path(__file__).with_name("report.html")
PLACE = "/*DATA*/"


def page(found: dict[str, Any]) -> str:
    """The template with the data in it.

    `<` is written as an escape: no text of the run can end the script element.
    """
    return TEMPLATE.read_text(encoding="utf-8").replace(
        PLACE, json.dumps(found, allow_nan=False).replace("<", "\\u003c")
    )


def write(run: Path, out: Path | None = None) -> Path:
    """Raises ValueError for a directory without a run in it."""
    path = out or run / "report.html"
    path.write_text(page(gather(run)), encoding="utf-8")
    return path


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rft report", description="Write one page about a run.")
    parser.add_argument("run", type=Path, help="the run's directory, also while it is under way")
    parser.add_argument("--out", type=Path, help="where to write it; default: RUN_DIR/report.html")
    asked = parser.parse_args(arguments)
    try:
        path = write(asked.run, asked.out)
    except (ValueError, OSError) as error:
        print(f"rft report: {error}", file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0
