"""A Data-Juicer service around the package py-data-juicer, in a Python of its own
(`make env-data-juicer`): what `service.data_juicer.auto_start` starts where no command is given.

    rft ── HTTP, as rft.extras.pipeline.data_juicer says it ──► this ──► operators, in this process

In: operators of Data-Juicer by name, or a recipe's file; rows, as an Arrow stream or as files. Out:
rows, with what filters computed in `__dj__stats__`. Invariants: an operator that raises is an
answer 500 with its words; nothing is ever installed: Data-Juicer would install what an operator
lacks, torch above all, here it is said; what needs no torch itself runs without it, because
operators are called batch by batch, and never through Data-Juicer's executors; only who has the
token that this was started with (the variable TOKEN) is answered, and what is malformed, or comes
too slowly, ends its own connection.

    python -I juicer_service.py --port N | --check     (-I: no module beside it is imported)
"""

import argparse
import base64
import email
import hmac
import importlib.metadata
import io
import json
import os
import sys
import threading
import traceback
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PACKAGE, MAJOR = "py-data-juicer", "1"
TOKEN = "RFT_JUICER_TOKEN"
LARGEST = 2**30  # bytes of a request: the experiences of a group
SILENT_S = 20.0  # in which nothing of a request comes
STATS, META = "__dj__stats__", "__dj__meta__"
BATCH = 1000
RECIPE = ("process", "text_keys")  # of a recipe's file, what is done
ASIDE = ("project_name", "np", "executor_type")  # and what changes no row
WEIGHTS = {"quality": 1.0, "difficulty": -0.7, "usage_frequency": -0.5}
# stat: whether more is better, and its range; perplexity has none, and is put into that of its rows
QUALITY = {
    "alnum_ratio": True,
    "char_rep_ratio": False,
    "flagged_words_ratio": False,
    "special_char_ratio": False,
    "stopwords_ratio": True,
    "word_rep_ratio": False,
    "llm_quality_score": True,
}
DIFFICULTY = {"perplexity": True, "lang_score": False, "llm_difficulty_score": True}
Row = dict[str, Any]


class Wrong(Exception):
    """Status and words of an answer."""


def version() -> str:
    """Of the package; raises SystemExit for none, or one of another major version."""
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed in {sys.prefix}")
    if found.partition(".")[0] != MAJOR:
        sys.exit(
            f"{PACKAGE} {found} is of another major version than {MAJOR}, which this service "
            "speaks to: install that"
        )
    return found


