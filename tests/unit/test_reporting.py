"""What a step tells, and what a process that resumes a run learns from the lines that the one
before it wrote.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.config import Config, ExplorerInputConfig, MonitorConfig, TasksetConfig
from rft.ground.experience import Experience
from rft.monitor.metrics import Speed
from rft.monitor.run_record import RunRecord
from rft.trainer.reporting import StepReporter, representative

LINES = [
    {"step": 0, "eval/a/accuracy": 0.1},
    {"step": 0, "eval/b/accuracy": 0.2},
    {"step": 1, "loss": 1.0},
    {"step": 5, "loss": 0.5},
    {"step": 5, "eval/a/accuracy": 0.3},
    {"step": 5, "eval/b/accuracy": 0.4},
    {"step": 10, "eval/a/accuracy": 0.5},  # killed before b was done
    {"step": 10, "loss": 0.4},
    {"step": 15, "eval/a/accuracy": 0.7},
    {"step": 15, "eval/b/accuracy": 0.8},
]


def evaluated(job: Path, resumed_at: int, names: tuple[str, ...] = ("a", "b")) -> dict[int, float]:
    """Accuracy on `a` of every version that counts as evaluated."""
    (job / "metrics.jsonl").write_text(
        "".join(json.dumps(line | {"time_s": 1.0}) + "\n" for line in LINES)
    )
    config = Config(name="x", monitor=MonitorConfig(monitor_type="none"))
    config.buffer.explorer_input = ExplorerInputConfig(
        eval_tasksets=[TasksetConfig(name=n, path="-") for n in names]
    )
    reporter = StepReporter(
        config, job, resumed_at, tokenizer=None, speed=Speed(1, None, False), pool=dict
    )
    reporter.close()
    return {version: found["eval/a/accuracy"] for version, found in reporter.evaluated.items()}


def test_evaluations_up_to_the_resumed_step_are_known(tmp_path: Path) -> None:
    """One that was cut in half is not: all of it is made again; nor what a new start or an older
    checkpoint drops.
    """
    assert evaluated(tmp_path, 10) == {0: 0.1, 5: 0.3}
    assert evaluated(tmp_path, 15) == {0: 0.1, 5: 0.3, 15: 0.7}
    assert evaluated(tmp_path, 4) == {0: 0.1}
    assert evaluated(tmp_path, 0) == {}
    assert evaluated(tmp_path, 15, names=()) == {}


def test_a_step_shows_its_best_and_its_worst_responses(tmp_path: Path) -> None:
    config = Config(name="x", monitor=MonitorConfig(monitor_type="none", num_samples=2))
    text = SimpleNamespace(decode=lambda tokens: "".join(map(str, tokens)))
    reporter = StepReporter(config, tmp_path, 0, text, Speed(1, None, False), pool=dict)
    made = [
        Experience(tokens=[1, n], prompt_length=1, action_mask=[1], group=n, reward=float(n))
        for n in (2, 3, 1)
    ]
    work = {"packing/tokens": 2.0, "packing/forward_flops": 1e12}  # one was left out
    reporter.step(4, {"time/train_s": 1.0, "time/step_s": 2.0} | work, made)
    reporter.close()
    (row,) = RunRecord(tmp_path).rows
    assert (row["step"], row["tokens_per_s"], row["perf/tokens_per_s"]) == (4, 3.0, 2.0)
    assert row["perf/tflops_per_gpu"] == 3.0
    told = [
        tuple(shown[name] for name in ("step", "table", "prompt", "response", "reward"))
        for shown in RunRecord(tmp_path).samples
    ]
    assert told == [(4, "samples", "1", "1", 1.0), (4, "samples", "1", "3", 3.0)]


def test_rewards_that_are_told_are_those_that_there_are(tmp_path: Path) -> None:
    """Those of tokens added up, none that failed, none of a response that others are compared with;
    the work of a step is that of each of its epochs.
    """
    config = Config(name="x")
    config.monitor = MonitorConfig(monitor_type="none", num_samples=2, detailed=True)
    config.trainer.ppo_epochs = 3
    text = SimpleNamespace(decode=str)
    reporter = StepReporter(config, tmp_path, 0, text, Speed(1, None, False), pool=dict)

    def one(reward: float, **more: Any) -> Experience:
        return Experience(
            tokens=[1, 2], prompt_length=1, action_mask=[1], group=0, reward=reward, **more
        )

    made = [
        one(0.0, token_rewards=[7.0]),
        one(5.0),
        one(0.0, reward_outcome="error"),
        one(9.0, info={"baseline": True}),
    ]
    work = {"packing/tokens": 2.0, "packing/forward_flops": 1e12}
    reporter.step(1, {"time/train_s": 1.0, "time/step_s": 1.0} | work, made[:3])
    reporter.step(2, {"time/train_s": 1.0, "time/step_s": 1.0}, made[1:])
    reporter.close()
    first, second = RunRecord(tmp_path).rows
    assert (first["perf/tokens_per_s"], first["perf/tflops_per_gpu"]) == (6.0, 9.0)
    assert (first["reward/p05"], first["reward/p95"]) == (5.1, 6.9)
    assert (second["reward/p05"], second["reward/p95"]) == (5.0, 5.0)
    shown = [row["reward"] for row in RunRecord(tmp_path).samples if row["step"] == 1]
    assert shown == [0.0, 7.0]


@pytest.mark.parametrize(("have", "wanted"), [(1, 4), (3, 4), (3, 8), (4, 4), (5, 4), (5, 1)])
def test_each_response_is_shown_once(have: int, wanted: int) -> None:
    made = [
        Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], reward=float(n))
        for n in range(have)
    ]
    shown = [one.reward for one in representative(made, wanted)]
    assert len(set(shown)) == len(shown) == min(have, wanted)
    assert have - 1.0 in shown, "the best"
