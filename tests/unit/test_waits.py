"""Every wait between parts is declared, in rft.tools.waits, and only those that are there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rft.tools.waits import declared

PACKAGE = Path(__file__).resolve().parents[2] / "rft"
CALLS = {
    *("ray.get", "ray.wait", "select.select", "await_end", "end_descendants", "accepted"),
    *("asyncio.wait", "asyncio.wait_for", "asyncio.timeout", "answered"),
    *("asyncio.sleep", "time.sleep", "os.wait", "os.waitpid", "fcntl.flock", "fcntl.lockf"),
    *("subprocess.run", "socket.create_connection", "urllib.request.urlopen"),
}
# methods of processes, conditions, events, threads, futures, sockets, HTTP connections
METHODS = {
    *("wait", "wait_for", "wait_procs", "communicate", "poll", "accept", "recv", "recv_into"),
    *("result", "acquire", "getresponse"),
}
OF_DATABASES = re.compile(r"\bengine\.(begin|connect)$")
OF_THREADS = re.compile(r"thread.*\.join$|^feeder\.join$")
# what looks like one
AT_ONCE = re.compile(
    r"(process|child|trial)\.poll$|select\.poll$|os\.waitpid\(.*WNOHANG"
    r"|(HydraConfig|RAISED|captured)\.get$|accepted\(raw"
)


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
    if AT_ONCE.search(name) or AT_ONCE.search(ast.unparse(node)):
        return False
    if name in CALLS or OF_DATABASES.search(name) or OF_THREADS.search(name):
        return True
    if not isinstance(node.func, ast.Attribute):
        return False
    given = bool(node.args or node.keywords)
    of_queue = not given or any(one.arg == "timeout" for one in node.keywords)
    return (
        node.func.attr in METHODS
        or (node.func.attr == "join" and not given)
        or (node.func.attr == "get" and of_queue)
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


def test_every_wait_says_for_whom_how_long_and_what_then() -> None:
    there = {
        f"{path.relative_to(PACKAGE)} {function}"
        for path in PACKAGE.rglob("*.py")
        for function in waits(ast.parse(path.read_text(encoding="utf-8")))
    }
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
    def nap(self):
        while self.names.get("a"):
            time.sleep(1)
    def ask(self):
        with self.engine.begin() as db:
            return db
    def take(self):
        return self.queue.get()
    def look(self):
        return self.state
"""
    assert set(waits(ast.parse(source))) == {
        *("Part.hang", "Part.hang.inner", "Part.join", "Part.nap", "Part.ask", "Part.take")
    }


# who tells the time of day, or a stamp that others read; a step of the clock changes what is told
WALL_CLOCK = {
    "agents/endpoint/replies.py": "OpenAI's field `created`",
    "monitor/trace.py": "where a timeline begins",
    "monitor/mlflow.py": "the stamp of a row",
    "tools/quickstart.py": "how long ago another process began, as it is told",
    "tools/demo.py": "the same",
    "tools/ckpt.py": "the age of a file, as it is told",
    "run/owners.py": "since when somebody has a directory",
    "train.py": "a name",
    "buffer/experience_buffer.py": "when a group was used last, which outlives the process",
    "buffer/selection.py": "the same: Replay.rests",
}
CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}


def clocks_of(source: str) -> bool:
    """Whether it looks at the wall clock, called or handed on."""
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) in CLOCKS
        for node in ast.walk(ast.parse(source))
    )


def test_a_clock_that_jumps_ends_no_wait_and_no_lease() -> None:
    """Every duration is of a clock that only goes on; a database's leases are of its own clock."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if clocks_of(path.read_text(encoding="utf-8"))
    }
    assert found == set(WALL_CLOCK)


def test_a_wall_clock_that_is_handed_on_is_found() -> None:
    assert clocks_of("import time\ndef f(clock=time.time): ...")
    assert not clocks_of("import time\nend = time.monotonic() + 3")
