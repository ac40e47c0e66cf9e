"""A user's own workflow with tools, for a model that cannot call any: what it says first is counted
by a program.
"""

from typing import Any

from rft.rollout.workflows import ToolUse
from rft.rollout.workflows.tools import ToolCall


class Counted(ToolUse):
    turn = 0

    async def step(self, answer: str) -> list[dict[str, Any]] | None:  # type: ignore[override]
        self.turn += 1
        if self.turn == 2:
            return None
        call = ToolCall("python", {"code": f"print(len({answer!r}))"})
        return [{"role": "tool", "content": await self.answer_to(call)}]
