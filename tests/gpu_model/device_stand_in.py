"""A stand-in for a GPU, for one process and its shapes: what would lie on the card is a tensor of
torch's `meta` device, and `torch.cuda` answers as if there were one.

In: code that says `cuda`, as it stands. Out: every place where the host would wait for the card
(`Wait`: who asked, and for what), and the bytes that are alive on it. Whoever waits is given a
value that keeps shapes consistent: every token wanted, every expert with as many. Nothing is
computed, so nothing here says that a number is right.
"""

import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed._tools import fake_collectives  # noqa: F401  (collectives of meta tensors)
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from rft.megatron.cpu_port import cuda as stand_in

META = torch.device("meta")
RFT = str(Path(__file__).resolve().parents[2] / "rft")
aten = torch.ops.aten
# that must know values of the card before they can say how long their result is
BY_CONTENT = {aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive}
BY_CONTENT |= {aten.bincount, aten.equal, aten.is_nonzero}
# that torch's collectives of meta tensors leave out
COALESCED = {
    torch.ops.c10d.reduce_scatter_tensor_coalesced_,
    torch.ops.c10d.allgather_into_tensor_coalesced_,
}
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
ADAM = {aten._fused_adamw_, aten._fused_adam_}


IS_CUDA, DEVICE = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__


class Wait(NamedTuple):
    """`place`: file and function of the nearest caller in rft or in megatron; `what`: the operation
    that waits.
    """

    place: str
    what: str


def caller() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        file, code = frame.f_code.co_filename, frame.f_code
        if file.startswith(RFT):
            return f"rft{file[len(RFT) :]} {code.co_qualname}"
        if "/megatron/core/" in file:
            return f"megatron/core/{file.split('/megatron/core/')[1]} {code.co_qualname}"
        if "/transformer_engine/" in file:
            return f"transformer_engine {code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "nobody"


