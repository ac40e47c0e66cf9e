"""Learning rates by hand."""

import pytest

from rft.config import ConfigError, OptimizerConfig
from rft.megatron.schedule import learning_rate


def rates(kind: str, steps: int = 6, **keys: float) -> list[float]:
    config = OptimizerConfig(lr=1.0, lr_scheduler_type=kind, lr_warmup_steps=2, **keys)
    return [learning_rate(step, config, steps) for step in range(steps + 1)]


def test_every_schedule_warms_up_and_ends_at_its_floor() -> None:
    assert rates("constant") == pytest.approx([0.5, 1, 1, 1, 1, 1, 1])
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates("linear", min_lr_ratio=0.2)[-1] == pytest.approx(0.2)
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


def test_a_schedule_with_an_end_needs_one() -> None:
    with pytest.raises(ConfigError, match="total_steps"):
        learning_rate(0, OptimizerConfig(lr_scheduler_type="cosine"), None)
