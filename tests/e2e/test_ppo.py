"""PPO with a critic and a reference through the whole system, from
the engine's tokens to the checkpoint.
"""

import math
from pathlib import Path

import pytest
from exact import EVERYTHING, RANK, assert_same, deterministic, run_killed, run_whole
from safetensors import safe_open

from rft.checkpoint.reader import Checkpoint
from rft.checkpoint.storage import Disk, LocalStorage

from runs import checkpoints, overrides, step_rows, train, write_assets

STEPS, WARMUP = 4, 1

# `tests/dist/test_critic.py` has every number, on every mesh
pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def test_ppo_learns_values_and_keeps_near_the_first_version(tmp_path: Path) -> None:
    assets = write_assets(tmp_path / "assets")
    arguments = overrides(
        tmp_path,
        "ppo",
        assets,
        "algorithm.algorithm_type=ppo",
        f"trainer.total_steps={STEPS}",
        "critic.optim.lr=1e-3",
        f"trainer.critic_warmup={WARMUP}",
        "algorithm.proximal_logprobs=true",
        "algorithm.kl_penalty_fn=k1",
        "algorithm.rollout_correction.rollout_is=token",
        "+algorithm.entropy_loss_fn_args.entropy_coef=0.01",
    )
    with train(*arguments) as run:
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / "ppo"
    rows = step_rows(job)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[0]["value/mean"] == 0.0 and all(row["value/mean"] != 0.0 for row in rows[1:])
    assert all(row["critic/grad_norm"] > 0 and row["advantage/std"] > 0 for row in rows)
    assert "kl/reference" not in rows[WARMUP - 1], "the policy waits"
    nearness = [row["kl/reference"] for row in rows[WARMUP:]]
    assert nearness[0] < 1e-9 < nearness[-1], "the reference is the policy until that has learned"
    assert rows[WARMUP]["importance/mean"] == pytest.approx(1.0, abs=1e-3), (
        "engine and proximal policy are one"
    )
    assert checkpoints(job) == [STEPS]
    with Checkpoint(LocalStorage(job / "checkpoints", Disk()), f"step_{STEPS:08d}") as checkpoint:
        held = checkpoint.tensors
        assert held["critic.model/score.weight"] == ("float32", (1, 64))
        assert {"exp_avg/model.norm.weight", "critic.exp_avg/model.norm.weight"} <= held.keys()
    export = job / "huggingface" / f"step_{STEPS:08d}" / "model.safetensors"
    with safe_open(str(export), framework="np") as tensors:
        assert "model.norm.weight" in tensors.keys() and "score.weight" not in tensors.keys()  # noqa: SIM118


def test_sixteen_updates_a_step_are_the_same_through_kill_and_resume(tmp_path: Path) -> None:
    """Four epochs of four mini-batches, dealt anew in each; killed after a step, and in the middle
    of the life of another.
    """
    assets, steps = write_assets(tmp_path / "assets"), 5
    settings = (
        "algorithm.algorithm_type=ppo",
        "algorithm.proximal_logprobs=true",
        "algorithm.repeat_times=4",
        "critic.optim.lr=1e-3",
        f"trainer.total_steps={steps}",
        "trainer.save_interval=2",
        "trainer.ppo_epochs=4",
        "trainer.ppo_mini_batch_size=4",
        "trainer.ppo_shuffle=true",
        "buffer.batch_size=4",
    )
    run_whole(deterministic(tmp_path, "whole", assets, *settings))
    rows = step_rows(tmp_path / "rft" / "whole")
    assert [row["updates"] for row in rows] == [16.0] * steps
    assert all(abs(row["kl/old_first"]) < 1e-6 < abs(row["kl/old_last"]) for row in rows)
    run_killed(deterministic(tmp_path, "killed", assets, *settings), [(1, RANK), (3, EVERYTHING)])
    assert_same(tmp_path / "rft" / "killed", tmp_path / "rft" / "whole", steps)
