"""Ranks that save step 1 to disk and keep steps 2 and 3 in memory, then wait to be killed; with
PARTS, save all three to disk, and have so much memory for it; `apart`, each rank is on a node of
its own, with a control directory of its own, and each state on two:
python kept_trainer.py ROOT WORLD EPOCH [PARTS | apart].
"""

import sys
import threading
from pathlib import Path

from states import PATIENCE, Member, Ranks, apart, large, save, trainer_config, until, whole

from rft.checkpoint.manager import CheckpointManager


def train(root: Path, member: Member, epoch: int, parts: float, is_apart: bool) -> None:
    state, config = whole(), trainer_config(memory_interval=1, replicas=int(is_apart))
    if parts:
        state, config = large(), trainer_config(memory=parts)
    more = apart(root, member.rank) if is_apart else {}
    manager = CheckpointManager(root, member, config, epoch=epoch, log_dir=root.parent, **more)
    manager.start(state)
    save(manager, 1, state.fill(1))
    for step in (2, 3):
        member.barrier("the next step")
        if parts:
            save(manager, step, state.fill(step))
            continue
        manager.save(step, state.fill(step), {"seen": step}, full=False, memory=True)
        manager.before_update()
    if is_apart:
        until(lambda: manager.metrics()["checkpoint/replicated"] == 3, "two nodes have it")
    manager._stager.await_done()  # its agent has been told of the last one
    member.barrier("all is staged")


if __name__ == "__main__":
    root, ranks, epoch = Path(sys.argv[1]), Ranks(int(sys.argv[2])), int(sys.argv[3])
    is_apart = sys.argv[4:] == ["apart"]
    parts = float(sys.argv[4]) if len(sys.argv) > 4 and not is_apart else 0.0
    threads = [
        threading.Thread(target=train, args=(root, ranks.member(rank), epoch, parts, is_apart))
        for rank in range(ranks.world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    print("staged", flush=True)
    sys.stdin.read()
