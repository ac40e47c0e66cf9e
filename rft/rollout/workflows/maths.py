"""Single questions as Trinity-RFT asks them: the form of the answer is asked for in the prompt, and
its reward (`rft.rollout.rewards.trinity`) scores it.

In: a task whose prompt is text, or a row with the columns that a class names. Out: experiences of
`SingleTurn`. Invariant: a prompt that is a list of messages, or that has a system prompt, is asked
as it stands; what is asked for otherwise is in words of our own, and means the same.
"""

import json
from typing import Any, ClassVar

import msgspec
import numpy as np

from rft.ground.experience import Experience, Sampling, Task
from rft.rollout.context import WorkflowContext
from rft.rollout.rewards import takes
from rft.rollout.workflows.dialogue import Dialogue, SingleTurn
from rft.rollout.workflows.threads import together

THINK = """Answer the user's question. First reason about it, then answer: the reasoning stands \
between <think> and </think>, the answer between <answer> and </answer>, like this:
<think> the reasoning </think>
<answer> the answer </answer>"""
BOXED = "Solve it step by step. The final answer stands in \\boxed{}."
BOXED_THINK = """You solve mathematical problems. First reason between <think> and </think>, then \
answer. The final answer, in closed form, stands in \\boxed{}."""
ASSISTANT = "You are a helpful assistant."
CALLS = """You may call these functions:
<tools>
{tools}
</tools>
In one reply, first reason between <think> and </think>, then write the calls as a JSON list \
between <tool_call> and </tool_call>, with arguments of the right types, like this:
<think> the reasoning </think> <tool_call>[{{"name": "<name>", "arguments": {{<arguments>}}}}]\
</tool_call>"""
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}  # of ShareGPT's `from`


def with_system(task: Task, words: str) -> Task:
    """The task, with this system prompt where its prompt is plain text."""
    if not isinstance(task.prompt, str):
        return task
    messages = [{"role": "system", "content": words}, {"role": "user", "content": task.prompt}]
    return msgspec.structs.replace(task, prompt=messages)


class MathThink(SingleTurn):
    """Asks for <think> and <answer>, unless there is a system prompt or another reward than
    `math_reward`.
    """

    reward_unless_named = "math_reward"

    def asked(self, task: Task) -> Task:
        return with_system(task, THINK) if task.reward == "math_reward" else task


class MathBoxed(SingleTurn):
    """Asks for a boxed answer; one that was cut is not trained on."""

    reward_unless_named = "math_boxed_reward"
    ARGUMENTS: ClassVar[dict[str, type]] = {
        "use_base": bool,  # plain text instead of the chat template
        "with_think": bool,  # asks for <think> too, and takes off for a response without it
        "format_score_coef": float,  # how much; default 0.1
    }

    def asked(self, task: Task) -> Task:
        args = task.workflow_args
        task = with_system(task, BOXED_THINK if args.get("with_think") else BOXED)
        given = {name: args[name] for name in ("with_think", "format_score_coef") if name in args}
        given = {name: one for name, one in given.items() if takes(task.reward, name)}
        return msgspec.structs.replace(task, reward_args={**given, **task.reward_args})

    def prompt(self, task: Task, ctx: WorkflowContext) -> list[int]:
        if not task.workflow_args.get("use_base") or isinstance(task.prompt, str):
            return super().prompt(task, ctx)
        said = [f"{one['role'].capitalize()}:\n{one['content']}" for one in task.prompt]
        return ctx.encode("\n".join([*said, "Assistant:\n"]))

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        made = await super().run(task, ctx)
        for one in made:
            if one.stop == "length":
                one.action_mask = np.zeros(one.response_length, dtype=bool)
        return made


class BotsMathBoxed(MathBoxed):
    """`math_boxed` for rows whose prompt is messages, always with the reward of that recipe."""

    reward_unless_named = "bots_math_boxed_reward"
    has_own_reward = True


class MathQuestion(SingleTurn):
    """Asks, behind the question, for steps and a boxed answer."""

    reward_unless_named = "math_eval_reward"
    has_own_reward = True

    def asked(self, task: Task) -> Task:
        if not isinstance(task.prompt, str):
            return task
        words = f"{task.prompt}\n{BOXED}"
        return with_system(msgspec.structs.replace(task, prompt=words), ASSISTANT)


