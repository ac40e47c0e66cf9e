"""Workflows that ask and score as Trinity-RFT's do: what the model is shown, what comes of it, and
what becomes of every name of the reference.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_flows import END, TOKENIZER, Scripted

from rft import config as configs
from rft.agents.endpoint.chat_format import read
from rft.agents.endpoint.sessions import Session
from rft.algorithm.advantages import Columns
from rft.config import trinity_flows
from rft.data.chat import render_prompt, row_tools
from rft.ground.experience import PEERS, Completion, Experience, Sampling, Task
from rft.preflight.inputs_flows import flows
from rft.rollout import rewards, workflows
from rft.rollout.context import TokenLimits
from rft.rollout.environments import KNOWN
from rft.rollout.evaluation import summarise
from rft.rollout.reward_worker import RewardResult, judge
from rft.rollout.workflows import Tool, ToolUse
from rft.rollout.workflows.dialogue import Dialogue
from rft.rollout.workflows.maths import BOXED, BOXED_THINK, THINK
from rft.tools.workflows import lines

NAMES = [
    "simple_workflow",
    "async_simple_workflow",
    "math_workflow",
    "async_math_workflow",
    "math_boxed_workflow",
    "async_math_boxed_workflow",
    "math_eval_workflow",
    "async_math_eval_workflow",
    "math_rm_workflow",
    "async_math_rm_workflow",
    "tool_call_workflow",
    "toolcall_workflow",
    "agentscope_workflow_adapter",
    "agentscope_workflow_adapter_v1",
    "agentscope_react_workflow",
    "agentscope_react_math_workflow",
    "as_react_workflow",
    "agentscopev0_react_math_workflow",
    "agentscope_v1_react_search_workflow",
    "email_search_workflow",
    "alfworld_workflow",
    "RAFT_alfworld_workflow",
    "RAFT_reflect_alfworld_workflow",
    "frozen_lake_workflow",
    "sciworld_workflow",
    "webshop_workflow",
    "intercode_sql_workflow",
    "step_wise_alfworld_workflow",
    "async_math_ruler_workflow",
    "math_ruler_workflow",
    "math_trainable_ruler_workflow",
    "rubric_judge_workflow",
    "rubric_judge_openai_workflow",
    "simple_mm_workflow",
    "async_simple_mm_workflow",
    "on_policy_distill_workflow",
    "on_policy_distill_math_workflow",
    "thinking_budget_workflow",
    "sudoku_workflow",
    "bots_math_boxed_workflow",
    "learn2ask_workflow",
]


class Scoring(Scripted):
    """Rewards are the real ones."""

    async def reward(self, items: list[Any]) -> list[RewardResult]:
        return [
            judge(rewards.resolve(task.reward), response, task, n) for task, response, n in items
        ]

    def decode(self, tokens: list[int]) -> str:
        """The letters of this tokenizer have no backslash."""
        return super().decode(tokens).replace("boxed{", "\\boxed{")

    @property
    def shown(self) -> list[str]:
        return [TOKENIZER.decode(one.prompt) for one in self.asked]


def task(workflow: str, prompt: Any = "what?", runs: int = 1, **more: Any) -> Task:
    more.setdefault("sampling", Sampling(max_tokens=900))
    return Task(
        id="t/0/0", taskset="t", row=0, prompt=prompt, workflow=workflow, repeat_times=runs, **more
    )


def made(of: Task, *lines: str, judge: Any = None) -> tuple[list[Experience], Scoring]:
    context = Scoring(*lines, judge=judge)
    context.shared.limits = TokenLimits(3000, 8000)
    return asyncio.run(workflows.run(of, context)), context


def test_math_think_asks_for_its_form_and_scores_it() -> None:
    told = "<think>a</think>\n<answer>72</answer>" + END
    [one], context = made(task("math_think", truth="#### 72"), told)
    assert one.reward == pytest.approx(1.1) and THINK in context.shown[0]
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "what?"}]
    _, context = made(task("math_think", own, truth="72"), told)
    assert THINK not in context.shown[0]
    counted = task("math_think", reward="countdown", raw={"numbers": [1], "target": 1}, truth="1")
    _, context = made(counted, told)
    assert THINK not in context.shown[0], "only its own reward has this form"


def test_math_boxed_reads_its_arguments() -> None:
    args = {"with_think": True, "format_score_coef": 0.4}
    [one], context = made(task("math_boxed", truth="72", workflow_args=args), "\\boxed{72}" + END)
    assert one.reward == pytest.approx(0.6) and BOXED_THINK[:90] in context.shown[0]
    [one], context = made(task("math_boxed", truth="72"), "\\boxed{72}")
    assert one.reward == 1 and BOXED[:40] in context.shown[0]
    assert not any(one.action_mask), "an answer that was cut is not trained on"
    base = task("math_boxed", truth="72", workflow_args={"use_base": True}, reward="math_dapo")
    [one], context = made(base, "\\boxed{72}" + END)
    assert "<|user|>" not in context.shown[0] and context.shown[0].endswith(
        "User:\nwhat?\nAssistant:\n"
    )


def test_math_eval_samples_as_its_recipe_does() -> None:
    hot = Sampling(max_tokens=900, temperature=1.0)
    [one], context = made(task("math_eval", truth="72", sampling=hot), "the answer is 72" + END)
    asked = context.asked[0].sampling
    assert (asked.temperature, asked.top_p, one.reward) == (0.6, 0.8, 1.0)
    _, context = made(task("math_question", truth="72", sampling=hot), "72" + END)
    assert context.asked[0].sampling.temperature == 1.0


def test_a_row_of_tool_calls_is_shown_and_scored() -> None:
    row = {
        "raw_system": "Be brief.",
        "tools": json.dumps([{"name": "find", "parameters": {}}]),
        "conversations": [
            {"from": "human", "value": "find it"},
            {"from": "function_call", "value": [1]},
            {"from": "observation", "value": "seen"},
        ],
        "answer": json.dumps([{"name": "find", "arguments": {}}]),
    }
    call = '<think>a</think><tool_call>[{"name": "find", "arguments": {}}]</tool_call>' + END
    [one], context = made(task("tool_call", raw=row), call)
    assert one.reward == 1
    shown = context.shown[0]
    order = [
        shown.index(text) for text in ("Be brief.", '"name": "find"', "find it", "[1]", "seen")
    ]
    assert order == sorted(order)
    row["conversations"][0]["from"] = "nobody"
    with pytest.raises(ValueError, match="nobody"):
        made(task("tool_call", raw=row), call)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_thinking_ends_with_its_budget(temperature: float) -> None:
    args = {"thinking_token_budget": 4}
    sampling = Sampling(max_tokens=20, temperature=temperature)
    of = task("thinking_budget", truth="long</think>42", sampling=sampling, workflow_args=args)
    [one], context = made(of, "long", "42" + END)
    assert [request.sampling.max_tokens for request in context.asked] == [4, 16]
    added = len("</think>")
    chosen = int(temperature > 0)
    assert one.action_mask.tolist() == [chosen] * 4 + [0] * added + [chosen] * 3
    assert TOKENIZER.decode(one.response_ids).startswith("long</think>42")
    [one], context = made(of, "ok" + END)
    assert len(context.asked) == 1 and all(one.action_mask) is bool(chosen)


def test_a_rating_is_a_share_of_nine() -> None:
    [one], context = made(
        task("rating", raw={"rubric": [{"description": "short", "weight": 2}]}),
        "text" + END,
        judge=lambda question: '{"rating": 7}',
    )
    assert one.reward == pytest.approx(6 / 9) and "short" in context.questions[0]
    for odd in ("7", '{"rating": 11}', '{"rating": true}'):
        [one], _ = made(task("rating"), "text" + END, judge=lambda _, odd=odd: odd)
        assert one.reward_outcome == "error"


def test_the_ruler_of_mathematics_keeps_the_true_reward_as_a_metric() -> None:
    right, wrong = "<think>a</think><answer>72</answer>" + END, "no" + END
    of = task("math_ruler", truth="72", runs=2)
    context = Scoring(judge=lambda _: '{"scores": [0.25, 0.75]}')
    context.shared.limits = TokenLimits(3000, 8000)
    said = iter([right, wrong])

    async def answer(request: Any) -> list[Completion]:
        return [context.completion(next(said), 1) for _ in range(request.n)]

    context.shared.pool.generate = answer
    found = asyncio.run(workflows.run(of, context))
    assert [one.reward for one in found] == [0.25, 0.75]
    assert [one.metrics["gold_reward"] for one in found] == [pytest.approx(1.1), -0.1]


def judged(share: float, *judgements: str) -> list[Experience]:
    args = {"truth_share": share}
    of = task("trainable_ruler", truth="72", runs=2, workflow_args=args)
    context = Scoring()
    context.shared.limits = TokenLimits(3000, 8000)
    said = iter(["<think>a</think><answer>72</answer>", "no", *judgements])

    async def answer(request: Any) -> list[Completion]:
        return [context.completion(next(said) + END, 1) for _ in range(request.n)]

    context.shared.pool.generate = answer
    return asyncio.run(workflows.run(of, context))


def test_the_policy_judges_and_its_judgement_is_trained() -> None:
    found = judged(1.0, '{"scores": [1, 0.1]}', "I cannot say")
    assert [one.reward for one in found] == [
        pytest.approx(1.1),
        pytest.approx(-0.1),
        pytest.approx(1 - 0.1 / 2),
        0.0,
    ]
    assert [(one.sample, one.info.get(PEERS)) for one in found] == [
        (0, None),
        (1, None),
        (2, "judge"),
        (3, "judge"),
    ]
    for one in found:
        one.group = 5
    assert [list(places) for places in Columns.of(found).members()] == [[0, 1], [2, 3]]
    of = task("trainable_ruler", truth="72", runs=2)
    told = summarise("t", 0, 1, [(of, found)], TOKENIZER).metrics
    assert told["accuracy"] == 0.5 and told["reward/mean"] == pytest.approx(0.5)


def test_without_the_truth_one_judgement_gives_the_rewards() -> None:
    found = judged(0.0, '{"scores": [0.9, 0.2]}')
    assert [one.reward for one in found] == [0.9, 0.2]
    assert [one.reward_outcome for one in judged(0.0, "no")] == ["error", "error"]


@pytest.mark.parametrize(
    ("args", "truth", "said", "reward"),
    [
        ({}, "continue", "Since when?", 1 + 2 * 0.5 + 1),
        ({"fusion_mode": "sum"}, "continue", "Since when?", 1 + 0.5 + 1),
        ({"train_mode": "Ra"}, "continue", "Since when?", 2 * 0.5 + 1),
        ({"train_mode": "Rs"}, "continue", "Since when?", 3 + 1),
        ({}, "continue", "<stop />", 0),
        ({}, "stop", "<stop />", 1 + 2 + 1),
        ({}, "stop", "Bye. <stop />", 1 + 2),
        ({"train_mode": "Rs"}, "stop", "Since when?", 0),
    ],
)
def test_learning_to_ask(args: dict[str, Any], truth: str, said: str, reward: float) -> None:
    of = task("learn_to_ask", workflow_args=args, raw={"decision_truth": truth, "info_truth": "x"})
    [one], _ = made(of, said + END, judge=lambda _: '{"content": 0.5, "form": 1}')
    assert one.reward == pytest.approx(reward)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_reference_is_mapped_or_has_its_own_sentence(name: str) -> None:
    if name in trinity_flows.WORKFLOWS:
        here, _ = trinity_flows.WORKFLOWS[name]
        assert here in workflows.WORKFLOWS or here == trinity_flows.ENVIRONMENT
    else:
        assert trinity_flows.refusal(name)


def test_at_most_six_workflows_are_refused() -> None:
    assert len(trinity_flows.REFUSED) <= 6
    assert not {*trinity_flows.WITHOUT} & {*trinity_flows.WORKFLOWS, *workflows.WORKFLOWS}
    # what is mapped runs: an adapter of ours is there
    assert {args["environment"] for args, _ in trinity_flows.ENVIRONMENTS.values()} <= {*KNOWN}
    page = (Path(__file__).parents[2] / "docs" / "trinity.md").read_text(encoding="utf-8")
    listed = page.split("the closed list, of at most six |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", listed, re.M) == [*trinity_flows.REFUSED]


def test_a_refused_name_is_told_with_what_to_use() -> None:
    config: Any = configs.Config()
    for workflow, reward in (
        ("email_search_workflow", "math"),
        ("simple_mm_workflow", "math"),
        ("math_workflow", "math"),
        ("single_turn", "openjudge_reward"),
    ):
        one = configs.TasksetConfig(default_workflow_type=workflow, default_reward_fn_type=reward)
        said = list(flows(config, "buffer.explorer_input.taskset", one, False, False))
        named = workflow if workflow != "single_turn" else reward
        assert len(said) == 1 and f"={named}: {trinity_flows.refusal(named)}" in said[0]


def test_arguments_of_a_workflow_become_those_of_an_environment() -> None:
    given = {"env_max_steps": 6, "agent_max_steps": 12, "is_slippery": True}
    file: dict[str, Any] = {
        "buffer": {
            "explorer_input": {
                "taskset": {"workflow_args": dict(given)},
                "eval_tasksets": [{"default_workflow_type": "math_workflow", "workflow_args": {}}],
                "default_workflow_type": "frozen_lake_workflow",
            }
        }
    }
    trinity_flows.asked_of_environments(file)
    sets = file["buffer"]["explorer_input"]
    assert sets["taskset"]["workflow_args"] == {
        "environment": "gymnasium",
        "env_id": "FrozenLake-v1",
        "max_step_num": 12,
        "env_args": {"random_map": {"size": 4, "p": 0.8, "max_path": 6}, "is_slippery": True},
    }
    assert sets["eval_tasksets"][0]["workflow_args"] == {}
    usual = trinity_flows.ENVIRONMENTS["frozen_lake_workflow"][0]
    assert usual["max_step_num"] == 10 and usual["env_args"]["random_map"]["max_path"] == 8


def test_rft_lists_what_each_does_and_reads() -> None:
    told = "\n".join(lines(set()))
    for name in (*workflows.WORKFLOWS, *rewards.REWARDS):
        assert f"\n  {name}\n" in told
    assert "says nothing" not in told and "use_base: bool" in told
    assert "thinking_token_budget: int (needed)" in told and "format_score_coef = 0.1" in told
    page = Path(__file__).parents[2] / "docs" / "workflows.md"
    shown = page.read_text(encoding="utf-8")
    for name, what in workflows.WORKFLOWS.items():
        row = next(line for line in shown.splitlines() if line.startswith(f"| `{name}` |"))
        for argument in getattr(workflows.resolve(name), "ARGUMENTS", {}):
            assert f"`{argument}`" in row or row.split("|")[3].strip() in ("there", "the same"), (
                what
            )


# --- tools of a task ------------------------------------------------------------------------------

SERVER = {"command": sys.executable, "args": [str(Path(__file__).parent / "tool_server.py")]}
ADD = {"type": "function", "function": {"name": "add", "description": "Sums up."}}


def used(tools: list[dict[str, Any]], *lines: str) -> tuple[list[Experience], Scoring]:
    args = {"mcp_servers": [SERVER], "python": False}
    return made(task("tool_use", workflow_args=args, truth="5", tools=tools), *lines)


@pytest.mark.verify  # two programs that import a large library
def test_tools_of_an_mcp_server_are_offered_and_called() -> None:
    calls = [{"name": "add", "arguments": {"a": 2, "b": 3}}, {"name": "fail", "arguments": {}}]
    said = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    [one], context = used([], said + END, "5" + END)
    assert (one.reward, one.metrics["tools/calls"], one.metrics["tools/failed"]) == (1.0, 2.0, 1.0)
    assert "The sum of two numbers." in context.shown[0] and '"fail"' in context.shown[0]
    assert "python" not in context.shown[0]
    heard = context.shown[1][len(context.shown[0]) :]
    assert "tool<|pad|>>5<|end|>" in heard and "error: Error executing tool fail" in heard


def test_a_row_says_which_tools_are_offered() -> None:
    class Two(ToolUse):
        def tools(self, task: Task) -> list[Tool]:
            return [Tool("add", "Adds.", str), Tool("fail", "Fails.", str)]

    async def shown(tools: list[dict[str, Any]]) -> str:
        context = Scoring("5" + END)
        context.shared.limits = TokenLimits(3000, 8000)
        await Two().run(task("own", truth="5", tools=tools), context)
        return context.shown[0]

    told = asyncio.run(shown([ADD]))
    assert "Sums up." in told and "Adds." not in told and '"fail"' not in told
    with pytest.raises(ValueError, match="its row has the tool 'mail', which nobody offers"):
        asyncio.run(shown([{"name": "mail"}]))


def test_a_token_that_the_form_left_no_choice_of_is_not_trained() -> None:
    form = Sampling(structured={"json_object": True})
    said = Completion(tokens=[5, 6, 7], logprobs=[-1.0, 0.0, -0.5], versions=[], stop="stop")
    assert list(said.chosen(form)) == [1, 0, 1] and list(said.chosen(Sampling())) == [1, 1, 1]
    talk = Dialogue(task("single_turn", sampling=form), [1], 0)
    talk.say(said)
    assert list(talk.whole().action_mask) == list(talk.turns[0].action_mask) == [1, 0, 1]
    session = Session("s")
    asked = read({"prompt": "x", "response_format": {"type": "json_object"}}, Sampling())
    session.record(asked, None, [1], said, "", id="a", answer=None)
    assert session.experiences()[0].action_mask.tolist() == [1, 0, 1]


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
)


def test_tools_of_a_row_are_shown_by_the_chat_template() -> None:
    form = configs.FormatConfig(prompt_type="plaintext", tools_key="tools")
    for column in ([ADD], json.dumps([ADD])):
        of = task("single_turn", tools=row_tools({"tools": column}, form))
        shown = TOKENIZER.decode(render_prompt(TOKENIZER, of, TEMPLATE))
        assert shown == "what?add;"
    assert row_tools({}, form) == row_tools({"tools": None}, form) == []
    with pytest.raises(configs.ConfigError, match="the chat template shows none"):
        render_prompt(TOKENIZER, of, "{{ messages[0].content }}")
