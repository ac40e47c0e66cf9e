"""Assert statements about a program that nobody trusts, taken apart so that it never sees what it
should give.

    assert f(2) == [1, 4] ──► behind the program, in its cell: what is f(2)? ──► plain data
            ──► here: is that [1, 4]?

In: the text of a test. Out: `Asserts`, with the code to run behind the program, and `hold`, the
verdict on what that reported. A leaf, which only the program can give (a call of it, a variable),
is asked there. Constants, comparisons with them, tolerances (`abs`, `round`, `isclose`) and the
usual functions of constants stay here. Invariant: a report is only what the program says. It may
forge all of it, and gains nothing as long as it does not know the answers; so it needs no secret
word.

Not so where the statement itself hands the answer over. Two leaves (`f(x) == g(x)`, a variable or a
class of the test) are compared in the cell, as plain data or as two objects of one type. A program
that forges its report passes those, and what is only true or false (`assert f(x)`), and statements
that assert nothing.
"""

import ast
import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

BEHIND = '''
def _rft_plain(value):
    """The same of exact types of Python's own, whose == no program has written; else TypeError."""
    kind = type(value)
    if value is None or kind in (bool, range) or (kind.__module__, kind.__name__) in (
        ("fractions", "Fraction"), ("decimal", "Decimal")
    ):
        return value
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _rft_plain(value.item())
    for base, nothing in ((int, 0), (float, 0.0), (complex, 0j), (str, ""), (bytes, b"")):
        if isinstance(value, base):
            return base.__add__(value, nothing)
    for base in (list, tuple, set, frozenset):
        if isinstance(value, base):
            return base(map(_rft_plain, base.__iter__(value)))
    if isinstance(value, dict):
        return {_rft_plain(key): _rft_plain(held) for key, held in dict.items(value)}
    if kind in (type({}.keys()), type({}.items())):
        return set(map(_rft_plain, value))
    if kind is bytearray:
        return bytes(value)
    raise TypeError(f"{kind} is no plain data")


def _rft_packed(value):
    """Plain data as JSON can say it."""
    kind = type(value).__name__
    if value is None or kind in ("bool", "float", "str"):
        return value
    if kind == "int":
        return value if abs(value) < 2**63 else [kind, hex(value)]
    parts = {
        "dict": lambda: [[key, held] for key, held in value.items()],
        "complex": lambda: [value.real, value.imag],
        "range": lambda: [value.start, value.stop, value.step],
        "Fraction": lambda: [value.numerator, value.denominator],
        "Decimal": lambda: [str(value)],
    }.get(kind, lambda: list(value))()
    if kind == "dict":
        return [kind, [[_rft_packed(x) for x in part] for part in parts]]
    return [kind, [_rft_packed(part) for part in parts]]


def _rft_told(site, leaf, *values):
    try:
        _rft_reports.append([site, leaf, *(_rft_packed(_rft_plain(value)) for value in values)])
    except Exception:
        _rft_reports.append([site, leaf])


def _rft_equal(a, b):
    try:
        a = _rft_plain(a)
        # `approx` of a number compares as it wants to
        if not type(b).__module__.startswith("_pytest."):
            b = _rft_plain(b)
    except TypeError:
        return type(a) is type(b) and bool(a == b)
    return bool(b == a)


_rft_reports = []
'''
END = """
import json as _rft_json
print("\\n{word}" + _rft_json.dumps(_rft_reports), flush=True)
"""
LARGEST = 10**7  # elements that a literal may grow to here
TOLERANT = ("abs", "round", "isclose", "math.isclose")
HUGE = ("factorial", "comb", "perm", "prod")  # small arguments, large results


class UnreadableTest(ValueError):
    """A test that is no Python."""


@dataclass(frozen=True)
class Leaf:
    """Stands in an expression for what the program has to give."""

    number: int


def _range(*arguments: int) -> range:
    found = range(*arguments)
    if len(found) > LARGEST:
        raise ValueError("too large")
    return found


FUNCTIONS: dict[str, Any] = {
    "range": _range,
    "isclose": math.isclose,
    **{
        f.__name__: f
        for f in (abs, bool, complex, dict, float, frozenset, int, len, list, max, min, round)
    },
    **{f.__name__: f for f in (set, sorted, str, sum, tuple)},
    **{
        f"math.{name}": value
        for name, value in vars(math).items()
        if not name.startswith("_") and name not in HUGE
    },
}


