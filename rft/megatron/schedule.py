"""The learning rate as a function of the step number alone: a resume needs to remember nothing but
the step.

    constant   ──────────       linear, cosine   ╲ down to the end       wsd
            ───────╲ down over the last steps only

All begin with a linear warm-up. "wsd" is warm-up, stable, decay (arXiv:2404.06395): the rate stays
until the decay, so that a run can be made longer from a checkpoint before it. Neither torch nor
megatron is loaded here: `preflight` asks too.
"""

import math
from collections.abc import Iterator

from rft.config import ConfigError, OptimizerConfig
from rft.ground.errors import refuse_all

KEY = "algorithm.optimizer"
# of the steps, where a wsd schedule says nothing else (the share that arXiv:2405.18392 finds
# enough)
DECAY_RATIO = 0.1
# share of the way down that is left, by the part of it that is over; "minus_sqrt" is
# arXiv:2405.18392's
SHAPES = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
SCHEDULERS = ("constant", "linear", "cosine", "wsd")


def learning_rate(step: int, config: OptimizerConfig, total_steps: int | None) -> float:
    """Rate of update number `step` (from 0): linear warm-up to `lr`, then the schedule down to
    min_lr_ratio * lr.
    """
    kind, warmup = config.lr_scheduler_type, warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if kind == "constant":
        return config.lr
    end = _end(config, total_steps)
    length = decay_steps(config, end) if kind == "wsd" else end - warmup
    progress = min(1.0, max(0.0, (step - (end - length)) / max(1, length)))
    shape = SHAPES[(config.lr_decay_style or "linear") if kind == "wsd" else kind]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape(progress))


def warmup_steps(config: OptimizerConfig, total_steps: int | None) -> int:
    if not config.lr_warmup_steps_ratio:
        return config.lr_warmup_steps
    return math.ceil(config.lr_warmup_steps_ratio * _end(config, total_steps))


def decay_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Of the decay of "wsd"."""
    if config.lr_decay_steps is not None:
        return config.lr_decay_steps
    return math.ceil((config.lr_decay_steps_ratio or DECAY_RATIO) * total_steps)


def check(config: OptimizerConfig, total_steps: int | None, key: str = KEY) -> None:
    """Raise ConfigError for a schedule that contradicts itself or cannot fit the run."""
    refuse_all([*_problems(config, key)] or _fit(config, total_steps, key))


def _problems(config: OptimizerConfig, key: str) -> Iterator[str]:
    for name in ("lr_warmup_steps_ratio", "lr_decay_steps_ratio", "min_lr_ratio"):
        value = getattr(config, name)
        if value is not None and not 0 <= value <= 1:
            yield (f"{key}.{name}={value}: a share must be between 0 and 1")
    for one, other in (
        ("lr_warmup_steps", "lr_warmup_steps_ratio"),
        ("lr_decay_steps", "lr_decay_steps_ratio"),
    ):
        if getattr(config, one) and getattr(config, other):
            yield (
                f"{key}.{one}={getattr(config, one)} and {key}.{other}={getattr(config, other)}: "
                "set only one"
            )
    if config.lr_scheduler_type != "wsd":
        for name in ("lr_decay_steps", "lr_decay_steps_ratio", "lr_decay_style"):
            if getattr(config, name) is not None:
                yield (
                    f"{key}.{name}={getattr(config, name)} belongs to {key}.lr_scheduler_type=wsd, "
                    "not to "
                    f"{config.lr_scheduler_type}: set that, or leave it out"
                )
    elif config.lr_decay_style is not None and config.lr_decay_style not in SHAPES:
        yield (f"{key}.lr_decay_style={config.lr_decay_style} is unknown: use {', '.join(SHAPES)}")


def _fit(config: OptimizerConfig, total_steps: int | None, key: str) -> Iterator[str]:
    if config.lr_scheduler_type == "constant" and not config.lr_warmup_steps_ratio:
        return
    end = _end(config, total_steps, key)
    if config.lr_scheduler_type != "wsd":
        return
    warmup, decay = warmup_steps(config, end), decay_steps(config, end)
    if decay < 0 or warmup + decay > end:
        yield (
            f"{key}.lr_decay_steps={decay} after {warmup} steps of warm-up do not fit into "
            f"{end} steps: lower one of them, "
            "or raise trainer.total_steps"
        )


def _end(config: OptimizerConfig, total_steps: int | None, key: str = KEY) -> int:
    if total_steps is None:
        what = (
            "lr_scheduler_type"
            if config.lr_scheduler_type != "constant"
            else "lr_warmup_steps_ratio"
        )
        raise ConfigError(
            f"{key}.{what}={getattr(config, what)} needs an end: set trainer.total_steps"
        )
    return total_steps
