"""A hub on loopback: repositories of a few small files in this process's memory, in the dialect
that the real client of `huggingface_hub` speaks. It notes what it is asked for.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repository:
    """`refs`: branches and tags, of commits, each with all of its files."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def push(self, files: Files, *refs: str) -> str:
        """A new commit, which `main` and these refs are from now on."""
        files = {".gitattributes": b"* -text\n"} | files
        told = json.dumps(sorted((name, len(data), hash(data)) for name, data in files.items()))
        commit = hashlib.sha1(f"{told}{len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = files
        self.refs |= dict.fromkeys(("main", *refs), commit)
        return commit


@dataclass
class ServedHub:
    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)  # method, path
    tokens: set[str] = field(default_factory=set)

    def repository(self, name: str) -> Repository:
        """`org/name` of a model, `datasets/org/name` of data."""
        return self.repositories.setdefault(name, Repository())

    def fetched(self) -> list[str]:
        return [path for method, path in self.asked if method == "GET" and "/resolve/" in path]


@contextmanager
def serving() -> Iterator[ServedHub]:
    hub = ServedHub()
    handler = type("OfHub", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ServedHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None: ...

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.hub.asked.append((self.command, path))
        if token := self.headers.get("authorization"):
            self.hub.tokens.add(token)
        words = path.removeprefix("api/").removeprefix("models/").split("/")
        at = 3 if words[0] == "datasets" else 2
        name, rest = "/".join(words[:at]), words[at:]
        found = self.hub.repositories.get(name)
        if found is None:
            self._refuse(404, "RepoNotFound")
        elif path.startswith("api/") and rest[:1] == ["refs"]:
            there = [{"name": n, "ref": n, "targetCommit": c} for n, c in found.refs.items()]
            self._json({"branches": there, "tags": [], "converts": []})
        else:
            revision = rest[1] if len(rest) > 1 else "main"
            commit = found.refs.get(revision, revision)
            if commit not in found.commits:
                self._refuse(404, "RevisionNotFound")
            elif path.startswith("api/"):
                self._told(name, found.commits[commit], commit, rest)
            elif found.gated:
                self._refuse(403, "GatedRepo")
            else:
                self._file(found.commits[commit], commit, "/".join(rest[2:]))

    def _told(self, name: str, files: Files, commit: str, rest: list[str]) -> None:
        if rest[:1] == ["tree"]:
            self._json(
                [
                    {"type": "file", "oid": _etag(data), "size": len(data), "path": path}
                    for path, data in files.items()
                ]
            )
            return
        siblings = [{"rfilename": path} for path in files]
        told = {"id": name.removeprefix("datasets/"), "sha": commit, "siblings": siblings}
        self._json(told | {"private": False, "tags": [], "downloads": 0, "likes": 0})

    def _file(self, files: Files, commit: str, path: str) -> None:
        if path not in files:
            self._refuse(404, "EntryNotFound", {"X-Repo-Commit": commit})
            return
        data = files[path]
        head = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        first = self.headers.get("range", "").removeprefix("bytes=").partition("-")[0]
        if first:
            head["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            data = data[int(first) :]
        self._send(206 if first else 200, data, head)

    def _json(self, told: Any) -> None:
        self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _refuse(self, code: int, why: str, head: dict[str, str] | None = None) -> None:
        self._send(code, b"{}", {"X-Error-Code": why, "X-Error-Message": why} | (head or {}))

    def _send(self, code: int, data: bytes, head: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(data))} | head).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
