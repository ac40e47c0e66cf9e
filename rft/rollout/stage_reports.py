"""What engine workers say of a round that they receive beside their decoding: one line each, over a Unix socket.

vLLM's own calls to its workers block the decoding, so the end of a stage cannot be one. In: connections of workers, each open
for as long as the worker receives. Out: every worker's report, or the error of the first that failed. Invariant: a worker that
dies closes its connection, and that is a report too.
"""

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any


class StageReports:
    """One round: `async with StageReports(workers) as reports`, hand out `path`, await `all`."""

    def __init__(self, workers: int):
        self.workers = workers
        self._heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def __aenter__(self) -> "StageReports":
        self._directory = tempfile.mkdtemp(prefix="rft-")  # readable by this user only
        self.path = str(Path(self._directory) / "stage")
        self._server = await asyncio.start_unix_server(self._listen, self.path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        shutil.rmtree(self._directory)

    async def all(self, timeout: float) -> list[dict[str, Any]]:
        """All reports; if one of them is a failure, that one alone: the others may never come."""
        found = []
        async with asyncio.timeout(timeout):
            for _ in range(self.workers):
                report = await self._heard.get()
                if "error" in report:
                    return [report]
                found.append(report)
        return found

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.close()
        died = {"error": "a worker ended while it received weights", "kind": "broken"}
        self._heard.put_nowait(json.loads(line) if line else died)
