"""Fill the training state from the newest good checkpoint, whatever layout wrote it.

    rank 0: a state in memory that is as new as any on disk, and whole ─► every rank reads its part
                                                           else, or where a rank cannot:
    rank 0: the newest one ─► every rank reads its part ─► rank 0 judges
                 ▲                                           ├─► all is read: loaded
                 └── the one before ── set aside ────────────┼── it finds damage itself
                                                             └─► else: refused, on every rank

Collective order: `prepare` and `load` are called by every rank. Invariant: what is damaged is set
aside, named, and never deleted; the one before is taken; when none is left although there was one,
that is an error, never a silent start at step 0; nor is it one from models that a damaged state in
memory has filled in part. Only wrong content is damage: what a medium does
not give is tried again for PATIENCE_S, then the start is refused.
"""

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

import msgspec

from rft.checkpoint import catalog, neighbours
from rft.checkpoint.catalog import committed
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.left import LeftChunks
from rft.checkpoint.memory import Memory, MemoryTold, states
from rft.checkpoint.parts import ChosenState
from rft.checkpoint.peers import RunKey
from rft.checkpoint.rank_files import Found, StorageUnreachable, patiently
from rft.checkpoint.reader import Checkpoint, Mismatch, Pieces
from rft.checkpoint.records import LATEST, MANIFEST, PROBE
from rft.checkpoint.remote import Sources
from rft.checkpoint.sharding import Box, claim_of
from rft.checkpoint.storage import COLLECTIONS, NotAFile, Storage, open_storage
from rft.ground.protocols import Snapshotable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rft.ground.protocols import Collective

log = logging.getLogger(__name__)
MOST_READERS = 4
PATIENCE_S = 60.0  # for every single read: a server that restarts, a mount that comes late


class RestoreRefused(OSError):
    """No rank starts, nothing was renamed: a rank cannot read what is there, or reads something
    else than rank 0.
    """


class ReadReport(msgspec.Struct, kw_only=True):
    """What became of one rank's part of a checkpoint; where nothing is said, it was filled in."""

    host: str = ""
    mismatch: str = ""
    unreachable: str = ""
    damage: str = ""
    file: str = ""  # where the damage is, as is `chunk`
    chunk: int = 0


def scores_of(loop: dict[str, Any]) -> dict[int, float]:
    """Taken out of a loop state. JSON knows no NaN: older manifests have null for it."""
    scores = loop.pop("scores", {}).items()
    return {int(s): value for s, value in scores if s.isdecimal() and value is not None}


def sweep(storage: Storage) -> None:
    """Remove drafts and half-deleted directories of earlier attempts; what cannot be removed stays,
    and is told of.

    Called by one rank, after the run epoch was taken.
    """
    _remove(lambda where: storage.end_uploads(), f"an upload below {storage.where}")
    for collection in COLLECTIONS:
        told = catalog.hint(storage, collection)
        for path in storage.leftovers(collection):
            # in an object store a checkpoint that has lost its manifest looks like a draft
            if told is None or path != told.name:
                _remove(storage.remove_draft, path)
        for name in storage.list(collection):
            if ".new-" in name or name.startswith(PROBE):
                _remove(storage.discard, f"{collection}/{name}" if collection else name)


def _remove(act: Callable[[str], object], path: str) -> None:
    """A file that another node has open, one of another owner: no reason not to start."""
    try:
        act(path)
    except OSError as error:
        log.error(
            "%s is left over and cannot be removed, nothing else is affected: %s", path, error
        )


def prepare(storage: Storage, ranks: "Collective", patience_s: float = PATIENCE_S) -> None:
    """Make the root and sweep it, and see that it is one for all. Raises RestoreRefused."""

    def make() -> str:
        storage.prepare()
        sweep(storage)
        return neighbours.leave_mark(storage) if ranks.world > 1 else ""

    what = f"{storage.where} cannot be used"
    if mark := _by_first(ranks, lambda: patiently(what, make, patience_s)):
        blind = neighbours.blind_nodes(storage, ranks, mark, patience_s)
        if ranks.rank == 0:
            _remove(storage.discard, mark)
        if blind:
            raise RestoreRefused(blind)


@dataclass(frozen=True)
class Restored:
    """`on_disk`: step of the newest checkpoint there, None without one; `is_on_disk`: it is what
    was loaded, or the same. `identity`: of the save that was read from memory.
    """

    loop: dict[str, Any]
    on_disk: int | None
    is_on_disk: bool
    identity: str = ""
    read: tuple[int, float] = (0, 0.0)  # bytes that this rank took from memory, and seconds


