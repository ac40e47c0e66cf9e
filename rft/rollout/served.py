"""What clients of mode=serve were answered, on its way to the buffer: groups that no taskset asked
for.

    endpoint ── experiences of a task's sessions ──► store ── admit, put ──► buffer

In: what sessions made, once they have their rewards. Out: a group in the buffer, durably. A service
is an explorer of its own there, `<explorer>/endpoint`: as of any other, the last process that began
under a name is the only one that is served. Invariant: a group that a service had when it ended is
nobody's, for its sessions are gone: the next one gives it up.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from rft.buffer.calls import Lost
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.ground.experience import Experience, Sampling, Task, encode


class ServedGroups:
    """`ask`: what the buffer answers, within `within_s`. `put`: as `put_some`, of one.

    `patience_s`: for what may take long there. `lost`: hears that another process is served now.
    """

    def __init__(
        self,
        explorer: str,
        ask: Callable[..., Awaitable[Any]],
        put: Callable[[Any], Awaitable[None]],
        patience_s: float,
        lost: Callable[[BaseException], None],
    ):
        self.name = f"{explorer}/endpoint"
        self.patience_s = patience_s
        self._ask, self._put, self._lost = ask, put, lost

    async def begin(self) -> None:
        """Before anything is stored."""
        start = await self._ask(
            ExperienceBuffer.attach_explorer, self.name, within_s=self.patience_s
        )
        for group, _ in start["reissue"]:
            await self._ask(ExperienceBuffer.abandon, group, "the service that had it has ended")

    async def store(self, name: str, experiences: list[Experience]) -> None:
        """The sessions of task `name`. Durable on return."""
        task = Task(
            id=f"endpoint/{name}",
            taskset="endpoint",
            row=0,
            prompt="",
            workflow="agent",
            sampling=Sampling(),
        )
        try:
            group = await self._ask(
                *(ExperienceBuffer.admit, self.name, encode(task), {}, len(experiences)),
                within_s=self.patience_s,
            )
        except Lost as error:  # no other group will be taken either
            self._lost(error)
            raise
        for experience in experiences:
            experience.group, experience.task = group, task.id
        await self._put((group, encode(experiences), None))
