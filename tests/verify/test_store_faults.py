"""1,000 kills and cuts between agents and an object store: none loaded wrong, nothing acknowledged
lost, no orphan after the sweep.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.verify, pytest.mark.timeout(5400)]


def faults(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.store_faults", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    counts = found["counts"]
    assert (counts["accepted_wrong"], counts["lost"], counts["other"]) == (0, 0, 0)
    assert found["meets"]
    return dict(counts)


def test_a_thousand_kills_and_cuts() -> None:
    assert faults()["kills_and_cuts"] >= 1000
