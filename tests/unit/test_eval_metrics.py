"""What several answers to one task add up to, against values by hand and by counting; and which
models a bench evaluates.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import ray

from rft.config import Config, ConfigError, TasksetConfig
from rft.ground.experience import EvalResult, Experience, Sampling, Task, encode
from rft.ground.protocols import ActorHandle
from rft.monitor.run_record import RunRecord
from rft.rollout import evaluation
from rft.rollout.evaluation import extremes, pass_at, repeated, sizes
from rft.run import modes, stages


def group(*rewards: float, **metrics: list[float]) -> list[Experience]:
    return [
        Experience(
            tokens=[1, 2],
            prompt_length=1,
            action_mask=[1],
            sample=n,
            reward=reward,
            metrics={name: values[n] for name, values in metrics.items()},
        )
        for n, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(("n", "right"), [(4, 0), (4, 1), (4, 3), (4, 4), (6, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, right: int) -> None:
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(range(n), k))
        assert pass_at(k, n, right) == pytest.approx(
            sum(min(s) < right for s in subsets) / len(subsets)
        )


def test_best_and_worst_are_near_what_drawing_with_replacement_gives() -> None:
    values = [0.0, 0.2, 0.7, 1.0]
    for k in (2, 4):
        draws = list(itertools.product(values, repeat=k))
        best, worst = extremes(values, k)
        assert best == pytest.approx(sum(map(max, draws)) / len(draws), abs=0.03)
        assert worst == pytest.approx(sum(map(min, draws)) / len(draws), abs=0.03)
        assert (best, worst) == extremes(values, k)  # the same draws every time


@pytest.mark.parametrize(
    ("n", "found"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (12, [2, 4, 8, 12])]
)
def test_k_doubles_up_to_n(n: int, found: list[int]) -> None:
    assert sizes(n) == found


def test_metrics_of_a_set_by_hand() -> None:
    found = repeated([group(1.0, 0.0, form=[0.5, 0.1]), group(1.0, 1.0, form=[0.5, 0.5])], failed=2)
    assert (
        found["reward/mean@2"] == 0.75
        and found["reward/std@2"] == 0.25
        and found["form/mean@2"] == pytest.approx(0.4)
    )
    assert found["pass@1"] == pytest.approx((0.5 + 1 + 0 + 0) / 4) and found[
        "pass@2"
    ] == pytest.approx(2 / 4)
    assert found["reward/best@2"] > 0.8 and found["reward/worst@2"] < 0.7
    assert set(repeated([group(1.0)], 0)) == {"reward/mean@1"}


def test_a_run_of_several_turns_is_one_answer() -> None:
    turns = group(0.0, 1.0)
    turns[0].turn, turns[1].turn, turns[1].sample = 0, 1, 0
    assert repeated([turns], 0) == {"reward/mean@1": 1.0}


def test_a_set_with_several_answers_is_reported_by_name() -> None:
    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            return ""

    task = Task(id="a", taskset="a", row=0, prompt="p", sampling=Sampling())
    result = evaluation.summarise("held_out", 3, 1, [(task, group(1.0, 0.0))], Tokenizer())
    assert (
        result.metrics["accuracy"],
        result.metrics["reward/mean"],
        result.metrics["reward/mean@2"],
    ) == (
        0.5,
        0.5,
        0.5,
    )


@pytest.mark.parametrize("part", ["accuracy", "acc"])
def test_a_right_answer_that_is_too_long_is_right(part: str) -> None:
    """veRL's managers take a length off the score, beside which they say `acc`."""
    long, short = group(0.4, 1.0)
    long.metrics, short.metrics = {part: 1.0, "overlong": -0.6}, {part: 0.0, "score": 1.0}
    assert [evaluation.is_right(one) for one in (long, short)] == [True, False]


# --- bench ----------------------------------------------------------------------------------------


class Bench:
    """An explorer actor that notes what it evaluates, and dies when it is told to."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.loaded: list[tuple[str, int]] = []
        self.dies_at = dies_at
        self.load_weights = self.evaluate = self

    def remote(self, *given: Any) -> Any:
        if len(given) == 2:
            self.loaded.append((Path(given[0]).name, given[1]))
            return None
        if given[0] == self.dies_at:
            raise RuntimeError("killed")
        sets = ("one", "two")
        return [
            encode(
                EvalResult(
                    taskset=s, version=given[0], num_tasks=1, metrics={"accuracy": given[0] / 10}
                )
            )
            for s in sets
        ]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(ray, "get", lambda reference, timeout=None: reference)
    config = Config(name="b", checkpoint_root_dir=str(tmp_path), mode="bench")
    config.model.model_path = str(tmp_path / "base")
    config.monitor.monitor_type = "none"
    config.buffer.explorer_input.eval_tasksets = [
        TasksetConfig(name="one", path="a"),
        TasksetConfig(name="two", path="a"),
    ]
    for step in (10, 2, 4):
        (tmp_path / "rft" / "b" / "huggingface" / f"step_{step:08d}").mkdir(parents=True)
    return config


def evaluated(config: Config, dies_at: int | None = None) -> list[int]:
    explorer = Bench(dies_at)
    try:
        modes.evaluate_checkpoints(config, ActorHandle(explorer))
    except RuntimeError:
        assert dies_at is not None
    return [step for _, step in explorer.loaded]


def results(config: Config) -> dict[int, float]:
    rows = RunRecord(Path(config.checkpoint_root_dir) / "rft" / "b" / "bench").rows
    assert all("bench/one/accuracy" in row and "bench/two/accuracy" in row for row in rows)
    return {row["step"]: row["bench/one/accuracy"] for row in rows}


def test_a_bench_takes_all_steps_in_order_and_goes_on_where_it_was_stopped(job: Config) -> None:
    assert evaluated(job, dies_at=4) == [0, 2, 4]
    assert evaluated(job) == [4, 10]
    assert results(job) == {0: 0.0, 2: 0.2, 4: 0.4, 10: 1.0}
    assert evaluated(job) == []
    assert results(job) == {0: 0.0, 2: 0.2, 4: 0.4, 10: 1.0}


def test_only_the_newest_or_without_the_base_model(job: Config) -> None:
    job.explorer.eval_on_startup = False
    assert [step for step, _ in modes.chosen(job)] == [2, 4, 10]
    job.explorer.bench_on_latest_checkpoint = True
    assert evaluated(job) == [10] and results(job) == {10: 1.0}
    job.explorer.bench_on_latest_checkpoint = False
    assert evaluated(job) == [2, 4] and json.dumps(sorted(results(job))) == "[2, 4, 10]"


def test_a_bench_without_exports_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_hf_checkpoint=always"):
        stages.check_exports(Config(name="none", checkpoint_root_dir=str(tmp_path)))
