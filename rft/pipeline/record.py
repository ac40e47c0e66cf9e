"""What came into the experience pipeline, in a file that can be read back: `save_input`.

In: groups as they were sampled, before any operator. Out: JSON lines {"group", "prompt", "experiences"}, one per group, with all
tokens, log-probabilities and versions; `read` gives them back as records. A group that ran again after a crash is there twice,
and its last line counts. Invariant: every line is whole: what a killed process left half written is cut off by the next one.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rft.experience import Experience, Record


class Recorded(Record, kw_only=True):
    group: int
    prompt: str
    experiences: list[Experience]


_decoder = msgspec.json.Decoder(Recorded)


class Recorder:
    def __init__(self, path: str) -> None:
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.file = place.open("ab")
        size = self.file.tell()
        if size:
            os.truncate(place, whole_lines(place, size))

    def write(self, group: int, prompt: str, experiences: list[Experience]) -> None:
        line = msgspec.json.encode(Recorded(group=group, prompt=prompt, experiences=experiences))
        self.file.write(line + b"\n")
        self.file.flush()


def whole_lines(path: Path, size: int, step: int = 2**16) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as data:
        while size:
            start = max(0, size - step)
            data.seek(start)
            if (found := data.read(size - start).rfind(b"\n")) >= 0:
                return start + found + 1
            size = start
    return 0


def read(path: str | Path) -> Iterator[Recorded]:
    """Every group once, in the order of their last lines."""
    found: dict[int, Recorded] = {}
    with Path(path).open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                recorded = _decoder.decode(line)
                found.pop(recorded.group, None)
                found[recorded.group] = recorded
    yield from found.values()
