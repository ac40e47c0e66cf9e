"""Saves that somebody asks a run for while it trains.

    rft ckpt save RUN ── <control>/asked/<id>.ask ──► rank 0, at the end of its step: a save is due
                      ◄── <control>/asked/<id>.json ── committed as, or why not

In: a job's control directory. Out: at rank 0 whether a save is asked for, and words for who asked;
to who asks, that word. Invariants: what is asked for stays so until it is answered, also over a
restart of the ranks; nobody waits for who does not take his answer.
"""

import contextlib
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rft.checkpoint import fence
from rft.checkpoint.records import Committed, Report, SaveFailed, decode_json, encode_json
from rft.ground import durable

LOOK_S = 0.2  # between looks for the answer, which is a file
GONE_S = 5.0  # for ranks that were never there, or whose run has ended, to be taken for gone


class SaveAnswer(msgspec.Struct, frozen=True):
    """`name`: of the committed directory; empty where the save failed, for a `cause`."""

    step: int
    name: str = ""
    cause: str = ""


class NobodySaves(ConnectionError):
    """No run is under way there."""


def directory(control: Path) -> Path:
    return control / "asked"


@dataclass
class SaveRequests:
    """Rank 0's. What is asked while a save is under way is answered by the next one."""

    control: Path
    _under_way: dict[str, int] = field(default_factory=dict)  # step of the save, by who asked

    def is_asked(self) -> bool:
        return bool(self._waiting())

    def begun(self, step: int) -> None:
        """A checkpoint of `step` is being made: it is for all that wait."""
        self._under_way |= dict.fromkeys(self._waiting(), step)

    def hear(self, report: Report) -> None:
        if isinstance(report, Committed) and not report.collection:
            self._answer(SaveAnswer(report.step, name=report.name))
        elif isinstance(report, SaveFailed):
            self._answer(SaveAnswer(report.step, cause=report.cause))

    def _answer(self, answer: SaveAnswer) -> None:
        for asked in [one for one, step in self._under_way.items() if step == answer.step]:
            path = directory(self.control) / asked
            with contextlib.suppress(OSError):  # a full disk: asked again at the next step
                durable.put(path.with_suffix(".json"), encode_json(answer))
                path.unlink(missing_ok=True)
            del self._under_way[asked]

    def _waiting(self) -> set[str]:
        with contextlib.suppress(FileNotFoundError):
            names = {path.name for path in directory(self.control).iterdir()}
            return {name for name in names if name.endswith(".ask")} - set(self._under_way)
        return set()


def ask(control: Path, within_s: float) -> SaveAnswer:
    """Ask for a save, and wait until it is committed or has failed.

    Raises NobodySaves, TimeoutError when there is no answer, or OSError.
    """
    place = directory(control)
    asked = place / f"{uuid.uuid4().hex}.ask"
    answer = asked.with_suffix(".json")
    if not fence.is_owned(control):
        raise NobodySaves(f"{control.parent}: no run is under way here")
    place.mkdir(exist_ok=True)
    asked.touch()
    try:
        return _awaited(control, answer, within_s)
    finally:
        asked.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)


def _awaited(control: Path, answer: Path, within_s: float) -> SaveAnswer:
    begun = owned = time.monotonic()
    while not answer.exists():
        now = time.monotonic()
        owned = now if fence.is_owned(control) else owned
        if now > owned + GONE_S:
            raise NobodySaves(f"{control.parent}: the run has ended, and has not said of this save")
        if now > begun + within_s:
            raise TimeoutError(
                f"no save was committed within {within_s:g} s; the run saves at the end of a step: "
                "give a longer --timeout"
            )
        time.sleep(LOOK_S)
    return decode_json(answer.read_bytes(), SaveAnswer)
