"""What clients of mode=serve were answered, on its way to the buffer: groups that no taskset asked
for.

    endpoint ── experiences of a task's sessions ──► store ── admit, put ──► buffer

In: what sessions made, once they have their rewards. Out: a group in the buffer, durably. A service
is an explorer of its own there, `<explorer>/endpoint`: as of any other, the last process that began
under a name is the only one that is served. Invariants: a group that is given again, because nobody
heard what became of it, is stored once; one that a service had when it ended is nobody's, for its
sessions are gone: the next one gives it up.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rft.buffer.calls import Lost
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.ground.experience import Experience, Sampling, Task, encode


@dataclass(eq=False)
class ServedGroup:
    """Of sessions of one task, with no other ever added.

    `number`: under which the buffer knows it; None: nobody has heard one.
    """

    task: str
    experiences: list[Experience]
    number: int | None = None

    @property
    def id(self) -> str:
        return f"endpoint/{self.task}"

    def encoded(self) -> bytes:
        """What its task is to the buffer."""
        return encode(
            Task(
                id=self.id,
                taskset="endpoint",
                row=0,
                prompt="",
                workflow="agent",
                sampling=Sampling(),
            )
        )


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
        self._heard: int | None = None  # the last number
        self._unheard: list[ServedGroup] = []  # asked for, in this order
        self._admission = asyncio.Lock()

    async def begin(self) -> None:
        """Before anything is stored."""
        start = await self._ask(
            ExperienceBuffer.attach_explorer, self.name, within_s=self.patience_s
        )
        self._heard = start["heard"]
        for group, _ in start["reissue"]:
            await self._ask(ExperienceBuffer.abandon, group, "the service that had it has ended")

    async def store(self, group: ServedGroup) -> None:
        """Durable on return. After an error it may be stored or not: the same one, given again, is
        stored once.
        """
        if group.number is None:
            async with self._admission:
                await self._admit(group)
        for experience in group.experiences:
            experience.group, experience.task = group.number, group.id
        await self._put((group.number, encode(group.experiences), None))

    async def _admit(self, group: ServedGroup) -> None:
        """Until it has its number. Groups whose call was not answered may be begun, and the buffer
        knows them by their order: so those before it come along.
        """
        if group.number is None and group not in self._unheard:
            self._unheard.append(group)
        while group.number is None:
            tasks = [(one.encoded(), dict[str, Any]()) for one in self._unheard]
            most = [len(one.experiences) for one in self._unheard]
            try:
                numbers = await self._ask(
                    *(ExperienceBuffer.admit_some, self.name, tasks, most, self._heard),
                    within_s=self.patience_s,
                )
            except Lost as error:  # no other group will be taken either
                self._lost(error)
                raise
            if not numbers:
                raise RuntimeError("the buffer takes no more groups")
            for number in numbers:
                self._unheard.pop(0).number = number
            self._heard = numbers[-1]
