"""docs/coverage.md: where each feature of the reference stands. `python -m rft.tools.coverage_page`
rewrites it.

In: tests/coverage/rows.tsv, the features by number, and beside it tables that say of a row what
became of it and which tests show it. Out: one Markdown table per section, and the counts.
Invariant: the page says of every feature exactly one thing, and names no test that is not there;
tests/unit/test_coverage.py holds both.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "tests" / "coverage"
PAGE = ROOT / "docs" / "coverage.md"
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
STATES = ("done", "mapped", "refused")
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


@dataclass(frozen=True)
class Standing:
    """What became of a feature: `tests` are identifiers of pytest, without parameters."""

    row: str
    state: str
    how: str
    tests: tuple[str, ...]


def features() -> dict[str, str]:
    """Every row of the reference, in its order: number and name."""
    lines = (TABLES / "rows.tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)


def standings() -> list[Standing]:
    """What the tables beside rows.tsv say, one table after the other."""
    found = []
    for table in sorted(TABLES.glob("*.tsv")):
        if table.name != "rows.tsv":
            for line in table.read_text(encoding="utf-8").splitlines():
                row, state, how, tests = line.split("\t")
                found.append(Standing(row, state, how, tuple(tests.split())))
    return found


def tables() -> str:
    """The counts, and one table per section."""
    named = features()
    said = {standing.row: standing for standing in standings()}
    counts = Counter(standing.state for standing in said.values())
    told = ", ".join(f"{counts[state]} {state}" for state in STATES)
    lines = [f"{len(named)} features: {told}, {len(named) - len(said)} missing.", ""]
    for letter, rows in groupby(named, key=lambda row: row[0]):
        lines += [
            f"### {letter}: {SECTIONS[letter]}",
            "",
            "| | feature | is | how, or why not | shown by |",
        ]
        lines.append("| --- | --- | --- | --- | --- |")
        for row in rows:
            standing = said.get(row, Standing(row, "missing", "", ()))
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in standing.tests)
            cells = [row, named[row], standing.state, standing.how, tests]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """docs/coverage.md as it should be."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
