"""What is committed below a root, and what of that may go. No torch.

In: a `Storage`. Out: names, verified manifests, and one `Entry` per checkpoint, oldest first; of
these, those that retention lets go. Invariant: a directory counts only with a manifest whose seal
fits; the newest entry and every tagged one stay, whatever the rules say.
"""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import isfinite, nan

import msgspec

from rft.checkpoint.records import (
    LATEST,
    MANIFEST,
    QUARANTINED,
    Manifest,
    Retention,
    decode_json,
    final_name,
    sha256,
)
from rft.checkpoint.storage import COLLECTIONS, NotAFile, Storage

log = logging.getLogger(__name__)
COMMITTED = re.compile(r"(step|v)_(\d{8}|[1-9]\d{8,17})(\.[0-9a-z]+)?", re.ASCII)
FRESH = 64  # of the newest it is asked each time whether they are whole
RANK_FILE = re.compile(r"r\d{5,}\.(bin|json)")


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """LATEST: where a reader may look first. Never believed: the committed manifests decide. But
    what it names was committed once: if it is no checkpoint now, that is said.
    """

    name: str
    epoch: int
    step: int


def step_of(name: str) -> int | None:
    """Step of a committed directory's name; None for drafts, quarantined ones and foreign files."""
    match = COMMITTED.fullmatch(name.rpartition("/")[2])
    return int(match[2]) if match else None


def committed(storage: Storage, collection: str = "") -> list[str]:
    """Paths of all directories with a manifest, by step,
    ascending (a name alone proves nothing).
    """
    return [path for path in named(storage, collection) if MANIFEST in storage.list(path)]


def named(storage: Storage, collection: str = "") -> list[str]:
    """Paths below it that have a committed directory's name, by step, ascending."""
    steps = [(step_of(name), name) for name in storage.list(collection)]
    names = [name for step, name in sorted((s, n) for s, n in steps if s is not None)]
    return [f"{collection}/{name}" if collection else name for name in names]


def hint(storage: Storage, collection: str = "") -> Hint | None:
    """What LATEST says, if anything. Raises OSError where the medium fails."""
    try:
        data = storage.get(f"{collection}/{LATEST}" if collection else LATEST)
        return decode_json(data, Hint)
    except (FileNotFoundError, NotAFile, ValueError):
        return None


def lost(storage: Storage, collection: str = "") -> list[str]:
    """Paths of what was committed, still has its ranks' files, and no manifest any more."""
    told = hint(storage, collection)
    drafts = set(storage.leftovers(collection)) - ({told.name} if told else set())
    found = []
    for path in named(storage, collection):
        names = storage.list(path)
        is_ours = any(RANK_FILE.fullmatch(name) for name in names)
        if is_ours and path not in drafts and not {MANIFEST, QUARANTINED} & set(names):
            found.append(path)
    return found


def astray(storage: Storage, collection: str = "") -> str:
    """The path that LATEST names, if that is no checkpoint any more; else nothing."""
    told = hint(storage, collection)
    return told.name if told and told.name not in committed(storage, collection) else ""


def doubt(storage: Storage) -> str:
    """Why there may have been a newer checkpoint than those that are there, or nothing."""
    if hint(storage) is None:
        return f"{LATEST} is missing or damaged: nothing tells whether there was a newer one"
    gone = astray(storage)
    return f"{LATEST} names {gone}, which is no checkpoint any more" if gone else ""


def read_manifest(storage: Storage, path: str) -> Manifest:
    """The manifest of a committed directory. Raises ValueError when it is damaged.

    One of another format is no damage, as long as its seal fits: whoever opens it looks at
    `format`.
    """
    where = f"{storage.where}/{path}/{MANIFEST}"
    data = storage.get(f"{path}/{MANIFEST}")
    try:
        manifest = decode_json(data, Manifest)
    except ValueError as error:
        raise ValueError(f"{where} is damaged: {error}") from error
    unsealed = data.replace(f'"seal":"{manifest.seal}"'.encode(), b'"seal":""')
    if manifest.seal != sha256(unsealed):
        raise ValueError(f"{where} is damaged: its seal does not fit its content")
    if step_of(path) not in (manifest.step, None):
        raise ValueError(f"{where} is of step {manifest.step}: the directory was renamed")
    return manifest


def final_path(collection: str, step: int) -> str:
    """Where a save of it is published, if that name is not taken."""
    name = final_name("v" if collection else "step", step)
    return f"{collection}/{name}" if collection else name


def places(storage: Storage, collection: str, save: tuple[int, str]) -> list[str]:
    """Committed directories that may be the save of that (step, id): under its step's name, or,
    where that was taken, with the id behind it. Of the others, which may be a hundred thousand,
    none is looked at.
    """
    final = final_path(collection, save[0])
    return [path for path in (final, f"{final}.{save[1]}") if MANIFEST in storage.list(path)]


def find(storage: Storage, collection: str, save: tuple[int, str]) -> str | None:
    """Path of the committed save of that (step, id)."""
    for path in places(storage, collection, save):
        with contextlib.suppress(ValueError):  # a damaged one is not this save
            if read_manifest(storage, path).id == save[1]:
                return path
    return None


