"""Fixtures of all unit tests."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.monitor import left_out
from rft.tools.toy import write_arithmetic, write_model

MEMORY = Path("/dev/shm")
ENOUGH = 2**29  # bytes that must be free there; containers often give it much less


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """An empty directory in memory where there is room: what is no
    test of a disk need not wait for one.
    """
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ENOUGH:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="rft-test-", dir=MEMORY) as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is left out in this test alone: a process counts it from its begin on."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(left_out, "_left_out", found)
    return found


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers under `model/`, and sums in train.jsonl and eval.jsonl."""
    root = tmp_path_factory.mktemp("assets")
    write_model(
        root / "model", hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=128, context=64
    )
    write_arithmetic(root, num_eval=16)
    return root
