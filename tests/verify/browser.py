"""A headless Chromium that a test can type into, by way of the WebDriver protocol:

Debian's chromium and chromium-driver.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver"}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own word for an element's number


def program(name: str) -> str:
    """Path of the browser or its driver; installed where this is Debian and we may, else the test
    is skipped with the reason.
    """
    if found := shutil.which(name):
        return found
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.skip(f"no {name} here, and it cannot be installed: not root on a Debian")
    for arguments in (
        ["update", "-qq"],
        ["install", "-y", "-qq", "--no-install-recommends", PACKAGES[name]],
    ):
        done = subprocess.run(["apt-get", *arguments], capture_output=True, text=True)
    if not (found := shutil.which(name)):
        pytest.skip(
            f"{name} cannot be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
        )
    return found


class Browser:
    """One window; elements are found by CSS selectors."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())["value"]

    def open(self, url: str) -> None:
        self.ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector: str) -> str:
        found: str = self.ask("POST", "/element", {"using": "css selector", "value": selector})[
            ELEMENT
        ]
        return found

    def click(self, selector: str) -> None:
        self.ask("POST", f"/element/{self.find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """As a person would: what stood there goes, and leaving the field says that it is done."""
        element = self.find(selector)
        self.ask("POST", f"/element/{element}/clear", {})
        self.ask("POST", f"/element/{self.find(selector)}/value", {"text": text + "\ue004"})

    def until(self, script: str, *arguments: Any, within: float = 60.0) -> Any:
        """Wait until a script says something true."""
        end = time.monotonic() + within
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"never true: {script}"
        return found

    def picture(self, path: Path) -> bytes:
        data = base64.b64decode(self.ask("GET", "/screenshot"))
        path.write_bytes(data)
        return data


@contextlib.contextmanager
def browsing(width: int, height: int) -> Iterator[Browser]:
    driver = subprocess.Popen(
        [program("chromedriver"), "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert driver.stdout is not None
        port = next(
            line.split("port ")[1].strip(" .\n")
            for line in driver.stdout
            if "started successfully" in line
        )
        root = Browser(f"http://127.0.0.1:{port}")
        options = {
            "binary": program("chromium"),
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={width},{height}",
            ],
        }
        made = root.ask(
            "POST", "/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        )
        window = Browser(f"{root.url}/session/{made['sessionId']}")
        try:
            yield window
        finally:
            with contextlib.suppress(urllib.error.URLError):
                window.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()
