"""Orders to an engine's workers that vLLM knows nothing of: receive a round of weights beside the decoding.

    engine actor ── {"round", ...} ──► worker's thread       one line each way, over a Unix socket that stays open
                 ◄─ {"round", ...} ── when it has all, or failed

vLLM's own calls to its workers wait for the step that is being decoded, and hold up the next one, so neither the beginning nor the
end of a stage is one. In: one order per round. Out: every worker's report, or the first that tells of a failure. Invariants: a
report of an earlier round is not taken for one of this; a worker that dies closes its connection, and that is a report too.
"""

import asyncio
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

DIED = {"error": "a worker ended while it received weights", "kind": "broken"}


class Orders:
    """Life: `open`, tell every worker the path (each connects), `ask` as often as wanted, `close`."""

    def __init__(self, workers: int):
        self.workers = workers
        self._rounds = itertools.count(1)
        self._writers: list[asyncio.StreamWriter] = []
        self._heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._connected = asyncio.Condition()

    async def open(self) -> str:
        """The path that workers connect to."""
        self._directory = tempfile.mkdtemp(prefix="rft-")  # readable by this user only
        path = str(Path(self._directory) / "orders")
        self._server = await asyncio.start_unix_server(self._listen, path)
        return path

    async def ask(self, order: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """The workers' reports; if one of them is a failure, that one alone: the others may never come."""
        number, found = next(self._rounds), []
        line = json.dumps({**order, "round": number}).encode() + b"\n"
        async with asyncio.timeout(timeout):
            async with self._connected:
                await self._connected.wait_for(lambda: len(self._writers) == self.workers)
            for writer in self._writers:
                if writer.is_closing():
                    return [DIED]
                writer.write(line)
            while len(found) < self.workers:
                report = await self._heard.get()
                if report.pop("round", number) != number:
                    continue
                if "error" in report:
                    return [report]
                found.append(report)
        return found

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._connected:
            self._writers.append(writer)
            self._connected.notify_all()
        while line := await reader.readline():
            self._heard.put_nowait(json.loads(line))
        writer.close()
        self._heard.put_nowait(dict(DIED))

    def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        shutil.rmtree(self._directory)
