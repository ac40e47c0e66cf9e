"""Two or three machines on one kernel: each with its own network, processes, /tmp/ray and shared
memory, joined by one cable, and if wanted with a name and a disk of its own.

In: root, `unshare`, `nsenter` and `ip`. Out: `Machine`s that commands are run in. Addresses differ,
`ray stop` ends what is on its own machine, and what is on one reaches the other over TCP alone. A
machine that is lost (`lose`) takes its processes, its memory and its disk with it; first its cable,
if its end is to be silent. Ended with the block.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
SHARED_BYTES = 2 * 2**30
INSIDE = (
    f"mount -t tmpfs -o size={SHARED_BYTES} none /dev/shm",
    "mkdir -p /tmp/ray",
    "mount -t tmpfs none /tmp/ray",
)
# as the first process of a machine does: nobody's zombies are nobody's business
LIVE = ("echo up", "trap '' CHLD", "exec cat")
JOINED = ("--net", "--mount", "--pid", "--uts")  # by whoever runs something there


class NoMachines(RuntimeError):
    """This host does not give what they need."""


class Holder:
    """Namespaces that live until they are closed, or with this process; `inside`: what is done
    there first.
    """

    def __init__(self, *kinds: str, inside: tuple[str, ...]):
        self._kinds = [kind for kind in kinds if kind in JOINED]
        self._holder = subprocess.Popen(
            [
                "unshare",
                *kinds,
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                " && ".join((*inside, *LIVE)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            raise NoMachines(f"no namespaces here: {self._holder.stderr.read().strip()}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self.pid = children.split()[0]

    def command(self, *words: str) -> list[str]:
        """`words`, to be run in there, in the directory of whoever runs it."""
        return ["nsenter", f"--target={self.pid}", *self._kinds, "--wd=.", *words]

    def run(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """The first process takes all others with it."""
        self._holder.kill()
        self._holder.wait()


class Machine(Holder):
    """`disk`: where its own is, empty and in memory; none: it sees that of the host alone."""

    def __init__(self, number: int, disk: Path | None = None):
        self.address = ADDRESSES[number]
        kinds = ["--net", "--mount", "--pid", "--mount-proc", *(["--uts"] if disk else [])]
        super().__init__(*kinds, inside=(*INSIDE, *(_own(number, disk) if disk else ())))

    def bind(self, source: Path, place: Path) -> None:
        """What the host has at `source` is at `place` of this machine's disk too."""
        self.run("mkdir", "-p", str(place))
        self.run("mount", "--bind", str(source), str(place))

    def see(self, path: Path) -> Path:
        """Where this process finds what is at `path` in the machine."""
        return Path(f"/proc/{self.pid}/root{path}")

    def start(
        self, *words: str, directory: Path, log: Path, **environment: str
    ) -> "subprocess.Popen[bytes]":
        with open(log, "ab") as out:
            return subprocess.Popen(
                self.command(*words),
                cwd=directory,
                env=os.environ | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def lose(self, silently: bool = False) -> None:
        """Nothing of it is left. `silently`: no connection ends, for its cable was cut before."""
        if silently:
            self.cut(True)
        self.close()

    def cut(self, is_cut: bool) -> None:
        """Its cable; no connection ends by it."""
        self.run("ip", "link", "set", "cable", "down" if is_cut else "up")
        if not is_cut:
            self.route()

    def route(self) -> None:
        """A default one, which goes with the cable: Ray looks for its address by it."""
        other = ADDRESSES[self.address == ADDRESSES[0]]
        self.run("ip", "route", "replace", "default", "via", other)


def _own(number: int, disk: Path) -> tuple[str, ...]:
    """A disk, and a name, which the others know."""
    known = "\\n".join(f"{at} node{other}" for other, at in enumerate(ADDRESSES))
    return (
        f"mount -t tmpfs none {disk}",
        f"hostname node{number}",
        f"printf '127.0.0.1 localhost\\n{known}\\n' > {disk}/hosts",
        f"mount --bind {disk}/hosts /etc/hosts",
    )


@contextlib.contextmanager
def machines(count: int = 2, disk: Path | None = None) -> Iterator[list[Machine]]:
    """`disk`: an empty directory, which each of them has as its own. Raises NoMachines."""
    if os.geteuid() != 0:
        raise NoMachines("namespaces want root")
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            raise NoMachines(f"no `{tool}` here (Debian: util-linux, iproute2)")
    with contextlib.ExitStack() as held:
        switch = Holder("--net", inside=())
        held.callback(switch.close)
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        found: list[Machine] = []
        for number in range(count):
            found.append(Machine(number, disk))
            held.callback(found[-1].close)
            _join(found[-1], switch, f"port{number}")
        for machine in found:
            machine.route()
        yield found


def _join(machine: Machine, switch: Holder, port: str) -> None:
    ends = f"{port} netns {switch.pid} type veth peer name cable netns {machine.pid}"
    subprocess.run(["ip", "link", "add", *ends.split()], check=True)
    switch.run("ip", "link", "set", port, "master", "switch")
    switch.run("ip", "link", "set", port, "up")
    for words in (
        "link set lo up",
        f"addr add {machine.address}/24 dev cable",
        "link set cable up",
    ):
        machine.run("ip", *words.split())
