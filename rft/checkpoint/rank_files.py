"""The files of one committed directory, and the bytes of a rank in one of them.

    RankFile ─► chunks as they lie there, or made of an older save's and what has changed since
        └──► OpenFiles: few descriptors, and a medium that fails is asked again

In: a storage, a directory, receipts. Out: verified bytes. Invariant: nothing is called damaged
because the medium fails; no byte is handed out that was not verified against its receipt.
"""

import logging
import resource
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

from rft.checkpoint.chunks import ChunkFile, Damaged, Range, by_number
from rft.checkpoint.records import CHUNK, MANIFEST, FileReceipt
from rft.checkpoint.storage import NotAFile, ReadFile, Storage
from rft.ground import delta
from rft.ground.node_file import Content

log = logging.getLogger(__name__)
AGAIN_S = 0.5  # between two tries of what has failed
PART = 8  # of a process's descriptors, for one save
Found = TypeVar("Found")
# of a digest, a length, and what reads and verifies that chunk: the chunk, verified
Take = Callable[[str, int, Callable[[], Content]], Content]


class StorageUnreachable(OSError):
    """The medium fails (no mount, EIO, ESTALE, EACCES, too many open files): that says nothing
    about what lies there.
    """


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
        self._part = part
        self._most = max(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // part)
        self._open: OrderedDict[str, ReadFile] = OrderedDict()

    def where(self, name: str) -> str:
        return f"{self._storage.where}/{self._directory}/{name}"

    def read(self, name: str, start: int, length: int) -> bytes:
        """These bytes, or fewer where the file ends. Raises as `attempt` does."""
        return self.attempt(name, lambda: self._opened(name).read(start, length))

    def read_into(self, name: str, start: int, places: list[memoryview]) -> int:
        """The same into places, one behind the other: how many there are."""
        return self.attempt(name, lambda: self._opened(name).read_into(start, places))

    def beside(self) -> "OpenFiles":
        """The same files, for another thread."""
        return OpenFiles(self._storage, self._directory, self._patience_s, self._part)

    @property
    def read_bytes(self) -> int:
        return self._storage.read_bytes

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

    def _opened(self, name: str) -> ReadFile:
        if name not in self._open:
            while len(self._open) >= self._most:
                self._open.popitem(last=False)[1].close()
            self._open[name] = self._storage.open(f"{self._directory}/{name}")
        self._open.move_to_end(name)
        return self._open[name]


class RankFile(ChunkFile):
    """The bytes of one rank, verified chunk by chunk as they are read, by so many `readers` at the
    same time; the last chunk is kept.

    `before`: finds the file that a patch (a receipt, at a place) begins from, when that is needed.
    Raises Damaged, naming the file and the chunk, or StorageUnreachable.
    """

    def __init__(
        self,
        files: OpenFiles,
        receipt: FileReceipt,
        before: "Callable[[FileReceipt, str], RankFile]",
        readers: int = 1,
    ):
        super().__init__(receipt.bytes, receipt.chunks, files.read_bytes)
        self.name, self._readers = receipt.file, readers
        self._files, self._receipt, self._before = files, receipt, before
        self.take: Take | None = None
        self._taken: tuple[int, Content] = (-1, b"")
        self._starts: list[int] = []  # of frames
        self._made = Made(self, 0, [])

    def fill(self, ranges: list[Range]) -> None:
        todo = deque(by_number(ranges))
        is_plain = self.take is None and self._receipt.patch is None
        if self._readers == 1 or len(todo) == 1 or not is_plain:
            self._work_off(todo)
            return
        others = [
            RankFile(self._files.beside(), self._receipt, self._before)
            for _ in range(min(self._readers, len(todo)) - 1)
        ]
        try:
            with ThreadPoolExecutor(len(others) + 1) as threads:
                list(threads.map(lambda file: file._work_off(todo), [self, *others]))
        finally:
            for one in others:
                one._files.close()

    def _work_off(self, todo: deque[tuple[int, list[Range]]]) -> None:
        """What nobody else has taken yet."""
        while todo:
            try:
                number, inside = todo.popleft()
            except IndexError:  # somebody has
                return
            try:
                self.put(number, inside)
            except BaseException:
                todo.clear()
                raise

    def open(self) -> None:
        """All that it is made of: it stays readable when retention takes its directory away."""
        self._files.read(self.name, 0, 0)
        if self._receipt.patch is not None:
            self._before(self._receipt, self._files.where(self.name)).open()

    def chunk(self, number: int) -> Content:
        read = partial(super().chunk, number)
        if self.take is None:
            return read()
        if self._taken[0] != number:
            digest, count = self._receipt.chunks[number], self.size(number)
            self._taken = number, self.take(digest, count, read)
        return self._taken[1]

    def forget(self) -> None:
        super().forget()
        self._taken, self._made = (-1, b""), Made(self, 0, [])

    def _straight(self, number: int, inside: list[Range]) -> list[memoryview] | None:
        if self.take is not None:
            return None
        places, patch = super()._straight(number, inside), self._receipt.patch
        if places and patch and any(len(place) % patch.width for place in places):
            return None
        return places

    def _fetch(self, at: int, places: list[memoryview]) -> None:
        """As it lies there, or made of the base's."""
        number, inside = divmod(at, CHUNK)
        if inside == 0:
            self._made = self._how(number)
        made = self._made
        found = made.file._files.read_into(made.file.name, made.start + inside, places)
        if found != sum(map(len, places)):
            raise made.file._short(number, inside + found, self.size(number))
        for place in places if made.changes else []:
            for one in made.changes:
                one.apply(place, inside // one.steps.itemsize)
            inside += len(place)

    def _changed(self, number: int) -> Damaged:
        where = self._files.where(self.name)
        words = f"{where} was changed: chunk {number} differs from what was written"
        return Damaged(words, self.name, number)

    def _short(self, number: int, found: int, size: int) -> Damaged:
        where = self._files.where(self.name)
        words = f"{where} ends early: {found} of {size} bytes of chunk {number}"
        return Damaged(words, self.name, number)

    def _how(self, number: int) -> "Made":
        """Of the saves between only the deltas are read: a wrong one makes a wrong chunk."""
        file, changes, patch = self, list[delta.Changes](), self._receipt.patch
        while (frame := file._frame(number))[1] != self.size(number):
            assert patch is not None
            changes.append(file._changes(number, *frame, patch.width))
            file = file._before(file._receipt, file._files.where(file.name))
        return Made(file, frame[0], changes)

    def _frame(self, number: int) -> tuple[int, int]:
        """Where it begins, and its bytes: those of the chunk itself, or fewer of a delta."""
        patch = self._receipt.patch
        if patch is None:
            return number * CHUNK, self.size(number)
        self._starts = self._starts or list(accumulate(patch.frames, initial=0))
        return self._starts[number], patch.frames[number]

    def _changes(self, number: int, start: int, size: int, width: int) -> delta.Changes:
        data = self._files.read(self.name, start, size)
        if len(data) != size:
            raise self._short(number, len(data), size)
        try:
            return delta.read(data, self.size(number) // width, width)
        except ValueError as error:
            words = f"{self._files.where(self.name)} was changed: chunk {number}: {error}"
            raise Damaged(words, self.name, number) from error


class Made(NamedTuple):
    """What a chunk is made of: bytes that lie in a file from `start` on, and what has changed since
    (steps add up, so in any order).
    """

    file: RankFile
    start: int
    changes: list[delta.Changes]
