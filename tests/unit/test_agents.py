"""The workflow `agent`: users' functions and commands run against the real endpoint, over an engine
that answers as it is told.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from rft import config as configs
from rft import train
from rft.agents.workflow import AgentSettings, AgentWorkflow
from rft.config import ConfigError, ExplorerConfig, ModelConfig, RolloutModelConfig
from rft.ground.experience import Experience, Sampling, Task
from rft.rollout.context import Shared, TokenLimits, WorkflowContext
from rft.rollout.reward_worker import RewardResult
from tests.unit.scripted import TOKENIZER, Pool, listening, policy
from tests.unit.states import until

FILE = Path(__file__).with_name("agents_of_users.py")
ASKS = (
    "import sys, json, openai; task = json.loads(sys.stdin.readline()); "
    "openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': "
    "task['prompt']}])"
)  # noqa: E501


def task(repeat: int = 2, **args: Any) -> Task:
    found = {"agent": f"{FILE}:{args.pop('agent')}"} if "agent" in args else {}
    sampling = Sampling(temperature=0.9)
    return Task(
        id="t/0/0",
        taskset="t",
        row=0,
        prompt="1+1=",
        truth="2",
        repeat_times=repeat,
        sampling=sampling,
        workflow="agent",
        workflow_args={**found, **args},
    )


class Scores:
    """In the place of the reward workers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def score(self, items: list[tuple[Any, ...]]) -> list[RewardResult]:
        self.asked += [item[1] for item in items]
        return [RewardResult(reward=0.125, metrics={"right": 0.125})] * len(items)


def shared(pool: Pool, **rollout: Any) -> Shared:
    config = ExplorerConfig(rollout_model=RolloutModelConfig(**rollout), agent_processes=4)
    made = Shared(config, ModelConfig(), {}, None)
    made.pool, made.tokenizer, made.rewards = pool, TOKENIZER, Scores()  # type: ignore[assignment]
    made.limits, made.stop_token = TokenLimits(256, 512), TOKENIZER.eos_token_id
    return made


def in_context(
    scenario: Callable[[WorkflowContext], Awaitable[Any]],
    tmp_path: Path,
    others: tuple[Any, ...] = (),
    context: int = 512,
    **rollout: Any,
) -> Any:
    async def whole() -> Any:
        pool = Pool(lambda p, n: "ok")
        async with (
            asyncio.timeout(100),
            listening(pool, tmp_path, others=others, context=context) as endpoint,
        ):
            all_ = shared(pool, **rollout)
            all_.endpoint = endpoint
            ctx = WorkflowContext(all_, "t", "0")
            try:
                return await scenario(ctx)
            finally:
                ctx.end_sessions()
                assert not endpoint.registry.open_

    return asyncio.run(whole())


def run(given: Task, tmp_path: Path, **more: Any) -> list[Experience]:
    return in_context(lambda ctx: AgentWorkflow().run(given, ctx), tmp_path, **more)


def test_an_async_function_is_run_once_per_response(tmp_path: Path) -> None:
    made = run(task(repeat=3, agent="two_turns", args={"returns": 0.75}), tmp_path)
    assert [(one.sample, one.turn, one.reward, one.reward_outcome) for one in made] == [
        (n, 0, 0.75, "ok") for n in range(3)
    ]
    assert all(one.metrics["turns"] == 2 and one.temperature == 0.9 for one in made)
    assert TOKENIZER.decode(made[0].tokens.tolist()).endswith(
        "<|assistant|>ok<|end|><|user|>?<|end|><|assistant|>ok<|end|>"
    )


