"""Saved weights as an engine worker and a synchronizer without a trainer find them."""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from msgspec.structs import replace
from safetensors.torch import load_file
from states import State, managed, save

from rft.checkpoint.catalog import read_manifest
from rft.checkpoint.chunks import Range
from rft.checkpoint.rank_files import RankFile
from rft.checkpoint.records import CHUNK
from rft.checkpoint.storage import open_storage
from rft.ground import node_file
from rft.ground.experience import encode
from rft.ground.names import Dims, architecture_of, hf_names, read_hf_config
from rft.ground.rounds import InSave, Round
from rft.sync import stored_versions
from rft.sync.connection import PeerRefused
from rft.sync.plan import Share, needed
from rft.sync.readers import SavedWeights
from rft.sync.stored_versions import Refusal, Saved, SavedVersions, find
from rft.tools.toy import write_model

SHAPE = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64}
# some chunks of 8 MiB, of tensors of 2 MiB
LARGE = {"hidden": 768, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "ffn": 1536}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("saved") / "qwen3", "qwen3", **SHAPE)


def tensors_of(model: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) for name, value in load_file(model / "model.safetensors").items()}


def saved(root: Path, tensors: dict[str, torch.Tensor], *steps: int, epoch: int = 1) -> None:
    """Weights-only saves whose numbers are those of `tensors` plus the step."""
    state = State({f"model/{name}": torch.empty_like(value) for name, value in tensors.items()})
    with managed(root, state, epoch=epoch) as manager:
        for step in steps:
            for name, value in tensors.items():
                state.tensors[f"model/{name}"].copy_(value + step)
            save(manager, step, state, full=False, weights=True)


