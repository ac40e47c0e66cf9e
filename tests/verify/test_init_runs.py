"""What `rft init` writes starts: a step is trained from it, and the API server would take its
manifests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rft.ground.shipped import shipped
from rft.tools import init
from tests.verify.test_kubernetes import VERSIONS, validate

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "buffer.batch_size=4",
    "explorer.rollout_model.kv_cache_gb=0.25",
    "explorer.eval_interval=0",
)


@pytest.mark.parametrize("machine", ["here", "torchrun"])
def test_a_step_is_trained(machine: str, tmp_path: Path) -> None:
    """On one machine twice: the second start goes on where the first one ended."""
    place = tmp_path / "first"
    assert init.main([str(place), "--yes", "--machine", machine]) == 0
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    for steps in (1, 2) if machine == "here" else (1,):
        done = subprocess.run(
            [place / "run.sh", f"trainer.total_steps={steps}", "device=cpu", *SMALL],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"[{steps}/{steps} 100%" in done.stdout.replace("  ", " ")
    rows = (place / "runs/rft/first/metrics.jsonl").read_text("utf-8")
    assert '"reward' in rows and "right" in rows


@pytest.mark.parametrize("version", VERSIONS)
def test_its_manifests_are_valid(version: str, tmp_path: Path) -> None:
    paths = ["--model", "/runs/model", "--data", "/runs/tasks.jsonl", "--machine", "kubernetes"]
    assert init.main([str(tmp_path / "pods"), *paths, "--yes"]) == 0
    for file in sorted((shipped("launch") / "kubernetes").glob("*.yaml")):
        done = validate(tmp_path / "pods" / file.name, version)
        assert done.returncode == 0, done.stdout + done.stderr
