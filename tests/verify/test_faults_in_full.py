"""All injected faults: at least 10,000, none accepted wrong, the newest good one always found, no
acknowledged commit lost.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.verify, pytest.mark.timeout(7200)]


def test_ten_thousand_faults() -> None:
    command = [sys.executable, "-m", "bench.checkpoint_faults"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    counts = outcome["counts"]
    assert counts["injected"] >= 10_000
    assert (counts["accepted_wrong"], counts["lost"], counts["other"]) == (0, 0, 0)
    assert outcome["meets"]
