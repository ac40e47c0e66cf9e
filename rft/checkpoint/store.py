"""Durable files on a local path: write, fsync, rename, list. The only file of this package that touches a disk.

Invariant: a name that a reader looks for (`step_...`, `LATEST`) appears by rename of something complete and fsynced.
"""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

STEP_PREFIX = "step_"


class Store:
    """Checkpoints under `root`: `step_00000042/` when committed, `step_00000042.tmp-<id>/` while being written."""

    def __init__(self, root: Path):
        self.root = root

    def begin(self, step: int) -> Path:
        """A new directory to write step into; never an existing one."""
        self.root.mkdir(parents=True, exist_ok=True)
        directory = self.root / f"{STEP_PREFIX}{step:08d}.tmp-{uuid.uuid4().hex[:12]}"
        directory.mkdir()
        return directory

    def commit(self, written: Path, step: int) -> Path:
        """Publish `written` as step's directory. An already committed step is set aside, not written into."""
        target = self.path(step)
        if target.exists():
            target.rename(self.root / f".replaced-{target.name}-{uuid.uuid4().hex[:12]}")
        sync_directory(written)
        written.rename(target)
        sync_directory(self.root)
        write_text(self.root / "LATEST", target.name)
        return target

    def path(self, step: int) -> Path:
        return self.root / f"{STEP_PREFIX}{step:08d}"

    def steps(self) -> list[int]:
        """Committed steps, ascending: directories with a manifest (a name alone proves nothing)."""
        if not self.root.exists():
            return []
        names = (p for p in self.root.iterdir() if p.name.startswith(STEP_PREFIX) and (p / "MANIFEST.json").is_file())
        return sorted(int(p.name[len(STEP_PREFIX) :]) for p in names if p.name[len(STEP_PREFIX) :].isdigit())

    def latest_hint(self) -> str | None:
        hint = self.root / "LATEST"
        return hint.read_text(encoding="utf-8").strip() if hint.exists() else None

    def quarantine(self, step: int) -> Path:
        """Take a damaged checkpoint out of the list without deleting it."""
        target = self.root / f".bad-{self.path(step).name}-{uuid.uuid4().hex[:12]}"
        self.path(step).rename(target)
        return target

    def sweep(self) -> None:
        """Remove what earlier attempts left half written or set aside; called by one rank while nobody writes."""
        if self.root.exists():
            for path in self.root.iterdir():
                if ".tmp-" in path.name or path.name.startswith(".replaced-"):
                    shutil.rmtree(path)

    def retire(self, keep: int) -> None:
        """Delete all but the newest `keep` committed steps (0: keep all). Only ever called after a commit."""
        for step in self.steps()[:-keep] if keep else []:
            shutil.rmtree(self.path(step))


def write_text(path: Path, text: str) -> None:
    """Replace `path` atomically and durably."""
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
