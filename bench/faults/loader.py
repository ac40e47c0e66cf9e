"""The real loader in a process of its own, for torch makes a process that forks slow.

In, a JSON line per request: root, scale, sweep, patience_s. Out, a JSON line: the loop state and a
sha256 per tensor that was filled in, or the error of `restore.load`; and what it said.
"""

import hashlib
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.faults.toy import Cut, shapes
from rft.checkpoint import restore
from rft.checkpoint.storage import open_storage
from rft.ground.protocols import Piece, Snapshot


@dataclass(frozen=True)
class Loaded:
    """`cut`: what was loaded, None when nothing was; `exact`: every byte is the expected one."""

    cut: Cut | None
    exact: bool
    error: str
    said: str


class Loader:
    """The parent's end."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "bench.faults.loader"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def load(
        self,
        root: Path | str,
        scale: int = 1,
        sweep: bool = False,
        patience_s: float = restore.PATIENCE_S,
    ) -> Loaded:
        assert self._process.stdin and self._process.stdout
        asked = {"root": str(root), "scale": scale, "sweep": sweep, "patience_s": patience_s}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        loop = answer["loop"]
        if loop is None:
            return Loaded(None, False, answer["error"], answer["said"])
        cut = Cut(loop["step"], loop["variant"], loop["scale"])
        expected = {key: hashlib.sha256(cut.whole(key)).hexdigest() for key in shapes(cut.scale)}
        return Loaded(cut, expected == answer["digests"], answer["error"], answer["said"])

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class OneRank:
    rank, world = 0, 1

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item

    def barrier(self, name: str) -> None:
        pass


class Policy:
    """Tensors to be filled, at first full of ones that no pattern has."""

    def __init__(self, scale: int):
        import torch

        self.tensors = {
            key: torch.ones(shape, dtype=getattr(torch, dtype))
            for key, (dtype, shape) in shapes(scale).items()
        }

    def snapshot(self) -> Snapshot:
        return Snapshot(
            [Piece(key, t, tuple(t.shape), (0,) * t.dim()) for key, t in self.tensors.items()], {}
        )

    def restore(self, small: dict[str, bytes]) -> None:
        self.small = small

    def digests(self) -> dict[str, str]:
        import torch

        raw = {
            key: t.reshape(-1).view(torch.uint8).numpy().tobytes()
            for key, t in self.tensors.items()
        }
        return {key: hashlib.sha256(data).hexdigest() for key, data in raw.items()}


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def answer(request: dict[str, Any], said: Said) -> dict[str, Any]:
    said.lines.clear()
    storage = open_storage(request["root"])
    policy = Policy(request["scale"])
    loop, error = None, ""
    try:
        if request["sweep"]:
            restore.sweep(storage)
        found = restore.load(storage, OneRank(), policy, None, request["patience_s"])
        loop = found.loop if found else None
    except Exception as problem:  # whatever it is, it is what the judge wants to see
        error = f"{type(problem).__name__}: {problem}"
    return {
        "loop": loop,
        "digests": policy.digests() if loop else {},
        "error": error,
        "said": "\n".join(said.lines),
    }


def serve() -> None:
    import torch

    torch.set_num_threads(1)
    said = Said()
    logging.basicConfig(level="WARNING", handlers=[said])
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), said)), flush=True)


if __name__ == "__main__":
    serve()
