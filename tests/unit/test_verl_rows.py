"""Rows and rewards as veRL has them run as they are: from a parquet file, through the taskset and
the process that scores.
"""

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from rft.config import FormatConfig, TasksetConfig
from rft.data.taskset import TaskDefaults, Taskset, check_taskset
from rft.ground.errors import all_of
from rft.ground.experience import Sampling, Task
from rft.preflight.inputs_flows import verl_function, verl_rows
from rft.rollout.reward_pool import RewardPool
from rft.rollout.reward_worker import RewardResult
from rft.rollout.rewards import data_sources as sources

KEY = "buffer.explorer_input.taskset"
OWN = """
    import asyncio

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}

    async def later(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
        await asyncio.sleep(0)
        return extra_info["index"] + bonus

    def silent(data_source, solution_str, ground_truth, extra_info):
        return {"acc": 1.0}

    def narrow(data_source, solution_str):
        return 1.0
"""


def row(number: int, source: str = "openai/gsm8k", truth: Any = "72") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"How many are {number} and 70?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": number},
    }


def taskset(file: Path, rows: list[dict[str, Any]], **args: Any) -> TasksetConfig:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    form = FormatConfig(prompt_type="messages", messages_key="prompt")
    return TasksetConfig(
        path=str(file), format=form, default_reward_fn_type="verl", reward_fn_args=args
    )


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "score.py").write_text(textwrap.dedent(OWN))
    return str(tmp_path / "score.py")


def test_rows_of_a_parquet_file_are_scored_in_a_worker(tmp_path: Path, own: str) -> None:
    config = taskset(tmp_path / "train.parquet", [row(1), row(2)])
    assert check_taskset(config, f"{KEY}.path") == 2 and list(verl_rows(KEY, config)) == []
    defaults = TaskDefaults("single_turn", "exact_match", 2, 16, 1.0)
    first, second = Taskset(config, defaults, train=False)
    assert first.prompt == [{"role": "user", "content": "How many are 1 and 70?"}]

    def with_own(task: Task, function: str, **kwargs: Any) -> Task:
        args = {"path": own, "function": function, "kwargs": kwargs}
        return msgspec.structs.replace(task, reward_args=args)

    async def score() -> list[RewardResult]:
        async with RewardPool(1, timeout_s=60.0) as pool:
            groups = (
                [(first, "so #### 72"), (first, "so 72")],
                [(with_own(first, "compute_score"), "72")],
                [(with_own(second, "later", bonus=0.5), "x")],
                [(with_own(first, "silent"), "x")],
            )
            return [result for group in groups for result in await pool.score(group)]

    right, wrong, parts, later, silent = asyncio.run(score())
    assert (right.reward, wrong.reward) == (1.0, 0.0) and right.outcome == "ok"
    assert (parts.reward, parts.metrics) == (1.0, {"acc": 1.0}), "the score alone is the reward"
    assert later.reward == 2.5, "extra_info and further arguments arrive; async is awaited"
    assert silent.outcome == "error" and "no `score`" in silent.message


def test_rows_that_cannot_be_scored_are_refused_by_name(tmp_path: Path) -> None:
    rows = [row(1), row(2, "numina_cn_k12"), row(3, "codeforces"), row(4, truth=None)]
    rows[0]["images"] = [b"png"]
    said = list(verl_rows(KEY, taskset(tmp_path / "a.parquet", rows)))
    assert ["numina_cn_k12" in said[1], "codeforces" in said[0]] == [True, True]
    assert "no reward_model.ground_truth" in said[2] and "has images" in said[3] and len(said) == 4
    own = taskset(tmp_path / "b.parquet", rows[1:3], path="score.py")
    assert list(verl_rows(KEY, own)) == [], "a function of the user's scores every source"
    rows = [row(1) | {"reward_model": {"style": "model", "ground_truth": "1"}}]
    [said] = verl_rows(KEY, taskset(tmp_path / "c.parquet", rows))
    assert "style=model" in said
    [*_, said] = verl_rows(KEY, taskset(tmp_path / "d.parquet", [{"reward_model": None}]))
    assert "no reward_model" in said


