"""docs/coverage.md says of every feature of the reference one thing, with tests that exist."""

import ast
from collections import Counter, namedtuple
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rft.tools import docs_tables
from tests.verify import mutants, mutations
from tests.verify.planted.sitecustomize import BODIES, functions, planted

ROOT = Path(__file__).resolve().parents[2]
STANDINGS = docs_tables.standings()


@cache
def names_in(file: str) -> set[str]:
    """Names of the test functions in a file, those in classes included."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_feature_stands_somewhere_once() -> None:
    counts = Counter(standing.row for standing in STANDINGS)
    assert not [row for row, count in counts.items() if count > 1], "said twice"
    assert not set(counts) - set(docs_tables.features()), "no feature of the reference"
    assert not set(docs_tables.features()) - set(counts), "nothing is said of these"


def test_most_are_here() -> None:
    counts = Counter(standing.state for standing in STANDINGS)
    assert counts["done"] + counts["mapped"] >= 250, counts


def test_what_is_said_is_shown_by_tests_that_exist() -> None:
    wrong = [
        f"{standing.row}: {problem}" for standing in STANDINGS for problem in problems(standing)
    ]
    assert not wrong, "\n".join(wrong)


def problems(standing: docs_tables.Standing) -> Iterator[str]:
    if standing.state not in docs_tables.STATES:
        yield f"{standing.state} is no state"
    if not standing.how:
        yield "say how, or why not"
    if not standing.tests:
        yield "name a test"
    for test in standing.tests:
        file, _, name = test.partition("::")
        if not (ROOT / file).is_file():
            yield f"{file} does not exist"
        elif name not in names_in(file):
            yield f"{file} has no {name}"


@cache
def functions_in(module: str) -> set[str]:
    source = ROOT / f"{module.replace('.', '/')}.py"
    source = source if source.is_file() else source.with_suffix("") / "__init__.py"
    return {name for name, _ in functions(ast.parse(source.read_text(encoding="utf-8")))}


def is_there(function: str) -> bool:
    module, _, name = function.partition(":")
    table, _, row = name.removesuffix("]").partition("[")
    if not row:
        return name in functions_in(module)
    keys = getattr(import_module(module), table, {}).values()
    return any(row in key.row.split(", ") for key in keys)


def test_functions_and_tests_of_mutants_are_there() -> None:
    """`tests/verify/mutants.py` runs them; here, that a renamed one is noticed at once."""
    states, wrong = {standing.row: standing.state for standing in STANDINGS}, []
    for one in mutants.makers():
        if not is_there(one.function):
            wrong.append(f"{one.row}: there is no {one.function}")
        ast.parse(BODIES.get(one.instead, f"def planted(): return ({one.instead})"))
        standing = docs_tables.Standing(one.row, states.get(one.row, ""), "how", (one.test,))
        wrong += [f"{one.row}: {problem}" for problem in problems(standing)]
    assert not wrong, "\n".join(wrong)


def test_mutations_fit_the_source_that_they_change() -> None:
    """`tests/verify/test_silent_faults.py` plants them."""
    wrong = []
    for one in mutations.MUTATIONS:
        source = Path(one.place.partition(":")[0].replace(".", "/") + ".py")
        try:
            ast.parse(mutations.changed(one, (ROOT / source).read_text()))
        except LookupError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_what_is_not_partly_so_has_a_maker_without_which_it_is_not() -> None:
    """Whether its mutant dies is run by `make verify`."""
    known = {one.row for one in mutants.makers()}
    whole = [one.row for one in STANDINGS if one.state != "partly"]
    assert not set(whole) - known, "name their makers, or say that they are partly so"


def test_a_mutant_of_a_table_is_of_the_rows_that_it_has() -> None:
    source = "from a import Key\nROWS = {'a': Key('N1, N2', 1), 'b': Key('N12', 2)}\n"
    for wrong in ("ROWS[N3]", "ROW[N2]", "ROWS"):
        with pytest.raises(LookupError):
            planted(source, wrong, "None")
    found: dict[str, Any] = {"Key": namedtuple("Key", "row value")}
    code = compile(planted(source.splitlines()[1], "ROWS[N1]", "key.value + 5"), "rows", "exec")
    exec(code, found)  # as the import of the module would
    assert found["ROWS"]["a"] == 6 and found["ROWS"]["b"].value == 2


def test_every_weakness_has_its_test_or_says_that_it_has_none() -> None:
    given = docs_tables.weaknesses()
    assert [row for row, *_ in given] == [f"W{number:02}" for number in range(1, 62)]
    wrong = [
        f"{row}: {problem}"
        for row, what, test in given
        if test != "no test"
        for problem in problems(docs_tables.Standing(row, "done", what, (test,)))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_is_that_of_the_tables() -> None:
    page = docs_tables.DOCS / "coverage.md"
    assert page.read_text(encoding="utf-8") == docs_tables.pages()[page], (
        "run python -m rft.tools.docs_tables"
    )
