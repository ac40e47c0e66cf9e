"""Checkpoints in an object store: the `Storage` of `rft.checkpoint.storage` over any URL that
fsspec knows (s3://..., memory://...).

    data objects ─► receipts
            ─► MANIFEST.json, put last and never over another: the mark of a complete checkpoint

An object store has no rename: a draft has its final name, `step_NNNNNNNN.<id>`, from its first
object on, and without a manifest it is nothing to any reader. What a rename decides on a disk is
decided here by a put that succeeds only where nothing is (`If-None-Match: *`): of an agent that
commits a draft and a start that sweeps it, the first to put the manifest's name has it. Invariant:
an object is there as a whole or not at all (the store's own promise), the manifest after all
others; what is set aside keeps every object and gets one more, QUARANTINED, that takes it out of
the lists. A listing may lag behind: what matters is asked for by its name.
"""

import contextlib
import json
import logging
import re
import uuid
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from fsspec.core import url_to_fs

from rft.checkpoint.records import (
    CHUNK,
    COLLECTIONS,
    LATEST,
    MANIFEST,
    PROBE,
    QUARANTINED,
    final_name,
)
from rft.checkpoint.uploads import PART, Upload, Uploads, medium

log = logging.getLogger(__name__)
# names that `draft` makes; others are not ours to sweep
OURS = re.compile(r"(step|v)_\d{8,}\.e\d+n\d+")
SWEPT = "SWEPT"  # mark of a draft that is being removed
NEVER = b"no checkpoint: it was removed before its manifest was put\n"  # in the manifest's place
# what a record that somebody else has written may be
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
PROBES = 2  # a sweep may take one away in the middle


