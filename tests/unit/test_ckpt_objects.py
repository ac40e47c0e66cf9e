"""Checkpoints in an object store: a real S3 server on loopback, and the rules of `ObjectStorage`
over memory://.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from states import PATIENCE, OneRank, equal, every_kind, plain, save, trainer_config, until

from rft.checkpoint import catalog, restore
from rft.checkpoint.catalog import committed
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.objects import ObjectStorage
from rft.checkpoint.records import QUARANTINED, encode_json
from rft.checkpoint.storage import open_storage, read_at


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in told.items():
            patch.setenv(key, value)
        import boto3

        boto3.client("s3").create_bucket(Bucket="checkpoints")
        yield "s3://checkpoints"
    server.stop()


def manager(url: str, control: Path, epoch: int = 1, **config: object) -> CheckpointManager:
    return CheckpointManager(
        url,
        OneRank(),
        trainer_config(**config),
        control=control,
        epoch=epoch,
        log_dir=control.parent,
    )


def test_the_whole_way_through_an_object_store(bucket: str, memory_path: Path) -> None:
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
    assert read_at(storage.open("x"), 2, 10) == b"23" and read_at(storage.open("x"), 4, 10) == b""
    with pytest.raises(FileNotFoundError):
        read_at(storage.open("y"), 0, 1)


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
    file = store.open("x")
    file.seek(4)
    assert file.read(3) == bytes((4, 5, 6)) and file.read(2) == bytes((7, 8))
