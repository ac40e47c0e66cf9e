"""Do processes of this machine reach each other the way that trainer ranks do? A part of `rft
doctor`.

    python -m rft.tools.handshake DEVICE RANK RANKS STORE_FILE SECONDS

Every process chooses its device as a rank would, joins the others and adds its number to theirs.
Out of the first: one line of JSON with the backend, the device, its memory and how many GPUs torch
sees; anything that goes
wrong is a traceback and exit code 1.
"""

import json
import sys
from datetime import timedelta

from rft.ground import device as devices


def main(argv: list[str]) -> None:
    import torch
    import torch.distributed as dist

    kind, rank, ranks, store, seconds = argv[0], int(argv[1]), int(argv[2]), argv[3], float(argv[4])
    device = devices.choose(kind, rank)
    device.activate()
    dist.init_process_group(
        device.backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    number = torch.full((1024,), float(rank + 1), device=device.torch)
    dist.all_reduce(number)
    expected = ranks * (ranks + 1) / 2
    if number.tolist() != [expected] * 1024:
        raise RuntimeError(
            f"all-reduce over {device.backend} gave {number[0].item()}, not {expected}"
        )
    if rank == 0:
        print(
            json.dumps(
                {
                    "backend": device.backend,
                    "device": device.describe(),
                    "memory": device.memory_bytes(),
                    "ranks": ranks,
                    "cards": devices.cards_seen(),
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
