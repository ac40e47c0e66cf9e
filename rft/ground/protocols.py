"""The seams: what one part may ask of another without importing it. Typing only; no
heavy import, not even Ray's.

The Megatron policy is `Snapshotable` and a `WeightSource`; `checkpoint` saves the one and `sync`
streams the other without knowing Megatron. `monitor` offers every sink as a `MetricSink`. Of parts
that may die and come back, `RETURN_S` is how long all others wait.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
BACK_S = 300.0  # for a part that died to be back, before its supervisor ends the run
# for an answer of one that may die and come back meanwhile, which Ray then asks: its supervisor is
# the first to say that it does not
RETURN_S = BACK_S + 60.0
P = ParamSpec("P")


@dataclass(frozen=True)
class Piece:
    """One tensor of this rank's training state, by reference (its bytes change at the next
    optimizer step).

    It is the box [offset, offset + shape) of the whole tensor `key` of `global_shape`; with
    `flat=(start, stop)` only those elements of that box, flattened (a range of the distributed
    optimizer). `shape` is left out where it is the tensor's own. Ranks that hold equal pieces hold
    equal bytes, and one of them stores them. `stored=False`: others hold the same elements in
    another cut and store them; this piece is only filled when a checkpoint is loaded.
    """

    key: str
    tensor: "torch.Tensor"
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    flat: tuple[int, int] | None = None
    stored: bool = True


@dataclass(frozen=True)
class Snapshot:
    """All training state of one rank at one step: big tensors by reference, small objects already
    serialised to bytes.

    `small` is the same on every rank, `local` this rank's own: it comes back only in the layout
    that wrote it.
    """

    pieces: list[Piece]
    small: dict[str, bytes] = field(default_factory=dict)
    local: dict[str, bytes] = field(default_factory=dict)


class Snapshotable(Protocol):
    """What the checkpoint manager saves and loads; the Megatron policy is one."""

    def snapshot(self) -> Snapshot:
        """Describe this rank's state. No collective, no copy of big tensors."""

    def restore(self, small: dict[str, bytes]) -> None:
        """Called after every piece's tensor was filled in place: take over counters and, where
        given, generators.

        `small` holds what `snapshot` gave as `small` and, in the layout that wrote the checkpoint,
        as `local`.
        """


@dataclass(frozen=True)
class Block:
    """A contiguous slab of one Hugging Face tensor: rows (dim 0) or columns (dim 1) [start, stop)
    of `name`.

    `shape` is that of the whole HF tensor, `dtype` a safetensors-like name ("float32", "bfloat16").
    A replicated or whole tensor is one block with dim 0 and [0, shape[0]).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])


class WeightSource(Protocol):
    """The trainer side of weight sync: which blocks this rank owns, and their bytes now."""

    def blocks(self) -> list[Block]:
        """Blocks that this rank sends, in the order of `read_blocks`; fixed for the life of the
        policy. No collective.
        """

    def read_blocks(self) -> Iterator["torch.Tensor"]:
        """One contiguous tensor per block, same order, current weights. No collective."""


@dataclass(frozen=True)
class ActorHandle(Generic[T]):
    """A Ray actor with the class that it runs, so that its methods are named by the class's own
    functions: one that is not there fails where it is read, and a search for it finds who calls it.

    `actor` is Ray's own handle, for whoever hands it to other actors.
    """

    actor: Any

    def ask(
        self, method: Callable[Concatenate[T, P], Any], *arguments: P.args, **named: P.kwargs
    ) -> Any:
        """Begin a call; returns Ray's reference to its answer at once."""
        return getattr(self.actor, method.__name__).remote(*arguments, **named)

    def ask_once(self, method: Callable[[T], Any]) -> Any:
        """The same, of the process that has the actor now: its end is an error, and no other is
        asked.
        """
        return getattr(self.actor, method.__name__).options(max_task_retries=0).remote()


class Collective(Protocol):
    """What parts of a trainer ask of all its ranks together: every rank
    calls each of these, in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def gather(self, item: Any) -> list[Any] | None:
        """Every rank's item in the order of ranks, at rank 0; None elsewhere."""

    def broadcast(self, item: Any) -> Any:
        """Rank 0's item, on every rank."""

    def barrier(self, name: str) -> None: ...


class TrainerMesh(Collective, Protocol):
    """The ranks of a trainer with their places in the layout TP x CP x PP x DP."""

    @property
    def dp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def cp_rank(self) -> int: ...
    @property
    def is_last_stage(self) -> bool: ...
    def scatter_parts(self, parts: Sequence[list[Any]] | None) -> Sequence[Any]:
        """Of rank 0's stacked microbatches per data-parallel index those of this rank; each is
        packed when it is asked for.
        """

    def reduce(self, sums: "torch.Tensor", maxima: "torch.Tensor") -> None:
        """Over all ranks that hold different tokens, in place."""

    def close(self) -> None: ...


class Checkpoints(Protocol):
    """Saves of the policy with the loop's own state.

    Every rank calls every method, in the same order.
    """

    requested: int | None
    remembered: int | None
    needed: int  # the oldest version that data which may be trained is of

    @property
    def newest(self) -> int | None: ...
    def save(
        self,
        step: int,
        models: Any,
        loop: dict[str, Any],
        full: bool = True,
        weights: bool = False,
        version: bool = False,
        memory: bool = False,
        local: dict[str, bytes] | None = None,
    ) -> bool: ...
    def poll(self) -> list[Any]: ...
    def before_update(self) -> float: ...
    def wait(self, step: int) -> None: ...
    def wait_exports(self) -> None: ...
    def metrics(self) -> dict[str, float]: ...


class MetricSink(Protocol):
    """Where metrics go. One owner process per run; `step` is always the policy version."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...
    def table(self, name: str, rows: Iterable[dict[str, Any]], step: int) -> None: ...
    def histograms(self, values: dict[str, list[float]], step: int) -> None: ...
    def close(self) -> None: ...
