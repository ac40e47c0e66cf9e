"""Was anything lost, or accepted that is not what was saved? Two judges: a reader of its own, and
the real loader.

The reader here shares no code with `rft.checkpoint.reader`: it parses manifests and receipts as
JSON, recomputes every hash, holds every byte against the pattern of the step that the manifest
names.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from bench.faults.loader import Loaded, Loader
from bench.faults.toy import Cut, shapes

COMMITTED = re.compile(r"(?:step|v)_(\d{8,})(?:\.[0-9a-z]+)?")
CHUNK = 8 * 2**20
WIDTH = {"float32": 4, "bfloat16": 2, "int64": 8}


@dataclass
class Tally:
    """Results of one class of faults."""

    name: str
    injected: int = 0
    wrong: int = 0  # accepted, and not what was saved
    lost: int = 0  # a newest good one not found, or an acknowledged one gone
    other: int = 0  # no message, a hang, something deleted, the next save failed
    problems: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def note(self, kind: str, case: str, found: list[str]) -> None:
        self.injected += 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.wrong += any(text.startswith("WRONG") for text in found)
        self.lost += any(text.startswith("LOST") for text in found)
        self.other += any(not text.startswith(("WRONG", "LOST")) for text in found)
        self.problems += [f"{case}: {text}" for text in found]

    @property
    def bad(self) -> int:
        return len(self.problems)


@dataclass(frozen=True)
class Held:
    """A committed directory as the independent reader sees it; `why` it is not sound, or ''."""

    path: Path
    epoch: int
    cut: Cut
    why: str


def committed(root: Path) -> list[Held]:
    """Every directory that claims to be a checkpoint, oldest first."""
    found = (
        [
            path
            for path in root.iterdir()
            if COMMITTED.fullmatch(path.name) and (path / "MANIFEST.json").is_file()
        ]
        if root.is_dir()
        else []
    )
    return sorted((examine(path) for path in found), key=lambda held: (held.epoch, held.cut.step))


def content(path: Path) -> bytes:
    """Of a file; a pipe or a device would be read for ever."""
    if not path.is_file():
        raise OSError(f"{path} is no file")
    return path.read_bytes()


def examine(path: Path) -> Held:
    cut, epoch = Cut(-1), -1
    try:
        raw = content(path / "MANIFEST.json")
        manifest = json.loads(raw)
        loop = manifest["loop"]
        epoch = manifest["epoch"]
        cut = Cut(manifest["step"], loop.get("variant", 0), loop.get("scale", 1))
        named = int(COMMITTED.fullmatch(path.name)[1])
        why = _flaw(path, raw, manifest, cut) if named == cut.step else "its name"
        return Held(path, epoch, cut, why)
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        return Held(path, epoch, cut, f"{type(error).__name__}: {error}")


def _flaw(path: Path, raw: bytes, manifest: dict[str, Any], cut: Cut) -> str:
    if hashlib.sha256(raw.replace(manifest["seal"].encode(), b"")).hexdigest() != manifest["seal"]:
        return "seal of the manifest"
    count = dict.fromkeys(
        (key for key in shapes(cut.scale) if path.name[0] == "s" or key.startswith("model/")), 0
    )
    if len(manifest["receipts"]) != manifest["world"]:
        return "number of receipts"
    for name, digest in manifest["receipts"].items():
        raw = content(path / name)
        if hashlib.sha256(raw).hexdigest() != digest:
            return f"hash of {name}"
        receipt = json.loads(raw)
        data = content(path / receipt["file"])
        hashes = [
            xxhash.xxh3_128_hexdigest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)
        ]
        if (
            len(data) != receipt["bytes"]
            or hashes != receipt["chunks"]
            or receipt["step"] != cut.step
        ):
            return f"bytes of {receipt['file']}"
        for region in receipt["regions"]:
            stored = data[region["at"] : region["at"] + region["bytes"]]
            if stored != expected(cut, region):
                return f"{region['key']} is not that of step {cut.step}"
            count[region["key"]] += region["bytes"]
    whole = {
        key: prod(shapes(cut.scale)[key][1]) * WIDTH[shapes(cut.scale)[key][0]] for key in count
    }
    return "" if count == whole else f"parts are missing: {count} of {whole}"


def expected(cut: Cut, region: dict[str, Any]) -> bytes:
    """A region's bytes, found by counting elements of the whole tensor."""
    shape, offset, box = region["global_shape"], region["offset"], region["shape"]
    numbers = np.arange(prod(shape)).reshape(shape)
    for axis, (low, n) in enumerate(zip(offset, box, strict=True)):
        numbers = numbers.take(range(low, low + n), axis)
    chosen = numbers.reshape(-1)[slice(*region["flat"])] if region["flat"] else numbers.reshape(-1)
    width = WIDTH[region["dtype"]]
    whole = np.frombuffer(cut.whole(region["key"]), dtype=np.uint8).reshape(-1, width)
    return whole[chosen].tobytes()


def judge(
    root: Path, loader: Loader, least: int, scale: int = 1, sweep: bool = False
) -> tuple[list[str], Loaded]:
    """Problems after a crash: everything committed must be sound, and the newest, of step `least`
    or later, be what is loaded.
    """
    held = committed(root)
    sound = [one for one in held if not one.why]
    loaded = loader.load(root, sound[-1].cut.scale if sound else scale, sweep)
    return compared(root, held, loaded, least), loaded


def compared(root: Path, held: list[Held], loaded: Loaded, least: int) -> list[str]:
    """The same of what was `held`, and `loaded`."""
    found = []
    weights = committed(root / "weights")
    for one in held + weights:
        if one.why:
            found.append(f"WRONG {one.path.name} is committed with a flaw: {one.why}")
    sound = [one for one in held if not one.why]
    newest = sound[-1].cut if sound else None
    if newest is None or newest.step < least:
        found.append(
            f"LOST step {least}: the newest sound one is {newest}; "
            f"{sorted(p.name for p in root.iterdir())}"
        )
    if loaded.cut is not None and not loaded.exact:
        found.append(f"WRONG the loader accepted {loaded.cut} with other bytes")
    if loaded.cut is None or (newest and loaded.cut.step < newest.step):
        found.append(
            f"LOST the loader took {loaded.cut}, there is {newest}: {loaded.error} {loaded.said}"
        )
    return found
