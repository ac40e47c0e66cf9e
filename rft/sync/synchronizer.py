"""Who holds which policy version: leads every engine through each round and tells when all of them have a version.

    disconnected ── connect(plan, streams, epoch) ──► connected ── publish(v) ──► publishing
         ▲                                              ▲  ▲                         │  │
         │                                              │  └── every engine echoed ──┘  │
         └────── one failed, or the deadline passed ────┼───────────────────────────────┘
                                                        └── connect with a higher epoch, from any state

Consumes plans and version numbers from trainer rank 0, produces published versions for the experience buffer and for
`wait_for`. An engine may answer a higher version than the trainer's, after a resume from a checkpoint: the next publish
overwrites it, so versions may go back. Invariants: `version()` names a version that every engine has confirmed, with the plan's
digest; a trainer of a lower epoch can neither connect nor publish.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any

log = logging.getLogger(__name__)


class Synchronizer:
    """Runs as one Ray actor; every method is a coroutine on its event loop."""

    def __init__(self, engines: dict[str, Any], buffer: Any, timeout: float):
        self.engines = engines
        self.buffer = buffer
        self.timeout = timeout
        self.epoch = -1
        self.phase = "disconnected"
        self._digest: str | None = None
        self._version: int | None = None
        self._round = asyncio.Lock()
        self._published = asyncio.Condition()

    async def peers(self) -> list[str]:
        """Every engine worker that gets its own copy of the streams, in the order in which senders must connect."""
        stats = await self._all("telling their workers", {n: e.stats.remote() for n, e in self.engines.items()})
        return [f"{name}/{worker}" for name, facts in stats.items() for worker in range(facts["workers"])]

    async def connect(self, plan: dict[str, Any], streams: list[dict[str, Any]], epoch: int) -> None:
        """Let every engine join the streams of trainer epoch `epoch`. The trainer's senders must connect meanwhile."""
        if epoch <= self.epoch:
            raise ValueError(f"a trainer of epoch {epoch} cannot connect: epoch {self.epoch} has been here")
        self.epoch, self._digest = epoch, None
        async with self._round:
            self.phase = f"connecting epoch {epoch}"
            info = {"plan": plan, "streams": streams, "epoch": epoch, "timeout": self.timeout}
            asked = {n: e.init_weights.remote({**info, "engine": n}) for n, e in self.engines.items()}
            await self._all("connecting", asked)
            self._digest = str(plan["digest"])
            self.phase = "connected"

    async def publish(self, version: int, epoch: int | None = None) -> dict[str, float]:
        """One round on all engines at once; returns its numbers when every engine serves `version`."""
        async with self._round:
            self._check(version, epoch)
            began = time.monotonic()
            self.phase = f"publishing version {version}"
            update = {"digest": self._digest, "epoch": self.epoch, "timeout": self.timeout}
            digest, self._digest = self._digest, None  # a round that fails leaves its links closed
            asked = {n: e.update_weights.remote(version, update) for n, e in self.engines.items()}
            reports = await self._all(f"installing version {version}", asked)
            wrong = {n: r for n, r in reports.items() if (r["version"], r["digest"]) != (version, digest)}
            if wrong:
                raise RuntimeError(f"engines confirmed something else than version {version}, plan {digest}: {wrong}")
            self._digest = digest
            await self.buffer.published.remote(version, self.epoch)
            async with self._published:
                self._version = version
                self._published.notify_all()
            self.phase = "connected"
        return {
            "pause_s": max(r["pause_s"] for r in reports.values()),
            "receive_s": max(r["receive_s"] for r in reports.values()),
            "round_s": time.monotonic() - began,
            "bytes": float(sum(r["bytes"] for r in reports.values())),
            "engines": float(len(reports)),
        }

    async def version(self) -> int | None:
        """The version that every engine has confirmed; None before the first."""
        return self._version

    async def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Return the published version once it is at least `version`; TimeoutError after `timeout` seconds."""
        seconds = timeout if timeout is not None else self.timeout
        try:
            async with asyncio.timeout(seconds), self._published:
                await self._published.wait_for(lambda: self._version is not None and self._version >= version)
        except TimeoutError:
            raise TimeoutError(
                f"version {version} not published in {seconds} s: synchronizer is {self.phase}"
            ) from None
        assert self._version is not None
        return self._version

    async def watch(self) -> None:
        """Never returns: a failed round is raised to the trainer that asked for it."""
        await asyncio.get_running_loop().create_future()

    async def shutdown(self) -> None:
        self._digest, self.phase = None, "shut down"

    def _check(self, version: int, epoch: int | None) -> None:
        if epoch is not None and epoch != self.epoch:
            raise ValueError(f"version {version} comes from epoch {epoch}, the engines are connected to {self.epoch}")
        if self._digest is None:
            raise RuntimeError(
                f"version {version} cannot be published: {self.phase} ended without success; connect anew"
            )

    async def _all(self, doing: str, asked: dict[str, Awaitable[Any]]) -> dict[str, Any]:
        """Every engine's answer by name; one error that names all that failed or did not answer in time."""
        jobs = {name: asyncio.ensure_future(_answer(reference)) for name, reference in asked.items()}
        _, late = await asyncio.wait(jobs.values(), timeout=self.timeout)
        problems = [f"{name} did not answer in {self.timeout} s" for name, job in jobs.items() if job in late]
        problems += [
            f"{n}: {reason(job.exception())}" for n, job in jobs.items() if job not in late and job.exception()
        ]
        if problems:
            raise RuntimeError(f"engines {doing}: " + "; ".join(problems))
        return {name: job.result() for name, job in jobs.items()}


async def _answer(reference: Awaitable[Any]) -> Any:
    return await reference


def reason(error: BaseException | None) -> str:
    """What happened, in one line: of an error that came through Ray, what the remote method raised."""
    inner = getattr(error, "cause", None) or error
    return (str(inner).splitlines() or [type(inner).__name__])[0]
