"""Code against tests: a program in a response and the tests of its task in, the share that passes
out.

The reference answer is JSON (or the row's column `tests` is the object itself), one of

    {"inputs": [...], "outputs": [...]}                       whole programs: stdin, and what they
                                                              must print
    {"fn_name": "f", "inputs": [[...], ...], "outputs": [...]}
            calls of a function, and what it must return
    ["assert f(1) == 2", ...]                                 statements behind the program

Every test is a program of its own in a cell (`rft.rollout.sandbox`). Invariants: what the program
does wrong, a hang included, is a failed test; only a machine that cannot make a cell, or tests that
cannot be read, are errors. What a program should print or return is never in its cell, and is
compared here, as plain data; in statements, what they compare with constants (see `asserts`).
"""

import asyncio
import json
import re
import secrets
import time
from typing import Any

import msgspec

from rft.ground.experience import Task
from rft.rollout.rewards.asserts import Asserts, UnreadableTest
from rft.rollout.rewards.text import needed
from rft.rollout.sandbox import Limits, run

FENCED = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
REPORTED = 2**22  # bytes of output with the values that assert statements ask for
RETURNED = """
import json as _json, sys as _sys
_word, _given = _json.loads(_sys.stdin.readline())
_function = {name} if "{name}" in globals() else Solution().{name}
print("\\n" + _word + _json.dumps(_function(*_given)), flush=True)
"""


def code_tests(
    response: str,
    truth: str | None,
    task: Task,
    partial: bool = False,
    seconds: float = 8.0,
    per_test: float = 3.0,
    max_tests: int = 20,
    memory_mb: int = 1024,
    isolate: bool = True,
) -> float:
    """1 when every test passes (`partial`: the share that does). `seconds` for all of them
    together; those that do not get to run have failed. Keep it below explorer.reward_timeout.
    """
    tests = read_tests(task.raw["tests"] if task.raw.get("tests") else needed(truth, task), task)[
        :max_tests
    ]
    blocks = FENCED.findall(response)
    program = blocks[-1] if blocks else response
    limits = Limits(seconds=per_test, memory_mb=memory_mb, isolate=isolate)
    passed = asyncio.run(_passed(program, tests, limits, seconds, partial))
    return passed / len(tests) if partial else float(passed == len(tests))


def read_tests(given: Any, task: Task) -> list[dict[str, Any]]:
    try:
        told = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        told = [given]  # statements as they stand
    if isinstance(told, list) and told and all(isinstance(one, str) for one in told):
        try:
            return [{"statement": Asserts(one)} for one in told]
        except UnreadableTest as error:
            raise ValueError(f"task {task.id} has a test that is no Python: {error}") from error
    if (
        isinstance(told, dict)
        and told.get("inputs")
        and len(told["inputs"]) == len(told.get("outputs", ()))
    ):
        name = told.get("fn_name")
        if name is not None and not str(name).isidentifier():
            raise ValueError(f"task {task.id}: fn_name={name!r} is no name of a function")
        return [
            {"name": name, "in": i, "out": o}
            for i, o in zip(told["inputs"], told["outputs"], strict=True)
        ]
    raise ValueError(
        f"task {task.id} has no tests that code_tests reads: give inputs and outputs of one "
        "length, or a list of assert statements"
    )


async def _passed(
    program: str, tests: list[dict[str, Any]], limits: Limits, seconds: float, partial: bool
) -> int:
    deadline, passed = time.monotonic() + seconds, 0
    for test in tests:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        allowed = msgspec.structs.replace(limits, seconds=min(limits.seconds, left))
        if await _passes(program, test, allowed):
            passed += 1
        elif not partial:
            break
    return passed


async def _passes(program: str, test: dict[str, Any], limits: Limits) -> bool:
    word = secrets.token_hex(8)
    if "statement" in test:
        limits = msgspec.structs.replace(limits, output=REPORTED)
        ran = await run(test["statement"].behind(program, word), "", limits)
        return ran.well and test["statement"].hold(_behind(word, ran.out))
    # a right answer may be long, and spaced otherwise
    limits = msgspec.structs.replace(
        limits, output=limits.output + 2 * len(json.dumps(test["out"]))
    )
    if test["name"]:
        asked = json.dumps([word, test["in"]])
        ran = await run(program + RETURNED.format(name=test["name"]), f"{asked}\n", limits)
        return ran.well and _same(_behind(word, ran.out), test["out"])
    ran = await run(program, str(test["in"]), limits)
    return ran.well and _words(ran.out) == _words(str(test["out"]))


def _behind(word: str, out: str) -> str:
    """What our own code printed behind the program.

    The word only tells it from what the program prints.
    """
    _, found, told = out.rpartition(f"\n{word}")
    return told if found else ""


def _words(text: str) -> list[list[str]]:
    """Lines without the space around them; empty lines at the end do not count."""
    return [line.split() for line in text.rstrip().splitlines()]


def _same(told: str, expected: Any) -> bool:
    """As JSON, where tuples are lists. Some data sets wrap the one output into a list."""
    try:
        found = json.loads(told)
    except (ValueError, RecursionError):
        return False
    return bool(found == expected or [found] == expected)
