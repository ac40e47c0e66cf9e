"""`launch/torchrun.sh` on two nodes: the same command on both, tensor parallelism over the cable
between them.
"""

import sys
from pathlib import Path

import pytest
from two_nodes import two_nodes

from runs import REPOSITORY, checkpoints, step_rows, write_assets

STEPS = 4
RUN_S = 300.0

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


def test_the_same_command_on_two_nodes(tmp_path: Path) -> None:
    assets = write_assets(tmp_path / "assets")
    command = [
        str(REPOSITORY / "launch" / "torchrun.sh"),
        "experiment=sft",
        "name=run",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={tmp_path}",
        f"model.model_path={assets / 'model'}",
        "buffer.train_batch_size=8",
        f"buffer.trainer_input.experience_buffer.path={assets / 'train.jsonl'}",
        f"trainer.total_steps={STEPS}",
        "trainer.megatron.tensor_model_parallel_size=2",
    ]
    with two_nodes() as nodes:
        settings = {
            "PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY),
            "RANKS": "1",
            "NNODES": "2",
            "MASTER_ADDR": nodes[0].address,
            # as on any machine whose name is not that of the interface
            "GLOO_SOCKET_IFNAME": "cable",
        }
        logs = [tmp_path / f"node_{number}.log" for number in range(2)]
        started = [
            node.start(*command, directory=tmp_path, log=log, NODE_RANK=str(number), **settings)
            for number, (node, log) in enumerate(zip(nodes, logs, strict=True))
        ]
        codes = [process.wait(RUN_S) for process in started]
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    job = tmp_path / "rft" / "run"
    assert [row["step"] for row in step_rows(job)] == list(range(1, STEPS + 1))
    assert checkpoints(job) == [STEPS]