def load(
    storage: Storage,
    ranks: "Collective",
    policy: Snapshotable,
    layout: Any,
    patience_s: float = PATIENCE_S,
    memory: Memory | None = None,
) -> Restored | None:
    """The newest state, of `memory` or of a checkpoint, was loaded; None when there never was one.

    Raises Mismatch, FileNotFoundError or RestoreRefused, the same on every rank.
    """
    candidates = Candidates(storage, patience_s)
    path = _by_first(ranks, candidates.newest)
    spoiled: list[int] = []  # steps of states that were read in part
    if memory is not None:
        found = _from_memory(
            memory, ranks, policy, layout, lambda: candidates.newest_known, spoiled
        )
        if found:
            return found
    left = memory.left() if memory is not None else LeftChunks()
    while path is not None:
        before = time.monotonic()
        part, small, loop = _read(storage, path, ranks, policy, layout, patience_s, left)
        parts = ranks.gather(msgspec.to_builtins(part))
        is_good, following = _by_first(ranks, partial(candidates.after, path, parts))
        if is_good:
            _take_over(policy, small, f"{storage.where}/{path}", ranks)
            if ranks.rank == 0:
                log.info("resumed from %s/%s", storage.where, path)
            read = left.taken, (time.monotonic() - before if left.taken else 0.0)
            return Restored(loop, int(loop["step"]), is_on_disk=True, read=read)
        path = following
    if spoiled:
        raise FileNotFoundError(
            f"the state of step {spoiled[0]} in the memory of the agents cannot be read, the "
            f"models hold parts of it, and there is no checkpoint in {storage.where}: start again, "
            "which is at step 0 once the agents have ended"
        )
    return _nothing(storage, candidates.rejected, ranks, patience_s)


class Plan(msgspec.Struct, frozen=True):
    """A state whose parts are all in memory, and what its first rank kept; `run`: by which agents
    of other nodes are asked.
    """

    state: ChosenState
    loop: dict[str, Any]
    about: dict[str, Any]
    small: dict[str, bytes]
    run: RunKey | None
    on_disk: int | None
    is_on_disk: bool


def _from_memory(
    memory: Memory,
    ranks: "Collective",
    policy: Snapshotable,
    layout: Any,
    newest: "Callable[[], tuple[int, int] | None]",
    spoiled: list[int],
) -> Restored | None:
    """`newest`: rank 0's, (epoch, step) of the newest checkpoint. None: go to the disk, which has
    to fill all that the `spoiled` have begun to.
    """
    said = ranks.gather(msgspec.to_builtins(memory.told()))
    told = msgspec.convert(said or [], list[MemoryTold])
    for others in (False, True):
        plans = _by_first(ranks, partial(_plans, memory, told, newest, others))
        for plan in msgspec.convert(plans, list[Plan]):
            if found := _from_parts(memory, plan, ranks, policy, layout, spoiled):
                return found
    return None


def _from_parts(
    memory: Memory,
    plan: Plan,
    ranks: "Collective",
    policy: Snapshotable,
    layout: Any,
    spoiled: list[int],
) -> Restored | None:
    """Nothing is filled before every rank has found all that it needs."""
    state, part = plan.state, ReadReport(host=socket.gethostname())
    before, count, own, files = time.monotonic(), 0, [], dict[int, Sources]()
    try:
        files = memory.parts(state, plan.run)
    except OSError as error:
        part.damage = str(error)
    if _is_lost(state, part, ranks):
        return None
    spoiled.append(state.step)
    try:
        mine = [files[rank].receipt for rank in sorted(files)]
        own = [one.small | one.local for one in mine if one.rank == ranks.rank]
        with Pieces(f"memory of step {state.step}", mine, lambda one: files[one.rank]) as pieces:
            count = _read_pieces(pieces, policy)
    except (Damaged, Mismatch, OSError) as error:
        part.damage = str(error)
    read = count, time.monotonic() - before
    if _is_lost(state, part, ranks):
        return None
    where = f"the memory of the agents (step {state.step})"
    is_same = state.world == ranks.world and plan.about.get("layout") == layout
    _take_over(policy, own[0] if is_same else plan.small, where, ranks)
    if ranks.rank == 0:
        log.info("resumed from %s", where)
    return Restored(plan.loop, plan.on_disk, plan.is_on_disk, state.id, read)


