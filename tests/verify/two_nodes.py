"""Two machines for a test, on one kernel: each with its own network, processes, /tmp/ray and shared
memory, joined by one cable.

In: root and iproute2. Out: `Node`s that commands are run in. Ray then behaves as on two hosts:
addresses differ, `ray stop` ends what is on its own node, and the engines of one reach the ranks of
the other over TCP alone. Ended with the block.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SHARED_BYTES = 2 * 2**30
INSIDE = " && ".join(
    (
        f"mount -t tmpfs -o size={SHARED_BYTES} none /dev/shm",
        "mkdir -p /tmp/ray",
        "mount -t tmpfs none /tmp/ray",
        "echo up",
        # as the first process of a machine does: nobody's zombies are nobody's business
        "trap '' CHLD",
        "exec cat",
    )
)


class Node:
    def __init__(self, number: int):
        self.address = ADDRESSES[number]
        command = [
            "unshare",
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            INSIDE,
        ]
        # It lives until its stdin is closed, or with the test.
        self._holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            pytest.skip(f"no namespaces here: {self._holder.stderr.read().strip()}")
        children = (
            Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        )
        self.pid = children[0]

    def command(self, *words: str) -> list[str]:
        """`words`, to be run in this node, in the directory of whoever runs it."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--wd=.", *words]

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

    def close(self) -> None:
        """The first process of a node takes all others with it."""
        self._holder.kill()
        self._holder.wait()


@contextlib.contextmanager
def two_nodes() -> Iterator[list[Node]]:
    if os.geteuid() != 0:
        pytest.skip("namespaces want root")
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"no `{tool}` here (Debian: util-linux, iproute2)")
    with contextlib.ExitStack() as held:
        nodes = []
        for number in range(2):
            nodes.append(Node(number))
            held.callback(nodes[-1].close)
        first, second = nodes
        _ip(
            "link",
            "add",
            "cable",
            "netns",
            first.pid,
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            second.pid,
        )
        for node, other in ((first, second), (second, first)):
            for words in (
                ["link", "set", "lo", "up"],
                ["addr", "add", f"{node.address}/24", "dev", "cable"],
                ["link", "set", "cable", "up"],
                ["route", "add", "default", "via", other.address],
            ):
                subprocess.run(node.command("ip", *words), check=True)
        yield nodes


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
