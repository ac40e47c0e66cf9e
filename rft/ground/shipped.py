"""Files that come with rft and are not Python: `configs` and `launch`.

In: a directory's name. Out: where it is. Invariant: they lie beside `rft` in a checkout and inside
it in an installed wheel (setup.py), and nothing else has to know.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def shipped(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name
