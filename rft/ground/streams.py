"""What is done on a device beside its computation, and what comes before what there.

In: threads that begin, and copies and packing that they do. Out: on a GPU every thread is on its
own card, every read and write is on a stream that waits for who wrote and read before, and memory
that is made on a stream is freed there. On a CPU nothing is done, or a plain copy.

Invariant (`tests/gpu_model/stream_order.py` models it): between any two uses of the same memory,
one of which writes or frees it, there is a stream, an event or a wait of the host that orders them.
"""

import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

LARGE = 2**20  # bytes of a copy that is worth a call of its own


def enter_thread(device: "torch.device") -> None:
    """The first call of every thread that may touch a device: CUDA's current card is per thread and
    begins as the first one, where even leaving a stream would make a context of half a gigabyte.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def settle(device: "torch.device") -> None:
    """Return when all that this thread has asked of the device is done."""
    if device.type == "cuda":
        import torch

        torch.cuda.current_stream(device).synchronize()


def hand_over(tensor: "torch.Tensor") -> None:
    """Called by the thread that uses and frees memory that another stream has made: it is not given
    out again there before what this thread's stream does with it is done.
    """
    if tensor.is_cuda:
        import torch

        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Beside:
    """One stream for all rounds of one link or thread: torch has only so many, and its allocator
    keeps the memory of each apart. Make it when the link is made, enter it for every round:

        with beside:    sees what the device's computation has done until now
            ...         goes on beside that; memory that is made here stays of this stream
                        on leaving, all of it is done

    After an error inside nothing is waited for: a device that hangs must not hang the thread that
    reports it. Host memory: nothing special.
    """

    def __init__(self, device: "torch.device"):
        self._device = device
        self._stream: Any = None
        self._inside = threading.local()  # one that hangs may still be in it
        if device.type == "cuda":
            import torch

            self._stream = torch.cuda.Stream(device)

    def __enter__(self) -> None:
        if self._stream is not None:
            import torch

            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            self._inside.stream = torch.cuda.stream(self._stream)
            self._inside.stream.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._stream is not None:
            self._inside.stream.__exit__(kind, error, trace)
            if kind is None:
                self._stream.synchronize()


@dataclass(frozen=True)
class Copies:
    """What is copied where: `targets` are on the host, of the dtypes and shapes of `sources`. For
    tensors that are copied again and again it is made once, and what is looked up of each as well.
    """

    targets: "list[torch.Tensor]"
    sources: "list[torch.Tensor]"

    @cached_property
    def large(self) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """Targets and sources that are worth a call of their own."""
        return [pair for pair in self._pairs if _is_large(pair[1])]

    @cached_property
    def small(self) -> "tuple[list[torch.Tensor], list[torch.Tensor]]":
        """All other targets, and their sources."""
        pairs = [pair for pair in self._pairs if not _is_large(pair[1])]
        return [target for target, _ in pairs], [source for _, source in pairs]

    @property
    def _pairs(self) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
        return zip(self.targets, self.sources, strict=True)


def _is_large(source: "torch.Tensor") -> bool:
    return source.nbytes >= LARGE and source.is_contiguous()


class Copier(Protocol):
    """Copies tensors to host memory beside the computation that goes on."""

    @property
    def device(self) -> "torch.device":
        """What a thread that calls `copy` or `finish` enters first."""

    def begin(self) -> None:
        """Called in the computing thread: copies see what has been
        computed until now, and nothing later.
        """

    def copy(self, copies: Copies) -> None:
        """May return before the copies are done."""

    def fence(self) -> None:
        """Called in the computing thread: whatever is computed from now on comes after the copies.

        Need not block it.
        """

    def finish(self) -> None:
        """Returns when all copies are done."""


class HostCopier:
    """Tensors in host memory, without the interpreter's lock: all small ones in one call, for each
    turn at the lock holds up the computing thread; a large one by itself, as the C library copies,
    which leaves that thread more of the memory's bandwidth than torch does.
    """

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu")

    def begin(self) -> None: ...

    def copy(self, copies: Copies) -> None:
        import torch

        for target, source in copies.large:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        targets, sources = copies.small
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)

    def fence(self) -> None: ...

    def finish(self) -> None: ...


class CudaCopier:
    """A stream of its own.

    The next change of the weights waits for it on the device; the CPU does not.
    """

    def __init__(self, device: "torch.device"):
        import torch

        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    def begin(self) -> None:
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, copies: Copies) -> None:
        import torch

        with torch.no_grad(), torch.cuda.stream(self._stream):
            for target, source in zip(copies.targets, copies.sources, strict=True):
                flat = source.contiguous()
                flat.record_stream(self._stream) if flat.is_cuda else None
                target.copy_(flat, non_blocking=True)
        self._done.record(self._stream)

    def fence(self) -> None:
        import torch

        torch.cuda.current_stream(self.device).wait_event(self._done)

    def finish(self) -> None:
        self._done.synchronize()
