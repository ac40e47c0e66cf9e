"""Rewards with a file of their own, by value; code in real
cells, the judge behind a real HTTP server.
"""

import asyncio
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rft.ground.experience import Sampling, Task
from rft.rollout import rewards, sandbox
from rft.rollout.reward_pool import RewardPool

isolated = pytest.mark.skipif(sandbox.obstacle() is not None, reason="no cells on this machine")


def task(
    reward: str, truth: str | None = None, raw: dict[str, Any] | None = None, **args: Any
) -> Task:
    return Task(
        id="t/0/0",
        taskset="t",
        row=0,
        prompt="p",
        truth=truth,
        reward=reward,
        raw=raw or {},
        reward_args=args,
        sampling=Sampling(max_tokens=100),
    )


def scored(
    reward: str,
    response: str,
    truth: str | None = None,
    raw: dict[str, Any] | None = None,
    **args: Any,
) -> Any:
    return rewards.resolve(reward)(response, truth, task(reward, truth, raw), **args)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("(1 + 2) * 3 - 4", 1.0),
        ("(1+2)*3-4 = 5", 1.0),
        ("1+2+4-3", 0.1),  # not 5
        ("5", 0.1),  # a number that is not given
        ("(1+2)*3-4+0", 0.1),
        ("3+2", 0.1),  # 5, but not all of them
        ("3*3-4", 0.1),  # one twice
        ("1/(2-2)+3+4", 0.1),
        ("9**9**9**9", 0.1),  # no such operation, and nothing is computed
        ("__import__('os').getcwd()", 0.1),
        ("1+", 0.0),
        ("(" * 400, 0.0),
        ("-" * 499 + "1", 0.1),
        ("1" * 600, 0.0),
    ],
)
def test_countdown(said: str, expected: float) -> None:
    assert (
        scored("countdown", f"<answer>{said}</answer>", raw={"numbers": [1, 2, 3, 4], "target": 5})
        == expected
    )


def test_countdown_is_exact_and_needs_an_answer() -> None:
    assert scored("countdown", "8/(3-8/3)", "24", {"nums": [3, 3, 8, 8]}) == 0.0
    assert scored("countdown", "<answer>8/(3-8/3)</answer>", "24", {"nums": [3, 3, 8, 8]}) == 1.0
    with pytest.raises(ValueError, match="countdown needs the column `numbers`"):
        scored("countdown", "<answer>1</answer>", "24")


@pytest.mark.parametrize(
    ("response", "tokens", "args", "expected"),
    [
        ("so \\boxed{42}", -1, {}, {"accuracy": 1.0}),
        ("so \\boxed{41}", -1, {}, {"accuracy": -1.0}),
        (
            "\\boxed{42}",
            60,
            {"enable_overlong_penalty": True, "cache_length": 40},
            {"accuracy": 1.0, "overlong": 0.0},
        ),
        (
            "\\boxed{42}",
            70,
            {"enable_overlong_penalty": True, "cache_length": 40},
            {"accuracy": 1.0, "overlong": -0.25},
        ),
        (
            "\\boxed{41}",
            100,
            {"enable_overlong_penalty": True, "cache_length": 40, "penalty_factor": 2.0},
            {"accuracy": -1.0, "overlong": -2.0},
        ),
        (
            "\\boxed{42}",
            15,
            {"enable_overlong_penalty": True, "cache_length": 10, "max_response_length": 20},
            {"accuracy": 1.0, "overlong": -0.5},
        ),
    ],
)
def test_math_dapo(response: str, tokens: int, args: dict, expected: dict) -> None:
    assert scored("math_dapo", response, "42", response_tokens=tokens, **args) == expected


def test_gsm8k() -> None:
    truth = "48 / 2 = 24 ...\n#### 1,072"
    assert [scored("gsm8k", said, truth) for said in ("so #### 1072", "#### 72", "1072")] == [
        1.0,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match="does not end in a number"):
        scored("gsm8k", "#### 1", "#### Paris")


