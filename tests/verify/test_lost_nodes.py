"""1,000 nodes lost with their disks while states travel between agents: no state that two nodes had
is lost, nothing is loaded wrong.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.verify, pytest.mark.timeout(7200)]


def test_a_thousand_lost_nodes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.checkpoint_faults", "--only", "nodes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    counts = found["counts"]
    assert (counts["accepted_wrong"], counts["lost"], counts["other"]) == (0, 0, 0)
    assert counts["injected"] >= 1000 and found["meets"]
