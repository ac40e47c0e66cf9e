"""Agents of AgentScope: its ReAct agent, or a function of yours that is given its model.

In: a task, the address of the model. Out: what the function returns (a number, or a number and
metrics); None where the task's own reward function is to judge the last answer. `env_id`: nothing,
or path/to/file.py:function, async, called with (task, model, **env_args).
"""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

from agentscope.agent import Agent, ReActConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel

_MATH = "Solve the problem step by step, and give the final answer within \\boxed{}."
PROMPTS = {None: "You are helpful.", "gsm8k": _MATH, "dapo": _MATH}


class AgentScope:
    packages = {"agentscope": ("2",)}
    drives = True

    @classmethod
    def prepare(cls, env_id: str = "", **args: Any) -> None:
        cls.function = staticmethod(named(env_id) if env_id else react)
        given = inspect.signature(cls.function)
        given.bind({}, None, **args)
        if not env_id and args.get("type") not in PROMPTS:
            known = ", ".join(name for name in PROMPTS if name)
            raise ValueError(f"type={args['type']}: give one of {known}, or system_prompt alone")

    def __init__(self, env_id: str = "", **args: Any) -> None:
        self.args = args

    async def drive(self, task: "dict[str, Any]", access: "dict[str, Any]") -> Any:
        credential = OpenAICredential(api_key=access["api_key"], base_url=access["base_url"])
        model = OpenAIChatModel(credential, "policy", stream=False, max_retries=0)
        return await self.function(task, model, **self.args)


async def react(
    task: "dict[str, Any]",
    model: Any,
    system_prompt: "str | None" = None,
    max_iters: int = 8,
    type: "str | None" = None,
) -> None:
    """`type`: of Trinity-RFT, what the tasks are, which says the system prompt."""
    prompt = PROMPTS[type] if system_prompt is None else system_prompt
    agent = Agent("agent", prompt, model, react_config=ReActConfig(max_iters=max_iters))
    asked = task["prompt"]
    text = asked if isinstance(asked, str) else asked[-1]["content"]
    await agent.reply(UserMsg(name="user", content=text))


def named(path: str) -> Any:
    file, _, name = path.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise FileNotFoundError(f"env_id={path}: give path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"env_id={path}: {name} must be an async function")
    return function