class Card(TorchDispatchMode):
    """`routed`: pairs of a token and an expert that a rank has in a layer of experts."""

    def __init__(self, routed: int = 0) -> None:
        super().__init__()
        self.routed = routed
        self.waits: Counter[Wait] = Counter()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def wait(self, what: str) -> None:
        self.waits[Wait(caller(), what)] += 1

    @contextmanager
    def metered(self) -> Iterator[list[int]]:
        """Gives the highest number of bytes that came to be alive beside those of the beginning."""
        began, self.peak, found = self.alive, self.alive, [0]
        yield found
        found[0] = self.peak - began

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._answer(func.overloadpacket, func, args, kwargs)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            self._count(tensor)
        return result

    def _answer(self, packet: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if packet in (aten._local_scalar_dense, aten.item) and first.is_meta:
            self.wait("item")
            return {torch.bool: True}.get(first.dtype, 1.0 if first.is_floating_point() else 1)
        if packet in (aten.nonzero, aten.nonzero_numpy) and first.is_meta:
            self.wait("nonzero")
            return first.new_empty((first.numel(), first.ndim), dtype=torch.int64)
        if packet is aten._to_copy and first.is_meta and _is_cpu(kwargs.get("device")):
            self.wait("to the host")
            return self.values(first.shape, kwargs.get("dtype") or first.dtype)
        if packet is aten.copy_ and first.device.type == "cpu" and args[1].is_meta:
            self.wait("copy to the host")
            return first
        if packet in INDEXED and first.is_meta and any(_is_mask(index) for index in args[1]):
            return self._masked(packet, func, args)
        if packet in BY_CONTENT and first.is_meta:
            self.wait(packet.__name__)
            raise NotImplementedError(f"{packet} of the card's content, asked for in {caller()}")
        if packet is aten.repeat_interleave and kwargs.get("output_size") is None and first.is_meta:
            self.wait("repeat_interleave without its size")
            return first.new_empty(self.routed)
        if packet in COALESCED:
            return FakeWork().boxed()
        return None if packet in ADAM else func(*args, **kwargs)

    def _masked(self, packet: Any, func: Any, args: Any) -> Any:
        tensor, indices = args[0], args[1]
        if not any(index.is_meta for index in indices if _is_mask(index)):  # counted on the host
            places = [i.nonzero(as_tuple=True) if _is_mask(i) else (i,) for i in indices]
            return func(tensor, [index for place in places for index in place], *args[2:])
        one_value = packet is not aten.index and args[2].numel() == 1 and len(indices) == 1
        if not one_value:  # which is filled in, without counting
            self.wait("index by a mask")
        if packet is aten.index:
            mask = next(index for index in indices if _is_mask(index))
            return tensor.new_empty((mask.numel(), *tensor.shape[mask.ndim :]))
        return torch.empty_like(tensor) if packet is aten.index_put else tensor

    def values(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """What the host is told; whole numbers are tokens per expert."""
        count = max(1, torch.Size(shape).numel())
        value = self.routed // count if not dtype.is_floating_point and self.routed else 1
        return torch.full(tuple(shape), value, dtype=dtype, device="cpu")

    def _count(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


class _Elsewhere(TorchFunctionMode):
    """What is asked for on cuda is made on meta; what Python alone waits for is noted."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy") and args[0].is_meta:
            self.card.wait(name)
            made = self.card.values(args[0].shape, args[0].dtype)
            return getattr(made, name)()
        if func in (IS_CUDA, DEVICE) and args[0].is_meta:
            return True if func is IS_CUDA else torch.device("cuda", 0)
        if name == "type" and len(args) == 1 and args[0].is_meta:
            return func(*args).replace("meta", "cuda")
        if name == "cuda":
            return args[0].to(META)
        if name == "pin_memory":
            return args[0]
        if name == "backward":  # whose own calls are to come here, too
            with self:
                return _run_backward(args[0])
        kwargs.pop("pin_memory", None)
        if name == "tensor" and isinstance(args[0], list):
            args = (_on_host(args[0]),)
        if "device" in kwargs:
            kwargs["device"] = _placed(kwargs["device"], number=True)
        args = tuple(_placed(arg) for arg in args) if name not in ("__new__", "device") else args
        return func(*args, **kwargs)


def _run_backward(tensors: Any) -> None:
    """Of a loss: the engine, which is no function of torch's that a mode is asked for."""
    whole = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    ones = tuple(torch.ones_like(tensor) for tensor in whole)
    torch.autograd.Variable._execution_engine.run_backward(
        whole, ones, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _on_host(value: Any) -> Any:
    """Numbers of a list that becomes a tensor."""
    if isinstance(value, list):
        return [_on_host(part) for part in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _placed(value: Any, number: bool = False) -> Any:
    if isinstance(value, torch.device):
        return META if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return META
    is_index = number and isinstance(value, int) and not isinstance(value, bool)
    return META if is_index else value


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def watched(card: Card) -> Iterator[None]:
    """What is done inside is done on the card."""
    with _Elsewhere(card), card:
        yield


@contextmanager
def standing_in(card: Card, rank: int, world: int) -> Iterator[None]:
    """This process is `rank` of so many, each with a card; its collectives exchange nothing."""
    for name, member in vars(stand_in).items():
        if not name.startswith("__"):
            setattr(torch.cuda, name, member)
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda seed: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda device=None: card.wait("synchronize")

    class Queue(stand_in.Stream):
        def synchronize(self) -> None:
            card.wait("synchronize")

    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.cuda.Stream = torch.cuda.Event = Queue
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: Queue()
    made, dist.new_group = dist.new_group, _in_this_process(dist.new_group)
    dist.batch_isend_irecv = lambda operations: [FakeWork() for _ in operations]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with watched(card):
            yield
    finally:
        dist.new_group = made


def _in_this_process(new_group: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake", "pg_options": None})

    return make


def plain_generators(random: types.ModuleType) -> None:
    """megatron's tracker of generators of the card has the host's."""
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda *args, **kwargs: None  # type: ignore[attr-defined]