def test_the_length_reaches_the_rewards_that_ask_for_it() -> None:
    async def body() -> list[Any]:
        async with RewardPool(1, 60.0) as pool:
            long = task("math_dapo", "42", enable_overlong_penalty=True, cache_length=40)
            return await pool.score(
                [(long, "42", 80), (long, "42"), (task("exact_match", "42"), "42", 80)]
            )

    first, unknown, plain = asyncio.run(body())
    assert (first.reward, first.metrics) == (0.5, {"accuracy": 1.0, "overlong": -0.5})
    assert unknown.outcome == "error" and "number of the response's tokens" in unknown.message
    assert plain.reward == 1.0


# Code


PROGRAM = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
FUNCTION = "```python\ndef add(a, b):\n    print('noise')\n    return a + b\n```"
PAIRS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]})
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"])


@isolated
@pytest.mark.parametrize(
    ("response", "tests", "expected"),
    [
        (PROGRAM, PAIRS, 1.0),
        (PROGRAM.replace("+", "-"), PAIRS, 0.0),
        ("print(3)", PAIRS, 0.5),
        (FUNCTION, CALLS, 1.0),
        ("class Solution:\n    def add(self, a, b): return a + b", CALLS, 1.0),
        (FUNCTION, ASSERTS, 1.0),
        ("def add(a, b): return 3", ASSERTS, 0.5),
        ("import sys; sys.exit(0)", ASSERTS, 0.0),  # ends before the tests
        ("import os\nos._exit(0)", ASSERTS, 0.0),
        ("def add(a, b):\n    while True: pass", ASSERTS, 0.0),
        ("def add(", ASSERTS, 0.0),
    ],
)
def test_code_is_what_its_tests_say(response: str, tests: str, expected: float) -> None:
    assert scored("code_tests", response, tests, partial=True, per_test=1.0) == expected


EQUAL = "class A:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
ROOT = json.dumps(["assert abs(root(2) - 1.41421) < 1e-4"])
CHECK = json.dumps(
    ["def check(candidate):\n    assert candidate(1, 2) == 3, 'one and two are 3'\ncheck(add)"]
)
MANY = json.dumps(["assert all(add(a, b) == c for a, b, c in [(1, 2, 3), (3, 4, 7)])"])
CHEATS = {
    "prints what it finds on its stdin": ("print(input())\nexit()", ASSERTS),
    "prints all that it can read, and ends": (
        "import os\nfor name in ('cmdline', 'environ', 'fd/0', 'fd/63'):\n    "
        "print(open('/proc/self/' + name).read())\n"
        "import sys; sys.stdout.flush()\nos._exit(0)",
        ASSERTS,
    ),
    "does so at its exit": (
        (
            "import atexit\natexit.register(lambda: print(open('/proc/self/fd/0').read(), "
            "open('/proc/self/fd/63').read()))\nexit()"
        ),
        ASSERTS,
    ),
    "returns an object that equals everything": (EQUAL + "def add(a, b): return A()", ASSERTS),
    "returns a number that equals everything": (
        EQUAL.replace("A:", "A(int):") + "def add(a, b): return A()",
        ASSERTS,
    ),
    "returns a list of such": (
        EQUAL + "def add(a, b): return [A()]",
        json.dumps(["assert add(1, 2) == [3]"]),
    ),
    "returns what the standard library has for that": (
        "from unittest.mock import ANY\ndef add(a, b): return ANY",
        ASSERTS,
    ),
    "gives such an object to a function of the test": (EQUAL + "def add(a, b): return A()", CHECK),
    "gives it to a comparison inside of all()": (EQUAL + "def add(a, b): return A()", MANY),
    "reads the answer in its own text": (
        "import ast\ndef add(*given):\n    for node in "
        "ast.walk(ast.parse(open('/proc/self/fd/63').read())):\n"
        "        if isinstance(node, ast.Compare) and ast.unparse(node.left) == f'add{given}':\n"
        "            return ast.literal_eval(node.comparators[0])",
        ASSERTS,
    ),
    "reads the answer among its caller's constants": (
        "import sys\ndef add(a, b):\n    found = sys._getframe(1).f_code.co_consts\n"
        "    return [one for one in found if one not in (a, b, None)][0]",
        CHECK,
    ),
    "begins again without asserts": (
        "import os, sys\nif __debug__: os.execv(sys.executable, [sys.executable, '-O', "
        "'/proc/self/fd/63'])\n"
        "def add(a, b): return 0",
        ASSERTS,
    ),
    "swallows what its caller raises": (
        (
            "import sys\nsys.excepthook = lambda *_: (print(input()), sys.stdout.flush(), "
            "__import__('os')._exit(0))"
        ),
        ASSERTS,
    ),
    "has another abs": ("def root(x): return 0\ndef abs(x): return 0", ROOT),
    "changes the built-in abs": (
        "import builtins\nbuiltins.abs = lambda x: 0\ndef root(x): return 0",
        ROOT,
    ),
    "returns what becomes nothing when something is taken from it": (
        "class A:\n    def __sub__(self, other): return 0\ndef root(x): return A()",
        ROOT,
    ),
    "forges a report from a thread": (
        "import re, os, threading\nword = re.findall('[0-9a-f]{16}', "
        "open('/proc/self/fd/63').read())[-1]\n"
        "thread = threading.Thread(target=lambda: (os.write(1, f'\\n{word}[[0, 0, "
        "true]]'.encode()), os._exit(0)))\n"
        "thread.start(); thread.join()",
        ASSERTS,
    ),
    "forges an empty report": (
        (
            "import re\nprint('\\n' + re.findall('[0-9a-f]{16}', "
            "open('/proc/self/fd/63').read())[-1] "
            "+ '[]')\nexit()"
        ),
        CHECK,
    ),
    "makes the report say nothing": (
        "import json\njson.dumps = lambda *_: '[]'\ndef add(a, b): return 0",
        ASSERTS,
    ),
}


