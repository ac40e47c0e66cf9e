"""Processes and their families, with real ones: deaf, stopped, detached, orphaned, killed."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rft.ground import process
from rft.ground.process import ending

PATIENCE_S = 30.0  # of the tests, for what takes no time
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WAITS = "print(os.getpid(), flush=True); signal.pause()"
KINDS = {
    "deaf": f"import os, signal; {DEAF}{WAITS}",
    "detached": f"import os, signal; os.setsid(); {DEAF}{WAITS}",
    "stopped": "import os; print(os.getpid(), flush=True); os.kill(os.getpid(), 19)",
}
# starts one of each kind, tells who they are, and does what the last argument says
LEADER = """
import subprocess, sys
*kinds, then = sys.argv[1:]
start = lambda kind: subprocess.Popen([sys.executable, "-c", kind], stdout=subprocess.PIPE)
print(*[int(start(kind).stdout.readline()) for kind in kinds], flush=True)
exec(then)
"""


def lead(*kinds: str, then: str = "import signal; signal.pause()", **environment: str) -> list:
    """A leader in a session of its own, and its children of these kinds."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, *[KINDS[kind] for kind in kinds], then],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | environment,
    )
    assert leader.stdout is not None
    with leader.stdout as told:
        return [leader, *[psutil.Process(int(pid)) for pid in told.readline().split()]]


def lives(child: psutil.Process) -> bool:
    """Somebody else's dead child may be there until that one looks."""
    return child.is_running() and child.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def nobody_left() -> Iterator[None]:
    """What a test that fails has started does not outlive it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    for left in set(psutil.Process().children(recursive=True)) - before:
        left.kill()


BODIES = [b"", b"a", b"b" * 200_000, bytes(range(256)), b""]


@pytest.mark.parametrize("size", [1, 7, 2**20])
def test_messages_are_whole_in_whatever_parts_they_come(size: int) -> None:
    data, frames = b"".join(map(process.frame, BODIES)), process.Frames()
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    assert [body for part in parts for body in frames.split(part)] == BODIES
    assert not frames.rest


SENDS = """
import os, socket, sys
from rft.ground.process import frame
with socket.socket(fileno=int(sys.argv[1])) as stream:
    stream.sendall(frame(b"whole") + frame(b"torn")[:int(sys.argv[2])])
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("torn", [0, 2, 5])
def test_a_torn_message_of_a_process_that_was_killed_is_none(torn: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", SENDS, str(theirs.fileno()), str(torn)]
        subprocess.run(command, pass_fds=[theirs.fileno()])
        theirs.close()
        come = process.messages(ours)
        assert next(come) == b"whole"
        if torn:
            with pytest.raises(process.BrokenFrame, match="ended inside"):
                next(come)
        assert next(come, None) is None


def test_what_is_no_message_of_ours_is_refused_unread() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b'{"a line": "of something else"}')
        ours.settimeout(PATIENCE_S)
        with pytest.raises(process.BrokenFrame, match="too long"):
            next(process.messages(ours, limit=2**20))


def test_a_silent_stream_is_waited_for_no_longer_than_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(process.frame(b"all but the end")[:-1])
        ours.settimeout(0.01)
        with pytest.raises(TimeoutError):
            next(process.messages(ours))


@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize("by", ["popen", "number"])
def test_a_family_ends_whole(by: str) -> None:
    """Children that do not hear SIGTERM, left the group or are stopped."""
    leader, *children = lead("deaf", "detached", "stopped")
    process.end_family(leader if by == "popen" else leader.pid)
    assert not any(lives(child) for child in children)
    if by == "popen":
        assert leader.returncode == -signal.SIGKILL  # and not lost to another waiter
    else:
        assert leader.poll() is not None


@pytest.mark.usefixtures("nobody_left")
def test_a_group_is_killed_whose_leader_is_gone() -> None:
    leader, child = lead("deaf", then="")
    assert leader.wait(PATIENCE_S) == 0 and lives(child)
    assert process.kill_family(leader.pid) == []
    psutil.wait_procs([child], timeout=PATIENCE_S)
    assert not lives(child)


def test_who_is_no_leader_takes_no_group_along() -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        process.end_family(child)  # of the group of this test
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 1)", f"killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_an_ending_is_told_in_words(does: str, words: str) -> None:
    code = subprocess.run([sys.executable, "-c", f"import os, signal, sys; {does}"]).returncode
    assert ending(code) == words


def test_an_ending_is_told_in_the_words_of_its_sentence() -> None:
    assert ending(-9, killed="was killed by") == "was killed by SIGKILL"
    assert ending(7, exited="exited with code") == "exited with code 7"
    assert ending(None) == "ended, how is not known"


