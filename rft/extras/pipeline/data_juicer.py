"""Data-Juicer: a client of its service, a service that this run starts and ends itself (ours around
the package py-data-juicer, or Trinity-RFT's), and the operator data_juicer, by which the
experiences of a group go through operators of that service.

    GET /health                                         200 when it serves
    POST /create              JSON config               {"session_id"}
    POST /process_experience  session_id, arrow_data    an Arrow stream; metrics in the header
                                                        X-Metrics
    POST /process_task        {"session_id"}            {"metrics"}; the service reads and writes
                                                        the files of the config
    POST /close               {"session_id"}

Invariants: every call ends within its time, with an answer of the right form or a JuicerError that
says what came instead. The start ends within `start_timeout` (the reference waits for ever: W49),
with a service or with the end of its log; a port is not taken on trust: the answer must come from a
process of ours; nothing of it is left after `stop`, nor after the death of the process that started
it.
"""

import asyncio
import contextlib
import json
import logging
import re
import secrets
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil

from rft.config import DataJuicerConfig
from rft.extras.pipeline.experience_operators import is_number
from rft.ground.device import turns_not_inherited
from rft.ground.experience import Experience
from rft.ground.process import end_family, ending, family, python_path, tied
from rft.ground.surroundings import foreign
from rft.rollout.environments import ADAPTERS, PLACE

log = logging.getLogger(__name__)
THEIRS = "{python} -m trinity.service.data_juicer.server.server --host 127.0.0.1 --port {port}"
SERVICE = ADAPTERS / "juicer_service.py"
TOKEN = "RFT_JUICER_TOKEN"  # as the service calls it
TRIES = 3  # with another port each
LOOK_S = 0.1  # between two questions whether it serves: nothing tells
ANSWER_S = 5.0
END_S = 10.0
LAST_LINES = 3
STATS = "__dj__stats__"
TRACEBACK = "Traceback"
NO_SESSION = 404
# no proxy of the environment stands between this machine and itself
HERE = re.compile(r"https?://(localhost|127\.[\d.]+|\[::1\])(:|/|$)", re.IGNORECASE)


class JuicerError(RuntimeError):
    """The service cannot be reached, refuses, fails, or answers something else."""


class Refused(JuicerError):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class JuicerPortTaken(JuicerError):
    """Somebody else was faster."""


