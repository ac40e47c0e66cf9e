"""A stand-in for the memory of a GPU that two processes share: memory of the host, mapped by both
(`rft.sync.links.CardMemory`).

What stands for CUDA's handle is the sender's file descriptor, by its place under /proc: no name of
it can be left behind.
"""

import mmap
import os
from typing import Any

import torch


class HostCard:
    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # descriptor by address

    def room(self, size: int) -> torch.Tensor:
        file = os.memfd_create("bucket")
        os.ftruncate(file, size)
        memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        self._files[memory.data_ptr()] = file
        return memory

    def share(self, memory: torch.Tensor) -> dict[str, Any]:
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._files[memory.data_ptr()]}",
            "size": len(memory),
        }

    def open(self, told: dict[str, Any]) -> torch.Tensor:
        with open(told["path"], "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), told["size"]), dtype=torch.uint8)

    def settle(self) -> None: ...


class ForeignCard(HostCard):
    """As where the driver finds no way between two cards."""

    def open(self, told: dict[str, Any]) -> torch.Tensor:
        raise RuntimeError("peer access is not supported between these two devices")
