"""The MLflow sink against a real tracking server on this machine,
from the start of a run to its resumption.
"""

import io
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.config import MonitorConfig
from rft.monitor import sinks

VERSION = "3.17.2"  # of the server; the sink needs none of its packages
START_S = 120.0
CONFIG = (
    "name: run\nalgorithm:\n  optimizer:\n    lr: 1.0e-06\nmonitor:\n  monitor_args:\n    "
    "password: ${oc.env:RFT_SECRET_X}\n"
)
pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]


def command(directory: Path) -> str:
    """`mlflow` of this machine, or of an environment made for this test; skips, with the reason,
    where there can be none.
    """
    if found := shutil.which("mlflow"):
        return found
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    install = [
        directory / "bin" / "pip",
        "install",
        "-qq",
        "--disable-pip-version-check",
        f"mlflow=={VERSION}",
    ]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(
            f"mlflow cannot be installed here: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    return str(directory / "bin" / "mlflow")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running server."""
    directory = tmp_path_factory.mktemp("mlflow")
    executable = command(directory / "venv")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = [
        executable,
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        "--backend-store-uri",
        f"sqlite:///{directory / 'db.sqlite'}",
        "--artifacts-destination",
        str(directory / "artifacts"),
    ]
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(
            arguments, stdout=log, stderr=log, cwd=directory, start_new_session=True
        )
    try:
        await_health(f"http://127.0.0.1:{port}", process, directory / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        import psutil

        family = [*psutil.Process(process.pid).children(recursive=True), process]
        for member in family:
            member.kill()
        process.wait(30)


def await_health(uri: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=5) as answer:
                assert answer.read() == b"OK"
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)  # between two looks at a server that starts: it tells nobody


def ask(uri: str, path: str, body: Any = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"{uri}/api/2.0/{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())  # type: ignore[no-any-return]


def runs_of(uri: str, project: str) -> list[dict[str, Any]]:
    experiment = ask(uri, f"mlflow/experiments/get-by-name?experiment_name={project}")[
        "experiment"
    ]["experiment_id"]
    return ask(uri, "mlflow/runs/search", {"experiment_ids": [experiment]}).get("runs", [])  # type: ignore[no-any-return]


def test_a_run_and_its_resumption_are_one_run_with_metrics_by_policy_version(
    server: str, tmp_path: Path
) -> None:
    (tmp_path / "resolved.yaml").write_text(CONFIG)
    config = MonitorConfig(monitor_type="mlflow", monitor_args={"uri": server})
    for resumed_at, steps in ((0, (1, 2, 3)), (3, (4,))):
        with sinks.build(
            config, tmp_path, "adding", "first try", 5, resumed_at, io.StringIO()
        ) as monitor:
            for step in steps:
                monitor.log(
                    {"reward/mean": step / 10, "eval/sums/mean@4": 0.5, "loss": float("nan")}, step
                )
            monitor.table("samples", [{"prompt": "1+1=", "reward": 1.0}], steps[-1])
    (run,) = runs_of(server, "adding")
    assert (run["info"]["run_name"], run["info"]["status"]) == ("first try", "FINISHED")
    params = {param["key"]: param["value"] for param in run["data"]["params"]}
    assert params["algorithm.optimizer.lr"] == "1e-06"
    assert params["monitor.monitor_args.password"] == "${oc.env:RFT_SECRET_X}"
    identity = run["info"]["run_id"]
    history = ask(server, f"mlflow/metrics/get-history?run_id={identity}&metric_key=reward%2Fmean")[
        "metrics"
    ]
    assert [(point["step"], point["value"]) for point in history] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 0.4),
    ]
    assert "eval/sums/mean_at_4" in {metric["key"] for metric in run["data"]["metrics"]}
    found = ask(server, f"mlflow/artifacts/list?run_id={identity}&path=tables/samples")["files"]
    assert [Path(file["path"]).name for file in found] == [
        "step_00000003.json",
        "step_00000004.json",
    ]


def test_a_new_start_is_a_new_run(server: str, tmp_path: Path) -> None:
    config = MonitorConfig(monitor_type="mlflow", monitor_args={"uri": server})
    for _ in range(2):
        with sinks.build(config, tmp_path, "again", "run", 5, 0, io.StringIO()) as monitor:
            monitor.log({"loss": 1.0}, 1)
    assert len(runs_of(server, "again")) == 2
