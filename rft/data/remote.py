"""Data that is somewhere else: data sets of a hub and files behind URLs, as files of this node.

In: a `path` that names one, with `split` and `subset_name` as `datasets.load_dataset` takes them.
Out: the path with what it means now, a commit or the SHA-256 of a file; the data files in the order
of `datasets`, in the caches of `huggingface_hub` and `datasets`. Invariants: which files a split
has is decided by `datasets` itself, from the card and the names of all files, before one of them is
fetched; only those are; nothing of a data set is run. A path with its commit or checksum means the
same rows for ever, and what is in the cache is taken without a network.
"""

import dataclasses
import fnmatch
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from rft.ground import durable, hubs, redact
from rft.ground.errors import ConfigError, Late
from rft.ground.hubs import Found, Name

CARDS = ("README.md", ".huggingface.yaml", "dataset_infos.json")
OWN = ("name", "version", "data_dir", "data_files", "description", "features")
ADDRESS = re.compile(r"(?P<address>https?://[^#\s]+)(#sha256=(?P<revision>[0-9a-f]{64}))?")


@dataclass(frozen=True)
class Address:
    """A file behind a URL; `revision`: the SHA-256 of its content."""

    address: str
    revision: str | None = None

    def at(self, revision: str) -> "Address":
        return replace(self, revision=revision)

    def __str__(self) -> str:
        return self.address + (f"#sha256={self.revision}" if self.revision else "")

    @property
    def repository(self) -> str:
        """As `resolved.yaml` notes its checksum, without the secrets of an address."""
        return redact.text(str(self))


def source_of(path: str | None, suffixes: tuple[str, ...]) -> Name | Address | None:
    """None: a path of this node, or none at all."""
    if match := ADDRESS.fullmatch(path or ""):
        return Address(**match.groupdict())
    return hubs.name_of(path, "dataset", suffixes) if path else None


@dataclass(frozen=True)
class Looked:
    """`revision`: what the source means now; `missing`: bytes that are still to be fetched."""

    revision: str
    missing: int = 0


def look(source: Name | Address, split: str, subset: str | None, key: str) -> Looked:
    """What there is, asked of the hub; an address has its file fetched, which tells no less."""
    if isinstance(source, Address):
        return Looked(_downloaded(source, key).parent.name)
    found, files = _chosen(source, split, subset, key)
    hubs.check_room(found, files, f"{key}.path")
    return Looked(str(found.name.commit), found.missing(files))


def files(source: Name | Address, split: str, subset: str | None, key: str) -> list[Path]:
    """Here; fetched if need be."""
    if isinstance(source, Address):
        return [_downloaded(source, key)]
    found, chosen = _chosen(source, split, subset, key)
    with hubs.told(found.name, f"{key}.path"):
        hubs.fetch(found, chosen)
    return [found.folder / one for one in chosen]


# --- data sets of a hub ---------------------------------------------------------------------------


def _chosen(name: Name, split: str, subset: str | None, key: str) -> tuple[Found, list[str]]:
    """The commit, and the files of the split."""
    found = hubs.find(name, f"{key}.path")
    if name.file:
        matching = fnmatch.filter(sorted(found.sizes), name.file)
        if not matching:
            raise ConfigError(f"{key}.path: {name} is not among the files of {name.repo}")
        return found, matching
    with hubs.told(found.name, f"{key}.path"):
        hubs.fetch(found, [one for one in CARDS if one in found.sizes])
    splits = _splits(found.name, found.folder, tuple(found.sizes), subset, key)
    if split not in splits:
        there = ", ".join(splits) or "none"
        raise ConfigError(f"{key}.split: {name} has no split {split!r}; there are {there}")
    return found, splits[split]


@functools.lru_cache(maxsize=16)
def _splits(
    name: Name, folder: Path, there: tuple[str, ...], subset: str | None, key: str
) -> dict[str, list[str]]:
    """The files of every split, as `datasets` sees them in a folder with the same names, which are
    all that it sees; `folder` has the card.
    """
    import datasets

    with tempfile.TemporaryDirectory() as root:
        outline = Path(root).resolve() / name.repo.partition("/")[2]
        for one in there:
            (outline / one).parent.mkdir(parents=True, exist_ok=True)
            (outline / one).touch()
        for card in CARDS:
            if (folder / card).exists():
                shutil.copyfile(folder / card, outline / card)
        try:
            names = datasets.get_dataset_config_names(str(outline))
            if subset not in names and (subset or len(names) > 1 and "default" not in names):
                raise ConfigError(
                    f"{key}.subset_name: {name} has no subset {subset!r}; there are "
                    f"{', '.join(names)}"
                )
            builder = datasets.load_dataset_builder(str(outline), name=subset)
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            why = str(error).replace(str(outline), str(name)).splitlines()[0]
            raise ConfigError(
                f"{key}.path: {name} is no data set of plain files ({why}): give its data "
                "files, as hf://datasets/org/name/FILE, or download and convert them"
            ) from error
        _check_reading(builder.config, name, key)
        return {
            str(split): [str(Path(one).relative_to(outline)) for one in chosen]
            for split, chosen in (builder.config.data_files or {}).items()
        }


def _check_reading(config: Any, name: Name, key: str) -> None:
    """A card may say how its files are to be read, which rft does not follow."""
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if one.name not in OWN and one.default is not dataclasses.MISSING and value != one.default:
            raise ConfigError(
                f"{key}.path: the card of {name} has its files read with {one.name}={value!r}, "
                "which rft does not do: download and convert them"
            )


# --- files behind URLs ----------------------------------------------------------------------------


def _downloaded(source: Address, key: str) -> Path:
    """The file, under its own name in a folder called like its checksum."""
    import datasets

    root = Path(datasets.config.DOWNLOADED_DATASETS_PATH) / "rft"
    named = PurePosixPath(urlsplit(source.address).path).name or "data"
    if source.revision and (root / source.revision / named).exists():
        return root / source.revision / named
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / ".lock"):
        came = _fetched(source, key)
        with came.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if source.revision not in (None, digest):
            raise ConfigError(
                f"{key}.path: {redact.text(source.address)} is no longer the file with sha256 "
                f"{source.revision}: give that one as a local file, or begin a new run (another "
                "name) with what is there now"
            )
        place = root / digest / named
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            place.unlink(missing_ok=True)
            place.symlink_to(came)
    return place


def _fetched(source: Address, key: str) -> Path:
    """By the cache of `datasets`, which fetches again what has another ETag."""
    import aiohttp
    import datasets

    datasets.disable_progress_bars()
    try:
        return Path(str(datasets.DownloadManager().download(source.address)))
    except (OSError, aiohttp.ClientError, ValueError) as error:
        why = redact.text(" ".join(str(error).split()))[:160] or type(error).__name__
        raise ConfigError(
            Late(
                f"{key}.path: {redact.text(source.address)} cannot be fetched ({why}): see to the "
                "address and the network, or give a local file"
            )
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    held = durable.lock(path, wait_s=hubs.FETCH_S)
    if held is None:
        raise ConfigError(
            Late(f"another process has held {path} for more than {hubs.FETCH_S / 3600:g} h: end it")
        )
    try:
        yield
    finally:
        os.close(held)
