"""Tasksets of `verifiers` 0.4, the format of its hub's packages since 0.3: a module that exports a
Taskset, whose tasks have a prompt and functions that reward a trace.

In: a task of the set by its number, the address of the model. Out: the trace's reward and metrics.
`env_id`: the name of an installed package, or the directory of one; `env_args`: the keys of the
set's config. The harness is `Talk`, in this process: those of verifiers fetch their programs from a
registry while a run is under way. Invariant: an episode with an error, also one of a reward
function, is raised, and no reward of 0.
"""

import copy
import itertools
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.envs.single_agent import SingleAgentEnv, SingleAgentEnvConfig
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import environment_class

__all__ = ["Talk"]  # how verifiers finds a harness in a module


class Talk(vf.Harness[HarnessConfig]):
    """Asks the model once; a task with tools is refused by verifiers itself."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: "dict[str, str]",
        data: Any,
        tool_interception_url: "str | None" = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(one) for one in prompt or ()]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")


class VerifiersTasks:
    packages = {"verifiers": ("0.4",)}
    drives = True
    env: Any = None  # one of a process; each rollout serves a copy
    found: "list[Any]" = []  # tasks that were looked at; a set may have no end
    more: Any = None

    @classmethod
    def prepare(cls, env_id: str, **args: Any) -> None:
        place = Path(env_id).expanduser()
        if place.is_dir():
            sys.path.insert(0, str(place.resolve().parent))
            env_id = place.name
        if environment_class(env_id) is not SingleAgentEnv:
            raise TypeError(f"{env_id} has an environment of several agents: one is trained here")
        agent = {"harness": {"id": __name__}, "runtime": {"type": "subprocess"}}
        asked = {"taskset": {"id": env_id} | args, "agent": agent}
        asked["interception"] = {"type": "server"}
        cls.env = SingleAgentEnv(SingleAgentEnvConfig.model_validate(asked))
        cls.found, cls.more = [], iter(cls.env.taskset)

    def __init__(self, env_id: str, **args: Any) -> None: ...

    @classmethod
    def task(cls, number: int) -> Any:
        cls.found += itertools.islice(cls.more, max(0, number + 1 - len(cls.found)))
        if number >= len(cls.found):
            raise IndexError(f"there is no task {number}: the set has {len(cls.found)}")
        return cls.found[number]

    async def drive(
        self, task: "dict[str, Any]", access: "dict[str, Any]"
    ) -> "tuple[float, dict[str, float]]":
        asked = self.task(int(task["raw"].get("index", task["row"])))
        name = f"RFT_SESSION_{uuid.uuid4().hex}"  # verifiers reads a key from nowhere else
        client = EvalClientConfig(base_url=access["base_url"], api_key_var=name)
        env, os.environ[name] = copy.copy(self.env), access["api_key"]
        try:
            async with env.serving():
                made = await env.run_episode(asked, ModelContext(model="policy", client=client))
        finally:
            del os.environ[name]
        for error in (*made.errors, *(one for trace in made.traces for one in trace.errors)):
            raise RuntimeError(f"the episode of verifiers failed: {error.type}: {error.message}")
        [trace] = made.traces
        scores = {name: one.score for name, one in trace.rewards.items()}
        return trace.reward, {**trace.metrics, **scores}

    @classmethod
    def rows(cls, count: int, seed: int, env_id: str, **args: Any) -> "list[dict[str, Any]]":
        """The first tasks of the set; `seed` chooses nothing: they have an order."""
        cls.found += itertools.islice(cls.more, max(0, count - len(cls.found)))
        return [
            {
                "prompt": one.data.prompt_text,
                "response": str(getattr(one.data, "answer", "")),
                "index": number,
            }
            for number, one in enumerate(cls.found[:count])
        ]
