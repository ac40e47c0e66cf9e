"""What sources have in common whose batch of a step follows from its number alone: a resume needs nothing but the number.

In: the calls of `feed.Source`. Out: nothing to note, and nobody to wait for. Invariant: such a source has no state that a
checkpoint would have to keep.
"""

from typing import Any


class ByStep:
    def wants_weights(self, interval: int) -> bool:
        """Nobody explores."""
        return False

    def consumed(self, step: int) -> None: ...

    def saved(self, step: int) -> None: ...

    def mark(self) -> int:
        return 0

    def retain(self, loop: dict[str, Any]) -> None: ...
