"""Checkpoints in an object store: a real S3 server on loopback, a network between that misbehaves,
and the rules of `ObjectStorage` over memory://. `bench.store_faults` draws faults by seed.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from states import PATIENCE, OneRank, equal, every_kind, plain, save, trainer_config, until

from bench.faults.proxy import CALM, Network, Plan
from rft.checkpoint import catalog, restore
from rft.checkpoint.catalog import committed
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.objects import NEVER, ObjectStorage
from rft.checkpoint.rank_files import patiently
from rft.checkpoint.records import QUARANTINED, encode_json
from rft.checkpoint.storage import open_storage
from rft.config import ConfigError
from tests.unit.test_config import grpo


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
def s3(network: Network) -> Iterator[Any]:
    """A client that goes past the network, and what tells other ones of it."""
    told = {
        "AWS_ENDPOINT_URL": network.address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in told.items():
            patch.setenv(key, value)
        import boto3

        client = boto3.client("s3", endpoint_url=network.store)
        client.create_bucket(Bucket="checkpoints")
        yield client


@pytest.fixture
def bucket(s3: Any, network: Network) -> Iterator[str]:
    network.plan(CALM)
    yield "s3://checkpoints"
    network.plan(CALM)


def manager(url: str, control: Path, epoch: int = 1, **config: object) -> CheckpointManager:
    return CheckpointManager(
        url,
        OneRank(),
        trainer_config(**config),
        control=control,
        epoch=epoch,
        log_dir=control.parent,
    )


def test_the_whole_way_through_an_object_store(
    bucket: str, network: Network, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", network.store)  # of the agents
    url, control, state = f"{bucket}/job", memory_path / "control", every_kind()
    first = manager(url, control, max_checkpoints_to_keep=2)
    assert first.load(every_kind()) is None
    first.start(state)
    for step in (1, 2):
        save(first, step, state.fill(step), weights=step == 2)
    first.save(3, state.fill(3), {"seen": 3})
    first.before_update()
    os.kill(first._link.pid, signal.SIGKILL)
    first.wait(3)
    until(lambda: first.metrics()["checkpoint/agent_deaths"] == 1, "the death is counted")
    storage = open_storage(url)
    until(lambda: len(committed(storage)) == 2, "retention")
    assert committed(storage, "weights") == ["weights/v_00000002.e0001n0001"]
    first.close(PATIENCE)

    found = every_kind()
    assert manager(url, control, 2).load(found) == {"seen": 3, "step": 3} and equal(found, state)
    storage.put(
        "step_00000003.e0001n0002/r00000.bin",
        b"?" * storage.size("step_00000003.e0001n0002/r00000.bin"),
    )
    assert manager(url, control, 3).load(found) == {"seen": 2, "step": 2} and equal(
        found, every_kind().fill(2)
    )
    assert committed(storage) == ["step_00000002.e0001n0001"]
    assert QUARANTINED in storage.list("step_00000003.e0001n0002")
    storage.discard("step_00000002.e0001n0001/r00000.bin")
    with pytest.raises(FileNotFoundError, match="no good one is left"):
        manager(url, control, 4).load(found)


def test_an_object_that_was_cut_short_ends_there(bucket: str) -> None:
    """S3 refuses a range that begins at the end; that is content, and no failure of the medium."""
    storage = open_storage(f"{bucket}/short")
    storage.put("x", b"0123")
    assert storage.open("x").read(2, 10) == b"23" and storage.open("x").read(4, 10) == b""
    with pytest.raises(FileNotFoundError):
        storage.open("y").read(0, 1)


def test_a_bucket_that_is_not_there_is_refused_at_the_start(bucket: str, memory_path: Path) -> None:
    with pytest.raises(OSError):
        manager("s3://nowhere/job", memory_path / "control").start(plain())


def test_a_store_that_does_not_answer_is_an_os_error(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(OSError):
        ObjectStorage("s3://checkpoints/job").get("LATEST")
    s3fs.S3FileSystem.clear_instance_cache()


PLACE, DATA = "step_00000001.e0001n0000", f"{'step_00000001.e0001n0000'}/r00000.bin"
PART = 300  # bytes; this server takes parts from 256 on


def parts_up(network: Network, act: Any) -> int:
    """How many requests `act` makes."""
    network.plan(CALM)
    act()
    return int(network.plan(CALM)["count"])


def uploads(s3: Any) -> list[str]:
    return [
        one["Key"] for one in s3.list_multipart_uploads(Bucket="checkpoints").get("Uploads", [])
    ]


def test_an_upload_goes_on_where_an_agent_that_died_has_stopped(
    bucket: str, network: Network, s3: Any
) -> None:
    storage, data = ObjectStorage(f"{bucket}/again", part=PART), os.urandom(5 * PART + 7)
    storage.create(DATA, len(data)).write(memoryview(data)[: 4 * PART])  # and nobody closes it
    assert uploads(s3) == [f"again/{DATA}"]
    sink = ObjectStorage(f"{bucket}/again", part=PART).create(DATA, len(data))
    sink.write(memoryview(data)[:PART])
    more = parts_up(network, lambda: sink.write(memoryview(data)[PART : 4 * PART]))
    sink.write(memoryview(data)[4 * PART :])
    sink.close()
    assert more == 0 and storage.get(DATA) == data and uploads(s3) == []


def test_of_an_upload_that_was_left_only_equal_bytes_are_taken(bucket: str) -> None:
    storage, data = ObjectStorage(f"{bucket}/other", part=PART), os.urandom(4 * PART)
    storage.create(DATA, len(data)).write(memoryview(os.urandom(PART) + data[PART : 3 * PART]))
    sink = storage.create(DATA, len(data))
    sink.write(memoryview(data))
    sink.close()
    assert storage.get(DATA) == data


def test_uploads_that_nobody_goes_on_with_are_ended_at_the_next_start(bucket: str, s3: Any) -> None:
    storage = ObjectStorage(f"{bucket}/orphans", part=PART)
    for path in (DATA, "weights/v_00000002.e0001n0001/r00000.bin", "mine/r00000.bin"):
        storage.create(path, 3 * PART).write(memoryview(bytes(2 * PART)))
    restore.sweep(storage)
    assert uploads(s3) == ["orphans/mine/r00000.bin"]  # not a name that `draft` makes
    s3.abort_multipart_upload(
        Bucket="checkpoints",
        Key="orphans/mine/r00000.bin",
        UploadId=s3.list_multipart_uploads(Bucket="checkpoints")["Uploads"][0]["UploadId"],
    )


@pytest.mark.parametrize("kind", ["lost answer", "500 done", "twice", "again later"])
def test_what_was_done_and_not_heard_of_is_not_done_again(
    bucket: str, network: Network, kind: str
) -> None:
    """What is asked again, by the client or by who uses it, finds it done."""
    storage, data = ObjectStorage(f"{bucket}/{kind[:2]}", part=PART), os.urandom(3 * PART)
    network.plan(Plan(rate=0.4, seed=3, kinds=(kind,)))
    sink = storage.create(DATA, len(data))
    sink.write(memoryview(data))
    sink.close()
    patiently("a put", lambda: storage.put(f"{PLACE}/MANIFEST.json", b"one"), PATIENCE)
    assert network.plan(CALM)["met"] and storage.get(DATA) == data
    with pytest.raises(FileExistsError):
        storage.put(f"{PLACE}/MANIFEST.json", b"another")


def test_what_a_listing_does_not_show_yet_is_found_by_its_name(
    bucket: str, network: Network
) -> None:
    storage = ObjectStorage(f"{bucket}/late")
    network.plan(Plan(lags=True))
    storage.put(f"{PLACE}/MANIFEST.json", b"{}")
    storage.put("LATEST", encode_json(catalog.Hint(name=PLACE, epoch=1, step=1)))
    assert storage._names("") == set() and storage._names(PLACE) == set()
    assert committed(storage) == [PLACE] and "LATEST" in storage.list()
    assert storage.leftovers("") == []


def test_a_store_that_ignores_the_condition_is_found_by_two_puts(
    bucket: str, network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    assert ObjectStorage(f"{bucket}/kept").is_conditional
    network.plan(Plan(ignores=True))
    storage = ObjectStorage(f"{bucket}/ignored")
    storage.prepare()
    assert not storage.is_conditional and "ignores If-None-Match" in caplog.text
    storage.put(DATA, b"")
    storage.remove_draft(PLACE)
    assert storage.list() == []


@pytest.mark.parametrize(
    ("storage", "environment", "plan", "said"),
    [
        ("s3://nowhere/x", {}, CALM, "bucket does not exist; make the bucket"),
        (
            "s3://checkpoints/x",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            CALM,
            "Unable to locate credentials; give credentials",
        ),
        (
            "s3://checkpoints/x",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            CALM,
            "AWS_ENDPOINT_URL",
        ),
        ("s3://checkpoints/x", {}, Plan(ignores=True), "unconditional_store=accept"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(
    bucket: str,
    network: Network,
    assets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: str,
    environment: dict[str, str],
    plan: Plan,
    said: str,
) -> None:
    import s3fs

    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    network.plan(plan)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError) as refused:
        grpo(assets, tmp_path, f"trainer.checkpoint.storage={storage}")
    s3fs.S3FileSystem.clear_instance_cache()
    assert f"trainer.checkpoint.storage={storage}: " in str(refused.value)
    assert said in str(refused.value)


def test_a_store_without_the_condition_may_be_accepted(
    bucket: str, network: Network, assets: Path, tmp_path: Path
) -> None:
    network.plan(Plan(ignores=True))
    accepted = "trainer.checkpoint.unconditional_store=accept"
    grpo(assets, tmp_path, f"trainer.checkpoint.storage={bucket}/x", accepted)


@pytest.fixture(scope="module")
def faults() -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.store_faults", "--quick", "--seed", "49"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_kill_and_no_cut_loses_a_checkpoint_or_leaves_an_orphan(faults: dict[str, Any]) -> None:
    counts = faults["counts"]
    assert counts["kills_and_cuts"] >= 4 and faults["meets"]
    assert (counts["accepted_wrong"], counts["lost"], counts["other"]) == (0, 0, 0)


@pytest.fixture
def store() -> Iterator[ObjectStorage]:
    found = ObjectStorage("memory://job")
    yield found
    found._fs.store.clear()


def test_a_manifest_is_never_put_over_another(store: ObjectStorage) -> None:
    store.put("step_00000001.e0001n0000/MANIFEST.json", b"one")
    store.put("step_00000001.e0001n0000/MANIFEST.json", b"one")
    with pytest.raises(FileExistsError):
        store.put("step_00000001.e0001n0000/MANIFEST.json", b"another")


def test_a_draft_whose_data_was_swept_is_not_published(store: ObjectStorage) -> None:
    place = "step_00000001.e0001n0000"
    store.put(f"{place}/MANIFEST.json", b"one")
    with pytest.raises(FileNotFoundError):
        store.publish(place, "step_00000001")
    assert committed(store) == []


class Interrupted(ObjectStorage):
    """Dies before it deletes."""

    def _delete(self, path: str) -> None: ...


def test_of_a_sweep_and_a_commit_the_first_has_the_draft(store: ObjectStorage) -> None:
    """The manifest's name is put once: by the agent, or by who sweeps."""
    place = "step_00000001.e0001n0000"
    store.put(f"{place}/r00000.json", b"")
    manifest = b'{"receipts": {"r00000.json": ""}}'
    Interrupted(store.where).remove_draft(place)
    with pytest.raises(FileNotFoundError, match="was removed"):
        store.put(f"{place}/MANIFEST.json", manifest)
    assert committed(store) == [] and store.leftovers("") == [place]
    store.remove_draft(place)
    assert store.list() == []
    store.put(f"{place}/r00000.json", b"")
    store.put(f"{place}/MANIFEST.json", manifest)
    store.remove_draft(place)
    assert committed(store) == [place] and store.list(place) == ["MANIFEST.json", "r00000.json"]


