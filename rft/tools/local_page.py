"""A page of one file with a few questions behind it, for a browser on this machine.

In: a page, and functions by path. Out: a server on loopback that answers only a browser that has
opened the printed address, with its random token, and in that browser only its own page: no other
user of this machine, and no other page that is open. Invariant: one question is answered at a time.
"""

import json
import secrets
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from rft.config import ConfigError

LARGEST = 2**20  # bytes of one question
SHARED = {  # what stands in a page for what all pages have
    "/*STYLE*/": Path(__file__).with_name("page.css"),
    "/*SCRIPT*/": Path(__file__).with_name("page.js"),
}
Answers = dict[str, Callable[[dict[str, Any]], Any]]


class PageServer(ThreadingHTTPServer):
    """GET / is `page`; POST to a path of `answers`, with an object as
    JSON, is what the function says of it.
    """

    daemon_threads = True

    def __init__(self, port: int, page: Path, answers: Answers):
        self.page = page.read_text(encoding="utf-8")
        for mark, file in SHARED.items():
            self.page = self.page.replace(mark, file.read_text(encoding="utf-8").rstrip("\n"))
        self.answers = answers
        self.asking = threading.Lock()
        self.token = secrets.token_urlsafe(32)
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def address(self) -> str:
        """What to open in a browser, which is given a cookie for it."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """Its name; browsers keep the cookies of all ports together."""
        return f"rft_{self.server_port}"

    def knows(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())


class Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 20  # seconds in which nothing comes

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path != "/":
            self._refuse(HTTPStatus.NOT_FOUND, "not here")
        elif self.server.knows(parse_qs(query).get("token", [""])[0]):
            given = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.encode(), given)
        elif self._is_known():
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page.encode())
        else:
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that was printed, with its token")

    def do_POST(self) -> None:
        if why := self._obstacle():
            self._refuse(HTTPStatus.FORBIDDEN, why)
            return
        length, answer = self.headers.get("Content-Length", "0"), self.server.answers.get(self.path)
        if answer is None or not length.isdecimal() or int(length) > LARGEST:
            self._refuse(HTTPStatus.NOT_FOUND, "not here")
            return
        try:
            asked = json.loads(self.rfile.read(int(length)) or b"{}")
            with self.server.asking:
                found = json.dumps(answer(asked), allow_nan=False).encode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            what = (
                str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            )
            self._refuse(HTTPStatus.BAD_REQUEST, what)
            return
        self._send(HTTPStatus.OK, "application/json", found)

    def parse_request(self) -> bool:
        """Whoever asks under another name is a page of somebody
        else that made its name point here.
        """
        if not super().parse_request():
            return False
        if str(self.headers.get("Host", "")).rpartition(":")[0] in ("127.0.0.1", "localhost"):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "ask for 127.0.0.1")
        return False

    def _is_known(self) -> bool:
        """Whether the browser was given our cookie."""
        for one in self.headers.get("Cookie", "").split(";"):
            name, _, value = one.strip().partition("=")
            if name == self.server.cookie:
                return self.server.knows(value)
        return False

    def _obstacle(self) -> str | None:
        """Why a question is not our page's own."""
        if not self._is_known():
            return "open the address that was printed, with its token"
        if self.headers.get("Origin") != f"http://{self.headers['Host']}":
            return "ask from the page itself"
        if self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return "ask from the page itself"
        is_json = self.headers.get_content_type() == "application/json"
        return None if is_json else "ask in application/json"

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, "text/plain; charset=utf-8", why.encode() + b"\n")

    def _send(self, status: HTTPStatus, kind: str, body: bytes, cookie: str | None = None) -> None:
        self.send_response(status)
        told = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Referrer-Policy": "same-origin",
        }
        for name, value in told.items():
            self.send_header(name, value)
        if cookie is not None:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """A line per request would hide the address."""


def serve(name: str, port: int, page: Path, answers: Answers) -> int:
    """Until Ctrl-C; 2 if the port cannot be had."""
    try:
        server = PageServer(port, page, answers)
    except (OSError, OverflowError) as error:
        said = error.strerror if isinstance(error, OSError) else "there are 0 to 65535"
        print(
            f"{name}: port {port}: {said}; give another with --port, or 0",
            file=sys.stderr,
        )
        return 2
    print(f"{name}: {server.address}   (ends with Ctrl-C)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
