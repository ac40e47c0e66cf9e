"""Host memory for staged checkpoints: slots of anonymous shared memory (memfd), mapped here and in
the agent.

memfd instead of /dev/shm: no container limit applies, and nothing is left when every holder dies.
Pages are touched at once, so that the first save costs what the others cost; on a GPU they are
pinned, once, with their exact size.
"""

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from rft.ground.device import Device

if TYPE_CHECKING:
    import torch


class Slot:
    """`number` is what messages call it; `memory` what copies go to."""

    def __init__(self, number: int, size: int, device: Device):
        self.number = number
        self.size = size
        self.device = device
        self.descriptor = os.memfd_create(f"rft-checkpoint-slot-{number}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if device.pin_memory:
            device.pin(self.address, size)

    def bytes_at(self, at: int, count: int) -> "torch.Tensor":
        """A uint8 tensor over this memory."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=at)

    def close(self) -> None:
        """Give back the descriptor; the mapping goes with the last tensor over it."""
        if self.device.pin_memory:
            self.device.unpin(self.address)
        os.close(self.descriptor)
