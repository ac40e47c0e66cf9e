"""Rows of docs/coverage.md, made useless one by one: the test that shows a row fails without it."""

import subprocess
import sys

import pytest

from tests.verify import mutants


@pytest.mark.verify
@pytest.mark.timeout(2400)
def test_forty_rows_by_a_printed_seed_die() -> None:
    command = [sys.executable, "-m", "tests.verify.mutants"]
    ended = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_a_mutant_that_changes_nothing_lives(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """What finds nothing would call every row done."""
    table = tmp_path / "made_by.tsv"
    test = "tests/unit/test_token_credit.py::test_estimators_by_hand"
    table.write_text(f"A1\trft.algorithm.ratios:k2\t(logprobs - reference) ** 2 / 2\t{test}\n")
    program = (
        "import sys, pathlib; from tests.verify import mutants\n"
        "mutants.TABLE = pathlib.Path(sys.argv[1])\n"
        "sys.exit(mutants.main(['--all', '--log', sys.argv[1] + '.log']))"
    )
    command = [sys.executable, "-c", program, str(table)]
    ended = subprocess.run(command, cwd=mutants.ROOT, capture_output=True, text=True)
    assert ended.returncode == 1 and "A1    LIVES" in ended.stdout, ended.stdout + ended.stderr
