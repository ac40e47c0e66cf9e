"""An engine worker that takes a save, in a process of its own: how much it read, and what it got.

python reading_worker.py MODEL WORKER ROUND
"""

import json
import sys

import torch
import xxhash

from rft.checkpoint.rank_files import OpenFiles
from rft.ground.experience import decode
from rft.ground.rounds import Round
from rft.sync.loading import PartTensor
from rft.sync.plan import Share
from rft.sync.readers import SavedWeights

model, worker, coming = sys.argv[1:]
read, count = OpenFiles.read_into, 0


def counted(files: OpenFiles, name: str, start: int, places: list[memoryview]) -> int:
    global count
    found = read(files, name, start, places)
    count += found
    return found


def digest(tensor: torch.Tensor) -> str:
    (held,) = tensor.pieces if isinstance(tensor, PartTensor) else [tensor]
    return xxhash.xxh3_128_hexdigest(held.view(torch.int16).numpy())


OpenFiles.read_into = counted  # type: ignore[method-assign]
share = Share(worker=int(worker), workers=2, kv_heads=2)
reader = SavedWeights(model, torch.device("cpu"), share)
staged = reader.stage(decode(bytes.fromhex(coming), Round))
print(json.dumps({"read": count, "digests": {name: digest(one) for name, one in staged.items()}}))
