"""Class 5: corruptions that nobody has chosen, drawn anew in every run from a seed that is printed.

Three checkpoints of two ranks, one to three corruptions of whatever lies there, then `rft ckpt
verify` and the loader. Asked for: nothing wrong loaded, no step back (or start at 0) that is not
said and that verify does not fail on, nothing sound renamed, nothing deleted, no crash. What is
sound is for the judge's own reader to say.
"""

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from bench.faults.job import save_here
from bench.faults.judge import Held, Tally, committed, content
from bench.faults.kills import Ground
from bench.faults.loader import Loaded
from bench.faults.toy import Cut
from rft.tools import ckpt

STEPS = (1, 2, 3)
FILES = ("r00000.bin", "r00001.bin", "r00000.json", "r00001.json", "MANIFEST.json")
KINDS: dict[str, Callable[["Dice", Path], object]] = {}
REFUSALS = ("FileNotFoundError", "RestoreRefused")


class Dice(random.Random):
    """Draws places as well as numbers; of checkpoints mostly the newest."""

    steps: tuple[int, ...] = STEPS
    prefix = "step_"

    def step(self) -> int:
        return self.choices(self.steps, (*(1 for _ in self.steps[1:]), 4))[0]

    def named(self, step: int) -> str:
        return f"{self.prefix}{step:08d}"

    def directory(self, root: Path) -> Path:
        return root / self.named(self.step())

    def file(self, root: Path) -> Path:
        return self.directory(root) / self.choice(FILES)

    def older(self, path: Path) -> Path:
        """The same file of another step."""
        steps = [step for step in self.steps if path.parent.name != self.named(step)]
        return path.parent.with_name(self.named(self.choice(steps))) / path.name

    def damage(self, root: Path) -> list[str]:
        """By one to three corruptions; which."""
        names = [self.choice(list(KINDS)) for _ in range(self.choice((1, 1, 1, 2, 3)))]
        for name in names:
            KINDS[name](self, root)
        return names


def kind(act: Callable[[Dice, Path], object]) -> Callable[[Dice, Path], object]:
    KINDS[act.__name__] = act
    return act


def edit(act: Callable[[Dice, bytearray], object]) -> Callable[[Dice, bytearray], object]:
    """Of the bytes of one file, where it has any."""

    def change(dice: Dice, root: Path) -> None:
        path = dice.file(root)
        if path.is_file() and (data := bytearray(path.read_bytes())):
            act(dice, data)
            path.write_bytes(data)

    KINDS[act.__name__] = change
    return act


def replace(make: Callable[[Dice, Path], object]) -> Callable[[Dice, Path], object]:
    """One file gives way to something else; what it held lies in a directory of another name."""

    def change(dice: Dice, root: Path) -> None:
        path = dice.file(root)
        if os.path.lexists(path):
            remove(path)
            make(dice, path)

    KINDS[make.__name__] = change
    return make


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@edit
def flip(dice: Dice, data: bytearray) -> None:
    for _ in range(dice.choice((1, 1, 1, 2, 32))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


@edit
def truncate(dice: Dice, data: bytearray) -> None:
    del data[dice.randrange(len(data)) :]


@edit
def append(dice: Dice, data: bytearray) -> None:
    data += dice.randbytes(dice.choice((1, 64, 4096)))


@edit
def insert(dice: Dice, data: bytearray) -> None:
    at = dice.randrange(len(data))
    data[at:at] = dice.randbytes(dice.choice((1, 512)))


@edit
def cut_out(dice: Dice, data: bytearray) -> None:
    at = dice.randrange(len(data))
    del data[at : at + dice.choice((1, 512, 4096))]


@edit
def zeros(dice: Dice, data: bytearray) -> None:
    at = dice.randrange(len(data))
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))


