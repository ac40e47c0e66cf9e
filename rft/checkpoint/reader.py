"""Read a committed checkpoint in any cut: manifest ─► receipts ─► verified chunks
        ─► the elements that somebody asks for.

No torch: elements are numpy integers of the right width, so that bfloat16 needs no type of its own.
Invariant: no byte is handed out that was not verified against its receipt, no receipt believed that
the manifest does not vouch for; and nothing is called damaged because the medium fails.
"""

import logging
import resource
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, BinaryIO, TypeVar

import msgspec
import numpy as np
import xxhash

from rft.checkpoint.catalog import read_manifest
from rft.checkpoint.records import (
    CHUNK,
    FORMAT,
    MANIFEST,
    LoopState,
    Receipt,
    Region,
    decode_json,
    sha256,
)
from rft.checkpoint.sharding import (
    Box,
    Claim,
    CoverageError,
    boxes,
    check_coverage,
    check_place,
    overlap,
)
from rft.checkpoint.storage import NotAFile, Storage, read_at
from rft.checkpoint.writer import file_name, receipt_name
from rft.ground.names import ITEM_BYTES

log = logging.getLogger(__name__)
CRITIC = "critic."  # keys of a critic's tensors begin so
SHOWN = 8  # tensors named in one message
AGAIN_S = 0.5  # between two tries of what has failed
Found = TypeVar("Found")


class Damaged(RuntimeError):
    """A checkpoint that must not be loaded: content missing, cut short, or different from what was
    written.

    `file`, `chunk`: where another reader may look for itself; no file: the manifest, the receipts,
    or what they cover.
    """

    def __init__(self, words: str, file: str = "", chunk: int = 0):
        super().__init__(words)
        self.file, self.chunk = file, chunk


class StorageUnreachable(OSError):
    """The medium fails (no mount, EIO, ESTALE, EACCES, too many open files): that says nothing
    about what lies there.
    """


class Mismatch(ValueError):
    """A good checkpoint of something else: another model, vocabulary, precision or format."""