def test_a_manifest_alone_is_swept_and_a_damaged_one_is_not(store: ObjectStorage) -> None:
    """An agent may put one a moment after a sweep, and die before it looks."""
    store.put("step_00000001.e0001n0000/MANIFEST.json", b'{"receipts": {"r00000.json": ""}}')
    store.put("step_00000002.e0001n0001/MANIFEST.json", b"")
    store.put("step_00000003.e0001n0002/MANIFEST.json", NEVER)  # of a removal, sent twice
    store.put("LATEST", b"[" * 100_000)
    assert committed(store)[-1] == "step_00000002.e0001n0001"
    restore.sweep(store)
    assert store.list() == ["LATEST", "step_00000002.e0001n0001"]


def test_only_our_drafts_without_manifest_are_swept(store: ObjectStorage) -> None:
    for name in (
        "step_00000001.e0001n0000/r00000.bin",
        "step_00000002.e0001n0001/MANIFEST.json",
        "step_00000003/mine",
        "step_00000004.e0001n0002/QUARANTINED",
        "weights/v_00000001.e0001n0000/r00000.bin",
        "notes",
    ):
        store.put(name, b"")
    restore.sweep(store)
    assert store.list() == [
        "notes",
        "step_00000002.e0001n0001",
        "step_00000003",
        "step_00000004.e0001n0002",
    ]
    assert store.list("weights") == []