ASKS = "import os, signal; from rft.ground.process import die_with_parent; "
TIED = {
    "who it is": f"{ASKS}assert die_with_parent(os.getppid()); {WAITS}",
    "only that it is": f"{ASKS}die_with_parent(); {WAITS}",
}
PARENT = """
import subprocess, sys
from rft.ground.process import tied
knows, program = sys.argv[1:]
command = [sys.executable, "-c", program]
subprocess.run(tied(command) if knows == "nothing" else command)
"""


@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize("knows", [*TIED, "nothing"])
def test_a_process_dies_with_a_parent_that_is_killed(knows: str) -> None:
    """Also a program that knows nothing of it."""
    command = [sys.executable, "-c", PARENT, knows, TIED.get(knows, KINDS["deaf"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        psutil.wait_procs([child], timeout=PATIENCE_S)
    assert not lives(child)


STARTS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("nobody_left")
def test_what_a_program_has_started_ends_with_the_parent_too() -> None:
    """In a session of its own, by a program that is killed before it could end it."""
    command = [sys.executable, "-c", PARENT, "nothing", STARTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        psutil.wait_procs([grandchild], timeout=PATIENCE_S)
    assert not lives(grandchild)


@pytest.mark.parametrize(
    ("does", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -6)]
)
def test_a_tied_program_ends_as_it_does(does: str, code: int) -> None:
    program = f"import os, sys; sys.stdout.write(sys.stdin.read()); sys.stdout.flush(); {does}"
    done = subprocess.run(
        process.tied([sys.executable, "-c", program]), input=b"said", capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, b"said", b"")


def test_a_program_whose_parent_was_gone_first_is_not_begun() -> None:
    """Its parent is this process, and no longer the one that it was started for."""
    command = process.tied([sys.executable, "-c", "print('begun')"])
    command[command.index(str(os.getpid()))] = "1"
    for words, printed in ((command, b""), (process.tied(command[-3:]), b"begun\n")):
        assert subprocess.run(words, stdout=subprocess.PIPE).stdout == printed


def test_the_end_of_a_process_is_awaited_up_to_a_deadline() -> None:
    """Also of one that is no child of this process."""
    leader, stranger = lead("deaf")
    assert not process.await_end(stranger.pid, 0.01)
    process.kill_family(leader.pid)
    assert process.await_end(stranger.pid, PATIENCE_S)
    assert process.await_end(leader.pid, PATIENCE_S) and leader.wait() == -signal.SIGKILL
    assert process.await_end(leader.pid)


CHILD = f"""
    import os, signal, subprocess, sys
    from rft.ground.process import frame, messages, parents_socket

    stream = parents_socket()
    for body in messages(stream):
        if body == b"end":
            stream.sendall(frame(b"torn")[:-1])
            os._exit(7)
        if body == b"who":
            body = str(os.getpid()).encode()
        if body == b"fork" and not os.fork():
            os.setsid()
            if not os.fork():
                stream.sendall(frame(str(os.getpid()).encode()))
                signal.pause()
            os._exit(0)
        if body == b"start":
            program = {KINDS["detached"]!r}
            grandchild = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            body = grandchild.stdout.readline()
        stream.sendall(frame(body))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "says_it_back.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.syspath_prepend(tmp_path)
    return "says_it_back"


@pytest.mark.usefixtures("nobody_left")
def test_a_child_talks_and_ends_with_all_that_it_started(module: str) -> None:
    async def scenario() -> None:
        child = process.Child(module)
        child.start()
        for body in BODIES:
            await child.send(body)
            assert await child.receive() == body
        await child.send(b"who")
        pid = int(await child.receive())
        await child.send(b"start")
        grandchild = psutil.Process(int(await child.receive()))
        reader = asyncio.create_task(child.receive())
        await asyncio.sleep(0)  # it listens
        child.kill()
        with pytest.raises(EOFError):
            await reader
        child.reap()
        assert not child.alive and not psutil.pid_exists(pid)
        psutil.wait_procs([grandchild], timeout=PATIENCE_S)
        assert not lives(grandchild)

    asyncio.run(scenario())


@pytest.mark.usefixtures("nobody_left")
def test_how_a_child_ended_is_told_and_its_next_life_begins_anew(module: str) -> None:
    async def scenario() -> None:
        child = process.Child(module)
        for _ in range(2):
            child.start()
            assert child.alive
            await child.send(b"a")
            assert await child.receive() == b"a"
            await child.send(b"end")
            with pytest.raises(EOFError):
                await child.receive()
            assert await child.end() == "exited with code 7"
            child.kill()
        child.reap()

    asyncio.run(scenario())


@pytest.mark.usefixtures("nobody_left")
def test_a_reader_wakes_though_somebody_else_holds_the_childs_end(module: str) -> None:
    """A fork of user code that detached itself and has no parent any more is nobody's family."""

    async def scenario() -> None:
        child = process.Child(module)
        child.start()
        await child.send(b"fork")
        told = {await child.receive(), await child.receive()} - {b"fork"}
        orphan = psutil.Process(int(told.pop()))
        try:
            child.kill()
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(EOFError):
                    await child.receive()
            child.reap()
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()

    asyncio.run(scenario())


def test_a_child_dies_with_a_parent_that_is_killed(module: str) -> None:
    program = f"""
import signal, sys
from rft.ground.process import Child
child = Child({module!r})
child.start()
print(child._process.pid, flush=True)
signal.pause()
"""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | path
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        psutil.wait_procs([child], timeout=PATIENCE_S)
    assert not lives(child)


def scripted(program: str) -> str:
    """What a program prints that adopts orphans, which this process had better not."""
    head = "import os, subprocess, sys\nfrom rft.ground import process\n"
    done = subprocess.run(
        [sys.executable, "-c", head + program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip()


def test_who_is_marked_ends_whoever_its_parent_is() -> None:
    program = """
import psutil
from test_process import lead, lives
process.adopt_orphans()
marked, orphan = lead("detached", then="", PART="one")
other, kept = lead("detached", PART="two")
marked.wait()
process.end_marked("PART", "one")
print(lives(orphan), lives(kept), other.poll())
process.end_descendants()
"""
    assert scripted(program) == "False True None"


def test_the_spared_are_left_with_their_children_and_others_killed() -> None:
    program = """
from test_process import lead, lives
process.adopt_orphans()
spared, child = lead("deaf")
killed, other = lead("deaf")
process.end_descendants(0.0, spare=[spared.pid])
print(spared.poll(), lives(child), lives(other))
process.end_family(spared)
"""
    assert scripted(program) == "None True False"


DAEMON = (
    "import os, signal; os.setsid(); signal.signal(15, signal.SIG_IGN); print(os.getpid(), "
    "flush=True); signal.pause()"
)


def test_nobody_is_left_behind() -> None:
    """A process in a session of its own, deaf to SIGTERM, whose parent is gone."""
    code = f"""
import os, subprocess, sys
from rft.ground.process import adopt_orphans, end_descendants
adopt_orphans()
read, write = os.pipe()
middle = "import subprocess, sys; " \
    "subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=int(sys.argv[2]), pass_fds=[])"
subprocess.run([sys.executable, "-c", middle, {DAEMON!r}, str(write)], pass_fds=[write], check=True)
print(os.read(read, 100).decode().strip(), flush=True)
end_descendants()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not psutil.pid_exists(int(done.stdout))


def test_nobody_is_left_behind_whose_parent_ends_during_the_look() -> None:
    """All that was found has ended by itself, and somebody is left who was not found."""
    program = f"""
import psutil
from test_process import lives
process.adopt_orphans()
middle = "import subprocess, sys; sys.stdin.read(); " \\
    "subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
parent = subprocess.Popen([sys.executable, "-c", middle, {DAEMON!r}], **pipes)
wait_procs = psutil.wait_procs
def ends_meanwhile(found, timeout):
    psutil.wait_procs = wait_procs
    parent.stdin.close()
    left.append(psutil.Process(int(parent.stdout.readline())))
    parent.wait()
    return wait_procs(found, timeout)
left, psutil.wait_procs = [], ends_meanwhile
process.end_descendants()
print(lives(left[0]))
process.kill_these(left)
"""
    assert scripted(program) == "False"


@pytest.mark.parametrize(("says", "code"), [("end.code = 3", 3), ("raise KeyError('x')", 1)])
def test_a_short_exit_leaves_nothing_out_but_pythons_own_end(says: str, code: int) -> None:
    program = f"""
import atexit, logging, threading
from rft.ground.process import ShortExit
end = ShortExit()
class Module:
    def __del__(self): print("taken apart")
kept = Module()
atexit.register(print, "the last that registers is the first, and nothing is lost", end="")
last = lambda: threading.Event().wait(0.05) or print("threads are waited for")
threading.Thread(target=last).start()
{says}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    lines = ["threads are waited for", "the last that registers is the first, and nothing is lost"]
    assert (done.returncode, done.stdout.splitlines()) == (code, lines)
    assert ("KeyError" in done.stderr) == says.startswith("raise")


def test_the_kernel_knows_a_named_thread_by_its_name() -> None:
    told: list[str] = []

    def look() -> None:
        told.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    thread = process.NamedThread(target=look, name="checkpoint-reports")
    thread.start()
    thread.join()
    assert told == ["checkpoint-repo"]
