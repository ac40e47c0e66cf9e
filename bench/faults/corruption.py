"""Class 4: a committed checkpoint is damaged in silence. It must be refused, named and kept, and
the one before loaded.

A root with steps 1 and 2 of two ranks is damaged in place, loaded, and put back from memory:
thousands of cases in seconds.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.faults.job import save_here
from bench.faults.judge import Tally
from bench.faults.kills import NEW, OLD, Ground
from bench.faults.toy import Cut
from rft.checkpoint.catalog import read_manifest
from rft.checkpoint.records import encode_json
from rft.checkpoint.storage import Disk, LocalStorage

STEP = "step_00000002"
FILES = ("r00000.bin", "r00001.bin", "r00000.json", "r00001.json", "MANIFEST.json")
Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """`named`: what the message must contain.

    `expects`: the step to be loaded, 0: a refusal that says `named`.
    """

    kind: str
    words: str
    damage: Damage
    named: str = STEP
    expects: int = OLD.step


def flip(name: str, bit: int) -> Damage:
    def damage(root: Path) -> None:
        path = root / STEP / name
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)

    return damage


def cut_off(name: str, length: int) -> Damage:
    return lambda root: (root / STEP / name).write_bytes((root / STEP / name).read_bytes()[:length])


def zero(name: str, at: int, count: int) -> Damage:
    def damage(root: Path) -> None:
        data = bytearray((root / STEP / name).read_bytes())
        data[at : at + count] = bytes(len(data[at : at + count]))
        (root / STEP / name).write_bytes(data)

    return damage


def swap(root: Path) -> None:
    """The two ranks' bytes, cut to one size."""
    one, other = root / STEP / FILES[0], root / STEP / FILES[1]
    left, right = one.read_bytes(), other.read_bytes()
    one.write_bytes(right.ljust(len(left), b"\0")[: len(left)])
    other.write_bytes(left.ljust(len(right), b"\0")[: len(right)])


def stale(*names: str) -> Damage:
    def damage(root: Path) -> None:
        for name in names:
            shutil.copyfile(root / "step_00000001" / name, root / STEP / name)

    return damage


def gone(name: str) -> Damage:
    return lambda root: (root / STEP / name).unlink()


def renamed(root: Path) -> None:
    """An old checkpoint under a newer name."""
    shutil.copytree(root / "step_00000001", root / "step_00000009")


def newer_format(root: Path) -> None:
    manifest = read_manifest(LocalStorage(root, Disk()), STEP)
    newer = msgspec.structs.replace(manifest, format=manifest.format + 1).sealed()
    (root / STEP / "MANIFEST.json").write_bytes(encode_json(newer))


def latest(data: bytes) -> Damage:
    return lambda root: (root / "LATEST").write_bytes(data)


def foreign(root: Path) -> None:
    (root / "step_00000007").write_text("a file")
    (root / "step_00000008").mkdir()
    (root / "notes").mkdir()
    (root / "notes" / "step_00000042").mkdir()
    (root / "README").write_text("hands off")
    (root / "step_12").mkdir()


def foreign_manifest(root: Path) -> None:
    (root / "step_00000008" / "MANIFEST.json").mkdir(parents=True)


def cases(root: Path, flips: int) -> Iterator[Case]:
    sizes = {name: (root / STEP / name).stat().st_size for name in FILES}
    dice = random.Random(4)
    for number in range(flips):
        name = FILES[number % len(FILES)]
        bit = dice.randrange(8 * sizes[name])
        yield Case("bit flip", f"{name} bit {bit}", flip(name, bit))
    for name, size in sizes.items():
        for length in sorted({0, 1, size // 2, size - 1, max(0, size - 4096)}):
            yield Case("truncation", f"{name} to {length}", cut_off(name, length))
        yield Case(
            "missing", name, gone(name), expects=OLD.step, named=STEP if name != FILES[-1] else ""
        )
    for name in FILES[:2]:
        for at in range(0, sizes[name], 4096):
            yield Case("zeroed page", f"{name} at {at}", zero(name, at, 4096))
        yield Case("stale file", name, stale(name))
    yield Case("swapped", "bytes of the ranks", swap)
    yield Case("stale file", "receipt", stale(FILES[2]))
    yield Case("stale file", "receipt and bytes", stale(FILES[0], FILES[2]))
    yield Case("stale file", "manifest", stale(FILES[4]))
    yield Case("stale file", "everything", stale(*FILES))
    yield Case("stale file", "a directory of another name", renamed, "step_00000009", NEW.step)
    yield Case("newer format", "manifest", newer_format, "format 3", 0)
    for words, data in (("empty", b""), ("garbage", b"\xff{]"), ("text", b"step_00000001")):
        yield Case("LATEST", words, latest(data), "", NEW.step)
    ahead = json.dumps({"name": "step_00000099", "epoch": 9, "step": 99}).encode()
    yield Case("LATEST", "ahead of time", latest(ahead), "", NEW.step)
    yield Case("foreign files", "files and directories", foreign, "", NEW.step)
    yield Case(
        "foreign files",
        "a directory called MANIFEST.json",
        foreign_manifest,
        "step_00000008",
        NEW.step,
    )


def run(ground: Ground, count: int) -> Tally:
    tally = Tally("corruption")
    whole = ground.fresh(2)
    save_here(whole, NEW, 2)
    before = contents(whole)
    other = len(list(cases(whole, 0)))
    for case in cases(whole, max(0, count - other)):
        case.damage(whole)
        damaged = contents(whole)
        problems = judged(ground, whole, case, damaged)
        tally.note(case.kind, case.words, problems)
        restore(whole, before)
    shutil.rmtree(whole)
    return tally


def judged(ground: Ground, root: Path, case: Case, damaged: dict[str, bytes]) -> list[str]:
    loaded = ground.loader.load(root)
    problems = []
    if loaded.cut is not None and not loaded.exact:
        problems.append(f"WRONG accepted {loaded.cut} with other bytes")
    if (loaded.cut or Cut(0)).step != case.expects:
        problems.append(
            f"LOST expected step {case.expects}, got {loaded.cut}: {loaded.error} {loaded.said}"
        )
    if case.named not in loaded.said + loaded.error:
        problems.append(f"no message names {case.named}: {loaded.said} {loaded.error}")
    after = contents(root)
    if sorted(damaged.values()) != sorted(after.values()):
        problems.append(f"something was deleted or changed: {sorted(set(damaged) ^ set(after))}")
    return problems


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "control" not in path.parts
    }


def restore(root: Path, before: dict[str, bytes]) -> None:
    """Undo a case: whatever differs is written again, whatever came is removed."""
    for path in root.iterdir():
        if path.name not in ("control", "weights", "step_00000001", STEP, "LATEST"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, data in before.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)
