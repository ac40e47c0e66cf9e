"""What docs/coverage.md says of a row is tried: its function is made useless, and its test fails.

    python -m tests.verify.mutants [ROW ...] [--number 40] [--seed N]     (no ROW: by the seed)
    python -m tests.verify.mutants --all

In: tests/coverage/made_by.tsv: row, module:qualname, what it gives instead of its result, test; a
row may have several lines, of which each must die.
Out: of every line `dies` or `LIVES`, and the exit code. Each is a process of its own, forked from
one that has imported what is heavy and nothing of rft; nothing is written into the tree
(`planted/sitecustomize.py`). Invariant: a mutant counts as dead only where the same test passes
without it.
"""

import argparse
import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "coverage" / "made_by.tsv"
PLANTED = Path(__file__).with_name("planted")
HEAVY = ("numpy", "torch", "hydra", "omegaconf", "pydantic", "msgspec", "transformers", "yaml")
PASSED, FAILED = 0, 1  # exit codes of pytest
SUBREAPER = 36  # of prctl
HANGS_S = 60  # a test that waits for what a mutant never gives fails
OUTCOMES = {PASSED: "LIVES", FAILED: "dies", -signal.SIGKILL: "dies"}


class Maker(NamedTuple):
    row: str
    function: str
    instead: str
    test: str


def makers() -> list[Maker]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [Maker(*line.split("\t")) for line in lines]


def drawn(number: int, seed: int) -> list[Maker]:
    """So many of them, tests of a file side by side."""
    known = makers()
    chosen = random.Random(seed).sample(known, min(number, len(known)))
    return sorted(chosen, key=lambda one: (one.test, one.row))


def outcome(tests: list[str], spec: str, log: Path, limit_s: float = 0.0) -> int:
    """The exit code of pytest over these tests, in a child where `spec` is planted (or nothing),
    and which is killed after `limit_s` (0: never): a test may have a longer timeout of its own.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        with log.open("a", encoding="utf-8") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        print(f"=== {spec or 'as it is'}: {' '.join(tests)}", flush=True)
        code = 3
        try:
            code = planted_run(tests, spec)
        finally:
            sys.stdout.flush()
            os._exit(code)
    limit = threading.Timer(limit_s, os.kill, (child, signal.SIGKILL)) if limit_s else None
    if limit:
        limit.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if limit:
        limit.cancel()
    end_what_is_left()
    return code


def end_what_is_left() -> None:
    """Processes of a test that a mutant, or its limit, kept from ending them."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left)


def planted_run(tests: list[str], spec: str) -> int:
    import pytest

    os.environ["PYTHONPATH"] = os.pathsep.join([str(PLANTED), str(ROOT)])
    os.environ["RFT_PLANTED"] = spec
    sys.path.insert(0, str(PLANTED))
    sys.modules.pop("sitecustomize", None)  # another one, of the interpreter
    import sitecustomize  # noqa: F401

    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "verify or not verify", "--tb=line"]
    options += ["--timeout", str(HANGS_S)] if spec else []
    return int(pytest.main([*options, *(str(ROOT / test) for test in tests)]))


def tried(chosen: list[Maker], log: Path) -> dict[Maker, str]:
    """What became of every line. All tests are run once without any mutant."""
    for name in HEAVY:
        __import__(name)
    ctypes.CDLL(None).prctl(SUBREAPER, 1)  # what a test leaves behind becomes a child of this one
    tests = list(dict.fromkeys(one.test for one in chosen))
    passing, begun = set(tests), time.monotonic()
    if outcome(tests, "", log) != PASSED:
        passing = {test for test in tests if outcome([test], "", log) == PASSED}
    limit_s = 2 * HANGS_S + time.monotonic() - begun  # longer than any that passes
    found = {}
    for one in chosen:
        begun = time.monotonic()
        if one.test not in passing:
            found[one] = "FAILS by itself"
        else:
            before = log.stat().st_size
            code = outcome([one.test], f"{one.function}={one.instead}", log, limit_s)
            found[one] = OUTCOMES.get(code, f"NOT RUN, code {code}")
            if b"NameError" in log.read_bytes()[before:]:
                found[one] = "IS MISSPELT"  # and would fail any test
        spent = time.monotonic() - begun
        print(f"{one.row:<5} {found[one]:<16} {spent:6.1f} s  {one.function} -> {one.instead}")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--log", type=Path, default=ROOT / ".verify" / "mutants.log")
    given = parser.parse_args(argv)
    seed = random.randrange(10**6) if given.seed is None else given.seed
    if given.all or given.rows:
        chosen = [one for one in makers() if given.all or one.row in given.rows]
        chosen.sort(key=lambda one: (one.test, one.row))
    else:
        print(f"seed {seed}: --seed {seed} draws the same rows")
        chosen = drawn(given.number, seed)
    given.log.parent.mkdir(exist_ok=True)
    given.log.unlink(missing_ok=True)
    found = tried(chosen, given.log)
    wrong = [one for one, state in found.items() if state != "dies"]
    print(f"{len(found) - len(wrong)} of {len(found)} die; {given.log} has what their tests said")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
