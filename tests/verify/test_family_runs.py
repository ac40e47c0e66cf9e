"""Every family of `tests/dist/test_families.py` through the whole loop: steps in whose
log-probabilities engine and trainer agree after every sync, an export that transformers loads, and
a run that begins with that export, engine and trainer each reading it by themselves. And one that
is killed, whose journal has the routes.
"""

from pathlib import Path
from typing import Any

import pytest
from exact import EVERYTHING, assert_same, deterministic, run_killed, run_whole, trained
from safetensors.torch import load_file

from rft.ground.families import num_experts
from rft.ground.names import read_hf_config
from rft.tools.toy import write_arithmetic, write_model

from runs import MODEL, REPEATS, TASKS, checkpoints, overrides, step_rows, train

STEPS = 10
TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"more": {"sliding_window": 9}},
    "mixtral": {},
    "glm4_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "qwen2_moe": {"more": {"mlp_only_layers": [0]}},
}
BALANCED = "glm4_moe", "deepseek_v3"  # their routers' correction biases move with every step
RATE = "trainer.moe_router_bias_update_rate=0.01"
pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_after_every_sync_and_over_an_export(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    assets = tmp_path / "assets"
    write_model(assets / "model", family, tied=False, **(MODEL | FAMILIES[family]))
    write_arithmetic(assets, digits=1, num_eval=16)
    moves = [RATE] if family in BALANCED else []
    job = tuned(tmp_path, family, assets, STEPS, *moves)
    export = job / "huggingface" / f"step_{STEPS:08d}"
    _, loading = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(loading.values()), loading
    if moves:
        assert_biases_moved(assets / "model", export)
    tuned(tmp_path, f"{family}_again", assets, 1, f"model.model_path={export}")


def assert_biases_moved(before: Path, after: Path) -> None:
    then, now = (load_file(path / "model.safetensors") for path in (before, after))
    biases = [name for name in then if name.endswith("e_score_correction_bias")]
    moved = [(now[name] - then[name]).abs().max().item() for name in biases]
    assert moved and all(0.005 < one <= STEPS * 0.01 + 1e-6 for one in moved), moved


def tuned(root: Path, name: str, assets: Path, steps: int, *more: str) -> Path:
    """The job's directory, after that many steps, each on rollouts of the weights of the step
    before it.
    """
    given = [f"trainer.total_steps={steps}", "synchronizer.max_staleness=0", *more]
    with train(*overrides(root, name, assets, *given)) as run:
        assert (run.end(timeout=600), run.errors()) == (0, "")
    job = root / "rft" / name
    rows = step_rows(job)
    assert len(rows) == steps and all(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows) < TOLERANCE
    if num_experts(read_hf_config(str(assets / "model"))):
        # of every token but the last of a response the engine has told its experts
        assert all(row["routing/free_tokens"] == TASKS * REPEATS for row in rows)
        assert all(row["routing/agree_frac"] > 0.99 for row in rows)
    assert checkpoints(job)[-1] == steps
    return job


def test_killed_and_continued_it_routes_as_it_did(tmp_path: Path) -> None:
    """The step after the checkpoint is trained twice, the second time by the routes of the
    journal and from the biases that the checkpoint has.
    """
    steps, assets = 4, tmp_path / "assets"
    write_model(assets / "model", "glm4_moe", tied=False, **MODEL)
    write_arithmetic(assets, digits=1, num_eval=16)
    given = [f"trainer.total_steps={steps}", "trainer.save_interval=2", "explorer.eval_interval=0"]
    given += [RATE]
    run_whole(deterministic(tmp_path, "whole", assets, *given))
    run_killed(deterministic(tmp_path, "killed", assets, *given), [(3, EVERYTHING)])
    whole, killed = (tmp_path / "rft" / name for name in ("whole", "killed"))
    assert all(one.routed_experts for batch in trained(killed, steps) for one in batch)
    rows = step_rows(killed)
    assert rows[2]["sample/replayed"] and all(row["routing/agree_frac"] > 0.99 for row in rows)
    assert_same(killed, whole, steps)
