"""A file in the shape that users of Trinity-RFT write runs as it is, through to its last step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rft.tools.toy import write_arithmetic, write_model
from tests.e2e.runs import REPOSITORY

FILE = REPOSITORY / "tests" / "unit" / "flat" / "both.yaml"


@pytest.mark.verify
def test_a_flat_file_trains(tmp_path: Path) -> None:
    write_model(tmp_path / "model", hidden=64, layers=2, heads=2, kv_heads=2, ffn=128)
    write_arithmetic(tmp_path, digits=1, num_eval=16)
    places = {
        "FLAT_ROOT": str(tmp_path / "runs"),
        "FLAT_MODEL": str(tmp_path / "model"),
        "FLAT_DATA": str(tmp_path),
    }
    smaller = ["device=cpu", "trainer.total_steps=3", "explorer.rollout_model.kv_cache_gb=0.25"]
    done = subprocess.run(
        [sys.executable, "-m", "rft.train", "--config", str(FILE), *smaller],
        env=os.environ | places,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trainer.trainer_strategy=fsdp: " in done.stderr, (
        "what means something else here is said"
    )
    job = tmp_path / "runs" / "flat" / "both"
    lines = [
        json.loads(line)
        for line in (job / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert max(line["step"] for line in lines) == 3
    assert any(key.startswith("eval/held_out/") for line in lines for key in line)
    assert list((job / "huggingface").glob("step_*3/*.safetensors"))
    planted = b"planted-key"
    assert not [path for path in job.rglob("*") if path.is_file() and planted in path.read_bytes()]