class JuicerSession:
    """Operators that were made, and what a task pipeline says beside them."""

    def __init__(self, asked: "dict[str, Any]") -> None:
        self.asked, operators, text_key = asked, asked.get("operators"), None
        if asked.get("pipeline_type") == "task":
            text_key = next(iter(asked.get("target_fields") or ()), None)
        if asked.get("config_path"):
            operators, given = recipe(asked["config_path"])
            text_key = given or text_key
        if not operators:
            raise Wrong(400, "there are no operators, and no config_path")
        self.operators = [made(one, text_key) for one in operators]

    def process(self, rows: "list[Row]") -> "list[Row]":
        for one in rows:
            one.setdefault(STATS, {})
            one.setdefault(META, {})
        for name, operator in self.operators:
            try:
                rows = applied(operator, rows)
            except Exception as error:
                raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
        for one in rows:
            for beside in (STATS, META):
                if not one.get(beside):
                    one.pop(beside, None)
        return rows

    def process_task(self) -> "dict[str, Any]":
        rows = [
            json.loads(line)
            for path in self.asked["inputs"]
            for line in Path(path).read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        rows = ordered(self.process(rows), self.asked.get("priority_weights") or WEIGHTS)
        if (top := self.asked.get("top_k", -1)) >= 0:
            rows = rows[:top]
        text = "".join(json.dumps(row, default=str) + "\n" for row in rows)
        (Path(self.asked["output_dir"]) / "output.jsonl").write_text(text, encoding="utf-8")
        return {"sample_num": len(rows)}


def recipe(path: str) -> "tuple[list[dict[str, Any]], str | None]":
    """Operators and the text's column of a file of Data-Juicer's."""
    import yaml

    if not Path(path).is_file():
        raise Wrong(400, f"no file {path}")
    given = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    if unknown := sorted(set(given) - {*RECIPE, *ASIDE}):
        raise Wrong(
            400, f"{path}: {', '.join(unknown)} is not for this service, which is given its rows"
        )
    keys = given.get("text_keys")
    return given.get("process") or [], keys if isinstance(keys, str | None) else keys[0]


def made(asked: "dict[str, Any]", text_key: "str | None") -> "tuple[str, Any]":
    from data_juicer.core.preflight import pre_instantiation_check
    from data_juicer.ops import OPERATORS

    [(name, args)] = asked.items()
    args = dict(args or {})
    if text_key is not None:
        args.setdefault("text_key", text_key)
    try:
        pre_instantiation_check([{name: args}])  # names: Data-Juicer takes any argument else
        return name, OPERATORS.modules[name](**args)
    except Exception as error:  # what a package raises: told, with its operator's name
        raise Wrong(400, f"{name}: {lacking(error)}") from error


def lacking(error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, ImportError):
        said = f"it lacks a package, and nothing is installed for it: install that yourself: {said}"
    return said[:600]


def applied(operator: Any, rows: "list[Row]") -> "list[Row]":
    """What an operator makes of rows; in batches, or one by one, as it wants them."""
    from data_juicer.ops import Filter, Mapper

    if not rows:
        return rows
    if not isinstance(operator, Mapper | Filter):
        return of_all(operator, rows)
    size, found = (BATCH if operator.is_batched_op() else 1), list[Row]()
    for start in range(0, len(rows), size):
        batch = columns(rows[start : start + size])
        if isinstance(operator, Filter):
            batch = operator.compute_stats(batch)
            kept = list(operator.process(batch))
            found += [row for row, keep in zip(rows_of(batch), kept, strict=True) if keep]
        else:
            found += rows_of(operator.process(batch))
    return found


def of_all(operator: Any, rows: "list[Row]") -> "list[Row]":
    """Of one that compares rows: it has a hash of each, or chooses among them."""
    from datasets import Dataset

    if hasattr(operator, "compute_hash"):
        rows = [row for one in rows for row in rows_of(hashed(operator, one))]
    told = operator.process(Dataset.from_list([without_empty(row) for row in rows]))
    return (told[0] if isinstance(told, tuple) else told).to_list()


def hashed(operator: Any, row: Row) -> "dict[str, list[Any]]":
    batch = columns([row])
    return operator.compute_hash(batch)


def without_empty(row: Row) -> Row:
    """Arrow has no empty objects."""
    return {name: value for name, value in row.items() if value != {}}


def columns(rows: "list[Row]") -> "dict[str, list[Any]]":
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def rows_of(batch: "dict[str, list[Any]]") -> "list[Row]":
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def ordered(rows: "list[Row]", weights: "dict[str, float]") -> "list[Row]":
    """By priority, the highest first, where filters said anything of the rows; else as they are."""
    if not any(STATS in row for row in rows):
        return rows
    seen = [row.get(STATS, {}) for row in rows]
    perplexity = [one["perplexity"] for one in seen if "perplexity" in one]
    span = (min(perplexity), max(perplexity)) if perplexity else (0.0, 1.0)
    for row, stats in zip(rows, seen, strict=True):
        scores = {"usage_frequency": float(stats.get("consumed_cnt", 0))}
        for name, of in (("quality", QUALITY), ("difficulty", DIFFICULTY)):
            found = [
                shared(stats[one], better, one, span) for one, better in of.items() if one in stats
            ]
            scores[name] = sum(found) / len(found) if found else 0.5
        row.setdefault("priority", sum(weights.get(name, 0) * scores[name] for name in scores))
    return sorted(rows, key=lambda row: -row["priority"])


def shared(value: float, better: bool, name: str, span: "tuple[float, float]") -> float:
    """A stat as a number from 0 to 1 of which more is better."""
    low, high = span if name == "perplexity" else (0.0, 1.0)
    part = (value - low) / (high - low) if high > low else 0.0
    return part if better else 1.0 - part


class JuicerService(BaseHTTPRequestHandler):
    sessions: "dict[str, JuicerSession]" = {}
    one_at_a_time = threading.Lock()  # operators are no friends of threads

    token = ""  # none: nobody is asked for one
    timeout = SILENT_S

    def do_GET(self) -> None:
        self.say(200 if self.path == "/health" else 404, {"status": "ok"})

    def do_POST(self) -> None:
        try:
            body = self.asked()
            if self.path not in ("/create", "/process_experience", "/process_task", "/close"):
                raise Wrong(404, f"there is no {self.path}")
            with self.one_at_a_time:
                getattr(self, self.path[1:])(body)
        except Wrong as wrong:
            self.say(wrong.args[0], {"error": wrong.args[1]})
        except ConnectionError:
            raise  # nobody is there to be told
        except Exception as error:  # an operator's: the answer says so
            traceback.print_exc()
            self.say(500, {"error": " ".join(str(error).split())[:600]})

    def asked(self) -> bytes:
        """The body of a request of somebody who has the token."""
        given = self.headers.get("Authorization", "").encode()
        basic = base64.b64encode(f"rft:{self.token}".encode())
        if self.token and not hmac.compare_digest(given, b"Basic " + basic):
            raise Wrong(401, "it is asked without the token that it was started with")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and int(length[:20]) <= LARGEST):
            raise Wrong(400, f"Content-Length is no number up to {LARGEST}")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise Wrong(400, "the request ended inside its body")
        return body

    def create(self, body: bytes) -> None:
        name = uuid.uuid4().hex
        self.sessions[name] = JuicerSession(record(body))
        self.say(200, {"session_id": name})

    def process_experience(self, body: bytes) -> None:
        import pyarrow as pa

        parts = form(self.headers.get("Content-Type", ""), body)
        session = self.session(parts["session_id"].decode(errors="replace").strip())
        try:
            with pa.ipc.open_stream(parts["arrow_data"]) as reader:
                table = reader.read_all()
                table.validate(full=True)
            rows = table.to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Wrong(400, f"arrow_data is no Arrow stream: {error}") from error
        rows = session.process(rows)
        table = pa.Table.from_pylist([without_empty(row) for row in rows])
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        self.send(200, sink.getvalue(), {"X-Metrics": json.dumps({"sample_num": len(rows)})})

    def process_task(self, body: bytes) -> None:
        self.say(200, {"metrics": self.session(record(body).get("session_id")).process_task()})

    def close(self, body: bytes) -> None:
        known = self.sessions.pop(str(record(body).get("session_id")), None)
        self.say(200 if known else 404, {"message": "closed"})

    def session(self, name: Any) -> JuicerSession:
        if str(name) not in self.sessions:
            raise Wrong(404, "there is no such session")
        return self.sessions[str(name)]

    def say(self, status: int, answer: "dict[str, Any]") -> None:
        self.send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: "dict[str, str]") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class JuicerListener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who has gone is in no log, anything else is, in a line."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            print(f"a request failed: {type(error).__name__}: {error}", flush=True)


def record(body: bytes) -> "dict[str, Any]":
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Wrong(400, f"the request is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Wrong(400, "the request is no JSON object")
    return found


def form(kind: str, body: bytes) -> "dict[str, bytes]":
    """Its two parts."""
    message = email.message_from_bytes(
        f"Content-Type: {kind}\r\n\r\n".encode("latin-1", "replace") + body
    )
    payload: Any = message.get_payload() if message.is_multipart() else []
    found = {
        str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
        for part in payload
    }
    if not all(isinstance(found.get(name), bytes) for name in ("session_id", "arrow_data")):
        raise Wrong(400, "the request has no session_id and arrow_data")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    found = version()
    if given.check:
        return
    # what Data-Juicer asks of an installer finds nothing, so its operator says what it lacks
    os.environ |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "UV_OFFLINE": "1"}
    os.environ.pop("PYTHONPATH", None)  # nor is rft's own Python a place that has it
    import data_juicer.core  # noqa: F401  before it serves: it takes seconds

    JuicerService.token = os.environ.pop(TOKEN, "")
    server = JuicerListener(("127.0.0.1", given.port), JuicerService)
    print(f"{PACKAGE} {found} at {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
