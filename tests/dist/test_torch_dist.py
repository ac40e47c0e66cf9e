"""Megatron's own checkpoints: what it wrote we read, what we write it reads, at another
tensor-parallel size.
"""

import io
import pickle
import shutil
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.planner import WriteItemType
from torch_dist_jobs import digest

from rft.ground.names import Dims, architecture_of, read_hf_config
from rft.tools import torch_dist
from rft.tools.torch_dist import TorchDist, TorchDistError
from rft.tools.toy import write_model

from ranks import Ranks

SMALL = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
FAMILIES = {"llama": False, "qwen2": True, "qwen3": True}  # tied?


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("torch_dist")
    return {
        name: write_model(root / name, name, tied=tied, **SMALL) for name, tied in FAMILIES.items()
    }


def opened(model: Path, directory: Path) -> TorchDist:
    hf = read_hf_config(model)
    return TorchDist(directory, Dims.of(hf), architecture_of(hf))


@pytest.mark.parametrize(
    ("family", "tp", "dtype"), [("llama", 2, "bf16"), ("qwen2", 1, "fp32"), ("qwen3", 2, "fp32")]
)
def test_reads_what_megatron_wrote(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, family: str, tp: int, dtype: str
) -> None:
    job = "torch_dist_jobs:saved"
    wanted = ranks.run(
        job, tp, path=str(models[family]), root=str(tmp_path / "m"), tp=tp, dtype=dtype
    )[0]["weights"]
    found = opened(models[family], tmp_path / "m")
    assert (found.kinds, found.iteration) == (["model"], 7)
    assert set(found.names) == set(wanted)
    for name in found.names:
        assert digest(found.tensor("model", name)) == digest(wanted[name]), name


def test_reads_masters_and_moments(ranks: Ranks, models: dict[str, Path], tmp_path: Path) -> None:
    arguments = {
        "path": str(models["llama"]),
        "root": str(tmp_path / "m"),
        "optimizer": True,
        "dtype": "bf16",
    }
    wanted = ranks.run("torch_dist_jobs:saved", 1, **arguments)[0]
    found = opened(models["llama"], tmp_path / "m")
    assert sorted(found.kinds) == ["exp_avg", "exp_avg_sq", "master", "model"]
    assert found.updates == 1
    moved = 0
    for key, offset, shape, flat, value in wanted["pieces"]:
        kind, _, name = key.partition("/")
        whole = found.tensor(kind, name)
        box = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].reshape(-1)
        assert torch.equal(box[slice(*flat)], value.reshape(-1)), key
        moved += int(value.abs().sum() > 0)
    assert moved > len(wanted["pieces"]) / 2, "a step was made"


@pytest.mark.parametrize(("family", "tp"), [("llama", 2), ("qwen2", 2), ("qwen3", 1)])
def test_megatron_reads_what_we_write(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, family: str, tp: int
) -> None:
    hf = read_hf_config(models[family])
    weights = {
        k: v + 1
        for file in models[family].glob("*.safetensors")
        for k, v in load_file(file).items()
    }
    written = tmp_path / "m"
    written.mkdir()
    torch_dist.write(written, Dims.of(hf), architecture_of(hf), weights.__getitem__, 12)
    found = ranks.run(
        "torch_dist_jobs:loaded", tp, path=str(models[family]), root=str(written), tp=tp
    )[0]
    assert found.pop("iteration") == 12
    assert found == {name: digest(value) for name, value in weights.items() if name in found}
    again = opened(models[family], written)
    assert set(found) == set(again.names)
    assert all(torch.equal(again.tensor("model", name), weights[name]) for name in again.names)


@pytest.fixture
def written(models: dict[str, Path], tmp_path: Path) -> Path:
    hf = read_hf_config(models["qwen3"])
    weights = {
        k: v for file in models["qwen3"].glob("*.safetensors") for k, v in load_file(file).items()
    }
    (tmp_path / "m").mkdir()
    torch_dist.write(tmp_path / "m", Dims.of(hf), architecture_of(hf), weights.__getitem__, 12)
    return tmp_path / "m"


