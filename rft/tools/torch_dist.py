"""Megatron's `torch_dist` checkpoints, read and written in Hugging Face coordinates. No megatron,
no process group.

    DIR/metadata.json   says that it is one         DIR/.metadata
            pickled index: tensors, chunks, places
    DIR/common.pt       iteration, optimizer steps  DIR/*.distcp
            the chunks, each as torch.save wrote it

Layers are stacked there: `decoder.layers.mlp.linear_fc2.weight` is [layers, rows, columns] (or,
from heterogeneous models, numbered as in the model). The rest is `rft.ground.names` at
tensor-parallel size 1, padding rows of the vocabulary included. In: such a directory and the
model's `Dims`. Out: HF tensors one at a time; and the way back. Invariant: pickles are read by an
unpickler that knows the classes below and calls nothing else.
"""

import argparse
import enum
import io
import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rft.ground import durable
from rft.ground.names import RULES, Dims, WeightRule, hf_names, hf_shape, is_expert, segments

KINDS = {"": "model", "param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|exp_avg|exp_avg_sq)\.(.+)")
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
# Objects that megatron's loader asks for beside the weights: states of layers that compute in 8
# bits, empty here.
EXTRA = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
)
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class TorchDistError(ValueError):
    """Not a torch_dist checkpoint, a damaged one, or one of something else."""


# --- pickles --------------------------------------------------------------------------------------


def _member(kind: Any, name: Any) -> enum.Enum:
    """Of an enumeration, and nothing else that has attributes."""
    if not (isinstance(kind, enum.EnumMeta) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{name!r} of {kind!r} has no place in a checkpoint's index")
    return kind[name]


def _allowed() -> dict[tuple[str, str], Any]:
    """Everything that an index of this format consists of: records without behaviour, and torch's
    own constants.
    """
    found: dict[tuple[str, str], Any] = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): OrderedDict,
        ("argparse", "Namespace"): argparse.Namespace,
        ("builtins", "getattr"): _member,  # as Python 3.11.2, which Debian 12 has, pickles one
    }
    found |= {("torch", name): getattr(torch, name) for name in _DTYPES}
    listed = (
        (
            metadata,
            (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "StorageMeta",
                "ChunkStorageMetadata",
                "TensorProperties",
                "_MEM_FORMAT_ENCODING",
            ),
        ),
        (filesystem, ("_StorageInfo", "_StoragePrefix")),
        (
            planner,
            ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
        ),
    )
    for module, names in listed:
        found |= {
            (module.__name__, name): getattr(module, name)
            for name in names
            if hasattr(module, name)
        }
    return found


ALLOWED = _allowed()


class IndexUnpickler(pickle.Unpickler):
    """For `.metadata`: any other name is an error."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"{module}.{name} has no place in a checkpoint's index"
            ) from None


class Opaque:
    """Stands for an object of a class that is not in the list: it was not made, and all that was to
    be put into it is dropped.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "Opaque":
        return object.__new__(cls)

    def _drop(self, *args: Any, **kwargs: Any) -> "Opaque":
        return self

    __init__ = lambda self, *args, **kwargs: None  # noqa: E731 - must return None
    __call__ = __setstate__ = __setitem__ = append = extend = add = _drop


class CommonUnpickler(pickle.Unpickler):
    """For `common.pt`: megatron puts the arguments of the run there, of any class.

    Tensors are as little made as those.
    """

    def find_class(self, module: str, name: str) -> Any:
        return ALLOWED.get((module, name), Opaque)

    def persistent_load(self, pid: Any) -> Opaque:
        return Opaque()


# --- reading --------------------------------------------------------------------------------------


