"""Client of a Data-Juicer service: rows go there as Arrow, what the service makes of them comes back.

    GET /health                                         200 when it serves
    POST /create              JSON config               {"session_id"}
    POST /process_experience  session_id, arrow_data    an Arrow stream; metrics in the header X-Metrics
    POST /process_task        {"session_id"}            {"metrics"}; the service reads and writes the files of the config
    POST /close               {"session_id"}

Invariant: every call ends within its time, with an answer of the right form or a JuicerError that says what came instead.
"""

import asyncio
import json
from typing import Any

TRACEBACK = "Traceback"


class JuicerError(RuntimeError):
    """The service cannot be reached, refuses, fails, or answers something else."""


class JuicerClient:
    def __init__(self, url: str, timeout_s: float) -> None:
        import httpx

        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._http = httpx.AsyncClient(timeout=timeout_s)

    async def health(self) -> None:
        await self._call("GET", "/health")

    async def create(self, config: dict[str, Any]) -> str:
        """The name of a new session with these operators."""
        answer = self._json("/create", await self._call("POST", "/create", json=config))
        session = answer.get("session_id")
        if not isinstance(session, str) or not session:
            raise JuicerError(f"{self.url}/create answered {str(answer)[:200]}, in which there is no session_id")
        return session

    async def process_experience(
        self, session: str, rows: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        import pyarrow as pa

        table = pa.Table.from_pylist(rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        files = {"arrow_data": ("dataset.arrow", sink.getvalue().to_pybytes(), "application/octet-stream")}
        answer = await self._call("POST", "/process_experience", data={"session_id": session}, files=files)
        try:
            with pa.ipc.open_stream(answer.content) as reader:
                found = reader.read_all().to_pylist()
            metrics = json.loads(answer.headers.get("X-Metrics") or "{}")
        except (pa.ArrowInvalid, ValueError) as error:
            raise JuicerError(f"{self.url}/process_experience answered no Arrow stream: {error}") from error
        numbers = {
            str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)
        }
        return found, numbers

    async def process_task(self, session: str) -> dict[str, Any]:
        answer = self._json("/process_task", await self._call("POST", "/process_task", json={"session_id": session}))
        metrics = answer.get("metrics")
        if not isinstance(metrics, dict):
            raise JuicerError(f"{self.url}/process_task answered {str(answer)[:200]}, in which there are no metrics")
        return metrics

    async def close(self, session: str | None = None) -> None:
        try:
            if session is not None:
                await self._call("POST", "/close", json={"session_id": session})
        finally:
            await self._http.aclose()

    async def _call(self, method: str, path: str, **content: Any) -> Any:
        import httpx

        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._http.request(method, self.url + path, **content)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise JuicerError(f"{self.url}{path} gave no answer in {self.timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise JuicerError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise Refused(answer.status_code, f"{self.url}{path} answered {answer.status_code}: {reason(answer)}")
        return answer

    def _json(self, path: str, answer: Any) -> dict[str, Any]:
        try:
            found = answer.json()
        except ValueError as error:
            raise JuicerError(f"{self.url}{path} answered no JSON but {answer.text[:200]!r}") from error
        if not isinstance(found, dict):
            raise JuicerError(f"{self.url}{path} answered {str(found)[:200]}, which is no object")
        return found


class Refused(JuicerError):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def reason(answer: Any) -> str:
    """What an error answer says; of a traceback its last line."""
    try:
        text = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = answer.text
    lines = text.strip().splitlines()
    return (lines[-1] if lines and TRACEBACK in text else " ".join(lines))[:300] or "nothing"
