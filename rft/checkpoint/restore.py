"""Fill the training state from the newest good checkpoint, whatever layout wrote it.

Collective order: `load` is called by every rank. Invariant: what is damaged is set aside, named, and never deleted;
the one before is taken; when none is left although there was one, that is an error, never a silent start at step 0.
"""

import logging
from typing import TYPE_CHECKING, Any

from rft.checkpoint import commit
from rft.checkpoint.layout import Claim, claim_of
from rft.checkpoint.reader import Checkpoint, Damaged, Mismatch
from rft.checkpoint.storage import LATEST, WEIGHTS, Storage, committed
from rft.protocols import Piece, Snapshotable

if TYPE_CHECKING:
    from rft.checkpoint.manager import Collective

log = logging.getLogger(__name__)


def sweep(storage: Storage) -> None:
    """Remove drafts and half-deleted directories of earlier attempts. Called by one rank, after the run epoch was taken."""
    for collection in ("", WEIGHTS):
        for path in storage.leftovers(collection):
            storage.remove(path)
        for name in storage.list(collection):
            if ".new-" in name:
                storage.discard(f"{collection}/{name}" if collection else name)


def load(storage: Storage, ranks: "Collective", policy: Snapshotable, layout: Any) -> dict[str, Any] | None:
    """Loop state of the checkpoint that was loaded, None when there never was one. Raises Mismatch or FileNotFoundError."""
    rejected: list[str] = []
    while True:
        path = ranks.broadcast(_newest(storage, rejected) if ranks.rank == 0 else None)
        if path is None:
            return _nothing(storage, rejected, ranks)
        failure, loop = _read(storage, path, ranks, policy, layout)
        if failure is None:
            if ranks.rank == 0:
                log.info("resumed from %s/%s", storage.where, path)
            return loop
        rejected.append(failure)
        if ranks.rank == 0:
            _put_aside(storage, path, failure)
        ranks.barrier("checkpoint quarantine")


def _newest(storage: Storage, rejected: list[str]) -> str | None:
    """Path of the newest committed checkpoint; those without a sound manifest are set aside on the way."""
    for path in committed(storage):
        try:
            commit.read_manifest(storage, path)
        except (ValueError, OSError) as error:
            if _put_aside(storage, path, str(error)):
                rejected.append(str(error))
    entries = commit.list_entries(storage)
    return entries[-1].path if entries else None


def _put_aside(storage: Storage, path: str, why: str) -> bool:
    """Quarantine; False if the directory has gone meanwhile: retention of a run that goes on has taken it."""
    try:
        aside = storage.set_aside(path, "bad")
    except FileNotFoundError:
        return False
    log.error("checkpoint rejected and set aside as %s/%s: %s", storage.where, aside, why)
    return True


def _read(
    storage: Storage, path: str, ranks: "Collective", policy: Snapshotable, layout: Any
) -> tuple[str | None, dict[str, Any]]:
    """Fill the policy on every rank: (the first damage that any rank found or None, loop state).

    State of another model is no damage: it raises, on every rank, and nothing is set aside.
    """
    damage = mismatch = None
    loop: dict[str, Any] = {}
    try:
        with Checkpoint(storage, path) as checkpoint:
            pieces = policy.snapshot().pieces
            claims = [claim_of(piece) for piece in pieces]
            checkpoint.check(claims)
            for piece, claim in zip(pieces, claims, strict=True):
                _fill(piece, claim, checkpoint)
            small, loop = _small(checkpoint, ranks, layout), dict(checkpoint.manifest.loop)
    except Mismatch as error:
        mismatch = str(error)
    except (Damaged, OSError) as error:
        damage = str(error)
    gathered = ranks.gather([mismatch, damage])
    first = [next(filter(None, found), None) for found in zip(*gathered, strict=True)] if gathered else None
    mismatch, damage = ranks.broadcast(first)
    if mismatch:
        raise Mismatch(mismatch)
    if damage is None:
        policy.restore(small)
    return damage, loop


def _small(checkpoint: Checkpoint, ranks: "Collective", layout: Any) -> dict[str, bytes]:
    """Rank 0's small objects; this rank's own, with its generators, if the layout is the one that wrote them."""
    manifest = checkpoint.manifest
    same = manifest.world == ranks.world and manifest.about.get("layout") == layout
    if not same:
        return checkpoint.receipts[0].small
    mine = checkpoint.receipts[ranks.rank]
    return mine.small | mine.local


def _fill(piece: Piece, claim: Claim, checkpoint: Checkpoint) -> None:
    import numpy as np
    import torch

    if not claim.bytes:
        return
    values = torch.from_numpy(checkpoint.elements(claim).view(np.uint8))
    with torch.no_grad():
        piece.tensor.copy_(values.view(piece.tensor.dtype).reshape(piece.tensor.shape))


def _nothing(storage: Storage, rejected: list[str], ranks: "Collective") -> None:
    """Nothing to load is right only when nothing points at anything."""
    hint = LATEST in storage.list() if ranks.rank == 0 else None
    hint, rejected = ranks.broadcast([hint, rejected])
    if hint or rejected:
        raise FileNotFoundError(
            f"{storage.where}: there were checkpoints, but no good one is left ({'; '.join(rejected) or 'LATEST points nowhere'}). "
            "Put one back, or start anew with continue_from_checkpoint=false"
        )
