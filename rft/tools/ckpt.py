"""`rft ckpt`: look at checkpoints, check every byte, compare, keep, and convert them.

In: a run's directory or URL. Out: text for a person; exit code 1 when something is damaged or
differs, 2 for input that names nothing. Nothing here needs the run to be stopped but `import`, and
`gc`, which reads the journal; nothing is changed but by tag, untag, gc and import.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rft.buffer.journal import JournalError
from rft.checkpoint import asking, catalog, fence
from rft.checkpoint.catalog import step_of
from rft.checkpoint.chunks import Damaged
from rft.checkpoint.export import Tensor, slabs
from rft.checkpoint.rank_files import StorageUnreachable
from rft.checkpoint.reader import Checkpoint, Mismatch
from rft.checkpoint.records import LATEST, MANIFEST, Manifest
from rft.checkpoint.single import Busy
from rft.checkpoint.storage import COLLECTIONS, VERSIONS, WEIGHTS, Storage
from rft.config import ConfigError
from rft.ground.names import ITEM_BYTES
from rft.monitor.run_record import RunRecord, flat
from rft.tools.buffer import NAME, versions_of
from rft.tools.places import InputError, Run, find_checkpoint, find_job, find_run, ranges
from rft.tools.tables import table

SHOWN = 8
SAVED_S = 3600.0  # for a step to end and a save to be committed
PARALLEL = ("tp", "pp", "cp", "ep", "dp")


def main(arguments: list[str]) -> int:
    """Exit code: 0 good, 1 damaged or different, 2 wrong input."""
    options = _parser().parse_args(arguments)
    try:
        return options.handler(options)
    except (Damaged, Mismatch, StorageUnreachable) as error:
        print(f"rft ckpt: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except (InputError, ConfigError, Busy, JournalError, OSError, ValueError) as error:
        print(f"rft ckpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rft ckpt",
        description=(
            "RUN: a run, job or checkpoints directory, or a URL. CHECKPOINT: "
            "RUN (the newest), RUN@STEP, or a path."
        ),
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, handler: Callable[[Any], int], words: str, *positional: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=words, description=words)
        for word in positional:
            command.add_argument(word.lower(), metavar=word)
        command.set_defaults(handler=handler)
        return command

    saving = add("save", save, "let a run that is under way save, until it is committed", "RUN_DIR")
    saving.add_argument("--timeout", type=float, default=SAVED_S, help="seconds to wait for that")
    add("ls", ls, "what is there", "RUN")
    showing = add("show", show, "what one holds", "CHECKPOINT")
    showing.add_argument("--tensors", action="store_true", help="list every tensor")
    add(
        "verify",
        verify,
        "read and check every byte; of a RUN: of all its checkpoints",
        "CHECKPOINT",
    )
    add("diff", diff, "which tensors and which loop state differ", "A", "B")
    add("tag", tag, "keep one for ever", "CHECKPOINT").add_argument(
        "label", nargs="?", default="", help="why"
    )
    add("untag", untag, "leave it to retention again", "CHECKPOINT")
    for command in (showing, _add_export(add)):
        command.add_argument(
            "--version", type=int, help="of a RUN: the weights of this policy version"
        )
    going = add("gc", gc, "which versions no stored experience is of, and remove them", "RUN")
    going.add_argument("--remove", action="store_true", help="not only say so")
    going.add_argument("--name", default=NAME, help=f"of the buffer; default {NAME}")
    _add_import(add)
    return parser


Adding = Callable[..., argparse.ArgumentParser]


def _add_export(add: Adding) -> argparse.ArgumentParser:
    out = add("export", export, "write it in another format", "CHECKPOINT", "TARGET")
    out.add_argument(
        "--to",
        choices=("hf", "torch_dist"),
        default="hf",
        help="Hugging Face (default) or Megatron",
    )
    out.add_argument(
        "--model", help="Hugging Face directory with config and tokenizer; default: the run's own"
    )
    return out


def _add_import(add: Adding) -> None:
    into = add(
        "import",
        import_,
        "make a checkpoint of a Hugging Face or torch_dist directory",
        "SOURCE",
        "RUN_DIR",
    )
    into.add_argument(
        "--step", type=int, help="default: 0, and then RUN_DIR must not have checkpoints yet"
    )
    into.add_argument("--model", help="Hugging Face directory with config.json; default: SOURCE")
    into.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="trainer.dtype of the run; default: SOURCE's own"
    )


# --- save -----------------------------------------------------------------------------------------


def save(options: argparse.Namespace) -> int:
    """Exit code 1 when it failed, or is not committed in time."""
    try:
        answer = asking.ask(find_job(options.run_dir), options.timeout)
    except TimeoutError as error:
        print(f"rft ckpt: {error}", file=sys.stderr)
        return 1
    if answer.cause:
        print(f"rft ckpt: the save of step {answer.step} failed: {answer.cause}", file=sys.stderr)
        return 1
    print(f"step {answer.step} is committed as {answer.name}")
    return 0


# --- ls -------------------------------------------------------------------------------------------


def ls(options: argparse.Namespace) -> int:
    """Exit code 1 when a committed one has a damaged manifest, or none any more."""
    run = find_run(options.run)
    storage, names = run.storage, run.storage.list()
    rows, damaged = [], []
    latest = _latest(storage)
    for name in names:
        if step_of(name) is None or MANIFEST not in storage.list(name):
            continue
        try:
            rows.append((catalog.read_manifest(storage, name), name))
        except (ValueError, OSError) as error:
            damaged.append(f"{name}: {error}")
    print(run.where)
    ordered = sorted(rows, key=lambda row: (row[0].epoch, row[0].step))
    told = [_row(run, manifest, name, latest) for manifest, name in ordered]
    print(table(told) if told else "no checkpoints")
    _print_apart("damaged manifest", damaged)
    lost = catalog.lost(storage)
    drafts = [
        n
        for n in names
        if ".tmp-" in n
        or (step_of(n) is not None and n not in lost and MANIFEST not in storage.list(n))
    ]
    _print_apart("manifest lost", lost)
    _print_apart("unfinished", drafts)
    _print_apart("set aside as damaged", [n for n in names if n.startswith(".bad-")])
    _print_apart("weights only", [n for n in storage.list(WEIGHTS) if step_of(n) is not None])
    if kept := catalog.list_entries(storage, VERSIONS):
        size, full = sum(entry.bytes for entry in kept), sum(entry.base is None for entry in kept)
        print(
            f"versions: {ranges(entry.path for entry in kept)}; {_size(size)}, {full} of "
            f"{len(kept)} in full"
        )
    _print_apart("in memory", _in_memory(run.job) if run.job else [])
    return 1 if damaged or lost else 0


def _in_memory(job: Path) -> Iterator[str]:
    """What agents that live on this host hold, as the newest step told it."""
    agents = [fence.holder(path) for path in fence.living_agents(fence.control_dir(job))]
    row = RunRecord(job).newest("checkpoint/in_memory") if agents else {}
    if (step := int(row.get("checkpoint/in_memory", -1))) >= 0:
        copied = int(row.get("checkpoint/replicated", -1))
        twice = f" (on two nodes: step {copied})" if copied >= 0 else ""
        yield f"step {step}{twice}, by agents {', '.join(map(str, agents))}"


def _row(run: Run, manifest: Manifest, name: str, latest: str) -> dict[str, str]:
    score = manifest.loop.get("scores", {}).get(str(manifest.step))
    tags = run.storage.list("tags")
    label = run.storage.get(f"tags/{name}").decode() or "yes" if name in tags else ""
    exported = run.job and (run.job / "huggingface" / f"step_{manifest.step:08d}").is_dir()
    return {
        "name": name,
        "step": str(manifest.step),
        "attempt": str(manifest.epoch),
        "age": _age(run, name),
        "size": _size(manifest.bytes),
        "layout": _layout(manifest),
        "score": "" if score is None else f"{score:.4g}",
        "tag": label,
        "exported": "yes" if exported else "",
        "": LATEST if name == latest else "",
    }


def _latest(storage: Storage) -> str:
    told = catalog.hint(storage)
    return told.name if told else ""


def _age(run: Run, name: str) -> str:
    path = Path(run.where, name, MANIFEST)
    if not path.is_file():
        return "-"  # an object store's times are not asked for
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _layout(manifest: Manifest) -> str:
    sizes = manifest.about.get("layout") or {}
    return (
        " ".join(f"{name}{sizes[name]}" for name in PARALLEL if sizes.get(name, 1) > 1)
        or f"{manifest.world} rank"
    )


def _print_apart(title: str, lines: Iterable[str]) -> None:
    for line in lines:
        print(f"{title}: {line}")


# --- show -----------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> int:
    run, name = find_checkpoint(options.checkpoint, options.version)
    with Checkpoint(run.storage, name) as checkpoint:
        manifest, about = checkpoint.manifest, checkpoint.manifest.about
        print(checkpoint.where)
        lines = {
            "step": manifest.step,
            "attempt": manifest.epoch,
            "save": manifest.id,
            "format": manifest.format,
            "ranks": manifest.world,
            "layout": json.dumps(about.get("layout")),
            "size": _size(manifest.bytes),
            "age": _age(run, name),
        }
        if manifest.base:
            lines["on disk"] = f"{_size(manifest.size)}, what changed since v {manifest.base[0]}"
        lines |= {key: value for key, value in sorted(about.items()) if key != "layout"}
        for key, value in lines.items():
            print(f"  {key:<14}{value}")
        print("cut")
        for key, value in sorted(flat(manifest.loop).items()):
            print(f"  {key:<24}{json.dumps(value)}")
        print("tensors")
        for line in _kinds(checkpoint):
            print(f"  {line}")
        for key, (dtype, shape) in sorted(checkpoint.tensors.items()) if options.tensors else []:
            print(f"  {key}  {dtype} {list(shape)}")
    return 0


def _kinds(checkpoint: Checkpoint) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for key, (dtype, shape) in checkpoint.tensors.items():
        kinds[key.partition("/")[0], dtype].append(prod(shape))
    for (kind, dtype), sizes in kinds.items():
        size = _size(sum(sizes) * ITEM_BYTES[dtype])
        yield f"{kind:<12}{len(sizes):>6} tensors {sum(sizes):>16,} elements  {dtype:<9} {size}"


# --- verify ---------------------------------------------------------------------------------------


def verify(options: argparse.Namespace) -> int:
    run, names, gone = _asked(options.checkpoint)
    for line in gone:
        print(line)
    bad = len(gone)
    for name in names:
        began = time.monotonic()
        try:
            with Checkpoint(run.storage, name) as checkpoint:
                with progress(name, checkpoint.manifest.bytes) as seen:
                    checkpoint.verify(seen)
                size = checkpoint.manifest.bytes
        except (Damaged, Mismatch, StorageUnreachable) as error:
            bad += 1
            state = "UNREADABLE" if isinstance(error, StorageUnreachable) else "DAMAGED"
            print(f"{name}  {state}  {error}")
            continue
        print(
            f"{name}  good  {_size(size)}  every byte read and checked in "
            f"{time.monotonic() - began:.1f} s"
        )
    return 1 if bad else 0


def _asked(text: str) -> tuple[Run, list[str], list[str]]:
    """One checkpoint, or all of a run: full and weights only, with a sound manifest or not; and a
    line for each that was committed and is none any more.
    """
    if "@" in text or step_of(text.rstrip("/")) is not None:
        run, name = find_checkpoint(text)
        return run, [name], []
    run = find_run(text)
    found = [*run.storage.list()]
    for collection in (WEIGHTS, VERSIONS):
        found += [f"{collection}/{name}" for name in run.storage.list(collection)]
    names = [
        path for path in found if step_of(path) is not None and MANIFEST in run.storage.list(path)
    ]
    gone = []
    for collection in COLLECTIONS:
        lost, astray = (
            catalog.lost(run.storage, collection),
            catalog.astray(run.storage, collection),
        )
        gone += [f"{path}  DAMAGED  {run.where}/{path}/{MANIFEST} is missing" for path in lost]
        if astray and astray not in lost:
            gone.append(f"{astray}  DAMAGED  {LATEST} names it, and it is no checkpoint any more")
    if not names and not gone:
        raise InputError(f"{run.where}: no checkpoints")
    return run, names, gone


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr where that is a terminal. Yields what hears of bytes."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


# --- diff -----------------------------------------------------------------------------------------


def diff(options: argparse.Namespace) -> int:
    """Exit code 1 when anything differs."""
    (run_a, name_a), (run_b, name_b) = find_checkpoint(options.a), find_checkpoint(options.b)
    with Checkpoint(run_a.storage, name_a) as a, Checkpoint(run_b.storage, name_b) as b:
        lines = [*_only(a, b), *_only(b, a)]
        both = [key for key in a.tensors if key in b.tensors]
        same = [key for key in both if a.tensors[key] == b.tensors[key]]
        lines += _few(
            [f"{key}: {_kind(a, key)} and {_kind(b, key)}" for key in both if key not in same]
        )
        found = _differing(a, b, same)
        for largest, count, key in found:
            lines.append(
                f"{key}: {count:,} of {prod(a.tensors[key][1]):,} elements, "
                f"by at most {largest:.3g}"
            )
        lines += _loop_lines(a.manifest.loop, b.manifest.loop)
        print(f"A  {a.where}\nB  {b.where}")
        for line in lines:
            print(line)
        print(f"{len(found)} of {len(same)} tensors that both hold alike differ in value")
    return 1 if lines else 0


def _only(one: Checkpoint, other: Checkpoint) -> list[str]:
    return _few([f"{key}: only in {one.where}" for key in one.tensors if key not in other.tensors])


def _few(lines: list[str]) -> list[str]:
    """What is so for whole kinds of tensors need not be said of each."""
    if len(lines) <= SHOWN:
        return lines
    return [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more like that"]


def _differing(a: Checkpoint, b: Checkpoint, keys: list[str]) -> list[tuple[float, int, str]]:
    """(largest difference, elements, key) of all that differ,
    the largest first, NaN before that.
    """
    found = []
    total = sum(prod(a.tensors[key][1]) * ITEM_BYTES[a.tensors[key][0]] for key in keys)
    with progress("comparing", total) as seen:
        for key in keys:
            count, largest = _difference(a, b, key, seen)
            if count:
                found.append((largest, count, key))
    return sorted(found, key=lambda entry: (-np.nan_to_num(entry[0], nan=np.inf), entry[2]))


def _kind(checkpoint: Checkpoint, key: str) -> str:
    dtype, shape = checkpoint.tensors[key]
    return f"{dtype} {list(shape)}"


def _difference(
    a: Checkpoint, b: Checkpoint, key: str, seen: Callable[[int], object]
) -> tuple[int, float]:
    """(number of elements whose bytes differ, largest absolute difference)."""
    dtype, shape = a.tensors[key]
    count, largest = 0, 0.0
    for claim in slabs(Tensor(key, key, dtype, shape)):
        one, two = a.elements(claim), b.elements(claim)
        unequal = one != two
        if unequal.any():
            count += int(unequal.sum())
            gap = np.abs(values(one[unequal], dtype) - values(two[unequal], dtype))
            largest = float(np.maximum(largest, gap.max()))
        seen(claim.bytes)
    return count, largest


def values(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that a checkpoint's unsigned integers stand for, as float64."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view("?" if dtype == "bool" else dtype).astype(np.float64)


def _loop_lines(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    one, two = flat(a), flat(b)
    for key in sorted(one.keys() | two.keys()):
        if one.get(key) != two.get(key):
            yield f"cut {key}: {json.dumps(one.get(key))} and {json.dumps(two.get(key))}"


# --- tag ------------------------------------------------------------------------------------------


def tag(options: argparse.Namespace) -> int:
    run, name = _full(options.checkpoint)
    run.storage.begin("tags")
    run.storage.put(f"tags/{name}", options.label.encode())
    print(f"{run.where}/{name} is tagged: retention keeps it")
    return 0


def untag(options: argparse.Namespace) -> int:
    run, name = _full(options.checkpoint)
    if name not in run.storage.list("tags"):
        raise InputError(f"{run.where}/{name} has no tag")
    run.storage.discard(f"tags/{name}")
    print(f"{run.where}/{name} has no tag any more: retention decides at the next save")
    return 0


def _full(text: str) -> tuple[Run, str]:
    run, name = find_checkpoint(text)
    if not name.startswith("step_"):
        raise InputError(f"{text} holds weights only; tags are for checkpoints")
    return run, name


# --- gc -------------------------------------------------------------------------------------------


def gc(options: argparse.Namespace) -> int:
    """Versions that sampled no token of what the journal holds; the newest of each attempt stays,
    and with every one that stays what it is made of.
    """
    run = find_run(options.run)
    entries = catalog.list_entries(run.storage, VERSIONS, is_complete=True)
    if not entries:
        raise InputError(f"{run.where}: no versions are kept")
    if run.job is None:
        raise InputError(
            f"{run.where}: which versions are needed says the journal in the run's "
            "directory; give that"
        )
    tokens = versions_of(str(run.job), options.name)
    newest = {entry.epoch: entry for entry in entries}  # which the next may be a patch of
    wanted = [e for e in entries if e.step in tokens or newest[e.epoch] is e]
    kept = catalog.with_bases(wanted, entries)
    gone = [entry for entry in entries if entry.path not in kept]
    told = [entry.path for entry in entries if entry.step in tokens]
    print(f"{sum(tokens.values())} stored tokens are of versions {ranges(told) or 'that are gone'}")
    words = f"{len(gone)} of {len(entries)} versions, {_size(sum(e.bytes for e in gone))}"
    if not options.remove:
        print(f"to go: {ranges(e.path for e in gone) or 'none'} ({words}); --remove removes them")
        return 0
    for entry in reversed(gone):  # a patch before what it is made of
        run.storage.remove(entry.path)
    print(f"removed: {words}")
    return 0


# --- other formats --------------------------------------------------------------------------------


def export(options: argparse.Namespace) -> int:
    from rft.tools import convert

    run, name = find_checkpoint(options.checkpoint, options.version)
    target = Path(options.target).absolute()
    write = {"hf": convert.to_hf, "torch_dist": convert.to_torch_dist}[options.to]
    if write(run, name, options.model, target, progress):
        print(f"{run.where}/{name} exported to {target}")
    elif convert.is_export(target):
        print(f"{target} is there already, nothing was done")
    else:
        raise InputError(f"{target} is there already, and is no export: give a path that is new")
    return 0


def import_(options: argparse.Namespace) -> int:
    from rft.tools import convert

    job = Path(options.run_dir).absolute()
    name, words = convert.import_(
        Path(options.source).absolute(), job, options.step, options.model, options.dtype, progress
    )
    print(f"{job / 'checkpoints' / name} made of {options.source}: {words}")
    return 0
