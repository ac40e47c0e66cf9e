"""What Python sources say of names, types and signatures, without importing anything.

In: directories of sources and type stubs, and the text of a module that uses them. Out: one line
per use that the sources contradict, as `file:line what`: a name that is not there, a keyword that a
function does not take, too many positional arguments, one that is missing, a method that overrides
another without taking its arguments. Types are followed as far as they are plain: imports,
annotations, constructors, return types, attributes of `self`, context managers, keys of
dictionaries that are given as `**keywords`. Invariant: what cannot be followed is unknown, and of
what is unknown nothing is said.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef
# Bases that add no attribute that anybody asks for by name.
PLAIN = {"Generic", "ABC", "Protocol", "object", "NamedTuple", "Enum", "IntEnum", "Struct"}
PLAIN |= {"TypedDict", "Exception", "RuntimeError", "str", "int", "StrEnum"}
ITEMS = {"list", "List", "Sequence", "Iterable", "Iterator", "set", "frozenset", "tuple", "Tuple"}
ITEMS |= {"Generator", "AsyncGenerator", "AsyncIterator", "AsyncIterable", "deque"}


@dataclass(frozen=True)
class Module:
    name: str


@dataclass(frozen=True)
class Class:
    module: str
    node: ast.ClassDef

    def __str__(self) -> str:
        return f"{self.module}.{self.node.name}"


@dataclass(frozen=True)
class Instance:
    of: Class


@dataclass(frozen=True)
class Parent:
    """What `super()` gives."""

    of: Class


@dataclass(frozen=True)
class Function:
    """`nodes`: one, or all overloads. `bound`: its first argument is given."""

    module: str
    nodes: tuple[Definition, ...]
    owner: Class | None = None
    bound: bool = False


@dataclass(frozen=True)
class Items:
    element: Any


@dataclass(frozen=True)
class Keys:
    """A dictionary of which these keys are known."""

    keys: frozenset[str]


@dataclass
class Scope:
    module: str
    names: dict[str, Any] = field(default_factory=dict)
    within: Class | None = None
    returned: list[Any] = field(default_factory=list)

    def inner(self) -> "Scope":
        return Scope(self.module, dict(self.names), self.within)


MISSING = object()


class Sources:
    """`roots`: top-level package -> the directory that has it. `read`: prefixes of modules that are
    looked at; all others are unknown. `hints`: name of a parameter -> the class that it is of.
    `texts`: of modules that have no file, or another text than it.
    """

    def __init__(
        self,
        roots: dict[str, Path],
        read: tuple[str, ...],
        hints: dict[str, str],
        texts: dict[str, str],
        user: str,
    ):
        self.roots, self.read, self.hints, self.texts = roots, read, hints, texts
        self.user = user  # whose own names are not judged
        self.problems: set[str] = set()
        self.seen: set[str] = set()  # names of libraries that were looked up for the user's text
        self._watched: str | None = None
        self._running: set[Any] = set()

    # --- modules ----------------------------------------------------------------------------------

    def path(self, module: str) -> Path | None:
        root = self.roots.get(module.split(".")[0])
        if root is None:
            return None
        stem = root.joinpath(*module.split("."))
        for path in (stem.with_name(f"{stem.name}.pyi"), stem.with_name(f"{stem.name}.py")):
            if path.is_file():
                return path
        for name in ("__init__.pyi", "__init__.py"):
            if (stem / name).is_file():
                return stem / name
        return None

    @functools.cache  # noqa: B019 - lives as long as its test
    def exists(self, module: str) -> bool:
        root = self.roots.get(module.split(".")[0])
        has_path = root is not None and root.joinpath(*module.split(".")).is_dir()
        return has_path or module in self.texts or self.path(module) is not None

    def is_read(self, module: str) -> bool:
        return any(module == prefix or module.startswith(f"{prefix}.") for prefix in self.read)

    @functools.cache  # noqa: B019
    def bindings(self, module: str) -> dict[str, list[ast.AST]]:
        return _bindings(self.tree(module).body)

    @functools.cache  # noqa: B019
    def tree(self, module: str) -> ast.Module:
        path, text = self.path(module), self.texts.get(module)
        return ast.parse(text or "") if text is not None or path is None else parsed(path)

    def package(self, module: str) -> str:
        path = self.path(module)
        own = path is not None and path.stem == "__init__"
        return module if own else module.rpartition(".")[0]

    def target(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = self.package(module).split(".")
        base = base[: len(base) - node.level + 1]
        return ".".join([*base, *(node.module.split(".") if node.module else [])])

    @functools.cache  # noqa: B019
    def of_module(self, module: str, name: str) -> Any:
        """A member of a module; MISSING when its sources have none."""
        if not self.is_read(module):
            return None
        found = self.bindings(module)
        values = [self._bound(module, name, node) for node in found.get(name, ())]
        functions = [v for v in values if isinstance(v, Function)]
        if len(functions) > 1:
            return Function(module, tuple(node for f in functions for node in f.nodes))
        known = [value for value in values if value is not None and value is not MISSING]
        if known:
            return known[0]
        if self.exists(f"{module}.{name}"):  # which a package may import from itself
            return Module(f"{module}.{name}")
        if values:
            return values[0]
        for star in found.get("*", ()):
            assert isinstance(star, ast.ImportFrom)
            value = self.of_module(self.target(module, star), name)
            if value is not MISSING:
                return value
        has_text = module in self.texts or self.path(module) is not None
        open_ = (
            "__getattr__" in found and "MODULE_ATTRS" not in found
        )  # vLLM's list of all it gives
        return MISSING if has_text and not open_ else None

    def _bound(self, module: str, name: str, node: ast.AST) -> Any:
        key = (module, name, id(node))
        if key in self._running:
            return None
        self._running.add(key)
        try:
            if isinstance(node, ast.ImportFrom):
                alias = next(a for a in node.names if (a.asname or a.name) == name)
                return self.imported(self.target(module, node), alias.name)
            if isinstance(node, ast.alias):
                return Module(node.name if node.asname else node.name.split(".")[0])
            if isinstance(node, ast.ClassDef):
                return Class(module, node)
            if isinstance(node, Definition):
                return Function(module, (node,))
            if isinstance(node, ast.AnnAssign):
                typed = self.annotated(node.annotation, Scope(module))
                return typed if typed or not node.value else self.quiet(node.value, Scope(module))
            is_union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
            if is_union or isinstance(node, ast.Subscript):  # a name for an annotation
                return self.annotated(node, Scope(module))
            return self.quiet(node, Scope(module)) if isinstance(node, ast.expr) else None
        finally:
            self._running.discard(key)

    def imported(self, module: str, name: str) -> Any:
        if not self.is_read(module):
            return Module(f"{module}.{name}") if self.is_read(f"{module}.{name}") else None
        if self.exists(module):
            return self.of_module(module, name)
        return MISSING

    # --- classes ----------------------------------------------------------------------------------

    @functools.cache  # noqa: B019
    def line(self, cls: Class) -> tuple[tuple[Class, ...], bool]:
        """The class and its bases, and whether all of them are known."""
        line, whole = [cls], True
        for base in cls.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            value = self.quiet(plain, Scope(cls.module))
            name = plain.attr if isinstance(plain, ast.Attribute) else getattr(plain, "id", "")
            if isinstance(value, Class):
                more, known = self.line(value)
                line += [c for c in more if c not in line]
                whole &= known
            else:
                whole &= name in PLAIN
        return tuple(line), whole

    def member(self, cls: Class, name: str, bound: bool, after: bool = False) -> Any:
        """Of a class, or of an instance of it (`bound`); `after`: of what it inherits."""
        line, whole = self.line(cls)
        for owner in line[after:]:
            value = self.own(owner, name, bound)
            if value is not MISSING:
                return value
        open_ = not whole or any("__getattr__" in body(c.node) for c in line)
        return None if open_ or name.startswith("__") else MISSING

    @functools.cache  # noqa: B019
    def own(self, cls: Class, name: str, bound: bool) -> Any:
        scope, nodes = Scope(cls.module, within=cls), body(cls.node).get(name, ())
        functions = tuple(node for node in nodes if isinstance(node, Definition))
        if functions:
            marks = {ast.unparse(mark).split(".")[-1] for mark in functions[0].decorator_list}
            if marks & {"property", "cached_property", "setter"}:
                return self.result(Function(cls.module, functions, cls))
            given = ("classmethod" in marks or bound) and "staticmethod" not in marks
            return Function(cls.module, functions, cls, given)
        for node in nodes:
            return self._bound(cls.module, name, node)
        if bound and name in (assigned := assigned_to_self(cls.node)):
            return self._attribute(cls, *assigned[name], scope)
        return MISSING

    def _attribute(self, cls: Class, method: Definition, node: Any, scope: Scope) -> Any:
        if isinstance(node, ast.AnnAssign):
            typed = self.annotated(node.annotation, scope)
            if typed is not None or node.value is None:
                return typed
        key = (cls, method.name, node.lineno)
        if key in self._running or not isinstance(node, ast.Assign | ast.AnnAssign):
            return None
        self._running.add(key)
        try:
            inner = self.enter(method, scope, cls)
            for n in ast.walk(method):  # what the method imports for itself
                if isinstance(n, ast.Import | ast.ImportFrom):
                    self._import(n, inner)
            return self.quiet(node.value, inner) if node.value else None
        finally:
            self._running.discard(key)

    def fields(self, cls: Class) -> dict[str, bool] | None:
        """Of a record that has no constructor of its own: name -> whether it must be given."""
        line, whole = self.line(cls)
        if not whole or any("__init__" in body(c.node) or "__new__" in body(c.node) for c in line):
            return None
        optional = any(
            k.arg == "total" and not ast.literal_eval(k.value) for k in cls.node.keywords
        )
        found: dict[str, bool] = {}
        for owner in reversed(line):
            for node in owner.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    kind = ast.unparse(node.annotation)
                    if "ClassVar" not in kind:
                        needed = node.value is None and "NotRequired" not in kind
                        found[node.target.id] = needed and not optional
        return found

    # --- types of expressions ---------------------------------------------------------------------

    def annotated(self, node: ast.expr | None, scope: Scope) -> Any:
        """The value that something of this annotation is."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.annotated(ast.parse(node.value.strip(), mode="eval").body, scope)
        if isinstance(node, ast.BinOp):
            left, right = (self.annotated(part, scope) for part in (node.left, node.right))
            # of two classes, either may be meant
            return (
                None
                if isinstance(left, Instance) and isinstance(right, Instance)
                else left or right
            )
        if isinstance(node, ast.Subscript):
            name = ast.unparse(node.value).split(".")[-1]
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if name in ITEMS:
                return Items(self.annotated(parts[0], scope))
            if name == "type":
                made = self.annotated(parts[0], scope)
                return made.of if isinstance(made, Instance) else None
            if name in ("Optional", "Annotated", "Awaitable", "Final", "NotRequired"):
                return self.annotated(parts[0], scope)
            if name == "Union":
                known = [v for part in parts if (v := self.annotated(part, scope))]
                return known[0] if len(known) == 1 else None
            return self.annotated(node.value, scope)
        if isinstance(node, ast.Name) and node.id == "Self" and scope.within:
            return Instance(scope.within)
        if isinstance(node, ast.Name | ast.Attribute):
            value = self.quiet(node, scope)
            return Instance(value) if isinstance(value, Class) else _alias(value)
        return None

    def result(self, function: Function) -> Any:
        """What a call gives."""
        node, scope = function.nodes[0], Scope(function.module, within=function.owner)
        if node.returns is not None:
            if ast.unparse(node.returns).startswith("dict[") and function.module.startswith(
                self.user
            ):
                return self._keys_given(function)
            return self.annotated(node.returns, scope)
        return None

    def _keys_given(self, function: Function) -> Any:
        if function.nodes in self._running:
            return None
        self._running.add(function.nodes)
        watched, self._watched = self._watched, None
        try:
            inner = self.enter(function.nodes[0], Scope(function.module), function.owner)
            self.run(function.nodes[0].body, inner)
            known = [value for value in inner.returned if isinstance(value, Keys)]
            return Keys(frozenset().union(*(k.keys for k in known))) if known else None
        finally:
            self._watched = watched
            self._running.discard(function.nodes)

    def quiet(self, node: ast.expr, scope: Scope) -> Any:
        watched, self._watched = self._watched, None
        try:
            return self.value(node, scope)
        finally:
            self._watched = watched

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """Type of an expression; what its parts contradict is noted on the way."""
        known = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if known is not None:
            return known(node, scope)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, scope)
        return None

    def _of_name(self, node: ast.Name, scope: Scope) -> Any:
        if node.id in scope.names:
            return scope.names[node.id]
        if self.is_read(scope.module) and node.id in self.bindings(scope.module):
            return _known(self.of_module(scope.module, node.id))
        return None

    def _of_attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        return _known(self.attribute(self.value(node.value, scope), node.attr, node))

    def attribute(self, base: Any, name: str, node: ast.AST) -> Any:
        value: Any = None
        if isinstance(base, Module):
            value = self.of_module(base.name, name)
            if value is None and self.exists(f"{base.name}.{name}"):
                value = Module(f"{base.name}.{name}")
            place = base.name
        elif isinstance(base, Class):
            value, place = self.member(base, name, False), str(base)
        elif isinstance(base, Instance):
            value, place = self.member(base.of, name, True), str(base.of)
        elif isinstance(base, Parent):
            value, place = self.member(base.of, name, True, after=True), f"super of {base.of}"
        else:
            return None
        if self._watched and not place.startswith(self.user):
            self.seen.add(f"{place}.{name}") if value is not None else None
        if value is MISSING:
            self.note(node, place, f"has no {name}")
        return value

    def _of_await(self, node: ast.Await, scope: Scope) -> Any:
        return self.value(node.value, scope)

    def _of_ifexp(self, node: ast.IfExp, scope: Scope) -> Any:
        self.value(node.test, scope)
        return _either(self.value(node.body, scope), self.value(node.orelse, scope))

    def _of_boolop(self, node: ast.BoolOp, scope: Scope) -> Any:
        return functools.reduce(_either, [self.value(value, scope) for value in node.values])

    def _of_binop(self, node: ast.BinOp, scope: Scope) -> Any:
        both = [self.value(node.left, scope), self.value(node.right, scope)]
        known = [value for value in both if isinstance(value, Keys)]
        return Keys(frozenset().union(*(k.keys for k in known))) if known else None

    def _of_dict(self, node: ast.Dict, scope: Scope) -> Any:
        keys: set[str] = set()
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope)
            if key is None:
                keys |= value.keys if isinstance(value, Keys) else set()
            elif isinstance(key, ast.Constant) and isinstance(key.value, str):
                keys.add(key.value)
            else:
                self.value(key, scope)
        return Keys(frozenset(keys))

    def _of_subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        base = self.value(node.value, scope)
        self.value(node.slice, scope)
        sliced = isinstance(node.slice, ast.Slice)
        return base if sliced else base.element if isinstance(base, Items) else None

    def _of_lambda(self, node: ast.Lambda, scope: Scope) -> Any:
        inner = scope.inner()
        inner.names |= {arg.arg: None for arg in _parameters(node.args)}
        self.value(node.body, inner)

    def _comprehension(self, node: Any, scope: Scope) -> Any:
        inner = scope.inner()
        for part in node.generators:
            self.bind(part.target, _element(self.value(part.iter, inner)), inner)
            for test in part.ifs:
                self.value(test, inner)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        values = [self.value(part, inner) for part in parts]
        return None if isinstance(node, ast.DictComp) else Items(values[0])

    _of_listcomp = _of_setcomp = _of_generatorexp = _of_dictcomp = _comprehension

    def _of_call(self, node: ast.Call, scope: Scope) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        function = self.value(node.func, scope)
        values = [self.value(arg, scope) for arg in node.args]
        keywords = {k.arg: self.value(k.value, scope) for k in node.keywords if k.arg}
        splat = [self.value(k.value, scope) for k in node.keywords if k.arg is None]
        if name == "super" and scope.within:
            return Parent(scope.within)
        if name == "dict":
            more = [value.keys for value in (*values, *splat) if isinstance(value, Keys)]
            return Keys(frozenset(keywords).union(*more))
        if name in ("list", "sorted", "tuple", "reversed", "iter"):
            return Items(_element(values[0])) if values else None
        if isinstance(function, Class | Function):
            asked = set(keywords).union(*(s.keys for s in splat if isinstance(s, Keys)))
            starred = any(isinstance(arg, ast.Starred) for arg in node.args)
            self.check(node, function, len(values), asked, starred, bool(splat))
        if isinstance(function, Class):
            return Instance(function)
        return self.result(function) if isinstance(function, Function) else None

    # --- calls ------------------------------------------------------------------------------------

    def check(
        self,
        node: ast.AST,
        function: Class | Function,
        count: int,
        keywords: set[str],
        starred: bool,
        splat: bool,
    ) -> None:
        if isinstance(function, Class):
            fields = self.fields(function)
            if fields is not None:
                self._check_fields(node, function, fields, count, keywords, starred or splat)
                return
            made = self.member(function, "__init__", True)
            made = made if isinstance(made, Function) else self.member(function, "__new__", True)
            if isinstance(made, Function):
                self.check(node, made, count, keywords, starred, splat)
            return
        wrong = [
            _refused(one, function.bound, count, keywords, starred, splat) for one in function.nodes
        ]
        if all(wrong):
            owner = str(function.owner or function.module)
            self.note(node, f"{owner}.{function.nodes[0].name}", str(wrong[0]))

    def _check_fields(
        self,
        node: ast.AST,
        cls: Class,
        fields: dict[str, bool],
        count: int,
        keywords: set[str],
        loose: bool,
    ) -> None:
        for name in sorted(keywords - set(fields)):
            self.note(node, str(cls), f"takes no keyword {name}")
        if count > len(fields):
            self.note(node, str(cls), f"takes no {count} positional arguments")
        given = keywords | set(list(fields)[:count])
        lacking = [name for name, needed in fields.items() if needed and name not in given]
        if lacking and not loose:
            self.note(node, str(cls), f"needs {', '.join(lacking)}")

    def note(self, node: ast.AST, place: str, text: str) -> None:
        if self._watched and not place.startswith(self.user):
            self.problems.add(f"{self._watched}:{getattr(node, 'lineno', 0)} {place} {text}")

    # --- statements -------------------------------------------------------------------------------

    def enter(self, node: Definition, scope: Scope, cls: Class | None) -> Scope:
        """The scope of a function's body; parameters that say nothing of themselves are of the
        type that the overridden method says."""
        inner = scope.inner()
        inner.within = cls or scope.within
        above = self.member(cls, node.name, True, after=True) if cls else None
        theirs = _parameters(above.nodes[0].args) if isinstance(above, Function) else []
        for number, arg in enumerate(_parameters(node.args)):
            typed = self.annotated(arg.annotation, inner)
            named = [theirs[number].annotation] if number < len(theirs) else []
            if typed is None and named and theirs[number].arg == arg.arg:
                typed = self.annotated(named[0], Scope(above.module))
            if typed is None and arg.arg in self.hints:
                module, _, name = self.hints[arg.arg].rpartition(".")
                made = self.of_module(module, name)
                typed = Instance(made) if isinstance(made, Class) else None
            inner.names[arg.arg] = typed
        marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
        if cls and node.args.args and "staticmethod" not in marks:
            first = node.args.args[0].arg
            inner.names[first] = cls if "classmethod" in marks else Instance(cls)
        return inner

    def run(self, statements: Iterable[ast.stmt], scope: Scope, cls: Class | None = None) -> None:
        for node in statements:
            if isinstance(node, Definition):
                for part in (*node.decorator_list, *_defaults(node.args)):
                    self.value(part, scope)
                if cls:
                    self._check_override(node, cls)
                elif scope.within or scope.names:
                    scope.names[node.name] = Function(scope.module, (node,))
                self.run(node.body, self.enter(node, scope, cls))
            elif isinstance(node, ast.ClassDef):
                made = Class(scope.module, node)
                for part in (*node.bases, *node.decorator_list):
                    self.value(part, scope)
                self._check_abstract(made)
                self.run(node.body, Scope(scope.module, dict(scope.names), made), made)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node, scope)
            elif isinstance(node, ast.Try) and _expects_none(node):
                watched, self._watched = self._watched, None
                self.run(node.body, scope)
                self._watched = watched
                self._statement(ast.Try([], node.handlers, node.orelse, node.finalbody), scope)
            else:
                self._statement(node, scope)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if self.is_read(alias.name) and not self.exists(alias.name):
                    self.note(node, alias.name, "is no module")
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                scope.names[alias.asname or whole] = Module(whole)
            return
        module = self.target(scope.module, node)
        if self.is_read(module) and not self.exists(module):
            self.note(node, module, "is no module")
            return
        for alias in node.names:
            value = self.imported(module, alias.name)
            if self._watched and value is not None and not module.startswith(self.user):
                self.seen.add(f"{module}.{alias.name}")
            if value is MISSING:
                self.note(node, module, f"has no {alias.name}")
            scope.names[alias.asname or alias.name] = _known(value)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        if isinstance(node, ast.Assign):
            value = self.value(node.value, scope)
            for target in node.targets:
                self.bind(target, value, scope)
        elif isinstance(node, ast.AnnAssign):
            value = self.value(node.value, scope) if node.value else None
            typed = self.annotated(node.annotation, scope)
            kept = value if isinstance(value, Keys) or typed is None else typed
            self.bind(node.target, kept, scope)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.bind(node.target, _element(self.value(node.iter, scope)), scope)
            self.run([*node.body, *node.orelse], scope)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                value = self.value(item.context_expr, scope)
                if item.optional_vars:
                    self.bind(item.optional_vars, self._entered(value), scope)
            self.run(node.body, scope)
        elif isinstance(node, ast.Return):
            scope.returned.append(self.value(node.value, scope) if node.value else None)
        else:
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr):
                    self.value(part, scope)
                elif isinstance(part, ast.stmt):
                    self.run([part], scope)
                elif isinstance(part, ast.ExceptHandler):
                    self.value(part.type, scope) if part.type else None
                    self.run(part.body, scope)

    def _entered(self, value: Any) -> Any:
        if isinstance(value, Items):  # of a function that is made a context manager
            return value.element
        made = self.member(value.of, "__enter__", True) if isinstance(value, Instance) else None
        return self.result(made) if isinstance(made, Function) else None

    def bind(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self.bind(part, _element(value), scope)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, Items(value), scope)
        elif isinstance(target, ast.Attribute):
            self.value(target, scope)
        elif isinstance(target, ast.Subscript):
            self._bind_key(target, scope)

    def _bind_key(self, target: ast.Subscript, scope: Scope) -> None:
        base = self.value(target.value, scope)
        key = target.slice.value if isinstance(target.slice, ast.Constant) else None
        if isinstance(base, Keys) and isinstance(key, str) and isinstance(target.value, ast.Name):
            scope.names[target.value.id] = Keys(base.keys | {key})
        elif isinstance(base, Instance) and isinstance(key, str):
            fields = self.fields(base.of)
            if fields and key not in fields:
                self.note(target, str(base.of), f"has no key {key}")
        elif key is None:
            self.value(target.slice, scope)

    # --- classes of the user that inherit ---------------------------------------------------------

    def _check_override(self, node: Definition, cls: Class) -> None:
        """Whoever calls the method of the base may do so by position or by name."""
        if node.name in ("__init__", "__new__"):
            return
        above = self.member(cls, node.name, True, after=True)
        if not isinstance(above, Function) or not cls.module.startswith("rft."):
            return
        place, theirs, ours = f"{above.owner}.{node.name}", above.nodes[0].args, node.args
        if ours.vararg and ours.kwarg:
            return
        names = [arg.arg for arg in theirs.posonlyargs + theirs.args][1:]
        taken = [arg.arg for arg in ours.posonlyargs + ours.args][1:]
        if names != taken[: len(names)] and not ours.vararg:
            given, own = ", ".join(names) or "nothing", ", ".join(taken) or "nothing"
            self.note(node, place, f"is given {given}, and this takes {own}")
        lacking = {arg.arg for arg in theirs.kwonlyargs} - {arg.arg for arg in ours.kwonlyargs}
        if lacking - set(taken) and not ours.kwarg:
            self.note(node, place, f"may be given {', '.join(sorted(lacking))}")

    def _check_abstract(self, cls: Class) -> None:
        line, _ = self.line(cls)
        done = {name for c in line for name in body(c.node) if not _abstract(c.node, name)}
        for owner in line:
            for name in body(owner.node):
                if _abstract(owner.node, name) and name not in done:
                    self.note(cls.node, str(owner), f"wants a {name}")

    def examine(self, module: str, shown: str) -> None:
        """Note what a module says against the sources."""
        self._watched = shown
        self.run(self.tree(module).body, Scope(module))
        self._watched = None


