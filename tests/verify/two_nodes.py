"""Two or three machines for a test (`bench.faults.machines`); without root, or the tools, the test
is skipped.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.faults.machines import Machine as Node
from bench.faults.machines import NoMachines, machines

__all__ = ["Node", "two_nodes"]


@contextlib.contextmanager
def two_nodes(count: int = 2, disk: Path | None = None) -> Iterator[list[Node]]:
    """`disk`: as of `machines`."""
    with contextlib.ExitStack() as held:
        try:
            found = held.enter_context(machines(count, disk))
        except NoMachines as why:
            pytest.skip(str(why))
        yield found
