"""A trainer in miniature that publishes by memory: python depositing.py RAY NAMESPACE SYNCHRONIZER
MODEL VERSION; then it is gone.

Two ranks as threads of one process, which is no actor of Ray's, as a trainer rank is none.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from miniature import BUCKET_BYTES, Shards, ThreadMesh

from rft.config import SynchronizerConfig
from rft.sync.origins import MemoryOrigin
from rft.sync.publisher import Publisher
from rft.sync.synchronizer import SynchronizerHandle
from rft.trainer import control


def publish(publisher: Publisher, version: int) -> dict[str, float]:
    publisher.connect()
    publisher.start(version)
    publisher.release()
    for _, tensor in publisher.origin.source.parts:  # type: ignore[attr-defined]
        tensor.zero_()  # they may change now
    publisher.wait()
    return publisher.last


def deposit(
    synchronizer: SynchronizerHandle, path: Path, version: int, epoch: int
) -> dict[str, float]:
    slots, barrier = [None, None], Barrier(2)
    config = SynchronizerConfig(sync_timeout=60.0, bucket_bytes=BUCKET_BYTES)
    publishers = [
        Publisher(
            MemoryOrigin(
                ThreadMesh(rank, slots, barrier), Shards(path, rank), synchronizer, config, epoch
            )
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        return [job.result() for job in [pool.submit(publish, one, version) for one in publishers]][
            0
        ]


if __name__ == "__main__":
    address, namespace, name, path, version = sys.argv[1:]
    control.connect(address, namespace)
    print(deposit(control.actor(name), Path(path), int(version), epoch=1))