def test_rewards_come_from_the_agent_or_from_the_task(tmp_path: Path) -> None:
    posts = {"agent": "two_turns", "args": {"posts": 0.5}}
    with pytest.raises(httpx.HTTPStatusError, match="403"):
        run(task(**posts), tmp_path)
    posted = run(task(**posts, agent_posts_reward=True), tmp_path)
    assert {one.reward for one in posted} == {0.5}
    waited = run(
        task(
            agent="two_turns",
            args={"posts": 0.5, "returns": 3},
            reward="posted",
            agent_posts_reward=True,
        ),
        tmp_path,
    )
    assert {one.reward for one in waited} == {0.5}
    parts = run(task(agent="two_turns", args={"returns": {"a": 1, "b": 0.5}}), tmp_path)
    assert {one.reward for one in parts} == {1.5} and parts[0].metrics["b"] == 0.5
    for args in ({"args": {}}, {"args": {"returns": 3}, "reward": "task"}):
        scored = run(task(agent="two_turns", **args), tmp_path)
        assert {(one.reward, one.metrics["right"]) for one in scored} == {(0.125, 0.125)}
    alone = run(
        task(repeat=1, agent="two_turns", args={"turns": 3, "returns": 1.0}, merge=False), tmp_path
    )
    assert [(one.turn, one.response_length, one.reward) for one in alone] == [
        (n, 3, 1.0) for n in range(3)
    ]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (task(agent="two_turns", args={"raises": "answer"}), "KeyError: 'answer'"),
        (task(agent="two_turns", reward="posted", reward_timeout=0.01), "no reward was posted"),
        (
            task(agent="two_turns", args={"returns": "much"}),
            "a reward must be a number, not 'much'",
        ),
        (task(agent="two_turns", args={"returns": 1e9}), r"at most 1e\+06 in size, not 1e\+09"),
        (task(agent="never", timeout=0.01), "ran longer than 0.01 s"),
        (task(agent="quiet"), "asked the model for nothing"),
        (task(repeat=1, agent="fails"), r"ValueError: no such town \(.*agents_of_users.py:\d+\)"),
        (task(repeat=1, agent="dies"), "killed by SIGKILL; it wrote last: before the end"),
        (
            task(repeat=1, command=[sys.executable, "-c", "import sys; print('why'); sys.exit(3)"]),
            "exit code 3; it wrote last: why",
        ),
        (task(repeat=1, command=["no-such-program"]), "FileNotFoundError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_run_that_fails_fails_the_group(tmp_path: Path, given: Task, names: str) -> None:
    with pytest.raises(Exception) as failed:
        run(given, tmp_path)
    import re

    assert re.search(names, f"{type(failed.value).__name__}: {failed.value}")


def test_a_context_that_is_full_is_an_ending(tmp_path: Path) -> None:
    """The client is told so and raises; what was answered before is learned from."""
    made = run(task(agent="two_turns", args={"turns": 9}), tmp_path, context=48)
    assert all(
        one.stop == "length" and 1 < one.metrics["turns"] < 9 and one.reward == 0.125
        for one in made
    )
    [alone] = run(task(repeat=1, agent="two_turns"), tmp_path, context=6)  # not one answer
    assert (alone.stop, alone.response_length, alone.reward_outcome) == (
        "prompt_too_long",
        0,
        "none",
    )


def test_a_plain_function_and_a_command_have_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RFT_ENDPOINT_TOKEN", "not for agents")
    made = run(task(agent="plain", args={"reward": 1.0}), tmp_path)
    assert [(one.sample, one.reward, one.metrics["short"]) for one in made] == [
        (0, 1.5, 0.5),
        (1, 1.5, 0.5),
    ]
    check = "import os; assert 'RFT_ENDPOINT_TOKEN' not in os.environ; "
    [one] = run(task(repeat=1, command=[sys.executable, "-c", check + ASKS]), tmp_path)
    assert one.reward == 0.125 and "<|user|>1+1=<|end|>" in TOKENIZER.decode(one.tokens.tolist())


def test_what_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pids"

    async def scenario(ctx: WorkflowContext) -> None:
        running = asyncio.ensure_future(
            AgentWorkflow().run(task(repeat=1, agent="has_children", args={"file": str(file)}), ctx)
        )
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    in_context(scenario, tmp_path)

    def gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    # a signal is sent at once, and a process ends when the machine finds time for it
    until(lambda: all(gone(int(pid)) for pid in file.read_text().split()), "both are gone")


def test_an_auxiliary_model_is_asked_by_name(tmp_path: Path) -> None:
    judge = Pool(lambda p, n: "fine" if "good?" in p else "what")

    async def scenario(ctx: WorkflowContext) -> None:
        asked = [{"role": "user", "content": "good?"}]
        assert [await ctx.ask(asked), await ctx.ask(asked, "judge", Sampling(max_tokens=3))] == [
            "fine",
            "fine",
        ]
        assert [one.sampling.temperature for one in judge.asked] == [0.0, 1.0]
        with pytest.raises(ValueError, match="no auxiliary model 'jugde': there are judge"):
            await ctx.ask(asked, "jugde")
        assert (
            ctx.openai("judge").base_url.endswith("/m/judge/v1")
            and ctx.openai().api_key == ctx.openai("judge").api_key
        )

    in_context(scenario, tmp_path, others=(policy(judge, name="judge"),))

    async def without(ctx: WorkflowContext) -> None:
        with pytest.raises(ValueError, match="explorer.auxiliary_models"):
            await ctx.ask([{"role": "user", "content": "x"}])

    in_context(without, tmp_path)


def test_history_holds_every_call_until_it_is_taken(tmp_path: Path) -> None:
    async def scenario(ctx: WorkflowContext) -> None:
        prompt = TOKENIZER.encode("1+1=")
        made = await ctx.generate(prompt, 2, Sampling(max_tokens=4))
        async with __import__("openai").AsyncOpenAI(**ctx.openai()._asdict()) as client:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a"}]
            )
        kept = ctx.extract_experience_from_history(clear=False)
        assert [one.response_ids for one in kept[:2]] == [one.ids for one in made]
        assert (
            len(kept) == 3
            and list(kept[0].logprobs) == list(made[0].logprobs)
            and kept[0].reward_outcome == "none"
        )
        assert (
            ctx.extract_experience_from_history() == kept
            and ctx.extract_experience_from_history() == []
        )

    in_context(scenario, tmp_path, enable_history=True)

    async def off(ctx: WorkflowContext) -> None:
        await ctx.generate([7], 1, Sampling())
        with pytest.raises(RuntimeError, match="explorer.rollout_model.enable_history=true"):
            ctx.extract_experience_from_history()

    in_context(off, tmp_path)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, "needs one of agent=file.py:function and command"),
        ({"agent": "a:b", "command": ["c"]}, "needs one of"),
        ({"agent": "nowhere"}, "agent=nowhere: give 'package.module:function'"),
        (
            {"agent": "a:b", "rewrad": "task"},
            "workflow_args.rewrad: the workflow agent does not take it",
        ),
        ({"agent": "a:b", "reward": "later"}, "reward=later: choose one of auto, posted, task"),
        ({"agent": "a:b", "timeout": -1}, "timeout=-1.0: give seconds"),
        ({"agent": "a:b", "timeout": float("nan")}, "timeout=nan: give seconds"),
        ({"command": "python agent.py"}, "workflow_args.command='python agent.py': give a value"),
        ({"command": 5}, "workflow_args.command=5: give a value of type list"),
        ({"agent": 5}, "workflow_args.agent=5: give a value of type str"),
        ({"agent": "a:b", "args": 5}, "workflow_args.args=5: give a value of type dict"),
        ({"agent": "a:b", "merge": "no"}, "workflow_args.merge='no': give a value of type bool"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_are_refused_by_name(given: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AgentSettings.of(given)
    assert names in str(refused.value) and len(refused.value.problems) == 1


def test_serving_needs_a_model_and_nothing_else(tmp_path: Path) -> None:
    from rft.tools.toy import write_model

    model = write_model(tmp_path / "model", hidden=64, layers=2, heads=2, kv_heads=2, ffn=128)
    keys = [
        "experiment=serve",
        f"model.model_path={model}",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={tmp_path}",
    ]
    [config] = train.prepared_stages(configs.compose(keys))
    assert config.mode == "serve" and config.explorer.rollout_model.enable_openai_api
    assert (
        config.synchronizer.sync_method == "checkpoint"
        and config.explorer.listen_address == "127.0.0.1"
    )


def test_what_a_workflow_says_of_samples_is_kept() -> None:
    """(see `Runner`): an agent's group has as many experiences as its sessions had sequences."""
    from rft.rollout import runner, workflows

    async def scenario() -> list[int]:
        made = [
            Experience(
                tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[0.0], sample=n, turn=t
            )
            for n, t in ((0, 0), (0, 1), (1, 0))
        ]

        async def whole(given: Task, ctx: Any) -> list[Experience]:
            return made

        patch = pytest.MonkeyPatch()
        patch.setattr(workflows, "run", whole)
        found = await runner.Runner(ExplorerConfig(), shared(Pool(lambda p, n: ""))).run(
            3, msgspec.structs.replace(task(agent="quiet"))
        )
        patch.undo()
        return [one.sample for one in found]

    assert asyncio.run(scenario()) == [0, 0, 1]
    assert os.path.exists(FILE)
