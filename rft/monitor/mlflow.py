"""An MLflow run, over the tracking server's REST interface (2.0).

Not with MLflow's own client: `mlflow-skinny` (3.17.2) wants cachetools below 8, which our lock
has at 8.0, and six packages more (databricks-sdk, gitpython, sqlparse ...), for five calls that
are a line of JSON each.

In: metrics and tables with their step. Out: a run of the experiment `project` with the config as
its parameters, metrics with the policy version as their step, and tables as artifacts
`tables/<name>/step_<n>.json`, in MLflow's own form of a table. Invariants: the server is spoken to
by a thread of its own, so a slow one does not hold up the training; one that cannot be reached is
refused at the start, and later costs what it did not take, which is counted and told at the end,
never the run.
"""

import base64
import http.client
import json
import logging
import os
import posixpath
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rft.config import ConfigError
from rft.ground import durable
from rft.monitor import left_out
from rft.monitor.run_record import RunRecord

log = logging.getLogger(__name__)
DEFAULT_URI = "http://localhost:5000"
REPLY_S = 20.0
CLOSE_S = 30.0  # for what is still to be sent when the run ends
WAITING = 1000  # calls
BATCH = 900  # metrics of one call; the server takes 1,000
PARAMS, PARAM_LENGTH = 100, 500  # of one call; of one value
STRANGE, NAME_LENGTH = re.compile(r"[^/\w.\- ]"), 250  # what no name may have, anywhere
GONE = ("RESOURCE_DOES_NOT_EXIST", "must be in the 'active' state")  # a run that was deleted


class TrackingError(RuntimeError):
    """The server did not do what it was asked."""


class Server:
    """One tracking server.

    What is not given comes from MLflow's own variables.
    """

    def __init__(self, uri: str | None, username: str | None, password: str | None):
        self.uri = str(uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI).rstrip("/")
        user = username or os.environ.get("MLFLOW_TRACKING_USERNAME")
        password = password or os.environ.get("MLFLOW_TRACKING_PASSWORD")
        self.headers = {"Content-Type": "application/json"}
        if user and password:
            self.headers["Authorization"] = (
                "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
            )
        elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
            self.headers["Authorization"] = f"Bearer {token}"

    def call(self, path: str, body: Any, method: str = "POST") -> dict[str, Any]:
        """The answer of `api/2.0/<path>`; raises TrackingError with the server's own words."""
        try:
            found = json.loads(self._ask(path, body, method) or b"{}")
        # refused, late, cut off, or no address at all; and what is no JSON, there or here
        except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
            raise TrackingError(f"{path}: {error}") from error
        if not isinstance(found, dict):
            raise TrackingError(f"{path}: answered {str(found)[:300]}")
        return found

    def _ask(self, path: str, body: Any, method: str) -> bytes:
        request = urllib.request.Request(
            f"{self.uri}/api/2.0/{path}",
            None if body is None else json.dumps(body, default=str).encode(),
            self.headers,
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=REPLY_S) as answer:
                return answer.read()  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            raise TrackingError(
                f"{path}: {error.code} {error.read().decode(errors='replace')[:300]}"
            ) from error


