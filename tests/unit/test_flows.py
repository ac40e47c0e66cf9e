"""Dialogues, tools and judges: real prompts, ids and cells; the engine, the reward function and the
judge answer by script.
"""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rft.ground.experience import (
    Completion,
    Experience,
    GenerateRequest,
    Sampling,
    Task,
    VersionSpan,
)
from rft.rollout import rewards, sandbox, workflows
from rft.rollout.context import TokenLimits, WorkflowContext
from rft.rollout.reward_worker import RewardResult, judge
from rft.rollout.workflows import MultiTurn, RewardPropagation, StepWiseReward, ToolUse
from rft.rollout.workflows.tools import Tool, ToolCall, calls
from rft.tools.toy import character_tokenizer

END = "<|end|>"
TOKENIZER = character_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


class Scripted(WorkflowContext):
    """Says `lines` in turn, `per` of them to each run, from a
    version that grows with every turn.
    """

    def __init__(
        self, *lines: str, judge: Callable[[str], str] | None = None, room: int = 4000
    ) -> None:
        shared: Any = SimpleNamespace(
            tokenizer=TOKENIZER,
            model=SimpleNamespace(custom_chat_template=None, enable_prompt_truncation=False),
            limits=TokenLimits(600, room),
            seed=None,
            stop_token=ids(END)[0],
            count=lambda *_: None,
            keeps_history=False,
        )
        self.lines, self.judge = list(lines), judge
        self.asked: list[GenerateRequest] = []
        self.scored: list[tuple[str, int]] = []
        self.questions: list[str] = []
        super().__init__(shared, "r", "s")
        pool: Any = SimpleNamespace(generate=self.answer)
        shared.pool, shared.rewards = pool, SimpleNamespace(score=self.reward)

    async def answer(self, request: GenerateRequest) -> list[Completion]:
        self.asked.append(request)
        version = len(self.asked)
        return [self.completion(self.lines.pop(0), version) for _ in range(request.n)]

    def completion(self, line: str, version: int) -> Completion:
        said = ids(line)
        stop: Any = "stop" if line.endswith(END) else "length"
        spans = [VersionSpan(version=version, start=0, end=len(said))]
        return Completion(tokens=said, logprobs=[-0.5] * len(said), versions=spans, stop=stop)

    async def reward(self, items: list[Any]) -> list[RewardResult]:
        self.scored += [(response, tokens) for _, response, tokens in items]
        return [RewardResult(reward=float("42" in response)) for _, response, _ in items]

    async def ask(
        self, messages: list[dict[str, Any]], model: str = "", sampling: Sampling | None = None
    ) -> str:
        assert self.judge is not None
        self.questions.append(messages[0]["content"])
        return self.judge(messages[0]["content"])


def task(workflow: str, repeat_times: int = 1, **more: Any) -> Task:
    return Task(
        id="t/0/0",
        taskset="t",
        row=0,
        prompt="6*7=",
        truth="42",
        workflow=workflow,
        repeat_times=repeat_times,
        sampling=Sampling(temperature=0.7),
        **more,
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Experience]]:
    def _run(kind: Any, ctx: Scripted, repeat_times: int = 1, **more: Any) -> list[Experience]:
        name = kind if isinstance(kind, str) else "mine"
        if name == "mine":
            monkeypatch.setitem(workflows.WORKFLOWS, "mine", kind)
        of = task(name, repeat_times, **more)
        made = asyncio.run(asyncio.wait_for(workflows.run(of, ctx), 60))
        workflows.numbered(of, made)
        return made

    return _run


class Guess(MultiTurn):
    """Says `higher` until the guess is right."""

    def begin(self, task: Task) -> None:
        self.heard = 0

    def step(self, answer: str) -> list[dict[str, Any]] | None:
        self.heard += 1
        return None if answer == "42" else [{"role": "user", "content": f"higher {self.heard}"}]


