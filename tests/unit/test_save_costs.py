"""What checkpoints cost a node: the page's table is the model's, whose bytes are those that
agents write.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from states import Ranks, State, save, trainer_config

from rft.checkpoint.catalog import list_entries
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.storage import open_storage
from rft.preflight.save_costs import cost

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
CASES = {  # as the page names them: parameters, ranks
    "0.6B, one GPU": (600_000_000, 1),
    "8B, one node of 8": (8_000_000_000, 8),
    "70B, 64 nodes of 8": (70_000_000_000, 512),
}


def row(name: str, parameters: int, ranks: int) -> str:
    two, less = (cost(parameters, 2, "adam", ranks, 8, memory) for memory in (2.0, 1.3))
    cells = [
        name,
        f"{two.checkpoint / 1e9:,.1f}",
        f"{two.part / 1e9:.2f}",
        f"{two.node_memory / 1e9:.1f}",
        f"{less.node_memory / 1e9:.1f}",
        *(f"{one:.1f}" for one in (two.copy_s, two.durable_s, two.back_s, two.disk_s)),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_page_has_what_the_model_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("<!-- costs: begin -->")[2].partition("<!-- costs: end -->")[0]
    assert table.strip().split("\n")[2:] == [row(name, *case) for name, case in CASES.items()]


def test_ranks_save_and_hold_as_many_bytes_as_it_says(memory_path: Path) -> None:
    """The state of a bf16 run, as Megatron's distributed optimizer holds it on two ranks."""
    rows, width, count, world = 512, 1024, 12, 2
    ranks = Ranks(world)

    def run(rank: int) -> int:
        state = State(
            {
                f"{kind}/w{i:02}": torch.zeros(rows, width, dtype=dtype)
                for kind, dtype in (
                    ("model", torch.bfloat16),
                    ("master", torch.float32),
                    ("exp_avg", torch.float32),
                    ("exp_avg_sq", torch.float32),
                )
                for i in range(count)
            }
        )
        manager = CheckpointManager(
            memory_path / "c", ranks.member(rank), trainer_config(memory=2.0)
        )
        manager.start(state)
        try:
            save(manager, 1, state.fill(1))
            return sum(slot.size for slot in manager._stager.slots.all)
        finally:
            manager.close()

    with ThreadPoolExecutor(world) as pool:
        held = list(pool.map(run, range(world)))
    wanted = cost(rows * width * count, 2, "adam", world, world, 2.0)
    [entry] = list_entries(open_storage(memory_path / "c"))
    assert entry.bytes == wanted.checkpoint
    slack = world * 2 * (4 * rows * width + 2**21)  # the largest piece, and whole pages
    assert wanted.node_memory <= sum(held) <= wanted.node_memory + slack
