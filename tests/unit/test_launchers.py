"""Who started this process: the environments of plain starts,
torchrun, sbatch shells and srun steps.
"""

import pytest

from rft.run.outer import launched, nodes_of

SBATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WORLD_SIZE": "2"}, None),  # left over in a shell: no rank, so nobody started us as one
        ({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun"),
        (SBATCH, None),  # the batch script itself: it starts the supervisor
        ({**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "slurm"),
        # srun of one task: a plain start
        ({**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            {
                **SBATCH,
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "RANK": "0",
                "WORLD_SIZE": "8",
            },
            "torchrun",
        ),
    ],
)
def test_launched(environment: dict[str, str], expected: str | None) -> None:
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 1),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, 2),
        ({"WORLD_SIZE": "4"}, 1),  # a launcher that says nothing else: ranks of one machine
        ({"WORLD_SIZE": "4", "SLURM_STEP_NUM_NODES": "2"}, 2),
        # one torchrun per node, itself started by srun: both count the same nodes, but torchrun's
        # word is about the ranks
        (
            {
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "4",
                "SLURM_STEP_NUM_NODES": "2",
                "TORCHELASTIC_RUN_ID": "x",
            },
            1,
        ),
    ],
)
def test_nodes_of(environment: dict[str, str], expected: int) -> None:
    assert nodes_of(environment) == expected
