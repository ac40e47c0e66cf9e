"""The tables of docs/: keys in configure.md, verl.md and trinity.md, features in coverage.md, waits
in architecture.md.
`python -m rft.tools.docs_tables` rewrites them.

In: the schema (`rft.config.keys`), the tables of rft/config/verl.py and trinity.py, and those of
tests/coverage: rows.tsv, the reference's features by number, and beside it what became of each and
which tests show it. Out: Markdown. Invariants: a page cannot say something else than the code; of
every feature exactly one thing is said, and no test is named that is not there. Tests hold both.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rft.config import trinity as trinity_keys
from rft.config import trinity_defaults as defaults
from rft.config import trinity_flows, verl_newer, verl_run, verl_words
from rft.config import verl as verl_keys
from rft.config.foreign import UNSET, ForeignKey
from rft.config.keys import Setting, tables
from rft.tools import waits

ROOT = Path(__file__).resolve().parents[2]
DOCS, COVERAGE = ROOT / "docs", ROOT / "tests" / "coverage"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
STATES = ("done", "partly", "mapped", "refused")
BESIDE = ("rows.tsv", "made_by.tsv", "weaknesses.tsv")  # other tables than what became of a row
SECTIONS = {
    "A": "Configuration",
    "B": "Algorithm",
    "C": "Monitor",
    "D": "Model",
    "E": "Cluster",
    "F": "Buffer",
    "G": "Explorer",
    "H": "Synchronizer",
    "I": "Trainer",
    "J": "Service, data processor, log, stages",
    "N": "veRL's keys",
    "O": "Config studio",
    "P": "Trainer class",
    "Q": "Trainer backends",
    "R": "Manager",
    "T": "Megatron engine",
}


def keys_table() -> str:
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
    origin = "Megatron" if ".override_" in setting.key else "rft"
    origin = "Trinity-RFT" if setting.key in trinity_keys.SHARED else origin
    default = f"`{setting.default}`" if setting.default else ""
    return line(f"`{setting.key}`", setting.takes, default, setting.meaning, origin)


def line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verl_table() -> str:
    """veRL's keys, in the order of rft/config/verl.py and verl_run.py."""
    lines = ["| | key | is |", "| --- | --- | --- |"]
    lines += [
        f"| {key.row} | `{name}` | {of_foreign(key)} |" for name, key in verl_run.EVERY.items()
    ]
    sections = {name: f"`{to}.*`" for name, to in verl_run.FREE.items()}
    sections |= {
        name: f"`{to}.*`" if to else "as the policy's" for name, to in verl_keys.FREE.items()
    }
    sections |= {name: f"taken: {why}" for name, why in verl_run.SKIPPED.items()}
    lines += [f"| | `{name}.*` | {said} |" for name, said in sections.items()]
    lines += ["", "| in newer versions of veRL | is as |", "| --- | --- |"]
    lines += [f"| `{name}` | `{older}` |" for name, older in verl_newer.MOVED.items()]
    lines += ["", "| left out | veRL's default | is | rft's default |", "| --- | --- | --- | --- |"]
    for one in verl_words.read(["data.train_files=a", "data.val_files=b"]).taken:
        own = one.why.partition(": ")[2]
        lines.append(line(*(f"`{cell}`" for cell in (one.place, one.theirs, one.here, own))))
    return "\n".join(lines) + "\n"


def of_foreign(key: ForeignKey) -> str:
    """What a key of another system is here."""
    taken = ", ".join(shown(value) for value in (*key.only, *key.each_of))
    if key.to:
        targets = ", ".join(f"`{to}`" for to in key.to.split(", "))
        return f"{targets}, of {taken}" if key.only else targets
    if key.takes_any:
        return f"taken: {key.why}"
    return f"only {taken}: {key.why}" if taken else f"refused: {key.why}"


def trinity_table() -> str:
    """What a file of Trinity-RFT's keys may say that rft calls otherwise, or does not have, in the
    order of rft/config/trinity.py.
    """
    lines = ["| | key | is |", "| --- | --- | --- |"]
    lines += [
        f"| {key.row} | `{name}` | {of_foreign(key)} |" for name, key in trinity_keys.KEYS.items()
    ]
    lines += ["", "| value of | there | here |", "| --- | --- | --- |"]
    renamed = {
        "a workflow" if values is trinity_flows.WORKFLOWS else f"`{name}`": values
        for name, values in trinity_keys.RENAMED.items()
    }
    for name, values in renamed.items():
        for there, (here, why) in values.items():
            lines.append(f"| {name} | {shown(there)} | {shown(here)}{': ' + why if why else ''} |")
    for there, here in defaults.ARGUMENTS.items():
        lines.append(f"| an argument of a loss | {shown(there)} | {shown(here)} |")
    for name, (names, why) in trinity_keys.NAMES.items():
        lines.append(f"| `{name}` | {', '.join(map(shown, names))} | unless rft has it: {why} |")
    others = {k: v for k, v in trinity_flows.WITHOUT.items() if k not in trinity_flows.REFUSED}
    for what, names in (
        ("workflow that is refused: the closed list, of at most six", trinity_flows.REFUSED),
        ("not in this round: images, OpenJudge", others),
    ):
        lines += ["", f"| {what} | use instead |", "| --- | --- |"]
        lines += [f"| {shown(name)} | {why} |" for name, why in names.items()]
    return "\n".join([*lines, "", *trinity_defaults()]) + "\n"


