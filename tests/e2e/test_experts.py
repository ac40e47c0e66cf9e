"""A mixture of experts through the whole loop, its trainer cut TP2 x EP2: import, steps, weight sync, checkpoint, export."""

from pathlib import Path

import pytest

from runs import LETTERS, checkpoints, step_rows, train

STEPS = {"sft_warmup": 2, "rft": 3}
TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32

pytestmark = pytest.mark.timeout(600)


def test_a_mixture_of_experts_is_tuned_at_tp2_ep2(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    command = [
        "experiment=quickstart_moe", "monitor=none", f"checkpoint_root_dir={tmp_path}", "stages.0.trainer.stop_at_loss=null",
        f"stages.0.trainer.total_steps={STEPS['sft_warmup']}", "stages.0.buffer.train_batch_size=16",
        "stages.0.cluster.threads_per_rank=1", f"stages.1.trainer.total_steps={STEPS['rft']}",
        "stages.1.trainer.save_interval=2", "stages.1.buffer.batch_size=4", "stages.1.algorithm.repeat_times=4",
        "explorer.rollout_model.kv_cache_gb=0.25", "stages.1.synchronizer.max_staleness=0",
        f"stages.1.buffer.explorer_input.default_reward_fn_type={LETTERS}", "stages.1.buffer.explorer_input.eval_tasksets=[]",
        "finish=null",
    ]  # fmt: skip
    with train(*command) as run:
        assert (run.end(timeout=400), run.errors()) == (0, "")
    assert "(tp2 pp1 cp1 ep2 etp1)" in run.lines[0]
    job = tmp_path / "rft" / "quickstart_moe" / "rft"
    rows = step_rows(job)
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["grad_norm"] > 0 for row in rows)
    # Every step learns from what the weights of the step before have said: all of them reached the engine.
    assert max(row["logprob_diff/max"] for row in rows) < TOLERANCE
    assert checkpoints(job)[-1] == STEPS["rft"]
    _, loading = AutoModelForCausalLM.from_pretrained(job / "huggingface" / "step_00000003", output_loading_info=True)
    assert not any(loading.values()), loading
