"""Checkpoints from and to other formats: Hugging Face directories and Megatron's `torch_dist`.

In: a committed checkpoint, or a directory of the other format. Out: a directory that gets its name
when it is complete, or a committed checkpoint that a run of the same model resumes from. One tensor
in memory at a time.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from rft.checkpoint import catalog, fence
from rft.checkpoint import export as hf_export
from rft.checkpoint.reader import Checkpoint
from rft.checkpoint.sharding import MODEL
from rft.checkpoint.single import TensorSource, write
from rft.checkpoint.storage import Disk, open_storage
from rft.ground.names import Dims, ShardSlice, architecture_of, hf_names, read_hf_config
from rft.tools import torch_dist
from rft.tools.places import InputError, Run

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STATE = ("master", "exp_avg", "exp_avg_sq")


def to_hf(run: Run, name: str, model: str | None, target: Path, progress: Progress) -> bool:
    """False if `target` is there already."""
    source = _model_of(run, name, model)
    told = 0
    with progress(f"{name} to Hugging Face", _weight_bytes(run, name)) as seen:

        def hear(done: int, total: int) -> None:
            nonlocal told
            seen(done - told)
            told = done

        return hf_export.export(run.storage, name, source, target, seen=hear)


def to_torch_dist(run: Run, name: str, model: str | None, target: Path, progress: Progress) -> bool:
    """Weights alone: moments are not written. False if `target` is there already."""
    if target.exists():
        return False
    hf = read_hf_config(_model_of(run, name, model))
    disk = Disk()
    with (
        Checkpoint(run.storage, name) as checkpoint,
        progress(f"{name} to torch_dist", _weight_bytes(run, name)) as seen,
    ):
        if checkpoint.manifest.about.get("adapter"):
            raise InputError(f"{run.where}/{name} holds an adapter (LoRA) only: export it --to hf")
        hf_export.plan(checkpoint, hf)
        with hf_export.draft_of(target, disk) as draft:
            torch_dist.write(
                draft,
                Dims.of(hf),
                architecture_of(hf),
                lambda tensor: whole(checkpoint, MODEL + tensor),
                checkpoint.manifest.step,
                seen,
            )
            hf_export.publish(draft, target, disk)
    return True


def is_export(target: Path) -> bool:
    """Whether a model lies there, of either format."""
    return (target / "config.json").is_file() or torch_dist.is_torch_dist(target)


def whole(checkpoint: Checkpoint, key: str) -> Tensor:
    """A tensor of the checkpoint as torch knows it."""
    dtype, shape = checkpoint.tensors[key]
    return (
        torch.from_numpy(checkpoint.whole(key).reshape(-1).view(np.uint8))
        .view(getattr(torch, dtype))
        .reshape(shape)
    )


def _model_of(run: Run, name: str, model: str | None) -> Path:
    """The Hugging Face directory that the run began with."""
    given = model or catalog.read_manifest(run.storage, name).about.get("model")
    if not given:
        raise InputError(
            f"{run.where}/{name} does not say which model it is of; give --model DIRECTORY"
        )
    path = Path(given)
    if not (path / "config.json").is_file():
        raise InputError(
            f"the model's directory {path} has no config.json (any more); give --model DIRECTORY"
        )
    return path


def _weight_bytes(run: Run, name: str) -> int:
    with Checkpoint(run.storage, name) as checkpoint:
        return sum(
            r.bytes
            for receipt in checkpoint.receipts
            for r in receipt.regions
            if r.key.startswith(MODEL)
        )


# --- import ---------------------------------------------------------------------------------------


class Given:
    """What is imported:

    HF tensors by kind and name. `updates`: of Adam; 0 where there are no moments.
    """

    def __init__(self, source: Path, hf: dict[str, Any]):
        self.updates = 0
        self.kinds = ["model"]
        self._read: Callable[[str, str], Tensor]
        if torch_dist.is_torch_dist(source):
            found = torch_dist.TorchDist(source, Dims.of(hf), architecture_of(hf))
            self.kinds, self.updates = found.kinds, found.updates or 0
            self.names, self.dtype, self._read = found.names, found.dtype(), found.tensor
        elif (source / "config.json").is_file():
            reader = _hf_reader(source, hf)
            self.names = hf_names(Dims.of(hf), architecture_of(hf))
            self._read = lambda kind, name: reader.read(
                name, ShardSlice(0, 0, 0, self.names[name][0], 0)
            )
            self.dtype = self._read("model", next(iter(self.names))).dtype
        else:
            raise InputError(
                f"{source} is neither a torch_dist checkpoint nor a Hugging Face model directory"
            )

    def tensor(self, kind: str, name: str) -> Tensor:
        """Masters that are not there are the weights, moments that are not there 0."""
        if kind in self.kinds:
            return self._read(kind, name)
        if kind == "master":
            return self._read("model", name).float()
        return torch.zeros(self.names[name])

    def sources(self, dtype: torch.dtype) -> Iterator[TensorSource]:
        kinds = ["model", *STATE] if dtype == torch.bfloat16 else ["model", *STATE[1:]]
        for kind in kinds:
            stored = dtype if kind == "model" else torch.float32
            for name, shape in self.names.items():
                # fp32 runs update the parameter itself: the master that a bf16 run left is the
                # better start
                read = (
                    "master"
                    if kind == "model" and dtype == torch.float32 and "master" in self.kinds
                    else kind
                )
                yield self._source(f"{kind}/{name}", read, name, shape, stored)

    def _source(
        self, key: str, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> TensorSource:
        def parts() -> Iterator[np.ndarray]:
            yield (
                self.tensor(kind, name).to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
            )

        return TensorSource(key, str(dtype).removeprefix("torch."), shape, parts)


def _hf_reader(source: Path, hf: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        # megatron tells on import which GPU libraries are not there
        warnings.simplefilter("ignore")
        from rft.megatron.weights import HFReader
    return HFReader(source, hf)


def import_(
    source: Path,
    job: Path,
    step: int | None,
    model: str | None,
    dtype: str | None,
    progress: Progress,
) -> tuple[str, str]:
    """(name of the new checkpoint, what was taken over)."""
    if step is not None and step < 0:
        raise InputError(f"--step {step}: steps are counted from 0")
    if job.exists() and not job.is_dir():
        raise InputError(f"{job} is a file: give the directory of a run, which may be new")
    storage = open_storage(job / "checkpoints")
    present = catalog.list_entries(storage)
    if present and step is None:
        raise InputError(
            f"{storage.where} has checkpoints already (newest: "
            f"step {present[-1].step}); a run would go on from the import instead of them: "
            "give the directory of another run, or say --step N"
        )
    directory = Path(model) if model else source
    if not (directory / "config.json").is_file():
        raise InputError(
            f"{directory} has no config.json: "
            "give the Hugging Face directory of this model as --model"
        )
    given = Given(source, read_hf_config(directory))
    if dtype is None and given.dtype not in DTYPES.values():
        raise InputError(
            f"{source} holds {given.dtype}; "
            "say --dtype fp32 or --dtype bf16, as trainer.dtype of the run"
        )
    stored = DTYPES[dtype] if dtype else given.dtype
    sources = list(given.sources(stored))
    step = step or 0
    job.mkdir(parents=True, exist_ok=True)
    # as Policy.snapshot
    counters = msgspec.msgpack.encode({"step": step, "updates": given.updates})
    about = {
        "model": str(directory.absolute()),
        "dtype": _name(stored),
        "layout": None,
        "imported_from": str(source),
    }
    loop = {"journal": 0, "run_epoch": 0, "recent_losses": []}
    with progress(f"importing {source.name}", sum(s.claim.bytes for s in sources)) as seen:
        name = write(
            storage,
            fence.control_dir(job),
            step,
            sources,
            small={"policy": counters},
            loop=loop,
            about=about,
            seen=seen,
        )
    moments = (
        f"moments of {given.updates} updates"
        if "exp_avg" in given.kinds
        else "no moments: Adam starts anew"
    )
    return name, f"step {step}, {len(given.names)} tensors of weights in {_name(stored)}, {moments}"


def _name(dtype: torch.dtype) -> str:
    return next(name for name, value in DTYPES.items() if value == dtype)
