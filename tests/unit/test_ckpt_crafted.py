"""A checkpoint that a stranger has made, sealed as it should be: whatever it says, nothing crashes,
hangs or is loaded that is not there; it is set aside by name, and the one before taken.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from states import PATIENCE, OneRank, State, write_cut

from rft.checkpoint import restore
from rft.checkpoint.catalog import Hint, committed, read_manifest
from rft.checkpoint.records import Receipt, decode_json, encode_json, sha256
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import open_storage
from rft.tools import ckpt

SHAPE = (4, 3)
NEW = "step_00000002"
Craft = Callable[[Path], None]


def receipts(root: Path) -> list[Receipt]:
    return [decode_json((root / NEW / f"r0000{n}.json").read_bytes(), Receipt) for n in (0, 1)]


def seal(root: Path, written: list[Any], **manifest: Any) -> None:
    """What a stranger does: receipts as he likes them, and a manifest that vouches for them."""
    digests = {}
    for number, receipt in enumerate(written):
        data = receipt if isinstance(receipt, bytes) else encode_json(receipt)
        (root / NEW / f"r0000{number}.json").write_bytes(data)
        digests[f"r0000{number}.json"] = sha256(data)
    old = read_manifest(open_storage(root), NEW)
    forged = msgspec.structs.replace(old, **{"receipts": digests, **manifest})
    (root / NEW / "MANIFEST.json").write_bytes(encode_json(forged.sealed()))


def receipt(**fields: Any) -> Craft:
    """Rank 1's receipt with other content."""

    def craft(root: Path) -> None:
        one, other = receipts(root)
        seal(root, [one, msgspec.structs.replace(other, **fields)])

    return craft


def region(**fields: Any) -> Craft:
    """Rank 1's region with other content."""

    def craft(root: Path) -> None:
        one, other = receipts(root)
        forged = [msgspec.structs.replace(region, **fields) for region in other.regions]
        seal(root, [one, msgspec.structs.replace(other, regions=forged)])

    return craft


def manifest(**fields: Any) -> Craft:
    return lambda root: seal(root, receipts(root), **fields)


def raw(data: bytes) -> Craft:
    """Rank 1's receipt is of another type."""
    return lambda root: seal(root, [receipts(root)[0], data])


def instead(name: str, make: Callable[[Path], object]) -> Craft:
    def craft(root: Path) -> None:
        (root / NEW / name).unlink()
        make(root / NEW / name)

    return craft


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


DEEP = b'{"format":2,"loop":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}"
CRAFTED = {
    "regions overlap": region(offset=(1, 0)),
    "a region is missing": receipt(regions=[]),
    "a region is there twice": lambda root: seal(root, [receipts(root)[0]] * 2),
    "negative at": region(at=-64),
    "at behind the end": region(at=2**62),
    "a region is larger than its file": region(global_shape=(2**50, 3), shape=(2**50 - 2, 3)),
    "bytes of another number": region(bytes=12),
    "negative shape": region(shape=(-2, -3)),
    "negative offset": region(offset=(-2, 0)),
    "more offsets than dimensions": region(offset=(2, 0, 0)),
    "forty dimensions": region(global_shape=(1,) * 40, shape=(1,) * 40, offset=(0,) * 40),
    "flat and negative": region(flat=(-6, 0)),
    "flat and too long": region(flat=(0, 60)),
    "no such dtype": region(dtype="object"),
    "another dtype": region(dtype="int32"),
    "another shape": region(global_shape=(5, 3)),
    "fewer hashes": receipt(chunks=[]),
    "more hashes": receipt(chunks=["0"] * 2),
    "negative bytes": receipt(bytes=-1, chunks=[]),
    "a file elsewhere": receipt(file="../../elsewhere.bin"),
    "an absolute file": receipt(file="/etc/passwd"),
    "another rank": receipt(rank=0),
    "another step": receipt(step=1),
    "another attempt": receipt(epoch=7),
    "another format": receipt(format=1),
    "another world": receipt(world=3),
    "a list": raw(b"[]"),
    "another record": raw(b'{"name":"x","epoch":1,"step":2}'),
    "no JSON": raw(b"\xff{]"),
    "nested": raw(DEEP),
    "a loop without step": manifest(loop={}),
    "a loop of another step": manifest(loop={"step": 1}),
    "a step that is none": manifest(loop={"step": "2"}),
    "scores that are none": manifest(loop={"step": 2, "scores": [1]}),
    "skips that are none": manifest(loop={"step": 2, "skips": "x"}),
    "gates that are none": manifest(loop={"step": 2, "gates": {"clipped": ["x"]}}),
    "losses that are none": manifest(loop={"step": 2, "recent_losses": ["x"]}),
    "fewer receipts": lambda root: seal(root, receipts(root)[:1]),
    "more ranks": manifest(world=10**18),
    "no ranks": manifest(world=0, receipts={}),
    "receipts elsewhere": manifest(receipts={"../r00000.json": "0", "r00001.json": "0"}),
    "bytes that are not there": manifest(bytes=10**30),
    "a nested manifest": lambda root: (root / NEW / "MANIFEST.json").write_bytes(DEEP) and None,
    "a pipe as bytes": instead("r00001.bin", os.mkfifo),
    "a pipe as receipt": instead("r00001.json", os.mkfifo),
    "a pipe as manifest": instead("MANIFEST.json", os.mkfifo),
    "a device as bytes": instead("r00001.bin", lambda path: path.symlink_to("/dev/zero")),
    "a device as receipt": instead("r00001.json", lambda path: path.symlink_to("/dev/zero")),
    "a device as manifest": instead("MANIFEST.json", lambda path: path.symlink_to("/dev/zero")),
    "a directory as bytes": instead("r00001.bin", os.mkdir),
    "a directory as receipt": instead("r00001.json", os.mkdir),
    "a manifest of a terabyte": instead("MANIFEST.json", sparse),
    "a receipt of a terabyte": instead("r00001.json", sparse),
}


