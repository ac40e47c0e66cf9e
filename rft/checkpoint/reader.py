"""Read a committed checkpoint in any cut: manifest ─► receipts ─► verified chunks ─► the elements that somebody asks for.

No torch: elements are numpy integers of the right width, so that bfloat16 needs no type of its own. Invariant: no
byte is handed out that was not verified against its receipt, no receipt believed that the manifest does not vouch
for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, BinaryIO

import numpy as np
import xxhash

from rft.checkpoint.commit import read_manifest
from rft.checkpoint.layout import ITEM_BYTES, Box, Claim, Uncovered, boxes, check_coverage, overlap
from rft.checkpoint.records import CHUNK, FORMAT, Receipt, Region, decode_json, sha256
from rft.checkpoint.storage import Storage, read_at

CRITIC = "critic."  # keys of a critic's tensors begin so
SHOWN = 8  # tensors named in one message


class Damaged(RuntimeError):
    """A checkpoint that must not be loaded: missing, cut short, or different from what was written."""


class Mismatch(ValueError):
    """A good checkpoint of something else: another model, vocabulary, precision or format."""


class RankFile:
    """The bytes of one rank, verified chunk by chunk as they are read; the last chunk is kept."""

    def __init__(self, storage: Storage, directory: str, receipt: Receipt):
        self.where = f"{storage.where}/{directory}/{receipt.file}"
        self._storage, self._path = storage, f"{directory}/{receipt.file}"
        self._receipt = receipt
        self._file: BinaryIO | None = None
        self._kept: tuple[int, bytes] = (-1, b"")

    def read(self, start: int, count: int) -> bytearray:
        """Raises Damaged, naming the file and the chunk."""
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
            length = min(CHUNK, self._receipt.bytes - number * CHUNK)
            try:
                self._file = self._file or self._storage.open(self._path)
                data = read_at(self._file, number * CHUNK, length)
            except OSError as error:
                raise Damaged(f"{self.where} cannot be read: {error}") from error
            if len(data) != length:
                raise Damaged(f"{self.where} ends early: {len(data)} of {length} bytes of chunk {number}")
            if xxhash.xxh3_128_hexdigest(data) != self._receipt.chunks[number]:
                raise Damaged(f"{self.where} was changed: chunk {number} differs from what was written")
            self._kept = (number, data)
        return self._kept[1]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Checkpoint:
    """A committed directory, opened: manifest and receipts are verified, bytes are when they are read."""

    def __init__(self, storage: Storage, path: str):
        self.storage = storage
        self.path = path
        self.where = f"{storage.where}/{path}"
        try:
            self.manifest = read_manifest(storage, path)
        except (ValueError, OSError) as error:
            raise Damaged(str(error)) from error
        if self.manifest.format != FORMAT:
            raise Mismatch(
                f"{self.where} has format {self.manifest.format}, this rft reads {FORMAT}: use the rft that wrote it"
            )
        self.receipts = [self._receipt(name, digest) for name, digest in sorted(self.manifest.receipts.items())]
        self._pieces: dict[str, list[tuple[RankFile, Region]]] = defaultdict(list)
        for receipt in self.receipts:
            file = RankFile(storage, path, receipt)
            for region in receipt.regions:
                self._pieces[region.key].append((file, region))

    def _receipt(self, name: str, digest: str) -> Receipt:
        where = f"{self.where}/{name}"
        try:
            data = self.storage.get(f"{self.path}/{name}")
        except OSError as error:
            raise Damaged(f"{where} is missing or cannot be read: {error}") from error
        if sha256(data) != digest:
            raise Damaged(f"{where} was changed")
        receipt = decode_json(data, Receipt)
        if receipt.id != self.manifest.id:
            raise Damaged(f"{where} is of another save")
        return receipt

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """key -> (dtype, whole shape)."""
        return {key: (found[0][1].dtype, found[0][1].global_shape) for key, found in self._pieces.items()}

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
                f"{self.where} holds no critic, and this run has one: start under another name, or with the algorithm that wrote it"
            )
        words = [f"{len(missing)} tensors are missing there: {_few(missing)}"] if missing else []
        words += [f"{len(other)} differ: {_few(other)}"] if other else []
        if words:
            raise Mismatch(
                f"{self.where} is of another model, vocabulary, precision or optimizer: {'; '.join(words)}; "
                "use the model.model_path, trainer.dtype and optimizer_type that it was written with, or another name"
            )

    def elements(self, claim: Claim) -> np.ndarray:
        """The claimed elements, flat, as unsigned integers of the dtype's width. Raises Damaged."""
        width = ITEM_BYTES[claim.dtype]
        out = np.empty(claim.bytes // width, dtype=f"<u{width}")
        filled = 0
        for target in boxes(claim):
            view = out[target.start : target.start + prod(target.shape)].reshape(target.shape)
            for file, region in self._pieces[claim.key]:
                for source in boxes(region):
                    filled += _copy(file, region, source, target, view)
        if filled != len(out):
            raise Damaged(f"{self.where}: {filled} of {len(out)} elements of {claim.key} are there")
        return out

    def whole(self, key: str) -> np.ndarray:
        """A whole tensor, in its shape, as unsigned integers."""
        dtype, shape = self.tensors[key]
        return self.elements(Claim(key, dtype, shape, (0,) * len(shape), shape, None)).reshape(shape)

    def verify(self, seen: Callable[[int], object] = lambda count: None) -> None:
        """Read and check every byte; `seen(bytes)` hears of progress. Raises Damaged."""
        try:
            check_coverage(region for receipt in self.receipts for region in receipt.regions)
        except Uncovered as error:
            raise Damaged(f"{self.where}: {error}") from error
        for receipt in self.receipts:
            file = RankFile(self.storage, self.path, receipt)
            for number in range(len(receipt.chunks)):
                seen(len(file.chunk(number)))
            file.close()

    def files(self) -> Iterator[RankFile]:
        return iter({id(file): file for found in self._pieces.values() for file, _ in found}.values())

    def close(self) -> None:
        for file in self.files():
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _copy(file: RankFile, region: Region, source: Box, target: Box, view: np.ndarray) -> int:
    """Copy what `source` and `target` have in common into `view` (of the target's shape); number of elements copied.

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
    values = np.frombuffer(data, dtype=f"<u{width}").reshape((rows, *source.shape[1:]) if shape else ())
    inner = tuple(slice(a - b, a - b + n) for a, b, n in zip(low[1:], source.offset[1:], shape[1:], strict=True))
    place = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, target.offset, shape, strict=True))
    view[place] = values[(slice(None), *inner)] if shape else values
    return prod(shape)


def _few(words: list[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
