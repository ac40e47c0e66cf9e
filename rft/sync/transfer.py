"""How much memory of its GPU a process gives to the transfer of weights, and how large a message is
for that. Pure; loads no torch.

    trainer rank   a link to each tensor-parallel worker of the engine that takes its stream
    engine worker  a link from each trainer rank whose stream it takes, and one group of engines

In: numbers of ranks, engines and their workers. Out: bytes, all of them taken as the links are made
and kept: messages and NCCL's own buffers. Not in it: a block of a rank's weights that is not in one
piece there, of which each link of a rank holds one at a time; and what NCCL's and torch's code
takes of a card, whoever uses it.

NCCL's part is what its sources say (`init.cc`, `computeBuffSizes`; not read again here and never
measured): for each peer, direction and channel a buffer of each protocol. Their sizes are of the
process, and its collectives need them too, so not they are chosen here but how many channels a
communicator may have. Where memory of another process is read in place (CUDA IPC) it is not taken.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rft.config import Config

MEBI = 2**20
BOUND = 512 * MEBI  # of one process
SENT, RECEIVED, PASSED = 2, 1, 4  # messages of a link at its rank and at its worker; of a group
LEAST, MOST = 2 * MEBI, 32 * MEBI  # of a message: a few launches of kernels must be worth it
# NCCL's protocols: lines per thread, threads, steps, bytes
LL = 8 * 512 * 8 * 16
LL128 = 120 * 640 * 8 * 8
SIMPLE = 4 * MEBI
VARIABLES = {"NCCL_BUFFSIZE": SIMPLE, "NCCL_LL_BUFFSIZE": LL, "NCCL_LL128_BUFFSIZE": LL128}
OWN = 4 * MEBI  # of a communicator, about: its tables, and the work that waits
# channels of one communicator, and of all links of a process together, if there are fewer than that
OF_ONE, OF_LINKS = 4, 8
RING = 2  # neighbours in a group


@dataclass(frozen=True)
class Transfer:
    """`links`: pairs with one other process; `messages`: of all of them and of the group."""

    links: int
    messages: int
    groups: int
    message_bytes: int

    def nccl_bytes(self, environment: Mapping[str, str] = os.environ) -> int:
        """If everything goes over it."""
        channel = sum(int(environment.get(name, usual)) for name, usual in VARIABLES.items())
        buffers = self.links * channels(self.links) + self.groups * RING * OF_ONE
        return buffers * channel + (self.links + self.groups) * OWN

    def bytes(self, environment: Mapping[str, str] = os.environ) -> int:
        return self.messages * self.message_bytes + self.nccl_bytes(environment)


def channels(links: int) -> int:
    """Of each communicator of two, in a process with so many (NCCL: `max_ctas`)."""
    return min(OF_ONE, max(1, OF_LINKS // max(1, links)))


def at_rank(workers: int, message_bytes: int) -> Transfer:
    """`workers`: of one engine, which are served at a time."""
    return Transfer(workers, SENT * workers, 0, message_bytes)


def at_worker(ranks: int, engines: int, message_bytes: int) -> Transfer:
    """`engines`: of one shape. Streams are dealt over them (`rft.sync.fanout`)."""
    links, groups = -(-ranks // engines), int(engines > 1)
    return Transfer(links, RECEIVED * links + groups * PASSED, groups, message_bytes)


def message_bytes(ranks: int, engines: int, workers: int) -> int:
    """The largest message with which both ends stay below the bound; the least one, where none
    does.
    """
    size = MOST
    while size > LEAST and most_bytes(ranks, engines, workers, size) > BOUND:
        size //= 2
    return size


def most_bytes(ranks: int, engines: int, workers: int, size: int) -> int:
    ends = at_rank(workers, size), at_worker(ranks, engines, size)
    return max(end.bytes({}) for end in ends)


def of_config(config: Config) -> tuple[Transfer, Transfer] | None:
    """At a trainer rank and at an engine worker; None where weights do not go from card to card."""
    sync, rollout = config.synchronizer, config.explorer.rollout_model
    if (config.device, config.mode, sync.sync_method) != ("cuda", "both", "nccl"):
        return None
    engines, workers = int(rollout.engine_num or 1), rollout.tensor_parallel_size
    ranks = int(config.trainer.num_ranks or 1)
    size = sync.bucket_bytes or message_bytes(ranks, engines, workers)
    return at_rank(workers, size), at_worker(ranks, engines, size)


def told(config: Config) -> str | None:
    """For the start of a run, and for `rft doctor`."""
    ends = of_config(config)
    if ends is None:
        return None
    rank, worker = ((end.bytes() / MEBI, end.links) for end in ends)
    return (
        f"weights in messages of {ends[0].message_bytes / MEBI:.0f} MiB; of its card a trainer "
        f"rank gives them {rank[0]:.0f} MiB ({rank[1]} links), an engine worker {worker[0]:.0f} "
        f"MiB ({worker[1]} links{', a group' if ends[1].groups else ''})"
    )
