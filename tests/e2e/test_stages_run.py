"""Three stages of one run, each with an algorithm, a buffer, an explorer and a trainer of its own:
a failed one stops the run, and the same command goes on at the boundary, each stage from the model
of the one before.
"""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from runs import LETTERS, is_one_line, step_rows, train, write_assets

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def test_a_failed_stage_stops_the_run_and_the_rest_goes_on_from_the_boundary(
    tmp_path: Path,
) -> None:
    assets = write_assets(tmp_path / "assets")
    rows = {
        "trainer_input": {
            "experience_buffer": {"storage_type": "file", "path": str(assets / "train.jsonl")}
        }
    }
    rows["trainer_input"]["experience_buffer"]["format"] = {"prompt_type": "plaintext"}  # type: ignore[assignment]
    supervised = {
        "mode": "train",
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {"train_batch_size": 8, **rows},
    }
    by_reward = {
        "stage_name": "tuned",
        "mode": "both",
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 2},
        "explorer": {"runner_per_model": 3, "rollout_model": {"kv_cache_gb": 0.25}},
        "trainer": {"total_steps": 2, "grad_clip": 0.7},
        "buffer": {
            "batch_size": 4,
            "explorer_input": {
                "default_reward_fn_type": LETTERS,
                "taskset": {
                    "path": str(assets / "train.jsonl"),
                    "format": {"prompt_type": "plaintext"},
                },
            },
        },
    }
    stages = [
        {"stage_name": "warmup", "trainer": {"total_steps": 3}, **supervised},
        {
            "stage_name": "polish",
            "trainer": {"total_steps": 4, "max_skipped_steps": 2, "max_restarts": 0},
            **supervised,
        },
        by_reward,
    ]
    experiment = tmp_path / "configs" / "experiment" / "three.yaml"
    experiment.parent.mkdir(parents=True)
    model = {"model_path": str(assets / "model"), "max_prompt_tokens": 16, "max_response_tokens": 8}
    whole = {"name": "three", "device": "cpu", "model": model, "stages": stages}
    experiment.write_text("# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(whole)))
    command = [
        f"hydra.searchpath=[file://{tmp_path / 'configs'}]",
        "experiment=three",
        "monitor=none",
        f"checkpoint_root_dir={tmp_path}",
    ]
    job = tmp_path / "rft" / "three"

    with train(*command, "+stages.1.algorithm.optimizer={lr: 1e30}") as run:
        assert run.end() == 10
        assert is_one_line(run.errors(), "failed while judging the step"), run.errors()
    assert (job / "warmup" / "result.json").exists() and not (job / "tuned").joinpath(
        "logs"
    ).exists()

    with train(*command) as run:
        run.wait_for("^warmup: already finished")
        assert (run.end(), run.errors()) == (0, "")
    assert [len(step_rows(job / name)) for name in ("warmup", "polish", "tuned")] == [3, 4, 2]
    resolved: list[Any] = [
        OmegaConf.load(job / name / "resolved.yaml") for name in ("warmup", "polish", "tuned")
    ]
    begins = [Path(config.model.model_path) for config in resolved]
    assert begins == [
        assets / "model",
        job / "warmup/huggingface/step_00000003",
        job / "polish/huggingface/step_00000004",
    ]
    assert [config.algorithm.algorithm_type for config in resolved] == ["sft", "sft", "grpo"]
    assert [config.trainer.grad_clip for config in resolved] == [1.0, 1.0, 0.7]
    assert [config.buffer.train_batch_size for config in resolved] == [8, 8, 8] and resolved[
        2
    ].explorer.runner_per_model == 3
