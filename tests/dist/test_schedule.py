"""Learning rates by hand."""

from typing import Any

import pytest

from rft.config import ConfigError, OptimizerConfig
from rft.megatron.schedule import check, learning_rate


def rates(kind: str, steps: int = 6, **keys: Any) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, "lr_scheduler_type": kind, "lr_warmup_steps": 2} | keys)
    return [learning_rate(step, config, steps) for step in range(steps + 1)]


def test_every_schedule_warms_up_and_ends_at_its_floor() -> None:
    assert rates("constant") == pytest.approx([0.5, 1, 1, 1, 1, 1, 1])
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    assert rates("linear", min_lr_ratio=0.2)[-1] == pytest.approx(0.2)
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)


def test_wsd_stays_and_then_comes_down_over_the_last_steps() -> None:
    assert rates("wsd", 10, lr_decay_steps=4) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    )
    assert rates("wsd", 10, lr_decay_steps_ratio=0.4) == rates("wsd", 10, lr_decay_steps=4)
    assert rates("wsd", 20) == rates("wsd", 20, lr_decay_steps=2), "a tenth"
    assert rates("wsd", 10, lr_decay_steps=4, lr_decay_style="cosine")[-4:] == pytest.approx(
        [0.853553, 0.5, 0.146447, 0], abs=1e-6
    )
    root = rates("wsd", 10, lr_decay_steps=4, lr_decay_style="minus_sqrt", min_lr_ratio=0.2)
    assert root[-4:] == pytest.approx(
        [0.6, 0.2 + 0.8 * (1 - 0.5**0.5), 0.2 + 0.8 * (1 - 0.75**0.5), 0.2]
    )


def test_warm_up_as_a_share_of_the_run() -> None:
    assert rates("linear", 10, lr_warmup_steps=0, lr_warmup_steps_ratio=0.35) == rates(
        "linear", 10, lr_warmup_steps=4
    )


@pytest.mark.parametrize(
    ("keys", "total", "message"),
    [
        ({"lr_scheduler_type": "cosine"}, None, "lr_scheduler_type=cosine needs an end"),
        ({"lr_warmup_steps_ratio": 0.1}, None, "lr_warmup_steps_ratio=0.1 needs an end"),
        ({"lr_warmup_steps_ratio": 0.1, "lr_warmup_steps": 3}, 10, "set only one"),
        ({"lr_warmup_steps_ratio": 1.5}, 10, "between 0 and 1"),
        ({"min_lr_ratio": -0.1}, 10, "min_lr_ratio=-0.1"),
        (
            {"lr_scheduler_type": "linear", "lr_decay_steps": 3},
            10,
            "belongs to algorithm.optimizer.lr_scheduler_type=wsd",
        ),
        (
            {"lr_scheduler_type": "wsd", "lr_decay_steps": 3, "lr_decay_steps_ratio": 0.3},
            10,
            "set only one",
        ),
        (
            {"lr_scheduler_type": "wsd", "lr_decay_style": "root"},
            10,
            "use linear, cosine, minus_sqrt",
        ),
        (
            {"lr_scheduler_type": "wsd", "lr_decay_steps": 8, "lr_warmup_steps": 3},
            10,
            "do not fit into 10 steps",
        ),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(
    keys: dict[str, Any], total: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check(OptimizerConfig(**keys), total)
    assert len(str(refused.value).splitlines()) == 1
