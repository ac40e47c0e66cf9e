"""The state that `bench.checkpoint` saves, and the training step around it.

In: a size, a rank, a world. Out: named tensors whose every bit at version v can be computed again,
so that a loaded checkpoint is compared bit by bit without a second copy of the state; and steps
(compute, then an update in place of all tensors) that the modes are measured against. Run by
`python -m bench.checkpoint`.
"""

import mmap
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

MIB = 2**20
TENSORS = 64  # of fp32: masters and moments
HALVES = 8  # of bf16: weights, an eighth of the fp32 bytes
SIDE = 512  # of the matrices that stand for forward and backward
COMPUTE_S = 0.080
BITS = {4: torch.int32, 2: torch.int16}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: arithmetic on it is exact
    and NaNs compare equal to themselves.
    """
    return tensor.view(BITS[tensor.element_size()])


class State:
    """One rank's tensors:

    `mib` MiB of fp32 over all ranks, cut along dim 0, some bf16, a 0-dim scalar per fp32 tensor.
    """

    def __init__(self, mib: int, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.version = 0
        rows = mib * MIB // 4 // SIDE // TENSORS // world
        self.tensors: dict[str, torch.Tensor] = {}
        for index in range(TENSORS):
            self.tensors[f"master.{index:02}"] = torch.empty(rows, SIDE)
        for index in range(HALVES):
            self.tensors[f"weight.{index:02}"] = torch.empty(2 * rows, SIDE, dtype=torch.bfloat16)
        for index in range(TENSORS):
            self.tensors[f"step.{index:02}"] = torch.empty(())
        for name, tensor in self.tensors.items():
            bits(tensor).copy_(self.expected(name, 0))

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def sharded(self, name: str) -> bool:
        return self.tensors[name].dim() > 0

    def update(self) -> None:
        """Every element changes, in place, as an optimizer step does."""
        for tensor in self.tensors.values():
            bits(tensor).add_(1)
        self.version += 1

    def expected(self, name: str, version: int) -> torch.Tensor:
        """The integers behind a tensor at a version.

        Scalars are the same on every rank, as Adam's step is.
        """
        tensor = self.tensors[name]
        salt = list(self.tensors).index(name) * 1_000_003 + version
        if tensor.dim():
            salt += self.rank * 500_009
        dtype = BITS[tensor.element_size()]
        plain = torch.arange(tensor.numel(), dtype=torch.int32).add_(salt)
        return plain.to(dtype).view(tensor.shape)

    def landing(self) -> dict[str, torch.Tensor]:
        """Memory to load to: one shared anonymous mapping, made once.

        Freed and made again per load, it would stay in the allocator as warm memory for the next
        copy of a peer; private, every fork would copy its page tables.
        """
        memory = mmap.mmap(-1, self.bytes)
        found, at = {}, 0
        for name, tensor in self.tensors.items():
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            found[name] = flat.view(tensor.shape)
            at += tensor.nbytes
        return found

    def differing(self, loaded: dict[str, torch.Tensor], version: int) -> int:
        """How many tensors are not, bit for bit, those of `version`."""
        wrong = 0
        for name, tensor in self.tensors.items():
            other = loaded.get(name)
            same = other is not None and other.dtype == tensor.dtype and other.shape == tensor.shape
            if not same or not torch.equal(bits(other), self.expected(name, version)):
                wrong += 1
        return wrong


class Training:
    """The loop around the saves. Ranks meet once a step, as they do for the gradient norm."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.left, self.right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
        self.products = 1
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            self._compute()
            times.append(time.perf_counter() - begin)
        # The fastest one: neighbours on the same cores make some slower, and the others would be
        # slowed in the steps, too.
        self.products = max(1, round(self.agree(COMPUTE_S / min(times), dist.ReduceOp.MAX)))

    def _compute(self) -> None:
        for _ in range(self.products):
            torch.mm(self.left, self.right)

    def agree(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self.world == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, operation)
        return tensor.item()

    def step(self, state: State, before_update: Callable[[], None]) -> None:
        self._compute()
        self.agree(1.0, dist.ReduceOp.SUM)
        before_update()
        state.update()