def patiently(what: str, act: Callable[[], Found], patience_s: float) -> Found:
    """What `act` returns; an OSError is tried again for `patience_s` seconds, then it is
    StorageUnreachable.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            return act()
        except OSError as error:
            left = end - time.monotonic()
            if left <= 0:
                tried = f" (tried for {patience_s:g} s)" if patience_s else ""
                raise StorageUnreachable(f"{what}: {error}{tried}") from error
            log.warning("%s, tried again for %.0f s: %s", what, left, error)
            time.sleep(min(AGAIN_S, left))


class OpenFiles:
    """The files of one committed directory.

    Of many only those used last are open: the ranks may be more than descriptors.
    """

    def __init__(self, storage: Storage, directory: str, patience_s: float):
        self._storage, self._directory, self._patience_s = storage, directory, patience_s
        # the rest is the process's own
        self._most = max(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._open: OrderedDict[str, BinaryIO] = OrderedDict()

    def where(self, name: str) -> str:
        return f"{self._storage.where}/{self._directory}/{name}"

    def read(self, name: str, start: int, length: int) -> bytes:
        """These bytes, or fewer where the file ends. Raises as `attempt` does."""
        return self.attempt(name, lambda: read_at(self._opened(name), start, length))

    def attempt(self, name: str, read: Callable[[], Found]) -> Found:
        """`read()` of the file `name`.

        Raises Damaged if there is no such file, StorageUnreachable if that cannot be said.
        """

        def once() -> Found:
            try:
                return read()
            except NotAFile as error:
                raise Damaged(f"{self.where(name)} {error.strerror}", name) from error
            except OSError as error:
                self.close()  # a handle may be stale, or the descriptors spent
                names = (
                    self._storage.list(self._directory)
                    if isinstance(error, FileNotFoundError)
                    else []
                )
                # else it is the whole directory that is not there
                if MANIFEST in names and name not in names:
                    raise Damaged(f"{self.where(name)} is missing", name) from error
                raise

        return patiently(f"{self.where(name)} cannot be read", once, self._patience_s)

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _opened(self, name: str) -> BinaryIO:
        if name not in self._open:
            while len(self._open) >= self._most:
                self._open.popitem(last=False)[1].close()
            self._open[name] = self._storage.open(f"{self._directory}/{name}")
        self._open.move_to_end(name)
        return self._open[name]


class RankFile:
    """The bytes of one rank, verified chunk by chunk as they are read; the last chunk is kept."""

    def __init__(self, files: OpenFiles, receipt: Receipt):
        self.name, self.bytes = receipt.file, receipt.bytes
        self._files, self._receipt = files, receipt
        self._kept: tuple[int, bytes] = (-1, b"")

    def read(self, start: int, count: int) -> bytearray:
        """Raises Damaged, naming the file and the chunk, or StorageUnreachable."""
        out = bytearray(count)
        at = start
        while at < start + count:
            number = at // CHUNK
            inside = self.chunk(number)[at - number * CHUNK : start + count - number * CHUNK]
            out[at - start : at - start + len(inside)] = inside
            at += len(inside)
        return out

    def chunk(self, number: int) -> bytes:
        if self._kept[0] != number:
            where, length = (
                self._files.where(self.name),
                min(CHUNK, self._receipt.bytes - number * CHUNK),
            )
            data = self._files.read(self.name, number * CHUNK, length)
            if len(data) != length:
                words = f"{where} ends early: {len(data)} of {length} bytes of chunk {number}"
                raise Damaged(words, self.name, number)
            if xxhash.xxh3_128_hexdigest(data) != self._receipt.chunks[number]:
                words = f"{where} was changed: chunk {number} differs from what was written"
                raise Damaged(words, self.name, number)
            self._kept = (number, data)
        return self._kept[1]


class Checkpoint:
    """A committed directory, opened: manifest and receipts are verified, bytes are when they are
    read.

    What the medium does not give is tried again for `patience_s` seconds each time, then it raises
    StorageUnreachable.
    """

    def __init__(self, storage: Storage, path: str, patience_s: float = 0.0):
        self.path = path
        self.where = f"{storage.where}/{path}"
        self._storage = storage
        self._files = OpenFiles(storage, path, patience_s)
        try:
            self.manifest = self._files.attempt(MANIFEST, lambda: read_manifest(storage, path))
        except ValueError as error:
            raise Damaged(str(error)) from error
        if self.manifest.format != FORMAT:
            raise Mismatch(
                f"{self.where} has format {self.manifest.format}, this rft reads {FORMAT}: use the "
                "rft that wrote it"
            )
        self._check_manifest()
        self.receipts = [
            self._receipt(rank, self.manifest.receipts[receipt_name(rank)])
            for rank in range(self.manifest.world)
        ]
        if sum(receipt.bytes for receipt in self.receipts) != self.manifest.bytes:
            raise Damaged(f"{self.where}: the receipts vouch for other bytes than {MANIFEST}")
        self._sound: set[str] = set()  # keys whose pieces fit together
        self._pieces: dict[str, list[tuple[RankFile, Region]]] = defaultdict(list)
        for receipt in self.receipts:
            file = RankFile(self._files, receipt)
            for region in receipt.regions:
                self._pieces[region.key].append((file, region))

    def _check_manifest(self) -> None:
        """A seal says who wrote it, not that it makes sense: the directory may be a stranger's."""
        manifest, names = self.manifest, set(self.manifest.receipts)
        try:
            step = msgspec.convert(manifest.loop, LoopState).step
        except ValueError as error:
            raise Damaged(f"{self.where}/{MANIFEST}: its loop state is none: {error}") from error
        if step != manifest.step or step < 0:
            raise Damaged(f"{self.where}/{MANIFEST}: its loop state is not of step {manifest.step}")
        if len(names) != manifest.world or names != set(map(receipt_name, range(len(names)))):
            raise Damaged(
                f"{self.where}/{MANIFEST}: its {len(names)} receipts are not those of "
                f"{manifest.world} ranks"
            )

    def _receipt(self, rank: int, digest: str) -> Receipt:
        name, manifest = receipt_name(rank), self.manifest
        where = f"{self.where}/{name}"
        data = self._files.attempt(name, lambda: self._storage.get(f"{self.path}/{name}"))
        if sha256(data) != digest:
            raise Damaged(f"{where} was changed")
        try:
            receipt = decode_json(data, Receipt)
        except ValueError as error:
            raise Damaged(f"{where} is no receipt: {error}") from error
        if receipt.id != manifest.id:
            raise Damaged(f"{where} is of another save")
        same = ("format", "step", "epoch", "world", "layout")
        wrong = [key for key in same if getattr(receipt, key) != getattr(manifest, key)]
        wrong += ["rank"] * (receipt.rank != rank) + ["file"] * (receipt.file != file_name(rank))
        if wrong:
            raise Damaged(f"{where} does not fit {MANIFEST} in: {', '.join(wrong)}")
        if receipt.bytes < 0 or len(receipt.chunks) != -(-receipt.bytes // CHUNK):
            raise Damaged(f"{where} has {len(receipt.chunks)} hashes for {receipt.bytes} bytes")
        return receipt

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """key -> (dtype, whole shape)."""
        return {
            key: (found[0][1].dtype, found[0][1].global_shape)
            for key, found in self._pieces.items()
        }

    def check(self, claims: list[Claim]) -> None:
        """Raises Mismatch, all differences at once, if this is not a checkpoint of such tensors."""
        held = self.tensors
        wanted = {claim.key: (claim.dtype, claim.global_shape) for claim in claims if claim.bytes}
        missing = [key for key in wanted if key not in held]
        other = [
            f"{key} is {held[key][0]} {list(held[key][1])} there and {dtype} {list(shape)} here"
            for key, (dtype, shape) in wanted.items()
            if key in held and held[key] != (dtype, shape)
        ]
        if missing and all(key.startswith(CRITIC) for key in missing):
            raise Mismatch(
                f"{self.where} holds no critic, and this run has one: start under another name, or "
                "with the algorithm that wrote it"
            )
        words = [f"{len(missing)} tensors are missing there: {_few(missing)}"] if missing else []
        words += [f"{len(other)} differ: {_few(other)}"] if other else []
        if words:
            raise Mismatch(
                f"{self.where} is of another model, vocabulary, precision or optimizer: "
                f"{'; '.join(words)}; "
                "use the model.model_path, trainer.dtype and optimizer_type that it was written "
                "with, or another name"
            )

    def elements(self, claim: Claim) -> np.ndarray:
        """The claimed elements, flat, as unsigned integers of the dtype's width.

        Raises Damaged or StorageUnreachable.
        """
        width = ITEM_BYTES[claim.dtype]
        out = np.empty(claim.bytes // width, dtype=f"<u{width}")
        filled = 0
        for target in boxes(claim):
            view = out[target.start : target.start + prod(target.shape)].reshape(target.shape)
            for file, region in self._pieces_of(claim.key):
                for source in boxes(region):
                    filled += _copy(file, region, source, target, view)
        if filled != len(out):
            raise Damaged(f"{self.where}: {filled} of {len(out)} elements of {claim.key} are there")
        return out

    def _pieces_of(self, key: str) -> list[tuple[RankFile, Region]]:
        """That they hold every element once is looked at where they are first used: to do so for
        all, on every rank, would take long where ranks are many.
        """
        found = self._pieces[key]
        if key not in self._sound:
            self._check_coverage([(file.bytes, region) for file, region in found])
            self._sound.add(key)
        return found

    def whole(self, key: str) -> np.ndarray:
        """A whole tensor, in its shape, as unsigned integers."""
        dtype, shape = self.tensors[key]
        return self.elements(Claim(key, dtype, shape, (0,) * len(shape), shape, None)).reshape(
            shape
        )

    def verify(self, seen: Callable[[int], object] = lambda count: None) -> None:
        """Read and check every byte; `seen(bytes)` hears of progress.

        Raises Damaged or StorageUnreachable.
        """
        self._check_coverage()
        for receipt in self.receipts:
            file = RankFile(self._files, receipt)
            for number in range(len(receipt.chunks)):
                seen(len(file.chunk(number)))

    def confirm(self, file: str, chunk: int) -> None:
        """Look at what another reader found damaged there, beyond what opening has checked.

        Raises Damaged or StorageUnreachable.
        """
        if not file:
            self._check_coverage()
        for receipt in self.receipts:
            if receipt.file == file:
                RankFile(self._files, receipt).chunk(chunk)

    def _check_coverage(self, placed: list[tuple[int, Region]] | None = None) -> None:
        """`placed`: (bytes of its file, region); default: all regions."""
        if placed is None:
            placed = [(one.bytes, region) for one in self.receipts for region in one.regions]
        try:
            for size, region in placed:
                check_place(region, size)
            check_coverage(region for _, region in placed)
        except CoverageError as error:
            raise Damaged(f"{self.where}: {error}") from error

    def files(self) -> Iterator[RankFile]:
        return iter(
            {id(file): file for found in self._pieces.values() for file, _ in found}.values()
        )

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _copy(file: RankFile, region: Region, source: Box, target: Box, view: np.ndarray) -> int:
    """Copy what `source` and `target` have in common into `view` (of the target's shape); number of
    elements copied.

    Only the rows of the source that are needed are read.
    """
    common = overlap(source, target)
    if common is None:
        return 0
    low, shape = common
    width = ITEM_BYTES[region.dtype]
    row = prod(source.shape[1:])
    first = low[0] - source.offset[0] if low else 0
    rows = shape[0] if shape else 1
    data = file.read(region.at + (source.start + first * row) * width, rows * row * width)
    values = np.frombuffer(data, dtype=f"<u{width}").reshape(
        (rows, *source.shape[1:]) if shape else ()
    )
    inner = tuple(
        slice(a - b, a - b + n)
        for a, b, n in zip(low[1:], source.offset[1:], shape[1:], strict=True)
    )
    place = tuple(
        slice(a - b, a - b + n) for a, b, n in zip(low, target.offset, shape, strict=True)
    )
    view[place] = values[(slice(None), *inner)] if shape else values
    return prod(shape)


def _few(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
