"""The key table of docs/configure.md, read from rft/config.py itself: `python -m rft.tools.config_page` rewrites it.

In: the dataclasses and the comments behind their fields. Out: Markdown rows, one per key. Invariant: the page cannot say
something else than the schema; a test compares them.
"""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rft import config as configs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configure.md"
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"
LISTED = {"buffer.explorer_input.taskset": configs.TasksetConfig}


def table() -> str:
    """One Markdown table per section, in the order of the schema."""
    lines: list[str] = []
    for title, prefix, cls in sections(configs.Config, ""):
        lines += [f"### {title}", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [row(prefix, cls, item) for item in fields(cls) if not is_dataclass(item.default_factory)]
        lines.append("")
    return "\n".join(lines)


def sections(cls: Any, prefix: str) -> list[tuple[str, str, Any]]:
    """(title, key prefix, dataclass) of every section, parents first."""
    found = [(f"`{prefix[:-1]}`" if prefix else "top level", prefix, cls)]
    for item in fields(cls):
        name = prefix + item.name
        inner = item.default_factory if is_dataclass(item.default_factory) else LISTED.get(name)
        if inner is not None:
            found += sections(inner, name + ".")
    return found


def row(prefix: str, cls: Any, item: Any) -> str:
    source = next(inspect.getsource(c) for c in cls.__mro__ if item.name in vars(c).get("__annotations__", {}))
    line = re.search(
        rf"^    {item.name}: (?P<type>[^=#]+?)(?: = (?P<default>.*?))?(?:  # (?P<meaning>.*))?$", source, re.M
    )
    assert line is not None, f"{cls.__name__}.{item.name} is not written on one line"
    default = line["default"] or ""
    default = (
        "required" if default == "MISSING" else re.sub(r"field\(default_factory=(lambda: )?(.*)\)", r"\2", default)
    )
    default = {"dict": "{}", "list": "[]", "None": ""}.get(default, default)
    cells = [f"`{prefix}{item.name}`", line["type"], f"`{default}`" if default else "", line["meaning"] or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def rewritten(page: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
