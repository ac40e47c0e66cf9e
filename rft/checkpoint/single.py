"""A checkpoint made by one process from arrays, without agents: imports, and tests that need one.

In: tensors as claims with a function that gives their bytes. Out: a committed directory that any
run of that model loads. The same writer and the same commit as in training: receipts, verification,
manifest, rename. Invariant: nothing is published while an agent of a run still lives.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rft.checkpoint import commit, fence, sharding
from rft.checkpoint.records import (
    ALIGN,
    Begin,
    CheckpointSettings,
    Committed,
    Output,
    Report,
    Retention,
    SaveFailed,
)
from rft.checkpoint.sharding import Claim
from rft.checkpoint.storage import Storage
from rft.checkpoint.writer import Writer

DEADLINE_S = 3600.0


class Busy(RuntimeError):
    """A run writes here."""


@dataclass(frozen=True)
class TensorSource:
    """One whole tensor: what it is, and how to get its elements in pieces, in row-major order."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[np.ndarray]]

    @property
    def claim(self) -> Claim:
        return Claim(self.key, self.dtype, self.shape, (0,) * len(self.shape), self.shape, None)


def write(
    storage: Storage,
    control: Path,
    step: int,
    sources: list[TensorSource],
    *,
    small: dict[str, bytes] | None = None,
    loop: dict[str, Any] | None = None,
    about: dict[str, Any] | None = None,
    seen: Callable[[int], object] = lambda count: None,
) -> str:
    """Commit a checkpoint of `step` as the newest one; its name. `seen(bytes)` hears of progress.

    Raises Busy, OSError, or ValueError when a source gives more or fewer bytes than its shape has.
    """
    if alive := fence.living_agents(control):
        raise Busy(
            f"{storage.where}: a run is at work here ({len(alive)} checkpoint agents); stop it, "
            "then write a checkpoint"
        )
    storage.prepare()
    epoch = fence.take_epoch(control)
    # as `place` does
    ordered = sorted(sources, key=lambda source: not source.key.startswith(sharding.MODEL))
    regions = sharding.place([source.claim for source in ordered])
    sharding.check_coverage(regions)
    identity = f"e{epoch:04d}n0000"
    draft, final = commit.names_of(storage, "", step, identity)
    output = Output(
        collection="",
        draft=draft,
        final=final,
        regions=regions,
        layout=sharding.digest([regions]),
        bytes=sharding.extent(regions),
        retention=Retention(),
    )
    begin = Begin(
        id=identity,
        step=step,
        outputs=[output],
        small=small or {},
        local={},
        loop=(loop or {}) | {"step": step},
        about=about or {},
    )
    settings = CheckpointSettings(
        root=storage.where,
        control=str(control),
        rank=0,
        world=1,
        epoch=epoch,
        slots=[],
        slot_bytes=0,
        strategy="unrestricted",
        rate_limit=0.0,
        deadline_s=DEADLINE_S,
        lease_s=0.0,
    )
    _fill(Writer(begin, settings, storage, lambda count: None), ordered, output, storage, seen)
    return _commit(begin, output, settings, storage)


def _fill(
    writer: Writer,
    sources: list[TensorSource],
    output: Output,
    storage: Storage,
    seen: Callable[[int], object],
) -> None:
    """All bytes in the order of the file, or no draft."""
    try:
        at = 0
        writer.window(memoryview(b""), 0)
        for source, region in zip(sources, output.regions, strict=True):
            begun = at
            for part in source.parts():
                data = (
                    memoryview(np.ascontiguousarray(part).reshape(-1)).cast("B")
                    if part.size
                    else memoryview(b"")
                )
                writer.window(data, at)
                at += len(data)
                seen(len(data))
            if at - begun != region.bytes:
                raise ValueError(
                    f"{source.key}: {at - begun} bytes were given, its shape has {region.bytes}"
                )
            padding = bytes(-region.bytes % ALIGN)
            writer.window(memoryview(padding), at)
            at += len(padding)
        writer.finish()
    except BaseException:
        writer.abort()
        # what went wrong is what counts, also when the draft was never made
        with contextlib.suppress(OSError):
            storage.remove_draft(output.draft)
        raise


def _commit(begin: Begin, output: Output, settings: CheckpointSettings, storage: Storage) -> str:
    heard: list[Report] = []
    committer = commit.Committer(storage, settings, heard.append)
    committer.watch(begin, output, time.monotonic())
    while committer.drafts:
        committer.look()
    for report in heard:
        if isinstance(report, SaveFailed):
            raise OSError(f"{storage.where}: {report.cause}")
        if isinstance(report, Committed):
            return report.name
    raise AssertionError("a draft ends in a report")
