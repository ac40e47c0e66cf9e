"""Programs that misbehave, in real cells: what they reach, what they leave, and how they are said
to have ended.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rft.ground.process import adopt_orphans
from rft.rollout import sandbox
from rft.rollout.sandbox import Limits, Ran

isolated = pytest.mark.skipif(
    sandbox.obstacle() is not None, reason=f"no cells on this machine: {sandbox.obstacle()}"
)


def run(program: str, stdin: str = "", **limits: object) -> Ran:
    return asyncio.run(sandbox.run(program, stdin, Limits(**{"seconds": 20.0, **limits})))  # type: ignore[arg-type]


def offspring() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("isolate", [pytest.param(True, marks=isolated), False])
def test_a_program_gets_its_stdin_and_says_how_it_ended(isolate: bool) -> None:
    assert run("print(input() * 2)", "ab\n", isolate=isolate) == Ran(ending="exit", out="abab\n")
    failed = run("import sys; print(1); sys.exit(3)", isolate=isolate)
    assert (failed.ending, failed.code, failed.out, failed.well) == ("exit", 3, "1\n", False)
    killed = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", isolate=isolate)
    assert (killed.ending, killed.code) == ("signal", 11)
    long = "x = 1\n" * 100_000 + "print(x)"  # more than fits into an argument
    assert run(long, isolate=isolate).out == "1\n"


@pytest.mark.parametrize("isolate", [pytest.param(True, marks=isolated), False])
@pytest.mark.parametrize(
    ("program", "ending", "limits"),
    [
        ("while True: pass", "timeout", {"seconds": 0.5}),
        ("import time; time.sleep(600)", "timeout", {"seconds": 0.5}),
        ("while True: print('x' * 1000)", "output", {}),
        ("import os, time\nif os.fork() == 0: time.sleep(600)", "exit", {}),  # an orphan
        ("import os\nos.fork()\nwhile True: pass", "timeout", {"seconds": 0.5}),
        # it detaches itself
        ("import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(600)", "exit", {}),
    ],
)
def test_what_does_not_end_is_ended_with_its_children(
    program: str, ending: str, limits: dict, isolate: bool
) -> None:
    """Ended and reaped: this process adopts orphans, as a run
    does, and would keep their zombies.
    """
    adopt_orphans()
    before = offspring()
    ran = run(program, **limits, isolate=isolate)
    assert ran.ending == ending and ran.well == (ending == "exit")
    assert len(ran.out) <= Limits().output
    assert offspring() <= before


@isolated
@pytest.mark.parametrize(
    ("program", "limits"),
    [
        ("import os\nwhile True: os.fork()", {"seconds": 3.0}),
        (
            (
                "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
                "args=(60,)).start()"
            ),
            {"seconds": 3.0},
        ),
    ],
)
def test_a_fork_bomb_stays_in_its_cell(program: str, limits: dict) -> None:
    before = offspring()
    assert not run(program, **limits).well
    assert offspring() <= before


@isolated
def test_memory_is_that_of_all_its_processes() -> None:
    assert "MemoryError" in run("x = bytearray(2 * 10**9)", memory_mb=300).err
    together = "import os\nfor _ in range(3): os.fork()\nx = bytearray(10**8)\nwhile True: pass"
    assert run(together, memory_mb=300).ending == "memory"


@isolated
def test_it_writes_nowhere_but_into_memory_of_its_own(tmp_path: Path) -> None:
    marks = [
        str(tmp_path / "here"),
        "/usr/here",
        "/here",
        str(Path(sys.prefix) / "here"),
        str(Path.cwd() / "here"),
    ]
    program = f"""
for path in {marks!r}:
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        pass
open("own", "w").write("x" * 100)
open("big", "w").write("x" * (64 << 20))
"""
    ran = run(program, files_mb=8)
    assert "wrote" not in ran.out and "OSError" in ran.err, ran
    assert not any(Path(mark).exists() for mark in marks)


@isolated
def test_it_sees_no_secret_no_process_and_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a-secret")
    (tmp_path / "netrc").write_text("sk-a-secret")
    program = f"""