class JuicerClient:
    """Rows go to the service as Arrow, what it makes of them comes back. `url`: a name and a
    password in it go along with every question, and into no words.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        import httpx

        who, _, where = url.rstrip("/").rpartition("@")
        scheme, _, who = who.rpartition("//")
        name, _, password = who.partition(":")
        self.url, self.timeout_s = f"{scheme}//{where}" if scheme else where, timeout_s
        self._http = httpx.AsyncClient(
            timeout=timeout_s,
            auth=(unquote(name), unquote(password)) if who else None,
            trust_env=HERE.match(self.url) is None,
        )

    async def health(self) -> None:
        await self._call("GET", "/health")

    async def create(self, config: dict[str, Any]) -> str:
        """The name of a new session with these operators."""
        answer = self._json("/create", await self._call("POST", "/create", json=config))
        session = answer.get("session_id")
        if not isinstance(session, str) or not session:
            raise JuicerError(
                f"{self.url}/create answered {str(answer)[:200]}, in which there is no session_id"
            )
        return session

    async def process_experience(
        self, session: str, rows: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        import pyarrow as pa

        table = pa.Table.from_pylist(rows)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        files = {
            "arrow_data": (
                "dataset.arrow",
                sink.getvalue().to_pybytes(),
                "application/octet-stream",
            )
        }
        answer = await self._call(
            "POST", "/process_experience", data={"session_id": session}, files=files
        )
        try:
            with pa.ipc.open_stream(answer.content) as reader:
                found = reader.read_all().to_pylist()
            metrics = json.loads(answer.headers.get("X-Metrics") or "{}")
        except (pa.ArrowInvalid, ValueError) as error:
            raise JuicerError(
                f"{self.url}/process_experience answered no Arrow stream: {error}"
            ) from error
        numbers = {
            str(k): float(v)
            for k, v in metrics.items()
            if isinstance(v, int | float) and not isinstance(v, bool)
        }
        return found, numbers

    async def process_task(self, session: str) -> dict[str, Any]:
        answer = self._json(
            "/process_task", await self._call("POST", "/process_task", json={"session_id": session})
        )
        metrics = answer.get("metrics")
        if not isinstance(metrics, dict):
            raise JuicerError(
                f"{self.url}/process_task answered {str(answer)[:200]}, in which there are no "
                "metrics"
            )
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
            raise Refused(
                answer.status_code,
                f"{self.url}{path} answered {answer.status_code}: {reason(answer)}",
            )
        return answer

    def _json(self, path: str, answer: Any) -> dict[str, Any]:
        try:
            found = answer.json()
        except ValueError as error:
            raise JuicerError(
                f"{self.url}{path} answered no JSON but {answer.text[:200]!r}"
            ) from error
        if not isinstance(found, dict):
            raise JuicerError(f"{self.url}{path} answered {str(found)[:200]}, which is no object")
        return found


def reason(answer: Any) -> str:
    """What an error answer says; of a traceback its last line."""
    try:
        text = str(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = answer.text
    lines = text.strip().splitlines()
    return (lines[-1] if lines and TRACEBACK in text else " ".join(lines))[:300] or "nothing"


def own_python() -> Path:
    """Of the environment that `make env-data-juicer` builds, there or not."""
    return Path(PLACE.format("data-juicer"), "bin", "python").absolute()


def command(config: DataJuicerConfig) -> str:
    """What starts a service, with {port}."""
    if config.command or not own_python().is_file():
        return config.command or THEIRS
    return f"{shlex.quote(str(own_python()))} -I {shlex.quote(str(SERVICE))} --port {{port}}"


class JuicerServer:
    """A service of this run, `service.data_juicer.auto_start`: the URL at which the process that
    was started here answers. `log_file`: where it prints to; `address`: the URL with the token that
    ours wants, once it serves.
    """

    def __init__(self, config: DataJuicerConfig, log_file: Path) -> None:
        self.config, self.log_file = config, log_file
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        """Raises JuicerError."""
        try:
            async with asyncio.timeout(self.config.start_timeout):
                for number in range(TRIES):
                    port = self._port(number)
                    try:
                        return await self._start_at(port)
                    except JuicerPortTaken as error:
                        log.warning("%s", error)
        except TimeoutError:
            raise JuicerError(
                f"the Data-Juicer service did not answer in {self.config.start_timeout:g} s "
                f"(service.data_juicer.start_timeout); its log is {self.log_file}{self._last()}"
            ) from None
        finally:
            if self.process is not None and not self.is_serving:
                await asyncio.to_thread(self.stop)
        raise JuicerError(
            f"the Data-Juicer service ended {TRIES} times before it served; its log is "
            f"{self.log_file}{self._last()}"
        )

    is_serving, address = False, ""

    def stop(self) -> None:
        """Kill it with all that it started."""
        if self.process is not None:
            end_family(self.process, END_S)
            self.process, self.is_serving = None, False

    async def _start_at(self, port: int) -> str:
        words = command(self.config).format(port=port, python=shlex.quote(sys.executable))
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(16)
        with self.log_file.open("ab") as output, turns_not_inherited():
            self.process = subprocess.Popen(
                tied(shlex.split(words)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=foreign("rewards") | python_path() | {TOKEN: token},
            )
        client = JuicerClient(f"http://127.0.0.1:{port}", ANSWER_S)
        try:
            while True:
                code = self.process.poll()
                if code is not None:
                    self.process = None
                    raise JuicerPortTaken(
                        f"the Data-Juicer service {ending(code)} at port {port}{self._last()}"
                    )
                try:
                    await client.health()
                except JuicerError:
                    await asyncio.sleep(LOOK_S)
                    continue
                if not self._listens(port):
                    await asyncio.to_thread(self.stop)
                    raise JuicerPortTaken(f"another process answers at port {port}")
                self.is_serving = True
                self.address = f"http://rft:{token}@127.0.0.1:{port}"
                return client.url
        finally:
            await client.close()

    def _port(self, number: int) -> int:
        """The one of the config if it is free; else one that nobody gets by chance for a minute; at
        last any free one.
        """
        wanted = self.config.port
        if wanted and number == 0:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", wanted))
                    return wanted
                except OSError:
                    log.warning("service.data_juicer.port=%d is in use: taking a free one", wanted)
        return free_port(reserve=number < TRIES - 1)

    def _listens(self, port: int) -> bool:
        """Whether a process of ours has the port."""
        assert self.process is not None
        for process in family(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                for link in process.net_connections("tcp"):
                    if link.status == psutil.CONN_LISTEN and link.laddr.port == port:
                        return True
        return False

    def _last(self) -> str:
        """The end of its log."""
        if not self.log_file.exists():
            return ""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[
            -LAST_LINES:
        ]
        return f", which ends with: {' | '.join(lines)}" if lines else ""


def free_port(reserve: bool = True) -> int:
    """A port that is free. `reserve`: a connection of its own that has just ended keeps the kernel
    from giving it to anybody who asks for any port, while a server that asks for this one (with
    SO_REUSEADDR, as servers do) gets it.
    """
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reserve))
        server.bind(("127.0.0.1", 0))
        if reserve:
            server.listen(1)
            server.settimeout(ANSWER_S)
            with socket.create_connection(server.getsockname(), ANSWER_S) as client:
                server.accept()[0].close()  # the side that closes first is the one that lingers
                client.recv(1)
        return int(server.getsockname()[1])


class DataJuicer:
    """data_juicer: the experiences of a group go through operators of a Data-Juicer service.
    `config_path`: a Data-Juicer file, as the service sees it; or `operators`: [{name: {argument:
    value}}]; `np` processes.

    In: experiences with their texts. Out: those that the service kept; what it computed
    (`__dj__stats__`) is in their `info`. The service sees the columns index, prompt_text,
    response_text, reward, prompt_length, response_length and task. A reward that it changed is
    taken; texts that it changed are not: the trainer learns from the tokens that were sampled.
    """

    def __init__(
        self,
        service: DataJuicerConfig,
        config_path: str | None = None,
        operators: list[dict[str, Any]] | None = None,
        np: int = 4,
    ) -> None:
        if not config_path and not operators:
            raise ValueError("neither config_path nor operators is given")
        for number, one in enumerate(operators or []):
            if not isinstance(one, dict) or len(one) != 1:
                raise ValueError(
                    f"operators.{number} is {one}; write {{name: {{argument: value}}}}"
                )
        if int(np) < 1:
            raise ValueError("np must be 1 or more")
        self.service = service
        self.config = {
            "pipeline_type": "experience",
            "operators": operators,
            "config_path": config_path,
            "np": int(np),
        }
        self.session: str | None = None

    async def prepare(self) -> None:
        self.client = JuicerClient(str(self.service.server_url), self.service.timeout)
        self.session = await self.client.create(self.config)

    async def close(self) -> None:
        await self.client.close(self.session)

    async def process(
        self, experiences: list[Experience]
    ) -> tuple[list[Experience], dict[str, float]]:
        rows = [row_of(number, experience) for number, experience in enumerate(experiences)]
        try:
            found, metrics = await self.client.process_experience(str(self.session), rows)
        except Refused as error:
            if error.status != NO_SESSION:
                raise
            # the service has been started anew since
            self.session = await self.client.create(self.config)
            found, metrics = await self.client.process_experience(self.session, rows)
        kept = [taken(experiences, row) for row in found]
        if len({id(one) for one in kept}) != len(kept):
            raise JuicerError("the service gave a row back twice")
        return kept, {"filtered_count": len(experiences) - len(kept), **metrics}


def row_of(number: int, experience: Experience) -> dict[str, Any]:
    return {
        "index": number,
        "prompt_text": str(experience.info.get("prompt_text", "")),
        "response_text": str(experience.info.get("response_text", "")),
        "reward": float(experience.reward),
        "prompt_length": experience.prompt_length,
        "response_length": experience.response_length,
        "task": experience.task,
    }


def taken(experiences: list[Experience], row: dict[str, Any]) -> Experience:
    """The experience that a row was, with what the service found out."""
    number = row.get("index")
    if not isinstance(number, int) or not 0 <= number < len(experiences):
        raise JuicerError(
            f"the service gave back a row with index {number!r}, of {len(experiences)} experiences"
        )
    experience = experiences[number]
    stats = row.get(STATS) or {}
    if not isinstance(stats, dict):
        raise JuicerError(f"the service gave {STATS}={str(stats)[:80]}, which is no object")
    experience.info |= {str(name): value for name, value in stats.items() if value is not None}
    if is_number(reward := row.get("reward")):
        experience.reward = float(reward)  # type: ignore[arg-type]
    return experience
