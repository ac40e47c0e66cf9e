"""Ranks that the user's own torchrun started, or srun: two, with tensor parallelism, through a
supervised and a grpo stage, whose weights reach the engine through memory.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runs import REPOSITORY, History, Run, step_rows, torchrun, write_assets

GRACE_S = 20.0  # shutdown_grace_s: the sidecar's, once torchrun is gone
STEPS = {"sft_warmup": 3, "rft": 6}
COMMAND = [
    "experiment=quickstart",
    "monitor=none",
    "trainer.num_ranks=2",
    "trainer.megatron.tensor_model_parallel_size=2",
    f"stages.0.trainer.total_steps={STEPS['sft_warmup']}",
    "stages.0.trainer.stop_at_loss=null",
    "stages.0.buffer.train_batch_size=16",
    f"stages.1.trainer.total_steps={STEPS['rft']}",
    "stages.1.explorer.eval_interval=0",
    "stages.1.trainer.save_interval=2",
    "stages.1.buffer.batch_size=4",
    "stages.1.algorithm.repeat_times=4",
    "stages.1.synchronizer.sync_method=memory",
    "stages.1.synchronizer.max_staleness=0",
    "explorer.rollout_model.kv_cache_gb=0.25",
]

TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32

pytestmark = pytest.mark.timeout(600)


def check_ends_well(command: list[str], root: Path, steps: dict[str, int]) -> None:
    with torchrun(2, *command) as run:
        assert run.end(timeout=300, lingering=GRACE_S) == 0
        assert not [line for line in run.errors().splitlines() if line.startswith("rft: ")]
    assert list(json.loads(run.lines[-1])["quickstart"]) == ["eval_sft", "eval_rft", "seconds"]
    for stage, number in steps.items():
        assert [row["step"] for row in step_rows(root / stage)] == list(range(1, number + 1))
    History(root / "rft" / "buffer" / "experience_buffer").check_exactly_once(steps["rft"])


@pytest.mark.verify
def test_torchrun(tmp_path: Path) -> None:
    """Both stages, and nothing is left. Every step trained on what the version before it has
    sampled, and trainer and engine agree about its probabilities.
    """
    root = tmp_path / "rft" / "quickstart"
    check_ends_well([*COMMAND, f"checkpoint_root_dir={tmp_path}"], root, STEPS)
    rows = step_rows(root / "rft")
    assert max(row["staleness/token_max"] for row in rows) == 0
    assert max(row["logprob_diff/max"] for row in rows) < TOLERANCE
    assert all(row["staleness/unversioned_tokens"] == 0 for row in rows)


@pytest.mark.verify  # `test_failures` has a part that dies, the test above a run that ends well
def test_torchrun_when_a_part_dies(tmp_path: Path) -> None:
    """And may not come back: all end. The same command again goes on and ends well. Nothing is left
    either time.
    """
    steps = {**STEPS, "rft": 30}
    command = [
        *COMMAND,
        f"checkpoint_root_dir={tmp_path}",
        f"stages.1.trainer.total_steps={steps['rft']}",
    ]
    with torchrun(2, *command, "cluster.max_restarts=0") as run:
        run.wait_for("reward")
        run.wait_step(3)
        run.find("ray::Explorer").kill()
        assert run.end(lingering=GRACE_S) != 0
        told = [line for line in run.errors().splitlines() if line.startswith("rft: ")]
        assert len(told) == 1 and "explorer failed while exploring" in told[0]
        assert not any("finished" in line for line in run.lines)
    check_ends_well(command, tmp_path / "rft" / "quickstart", steps)


@pytest.mark.verify
def test_a_killed_rank_of_files_goes_on_from_memory(tmp_path: Path) -> None:
    """Nobody of ours lives then: torchrun does, and starts both ranks again."""
    assets = write_assets(tmp_path / "assets")
    launcher = [sys.executable, "-m", "rft.run.loopback", "--nproc-per-node=2", "--max-restarts=1"]
    command = [
        "experiment=sft",
        "name=run",
        "monitor=none",
        f"checkpoint_root_dir={tmp_path}",
        f"model.model_path={assets / 'model'}",
        "buffer.train_batch_size=8",
        f"buffer.trainer_input.experience_buffer.path={assets / 'train.jsonl'}",
        "trainer.num_ranks=2",
        "trainer.megatron.tensor_model_parallel_size=2",
        "trainer.memory_interval=1",
        "trainer.total_steps=60",
    ]
    with Run([*launcher, "-m", "rft.train", *command]) as run:
        run.wait_step(3)
        ranks = [one for one in run.family() if "rft.train" in one.cmdline()]
        max(ranks, key=lambda one: len(one.parents())).kill()
        run.wait_for(r"goes on from memory behind step \d+: ")
        assert run.end(timeout=300) == 0
    rows = step_rows(tmp_path / "rft" / "run")
    assert [row["step"] for row in rows] == list(range(1, 61))


@pytest.mark.verify
def test_a_single_rank_of_files_that_is_stopped_is_ended(tmp_path: Path) -> None:
    """A run of files has no sidecar. Nothing is left."""
    one = ["trainer.num_ranks=1", "trainer.megatron.tensor_model_parallel_size=1"]
    long = "stages.0.trainer.total_steps=100000"
    with torchrun(1, *COMMAND, *one, long, f"checkpoint_root_dir={tmp_path}") as run:
        run.wait_step(1)
        ranks = [one for one in run.family() if "rft.train" in one.cmdline()]
        rank = max(ranks, key=lambda one: len(one.parents()))
        rank.suspend()
        assert run.end() != 0
        assert f"(process {rank.pid}) has been stopped for 30 s, and is killed" in run.errors()


@pytest.mark.verify
def test_refused_in_one_line_on_all_ranks(tmp_path: Path) -> None:
    """World size and num_ranks differ: every rank ends with the code of a refused config, one of
    them says why.
    """
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "rft.train",
    ]
    one = ["trainer.num_ranks=1", "trainer.megatron.tensor_model_parallel_size=1"]
    command = [*launcher, *COMMAND, *one, f"checkpoint_root_dir={tmp_path}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    refused = [line for line in done.stderr.splitlines() if line.startswith("rft: ")]
    assert len(refused) == 1 and "trainer.num_ranks=1" in refused[0] and "2 ranks" in refused[0]


@pytest.mark.verify
def test_ranks_of_a_launcher_without_a_store_all_hear_the_refusal(tmp_path: Path) -> None:
    """As srun starts them: the store is rank 0's own, who stays until the other has heard."""
    command = [sys.executable, "-m", "rft.train", *COMMAND, "trainer.num_ranks=3"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [*command, f"checkpoint_root_dir={tmp_path}"],
            cwd=REPOSITORY,
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = "".join(rank.communicate(timeout=200)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert said.count("rft: ") == 1 and "Traceback" not in said, said
