"""Fixtures of all unit tests."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ENOUGH = 2**29  # bytes that must be free there; containers often give it much less


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """An empty directory in memory where there is room: what is no test of a disk need not wait for one."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ENOUGH:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="rft-test-", dir=MEMORY) as directory:
        yield Path(directory)
