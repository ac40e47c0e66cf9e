"""From receipts to a checkpoint: watch a draft until every rank's receipt is there, verify, seal,
publish, retire.

Runs in every agent, outside the training processes. No torch. The right to commit is a lease that
goes down the line: rank 0 has it for `lease_s` from the moment the last receipt was seen, then rank
1, and so on, each by its own clock. Two agents that commit the same draft do the same thing: the
manifest is a function of the receipts, and of two renames one finds its source gone. Invariant:
nothing is published that was not verified, none after a newer attempt has taken its epoch, nothing
retired before.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rft.checkpoint import fence
from rft.checkpoint.catalog import (
    Entry,
    Hint,
    expired,
    final_path,
    list_entries,
    places,
    read_manifest,
    rolling,
)
from rft.checkpoint.catalog import find as find_save
from rft.checkpoint.catalog import hint as hint_of
from rft.checkpoint.records import (
    FORMAT,
    LATEST,
    MANIFEST,
    Begin,
    CheckpointSettings,
    Committed,
    Manifest,
    NotKept,
    Output,
    Receipt,
    Report,
    Retained,
    Retention,
    SaveFailed,
    decode_json,
    encode_json,
    sha256,
)
from rft.checkpoint.sharding import digest
from rft.checkpoint.storage import VERSIONS, Storage
from rft.checkpoint.writer import abandoned_name, file_name, receipt_name
from rft.ground import durable

log = logging.getLogger(__name__)
LINE = 4  # ranks that may commit; of more, all would have to look at the draft all the time


class CommitError(RuntimeError):
    """Receipts that do not make a checkpoint."""


@dataclass
class PendingCommit:
    """An output that this rank has written and that is not committed yet."""

    begin: Begin
    output: Output
    since: float
    complete_since: float | None = None
    failing_since: float | None = None
    cause: str = ""  # of that
    done: bool = False
    bytes: int = 0  # of all ranks, once that is known


@dataclass
class Committer:
    """`look` at intervals; every draft ends in exactly one report."""

    storage: Storage
    settings: CheckpointSettings
    report: Callable[[Report], object]
    orphaned: Callable[[], bool] = lambda: False
    in_use: Callable[[], set[str]] = set  # checkpoints that are being read and must not go now
    lose: Callable[[], object] = lambda: None  # a version that this rank has written is none
    drafts: list[PendingCommit] = field(default_factory=list)
    known: dict[str, dict[str, Entry]] = field(default_factory=dict)  # by collection and path

    def watch(self, begin: Begin, output: Output, since: float) -> None:
        self.drafts.append(PendingCommit(begin, output, since))

    def look(self) -> None:
        """One round over all drafts, oldest first.

        A failing medium is tried again, then reported, and does not end the agent.
        """
        for draft in list(self.drafts):
            try:
                name = self._advance(draft)
            except OSError as error:
                self._is_failing(draft, str(error))
                continue
            except (CommitError, ValueError) as error:
                self._fail(draft, str(error))
                continue
            if name is not None:
                self._committed(draft, name)
            elif draft.complete_since is None:
                draft.failing_since = None
        self.drafts = [draft for draft in self.drafts if not draft.done]

    def _is_failing(self, draft: PendingCommit, cause: str) -> None:
        """What fails here the next in the line may do: as long as one of them may, this save has
        not failed, and for one lease more, as each goes by its own clock.
        """
        now = time.monotonic()
        if draft.failing_since is None:
            log.error("%s: %s; tried again", draft.output.draft, cause)
            draft.failing_since = now
        draft.cause = cause
        if now > draft.failing_since + self._patience_s + self.settings.lease_s:
            self._fail(draft, cause)

    @property
    def _patience_s(self) -> float:
        """How long this rank tries what fails: all end at the same time, whoever had to begin."""
        line, rank = min(self.settings.world, LINE), self.settings.rank
        return self.settings.lease_s * (line - rank if rank < line else line)

    def _advance(self, draft: PendingCommit) -> str | None:
        """Name under which the draft is published by now, by whomever; None: not yet.

        Raises what makes it fail.
        """
        rank, names = self.settings.rank, set(self.storage.list(draft.output.draft))
        published = self._published(draft)
        if published:
            self.storage.settle(published)
            return published
        gone = sorted(name for name in names if name.endswith(".abandoned"))
        if gone:
            raise CommitError(self.storage.get(f"{draft.output.draft}/{gone[0]}").decode())
        if not names and not self._has_own(draft):
            raise self._gone(draft.output.draft)
        if rank < LINE and all(receipt_name(r) in names for r in range(self.settings.world)):
            draft.complete_since = draft.complete_since or time.monotonic()
            now = time.monotonic()
            since = now if draft.failing_since is None else draft.failing_since
            is_its_turn = now >= draft.complete_since + rank * self.settings.lease_s
            if self._follows_another(draft):
                return None
            if is_its_turn and now <= since + self._patience_s:
                return self._commit(draft)
            if now > since + self._patience_s:
                raise OSError(draft.cause)
        self._check_time(draft, names)
        return None

    def _has_own(self, draft: PendingCommit) -> bool:
        """Asked for by its name: an object store may list late."""
        try:
            self.storage.size(f"{draft.output.draft}/{receipt_name(self.settings.rank)}")
        except FileNotFoundError:
            return False
        return True

    def _follows_another(self, draft: PendingCommit) -> bool:
        """Versions are committed in their order: one may be a patch of the one before."""
        before = self.drafts[: self.drafts.index(draft)]
        return draft.output.collection == VERSIONS and any(
            one.output.collection == VERSIONS and not one.done for one in before
        )

    def _check_time(self, draft: PendingCommit, names: set[str]) -> None:
        """Raises when a rank will not come any more: at the deadline, or at once when this job is
        over and its agent is gone.
        """
        missing = [r for r in range(self.settings.world) if receipt_name(r) not in names]
        if time.monotonic() > draft.since + self.settings.deadline_s:
            raise CommitError(
                f"no receipt of rank(s) {missing} within {self.settings.deadline_s:g} s"
            )
        if self.orphaned():
            control = Path(self.settings.control)
            at_rest = {path.name for path in fence.resting(control)}  # these write nothing more
            dead = [
                r
                for r, lock in (
                    (r, fence.lock_path(control, self.settings.epoch, r)) for r in missing
                )
                if lock.name in at_rest or not durable.is_locked(lock)
            ]
            # a receipt may have come just before its agent went
            now = set(self.storage.list(draft.output.draft))
            if any(receipt_name(r) not in now for r in dead) and not self._published(draft):
                raise CommitError(f"rank(s) {dead} ended before their part was written")

    def _published(self, draft: PendingCommit) -> str | None:
        """The directory that this very save was published as."""
        save = draft.begin.step, draft.begin.id
        for path in places(self.storage, draft.output.collection, save):
            with contextlib.suppress(ValueError, OSError):  # a damaged one is not this save
                manifest = read_manifest(self.storage, path)
                if manifest.id == draft.begin.id:
                    draft.bytes = manifest.size
                    return path
        return None

    def _commit(self, draft: PendingCommit) -> str:
        place = draft.output.draft
        try:
            manifest = self._verified(draft)
            draft.bytes = manifest.size
            self._check_epoch()  # before the manifest too: in an object store it is what publishes
            self.storage.put(f"{place}/{MANIFEST}", encode_json(manifest))
            self._check_epoch()
            name = self.storage.publish(place, draft.output.final)
        except FileNotFoundError:  # another one's commit came in between
            if (found := self._published(draft)) is not None:
                self.storage.settle(found)
                return found
            raise self._gone(place) from None
        try:
            self._point(draft.output.collection, name, manifest)
        except OSError as error:
            log.error("LATEST cannot be moved to %s, nothing else is affected: %s", name, error)
        return name

    def _check_epoch(self) -> None:
        newest = fence.newest_epoch(Path(self.settings.control))
        if newest > self.settings.epoch:
            raise CommitError(
                f"attempt {newest} of this job has begun; attempt {self.settings.epoch} publishes "
                "nothing more"
            )

    def _gone(self, place: str) -> CommitError:
        """Why a draft is not there any more."""
        newest = fence.newest_epoch(Path(self.settings.control))
        if newest > self.settings.epoch:
            return CommitError(f"{place} is gone: attempt {newest} of this job has taken over")
        return CommitError(
            f"{self.storage.where}/{place}: No such file or directory; somebody has removed it"
        )

    def _verified(self, draft: PendingCommit) -> Manifest:
        """The manifest that these receipts make; raises CommitError for receipts of different
        saves, layouts or sizes.
        """
        receipts, digests = [], {}
        for rank in range(self.settings.world):
            path = f"{draft.output.draft}/{receipt_name(rank)}"
            data = self.storage.get(path)
            receipt = decode_json(data, Receipt)
            if (receipt.id, receipt.rank, receipt.layout) != (
                draft.begin.id,
                rank,
                draft.output.layout,
            ):
                raise CommitError(
                    f"{path} belongs to save {receipt.id} of rank {receipt.rank}, not to "
                    f"{draft.begin.id}"
                )
            size = self.storage.size(f"{draft.output.draft}/{receipt.file}")
            if size != receipt.stored:
                raise CommitError(f"{path} vouches for {receipt.stored} bytes, the file has {size}")
            receipts.append(receipt)
            digests[receipt_name(rank)] = sha256(data)
        if digest([receipt.regions for receipt in receipts]) != draft.output.layout:
            raise CommitError(
                f"{draft.output.draft}: the ranks' parts are not the ones that were planned"
            )
        lead = receipts[0]
        base = self._base_of(receipts, draft)
        return Manifest(
            format=FORMAT,
            id=lead.id,
            step=lead.step,
            epoch=lead.epoch,
            world=lead.world,
            layout=lead.layout,
            bytes=sum(receipt.bytes for receipt in receipts),
            receipts=digests,
            loop=lead.loop or {},
            about=lead.about or {},
            base=base,
            stored=sum(receipt.stored for receipt in receipts) if base else None,
        ).sealed()

    def _base_of(self, receipts: list[Receipt], draft: PendingCommit) -> tuple[int, str] | None:
        """The newest of the saves that patches are made from; each is there. Ranks choose by
        themselves, the one before or their last full one. Who keeps a version with the newest, and
        that with its own in turn, keeps all: none of these lies before any rank's last full one.
        """
        bases = {receipt.patch.base for receipt in receipts if receipt.patch}
        for base in sorted(bases):
            if find_save(self.storage, draft.output.collection, base) is None:
                raise CommitError(
                    f"{draft.output.draft} is a patch of version {base[0]}, which was not "
                    "committed or is gone"
                )
        return max(bases, default=None)

    def _point(self, collection: str, name: str, manifest: Manifest) -> None:
        """Move the hint, only ever forward."""
        path = f"{collection}/{LATEST}" if collection else LATEST
        old = hint_of(self.storage, collection)
        hint = Hint(name=name, epoch=manifest.epoch, step=manifest.step)
        if old is None or (old.epoch, old.step) <= (hint.epoch, hint.step):
            self.storage.put(path, encode_json(hint))

    def _committed(self, draft: PendingCommit, name: str) -> None:
        draft.done = True
        log.info("%s committed", name)
        seconds = time.monotonic() - draft.since
        begin, collection = draft.begin, draft.output.collection
        report = Committed(
            id=begin.id,
            step=begin.step,
            collection=collection,
            name=name,
            seconds=seconds,
            bytes=draft.bytes,
        )
        self.report(report)
        if self.settings.rank == 0:
            try:
                self._retire(draft.output)
            except (OSError, ValueError, CommitError) as error:
                log.error("retention failed, nothing else is affected: %s", error)

    def _retire(self, output: Output) -> None:
        """Delete what retention lets go, and tell what is left."""
        if output.collection == VERSIONS and output.retention == Retention():
            return  # they are many, and all of them stay
        self._check_epoch()
        known = self.known.setdefault(output.collection, {})
        is_complete = output.collection == VERSIONS  # which are made of each other
        entries = list_entries(self.storage, output.collection, known, is_complete=is_complete)
        in_use, gone = self.in_use(), set[str]()
        for entry in expired(entries, output.retention):
            if entry.path in in_use:
                continue
            log.info("retention removes %s", entry.path)
            try:
                self.storage.remove(entry.path)
                gone.add(entry.path)
            except OSError as error:  # the others go, and it is still there to be loaded
                log.error("%s cannot be removed: %s", entry.path, error)
        left = rolling([one for one in entries if one.path not in gone], output.retention)
        if left and not output.collection:
            self.report(Retained(oldest=read_manifest(self.storage, left[0].path).loop))

    def _fail(self, draft: PendingCommit, cause: str) -> None:
        draft.done = True
        log.error("%s failed: %s", draft.output.draft, cause)
        begin, collection = draft.begin, draft.output.collection
        if collection == VERSIONS:
            self.lose()
            self.report(NotKept(id=begin.id, step=begin.step, collection=collection, cause=cause))
        else:
            self.report(SaveFailed(id=begin.id, step=begin.step, cause=cause))
        try:
            self._give_space_back(draft.output.draft)
            if collection == VERSIONS:
                clear(self.storage, draft.output, self.settings.world)
        except OSError as error:
            log.error("%s keeps its space until the next start: %s", draft.output.draft, error)

    def _give_space_back(self, place: str) -> None:
        """Delete what nobody can commit: this rank's bytes if another's will never come, all if the
        last in the line has failed.

        All goes by a rename first, as does a commit: of the two, one finds the draft gone.
        """
        names, ranks = set(self.storage.list(place)), range(self.settings.world)
        if any(abandoned_name(r) in names and receipt_name(r) not in names for r in ranks):
            self.storage.discard(f"{place}/{file_name(self.settings.rank)}")
        elif self.settings.rank == min(len(ranks), LINE) - 1 and all(
            receipt_name(r) in names for r in ranks
        ):
            self.storage.remove_draft(place)


def abandon(storage: Storage, output: Output, rank: int, why: str) -> None:
    """Leave word for the other ranks' agents that this rank's part will not come; first its space,
    or word may not fit.
    """
    storage.begin(output.draft)
    if receipt_name(rank) not in storage.list(output.draft):
        storage.discard(f"{output.draft}/{file_name(rank)}")
    storage.put(f"{output.draft}/{abandoned_name(rank)}", why.encode())


def clear(storage: Storage, output: Output, world: int) -> None:
    """Remove a draft of which nothing will come any more, once every rank has said its word: on a
    full disk there would be one for each version.
    """
    names = set(storage.list(output.draft))
    if all({receipt_name(rank), abandoned_name(rank)} & names for rank in range(world)):
        with contextlib.suppress(FileNotFoundError):  # another rank's agent was faster
            storage.remove_draft(output.draft)


def names_of(storage: Storage, collection: str, step: int, identity: str) -> tuple[str, str]:
    """(draft, final) paths of a save."""
    draft = storage.draft("v" if collection else "step", step, identity)
    return f"{collection}/{draft}" if collection else draft, final_path(collection, step)
