"""Which transport is chosen when, and why. Pure; who asks is at the right of each line.

| bytes | between | transport | because | asks |
| --- | --- | --- | --- | --- |
| host memory | trainer rank and engine, engine and engine | `sockets` | they go from and to the \
tensors themselves; a death is the end of a file | - |
| packed, of a device | trainer rank and engine worker on one machine | `ipc` | the worker reads \
them where they lie, over NVLink if the cards are two; no kernel of one waits for one of the \
other, so turns on one card do not matter | `rft.sync.links.decide` |
| the same | where one cannot open the other's memory, or on two machines | `nccl` | a \
communicator of the two | the same |
| the same | workers t of all engines of one shape, all on one machine | `ipc` | everybody copies \
from the root's memory | `rft.sync.groups.join_group` |
| the same | on several machines, or where IPC did not work | `nccl` | a broadcast: a byte \
passes every link once | the same |
| the same | a worker that catches up alone: it joined late, or a bucket of a broadcast was \
wrong there | `wire` | through host memory and the socket: no communicator is built for it | \
`rft.sync.links.WireLink` |

CUDA IPC does not need the other card to be visible in this process: since CUDA 10.1 a handle is
opened into the address space of one's own card (NCCL relies on it, `transport/p2p.cc`). What it
needs is a way between the cards, and one kernel, one user and no wall of a container between the
processes. So nobody asks for lists of cards: the pair tries it, on a few bytes, before it counts on
it.
"""

from rft.config import Config
from rft.ground.rounds import HOST, PACKED

SOCKETS, IPC, NCCL, WIRE = "sockets", "ipc", "nccl", "wire"
WORDS = {
    SOCKETS: "sockets",
    IPC: "CUDA IPC",
    NCCL: "NCCL",
    WIRE: "sockets, through host memory",
}


def of_pair(kind: str, one_machine: bool, opens: bool = True, alone: bool = False) -> str:
    """Of a trainer rank and an engine worker. `opens`: the worker could open memory of the rank's;
    `alone`: the worker catches up, outside of a round of its group.
    """
    if kind == HOST:
        return SOCKETS
    if alone:
        return WIRE
    return IPC if one_machine and opens else NCCL


def of_group(kind: str, machines: int, opens: bool = True) -> str:
    """Of the workers of one number in all engines of one shape, on so many machines."""
    if kind == HOST:
        return SOCKETS
    return IPC if machines == 1 and opens else NCCL


def told(config: Config) -> str:
    """For the start of a run: what is expected of the layout; each link still tries for itself."""
    rollout = config.explorer.rollout_model
    engines, one_machine = int(rollout.engine_num or 1), config.cluster.ray_address is None
    kind, among = (PACKED if config.device == "cuda" else HOST), 1 if one_machine else engines
    line = f"weights over {WORDS[of_pair(kind, one_machine)]}"
    if engines > 1 and config.synchronizer.receive != "direct":
        way = WORDS[of_group(kind, among)]
        line += f", passed on from engine to engine over {way} ({engines} engines)"
    return line
