"""Read a committed checkpoint in any cut: manifest ─► receipts ─► verified chunks
        ─► the elements that somebody asks for.

No torch: elements are numpy integers of the right width, so that bfloat16 needs no type of its own.
Invariant: no byte is handed out that was not verified against its receipt, no receipt believed that
the manifest does not vouch for; and nothing is called damaged because the medium fails.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Protocol, Self, TypeVar, cast

import msgspec
import numpy as np

from rft.checkpoint.catalog import find, read_manifest
from rft.checkpoint.chunks import Damaged, Range
from rft.checkpoint.rank_files import PART, OpenFiles, RankFile, Take, patiently
from rft.checkpoint.records import (
    CHUNK,
    FORMAT,
    MANIFEST,
    FileReceipt,
    LoopState,
    Manifest,
    Patch,
    Receipt,
    Region,
    decode_json,
    sha256,
)
from rft.checkpoint.sharding import Claim, CoverageError, check_coverage, check_place, overlap
from rft.checkpoint.storage import Storage
from rft.checkpoint.targets import Array, Target, pairs, range_of
from rft.checkpoint.writer import file_name, receipt_name
from rft.ground.names import ITEM_BYTES

Kind = TypeVar("Kind", bound=FileReceipt)
CRITIC = "critic."  # keys of a critic's tensors begin so
SHOWN = 8  # tensors named in one message
BASE_PART = 64  # as `PART`, of each save that one is a patch of
ROOMS = 8  # files of which each keeps the chunk that it read last; of more, none does


class Mismatch(ValueError):
    """A good checkpoint of something else: another model, vocabulary, precision or format."""


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

    def receipt(self, rank: int, kind: type[Kind] = Receipt) -> Kind:
        """`kind`: `FileReceipt` where nobody asks which tensors they are."""
        name, manifest = receipt_name(rank), self.manifest
        where = f"{self.where}/{name}"
        data = self.files.attempt(name, lambda: self._storage.get(f"{self.path}/{name}"))
        if sha256(data) != manifest.receipts[name]:
            raise Damaged(f"{where} was changed")
        try:
            receipt = decode_json(data, kind)
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

    def _is_patch(self, patch: Patch, receipt: FileReceipt) -> bool:
        """Of an older version, so that no chain of them goes on for ever."""
        sizes = [min(CHUNK, receipt.bytes - start) for start in range(0, receipt.bytes, CHUNK)]
        return (
            len(patch.frames) == len(sizes)
            and all(0 < one <= size for one, size in zip(patch.frames, sizes, strict=True))
            and patch.width in ITEM_BYTES.values()
            and receipt.bytes % patch.width == 0
            and patch.base[0] < receipt.step
            and self.manifest.base is not None
            and patch.base <= self.manifest.base
        )


class Bases:
    """The saves that a patch builds on, one before the other; each, and of each rank its file, is
    opened once.
    """

    def __init__(self, storage: Storage, collection: str, patience_s: float):
        self._storage, self._collection, self._patience_s = storage, collection, patience_s
        self._there: dict[tuple[int, str], SealedDirectory] = {}
        self._files: dict[tuple[int, tuple[int, str]], RankFile] = {}

    def file(self, of: FileReceipt, where: str) -> RankFile:
        """That which the patch of receipt `of`, at `where`, begins from."""
        assert of.patch is not None
        base = of.patch.base
        if (of.rank, base) not in self._files:
            there = self._opened(base, where)
            what = f"{where} is a patch of version {base[0]}"
            if there.manifest.layout != of.layout or there.manifest.world != of.world:
                raise Damaged(f"{what}, whose layout is another")
            receipt = there.receipt(of.rank, FileReceipt)
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

    def fill(self, ranges: list[Range]) -> None: ...
    def forget(self) -> None: ...


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
        self.fill([(claim, Array(out))])
        return out

    def fill(self, wanted: list[tuple[Claim, Target]]) -> None:
        """The same of many, each into its target; every chunk is read once for all of them, in the
        order of the files.
        """
        ranges: dict[int, tuple[RankBytes, list[Range]]] = {}
        for claim, target in wanted:
            filled, width = 0, ITEM_BYTES[claim.dtype]
            for file, region in self._pieces_of(claim.key):
                for source, box in pairs(region, claim, target.is_flat):
                    if (common := overlap(source, box)) is None:
                        continue
                    place = range_of(source, box, common, width, target)
                    listed = ranges.setdefault(id(file), (file, []))[1]
                    listed.append((region.at + place[0] * width, place[1]))
                    filled += prod(common[1])
            if filled * width != claim.bytes:
                words = f"{filled} of {claim.bytes // width} elements of {claim.key} are there"
                raise Damaged(f"{self.where}: {words}")
        for file, listed in ranges.values():
            file.fill(listed)
            if len(ranges) > ROOMS:
                file.forget()

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

    def __init__(
        self, storage: Storage, path: str, patience_s: float = 0.0, readers: int | None = None
    ):
        """`readers`: threads that read one file; default: as many as the medium gains from."""
        there = SealedDirectory(storage, path, patience_s)
        self._readers = storage.readers if readers is None else readers
        self.path, self.manifest, self._files = path, there.manifest, there.files
        world, collection = self.manifest.world, path.rpartition("/")[0]
        receipts = [there.receipt(rank) for rank in range(world)]
        if sum(receipt.bytes for receipt in receipts) != self.manifest.bytes:
            raise Damaged(f"{there.where}: the receipts vouch for other bytes than {MANIFEST}")
        self._bases = Bases(storage, collection, patience_s)
        super().__init__(there.where, receipts, self._file)

    def _file(self, receipt: Receipt) -> RankFile:
        return RankFile(self._files, receipt, self._bases.file, self._readers)

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


def _few(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