def test_a_dialogue_goes_on_from_the_ids_that_were_sampled(run: Any) -> None:
    ctx = Scripted(f"7{END}", f"42{END}")
    (made,) = run(Guess, ctx)
    prompt = ids("<|user|>6*7=<|end|><|assistant|>")
    heard = ids("<|user|>higher 1<|end|><|assistant|>")
    assert made.tokens.tolist() == [*prompt, *ids(f"7{END}"), *heard, *ids(f"42{END}")]
    assert ctx.asked[1].prompt == made.tokens[: -len(ids(f"42{END}"))].tolist(), (
        "nothing was tokenized again"
    )
    assert made.prompt_length == len(prompt)
    assert made.action_mask.tolist() == [1, 1, *[0] * len(heard), 1, 1, 1]
    assert made.logprobs.tolist() == [-0.5 if mask else 0.0 for mask in made.action_mask]
    at = 2 + len(heard)
    assert made.versions == [
        VersionSpan(version=1, start=0, end=2),
        VersionSpan(version=2, start=at, end=at + 3),
    ]
    assert (made.reward, made.reward_outcome, made.metrics["turns"]) == (1.0, "ok", 2.0)
    assert ctx.scored == [("42", 5)], "the last answer, and how many tokens the model sampled"


def test_what_follows_closes_a_turn_that_the_model_did_not(run: Any) -> None:
    """An end that is not the template's own: the template's comes behind it, not trained."""
    ctx = Scripted("7<|pad|>", f"42{END}")
    ctx.completion = lambda line, version, of=ctx.completion: made_to_stop(of(line, version))  # type: ignore[method-assign]
    (made,) = run(Guess, ctx)
    assert made.response_ids[:4] == ids(f"7<|pad|>{END}<|user|>")
    assert made.action_mask[:4].tolist() == [1, 1, 0, 0]


def made_to_stop(made: Completion) -> Completion:
    made.stop = "stop"
    return made


def test_runs_of_a_group_have_environments_of_their_own(run: Any) -> None:
    made = run(Guess, Scripted(f"7{END}", f"8{END}", f"42{END}", f"42{END}"), repeat_times=2)
    assert [(e.sample, e.turn, e.metrics["turns"]) for e in made] == [(0, 0, 2.0), (1, 0, 2.0)]
    assert all(e.reward == 1.0 for e in made)


@pytest.mark.parametrize(("more", "turns"), [({}, 3), ({"workflow_args": {"max_step_num": 1}}, 1)])
def test_turns_are_bounded_and_the_argument_wins(run: Any, more: dict, turns: int) -> None:
    class Short(Guess):
        max_step_num = 3

    (made,) = run(Short, Scripted(*[f"7{END}"] * 9), **more)
    assert (made.metrics["turns"], made.reward, made.action_mask[-2:].tolist()) == (
        turns,
        0.0,
        [1, 1],
    )


def test_a_dialogue_ends_where_the_context_or_an_answer_does(run: Any) -> None:
    full = (
        len(ids("<|user|>6*7=<|end|><|assistant|>"))
        + 2
        + len(ids("<|user|>higher 1<|end|><|assistant|>"))
    )
    ctx = Scripted(f"7{END}", f"42{END}", room=full)
    (made,) = run(Guess, ctx)
    assert (len(ctx.asked), made.stop, made.metrics["turns"]) == (1, "length", 1.0)
    (made,) = run(Guess, Scripted("7", f"42{END}"))
    assert (made.stop, made.metrics["turns"]) == ("length", 1.0)
    (made,) = run(Guess, Scripted(room=5))
    assert (made.stop, made.reward_outcome, made.response_length) == ("prompt_too_long", "none", 0)


def test_seeds_of_a_deterministic_run_depend_on_run_and_turn_alone(run: Any) -> None:
    """Tools of two runs may take as long as they like."""

    def seeds(later: int) -> dict[str, int | None]:
        class Slow(Guess):
            def begin(self, task: Task) -> None:
                super().begin(task)
                self.number = len(begun)
                begun.append(self)

            async def step(self, answer: str) -> Any:  # type: ignore[override]
                if self.number == later and self.heard == 0:
                    await asyncio.wait_for(other.wait(), 20)
                elif self.heard == 1:
                    other.set()
                return super().step(answer)

        begun: list[Slow] = []
        other = asyncio.Event()
        ctx = Scripted(*[f"7{END}"] * 4)
        ctx.shared.seed = 3
        run(Slow, ctx, repeat_times=2, workflow_args={"max_step_num": 2})
        return {request.request_id: request.sampling.seed for request in ctx.asked}

    first, second = seeds(0), seeds(1)
    assert list(first) != list(second) and first == second and len(set(first.values())) == 4


class Stepping(StepWiseReward):
    def step(self, answer: str) -> list[dict[str, Any]] | None:
        return None if answer == "42" else [{"role": "user", "content": "no"}]

    async def reward(self, answer: str) -> Any:  # type: ignore[override]
        return {"7": 0.25, "8": float("nan"), "9": {"form": 0.5, "sum": 1.0}}.get(answer) or 1 / (
            answer != "0"
        )