class ObjectStorage:
    """Objects below one URL.

    Credentials and endpoint come from where the backend looks for them (AWS_ENDPOINT_URL, ...), or
    from `driver`, what it takes. `part`: bytes of a part of an upload.
    """

    look_s = 1.0  # between looks at a draft: every look is a request that somebody pays for
    read_bytes = CHUNK
    readers = 8

    def __init__(self, url: str, part: int = PART, **driver: Any):
        self.where = url.rstrip("/")
        with medium(url):
            self._fs, self._root = url_to_fs(self.where, use_listings_cache=False, **driver)
            self._uploads = (
                Uploads(self._fs, self._root, part) if "s3" in self._fs.protocol else None
            )
        self._part = part
        self._aside: set[str] = set()  # set aside here, whatever a listing says

    @cached_property
    def is_conditional(self) -> bool:
        """Whether the store refuses a put that says "only where nothing is", over something."""
        return any(self._refuses_a_second() for _ in range(PROBES))

    def _refuses_a_second(self) -> bool:
        probe = f"{PROBE}{uuid.uuid4().hex[:12]}"
        self._create(probe, b"first")
        try:
            self._create(probe, b"second")
        except FileExistsError:
            return True
        finally:
            self.discard(probe)
        return False

    def draft(self, prefix: str, step: int, identity: str) -> str:
        return f"{final_name(prefix, step)}.{identity}"

    def prepare(self) -> None:
        """OSError when nothing can be written there."""
        if not self.is_conditional:
            log.warning(
                "%s ignores If-None-Match: what keeps two saves apart there is their names alone, "
                "and nothing keeps two runs apart that write to one place",
                self.where,
            )

    def begin(self, draft: str) -> None:
        """Prefixes need no making."""

    def create(self, path: str, size: int) -> "ObjectSink | Upload":
        if self._uploads is not None:
            return Upload(self._uploads, path, size)
        with medium(self._name(path)):
            return ObjectSink(
                self,
                path,
                self._fs.open(self._at(path), "wb", block_size=self._part, autocommit=False),
            )

    def put(self, path: str, data: bytes) -> None:
        if path.rpartition("/")[2] == MANIFEST:
            self._create(path, data)
            return
        with medium(self._name(path)):
            self._fs.pipe_file(self._at(path), data)

    def _create(self, path: str, data: bytes) -> None:
        """Put it where nothing is. FileExistsError where something else is: the same is what the
        next agent in line has put, or this one before its answer was lost.
        """
        with medium(self._name(path)):
            try:
                self._fs.pipe_file(self._at(path), data, mode="create")
            except OSError as error:
                if not _is_there_already(error):
                    raise
                there = bytes(self._fs.cat_file(self._at(path)))
                if there == NEVER != data:
                    raise FileNotFoundError(f"{self._name(path)}: its draft was removed") from None
                if there != data:
                    raise FileExistsError(f"{self._name(path)} is there already") from error

    def discard(self, path: str) -> None:
        """A delete is sent only where something is: one that a network repeats late, when the name
        is in use, would take what is there by then.
        """
        if self._has(path):
            with medium(self._name(path)), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(path))

    def get(self, path: str) -> bytes:
        with medium(self._name(path)):
            data = bytes(self._fs.cat_file(self._at(path)))
        if data == NEVER:
            raise FileNotFoundError(f"{self._name(path)}: its draft was removed")
        return data

    def open(self, path: str) -> "ObjectReader":
        return ObjectReader(self, path)

    def size(self, path: str) -> int:
        if self._uploads is not None:
            return self._uploads.size(path)
        with medium(self._name(path)):
            return int(self._fs.size(self._at(path)))

    def list(self, path: str = "") -> list[str]:
        """Names directly below `path`; what is set aside has no manifest here. Marks that decide
        are there even if the store does not list them yet.
        """
        names = self._names(path)
        if path in COLLECTIONS:
            return sorted(names | self._told(path))
        if {QUARANTINED, SWEPT} & names or path in self._aside:
            return sorted(names - {MANIFEST})
        is_plain = MANIFEST in names and len(names) > 1
        if not is_plain and OURS.fullmatch(path.rpartition("/")[2]):
            names.discard(MANIFEST)
            names |= set() if self._receipts(path) is None else {MANIFEST}
        return sorted(names)

    def _told(self, collection: str) -> set[str]:
        """LATEST, and the checkpoint that it names; nothing where it is damaged."""
        try:
            told = json.loads(self.get(f"{collection}/{LATEST}" if collection else LATEST))
            name = told["name"].rpartition("/")[2]
        except (FileNotFoundError, *NONSENSE):
            return set()
        return {LATEST, name} if OURS.fullmatch(name) else set()

    def publish(self, draft: str, final: str) -> str:
        """The manifest has published it; make sure that it still vouches for something."""
        if not self._vouches(draft):
            self.discard(f"{draft}/{MANIFEST}")
            raise FileNotFoundError(f"{self.where}/{draft} is gone")
        return draft

    def settle(self, path: str) -> None:
        """An object that can be seen is durable."""

    def leftovers(self, collection: str) -> Sequence[str]:
        """Drafts that never got a manifest, or have nothing but one; and half-removed ones."""
        prefix = f"{collection}/" if collection else ""
        whole = self._whole(collection) if collection else set()
        names = [name for name in self._names(collection) if OURS.fullmatch(name)]
        drafts = [prefix + name for name in names if name not in whole]
        return sorted(draft for draft in drafts if self._is_left(draft))

    def _whole(self, collection: str) -> set[str]:
        """Names of saves of which one listing of all objects shows that they were committed: a
        request for each of a hundred thousand versions would take an hour. Of checkpoints, below
        which the other collections lie, there are few.
        """
        with medium(self._name(collection)), contextlib.suppress(FileNotFoundError):
            found: dict[str, set[str]] = {}
            for path in self._fs.find(self._at(collection)):
                _, save, name = path.rsplit("/", 2)
                found.setdefault(save, set()).add(name)
            return {
                save
                for save, names in found.items()
                if MANIFEST in names and len(names) > 1 and not names & {SWEPT, QUARANTINED}
            }
        return set()

    def _is_left(self, draft: str) -> bool:
        """A manifest that cannot be read is damage, and no leftover."""
        names = self._names(draft)
        if QUARANTINED in names or draft in self._aside:
            return False
        if SWEPT in names:
            return True
        if MANIFEST in names and len(names) > 1:
            return False
        receipts = self._receipts(draft)
        return receipts is None or (bool(receipts) and not self._vouches(draft))

    def set_aside(self, path: str, prefix: str) -> str:
        self.put(f"{path}/{QUARANTINED}", prefix.encode())
        self._aside.add(path)
        return f"{path}/{QUARANTINED}"

    def remove(self, path: str) -> None:
        """The manifest first, so that no reader meets a part."""
        self.discard(f"{path}/{MANIFEST}")
        self._delete(path)

    def remove_draft(self, path: str) -> None:
        """From here on nobody can commit it; one that somebody has committed meanwhile stays."""
        if self.is_conditional:
            self.put(f"{path}/{SWEPT}", b"")
            try:
                self._create(f"{path}/{MANIFEST}", NEVER)
            except FileExistsError:
                if self._vouches(path):
                    self.discard(f"{path}/{SWEPT}")
                    return
        self._delete(path)

    def _delete(self, path: str) -> None:
        """All objects below it, the marks that keep it from being committed after all others."""
        marks = [f"{self._at(path)}/{mark}" for mark in (MANIFEST, SWEPT)]
        with medium(self._name(path)), contextlib.suppress(FileNotFoundError):
            if found := [name for name in self._fs.find(self._at(path)) if name not in marks]:
                self._fs.rm(found)
        for mark in (MANIFEST, SWEPT):
            self.discard(f"{path}/{mark}")

    def end_uploads(self) -> None:
        """What agents that died have left in parts."""
        if self._uploads is None:
            return
        if ended := self._uploads.end_all(self._is_ours):
            log.warning("%s: %d uploads that nobody went on with are ended", self.where, ended)

    @staticmethod
    def _is_ours(path: str) -> bool:
        *above, draft, _ = ["", *path.split("/")]
        return "/".join(above).lstrip("/") in COLLECTIONS and bool(OURS.fullmatch(draft))

    def free_bytes(self) -> int | None:
        return None

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Fewer bytes where the object ends; S3 refuses a range that begins there, which is no
        failure of the medium.
        """
        with medium(self._name(path)):
            try:
                return bytes(self._fs.cat_file(self._at(path), start=start, end=stop))
            except OSError:
                if start < self._fs.size(self._at(path)):
                    raise
                return b""

    def _receipts(self, path: str) -> Sequence[str] | None:
        """Names of those that its manifest vouches for, [] of one that says nothing; None: it has
        none.
        """
        try:
            manifest = json.loads(self.get(f"{path}/{MANIFEST}"))
            return sorted(map(str, manifest["receipts"]))
        except FileNotFoundError:
            return None
        except NONSENSE:
            return []

    def _vouches(self, path: str) -> bool:
        """Has it a manifest, and anything that this is about?"""
        return any(self._has(f"{path}/{receipt}") for receipt in self._receipts(path) or ())

    def _has(self, path: str) -> bool:
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def _names(self, path: str) -> set[str]:
        with medium(self._name(path)):
            try:
                listing = self._fs.ls(self._at(path), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return set()
        return {name.rstrip("/").rpartition("/")[2] for name in listing}

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def _name(self, path: str) -> str:
        return f"{self.where}/{path}"


def _is_there_already(error: OSError) -> bool:
    """radosgw refuses as it should, and does not say which condition it was."""
    response = getattr(error.__cause__, "response", None) or {}
    code = response.get("Error", {}).get("Code")
    return isinstance(error, FileExistsError) or code in ("PreconditionFailed", "412")


class ObjectSink:
    """One upload. In a store proper nothing of it can be seen before `close`."""

    def __init__(self, storage: ObjectStorage, path: str, file: Any):
        self._storage, self._path, self._file = storage, path, file
        self._name = f"{storage.where}/{path}"

    def write(self, data: memoryview) -> None:
        with medium(self._name):
            self._file.write(data)

    def close(self) -> None:
        with medium(self._name):
            self._file.close()
            self._file.commit()

    def abort(self) -> None:
        """Give the upload up; the parts that went up already are the store's to forget."""
        with contextlib.suppress(OSError), medium(self._name):
            self._file.discard()
        with contextlib.suppress(AttributeError):  # of files that hold nothing back
            self._file.closed = True  # else the end of this object would upload what it still holds
        with contextlib.suppress(OSError):
            self._storage.discard(self._path)


class ObjectReader:
    """Ranges of one object, one request each."""

    def __init__(self, storage: ObjectStorage, path: str):
        self._storage, self._path = storage, path

    def read(self, start: int, length: int) -> bytes:
        return self._storage.read(self._path, start, start + length)

    def read_into(self, start: int, places: list[memoryview]) -> int:
        data = memoryview(self.read(start, sum(map(len, places))))
        at = 0
        for place in places:
            part = data[at : at + len(place)]
            place[: len(part)] = part
            at += len(part)
        return at

    def close(self) -> None:
        """Nothing is open between requests."""


def try_out(url: str) -> bool:
    """Does the store there refuse a put over something, if it is told to? OSError, after few tries,
    where nothing can be written.
    """
    few = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    return ObjectStorage(url, **(few if url.startswith("s3") else {})).is_conditional
