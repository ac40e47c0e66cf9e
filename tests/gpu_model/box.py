"""A machine with GPUs for a test that has none: what asks `nvidia-smi` and what asks for installed
versions is told of such a machine.

In: an empty directory, how many cards, the driver, what is installed. Out: `FakeBox`, whose `enter`
changes this process and its children, and whose `environment` children alone. Invariant: it fakes
the answers of a machine, no part of rft; torch itself, once imported, is this machine's.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

CARD, MEMORY_MIB, IDLE_MIB = "NVIDIA H100 80GB HBM3", 81559, 1
# what one asks of it, and nothing else; csv,noheader,nounits
QUERY = "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version"
FORMAT = "--format=csv,noheader,nounits"
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running."
)
SCRIPT = """#!/bin/sh
case "$*" in
{cases}
*) echo "nvidia-smi (a test's): no answer to: $*" >&2; exit 2 ;;
esac
"""
VLLM_ASKS = ("torch==2.13.0", "transformers<5.20")  # of vllm's own list


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-{index:012x}"


class FakeBox:
    """`driver=None`: nvidia-smi is there and fails. `busy`: MiB that others use of a card.
    `torch`: a version, "2.13.0+cpu" is a CPU build. `vllm=False`: only what this machine has.
    `te`: True, False, or "half" for the Python part without its torch extension.
    """

    def __init__(
        self,
        directory: Path,
        cards: int = 8,
        driver: str | None = "580.65.06",
        busy: Mapping[int, int] | None = None,
        torch: str = "2.13.0",
        cuda: str | None = "13.0",
        vllm: bool = True,
        te: bool | str = True,
    ):
        self.cards, self.driver, self.busy = cards, driver, dict(busy or {})
        self.bin, self.site = directory / "bin", directory / "site"
        self.bin.mkdir(parents=True)
        self.site.mkdir()
        script = self.bin / "nvidia-smi"
        script.write_text(SCRIPT.format(cases=self._cases()), encoding="utf-8")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        self._installed("torch", torch)
        # without an __init__.py: the real package is still the one that is imported
        told = None if torch.endswith("+cpu") else cuda
        self._file("torch/version.py", f"__version__ = {torch!r}\ncuda = {told!r}\n")
        if vllm:
            self._installed("vllm", "0.32.0", *VLLM_ASKS)
        if te:
            self._installed("transformer_engine", "2.20.2")
        if te is True:
            self._installed("transformer_engine_cu13", "2.20.2")
            self._installed("transformer_engine_torch", "2.20.2")
            self._file("transformer_engine_torch.abi3.so", "")

    @property
    def environment(self) -> dict[str, str]:
        """For a child: instead of what this process has."""
        return {
            name: os.pathsep.join(filter(None, (str(path), os.environ.get(name))))
            for name, path in (("PATH", self.bin), ("PYTHONPATH", self.site))
        }

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """This process, until the test ends."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.syspath_prepend(str(self.site))

    def _cases(self) -> str:
        if self.driver is None:
            return f'*) echo "{NO_DRIVER}"; exit 9 ;;'
        if not self.cards:
            return '*) echo "No devices were found"; exit 6 ;;'
        numbers = range(self.cards)
        answers = {
            "-L": [f"GPU {number}: {CARD} (UUID: {uuid(number)})" for number in numbers],
            f"{QUERY} {FORMAT}": [
                f"{number}, {CARD}, {uuid(number)}, {MEMORY_MIB}, "
                f"{self.busy.get(number, IDLE_MIB)}, {self.driver}"
                for number in numbers
            ],
            "topo -m": self._topology(),
        }
        return "\n".join(
            f"\"{asked}\") cat <<'END'\n" + "\n".join(lines) + "\nEND\n;;"
            for asked, lines in answers.items()
        )

    def _topology(self) -> list[str]:
        names = [f"GPU{number}" for number in range(self.cards)]
        rows = [
            [name, *("X" if other == name else "NV18" for other in names), "SYS", "0-95", "0"]
            for name in names
        ]
        nic = ["NIC0", *("SYS" for _ in names), "X"]
        head = ["", *names, "NIC0", "CPU Affinity", "NUMA Affinity"]
        legend = "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a set of # NVLinks"
        return ["\t".join(row) for row in [head, *rows, nic]] + [legend]

    def _installed(self, name: str, version: str, *asks: str) -> None:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in asks]
        self._file(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")

    def _file(self, name: str, text: str) -> None:
        path = self.site / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
