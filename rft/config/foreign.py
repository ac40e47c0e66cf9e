"""Configs by the keys of other systems: one engine, and a table for each system, which are
`rft.config.trinity` and `rft.config.verl`.

In: a nested dictionary by foreign names. Out: for each of its keys rft's own key and value, or the
reason why there is none and what to use instead. Invariants: no key is ignored; null means that a
key is not set.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

UNSET = object()  # what a value that says nothing becomes


def unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class ForeignKey:
    """`row`: of the list of the system's documented keys; `to`: rft's key, with `convert` from the
    value.

    Without `to`, or with `only`: a value of `only`, or any, is taken, and `why` says what that
    means, or what to use instead; `fits`: and those of which it is true. `late`: it is refused
    after everything else, because it asks for what is not here.
    """

    row: str
    why: str = ""
    to: str | None = None
    convert: Callable[[Any], Any] = unchanged
    only: tuple[Any, ...] = ()
    takes_any: bool = False
    each_of: tuple[str, ...] = ()  # a list of some of them, in any order
    late: bool = False
    fits: Callable[[Any], bool] | None = None

    def takes(self, value: Any) -> bool:
        """As YAML means it: True is not 1, and a list of names has no order."""
        if self.fits is not None and self.fits(value):
            return True
        if self.each_of:
            return isinstance(value, list) and set(value) <= set(self.each_of)
        if self.takes_any or (self.to is not None and not self.only):
            return True
        return any(
            _in_order(value) == _in_order(allowed)
            and isinstance(value, bool) == isinstance(allowed, bool)
            for allowed in self.only
        )

    def is_usual(self, value: Any) -> bool:
        """Whether nothing need be said of a value, because it is the one that rft works with."""
        return self.to is not None or bool(self.only) and value == self.only[0]

    @property
    def instead(self) -> str:
        """What to say of it where it cannot be taken."""
        return self.why or f"set {self.to}"


class Note(NamedTuple):
    """A key or value that is called otherwise, or means something else, here; `here`: what it is,
    empty where nothing is set.
    """

    place: str
    theirs: Any
    here: str
    why: str

    @property
    def line(self) -> str:
        said = f"it is {self.here} here" if self.here else ""
        return f"{self.place}={self.theirs}: " + ": ".join(filter(None, (said, self.why)))


def _in_order(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, list) else value


REFERENCE = re.compile(  # not one that a backslash makes a text
    r"(?<!\\)((?:\\\\)*\$\{(?:oc\.select:)?)([A-Za-z_][\w.]*)"
)


def localized(node: Any, block: dict[str, Any], place: str) -> Any:
    """`node`, a block of another system's keys at `place`, or a part of it, with the references
    that mean a key of the block itself (`${critic.optim.lr}`) made to mean it here.

    All others mean keys of the config that the block is in.
    """
    if isinstance(node, dict):
        return {name: localized(value, block, place) for name, value in node.items()}
    if isinstance(node, list):
        return [localized(value, block, place) for value in node]
    if not isinstance(node, str):
        return node

    def inside(found: re.Match[str]) -> str:
        there: Any = block
        for word in found[2].split("."):
            if not isinstance(there, dict) or word not in there:
                return found[0]
            there = there[word]
        return f"{found[1]}{place}.{found[2]}"

    return REFERENCE.sub(inside, node)


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


def put(node: dict[str, Any], place: list[str], value: Any) -> None:
    """Set a value below `node`; a dictionary is merged into the one that is there."""
    *sections, word = place
    for section in sections:
        node = node.setdefault(section, {})
    if isinstance(value, dict) and isinstance(node.get(word), dict):
        for name, inner in value.items():
            put(node[word], [name], inner)
    else:
        node[word] = value


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """By words, of dotted names."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        put(tree, name.split("."), value)
    return tree


def is_empty_section(name: str, value: Any, keys: Iterable[str]) -> bool:
    """Whether `name` is a section of `keys` that sets nothing."""
    return value in (None, {}) and any(key.startswith(f"{name}.") for key in keys)
