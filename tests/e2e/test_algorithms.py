"""Every algorithm that learns from rollouts trains the toy through the whole system: engine, buffer, ranks, checkpoint."""

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rft.algorithm import ALGORITHMS

from runs import REPOSITORY, checkpoints, overrides, step_rows, train, write_assets

STEPS = 3
IN_STEPS = f"buffer.explorer_input.default_workflow_type={REPOSITORY / 'tests' / 'e2e' / 'two_steps.py'}:TwoSteps"
CORRECTION = "algorithm.rollout_correction"
ADAPTIVE = "{adaptive:true,target_kl:0.1,horizon:100}"
MORE = {  # what else a run of this algorithm shows
    "gspo": [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=sequence", f"{CORRECTION}.rollout_rs_threshold=5"],
    "rloo": ["algorithm.kl_penalty_fn=k1"],
    "reinforceplusplus": ["algorithm.kl_penalty_fn=k2", f"+algorithm.kl_loss_fn_args={ADAPTIVE}"],
    "rec": ["+algorithm.policy_loss_fn_args.clip_mode=ring", "+algorithm.advantage_fn_args.drop=balance"],
    "grpo": [
        "algorithm.advantage_fn=clipb", "algorithm.sample_strategy=staleness_control",
        "+algorithm.sample_strategy_args.max_staleness=1",
    ],
    "multi_step_grpo": [IN_STEPS],
    "gigpo": [IN_STEPS],
}  # fmt: skip
EVERY_TIME = ("remax", "reinforceplusplus")
ROLLOUTS = [name for name, kind in ALGORITHMS.items() if kind.source == "rollouts" and name != "ppo"]  # see test_ppo

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.verify) for name in ROLLOUTS]
)
def test_it_trains(name: str, tmp_path: Path) -> None:
    assets = write_assets(tmp_path / "assets")
    arguments = overrides(
        tmp_path, name, assets, f"algorithm.algorithm_type={name}", f"trainer.total_steps={STEPS}", *MORE.get(name, [])
    )
    with train(*arguments) as run:
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / name
    rows = step_rows(job)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and checkpoints(job) == [STEPS]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["grad_norm"] > 0 and row["num_tokens"] > 0 and not row["skipped"] for row in rows)
    before = load_file(assets / "model" / "model.safetensors")
    after = load_file(job / "huggingface" / f"step_{STEPS:08d}" / "model.safetensors")
    assert any(not np.array_equal(before[key], value) for key, value in after.items())
