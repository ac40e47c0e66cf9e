"""A mixture of experts through the whole loop, its trainer cut TP2 x EP2: import, steps, weight
sync, checkpoint, export.
"""

from pathlib import Path

import pytest

from rft.tools.toy import write_arithmetic, write_model

from runs import MODEL, REPEATS, TASKS, checkpoints, overrides, step_rows, train

STEPS = 3
LAYOUT = [  # of experiment=quickstart_moe
    "trainer.num_ranks=2",
    "trainer.megatron.tensor_model_parallel_size=2",
    "trainer.megatron.sequence_parallel=true",
    "trainer.megatron.expert_model_parallel_size=2",
    "trainer.megatron.expert_tensor_parallel_size=1",
]
TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32

# `tests/dist` has the layouts of experts, import, export and blocks among them
pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def test_a_mixture_of_experts_is_tuned_at_tp2_ep2(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assets = tmp_path / "assets"
    write_model(assets / "model", "qwen3_moe", **MODEL)
    write_arithmetic(assets, digits=1, num_eval=16)
    more = [
        f"trainer.total_steps={STEPS}",
        "trainer.save_interval=2",
        "synchronizer.max_staleness=0",
        *LAYOUT,
    ]
    with train(*overrides(tmp_path, "experts", assets, *more)) as run:
        assert (run.end(timeout=400), run.errors()) == (0, "")
    assert "(tp2 pp1 cp1 ep2 etp1)" in run.lines[0]
    job = tmp_path / "rft" / "experts"
    rows = step_rows(job)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["grad_norm"] > 0 for row in rows)
    # Every step learns from what the weights of the step before have said: all of them reached the
    # engine.
    assert max(row["logprob_diff/max"] for row in rows) < TOLERANCE
    # the trainer was told of every token but the last of each response, and would have chosen so
    assert all(row["routing/free_tokens"] == TASKS * REPEATS for row in rows)
    assert all(row["routing/agree_frac"] > 0.99 and not row["drift/alarms"] for row in rows)
    assert checkpoints(job)[-1] == STEPS
    _, loading = AutoModelForCausalLM.from_pretrained(
        job / "huggingface" / "step_00000003", output_loading_info=True
    )
    assert not any(loading.values()), loading