def _is_lost(state: ChosenState, part: ReadReport, ranks: "Collective") -> bool:
    """For any rank."""
    lost = _by_first(ranks, partial(_first_damage, ranks.gather(msgspec.to_builtins(part))))
    if lost:
        log.error("the state of step %d is not read from memory: %s", state.step, lost)
    return bool(lost)


def _plans(
    memory: Memory,
    told: list[MemoryTold],
    newest: "Callable[[], tuple[int, int] | None]",
    others: bool,
) -> list[Any]:
    """Rank 0's: states of which every rank's part is somewhere, newest first, and none that is
    older than the newest on disk.
    """
    found, lies = states(memory, told, others)
    for words in lies:
        log.error("%s", words)
    heads = {head.receipt: head for each in told for head in each.heads}
    run = next((each.run for each in told if each.run), None)
    plans, on_disk = [], newest()
    for state in found:
        at = (state.epoch, state.step)
        if at >= (on_disk or (0, 0)):
            head = heads[state.receipts[0]]
            what = (state, head.loop, head.about, head.small, run)
            plans.append(Plan(*what, on_disk[1] if on_disk else None, on_disk == at))
    return cast(list[Any], msgspec.to_builtins(plans))


def _first_damage(said: list[Any]) -> str:
    for rank, part in enumerate(msgspec.convert(said, list[ReadReport])):
        if part.damage:
            return f"rank {rank} on {part.host}: {part.damage}"
    return ""


def adopt(
    where: str,
    ranks: "Collective",
    policy: Snapshotable,
    layout: Any,
    patience_s: float = PATIENCE_S,
) -> dict[str, Any]:
    """Loop state of another job's checkpoint, which this one begins from: that directory, or the
    newest of those below `where`. Nothing is ever set aside there.

    Raises Mismatch or RestoreRefused, the same on every rank.
    """
    storage = open_storage(place_of(where)[0])
    path = _by_first(ranks, partial(newest_of, where))
    part, small, loop = _read(storage, path, ranks, policy, layout, patience_s)
    said = ranks.gather(msgspec.to_builtins(part))
    _by_first(ranks, partial(_refuse_all_but_good, said))
    _take_over(policy, small, f"{storage.where}/{path}", ranks)
    if ranks.rank == 0:
        log.info("begun from %s/%s", storage.where, path)
    return loop


def _take_over(
    policy: Snapshotable, small: dict[str, bytes], where: str, ranks: "Collective"
) -> None:
    """Counters and generators. A rank that cannot must not leave the others waiting for it."""
    why = ""
    try:
        policy.restore(small)
    except Exception as error:  # of content that some stranger's hashes vouch for
        why = f"{type(error).__name__}: {error}"
    said = ranks.gather([socket.gethostname(), why])
    _by_first(ranks, partial(_refuse_small, where, said))


def _refuse_small(where: str, said: list[tuple[str, str]]) -> None:
    for rank, (host, why) in enumerate(said):
        if why:
            raise RestoreRefused(
                f"rank {rank} on {host}: the small state in {where} cannot be taken over: {why}. "
                "Nothing was set aside for it"
            )


def _refuse_all_but_good(said: list[Any]) -> None:
    for rank, part in enumerate(msgspec.convert(said, list[ReadReport])):
        if part.mismatch:
            raise Mismatch(part.mismatch)
        if why := part.unreachable or part.damage:
            raise RestoreRefused(_refusal(rank, part.host, why))


def place_of(where: str) -> tuple[str, str]:
    """(root, name) of one committed directory; without a name: the newest one is meant."""
    root, _, name = where.rstrip("/").rpartition("/")
    return (root or ".", name) if catalog.step_of(name) is not None else (where, "")


def newest_of(where: str) -> str:
    """The path below its root of the checkpoint that `where` names. Raises FileNotFoundError."""
    root, name = place_of(where)
    storage = open_storage(root)
    found = [path for path in committed(storage) if path == name or not name]
    if not found:
        raise FileNotFoundError(f"{where} holds no complete checkpoint")
    if not name and (gone := [*catalog.lost(storage), *filter(None, [catalog.astray(storage)])]):
        raise FileNotFoundError(
            f"{where} has lost its checkpoint {gone[-1]}: name the one to begin from"
        )
    try:
        entries = [(catalog.read_manifest(storage, path), path) for path in found]
    except ValueError as error:
        raise FileNotFoundError(str(error)) from error
    return max((manifest.epoch, manifest.step, path) for manifest, path in entries)[2]


