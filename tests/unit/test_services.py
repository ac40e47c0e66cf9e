"""What reaches the services: read back from their own files, and refused or counted where they
cannot be reached.
"""

import copy
import io
import json
import logging
import re
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.config import ConfigError, MonitorConfig
from rft.ground.experience import Experience, VersionSpan
from rft.monitor import left_out, metrics, mlflow, sinks
from rft.monitor.run_record import RunRecord
from rft.trainer.reporting import distributions, quantiles

BLOCK, HEADER = 32768, struct.Struct("<IHB")
RECORDED = Path(__file__).with_name("recorded_run")
CONFIG = (
    "name: run\nalgorithm:\n  optimizer:\n    lr: 1.0e-06\n  advantage_fn_args: "
    "{}\ntrainer:\n  total_steps: null\n"
)


def test_an_offline_run_of_wandb_has_metrics_config_and_tables_at_their_policy_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    job = tmp_path / "job"
    job.mkdir()
    (job / "resolved.yaml").write_text(CONFIG)
    with sinks.build(
        MonitorConfig(monitor_type="wandb"), job, "p", "my run", 5, 0, io.StringIO()
    ) as monitor:
        monitor.log({"reward/mean": 0.5}, 7)
        monitor.log({"eval/sums/accuracy": 0.25}, 5)
        monitor.table("samples", [{"prompt": "1+1=", "reward": 1.0}], 7)
        monitor.histograms({"reward": [0.0, 1.0, 1.0]}, 7)
    rows, settings, name = written(job)
    assert [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row] == [(7, 0.5)]
    assert [
        (row["step"], row["eval/sums/accuracy"]) for row in rows if "eval/sums/accuracy" in row
    ] == [(5, 0.25)]
    assert [row["samples"]["_type"] for row in rows if "samples" in row] == ["table-file"]
    assert [
        sum(row["histogram/reward"]["values"]) for row in rows if "histogram/reward" in row
    ] == [3]
    assert settings["algorithm.optimizer.lr"] == "1e-06" and name == "my run"


