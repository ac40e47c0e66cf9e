"""A medium that fails is not damage: it is asked again, then the start is refused on every rank,
and no checkpoint is renamed.
"""

import errno
import io
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from states import PATIENCE, Member, Ranks, State, equal, managed, plain, save, write_cut

from rft.checkpoint import restore
from rft.checkpoint.catalog import committed
from rft.checkpoint.restore import RestoreRefused
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import Disk, LocalFile, LocalStorage, Storage, open_storage
from rft.tools import ckpt

FILES = ("MANIFEST.json", "r00000.json", "r00000.bin")
ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE)


class Failing(LocalStorage):
    """A mount where what belongs to `name` fails with `error` the next `times` times."""

    def __init__(self, root: Path, name: str, error: int, times: int):
        super().__init__(root, Disk())
        self.name, self.error, self.times = name, error, times

    def fail(self, path: str) -> None:
        if path.endswith(self.name) and self.times > 0:
            self.times -= 1
            raise OSError(self.error, os.strerror(self.error), path)

    def get(self, path: str) -> bytes:
        self.fail(path)
        return super().get(path)

    def list(self, path: str = "") -> list[str]:
        self.fail(path or "ROOT")
        return super().list(path)

    def open(self, path: str) -> LocalFile:
        return Handle(self, path)


class Handle(LocalFile):
    """A file that was opened while all was well; one that has failed once fails for ever."""

    def __init__(self, storage: Failing, path: str):
        super().__init__(io.FileIO(storage.root / path))
        self.storage, self.path, self.failed = storage, path, False

    def read_into(self, start: int, places: list[memoryview]) -> int:
        try:
            self.storage.fail(self.path)
        except OSError:
            self.failed = True
        if self.failed:
            raise OSError(self.storage.error, os.strerror(self.storage.error))
        return super().read_into(start, places)


class Lying(LocalStorage):
    """A node whose memory flips a bit of every file of ranks' bytes that it reads."""

    def open(self, path: str) -> LocalFile:
        return Flipping(io.FileIO(self.root / path))


class Flipping(LocalFile):
    def read_into(self, start: int, places: list[memoryview]) -> int:
        count = super().read_into(start, places)
        places[0][0] ^= 1
        return count


@dataclass
class Start:
    """A rank of a job that begins: where it looks, what it fills in, and what comes of it."""

    storage: Storage
    state: State
    step: int | None = None
    error: Exception | None = None

    def run(self, member: Member, patience_s: float) -> None:
        try:
            found = restore.load(self.storage, member, self.state, None, patience_s)
            self.step = found and found.loop["step"]
        except Exception as error:  # the test looks at it
            self.error = error


