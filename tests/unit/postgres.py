"""A real PostgreSQL for a test: a new cluster in a directory of its own, on a free loopback port,
ended with the block.

In: an empty directory, and Debian's package (installed when it is missing, which takes root). Out:
the URL of a database. The server runs as an unprivileged user, as it insists; its password is asked
for, so that a URL has one.
"""

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

USER, PASSWORD = "postgres", "sesame-sesame"


def programs() -> Path:
    """The directory of initdb and postgres."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "postgresql"]
        subprocess.run(
            install,
            capture_output=True,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            check=False,
        )
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("needs Debian's package postgresql, or root and apt-get to install it")
    return found[-1].parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def proxied(url: str) -> Iterator[tuple[str, threading.Event]]:
    """The same database through a proxy, which hands on for as long as the event is set. It keeps
    every connection, and takes new ones, all the same.
    """
    address = urlsplit(url)
    flows, made = threading.Event(), list[socket.socket]()
    flows.set()

    def hand_on(here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(2**16):
                flows.wait()
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)

    def take(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near = listener.accept()[0]
                far = socket.create_connection((address.hostname, address.port))
                made.extend((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=hand_on, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=take, args=(listener,), daemon=True).start()
        try:
            yield url.replace(f":{address.port}/", f":{listener.getsockname()[1]}/"), flows
        finally:
            flows.set()
            listener.shutdown(socket.SHUT_RDWR)
            for one in made:
                one.close()


@contextlib.contextmanager
def postgres(root: Path) -> Iterator[str]:
    """URLs are like `postgresql://postgres:...@127.0.0.1:PORT/postgres`."""
    where, data, port = programs(), root / "data", free_port()
    pytest.importorskip("psycopg")
    as_user: dict[str, object] = {}
    secret = root / "password"
    secret.write_text(PASSWORD)
    if os.geteuid() == 0:
        entry = pwd.getpwnam(USER)
        as_user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        os.chown(root, entry.pw_uid, entry.pw_gid)
        os.chown(secret, entry.pw_uid, entry.pw_gid)
        for parent in root.parents:  # pytest makes them for one user alone
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o001)
    options = (
        f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={root} -c "
        "max_connections=60"
    )
    initdb = [
        where / "initdb",
        "-D",
        data,
        "-U",
        USER,
        "--auth=scram-sha-256",
        f"--pwfile={secret}",
        "-E",
        "UTF8",
        "-N",
    ]
    control = [where / "pg_ctl", "-D", data, "-w", "-t", "60"]
    subprocess.run(initdb, check=True, capture_output=True, cwd=root, **as_user)  # type: ignore[call-overload]
    start = [*control, "-l", root / "server.log", "-o", options, "start"]
    subprocess.run(start, check=True, stdout=subprocess.DEVNULL, cwd=root, **as_user)  # type: ignore[call-overload]
    try:
        yield f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        stop = [*control, "-m", "immediate", "stop"]
        subprocess.run(stop, check=True, stdout=subprocess.DEVNULL, cwd=root, **as_user)  # type: ignore[call-overload]