class MathEval(MathQuestion):
    """The same, always sampled with temperature 0.6 and top_p 0.8."""

    def asked(self, task: Task) -> Task:
        sampling = msgspec.structs.replace(task.sampling, temperature=0.6, top_p=0.8)
        return super().asked(msgspec.structs.replace(task, sampling=sampling))


class Unrewarded(SingleTurn):
    """Responses without a reward: for algorithms that compare them with a teacher."""

    scores = False

    async def run(self, task: Task, ctx: WorkflowContext) -> list[Experience]:
        made, _ = await self.answers(self.asked(task), ctx)
        return made


class ToolCallRow(SingleTurn):
    """One reply that must call the row's tools as its `answer` does. Columns: `tools` (JSON),
    `conversations` (`from`, `value`), `raw_system`, `answer` (JSON).
    """

    reward_unless_named = "tool_call_reward"
    has_own_reward = True
    needs_template = True
    needs_prompt = False

    def asked(self, task: Task) -> Task:
        row, shown = task.raw, []
        if missing := [name for name in ("tools", "conversations") if name not in row]:
            raise ValueError(f"task {task.id}: its row has no column {' and '.join(missing)}")
        for one in listed(row["tools"]):
            shown.append(json.dumps({"type": "function", "function": one}))
        system = f"{row.get('raw_system') or ''}{CALLS.format(tools=chr(10).join(shown))}"
        said = [message(one, task.id) for one in listed(row["conversations"])]
        return msgspec.structs.replace(task, prompt=[{"role": "system", "content": system}, *said])


def listed(value: Any) -> list[dict[str, Any]]:
    return json.loads(value) if isinstance(value, str) else value


def message(one: dict[str, Any], task: str) -> dict[str, Any]:
    if one["from"] == "function_call":
        return {"role": "assistant", "content": json.dumps(one["value"])}
    if one["from"] not in ROLES:
        known = ", ".join(ROLES)
        raise ValueError(
            f"task {task}: conversations has `from` {one['from']!r}: known are {known}"
        )
    return {"role": ROLES[one["from"]], "content": one["value"]}


class Sudoku(SingleTurn):
    """Columns `puzzle` and `solution`; the response must be the solution."""

    needs_prompt = False

    def asked(self, task: Task) -> Task:
        words = f"Solve this Sudoku:\n{task.raw['puzzle']}"
        return msgspec.structs.replace(
            task, prompt=words, truth=str(task.raw["solution"]), reward="exact_match"
        )


class ThinkingBudget(SingleTurn):
    """A response may think for so many tokens; then its thinking is ended, by tokens that are not
    trained on, and it goes on.
    """

    END = "</think>"
    ARGUMENTS: ClassVar[dict[str, type]] = {
        "thinking_token_budget": int,
        "reasoning_end_str": str,  # default </think>
    }
    REQUIRED = ("thinking_token_budget",)

    async def answers(
        self, task: Task, ctx: WorkflowContext
    ) -> tuple[list[Experience], list[Experience]]:
        prompt = self.prompt(task, ctx)
        runs = range(task.repeat_times)
        made = await together(*(self.one(task, ctx, prompt, number) for number in runs))
        return made, [one for one in made if one.stop != "prompt_too_long"]

    async def one(
        self, task: Task, ctx: WorkflowContext, prompt: list[int], number: int
    ) -> Experience:
        budget = int(task.workflow_args["thinking_token_budget"])
        end = str(task.workflow_args.get("reasoning_end_str", self.END))
        talk = Dialogue(task, prompt, number)
        first = msgspec.structs.replace(
            task.sampling, max_tokens=max(1, min(budget, task.sampling.max_tokens))
        )
        await self.said(talk, ctx, first)
        left = task.sampling.max_tokens - talk.said
        if talk.stop == "length" and left > 0:
            if end not in ctx.decode(talk.ids[len(prompt) :]):
                talk.add(ctx.tokens(end))
            await self.said(talk, ctx, msgspec.structs.replace(task.sampling, max_tokens=left))
        return talk.whole()

    async def said(self, talk: Dialogue, ctx: WorkflowContext, sampling: Sampling) -> None:
        (made,) = await ctx.generate(list(talk.ids), 1, sampling, len(talk.prompt), talk.sample)
        if made.stop == "abort":
            raise RuntimeError(f"task {talk.task.id}: run {talk.sample} was aborted")
        if made.stop == "prompt_too_long" and talk.turns:
            talk.stop = "length"
        else:
            talk.say(made)
