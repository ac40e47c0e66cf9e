"""The ranks of one trainer: process groups, who this rank is, and the control plane between ranks.

In: the `trainer.megatron` sizes and this process's `Device`; RANK, WORLD_SIZE, MASTER_* from
torch's launcher (without them: one rank). Out: a `Mesh`. Only this file reads megatron's
parallel_state.

Control-plane messages are bytes over a gloo group of their own, with a deadline; every rank must
make the same calls in the same order. Objects travel as msgpack, so what arrives is plain data:
tuples come back as lists, records as dictionaries. `close` ends everything, so that another mesh
can be made in the same process.

gloo connects two ranks when they first meet (`LAZY_GROUPS` of the device). All that is done here is
a star around rank 0, a tree from it, or a ring: of 512 ranks rank 0 has 511 sockets more, and any
other one about ten. Invariant: every connection is made in `__init__`. A rank that is late, or
gone, shows in a connection that is there by the deadline, but in one that must be made first only
after five of them.

On a CPU groups of one rank share a gloo device (`SHARED`). A device has a thread that looks at its
sockets a hundred times a second, used or not, and torch gives every group one of its own: of the
nineteen groups that Megatron makes for one rank that is 1,900 times a second and a fortieth of a
core, taken from whatever computes where no core is free. Groups of several ranks keep their own:
gloo tells connections that are made when ranks first meet apart by nothing but the rank.
"""

import functools
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.nn.functional import all_reduce

from rft.config import MegatronConfig
from rft.data.packing import Stacked
from rft.data.wire import Microbatches, encode_part
from rft.ground.device import Device, collective_timeout
from rft.ground.names import Place

P = ParamSpec("P")
R = TypeVar("R")
SHARED = "shared_gloo"  # as torch.distributed knows it
_alone: list[Any] = []  # options of the first group of one rank: its device, for all others