@edit
def swap_sectors(dice: Dice, data: bytearray) -> None:
    one, other = (512 * dice.randrange(1 + len(data) // 512) for _ in range(2))
    size = min(512, len(data) - one, len(data) - other)
    kept = data[one : one + size]
    data[one : one + size] = data[other : other + size]
    data[other : other + size] = kept


@edit
def digit(dice: Dice, data: bytearray) -> None:
    """Another number in JSON, or a byte that was one."""
    places = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if places:
        data[dice.choice(places)] = dice.randrange(0x30, 0x3A)


@kind
def reformat(dice: Dice, root: Path) -> None:
    path = dice.directory(root) / dice.choice(FILES[2:])
    with contextlib.suppress(OSError, ValueError):
        path.write_text(json.dumps(json.loads(content(path)), indent=dice.choice((None, 1))))


@kind
def double_key(dice: Dice, root: Path) -> None:
    path = dice.directory(root) / dice.choice(FILES[2:])
    if path.is_file() and (data := path.read_bytes()).startswith(b"{"):
        path.write_bytes(b'{"step":%d,' % dice.randrange(9) + data[1:])


@kind
def swap_files(dice: Dice, root: Path) -> None:
    one, other = dice.file(root), dice.file(root)
    if one.is_file() and other.is_file():
        left, right = one.read_bytes(), other.read_bytes()
        one.write_bytes(right), other.write_bytes(left)


@kind
def another_steps(dice: Dice, root: Path) -> None:
    place = dice.directory(root)
    for name in dice.choice([FILES[:1], FILES[2:3], FILES[4:], (FILES[0], FILES[2]), FILES[:4]]):
        source = dice.older(place / name)
        if source.is_file() and place.is_dir() and not (place / name).is_dir():
            remove(place / name)
            shutil.copyfile(source, place / name)


@replace
def nothing(dice: Dice, path: Path) -> None:
    """It is gone."""


@replace
def dangling(dice: Dice, path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


@replace
def loop(dice: Dice, path: Path) -> None:
    path.symlink_to(path.name)


@replace
def link_to_another_step(dice: Dice, path: Path) -> None:
    path.symlink_to(dice.older(path))


@replace
def device(dice: Dice, path: Path) -> None:
    path.symlink_to(dice.choice(("/dev/zero", "/dev/null", "/dev/full")))


@replace
def pipe(dice: Dice, path: Path) -> None:
    os.mkfifo(path)


@replace
def directory(dice: Dice, path: Path) -> None:
    path.mkdir()


@kind
def no_manifest(dice: Dice, root: Path) -> None:
    remove(dice.directory(root) / FILES[4])


@kind
def no_directory(dice: Dice, root: Path) -> None:
    remove(dice.directory(root))


@kind
def emptied(dice: Dice, root: Path) -> None:
    if (path := dice.directory(root)).is_dir():
        remove(path)
        path.mkdir()


@kind
def no_manifests_at_all(dice: Dice, root: Path) -> None:
    for path in root.glob(f"{dice.prefix}*/MANIFEST.json"):
        remove(path)
    if dice.random() < 0.5:
        remove(root / "LATEST")


@kind
def renamed(dice: Dice, root: Path) -> None:
    source, target = dice.directory(root), root / dice.named(dice.randrange(1, 12))
    if source.is_dir() and not target.exists():
        source.rename(target)


@kind
def copied(dice: Dice, root: Path) -> None:
    source, target = dice.directory(root), root / dice.named(dice.randrange(4, 12))
    if source.is_dir() and not target.exists():
        shutil.copytree(source, target, symlinks=True, copy_function=copy)


def copy(source: str, target: str) -> None:
    if Path(source).is_file():  # a pipe would be read for ever
        shutil.copyfile(source, target)


@kind
def exchanged(dice: Dice, root: Path) -> None:
    one, other, aside = dice.directory(root), dice.directory(root), root / "aside"
    if one != other and one.is_dir() and other.is_dir():
        one.rename(aside), other.rename(one), aside.rename(other)


@kind
def hint(dice: Dice, root: Path) -> None:
    ahead = json.dumps({"name": dice.named(99), "epoch": 9, "step": 99}).encode()
    words = dice.choice((None, b"", b"\xff{]", dice.named(1).encode(), ahead))
    remove(root / "LATEST") if words is None else (root / "LATEST").write_bytes(words)


@kind
def foreign(dice: Dice, root: Path) -> None:
    (root / dice.named(7)).mkdir(exist_ok=True)
    (root / dice.choice(("notes", f"{dice.prefix}12", ".tmp", "r00000.bin"))).write_bytes(
        b"hands off"
    )
    if (path := dice.directory(root)).is_dir():
        (path / "extra").write_bytes(b"hands off")


def run(ground: Ground, count: int, seed: int) -> Tally:
    tally = Tally("drawn")
    print(f"\ncorruptions are drawn from seed {seed}", flush=True)
    whole = ground.fresh(2)
    for step in STEPS[1:]:
        save_here(whole, Cut(step), 2)
    for number in range(count):
        dice, root = Dice(f"{seed}:{number}"), ground.top / "drawn"
        shutil.copytree(whole, root)
        names = dice.damage(root)
        words = f"{number} of seed {seed}: {', '.join(names)}"
        tally.note(names[0], words, judged(ground, root, names))
        shutil.rmtree(root)
    shutil.rmtree(whole)
    return tally


def contents(root: Path) -> list[bytes]:
    """Of all files proper: where a link leads is not what lies here."""
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return sorted(path.read_bytes() for path in files)


def judged(ground: Ground, root: Path, names: list[str]) -> list[str]:
    before, held = contents(root), [one for one in committed(root) if not one.why]
    verified = verify(root)
    loaded = ground.loader.load(root, patience_s=0.0)
    step = loaded.cut.step if loaded.cut else 0
    problems = []
    if loaded.cut is not None and not loaded.exact:
        problems.append(f"WRONG accepted {loaded.cut} with other bytes")
    problems += missed(held, loaded, step)
    if step < STEPS[-1] and not (loaded.said if step else loaded.error):
        problems.append(f"from {STEPS[-1]} to {step} without a word")
    # with the hint gone too, nothing is left for it to see that there was one
    if step < STEPS[-1] and verified == 0 and hint.__name__ not in names:
        problems.append(f"from {STEPS[-1]} to {step}, and rft ckpt verify finds nothing")
    if gone := [one.path.name for one in held if not (one.path / FILES[4]).is_file()]:
        problems.append(f"sound ones were renamed: {gone}; {loaded.said}")
    if before != contents(root):
        problems.append("something was deleted or changed")
    return problems


def missed(held: list[Held], loaded: Loaded, step: int) -> list[str]:
    """A refusal may leave a sound one alone: of what cannot be read nothing is known."""
    if loaded.error and loaded.error.partition(":")[0] not in REFUSALS:
        return [f"crashed: {loaded.error}"]
    is_refused = loaded.error.startswith("RestoreRefused")
    if held and step < held[-1].cut.step and not is_refused:
        return [f"LOST {held[-1].path.name} is sound, {step} was loaded: {loaded.said}"]
    return []


def verify(root: Path) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return ckpt.main(["verify", str(root)])
