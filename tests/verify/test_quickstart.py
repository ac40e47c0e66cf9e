"""The quickstart's claims, at full size: it learns for each of three seeds, within ten minutes, and
from the reward.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify import shuffled

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]


def quickstart(tmp_path: Path, *overrides: str) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "rft.train",
        "experiment=quickstart",
        f"checkpoint_root_dir={tmp_path}",
        *overrides,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    print(done.stdout[-1500:])
    return json.loads(done.stdout.splitlines()[-1])["quickstart"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_gets_better_by_reinforcement(tmp_path: Path, seed: int) -> None:
    outcome = quickstart(tmp_path, f"seed={seed}")
    assert 0.30 <= outcome["eval_sft"] <= 0.65
    assert outcome["eval_rft"] >= outcome["eval_sft"] + 0.20
    assert outcome["seconds"] <= 600


def test_rewards_of_other_answers_teach_nothing(tmp_path: Path) -> None:
    outcome = quickstart(tmp_path, shuffled.override("stages.1."))
    assert outcome["eval_rft"] <= outcome["eval_sft"] + 0.05