def test_of_versions_that_are_whole_none_is_asked_for_when_a_run_starts(
    store: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        save = f"versions/v_{number:08d}.e0001n{number:04d}"
        store.put(f"{save}/r00000.json", b"{}")
        if number != 2:
            store.put(f"{save}/MANIFEST.json", b'{"receipts": {"r00000.json": ""}}')
    store.put("versions/v_00000004.e0001n0004/SWEPT", b"")
    asked, real = list[str](), store._names
    monkeypatch.setattr(store, "_names", lambda path: asked.append(path) or real(path))
    left = [f"versions/v_{number:08d}.e0001n{number:04d}" for number in (2, 4)]
    assert store.leftovers("versions") == left and sorted(asked) == ["versions", *left]
    assert store.leftovers("weights") == []


def test_a_checkpoint_that_has_lost_its_manifest_is_no_draft_where_latest_names_it(
    store: ObjectStorage, caplog: pytest.LogCaptureFixture
) -> None:
    name = "step_00000002.e0001n0001"
    store.put("LATEST", encode_json(catalog.Hint(name=name, epoch=1, step=2)))
    store.put(f"{name}/r00000.bin", b"")
    restore.sweep(store)
    assert catalog.lost(store) == [name]
    with pytest.raises(FileNotFoundError, match=f"{name}/MANIFEST.json is missing"):
        restore.load(store, OneRank(), plain(), None, 0.0)
    assert catalog.lost(store) == [] and store.list(name) == ["QUARANTINED", "r00000.bin"]


def test_an_upload_that_is_given_up_leaves_no_object(store: ObjectStorage) -> None:
    sink = store.create("step_00000001.e0001n0000/r00000.bin", 3)
    sink.write(memoryview(b"abc"))
    sink.abort()
    assert store.list("step_00000001.e0001n0000") == []
    sink = store.create("step_00000001.e0001n0000/r00000.bin", 3)
    sink.write(memoryview(b"abc"))
    sink.close()
    assert store.get("step_00000001.e0001n0000/r00000.bin") == b"abc"


def test_ranges_are_read(store: ObjectStorage) -> None:
    store.put("x", bytes(range(10)))
    file, places = store.open("x"), [bytearray(2), bytearray(5)]
    assert file.read(4, 3) == bytes((4, 5, 6))
    assert file.read_into(5, [*map(memoryview, places)]) == 5
    assert places == [bytes((5, 6)), bytes((7, 8, 9, 0, 0))]
