"""Class 2: the power goes. All that a save did to the file system is recorded, and the states a
disk may be left in are enumerated.

    Remembering (a Disk) ─► journal of operations ─► Durable: what is certain, what is pending
            ─► states ─► the real loader

The model is POSIX at its weakest: data are durable after fsync of the file, entries after fsync of
their directory; pending data may be there in any 4 KiB page, pending entries in any subset; one
rename happens or does not. `FORGETS` are the mutations: a disk that says it has synced and has not.
"""

import copy
import itertools
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults.disks import Counting
from bench.faults.job import save_here
from bench.faults.judge import Tally, judge
from bench.faults.kills import NEW, OLD, Ground
from bench.faults.toy import Cut, begin, settings
from rft.checkpoint import fence
from rft.checkpoint.commit import Committer
from rft.checkpoint.records import Committed, Report
from rft.checkpoint.storage import LocalStorage

PAGE = 4096
RANDOM = 6  # random subsets per prefix, besides the systematic ones
TORN = 40  # random fates of unsynced pages per subset
Operation = tuple  # (kind, ...), see Durable.apply


class PowerCut(BaseException):
    """Ends a process in the middle, without a chance to tidy up."""


class Remembering(Counting):
    """Does everything, and writes it down; `forgets(kind, path)` syncs are done in word only.

    Dies before call `dies_at`.
    """

    def __init__(
        self,
        root: Path,
        forgets: str = "",
        journal: list[Operation] | None = None,
        dies_at: str = "",
    ):
        super().__init__()
        self.root, self.forgets, self.dies_at = root, forgets, dies_at
        self.journal: list[Operation] = journal if journal is not None else []

    def _name(self, path: Path | str) -> str:
        return os.path.relpath(path, self.root)

    def _is_kept(self, kind: str, path: str) -> bool:
        return not self.forgets or kind_of_sync(kind, self._name(path)) != self.forgets

    def mkdir(self, path: Path) -> None:
        is_new = not path.exists()
        super().mkdir(path)
        if is_new:
            self.journal.append(("mkdir", self._name(path)))

    def create(self, path: Path, size: int = 0) -> int:
        descriptor = super().create(path, size)
        self.journal.append(("create", self._name(path), size))
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        count = super().write(descriptor, data)
        self.journal.append(("write", self._name(self._paths[descriptor]), at, bytes(data[:count])))
        return count

    def sync(self, descriptor: int) -> None:
        path = self._paths[descriptor]
        if self._is_kept("sync", path):
            self.journal.append(("sync", self._name(path)))

    def sync_directory(self, path: Path) -> None:
        if self._is_kept("sync_directory", str(path)):
            self.journal.append(("sync_directory", self._name(path)))

    def rename(self, source: Path, target: Path) -> None:
        if self.dies_at and self.dies_at in target.name:
            super().rename(source, target)
            self.journal.append(("rename", self._name(source), self._name(target)))
            raise PowerCut
        super().rename(source, target)
        self.journal.append(("rename", self._name(source), self._name(target)))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.journal.append(("unlink", self._name(path)))

    def remove_tree(self, path: Path) -> None:
        names = sorted(os.listdir(path))
        super().remove_tree(path)
        self.journal += [("unlink", f"{self._name(path)}/{name}") for name in names]
        self.journal.append(("unlink", self._name(path)))


FORGETS = (
    "sync data",
    "sync receipt",
    "sync manifest",
    "sync_directory draft",
    "sync_directory root",
)


def kind_of_sync(kind: str, name: str) -> str:
    """Which of FORGETS a call is, '' for the rest (LATEST, which nobody believes)."""
    if kind == "sync_directory":
        return "sync_directory draft" if ".tmp-" in name else "sync_directory root"
    for part, what in ((".bin", "data"), ("MANIFEST", "manifest"), (".json", "receipt")):
        if part in name:
            return f"sync {what}"
    return ""


@dataclass
class Inode:
    """A file: what is on the disk for certain, and what was written last.

    A directory: entries name -> inode number.
    """

    is_directory: bool
    durable: bytes = b""
    latest: bytearray = field(default_factory=bytearray)
    entries: dict[str, int] = field(default_factory=dict)  # durable ones
    # (name that goes, name that comes, inode)
    pending: list[tuple[str, str, int]] = field(default_factory=list)
    now: dict[str, int] = field(default_factory=dict)