def start(*starts: Start, patience_s: float = 0.0) -> None:
    """All ranks at once; a rank that would wait for one that has gone fails the test."""
    ranks = Ranks(len(starts))
    threads = [
        threading.Thread(target=one.run, args=(ranks.member(n), patience_s), daemon=True)
        for n, one in enumerate(starts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def refusal(*starts: Start) -> str:
    """What every rank says, in the same words."""
    assert [type(one.error) for one in starts] == [RestoreRefused] * len(starts), [
        one.error for one in starts
    ]
    (words,) = {str(one.error) for one in starts}
    assert "Nothing was set aside for it" in words and "start again" in words
    return words


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the checkpoints of steps 1, 2 and 3."""
    root, state = tmp_path_factory.mktemp("made") / "c", plain()
    with managed(root, state) as manager:
        for step in (1, 2, 3):
            save(manager, step, state.fill(step))
    return root


@pytest.fixture
def root(made: Path, memory_path: Path) -> Path:
    return Path(shutil.copytree(made, memory_path / "c"))


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def good(root: Path) -> Start:
    return Start(open_storage(root), plain())


def test_a_mount_that_is_missing_on_one_node_refuses_the_start_and_the_checkpoints_stay(
    root: Path, memory_path: Path
) -> None:
    before, ranks = names(root), (good(root), good(memory_path / "not mounted"))
    start(*ranks)
    words = refusal(*ranks)
    assert (
        f"rank 1 on {os.uname().nodename}: {memory_path}/not mounted/step_00000003/MANIFEST.json"
        in words
    )
    assert "[Errno 2]" in words and names(root) == before


def test_a_mount_that_is_missing_on_the_node_of_rank_0_is_no_start_at_step_0(
    root: Path, memory_path: Path
) -> None:
    (memory_path / "empty").mkdir()
    before, ranks = names(root), (good(memory_path / "empty"), good(root))
    start(*ranks)
    words = refusal(*ranks)
    assert (
        f"rank 0 on {os.uname().nodename}: {memory_path}/empty holds no checkpoint, but rank 1 on "
        in words
    )
    assert "sees step_00000003 there" in words and names(root) == before


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_for_good_refuses_the_start_with_rank_file_and_error(
    root: Path, rank: int, error: int, name: str
) -> None:
    before, ranks = names(root), [good(root), good(root)]
    ranks[rank].storage = Failing(root, f"step_00000003/{name}", error, 10**9)
    start(*ranks)
    words = refusal(*ranks)
    assert (
        f"rank {rank} on " in words
        and f"[Errno {error}]" in words
        and f"step_00000003/{name}" in words
    )
    assert names(root) == before


@pytest.mark.parametrize("name", ["ROOT", "step_00000003", *FILES])
def test_what_fails_for_a_moment_is_asked_again_and_the_newest_is_loaded(
    root: Path, name: str
) -> None:
    before, ranks = (
        names(root),
        [Start(Failing(root, name, errno.ESTALE, 1), plain()) for _ in range(2)],
    )
    start(*ranks, patience_s=PATIENCE)
    assert [one.step for one in ranks] == [3, 3]
    assert all(equal(one.state, plain().fill(3)) for one in ranks) and names(root) == before


def test_the_refusal_says_how_long_it_was_tried(root: Path) -> None:
    ranks = (good(root), Start(Failing(root, "r00000.bin", errno.EIO, 10**9), plain()))
    start(*ranks, patience_s=0.01)
    assert "(tried for 0.01 s)" in refusal(*ranks)


@pytest.mark.parametrize("name", ["ROOT", "step_00000002"])
def test_a_list_that_rank_0_cannot_read_refuses_the_start(root: Path, name: str) -> None:
    before, ranks = names(root), (Start(Failing(root, name, errno.EIO, 10**9), plain()), good(root))
    start(*ranks)
    assert "rank 0 on " in refusal(*ranks) and names(root) == before


def on_each(act: Callable[[int], None], world: int) -> None:
    """Every rank at once."""
    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)


def test_a_root_that_cannot_be_made_refuses_the_start_on_every_rank() -> None:
    ranks, said = Ranks(2), []

    def prepare(rank: int) -> None:
        with pytest.raises(
            RestoreRefused, match="rank 0 on .*/proc/nowhere cannot be used"
        ) as refused:
            restore.prepare(open_storage("/proc/nowhere"), ranks.member(rank), 0.0)
        said.append(str(refused.value))

    on_each(prepare, 2)
    assert len(said) == 2 and len(set(said)) == 1


@pytest.mark.parametrize("blind", [None, 0, 1, 2])
def test_ranks_that_look_at_other_directories_are_refused(
    tmp_path: Path, blind: int | None
) -> None:
    """Each would save its part where the others' are not. Nothing is left of the look."""
    roots = [tmp_path / ("own" if rank == blind else "shared") for rank in range(3)]
    ranks, said = Ranks(3), []

    def prepare(rank: int) -> None:
        try:
            restore.prepare(open_storage(roots[rank]), ranks.member(rank), 0.0)
            said.append("")
        except RestoreRefused as refused:
            said.append(str(refused))

    on_each(prepare, 3)
    assert len(said) == 3 and len(set(said)) == 1
    if blind is None:
        assert not said[0]
    else:
        assert f"{roots[0]}: " in said[0] and "trainer.checkpoint.storage" in said[0]
    assert not [name for name in names(tmp_path) if "." in name]


class Sticky(Disk):
    """A reader on another node has files of every directory open: nothing can be deleted, or, of
    another owner, not even renamed.
    """

    def __init__(self, rename_too: bool):
        self.rename_too = rename_too

    def rename(self, source: Path, target: Path) -> None:
        if self.rename_too:
            raise PermissionError(errno.EPERM, "not yours", str(source))
        super().rename(source, target)

    def remove_tree(self, path: Path) -> None:
        raise OSError(errno.EBUSY, ".nfs000", str(path))

    def unlink(self, path: Path) -> None:
        raise OSError(errno.EBUSY, ".nfs001", str(path))


@pytest.mark.parametrize("rename_too", [False, True])
def test_leftovers_that_cannot_be_deleted_do_not_block_the_start(
    root: Path, rename_too: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("step_00000004.tmp-e0001n0003", ".trash-step_00000001-12", ".trash-x"):
        (root / name).mkdir()
        (root / name / "r00000.bin").touch()
    (root / ".LATEST.new-12").touch()
    storage = LocalStorage(root, Sticky(rename_too))
    restore.sweep(storage)
    rank = Start(storage, plain())
    start(rank)
    assert rank.step == 3 and caplog.text.count("is left over and cannot be removed") == 4
    restore.sweep(open_storage(root))
    assert not list(root.glob("*.tmp-*")) and not list(root.glob(".[tL]*"))


def test_damage_that_rank_0_does_not_find_is_refused_and_names_the_rank_that_does(
    root: Path,
) -> None:
    before, ranks = names(root), (good(root), Start(Lying(root, Disk()), plain()))
    start(*ranks)
    words = refusal(*ranks)
    assert (
        f"rank 1 on {os.uname().nodename} finds "
        f"{root}/step_00000003/r00000.bin was changed: chunk 0" in words
    )
    assert "rank 0 on " in words and names(root) == before


@pytest.mark.parametrize("missing", [False, True])
def test_damage_that_rank_0_finds_when_it_looks_is_set_aside(root: Path, missing: bool) -> None:
    path = root / "step_00000003/r00000.bin"
    path.unlink() if missing else path.write_bytes(b"?" + path.read_bytes()[1:])
    ranks = (Start(open_storage(root), State({})), good(root))  # rank 0 has no part of these bytes
    start(*ranks)
    assert [one.step for one in ranks] == [2, 2], [one.error for one in ranks]
    assert committed(open_storage(root)) == ["step_00000001", "step_00000002"]
    assert len(list(root.glob(".bad-step_00000003-*"))) == 1


def test_a_file_that_is_listed_and_leads_to_no_place_is_not_missing(
    root: Path, memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "step_00000003/r00000.bin"
    path.rename(memory_path / "elsewhere")
    path.symlink_to("/not/mounted/r00000.bin")
    before, rank = names(root), good(root)
    start(rank)
    assert str(path) in refusal(rank) and names(root) == before
    assert ckpt.main(["verify", str(root)]) == 1
    told = capsys.readouterr().out
    assert f"step_00000003  UNREADABLE  {path}" in told and "DAMAGED" not in told


def test_more_files_than_descriptors_are_read_a_few_at_a_time(memory_path: Path) -> None:
    whole = np.arange(48 * 4, dtype=np.float32).reshape(48, 4)
    rows = [[Claim("t", "float32", (48, 4), (n, 0), (1, 4), None)] for n in range(48)]
    write_cut(memory_path / "c", whole, rows).close()
    script = (
        "import resource, sys, torch; from states import OneRank, State; from rft.checkpoint "
        "import restore\n"
        "from rft.checkpoint.storage import open_storage\n"
        "state = State({'t': torch.zeros(48, 4)}); resource.setrlimit(resource.RLIMIT_NOFILE, (40, "
        "40))\n"
        "found = restore.load(open_storage(sys.argv[1]), OneRank(), state, None)\n"
        "assert found.loop == {'step': 1}\n"
        "assert state.tensors['t'].flatten().tolist() == list(range(192))\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", script, str(memory_path / "c")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert committed(open_storage(memory_path / "c")) == ["step_00000001"]
