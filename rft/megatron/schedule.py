"""The learning rate as a function of the step number alone: a resume needs to remember nothing but the step."""

import math

from rft.config import ConfigError, OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Rate of update number `step` (from 0): linear warm-up to `lr`, then the schedule down to min_lr_ratio * lr."""
    warmup, kind = config.lr_warmup_steps, config.lr_scheduler_type
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if kind == "constant":
        return config.lr
    if total_steps is None:
        raise ConfigError(f"algorithm.optimizer.lr_scheduler_type={kind} needs an end: set trainer.total_steps")
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