def round_of(root: Path, step: int) -> Round:
    path = f"weights/v_{step:08d}"
    seal = read_manifest(open_storage(root), path).seal
    return Round(version=step, digest=seal, location=InSave(root=str(root), path=path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_worker_gets_every_tensor_as_it_was_saved(
    model: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    wanted = tensors_of(model, dtype)
    saved(tmp_path / "root", wanted, 3, 4)
    reader = SavedWeights(str(model), torch.device("cpu"))
    for step in (3, 4):
        found = reader.stage(round_of(tmp_path / "root", step))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value + step) for name, value in wanted.items())
    again = reader.stage(round_of(tmp_path / "root", 3))
    assert all(again[name].data_ptr() == found[name].data_ptr() for name in found), (
        "the memory is kept"
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_biases_of_columns_are_read_whole(tmp_path: Path, workers: int) -> None:
    """gpt-oss has them: of the attention's output, and of each expert's."""
    hf = read_hf_config(write_model(tmp_path / "gpt_oss", "gpt_oss", **SHAPE, experts=4))
    shapes = hf_names(Dims.of(hf), architecture_of(hf))
    wanted = {name: torch.rand(shape) for name, shape in shapes.items()}
    saved(tmp_path / "root", wanted, 3)
    for worker in range(workers):
        share = Share(worker=worker, workers=workers, kv_heads=SHAPE["kv_heads"])
        reader = SavedWeights(str(tmp_path / "gpt_oss"), torch.device("cpu"), share)
        staged = reader.stage(round_of(tmp_path / "root", 3))
        biases = [name for name in wanted if name.endswith(("o_proj.bias", "down_proj.bias"))]
        assert len(biases) == 2 * (1 + 4)
        assert all(torch.equal(staged[name], wanted[name] + 3) for name in biases)


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_read_and_hold_their_part(
    model: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, read = tensors_of(model, torch.bfloat16), count_reads(monkeypatch)
    saved(tmp_path / "root", wanted, 3)
    for worker in range(workers):
        share = Share(worker=worker, workers=workers, kv_heads=SHAPE["kv_heads"])
        reader = SavedWeights(str(model), torch.device("cpu"), share)
        read.clear()
        staged = reader.stage(round_of(tmp_path / "root", 3))
        held = asked = 0
        for name, tensor in staged.items():
            dim, start, stop = needed(name, tuple(tensor.shape), share)
            part, same = (one.narrow(dim, start, stop - start) for one in (tensor, wanted[name]))
            assert torch.equal(part, same + 3), name
            held += part.nbytes
            asked += tensor.nbytes if dim else part.nbytes  # a file has whole rows
        assert wanted.keys() - staged.keys() <= {"model.embed_tokens.weight"}, "padding alone"
        assert (reader.size(staged), sum(read)) == (held, asked)
        assert held < 1.2 * sum(value.nbytes for value in wanted.values()) / workers


@pytest.mark.parametrize("common", [True, False])
def test_workers_of_a_node_read_each_byte_once(tmp_path: Path, common: bool) -> None:
    """Two processes, as if of two engines of two workers: together all chunks, none of them twice.
    Without the file that they have in common they read most of it twice.
    """
    model = write_model(tmp_path / "model", "qwen3", **LARGE)
    wanted, root = tensors_of(model, torch.bfloat16), tmp_path / "root"
    saved(root, wanted, 3)
    size = sum(file.stat().st_size for file in (root / "weights/v_00000003").glob("*.bin"))
    assert 4 * CHUNK < size < 1.01 * sum(value.nbytes for value in wanted.values())
    coming, name = round_of(root, 3), "a save"
    with node_file.held(name) as one, node_file.held(name) as other:
        rounds = [
            replace(coming, location=replace(coming.location, node_file=path if common else ""))
            for path in (one, other)
        ]
        command = [sys.executable, str(Path(__file__).with_name("reading_worker.py")), str(model)]
        workers = [
            subprocess.Popen([*command, str(number), encode(one).hex()], stdout=subprocess.PIPE)
            for number, one in enumerate(rounds)
        ]
        told = [json.loads(worker.communicate()[0]) for worker in workers]
    for number, said in enumerate(told):
        share = Share(worker=number, workers=2, kv_heads=LARGE["kv_heads"])
        for key, value in wanted.items():
            dim, start, stop = needed(key, tuple(value.shape), share)
            part = (value + 3).narrow(dim, start, stop - start).contiguous()
            assert said["digests"][key] == xxhash.xxh3_128_hexdigest(
                part.view(torch.int16).numpy()
            ), key
    read = sum(said["read"] for said in told)
    assert read == size if common else read > 1.5 * size


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that are asked of the files of a save, from now on."""
    found: list[int] = []
    fill = RankFile.fill

    def counted(file: RankFile, ranges: list[Range]) -> None:
        found.extend(len(place) for _, place in ranges)
        fill(file, ranges)

    monkeypatch.setattr(RankFile, "fill", counted)
    return found


def test_what_is_not_the_announced_save_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    saved(root, tensors_of(model), 1, 2)
    reader = SavedWeights(str(model), torch.device("cpu"))
    with pytest.raises(
        PeerRefused, match="is save .* of version 2, not the one that was announced as version 2"
    ):
        reader.stage(replace(round_of(root, 2), digest=round_of(root, 1).digest))
    (file,) = (root / "weights" / "v_00000002").glob("*.bin")
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    with pytest.raises(PeerRefused, match=r"v_00000002/r00000.bin was changed: chunk 0"):
        reader.stage(round_of(root, 2))
    gone = round_of(root, 1)
    shutil.rmtree(root / "weights" / "v_00000001")
    with pytest.raises(PeerRefused, match="v_00000001"):
        reader.stage(gone)
    other = write_model(tmp_path / "other", "qwen3", **{**SHAPE, "ffn": 32})
    saved(tmp_path / "another", tensors_of(other), 5)
    with pytest.raises(PeerRefused, match="is of another model"):
        reader.stage(round_of(tmp_path / "another", 5))


class Engines:
    """Take every version but those whose file is damaged."""

    def __init__(self, bad: set[int] = frozenset()):
        self.bad = bad
        self.took: list[tuple[int, int]] = []

    async def publish(self, save: Saved) -> None:
        if save.version in self.bad:
            raise Refusal(f"version {save.version} is damaged")
        self.took.append((save.epoch, save.version))


def looks(root: Path, engines: Engines) -> SavedVersions:
    return SavedVersions(str(root), engines.publish, patience=1.0)


def test_the_newest_version_is_published_once_and_a_bad_one_never(
    model: Path, tmp_path: Path
) -> None:
    root, tensors = tmp_path / "root", tensors_of(model)
    engines = Engines()
    watch = looks(root, engines)
    assert asyncio.run(watch.first()) is None, "nothing is there yet"
    saved(root, tensors, 1, 2)
    assert asyncio.run(watch.look()).version == 2 and asyncio.run(watch.look()) is None
    saved(root, tensors, 3, epoch=2)
    engines.bad = {3}
    assert asyncio.run(watch.look()) is None
    engines.bad = set()
    assert asyncio.run(watch.look()) is None, "it is not tried again"
    saved(root, tensors, 2, epoch=3)
    asyncio.run(watch.look())
    assert engines.took == [(1, 2), (3, 2)], "a trainer that went back is newer"


def test_the_one_before_serves_at_the_start_when_the_newest_is_bad(
    model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    saved(root, tensors_of(model), 1, 2)
    assert [save.version for save in find(str(root))] == [2, 1]
    engines = Engines(bad={2})
    assert asyncio.run(looks(root, engines).first()) == 1 and engines.took == [(1, 1)]
    with pytest.raises(
        RuntimeError, match="none can be served: version 2 is damaged; version 1 is damaged"
    ):
        asyncio.run(looks(root, Engines(bad={1, 2})).first())


def test_a_medium_that_is_silent_for_too_long_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(root: str, version: int | None) -> list[Saved]:
        asked.append(root)
        raise OSError("no route to host")

    asked: list[str] = []
    monkeypatch.setattr(stored_versions, "LOOK_S", 0.0)
    monkeypatch.setattr(stored_versions, "find", silent)
    with pytest.raises(TimeoutError, match="has not answered for 0.05 s: no route to host"):
        asyncio.run(SavedVersions("s3://bucket", Engines().publish, patience=0.05).follow())
    assert len(asked) > 1, "it is asked again before that"


def test_engines_that_take_too_long_are_not_mistaken_for_a_silent_medium(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def late(saved: Saved) -> None:
        raise TimeoutError("engine_0 is staging")

    monkeypatch.setattr(stored_versions, "LOOK_S", 0.0)
    monkeypatch.setattr(
        stored_versions, "find", lambda root, version: [Saved(1, 1, "weights/v_00000001", "seal")]
    )
    with pytest.raises(TimeoutError, match="engine_0 is staging"):
        asyncio.run(SavedVersions("s3://bucket", late, patience=100.0).follow())
