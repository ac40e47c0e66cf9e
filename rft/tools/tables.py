"""Tables of the tools: with a box on a terminal, aligned words in a pipe.

In: rows as dictionaries. Out: the table as text. Invariants: in a pipe a row is one line and
nothing of it is cut off, so that grep and awk find it; on a terminal a long cell is folded, never
cut; a cell is text, whatever brackets are in it.
"""

import sys
from collections.abc import Iterable
from typing import Any

from rich.box import ROUNDED
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 1_000_000  # characters; a pipe has no edge


def table(rows: Iterable[dict[str, Any]], *, headed: bool = True, ruled: bool = False) -> str:
    """Align rows under their keys, numbers to the right; a row without a key has `-` there.

    `headed`: with the keys above. `ruled`: with a line below them, where there is no box.
    """
    found, boxed = list(rows), sys.stdout.isatty()
    columns = list(dict.fromkeys(key for row in found for key in row))
    cells = [[_text(row.get(column)) for column in columns] for row in found]
    box, width, padding = (ROUNDED, None, (0, 1)) if boxed else (None, PIPE_WIDTH, (0, 2, 0, 0))
    made = Table(box=box, show_header=headed, pad_edge=boxed, padding=padding)
    for column, body in zip(columns, zip(*cells, strict=True), strict=True):
        justify = "right" if all(map(_is_numeric, body)) else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=not boxed)
    if ruled and not boxed:
        bodies = zip(columns, *cells, strict=True)
        made.add_row(*("-" * max(map(cell_len, body)) for body in bodies))
    for line in cells:
        made.add_row(*line)
    console = Console(
        width=width,
        force_terminal=boxed,
        color_system="auto" if boxed else None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_numeric(text: str) -> bool:
    digits = text.replace(",", "").replace(".", "", 1).removeprefix("-").removesuffix("%")
    return text in ("", "-") or digits.isdigit()