class MLflow:
    """The sink. A resumed job goes on with its run."""

    def __init__(
        self,
        job_dir: Path,
        project: str,
        name: str,
        resume_step: int,
        uri: str | None = None,
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        self._server = Server(uri, username, password)
        self._lost = 0
        self._orders: queue.SimpleQueue[tuple[str, Any, str] | None] = queue.SimpleQueue()
        try:
            self._run = self._known(job_dir, resume_step) or self._create(job_dir, project, name)
        except (TrackingError, LookupError, TypeError) as error:  # something else answers
            raise ConfigError(
                f"monitor.monitor_args.uri={self._server.uri}: MLflow's server does not answer "
                f"as one ({error}); start it, give its address, or set monitor.monitor_type=none"
            ) from error
        self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._thread.start()

    @property
    def _mark(self) -> str:
        return "monitor/mlflow.json"

    def _known(self, job_dir: Path, resume_step: int) -> dict[str, str] | None:
        path = job_dir / self._mark
        if resume_step < 1 or not path.exists():
            return None
        try:
            told = json.loads(path.read_bytes())
            run = {"id": str(told["id"]), "artifacts": str(told["artifacts"])}
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.warning("%s cannot be read (%s): a new MLflow run begins", path, error)
            return None
        try:
            self._server.call("mlflow/runs/update", {"run_id": run["id"], "status": "RUNNING"})
        except TrackingError as error:
            if not any(words in str(error) for words in GONE):
                raise
            log.warning("%s has no run %s: a new one begins", self._server.uri, run["id"])
            return None
        return run

    def _create(self, job_dir: Path, project: str, name: str) -> dict[str, str]:
        made = {"experiment_id": self._experiment(project), "run_name": name, "start_time": _now()}
        run = self._server.call("mlflow/runs/create", made)["run"]["info"]
        found = {"id": run["run_id"], "artifacts": run["artifact_uri"]}
        config = RunRecord(job_dir).flattened_config()
        named = {_name(key): value[:PARAM_LENGTH] for key, value in config.items() if value}
        params = [{"key": key, "value": value} for key, value in named.items()]
        for at in range(0, len(params), PARAMS):
            self._server.call(
                "mlflow/runs/log-batch", {"run_id": found["id"], "params": params[at : at + PARAMS]}
            )
        path = job_dir / self._mark
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.put(path, json.dumps(found))
        except OSError as error:  # a resume begins a run of its own there
            left_out.note("the name of MLflow's run", error)
        return found

    def _experiment(self, name: str) -> str:
        try:
            found = self._server.call(
                f"mlflow/experiments/get-by-name?experiment_name={urllib.request.quote(name)}",
                None,
                "GET",
            )
            return str(found["experiment"]["experiment_id"])
        except TrackingError as error:
            if "RESOURCE_DOES_NOT_EXIST" not in str(error):
                raise
        return str(self._server.call("mlflow/experiments/create", {"name": name})["experiment_id"])

    def log(self, metrics: dict[str, float], step: int) -> None:
        at = _now()
        made = [
            {
                "key": _name(key),
                "value": _number(value),
                "timestamp": at,
                "step": step,
            }
            for key, value in metrics.items()
        ]
        for first in range(0, len(made), BATCH):
            body = {"run_id": self._run["id"], "metrics": made[first : first + BATCH]}
            self._order("mlflow/runs/log-batch", body, "POST")

    def table(self, name: str, rows: Iterable[dict[str, Any]], step: int) -> None:
        found = list(rows)
        columns = list(dict.fromkeys(key for row in found for key in row))
        body = {
            "columns": columns,
            "data": [[row.get(column) for column in columns] for row in found],
        }
        scheme, _, place = self._run["artifacts"].partition(":/")
        # a server that keeps no artifacts: they lie in samples.jsonl
        if scheme != "mlflow-artifacts":
            return
        table = urllib.request.quote(f"{_name(name)}/step_{step:08d}.json")
        self._order(f"mlflow-artifacts/artifacts/{place.strip('/')}/tables/{table}", body, "PUT")

    def histograms(self, values: dict[str, list[float]], step: int) -> None:
        """MLflow has none; their quantiles are metrics."""

    def close(self) -> None:
        ended = {"run_id": self._run["id"], "status": "FINISHED", "end_time": _now()}
        self._orders.put(("mlflow/runs/update", ended, "POST"))
        self._orders.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive() or self._lost:
            log.error(
                "MLflow at %s took too long, or did not take %d of our calls",
                self._server.uri,
                self._lost,
            )

    def _order(self, path: str, body: Any, method: str) -> None:
        """A server that does not keep up costs calls, and not this process's memory."""
        if self._orders.qsize() < WAITING:
            self._orders.put((path, body, method))
        else:
            self._miss(TrackingError(f"{WAITING} wait already"))

    def _send(self) -> None:
        """Body of the thread: every order once, in turn."""
        while (order := self._orders.get()) is not None:
            try:
                self._server.call(*order)
            except TrackingError as error:
                self._miss(error)

    def _miss(self, error: TrackingError) -> None:
        self._lost += 1
        left_out.note("calls of MLflow's server", error)


def _now() -> int:
    return int(time.time() * 1000)


def _name(name: str) -> str:
    """As the server takes it: it refuses a whole call for one strange name."""
    plain = STRANGE.sub("_", name.replace("@", "_at_"))
    return posixpath.normpath(plain).lstrip("/.")[:NAME_LENGTH] or "_"


def _number(value: float) -> float | str:
    """JSON has no NaN; the server takes the word."""
    return (
        value if value - value == 0 else str(value).replace("inf", "Infinity").replace("nan", "NaN")
    )
