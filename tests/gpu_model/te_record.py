"""What megatron-core takes from Transformer Engine, as the wheel of Transformer Engine declares it.

    python tests/gpu_model/te_record.py UNPACKED_WHEEL MEGATRON_CORE...  > tests/gpu_model/te/te.tsv

In: the sources, which are parsed and not run: no GPU, no library of CUDA is needed. Out: a row per
name that a file of megatron-core imports from `transformer_engine`, or looks up in it: the module,
the name, and what it is: `function(...)`, `class(bases)`, `module`, `value`, `compiled` (in a
library, whose parameters the wheel does not tell), or `absent` (megatron has another way then).
Under the classes that megatron makes layers and optimizers of come their own methods with their
parameters, and the names under which they or their bases register weights.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

RECORD = Path(__file__).parent / "te" / "te.tsv"
ROOT = "transformer_engine"
COMPILED = ROOT + "_torch"
WITH_METHODS = (
    *("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention", "LayerNorm", "RMSNorm"),
    *("TransformerEngineBaseModule", "FP8GlobalStateManager", "FusedAdam"),
)
REGISTERED = "register_parameter:"
Rows = dict[tuple[str, str], str]  # (module, name): what it is


class Sources:
    """The modules of an unpacked wheel, as syntax trees."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel

    def file(self, module: str) -> Path | None:
        path = self.wheel.joinpath(*module.split("."))
        files = (path / "__init__.py", path.with_suffix(".py"))
        return next((file for file in files if file.exists()), None)

    @cache  # noqa: B019
    def statements(self, module: str) -> list[ast.stmt]:
        """All of a module but what is inside its functions and classes."""
        file = self.file(module)
        return list(_open(ast.parse(file.read_text(encoding="utf-8")).body)) if file else []

    def find(self, module: str, name: str) -> tuple[str, str | ast.AST] | None:
        """Where a name of a module is defined, and its definition: "module" or "value" where it is
        no class and no function.
        """
        if self.file(f"{module}.{name}"):
            return f"{module}.{name}", "module"
        for node in reversed(self.statements(module)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module == COMPILED:
                if name in {alias.asname or alias.name for alias in node.names}:
                    return COMPILED, "compiled"
            elif isinstance(node, ast.ImportFrom) and (source := self._source(module, node)):
                for alias in node.names:
                    found = None
                    if alias.name == "*":
                        found = self.find(source, name)
                    elif (alias.asname or alias.name) == name:
                        found = self.find(source, alias.name)
                    if found:
                        return found
            if name in _assigned(node):
                return module, "value"
        return None

    def _source(self, module: str, node: ast.ImportFrom) -> str | None:
        base = module.split(".")
        if node.level:
            file = self.file(module)
            assert file is not None
            up = node.level - (file.name == "__init__.py")
            parts = base[: len(base) - up] + ([node.module] if node.module else [])
            return ".".join(parts)
        return node.module if node.module and node.module.split(".")[0] == ROOT else None

    def methods(self, module: str, node: ast.ClassDef) -> dict[str, str]:
        """Its own methods with their parameters; `register_parameter:` has the names of weights, as
        the sources of it and its bases write them.
        """
        found: dict[str, str] = {}
        for base in reversed(node.bases):
            there = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if there and isinstance(there[1], ast.ClassDef):
                found |= self.methods(there[0], there[1])
        found = {name: what for name, what in found.items() if name == REGISTERED and what}
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                found[item.name] = parameters(item)
                if item.name == "__init__" and (names := _registered(item)):
                    found[REGISTERED] = names
        return found


def _open(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, part, []):
                    yield from _open(
                        inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    )


def _assigned(node: ast.stmt) -> set[str]:
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return {target.id for target in targets if isinstance(target, ast.Name)}


def parameters(function: ast.FunctionDef) -> str:
    """Names, kinds and defaults; annotations are left out."""
    given = function.args
    for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
        if argument is not None:
            argument.annotation = None
    return ast.unparse(given)


def _registered(function: ast.FunctionDef) -> str:
    """The names of weights; of `self.names[i]`, also what `self.names` is made to be."""
    names, lists = [], []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_parameter":
            names.append(ast.unparse(node.args[0]))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List) and node.value.elts:
            lists.append(ast.unparse(node))
    used = [line for line in lists if any(name.startswith(line.split(" = ")[0]) for name in names)]
    return "; ".join(dict.fromkeys([*names, *used]))