def whole_records(data: bytes) -> Iterator[bytes]:
    """W&B's file is a log of LevelDB's form: blocks of 32 KiB, records that may go over several,
    after 7 bytes of its own.
    """
    at, record = 7, b""
    while at < len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        record += data[at + HEADER.size : at + HEADER.size + length]
        at += HEADER.size + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def written(job: Path) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """History rows, config and name out of W&B's own file."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = job.rglob("*.wandb")
    rows, settings, name = [], {}, ""
    for data in whole_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            row: dict[str, Any] = {}
            for item in record.history.item:
                *path_to, last = list(item.nested_key) or [item.key]
                node = row
                for key in path_to:
                    node = node.setdefault(key, {})
                node[last] = json.loads(item.value_json)
            rows.append(row)
        if record.HasField("run"):
            name = record.run.display_name
            settings |= {
                update.key: json.loads(update.value_json) for update in record.run.config.update
            }
    return rows, settings, name


def test_tensorboard_gets_histograms(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with sinks.build(MonitorConfig(), tmp_path, "p", "run", 5, 0, io.StringIO()) as monitor:
        monitor.histograms({"reward": [0.0, 1.0, 1.0]}, 3)
    events = EventAccumulator(str(tmp_path / "monitor" / "tensorboard"))
    events.Reload()
    (found,) = events.Histograms("reward")
    assert (found.step, found.histogram_value.num, found.histogram_value.sum) == (3, 3.0, 2.0)


def test_a_detailed_step_has_the_values_behind_its_means() -> None:
    experiences = [
        Experience(
            tokens=[1, 2, 3, 4],
            prompt_length=2,
            action_mask=[1, 0],
            logprobs=[-1.0, -9.0],
            reward=float(number),
            group=0,
            versions=[VersionSpan(version=4, start=0, end=2)],
        )
        for number in range(5)
    ]
    values = distributions(
        [*experiences, Experience(tokens=[1, 2], prompt_length=1, action_mask=[1])], step=5
    )
    assert values["reward"] == [0.0, 1.0, 2.0, 3.0, 4.0] and values["staleness"] == [1.0] * 5
    assert values["logprob"] == [-1.0] * 5, "of trained tokens only"
    assert values["response_length"] == [2.0] * 5 + [1.0]
    assert quantiles(values)["reward/p50"] == 2.0 and quantiles(values)["reward/p25"] == 1.0
    failed, greedy, of_tokens = (copy.copy(experiences[0]) for _ in range(3))
    failed.reward_outcome, greedy.info = "error", {"baseline": True}
    of_tokens.token_rewards = np.array([1.0, 2.0])
    values = distributions([failed, greedy, of_tokens], step=5)
    assert values["reward"] == [3.0] and values["response_length"] == [2.0] * 2, "as their means"


def test_the_config_is_flat_text_for_services(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(CONFIG)
    found = RunRecord(tmp_path).flattened_config()
    assert found["algorithm.optimizer.lr"] == "1e-06" and found["trainer.total_steps"] == ""
    assert RunRecord(tmp_path / "none").flattened_config() == {}


# MLflow: tests/verify/test_mlflow.py speaks to a real server


class Grumpy(BaseHTTPRequestHandler):
    """Answers what starts a run, and takes no metrics. `cut`: codes of answers
    to metrics that end in their middle; `gone`: runs that are known no more.
    """

    gone, artifacts = "", "file:/x"

    def do_GET(self) -> None:
        self._answer(200, {"experiment": {"experiment_id": "1"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append((self.path, body, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        if "metrics" in body and self.server.cut:  # type: ignore[attr-defined]
            self._answer(self.server.cut.pop(0), {}, more=10)  # type: ignore[attr-defined]
        elif "metrics" in body:
            self._answer(500, {"error": "full"})
        elif "status" in body and body["run_id"] in self.gone:
            self._answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST"})
        else:
            self._answer(200, {"run": {"info": {"run_id": "r1", "artifact_uri": self.artifacts}}})

    do_PUT = do_POST

    def _answer(self, code: int, body: Any, more: int = 0) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data) + more))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def grumpy() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Grumpy)
    server.heard, server.cut = [], []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_that_takes_nothing_costs_its_calls_and_not_the_run(
    grumpy: HTTPServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"http://127.0.0.1:{grumpy.server_port}"
    args = {"uri": uri, "username": "me", "password": "secret-word"}
    with (
        caplog.at_level(logging.WARNING),
        sinks.build(
            MonitorConfig(monitor_type="mlflow", monitor_args=args),
            tmp_path,
            "p",
            "n",
            stream=io.StringIO(),
        ) as m,
    ):
        m.log({"loss": 1.0}, 1)
        m.log({"loss": 0.5}, 2)
    assert "did not take 2 of our calls" in caplog.text and "secret-word" not in caplog.text
    heard = grumpy.heard  # type: ignore[attr-defined]
    assert [body["metrics"][0]["step"] for _, body, _ in heard if "metrics" in body] == [1, 2]
    assert heard[-1][1]["status"] == "FINISHED" and all(
        word.startswith("Basic ") for _, _, word in heard
    )
    assert b"secret-word" not in b"".join(
        path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )


def test_a_table_of_a_set_with_any_name_is_sent(
    grumpy: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grumpy, "artifacts", "mlflow-artifacts:/1/r1")
    sink = mlflow.MLflow(tmp_path, "p", "n", 0, f"http://127.0.0.1:{grumpy.server_port}")
    sink.table("eval_AIME 2025, été", [{"reward": 1.0}], 3)
    sink.close()
    sent = [path for path, body, _ in grumpy.heard if "data" in body]  # type: ignore[attr-defined]
    place = "/api/2.0/mlflow-artifacts/artifacts/1/r1/tables"
    assert sent == [f"{place}/eval_AIME%202025_%20%C3%A9t%C3%A9/step_00000003.json"]


def test_a_server_that_does_not_keep_up_costs_calls_and_no_memory(
    grumpy: HTTPServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrived, gate, real = threading.Event(), threading.Event(), mlflow.Server.call

    def call(server: mlflow.Server, path: str, body: Any, method: str = "POST") -> Any:
        if body and "metrics" in body:
            arrived.set()
            assert gate.wait(20)
        return real(server, path, body, method)

    monkeypatch.setattr(mlflow.Server, "call", call)
    monkeypatch.setattr(mlflow, "WAITING", 2)
    sink = mlflow.MLflow(tmp_path, "p", "n", 0, f"http://127.0.0.1:{grumpy.server_port}")
    sink.log({"loss": 1.0}, 1)
    assert arrived.wait(20)
    for step in range(2, 7):
        sink.log({"loss": 1.0}, step)
    assert sink._orders.qsize() == 2 and left_out.count() == 3
    gate.set()
    sink.close()
    heard = grumpy.heard  # type: ignore[attr-defined]
    assert [body["metrics"][0]["step"] for _, body, _ in heard if "metrics" in body] == [1, 2, 3]
    assert "did not take 6 of our calls" in caplog.text  # and three were answered by an error


def test_an_answer_that_is_cut_off_costs_its_call_and_every_miss_is_counted(
    grumpy: HTTPServer, tmp_path: Path
) -> None:
    grumpy.cut += [200, 502]  # type: ignore[attr-defined]
    sink = mlflow.MLflow(tmp_path, "p", "n", 0, f"http://127.0.0.1:{grumpy.server_port}")
    for step in (1, 2, 3):
        sink.log({"loss": 1.0}, step)
    sink._order("mlflow/runs/log-batch", {("no", "JSON"): 1}, "POST")
    sink.close()
    heard = [body for _, body, _ in grumpy.heard]  # type: ignore[attr-defined]
    assert [body["metrics"][0]["step"] for body in heard if "metrics" in body] == [1, 2, 3]
    assert heard[-1]["status"] == "FINISHED" and left_out.count() == 4


def test_one_strange_name_does_not_cost_the_others(grumpy: HTTPServer, tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("a: {'b (c)': 1, 'b [c]': 2, d+e: 3}\n")
    sink = mlflow.MLflow(tmp_path, "p", "n", 0, f"http://127.0.0.1:{grumpy.server_port}")
    names = ["eval/gsm8k (hard)/mean@4", "eval/../x", "/a//b", "0_o.py:Shorter", "n" * 300, "?"]
    sink.log(dict.fromkeys(names, 1.0), 1)
    sink.close()
    heard = [body for _, body, _ in grumpy.heard]  # type: ignore[attr-defined]
    (params,) = [body["params"] for body in heard if "params" in body]
    assert params == [{"key": "a.b _c_", "value": "2"}, {"key": "a.d_e", "value": "3"}]
    (made,) = [body["metrics"] for body in heard if "metrics" in body]
    keys = [metric["key"] for metric in made]
    assert keys == ["eval/gsm8k _hard_/mean_at_4", "x", "a/b", "0_o.py_Shorter", "n" * 250, "_"]


@pytest.mark.parametrize("mark", ["{}", "[1]", "{", '{"id": "old", "artifacts": ""}'])
def test_a_resume_whose_run_is_gone_begins_another(
    grumpy: HTTPServer, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Grumpy, "gone", "old")
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor" / "mlflow.json").write_text(mark)
    sink = mlflow.MLflow(tmp_path, "p", "n", 3, f"http://127.0.0.1:{grumpy.server_port}")
    sink.close()
    assert sink._run["id"] == "r1"
    assert json.loads((tmp_path / "monitor" / "mlflow.json").read_text())["id"] == "r1"


@pytest.mark.parametrize("where", ["no-scheme", "http://a host"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, where: str) -> None:
    config = MonitorConfig(monitor_type="mlflow", monitor_args={"uri": where})
    with pytest.raises(ConfigError, match=re.escape(f"monitor.monitor_args.uri={where}")):
        sinks.build(config, tmp_path, "p", "n", stream=io.StringIO())


def test_a_server_of_something_else_is_refused(
    grumpy: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Grumpy, "do_GET", lambda self: self._answer(200, {"experiment": "of another kind"})
    )
    config = MonitorConfig(
        monitor_type="mlflow", monitor_args={"uri": f"http://127.0.0.1:{grumpy.server_port}"}
    )
    with pytest.raises(ConfigError, match="does not answer as one"):
        sinks.build(config, tmp_path, "p", "n", stream=io.StringIO())


def test_a_server_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    config = MonitorConfig(monitor_type="mlflow", monitor_args={"uri": "http://127.0.0.1:9"})
    with pytest.raises(ConfigError, match=re.escape("monitor.monitor_args.uri=http://127.0.0.1:9")):
        sinks.build(config, tmp_path, "p", "n", stream=io.StringIO())
    config.monitor_args = {"url": "x"}
    with pytest.raises(ConfigError, match="monitor_args.url is unknown: did you mean 'uri'"):
        sinks.build(config, tmp_path, "p", "n", stream=io.StringIO())


def test_numbers_that_json_does_not_have_are_words() -> None:
    assert [
        mlflow._number(value) for value in (1.5, float("nan"), float("inf"), -float("inf"))
    ] == [
        1.5,
        "NaN",
        "Infinity",
        "-Infinity",
    ]


# Names


def test_what_other_systems_call_ours_are_names_that_a_run_has() -> None:
    """Of a real run; what needs a critic, a reference or a GPU is not in it, nor what came later,
    and extremes are of the batch.
    """
    recorded = {
        name
        for line in (RECORDED / "metrics.jsonl").read_text().splitlines()
        for name in json.loads(line)
    }
    elsewhere = {"kl/reference", "perf/mfu", "pool/running", "reward/max", "reward/min"}
    elsewhere |= {"kl/old"}  # of several updates per batch
    later = {
        "clip_frac_low",
        "clip_frac_high",
        "clip_frac_dual",
        "checkpoint/bytes",
        "checkpoint/behind_steps",
    }
    assert set(metrics.ELSEWHERE.values()) - recorded <= elsewhere | later


def test_a_metric_gets_its_other_names_and_keeps_its_own() -> None:
    found = metrics.with_other_names({"loss": 1.0, "kl/reference": 2.0, "time/train_s": 3.0})
    assert (
        found["actor/final_loss"] == found["loss"] == 1.0
        and found["kl/ref"] == found["actor/kl_loss"] == 2.0
    )
    assert found["time/train_step"] == 3.0 and "actor/grad_norm" not in found


def test_the_page_lists_the_names_of_the_code() -> None:
    page = (Path(metrics.__file__).parents[2] / "docs" / "observe.md").read_text()
    assert [
        other
        for other, ours in metrics.ELSEWHERE.items()
        if f"| `{other}` | `{ours}` |" not in page
    ] == []
