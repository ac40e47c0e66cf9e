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


def test_what_is_loaded_is_passed_over_by_the_collector() -> None:
    program = (
        "import gc; from rft.ground.device import freeze_loaded; freeze_loaded(); "
        "print(gc.get_freeze_count() > 10_000)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["True"], ended.stdout + ended.stderr
