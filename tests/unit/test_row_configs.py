"""Configs of algorithms that learn from rows or from a teacher: what follows from their names."""

import json
from pathlib import Path

import pytest

from rft import train
from rft.config import Config, ConfigError
from rft.tools.toy import write_model
from tests.unit.test_config import composed, grpo

QUEUE = "buffer.trainer_input.experience_buffer"


def of_pairs(assets: Path, tmp_path: Path, *overrides: str) -> Config:
    rows = [{"prompt": str(n), "chosen": "a", "rejected": "b"} for n in range(20)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = [
        "experiment=dpo",
        f"model.model_path={assets / 'model'}",
        f"{QUEUE}.path={path}",
        f"checkpoint_root_dir={tmp_path}",
    ]
    (config,) = train.prepared_stages(composed([*base, "buffer.batch_size=4", *overrides]))
    return config


@pytest.mark.parametrize("given", ["null", "1", "2", "8"])
def test_repeat_times_of_pairs_is_two(assets: Path, tmp_path: Path, given: str) -> None:
    config = of_pairs(assets, tmp_path, f"algorithm.repeat_times={given}", "buffer.total_epochs=3")
    assert config.algorithm.repeat_times == 2 and config.buffer.train_batch_size == 8
    assert config.trainer.total_steps == 3 * (20 // 4), "an epoch is counted in pairs"
    assert (config.algorithm.policy_loss_fn, config.algorithm.loss_agg_mode) == (
        "dpo",
        "seq-mean-token-sum",
    )


def test_mix_makes_room_for_expert_rows(assets: Path, tmp_path: Path) -> None:
    beside = (
        f"{{sft_dataset: {{storage_type: file, path: {assets / 'train.jsonl'}, format: "
        f"{{prompt_type: plaintext}}}}}}"
    )
    words = [
        "algorithm.algorithm_type=mix",
        f"+buffer.trainer_input.auxiliary_buffers={beside}",
        "buffer.batch_size=4",
    ]
    (config,) = grpo(assets, tmp_path, *words)
    assert config.buffer.train_batch_size == 2 * 4 * 8 and config.algorithm.kl_loss_fn == "k2"
    assert config.algorithm.entropy_loss_fn == config.algorithm.sample_strategy == "mix"
    assert config.buffer.trainer_input.auxiliary_buffers["sft_dataset"].name == "sft_dataset"
    (config,) = grpo(
        assets, tmp_path, *words, "+algorithm.sample_strategy_args.expert_data_ratio=0.2"
    )
    assert config.buffer.train_batch_size == 40
    (config,) = grpo(assets, tmp_path, *words, "buffer.train_batch_size=64")
    assert config.buffer.train_batch_size == 64


def test_a_teacher_has_the_policys_vocabulary(assets: Path, tmp_path: Path) -> None:
    teacher = write_model(
        tmp_path / "teacher", seed=3, hidden=32, layers=1, heads=2, kv_heads=2, ffn=64
    )
    words = ["algorithm.algorithm_type=on_policy_distill", f"model.teacher_model_path={teacher}"]
    (config,) = grpo(assets, tmp_path, *words)
    assert (config.algorithm.advantage_fn, config.algorithm.kl_loss_fn) == (
        "on_policy_distill",
        "none",
    )
    told = json.loads((teacher / "tokenizer.json").read_text(encoding="utf-8"))
    told["model"]["vocab"]["a"], told["model"]["vocab"]["b"] = (
        told["model"]["vocab"]["b"],
        told["model"]["vocab"]["a"],
    )
    (teacher / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=(
            r"model.teacher_model_path=.* another vocabulary .*; give a teacher of the same "
            r"family"
        ),
    ):
        grpo(assets, tmp_path, *words)
