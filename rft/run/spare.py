"""Ranks that are there before they are needed: processes that have imported what a rank imports,
and sleep, one for each rank of a launcher.

    launcher (`rft.run.elastic`): its ranks train
            ──► Spares: python -m rft.run.spare FD PARENT CONFIG, one behind the other
    spare   imports, in a thread that lets others have the cores ──► READY, sleeps
    launcher: ranks have failed
            ──► Spares.take(command, environment) ──► the spare is a rank: its process, its output
                                                      and its exit code are those of a child

In: the resolved config; by the socket FD one message, the command and the environment of a rank,
or EOF, which is the end. Out: a rank with nothing to import. Invariants: a spare computes nothing
and has no CUDA context, so it holds no memory of a GPU: where an import makes one, none is kept.
Where a file that it has loaded, or the launcher's environment, has changed since, it begins anew as
the rank that it was asked to be (exec). It ends with its launcher, however that ends. An outer
launcher has none.
"""

import contextlib
import ctypes
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rft import config as configs
from rft.config import Config
from rft.data.chat import import_tokenizers
from rft.ground import device as devices
from rft.ground.process import NamedThread, ShortExit, die_with_parent
from rft.monitor import logs
from rft.trainer.feed import reads_files

log = logging.getLogger(__name__)
READY, IN_THE_WAY = b"r", b"c"  # a spare's first word
LOOK_S = 0.5  # at whether the ranks train


class Spares:
    """A launcher's, `count` of them. `path`: of the config."""

    def __init__(self, path: str, log_dir: Path, count: int):
        self.count = count
        self._path, self._log_dir = path, log_dir
        self._waiting: list[Spare] = []
        self._lock = threading.Lock()
        self._wanted, self._is_over = threading.Event(), threading.Event()
        # the kernel ends a spare with the thread that has started it: this one stays
        self._thread = NamedThread(target=self._run, name="spares", daemon=True)

    def __enter__(self) -> "Spares":
        if self.count:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.count:
            return
        with self._lock:
            self._is_over.set()
            self._wanted.set()
            for spare in self._waiting:
                spare.process.kill()
        self._thread.join()
        for spare in self._waiting:
            spare.process.wait()

    def refill(self) -> None:
        """Ranks are started now: once they train there may be as many spares again."""
        self._wanted.set()

    def pids(self) -> set[int]:
        """Of those that are no ranks."""
        with self._lock:
            return {spare.process.pid for spare in self._waiting}

    def take(
        self, command: Sequence[str], environment: dict[str, str]
    ) -> "subprocess.Popen[bytes] | None":
        """One that lives becomes this rank, from now on; None: there is none."""
        with self._lock:
            while self._waiting:
                spare = self._waiting.pop(0)
                if spare.become(command, environment):
                    return spare.process
        return None

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._wanted.wait()
            self._wanted.clear()
            while not self._wanted.wait(LOOK_S) and not self._trains():
                pass
            while not self._wanted.is_set() and len(self.pids()) < self.count:
                if not self._add():
                    self._is_over.wait()
                    return

    def _trains(self) -> bool:
        """Whether rank 0 has told of a phase since it was started."""
        told = self._log_dir / "phase_rank_0"
        return told.exists() and told.stat().st_size > 0

    def _add(self) -> bool:
        """One more, once it is ready. False: there can be none."""
        with self._lock:
            if self._is_over.is_set():
                return False
            self._waiting = [spare for spare in self._waiting if spare.process.poll() is None]
            spare = Spare(self._path)
            self._waiting.append(spare)
        if (word := spare.word()) == READY:
            return True
        with self._lock:
            if spare in self._waiting:
                self._waiting.remove(spare)
                spare.process.kill()
                spare.process.wait()
        if not self._is_over.is_set():
            why = "its imports make a CUDA context" if word == IN_THE_WAY else "it has ended"
            log.error("no spare rank is kept: %s", why)
        return False


