"""A GPU as far as rft's decisions go, on this machine's memory and processor: whatever rft does on
"cuda", it does here, with gloo between ranks.

It lies beside the stand-in for Transformer Engine, so that the rank processes that have the one on
their path have the other.
"""

from dataclasses import dataclass

import torch

from rft.ground.device import Device
from rft.ground.streams import Copier, HostCopier


@dataclass(frozen=True)
class ModelledCard(Device):
    kind: str = "cuda"
    index: int = 0
    backend: str = "gloo"
    threads: int = 1
    pin_memory: bool = False

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu")

    def activate(self) -> None:
        torch.set_num_threads(self.threads)

    def copier(self) -> Copier:
        return HostCopier()
