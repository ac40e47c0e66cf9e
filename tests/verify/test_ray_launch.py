"""`launch/ray.sh` and `launch/ray_job.sh` on a Ray of two nodes: the first trains, the second serves engines, all ends together."""

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_nodes import Node, two_nodes

from runs import REPOSITORY, History, overrides, step_rows, write_assets

STEPS = 4
RUN_S = 400.0
LATER_S = 120.0  # the engines' node hears from Ray that the head has gone
READY_S = 90.0
LOOK_S = 0.2  # between two questions; nobody tells
LAUNCH = REPOSITORY / "launch"

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1500)]


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ray")
    write_assets(directory / "assets")
    return directory


@pytest.fixture
def environment() -> dict[str, str]:
    return {
        "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32), "CPUS": "8", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip


def check(job: Path, second: Node, log: Path) -> None:
    assert [row["step"] for row in step_rows(job)] == list(range(1, STEPS + 1)), log.read_text()
    History(job / "buffer" / "experience_buffer").check_exactly_once(STEPS)


def arguments(root: Path, name: str) -> list[str]:
    return overrides(root, name, root / "assets", f"trainer.total_steps={STEPS}")


def test_the_same_command_on_every_node(nodes: list[Node], root: Path, environment: dict[str, str]) -> None:
    command = [str(LAUNCH / "ray.sh"), *arguments(root, "symmetric")]
    settings = environment | {"HEAD": nodes[0].address, "NODES": "2"}
    logs = [root / "first.log", root / "second.log"]
    first, second = (
        node.start(*command, directory=root, log=log, **settings) for node, log in zip(nodes, logs, strict=True)
    )
    assert first.wait(RUN_S) == 0, "\n".join(log.read_text() for log in logs)
    check(root / "rft" / "symmetric", nodes[1], logs[0])
    second.wait(LATER_S)


def test_a_job_of_a_cluster_that_is_there(nodes: list[Node], root: Path, environment: dict[str, str]) -> None:
    head, other = nodes
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    log = root / "cluster.log"
    words = ["--head", f"--node-ip-address={head.address}", "--num-cpus=1", "--include-dashboard=true"]
    started = subprocess.run(
        head.command(*ray, "start", *words), cwd=root, env=environment, capture_output=True, text=True, timeout=READY_S
    )
    assert started.returncode == 0, started.stderr
    other.start(
        *ray,
        "start",
        f"--address={head.address}:6379",
        "--num-cpus=8",
        "--block",
        directory=root,
        log=log,
        **environment,
    )
    await_open(head, 8265)
    command = [str(LAUNCH / "ray_job.sh"), *arguments(root, "job")]
    settings = environment | {"RAY_API": "http://127.0.0.1:8265", "RANKS": "0", "JOB_PYTHON": sys.executable}
    submitted = head.start(*command, directory=root, log=root / "job.log", **settings)
    assert submitted.wait(RUN_S) == 0, (root / "job.log").read_text()
    check(root / "rft" / "job", other, root / "job.log")


def await_open(node: Node, port: int) -> None:
    deadline = time.monotonic() + READY_S
    probe = node.command("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}")
    while subprocess.run(probe, capture_output=True).returncode != 0:
        assert time.monotonic() < deadline, f"nothing listens on {port}"
        time.sleep(LOOK_S)
