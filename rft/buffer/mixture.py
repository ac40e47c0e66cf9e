"""Several training sets as one: an epoch takes every row of each, mixed in proportion to their sizes.

In: tasksets, each with its own order. Out: their tasks, and one `cursor`. Which set a position of an epoch belongs to depends on
(seed, epoch) only, so the cursor is that position; every set keeps the order that its own selector gives it. As with one set, the
last short batch of an epoch is left out.
"""

from collections import Counter
from typing import Any

from rft.buffer.selectors import shuffled
from rft.buffer.taskset import Epochs, Taskset
from rft.config import ConfigError
from rft.experience import Task


class Mixture(Epochs):
    def __init__(self, sets: list[Taskset], seed: int, epochs: int | None, batch_size: int):
        self.sets = sets
        self.name = "+".join(one.name for one in sets)
        self.seed, self.epochs = seed, epochs
        self._places = [number for number, one in enumerate(sets) for _ in range(len(one))]
        self._length = len(self._places) // batch_size * batch_size
        if self._length == 0:
            raise ConfigError(
                f"buffer.explorer_input.tasksets have {len(self._places)} rows together, fewer than "
                f"buffer.batch_size={batch_size}: lower buffer.batch_size or add rows"
            )
        self.seek({"epoch": 0, "index": 0})

    def __iter__(self) -> "Mixture":
        return self

    def __next__(self) -> Task:
        if self._index == self._length:
            self.seek({"epoch": self._epoch + 1, "index": 0})
        if self.epochs is not None and self._epoch >= self.epochs:
            raise StopIteration
        self._index += 1
        return next(self.sets[self._order[self._index - 1]])

    def seek(self, cursor: dict[str, int]) -> None:
        """Continue at a cursor of this or an earlier process."""
        self._go_to(cursor, f"tasksets {self.name!r}", "Were the files or buffer.batch_size")
        self._order = [self._places[at] for at in shuffled(len(self._places), self.seed, self._epoch)]
        taken = Counter(self._order[: self._index])
        for number, one in enumerate(self.sets):
            one.seek({"epoch": self._epoch, "index": taken[number]})

    # What their selectors learn

    @property
    def learns(self) -> bool:
        return any(one.learns for one in self.sets)

    def is_waiting(self) -> bool:
        return self._index < self._length and self.sets[self._order[self._index]].is_waiting()

    def tell(self, task: Task, value: float | None) -> None:
        for one in self.sets:
            if one.name == task.taskset:
                one.tell(task, value)

    def recall(self, told: list[list[Any]], running: list[Task]) -> None:
        for one in self.sets:
            one.recall(told, running)
