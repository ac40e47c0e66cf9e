"""Some 300 injected faults against checkpoints (`make verify`: 500 and 10,000), and what makes them
count: a control and mutants that it finds guilty.

All of it runs once, in a process without torch, which forks fast; the tests look at its last line.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLASSES = (
    *("kills", "executed", "power", "errors"),
    *("concurrency", "corruption", "drawn", "patches"),
)
MUTANTS = (
    "sync data",
    "sync receipt",
    "sync manifest",
    "sync_directory draft",
    "sync_directory root",
)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.checkpoint_faults", "--quick", "--count", "240"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)  # shown where a test fails
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_some_three_hundred_faults_were_injected(outcome: dict[str, Any]) -> None:
    assert outcome["counts"]["injected"] >= 280


@pytest.mark.parametrize("name", CLASSES)
def test_nothing_wrong_is_accepted_and_nothing_good_lost(
    outcome: dict[str, Any], name: str
) -> None:
    injected, wrong, lost, other = outcome["counts"]["by_class"][name]
    assert injected > 0 and (wrong, lost, other) == (0, 0, 0)


def test_a_full_file_system_fails_the_save_and_nothing_else(outcome: dict[str, Any]) -> None:
    injected, *bad = outcome["counts"]["by_class"]["full disk"]
    if not injected:
        pytest.skip("no file system can be mounted here")
    assert bad == [0, 0, 0]


def test_the_harness_finds_a_saver_that_writes_in_place_guilty(outcome: dict[str, Any]) -> None:
    injected, wrong, lost = outcome["counts"]["control"]
    assert injected >= 40 and wrong >= 10 and lost >= 1


@pytest.mark.parametrize("skipped", MUTANTS)
def test_the_harness_notices_each_kind_of_sync_left_out(
    outcome: dict[str, Any], skipped: str
) -> None:
    assert outcome["counts"]["mutants"][skipped] > 0


def test_the_bench_says_that_it_meets_its_bar(outcome: dict[str, Any]) -> None:
    assert outcome["bench"] == "checkpoint_faults" and outcome["meets"] is True
