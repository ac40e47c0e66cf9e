"""Where the ranks of one machine meet: on loopback, over nothing that is unpickled, and at a new
place after one has died.
"""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.config import Config
from rft.ground.device import hosted_store
from rft.preflight.inputs_models import _ray
from rft.run import cluster
from rft.sync.connection import Listener, own_address

PROGRAM = Path(__file__).with_name("tiny_ranks.py")
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
TIMEOUT_S = 300


def told_by_ranks(directory: Path, port: int, restarts: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(PROGRAM), str(directory), str(port), str(restarts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "trainer rank 1 failed while starting: killed by SIGKILL; the ranks are started again "
        f"({number} of {restarts} within an hour)"
        for number in range(1, restarts + 1)
    ]
    return [json.loads((directory / f"rank_{number}.json").read_text()) for number in range(2)]


@pytest.mark.verify
def test_all_listen_on_loopback_alone_and_ranks_meet_again_after_one_was_killed(
    tmp_path: Path,
) -> None:
    """And nothing pickled is to be had where they meet."""
    for told in told_by_ranks(tmp_path, 0, restarts=1):
        assert (told["total"], told["start"]) == (2, 1)
        assert set(told["of_launcher"]) == {"127.0.0.1"} and set(told["of_ranks"]) <= set(LOOPBACK)
        assert told["rendezvous"] == []


@pytest.mark.verify  # the test above, at a port that a user chose
def test_ranks_meet_at_the_port_of_the_config(tmp_path: Path) -> None:
    port = free_port()
    for told in told_by_ranks(tmp_path, port, restarts=2):
        assert (told["total"], told["start"]) == (2, 2)
        assert told["at"] == f"127.0.0.1:{port}"


RANK = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print("saved", flush=True) or os._exit(138))
os.kill(os.getppid(), signal.SIGUSR1)
while True:
    signal.pause()
"""


def test_a_signal_reaches_the_ranks_of_torchrun_and_is_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "rft.run.loopback", "--signals-to-handle=SIGUSR1"]
    command += ["--nproc-per-node=1", str(tmp_path / "rank.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (138, "saved\n"), done.stderr
    assert "rft: stopped by SIGUSR1; run the same command again to go on" in done.stderr
    assert "Traceback" not in done.stderr


def free_port() -> int:
    store = hosted_store("127.0.0.1", 0, timedelta(seconds=1))
    return int(store.port)


IPV6 = pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")


@IPV6
def test_the_ray_of_a_run_may_be_at_an_address_of_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as head:
        config = Config(name="a")
        config.cluster.ray_address = f"[::1]:{head.getsockname()[1]}"
        _ray(config)
        assert own_address(config.cluster.ray_address) == "127.0.0.1"
        assert cluster.silence(config.cluster.ray_address) == ""


@IPV6
def test_engines_find_ranks_and_stores_at_an_address_of_ipv6() -> None:
    listener = Listener("::1", 5.0, lambda hello: "", lambda peer, hello: None)
    try:
        socket.create_connection(("::1", listener.endpoint["port"]), 5.0).close()
    finally:
        listener.close()
    assert hosted_store("::1", 0, timedelta(seconds=5)).host == "::1"


def test_a_store_listens_at_its_own_address_alone() -> None:
    """Also that of a pair of trainer rank and engine, which is
    hosted where the engine finds the rank.
    """
    store = hosted_store(own_address(None), 0, timedelta(seconds=5))
    mine = psutil.Process(os.getpid()).net_connections("tcp")
    assert [
        at.laddr.ip
        for at in mine
        if at.laddr.port == store.port and at.status == psutil.CONN_LISTEN
    ] == ["127.0.0.1"]
