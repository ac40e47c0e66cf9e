"""What metrics are called here and elsewhere, so that a dashboard of another system can be pointed
at a run of this one.

In: a step's metrics under their own names. Out, with `monitor.other_names=true`: the same numbers
also under the names in `ELSEWHERE`. Invariant: a number is copied, never computed: where another
system's metric means something else, it has no entry.
"""

ELSEWHERE = {  # name in other systems -> name here
    "actor/final_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/pg_clipfrac": "clip_frac",
    "clip_frac/low": "clip_frac_low",
    "clip_frac/high": "clip_frac_high",
    "actor/kl_loss": "kl/reference",
    "actor/entropy_loss": "entropy/mean",
    "actor/lr": "lr",
    "critic/score/mean": "reward/mean",
    "critic/score/max": "reward/max",
    "critic/score/min": "reward/min",
    "critic/rewards/mean": "reward/mean",
    "critic/rewards/max": "reward/max",
    "critic/rewards/min": "reward/min",
    "kl/ref": "kl/reference",
    "zero_signal_groups": "reward/zero_signal_groups",
    "mfu": "perf/mfu",
    "perf/mfu/actor": "perf/mfu",
    "time/train_step": "time/train_s",
    "time/read_experience": "time/wait_batch_s",
    "time/sync_weight": "time/sync_wait_s",
    "time/save_checkpoint": "time/checkpoint_s",
    "time/wait_batch": "time/wait_batch_s",
    "time/score": "time/score_s",
    "time/train": "time/train_s",
    "time/sync": "time/sync_wait_s",
    "time/stage": "time/staging_wait_s",
    "time/eval": "time/eval_s",
    "time/step": "time/step_s",
    "engine/running": "pool/running",
    "ckpt/stage_s": "checkpoint/copy_s",
    "ckpt/write_s": "checkpoint/commit_s",
    "ckpt/bytes": "checkpoint/bytes",
    "ckpt/behind_steps": "checkpoint/behind_steps",
}


def with_other_names(metrics: dict[str, float]) -> dict[str, float]:
    """`metrics`, and each that is known elsewhere under that name too."""
    return metrics | {
        other: metrics[ours]
        for other, ours in ELSEWHERE.items()
        if ours in metrics and other not in metrics
    }
