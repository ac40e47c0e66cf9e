"""Runs that learn from data rows or from a teacher: pairs, text, expert rows beside rollouts, and
distillation.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from runs import checkpoints, overrides, step_rows, train, write_assets

# `tests/dist/test_pairs.py` has the gradient of pairs, `tests/unit` mixtures and distillation
pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]
QUEUE = "buffer.trainer_input.experience_buffer"
TASKS = 4


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and sums, pairs of a right and a wrong sum, and the sums as text."""
    made = write_assets(tmp_path_factory.mktemp("rows") / "assets")
    sums = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()]
    pairs = [
        {"prompt": s["prompt"], "chosen": s["response"], "rejected": s["response"] + "0"}
        for s in sums
    ]
    for name, rows in (
        ("pairs", pairs),
        ("text", [{"prompt": s["prompt"] + s["response"]} for s in sums]),
    ):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def of_rows(root: Path, assets: Path, file: str, *more: str) -> list[str]:
    return [
        "experiment=dpo",
        "name=run",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={root}",
        "buffer.batch_size=8",
        f"model.model_path={assets / 'model'}",
        f"{QUEUE}.path={assets / file}",
        "algorithm.optimizer.lr=1e-3",
        *more,
    ]


def finished(*arguments: str) -> list[dict[str, Any]]:
    """Rows of the metrics of a run that ended well."""
    with train(*arguments) as run:
        assert (run.end(), run.errors()) == (0, "")
    root = next(
        word.partition("=")[2] for word in arguments if word.startswith("checkpoint_root_dir=")
    )
    rows = step_rows(Path(root) / "rft" / "run")
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["skipped"] == 0 for row in rows)
    return rows


def test_dpo_prefers_what_was_chosen_and_goes_on_where_it_stood(
    tmp_path: Path, assets: Path
) -> None:
    """Two ranks, and microbatches so small that pairs are parted; twelve steps at once, or five and
    then the rest.
    """
    small = ("trainer.num_ranks=2", "trainer.max_token_len_per_gpu=32", "trainer.save_interval=5")
    whole = finished(
        *of_rows(tmp_path / "whole", assets, "pairs.jsonl", *small, "trainer.total_steps=12")
    )
    assert whole[0]["loss"] == pytest.approx(math.log(2), rel=1e-5), (
        "the reference is the policy until that has learned"
    )
    assert whole[0]["rewards/margin"] == 0.0 and whole[-1]["loss"] < 0.6
    assert (
        whole[-1]["rewards/accuracy"] == 1.0
        and whole[-1]["rewards/chosen"] > whole[-1]["rewards/rejected"]
    )
    parts = of_rows(tmp_path / "parts", assets, "pairs.jsonl", *small)
    finished(*parts, "trainer.total_steps=5")
    resumed = finished(*parts, "trainer.total_steps=12")
    assert checkpoints(tmp_path / "parts" / "rft" / "run")[-1] == 12
    for wanted, found in zip(whole, resumed, strict=True):
        for name in ("loss", "rewards/margin", "grad_norm", "num_tokens"):
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), (
                found["step"],
                name,
            )


def test_mix_learns_from_rollouts_and_expert_rows_in_one_step(tmp_path: Path, assets: Path) -> None:
    words = overrides(tmp_path, "run", assets)
    rows = finished(
        *(word.replace("experiment=grpo", "experiment=mix") for word in words),
        f"buffer.trainer_input.auxiliary_buffers.sft_dataset.path={assets / 'train.jsonl'}",
        "trainer.total_steps=4",
        "algorithm.sample_strategy_args.expert_data_ratio=0.5",
        "+algorithm.entropy_loss_fn_args.entropy_coef=0.01",
        "algorithm.policy_loss_fn_args.mu=0.5",
        "algorithm.optimizer.lr=1e-3",
    )
    assert [row["sample/expert_rows"] for row in rows] == [4 * TASKS] * 4 and {
        row["loss/mu"] for row in rows
    } == {0.5}
    assert [row["sample/groups"] for row in rows] == [TASKS] * 4
    assert rows[0]["kl/mismatch"] < 1e-6, (
        "expert tokens, which no engine sampled, are not compared with one"
    )
    assert rows[-1]["expert/nll"] < rows[0]["expert/nll"] - 0.5
    assert all(row["kl/reference"] >= 0 for row in rows)


def test_cpt_learns_a_text(tmp_path: Path, assets: Path) -> None:
    rows = finished(
        *of_rows(
            tmp_path,
            assets,
            "text.jsonl",
            "algorithm=cpt",
            "algorithm.optimizer.lr=1e-3",
            "trainer.total_steps=20",
        )
    )
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.0
    assert rows[0]["prompt_length/mean"] == 1


def test_mix_chord_follows_its_schedule(tmp_path: Path, assets: Path) -> None:
    beside = (
        f"{{sft_dataset: {{storage_type: file, path: {assets / 'train.jsonl'}, format: "
        f"{{prompt_type: plaintext}}}}}}"
    )
    rows = finished(
        *overrides(tmp_path, "run", assets, "algorithm=mix_chord", "trainer.total_steps=4"),
        f"+buffer.trainer_input.auxiliary_buffers={beside}",
        "algorithm.policy_loss_fn_args.mu_peak=0.8",
        "+algorithm.policy_loss_fn_args.mu_warmup_steps=2",
        "+algorithm.policy_loss_fn_args.mu_decay_steps=1",
    )
    assert [row["loss/mu"] for row in rows] == pytest.approx([0.0, 0.4, 0.8, 0.1])


@pytest.mark.parametrize("name", ["on_policy_distill", "jsd"])
def test_a_teacher_stands_in_for_rewards(tmp_path: Path, assets: Path, name: str) -> None:
    """A teacher of other size and weights, sure of itself, whom the policy comes nearer to."""
    from rft.tools.toy import write_model

    teacher = write_model(
        tmp_path / "teacher", "llama", seed=9, hidden=32, layers=1, heads=2, kv_heads=2, ffn=64
    )
    weights = load_file(teacher / "model.safetensors")
    weights["model.norm.weight"] *= (
        10  # as they were made, all tokens are as likely, and the distance is lost in the noise
    )
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    rows = finished(
        *overrides(
            tmp_path,
            "run",
            assets,
            f"algorithm={name}",
            "trainer.total_steps=30",
            "buffer.batch_size=16",
        ),
        f"model.teacher_model_path={teacher}",
        "algorithm.optimizer.lr=3e-3",
    )
    assert rows[0]["advantage/mean"] < 0, "what the policy samples, the policy finds likelier"
    distance = [row["kl/teacher"] for row in rows]
    assert sum(distance[-3:]) < 0.85 * sum(distance[:3]), distance
    assert "kl/reference" not in rows[0]