@isolated
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_earns_nothing_that(cheat: str) -> None:
    program, tests = CHEATS[cheat]
    assert scored("code_tests", program, tests, partial=True) == 0.0


HONEST = [
    (
        "def f(x): return x",
        [
            "assert f(3) == 3",
            "assert 3 == f(3), 'no'",
            "assert f(3) != 4",
            "assert not f(0)",
            "assert f(None) is None",
            "assert f(2**70) == 2**70",
            "assert f((1, [2.5, {'a': {3}}], b'x', 1j)) == (1, [2.5, {'a': {3}}], b'x', 1j)",
            "assert f(float('inf')) == float('inf')",
            "assert set(f([1, 1])) == set([1])",
            "assert f({1: None}) == dict([(1, None)])",
            "assert 0 < f(3) <= 3",
            "assert 2 in f([1, 2])",
        ],
    ),
    (
        "def f(x): return x",
        [
            "assert f(None) is None or f(None)[0] == 1",
            "assert (f(3) == 3) is True",
            "assert abs(f(3) - 3.001) < 0.1 and f(1) == 1",
            "assert round(f(2.345), 1) == 2.3",
            "import math\nassert math.isclose(f(3.1), math.sqrt(9.61))",
            "assert len(f('abc')) == 3",
            "x = [3]\ny = f(x)\nx.append(4)\nassert y == x and y is x",
            "for a in range(3):\n    assert f(a) == a",
            "try:\n    f()\n    assert False\nexcept TypeError:\n    pass",
            "assert all(f(x) == x for x in range(3))",
            "f(1)",
            "def unused():\n    assert f(1) == 2",
            "from pytest import approx\nassert f(0.1) + f(0.2) == approx(0.3)",
        ],
    ),
    (
        "import numpy as np\ndef f(x): return np.float64(x)",
        [
            "assert f(3) == 3.0",
            "assert (np.array([f(3)]) == np.array([3])).all()",
        ],
    ),
    (
        "from fractions import Fraction\nfrom decimal import Decimal\ndef f(x): return Fraction(x)",
        [
            "assert f(2) == 2",
            "assert f('1/2') == Fraction(1, 2)",
            "assert f('1/2') == 0.5",
            "assert Decimal('0.5') == 0.5",
        ],
    ),
    (
        "from enum import IntEnum\nfrom collections import Counter, deque, namedtuple\n"
        "class Colour(IntEnum):\n    RED = 1\nP = namedtuple('P', 'x')",
        [
            "assert Colour.RED == 1",
            "assert P(3) == (3,)",
            "assert Counter('aab') == {'a': 2, 'b': 1}",
            "assert deque([1]) == deque([1])",
            "assert {'a': 1}.keys() == {'a'}",
        ],
    ),
    (
        "class Point:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return "
        "self.x == other.x\n"
        "    def __add__(self, other): return Point(self.x + other.x)\n    async def later(self): "
        "return self.x",
        [
            "assert Point(1) + Point(2) == Point(3)",
            "assert Point(1) != Point(2)",
            "assert Point(3)",
            "assert isinstance(Point(1), Point)",
            (
                "import asyncio\nasync def main():\n    assert await Point(4).later() == "
                "4\nasyncio.run(main())"
            ),
        ],
    ),
    ("def sum(x): return 'mine'", ["assert sum([1, 2]) == 'mine'"]),
    (
        "print('no end of line', end='')\ndef f(n): return list(range(n))",
        ["assert f(40000) == list(range(40000))"],
    ),
]


