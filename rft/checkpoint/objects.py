"""Checkpoints in an object store: the `Storage` of `rft.checkpoint.storage` over any URL that
fsspec knows (s3://..., memory://...).

    data objects ─► receipts
            ─► MANIFEST.json, put last and never over another: the mark of a complete checkpoint

An object store has no rename: a draft has its final name, `step_NNNNNNNN.<id>`, from its first
object on, and without a manifest it is nothing to any reader. Invariant: an object is there as a
whole or not at all (the store's own promise), the manifest after all others; what is set aside
keeps every object and gets one more, QUARANTINED, that takes it out of the lists.
"""

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs

from rft.checkpoint.records import MANIFEST, QUARANTINED, final_name

# names that `draft` makes; others are not ours to sweep
OURS = re.compile(r"(step|v)_\d{8,}\.e\d+n\d+")
PART = 32 * 2**20  # bytes of one part of a multipart upload


@contextlib.contextmanager
def _medium(what: str) -> Iterator[None]:
    """Clients of object stores have errors of their own; callers know OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {error}") from error


class ObjectStorage:
    """Objects below one URL.

    Credentials and endpoint come from where the backend looks for them (AWS_ENDPOINT_URL, ...).
    """

    look_s = 1.0  # between looks at a draft: every look is a request that somebody pays for

    def __init__(self, url: str):
        self.where = url.rstrip("/")
        with _medium(url):
            self._fs, self._root = url_to_fs(self.where, use_listings_cache=False)

    def draft(self, prefix: str, step: int, identity: str) -> str:
        return f"{final_name(prefix, step)}.{identity}"

    def prepare(self) -> None:
        """OSError when nothing can be written there."""
        self.put(".probe", b"")
        self.discard(".probe")

    def begin(self, draft: str) -> None:
        """Prefixes need no making."""

    def create(self, path: str, size: int) -> "ObjectSink":
        with _medium(self._name(path)):
            return ObjectSink(
                self, path, self._fs.open(self._at(path), "wb", block_size=PART, autocommit=False)
            )

    def put(self, path: str, data: bytes) -> None:
        with _medium(self._name(path)):
            if path.rpartition("/")[2] != MANIFEST:
                self._fs.pipe_file(self._at(path), data)
                return
            try:
                self._fs.pipe_file(self._at(path), data, mode="create")
            except FileExistsError:
                # the next agent in line may have put the same
                if self._fs.cat_file(self._at(path)) != data:
                    raise

    def discard(self, path: str) -> None:
        with _medium(self._name(path)), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def get(self, path: str) -> bytes:
        with _medium(self._name(path)):
            return bytes(self._fs.cat_file(self._at(path)))

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, ObjectReader(self, path))

    def size(self, path: str) -> int:
        with _medium(self._name(path)):
            return int(self._fs.size(self._at(path)))

    def list(self, path: str = "") -> list[str]:
        """Names directly below `path`; what is set aside has no manifest here."""
        names = self._names(path)
        return sorted(names - {MANIFEST} if QUARANTINED in names else names)

    def publish(self, draft: str, final: str) -> str:
        """The manifest has published it; make sure that it still vouches for something."""
        names = self._names(draft)
        if MANIFEST not in names or not any(name.endswith(".bin") for name in names):
            self.discard(f"{draft}/{MANIFEST}")
            raise FileNotFoundError(f"{self.where}/{draft} is gone")
        return draft

    def settle(self, path: str) -> None:
        """An object that can be seen is durable."""

    def leftovers(self, collection: str) -> Sequence[str]:
        """Drafts that never got a manifest."""
        prefix = f"{collection}/" if collection else ""
        drafts = [prefix + name for name in self._names(collection) if OURS.fullmatch(name)]
        return sorted(draft for draft in drafts if not {MANIFEST, QUARANTINED} & self._names(draft))

    def set_aside(self, path: str, prefix: str) -> str:
        self.put(f"{path}/{QUARANTINED}", prefix.encode())
        return f"{path}/{QUARANTINED}"

    def remove(self, path: str) -> None:
        """The manifest first, so that no reader meets a part."""
        self.discard(f"{path}/{MANIFEST}")
        with _medium(self._name(path)), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)

    def free_bytes(self) -> int | None:
        return None

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Fewer bytes where the object ends; S3 refuses a range that begins there, which is no
        failure of the medium.
        """
        with _medium(self._name(path)):
            try:
                return bytes(self._fs.cat_file(self._at(path), start=start, end=stop))
            except OSError:
                if start < self._fs.size(self._at(path)):
                    raise
                return b""

    def _names(self, path: str) -> set[str]:
        with _medium(self._name(path)):
            try:
                listing = self._fs.ls(self._at(path), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return set()
        return {name.rstrip("/").rpartition("/")[2] for name in listing}

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def _name(self, path: str) -> str:
        return f"{self.where}/{path}"


class ObjectSink:
    """One upload. In a store proper nothing of it can be seen before `close`."""

    def __init__(self, storage: ObjectStorage, path: str, file: Any):
        self._storage, self._path, self._file = storage, path, file
        self._name = f"{storage.where}/{path}"

    def write(self, data: memoryview) -> None:
        with _medium(self._name):
            self._file.write(data)

    def close(self) -> None:
        with _medium(self._name):
            self._file.close()
            self._file.commit()

    def abort(self) -> None:
        """Give the upload up; the parts that went up already are the store's to forget."""
        with contextlib.suppress(OSError), _medium(self._name):
            self._file.discard()
        with contextlib.suppress(AttributeError):  # of files that hold nothing back
            self._file.closed = True  # else the end of this object would upload what it still holds
        with contextlib.suppress(OSError):
            self._storage.discard(self._path)


class ObjectReader(io.RawIOBase):
    """Ranges of one object, one request each."""

    def __init__(self, storage: ObjectStorage, path: str):
        self._storage, self._path, self._position = storage, path, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET
        self._position = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        data = self._storage.read(self._path, self._position, self._position + size)
        self._position += len(data)
        return data