class Bomb:
    """Unpickled by an ordinary unpickler it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_pickle_runs_code(models: dict[str, Path], written: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb works"
    mark.unlink()
    torch.save({"iteration": 3, "args": Bomb(mark)}, written / "common.pt")
    assert opened(models["qwen3"], written).iteration == 3
    (written / ".metadata").write_bytes(pickle.dumps({"a": Bomb(mark)}))
    with pytest.raises(TorchDistError, match="has no place in a checkpoint's index"):
        opened(models["qwen3"], written)
    assert not mark.exists()


class Named:
    """A member of an enumeration, as Python 3.11.2 pickles one."""

    def __init__(self, kind: Any, name: str):
        self.kind, self.name = kind, name

    def __reduce__(self) -> Any:
        return getattr, (self.kind, self.name)


def test_an_index_of_an_older_python_is_read_and_no_other_attribute() -> None:
    def read(kind: Any, name: str) -> Any:
        return torch_dist.IndexUnpickler(io.BytesIO(pickle.dumps(Named(kind, name)))).load()

    assert read(WriteItemType, "TENSOR") is WriteItemType.TENSOR
    for kind, name in ((OrderedDict, "fromkeys"), (WriteItemType, "__class__")):
        with pytest.raises(pickle.UnpicklingError, match="has no place in a checkpoint's index"):
            read(kind, name)


class Program(torch.nn.Module):
    """Scripted and saved; loaded by torch.jit.load it writes a file that its weights name."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = str(path)

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        written = torch.from_file(state[0], True, 8, dtype=torch.uint8).fill_(65)
        assert int(written[0]) == 65  # what nothing looks at is optimized away


def test_no_torchscript_program_is_run(
    models: dict[str, Path], written: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(Program(mark)), program)
    mark.unlink(missing_ok=True)
    torch.jit.load(io.BytesIO(program.getvalue()))
    assert mark.read_bytes() == b"A" * 8, "the program works"
    mark.unlink()
    good = (written / "common.pt").read_bytes()
    (written / "common.pt").write_bytes(program.getvalue())
    with pytest.raises(TorchDistError, match=r"common\.pt is a TorchScript program"):
        opened(models["qwen3"], written)
    (written / "common.pt").write_bytes(good)
    found = opened(models["qwen3"], written)
    place = found._places["decoder.final_layernorm.weight", (0,)]
    chunks = written / place.relative_path
    chunks.write_bytes(chunks.read_bytes()[: place.offset] + program.getvalue())
    place.length = len(program.getvalue())
    with pytest.raises(TorchDistError, match="TorchScript"):
        found.tensor("model", "model.norm.weight")
    assert not mark.exists()


def test_a_tar_of_the_oldest_torch_is_refused(models: dict[str, Path], written: Path) -> None:
    with tarfile.open(written / "common.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"), io.BytesIO())
    with pytest.raises(TorchDistError, match=r"common\.pt cannot be read: File is not a zip file"):
        opened(models["qwen3"], written)


def test_bad_input_is_named(models: dict[str, Path], written: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TorchDistError,
        match=r"model of decoder\.layers\.0\.self_attention\.q_layernorm\.weight is missing",
    ):
        opened(models["qwen3"], strip(written, tmp_path / "less", "q_layernorm"))
    wide = write_model(tmp_path / "wide", "qwen3", tied=True, **(SMALL | {"ffn": 96}))
    with pytest.raises(
        TorchDistError, match=r"linear_fc1\.weight is \[128, 48\], config\.json says \[192, 48\]"
    ):
        opened(wide, written)
    found = opened(models["qwen3"], written)
    (written / "__0_0.distcp").write_bytes((written / "__0_0.distcp").read_bytes()[:1000])
    with pytest.raises(TorchDistError, match=r"__0_0\.distcp: the chunk of .* cannot be read"):
        found.tensor("model", "model.norm.weight")
    (written / "metadata.json").unlink()
    with pytest.raises(TorchDistError, match="no complete torch_dist checkpoint"):
        opened(models["qwen3"], written)


def strip(source: Path, target: Path, word: str) -> Path:
    """A copy whose index does not know the tensors with `word` in their names."""
    shutil.copytree(source, target)
    index = pickle.loads((source / ".metadata").read_bytes())
    index.state_dict_metadata = {
        k: v for k, v in index.state_dict_metadata.items() if word not in k
    }
    (target / ".metadata").write_bytes(pickle.dumps(index))
    return target
