"""`rft debug` with a real engine."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rft.ground.columns import unpacked
from rft.ground.experience import Experience

import runs

CODE = "import sys; from rft.tools import debug; sys.exit(debug.main(sys.argv[1:]))"
pytestmark = [pytest.mark.verify, pytest.mark.timeout(300)]


def test_one_task_goes_through_a_live_engine(tmp_path: Path) -> None:
    assets = runs.write_assets(tmp_path / "assets")
    words = runs.overrides(tmp_path, "looked", assets)
    done = subprocess.run(
        [sys.executable, "-c", CODE, "--row", "2", *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    job = tmp_path / "rft" / "looked_debug"
    found = [
        msgspec.json.decode(line, type=Experience, dec_hook=unpacked)
        for line in (job / "experiences.jsonl").read_bytes().splitlines()
    ]
    assert found and all(len(one.logprobs) and one.versions[0].version == 0 for one in found)
    assert done.stdout.count("\nexperience ") == len(found)
    assert done.stdout.count("  yes ") == sum(sum(one.action_mask) for one in found)
    assert not (tmp_path / "rft" / "looked").exists() or not list(
        (tmp_path / "rft" / "looked").iterdir()
    )
