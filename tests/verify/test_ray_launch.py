"""`launch/ray.sh` and `launch/ray_job.sh` on a Ray of two nodes: the first trains, the second
serves engines, all ends together.
"""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_nodes import Node, two_nodes

from runs import REPOSITORY, History, checkpoints, overrides, step_rows, write_assets

STEPS = 4
MANY = 80  # of the run that is stopped behind the second
RUN_S = 400.0
LATER_S = 120.0  # the engines' node hears from Ray that the head has gone
READY_S = 90.0
LOOK_S = 0.2  # between two questions; nobody tells
LAUNCH = REPOSITORY / "launch"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
API = "http://127.0.0.1:8265"

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
        "PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "CPUS": "8",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def check(job: Path, second: Node, log: Path) -> None:
    assert [row["step"] for row in step_rows(job)] == list(range(1, STEPS + 1)), log.read_text()
    History(job / "buffer" / "experience_buffer").check_exactly_once(STEPS)


def arguments(root: Path, name: str) -> list[str]:
    return overrides(root, name, root / "assets", f"trainer.total_steps={STEPS}")


def test_the_same_command_on_every_node(
    nodes: list[Node], root: Path, environment: dict[str, str]
) -> None:
    command = [str(LAUNCH / "ray.sh"), *arguments(root, "symmetric")]
    settings = environment | {"HEAD": nodes[0].address, "NODES": "2"}
    logs = [root / "first.log", root / "second.log"]
    first, second = (
        node.start(*command, directory=root, log=log, **settings)
        for node, log in zip(nodes, logs, strict=True)
    )
    assert first.wait(RUN_S) == 0, "\n".join(log.read_text() for log in logs)
    check(root / "rft" / "symmetric", nodes[1], logs[0])
    second.wait(LATER_S)


def test_a_trainer_of_two_machines_from_one_command(
    root: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """`ssh` leads into the nodes, and takes no environment along."""
    with two_nodes(3) as nodes:
        cases = "".join(f"{node.address}) pid={node.pid} ;;\n" for node in nodes)
        known = f"PATH={os.environ['PATH']} HOME={os.environ['HOME']}"
        ssh = tmp_path / "ssh"
        ssh.write_text(
            f"#!/bin/bash\ncase $1 in\n{cases}esac\nshift\n"
            f'exec nsenter --target=$pid --net --mount --pid --wd=. env -i {known} "$@"\n'
        )
        ssh.chmod(0o755)
        settings = environment | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "HOSTS": " ".join(node.address for node in nodes),
            "TRAINERS": "2",
            "RANKS": "1",
            "GLOO_SOCKET_IFNAME": "cable",
        }
        del settings["RAY_AUTH_MODE"], settings["RAY_AUTH_TOKEN"]
        command = [str(LAUNCH / "ray.sh"), *arguments(root, "trainers")]
        done = subprocess.run(
            [*command, "trainer.megatron.tensor_model_parallel_size=2"],
            cwd=root,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S + LATER_S,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    job = root / "rft" / "trainers"
    assert [row["step"] for row in step_rows(job)] == list(range(1, STEPS + 1)), done.stdout
    History(job / "buffer" / "experience_buffer").check_exactly_once(STEPS)


@pytest.fixture
def cluster(nodes: list[Node], root: Path, environment: dict[str, str]) -> tuple[Node, Node]:
    """A Ray that is there: the head, where jobs run, and the node that serves engines."""
    head, other = nodes
    words = [
        "--head",
        f"--node-ip-address={head.address}",
        "--num-cpus=1",
        "--include-dashboard=true",
    ]
    patient = environment | {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
    started = subprocess.run(
        head.command(*RAY, "start", *words),
        cwd=root,
        env=patient,
        capture_output=True,
        text=True,
        timeout=READY_S,
    )
    assert started.returncode == 0, started.stderr
    joined = [*RAY, "start", f"--address={head.address}:6379", "--num-cpus=8", "--block"]
    other.start(*joined, directory=root, log=root / "cluster.log", **environment)
    await_open(head, 8265)
    return head, other


def submit(
    head: Node, environment: dict[str, str], root: Path, log: Path, *words: str
) -> "subprocess.Popen[bytes]":
    settings = environment | {"RAY_API": API, "RANKS": "0", "JOB_PYTHON": sys.executable}
    return head.start(str(LAUNCH / "ray_job.sh"), *words, directory=root, log=log, **settings)


def test_a_job_of_a_cluster_that_is_there(
    cluster: tuple[Node, Node], root: Path, environment: dict[str, str]
) -> None:
    head, other = cluster
    assert (
        submit(head, environment, root, root / "job.log", *arguments(root, "job")).wait(RUN_S) == 0
    ), (root / "job.log").read_text()
    check(root / "rft" / "job", other, root / "job.log")


def test_a_job_that_is_stopped_saves_leaves_nothing_and_goes_on(
    cluster: tuple[Node, Node], root: Path, environment: dict[str, str]
) -> None:
    """`ray job stop`, as docs/launch.md has it; then the same job again."""
    (head, other), job, log = cluster, root / "rft" / "stopped", root / "stopped.log"
    words = [*arguments(root, "stopped"), f"trainer.total_steps={MANY}", "shutdown_grace_s=60"]
    words.remove(f"trainer.total_steps={STEPS}")
    submitted = submit(head, environment, root, log, *words)
    await_text(log, r"\[ *2/")
    number = re.search(r"raysubmit_\w+", log.read_text())
    assert number is not None
    stop = head.command(*RAY, "job", "stop", "--address", API, number[0])
    subprocess.run(
        stop, cwd=root, env=os.environ | environment, check=True, capture_output=True, timeout=RUN_S
    )
    submitted.wait(LATER_S)
    assert "rft: stopped by SIGTERM; run the same command again" in log.read_text()
    reached = step_rows(job)[-1]["step"]
    assert reached < MANY and checkpoints(job)[-1] == reached
    for node in (head, other):
        left = subprocess.run(
            node.command("ps", "-e", "-o", "args="), capture_output=True, text=True, check=True
        ).stdout
        assert not re.search(
            r"rft\.(train|rank|checkpoint)|EngineCore|ray::(RolloutEngine|Explorer|Synchronizer)",
            left,
        ), left
    again = root / "again.log"
    assert submit(head, environment, root, again, *words).wait(RUN_S) == 0, again.read_text()
    assert [row["step"] for row in step_rows(job)] == list(range(1, MANY + 1))
    assert re.search(rf"\[ *{reached + 1}/", again.read_text()) and not re.search(
        rf"\[ *{reached}/", again.read_text()
    )
    History(job / "buffer" / "experience_buffer").check_exactly_once(MANY)


def await_text(log: Path, pattern: str) -> None:
    deadline = time.monotonic() + RUN_S
    while not re.search(pattern, log.read_text()):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(LOOK_S)


def await_open(node: Node, port: int) -> None:
    deadline = time.monotonic() + READY_S
    probe = node.command("bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{port}")
    while subprocess.run(probe, capture_output=True).returncode != 0:
        assert time.monotonic() < deadline, f"nothing listens on {port}"
        time.sleep(LOOK_S)
