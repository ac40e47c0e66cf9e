"""Two or three machines for a test, on one kernel: each with its own network, processes, /tmp/ray
and shared memory, joined by one cable.

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

ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
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
def two_nodes(count: int = 2) -> Iterator[list[Node]]:
    if os.geteuid() != 0:
        pytest.skip("namespaces want root")
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"no `{tool}` here (Debian: util-linux, iproute2)")
    with contextlib.ExitStack() as held:
        nodes = []
        for number in range(count):
            nodes.append(Node(number))
            held.callback(nodes[-1].close)
        first = nodes[0]
        subprocess.run(first.command("ip", "link", "add", "cable", "type", "bridge"), check=True)
        for number, other in enumerate(nodes[1:]):
            # its end at the first node is a port of the bridge there
            ends = f"port{number} netns {first.pid} type veth peer name cable netns {other.pid}"
            subprocess.run(["ip", "link", "add", *ends.split()], check=True)
            for words in (f"set port{number} master cable", f"set port{number} up"):
                subprocess.run(first.command("ip", "link", *words.split()), check=True)
        for node in nodes:
            route = nodes[1].address if node is first else first.address
            for words in (
                "link set lo up",
                f"addr add {node.address}/24 dev cable",
                "link set cable up",
                f"route add default via {route}",
            ):
                subprocess.run(node.command("ip", *words.split()), check=True)
        yield nodes