@isolated
@pytest.mark.parametrize(("program", "statements"), HONEST)
def test_an_honest_program_passes_whatever_its_tests_look_like(
    program: str, statements: list[str]
) -> None:
    failed = [
        one
        for one in statements
        if scored("code_tests", program, json.dumps([one]), per_test=20.0, seconds=60.0) != 1
    ]
    assert not failed


@isolated
@pytest.mark.parametrize(
    "statement",
    [
        "assert f(3) == 4",
        "assert f(3) != 3",
        "assert not f(3)",
        "assert f((1, 2)) == [1, 2]",
        "assert f('1') == 1",
        "assert f(0)",
        "assert f(None) is None and f(3) == 4",
        "for a in range(3):\n    assert f(a) == 2",
        "assert f(3) == g(3)",
        "assert f(1) < f(1)",
        "try:\n    f(-1)\n    assert False\nexcept TypeError:\n    pass",
        "assert all(f(x) == 1 for x in range(3))",
        "f()",
        "def check(g):\n    assert g(1) == 2\ncheck(f)",
        "assert abs(f(3) - 3.2) < 0.1",
        "assert f([1]) == {1}",
        "assert 9**9**9 == f(1)",
    ],
)
def test_a_wrong_program_fails_whatever_its_tests_look_like(statement: str) -> None:
    assert (
        scored("code_tests", "def f(x): return x\ndef g(x): return x + 1", json.dumps([statement]))
        == 0.0
    )


@isolated
def test_a_long_right_answer_is_right() -> None:
    numbers = list(range(30_000))
    words = json.dumps({"inputs": [""], "outputs": ["\n".join(map(str, numbers))]})
    assert scored("code_tests", "for n in range(30_000): print(n)", words) == 1.0
    calls = json.dumps({"fn_name": "f", "inputs": [[30_000]], "outputs": [numbers]})
    assert scored("code_tests", "def f(n): return list(range(n))", calls) == 1.0


@isolated
def test_a_report_that_is_no_json_is_a_failed_test_and_no_error() -> None:
    program = "import json\nword, _ = json.loads(input())\nprint('\\n' + word + '{')\nexit()"
    assert scored("code_tests", program, CALLS) == 0.0


