"""The parts of `make verify`: nothing is in none of them, and what passed is remembered."""

from pathlib import Path

import pytest

from tests.verify import parts
from tests.verify.parts import Part

COUNT = "open('runs.txt', 'a').write('{0} '); {1}"


def part(name: str, then: str = "", more: tuple[str, ...] = ()) -> Part:
    """Runs a line of Python that writes its name to runs.txt first."""
    return Part([["-c", COUNT.format(name, then)]], more)


def ran(root: Path) -> list[str]:
    names = (root / "runs.txt").read_text().split()
    (root / "runs.txt").unlink()
    return names


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rft").mkdir()
    (tmp_path / "rft" / "a.py").write_text("1")
    (tmp_path / "docs").mkdir()
    (tmp_path / "runs.txt").touch()
    return tmp_path


def test_every_test_file_is_in_one_part() -> None:
    words = [{w for command in p.commands for w in command} for p in parts.PARTS.values()]
    named = [word for those in words for word in those if word.startswith("tests/")]
    for file in sorted((parts.ROOT / "tests").rglob("test_*.py")):
        path = str(file.relative_to(parts.ROOT))
        where = [word for word in named if path == word or path.startswith(f"{word}/")]
        assert len(where) == 1, f"{path} is in {where or 'no part'} of tests/verify/parts.py"
    assert all((parts.ROOT / word).exists() for word in named)


def test_it_goes_on_where_it_stopped_and_tells_of_every_part(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    several = {"first": part("first"), "second": part("second", "exit(3)"), "third": part("third")}
    assert parts.main([], several, root) == 1
    assert ran(root) == ["first", "second", "third"], "a failing part does not stop the others"
    table = capfd.readouterr().out.splitlines()[-3:]
    assert [line.split()[0] for line in table] == list(several)
    assert [line.split(maxsplit=2)[2] for line in table] == [
        "passed",
        "FAILED, exit code 3",
        "passed",
    ]
    assert parts.main([], several | {"second": part("second")}, root) == 0
    assert ran(root) == ["second"]
    assert "passed before, " in capfd.readouterr().out.splitlines()[-1]


def test_only_the_parts_that_were_asked_for_are_run(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    several = {"first": part("first"), "second": part("second")}
    assert parts.main(["second"], several, root) == 0 and ran(root) == ["second"]
    assert parts.main(["third"], several, root) == 2
    assert "no such part: third; there are first, second" in capfd.readouterr().err


def test_a_part_that_is_asked_for_skips_nothing(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "import pytest\n\ndef test_it():\n    {}\n"
    (root / "pytest.ini").write_text("[pytest]\n")
    test = root / "rft" / "test_it.py"
    several = {"one": Part([["-m", "pytest", "-q", str(test)]])}

    def state(*names: str) -> str:
        parts.main([*names], several, root)
        return capfd.readouterr().out.splitlines()[-1].split(maxsplit=2)[2]

    test.write_text(body.format("pytest.skip('no moon')"))
    assert state() == "passed, 1 skipped: no moon"
    assert state().startswith("passed before, ") and "no moon" in state()
    assert state("one") == "FAILED, 1 skipped: no moon", "and not: passed before"
    assert parts.main(["one"], several, root) == 1
    test.write_text(body.format("pass"))
    assert state("one") == "passed" and state("one").startswith("passed before, ")
    test.write_text(body.format("raise ValueError"))
    assert state() == "FAILED, exit code 1"


def test_another_content_or_name_of_a_source_is_tested_again(root: Path) -> None:
    several = {"code": part("code"), "pages": part("pages", more=("docs",))}
    both = list(several)
    for change, wanted in (
        (lambda: None, both),
        (lambda: (root / "rft" / "a.py").touch(), []),
        (lambda: (root / "rft" / "a.py").write_text("2"), both),
        (lambda: (root / "rft" / "a.py").rename(root / "rft" / "b.py"), both),
        (lambda: (root / "docs" / "page.md").write_text("a page"), ["pages"]),
    ):
        change()
        (root / "runs.txt").touch()
        assert parts.main([], several, root) == 0
        assert ran(root) == wanted


def test_a_part_whose_sources_change_under_it_is_not_remembered(root: Path) -> None:
    several = {"code": part("code", "open('rft/a.py', 'a').write('3')")}
    for _ in range(2):
        assert parts.main([], several, root) == 0
        assert ran(root) == ["code"]


def test_make_runs_them() -> None:
    rule = (parts.ROOT / "Makefile").read_text(encoding="utf-8").partition("\nverify:")[2]
    rule = rule.partition("\n\n")[0]
    assert "tests/verify/parts.py $(PART)" in rule
    assert ".venv-docs/.installed" in rule.partition("\n")[0]
