"""A real radosgw on this host for a test: one monitor, one OSD that keeps all in memory, and the
gateway, ended with the block; nothing outside `root` is written.

In: an empty directory, and Debian's packages (installed when they are missing, which takes root).
Out: `Gateway`. It takes parts as small as the toy's; there is no manager, for nobody asks for
statistics.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from slurm_cluster import await_true, read

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd")
USER, KEY, SECRET = "test", "test", "sesame-sesame"
ASKED_S = 120.0  # the first question to the gateway's pools makes them
ENDING_S = 30.0
CONFIG = """\
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = v2:127.0.0.1:{ports[0]}
public_addr = 127.0.0.1
mon_data = {root}/mon
osd_data = {root}/osd
rgw_data = {root}/rgw
run_dir = {root}
keyring = {root}/keyring
log_file = {root}/$name.log
admin_socket =
pid_file =
osd_objectstore = memstore
osd_pool_default_size = 1
osd_pool_default_pg_num = 4
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
rgw_frontends = beast endpoint=127.0.0.1:{ports[1]}
rgw_multipart_min_part_size = 1
"""
WHO = {  # may do what
    "mon.": ("--cap", "mon", "allow *"),
    "client.admin": ("--cap", "mon", "allow *", "--cap", "osd", "allow *"),
    "osd.0": ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"),
}


class Gateway(NamedTuple):
    """`environment`: its user's credentials."""

    endpoint: str
    environment: dict[str, str]
    version: str


def install() -> None:
    """Skips the test, with the reason, where Ceph is not there and cannot be installed."""
    if all(map(shutil.which, PACKAGES)):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.skip(f"needs Debian's {', '.join(PACKAGES)}, or root and apt-get to install them")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(
            ["apt-get", "-qq", *command], env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"apt-get {command[0]} failed: {done.stderr.strip()[-200:]}")


@contextlib.contextmanager
def running(root: Path) -> Iterator[Gateway]:
    install()
    fsid, ports = str(uuid.uuid4()), free_ports(2)
    for name in ("mon", "osd", "rgw"):
        (root / name).mkdir()
    (root / "ceph.conf").write_text(
        CONFIG.format(root=root, fsid=fsid, ports=ports), encoding="utf-8"
    )
    environment = os.environ | {"CEPH_CONF": str(root / "ceph.conf")}
    daemons: list[subprocess.Popen[bytes]] = []

    def ask(*command: str | Path) -> str:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ASKED_S
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def start(*command: str) -> None:
        with open(root / f"{command[0]}.out", "wb") as out:
            daemons.append(
                subprocess.Popen([*command, "-f"], env=environment, stdout=out, stderr=out)
            )

    def answers() -> bool:
        assert daemons[-1].poll() is None, read(root / "radosgw.out")
        with contextlib.suppress(OSError), urllib.request.urlopen(endpoint, timeout=ASKED_S):
            return True
        return False

    try:
        keyring, monmap = root / "keyring", root / "monmap"
        ask("ceph-authtool", "--create-keyring", keyring)
        for name, rights in WHO.items():
            ask("ceph-authtool", keyring, "--gen-key", "-n", name, *rights)
        monitor = f"[v2:127.0.0.1:{ports[0]}]"
        ask("monmaptool", "--create", "--fsid", fsid, "--addv", "a", monitor, monmap)
        ask("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        start("ceph-mon", "-i", "a")
        disk = str(uuid.uuid4())
        ask("ceph", "osd", "new", disk)
        ask("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start("ceph-osd", "-i", "0")
        user = ("--uid", USER, "--display-name", USER, "--access-key", KEY, "--secret-key", SECRET)
        ask("radosgw-admin", "user", "create", *user)
        start("radosgw", "-n", "client.admin")
        endpoint = f"http://127.0.0.1:{ports[1]}"
        await_true(answers, f"radosgw does not answer: {root}")
        version = ask("radosgw", "--version").split()[2]
        given = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        yield Gateway(endpoint, given | {"AWS_DEFAULT_REGION": "us-east-1"}, version)
    finally:
        for daemon in reversed(daemons):
            daemon.kill()  # nothing that they keep is wanted
            daemon.wait(ENDING_S)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
