"""One function of rft with another body, or rows of a table with other values, in this process and
in all that it starts.

In: RFT_PLANTED="module:qualname=expression", and this directory in PYTHONPATH (Python imports
`sitecustomize` of it at its start). Out: when that module is imported, the function returns the
expression, in which its own arguments may stand, or raises (`raise`), or yields nothing (`yield`).
Of `module:TABLE[ROW]` every value of that table which names that row of the reference (its `row`)
becomes the expression, in which it is `key`.
Invariant: no file is changed, and no byte code of the changed module is kept.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

VARIABLE = "RFT_PLANTED"
BODIES = {"raise": "raise RuntimeError('planted')", "yield": "yield from ()"}
ROWS = """
for _name, key in {table}.items():
    if "{row}" in key.row.split(", "):
        {table}[_name] = {instead}
"""


def planted(source: str | bytes, qualname: str, instead: str) -> ast.Module:
    """Raises LookupError where there is no such function, or no such row of a table."""
    tree = ast.parse(source)
    text = source if isinstance(source, str) else source.decode()
    table, _, row = qualname.removesuffix("]").partition("[")
    if row:
        texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        words = {word for text in texts for word in str(text).split(", ")}
        if row not in words or not re.search(rf"^{table}\b", text, re.MULTILINE):
            raise LookupError(f"no row {qualname}")
        tree.body += ast.parse(ROWS.format(table=table, row=row, instead=instead)).body
        return ast.fix_missing_locations(tree)
    found = [node for name, node in functions(tree) if name == qualname]
    if not found:
        raise LookupError(f"no function {qualname}")
    for node in found:
        node.body = ast.parse(BODIES.get(instead, f"return ({instead})")).body
    return ast.fix_missing_locations(tree)


def functions(tree: ast.AST, before: str = "") -> Iterator[tuple[str, Any]]:
    """Name and node of every function, those in classes and in other functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{before}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, before)


class Planter:
    def __init__(self, spec: str) -> None:
        place, _, self.instead = spec.partition("=")
        self.module, _, self.qualname = place.partition(":")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(name, spec.origin, self)
        return spec


class Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, planter: Planter) -> None:
        super().__init__(name, path)
        self.planter = planter

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = planted(self.get_data(path), self.planter.qualname, self.planter.instead)
        return compile(tree, path, "exec")


if os.environ.get(VARIABLE):
    sys.meta_path.insert(0, Planter(os.environ[VARIABLE]))
