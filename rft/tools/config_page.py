"""The key tables of docs/configure.md, verl.md and trinity.md: `python -m rft.tools.config_page` rewrites them.

In: the dataclasses of rft/config.py with the comments behind their fields, and the tables of rft/verl_keys.py and trinity_keys.py.
Out: Markdown rows, one per key. Invariant: a page cannot say something else than the code; a test compares them.
"""

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rft import config as configs
from rft import trinity_keys, verl_keys

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"
LISTED = {"buffer.explorer_input.taskset": configs.TasksetConfig}


def table() -> str:
    """One Markdown table per section, in the order of the schema."""
    lines: list[str] = []
    for title, prefix, cls in sections(configs.Config, ""):
        lines += [f"### {title}", "", "| key | type | default | meaning | source |", "| --- | --- | --- | --- | --- |"]
        lines += [row(prefix, cls, item) for item in leaves(cls)]
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


def leaves(cls: Any) -> list[Any]:
    """Its keys that hold a value, not a section."""
    return [item for item in fields(cls) if not is_dataclass(item.default_factory)]


def described(cls: Any, item: Any) -> tuple[str, str, str]:
    """(type, default, meaning) as they stand in the source."""
    source = next(inspect.getsource(c) for c in cls.__mro__ if item.name in vars(c).get("__annotations__", {}))
    line = re.search(
        rf"^    {item.name}: (?P<type>[^=#]+?)(?: = (?P<default>.*?))?(?:  # (?P<meaning>.*))?$", source, re.M
    )
    assert line is not None, f"{cls.__name__}.{item.name} is not written on one line"
    default = line["default"] or ""
    assert default.count("(") == default.count(")"), f"{cls.__name__}.{item.name} is not written on one line"
    default = (
        "required" if default == "MISSING" else re.sub(r"field\(default_factory=(lambda: )?(.*)\)", r"\2", default)
    )
    default = {"dict": "{}", "list": "[]", "None": ""}.get(default, default)
    return line["type"], default, line["meaning"] or ""


def row(prefix: str, cls: Any, item: Any) -> str:
    kind, default, meaning = described(cls, item)
    name = prefix + item.name
    origin = (
        "Trinity-RFT" if name in trinity_keys.SHARED else "Megatron" if item.name.startswith("override_") else "rft"
    )
    cells = [f"`{name}`", kind, f"`{default}`" if default else "", meaning, origin]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verl_table() -> str:
    """veRL's keys, in the order of rft/verl_keys.py."""
    lines = ["| | key | is |", "| --- | --- | --- |"]
    for name, key in verl_keys.KEYS.items():
        taken = ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in key.only)
        if key.to:
            meaning = f"`{key.to}`"
        elif taken:
            meaning = f"only {taken.replace('``', 'empty')}: {key.why}"
        else:
            meaning = f"refused: {key.why}"
        lines.append(f"| {key.row} | `{name}` | {meaning} |")
    return "\n".join(lines) + "\n"


def trinity_table() -> str:
    """What a file of Trinity-RFT's keys may say that rft calls otherwise, or does not have, in the order of rft/trinity_keys.py."""
    lines = ["| | key | is |", "| --- | --- | --- |"]
    for name, key in trinity_keys.KEYS.items():
        taken = ", ".join(shown(value) for value in key.only)
        if key.to:
            meaning = f"`{key.to}`"
        elif key.takes_any:
            meaning = f"taken: {key.why}"
        else:
            meaning = f"only {taken}: {key.why}" if taken else f"refused: {key.why}"
        lines.append(f"| {key.row} | `{name}` | {meaning} |")
    lines += ["", "| value of | there | here |", "| --- | --- | --- |"]
    for name, values in trinity_keys.RENAMED.items():
        for there, (here, why) in values.items():
            lines.append(f"| `{name}` | {shown(there)} | {shown(here)}{': ' + why if why else ''} |")
    for name, (names, why) in trinity_keys.NAMES.items():
        lines.append(f"| `{name}` | {', '.join(map(shown, names))} | unless rft has it: {why} |")
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "empty"


def pages() -> dict[Path, str]:
    """Every page with its table as it should be."""
    tables = {DOCS / "configure.md": table(), DOCS / "verl.md": verl_table(), DOCS / "trinity.md": trinity_table()}
    return {path: rewritten(path.read_text(encoding="utf-8"), found) for path, found in tables.items()}


def rewritten(page: str, found: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{found}\n{END}{tail}"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
