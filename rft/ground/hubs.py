"""Models and data of a hub by their names: which commit a name means, which of its files are
needed, and these files on this node. Everything is asked through `huggingface_hub`: its cache
(HF_HOME, HF_HUB_CACHE), its switch HF_HUB_OFFLINE, its HF_ENDPOINT and its tokens hold, and no
token is read here.

In: `org/name`, `org/name@revision` or `hf://datasets/org/name@revision/file` where a path could
stand. Out: `Found`, the commit with its folder in the cache and its files; the folder with the
files in it (`fetch`, `bring`). Invariants: what is a path here is no name; a commit that is known
is never asked for again, so a run goes on with it when the hub has moved on; of a repository one
process of a node fetches at a time, the others find it done; neither pickles nor code are fetched.

The folder of a model, `CACHE/models--org--name/snapshots/COMMIT`, is its path from preflight on. It
says what should be in it, so every node can make its own.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any, Literal

from rft.ground import durable
from rft.ground.errors import ConfigError, Late, unreadable

Kind = Literal["model", "dataset"]
COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^@\s]+))?")
FILE = re.compile(
    r"hf://datasets/(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^@/\s]+))?(/(?P<file>\S+))?"
)
SNAPSHOT = re.compile(r"(?P<cache>.+)/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
FETCH_S = 4 * 3600.0  # that another process may take for what this one needs too
SMALL = (".json", ".model", ".txt", ".jinja", ".tiktoken")  # of a model, beside its weights
TEMPLATES = "additional_chat_templates/"
INDEX = "model.safetensors.index.json"
# what says what else is needed; a card may be missing, the other file is in every repository
FIRST = {"model": ["config.json"], "dataset": ["README.md", ".gitattributes"]}
ON = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class Name:
    """`file`: of a data set, one file of it, or a pattern; empty: all."""

    kind: Kind
    repo: str
    revision: str | None = None
    file: str = ""

    @property
    def commit(self) -> str | None:
        """Where the revision is one and can mean nothing else."""
        return self.revision if COMMIT.fullmatch(self.revision or "") else None

    def at(self, revision: str) -> "Name":
        return replace(self, revision=revision)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        place = f"{self.repo}{revision}"
        return f"hf://datasets/{place}/{self.file}" if self.file else place

    @property
    def repository(self) -> str:
        """As `resolved.yaml` notes its commit: models and data may share a name."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{'datasets/' if self.kind == 'dataset' else ''}{self.repo}{revision}"


@dataclass(frozen=True)
class Found:
    """A name with its commit, the folder of that, which need not be there yet, and the bytes of
    every file that the commit has.
    """

    name: Name
    folder: Path
    sizes: dict[str, int]

    def missing(self, files: Sequence[str]) -> int:
        """Bytes that are still to be fetched."""
        return sum(self.sizes.get(one, 0) for one in files if not (self.folder / one).exists())


def name_of(text: str, kind: Kind, suffixes: tuple[str, ...] = ()) -> Name | None:
    """None: a path. `suffixes`: what a file has, and no repository."""
    if text.startswith("hf://"):
        match = FILE.fullmatch(text) if kind == "dataset" else None
        match = match or NAME.fullmatch(text.removeprefix("hf://").removeprefix(f"{kind}s/"))
    elif text.endswith(suffixes or ("://",)) or unreadable(text) or Path(text).exists():
        return None
    else:
        match = NAME.fullmatch(text)
    if match is None:
        return None
    told = match.groupdict()
    return Name(kind, told["repo"], told["revision"], told.get("file") or "")


# --- what there is --------------------------------------------------------------------------------


def find(name: Name, key: str) -> Found:
    """Ask the hub, or without it the cache; raises ConfigError with what to do. `key`: of the
    config, which has the name.
    """
    with told(name, key):
        folder = Path(_download(name, FIRST[name.kind]))
    return Found(name.at(folder.name), folder, _sizes(name.at(folder.name), folder))