# --- trees ---------------------------------------------------------------------------------------


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def body(cls: ast.ClassDef) -> dict[str, list[ast.AST]]:
    return _bindings(cls.body)


def _bindings(statements: Iterable[ast.stmt]) -> dict[str, list[ast.AST]]:
    """Name -> what binds it, also in branches."""
    found: dict[str, list[ast.AST]] = {}
    for node in _flat(statements):
        if isinstance(node, Definition | ast.ClassDef):
            found.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, []).append(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name.split(".")[0], []).append(alias)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, ast.Name):
                        found.setdefault(one.id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.setdefault(node.target.id, []).append(node)
    return found


def _flat(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in statements:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for name in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _flat(handler.body)


@functools.cache
def assigned_to_self(cls: ast.ClassDef) -> dict[str, tuple[Definition, ast.AST]]:
    """Attribute -> the method and the statement that first set it."""
    found: dict[str, tuple[Definition, ast.AST]] = {}
    for method in cls.body:
        for node in ast.walk(method) if isinstance(method, Definition) else ():
            for target in _targets(node):
                is_own = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
                if is_own and target.value.id == "self":
                    found.setdefault(target.attr, (method, node))
    return found


def _targets(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ast.walk(target)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        yield node.target
    elif isinstance(node, ast.With | ast.AsyncWith):
        yield from (item.optional_vars for item in node.items if item.optional_vars)


def _parameters(args: ast.arguments) -> list[ast.arg]:
    return [*args.posonlyargs, *args.args, *args.kwonlyargs]


def _defaults(args: ast.arguments) -> list[ast.expr]:
    return [*args.defaults, *(value for value in args.kw_defaults if value)]


def _expects_none(node: ast.Try) -> bool:
    """Whether it has another way for a name that is not there."""
    caught = {ast.unparse(handler.type) for handler in node.handlers if handler.type}
    return bool(caught & {"ImportError", "ModuleNotFoundError", "AttributeError"})


def _abstract(cls: ast.ClassDef, name: str) -> bool:
    return any(
        "abstractmethod" in ast.unparse(mark)
        for node in body(cls)[name]
        for mark in getattr(node, "decorator_list", ())
    )


def _refused(
    node: Definition, bound: bool, count: int, keywords: set[str], starred: bool, splat: bool
) -> str | None:
    """Why a function does not take this call; None where it does."""
    args = node.args
    places = [arg.arg for arg in args.posonlyargs + args.args][bound:]
    if count > len(places) and not args.vararg and not starred:
        return f"takes {len(places)} positional arguments, given are {count}"
    names = {arg.arg for arg in args.args + args.kwonlyargs}
    strange = sorted(keywords - names)
    if strange and not args.kwarg:
        return f"takes no keyword {', '.join(strange)}"
    required = places[: max(0, len(places) - len(args.defaults))]
    required += [
        arg.arg
        for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        if value is None
    ]
    lacking = [name for name in required if name not in {*places[:count], *keywords}]
    return f"needs {', '.join(lacking)}" if lacking and not (starred or splat) else None


def _known(value: Any) -> Any:
    return None if value is MISSING else value


def _alias(value: Any) -> Any:
    """Of a name that stands for an annotation, e.g. `SampleLogprobs`."""
    return value if isinstance(value, Instance | Items) else None


def _either(one: Any, other: Any) -> Any:
    if isinstance(one, Keys) and isinstance(other, Keys):
        return Keys(one.keys | other.keys)
    return other if one is None else one


def _element(value: Any) -> Any:
    return value.element if isinstance(value, Items) else None


def class_in_stub(path: Path, name: str) -> str:
    """The text of one class of a long stub."""
    found = re.search(rf"^class {name}\b.*?(?=^\S)", path.read_text("utf-8"), re.M | re.S)
    assert found, f"{path} has no class {name}"
    return found[0]
