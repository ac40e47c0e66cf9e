"""The process that makes a cell and runs one program in it: `python -I -S cell.py <file descriptor
of the report>`.

In: an order as JSON on stdin (program, its stdin, limits, directories that it may read). Out: the
program's own stdout and stderr, and a report of two lines, `{"begun"}` and `{"ending", "code"}`. It
needs nothing but the standard library. Three processes: this one, outside; process 1 of the cell,
which watches time and memory, and takes no signal of the program's; and the program, without
rights, whose user nobody else has where we are root.

Memory: what its processes have mapped is counted here. What they share without mapping it (memfd,
System V) only the kernel can count: in a control group of the program's own where one can be made,
v1 as root or v2 where it is delegated (that one was never run); else seccomp refuses to make it.
"begun" says which.

Invariant: the program starts only when all of this is in force; whatever cannot be made ends the
cell without that first line. SIGTERM ends the cell: this process is the last to go, and has reaped
all others.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 0x1, 0x2, 0x4, 0x20, 0x1000, 0x4000, 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
NOBODY = 65534
# one of them is hidden, for the cell only, by its root
PLACES = ("/mnt", "/media", "/srv", "/tmp", "/var", "/home")
# a user whom no other process of the machine has: its limit of processes is its own
PRIVATE_USERS = 1 << 30
PROGRAM = 63  # file descriptor that its text is read from
LOOK_S = 0.02
PAGE = os.sysconf("SC_PAGE_SIZE")
# signals that a program may send to whoever watches it
FROM_OUTSIDE = signal.valid_signals() - {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE),
}
GROUP = "rft-cell-"  # names of control groups
# of each machine: its name for the kernel, and numbers of system calls. The first three make memory
# that no process need have mapped; no test of a program needs the others.
CALLS = {
    "x86_64": (0xC000003E, (319, 29, 447), (323, 425, 248, 249, 250, 321, 298, 68, 64, 272, 308)),
    "aarch64": (
        0xC00000B7,
        (279, 194, 447),
        (282, 425, 217, 218, 219, 280, 241, 186, 190, 97, 268),
    ),
}
PR_SET_SECCOMP, SECCOMP_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # of the kernel's filters
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
OTHER_NUMBERS = 0x40000000  # the same calls under other numbers begin here
libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), None if data is None else data.encode())


def main() -> None:
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked = json.load(sys.stdin)
    group = memory_group((asked["memory_mb"] + asked["files_mb"]) << 20)
    if asked["isolate"]:
        separate()
    child = os.fork()
    if child == 0:
        guarded(lambda: watch(asked, report, group))
    watching = os.pidfd_open(child)
    signal.signal(signal.SIGTERM, lambda *_: kill(watching))
    _, status = os.waitpid(child, 0)
    end_children()  # without isolation, processes of the program may have outlived it
    if group is not None:
        group.remove()
    sys.exit(os.waitstatus_to_exitcode(status) and 1)


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(process, signal.SIGKILL)


def guarded(body: Callable[[], None]) -> None:
    """A child's whole life: never back into its parent's code."""
    try:
        body()
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def separate() -> None:
    """Namespaces of its own for what follows; who is not root becomes
    the one user of a namespace of users.
    """
    user, group = os.getuid(), os.getgid()
    call("unshare", NEWNS | NEWIPC | NEWPID | NEWNET | (NEWUSER if user else 0))
    if user:
        for name, text in (
            ("setgroups", "deny"),
            ("gid_map", f"{NOBODY} {group} 1"),
            ("uid_map", f"{NOBODY} {user} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


class MemoryGroup:
    """A control group for the program alone. `names`: of the files with its limit, with its number
    of killed processes, and with that of swap.
    """

    def __init__(self, parent: str, limit: int, version: str, names: tuple[str, str, str, str]):
        self.version = version
        self.path = os.path.join(parent, f"{GROUP}{os.getpid()}")
        most, kills, swap, swapped = names
        os.mkdir(self.path)
        try:
            self.write(most, str(limit))
            with contextlib.suppress(OSError):  # the kernel does not count swap
                self.write(swap, str(limit) if swapped == "too" else "0")
            self.procs = os.open(f"{self.path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            self.kills = os.open(f"{self.path}/{kills}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.rmdir(self.path)
            raise

    def write(self, name: str, text: str) -> None:
        with open(f"{self.path}/{name}", "w", encoding="ascii") as file:
            file.write(text)

    def join(self) -> None:
        os.write(self.procs, b"0")

    def killed(self) -> bool:
        """Whether the kernel ended a process because of the limit."""
        words = os.pread(self.kills, 4096, 0).split()
        return b"oom_kill" in words and int(words[words.index(b"oom_kill") + 1]) > 0

    def remove(self) -> None:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            try:
                os.rmdir(self.path)
                return
            except OSError:  # its last process is not quite gone
                time.sleep(LOOK_S)


def memory_group(limit: int) -> MemoryGroup | None:
    """None where this user can make none."""
    for parent, version, names in places_of_groups():
        try:
            if version == "cgroup v2":
                with open(f"{parent}/cgroup.subtree_control", encoding="ascii") as file:
                    if "memory" not in file.read().split():
                        continue
            sweep(parent)
            return MemoryGroup(parent, limit, version, names)
        except OSError:
            continue
    return None


def places_of_groups() -> list[tuple[str, str, tuple[str, str, str, str]]]:
    """Directories below which a group may be made: that of this process, and, of v2, the one above,
    since a group with processes of its own has none with limits below it.
    """
    found = []
    with open("/proc/self/cgroup", encoding="ascii") as file:
        lines = [line.strip().split(":", 2) for line in file]
    for _, kinds, path in lines:
        if "memory" in kinds.split(","):
            for parent in (f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"):
                names = ("memory.limit_in_bytes", "memory.oom_control")
                found.append((parent, "cgroup v1", (*names, "memory.memsw.limit_in_bytes", "too")))
        elif not kinds:
            for parent in (f"/sys/fs/cgroup{path}", os.path.dirname(f"/sys/fs/cgroup{path}")):
                names = ("memory.max", "memory.events")
                found.append((parent, "cgroup v2", (*names, "memory.swap.max", "none")))
    return found


def sweep(parent: str) -> None:
    """Groups of cells that were killed are empty, and stay otherwise."""
    for name in os.listdir(parent):
        if name.startswith(GROUP) and not os.path.exists(f"/proc/{name.removeprefix(GROUP)}"):
            with contextlib.suppress(OSError):  # of another container, and in use
                os.rmdir(f"{parent}/{name}")


def refuse_calls(shared_memory: bool) -> bool:
    """No system call from here on, in this process and its children, that a program needs only to
    get out or to hide memory. `shared_memory`: that neither. False: this machine's are not known.
    """
    machine, sharing, others = CALLS.get(os.uname().machine, (0, (), ()))
    if not machine:
        return False
    refused = others + (sharing if shared_memory else ())
    last = 4 + len(refused)  # what allows; behind it what refuses
    program = [(LOAD, 0, 0, 4), (EQUAL, 0, last - 1, machine), (LOAD, 0, 0, 0)]
    program.append((AT_LEAST, last - 3, 0, OTHER_NUMBERS))
    program += [(EQUAL, last - place, 0, number) for place, number in enumerate(refused, 4)]
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    told = struct.pack("HxxxxxxP", len(program), ctypes.addressof(packed))
    call("prctl", PR_SET_SECCOMP, SECCOMP_FILTER, told, 0, 0)
    return True


def watch(asked: dict[str, Any], report: int, group: MemoryGroup | None) -> None:
    """Process 1 of the cell: furnish it, start the program, and say how that ended.

    All others end with it.
    """
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    take_signals(signal.SIG_IGN)
    given = {place: in_memory(asked[name]) for place, name in ((0, "stdin"), (PROGRAM, "program"))}
    if asked["isolate"]:
        furnish(asked["readable"], asked["files_mb"])
    else:
        os.setsid()
    broken, started = os.pipe()  # closed without a word when the program has begun
    program = os.fork()
    if program == 0:
        guarded(lambda: begin(asked, given, started, group))
    os.close(started)
    why = os.read(broken, 4096)
    if not why:
        known = os.uname().machine in CALLS
        counted = group.version if group is not None else "seccomp" if known else "not counted"
        os.write(report, json.dumps({"begun": counted}).encode() + b"\n")
    ending, code = wait(program, asked["seconds"], asked["memory_mb"] << 20, asked["isolate"])
    if why:
        raise OSError(why.decode())
    if group is not None and group.killed():
        ending, code = "memory", 0
    os.write(report, json.dumps({"ending": ending, "code": code}).encode() + b"\n")
    os._exit(0)


def take_signals(how: Any) -> None:
    for number in FROM_OUTSIDE:
        with contextlib.suppress(OSError, ValueError):  # the C library's own
            signal.signal(number, how)


def furnish(directories: list[str], megabytes: int) -> None:
    """A root in memory with what a Python program reads, and one directory that it may write to."""
    mount(None, "/", None, REC | PRIVATE)
    root = next(
        p
        for p in PLACES
        if os.path.isdir(p) and not any(f"{d}/".startswith(f"{p}/") for d in directories)
    )
    mount("cell", root, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    for directory in directories:
        if os.path.islink(directory):
            os.makedirs(os.path.dirname(root + directory), exist_ok=True)
            os.symlink(os.readlink(directory), root + directory)
            continue
        os.makedirs(root + directory, exist_ok=True)
        mount(directory, root + directory, None, BIND | REC)
        read_only(directory, root + directory)
    os.mkdir(f"{root}/dev")
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        with open(root + device, "wb"):
            pass
        mount(device, root + device, None, BIND)
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV)
    os.mkdir(f"{root}/cell")
    mount(
        "cell",
        f"{root}/cell",
        "tmpfs",
        NOSUID | NODEV,
        f"size={megabytes}m,nr_inodes=4096,mode=777",
    )
    mount(None, root, None, REMOUNT | RDONLY | NOSUID | NODEV)
    os.chroot(root)


def read_only(directory: str, at: str) -> None:
    """With all that is mounted below it; kernels before 5.12 can
    do so only with the directory itself.
    """
    attributes = struct.pack("QQQQ", RDONLY, 0, 0, 0)
    if libc.syscall(
        MOUNT_SETATTR, AT_FDCWD, at.encode(), AT_RECURSIVE, attributes, len(attributes)
    ):
        mount(None, at, None, BIND | REMOUNT | RDONLY | locked(directory))


def locked(directory: str) -> int:
    """Flags of the mount that `directory` is on, which a user may not take away."""
    flags = os.statvfs(directory).f_flag
    return flags & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_RELATIME)


def in_memory(text: str) -> int:
    found = os.memfd_create("given")
    with open(found, "wb", closefd=False) as file:
        # half a character, as JSON can escape it, is the program's mistake
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(found, 0, os.SEEK_SET)
    return found


def begin(
    asked: dict[str, Any], given: dict[int, int], started: int, group: MemoryGroup | None
) -> None:
    """Become the program."""
    try:
        take_signals(signal.SIG_DFL)
        if group is not None:
            group.join()
        os.chdir("/cell" if asked["isolate"] else os.environ.get("TMPDIR", "/tmp"))
        for place, file in given.items():
            os.dup2(file, place)
        if not asked["isolate"]:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        elif os.getuid() == 0:
            become_nobody()
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        memory, files = asked["memory_mb"] << 20, asked["files_mb"] << 20
        for kind, limit in (
            (resource.RLIMIT_CPU, int(asked["seconds"]) + 1),
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, files),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
            # of this user: not only these
            *([(resource.RLIMIT_NPROC, asked["processes"])] if asked["isolate"] else []),
        ):
            resource.setrlimit(kind, (limit, limit))
        here = {
            "PATH": "/usr/bin:/bin",
            "HOME": os.getcwd(),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        refuse_calls(shared_memory=group is None)
        os.execve(asked["python"], [asked["python"], "-I", f"/proc/self/fd/{PROGRAM}"], here)
    except BaseException as error:
        os.write(started, f"{type(error).__name__}: {error}".encode())
    os._exit(1)


def become_nobody() -> None:
    os.setgroups([])
    try:
        user = PRIVATE_USERS + time.monotonic_ns() // 1000 % PRIVATE_USERS
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError:  # root of a container that has few users
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def wait(program: int, seconds: float, memory: int, isolated: bool) -> tuple[str, int]:
    """Until the program ends, or has to be ended.

    Orphans of it are ours to bury, and end with us.
    """
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(-1, os.WNOHANG)
        if found == program:
            code = os.waitstatus_to_exitcode(status)
            cpu = code == -signal.SIGXCPU  # its seconds, counted by the kernel
            return ("timeout", 0) if cpu else ("signal", -code) if code < 0 else ("exit", code)
        if time.monotonic() > deadline:
            return ended(program, "timeout", isolated)
        if isolated and resident() > memory:
            return ended(program, "memory", isolated)
        if not found:
            time.sleep(LOOK_S)


def ended(program: int, why: str, isolated: bool) -> tuple[str, int]:
    if not isolated:
        os.kill(program, signal.SIGKILL)
    return why, 0  # else with us, the first process of the cell


def resident() -> int:
    """Bytes in memory of all processes of the cell but this."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != "1":
            try:
                with open(f"/proc/{name}/statm", encoding="ascii") as file:
                    total += int(file.read().split()[1]) * PAGE
            except (OSError, IndexError):  # it has just ended
                continue
    return total


def end_children() -> None:
    """Kill and reap what is left.

    The children of each become ours, wherever they have detached themselves to.
    """
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for child in children():
                    os.kill(child, signal.SIGKILL)
                os.wait()


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


if __name__ == "__main__":
    main()
