"""`launch/torchrun.sh` on two nodes: the same command on both, tensor parallelism over the cable
between them.
"""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from two_nodes import Node, two_nodes

from bench.node_loss import ranks_of

from runs import REPOSITORY, checkpoints, step_rows, write_assets

STEPS = 4
RUN_S = 300.0
TOLD = re.compile(r"^\[ *(\d+)/\d+ .*loss", re.M)

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


class Nodes:
    """The command that runs on both of them."""

    def __init__(
        self, root: Path, processes: "list[subprocess.Popen[bytes]]", machines: list[Node]
    ):
        self.root, self.processes, self.machines = root, processes, machines

    def said(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.root.glob("node_*.log")))

    def wait_step(self, least: int) -> None:
        for _ in range(int(RUN_S / 0.2)):
            if any(int(step) >= least for step in TOLD.findall(self.said())):
                return
            ended, _ = psutil.wait_procs([psutil.Process(self.processes[0].pid)], timeout=0.2)
            assert not ended, self.said()
        raise AssertionError(self.said())

    def rank(self, node: int) -> psutil.Process:
        """That which torchrun has started there."""
        (found,) = ranks_of(self.processes[node].pid)
        return psutil.Process(found)

    def end(self) -> list[int]:
        return [process.wait(RUN_S) for process in self.processes]


@contextlib.contextmanager
def started(place: Path, nnodes: str, *more: str, count: int = 2, meet: int = 0) -> Iterator[Nodes]:
    """On nodes that know each other by name, with one file system for all that is written; they
    meet at node `meet`.
    """
    shared, disk = place / "shared", place / "disk"
    shared.mkdir()
    disk.mkdir()
    write_assets(shared / "assets")
    root = disk / "shared"  # as the nodes see it
    command = [
        str(REPOSITORY / "launch" / "torchrun.sh"),
        "experiment=sft",
        "name=run",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={root}",
        f"model.model_path={root / 'assets' / 'model'}",
        "buffer.train_batch_size=8",
        f"buffer.trainer_input.experience_buffer.path={root / 'assets' / 'train.jsonl'}",
        *(["trainer.megatron.tensor_model_parallel_size=2"] if count == 2 else []),
        *more,
    ]
    with two_nodes(count, disk) as nodes:
        settings = {
            "PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY),
            "RANKS": "1",
            "NNODES": nnodes,
            "MASTER_ADDR": nodes[meet].address,
            "GLOO_SOCKET_IFNAME": "cable",
        }
        for node in nodes:
            node.bind(shared, root)
        processes = [
            node.start(
                *command,
                directory=REPOSITORY,
                log=place / f"node_{number}.log",
                NODE_RANK=str(number),
                **settings,
            )
            for number, node in enumerate(nodes)
        ]
        yield Nodes(place, processes, nodes)


def test_the_same_command_on_two_nodes(tmp_path: Path) -> None:
    with started(tmp_path, "2", f"trainer.total_steps={STEPS}") as run:
        assert run.end() == [0, 0], run.said()
    job = tmp_path / "shared" / "rft" / "run"
    assert [row["step"] for row in step_rows(job)] == list(range(1, STEPS + 1))
    assert checkpoints(job) == [STEPS]


def test_the_node_of_rank_0_goes_and_that_where_all_meet_stays(tmp_path: Path) -> None:
    """torch tells each agent once where the first rank 0 is, and ranks of nodes that stay then look
    for it there; the script has it asked again for every start.
    """
    layouts = "trainer.layouts=[{num_ranks:3},{num_ranks:2}]"
    more = [layouts, "trainer.total_steps=200", "trainer.save_interval=5"]
    more += ["buffer.train_batch_size=12", "buffer.total_epochs=1000"]
    with started(tmp_path, "2:3", *more, count=3, meet=2) as run:
        run.wait_step(4)
        run.machines[0].lose()
        run.processes.pop(0).wait(RUN_S)
        assert run.end() == [0, 0], run.said()
        said = run.said()
    assert "of trainer.layouts: 2 rank(s)" in said, said
    assert step_rows(tmp_path / "shared" / "rft" / "run")[-1]["step"] == 200


def test_a_directory_of_each_nodes_own_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    own = f"checkpoint_root_dir={tmp_path / 'disk' / 'own'}"
    with started(tmp_path, "2", own, f"trainer.total_steps={STEPS}") as run:
        assert all(run.end()), run.said()
        said = run.said()
    # once by each node, for their logs have no common directory either
    assert said.count("Mount one file system there on all nodes, or set") == 2, said
    assert not TOLD.findall(said), said


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_that_is_killed_comes_back_with_the_other(tmp_path: Path, node: int) -> None:
    """No node is lost: torchrun starts the ranks of both again. Their agents have states, each a
    part that the other's rank needs too: nothing was filled of them, and they go on from the disk,
    where there is none from the start.
    """
    more = ["trainer.total_steps=30", "trainer.memory_interval=1", "trainer.num_ranks=2"]
    with started(tmp_path, "2:2", *more, f"trainer.save_interval={200 * (1 - node) + 2}") as run:
        run.wait_step(4)
        run.rank(node).kill()
        assert run.end() == [0, 0], run.said()
        said = run.said()
    steps = [row["step"] for row in step_rows(tmp_path / "shared" / "rft" / "run")]
    assert steps == list(range(1, 31))
    told = re.findall(r"goes on from (\w+|the start) behind step \d+: ", said)
    if node:  # nothing is said where the disk has the last step that was made
        assert set(told) <= {"disk"}, said
    else:
        assert told == ["the start"], said
