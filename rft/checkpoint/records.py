"""What a checkpoint consists of on disk, and what trainer and agent say to each other. Pure data;
no torch.

On disk: a `Receipt` per rank (JSON, next to that rank's bytes) and one `Manifest` per checkpoint.
Between processes: requests (`Begin`, `Window`, `Close`) and reports (`Ready`, `Freed`, `Committed`,
...), msgpack with a length prefix. Invariant: a receipt is bound to its manifest by hash, the
manifest to itself by `seal`; whoever changes a bit is found out.
"""

import hashlib
from typing import Any, TypeVar

import msgspec

FORMAT = 2
CHUNK = 8 * 2**20  # bytes covered by one hash
ALIGN = 64  # every region starts at a multiple of this in its file

Extent = tuple[int, ...]
Record = TypeVar("Record", bound=msgspec.Struct)

MANIFEST = "MANIFEST.json"
QUARANTINED = "QUARANTINED"  # in an object store, which knows no rename: it is set aside
WEIGHTS = "weights"  # collection of model-only saves, of which two stay
VERSIONS = "versions"  # collection of every published version
COLLECTIONS = ("", WEIGHTS, VERSIONS)  # "": checkpoints
PROBE = ".probe-"  # prefix of what was put only to see what a store does
LATEST = "LATEST"


class Region(msgspec.Struct, frozen=True, gc=False):
    """A box [offset, offset + shape) of the whole tensor `key`, or of it, flattened, the elements
    `flat` = [start, stop).

    Its bytes lie at `at` in the rank's file, row-major, in the machine's byte order (little endian
    on all that rft runs on).
    """

    key: str
    dtype: str
    global_shape: Extent
    offset: Extent
    shape: Extent
    flat: tuple[int, int] | None
    at: int
    bytes: int


class Patch(msgspec.Struct, frozen=True, kw_only=True):
    """How a file is stored that differs little from that of another save, of the same regions.

    `base`: (step, id) of that save. `frames`: stored bytes of each chunk, one after another: as
    many as the chunk has are its own, fewer a delta (`rft.ground.delta`, elements of `width` bytes)
    from the same chunk of the base.
    """

    base: tuple[int, str]
    width: int
    frames: list[int]


class FileReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Which bytes one rank wrote: of its receipt what says how they are read.

    `bytes`, `chunks`: of the content; xxh3-128 of each CHUNK bytes, in order. `file` holds it as it
    is, or as a `patch`.
    """

    format: int
    id: str
    step: int
    epoch: int
    rank: int
    world: int
    layout: str
    file: str
    bytes: int
    chunks: list[str]
    patch: Patch | None = None

    @property
    def stored(self) -> int:
        """Bytes of `file`."""
        return self.bytes if self.patch is None else sum(self.patch.frames)


class Receipt(FileReceipt, frozen=True, kw_only=True):
    """All that one rank wrote, once it was on disk."""

    regions: list[Region]
    small: dict[str, bytes]
    local: dict[str, bytes]
    loop: dict[str, Any] | None = None  # rank 0 only
    about: dict[str, Any] | None = None  # rank 0 only


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a complete checkpoint.

    `receipts`: sha256 of each receipt; `stored`: bytes of the files, where they hold patches, of
    which the save `base` is the newest base; `seal`: sha256 of everything else here.
    """

    format: int
    id: str
    step: int
    epoch: int
    world: int
    layout: str
    bytes: int
    receipts: dict[str, str]
    loop: dict[str, Any]
    about: dict[str, Any]
    base: tuple[int, str] | None = None
    stored: int | None = None
    seal: str = ""

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.bytes if self.stored is None else self.stored

    def sealed(self) -> "Manifest":
        return msgspec.structs.replace(self, seal=self.digest())

    def digest(self) -> str:
        return hashlib.sha256(encode_json(msgspec.structs.replace(self, seal=""))).hexdigest()


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """What a resume builds on of a manifest's `loop`. JSON has null for what is no number."""

    step: int
    run_epoch: int = 0
    journal: int | None = None
    scores: dict[str, float | None] = {}
    recent_losses: list[float | None] = []
    skips: tuple[int, int] = (0, 0)
    gates: dict[str, list[float | None]] = {}


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """What to keep: the union of all rules. 0 or None: the rule keeps nothing of its own; `last=0`
    keeps everything. What is kept can be read: of a patch the bases stay too.
    """

    last: int = 0
    since: int | None = None  # of this step and later ones
    every: int = 0
    best: int = 0
    best_is_lowest: bool = False
    max_bytes: int = 0  # over it the oldest go first, tagged ones and the newest never
    scores: dict[int, float] = {}


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One directory to be made of a staged slot: a full checkpoint, or the model weights alone (a
    prefix of the bytes).
    """

    collection: str  # "" for checkpoints, "weights" and "versions" for the model alone
    draft: str
    final: str
    regions: list[Region]
    layout: str
    bytes: int
    retention: Retention


class Replication(msgspec.Struct, frozen=True, kw_only=True):
    """Agents of a run that hold each other's parts. `nodes`, `at`: of every rank, where it runs and
    where its agent listens, at the descriptor `listener`. `journal`: directory of the one that
    travels along; rank 0 only. `before`: where agents of this node have listened in earlier
    attempts; of the node's first rank only.
    """

    run: str
    secret: str
    nodes: list[str]
    at: list[tuple[str, int]]
    listener: int
    journal: str = ""
    before: list[tuple[str, int]] = []


class CheckpointSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that an agent must know before its first save; sent once.

    `control`: local directory of locks and run epochs.
    """

    root: str
    control: str
    rank: int
    world: int
    epoch: int
    slots: list[int]  # file descriptors, inherited
    slot_bytes: int
    strategy: str
    rate_limit: float  # bytes per second, 0: none
    # for a save, from its first byte on, and for the agent after its trainer is gone
    deadline_s: float
    lease_s: float  # how long the right to commit stays with one rank before the next may take it
    reserve: int = 0  # bytes of disk that versions leave to checkpoints
    launcher: int = 0  # process number of somebody else's that may start the rank again
    replicas: Replication | None = None

    @property
    def inherited(self) -> list[int]:
        """Descriptors that every agent of this rank gets."""
        return [*self.slots, *([self.replicas.listener] if self.replicas else [])]


class SavedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part of a save, the first `bytes` of what is staged. `chunks`: its hashes, where an
    agent before this one has made them.
    """

    regions: list[Region]
    layout: str
    bytes: int
    chunks: list[str] = []


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A save; without `outputs` it is kept in memory alone. `kept`: what stays in its slot, for a
    restart to go on from.
    """

    id: str
    step: int
    outputs: list[Output]
    small: dict[str, bytes]
    local: dict[str, bytes]
    loop: dict[str, Any] | None  # rank 0 only, as is the next
    about: dict[str, Any] | None
    kept: SavedPart | None = None


class Window(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bytes [start, stop) of the save's file lie at the start of `slot`; with `last` the save is
    staged as a whole.
    """

    id: str
    slot: int
    start: int
    stop: int
    last: bool


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This rank will not finish save `id`; if its writing has not begun, its slot comes back."""

    id: str
    why: str


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was kept of save `id` is not needed any more; its slot comes back, once it is written.
    Sent when every rank has staged a newer one.
    """

    id: str


class Export(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write the Hugging Face directory `target` from the committed checkpoint `name`; config and
    tokenizer from `source`.
    """

    step: int
    name: str
    source: str
    target: str


class Close(msgspec.Struct, frozen=True, tag=True):
    """Finish what is staged, then end."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pid: int


class Freed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    slot: int


class Retained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From rank 0's agent, after each commit of a checkpoint: loop state of the oldest of the last
    ones (`max_checkpoints_to_keep`), whatever else is kept or tagged.
    """

    oldest: dict[str, Any]


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    step: int
    collection: str
    name: str
    seconds: float  # from its Begin to the commit
    bytes: int = 0  # of all ranks together; 0: they lie with somebody else


class Exported(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    step: int
    target: str
    cause: str = ""  # empty: it is there


class Exporting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """More of an export was written than when this was last said."""

    target: str


class SaveFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    step: int
    cause: str


class NotKept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A version that is not on disk; whatever else was saved with it is not affected."""

    id: str
    step: int
    collection: str
    cause: str


class Replicated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every rank's part of this state is in the memory of two nodes."""

    id: str
    step: int


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent lives; `doing` since `for_s` seconds. `is_waiting`: for work, or for its turn."""

    doing: str
    for_s: float
    is_waiting: bool


Request = CheckpointSettings | Begin | Window | Drop | Release | Export | Close
Report = (
    Ready
    | Freed
    | Committed
    | Retained
    | Exported
    | Exporting
    | SaveFailed
    | NotKept
    | Replicated
    | Beat
)

_json = msgspec.json.Encoder(order="deterministic")


def encode_json(record: Any) -> bytes:
    return _json.encode(record)


def decode_json(data: bytes, kind: type[Record]) -> Record:
    """Raises ValueError for anything that is not exactly such a record."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def final_name(prefix: str, step: int) -> str:
    return f"{prefix}_{step:08d}"
