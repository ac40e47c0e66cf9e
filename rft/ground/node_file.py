"""A file in memory that processes of a node have in common, so that what all of them need is read
and verified by one of them. Standard library only.

    engines' actors  held(name) ──► a path: of the file that another has for `name`, or a new one
    their workers    NodeFile(path).take(digest) ──► it is there: a copy
                                                 ──► it is not: made, and put there, under a lock

The file has no name of its own: where it is tells a link to a descriptor of the one who made it, in
this user's temporary directory. So nothing is left of it when all who have it have ended, however
they did; a link that leads nowhere is replaced by the next one, or swept at the next start. A lock
ends with its holder: what that was making is made by the next. Invariant: what is taken was put
there whole, under this digest, by a process that had verified it.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rft.ground import scratch

log = logging.getLogger(__name__)
BLOCK = 4096  # before each part: its digest
Content = bytes | memoryview


@contextlib.contextmanager
def held(name: str) -> Iterator[str]:
    """A path by which this process's children reach the file, until the block is left; "" where
    there can be none.
    """
    short = f"{scratch.LINKS}{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    with contextlib.ExitStack() as stack:
        try:
            link = scratch.shared_place() / short
            file = _opened(link)
            while file is None:
                own = os.memfd_create(short)
                stack.callback(os.close, own)
                try:
                    link.symlink_to(f"/proc/{os.getpid()}/fd/{own}")
                    stack.callback(link.unlink, missing_ok=True)
                    file = os.dup(own)
                except FileExistsError:  # another one was faster
                    file = _opened(link)
            stack.callback(os.close, file)
            path = f"/proc/{os.getpid()}/fd/{file}"
        except OSError as error:
            log.warning("every worker reads all that it needs for itself: %s", error)
            path = ""
        yield path


def _opened(link: Path) -> int | None:
    """None: nobody has it. A link that says otherwise goes."""
    try:
        target = os.readlink(link)
    except FileNotFoundError:
        return None
    with contextlib.suppress(OSError):  # who has made it is dead
        if os.readlink(target) == f"/memfd:{link.name} (deleted)":
            return os.open(target, os.O_RDWR | os.O_CLOEXEC)
    link.unlink(missing_ok=True)
    return None


class NodeFile:
    """`digests`, in hexadecimal: of all parts, in the same order for everyone; `size`: of a part,
    at most.
    """

    def __init__(self, path: str, digests: Iterable[str], size: int):
        self._places = {
            digest: number * (BLOCK + size) for number, digest in enumerate(dict.fromkeys(digests))
        }
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def take(self, digest: str, count: int, make: Callable[[], Content]) -> Content:
        """The `count` bytes of that part; `make` verifies what it makes."""
        place, mark = self._places[digest], bytes.fromhex(digest)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)
        try:
            if os.pread(self._file, len(mark), place) == mark:
                return os.pread(self._file, count, place + BLOCK)
            data = make()
            os.pwrite(self._file, bytes(len(mark)), place)
            if os.pwrite(self._file, data, place + BLOCK) == count:
                os.pwrite(self._file, mark, place)
            return data
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def close(self) -> None:
        os.close(self._file)
