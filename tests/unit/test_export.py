"""The Hugging Face export of a committed checkpoint: the same bytes, all the files, a name only
when it is complete.
"""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made import commit, sources_of, storage_at
from safetensors.torch import load_file

from rft.checkpoint import export
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.reader import Mismatch
from rft.checkpoint.storage import Disk
from rft.tools.toy import write_model

SHAPE = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("export") / "qwen3", "qwen3", tied=True, **SHAPE)


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Path:
    commit(tmp_path, 3, sources_of(model))
    return tmp_path


def run(job: Path, model: Path, target: Path, **more: object) -> bool:
    return export.export(storage_at(job / "checkpoints"), "step_00000003", model, target, **more)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def test_same_tensors_and_all_other_files(job: Path, model: Path) -> None:
    target = job / "huggingface" / "step_00000003"
    assert run(job, model, target)
    found, wanted = tensors_of(target), tensors_of(model)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    kept = {path.name for path in model.iterdir() if path.suffix != ".safetensors"}
    assert {path.name for path in target.iterdir()} == kept | {"model.safetensors"}
    assert all((target / name).read_bytes() == (model / name).read_bytes() for name in kept)
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_in_slabs_and_several_files(
    job: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.slabs, "__defaults__", (1000,))
    heard: list[tuple[int, int]] = []
    target = job / "hf"
    run(
        job, model, target, shard_bytes=30_000, seen=lambda done, total: heard.append((done, total))
    )
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    wanted = tensors_of(model)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(target / file)[name], wanted.pop(name))
    assert not wanted
    assert heard[-1][0] == heard[-1][1] == index["metadata"]["total_size"]
    assert len(heard) > 30, "slab by slab"


def test_transformers_loads_bf16_as_bf16(model: Path, tmp_path: Path) -> None:
    """The source is fp32 and says so; the export says what it holds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    commit(tmp_path, 3, sources_of(model, "bfloat16"))
    target = tmp_path / "hf"
    run(tmp_path, model, target)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    wanted = tensors_of(model)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value.bfloat16()) for name, value in wanted.items())
    assert AutoTokenizer.from_pretrained(target).apply_chat_template(
        [{"role": "user", "content": "1+1="}]
    )


def test_twice_is_once(job: Path, model: Path) -> None:
    target = job / "hf"
    assert run(job, model, target)
    before = (target / "model.safetensors").stat()
    assert not run(job, model, target)
    assert (target / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_a_flipped_bit_leaves_nothing(job: Path, model: Path) -> None:
    file = job / "checkpoints" / "step_00000003" / "r00000.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match=r"r00000\.bin was changed: chunk 0"):
        run(job, model, job / "hf")
    assert not list(job.glob("hf*"))


class Broken(Disk):
    """The last file cannot be made durable."""

    def create(self, path: Path, size: int = 0) -> int:
        descriptor = super().create(path, size)
        self.last = (descriptor, path.suffix)
        return descriptor

    def sync(self, descriptor: int) -> None:
        if self.last == (descriptor, ".safetensors"):
            raise OSError(5, "Input/output error")
        super().sync(descriptor)


def test_a_failing_disk_leaves_nothing(job: Path, model: Path) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        run(job, model, job / "out" / "hf", disk=Broken())
    assert list((job / "out").iterdir()) == []


def test_another_model_is_refused_by_name(job: Path, tmp_path: Path) -> None:
    wide = write_model(tmp_path / "wide", "qwen3", tied=True, **(SHAPE | {"ffn": 96}))
    with pytest.raises(
        Mismatch,
        match=r"6 of another shape, like model\.layers\.0\.mlp\.gate_proj\.weight is \[64, 48\]",
    ):
        run(job, wide, job / "hf")
    untied = write_model(tmp_path / "untied", "qwen3", tied=False, **SHAPE)
    with pytest.raises(Mismatch, match=r"1 tensors missing, .* lm_head\.weight is missing"):
        run(job, untied, job / "hf")


class Recorder(Disk):
    """Remembers the order of what makes things durable."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.paths: dict[int, str] = {}

    def create(self, path: Path, size: int = 0) -> int:
        descriptor = super().create(path, size)
        self.paths[descriptor] = path.name
        return descriptor

    def sync(self, descriptor: int) -> None:
        self.calls.append(f"sync {self.paths[descriptor]}")
        super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        self.calls.append(f"sync {path.name.partition('.tmp-')[0]}/")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.calls.append(f"rename {target.name}")
        super().rename(source, target)


def test_everything_is_durable_before_the_name(job: Path, model: Path) -> None:
    disk = Recorder()
    run(job, model, job / "out" / "hf", disk=disk)
    at = disk.calls.index("rename hf")
    assert {call.removeprefix("sync ") for call in disk.calls[: at - 1]} == {
        p.name for p in (job / "out/hf").iterdir()
    }
    assert disk.calls[at - 1] == "sync hf/"
    assert disk.calls[at + 1 :] == ["sync out/", f"sync {job.name}/"]


class Full(Disk):
    def free_bytes(self, path: Path) -> int:
        return 1000


def test_no_space_is_said_ahead(job: Path, model: Path) -> None:
    with pytest.raises(OSError, match="0.00 GB are free, the export needs"):
        run(job, model, job / "out" / "hf", disk=Full())
    assert list((job / "out").iterdir()) == []


def test_what_a_dead_export_left_goes_and_a_living_one_stays(job: Path, model: Path) -> None:
    import fcntl

    dead, living = job / "hf.tmp-0123", job / "hf.tmp-4567"
    for path in (dead, living):
        path.mkdir()
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    run(job, model, job / "hf")
    os.close(descriptor)
    assert living.exists() and not dead.exists()


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "rft.checkpoint.export", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True)


def test_as_a_command(job: Path, model: Path) -> None:
    checkpoint = job / "checkpoints" / "step_00000003"
    made = command(checkpoint, model, job / "hf")
    assert made.returncode == 0 and len(made.stdout) >= len(
        load_file(job / "hf" / "model.safetensors")
    )
    assert made.stdout.strip() == "", "empty lines tell the agent that it goes on"
    assert (job / "hf" / "model.safetensors").exists()
    for arguments, words in (
        ((checkpoint.with_name("step_00000004"), model, job / "no"), "step_00000004/MANIFEST.json"),
        ((checkpoint, job, job / "no"), "cannot read config.json"),
        ((checkpoint, model, job / "hf" / "config.json" / "no"), "File exists"),
    ):
        done = command(*arguments)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and words in done.stderr
    assert command(checkpoint).returncode == 2


def test_it_dies_with_the_agent(job: Path, tmp_path: Path) -> None:
    """The export waits for its config.json, a pipe that nobody writes, when the process that
    started it is killed.
    """
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "config.json")
    words = [
        sys.executable,
        "-m",
        "rft.checkpoint.export",
        str(job / "checkpoints/step_00000003"),
        str(source),
        str(job / "hf"),
    ]
    starter = (
        f"import subprocess; p = subprocess.Popen({words!r}); print(p.pid, flush=True); p.wait()"
    )
    agent = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    export_process = os.pidfd_open(int(agent.stdout.readline()))
    pipe = os.open(source / "config.json", os.O_WRONLY)  # returns when the export has come so far
    try:
        agent.kill()
        agent.wait()
        ended, _, _ = select.select([export_process], [], [], 20)
        assert ended, "still there"
    finally:
        os.close(pipe)
        os.close(export_process)
        agent.stdout.close()


def test_no_torch() -> None:
    code = (
        "import sys, rft.checkpoint.export; sys.exit('torch' in sys.modules or 'transformers' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