def test_a_function_is_looked_at_before_the_start(own: str) -> None:
    def problems(**args: Any) -> list[str]:
        return list(all_of(verl_function(KEY, {"path": own} | args)))

    assert problems() == [] == problems(function="later", kwargs={"bonus": 1})
    assert "called with data_source" in problems(function="narrow")[0]
    assert "bonus" in problems(kwargs={"bonus": 1})[0]
    assert "has no function 'compute_scor'" in problems(function="compute_scor")[0]
    assert "cannot import" in problems(path="/nowhere.py")[0]


@pytest.mark.parametrize(
    ("source", "response", "truth", "score"),
    [
        ("openai/gsm8k", "#### 1,200", "1200", 1.0),
        ("openai/gsm8k", "#### 72 apples", "72", 1.0),
        ("openai/gsm8k", "#### 72" + " " * 300, "72", 0.0),  # only the end is looked at
        ("openai/gsm8k", "72", "72", 0.0),
        ("lighteval/MATH", r"so \boxed{\frac12}", r"\frac{1}{2}", 1.0),
        ("lighteval/MATH", r"so \boxed{0.5}", r"\dfrac{1}{2}", 1.0),
        ("lighteval/MATH", r"\boxed{3/4}", r"\frac34", 1.0),
        ("lighteval/MATH", r"\boxed{x=5}", "5", 1.0),
        ("lighteval/MATH", r"\boxed{5\text{ cm}}", "5", 1.0),
        ("lighteval/MATH", r"\boxed{\sqrt3}", r"\sqrt{3}", 1.0),
        ("lighteval/MATH", r"\boxed{5} or \fbox{6}", "5", 1.0),
        ("lighteval/MATH", r"\boxed{5} \boxed6", "5", 0.0),
        ("lighteval/MATH", r"\boxed{\sqrt}", r"\sqrt", 1.0),  # broken: compared as it is
        ("lighteval/MATH", "5", "5", 0.0),
        ("math_dapo", "Answer: $34$", "34", 1.0),
        ("math_dapo", "answer : x = 1,000 dollars", "1000", 1.0),
        ("math_dapo", "so it is 34", "34", -1.0),
        ("aime_2024", "Answer: 33\nAnswer: 34", "34", 1.0),
        ("searchR1_nq", "<answer>The Beatles!</answer>", {"target": ["beatles"]}, 1.0),
        ("searchR1_nq", "<answer>b</answer>" * 11, {"target": "b"}, 0.25),
        ("searchR1_nq", "beatles", {"target": ["beatles"]}, 0.0),
    ],
)
def test_formulas(source: str, response: str, truth: Any, score: float) -> None:
    assert sources.verl(response, None, task(source, truth))[0] == score


def test_long_responses_cost_as_the_manager_dapo_has_it() -> None:
    def cost(tokens: int) -> float:
        given = {"overlong": 10, "penalty_factor": 2.0, "max_response_tokens": 100}
        return sources.verl("Answer: 1", None, task("math", "1"), tokens, **given)[1]["overlong"]

    assert [cost(tokens) for tokens in (1, 90, 95, 100)] == [0.0, 0.0, -1.0, -2.0]


def test_a_row_of_another_kind_is_an_error_and_no_zero() -> None:
    wrong = task("math", "1")
    wrong.raw.pop("reward_model")
    with pytest.raises(ValueError, match="and this one has data_source"):
        sources.verl("1", None, wrong)
    with pytest.raises(ValueError, match="'apps' has no formula"):
        sources.verl("1", None, task("apps", "1"))


def task(source: str, truth: Any) -> Task:
    return Task(
        id="t/0/0",
        taskset="t",
        prompt="p",
        truth=None,
        workflow="single_turn",
        reward="verl",
        repeat_times=1,
        sampling=Sampling(max_tokens=100),
        row=0,
        raw=row(0, source, truth),
    )