def test_each_turn_has_its_own_reward_and_failures_are_outcomes(run: Any) -> None:
    made = run(Stepping, Scripted(*(f"{n}{END}" for n in (7, 8, 9, 0, 42))))
    assert [(e.sample, e.turn) for e in made] == [(0, n) for n in range(5)]
    assert [e.reward for e in made] == [0.25, 0.0, 1.5, 0.0, 1.0]
    assert [e.reward_outcome for e in made] == ["ok", "error", "ok", "error", "ok"]
    assert made[2].metrics == {"form": 0.5, "sum": 1.0, "turns": 5.0}
    assert (
        "finite" in made[1].info["reward_message"]
        and "ZeroDivisionError" in made[3].info["reward_message"]
    )
    whole = ids("<|user|>6*7=<|end|><|assistant|>7<|end|><|user|>no<|end|><|assistant|>")
    assert made[1].tokens.tolist() == [*whole, *ids(f"8{END}")] and made[
        1
    ].action_mask.tolist() == [1, 1]


def test_one_reward_for_all_turns(run: Any) -> None:
    class Spread(RewardPropagation, Guess):
        def reward(self, answer: str) -> float:
            return self.heard / 2

    made = run(Spread, Scripted(f"7{END}", f"42{END}"))
    assert [(e.turn, e.reward) for e in made] == [(0, 1.0), (1, 1.0)]


# Plain functions


def test_a_plain_function_has_a_thread_where_the_context_waits(run: Any) -> None:
    names = []

    def plain(of: Task, ctx: Any) -> list[Experience]:
        names.append(threading.current_thread().name)
        prompt = ctx.render(of)
        made = ctx.generate(prompt, of.repeat_times, of.sampling)
        results = ctx.score(of, [ctx.decode(one.tokens) for one in made])
        return [workflows.experience(of, prompt, *pair) for pair in zip(made, results, strict=True)]

    made = run(plain, Scripted(f"41{END}", f"42{END}"), repeat_times=2)
    assert [(e.sample, e.reward) for e in made] == [(0, 0.0), (1, 1.0)]
    assert names == ["plain"]


@pytest.mark.parametrize("kind", ["spin", "wait"])
def test_the_thread_of_a_function_that_hangs_ends_with_the_tasks_time(kind: str) -> None:
    began, ended = threading.Event(), threading.Event()

    def hang(of: Task, ctx: Any) -> list[Experience]:
        try:
            began.set()
            while True:
                if kind == "wait":
                    ctx.ask([])
        finally:
            ended.set()

    class Silent(Scripted):
        async def ask(self, *_: Any) -> str:  # type: ignore[override]
            await asyncio.Event().wait()
            return ""

    async def scenario() -> None:
        job = asyncio.create_task(workflows.called(hang, task("mine"), Silent()))
        await asyncio.to_thread(began.wait)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert await asyncio.to_thread(ended.wait, 20)

    asyncio.run(scenario())


def test_what_a_plain_function_raises_is_raised(run: Any) -> None:
    def leave(of: Task, ctx: Any) -> None:
        raise SystemExit(3)

    def divide(of: Task, ctx: Any) -> float:
        return 1 / 0

    with pytest.raises(RuntimeError, match="raised SystemExit: 3"):
        run(leave, Scripted())
    with pytest.raises(ZeroDivisionError):
        run(divide, Scripted())


# Tools


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("just text", []),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            [ToolCall("f", {"a": 1})],
        ),
        (
            (
                'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "g", "arguments": '
                '"{\\"x\\": 2}"}</tool_call>'
            ),
            [ToolCall("f"), ToolCall("g", {"x": 2})],
        ),
        ('<tool_call>{"name": "f"}', "has no </tool_call>"),
        ("<tool_call>{name: f}</tool_call>", "no JSON"),
        ('<tool_call>[{"name": "f"}]</tool_call>', "must be an object"),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "must be an object"),
    ],
)
def test_calls_are_read_as_hermes_and_qwen_write_them(text: str, found: Any) -> None:
    if isinstance(found, str):
        (call,) = calls(text)
        assert found in call.problem
    else:
        assert calls(text) == found


def called_with(code: str) -> str:
    return (
        f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>{END}"
    )