class Spare:
    """The launcher's hold on one."""

    def __init__(self, path: str):
        self.environment = dict(os.environ)
        self._socket, theirs = socket.socketpair()
        with theirs:
            words = ["-m", __name__, str(theirs.fileno()), str(os.getpid()), path]
            self.process = subprocess.Popen(
                [sys.executable, *words],
                env=self.environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # as torch starts a rank
            )

    def word(self) -> bytes:
        """What it says first; nothing where it has ended."""
        with contextlib.suppress(ConnectionError):
            return self._socket.recv(1)
        return b""

    def become(self, command: Sequence[str], environment: dict[str, str]) -> bool:
        """A rank; False where it has ended."""
        is_same = self.environment == dict(os.environ)
        message = {"command": list(command), "environment": environment, "is_same": is_same}
        if self.process.poll() is not None:
            return False
        try:
            self._socket.sendall(json.dumps(message).encode())
            self._socket.shutdown(socket.SHUT_WR)
        except ConnectionError:
            return False
        return True


def main(descriptor: int, parent: int, path: str) -> int:
    """Wait; then be a rank: its exit code."""
    if not die_with_parent(parent):
        return 1
    os.set_inheritable(descriptor, False)
    loaded = LoadedFiles(path)
    config, outputs = configs.load(path), [os.dup(1), os.dup(2)]
    log_dir = logs.where(Path(os.environ["RFT_LOG_DIR"]), config.log)
    log_file = os.open(log_dir / "spares.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):  # imports talk
        os.dup2(log_file, stream)
    os.close(log_file)
    with socket.socket(fileno=descriptor) as line:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(import_ahead, config).result()
        loaded.look()
        be_shown_as([sys.executable, "-m", "rft.run.spare", "ready"])
        line.sendall(IN_THE_WAY if devices.holds_card() else READY)
        data = b"".join(iter(lambda: line.recv(2**16), b""))
    if not data:  # the launcher has no use for it any more
        return 0
    message = json.loads(data)
    for stream, kept in enumerate(outputs, start=1):
        os.dup2(kept, stream)
        os.close(kept)
    command, environment = message["command"], message["environment"]
    if not message["is_same"] or loaded.has_changed() or command[1:-1] != ["-m", "rft.run.rank"]:
        os.execve(command[0], command, environment)
    os.environ.clear()
    os.environ.update(environment)
    be_shown_as(command)
    from rft.run import rank

    return rank.main(command[-1])


def import_ahead(config: Config) -> None:
    """What a rank of this config imports, in a thread that takes a core after all others."""
    from rft.run.backends import backend_of
    from rft.run.rank import environment_of

    devices.yield_to_others()
    os.environ.update(environment_of(config))  # before the driver is asked for the first time
    kind = devices.choose(config.device)
    backend_of(config, kind).import_code()
    importlib.import_module("rft.run.assembly")
    import_tokenizers()  # this and the next are rank 0's, which any may be
    if not reads_files(config):
        importlib.import_module("ray")


class LoadedFiles:
    """The files that this process is made of: these, and those of its modules."""

    def __init__(self, *files: str):
        self._files = {path: stamp(path) for path in files}

    def look(self) -> None:
        """At what has been imported by now."""
        modules = [getattr(one, "__file__", None) for one in list(sys.modules.values())]
        self._files |= {path: stamp(path) for path in modules if path and path not in self._files}

    def has_changed(self) -> bool:
        return any(stamp(path) != before for path, before in self._files.items())


def stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def be_shown_as(command: Sequence[str]) -> None:
    """Lists of processes show this command line, as far as it is no longer than that with which
    this process was started: it is written over that (man 5 proc: arg_start, arg_end).
    """
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    first, last = int(fields[45]), int(fields[46])
    words = b"\0".join(os.fsencode(word) for word in command)
    if 0 < first < last:
        ctypes.memmove(first, words[: last - first - 1].ljust(last - first, b"\0"), last - first)


if __name__ == "__main__":
    end = ShortExit()
    end.code = main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
