"""`workflow_args` of a workflow that has settings: a map in, its dataclass out.

Invariant: all that is wrong is told at once: names, types, and what the class says of the values.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from rft.config.keys import spelled
from rft.ground.errors import refuse_all


class WorkflowSettings(Protocol):
    """Its fields have defaults. `problems`: what is wrong with values of the right types, naming
    `key`; of the fields `unread` nothing is known.
    """

    def problems(self, key: str, unread: set[str]) -> Iterator[str]: ...


Settings = TypeVar("Settings", bound=WorkflowSettings)


def settings_of(kind: type[Settings], who: str, given: dict[str, Any], key: str) -> Settings:
    """Raises ConfigError."""
    known = kind.__annotations__
    wrong, values = {}, {}
    for name, value in given.items():
        if name not in known:
            takes = f"it takes {', '.join(known)}"
            wrong[name] = f"{key}.{name}: the workflow {who} does not take it; {takes}"
            continue
        try:
            values[name] = msgspec.convert(value, known[name])
        except msgspec.ValidationError:
            wrong[name] = f"{key}.{name}={value!r}: give a value of type {spelled(known[name])}"
    made = kind(**values)
    refuse_all((*wrong.values(), *made.problems(key, set(wrong))))
    return made
