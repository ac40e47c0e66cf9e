"""How the packed buckets of one trainer rank reach one engine worker: over CUDA IPC on the same card, else over NCCL.

In: the wire of the pair and each end's device. Out: the same kind of `Link` at both ends. The worker says which card it is on, the
trainer rank decides and tells. Invariant: the choice is the first that goes over the wire, so both agree or part with an error.
"""

import torch

from rft import device as devices
from rft.sync.ipc_link import IpcLink
from rft.sync.sender import Link
from rft.sync.wire import Lost, Wire, machine

IPC, NCCL = "ipc", "nccl"


def host_link(wire: Wire, device: torch.device, address: str) -> Link:
    """The trainer rank's end. `address`: where a rendezvous may listen."""
    if decide(wire, card(device)) == IPC:
        return IpcLink(wire, devices.SharedCard(device))
    from rft.sync import nccl_link

    return nccl_link.host_link(wire, address, device)


def join_link(wire: Wire, device: torch.device) -> Link:
    """The engine worker's end."""
    if ask(wire, card(device)) == IPC:
        return IpcLink(wire, devices.SharedCard(device))
    from rft.sync import nccl_link

    return nccl_link.join_link(wire, device)


def decide(wire: Wire, ours: str) -> str:
    kind = IPC if wire.receive_record().get("card") == ours else NCCL
    wire.send_record({"link": kind})
    return kind


def ask(wire: Wire, ours: str) -> str:
    wire.send_record({"card": ours})
    kind = wire.receive_record().get("link")
    if kind not in (IPC, NCCL):
        raise Lost(f"{wire.name}: no word on how buckets travel, but {kind}")
    return str(kind)


def card(device: torch.device) -> str:
    """Equal for two processes that can open each other's memory on this device."""
    return f"{machine()} {devices.SharedCard(device).uuid()}"
