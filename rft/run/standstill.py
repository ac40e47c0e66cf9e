"""Parts of a run that live and do nothing: stopped (SIGSTOP, a job control that forgot
them). Their end is what every part is made for; their silence may be noticed by nobody.

    Standstill ──every LOOK_S: the states of all descendants──► `Looks`
               ──stopped for STOPPED_S──► a line for the user, SIGKILL ──► the part died: whoever
                                                                           watches it goes on

    python -m rft.run.standstill LAUNCHER RANK    the same beside ranks that an outer launcher
                                                  started where no sidecar is, tied to RANK's life

In: what the kernel says of each process, so a busy part is never taken for a stopped one. Out:
whatever the death of that part leads to (`rft.run.fleet`, `rft.run.elastic`, a failure).
Invariants: what user code started in the explorer is its own business; a stop of the watcher
itself, all of it with its parts maybe, counts as one look.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

import psutil

from rft.ground.process import die_with_parent, family, is_stopped, kill_these

LOOK_S = 2.0  # no event tells that somebody else's child was stopped
EXPLORER = "ray::Explorer"  # as Ray calls its process
STOPPED_S = 30.0  # a stop of a few seconds changes nothing


class Looks:
    """How often in a row each process was seen stopped."""

    def __init__(self) -> None:
        self.seen: dict[psutil.Process, int] = {}

    def look(self, stopped: Iterable[psutil.Process]) -> list[psutil.Process]:
        """Those of them that have been so for STOPPED_S now."""
        self.seen = {one: self.seen.get(one, 0) + 1 for one in stopped}
        return [one for one, times in self.seen.items() if times > STOPPED_S / LOOK_S]


class Standstill:
    def __init__(
        self,
        say: Callable[[str], None],
        *others: int,
        note: Callable[[Callable[[], Iterable[int]]], None] = lambda _: None,
    ):
        """`others`: processes that are not this one's, whose descendants are of the run too, unless
        it is init's place that one has. `note`: asked at every look, with who they all are.
        """
        self.say = say
        self.note = note
        self.roots = (os.getpid(), *(pid for pid in others if pid > 1))
        self.looks = Looks()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.over.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.over.wait(LOOK_S):
            self.note(lambda: [one.pid for root in self.roots for one in family(root)])
            for process in self.looks.look(stopped_parts(*self.roots)):
                self.say(
                    f"warning: {named(process)} (process {process.pid}) has been stopped for "
                    f"{STOPPED_S:g} s, and is killed"
                )
                kill_these([process])


def beside_ranks() -> "subprocess.Popen[bytes]":
    """Watch whoever this rank's launcher has started on this machine, until this rank ends, from a
    process of its own: one that is stopped itself watches nobody.
    """
    command = [sys.executable, "-m", "rft.run.standstill", str(os.getppid()), str(os.getpid())]
    return subprocess.Popen(command, stdout=2, start_new_session=True)


def main(launcher: int, rank: int) -> None:
    if die_with_parent(rank):
        Standstill(lambda line: print(line, flush=True), launcher).thread.join()


def stopped_parts(*roots: int) -> set[psutil.Process]:
    """Of all descendants, but what user code may have started and stopped."""
    found = {one for root in roots for one in family(root) if one.pid not in roots}
    return {one for one in found if is_stopped(one) and not any(map(is_explorer, parents(one)))}


def parents(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.parents()
    return []


def is_explorer(process: psutil.Process) -> bool:
    return named(process).startswith(EXPLORER)


def named(process: psutil.Process) -> str:
    """As a list of processes shows it: its title, or its command line."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return " ".join(process.cmdline()).strip()
    return ""


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
