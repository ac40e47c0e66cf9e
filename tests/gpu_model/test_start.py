"""Starts on machines with GPUs, as far as a machine without any can go: the real supervisor, Ray,
engine actors and launcher, over a made-up `nvidia-smi`; vLLM and the ranks' program stand in, and
say which GPUs they were given.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.tools.toy import write_arithmetic, write_model

from box import FakeBox

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
START_S = 240.0
RANK = """#!/bin/bash
[ "$2" = rft.run.rank ] && exec {python} {rank} "$@"
exec -a "$0" {python} "$@"
"""


class Start:
    """One start of a run, to its end, on a machine like `box`."""

    def __init__(self, directory: Path, box: FakeBox, *words: str, **environment: str):
        self.directory = directory
        write_model(
            directory / "model",
            hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, context=64,
        )  # fmt: skip
        write_arithmetic(directory, num_eval=16)
        starts, started = directory / "starts.jsonl", directory / "started"
        starts.touch()
        os.mkfifo(started)
        paths = {"STARTS": str(starts), "STARTED": str(started)}
        python = self._interpreter(box)
        site = os.pathsep.join(map(str, (HERE / "stand_ins", box.site, ROOT)))
        taskset = f"buffer.explorer_input.taskset.path={directory / 'train.jsonl'}"
        given = ["experiment=grpo", "name=started", f"model.model_path={directory / 'model'}"]
        given += [taskset, f"checkpoint_root_dir={directory / 'runs'}", "trainer.total_steps=1"]
        done = subprocess.run(
            [python, "-m", "rft.train", *given, "model.max_response_tokens=8", *words],
            env=os.environ | box.environment | {"PYTHONPATH": site} | paths | environment,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        self.output, self.code = done.stdout + done.stderr, done.returncode
        lines = starts.read_text(encoding="utf-8").splitlines()
        self.parts: dict[str, dict[str, Any]] = {
            told["part"]: told for told in map(json.loads, lines)
        }

    def _interpreter(self, box: FakeBox) -> str:
        """This one, but for the program of a rank."""
        real, packages = Path(sys.executable), Path(sys.prefix) / "lib"
        shim = box.bin / "python"
        shim.write_text(RANK.format(python=real, rank=HERE / "stand_ins/rank.py"), "ascii")
        shim.chmod(0o755)
        (box.bin.parent / "lib").symlink_to(packages)
        (box.bin.parent / "pyvenv.cfg").write_bytes((Path(sys.prefix) / "pyvenv.cfg").read_bytes())
        return str(shim)

    @property
    def cards(self) -> dict[str, str]:
        """Part -> what it sees, a rank the one that its number chooses."""
        return {
            part: told["cards"].split(",")[int(told["local"])] if "local" in told else told["cards"]
            for part, told in sorted(self.parts.items())
        }


def test_eight_cards_are_shared_out_between_ranks_and_engines(tmp_path: Path) -> None:
    start = Start(tmp_path, FakeBox(tmp_path / "box", cards=8))
    assert start.code == 0, start.output
    assert start.cards == {f"engine_{n}": str(4 + n) for n in range(4)} | {
        f"rank_{n}": str(n) for n in range(4)
    }
    assert {start.parts[f"rank_{n}"]["device"] for n in range(4)} == {"cuda"}
    arguments = start.parts["engine_0"]["arguments"]
    assert arguments["dtype"] == "bfloat16" and arguments["enforce_eager"] == "False"
    assert arguments["gpu_memory_utilization"] == "0.9" and "kv_cache_memory_bytes" not in arguments
    assert "4 trainer rank(s)       0 1 2 3" in start.output


@pytest.mark.verify
def test_one_card_is_shared_in_turns(tmp_path: Path) -> None:
    start = Start(tmp_path, FakeBox(tmp_path / "box", cards=1))
    assert start.code == 0, start.output
    assert start.cards == {"engine_0": "0", "rank_0": "0"}
    arguments = start.parts["engine_0"]["arguments"]
    assert arguments["enable_sleep_mode"] == "True"
    assert start.parts["rank_0"]["allocator"] and not start.parts["engine_0"]["allocator"]


@pytest.fixture
def ray_nodes() -> Iterator[Callable[..., str]]:
    """Starts a Ray of nodes with so many GPUs each, as each of them says; returns its address."""
    command = [sys.executable, "-m", "ray.scripts.scripts"]
    processes, place = [], tempfile.mkdtemp(prefix="rft-")  # short: a socket's path has 107 bytes

    def start(*gpus: int) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        for number, count in enumerate(gpus):
            where = [f"--port={address.rpartition(':')[2]}", "--head", f"--temp-dir={place}"]
            where = [f"--address={address}"] if number else [*where, "--include-dashboard=false"]
            more = [f"--num-gpus={count}", "--num-cpus=16", "--node-ip-address=127.0.0.1"]
            processes.append(
                subprocess.Popen(
                    [*command, "start", "--block", "--disable-usage-stats", *where, *more]
                )
            )
            assert answers(address, START_S)
        return address

    yield start
    for process in reversed(processes):
        process.terminate()
        process.wait(60)
    shutil.rmtree(place)


def answers(address: str, deadline_s: float) -> bool:
    """Whether somebody listens there before the deadline."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=deadline_s).close()
            return True
    return False


@pytest.mark.verify
def test_two_nodes_of_eight_cards(tmp_path: Path, ray_nodes: Callable[..., str]) -> None:
    """As launch/slurm.sh and launch/ray.sh start them: Ray has the GPUs of the second node."""
    words = [f"cluster.ray_address={ray_nodes(0, 8)}", "trainer.num_ranks=8"]
    words += [f"explorer.rollout_model.{key}" for key in ("engine_num=4", "tensor_parallel_size=2")]
    start = Start(tmp_path, FakeBox(tmp_path / "box", cards=8), *words)
    assert start.code == 0, start.output
    ranks = [start.cards[f"rank_{number}"] for number in range(8)]
    engines = [start.cards[f"engine_{number}"] for number in range(4)]
    assert ranks == list("01234567")
    assert sorted(",".join(engines).split(",")) == list("01234567"), "a card has two engines"


@pytest.mark.verify
def test_a_ray_that_counts_these_cards_holds_those_of_the_ranks(
    tmp_path: Path, ray_nodes: Callable[..., str]
) -> None:
    words = [f"cluster.ray_address={ray_nodes(8)}", "trainer.num_ranks=4"]
    start = Start(
        tmp_path,
        FakeBox(tmp_path / "box", cards=8),
        *words,
        "explorer.rollout_model.engine_num=2",
    )
    assert start.code == 0, start.output
    assert len(set(start.cards.values())) == 6, f"shared without being asked: {start.cards}"
