"""What `rft.device` does so that parts that are mostly asleep cost those that compute little."""

import os
import subprocess
import sys

PROGRAM = """
import os, subprocess, sys, threading
from rft.device import wait_for_turn

said = threading.Event()
early = threading.Thread(target=said.wait)
early.start()
wait_for_turn()
late = threading.Thread(target=said.wait)
late.start()
ask = "import os; print(os.sched_getscheduler(0))"
child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
policies = {os.sched_getscheduler(thread.native_id) for thread in (threading.main_thread(), early, late)}
said.set()
print(policies | {int(child)} == {os.SCHED_BATCH}, os.getpriority(os.PRIO_PROCESS, 0) == int(sys.argv[1]))
"""


def test_a_process_waits_with_all_its_threads_and_children_and_keeps_its_share() -> None:
    here = str(os.getpriority(os.PRIO_PROCESS, 0))
    ended = subprocess.run([sys.executable, "-c", PROGRAM, here], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True", "True"], ended.stdout + ended.stderr


def test_what_is_loaded_is_passed_over_by_the_collector() -> None:
    program = "import gc; from rft.device import freeze_loaded; freeze_loaded(); print(gc.get_freeze_count() > 10_000)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True"], ended.stdout + ended.stderr