def _by_first(ranks: "Collective", act: Callable[[], Found]) -> Found:
    """What `act` returns on rank 0, on every rank; what it raises is raised on every rank."""
    result, mismatch, refused = None, "", ""
    if ranks.rank == 0:
        try:
            result = act()
        except Mismatch as error:
            mismatch = str(error)
        except RestoreRefused as error:
            refused = str(error)
        except OSError as error:
            refused = _refusal(0, socket.gethostname(), str(error))
    result, mismatch, refused = ranks.broadcast([result, mismatch, refused])
    if mismatch:
        raise Mismatch(mismatch)
    if refused:
        raise RestoreRefused(refused)
    return cast(Found, result)


def _refusal(rank: int, host: str, why: str) -> str:
    return (
        f"rank {rank} on {host}: {why}. Nothing was set aside for it. "
        "See to the mount, the rights and the limit of open files there, then start again"
    )


@dataclass
class Candidates:
    """Rank 0's: which checkpoint to load, and what is wrong with those that were set aside."""

    storage: Storage
    patience_s: float
    rejected: list[str] = field(default_factory=list)
    newest_known: tuple[int, int] | None = None  # its (epoch, step)

    def newest(self) -> str | None:
        """Path of the newest committed checkpoint; those without a
        sound manifest are set aside on the way.
        """
        return patiently(f"{self.storage.where} cannot be read", self._look, self.patience_s)

    def _look(self) -> str | None:
        candidates = []
        for path in committed(self.storage):
            try:
                manifest = catalog.read_manifest(self.storage, path)
            except (ValueError, NotAFile) as error:
                self._put_aside(path, str(error))
                continue
            candidates.append((manifest.epoch, manifest.step, path))
        for path in catalog.lost(self.storage):
            self._put_aside(path, f"{self.storage.where}/{path}/{MANIFEST} is missing")
        newest = max(candidates)[2] if candidates else None
        self.newest_known = max(candidates)[:2] if candidates else None
        if newest and not self.rejected and (doubt := catalog.doubt(self.storage)):
            log.error("%s: %s; the newest is %s", self.storage.where, doubt, newest)
        return newest

    def after(self, tried: str, said: list[Any]) -> tuple[bool, str | None]:
        """(whether every rank has read `tried`, else the one to be tried next).

        Raises Mismatch or RestoreRefused.
        """
        parts = msgspec.convert(said, list[ReadReport])
        for part in parts:
            if part.mismatch:
                raise Mismatch(part.mismatch)
        for rank, part in enumerate(parts):
            if part.unreachable:
                newest = self.newest()
                if newest in (tried, None):
                    raise RestoreRefused(_refusal(rank, part.host, part.unreachable))
                return False, newest  # retention of a run that goes on has taken it meanwhile
        damaged = [(rank, part) for rank, part in enumerate(parts) if part.damage]
        if not damaged:
            return True, None
        why = self._confirmed(tried, [part for _, part in damaged])
        if not why:
            rank, part = damaged[0]
            raise RestoreRefused(
                f"rank {rank} on {part.host} finds {part.damage}; rank 0 on {parts[0].host} reads "
                "the same and finds it good. "
                "Nothing was set aside for it. See to the mount, the disk and the memory of "
                f"{part.host}, then start again"
            )
        self._put_aside(tried, why)
        return False, self.newest()

    def _confirmed(self, path: str, parts: list[ReadReport]) -> str:
        """The first damage of those told of that is found here too, or nothing."""
        try:
            with Checkpoint(self.storage, path, self.patience_s) as checkpoint:
                for part in parts:
                    checkpoint.confirm(part.file, part.chunk)
        except Damaged as error:
            return str(error)
        return ""

    def _put_aside(self, path: str, why: str) -> None:
        """Quarantine, unless the directory has gone meanwhile:
        retention of a run that goes on has taken it.
        """
        try:
            aside = self.storage.set_aside(path, "bad")
        except FileNotFoundError:
            return
        self.rejected.append(why)
        log.error("checkpoint rejected and set aside as %s/%s: %s", self.storage.where, aside, why)


