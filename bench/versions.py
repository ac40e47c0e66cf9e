"""Every published version kept: what it costs on disk, whether it comes back bit by bit, and how
long that takes beside reading a full one.

    python -m bench.versions [--steps N] [--lr X ...]

In: nothing; SmolLM2-135M's shapes in bf16, normal weights of deviation 1 / sqrt(hidden). A step is
Adam's own update of fp32 masters on normal gradients: what changes is what Adam changes, without
the drift that real gradients have. Each version is saved by the product's manager and agent, and
read as an engine reads it (`SavedWeights`: manifest, receipts, every chunk against its hash), from
the page cache, single-threaded. `bytes_per_changed`: of the patches, over the elements that are not
those of the version which each is made from; `with_full`: all on disk, but for the first, over the
elements that each step has changed. `rebuild`: a version's reading over that of the full one before
it, which is read before and after it, in every third chain; the bar is on the worst of the medians
by how many versions behind the full one it comes. Out: a table, and one last line of JSON.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import xxhash

from bench import report
from rft.checkpoint.catalog import Entry, list_entries, read_manifest
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.storage import VERSIONS, open_storage
from rft.config import TrainerConfig
from rft.ground.names import Dims, architecture_of, hf_names, read_hf_config
from rft.ground.protocols import Piece, Snapshot
from rft.ground.rounds import InSave, Round
from rft.sync.readers import SavedWeights

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
RATES = (1e-6, 1e-5)
STEPS = 200
TIMED = 3  # every so many chains the full one is read between all others
BYTES_BAR, REBUILD_BAR = 3.0, 2.0


class Alone:
    rank, world = 0, 1

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item

    def barrier(self, name: str) -> None: ...


class Training:
    """Masters, moments and bf16 weights, each one piece of memory."""

    def __init__(self, model: Path, rate: float):
        torch.manual_seed(0)
        hf = read_hf_config(model)
        shapes = hf_names(Dims.of(hf), architecture_of(hf))
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        self.master = torch.randn(sum(sizes)) / MODEL["hidden_size"] ** 0.5
        self.master.requires_grad_()
        self.weights = self.master.detach().to(torch.bfloat16)
        self.noise = torch.randn(2**24 + 1) * 1e-3  # of a length that no step's begin repeats soon
        self.master.grad = torch.empty_like(self.master)
        self.adam = torch.optim.Adam([self.master], rate, (0.9, 0.95), fused=True)
        parts = self.weights.split(sizes)
        self.pieces = [
            Piece(f"model/{name}", part.view(shape), tuple(shape), (0,) * len(shape))
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        ]

    def snapshot(self) -> Snapshot:
        return Snapshot(self.pieces)

    def step(self) -> int:
        """Returns how many weights have changed."""
        assert self.master.grad is not None
        for part in self.master.grad.split(2**22):
            begin = int(torch.randint(len(self.noise) - len(part), ()))
            part.copy_(self.noise[begin : begin + len(part)])
        self.adam.step()
        new = self.master.detach().to(torch.bfloat16)
        changed = int((new.view(torch.int16) != self.weights.view(torch.int16)).sum())
        self.weights.copy_(new)
        return changed

    def digests(self) -> dict[str, str]:
        return {piece.key.removeprefix("model/"): digest(piece.tensor) for piece in self.pieces}


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.int16).numpy())


class Checked:
    """Reads versions as an engine does."""

    def __init__(self, root: Path, model: Path):
        self.root, self.reader = root, SavedWeights(str(model), torch.device("cpu"))
        self.wrong, self.chains = 0, 0
        self.ratios: dict[int, list[float]] = {}  # by how many versions behind the full one

    def chain(self, entries: list[Entry], published: dict[int, dict[str, str]]) -> None:
        """A full version and those behind it."""
        full = entries[0]
        self._read(entries[-1], published)  # all of them, into the page cache
        self.chains += 1
        if self.chains % TIMED != 1:
            for entry in entries[1:]:
                self._read(entry, published)
            return
        after = self._read(full, published)
        for behind, entry in enumerate(entries[1:], 1):
            before, found = after, self._read(entry, published)
            after = self._read(full, published)
            self.ratios.setdefault(behind, []).append(2 * found / (before + after))

    def _read(self, entry: Entry, published: dict[int, dict[str, str]]) -> float:
        seal = read_manifest(open_storage(self.root), entry.path).seal
        location = InSave(root=str(self.root), path=entry.path)
        began = time.perf_counter()
        staged = self.reader.stage(Round(version=entry.step, digest=seal, location=location))
        seconds = time.perf_counter() - began
        self.wrong += {name: digest(one) for name, one in staged.items()} != published[entry.step]
        return seconds


def measure(rate: float, steps: int, directory: Path) -> dict[str, Any]:
    model, root = directory / "model", directory / f"{rate:g}" / "checkpoints"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    training, checked = Training(model, rate), Checked(root, model)
    config = TrainerConfig()
    config.checkpoint.versions, config.checkpoint.staging = "all", "lazy"
    manager = CheckpointManager(root, Alone(), config)
    storage = open_storage(root)
    changed: dict[int, int] = {}
    held: dict[int, torch.Tensor] = {}  # what a version may be made from
    published: dict[int, dict[str, str]] = {}
    size: Counter[str] = Counter()
    call, copies, full = [], [], 0
    manager.start(training)
    for step in range(steps + 1):
        published[step] = training.digests()
        held[step] = training.weights.view(torch.int16).clone()
        began = time.perf_counter()
        manager.save(step, training, {}, full=False, version=True)
        call.append(time.perf_counter() - began)
        manager.before_update()
        copies.append(manager.metrics()["checkpoint/copy_s"])
        changed[step + 1] = training.step()
        manager.wait(step)  # a step of this model takes seconds where its gradients are computed
        entries = list_entries(storage, VERSIONS)
        base = entries[-1].base
        size["full" if base is None else "patch"] += entries[-1].bytes
        size["full ones" if base is None else "patches"] += 1
        if base is not None:
            size["told"] += int((held[step] != held[base[0]]).sum())
        full = step if base is None else full
        held = {number: held[number] for number in (full, step)}
        if base is None or step == steps:
            ended = entries if step == steps else entries[:-1]
            for chain in chains(ended):
                checked.chain(chain, published)
            for entry in reversed(ended):
                storage.remove(entry.path)
    status = manager.metrics()
    manager.close(60.0)
    elements, kept = len(training.weights), sum(changed[s] for s in range(1, steps + 1))
    medians = {behind: report.median(found) for behind, found in checked.ratios.items()}
    every = [one for found in checked.ratios.values() for one in found]
    return {
        "changed": kept / steps / elements,
        "patches": size["patches"],
        "full": size["full ones"],
        "mb_per_version": (size["patch"] + size["full"]) / 1e6 / (steps + 1),
        "bytes_per_changed": size["patch"] / max(1, size["told"]),
        "with_full": (size["patch"] + size["full"] - 2 * elements) / kept,
        "rebuild_p95": report.quantile(every, 0.95),
        "rebuild_worst": max(medians.values()),
        "behind": max(medians),
        "wrong": checked.wrong,
        "lost": int(status["checkpoint/versions_lost"]),
        "call_ms": 1e3 * report.median(call),
        "copy_ms": 1e3 * report.median(copies),
    }


def chains(entries: list[Entry]) -> list[list[Entry]]:
    found: list[list[Entry]] = []
    for entry in entries:
        if entry.base is None:
            found.append([])
        found[-1].append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, nargs="*", default=RATES)
    given = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(prefix="rft-versions-") as directory:
        found = {rate: measure(rate, given.steps, Path(directory)) for rate in given.lr}
    names = list(next(iter(found.values())))
    rows = [[name, *(f"{one[name]:.4g}" for one in found.values())] for name in names]
    report.table("every version kept", ["", *(f"lr {rate:g}" for rate in found)], rows)
    meets = given.steps >= STEPS and all(
        one["wrong"] == one["lost"] == 0
        and one["bytes_per_changed"] <= BYTES_BAR
        and one["rebuild_worst"] <= REBUILD_BAR
        for one in found.values()
    )
    report.last_line(
        "versions",
        {
            f"{name}_{rate:g}": one[name]
            for rate, one in found.items()
            for name in ("bytes_per_changed", "with_full", "rebuild_worst", "rebuild_p95")
        },
        {f"steps_{rate:g}": given.steps for rate in found},
        {"model": "SmolLM2-135M's shapes", "dtype": "bf16"},
        report.versions("torch", "zstandard", "xxhash"),
        meets,
    )


if __name__ == "__main__":
    main()
