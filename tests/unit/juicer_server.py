"""A service that speaks Data-Juicer's API, in a process of its own: `python juicer_server.py --port
N [--mood MOOD] [--mark FILE]`.

Its operators do what the tests need: `text_length` computes a stat, `shorter_than` filters, `score`
changes the reward; `fail`, `hang`, `nonsense`, `twice`, `nowhere` and `page` misbehave. Moods:
`mute` never answers, `dead` ends at once, `late` is not healthy until asked three times, `forgets`
drops its sessions after each answer, `children` starts one and writes its number to FILE.
"""

import argparse
import email
import io
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa

STATS = "__dj__stats__"
sessions: dict[str, dict[str, Any]] = {}
asked: dict[str, int] = {}
mood = ""


PLAIN = {"page": (500, b"<html>Internal Server Error</html>"), "nonsense": (200, b"all is well")}


class Wrong(Exception):
    """Status and error of an answer."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked["health"] = asked.get("health", 0) + 1
        if mood == "mute":
            threading.Event().wait()
        late = mood == "late" and asked["health"] < 3
        self.say(503 if late else 200 if self.path == "/health" else 404, {"status": "ok"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            getattr(self, self.path.strip("/"))(body)
        except Wrong as wrong:
            self.say(wrong.args[0], {"error": wrong.args[1]})
        except Exception as error:
            self.say(
                500,
                {
                    "error": (
                        "failed:\nTraceback (most recent call "
                        f"last):\n{type(error).__name__}: {error}"
                    )
                },
            )

    def create(self, body: bytes) -> None:
        config = json.loads(body)
        if not config.get("operators") and not config.get("config_path"):
            raise Wrong(400, "Failed to parse config: no operators")
        if config.get("config_path") and not Path(config["config_path"]).exists():
            raise Wrong(400, f"no file {config['config_path']}")
        name = f"session-{len(sessions)}-{sum(asked.values())}"
        sessions[name] = config
        asked["create"] = asked.get("create", 0) + 1
        self.say(200, {"session_id": name})

    def process_experience(self, body: bytes) -> None:
        form = email.message_from_bytes(
            b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + body
        )
        parts = {
            part.get_param("name", header="content-disposition"): part
            for part in form.get_payload()
        }
        session = sessions.get(parts["session_id"].get_payload().strip())
        if session is None:
            raise Wrong(404, "Session ID not found.")
        rows = (
            pa.ipc.open_stream(parts["arrow_data"].get_payload(decode=True)).read_all().to_pylist()
        )
        for operator in session["operators"] or [{"text_length": {}}]:
            for name, args in operator.items():
                if name in PLAIN:
                    self.send(*PLAIN[name], {})
                    return
                rows = apply(name, args, rows)
        table = (
            pa.Table.from_pylist(rows) if rows else pa.table({"index": pa.array([], pa.int64())})
        )
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        if mood == "forgets":
            sessions.clear()
        self.send(200, sink.getvalue(), {"X-Metrics": json.dumps({"sample_num": len(rows)})})

    def process_task(self, body: bytes) -> None:
        session = sessions.get(json.loads(body)["session_id"])
        if session is None:
            raise Wrong(404, "Session ID not found.")
        rows = [
            json.loads(line)
            for path in session["inputs"]
            for line in Path(path).read_text().splitlines()
        ]
        for operator in session["operators"]:
            for name, args in operator.items():
                rows = apply(name, args, rows)
        for row in rows:
            row["priority"] = row.get("number", 0)
        rows.sort(key=lambda row: -row["priority"])
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (Path(session["output_dir"]) / "output.jsonl").write_text(lines)
        self.say(200, {"metrics": {"sample_num": len(rows)}})

    def close(self, body: bytes) -> None:
        known = sessions.pop(json.loads(body)["session_id"], None)
        self.say(200 if known else 404, {"message": "closed"})

    def say(self, status: int, answer: dict[str, Any]) -> None:
        self.send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def apply(name: str, args: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    match name:
        case "text_length":
            return [
                row | {STATS: {"text_len": len(row["response_text"]), "nothing": None}}
                for row in rows
            ]
        case "shorter_than":
            return [row for row in rows if len(row[args["field"]]) < args["length"]]
        case "score":
            return [row | {"reward": row["reward"] + args["add"]} for row in reversed(rows)]
        case "hang":
            threading.Event().wait()
        case "twice":
            return rows + rows
        case "nowhere":
            return [row | {"index": 99} for row in rows]
    raise ValueError(f"no operator {name}")


def main() -> None:
    global mood
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mood", default="")
    parser.add_argument("--mark", default="")
    given = parser.parse_args()
    mood = given.mood
    if mood == "dead":
        sys.exit("cannot import data_juicer")
    if mood == "children":
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        Path(given.mark).write_text(str(child.pid))
    server = ThreadingHTTPServer(("127.0.0.1", given.port), Handler)
    print(f"serving at {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