def asked(megatron: Path) -> set[tuple[str, str]]:
    """(module, name) of what the files of megatron-core import from Transformer Engine, or reach
    through a name for one of its modules.
    """
    wanted: set[tuple[str, str]] = set()
    for file in sorted(megatron.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        modules: dict[str, str] = {}  # name in the file: module
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == ROOT:
                        modules[alias.asname or ROOT] = alias.name if alias.asname else ROOT
                        wanted.add((alias.name, ""))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == ROOT:
                wanted |= {(str(node.module), alias.name) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (chain := _chain(node)):
                first, *names = chain
                if first in modules:
                    wanted.add((modules[first], ".".join(names)))
    return wanted


def _chain(node: ast.expr) -> list[str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def record(wheel: Path, megatrons: Iterable[Path]) -> str:
    """The rows, as text."""
    sources, rows = Sources(wheel), dict[tuple[str, str], str]()
    for module, name in sorted(set().union(*(asked(place) for place in megatrons))):
        parts = name.split(".") if name else []
        while parts and sources.file(f"{module}.{parts[0]}"):
            rows[module, ""] = "module"
            module, parts = f"{module}.{parts[0]}", parts[1:]
        rows[module, ""] = "module" if sources.file(module) else "absent"
        if parts and rows[module, ""] == "module":
            _describe(sources, module, parts[0], rows)
    return "".join(f"{m}\t{n}\t{what}\n" for (m, n), what in sorted(rows.items()))


def _describe(sources: Sources, module: str, name: str, rows: Rows) -> None:
    found = sources.find(module, name)
    if found is None:
        rows[module, name] = "absent"
        return
    place, node = found
    if isinstance(node, str):
        rows[module, name] = node
    elif isinstance(node, ast.FunctionDef):
        rows[module, name] = f"function({parameters(node)})"
    elif isinstance(node, ast.ClassDef):
        rows[module, name] = f"class({', '.join(ast.unparse(base) for base in node.bases)})"
        if name in WITH_METHODS and not module.endswith(".ops"):
            for method, given in sources.methods(place, node).items():
                rows[module, f"{name}.{method}"] = given


def differences() -> list[str]:
    """Where the stand-in has a function, or a method of a layer, with other parameters than the
    record. A default that is no literal in the record may be another.
    """
    rows = [line.split("\t") for line in RECORD.read_text(encoding="utf-8").splitlines()]
    told = {
        name: what.removeprefix("function(").removesuffix(")") if "." not in name else what
        for _, name, what in rows
        if "." in name or what.startswith("function(")
    }
    found = []
    for file in (RECORD.parent / ROOT).glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            methods = {}
            if isinstance(node, ast.ClassDef) and node.name in WITH_METHODS:
                members = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                methods = {f"{node.name}.{item.name}": item for item in members}
            elif isinstance(node, ast.FunctionDef):
                methods = {node.name: node}
            for name, item in methods.items():
                wanted, own = told.get(name), parameters(item)
                if wanted and wanted != own:
                    found += _against(name, own, wanted)
    return found


def _against(name: str, own: str, wanted: str) -> list[str]:
    mine, theirs = (
        ast.parse(f"lambda {text}: 0", mode="eval").body.args  # type: ignore[attr-defined]
        for text in (own, wanted)
    )
    if ast.unparse(_bare(mine)) != ast.unparse(_bare(theirs)):
        return [f"{name}: {own} and not {wanted}"]
    pairs = zip(
        [*mine.defaults, *mine.kw_defaults], [*theirs.defaults, *theirs.kw_defaults], strict=True
    )
    return [
        f"{name}: {ast.unparse(a)} and not {ast.unparse(b)}"
        for a, b in pairs
        if isinstance(b, ast.Constant) and ast.unparse(a) != ast.unparse(b)
    ]


def _bare(given: ast.arguments) -> ast.arguments:
    """Every default that there is as None."""
    none = ast.Constant(None)
    return ast.arguments(
        given.posonlyargs,
        given.args,
        given.vararg,
        given.kwonlyargs,
        [value and none for value in given.kw_defaults],
        given.kwarg,
        [none for _ in given.defaults],
    )


if __name__ == "__main__":
    sys.stdout.write(record(Path(sys.argv[1]), [Path(place) for place in sys.argv[2:]]))
