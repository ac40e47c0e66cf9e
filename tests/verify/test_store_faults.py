"""1,000 kills and cuts between agents and an object store: none loaded wrong, nothing acknowledged
lost, no orphan after the sweep. And some against another server than moto's: Debian's radosgw.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ceph_store import USER, running

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": USER}
pytestmark = [pytest.mark.verify, pytest.mark.timeout(5400)]


def faults(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.store_faults", *arguments],
        cwd=ROOT,
        env=os.environ | KEYS,
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
    assert faults()["kills_and_cuts"] >= 200


def test_the_same_against_radosgw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It honours If-None-Match of a put; a store that did not would be refused here."""
    from rft.checkpoint.objects import try_out

    with running(tmp_path) as address:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": address}.items():
            monkeypatch.setenv(name, value)
        import boto3

        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="tried")
        assert try_out("s3://tried/job")
        assert faults("--count", "20", "--endpoint", address)["kills_and_cuts"] >= 20
