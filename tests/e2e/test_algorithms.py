"""Algorithms that learn from rollouts train the toy through the whole system: engine, buffer,
ranks, checkpoint.
"""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rft.algorithm import ALGORITHMS

from runs import REPOSITORY, checkpoints, overrides, step_rows, train, write_assets

STEPS = 3
TWO_STEPS = REPOSITORY / "tests" / "e2e" / "two_steps.py"
IN_STEPS = f"buffer.explorer_input.default_workflow_type={TWO_STEPS}:TwoSteps"
CORRECTION = "algorithm.rollout_correction"
ADAPTIVE = "{adaptive:true,target_kl:0.1,horizon:100}"
TOGETHER = {  # explored and trained in one run
    "remax": [],
    "reinforceplusplus": ["algorithm.kl_penalty_fn=k2", f"+algorithm.kl_loss_fn_args={ADAPTIVE}"],
    "gigpo": [IN_STEPS],
    "gspo": [
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_rs=sequence",
        f"{CORRECTION}.rollout_rs_threshold=5",
    ],
}
MORE = {  # what else training shows
    "rloo": ["algorithm.kl_penalty_fn=k1"],
    "rec": [
        "+algorithm.policy_loss_fn_args.clip_mode=ring",
        "+algorithm.advantage_fn_args.drop=balance",
    ],
    "grpo": [
        "algorithm.advantage_fn=clipb",
        "algorithm.sample_strategy=staleness_control",
        "+algorithm.sample_strategy_args.max_staleness=3",
    ],
}
# test_ppo and test_row_runs: they need more
ELSEWHERE = ("ppo", "mix", "mix_chord", "on_policy_distill", "jsd")
ROLLOUTS = [
    name for name, kind in ALGORITHMS.items() if kind.source == "rollouts" and name not in ELSEWHERE
]

pytestmark = pytest.mark.timeout(600)


def check_trained(job: Path, assets: Path) -> None:
    rows = step_rows(job)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)) and checkpoints(job) == [
        STEPS
    ]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(
        row["grad_norm"] > 0 and row["num_tokens"] > 0 and not row["skipped"] for row in rows
    )
    before = load_file(assets / "model" / "model.safetensors")
    after = load_file(job / "huggingface" / f"step_{STEPS:08d}" / "model.safetensors")
    assert any(not np.array_equal(before[key], value) for key, value in after.items())


# grpo, ppo and mix go through the loop in other files; unit/test_algorithms_learn.py trains all of
# them
@pytest.mark.verify
@pytest.mark.parametrize("name", TOGETHER)
def test_it_explores_and_trains(name: str, tmp_path: Path) -> None:
    assets = write_assets(tmp_path / "assets")
    kind = f"algorithm.algorithm_type={name}"
    with train(
        *overrides(tmp_path, name, assets, kind, f"trainer.total_steps={STEPS}", *TOGETHER[name])
    ) as run:
        assert (run.end(), run.errors()) == (0, "")
    check_trained(tmp_path / "rft" / name, assets)


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Rollouts that every algorithm can learn from: runs of two steps, with states, and a greedy
    response per task.
    """
    root = tmp_path_factory.mktemp("explored")
    assets = write_assets(root / "assets")
    more = [
        "mode=explore",
        "algorithm.algorithm_type=remax",
        f"trainer.total_steps={STEPS}",
        IN_STEPS,
    ]
    with train(*overrides(root, "apart", assets, *more)) as run:
        assert (run.end(), run.errors()) == (0, "")
    return root / "rft" / "apart", assets


@pytest.mark.verify
@pytest.mark.parametrize("name", ROLLOUTS)
def test_what_multi_step_runs_left_trains_it(
    name: str, tmp_path: Path, explored: tuple[Path, Path]
) -> None:
    left, assets = explored
    job = tmp_path / "rft" / "apart"
    shutil.copytree(left, job, symlinks=True)
    more = [
        "mode=train",
        f"algorithm.algorithm_type={name}",
        f"trainer.total_steps={STEPS}",
        *MORE.get(name, []),
    ]
    with train(*overrides(tmp_path, "apart", assets, *more)) as run:
        assert (run.end(), run.errors()) == (0, "")
    check_trained(job, assets)