class TorchDist:
    """An opened checkpoint. `kinds`: what it holds of model, master, exp_avg, exp_avg_sq."""

    def __init__(self, directory: Path, dims: Dims, architecture: str):
        _refuse_experts(dims)
        self.directory, self.dims = directory, dims
        self.index = _index(directory)
        self.common = _common(directory)
        self._places = {
            (place.fqn, tuple(place.offset or ())): info
            for place, info in self.index.storage_data.items()
        }
        self._keys = self._by_kind()
        if "" not in self._keys:
            raise TorchDistError(f"{directory} holds no weights of a GPT model that rft knows")
        self.names = hf_names(dims, architecture)
        self._check()

    @property
    def kinds(self) -> list[str]:
        """Complete ones only: moments without the step counter of Adam would be worth nothing."""
        if self.updates is None or set(self._keys) != set(KINDS):
            return ["model"]
        return [KINDS[kind] for kind in self._keys]

    @property
    def iteration(self) -> int | None:
        found = self.common.get("iteration")
        named = re.fullmatch(r"iter_(\d+)", self.directory.name)
        return found if isinstance(found, int) else int(named[1]) if named else None

    @property
    def updates(self) -> int | None:
        """How many updates Adam has made."""
        groups = self.common.get("optimizer") or {}
        groups = groups.get("optimizer", groups) if isinstance(groups, dict) else {}
        steps = {int(group["step"]) for group in groups.get("param_groups", []) if "step" in group}
        return steps.pop() if len(steps) == 1 else None

    def dtype(self, kind: str = "") -> torch.dtype:
        return self._entry(next(iter(self._keys[kind].values()))).properties.dtype

    def tensor(self, kind: str, name: str) -> Tensor:
        """Read HF tensor `name` of "model", "master", "exp_avg" or "exp_avg_sq".

        Raises TorchDistError.
        """
        short = next(key for key, value in KINDS.items() if value == kind)
        rule, part, layer = rule_of(name)
        key, stacked = self._key(short, rule, layer)
        whole = self._read(key, layer if stacked else None)
        shape = hf_shape(rule.kind, part, name, self.dims)
        out = torch.empty(shape, dtype=whole.dtype)
        for run in segments(rule.kind, name, self.dims, 0, 1):
            if run.part == part:
                rows = run.stop - run.start
                out.narrow(run.dim, run.start, rows).copy_(whole.narrow(run.dim, run.local, rows))
        return out

    def _by_kind(self) -> dict[str, dict[str, str]]:
        """Per kind: megatron's name of a parameter -> the key of its tensor."""
        dense = [rule for rule in RULES if not is_expert(rule.hf[0])]
        known = {
            name
            for rule in dense
            for pattern in rule.megatron
            for name in _spellings(pattern, self.dims.layers)
        }
        found: dict[str, dict[str, str]] = {}
        for key, entry in self.index.state_dict_metadata.items():
            match = STATE.fullmatch(key)
            kind, name = (match[1], match[2]) if match else ("", key)
            if name in known and isinstance(entry, TensorStorageMetadata):
                found.setdefault(kind, {})[name] = key
        return found

    def _key(self, kind: str, rule: WeightRule, layer: int | None) -> tuple[str, bool]:
        """(key, are layers stacked in it)."""
        held = self._keys.get(kind, {})
        for pattern in rule.megatron:
            if layer is not None and (stacked := pattern.replace(".{layer}", "")) in held:
                return held[stacked], True
            if (plain := pattern.format(layer=layer)) in held:
                return held[plain], False
        raise TorchDistError(
            f"{self.directory}: {KINDS[kind]} of {rule.megatron[0].format(layer=layer)} is missing"
        )

    def _check(self) -> None:
        """Every tensor of the model is there, in the shape that config.json says.

        Raises TorchDistError.
        """
        for name in self.names:
            rule, part, layer = rule_of(name)
            key, stacked = self._key("", rule, layer)
            size = tuple(self._entry(key).size)
            found, wanted = (size[1:] if stacked else size), _packed_shape(rule, name, self.dims)
            if stacked and size[0] != self.dims.layers:
                raise TorchDistError(
                    f"{self.directory} has {size[0]} layers, config.json says {self.dims.layers}"
                )
            fits = found[1:] == wanted[1:] and (
                found[0] >= self.dims.vocab if rule.kind == "vocab" else found[0] == wanted[0]
            )
            if not fits:
                raise TorchDistError(
                    f"{self.directory}: {key} is {list(found)}, "
                    f"config.json says {list(wanted)} for it"
                )

    def _entry(self, key: str) -> TensorStorageMetadata:
        return self.index.state_dict_metadata[key]

    def _read(self, key: str, layer: int | None) -> Tensor:
        """A whole parameter, or one layer of a stack, put together from its chunks."""
        entry = self._entry(key)
        first, shape = (0, tuple(entry.size)) if layer is None else (layer, (1, *entry.size[1:]))
        out = torch.empty(shape, dtype=entry.properties.dtype)
        filled = 0
        for chunk in entry.chunks:
            low = max(chunk.offsets[0], first) if shape else 0
            high = min(chunk.offsets[0] + chunk.sizes[0], first + shape[0]) if shape else 1
            if low >= high:
                continue
            value = self._chunk(key, tuple(chunk.offsets), tuple(chunk.sizes))
            value = value[low - chunk.offsets[0] : high - chunk.offsets[0]]
            place = (slice(low - first, high - first),)
            place += tuple(
                slice(o, o + n) for o, n in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
            )
            out[place] = value
            filled += value.numel()
        if filled != out.numel():
            raise TorchDistError(
                f"{self.directory}: {filled} of {out.numel()} elements of {key} are there"
            )
        return out if layer is None else out[0]

    def _chunk(self, key: str, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        info = self._places.get((key, offset))
        if info is None:
            raise TorchDistError(
                f"{self.directory}: the chunk of {key} at {list(offset)} is missing"
            )
        path = self.directory / info.relative_path
        try:
            with open(path, "rb") as file:
                file.seek(info.offset)
                value = torch.load(
                    io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True
                )
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            cause = (str(error) or type(error).__name__).splitlines()[0]
            raise TorchDistError(f"{path}: the chunk of {key} cannot be read: {cause}") from error
        if not isinstance(value, Tensor) or tuple(value.shape) != sizes:
            raise TorchDistError(
                f"{path}: the chunk of {key} is not the tensor that the index says"
            )
        return value


def _refuse_experts(dims: Dims) -> None:
    if dims.experts:
        raise TorchDistError(
            "torch_dist checkpoints of models with experts are not read or written; "
            "go through Hugging Face files"
        )


def is_torch_dist(directory: Path) -> bool:
    return (directory / "metadata.json").is_file() and (directory / ".metadata").is_file()


def _index(directory: Path) -> Metadata:
    try:
        stated = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))
        if stated.get("sharded_backend") != "torch_dist":
            raise TorchDistError(
                f"{directory} is a checkpoint of backend "
                f"{stated.get('sharded_backend')}, not of torch_dist"
            )
        with open(directory / ".metadata", "rb") as file:
            found = IndexUnpickler(file).load()
    except OSError as error:
        raise TorchDistError(
            f"{directory} is no complete torch_dist checkpoint: {error}"
        ) from error
    except TorchDistError:
        raise
    except Exception as error:  # a damaged pickle fails in any way there is
        raise TorchDistError(f"{directory}/.metadata cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise TorchDistError(f"{directory}/.metadata is no index")
    return found


def _common(directory: Path) -> dict[str, Any]:
    """Plain values only: objects of classes that are not in the list come as `Opaque`.

    Not by torch.load, which gives what looks like a TorchScript archive to torch.jit.load, and that
    one runs its code.
    """
    try:
        with zipfile.ZipFile(directory / "common.pt") as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            if "constants.pkl" in names:
                raise TorchDistError(
                    f"{directory}/common.pt is a TorchScript program, which is not run"
                )
            with archive.open(names["data.pkl"]) as file:
                found = CommonUnpickler(file).load()
    except TorchDistError:
        raise
    except Exception as error:  # a damaged pickle fails in any way there is
        raise TorchDistError(f"{directory}/common.pt cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


# --- names ----------------------------------------------------------------------------------------


def rule_of(name: str) -> tuple[WeightRule, int, int | None]:
    """(rule, part, layer) of a Hugging Face name."""
    words = name.split(".")
    layer = int(words[2]) if words[:2] == ["model", "layers"] else None
    pattern = name if layer is None else ".".join([*words[:2], "{layer}", *words[3:]])
    for rule in RULES:
        if pattern in rule.hf:
            return rule, rule.hf.index(pattern), layer
    raise KeyError(f"no rule for {name}; add one to rft.ground.names.RULES")


def _spellings(pattern: str, layers: int) -> Iterator[str]:
    yield pattern.replace(".{layer}", "")
    for layer in range(layers if "{layer}" in pattern else 0):
        yield pattern.format(layer=layer)


def _packed_shape(rule: WeightRule, name: str, dims: Dims) -> tuple[int, ...]:
    """Shape of megatron's parameter at tensor-parallel size 1;
    of a vocabulary, with padding rows.
    """
    if rule.kind == "vocab":
        return (dims.padded_vocab(1), dims.hidden)
    shapes = [hf_shape(rule.kind, part, name, dims) for part in range(len(rule.hf))]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


# --- writing --------------------------------------------------------------------------------------


class _File:
    """Appends chunks to one .distcp file and keeps the index."""

    def __init__(self, stream: BinaryIO, name: str):
        self.stream, self.name = stream, name
        self.index = Metadata(state_dict_metadata={}, storage_data={}, version="1.0.0")

    def add(self, place: MetadataIndex, value: Any) -> None:
        start = self.stream.tell()
        buffer = io.BytesIO()  # torch.save wants to begin at 0
        torch.save(value, buffer)
        self.stream.write(buffer.getbuffer())
        self.index.storage_data[place] = filesystem._StorageInfo(
            self.name, start, self.stream.tell() - start
        )

    def tensor(self, key: str, value: Tensor, layer: int | None, layers: int) -> None:
        value = value if layer is None else value[None]
        offset = torch.Size([layer or 0, *[0] * (value.dim() - 1)])
        if key not in self.index.state_dict_metadata:
            size = value.shape if layer is None else torch.Size([layers, *value.shape[1:]])
            properties = TensorProperties(dtype=value.dtype)
            self.index.state_dict_metadata[key] = TensorStorageMetadata(properties, size, [])
        self.index.state_dict_metadata[key].chunks.append(ChunkStorageMetadata(offset, value.shape))
        self.add(MetadataIndex(key, offset), value)

    def object(self, key: str) -> None:
        self.index.state_dict_metadata[key] = BytesStorageMetadata()
        self.add(MetadataIndex(key), [None])


def write(
    directory: Path,
    dims: Dims,
    architecture: str,
    read: Callable[[str], Tensor],
    iteration: int,
    seen: Callable[[int], object] = lambda count: None,
) -> None:
    """Fill an existing directory with the weights alone; `read` gives HF tensors by name.

    Durable when it returns.
    """
    _refuse_experts(dims)
    names = hf_names(dims, architecture)
    chunks = "__0_0.distcp"
    with durable.replacing(directory / chunks) as stream:
        file = _File(stream, chunks)
        for name in names:
            rule, part, layer = rule_of(name)
            if part == 0:
                value = _packed(rule, name, layer, dims, read)
                file.tensor(rule.megatron[-1].replace(".{layer}", ""), value, layer, dims.layers)
                seen(value.nbytes)
        for layer in range(dims.layers):
            for module in EXTRA:
                file.object(f"decoder.layers.{module}._extra_state/shard_{layer}_{dims.layers}")
        file.object("decoder.final_layernorm._extra_state/shard_0_1")
    with durable.replacing(directory / "common.pt") as stream:
        torch.save({"iteration": iteration, "checkpoint_version": 3.0}, stream)
    durable.put(directory / ".metadata", pickle.dumps(file.index))
    durable.put(directory / "metadata.json", json.dumps(BACKEND))


def _packed(
    rule: WeightRule, name: str, layer: int | None, dims: Dims, read: Callable[[str], Tensor]
) -> Tensor:
    parts = [read(pattern.format(layer=layer)) for pattern in rule.hf]
    whole = torch.zeros(_packed_shape(rule, name, dims), dtype=parts[0].dtype)
    for run in segments(rule.kind, name, dims, 0, 1):
        rows = run.stop - run.start
        whole.narrow(run.dim, run.local, rows).copy_(
            parts[run.part].narrow(run.dim, run.start, rows)
        )
    return whole
