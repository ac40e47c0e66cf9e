"""Starts on machines with GPUs, as far as a machine without any can go: the real supervisor, Ray,
engine actors and launcher, over a made-up `nvidia-smi`; vLLM and the ranks' program stand in, and
say which GPUs they were given.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.tools.toy import write_arithmetic, write_model

from box import FakeBox

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
START_S = 240.0
LENGTHS = ("model.max_prompt_tokens=2048", "model.max_response_tokens=2048")
OPEN = {"RAY_AUTH_MODE": "disabled"}  # of a Ray of the test's own
RANK = """#!/bin/bash
[ "$2" = rft.run.rank ] && exec {python} {rank} "$@"
exec -a "$0" {python} "$@"
"""


def surroundings(directory: Path, box: FakeBox) -> dict[str, str]:
    """The environment of a start in `directory`, and of a Ray that has its engines."""
    return (
        os.environ
        | box.environment
        | {"PYTHONPATH": os.pathsep.join(map(str, (HERE / "stand_ins", box.site, ROOT)))}
        | {"STARTS": str(directory / "starts.jsonl"), "STARTED": str(directory / "started")}
    )


class Start:
    """One start of a run, to its end, on a machine like `box`."""

    def __init__(self, directory: Path, box: FakeBox, *words: str, **environment: str):
        self.directory = directory
        write_model(
            directory / "model",
            hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, context=4096,
        )  # fmt: skip
        write_arithmetic(directory, num_eval=16)
        (directory / "starts.jsonl").touch()
        os.mkfifo(directory / "started")
        python = self._interpreter(box)
        taskset = f"buffer.explorer_input.taskset.path={directory / 'train.jsonl'}"
        given = ["experiment=grpo", "name=started", f"model.model_path={directory / 'model'}"]
        given += [taskset, f"checkpoint_root_dir={directory / 'runs'}", "trainer.total_steps=1"]
        done = subprocess.run(
            [python, "-m", "rft.train", *given, *LENGTHS, *words],
            env=surroundings(directory, box) | environment,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        self.output, self.code = done.stdout + done.stderr, done.returncode
        lines = (directory / "starts.jsonl").read_text(encoding="utf-8").splitlines()
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

    def is_told_on_the_page(self, name: str) -> None:
        """docs/install.md shows what such a start says, but for names of places."""
        page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
        (block,) = re.findall(rf"<!-- start: {name} -->\n```\n(.*?)```", page, re.DOTALL)
        first, *said = self.output.splitlines()
        told = re.sub(r"Ray at [\d.:]+", "Ray at 10.0.0.1:6379", "\n".join(said))
        assert block.partition("\n")[2] == told.strip() + "\n"
        assert block.startswith(first.partition(";")[0])

    @property
    def cards(self) -> dict[str, str]:
        """Part -> what it sees, a rank the one that its number chooses."""
        return {
            part: told["cards"].split(",")[int(told["local"])] if "local" in told else told["cards"]
            for part, told in sorted(self.parts.items())
        }


@pytest.mark.verify  # Ray and four engine actors: half a minute
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
    start.is_told_on_the_page("eight cards")


@pytest.mark.verify
def test_one_card_is_shared_in_turns(tmp_path: Path) -> None:
    start = Start(tmp_path, FakeBox(tmp_path / "box", cards=1))
    assert start.code == 0, start.output
    assert start.cards == {"engine_0": "0", "rank_0": "0"}
    arguments = start.parts["engine_0"]["arguments"]
    assert arguments["enable_sleep_mode"] == "True"
    assert not start.parts["engine_0"]["allocator"], "vLLM's sleep wants torch's usual segments"
    start.is_told_on_the_page("one card")


@pytest.fixture
def ray_nodes() -> Iterator[Callable[..., str]]:
    """Starts a Ray of nodes with so many GPUs each, as each of them says; returns its address."""
    place = tempfile.mkdtemp(prefix="rft-")  # short: a socket's path has 107 bytes
    processes = []

    def node(environment: dict[str, str], gpus: int, *where: str) -> str:
        """A node, to its start; what it said."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where]
        more = [f"--num-gpus={gpus}", "--num-cpus=16", "--disable-usage-stats", "--log-color=false"]
        process = subprocess.Popen(
            [*command, *more], stdout=subprocess.PIPE, text=True, env=environment | OPEN
        )
        processes.append(process)
        assert process.stdout is not None
        return "".join(itertools.takewhile(lambda line: "--block" not in line, process.stdout))

    def start(environment: dict[str, str], head: int, *others: int) -> str:
        here = ("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={place}")
        found = re.search(r"--address='([\d.:]+)'", node(environment, head, *here))
        assert found is not None
        for gpus in others:
            node(environment, gpus, f"--address={found.group(1)}")
        return found.group(1)

    yield start
    for process in reversed(processes):
        process.terminate()
        process.communicate(timeout=60)
    shutil.rmtree(place)


@pytest.mark.verify
def test_two_nodes_of_eight_cards(tmp_path: Path, ray_nodes: Callable[..., str]) -> None:
    """As launch/slurm.sh and launch/ray.sh start them: Ray has the GPUs of the second node."""
    box = FakeBox(tmp_path / "box", cards=8)
    words = [
        f"cluster.ray_address={ray_nodes(surroundings(tmp_path, box), 0, 8)}",
        "trainer.num_ranks=8",
    ]
    words += [f"explorer.rollout_model.{key}" for key in ("engine_num=4", "tensor_parallel_size=2")]
    start = Start(tmp_path, box, *words, **OPEN)
    assert start.code == 0, start.output
    ranks = [start.cards[f"rank_{number}"] for number in range(8)]
    engines = [start.cards[f"engine_{number}"] for number in range(4)]
    assert ranks == list("01234567")
    assert sorted(",".join(engines).split(",")) == list("01234567"), "a card has two engines"
    start.is_told_on_the_page("two nodes of eight cards")


@pytest.mark.verify
def test_a_ray_that_counts_these_cards_holds_those_of_the_ranks(
    tmp_path: Path, ray_nodes: Callable[..., str]
) -> None:
    box = FakeBox(tmp_path / "box", cards=8)
    words = [f"cluster.ray_address={ray_nodes(surroundings(tmp_path, box), 8)}"]
    words += ["trainer.num_ranks=4", "explorer.rollout_model.engine_num=2"]
    start = Start(tmp_path, box, *words, **OPEN)
    assert start.code == 0, start.output
    assert len(set(start.cards.values())) == 6, f"shared without being asked: {start.cards}"
