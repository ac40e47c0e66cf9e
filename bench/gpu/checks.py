"""What the programs of `python -m bench.gpu` have in common: checks with bars, and how they end.

    python -m bench.gpu.PROGRAM CHECK cuda|cpu

In: the name of a check, and what it is to compute on, which is never guessed: a stage for a card
fails where torch sees none. Out: a line per number, one last line of JSON as every benchmark's, and
exit code 1 where a bar was missed. On "cpu" the same code runs over stand-ins; `fake` then says
that no number is a measurement.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from bench import report
from rft.ground import device as devices
from rft.ground.device import Device
from rft.ground.process import ShortExit


class Checks:
    """Numbers of one stage, each as it is found."""

    def __init__(self, device: Device):
        self.device = device
        self.fake = device.kind == "cpu"
        self.found: dict[str, Any] = {}
        self.missed: list[str] = []

    def tell(self, name: str, value: Any, bar: str = "", fits: bool = True) -> None:
        """`bar`: in words; a number without one is only told."""
        self.found[name] = float(f"{value:.4g}") if isinstance(value, float) else value
        self.missed += [] if fits else [name]
        print(f"{'ok  ' if fits else 'FAIL'}  {name}: {value}{f' (bar: {bar})' * bool(bar)}")
        sys.stdout.flush()

    def on_card(self, name: str, value: Any, bar: str, fits: bool) -> None:
        """Stand-ins are not asked."""
        self.tell(name, value, f"{bar}; not asked here" if self.fake else bar, self.fake or fits)

    def most(self, name: str, value: float, bar: float) -> None:
        self.tell(name, value, f"at most {bar:g}", value <= bar)  # not so for NaN

    def least(self, name: str, value: float, bar: float) -> None:
        self.tell(name, value, f"at least {bar:g}", value >= bar)

    def true(self, name: str, value: bool) -> None:
        self.tell(name, value, "", value)


def main(checks: Mapping[str, Callable[[Checks], None]]) -> None:
    ending = ShortExit()  # threads that wait in a library make no difference to how it ends
    name, kind = sys.argv[1:3]
    device = devices.choose(kind)
    found = Checks(device)
    checks[name](found)
    config = {"device": "stand-in" if found.fake else device.describe()}
    report.last_line(
        f"gpu {name}", found.found, {"missed": found.missed}, config, {}, not found.missed
    )
    ending.code = int(bool(found.missed))