@pytest.mark.skipif(sandbox.obstacle() is not None, reason="no cells on this machine")
def test_a_model_uses_python_and_what_it_says_is_not_trained(run: Any) -> None:
    ctx = Scripted(called_with("print(6*7)"), called_with("1/0"), f"it is 42{END}")
    (made,) = run("tool_use", ctx)
    text = TOKENIZER.decode(made.tokens, skip_special_tokens=False)
    assert '"name": "python"' in text.partition("6*7=")[0], (
        "the tools are described before the question"
    )
    said = ids("<|tool|>42\n<|end|><|assistant|>")
    at = made.prompt_length + len(ids(called_with("print(6*7)")))
    assert made.tokens[at : at + len(said)].tolist() == said
    mask = [0] * made.prompt_length + made.action_mask.tolist()
    assert not any(mask[at : at + len(said)]) and mask[at + len(said)] == mask[at - 1] == 1
    assert "ZeroDivisionError" in text and "error: exit code 1" in text
    told = {"turns": 3.0, "tools/calls": 2.0, "tools/failed": 1.0}
    assert (made.reward, made.metrics) == (1.0, told)


def test_a_machine_that_cannot_run_programs_is_no_fault_of_the_models(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "CELL", "/nowhere/cell.py")
    with pytest.raises(sandbox.CellError, match="no cell for a program could be made: .*nowhere"):
        run("tool_use", Scripted(called_with("print(6*7)"), f"42{END}"))
    with pytest.raises(sandbox.CellError):
        rewards.resolve("code_tests")(
            "print(1)", json.dumps({"inputs": [""], "outputs": ["1"]}), task("tool_use")
        )


def test_tools_of_ones_own_and_calls_that_cannot_be_made(run: Any) -> None:
    class Own(ToolUse):
        def tools(self, task: Task) -> list[Tool]:
            async def look(word: str) -> str:
                return word * 3000

            return [Tool("look", "Looks a word up.", look), Tool("plain", "Fails.", lambda: 1 / 0)]

    lines = [
        (
            '<tool_call>{"name": "look", "arguments": {"word": '
            '"ab"}}</tool_call><tool_call>{"name": '
            '"plain"}</tool_call>'
        ),
        (
            '<tool_call>{"name": "lok"}</tool_call><tool_call>{"name": "look", "arguments": '
            '{"wrd": '
            "1}}</tool_call>"
        ),
    ]
    (made,) = run(Own, Scripted(*(line + END for line in lines), f"42{END}", room=100_000))
    text = TOKENIZER.decode(made.tokens, skip_special_tokens=False)
    for said in (
        "2000 characters left out",
        "error: division by zero",
        "there is no tool 'lok': there are look, plain",
    ):
        assert said in text
    assert "unexpected keyword argument 'wrd'" in text
    assert (made.metrics["tools/calls"], made.metrics["tools/failed"]) == (4.0, 3.0)


def test_results_of_tools_have_the_ids_that_mistrals_templates_want() -> None:
    flow = ToolUse()
    flow.made = flow.failed = 0
    flow.known = {"f": Tool("f", "", lambda: "5")}
    told = asyncio.run(flow.step('<tool_call>{"name": "f"}</tool_call>' * 2))
    assert [one["content"] for one in told or []] == ["5", "5"]
    known = {one["tool_call_id"] for one in told or []}
    assert len(known) == 2 and all(len(one) == 9 and one.isalnum() for one in known)


# Judges


RUBRIC = {"rubric": ["is short", {"description": "is right", "weight": 3}]}


@pytest.mark.parametrize(
    ("said", "reward", "problem"),
    [
        ('thought {"met": [true]} then {"met": [true, true]}', 1.0, ""),
        ('{"met": [false, true]}', 0.75, ""),
        ('{"met": [true, false]}', 0.25, ""),
        ("it is good", 0.0, "no JSON object with `met`"),
        ('{"met": [true]}', 0.0, "must be a list of 2; it has 1 entries"),
        ('{"met": [1, 0]}', 0.0, "something else than true and false"),
        ('{"met": "yes"}', 0.0, "must be a list of 2"),
    ],
)
def test_a_rubric_is_weighed_and_what_is_no_verdict_is_an_error(
    run: Any, said: str, reward: float, problem: str
) -> None:
    ctx = Scripted(f"42{END}", judge=lambda question: said)
    (made,) = run("rubric_judge", ctx, workflow_args=RUBRIC)
    assert made.reward == pytest.approx(reward) and made.reward_outcome == (
        "error" if problem else "ok"
    )
    assert problem in made.info.get("reward_message", "")
    assert '"is right"' in ctx.questions[0] and '"42"' in ctx.questions[0]


