"""Every wait between parts is declared, in rft.tools.waits, and only those that are there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rft.tools.waits import PLACES, declared

PACKAGE = Path(__file__).resolve().parents[2] / "rft"
CALLS = {
    *("ray.get", "ray.wait", "select.select", "await_end", "end_descendants", "accepted"),
    *("asyncio.wait", "asyncio.wait_for", "asyncio.timeout"),
}
# methods of processes, conditions, events, threads, futures, sockets
METHODS = {
    *("wait", "wait_for", "wait_procs", "communicate", "poll", "accept", "recv", "recv_into"),
    *("result", "acquire"),
}


def is_wait(node: ast.AST) -> bool:
    if isinstance(node, ast.Await):  # for an actor, without a deadline of its own
        asked = node.value
        return (
            isinstance(asked, ast.Call)
            and isinstance(asked.func, ast.Attribute)
            and asked.func.attr == "ask"
        )
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if name in CALLS:
        return True
    if not isinstance(node.func, ast.Attribute):
        return False
    is_thread = node.func.attr == "join" and ("thread" in name or name == "feeder.join")
    return (
        node.func.attr in METHODS
        or is_thread
        or name == "events.get"
        or name.endswith(".events.get")
    )


def waits(node: ast.AST, within: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions of a source that wait."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from waits(child, (*within, child.name))
        else:
            if is_wait(child):
                yield ".".join(within)
            yield from waits(child, within)


def found_in(directory: str) -> set[str]:
    return {
        f"{path.relative_to(PACKAGE)} {function}"
        for path in (PACKAGE / directory).glob("*.py")
        for function in waits(ast.parse(path.read_text(encoding="utf-8")))
    }


def test_every_wait_says_for_whom_how_long_and_what_then() -> None:
    there = set().union(*map(found_in, PLACES))
    said = [f"{one.file} {one.function}" for one in declared()]
    assert len(said) == len(set(said))
    assert there - set(said) == set(), "these wait, and rft/tools/waits.py does not declare it"
    assert set(said) - there == set(), "rft/tools/waits.py declares these, and they are gone"


def test_the_limits_that_are_named_are_there() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", text.replace((PACKAGE / "tools/waits.py").read_text(), "")))
    for one in declared():
        named = re.findall(r"`(\w+)`", one.limit)
        assert set(named) <= words, one
        assert named or re.match("none|0|the|a |one|what", one.limit), one


def test_a_wait_that_nobody_declared_is_found() -> None:
    source = """
class Part:
    async def hang(self):
        def inner():
            return ray.get(self.reference)
        await self.buffer.ask(method)
    def join(self):
        self.thread.join()
        ", ".join(self.names)
    def look(self):
        return self.state
"""
    assert set(waits(ast.parse(source))) == {"Part.hang", "Part.hang.inner", "Part.join"}
