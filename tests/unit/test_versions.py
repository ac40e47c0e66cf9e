"""Every published version: whatever changes from one to the next, and whatever is lost between,
what is kept is read bit by bit as it was, and nothing else of a save suffers.
"""

import asyncio
import errno
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import states
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from states import Hand, State, load, managed, save, trainer_config, until

from rft.buffer.ledger import Ledger
from rft.buffer.progress import Issued, Stored
from rft.checkpoint import catalog, commit, sharding, versions
from rft.checkpoint.catalog import Entry, expired
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.reader import Checkpoint, Mismatch
from rft.checkpoint.records import (
    Begin,
    CheckpointSettings,
    NotKept,
    Output,
    Receipt,
    Report,
    Retention,
    SaveFailed,
    decode_json,
)
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import VERSIONS, Disk, LocalStorage, open_storage
from rft.checkpoint.versions import VersionKeeper
from rft.checkpoint.writer import Writer, receipt_name
from rft.ground.experience import Experience, VersionSpan, encode
from rft.sync.stored_versions import Saved, SavedVersions, find
from rft.tools import ckpt

WIDTHS = {"bfloat16": 2, "float32": 4, "uint8": 1}
seeds = st.integers(0, 2**32 - 1)


class FullDisk(Disk):
    """Takes so many more bytes; of what it took it makes no haste."""

    left = 2**60

    def sync(self, descriptor: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...

    def write(self, descriptor: int, data: memoryview) -> int:
        if len(data) > self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(descriptor, data)


class Ranks:
    """Agents of a few ranks, without their processes: writers and committers, over one directory.
    Each holds its rows of one tensor.
    """

    def __init__(self, root: Path, world: int, rows: int, dtype: str = "bfloat16"):
        self.disk = FullDisk()
        self.storage = LocalStorage(root, self.disk)
        self.storage.prepare()
        self.world, self.dtype, self.reports = world, dtype, []
        claims = [
            Claim("model/w", dtype, (rows * world, 64), (rank * rows, 0), (rows, 64), None)
            for rank in range(world)
        ]
        self.regions = [sharding.place([claim]) for claim in claims]
        self.keepers = [VersionKeeper() for _ in range(world)]
        control = root.parent / "control"
        self.settings = [
            CheckpointSettings(
                root=str(root),
                control=str(control),
                rank=rank,
                world=world,
                epoch=1,
                slots=[],
                slot_bytes=0,
                strategy="unrestricted",
                rate_limit=0,
                deadline_s=60,
                lease_s=0,
            )  # fmt: skip
            for rank in range(world)
        ]
        self.committers = [
            commit.Committer(self.storage, one, self.reports.append, lose=keeper.lose)
            for one, keeper in zip(self.settings, self.keepers, strict=True)
        ]

    def output(self, step: int) -> list[Output]:
        draft, final = commit.names_of(self.storage, VERSIONS, step, f"e0001n{step:04d}")
        return [
            Output(
                collection=VERSIONS,
                draft=draft,
                final=final,
                regions=regions,
                layout=sharding.digest(self.regions),
                bytes=sharding.extent(regions),
                retention=Retention(),
            )  # fmt: skip
            for regions in self.regions
        ]

    def publish(self, step: int, parts: list[np.ndarray], full: set[int] = frozenset()) -> None:
        """`full`: ranks whose disk is full while they write."""
        for rank, (part, output) in enumerate(zip(parts, self.output(step), strict=True)):
            begin = Begin(
                id=f"e0001n{step:04d}", step=step, outputs=[output], small={}, local={},
                loop={"step": step} if rank == 0 else None, about={},
            )  # fmt: skip
            self.disk.left = 0 if rank in full else 2**60

            def lose(begin: Begin, output: Output, cause: str, rank: int = rank) -> None:
                self.disk.left = 2**60  # there is room for a word
                commit.abandon(self.storage, output, rank, cause)
                commit.clear(self.storage, output, self.world)

            writer = Writer(
                begin, self.settings[rank], self.storage, lambda count: None,
                self.keepers[rank].stream, lose,
            )  # fmt: skip
            data = np.zeros(output.bytes, np.uint8)
            data[: part.nbytes] = part.reshape(-1).view(np.uint8)
            writer.window(memoryview(data), 0)
            writer.finish()
            self.disk.left = 2**60
            for kept in writer.outputs:
                self.committers[rank].watch(begin, kept, time.monotonic())

    def settle(self) -> None:
        while any(committer.drafts for committer in self.committers):
            for committer in self.committers:
                committer.look()

    def read(self, path: str) -> np.ndarray:
        with Checkpoint(self.storage, path) as saved:
            saved.verify()
            return saved.whole("model/w")

    @property
    def kept(self) -> dict[int, str]:
        return {catalog.step_of(p): p for p in catalog.committed(self.storage, VERSIONS)}


@contextmanager
def smaller(chunk: int, reach: float) -> Iterator[None]:
    from rft.checkpoint import chunks, rank_files, reader, writer

    patch = pytest.MonkeyPatch()
    for module in (chunks, rank_files, reader, writer, versions):
        patch.setattr(module, "CHUNK", chunk)
    patch.setattr(versions, "REACH", reach)
    try:
        yield
    finally:
        patch.undo()


@settings(max_examples=30, deadline=None)
@given(
    seeds,
    st.integers(1, 3),
    st.integers(1, 90),
    st.sampled_from(sorted(WIDTHS)),
    st.lists(st.sampled_from((0.0, 0.001, 0.02, 0.3, 1.0)), min_size=1, max_size=8),
    st.sampled_from((0.05, 0.3, 9.0)),
    st.sets(st.tuples(st.integers(1, 8), st.integers(0, 2)), max_size=3),
)
def test_what_is_kept_is_what_was_published(
    tmp_path_factory, seed, world, rows, dtype, densities, reach, faults
):
    """Random edits, more of them at some ranks than at others, ranks whose disk is full now and
    then, chains of any length; every version is there bit by bit, or is none, for every rank; also
    when all is gone that it is not made of.
    """
    random = np.random.default_rng(seed)
    with smaller(4096, reach):
        ranks = Ranks(tmp_path_factory.mktemp("v") / "checkpoints", world, rows, dtype)
        kind = f"u{WIDTHS[dtype]}"
        whole = np.frombuffer(random.bytes(world * rows * 64 * WIDTHS[dtype]), kind).copy()
        whole = whole.reshape(world * rows, 64)
        published, few = {}, np.repeat(random.choice((1.0, 0.3), world), rows)[:, None]
        for step, density in enumerate(densities, 1):
            where = random.random(whole.shape) < density * few
            whole[where] += random.integers(1, 4, int(where.sum())).astype(kind)
            published[step] = whole.copy()
            full = {rank for at, rank in faults if at == step and rank < world}
            ranks.publish(step, np.split(whole, world), full)
            if random.random() < 0.7:  # else the next one is written before this one is decided
                ranks.settle()
        ranks.settle()
        kept = ranks.kept
        for step, path in kept.items():
            assert np.array_equal(ranks.read(path), published[step]), f"version {step}"
        hurt = {at for at, rank in faults if rank < world}
        assert not hurt & set(kept)
        if not hurt:
            assert set(kept) == set(published)
        assert not [name for name in ranks.storage.list(VERSIONS) if ".tmp-" in name]
        if kept:
            one = random.choice(sorted(kept))
            entries = catalog.list_entries(ranks.storage, VERSIONS)
            needed = catalog.with_bases([e for e in entries if e.path == kept[one]], entries)
            for path in set(kept.values()) - needed:
                ranks.storage.remove(path)
            assert np.array_equal(ranks.read(kept[one]), published[one])


@pytest.mark.parametrize(
    ("share", "of", "first", "each"),
    [
        (0.01, 1.0, [0, 1, 2, 3, 1], 5),
        (0.0165, 1.0, [0, 1, 2], 3),
        (0.01, 0.02, [0, 1, 2, 3, 1], 30),
    ],
    ids=["any-elements", "more", "the-same-ones"],
)
def test_few_changes_cost_few_bytes_and_a_chain_ends(tmp_path, share, of, first, each):
    """By what lies on disk: a version is made from the one before, then from the last full one, and
    is full where too much will be another than there; where few elements move, and so few ever
    differ, only the first is. `share`: of all elements, moves in a step; `of`: can move at all;
    `first`: bases until the next full one, 0: none; `each`: so many versions have one.
    """
    random, ranks = np.random.default_rng(0), Ranks(tmp_path / "checkpoints", 1, 8192)
    whole = np.frombuffer(random.bytes(8192 * 64 * 2), "u2").copy().reshape(8192, 64)
    movable, published = random.random(whole.shape) < of, {}
    (keeper,) = ranks.keepers
    bases, sizes = [], []
    for step in range(1, 31):
        whole[movable & (random.random(whole.shape) < share / of)] += 1
        published[step] = whole.copy()
        ranks.publish(step, [whole])
        ranks.settle()
        manifest = catalog.read_manifest(ranks.storage, ranks.kept[step])
        bases.append(manifest.base[0] if manifest.base else 0)
        sizes.append(manifest.size)
        reach = keeper.told.sum() / whole.size + versions.LINK * keeper.links
        assert reach < 1.02 * versions.REACH, "as far as the next step can be told"
    full = [step for step, base in enumerate(bases, 1) if not base]
    assert [sizes[step - 1] for step in full] == [whole.nbytes] * len(full)
    assert bases[: len(first)] == first and full == list(range(1, 31, each))
    assert max(size for size in sizes if size < whole.nbytes) < 3 * 0.045 * whole.size
    for step in (5, 13, 30):
        assert np.array_equal(ranks.read(ranks.kept[step]), published[step])


def test_ranks_choose_by_themselves_what_a_version_is_made_from(tmp_path):
    """One whose weights change more than the other's: versions name the newest base, and what is
    kept keeps the others.
    """
    random, ranks = np.random.default_rng(0), Ranks(tmp_path / "checkpoints", 2, 2048)
    whole = np.frombuffer(random.bytes(4096 * 64 * 2), "u2").copy().reshape(4096, 64)
    of_ranks = []
    for step in range(1, 21):
        share = np.repeat((0.01, 0.003), 2048)[:, None]
        whole[random.random(whole.shape) < share] += 1
        ranks.publish(step, np.split(whole, 2))
        ranks.settle()
        path = tmp_path / "checkpoints" / ranks.kept[step]
        receipts = [decode_json((path / receipt_name(n)).read_bytes(), Receipt) for n in (0, 1)]
        of_ranks.append([one.patch.base[0] if one.patch else 0 for one in receipts])
        base = catalog.read_manifest(ranks.storage, ranks.kept[step]).base
        assert (base[0] if base else 0) == max(of_ranks[-1])
    assert [1, 4] in of_ranks, "from the full one at one rank, from the one before at the other"
    assert any(0 in each and max(each) for each in of_ranks), "a full one of one rank alone"
    entries = catalog.list_entries(ranks.storage, VERSIONS)
    for one in expired(entries, Retention(last=1)):
        ranks.storage.remove(one.path)
    assert len(ranks.kept) < 20
    assert np.array_equal(ranks.read(ranks.kept[20]), whole)


@pytest.mark.parametrize("each", [2, 1], ids=["elements", "bytes"])
def test_a_patched_version_goes_into_places_of_any_cut(tmp_path, each):
    """Cut where an element ends, or in the middle of one."""
    random, ranks = np.random.default_rng(0), Ranks(tmp_path / "checkpoints", 1, 640)
    whole = np.frombuffer(random.bytes(640 * 64 * 2), "u2").copy().reshape(640, 64)
    with smaller(16384, 9.0):
        for step in (1, 2, 3):
            whole[random.random(whole.shape) < 0.02] += 1
            ranks.publish(step, [whole])
            ranks.settle()
        with Checkpoint(ranks.storage, ranks.kept[3]) as saved:
            file = next(saved.files())
            cuts = sorted(each * random.choice(file.bytes // each, 40, replace=False))
            places = [memoryview(bytearray(b - a)) for a, b in pairwise([0, *cuts, file.bytes])]
            starts = accumulate(map(len, places), initial=0)
            file.fill(list(zip(starts, places, strict=False)))
    assert b"".join(places)[: whole.nbytes] == whole.tobytes()


def test_a_damaged_base_is_named_and_the_versions_before_it_are_good(tmp_path):
    random, ranks = np.random.default_rng(0), Ranks(tmp_path / "checkpoints", 1, 64)
    whole = np.frombuffer(random.bytes(64 * 64 * 2), "u2").copy().reshape(64, 64)
    before = {}
    for step in (1, 2, 3):
        whole[step, :5] += 1
        before[step] = whole.copy()
        ranks.publish(step, [whole])
        ranks.settle()
    file = tmp_path / "checkpoints" / ranks.kept[2] / "r00000.bin"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert np.array_equal(ranks.read(ranks.kept[1]), before[1])
    for step in (2, 3):
        with pytest.raises(Damaged, match="was changed: chunk 0"):
            ranks.read(ranks.kept[step])
    ranks.storage.remove(ranks.kept[1])
    with pytest.raises(Damaged, match="patch of version 1 .*not there any more"):
        ranks.read(ranks.kept[2])


def test_a_changed_byte_anywhere_gives_the_right_bits_or_none(tmp_path):
    """Of any file of a chain: what does not depend on it is read, nothing else is handed out."""
    random, ranks = np.random.default_rng(0), Ranks(tmp_path / "checkpoints", 2, 40)
    whole = np.frombuffer(random.bytes(80 * 64 * 2), "u2").copy().reshape(80, 64)
    published = {}
    for step in (1, 2, 3, 4):
        whole[random.random(whole.shape) < 0.005] += 1
        published[step] = whole.copy()
        ranks.publish(step, np.split(whole, 2))
        ranks.settle()
    paths = ranks.kept
    files = sorted(path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file())
    files = [path for path in files if path.name != "LATEST"]
    refused = 0
    for _ in range(150):
        file = files[random.integers(len(files))]
        before = file.read_bytes()
        data = bytearray(before)
        at = int(random.integers(len(data)))
        if random.random() < 0.2:
            del data[at:]
        else:
            data[at] ^= 1 << int(random.integers(8))
        file.write_bytes(data)
        for step, path in paths.items():
            try:
                assert np.array_equal(ranks.read(path), published[step])
                assert catalog.step_of(file.parent.name) > step, f"{file} is a part of {path}"
            except (Damaged, Mismatch):
                refused += 1
        file.write_bytes(before)
    assert refused > 150


def test_what_is_kept_keeps_what_it_is_made_of():
    entries = [Entry("a", 1, 1, 9, id="a"), Entry("b", 1, 2, 1, id="b", base=(1, "a"))]
    entries += [Entry("c", 1, 3, 1, id="c", base=(2, "b")), Entry("d", 1, 4, 9, id="d")]
    entries += [Entry("e", 1, 5, 1, id="e", base=(4, "d"))]
    assert [e.path for e in expired(entries, Retention(last=1))] == ["a", "b", "c"]
    assert [e.path for e in expired(entries, Retention(last=1, since=3))] == []
    assert [e.path for e in expired(entries, Retention(last=1, since=4))] == ["a", "b", "c"]
    del entries[1]  # a list that lags: of what "c" is made is not known
    assert [e.path for e in expired(entries, Retention(last=1, since=3))] == []
    assert [e.path for e in expired(entries, Retention(last=1, since=4))] == ["a", "c"]


def test_a_manifest_that_cannot_be_read_for_once_costs_no_version(tmp_path, monkeypatch):
    """What the versions behind it are made of is not known then, so nothing goes."""
    ranks = Ranks(tmp_path / "checkpoints", 1, 640)
    whole = np.zeros((640, 64), "u2")
    for step in range(1, 6):
        whole[step, :5] += 1
        ranks.publish(step, [whole])
        ranks.settle()
    read, broken = ranks.storage.get, [f"{ranks.kept[4]}/MANIFEST.json"]

    def get(path: str) -> bytes:
        if path in broken:
            raise OSError(errno.EIO, "Input/output error", path)
        return read(path)

    monkeypatch.setattr(ranks.storage, "get", get)
    output = structs.replace(ranks.output(6)[0], retention=Retention(last=2, since=5))
    with pytest.raises(OSError, match="Input/output error"):
        ranks.committers[0]._retire(output)
    broken.clear()
    ranks.committers[0]._retire(output)
    assert sorted(ranks.kept) == [1, 2, 3, 4, 5]
    assert np.array_equal(ranks.read(ranks.kept[5]), whole)


def test_chunks_that_change_as_a_whole_make_no_version_a_full_one(tmp_path):
    """They are stored as they are, and whoever reads one needs nothing of its base."""
    with smaller(chunk=4096, reach=versions.REACH):
        random, ranks = np.random.default_rng(0), Ranks(tmp_path / "checkpoints", 1, 1280)
        whole, bases = np.zeros((1280, 64), "u2"), []
        for step in range(1, 13):
            whole[32 * (step % 8) : 32 * (step % 8) + 96] = random.integers(1, 9, (96, 64))
            ranks.publish(step, [whole])
            ranks.settle()
            bases.append(catalog.read_manifest(ranks.storage, ranks.kept[step]).base)
        assert np.array_equal(ranks.read(ranks.kept[12]), whole)
    assert bases.count(None) <= 2, bases


# --- the real agent ------------------------------------------------------------------------------


def weights() -> State:
    torch.manual_seed(0)
    return State(
        {
            "exp_avg/w": torch.zeros(300, 64),
            "model/w": torch.randn(300, 64).to(torch.bfloat16),
        },
        b"x",
    )


def bits(root: Path, path: str) -> torch.Tensor:
    with Checkpoint(open_storage(root), path) as saved:
        saved.verify()
        assert all(key.startswith("model/") for key in saved.tensors)
        return torch.from_numpy(saved.whole("model/w").view("i2")).view(torch.bfloat16)


@pytest.mark.parametrize("full", [True, False], ids=["with-a-checkpoint", "alone"])
def test_an_agent_keeps_every_version(tmp_path: Path, full: bool) -> None:
    root, source, expected = tmp_path / "checkpoints", weights(), {}
    with managed(root, source, config=trainer_config(versions="all")) as manager:
        for step in range(1, 6):
            source.tensors["model/w"][step, ::7] *= 1.01
            expected[step] = source.tensors["model/w"].clone()
            save(manager, step, source, full=full, version=True)
        metrics = manager.metrics()
    storage = open_storage(root)
    paths = catalog.committed(storage, VERSIONS)
    assert paths == [f"versions/v_{step:08d}" for step in range(1, 6)]
    for step, path in enumerate(paths, 1):
        assert torch.equal(bits(root, path), expected[step])
    manifests = [catalog.read_manifest(storage, path) for path in paths]
    assert [m.base and m.base[0] for m in manifests] == [None, 1, 2, 3, 4]
    assert metrics["checkpoint/versions"] == 5 and metrics["checkpoint/versions_lost"] == 0
    assert metrics["checkpoint/versions_bytes"] == sum(m.size for m in manifests)
    assert (load(root, weights()) is not None) == full


def test_an_agent_that_died_begins_with_a_full_version(tmp_path: Path) -> None:
    root, source = tmp_path / "checkpoints", weights()
    with managed(root, source, config=trainer_config(versions="all")) as manager:
        save(manager, 1, source, full=False, version=True)
        source.tensors["model/w"][3] += 1
        save(manager, 2, source, full=False, version=True)
        os.kill(manager._link.pid, signal.SIGKILL)
        source.tensors["model/w"][5] += 1
        save(manager, 3, source, full=False, version=True)
        save(manager, 4, source, full=False, version=True)
    paths = catalog.committed(open_storage(root), VERSIONS)
    manifests = [catalog.read_manifest(open_storage(root), path) for path in paths]
    assert [m.base and m.base[0] for m in manifests] == [None, 1, None, 3]
    assert torch.equal(bits(root, paths[-1]), source.tensors["model/w"])


@pytest.mark.parametrize("slots", [None, 0.0085], ids=["one-window", "windows"])
def test_a_full_disk_costs_versions_and_nothing_else(
    memory_path: Path, slots: float | None
) -> None:
    """Versions leave room for a checkpoint, and begin again, in full, when there is some."""
    root, source = memory_path / "checkpoints", weights()
    hand = Hand(memory_path / "hand")
    if slots:  # of one window each
        source.tensors |= {f"model/{i}": torch.zeros(2**20, dtype=torch.float32) for i in (1, 2)}
    config = trainer_config(versions="all", host_memory_gb=slots)
    heard: list[Report] = []
    with managed(root, source, config=config, agent=hand.command) as manager:
        save(manager, 1, source, version=True)
        manager.hear = heard.append
        # more than a checkpoint takes, and less than it and a version
        hand.set("free", manager._plan.whole.bytes + 1000)
        for step in (2, 3):
            source.fill(step)
            save(manager, step, source, version=True)
            save(manager, step, source, full=False, version=True)  # alone it is no failed save
        hand.clear("free")
        save(manager, 4, source, version=True)
        metrics = manager.metrics()
        assert not manager._link._saves, "what was given up is not told to a later agent"
    hand.close()
    storage = open_storage(root)
    assert [catalog.step_of(path) for path in catalog.committed(storage)] == [1, 2, 3, 4]
    paths = catalog.committed(storage, VERSIONS)
    assert [catalog.step_of(path) for path in paths] == [1, 4]
    assert torch.equal(bits(root, paths[-1]), source.tensors["model/w"])
    assert metrics["checkpoint/versions_lost"] == 4 and metrics["checkpoint/failed"] == 0
    lost = [report for report in heard if isinstance(report, NotKept)]
    assert len(lost) == 4 and all("are left to checkpoints" in report.cause for report in lost)
    assert not [report for report in heard if isinstance(report, SaveFailed)]
    assert not [name for name in storage.list(VERSIONS) if ".tmp-" in name]


def test_a_version_that_is_lost_with_its_checkpoint_is_lost_once(tmp_path: Path) -> None:
    """Its committer and the checkpoint's both say so at rank 0."""
    hand, ranks, config = Hand(tmp_path / "hand"), states.Ranks(2), trainer_config(versions="all")
    agents: list[dict[str, Any]] = [{}, {"agent": hand.command}]
    managers = [
        CheckpointManager(tmp_path / "c", ranks.member(n), config, **agents[n]) for n in (0, 1)
    ]
    heard: list[Report] = []
    managers[0].hear = heard.append
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.start(weights()), managers))
        hand.set("free", 1000)
        list(pool.map(lambda one: one.save(1, weights(), {}, version=True), managers))
        until(lambda: {type(one) for one in heard} == {SaveFailed, NotKept}, "both are told")
        assert [one.metrics()["checkpoint/versions_lost"] for one in managers] == [1, 1]
        for one in managers:
            one.close()
    hand.close()


def test_versions_that_no_data_is_of_go(tmp_path: Path) -> None:
    """Those before the oldest one needed, but for what later ones are made of; two stay anyway."""
    root, source = tmp_path / "checkpoints", weights()
    with managed(root, source, config=trainer_config(versions="needed")) as manager:
        for step, needed, expected in (
            (1, 0, [1]),
            (2, 0, [1, 2]),
            (3, 2, [1, 2, 3]),
            (4, 4, [1, 2, 3, 4]),  # a full one, to which 3 is the last before
            (5, 5, [4, 5]),
            (6, 6, [4, 5, 6]),
        ):
            if step == 4:
                os.kill(manager._link.pid, signal.SIGKILL)
            manager.needed = needed
            source.tensors["model/w"][step, ::7] *= 1.01
            save(manager, step, source, full=False, version=True)
            until(lambda: kept_steps(root) == expected, f"{expected}: {kept_steps(root)}")  # noqa: B023
    assert torch.equal(bits(root, "versions/v_00000006"), source.tensors["model/w"])


def kept_steps(root: Path) -> list[int | None]:
    return [catalog.step_of(path) for path in catalog.committed(open_storage(root), VERSIONS)]


# --- by hand -------------------------------------------------------------------------------------


def stored(directory: Path, versions: list[list[int]]) -> None:
    """A journal with a group for each list, a token of each of its versions."""
    ledger = Ledger(str(directory), 2**20)
    for number, sampled in enumerate(versions):
        spans = [VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(sampled)]
        row = Experience(
            tokens=[1] * (1 + len(spans)),
            prompt_length=1,
            action_mask=[True] * len(spans),
            logprobs=[0.0] * len(spans),
            versions=spans,
        )
        ledger.append(Issued(group=number, explorer="e", task=b"", cursor={}))
        ledger.append(Stored(group=number, experiences=encode([row]), version=min(sampled)))
    ledger.append(Issued(group=number + 1, explorer="e", task=b"", cursor={}, version=9))
    assert ledger.progress.oldest_version() == min(map(min, versions))
    ledger.journal.close()


def test_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ls, show, verify and gc know versions; what stored tokens are of stays, with its bases."""
    root, source, expected = tmp_path / "checkpoints", weights(), {}
    with managed(root, source, config=trainer_config(versions="all")) as manager:
        for step in range(7):
            source.tensors["model/w"][step, ::7] *= 1.01
            expected[step] = source.tensors["model/w"].clone()
            if step == 3:  # as after the death of an agent: a full one
                os.kill(manager._link.pid, signal.SIGKILL)
            save(manager, step, source, full=step == 6, version=True)
    assert ckpt.main(["ls", str(tmp_path)]) == 0
    assert "versions: 0-6; " in (said := capsys.readouterr().out) and "2 of 7 in full" in said
    assert ckpt.main(["show", str(tmp_path), "--version", "2"]) == 0
    assert "what changed since v 1" in capsys.readouterr().out
    assert ckpt.main(["show", str(tmp_path), "--version", "9"]) == 2
    assert "no weights of version 9; kept: 0-6" in capsys.readouterr().err
    stored(tmp_path / "buffer" / "experience_buffer", [[5], [4, 5]])
    assert ckpt.main(["gc", str(tmp_path)]) == 0
    assert "3 stored tokens are of versions 4-5\nto go: 0-2 (3 of 7" in capsys.readouterr().out
    with closing(Ledger(str(tmp_path / "buffer" / "experience_buffer"), 2**20).journal):
        assert ckpt.main(["gc", str(tmp_path), "--remove"]) == 2, "the run has it open"
    assert "is already open in process" in capsys.readouterr().err
    assert ckpt.main(["gc", str(tmp_path), "--remove"]) == 0
    paths = catalog.committed(open_storage(root), VERSIONS)
    assert [catalog.step_of(path) for path in paths] == [3, 4, 5, 6]
    for path in paths:
        assert torch.equal(bits(root, path), expected[catalog.step_of(path)])
    capsys.readouterr()
    assert ckpt.main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("good") == 5
    by_path = [str(root / path) for path in paths]
    assert ckpt.main(["verify", by_path[1]]) == 0 and "good" in capsys.readouterr().out
    assert ckpt.main(["diff", by_path[1], by_path[2]]) == 1
    assert "model/w: " in capsys.readouterr().out
    (file,) = (root / paths[1]).glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    assert ckpt.main(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("DAMAGED") == 3, "it, and what is made of it"
    assert catalog.weights_of(open_storage(root), 6) == "versions/v_00000006"


def test_a_version_is_found_by_its_number_wherever_its_weights_are(tmp_path: Path) -> None:
    """As serving and evaluating do: a patch, then what only engines' saves or checkpoints hold."""
    root, source = tmp_path / "checkpoints", weights()
    with managed(root, source, config=trainer_config(versions="all")) as manager:
        for step in (1, 2, 3):
            source.tensors["model/w"][step] *= 1.01
            save(manager, step, source, full=step == 3, weights=True, version=step < 3)
            if step == 2:
                expected = source.tensors["model/w"].clone()
    (two,) = find(str(root), 2)
    assert torch.equal(bits(root, two.path), expected)
    assert [one.path for one in find(str(root), 1)] == ["versions/v_00000001"]
    assert [one.path for one in find(str(root), 3)] == ["weights/v_00000003"]
    open_storage(root).remove("weights/v_00000003")
    assert [one.path for one in find(str(root), 3)] == ["step_00000003"]

    published: list[Saved] = []

    async def publish(saved: Saved) -> None:
        published.append(saved)

    saved = SavedVersions(str(root), publish, 1.0, version=2)
    assert asyncio.run(saved.first()) == 2
    asyncio.run(saved.follow())  # it is there, and never another one
    assert [one.path for one in published] == ["versions/v_00000002"]
    with pytest.raises(RuntimeError, match="has no weights of version 9"):
        asyncio.run(SavedVersions(str(root), publish, 1.0, version=9).first())