def trinity_defaults() -> Iterator[str]:
    """Every default that differs: those that a file gets, and those of which rft's is kept."""
    yield f"| left out, with Trinity-RFT {defaults.VERSION}'s default | there | rft's own | |"
    yield "| --- | --- | --- | --- |"
    sets, rows = trinity_keys.TASKSET, defaults.ROWS
    tables = ("", defaults.DEFAULTS), (f"{sets}.", defaults.SETS)
    tables += (f"{defaults.EVALUATIONS}.", defaults.EVALUATED), (f"{rows}.", defaults.BUFFERS)
    for prefix, table in tables:
        for key, one in table.items():
            theirs = one.shown or (f"`model.{one.passes}`" if one.passes else shown(one.theirs))
            yield f"| `{prefix}{key}` | {theirs} | {one.ours or 'each set says it'} | {one.why} |"
    yield ""
    yield "| left out, with rft's default | there | here | why |"
    yield "| --- | --- | --- | --- |"
    for key, (theirs, ours, why) in defaults.KEPT.items():
        yield f"| `{key}` | {theirs} | {ours} | {why} |"


def shown(value: Any) -> str:
    if value is UNSET:
        return "left out"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "empty"


@dataclass(frozen=True)
class Standing:
    """What became of a feature: `tests` are identifiers of pytest, without parameters."""

    row: str
    state: str
    how: str
    tests: tuple[str, ...]


def features() -> dict[str, str]:
    """Every row of the reference, in its order: number and name."""
    lines = (COVERAGE / "rows.tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)


def standings() -> list[Standing]:
    """What the tables beside rows.tsv say, one table after the other."""
    found = []
    for table in sorted(COVERAGE.glob("*.tsv")):
        if table.name not in BESIDE:
            for line in table.read_text(encoding="utf-8").splitlines():
                row, state, how, tests = line.split("\t")
                found.append(Standing(row, state, how, tuple(tests.split())))
    return found


def made_by() -> dict[str, list[str]]:
    """Row: the functions, or rows of a table, that make it."""
    lines = (COVERAGE / "made_by.tsv").read_text(encoding="utf-8").splitlines()
    found: dict[str, list[str]] = {}
    for row, function, *_ in (one.split("\t") for one in lines):
        found.setdefault(row, []).append(function)
    return found


def weaknesses() -> list[tuple[str, str, str]]:
    """Number, what is wrong in the reference, and the test that shows that rft has it not."""
    lines = (COVERAGE / "weaknesses.tsv").read_text(encoding="utf-8").splitlines()
    return [tuple(line.split("\t")) for line in lines]  # type: ignore[misc]


def weaknesses_table() -> list[str]:
    given = weaknesses()
    shown = sum("::" in test for *_, test in given)
    return [
        "### W: Weaknesses of the reference",
        "",
        f"{shown} of {len(given)} have a test that shows them absent.",
        "",
        "| | weakness there | absent here by |",
        "| --- | --- | --- |",
        *(
            line(row, what, f"`{test.removeprefix('tests/')}`" if "::" in test else test)
            for row, what, test in given
        ),
        "",
    ]


def coverage_table() -> str:
    """Count the features, and tell of each, one table per section."""
    named = features()
    said = {standing.row: standing for standing in standings()}
    counts = Counter(standing.state for standing in said.values())
    told = ", ".join(f"{counts[state]} {state}" for state in STATES)
    makers = made_by()
    lines = [f"{len(named)} features: {told}, {len(named) - len(said)} missing.", ""]
    lines += [f"{len(makers)} of them name the function that makes them and die without it.", ""]
    for letter, rows in groupby(named, key=lambda row: row[0]):
        lines += [
            f"### {letter}: {SECTIONS[letter]}",
            "",
            "| | feature | is | how, or why not | made by | shown by |",
        ]
        lines.append("| --- | --- | --- | --- | --- | --- |")
        for row in rows:
            standing = said.get(row, Standing(row, "missing", "", ()))
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in standing.tests)
            made = "<br>".join(f"`{function}`" for function in makers.get(row, ()))
            lines.append(line(row, named[row], standing.state, standing.how, made, tests))
        lines.append("")
    lines += weaknesses_table()
    return "\n".join(lines)


def waits_table() -> str:
    """Who waits for whom, as rft/tools/waits.py declares it."""
    lines = ["| in | waits for | how long | what then |", "| --- | --- | --- | --- |"]
    for one in waits.declared():
        lines.append(line(f"`{one.file}` {one.function}", one.whom, one.limit, one.then))
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Every page with its table as it should be."""
    found = {
        "configure": keys_table(),
        "verl": verl_table(),
        "trinity": trinity_table(),
        "coverage": coverage_table(),
        "architecture": waits_table(),
    }
    paths = {name: DOCS / f"{name}.md" for name in found}
    return {
        path: rewritten(path.read_text(encoding="utf-8"), found[name])
        for name, path in paths.items()
    }


def rewritten(page: str, found: str) -> str:
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{found}\n{END}{tail}"


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
