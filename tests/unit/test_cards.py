"""Who gets which GPU: a row for every way to start a run, and what is refused with the way that
works.

The machine is made up, the config is composed, filled and dealt as at a start. Commands of README
and docs/launch.md stand beside their rows.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from rft import config as configs
from rft.config import Config, ConfigError
from rft.ground.errors import refuse_all
from rft.preflight.fill import fill_config
from rft.preflight.rules import Refusals
from rft.run import cards
from rft.run.cards import Card, Machine

ROOT = Path(__file__).resolve().parents[2]
AUXILIARY = "+explorer.auxiliary_models=[{name:judge,model_path:/m}]"
RAY = "cluster.ray_address=10.0.0.1:6379"
TP2 = "trainer.megatron.tensor_model_parallel_size=2"
ENGINES, WIDE = "explorer.rollout_model.engine_num", "explorer.rollout_model.tensor_parallel_size"
RANKS, NODES = "trainer.num_ranks", "cluster.node_num"
APART = "synchronizer.sync_method=checkpoint"


def box(count: int, visible: str | None = None, **more: object) -> Machine:
    names = tuple(map(str, range(count))) if visible is None else tuple(visible.split(","))
    found = tuple(Card(number, "NVIDIA H100 80GB HBM3") for number in range(count))
    return Machine(
        found, "580.65", "nvidia-smi", tuple(filter(None, names)), visible is not None, **more
    )  # type: ignore[arg-type]


def task(local: int, visible: str | None = None, launcher: str = "torchrun") -> Machine:
    """A rank of a launcher, on a node of eight GPUs with `local` ranks."""
    return box(8, visible, launcher=launcher, local_ranks=local)


@dataclass(frozen=True)
class Row:
    """`dealt`: of ranks | of engines, "4,5" for one that has two | of nobody."""

    command: str
    machine: Machine
    words: str = ""
    dealt: str = ""
    num_ranks: int | None = None
    engine_num: int | None = None
    colocate: bool = False
    device: str = "cuda"


ONE, EIGHT, NONE, ALL = box(1), box(8), Machine(), "0 1 2 3 4 5 6 7"
HALVES = "0 1 2 3 | 4 5 6 7"
TRAIN, TURNS = f"mode=train {APART}", "cluster.colocate=true"
SLURM = task(8, launcher="slurm")
TABLE = [
    # one machine
    Row("python -m rft.train experiment=grpo", NONE, "", "", 1, 1, device="cpu"),
    Row("python -m rft.train experiment=grpo", EIGHT, "", HALVES, 4, 4),
    Row("python -m rft.train experiment=grpo", ONE, "", "0 | 0", 1, 1, colocate=True),
    Row("two cards", box(2), "", "0 | 1", 1, 1),
    Row("the user's own cards", box(8, "6,2,4"), "", "6 2 | 4", 2, 1),
    Row("no card for this process", box(8, ""), "", "", 1, 1, device="cpu"),
    Row("a part of a card", box(1, "MIG-3a"), "", "MIG-3a | MIG-3a", 1, 1, colocate=True),
    Row("on the CPUs of a GPU machine", EIGHT, "device=cpu", "", 1, 1, device="cpu"),
    Row("fewer than there are", EIGHT, "cluster.gpu_per_node=2", "0 | 1", 1, 1),
    Row("engines asked for", EIGHT, f"{ENGINES}=2", "0 1 2 3 4 5 | 6 7", 6, 2),
    Row("ranks asked for", EIGHT, f"{RANKS}=6", "0 1 2 3 4 5 | 6 7", 6, 2),
    Row("both", EIGHT, f"{RANKS}=2 {ENGINES}=3", "0 1 | 2 3 4 | 5 6 7", 2, 3),
    Row("wide engines", EIGHT, f"{WIDE}=2", "0 1 2 3 | 4,5 6,7", 4, 2),
    Row("whole copies of the model", box(7), TP2, "0 1 2 3 | 4 5 6", 4, 3),
    Row("a judge beside", EIGHT, AUXILIARY, "0 1 2 3 | 4 5 6 7", 4, 3),
    Row("turns", box(2), TURNS, "0 1 | 0 1", 2, 2, True),
    Row("turns, wide", box(4), f"{TURNS} {WIDE}=2", "0 1 2 3 | 0,1 2,3", 4, 2, True),
    Row("turns and a judge", box(2), f"{TURNS} {AUXILIARY}", "0 | 0 1", 1, 1, True),
    # modes
    Row("python -m rft.train mode=train", EIGHT, TRAIN, ALL, 8, 1),
    Row("mode=explore", box(2), f"mode=explore {APART}", "| 0 1", engine_num=2),
    Row("mode=bench", box(2), f"mode=bench {APART}", "| 0 1", engine_num=2),
    Row("rft serve", box(3), f"mode=serve {WIDE}=2 {APART}", "| 0,1 | 2", engine_num=1),
    # launchers
    Row("RANKS=2 launch/torchrun.sh", task(2), f"{RANKS}=2", "0 1 | 2 | 3 4 5 6 7", 2, 1),
    Row("RANKS=8 NNODES=2 launch/torchrun.sh", task(8), f"{RANKS}=16 {RAY}", ALL, 16, 1),
    Row("sbatch --nodes=1 launch/slurm.sh", box(8, "0,1,2,3,4,5,6,7"), "", HALVES, 4, 4),
    Row("launch/slurm_sweep.sh", EIGHT, "", HALVES, 4, 4),
    Row("sbatch --nodes=3 launch/slurm.sh", EIGHT, f"{RANKS}=8 {RAY} {ENGINES}=16", ALL, 8, 16),
    Row("TRAINER_NODES=2 sbatch --nodes=6 launch/slurm.sh", SLURM, f"{RANKS}=16 {RAY}", ALL, 16, 1),
    Row("srun --gpus-per-task=1", task(8, "3", "slurm"), f"{RANKS}=8 {RAY}", "", 8, 1),
    Row("launch/ray.sh", EIGHT, RAY, ALL, 8, 1),
    Row("RANKS=4 launch/ray_job.sh", box(8, "4,5,6,7"), f"{RANKS}=4 {RAY}", "4 5 6 7", 4, 1),
    Row("planned for two nodes", EIGHT, f"{NODES}=2 {RAY} {ENGINES}=8", ALL, 8, 8),
    Row("planned on a desk", NONE, "device=cuda cluster.gpu_per_node=8", HALVES, 4, 4),
]


def filled(words: str, machine: Machine) -> Config:
    given = ["name=dealt", "model.model_path=/m", *words.split()]
    (draft,) = configs.stage_drafts(configs.compose(given))
    refusals = Refusals()
    fill_config(draft.config, refusals, machine)
    refuse_all(refusals.sentences())
    return draft.config


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.command} {row.words}")
def test_every_part_of_every_start_has_its_own_cards(row: Row) -> None:
    config = filled(row.words, row.machine)
    assert (config.device, config.cluster.colocate) == (row.device, row.colocate)
    assert row.engine_num in (None, config.explorer.rollout_model.engine_num)
    assert row.num_ranks in (None, config.trainer.num_ranks)
    dealt = config.cluster.cards
    engines = list(dealt.engines.values())
    parts = [dealt.ranks, engines, dealt.spare]
    assert [" ".join(part) for part in parts] == [
        part.strip() for part in f"{row.dealt}||".split("|")[:3]
    ]
    apart = [*",".join(engines).split(","), *dealt.spare, *([] if row.colocate else dealt.ranks)]
    assert len(apart) == len(set(apart)), "a card has two parts"


def test_every_way_to_start_that_the_pages_name_has_a_row() -> None:
    pages = (ROOT / "README.md", ROOT / "docs/launch.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    starts = set(re.findall(r"launch/\w+\.sh|python -m rft\.train", text))
    assert len(starts) >= 6
    for start in starts:
        assert any(start in row.command for row in TABLE), f"no row of {start}"


REFUSED = {  # machine, words -> what is said, with the way that works
    "one card, apart": (ONE, "cluster.colocate=false", "cluster.colocate=true"),
    "too many ranks": (box(2), "trainer.num_ranks=3", "launch/slurm.sh"),
    "too many engines": (box(2), f"{ENGINES}=2 trainer.num_ranks=1", "cluster.colocate=true"),
    "no card": (NONE, "device=cuda", "or set device=cpu"),
    "uneven turns": (box(4), "cluster.colocate=true trainer.num_ranks=3 "
                     f"{ENGINES}=2", "both numbers are equal"),
    "a card for each task": (task(8, "3", "slurm"), "trainer.num_ranks=8", "--gpu-bind=none"),
    "no whole copy": (box(8), f"{ENGINES}=1 {TP2}", "no multiple of the 2"),
    "too wide": (box(2), f"mode=serve {WIDE}=4 {APART}", "lower explorer.rollout_model.engine_num"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_what_can(case: str) -> None:
    machine, words, way = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        filled(words, machine)
    assert way in str(refused.value)


def test_stages_do_not_take_cards_from_each_other() -> None:
    """What one stage was dealt says nothing to the next (in one process they follow each other)."""
    first = filled("", EIGHT).cluster.cards
    assert filled("", EIGHT).cluster.cards == first
    train = filled(f"mode=train {APART}", EIGHT)
    assert len(train.cluster.cards.ranks) == 8


def test_the_device_files_are_counted_where_the_driver_has_no_tool(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm"):  # of a container
        (tmp_path / "dev" / name).touch()
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release\n")
    machine = cards.look({"PATH": str(tmp_path)}, tmp_path)
    assert (machine.visible, machine.driver, machine.source) == (
        ("0", "1"),
        "580.65.06",
        "device files",
    )
    assert cards.look({"PATH": "/nowhere"}, tmp_path / "empty") == Machine()


@pytest.mark.parametrize(
    ("told", "visible"),
    [
        *(("", ""), ("-1", ""), ("1", "1"), ("1,0", "1 0"), ("0,7,1", "0")),
        *(("GPU-ab,1", "GPU-ab 1"), ("MIG-ab", "MIG-ab")),
        *(("none", ""), ("NoDevFiles", ""), ("void", ""), ("1,none,0", "1")),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    told: str, visible: str, tmp_path: Path
) -> None:
    (tmp_path / "dev").mkdir()
    for number in range(2):
        (tmp_path / f"dev/nvidia{number}").touch()
    environment = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": told}
    assert " ".join(cards.look(environment, tmp_path).visible) == visible
    assert cards.look(environment, tmp_path / "no GPU").visible == ()


def test_a_uuid_is_that_of_a_gpu_that_the_driver_tells(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, H100, GPU-ab12, 81559, 0, 580.65'\n")
    tool.chmod(0o755)
    for told, visible in (("GPU-ab", ("GPU-ab",)), ("GPU-cd,0", ()), ("0,GPU-cd", ("0",))):
        environment = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": told}
        assert cards.look(environment).visible == visible


def test_an_engine_that_is_added_takes_cards_that_nobody_has() -> None:
    seats = cards.Seats(filled(f"{RANKS}=2 {ENGINES}=3", EIGHT).cluster.cards)
    living = ["engine_0", "engine_1", "engine_2"]
    assert seats.free(living) == ["5", "6", "7"]
    seats.take("engine_3", 2, living)
    assert seats.of_engine["engine_3"] == "5,6" and seats.free([*living, "engine_3"]) == ["7"]
    seats.take("engine_1", 1, living)
    assert seats.of_engine["engine_1"] == "3", "one that is started again has its own"
    living = ["engine_0", "engine_2", "engine_3"]
    assert seats.free(living) == ["3", "7"], "one that was removed has none"
    assert not cards.Seats(filled("", NONE).cluster.cards).free(["engine_0"])


def test_the_table_says_who_computes_where() -> None:
    told = "\n".join(cards.table(filled("", EIGHT), EIGHT))
    assert "8 x NVIDIA H100 80GB HBM3, driver 580.65" in told
    assert "4 trainer rank(s)       0 1 2 3" in told and "engine_3                7" in told
    assert "in turns with the rank there" in "\n".join(cards.table(filled("", ONE), ONE))