def _product(a: Any, b: Any) -> Any:
    for one, times in ((a, b), (b, a)):
        if hasattr(one, "__len__") and len(one) * times > LARGEST:
            raise ValueError("too large")
    return a * b


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and a.bit_length() * b > LARGEST:
        raise ValueError("too large")
    return a**b


OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _product,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.LShift: lambda a, b: a * _power(2, b),
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


# --- taking apart ---------------------------------------------------------------------------------


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _not(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), node)


def _truth(node: ast.expr) -> ast.expr:
    """What is true or false of it in the cell; `a == b` by `_rft_equal`."""
    if (
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.Eq | ast.NotEq)
        and len(node.ops) == 1
    ):
        same = ast.Call(ast.Name("_rft_equal"), [node.left, node.comparators[0]], [])
        return same if isinstance(node.ops[0], ast.Eq) else _not(same)
    return _not(_not(node))


class _Elements(ast.NodeTransformer):
    """`all(f(x) == y for x, y in ...)` compares as an assert of its own would."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        given = node.args[0] if len(node.args) == 1 else None
        if _name(node.func) in ("all", "any") and isinstance(
            given, ast.GeneratorExp | ast.ListComp
        ):
            given.elt = _truth(given.elt)
        return node


class _Split:
    """One condition:

    `here` is what remains of it, a `Leaf` in place of each of `leaves`. Without `functions` no name
    is ours.
    """

    def __init__(self, condition: ast.expr, functions: bool):
        self.functions = functions
        self.leaves: list[ast.expr] = []
        self.here = self._condition(condition)

    def _leaf(self, node: ast.expr) -> ast.expr:
        self.leaves.append(_Elements().visit(node))
        return ast.Constant(Leaf(len(self.leaves) - 1))

    def _known(self, node: ast.AST) -> bool:
        """Needs nothing of the program, and `_value` can compute it."""
        match node:
            case ast.Constant():
                return True
            case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() | ast.UnaryOp() | ast.BinOp():
                parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
                usual = not isinstance(node, ast.BinOp) or type(node.op) in OPERATORS
                return (
                    usual and None not in getattr(node, "keys", ()) and all(map(self._known, parts))
                )
            case ast.Call():
                given = [*node.args, *(keyword.value for keyword in node.keywords)]
                named = all(keyword.arg for keyword in node.keywords)
                return named and self._is_function(node.func) and all(map(self._known, given))
            case ast.Attribute():
                return self.functions and isinstance(FUNCTIONS.get(_name(node)), float)
        return False

    def _is_function(self, node: ast.expr) -> bool:
        return self.functions and callable(FUNCTIONS.get(_name(node)))

    def _condition(self, node: ast.expr) -> ast.expr:
        match node:
            case ast.BoolOp():
                return ast.BoolOp(node.op, [self._condition(value) for value in node.values])
            case ast.UnaryOp(op=ast.Not()):
                return _not(self._condition(node.operand))
            case ast.Compare():
                return self._compared(node)
            case ast.Call() if self._is_tolerant(node):
                return self._operand(node)
        return node if self._known(node) else self._leaf(_not(_not(node)))

    def _compared(self, node: ast.Compare) -> ast.expr:
        operands = [node.left, *node.comparators]
        if not any(map(self._known, operands)):
            return self._leaf(_truth(node))
        first, *others = map(self._operand, operands)
        return ast.Compare(first, node.ops, others)

    def _operand(self, node: ast.expr) -> ast.expr:
        match node:
            case _ if self._known(node):
                return node
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return self._condition(node)
            case ast.BinOp(op=ast.Add() | ast.Sub()) if self._known(node.left) or self._known(
                node.right
            ):
                return ast.BinOp(self._operand(node.left), node.op, self._operand(node.right))
            case ast.Call() if self._is_tolerant(node):
                keywords = [
                    ast.keyword(keyword.arg, self._operand(keyword.value))
                    for keyword in node.keywords
                ]
                return ast.Call(node.func, [self._operand(given) for given in node.args], keywords)
        return self._leaf(node)

    def _is_tolerant(self, node: ast.Call) -> bool:
        plain = all(keyword.arg for keyword in node.keywords) and not any(
            isinstance(x, ast.Starred) for x in node.args
        )
        return plain and _name(node.func) in TOLERANT and self._is_function(node.func)


class _Rewriting(ast.NodeTransformer):
    """Every assert that asks the program something becomes reports of its leaves."""

    def __init__(self, surely: set[ast.AST]):
        self.surely = surely
        self.sites: list[ast.expr] = []
        self.required: set[int] = set()

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt] | ast.stmt:
        split = _Split(node.test, functions=True)
        if not split.leaves:  # `sum([1, 2]) == 3`: then that is the program's
            split = _Split(node.test, functions=False)
        if not split.leaves:
            return ast.Assert(node.test)
        site = len(self.sites)
        self.sites.append(split.here)
        if node in self.surely:
            self.required.add(site)
        lazy = any(isinstance(part, ast.BoolOp) for part in ast.walk(split.here))
        told: list[ast.stmt] = []
        for number, leaf in enumerate(split.leaves):
            line = f"_rft_told({site}, {number}, {ast.unparse(leaf)})"
            if lazy and number:  # `f(x) is None or f(x)[0] == 1` may never have asked for it
                line = f"try:\n    {line}\nexcept Exception:\n    _rft_told({site}, {number})"
            told += ast.parse(line).body
        return told


def _surely(tree: ast.Module) -> set[ast.AST]:
    """Asserts that whoever comes to the end has passed: of the test itself, and of the functions
    that it mentions.
    """
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found: set[ast.AST] = {node for node in tree.body if isinstance(node, ast.Assert)}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name in mentioned:
            found |= {node for node in function.body if isinstance(node, ast.Assert)}
    return found


class Asserts:
    """A test of assert statements. Raises UnreadableTest."""

    def __init__(self, text: str):
        try:
            tree = ast.parse(text)
            rewriting = _Rewriting(_surely(tree))
            self._code = ast.unparse(ast.fix_missing_locations(rewriting.visit(tree)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UnreadableTest(str(error)) from error
        self._sites, self._required = rewriting.sites, rewriting.required

    def behind(self, program: str, word: str) -> str:
        """The program and the test of it, whose last line of output is `word` and the report."""
        return f"{program}\n{BEHIND}\n{self._code}\n{END.format(word=word)}"

    def hold(self, report: str) -> bool:
        """Whether the values that a program has reported are those that the test demands."""
        try:
            asked: list[tuple[int, dict[int, Any]]] = []
            for site, leaf, *values in json.loads(report):
                if leaf == 0:
                    asked.append((site, {}))
                elif asked[-1][0] != site:
                    return False
                if values:
                    asked[-1][1][leaf] = _unpacked(values[0])
            return self._required <= {site for site, _ in asked} and all(
                _value(self._sites[site], given) for site, given in asked
            )
        except Exception:  # of what a program wrote anything may be wrong, and that is its failure
            return False


# --- values ---------------------------------------------------------------------------------------


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, parts = packed
    if kind == "int":
        return int(parts, 16)
    if kind == "dict":
        return {_unpacked(key): _unpacked(held) for key, held in parts}
    values = [_unpacked(part) for part in parts]
    if kind == "Decimal":
        found = Decimal(*values)
        if found.is_finite() and abs(found.adjusted()) > LARGEST // 1000:
            raise ValueError("too large")
        return found
    if kind in ("complex", "range", "Fraction"):
        return {"complex": complex, "range": range, "Fraction": Fraction}[kind](*values)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes}[kind](
        values
    )


def _value(node: ast.AST, given: dict[int, Any]) -> Any:
    """Of an expression of `_Split`. A leaf that was not reported is a KeyError."""

    def each(nodes: list[Any]) -> list[Any]:
        return [_value(one, given) for one in nodes]

    match node:
        case ast.Constant(value=Leaf(number=number)):
            return given[number]
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple() | ast.Set():
            return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](each(node.elts))
        case ast.Dict():
            return dict(zip(each(node.keys), each(node.values), strict=True))
        case ast.UnaryOp():
            return OPERATORS[type(node.op)](_value(node.operand, given))
        case ast.BinOp():
            return OPERATORS[type(node.op)](*each([node.left, node.right]))
        case ast.BoolOp():
            return (all if isinstance(node.op, ast.And) else any)(
                _value(one, given) for one in node.values
            )
        case ast.Compare():
            values = each([node.left, *node.comparators])
            pairs = zip(node.ops, values, values[1:], strict=False)
            return all(OPERATORS[type(op)](a, b) for op, a, b in pairs)
        case ast.Call():
            keywords = {str(keyword.arg): _value(keyword.value, given) for keyword in node.keywords}
            return FUNCTIONS[_name(node.func)](*each(node.args), **keywords)
        case ast.Attribute():
            return FUNCTIONS[_name(node)]
    raise ValueError(f"{type(node).__name__} is not computed here")
