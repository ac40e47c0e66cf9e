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
from itertools import accumulate
from math import prod
from typing import Any, BinaryIO, Protocol, Self, TypeVar, cast

import msgspec
import numpy as np
import xxhash

from rft.checkpoint.catalog import find, read_manifest
from rft.checkpoint.records import (
    CHUNK,
    FORMAT,
    MANIFEST,
    LoopState,
    Manifest,
    Patch,
    Receipt,
    Region,
    by_chunk,
    decode_json,
    of_chunks,
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
from rft.ground import delta
from rft.ground.names import ITEM_BYTES
from rft.ground.node_file import Content

log = logging.getLogger(__name__)
CRITIC = "critic."  # keys of a critic's tensors begin so
SHOWN = 8  # tensors named in one message
AGAIN_S = 0.5  # between two tries of what has failed
PART, BASE_PART = 8, 64  # of a save, and of each that it is a patch of
Range = tuple[int, memoryview]  # a byte of a file, and the place of those from it on
Found = TypeVar("Found")
# of a digest, a length, and what reads and verifies that chunk: the chunk, verified
Take = Callable[[str, int, Callable[[], Content]], Content]


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

    def __init__(self, storage: Storage, directory: str, patience_s: float, part: int = PART):
        """`part`: of the process's descriptors one in so many; the rest is its own."""
        self._storage, self._directory, self._patience_s = storage, directory, patience_s
        self._most = max(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // part)
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
    """The bytes of one rank, verified chunk by chunk as they are read; the last chunk is kept.

    `before`: finds the file that a patch (a receipt, at a place) begins from, when that is needed.
    """

    def __init__(
        self,
        files: OpenFiles,
        receipt: Receipt,
        before: "Callable[[Receipt, str], RankFile]",
    ):
        self.name, self.bytes = receipt.file, receipt.bytes
        self._files, self._receipt, self._before = files, receipt, before
        self.take: Take = lambda digest, count, read: read()
        self._kept: tuple[int, Content] = (-1, b"")
        self._starts: list[int] = []  # of frames
        self._memory = bytearray()  # of a patched chunk, until the next

    def read(self, start: int, count: int) -> bytearray | memoryview:
        """Raises Damaged, naming the file and the chunk, or StorageUnreachable."""
        return of_chunks(self.chunk, start, count)

    def fill(self, ranges: list[Range]) -> None:
        """By chunks: the processor's cache still has what was just compared with its hash."""
        for start, place in ranges:
            for at, end in by_chunk(start, start + len(place)):
                place[at - start : end - start] = self.read(at, end - at)

    def open(self) -> None:
        """All that it is made of: it stays readable when retention takes its directory away."""
        self._files.read(self.name, 0, 0)
        if self._receipt.patch is not None:
            self._before(self._receipt, self._files.where(self.name)).open()

    def chunk(self, number: int) -> Content:
        if self._kept[0] != number:
            digest, count = self._receipt.chunks[number], min(CHUNK, self.bytes - number * CHUNK)
            self._kept = (number, self.take(digest, count, lambda: self._verified(number)))
        return self._kept[1]

    def _verified(self, number: int) -> Content:
        data = self._content(number)
        if xxhash.xxh3_128_hexdigest(data) != self._receipt.chunks[number]:
            where = self._files.where(self.name)
            words = f"{where} was changed: chunk {number} differs from what was written"
            raise Damaged(words, self.name, number)
        return data

    def _content(self, number: int) -> Content:
        """A chunk that is not verified yet: as it lies there, or made of the base's. Of those
        between only the deltas are read: a wrong one makes a wrong chunk.
        """
        deltas: list[tuple[RankFile, bytes]] = []
        file, is_own, data = self, False, b""
        while not is_own:
            data, is_own = file._stored(number)
            if not is_own:
                deltas.append((file, data))
                file = file._before(file._receipt, file._files.where(file.name))
        if not deltas:
            return data
        self._memory = self._memory or bytearray(min(CHUNK, self.bytes))
        content = memoryview(self._memory)[: len(data)]
        content[:] = data
        for file, frame in reversed(deltas):
            file._apply(number, frame, content)
        return content

    def _stored(self, number: int) -> tuple[bytes, bool]:
        """A frame, and whether it is the chunk itself."""
        length, patch = min(CHUNK, self.bytes - number * CHUNK), self._receipt.patch
        size, start = length, number * CHUNK
        if patch is not None:
            self._starts = self._starts or list(accumulate(patch.frames, initial=0))
            size, start = patch.frames[number], self._starts[number]
        data = self._files.read(self.name, start, size)
        if len(data) != size:
            where = self._files.where(self.name)
            words = f"{where} ends early: {len(data)} of {size} bytes of chunk {number}"
            raise Damaged(words, self.name, number)
        return data, size == length

    def _apply(self, number: int, frame: bytes, content: memoryview) -> None:
        assert self._receipt.patch is not None
        try:
            delta.apply(frame, content, self._receipt.patch.width)
        except ValueError as error:
            words = f"{self._files.where(self.name)} was changed: chunk {number}: {error}"
            raise Damaged(words, self.name, number) from error


class SealedDirectory:
    """A committed directory whose manifest is verified; so is each receipt that is asked for."""

    def __init__(self, storage: Storage, path: str, patience_s: float, part: int = PART):
        self.path = path
        self.where = f"{storage.where}/{path}"
        self.files = OpenFiles(storage, path, patience_s, part)
        self._storage = storage
        try:
            self.manifest: Manifest = self.files.attempt(
                MANIFEST, lambda: read_manifest(storage, path)
            )
        except ValueError as error:
            raise Damaged(str(error)) from error
        if self.manifest.format != FORMAT:
            raise Mismatch(
                f"{self.where} has format {self.manifest.format}, this rft reads {FORMAT}: use the "
                "rft that wrote it"
            )
        self._check_manifest()

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

    def receipt(self, rank: int) -> Receipt:
        name, manifest = receipt_name(rank), self.manifest
        where = f"{self.where}/{name}"
        data = self.files.attempt(name, lambda: self._storage.get(f"{self.path}/{name}"))
        if sha256(data) != manifest.receipts[name]:
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
        if receipt.patch is not None and not self._is_patch(receipt.patch, receipt):
            raise Damaged(f"{where}: its patch is none of {receipt.bytes} bytes")
        return receipt

    def _is_patch(self, patch: Patch, receipt: Receipt) -> bool:
        """Of an older version, so that no chain of them goes on for ever."""
        sizes = [min(CHUNK, receipt.bytes - start) for start in range(0, receipt.bytes, CHUNK)]
        return (
            len(patch.frames) == len(sizes)
            and all(0 < one <= size for one, size in zip(patch.frames, sizes, strict=True))
            and patch.width in ITEM_BYTES.values()
            and patch.base[0] < receipt.step
            and patch.base == self.manifest.base
        )


class Bases:
    """The saves that a patch builds on, one before the other; each, and of each rank its file, is
    opened once.
    """

    def __init__(self, storage: Storage, collection: str, patience_s: float):
        self._storage, self._collection, self._patience_s = storage, collection, patience_s
        self._there: dict[tuple[int, str], SealedDirectory] = {}
        self._files: dict[tuple[int, tuple[int, str]], RankFile] = {}

    def file(self, of: Receipt, where: str) -> RankFile:
        """That which the patch of receipt `of`, at `where`, begins from."""
        assert of.patch is not None
        base = of.patch.base
        if (of.rank, base) not in self._files:
            there = self._opened(base, where)
            what = f"{where} is a patch of version {base[0]}"
            if there.manifest.layout != of.layout or there.manifest.world != of.world:
                raise Damaged(f"{what}, whose layout is another")
            receipt = there.receipt(of.rank)
            if receipt.bytes != of.bytes:
                raise Damaged(f"{what}, which has {receipt.bytes} bytes and not {of.bytes}")
            self._files[of.rank, base] = RankFile(there.files, receipt, self.file)
        return self._files[of.rank, base]

    def _opened(self, base: tuple[int, str], where: str) -> SealedDirectory:
        if base not in self._there:
            what = f"{where} is a patch of version {base[0]}"
            path = patiently(
                f"{what}, which cannot be looked for",
                lambda: find(self._storage, self._collection, base),
                self._patience_s,
            )
            if path is None:
                raise Damaged(f"{what} ({base[1]}), which is not there any more")
            there = SealedDirectory(self._storage, path, self._patience_s, BASE_PART)
            self._there[base] = there
        return self._there[base]

    def close(self) -> None:
        for there in self._there.values():
            there.files.close()


class RankBytes(Protocol):
    """The bytes of one rank, verified as they are read. Raises Damaged or StorageUnreachable."""

    bytes: int

    def read(self, start: int, count: int) -> bytearray | memoryview:
        """Good until something else is read."""

    def fill(self, ranges: list[Range]) -> None: ...


class Pieces:
    """What ranks have stored of tensors, in any cut. `where`: of messages."""

    def __init__(
        self, where: str, receipts: list[Receipt], open_file: Callable[[Receipt], RankBytes]
    ):
        self.where, self.receipts = where, receipts
        self._sound: set[str] = set()  # keys whose pieces fit together
        self._pieces: dict[str, list[tuple[RankBytes, Region]]] = defaultdict(list)
        for receipt in receipts:
            file = open_file(receipt)
            for region in receipt.regions:
                self._pieces[region.key].append((file, region))

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
        self.fill([(claim, out)])
        return out

    def fill(self, wanted: list[tuple[Claim, np.ndarray]]) -> None:
        """The same of many, each into its array; a file is asked once for all that is one range of
        it.
        """
        ranges: dict[int, tuple[RankBytes, list[Range]]] = {}
        for claim, out in wanted:
            filled = 0
            for file, region in self._pieces_of(claim.key):
                if (region.offset, region.shape) == (claim.offset, claim.shape):
                    if (found := _range(region, claim, out)) is not None:
                        ranges.setdefault(id(file), (file, []))[1].append(found)
                        filled += len(found[1]) // out.itemsize
                    continue
                for target in boxes(claim):
                    view = out[target.start :][: prod(target.shape)].reshape(target.shape)
                    for source in boxes(region):
                        filled += _copy(file, region, source, target, view)
            if filled != len(out):
                words = f"{filled} of {len(out)} elements of {claim.key} are there"
                raise Damaged(f"{self.where}: {words}")
        for file, listed in ranges.values():
            file.fill(listed)

    def _pieces_of(self, key: str) -> list[tuple[RankFile, Region]]:
        """That they hold every element once is looked at where they are first used: to do so for
        all, on every rank, would take long where ranks are many.
        """
        found = self._pieces[key]
        if key not in self._sound:
            self._check_coverage([(file.bytes, region) for file, region in found])
            self._sound.add(key)
        return found

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

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Checkpoint(Pieces):
    """A committed directory, opened: manifest and receipts are verified, bytes are when they are
    read.

    What the medium does not give is tried again for `patience_s` seconds each time, then it raises
    StorageUnreachable.
    """

    def __init__(self, storage: Storage, path: str, patience_s: float = 0.0):
        there = SealedDirectory(storage, path, patience_s)
        self.path, self.manifest, self._files = path, there.manifest, there.files
        world, collection = self.manifest.world, path.rpartition("/")[0]
        receipts = [there.receipt(rank) for rank in range(world)]
        if sum(receipt.bytes for receipt in receipts) != self.manifest.bytes:
            raise Damaged(f"{there.where}: the receipts vouch for other bytes than {MANIFEST}")
        self._bases = Bases(storage, collection, patience_s)
        super().__init__(there.where, receipts, self._file)

    def _file(self, receipt: Receipt) -> RankFile:
        return RankFile(self._files, receipt, self._bases.file)

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
            file = self._file(receipt)
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
                self._file(receipt).chunk(chunk)

    def take_from(self, take: Take) -> None:
        """From now on chunks are read where `take` has them read."""
        for file in self.files():
            file.take = take

    def files(self) -> Iterator[RankFile]:
        held = {id(file): file for found in self._pieces.values() for file, _ in found}
        return iter(cast(list[RankFile], list(held.values())))

    def close(self) -> None:
        self._files.close()
        self._bases.close()


def _range(region: Region, claim: Claim, out: np.ndarray) -> Range | None:
    """What two ranges of one box have in common, one piece of memory: as where the layout is the
    same.
    """
    start, stop = claim.flat or (0, prod(claim.shape))
    first, last = region.flat or (0, prod(region.shape))
    low, high = max(start, first), min(stop, last)
    if low >= high:
        return None
    place = memoryview(out[low - start : high - start].view(np.uint8))
    return region.at + (low - first) * ITEM_BYTES[region.dtype], place


def _copy(file: RankBytes, region: Region, source: Box, target: Box, view: np.ndarray) -> int:
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
    inner = tuple(
        slice(a - b, a - b + n)
        for a, b, n in zip(low[1:], source.offset[1:], shape[1:], strict=True)
    )
    place = tuple(
        slice(a - b, a - b + n) for a, b, n in zip(low, target.offset, shape, strict=True)
    )
    found = view[place] if shape else view.reshape(1)
    rows = shape[0] if shape else 1
    at_once = max(1, CHUNK // (row * width))
    for begin in range(0, rows, at_once):
        end = min(rows, begin + at_once)
        start = region.at + (source.start + (first + begin) * row) * width
        data = file.read(start, (end - begin) * row * width)
        values = np.frombuffer(data, dtype=f"<u{width}").reshape(end - begin, *source.shape[1:])
        found[begin:end] = values[(slice(None), *inner)]
    return prod(shape)


def _few(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