def find_model(name: Name, key: str, weights: bool, code: bool) -> Found:
    """And fetch what is small: config and tokenizer. `weights`: they are needed, and have to be
    there, and to fit; `code`: so is its own Python.
    """
    found = find(name, key)
    with told(name, key):
        fetch(found, small_files(found, code))
    if not weights:
        return found
    needed = weight_files(found)
    if not needed:
        raise ConfigError(
            f"{key}={name} has no *.safetensors: take a repository that has them; pickled weights "
            "(.bin, .pt) and .gguf are not read"
        )
    check_room(found, needed, key)
    return found


def check_room(found: Found, files: Sequence[str], key: str) -> None:
    there = found.folder
    while not there.exists():
        there = there.parent
    free, wanted = shutil.disk_usage(there).free, found.missing(files)
    if wanted > free:
        raise ConfigError(
            f"{key}={found.name} has {wanted / 1e9:.1f} GB to fetch, and {there} has "
            f"{free / 1e9:.1f} GB free: make room, or set HF_HOME to a larger disk"
        )


def small_files(found: Found, code: bool) -> list[str]:
    endings = (*SMALL, ".py") if code else SMALL
    return [
        one
        for one in found.sizes
        if one.startswith(TEMPLATES) or ("/" not in one and one.endswith(endings))
    ]


def weight_files(found: Found) -> list[str]:
    return weights_among(found.folder, found.sizes)


def local_weights(folder: Path) -> list[Path]:
    """The files of a directory that hold its weights; one that the index names may be missing."""
    there = [path.name for path in sorted(folder.glob("*.safetensors"))]
    return [folder / one for one in weights_among(folder, there)]


def absent_weights(folder: Path) -> str:
    """What a directory of a model lacks of them, as where a download has broken off."""
    files = local_weights(folder)
    absent = (file.name for file in files if not file.exists())
    return ", ".join(absent) if files else "*.safetensors"


def weights_among(folder: Path, there: Iterable[str]) -> list[str]:
    """Those that the index names; without one, those at the top that are no second copy."""
    index = folder / INDEX
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} cannot be read ({error}): fetch it again") from error
    top = [one for one in there if "/" not in one and one.endswith(".safetensors")]
    whole = [one for one in top if one == "model.safetensors"]
    return whole or [one for one in top if not one.startswith("consolidated")]