def test_the_rows_own_rubric_wins(run: Any) -> None:
    ctx = Scripted(f"42{END}", judge=lambda question: '{"met": [true]}')
    (made,) = run("rubric_judge", ctx, workflow_args=RUBRIC, raw={"rubric": ["rhymes"]})
    assert (made.reward, made.metrics) == (1.0, {"rubric/0": 1.0})
    with pytest.raises(ValueError, match="has no rubric"):
        run("rubric_judge", Scripted(f"42{END}"))


def test_ruler_asks_once_for_the_group(run: Any) -> None:
    ctx = Scripted(
        f"41{END}", f"42{END}", f'a"]{END}', judge=lambda question: '{"scores": [0.2, 1, 0]}'
    )
    made = run("ruler", ctx, repeat_times=3)
    assert [e.reward for e in made] == [0.2, 1.0, 0.0] and len(ctx.questions) == 1
    assert json.dumps(["41", "42", 'a"]']) in ctx.questions[0], (
        "what a response says cannot pass for another"
    )


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ('{"scores": [0.2, 2]}', "no number from 0 to 1"),
        ('{"scores": [0.2, true]}', "no number from 0 to 1"),
        ('{"scores": [NaN, 0]}', "no number from 0 to 1"),
        ('{"scores": [0.2]}', "must be a list of 2"),
        ("first is best", "no JSON object with `scores`"),
        (None, "TimeoutError: too late"),
    ],
)
def test_a_ruler_that_cannot_be_read_fails_the_whole_group(
    run: Any, said: str | None, problem: str
) -> None:
    def judge(question: str) -> str:
        if said is None:
            raise TimeoutError("too late")
        return said

    made = run("ruler", Scripted(f"41{END}", f"42{END}", judge=judge), repeat_times=2)
    assert [(e.reward, e.reward_outcome) for e in made] == [(0.0, "error")] * 2
    assert all(problem in e.info["reward_message"] for e in made)


# The page on workflows


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "workflows.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize(
    ("file", "name", "lines", "reward"),
    [
        ("my_workflow.py", "twice", (f"41{END}", f"42{END}"), [0.0, 1.0]),
        ("guess.py", "Guess", (f"7{END}", f"42{END}"), [1.0]),
    ],
)
def test_what_the_page_shows_runs(
    tmp_path: Path, file: str, name: str, lines: tuple[str, ...], reward: list[float]
) -> None:
    (tmp_path / file).write_text(EXAMPLES[file])
    of = task(f"{tmp_path / file}:{name}", repeat_times=len(reward))
    assert [made.reward for made in asyncio.run(workflows.run(of, Scripted(*lines)))] == reward


MY_PROJECT = """
def accuracy_reward(completions, solution, **kwargs):
    said = [one[0]["content"] for one in completions]
    return [None if s == "?" else float(a == s) for a, s in zip(said, solution, strict=True)]

def format_reward(prompts, completions, **kwargs):
    assert "prompt" not in kwargs and kwargs["level"] == ["hard"] and len(prompts) == 1
    return [None if completions[0][0]["content"] == "nobody knows" else 0.5]
"""


@pytest.mark.parametrize(
    ("response", "solution", "parts"),
    [
        ("42", "42", {"accuracy_reward": 1.0, "format_reward": 0.5}),
        ("41", "42", {"accuracy_reward": 0.0, "format_reward": 0.5}),
        ("41", "?", {"format_reward": 0.5}),
        ("nobody knows", "?", None),
    ],
)
def test_functions_of_trl_are_called_as_the_page_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    response: str,
    solution: str,
    parts: dict[str, float] | None,
) -> None:
    (tmp_path / "my_project.py").write_text(MY_PROJECT)
    (tmp_path / "trl_rewards.py").write_text(EXAMPLES["trl_rewards.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    raw = {"prompt": "6*7=", "solution": solution, "level": "hard"}
    of = msgspec.structs.replace(task("single_turn"), raw=raw)
    found = judge(rewards.resolve(f"{tmp_path}/trl_rewards.py:both"), response, of)
    if parts is None:
        assert found.outcome == "error" and "empty" in found.message
    else:
        assert (found.reward, found.metrics) == (sum(parts.values()), parts)


def test_the_page_lists_every_name() -> None:
    for name in (*workflows.WORKFLOWS, *rewards.REWARDS):
        assert f"| `{name}` |" in PAGE, name
