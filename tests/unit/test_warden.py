"""What is left when a supervisor is killed with -9: nothing of its own, but who finishes a save."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from test_process import KINDS, PATIENCE_S, lives

from rft.run.warden import LOOK_S, look

# a supervisor that has a detached deaf process, one that hides its mark as Ray's do, an agent that
# holds its lock with a child, and one that is not its own
SUPERVISOR = """
import os, signal, subprocess, sys
from pathlib import Path
from rft.run.warden import MARK, Warden
detached, agent, log_dir = sys.argv[1:]
def start(program, *words, **environment):
    made = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE,
                            env=os.environ | environment)
    return made.stdout.readline().decode().split()
warden = Warden(Path(log_dir), Path(log_dir) / "control")
hidden = start(detached, **{MARK: "written over"})
warden.tell()
mine = start(detached)
foreign = start(detached, **{MARK: "of another supervisor"})
print(warden.process.pid, *foreign, *hidden, *mine, *start(agent, log_dir, detached), flush=True)
signal.pause()
"""
AGENT = """
import os, signal, subprocess, sys
from pathlib import Path
from rft.checkpoint import fence
held = fence.hold(fence.lock_path(Path(sys.argv[1]) / "control", 1, 0))
child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
print(os.getpid(), child.stdout.readline().decode().strip(), flush=True)
signal.pause()
"""


def test_who_was_started_by_a_killed_supervisor_ends_but_an_agent_that_saves(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", SUPERVISOR, KINDS["detached"], AGENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        told = [psutil.Process(int(pid)) for pid in supervisor.stdout.readline().split()]
        warden, foreign, hidden, mine, agent, child = told
        try:
            supervisor.kill()
            psutil.wait_procs([warden], timeout=PATIENCE_S)
            assert not lives(warden)
            assert [lives(one) for one in (foreign, hidden, mine, agent, child)] == [
                *(True, False, False, True, True)
            ]
        finally:
            for one in filter(lives, told):
                one.kill()


def test_what_starts_before_it_can_be_told_is_found(tmp_path: Path) -> None:
    """Ray's agents, when the supervisor dies while Ray starts."""
    found: set[psutil.Process] = set()
    read, write = os.pipe()
    command = [sys.executable, "-c", KINDS["detached"]]
    with os.fdopen(read) as until, subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        looking = threading.Thread(target=look, args=(os.getpid(), found, until))
        looking.start()
        deadline = time.monotonic() + PATIENCE_S
        while psutil.Process(child.pid) not in found and time.monotonic() < deadline:
            looking.join(LOOK_S)
        os.close(write)
        looking.join()
        child.kill()
    assert child.pid in {one.pid for one in found}
