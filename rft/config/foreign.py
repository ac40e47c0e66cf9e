"""Configs by the keys of other systems: one engine, and a table for each system, which are
`rft.config.trinity` and `rft.config.verl`.

In: a nested dictionary by foreign names. Out: for each of its keys rft's own key and value, or the
reason why there is none and what to use instead. Invariants: no key is ignored; null means that a
key is not set.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

UNSET = object()  # what a value that says nothing becomes


def unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class ForeignKey:
    """`row`: of the list of the system's documented keys; `to`: rft's key, with `convert` from the
    value.

    Without `to`, or with `only`: a value of `only`, or any, is taken, and `why` says what that
    means, or what to use instead. `late`: it is refused after everything else, because it asks for
    what is not here.
    """

    row: str
    why: str = ""
    to: str | None = None
    convert: Callable[[Any], Any] = unchanged
    only: tuple[Any, ...] = ()
    takes_any: bool = False
    late: bool = False

    def takes(self, value: Any) -> bool:
        """As YAML means it: True is not 1, and a list of names has no order."""
        if self.takes_any or (self.to is not None and not self.only):
            return True
        return any(
            _in_order(value) == _in_order(allowed)
            and isinstance(value, bool) == isinstance(allowed, bool)
            for allowed in self.only
        )

    @property
    def instead(self) -> str:
        """What to say of it where it cannot be taken."""
        return self.why or f"set {self.to}"


def _in_order(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, list) else value


def leaves(
    node: dict[str, Any], is_end: Callable[[str], bool], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in `node`; what `is_end` may itself be a section."""
    for word, value in node.items():
        name = f"{prefix}{word}"
        if isinstance(value, dict) and value and not is_end(name):
            yield from leaves(value, is_end, f"{name}.")
        else:
            yield name, value


def is_empty_section(name: str, value: Any, keys: Iterable[str]) -> bool:
    """Whether `name` is a section of `keys` that sets nothing."""
    return value in (None, {}) and any(key.startswith(f"{name}.") for key in keys)
