"""Programs that misbehave, in real cells: what they reach, what they leave, and how they are said
to have ended.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rft.ground.process import adopt_orphans
from rft.rollout import sandbox
from rft.rollout.sandbox import Limits, Ran, cell

CELLS = "rft-cell-"  # control groups
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
    # half a character, as JSON of a model may have it
    strange = run("print('\ud800')", isolate=isolate)
    assert (strange.ending, strange.code) == ("exit", 1) and "SyntaxError" in strange.err
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
        ("import os\nwhile True: os.fork()", {"seconds": 1.0}),
        (
            (
                "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
                "args=(60,)).start()"
            ),
            {"seconds": 1.0},
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


MEMFD = """
import os
for _ in range(25):
    file = os.memfd_create("m")
    for _ in range(8):
        os.write(file, b"x" * 2**20)
print("200 MB")
"""
SYSTEM_V = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
c.shmat.restype, c.shmdt.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(12):
    segment = c.shmget(0, 16 * 2**20, 0o1600)
    if segment < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    place = c.shmat(segment, None, 0)
    ctypes.memset(place, 1, 16 * 2**20)
    c.shmdt(place)
print("192 MB")
"""


@isolated
@pytest.mark.parametrize("program", [MEMFD, SYSTEM_V], ids=["memfd", "system v"])
def test_memory_that_no_process_has_mapped_counts(program: str) -> None:
    """Under a control group where this machine has one; the test of who is not root has none."""
    ran = run(program, memory_mb=64)
    assert "MB" not in ran.out
    if sandbox.shared_memory().startswith("cgroup"):
        assert ran.ending == "memory", ran
        assert not left_groups(), "none is left"
    else:
        assert "PermissionError" in ran.err, ran


def left_groups() -> list[Path]:
    """Control groups of cells that have ended. Those of other containers, which may be seen here
    and have process numbers of their own, are below other directories.
    """
    parents = {Path(parent) for parent, _, _ in cell.places_of_groups()}
    made = [group for parent in parents for group in parent.glob(f"{CELLS}*")]
    dead = [group for group in made if not psutil.pid_exists(int(group.name.removeprefix(CELLS)))]
    return [group for group in dead if group.exists()]  # it was, when it was listed


@isolated
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1])
def test_a_program_that_turns_on_its_watcher_has_failed(
    number: signal.Signals, isolate: bool
) -> None:
    """The machine is not blamed for it. What the program itself gets are the usual signals."""
    program = f"""
import os, signal
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
try:
    os.kill(os.getppid(), {number:d})
except PermissionError:
    pass
import time; time.sleep(0.2)
print("alive")
"""
    ran = run(program, isolate=isolate)
    if isolate or number != signal.SIGKILL:
        assert (ran.ending, ran.code, ran.out) == ("exit", 0, "alive\n")
    else:
        assert (ran.ending, ran.code) == ("signal", 9) and ran.in_words(Limits())


@isolated
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of that machine's calls")
def test_calls_that_no_program_needs_are_refused() -> None:
    program = """
import ctypes, os
c = ctypes.CDLL(None, use_errno=True)
for name, number in CALLS.items():
    print(name, c.syscall(number, 0, 0, 0, 0), ctypes.get_errno() == 1)
print(c.syscall(39) == os.getpid())
"""
    calls = {"io_uring": 425, "userfaultfd": 323, "keyctl": 250, "bpf": 321, "unshare": 272}
    calls["getpid by its other number"] = 0x40000000 + 39
    ran = run(program.replace("CALLS", repr(calls)))
    assert ran.out.splitlines() == [*(f"{name} -1 True" for name in calls), "True"], ran


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
    assert done.stdout == f"{sys.prefix}\n"
    assert done.stderr.splitlines()[1:] == ['{"ending": "exit", "code": 0}']


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
import ctypes, os
print(os.getuid(), len([name for name in os.listdir("/proc") if name.isdecimal()]))
for path in ("/etc/passwd", "/usr/here", "/here"):
    try:
        open(path, "r" if path == "/etc/passwd" else "w")
        print("opened", path)
    except OSError:
        pass
for make in (lambda: os.memfd_create("m"), lambda: ctypes.CDLL(None).shmget(0, 4096, 0o1600)):
    try:
        print("made" if make() >= 0 else "")
    except PermissionError:
        print()
os.kill(1, 2)  # it watches as this very user
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
    said = sandbox.read_report(done.stderr.encode())
    # no group that this user could make
    assert said == {"begun": "seccomp", "ending": "exit", "code": 0}, done
    assert done.stdout == "65534 2\n\n\n"