def weights_of(storage: Storage, version: int) -> str | None:
    """Path of the newest save that has the weights of policy version `version`: it was kept, or it
    is there for engines, or in a checkpoint.
    """
    paths = [
        path
        for collection in reversed(COLLECTIONS)
        for path in named(storage, collection)
        if step_of(path) == version and MANIFEST in storage.list(path)
    ]
    found = list(_entries(storage, paths))
    return max(found, key=lambda one: one.epoch).path if found else None


@dataclass(frozen=True)
class Entry:
    """A committed checkpoint. Later ones have a larger (epoch, step). `bytes`: on disk; `base`:
    (step, id) of the one that it is a patch of.
    """

    path: str
    epoch: int
    step: int
    bytes: int
    tagged: bool = False
    id: str = ""
    base: tuple[int, str] | None = None


def with_bases(kept: list[Entry], entries: list[Entry]) -> set[str]:
    """Paths of these, and of all without which they could not be read. Where a base is not among
    the `entries`, as in a store whose listing lags, any older one may be what it is made of.
    """
    known = {(entry.step, entry.id): entry for entry in entries}
    paths: set[str] = set()
    for entry in kept:
        one: Entry | None = entry
        while one is not None and one.path not in paths:
            paths.add(one.path)
            if one.base is not None and one.base not in known:
                place = one.epoch, one.step
                paths |= {other.path for other in entries if (other.epoch, other.step) < place}
            one = known.get(one.base) if one.base else None
    return paths


def expired(entries: list[Entry], policy: Retention) -> list[Entry]:
    """What may be deleted, oldest first."""
    ordered = sorted(entries, key=lambda entry: (entry.epoch, entry.step))
    if not ordered:
        return []
    keep = {ordered[-1].path} | {entry.path for entry in ordered if entry.tagged}
    wanted = set(keep)
    wanted |= {entry.path for entry in (ordered[-policy.last :] if policy.last else ordered)}
    if policy.since is not None:
        wanted |= {entry.path for entry in ordered if entry.step >= policy.since}
    if policy.every:
        wanted |= {entry.path for entry in ordered if entry.step % policy.every == 0}
    if policy.best:
        wanted |= {entry.path for entry in _best(ordered, policy)}
    if policy.max_bytes:
        total = sum(entry.bytes for entry in ordered if entry.path in wanted)
        for entry in ordered:
            if total > policy.max_bytes and entry.path in wanted - keep:
                wanted.discard(entry.path)
                total -= entry.bytes
    wanted = with_bases([entry for entry in ordered if entry.path in wanted], ordered)
    return [entry for entry in ordered if entry.path not in wanted]


def rolling(entries: list[Entry], policy: Retention) -> list[Entry]:
    """The newest ones, which a run goes on from; not what is kept beside them, tagged or best or
    every so many steps, and would hold all data since then. Oldest first.
    """
    ordered = sorted(entries, key=lambda entry: (entry.epoch, entry.step))
    return ordered[-policy.last :] if policy.last else ordered


def _best(ordered: list[Entry], policy: Retention) -> list[Entry]:
    sign = 1 if policy.best_is_lowest else -1
    # NaN is greater and less than nothing: sorted, it would push the best out
    scored = [e for e in ordered if isfinite(policy.scores.get(e.step, nan))]
    return sorted(scored, key=lambda entry: (sign * policy.scores[entry.step], -entry.step))[
        : policy.best
    ]


def list_entries(
    storage: Storage,
    collection: str = "",
    known: dict[str, Entry] | None = None,
    *,
    is_complete: bool = False,
) -> list[Entry]:
    """Committed directories with a sound manifest, oldest first. Of those that are `known`, from
    the last call, only the newest are read again: a run may keep a hundred thousand.
    `is_complete`: a manifest that the medium does not give is an OSError and not left out, for
    whoever deletes has to know what the others are made of.
    """
    known = {} if known is None else known
    paths, tags = named(storage, collection), set(storage.list("tags"))
    old = {path: known[path] for path in paths[:-FRESH] if path in known}
    new = [path for path in paths if path not in old and MANIFEST in storage.list(path)]
    found = [*old.values(), *_entries(storage, new, is_complete)]
    known.clear()
    known |= {one.path: one for one in found}
    tagged = (replace(one, tagged=one.path in tags) for one in found)
    return sorted(tagged, key=lambda one: (one.epoch, one.step))


def _entries(storage: Storage, paths: Iterable[str], is_complete: bool = False) -> Iterator[Entry]:
    """Of committed directories those with a sound manifest; whether tagged is not looked at."""
    for path in paths:
        try:
            found = read_manifest(storage, path)
        except (ValueError, OSError) as error:
            if is_complete and not isinstance(error, ValueError):
                raise
            log.error("%s", error)
            continue
        numbers = found.epoch, found.step, found.size
        yield Entry(path, *numbers, id=found.id, base=found.base)
