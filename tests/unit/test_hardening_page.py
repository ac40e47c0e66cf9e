"""docs/hardening.md names tests and commits that are there."""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hardening.md"
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7}\b")
NAMED = re.compile(r"(?P<path>tests/[\w/]+(?:\.py)?)?(?:(?:::)?\b(?P<test>test_\w+))?")


def rows() -> list[list[str]]:
    """Finding, was it so, test, commit."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in found if row[0] not in ("finding", "---")]


def named_in(cell: str) -> Iterator[tuple[str, str]]:
    """A path, and a test in it or nothing; a test without a path is in the one before it."""
    path = ""
    for found in NAMED.finditer(re.sub(r"\[[^\]]*\]", "", cell)):
        path = found["path"] or path
        if found["path"] or found["test"]:
            yield path, found["test"] or ""


@functools.cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def absent(cell: str) -> list[str]:
    return [
        f"{path}::{test}"
        for path, test in named_in(cell)
        if not (ROOT / path).exists() or (test and test not in functions(ROOT / path))
    ]


def test_every_row_has_its_four_cells() -> None:
    assert [row for row in rows() if len(row) != 4 or not row[0] or not row[1]] == []


def test_every_test_that_is_named_is_there() -> None:
    named = [row[2] for row in rows()]
    assert sum(len(list(named_in(cell))) for cell in named) > 100
    assert [missing for cell in named for missing in absent(cell)] == []


def test_what_is_not_there_is_found() -> None:
    here = "tests/unit/test_hardening_page.py"
    assert absent(f"{here}::test_what_is_not_there_is_found[a | b], ::test_gone; tests/no.py") == [
        f"{here}::test_gone",
        "tests/no.py::",
    ]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.mark.verify  # of a history that nobody has written anew
def test_every_commit_that_is_named_is_in_the_history() -> None:
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the history is not here")
    named = sorted({found for row in rows() for cell in row for found in COMMIT.findall(cell)})
    known = set(git("rev-list", "--abbrev=7", "--abbrev-commit", "HEAD").split())
    assert len(named) > 20
    assert [one for one in named if not any(full.startswith(one) for full in known)] == []


def test_a_mended_finding_has_a_commit_and_a_test() -> None:
    """Or says why not."""
    bare = [
        row[0] for row in rows() if row[1].startswith("yes") and not (row[2] and row[3]) and
        not re.search(r"\b(left|said|caught|by reading|below)\b", row[1], re.IGNORECASE)
    ]  # fmt: skip
    assert bare == []
