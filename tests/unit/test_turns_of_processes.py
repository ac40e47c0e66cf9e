"""What `rft.ground.device` does so that parts that are mostly
asleep cost those that compute little.
"""

import os
import subprocess
import sys

PROGRAM = """
import os, subprocess, sys, threading
from rft.ground.device import wait_for_turn

said = threading.Event()
early = threading.Thread(target=said.wait)
early.start()
wait_for_turn()
late = threading.Thread(target=said.wait)
late.start()
ask = "import os; print(os.sched_getscheduler(0))"
ask = [sys.executable, "-c", ask]
child = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
threads = threading.main_thread(), early, late
policies = {os.sched_getscheduler(thread.native_id) for thread in threads}
said.set()
priority = os.getpriority(os.PRIO_PROCESS, 0)
print(policies | {int(child)} == {os.SCHED_BATCH}, priority == int(sys.argv[1]))
"""


def test_a_process_waits_with_all_its_threads_and_children_and_keeps_its_share() -> None:
    here = str(os.getpriority(os.PRIO_PROCESS, 0))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, here], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["True", "True"], ended.stdout + ended.stderr


FRONT = """
import os, threading
from rft.ground.device import yield_to_engine, yield_to_others

def behind(thread):
    return os.getpriority(os.PRIO_PROCESS, thread.native_id) - before

def copy():
    yield_to_others()
    copies.set()
    said.wait()

before, said, copies = os.getpriority(os.PRIO_PROCESS, 0), threading.Event(), threading.Event()
early, copier = threading.Thread(target=said.wait), threading.Thread(target=copy)
early.start()
copier.start()
copies.wait()
yield_to_engine()
late = threading.Thread(target=said.wait)
late.start()
print(*map(behind, [threading.main_thread(), early, late, copier]))
said.set()
"""


def test_the_front_of_an_engine_comes_behind_it_with_all_its_threads() -> None:
    ended = subprocess.run([sys.executable, "-c", FRONT], capture_output=True, text=True)
    assert ended.stdout.split() == ["5", "5", "5", "10"], ended.stdout + ended.stderr


STARTER = """
import asyncio, os, sys
from rft.ground.device import wait_for_turn
from rft.ground.experience import Record, Task
from rft.ground.process import Child
from rft.rollout import sandbox
from rft.agents.agent_process import _process

SAY = "import os; print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"
TELL = '''
import os, socket, sys
told = f"{os.sched_getscheduler(0)} {os.getpriority(os.PRIO_PROCESS, 0)}".encode()
told = len(told).to_bytes(4, "little") + told
socket.socket(fileno=int(sys.argv[1])).sendall(told)
'''

async def main():
    wait_for_turn()
    child = Child(command=[sys.executable, "-c", TELL])
    child.start()
    print((await child.receive()).decode())
    await child.end()
    child.kill()
    child.reap()
    code, said = await _process([sys.executable, "-c", SAY], b"", "", "")
    print(said.split(": ")[1])
    if sandbox.obstacle() is None:
        print((await sandbox.run(SAY)).out.strip())
    print(os.sched_getscheduler(0) == os.SCHED_BATCH)

asyncio.run(main())
"""


def test_what_such_a_process_starts_takes_its_turns_as_others_do() -> None:
    ended = subprocess.run([sys.executable, "-c", STARTER], capture_output=True, text=True)
    *children, itself = ended.stdout.splitlines()
    ordinary = f"{os.SCHED_OTHER} {os.getpriority(os.PRIO_PROCESS, 0)}"
    assert len(children) >= 2 and set(children) == {ordinary}, ended.stdout + ended.stderr
    assert itself == "True", "it goes on as it was"


def test_what_is_loaded_is_passed_over_by_the_collector() -> None:
    program = (
        "import gc; from rft.ground.device import freeze_loaded; freeze_loaded(); "
        "print(gc.get_freeze_count() > 10_000)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["True"], ended.stdout + ended.stderr
