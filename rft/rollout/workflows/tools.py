"""A model that calls tools: text with <tool_call> in, what the tools said out, until it answers
without one.

    answer ── calls ──► python (in a cell) or a function of yours ── text
            ──► message of role `tool` ──► next turn

In: a task; the tools are described in its system message, in the form that Hermes and Qwen models
were trained on, so that any chat template will do. Out: experiences of `MultiTurn`: what a tool
said has action mask 0. Invariant: a call that cannot be read, that names no tool, that fails or
takes too long is told to the model as such, and counted. Only a machine that cannot run programs
fails the task.
"""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import msgspec

from rft.ground.experience import Experience, Task
from rft.rollout import sandbox
from rft.rollout.context import WorkflowContext
from rft.rollout.sandbox import Limits
from rft.rollout.workflows.dialogue import Dialogue, Messages, MultiTurn
from rft.rollout.workflows.threads import called, together

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
SHOWN = 4000  # characters of what a tool said that the model sees: the beginning and the end
SERVER_S = 60.0  # for one answer of a server
SYSTEM = """You may call functions to help with the question. They are described in <tools></tools>:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and its arguments, like this:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""


@dataclass(frozen=True)
class Tool:
    """What a model may call.

    `run` gets the arguments by name, may be async, and returns text; what it raises is told.
    """

    name: str
    description: str
    run: Callable[..., Any]
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def described(self) -> str:
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return json.dumps({"type": "function", "function": told})


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `problem` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def calls(text: str) -> list[ToolCall]:
    """Every <tool_call> of an answer, in order."""
    return [_call(found[1], bool(found[2])) for found in CALL.finditer(text)]


def _call(body: str, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall(problem="the call has no </tool_call>")
    try:
        told = json.loads(body)
        arguments = told.get("arguments", {}) if isinstance(told, dict) else None
        if isinstance(arguments, str):  # some models write them as text
            arguments = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is no JSON: {error}")
    if not isinstance(arguments, dict) or not isinstance(told.get("name"), str):
        return ToolCall(
            problem='the call must be an object like {"name": "...", "arguments": {...}}'
        )
    return ToolCall(told["name"], arguments)


def python_tool(limits: Limits) -> Tool:
    async def run(code: str) -> str:
        ran = await sandbox.run(str(code), limits=limits)
        if ran.well:
            return ran.out or "(the program printed nothing: print what you want to see)"
        raise RuntimeError(f"{ran.in_words(limits)}\n{ran.out}{ran.err}")

    schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    return Tool(
        "python",
        "Runs a Python program and returns what it prints. Nothing is kept between calls.",
        run,
        schema,
    )


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def of_row(task: Task, offered: dict[str, Tool]) -> dict[str, Tool]:
    """Those tools that the row names, as it describes them."""
    found = {}
    for one in task.tools:
        told = one.get("function", one)
        name = str(told.get("name"))
        if name not in offered:
            raise ValueError(
                f"task {task.id}: its row has the tool {name!r}, which nobody offers (there are "
                f"{', '.join(offered) or 'none'}): name a server of it in workflow_args.mcp_servers"
            )
        found[name] = replace(
            offered[name],
            description=str(told.get("description", offered[name].description)),
            parameters=told.get("parameters", offered[name].parameters),
        )
    return found


async def mcp_tools(stack: AsyncExitStack, server: str | dict[str, Any]) -> list[Tool]:
    """What a server of the Model Context Protocol offers: its URL, or the `command` that starts one
    (with `args`, `env`) for this run alone. It ends with the stack.
    """
    import mcp

    place = server if isinstance(server, str) else mcp.StdioServerParameters(**server)
    client = await stack.enter_async_context(mcp.Client(place, read_timeout_seconds=SERVER_S))

    def calling(name: str) -> Callable[..., Any]:
        async def run(**arguments: Any) -> str:
            told = await client.call_tool(name, arguments)
            said = "\n".join(str(getattr(one, "text", f"({one.type})")) for one in told.content)
            if told.is_error:
                raise RuntimeError(said)
            return said

        return run

    found, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += [
            Tool(one.name, one.description or "", calling(one.name), one.input_schema)
            for one in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return found


class ToolUse(MultiTurn):
    """Turns until an answer has no call; the task's reward function judges that answer.

    `workflow_args.limits` are `Limits` of the Python tool; `python: false` is without it;
    `mcp_servers` are asked for more. Where a row names tools (`format.tools_key`), these of them
    are offered. Write `tools` for your own.
    """

    needs_cell = True
    needs_template = True
    needs_prompt = True
    scores = True
    ARGUMENTS: ClassVar[dict[str, type]] = MultiTurn.ARGUMENTS | {
        "limits": dict,
        "python": bool,
        "mcp_servers": list,
    }
    served: Sequence[Tool] = ()

    async def episode(self, task: Task, ctx: WorkflowContext, sample: int) -> list[Experience]:
        try:
            async with AsyncExitStack() as stack:
                servers = task.workflow_args.get("mcp_servers", [])
                asked = [await mcp_tools(stack, server) for server in servers]
                self.served = [tool for tools in asked for tool in tools]
                return await super().episode(task, ctx, sample)
        except BaseExceptionGroup as group:  # a client's own: what went wrong in the run is inside
            raise _innermost(group) from None

    def begin(self, task: Task) -> None:
        self.made = self.failed = 0
        offered = {tool.name: tool for tool in (*self.tools(task), *self.served)}
        self.known = of_row(task, offered) if task.tools else offered

    def tools(self, task: Task) -> list[Tool]:
        if not task.workflow_args.get("python", True):
            return []
        return [python_tool(msgspec.convert(task.workflow_args.get("limits", {}), Limits))]

    def opening(self, task: Task) -> Task:
        told = SYSTEM.format(tools="\n".join(tool.described() for tool in self.known.values()))
        messages = (
            [{"role": "user", "content": task.prompt}]
            if isinstance(task.prompt, str)
            else list(task.prompt)
        )
        if messages and messages[0]["role"] == "system":
            told = f"{messages.pop(0)['content']}\n\n{told}"
        shown = [{"role": "system", "content": told}, *messages]
        return msgspec.structs.replace(task, prompt=shown, tools=[])  # told, not by the template

    async def step(self, answer: str) -> Messages | None:  # type: ignore[override]
        asked = calls(answer)
        if not asked:
            return None
        told = await together(*map(self.answer_to, asked))
        return [
            # Mistral's templates want an id, of nine letters and digits
            {"role": "tool", "content": said, "tool_call_id": f"call{number:05}"}
            for number, said in enumerate(told)
        ]

    async def answer_to(self, call: ToolCall) -> str:
        self.made += 1
        tool = self.known.get(call.name)
        problem = call.problem or (
            "" if tool else f"there is no tool {call.name!r}: there are {', '.join(self.known)}"
        )
        if tool and not problem:
            try:
                return shown(str(await called(_with_names(tool.run, call.arguments))))
            except sandbox.CellError:
                raise
            except Exception as error:
                problem = str(error) or type(error).__name__
        self.failed += 1
        return f"error: {shown(problem)}"

    async def finished(self, talk: Dialogue, answer: str) -> list[Experience]:
        told = {"tools/calls": float(self.made), "tools/failed": float(self.failed)}
        return [self.told(one, told) for one in await super().finished(talk, answer)]


def _with_names(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """`function` without arguments, of the same kind: `called` looks at that."""
    if inspect.iscoroutinefunction(function):

        async def waits() -> Any:
            return await function(**arguments)

        return waits
    return lambda: function(**arguments)


def shown(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return (
        f"{text[: SHOWN // 2]}\n... {len(text) - SHOWN} characters left out "
        f"...\n{text[-SHOWN // 2 :]}"
    )