class Durable:
    """A file system that remembers what of it would survive."""

    def __init__(self, root: Path):
        self.inodes: list[Inode] = []
        self.top = self._read(root)

    def _read(self, path: Path) -> int:
        """Everything that is there at the start is durable."""
        number = len(self.inodes)
        if path.is_dir():
            self.inodes.append(Inode(True))
            entries = {
                name: self._read(path / name)
                for name in sorted(os.listdir(path))
                if name != "control"
            }
            self.inodes[number].entries, self.inodes[number].now = dict(entries), entries
        else:
            data = path.read_bytes()
            self.inodes.append(Inode(False, data, bytearray(data)))
        return number

    def _find(self, name: str) -> int:
        number = self.top
        for part in Path(name).parts:
            number = self.inodes[number].now[part]
        return number

    def apply(self, operation: Operation) -> None:
        kind, name = operation[0], operation[1]
        folder, last = self.inodes[self._find(os.path.dirname(name))], os.path.basename(name)
        if kind in ("mkdir", "create"):
            self.inodes.append(
                Inode(kind == "mkdir", latest=bytearray(operation[2] if kind == "create" else 0))
            )
            folder.now[last] = len(self.inodes) - 1
            folder.pending.append(("", last, len(self.inodes) - 1))
        elif kind == "write":
            file, (at, data) = self.inodes[folder.now[last]], operation[2:]
            file.latest[at : at + len(data)] = data
        elif kind == "sync":
            file = self.inodes[folder.now[last]]
            file.durable = bytes(file.latest)
        elif kind == "sync_directory":
            directory = self.inodes[self._find(name)]
            directory.entries, directory.pending = dict(directory.now), []
        elif kind == "rename":
            number, new = folder.now.pop(last), os.path.basename(operation[2])
            folder.now[new] = number
            folder.pending.append((last, new, number))
        else:
            folder.pending.append((last, "", folder.now.pop(last)))

    def states(self, dice: random.Random) -> Iterator["Durable"]:
        """Legal states after a crash now: subsets of pending entries, combined with fates of
        unsynced pages.
        """
        pending = [(n, i) for n, inode in enumerate(self.inodes) for i in range(len(inode.pending))]
        subsets: list[set[tuple[int, int]]] = [set(), set(pending)]
        subsets += [set(pending) - {one} for one in pending] + [{one} for one in pending]
        subsets += [set(pending[:n]) for n in range(1, len(pending))]
        subsets += [{one for one in pending if dice.random() < 0.5} for _ in range(RANDOM)]
        dirty = [
            n
            for n, inode in enumerate(self.inodes)
            if not inode.is_directory and inode.latest != inode.durable
        ]
        fates = ("lost", "all", "front", "zero", *["torn"] * TORN) if dirty else ("all",)
        for subset, fate in itertools.product(subsets, fates):
            yield self._after(subset, fate, dice)

    def _after(self, subset: set[tuple[int, int]], fate: str, dice: random.Random) -> "Durable":
        state = copy.copy(self)
        state.inodes = [copy.copy(inode) for inode in self.inodes]
        for number, inode in enumerate(state.inodes):
            inode.entries = dict(inode.entries)
            for position, (goes, comes, what) in enumerate(inode.pending):
                if (number, position) not in subset:
                    continue
                if not goes:
                    inode.entries[comes] = what
                elif inode.entries.get(goes) == what:
                    del inode.entries[goes]
                    if comes:
                        inode.entries[comes] = what
                elif comes:  # the rename reached the disk as one, its source's creation with it
                    inode.entries[comes] = what
            if not inode.is_directory and inode.latest != inode.durable:
                inode.durable = _torn(inode.durable, bytes(inode.latest), fate, dice)
        return state

    def listing(self, number: int | None = None, at: str = "") -> dict[str, bytes | None]:
        """path -> content, None for directories."""
        inode = self.inodes[self.top if number is None else number]
        if not inode.is_directory:
            return {at: inode.durable}
        found: dict[str, bytes | None] = {at: None} if at else {}
        for name, child in sorted(inode.entries.items()):
            found |= self.listing(child, f"{at}/{name}" if at else name)
        return found


