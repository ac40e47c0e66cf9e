"""Foreign programs in a cell of their own: Python text in, what it printed and how it ended out.

    run(program) ──► cell.py: namespaces, limits ──► process 1 of the cell (ours: watches)
            ──► the program
                     deadline, size of the output, counted here as well

The program sees no variable, file, process or network of this machine but Python and its packages,
which it may only read; it may write below its own directory in memory. Invariant: when `run`
returns, or is cancelled, or this process is killed, no process of the cell is left: they all end
with process 1 of theirs, and that one ends with its parent. A cell that ended without a word after
its program had begun was ended by the program: that is no failure of this machine.
"""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Literal

from rft.ground.device import turns_not_inherited
from rft.ground.experience import Record

CELL = str(Path(__file__).with_name("cell.py"))
TRIAL_S = 30.0  # for the first cell of a process, which tells what this machine can
LATE_S = 5.0  # for the cell to report a program that it ended
EMPTY = {"PATH": "/usr/bin:/bin"}  # nothing of this process's environment goes into the cell's


class Limits(Record, frozen=True, forbid_unknown_fields=True):
    """What one program may use.

    `isolate=False`: these limits alone, with the files and the network of this user.
    """

    seconds: float = 5.0
    memory_mb: int = 1024  # of all its processes together
    processes: int = 16
    files_mb: int = 16  # all that it writes
    output: int = 65536  # bytes of stdout, and of stderr, that are kept; more ends the program
    isolate: bool = True


USUAL = Limits()


class CellError(RuntimeError):
    """This machine could not make a cell: no word on the program."""


class Ran(Record):
    """How a program ended. `code` is its exit status, where it ended by itself."""

    ending: Literal["exit", "signal", "timeout", "memory", "output", "failed"]
    code: int = 0
    out: str = ""
    err: str = ""

    @property
    def well(self) -> bool:
        return self.ending == "exit" and self.code == 0

    def in_words(self, limits: Limits) -> str:
        """Why it did not end well."""
        return {
            "exit": f"exit code {self.code}",
            "signal": f"killed by signal {self.code}",
            "timeout": f"ran longer than {limits.seconds:g} s",
            "memory": f"used more than {limits.memory_mb} MB of memory",
            "output": f"printed more than {limits.output} bytes",
            "failed": f"could not be started: {self.err.strip()[-300:]}",
        }[self.ending]


async def run(program: str, stdin: str = "", limits: Limits = USUAL) -> Ran:
    """Run Python text. Raises CellError where the cell itself cannot be made."""
    read, write = os.pipe()
    try:
        with turns_not_inherited():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                CELL,
                str(write),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=EMPTY,
                pass_fds=[write],
                cwd="/",
            )
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    with open(read, "rb") as told:
        try:
            return await _ended(process, told, order(program, stdin, limits), limits)
        finally:
            await asyncio.shield(_end(process))


def order(program: str, stdin: str, limits: Limits) -> bytes:
    asked = {
        "program": program,
        "stdin": stdin,
        "python": sys.executable,
        "readable": list(readable()),
    }
    fields = {name: getattr(limits, name) for name in Limits.__struct_fields__}
    return json.dumps(asked | fields).encode()


@functools.cache
def readable() -> tuple[str, ...]:
    """Directories that a Python program needs."""
    wanted = [
        sys.prefix,
        sys.base_prefix,
        *filter(None, map(sysconfig.get_path, ("stdlib", "purelib"))),
    ]
    found = {
        "/usr",
        "/lib",
        "/lib64",
        "/bin",
        *(os.path.realpath(path) for path in wanted),
        sys.prefix,
    }
    kept = [path for path in sorted(found) if os.path.isdir(path)]
    return tuple(p for p in kept if not any(p.startswith(f"{other}/") for other in kept))


async def _ended(process: Any, told: Any, asked: bytes, limits: Limits) -> Ran:
    outputs = [
        asyncio.ensure_future(_kept(process, stream, limits.output))
        for stream in (process.stdout, process.stderr)
    ]
    late = False
    try:
        async with asyncio.timeout(limits.seconds + LATE_S):
            await _give(process.stdin, asked)
            await process.wait()
    except TimeoutError:
        late = True
        await _end(process)
    try:  # a killed cell, where nothing is isolated, may have left one who keeps them open
        (out, more), (err, still_more) = await asyncio.wait_for(asyncio.gather(*outputs), LATE_S)
    except TimeoutError:
        return Ran(ending="timeout")
    report = read_report(told.read())
    if more or still_more:
        report = {"ending": "output"}
    elif late:
        report = {"ending": "timeout"}
    if "begun" in report:  # whatever ended the cell then, the program did it
        report = {"ending": "signal", "code": signal.SIGKILL} | report
    found = Ran(out=out, err=err, ending=report.get("ending", "failed"), code=report.get("code", 0))
    if found.ending == "failed":
        raise CellError(
            f"no cell for a program could be made: {err.strip()[-300:] or 'its process was killed'}"
        )
    return found


def read_report(told: bytes) -> dict[str, Any]:
    """Its lines together; the last may not be whole."""
    found: dict[str, Any] = {}
    for line in told.splitlines():
        with contextlib.suppress(ValueError):
            found |= json.loads(line)
    return found


async def _end(process: Any) -> None:
    """The cell reaps its own processes; killed, it would leave them to whoever adopts orphans."""
    for end in (process.terminate, process.kill):
        if process.returncode is None:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                end()
                await asyncio.wait_for(process.wait(), LATE_S)


async def _give(stream: Any, asked: bytes) -> None:
    try:
        stream.write(asked)
        await stream.drain()
        stream.close()
    except ConnectionError:  # it ended first, and says why on stderr
        return


async def _kept(process: Any, stream: Any, limit: int) -> tuple[str, bool]:
    """The first `limit` bytes, and whether there were more: then the program is ended."""
    data, more = b"", False
    while part := await stream.read(65536):
        data += part[: limit + 1 - len(data)]
        if len(data) > limit and not more:
            more = True
            with contextlib.suppress(ProcessLookupError):  # it has ended
                process.terminate()
    return data[:limit].decode(errors="replace"), more


def obstacle() -> str | None:
    """Why this machine cannot isolate a program; None where it can. Tries it."""
    return _tried()[0]


def shared_memory() -> str:
    """How memory is counted that a program shares and has not mapped: by a control group; or
    "seccomp", which refuses it; or "not counted".
    """
    return _tried()[1]


@functools.cache
def _tried() -> tuple[str | None, str]:
    with tempfile.TemporaryFile() as report:
        done = subprocess.run(
            [sys.executable, "-I", "-S", CELL, str(report.fileno())],
            input=order("", "", Limits(seconds=TRIAL_S)),
            capture_output=True,
            env=EMPTY,
            pass_fds=[report.fileno()],
            cwd="/",
            check=False,
            timeout=2 * TRIAL_S,
        )
        report.seek(0)
        found = read_report(report.read())
    counted = str(found.get("begun", "not counted"))
    if found.get("ending") == "exit":
        return None, counted
    said = done.stderr.decode(errors="replace").strip()[-200:]
    return said or f"exit code {done.returncode}", counted