@pytest.fixture
def root(memory_path: Path) -> Path:
    """Steps 1 and 2 of two ranks, a block of rows each."""
    path = memory_path / "c"
    rows = [[Claim("t", "float32", SHAPE, (2 * n, 0), (2, 3), None)] for n in (0, 1)]
    for step in (1, 2):
        whole = np.arange(12, dtype=np.float32).reshape(SHAPE) + step
        write_cut(path, whole, rows, step).close()
    return path


def within(work: Callable[[], Any]) -> Any:
    """Its result; what hangs must not hold up the test."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:  # the test looks at it
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "it hangs"
    return found[0]


def started(root: Path) -> tuple[Any, State]:
    state = State({"t": torch.zeros(SHAPE)})
    found = within(lambda: restore.load(open_storage(root), OneRank(), state, None, 0.0))
    return (found.loop if isinstance(found, restore.Restored) else found), state


def test_what_is_made_as_it_should_be_is_loaded(root: Path) -> None:
    seal(root, receipts(root))
    loop, state = started(root)
    assert loop == {"step": 2} and state.tensors["t"].flatten().tolist() == list(range(2, 14))


@pytest.mark.parametrize("words", CRAFTED)
def test_what_is_crafted_is_refused_and_the_one_before_taken(
    root: Path, words: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copyfile(root / NEW / "r00001.bin", root.parent / "elsewhere.bin")  # with the hash
    CRAFTED[words](root)
    assert within(lambda: ckpt.main(["verify", str(root)])) == 1
    assert f"{NEW}  DAMAGED" in capsys.readouterr().out
    loop, state = started(root)
    assert loop == {"step": 1} and state.tensors["t"].flatten().tolist() == list(range(1, 13))
    assert f"{NEW}" in caplog.text and "set aside as" in caplog.text
    assert committed(open_storage(root)) == ["step_00000001"]
    assert len(list(root.glob(f".bad-{NEW}-*"))) == 1


def point(root: Path) -> None:
    (root / "LATEST").write_bytes(encode_json(Hint(name=NEW, epoch=1, step=2)))


@pytest.mark.parametrize("is_named", [True, False])
def test_a_lost_manifest_is_said_and_the_rest_of_it_set_aside(
    root: Path, is_named: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_named:
        point(root)
    (root / NEW / "MANIFEST.json").unlink()
    for command in ("verify", "ls"):
        assert ckpt.main([command, str(root)]) == 1
    told = capsys.readouterr().out
    assert f"{NEW}  DAMAGED  {root}/{NEW}/MANIFEST.json is missing" in told
    assert f"manifest lost: {NEW}" in told and "unfinished" not in told
    with pytest.raises(FileNotFoundError, match=f"lost its checkpoint {NEW}: name the one"):
        restore.newest_of(str(root))
    assert started(root)[0] == {"step": 1}
    assert f"set aside as {root}/.bad-{NEW}-" in caplog.text
    assert f"{root}/{NEW}/MANIFEST.json is missing" in caplog.text


@pytest.mark.parametrize("is_there", [True, False])
def test_a_checkpoint_that_latest_names_and_that_is_gone_is_said(
    root: Path, is_there: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    point(root)
    shutil.rmtree(root / NEW)
    if is_there:
        (root / NEW).mkdir()
    assert ckpt.main(["verify", str(root)]) == 1
    assert f"{NEW}  DAMAGED  LATEST names it" in capsys.readouterr().out
    assert started(root)[0] == {"step": 1}
    assert f"LATEST names {NEW}, which is no checkpoint any more" in caplog.text
    assert not list(root.glob(".bad-*"))


def test_without_manifests_and_hint_there_is_no_start_at_step_0_however_often(root: Path) -> None:
    for path in root.glob("*/MANIFEST.json"):
        path.unlink()
    refused = [started(root)[0] for _ in range(2)]
    assert [type(error) for error in refused] == [FileNotFoundError] * 2, refused
    assert "step_00000001/MANIFEST.json is missing" in str(refused[0])
    assert ".bad-step_" in str(refused[1]) and len(list(root.glob(".bad-*/*.bin"))) == 4


def test_small_state_that_is_none_refuses_the_start_on_every_rank(root: Path) -> None:
    seal(root, [msgspec.structs.replace(one, small={"x": b"\xc1"}) for one in receipts(root)])
    refused, _ = started(root)
    assert isinstance(refused, restore.RestoreRefused) and NEW in str(refused)
    assert "KeyError: 'rng'" in str(refused) and len(committed(open_storage(root))) == 2
