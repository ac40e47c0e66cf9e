"""The key tables of docs/configure.md, verl.md and trinity.md: `python -m rft.tools.config_page`
rewrites them.

In: the schema (`rft.config.keys`), and the tables of rft/config/verl.py and trinity.py. Out:
Markdown rows, one per key. Invariant: a page cannot say something else than the code; a test
compares them.
"""

from pathlib import Path
from typing import Any

from rft.config import trinity as trinity_keys
from rft.config import verl as verl_keys
from rft.config.keys import Setting, tables

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"


def table() -> str:
    """One Markdown table per section, in the order of the schema."""
    lines: list[str] = []
    for prefix, settings in tables():
        lines += [
            f"### `{prefix[:-1]}`" if prefix else "### top level",
            "",
            "| key | takes | default | meaning | source |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [row(setting) for setting in settings]
        lines.append("")
    return "\n".join(lines)


def row(setting: Setting) -> str:
    origin = (
        "Trinity-RFT"
        if setting.key in trinity_keys.SHARED
        else "Megatron"
        if ".override_" in setting.key
        else "rft"
    )
    default = f"`{setting.default}`" if setting.default else ""
    cells = [f"`{setting.key}`", setting.takes, default, setting.meaning, origin]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verl_table() -> str:
    """veRL's keys, in the order of rft/config/verl.py."""
    lines = ["| | key | is |", "| --- | --- | --- |"]
    for name, key in verl_keys.KEYS.items():
        taken = ", ".join(
            f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in key.only
        )
        if key.to:
            meaning = f"`{key.to}`"
        elif taken:
            meaning = f"only {taken.replace('``', 'empty')}: {key.why}"
        else:
            meaning = f"refused: {key.why}"
        lines.append(f"| {key.row} | `{name}` | {meaning} |")
    return "\n".join(lines) + "\n"


def trinity_table() -> str:
    """What a file of Trinity-RFT's keys may say that rft calls otherwise, or does not have, in the
    order of rft/config/trinity.py.
    """
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
            lines.append(
                f"| `{name}` | {shown(there)} | {shown(here)}{': ' + why if why else ''} |"
            )
    for name, (names, why) in trinity_keys.NAMES.items():
        lines.append(f"| `{name}` | {', '.join(map(shown, names))} | unless rft has it: {why} |")
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "empty"


def pages() -> dict[Path, str]:
    """Every page with its table as it should be."""
    tables = {
        DOCS / "configure.md": table(),
        DOCS / "verl.md": verl_table(),
        DOCS / "trinity.md": trinity_table(),
    }
    return {
        path: rewritten(path.read_text(encoding="utf-8"), found) for path, found in tables.items()
    }


def rewritten(page: str, found: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{found}\n{END}{tail}"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
