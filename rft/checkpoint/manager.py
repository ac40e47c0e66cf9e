"""Save and load the training state of one step: every rank's pieces and the loop's own state, in one commit.

In: a `Snapshotable` (the policy) and a small dictionary of loop state (step, journal position, run epoch). Out: directories
`step_N/` with a manifest. Invariant: the manifest is written after every rank's receipt, the directory gets its name after
the manifest is on disk, and loading takes only what the manifest and every hash confirm.

Collective order: `save` and `load` are called by every rank, together.
"""

import json
import logging
from pathlib import Path
from typing import Any, Protocol

from rft.checkpoint import shards
from rft.checkpoint.shards import Damaged
from rft.checkpoint.store import Store, write_json
from rft.protocols import Snapshotable

FORMAT = 1
log = logging.getLogger(__name__)


class Collective(Protocol):
    rank: int
    world: int

    def gather(self, item: Any) -> list[Any] | None: ...
    def broadcast(self, item: Any) -> Any: ...
    def barrier(self, name: str) -> None: ...


class CheckpointManager:
    """Synchronous checkpoints with atomic commit, verification on load and fall-back to the one before."""

    def __init__(self, root: Path, ranks: Collective, layout: dict[str, int], keep: int):
        self.store = Store(root)
        self.ranks = ranks
        self.layout = layout
        self.keep = keep
        self.newest: int | None = None  # step of the last save or load of this process

    @property
    def oldest(self) -> dict[str, Any] | None:
        """Loop state of the oldest committed checkpoint, at rank 0: nothing before it will be asked for again."""
        steps = self.store.steps() if self.ranks.rank == 0 else []
        return self._loop(steps[0]) if steps else None

    def save(self, step: int, policy: Snapshotable, loop: dict[str, Any]) -> Path:
        """Write and commit step; returns its directory on every rank. An error on any rank fails the save on all."""
        directory = Path(self.ranks.broadcast(str(self.store.begin(step)) if self.ranks.rank == 0 else None))
        failure, digest = None, ""
        try:
            digest = shards.write(directory, self.ranks.rank, policy.snapshot())
        except OSError as error:
            failure = f"rank {self.ranks.rank} cannot write {directory}: {error}"
        outcomes = self.ranks.gather((failure, digest))
        if outcomes is not None:
            failures = [f for f, _ in outcomes if f]
            if not failures:
                receipts = {f"r{rank:05d}": d for rank, (_, d) in enumerate(outcomes)}
                manifest = {"format": FORMAT, "step": step, "layout": self.layout, "receipts": receipts, "loop": loop}
                write_json(directory / "MANIFEST.json", manifest)
                self.store.commit(directory, step)
                self.store.retire(self.keep)
            failure = "; ".join(failures)
        failure = self.ranks.broadcast(failure)
        if failure:
            raise RuntimeError(f"checkpoint of step {step} failed: {failure}")
        self.newest = step
        return self.store.path(step)

    def load(self, policy: Snapshotable) -> dict[str, Any] | None:
        """Restore the newest good checkpoint into `policy` and return its loop state; None when there never was one.

        A damaged checkpoint is quarantined, named, and the one before is taken. Raises when only damaged ones exist or
        when the newest was written in another layout.
        """
        if self.ranks.rank == 0:
            self.store.sweep()
        rejected: list[str] = []
        while True:
            step = self.ranks.broadcast(max(self.store.steps(), default=None) if self.ranks.rank == 0 else None)
            if step is None:
                return self._nothing(rejected)
            manifest = self.ranks.broadcast(self._manifest(step) if self.ranks.rank == 0 else None)
            failure = "MANIFEST.json does not parse" if manifest is None else self._read(step, manifest, policy)
            if failure is None and manifest is not None:
                self.newest = step
                log.info("resumed from %s", self.store.path(step))
                return manifest["loop"]
            rejected.append(failure)
            if self.ranks.rank == 0:
                log.error("checkpoint rejected, set aside at %s: %s", self.store.quarantine(step), failure)
            self.ranks.barrier("checkpoint quarantine")

    def _read(self, step: int, manifest: dict[str, Any], policy: Snapshotable) -> str | None:
        """Fill the policy from step on every rank; the first damage that any rank found, or None.

        State of another model is no damage: it raises, on every rank, and nothing is set aside.
        """
        damage = mismatch = None
        mine = f"r{self.ranks.rank:05d}"
        directory = self.store.path(step)
        try:
            shards.read(directory, manifest["receipts"], policy.snapshot())
            small = shards.load_receipt(directory, mine, manifest["receipts"][mine])["small"]
        except shards.Mismatch as error:
            mismatch = str(error)
        except (Damaged, OSError) as error:
            damage = str(error)
        gathered = self.ranks.gather((mismatch, damage))
        first = [next(filter(None, found), None) for found in zip(*gathered, strict=True)] if gathered else None
        mismatch, damage = self.ranks.broadcast(first)
        if mismatch:
            raise ValueError(mismatch)
        if damage is None:
            policy.restore({name: bytes.fromhex(value) for name, value in small.items()})
        return damage

    def _manifest(self, step: int) -> dict[str, Any] | None:
        """The manifest, None when it is damaged; a good one that this run cannot use raises."""
        path = self.store.path(step) / "MANIFEST.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            return None
        if manifest["format"] != FORMAT:
            raise ValueError(f"{path} has format {manifest['format']}; this rft reads {FORMAT}")
        if manifest["layout"] != self.layout:
            raise ValueError(
                f"{path} was written with layout {manifest['layout']}, this run has {self.layout}: "
                "use the same trainer.megatron sizes and trainer.num_ranks, or another name"
            )
        return manifest

    def _loop(self, step: int) -> dict[str, Any]:
        return json.loads((self.store.path(step) / "MANIFEST.json").read_text(encoding="utf-8"))["loop"]

    def _nothing(self, rejected: list[str]) -> None:
        hint = self.store.latest_hint()
        if hint or rejected:
            raise FileNotFoundError(
                f"{self.store.root}: LATEST names {hint}, but no good checkpoint is left ({'; '.join(rejected) or 'none found'}). "
                "Restore one, or start anew with continue_from_checkpoint=false"
            )