def _make_shared(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """A group of gloo's; one that connects to nobody, over the device of the first such."""
    if size == 1 and _alone:
        return dist.ProcessGroupGloo(store, rank, size, _alone[0])
    made = dist.ProcessGroupGloo(store, rank, size, timeout)
    if size == 1:
        _alone.append(made.options)
    return made


dist.Backend.register_backend(SHARED, _make_shared, devices="cpu")


def _named(wait: Callable[P, R]) -> Callable[P, R]:
    """A collective that fails or runs into its deadline says
    which one it was, and at which rank.
    """

    @functools.wraps(wait)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return wait(*args, **kwargs)
        except RuntimeError as error:
            mesh = args[0]
            assert isinstance(mesh, Mesh)
            raise RuntimeError(
                f"{wait.__name__} at rank {mesh.rank} of {mesh.world}: {error}"
            ) from error

    return run


class Mesh:
    """Rank facts and collectives. `tp`, `pp`, `cp`, `dp` are sizes, `tp_rank` ... this rank's
    places.

    `bitwise`: log-probabilities are to be those of an engine to the bit (`rft.megatron.bitwise`).
    `vpp`: parts of the model per pipeline stage. `place`: the facts that decide which weights are
    here; layers of experts are spread otherwise over the same ranks, `place.ep` x `place.etp`.
    """

    def __init__(
        self,
        config: MegatronConfig,
        device: Device,
        timeout_s: float = 1800.0,
        bitwise: bool = False,
    ):
        self.device, self.bitwise = device, bitwise
        self.timeout = collective_timeout(timeout_s)
        self._join()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.cp_group = parallel_state.get_context_parallel_group()
        dp_group = parallel_state.get_data_parallel_group(with_context_parallel=False)
        self.tp, self.tp_rank = self.tp_group.size(), self.tp_group.rank()
        self.pp, self.pp_rank = self.pp_group.size(), self.pp_group.rank()
        self.cp, self.cp_rank = self.cp_group.size(), self.cp_group.rank()
        self.dp, self.dp_rank = dp_group.size(), dp_group.rank()
        self.vpp = config.virtual_pipeline_model_parallel_size or 1
        experts = parallel_state.get_expert_model_parallel_group()
        shards = parallel_state.get_expert_tensor_parallel_group()
        copies = parallel_state.get_expert_data_parallel_group()
        self.place = Place(
            self.tp,
            self.tp_rank,
            experts.size(),
            experts.rank(),
            shards.size(),
            shards.rank(),
            copy=self.dp_rank * self.cp + self.cp_rank,
            copies=self.dp * self.cp,
            expert_copy=copies.rank(),
            expert_copies=copies.size(),
        )
        self.sequence_parallel = config.sequence_parallel and self.tp > 1
        self._control = dist.new_group(backend="gloo", timeout=self.timeout)
        self._meet()
        # at rank 0: of every rank its data-parallel index, and whether it hands on what it gets
        self._places: list[tuple[int, bool]] = self.gather((self.dp_rank, self._is_lead)) or []

    def _join(self) -> None:
        backend = SHARED if self.device.backend == "gloo" else self.device.backend
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=self.timeout)
        else:
            store = dist.HashStore()
            dist.init_process_group(
                backend, store=store, rank=0, world_size=1, timeout=self.timeout
            )

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def layout(self) -> dict[str, int]:
        """Sizes that say whether a checkpoint's own generators fit this mesh."""
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp}
        unusual = {"vpp": (self.vpp, 1), "ep": (self.place.ep, 1), "etp": (self.place.etp, self.tp)}
        return sizes | {name: size for name, (size, usual) in unusual.items() if size != usual}

    @_named
    def broadcast(self, item: Any) -> Any:
        """Rank 0's `item` on every rank, as msgpack gives it back."""
        data = msgspec.msgpack.encode(item) if self.rank == 0 else b""
        if self.world > 1:
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, group=self._control)
            buffer = _buffer(data, int(size))
            dist.broadcast(buffer, 0, group=self._control)
            data = buffer.numpy().tobytes()
        return msgspec.msgpack.decode(data)

    @_named
    def gather(self, item: Any) -> list[Any] | None:
        """Every rank's item in rank order at rank 0, None elsewhere."""
        data = msgspec.msgpack.encode(item)
        if self.world == 1:
            return [msgspec.msgpack.decode(data)]
        size = torch.tensor([len(data)])
        sizes = [torch.zeros_like(size) for _ in range(self.world)] if self.rank == 0 else None
        dist.gather(size, sizes, 0, group=self._control)
        if sizes is None:
            dist.send(_buffer(data, len(data)), 0, group=self._control)
            return None
        parts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        for rank in range(1, self.world):
            dist.recv(parts[rank], rank, group=self._control)
        parts[0] = _buffer(data, len(data))
        return [msgspec.msgpack.decode(part.numpy().tobytes()) for part in parts]

    @_named
    def scatter_parts(self, parts: Sequence[list[Stacked]] | None) -> Microbatches:
        """The microbatches of this rank's data-parallel index; `parts` (one per index) is given at
        rank 0 only. Each part leaves rank 0 once: the ranks that it is for hand it on among
        themselves, and each lays it out.
        """
        if parts is None:
            data = self._spread(self._receive_part() if self._is_lead else None)
            own = Microbatches(data.numpy().data)
        else:
            sends = self._send_parts(parts)
            data = encode_part(parts[self.dp_rank])
            if self.world > self.dp:
                self._spread(_tensor(data))
            own = Microbatches(data)
            for send in sends:
                send.wait()
        return own

    @property
    def _is_lead(self) -> bool:
        """Of the ranks of its data-parallel index, the one that rank 0 speaks to."""
        return not (self.tp_rank or self.cp_rank or self.pp_rank)

    def _send_parts(self, parts: Sequence[list[Stacked]]) -> list[dist.Work]:
        """To the other leads; what is under way then."""
        sends = []
        for rank, (index, is_lead) in enumerate(self._places):
            if rank and is_lead:
                data = _tensor(encode_part(parts[index]))
                for message in (torch.tensor([len(data)]), data):
                    sends.append(dist.isend(message, rank, group=self._control))
        return sends

    def _receive_part(self) -> torch.Tensor:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, 0, group=self._control)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(buffer, 0, group=self._control)
        return buffer

    def _spread(self, data: torch.Tensor | None) -> torch.Tensor:
        """What the lead has, on all ranks of its data-parallel index: stage by stage, then over the
        context, then over tensor-parallel ranks, by the groups that training uses.
        """
        groups = (
            (self.pp_group, not (self.tp_rank or self.cp_rank)),
            (self.cp_group, not self.tp_rank),
            (self.tp_group, True),
        )
        for group, takes_part in groups:
            if takes_part and group.size() > 1:
                data = self._hand_on(data, group)
        assert data is not None
        return data

    def _hand_on(self, data: torch.Tensor | None, group: dist.ProcessGroup) -> torch.Tensor:
        place = self.device.torch
        size = torch.tensor([0 if data is None else len(data)], device=place)
        dist.broadcast(size, group=group, group_src=0)
        here = data if data is not None else torch.empty(int(size), dtype=torch.uint8)
        moved = here.to(place)
        dist.broadcast(moved, group=group, group_src=0)
        return moved.cpu()

    def barrier(self, name: str) -> None:
        """Wait for every rank; after the deadline the error names
        what was waited for and who is missing.
        """
        if self.world == 1:
            return
        try:
            dist.monitored_barrier(self._control, timeout=self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"barrier '{name}' at rank {self.rank}: {error}") from error

    @_named
    def reduce(self, sums: torch.Tensor, maxima: torch.Tensor) -> None:
        """In place over all ranks:

        `sums` are added up, `maxima` are maximised. float64 on the host.
        """
        if self.world > 1:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group=self._control)
            if len(maxima):
                dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._control)

    @_named
    def sum_over_context(self, tensor: torch.Tensor) -> torch.Tensor:
        """Added up over the ranks that hold parts of the same sequences, with gradient."""
        total: torch.Tensor = all_reduce(tensor, group=self.cp_group)
        return total

    @_named
    def longest(self, lengths: list[int]) -> list[int]:
        """Per position, the largest over all ranks; all give the same number of positions."""
        maxima = torch.tensor(lengths)
        if self.world > 1:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self._control)
        return [int(length) for length in maxima]

    def _meet(self) -> None:
        """Make the connections of all that is done here."""
        numbers = torch.zeros(1, dtype=torch.float64)
        self.reduce(numbers, numbers)
        dist.broadcast(numbers, 0, group=self._control)
        self.gather(None)

    def close(self) -> None:
        """Destroy every process group; safe to call twice."""
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _tensor(data: bytearray) -> torch.Tensor:
    """The same bytes."""
    return torch.frombuffer(data, dtype=torch.uint8)


def _buffer(data: bytes, size: int) -> torch.Tensor:
    """`data` as a writable uint8 tensor of `size` elements; what is missing is 0."""
    buffer = torch.zeros(size, dtype=torch.uint8)
    if data:
        buffer[: len(data)] = _tensor(bytearray(data))
    return buffer
