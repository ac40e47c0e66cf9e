"""5,000 malformed frames and requests at each of rft's listeners, drawn anew each time."""

import secrets
from pathlib import Path

import pytest

from tests.unit import fuzzed

CASES = 5000
MOST_GROWN = 48 * 2**20  # bytes: what allocators keep; a leak of 16 KiB per case would be 80 MB
pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", list(fuzzed.listeners(Path())))
def test_nothing_crashes_hangs_or_grows(name: str, tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    seen = fuzzed.fuzz(fuzzed.listeners(tmp_path)[name], seed, CASES)
    print(f"{name}, seed {seed}: {seen}")
    assert (seen.wrong, seen.cases) == ([], CASES), f"seed {seed}"
    assert seen.longest_s < fuzzed.HANG_S and seen.grown < MOST_GROWN, f"seed {seed}: {seen}"