def _torn(old: bytes, new: bytes, fate: str, dice: random.Random) -> bytes:
    if fate in ("lost", "all"):
        return old if fate == "lost" else new
    if fate == "zero":
        return bytes(len(new))
    keep = [
        fate == "front" and at < len(new) // 2 or fate == "torn" and dice.random() < 0.5
        for at in range(0, len(new), PAGE)
    ]
    parts = [
        new[n * PAGE : n * PAGE + PAGE] if kept else old[n * PAGE : n * PAGE + PAGE]
        for n, kept in enumerate(keep)
    ]
    return b"".join(
        part.ljust(min(PAGE, len(new) - n * PAGE), b"\0") for n, part in enumerate(parts)
    )


def materialise(listing: dict[str, bytes | None], target: Path) -> None:
    target.mkdir()
    for name, content in listing.items():
        if content is None:
            (target / name).mkdir()
        else:
            (target / name).write_bytes(content)


@dataclass(frozen=True)
class Scene:
    """A save to be recorded.

    `twice`: the committing agent dies between its rename and all that follows, another one commits.
    """

    world: int
    keep: int
    twice: bool = False
    scale: int = 1


SCENES = [
    Scene(world, keep, twice, scale)
    for scale in (1, 5)
    for twice in (False, True)
    for world in (1, 2, 3)
    for keep in (1, 0)
]


def record(ground: Ground, scene: Scene, forgets: str = "") -> tuple[Durable, list[Operation]]:
    """The state before the save, and its journal with `("acknowledged",)` where the trainer has
    heard of the commit.
    """
    root, cut = ground.fresh(scene.world, scene.scale), Cut(NEW.step, scale=scene.scale)
    before = Durable(root)
    journal: list[Operation] = []
    disk = Remembering(root, forgets, journal, dies_at="step_00000002" if scene.twice else "")
    reports: list[Report] = []
    epoch = fence.take_epoch(root / "control")
    try:
        reports = save_here(
            root,
            cut,
            scene.world,
            disk,
            scene.keep,
            epoch,
            lambda: journal.append(("acknowledged",)),
        )
    except PowerCut:
        second = LocalStorage(root, Remembering(root, forgets, journal))
        told = settings(str(root), str(root / "control"), 0, scene.world, epoch, [], 0)
        asked = begin(second, cut, 0, scene.world, f"e{epoch:04d}n0000", scene.keep)

        def hear(report: Report) -> None:
            reports.append(report)
            if isinstance(report, Committed):
                journal.append(("acknowledged",))

        committer = Committer(second, told, hear)
        committer.watch(asked, asked.outputs[0], 0.0)
        committer.look()
    assert any(isinstance(report, Committed) for report in reports), reports
    shutil.rmtree(root)
    return before, journal


def explore(ground: Ground, scene: Scene, tally: Tally, limit: int, forgets: str = "") -> None:
    """Load up to `limit` distinct states of one scene, spread over all prefixes of its journal."""
    disk, journal = record(ground, scene, forgets)
    dice = random.Random(3)
    least, found, seen = OLD.step, [], set()
    for number, operation in enumerate([("start",), *journal]):
        if operation[0] == "acknowledged":
            least = NEW.step
        elif operation[0] != "start":
            disk.apply(operation)
        for state in disk.states(dice):
            listing = state.listing()
            key = (least, hash(tuple(listing.items())))
            if key not in seen:
                seen.add(key)
                found.append(
                    (f"{scene} {forgets} after operation {number} {operation[:2]}", least, listing)
                )
    chosen = found if len(found) <= limit else dice.sample(found, limit)
    for words, least, listing in chosen:
        root = ground.top / "crashed"
        materialise(listing, root)
        problems, _ = judge(root, ground.loader, least, scene.scale, sweep=True)
        tally.note(
            f"world {scene.world}" + (", commit taken over" if scene.twice else ""), words, problems
        )
        shutil.rmtree(root)


def run(ground: Ground, count: int) -> Tally:
    tally = Tally("power loss")
    for number, scene in enumerate(SCENES):  # the first are small; what they lack the others have
        explore(ground, scene, tally, -(-(count - tally.injected) // (len(SCENES) - number)))
    return tally


def mutants(ground: Ground, limit: int) -> dict[str, int]:
    """Failures that the same harness finds when one kind of sync is
    left out; each must be more than none.
    """
    found = {}
    for forgets in FORGETS:
        tally = Tally(forgets)
        explore(ground, Scene(2, 1), tally, limit, forgets)
        found[forgets] = tally.bad
    return found
