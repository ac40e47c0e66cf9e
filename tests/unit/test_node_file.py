"""What readers of a node have in common is made once, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from rft.ground import node_file, scratch
from rft.ground.node_file import NodeFile

SIZE = 2**16
PARTS = [bytes([number]) * SIZE for number in range(3)]
DIGESTS = [xxhash.xxh3_128_hexdigest(part) for part in PARTS]

HOLDS = """
import sys
from rft.ground import node_file
with node_file.held("a save"):
    print(flush=True)
    sys.stdin.read()
"""
# makes the first part, and never gets there
MAKES = f"""
import sys
from rft.ground.node_file import NodeFile
def make():
    print(flush=True)
    sys.stdin.read()
NodeFile(sys.argv[1], {DIGESTS}, {SIZE}).take({DIGESTS[0]!r}, {SIZE}, make)
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where links are; a short name."""
    with tempfile.TemporaryDirectory(prefix="t") as made:
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(made) / f"rft-{os.getuid()}"


def running(program: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """When it has said that it is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    return process


def killed(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def never() -> bytes:
    raise AssertionError("it is there")


def giving(part: bytes) -> Callable[[], bytes]:
    return lambda: part


def test_all_who_ask_for_a_name_have_one_file_and_nothing_is_left(place: Path) -> None:
    with node_file.held("a save") as one, node_file.held("a save") as other:
        with node_file.held("another") as strange:
            assert not os.path.samefile(one, strange)
        assert os.path.samefile(one, other)
        first, second = (NodeFile(path, DIGESTS, SIZE) for path in (one, other))
        for digest, part in zip(DIGESTS, PARTS, strict=True):
            assert first.take(digest, SIZE, giving(part)) == part
            assert second.take(digest, SIZE, never) == part
        first.close()
        second.close()
    assert list(place.iterdir()) == []
    assert not [link for link in Path("/proc/self/fd").iterdir() if "memfd:node" in told(link)]


def told(link: Path) -> str:
    return os.readlink(link) if link.is_symlink() else ""


def test_what_a_killed_process_was_making_is_made_by_the_next() -> None:
    with node_file.held("a save") as path:
        killed(running(MAKES, path))
        common = NodeFile(path, DIGESTS, SIZE)
        assert common.take(DIGESTS[0], SIZE, giving(PARTS[0])) == PARTS[0]
        common.close()


def test_what_could_not_be_made_is_not_there() -> None:
    def fail() -> bytes:
        raise ValueError("damaged")

    with node_file.held("a save") as path:
        common = NodeFile(path, DIGESTS, SIZE)
        with pytest.raises(ValueError, match="damaged"):
            common.take(DIGESTS[1], SIZE, fail)
        assert common.take(DIGESTS[1], SIZE, giving(PARTS[1])) == PARTS[1]
        common.close()


def test_what_is_there_of_another_save_is_not_taken() -> None:
    with node_file.held("a save") as path:
        ours, theirs = (NodeFile(path, [digest], SIZE) for digest in DIGESTS[:2])
        for file, which in ((ours, 0), (theirs, 1), (ours, 0)):
            assert file.take(DIGESTS[which], SIZE, giving(PARTS[which])) == PARTS[which]
        assert ours.take(DIGESTS[0], SIZE, never) == PARTS[0]
        ours.close()
        theirs.close()


def test_a_killed_holder_leaves_a_link_that_is_replaced_or_swept(place: Path) -> None:
    killed(running(HOLDS))
    (link,) = place.iterdir()
    with node_file.held("a save") as path:
        assert os.path.samefile(link, path)
    killed(running(HOLDS))
    alive = running(HOLDS.replace("a save", "another"))
    scratch.sweep()
    (left,) = place.iterdir()
    assert left.exists(), "that of a living one"
    killed(alive)
    scratch.sweep()
    assert list(place.iterdir()) == []


def test_where_there_can_be_none_every_worker_reads_for_itself(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write_text("somebody else's")
    with node_file.held("a save") as path:
        assert path == ""
