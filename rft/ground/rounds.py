"""What a round of weights is, for all who have a part in it: the same records from the trainer to
the worker inside vLLM.

    publisher ── digest, Location ──► synchronizer ── Round ──► engine ── Round ──► its workers
              ◄── numbers ──────────               ◄── Installed ──    ◄── Received, WorkerState ──

In between nobody changes a field but `location`, which the engine's actor may have to bring within
its workers' reach. No heavy import.
"""

from collections.abc import Collection
from typing import Any

from rft.ground.experience import Record

STREAM, MEMORY, CHECKPOINT = "nccl", "memory", "checkpoint"  # methods
# kinds of links: straight from host memory, or packed on a device
HOST, PACKED = "host", "packed"
# whom a failed round blames: nobody (the version is over); the way to the trainer; the engine; and
# the engine, whose weights are mixed now
MISSED, UNREACHABLE, BROKEN, DAMAGED = "missed", "unreachable", "broken", "damaged"


class InSave(Record, frozen=True, tag=True):
    """A committed save of the weights: the directory `path` below `root`, a path or URL.

    `node_file`: what readers on this node have in common while they read it; "": nothing.
    """

    root: str
    path: str
    node_file: str = ""


class InStore(Record, frozen=True, tag=True):
    """Ray's object store: (object reference, checksum) of every bucket, stream by stream."""

    streams: list[list[tuple[Any, str]]]


class InFile(Record, frozen=True, tag=True):
    """One file: (place, length, checksum) of every bucket, stream by stream."""

    path: str
    streams: list[list[tuple[int, int, str]]]


class AtPath(Record, frozen=True, tag=True):
    """For who opens it there: safetensors of a Hugging Face directory, or the name that a service
    has given to its own copy.
    """

    path: str


Location = InSave | InStore | InFile | AtPath
METHODS = {InSave: CHECKPOINT, InStore: MEMORY, InFile: MEMORY}


class WorkerOffer(Record, frozen=True):
    """What one worker of an engine says of itself, so that others can take weights from it.

    `shape`: of its engine, as far as it decides what each worker needs: (workers, key/value heads).
    `endpoint`: where it listens. `kind`: of its links.
    """

    shape: tuple[int, int]
    endpoint: dict[str, Any]
    kind: str = HOST


class GroupSeat(Record, frozen=True):
    """The place of one worker among those of its number in all engines of one shape.

    `names`: these engines, in order; `mine`: the place of this one. `before`, `leader`: endpoints
    of that worker in the engine before it, and in the first one. `generation` grows whenever who is
    here changes.
    """

    generation: int
    names: list[str]
    mine: int
    before: dict[str, Any]
    leader: dict[str, Any]


class TrainerInfo(Record, frozen=True):
    """What an engine must know of a trainer before it takes anything of it.

    `plan`, encoded, and `streams`, an endpoint each: where `method` has them. `kv`: what becomes of
    the key-value cache at a commit. `engine`: who is told, by its name. `seats`: of its workers, by
    their number; none: each takes every stream from the trainer.
    """

    epoch: int
    timeout: float  # seconds, of everything that an engine waits for
    method: str = STREAM
    plan: dict[str, Any] | None = None
    streams: list[dict[str, Any]] = []
    kv: str = "recompute"
    engine: str = ""
    seats: list[GroupSeat] = []
    direct: bool = False  # as in a `Round`: its rounds will be
    # this engine catches up for itself: nothing is built for it that would not be used again
    alone: bool = False


class Round(Record, frozen=True):
    """One version, on its way into one engine.

    `digest`: of the plan or the save that it must be of. `direct`: received while nothing decodes,
    without staging memory. `location`: None where the trainer's streams bring the bytes.
    """

    version: int
    epoch: int = -1
    digest: str = ""
    timeout: float = 0.0
    direct: bool = False
    location: Location | None = None

    @property
    def method(self) -> str:
        return METHODS.get(type(self.location), STREAM)


class Received(Record, frozen=True):
    """What a worker has staged, or the `error` that kept it from that and whom it blames.

    `lost`: the engine that should have passed the bytes on; "": it was not an engine.
    """

    digest: str = ""
    bytes: int = 0
    receive_s: float = 0.0
    again: int = 0  # buckets that had to be sent again
    error: str = ""
    blame: str = ""
    lost: str = ""


class WorkerState(Record, frozen=True):
    """What a worker holds, and what its last round took. `version`: None before the first. `lost`:
    as in `Received`, of the last failure.
    """

    version: int | None
    mixed: bool
    unreachable: bool  # the last failure was that no bytes came
    received: Received
    load_s: float = 0.0
    adapters: list[int] = []
    install_s: float = 0.0  # of an adapter
    lost: str = ""


class Installed(Record, frozen=True):
    """What an engine confirms: it serves `version`, of the plan or save `digest`."""

    version: int
    digest: str = ""
    bytes: int = 0
    receive_s: float = 0.0
    again: int = 0
    load_s: float = 0.0
    pause_s: float = 0.0
    install_s: float = 0.0
    adapters: list[int] = []


class Holding(Record, frozen=True):
    """What an engine says of itself to a synchronizer that knows nothing of it: the `mark` (epoch,
    version) of its weights, None before the first round; the `digest` that they came under; the
    newest `generation` of rings that it was told of; whether it sleeps for its trainer.
    """

    mark: tuple[int, int] | None = None
    digest: str = ""
    generation: int = 0
    asleep: bool = False


def numbers_of(installed: Collection[Installed], seconds: float, engines: int) -> dict[str, float]:
    """A round of `seconds` as metrics: the slowest engine's times, the bytes of all."""

    def most(key: str) -> float:
        return max((getattr(report, key) for report in installed), default=0.0)

    busy = max((report.receive_s + report.load_s for report in installed), default=0.0)
    return {
        "pause_s": most("pause_s"),
        "receive_s": most("receive_s"),
        "round_s": seconds,
        "control_s": max(0.0, seconds - busy),
        "bytes": float(sum(report.bytes for report in installed)),
        "again": float(sum(report.again for report in installed)),
        "engines": float(engines),
    }


class AdapterOrder(Record, frozen=True):
    """What workers are to do with a staged adapter; see `rft.rollout.adapter_serving`."""

    number: int  # vLLM's lora_int_id, never used before in this engine
    drop: list[int]
    rank: int
    alpha: float
    projections: list[str]


class RoundFailed(RuntimeError):
    """A round of weights that was not installed. `kind`: whom that blames; `lost`: the engine that
    did not pass it on.
    """

    def __init__(self, message: str, kind: str = BROKEN, lost: str = ""):
        super().__init__(message, kind, lost)  # all, so that it can be pickled
        self.kind = kind
        self.lost = lost

    def __str__(self) -> str:
        return str(self.args[0])
