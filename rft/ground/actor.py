"""A Ray actor with the class that it runs, so that its methods are named by the class's own
functions: one that is not there fails where it is read, and a search for it finds who calls it.

Without Ray, which only the callers load.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class ActorHandle(Generic[T]):
    """`actor` is Ray's own handle, for whoever hands it to other actors."""

    actor: Any

    def ask(
        self, method: Callable[Concatenate[T, P], Any], *arguments: P.args, **named: P.kwargs
    ) -> Any:
        """Begin a call; returns Ray's reference to its answer at once."""
        return getattr(self.actor, method.__name__).remote(*arguments, **named)
