"""Trinity-RFT's rewards, number by number: an answer in its form gets its score."""

import json
from typing import Any

import pytest

from rft.ground.experience import Sampling, Task
from rft.rollout.reward_worker import judge
from rft.rollout.rewards import REWARDS, prepare

FORM = "<think>We add.</think>\n<answer>{}</answer>"
LINES = "<think>\nWe add.\n</think>\n<answer>\n72\n</answer>"
SOLVED = "She sold 48/2 = <<48/2=24>>24 in May, 48+24 = 72 in all.\n#### 72"
COUNT = json.dumps({"numbers": [1, 2, 3], "target": 7})
CALL = (
    '<think>Look.</think> <tool_call>[{"name": "find", "arguments": {"a": 1, "b": 2}}]</tool_call>'
)
WANTED = json.dumps([{"name": "find", "arguments": {"b": 2, "a": 1}}])
THINK = {"with_think": True}


def called(calls: str, thought: str = "<think>Look.</think>") -> str:
    return f"{thought}<tool_call>{calls}</tool_call>"


# reward, response, truth, arguments, score by the published formula
ROWS: list[tuple[str, str, str, dict[str, Any], float]] = [
    # accuracy of the first <answer> of one line, 0.1 for the form and -0.1 without
    ("math_reward", FORM.format(72), "#### 72", {}, 1.1),
    ("math_reward", FORM.format(72), SOLVED, {}, 1.1),
    ("math_reward", FORM.format(72), "72", {}, 1.1),
    ("math_reward", FORM.format(71), "72", {}, 0.1),
    ("math_reward", "It is 72", "72", {}, 0.9),
    ("math_reward", "It is 71", "72", {}, -0.1),
    ("math_reward", "<answer>72</answer>", "72", {}, 0.9),
    ("math_reward", FORM.format(72) + " done", "72", {}, 0.9),
    ("math_reward", FORM.format(72) + "\ndone", "72", {}, 1.1),  # its `$` ends a line
    ("math_reward", "Well. " + FORM.format(72), "72", {}, 1.1),
    ("math_reward", FORM.format("1/2"), "0.5", {}, 1.1),
    ("math_reward", "<answer>71</answer> or <answer>72</answer>", "72", {}, -0.1),
    ("math_reward", FORM.format("\n72\n"), "72", {}, 1.1),
    ("math_reward", FORM.format(72), "72", {"pattern": "never"}, 0.9),
    # 0.1 or -0.1
    ("format_reward", LINES, "", {}, 0.1),
    ("format_reward", FORM.format(72), "", {}, -0.1),
    ("format_reward", "so " + LINES, "", {}, -0.1),
    ("format_reward", "ab", "", {"pattern": "a"}, 0.1),
    # marked LaTeX only
    ("accuracy_reward", "so \\boxed{72}", "72", {}, 1.0),
    ("accuracy_reward", "so \\boxed{72}", "$72$", {}, 1.0),
    ("accuracy_reward", "so \\boxed{71}", "72", {}, 0.0),
    ("accuracy_reward", "it is 72", "72", {}, 0.0),
    # texts of boxes, nothing computed
    ("math_boxed_reward", "so \\boxed{72}", "72", {}, 1.0),
    ("math_boxed_reward", "so \\boxed 72$.", "72", {}, 1.0),
    ("math_boxed_reward", "so \\boxed{71}, no, \\boxed{72}", "\\boxed{72}", {}, 1.0),
    ("math_boxed_reward", "so 72", "72", {}, 0.0),
    ("math_boxed_reward", "\\boxed{\\dfrac12}", "\\frac{1}{2}", {}, 1.0),
    ("math_boxed_reward", "\\boxed{1/2}", "\\frac{1}{2}", {}, 1.0),
    ("math_boxed_reward", "\\boxed{2/4}", "\\frac{1}{2}", {}, 0.0),
    ("math_boxed_reward", "\\boxed{70+2}", "72", {}, 0.0),
    ("math_boxed_reward", "\\boxed{\\$72.00}", "72", {}, 1.0),
    ("math_boxed_reward", "\\boxed{x = 72\\text{ cm}}", "72", {}, 1.0),
    ("math_boxed_reward", "\\boxed{\\left(1, 2\\right)}", "(1,2)", {}, 1.0),
    ("math_boxed_reward", "\\boxed{2\\sqrt3}", "2\\sqrt{3}", {}, 1.0),
    ("math_boxed_reward", "\\boxed{72}", SOLVED, {}, 0.0),
    ("math_boxed_reward", "\\boxed{72}", "72", THINK, 0.9),
    ("math_boxed_reward", "<think>a</think>\\boxed{72}", "72", THINK, 1.0),
    ("math_boxed_reward", "</think><think>\\boxed{72}", "72", THINK, 0.9),
    ("math_boxed_reward", "\\boxed{71}", "72", THINK | {"format_score_coef": 0.5}, -0.5),
    ("math_boxed_reward", "\\boxed{72}", "72", THINK | {"format_score_coef": 0}, 0.9),
    # boxed, "the answer is", the last number
    ("math_eval_reward", "\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", {}, 1.0),
    ("math_eval_reward", "\\boxed{0.5}", "\\frac{1}{2}", {}, 0.0),  # of that, the last number
    ("math_eval_reward", "The answer is 72.", SOLVED, {}, 1.0),
    ("math_eval_reward", "first 70, then 1,072", "1072", {}, 1.0),
    ("math_eval_reward", "\\boxed{50\\%}", "0.5", {}, 1.0),
    ("math_eval_reward", "\\boxed{71}", "72", {}, 0.0),
    ("math_eval_reward", "no idea", "72", {}, 0.0),
    # 1 or -1, and the penalty on length
    ("math_dapo_reward", "\\boxed{34}", "34", {}, 1.0),
    ("math_dapo_reward", "\\boxed{34}</think> \\boxed{35}", "34", {}, -1.0),
    ("math_dapo_reward", "<think>x</think> 34", "34", {}, 1.0),
    ("math_dapo_reward", "\\boxed{68/2}", "34", {}, 1.0),
    ("math_dapo_reward", "I do not know", "34", {}, -1.0),
    ("math_dapo_reward", "\\boxed{34}", "34", {"tokens": 16}, 1.0),
    ("math_dapo_reward", "\\boxed{34}", "34", {"tokens": 18}, 0.5),
    ("math_dapo_reward", "\\boxed{35}", "34", {"tokens": 30}, -2.0),
    # 1, 0.1, 0
    ("countdown_reward", "<answer>1+2*3</answer>", COUNT, {}, 1.0),
    ("countdown_reward", "<think>a</think>\n<answer> (1+2)*3 </answer>", COUNT, {}, 0.1),
    ("countdown_reward", "<answer>1+2*3</answer>\nthat is it", COUNT, {}, 0.0),
    ("countdown_reward", "<answer>1+2*3=7</answer>", COUNT, {}, 0.1),
    ("countdown_reward", "<answer>1+6</answer>", COUNT, {}, 0.1),
    ("countdown_reward", "<answer>3**2-1*1</answer>", COUNT, {}, 0.1),
    ("countdown_reward", "<answer>2**3-1</answer>", COUNT, {}, 1.0),
    ("countdown_reward", "1+2*3", COUNT, {}, 0.0),
    ("countdown_reward", "<answer>no 1 2 3</answer>", COUNT, {}, 0.1),
    # of RM-Gallery
    ("rm_gallery_reward", "so $72$", "72", {"reward_name": "math_verify_reward"}, 1.0),
    ("rm_gallery_reward", "so 71", "72", {"reward_name": "math_verify_reward"}, 0.0),
    # the same calls, in any order
    ("tool_call_reward", CALL, WANTED, {}, 1.0),
    ("tool_call_reward", CALL.replace("2}", "3}"), WANTED, {}, 0.0),
    ("tool_call_reward", called('{"name": "find", "arguments": {"a": 1, "b": 2}}'), WANTED, {}, 1),
    ("tool_call_reward", called(WANTED, ""), WANTED, {}, 0.0),
    ("tool_call_reward", called(WANTED) + "<think></think>", WANTED, {}, 0.0),
    ("tool_call_reward", called(WANTED, "") + "<think></think>", WANTED, {}, 0.0),
    ("tool_call_reward", called("[]"), "[]", {}, 1.0),
    ("tool_call_reward", called("[3]"), WANTED, {}, 0.0),
    ("tool_call_reward", "<think>a</think>no call", "[]", {}, 0.0),
    # DAPO's rule, 1 or 0
    ("bots_math_boxed_reward", "\\boxed{34}", "34", THINK, 0.9),
    ("bots_math_boxed_reward", "\\boxed{35}", "34", {}, 0.0),
]


@pytest.mark.parametrize(("name", "response", "truth", "args", "score"), ROWS)
def test_scored_as_published(
    name: str, response: str, truth: str, args: dict[str, Any], score: float
) -> None:
    given = dict(args)
    tokens = given.pop("tokens", -1)
    if tokens >= 0:
        given |= {"enable_overlong_penalty": True, "max_response_length": 20, "cache_length": 4}
    row = {"answer": truth} if name == "tool_call_reward" else {}
    task = Task(
        id="t/0/0",
        taskset="t",
        row=0,
        prompt="",
        truth=truth,
        reward_args=given,
        raw=row,
        sampling=Sampling(),
    )
    found = judge(prepare(name), response, task, tokens)
    assert (found.outcome, found.reward) == ("ok", pytest.approx(score)), found.message


def test_each_of_its_rewards_is_scored() -> None:
    assert len(ROWS) >= 40
    assert {row[0] for row in ROWS} == {
        name for name, one in REWARDS.items() if one.__module__.endswith(".trinity")
    }
