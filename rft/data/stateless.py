"""Sources of batches that a step's number says everything about.

In: the number of a step. Out: its batch. Invariant: a checkpoint keeps nothing of such a source.
"""

from typing import Any

from rft.ground.experience import Batch


class StatelessSource:
    """What sources have in common whose batch of a step follows from its number alone: a resume
    needs nothing but the number.

    In: the calls of `feed.BatchSource`, and of `looking.ShowsNext`. Out: nothing to note, and
    nobody to wait for. Invariant: such a source has no state that a checkpoint would have to keep.
    """

    _looked: int = 0
    _shown: Batch | None = None  # what was seen of that step, until it is taken

    def batch(self, step: int) -> Batch:
        """That of `step`; empty when the run is over."""
        raise NotImplementedError

    def take(self, step: int) -> Batch:
        shown, self._shown = self._shown, None
        return shown if shown is not None and shown.step == step else self.batch(step)

    def begin_look(self, step: int) -> None:
        self._looked = step

    def look(self) -> Batch:
        self._shown = self.batch(self._looked)
        return self._shown

    def look_away(self) -> None: ...

    def wants_weights(self, interval: int) -> bool:
        """Nobody explores."""
        return False

    def consumed(self, step: int) -> None: ...

    def saved(self, step: int) -> None: ...

    def close(self) -> None: ...

    def mark(self) -> int:
        return 0

    def retain(self, loop: dict[str, Any]) -> None:
        """No policy sampled any of it."""