def _sizes(name: Name, folder: Path, cache: str | None = None) -> dict[str, int]:
    """As the client has them noted; where it has not, what is there."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(
            name.repo, repo_type=name.kind, revision=name.revision, cache_dir=cache
        )
    except CachedRepoTreeNotFoundError:
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    return {one.path: one.size for one in files}


# --- bringing it here -----------------------------------------------------------------------------


def fetch(found: Found, files: Sequence[str], cache: str | None = None) -> Path:
    """These files, once per node: whoever comes second waits for the first, and finds them."""
    folder = found.folder
    if all((folder / one).exists() for one in files):
        return folder
    lock = folder.parents[2] / ".locks" / f"rft--{folder.parents[1].name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = durable.lock(lock, wait_s=FETCH_S)
    if held is None:
        raise TimeoutError(
            f"another process has fetched {found.name} for more than {FETCH_S / 3600:g} h; "
            "end it, and the next start goes on where it was"
        )
    try:
        if missing := [one for one in files if not (folder / one).exists()]:
            size = found.missing(missing)
            if is_large := size > 10**7:
                said = f"{len(missing)} files, {size / 1e9:.2f} GB, into {folder}"
                print(f"rft: fetching {found.name}: {said}", file=sys.stderr, flush=True)
            _download(found.name, files, cache, shown=is_large)
    finally:
        os.close(held)
    for one in files:  # a cache that others have filled may have less than it was asked for
        if not (folder / one).exists():
            raise FileNotFoundError(f"{one} is not there")
    return folder


def is_snapshot(path: str) -> bool:
    """Whether this is where the cache of some node has a model of a hub."""
    return SNAPSHOT.fullmatch(path) is not None


def title(path: str) -> str:
    """What a model is called: the name of its directory, or of its repository."""
    match = SNAPSHOT.fullmatch(path)
    return match["repo"].rpartition("--")[2] if match else Path(path).name


def bring(path: str, weights: bool = True, code: bool = False) -> None:
    """Have the model of this folder of a cache on this node; nothing for any other path. Raises
    ConfigError where that cannot be.
    """
    if (match := SNAPSHOT.fullmatch(path)) is None:
        return
    name = Name("model", match["repo"].replace("--", "/", 1), match["commit"])
    folder, cache = Path(path), match["cache"]
    with told(name, "model.model_path"):
        if not (folder / FIRST["model"][0]).exists():
            _download(name, FIRST["model"], cache)
        found = Found(name, folder, _sizes(name, folder, cache))
        fetch(found, small_files(found, code), cache)
        if weights:
            fetch(found, weight_files(found), cache)


def is_offline(kind: Kind) -> bool:
    """By a switch: that of the client, or for data that of `datasets`."""
    from huggingface_hub import constants

    own = os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ON
    return constants.is_offline_mode() or (kind == "dataset" and own)


def _download(
    name: Name, files: Sequence[str], cache: str | None = None, shown: bool = False
) -> str:
    from huggingface_hub import snapshot_download

    with _bars(shown):
        return snapshot_download(
            name.repo,
            repo_type=name.kind,
            revision=name.revision,
            cache_dir=cache,
            allow_patterns=[escape(one) for one in files],
            local_files_only=is_offline(name.kind),
        )


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Progress is for a terminal, and for what takes a while; HF_HUB_DISABLE_PROGRESS_BARS wins."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or (shown and sys.stderr.isatty()):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


# --- what to say of a hub -------------------------------------------------------------------------


@contextlib.contextmanager
def told(name: Name, key: str) -> Iterator[None]:
    """What the client raises, as a sentence about `key` with the fix."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except ConfigError:
        raise
    except GatedRepoError as error:
        said = f"is gated: ask for access at {_page(name)}, then {_TOKEN}"
        raise _refusal(name, key, said) from error
    except RepositoryNotFoundError as error:
        said = (
            f"is no path here, and {_page(name)} is not there, or private: correct the name or the "
            f"path; for a private one {_TOKEN}"
        )
        raise _refusal(name, key, said) from error
    except RevisionNotFoundError as error:
        raise _refusal(name, key, f"has no such revision; {_revisions(name)}") from error
    except (OSError, HTTPError) as error:
        raise _refusal(name, key, _unreachable(name, error)) from error


_TOKEN = "set HF_TOKEN to a token that may read it (or `hf auth login`)"


def _refusal(name: Name, key: str, said: str) -> ConfigError:
    return ConfigError(Late(f"{key}: {name} {said}"))


def _page(name: Name) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"


def _revisions(name: Name) -> str:
    """Best told by the hub; a hub that is gone by now tells nothing."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        refs: Any = HfApi().list_repo_refs(name.repo, repo_type=name.kind)
    except (OSError, HTTPError) as error:
        return f"which there are, it does not say ({error})"
    there = [one.name for one in (*refs.branches, *refs.tags)]
    return f"there are {', '.join(there[:12]) or 'none'}: write {name.repo}@REVISION, or a commit"


def _unreachable(name: Name, error: BaseException) -> str:
    """The client's error has what it met as its cause."""
    from huggingface_hub import constants

    option = " --repo-type dataset" if name.kind == "dataset" else ""
    option += f" --revision {name.revision}" if name.revision else ""
    fetched = f"`hf download {name.repo}{option}`"
    if is_offline(name.kind):
        return (
            f"is not, or not whole, in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE (or "
            f"HF_DATASETS_OFFLINE) is set: unset it, or fill the cache by {fetched} where there is "
            "a network, or give a local folder"
        )
    met = error.__cause__ or error
    why = " ".join(str(met).split())[:160] or type(met).__name__
    return (
        f"is no path here, is not whole in the cache {constants.HF_HUB_CACHE}, and "
        f"{constants.ENDPOINT} cannot be asked ({why}): see to the network, name a mirror in "
        f"HF_ENDPOINT, fill the cache by {fetched} elsewhere and bring it here (HF_HOME, "
        "HF_HUB_OFFLINE=1), or give a local folder"
    )
