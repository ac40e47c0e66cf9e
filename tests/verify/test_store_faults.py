"""1,000 kills and cuts between agents and an object store: none loaded wrong, nothing acknowledged
lost, no orphan after the sweep. The server is moto's; 60 more are before Debian's radosgw, of which
it is shown too that it honours the condition by which a save is committed.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from radosgw import Gateway, running

from rft.checkpoint.objects import ObjectStorage, try_out

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE, RACES = 4, 100
pytestmark = [pytest.mark.verify, pytest.mark.timeout(5400)]


def faults(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.store_faults", *arguments],
        cwd=ROOT,
        env=os.environ | (environment or {}),
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


@pytest.fixture(scope="module")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running(tmp_path_factory.mktemp("radosgw")) as found:
        yield found


def test_a_thousand_kills_and_cuts() -> None:
    assert faults()["kills_and_cuts"] >= 1000


@pytest.fixture
def bucket(radosgw: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import boto3
    import s3fs

    for name, value in (radosgw.environment | {"AWS_ENDPOINT_URL": radosgw.endpoint}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="start")
    yield "s3://start"
    s3fs.S3FileSystem.clear_instance_cache()


def test_debians_radosgw_refuses_a_put_over_something(bucket: str) -> None:
    """By the two puts of every start."""
    assert try_out(f"{bucket}/run")


def test_of_puts_at_once_debians_radosgw_takes_one(bucket: str) -> None:
    storage, together = ObjectStorage(f"{bucket}/races"), threading.Barrier(AT_ONCE)

    def is_taken(name: str, writer: int) -> bool:
        together.wait(60)
        try:
            storage.put(name, f"of writer {writer}".encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for race in range(RACES):
            name = f"step_{race:08d}.e0001n0000/MANIFEST.json"
            taken = list(pool.map(is_taken, [name] * AT_ONCE, range(AT_ONCE)))
            assert taken.count(True) == 1
            assert storage.get(name) == f"of writer {taken.index(True)}".encode()


def test_sixty_kills_and_cuts_before_debians_radosgw(radosgw: Gateway) -> None:
    print("radosgw", radosgw.version)
    found = faults(
        *("--endpoint", radosgw.endpoint, "--count", "60"), environment=radosgw.environment
    )
    assert found["kills_and_cuts"] >= 60
