"""Who started this process: the environments of plain starts,
torchrun, sbatch shells and srun steps.
"""

from typing import Any

import pytest

from rft.config import Config, ConfigError, LayoutConfig
from rft.preflight.fill import take_layout
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


def config_of(*layouts: LayoutConfig, **trainer: Any) -> Config:
    config = Config()
    config.trainer.layouts = list(layouts)
    for key, value in trainer.items():
        setattr(config.trainer, key, value)
    return config


def started(ranks: int, nodes: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // nodes)}


def test_the_first_layout_that_the_ranks_make_is_taken() -> None:
    layouts = [
        LayoutConfig(num_ranks=8, tensor_model_parallel_size=4),
        LayoutConfig(num_ranks=4, tensor_model_parallel_size=2),
        LayoutConfig(num_ranks=4),
    ]
    for environment, ranks, tp in ((started(8, 2), 8, 4), (started(4, 1), 4, 2), ({}, 8, 4)):
        config = config_of(*layouts)
        take_layout(config, environment)
        assert config.trainer.num_ranks == ranks
        assert config.trainer.megatron.tensor_model_parallel_size == tp
    plain = config_of(num_ranks=3)
    take_layout(plain, started(4, 1))
    assert plain.trainer.num_ranks == 3


def test_all_that_is_wrong_with_layouts_is_said_at_once() -> None:
    layouts = [LayoutConfig(num_ranks=8), LayoutConfig(num_ranks=6, tensor_model_parallel_size=4)]
    with pytest.raises(ConfigError) as refused:
        take_layout(config_of(*layouts, num_ranks=5), started(2, 1))
    said = refused.value.problems
    assert len(said) == 3
    assert "trainer.layouts[1].num_ranks=6: its sizes need a multiple of 4" in said[0]
    assert "trainer.num_ranks=5 is what trainer.layouts say" in said[1]
    assert "have 8, 6 ranks, and 2 were started on 1 node(s)" in said[2]