import glob, os, socket
print(os.environ, os.listdir("/"))
others = [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/root/{tmp_path}/netrc")]
for path in [*others, {str(tmp_path / "netrc")!r}]:
    try:
        print(open(path).read())
    except OSError:
        pass
print(len(glob.glob("/proc/[0-9]*")), "processes")
try:
    socket.create_connection(("127.0.0.1", {os.getppid()} % 60000 + 1), 2)
except OSError as error:
    print(error)
"""
    ran = run(program)
    assert ran.well, ran
    assert (
        "secret" not in ran.out and "2 processes" in ran.out and "Network is unreachable" in ran.out
    )


@isolated
def test_a_virtual_environment_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sys.prefix)
    asked = json.loads(
        sandbox.order(
            f"import os; print(os.readlink({str(tmp_path / 'link')!r}))", "", Limits(seconds=20.0)
        )
    )
    asked["readable"].append(str(tmp_path / "link"))
    command = [sys.executable, "-I", "-S", sandbox.CELL, "2"]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env={}, cwd="/"
    )
    assert (done.stdout, done.stderr) == (f"{sys.prefix}\n", '{"ending": "exit", "code": 0}')


@isolated
def test_a_cancelled_run_leaves_nothing() -> None:
    async def scenario() -> None:
        job = asyncio.create_task(sandbox.run("while True: pass", limits=Limits(seconds=600)))
        while len(offspring()) < len(before) + 2:
            await asyncio.sleep(0.01)
        job.cancel()
        await asyncio.wait({job})

    before = offspring()
    asyncio.run(scenario())
    gone = psutil.wait_procs(
        [psutil.Process(pid) for pid in offspring() - before if psutil.pid_exists(pid)], timeout=10
    )
    assert not gone[1]


@isolated
def test_a_cell_dies_with_the_process_that_wanted_it() -> None:
    program = """
import asyncio, os, sys
from rft.rollout import sandbox
async def main():
    job = asyncio.create_task(sandbox.run("while True: pass", limits=sandbox.Limits(seconds=600)))
    while True:
        await asyncio.sleep(0.02)
        print(flush=True)
asyncio.run(main())
"""
    outer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process, deadline = psutil.Process(outer.pid), time.monotonic() + 60
    while len(family := process.children(recursive=True)) < 3 and time.monotonic() < deadline:
        assert outer.stdout is not None and outer.stdout.readline()
    assert len(family) == 3
    outer.kill()
    outer.wait()
    alive = psutil.wait_procs(family, timeout=30)[1]
    for left in alive:
        left.kill()
    assert not alive


@isolated
@pytest.mark.skipif(
    os.getuid() != 0 or not Path("/usr/bin/python3").exists(),
    reason="the other tests are of who is not root",
)
def test_who_is_not_root_has_cells_too() -> None:
    """Under /usr/bin/python3, which everybody may read."""
    program = """
import os
print(os.getuid(), len([name for name in os.listdir("/proc") if name.isdecimal()]))
for path in ("/etc/passwd", "/usr/here", "/here"):
    try:
        open(path, "r" if path == "/etc/passwd" else "w")
        print("opened", path)
    except OSError:
        pass
open("own", "w").write("x")
"""
    asked = json.loads(sandbox.order(program, "", Limits(seconds=20.0)))
    asked |= {"python": "/usr/bin/python3", "readable": ["/bin", "/lib", "/lib64", "/usr"]}
    command = ["/usr/bin/python3", "-I", "-S", "-c", Path(sandbox.CELL).read_text(), "2"]
    done = subprocess.run(
        command,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={},
        cwd="/",
        user=1234,
        group=1234,
        extra_groups=[],
    )
    assert json.loads(done.stderr) == {"ending": "exit", "code": 0}, done
    assert done.stdout == "65534 2\n"
