"""Debian's radosgw on this host for a test: one monitor, one OSD in memory, the gateway, ended with
the block; nothing outside `root` is written.

In: an empty directory, root, and Debian's packages (installed when they are missing). Out: the
gateway's address; its one user's key and secret are `USER`.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("ceph-mon", "ceph-osd", "ceph-common", "radosgw")
DAEMONS = ("ceph-mon", "ceph-osd", "radosgw")
USER = "test"
READY_S = 60.0
ENDING_S = 10.0
LOOK_S = 0.2  # between two questions to the gateway, which tells nobody that it is there
CONFIG = """\
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{monitor}
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
public network = 127.0.0.0/8
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 1073741824
mon allow pool size one = true
osd data = {root}/osd0
mon data = {root}/mon
run dir = {root}
admin socket = {root}/$name.$pid.asok
log file = {root}/$name.log
pid file = {root}/$name.pid
keyring = {root}/keyring
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw thread pool size = 32
rgw multipart min part size = 256
"""
CAPS = {
    "mon.": ("mon",),
    "client.admin": ("mon", "osd"),
    "client.rgw": ("mon", "osd"),
}


def install() -> None:
    """Skips the test, with the reason, where Ceph is not there and cannot be installed."""
    if os.geteuid() != 0:
        pytest.skip("Ceph's daemons want root")
    if all(shutil.which(name) for name in DAEMONS):
        return
    if shutil.which("apt-get") is None:
        pytest.skip("no Ceph here, and no apt-get to install it")
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", "-qq", *command], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"apt-get {command[0]} failed: {done.stderr.strip()[-200:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(root: Path) -> Iterator[str]:
    """The gateway's address."""
    install()
    fsid, monitor, gateway = str(uuid.uuid4()), free_port(), free_port()
    config = root / "ceph.conf"
    config.write_text(CONFIG.format(fsid=fsid, monitor=monitor, gateway=gateway, root=root))
    daemons: list[subprocess.Popen[bytes]] = []

    def ask(name: str, *arguments: str) -> None:
        done = subprocess.run([name, *arguments], capture_output=True, text=True, timeout=READY_S)
        assert done.returncode == 0, f"{name} {arguments}: {done.stderr}"

    def start(name: str, *arguments: str) -> None:
        command = [name, "-c", str(config), "-f", *arguments]
        with open(root / f"{name}.out", "ab") as out:
            daemons.append(subprocess.Popen(command, stdout=out, stderr=out))

    for name, parts in CAPS.items():
        caps = [word for part in parts for word in ("--cap", part, "allow *")]
        more = [] if (root / "keyring").exists() else ["--create-keyring"]
        ask("ceph-authtool", *more, str(root / "keyring"), "--gen-key", "-n", name, *caps)
    address = f"[v1:127.0.0.1:{monitor}]"
    monmap = str(root / "monmap")
    ask("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
    of_mon = ("--monmap", monmap, "--keyring", str(root / "keyring"))
    ask("ceph-mon", "-c", str(config), "--mkfs", "-i", "a", *of_mon)
    (root / "osd0").mkdir()
    try:
        start("ceph-mon", "-i", "a")
        ask("ceph-osd", "-c", str(config), "-i", "0", "--mkfs")
        ask("ceph", "-c", str(config), "osd", "new", (root / "osd0" / "fsid").read_text().strip())
        start("ceph-osd", "-i", "0")
        start("radosgw", "-n", "client.rgw")
        url = f"http://127.0.0.1:{gateway}"
        await_answer(url)
        user = ("--uid", USER, "--display-name", USER, "--access-key", USER, "--secret", USER)
        ask("radosgw-admin", "-c", str(config), "-n", "client.rgw", "user", "create", *user)
        yield url
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(ENDING_S)


def await_answer(url: str) -> None:
    end = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError as error:
            assert time.monotonic() < end, f"radosgw does not answer: {error}"
            time.sleep(LOOK_S)