@isolated
def test_code_that_hangs_is_wrong_in_time_and_no_outcome_of_its_own() -> None:
    many = json.dumps({"inputs": ["1\n"] * 10, "outputs": ["1"] * 10})
    began = time.monotonic()
    assert (
        scored("code_tests", "while True: pass", many, partial=True, seconds=1.5, per_test=1.0)
        == 0.0
    )
    assert time.monotonic() - began < 30

    async def body() -> Any:
        async with RewardPool(1, 30.0) as pool:
            wrong = task("code_tests", many, seconds=1.0)
            return await pool.score(
                [
                    (wrong, "while True: pass"),
                    (wrong, "import os\nwhile True: os.fork()"),
                    (wrong, "print(1)"),
                ]
            )

    results = asyncio.run(body())
    assert [(r.outcome, r.reward) for r in results[:2]] == [("ok", 0.0)] * 2


@pytest.mark.parametrize(
    "tests",
    [
        "{}",
        '["assert f(1) ="]',
        '{"inputs": ["1"], "outputs": []}',
        "[1]",
        '{"fn_name": "a b", "inputs": [[1]], "outputs": [1]}',
    ],
)
def test_tests_that_cannot_be_read_are_an_error(tests: str) -> None:
    with pytest.raises(ValueError, match="task t/0/0"):
        scored("code_tests", "1", tests)


# A judge behind HTTP


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers by script: a status and a body each; the last one again and again."""

    script: list[tuple[int, str]] = []
    seen: list[tuple[str, dict[str, Any]]] = []
    release = threading.Event()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.headers.get("Authorization", ""), asked))
        status, body = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if status == 0:
            self.release.wait(30)
            return
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None: ...


def says(text: str) -> tuple[int, str]:
    return 200, json.dumps({"choices": [{"message": {"content": text}}]})


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Judge.seen, Judge.release = [], threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-judge")
    yield f"http://127.0.0.1:{server.server_port}/v1"
    Judge.release.set()
    server.shutdown()
    server.server_close()


def asked(judge: str, *script: tuple[int, str], **args: Any) -> Any:
    Judge.script = list(script)
    given = {"url": judge, "model": "m", "key_variable": "JUDGE_KEY", "seconds": 20.0, **args}
    return scored("remote_judge", "4{2}", "42", **given)


def test_a_remote_judge_scores_and_the_key_goes_to_it_alone(judge: str) -> None:
    assert asked(judge, says('good {"score": 0.75}')) == 0.75
    key, body = Judge.seen[0]
    assert (
        key == "Bearer sk-of-the-judge"
        and body["model"] == "m"
        and '"4{2}"' in body["messages"][0]["content"]
    )


def test_a_remote_judge_is_asked_again_for_what_may_pass(judge: str) -> None:
    assert asked(judge, (503, ""), (429, ""), says('{"score": 1}')) == 1.0
    assert len(Judge.seen) == 3


@pytest.mark.parametrize(
    ("script", "args", "message", "times"),
    [
        ([(500, "")], {"retries": 1}, "no answer in 20 s: 500", 2),
        ([(401, "")], {}, "refuses to answer: 401", 1),
        ([(302, "")], {}, "refuses to answer: 302", 1),
        ([(200, "{}")], {}, "no chat completion", 1),
        ([(200, "<html>")], {}, "no chat completion", 1),
        ([says("fine")], {}, "no JSON object with `score`", 1),
        ([says('{"score": 7}')], {}, "no number from 0 to 1", 1),
        ([(0, "")], {"seconds": 0.3}, "no answer in 0.3 s", 1),
    ],
)
def test_a_judge_that_fails_is_an_error_and_no_reward(
    judge: str, script: Any, args: dict, message: str, times: int
) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message) as raised:
        asked(judge, *script, **args)
    assert len(Judge.seen) == times and "sk-of" not in str(raised.value)


def test_a_judge_that_is_not_there_is_an_error(judge: str) -> None:
    with pytest.raises(RuntimeError, match="no answer in 0.2 s"):
        asked("http://127.0.0.1:1/v1", says(""), seconds=0.2)
