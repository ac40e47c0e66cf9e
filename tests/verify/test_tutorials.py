"""Every tutorial is done, from its first line to its last, in an empty directory.

In: docs/tutorials/*.md. A block with `title="FILE"` is written to that file, where it stands in the
story; the lines of a shell block are given, one after the other, to bash; a block of text is what
they print, with other numbers. Invariant: a command is run, or stands behind a line that a reader
sees, `*Not run by the tests: WHY.*`, and begins with one of the programs of ABSENT.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.verify.test_docs_commands_run import DIFFERS
from tests.verify.test_kubernetes import VERSIONS, validate

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(
    r"(?:^\*Not run by the tests: (?P<why>[^\n]+)\.\*\n\n)?"
    r'^```(?P<kind>\w*)(?: title="(?P<file>[^"]+)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
ABSENT = ("kubectl", "docker", "sbatch", "scancel", "squeue")  # programs of a cluster
COMMAND_S = 900.0

pytestmark = [pytest.mark.verify, pytest.mark.timeout(2400)]


class Block(NamedTuple):
    """`why`: it is not run."""

    kind: str
    text: str
    file: str = ""
    why: str = ""

    @property
    def commands(self) -> list[str]:
        lines = self.text.replace("\\\n", " ").splitlines()
        found = (re.sub(r"\s+#\s.*$", "", line).strip() for line in lines)
        return [line for line in found if line and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    for found in BLOCK.finditer(page.read_text("utf-8")):
        yield Block(found["kind"], found["text"], found["file"] or "", found["why"] or "")


class Reader:
    """Somebody who does what a page says."""

    def __init__(self, place: Path):
        self.place = place
        self.printed = ""

    def do(self, block: Block) -> None:
        if block.file:
            file = self.place / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, "utf-8")
        elif block.kind == "sh" and not block.why:
            self.printed = "".join([self.run(line) for line in block.commands])
        elif block.kind == "text":
            assert not (lost := unsaid(block.text, self.printed)), f"{lost}\n{self.printed}"

    def run(self, line: str) -> str:
        if line.startswith("cd "):
            self.place = self.place / line.removeprefix("cd ")
            return ""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.place,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == (1 if DIFFERS.search(line) else 0), f"{line}\n{done.stdout}"
        return done.stdout


def unsaid(shown: str, printed: str) -> str:
    """The first shown line that was not printed, after the one before it; a word with a digit in it
    is any such word, and `...` is anything.
    """
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        if line.strip() not in ("", "..."):
            wanted = re.compile(r"\s*" + r"\s+".join(map(pattern, line.split())) + r"\s*")
            if not any(wanted.fullmatch(one) for one in lines):
                return line
    return ""


def pattern(word: str) -> str:
    if word == "...":
        return ".*"
    if re.search(r"\d", word):
        return r"[^\s]*\d[^\s]*"
    return ".*".join(map(re.escape, word.split("...")))


def test_a_line_that_was_not_printed_is_found() -> None:
    printed = "[ 1/20   5%]  loss 4.45  len 3/4\nA  /tmp/x/one/step_20\n0 of 3 tensors differ\n"
    assert not unsaid("[ 9/20  45%]  loss 1.2 ...\n...\n1 of 9 tensors differ", printed)
    assert not unsaid("A .../one/step_20", printed)
    assert unsaid("1 of 9 tensors agree", printed)
    assert unsaid("1 of 9 tensors differ\n[ 9/20  45%]  loss 1.2 ...", printed), "in this order"


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_what_is_not_run_is_of_a_cluster_and_says_so(page: Path) -> None:
    found = [*blocks(page)]
    text = page.read_text("utf-8")
    assert "<!--" not in text, "what a reader does not see"
    assert text.count("Not run by the tests") == sum(bool(one.why) for one in found)
    assert sum(len(one.commands) for one in found if one.kind == "sh" and not one.why) > 2
    assert text.count("\n```") == 2 * len(found), "a block that nobody reads"
    for block in found:
        if block.why:
            assert all(line.startswith(ABSENT) for line in block.commands), block


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorial_can_be_done(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in blocks(page):
        reader.do(block)
    for manifest in (*tmp_path.rglob("trainer.yaml"), *tmp_path.rglob("engines.yaml")):
        done = validate(manifest, VERSIONS[-1])
        assert done.returncode == 0, done.stdout + done.stderr