def _read(
    storage: Storage,
    path: str,
    ranks: "Collective",
    policy: Snapshotable,
    layout: Any,
    patience_s: float,
    left: LeftChunks | None = None,
) -> tuple[ReadReport, dict[str, bytes], dict[str, Any]]:
    """Fill this rank's part of the policy: (what became of it, small objects, loop state)."""
    part, small, loop = ReadReport(host=socket.gethostname()), {}, {}
    try:
        with Checkpoint(storage, path, patience_s, _readers(storage)) as checkpoint:
            if left is not None:
                checkpoint.take_from(left.take)
            _read_pieces(checkpoint, policy)
            small, loop = _small(checkpoint, ranks, layout), dict(checkpoint.manifest.loop)
    except Mismatch as error:
        part.mismatch = str(error)
    except Damaged as error:
        part.damage, part.file, part.chunk = str(error), error.file, error.chunk
    except OSError as error:
        part.unreachable = str(error)
    return part, small, loop


def _readers(storage: Storage) -> int:
    """Threads that read: as many as this rank computes with, a few of which are as quick as a disk
    is.
    """
    import torch

    return max(storage.readers, min(MOST_READERS, torch.get_num_threads()))


def _small(checkpoint: Checkpoint, ranks: "Collective", layout: Any) -> dict[str, bytes]:
    """Rank 0's small objects; this rank's own, with its generators, if
    the layout is the one that wrote them.
    """
    manifest = checkpoint.manifest
    same = manifest.world == ranks.world and manifest.about.get("layout") == layout
    if not same:
        return checkpoint.receipts[0].small
    mine = checkpoint.receipts[ranks.rank]
    return mine.small | mine.local


def _read_pieces(stored: Pieces, policy: Snapshotable) -> int:
    """Fill this rank's tensors; bytes of that. Raises Mismatch, Damaged or StorageUnreachable."""
    pieces = policy.snapshot().pieces
    claims = [claim_of(piece) for piece in pieces]
    stored.check(claims)
    stored.fill(
        [
            (claim, Elements(piece.tensor.detach()))
            for piece, claim in zip(pieces, claims, strict=True)
            if claim.bytes
        ]
    )
    return sum(claim.bytes for claim in claims)


class Elements:
    """A tensor's, on whichever device and in whichever strides: `targets.Target`."""

    def __init__(self, tensor: "torch.Tensor"):
        import torch

        self.is_flat = tensor.is_contiguous()
        self._bits = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}"))
        self.memory = None
        if self.is_flat and tensor.device.type == "cpu":
            self.memory = memoryview(self._bits.view(-1).view(torch.uint8).numpy())

    def put(self, box: Box, place: tuple[slice, ...], values: "np.ndarray") -> None:
        import numpy as np
        import torch

        bits = self._bits
        if self.is_flat:
            bits = bits.view(-1)[box.start :][: prod(box.shape)].view(box.shape)
        values = np.ascontiguousarray(values).view(f"i{values.itemsize}")
        bits[place].copy_(torch.from_numpy(values))


def _nothing(storage: Storage, rejected: list[str], ranks: "Collective", patience_s: float) -> None:
    """Nothing to load is right only when nothing points at anything, and no rank sees more than
    rank 0 does.
    """
    seen, unreachable = [], ""
    try:
        seen = patiently(f"{storage.where} cannot be read", lambda: committed(storage), patience_s)
    except StorageUnreachable as error:
        unreachable = str(error)
    said = ranks.gather([socket.gethostname(), seen, unreachable])
    lost = _by_first(ranks, partial(_lost, storage, rejected, said))
    if lost:
        raise FileNotFoundError(
            f"{storage.where}: there were checkpoints, but no good one is left ({lost}). "
            "Put one back, or start anew with continue_from_checkpoint=false"
        )


def _lost(storage: Storage, rejected: list[str], said: list[Any]) -> str:
    """Why there should be a checkpoint, or nothing. Raises RestoreRefused."""
    names = storage.list()
    if rejected or LATEST in names:
        return "; ".join(rejected) or "LATEST points nowhere"
    if aside := [name for name in names if name.startswith(".bad-")]:
        return f"{aside[-1]} was set aside by an earlier start"
    here = said[0][0]
    for rank, (host, seen, unreachable) in enumerate(said):
        if unreachable:
            raise RestoreRefused(_refusal(rank, host, unreachable))
        if seen:
            why = (
                f"{storage.where} holds no checkpoint, but rank {rank} on {host} sees {seen[-1]} "
                "there"
            )
            raise RestoreRefused(_refusal(0, here, why))
    return ""
