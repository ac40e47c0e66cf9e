"""The only file that decides between CPU and CUDA: device, collective backend, dtype, threads.

In: the `device` key of the config ("auto", "cpu", "cuda") and this rank's local index. Out: one
frozen `Device` that is handed to whoever needs it and printed once at start. No other file of rft
may name a device or a backend, but `rft.ground.streams`, which orders what is done on one.
"""

import gc
import mmap
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rft.ground import host_memory
from rft.ground.streams import Copier, CudaCopier, HostCopier, settle

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed import TCPStore

# Dense TFLOP/s of the matrix units in bf16, from the vendor's data sheets; the longest name that
# the device's begins with counts.
PEAK_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA A800": 312.0,
    "NVIDIA H100": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200": 989.4,
    "NVIDIA H800": 989.4,
    "NVIDIA H20": 148.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
    "NVIDIA A10": 125.0,
}
# what torch tells of shared memory of a GPU, in its order: numbers, bytes and one truth value
HANDLE = (
    "device",
    "handle",
    "size",
    "offset",
    "counter",
    "counter_offset",
    "event",
    "event_is_needed",
)
# objects that may be new before the collector looks at them: a few thousand requests are under way
# at a time
YOUNG = 20_000
BF16_OF_CPUS = {"avx512_bf16", "amx_bf16", "bf16"}  # instructions of x86 and Arm, in Linux's words
NICE = 10  # a tenth of what others get of a core that both want
FRONT_NICE = 5  # a third
# Elements of a tile of logits: on a CPU 16 MiB in fp32, which stay in a last-level cache between
# the passes over them; on a GPU 1 GiB, of which two are held.
HOST_TILE, CARD_TILE = 2**22, 2**28
# elements of what operations on a CPU that follow each other work on: half a megabyte in fp32
HOST_CACHE = 2**17
# of cuBLAS and Transformer Engine: only kernels that give the same bits twice
ORDERED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
# Columns of a tile: with fewer, adding to the gradient of all hidden states takes longer than its
# product, also where that leaves the cache; with more, a GPU gains nothing.
LEAST_COLUMNS, MOST_COLUMNS = 512, 2**14
# where torch reads its allocator's settings; the first one that is set counts
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
TOOL_S = 30.0  # for the driver's tool: it may have to wake the GPUs
BLACKWELL = 10  # its compute capability; from there on copies and kernels have queues enough
# gloo connects a pair of ranks when it first meets; else all pairs of every group, at once
LAZY_GROUPS = "TORCH_GLOO_LAZY_INIT"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


_segments = threading.Lock()


@dataclass(frozen=True)
class Device:
    """What one process computes on.

    `kind` is "cpu" or "cuda"; `backend` is what torch.distributed takes.
    """

    kind: str
    index: int
    backend: str
    threads: int
    pin_memory: bool

    @property
    def torch(self) -> "torch.device":
        import torch

        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    def activate(self) -> None:
        """Make this the process's device; call once, before anything allocates."""
        import torch

        os.environ.setdefault(LAZY_GROUPS, "1")
        if self.kind == "cuda":
            torch.cuda.set_device(self.index)
        else:
            torch.set_num_threads(self.threads)
            host_memory.keep_blocks()

    def order_sums(self) -> None:
        """On a GPU take only kernels that add up in one order. On a CPU all do."""
        import torch

        if self.kind == "cuda":
            os.environ.update(ORDERED)
            torch.use_deterministic_algorithms(True)

    def pin(self, address: int, size: int) -> None:
        """Page-lock host memory that CUDA did not allocate, so that copies to it run beside the
        computation.
        """
        _page_lock(address, size, "lower trainer.checkpoint.host_memory_gb")

    def unpin(self, address: int) -> None:
        _page_unlock(address)

    def give_back(self) -> None:
        """Free what torch keeps of this device for tensors that are gone, so that another process
        can have it. For host memory torch keeps nothing.
        """
        if self.kind == "cuda":
            import torch

            gc.collect()
            torch.cuda.empty_cache()

    def peak_tflops(self, dtype: str) -> float | None:
        """What this device can do at most in `dtype`; None where the
        data sheets above say nothing of it.
        """
        import torch

        if self.kind != "cuda" or dtype != "bf16":
            return None
        return peak_of(torch.cuda.get_device_name(self.index))

    @property
    def message_bytes(self) -> int:
        """Of one message of a long stream: what fits a cache, or
        what keeps a link between GPUs busy.
        """
        return 2**27 if self.kind == "cuda" else 2**24

    def memory_bytes(self) -> int:
        """What it has altogether: of a GPU, or of the machine."""
        import torch

        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(self.index).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def range(self, name: str) -> AbstractContextManager[None]:
        """A named range for Nsight Systems."""
        import torch

        return torch.cuda.nvtx.range(name)

    def capture(self, on: bool) -> None:
        """Begin or end what `nsys --capture-range=cudaProfilerApi` records."""
        import torch

        torch.cuda.profiler.start() if on else torch.cuda.profiler.stop()

    def copier(self) -> Copier:
        return CudaCopier(self.torch) if self.kind == "cuda" else HostCopier()

    def bring(self, array: "np.ndarray") -> "torch.Tensor":
        """A copy on this device, which a GPU makes while the host goes on; on a CPU the array."""
        import torch

        tensor = torch.from_numpy(array)
        if not self.pin_memory:
            return tensor.to(self.torch)
        return tensor.pin_memory().to(self.torch, non_blocking=True)

    def describe(self) -> str:
        place = (
            f"{self.kind}:{self.index}" if self.kind == "cuda" else f"cpu, {self.threads} thread(s)"
        )
        names = (*ALLOCATOR_VARIABLES, QUEUES) if self.kind == "cuda" else ()
        told = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
        return ", ".join([place, f"collectives over {self.backend}", *told])


class LockedMemory(mmap.mmap):
    """Anonymous memory of exactly its size, page-locked until nobody uses it any more. Of torch's
    own pinned memory every block is a power of two: 27 % more for the tensors of an 8B model.
    """

    address = 0

    def lock(self, address: int) -> None:
        _page_lock(
            address,
            len(self),
            "an engine keeps the next version of its weights there: give the container more "
            "memory, lift `ulimit -l`, or set synchronizer.receive=direct",
        )
        self.address = address

    def __del__(self) -> None:
        if self.address:
            _page_unlock(self.address)


def staging_memory(size: int, device: "torch.device") -> "torch.Tensor":
    """Bytes of the host that copies to and from `device` reach without a detour."""
    import torch

    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    memory = LockedMemory(-1, size)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    memory.lock(flat.data_ptr())
    return flat


def _page_lock(address: int, size: int, fix: str) -> None:
    import torch

    code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
    if code:
        raise RuntimeError(
            f"cudaHostRegister of {size / 1e9:.1f} GB failed with code {code}; {fix}"
        )


def _page_unlock(address: int) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)


def choose(kind: str = "auto", index: int = 0, threads: int = 1) -> Device:
    """Decide the device of this process. Raises ValueError when CUDA is asked for and absent."""
    if kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={kind}: use auto, cpu or cuda")
    if kind != "cpu":
        import torch

        if torch.cuda.is_available():
            # Slurm may show every task a card of its own, which is the first one then
            index %= torch.cuda.device_count()
            return Device("cuda", index, "nccl", threads, pin_memory=True)
        if kind == "cuda":
            raise ValueError(
                "device=cuda: torch sees no CUDA device here; use device=auto or device=cpu"
            )
    return Device("cpu", 0, "gloo", threads, pin_memory=False)


def cards_seen() -> int:
    """How many GPUs torch finds."""
    import torch

    return torch.cuda.device_count()


def holds_card() -> bool:
    """Whether this process has a context on a GPU, and so memory there."""
    import torch

    return torch.cuda.is_initialized()


def yield_to_others() -> None:
    """This thread, and threads that it starts from now on, take a core after the others of this
    process: the kernel's niceness, which Linux keeps per thread. For copying beside the computation
    that somebody waits for.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)


def yield_to_engine() -> None:
    """This process, the front of an engine that has its own processes by now, takes a core after
    them: a third of what they get of one that both want, so steps are interrupted less. It needs a
    fifth of what the engine does for the same requests, measured with answers of 8 tokens by a
    model of 2.4M parameters, and less where the model is larger. What this process starts from now
    on inherits it.
    """
    least = os.getpriority(os.PRIO_PROCESS, 0) + FRONT_NICE

    def give_way(thread: int) -> None:
        os.setpriority(  # never back: that is a privilege
            os.PRIO_PROCESS, thread, max(least, os.getpriority(os.PRIO_PROCESS, thread))
        )

    _with_every_thread(give_way)


def wait_for_turn() -> None:
    """This process does not interrupt others when it wakes: its share of the cores stays the same,
    it only begins when a core is free or somebody's turn is over (Linux: SCHED_BATCH). For parts
    that are asleep most of the time, beside an engine or a rank that computes all the time and
    loses its caches with every interruption. No smaller share: whoever waits for it may have only
    so many seconds. What it starts is to do so inside `turns_not_inherited`.
    """
    _with_every_thread(
        lambda thread: os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    )


def _with_every_thread(change: Callable[[int], None]) -> None:
    """Linux keeps turns and niceness per thread; some may begin meanwhile."""
    changed: set[str] = set()
    while others := set(os.listdir("/proc/self/task")) - changed:
        for thread in others:
            with suppress(ProcessLookupError):  # it has ended
                change(int(thread))
        changed |= others


@contextmanager
def turns_not_inherited() -> Iterator[None]:
    """A process that this thread starts inside takes its turns as any other does, whatever
    `wait_for_turn` made of this one: a reward or an agent computes, and has a deadline.
    SCHED_RESET_ON_FORK would not do it: Linux takes back real-time policies and negative niceness
    only, a child of SCHED_BATCH stays SCHED_BATCH.
    """
    if not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) != os.SCHED_BATCH:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # of this thread alone
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def freeze_loaded(young: int | None = None) -> None:
    """Python's collector passes over all that this process holds by now (modules, a model, a
    tokenizer), which stays anyway, and looks at what is new once there are `young` objects (None:
    as often as before). Once, when it begins to serve or to train: looking through hundreds of
    thousands of old objects again and again took an engine's front, and every request that waited
    for it, more than a quarter of its time, and a rank, with all that wait for it, a quarter of a
    second every few hundred steps.
    """
    gc.collect()
    gc.freeze()
    if young is not None:
        gc.set_threshold(young)


def spare_cores() -> int:
    """How many threads may copy at a time while this process
    computes with all of its own; at least 1.
    """
    import torch

    return max(1, len(os.sched_getaffinity(0)) - torch.get_num_threads())


def logit_columns(device: "torch.device", tokens: int) -> int:
    """Of a tile of the logits of so many tokens (`rft.megatron.logprobs`)."""
    return tile_columns(device.type, tokens)


def tile_columns(kind: str, tokens: int) -> int:
    if kind == "cuda":
        return min(MOST_COLUMNS, max(1, CARD_TILE // max(1, tokens)))
    return max(LEAST_COLUMNS, HOST_TILE // max(1, tokens))


class SharedCard:
    """Memory of one GPU, handed to another process of the machine by CUDA's own handles
    (`rft.sync.links`), also to one on another card, which reaches it over NVLink or PCIe and need
    not see the card (`rft.sync.transport`). Whoever shared memory keeps it; it is given back when
    both sides have let it go. What a process that was killed had opened stays taken.
    """

    def __init__(self, device: "torch.device"):
        self.device = device
        self._pool: Any = None

    def room(self, size: int) -> "torch.Tensor":
        """A segment of its own, from a pool in which nothing of the allocator's cache is.

        Never an expandable one (`rank_environment`): torch hands those to another process by file
        descriptors or fabric handles, which containers forbid or which it gets wrong (its issues
        179220, 189879 and 190860), and ordinary ones by CUDA's own handle.
        """
        import torch

        self._pool = self._pool or torch.cuda.MemPool()
        with ordinary_segments(), torch.cuda.use_mem_pool(self._pool, self.device.index):
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def share(self, memory: "torch.Tensor") -> dict[str, Any]:
        return dict(zip(HANDLE, memory.untyped_storage()._share_cuda_(), strict=True))

    def open(self, told: dict[str, Any]) -> "torch.Tensor":
        import torch

        torch.cuda.init()
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        fields = {**told, "device": index}  # the other process may count its devices in another way
        storage = torch.UntypedStorage._new_shared_cuda(*(fields[name] for name in HANDLE))
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(
            storage, 0, (told["size"],)
        )

    def settle(self) -> None:
        settle(self.device)


@contextmanager
def ordinary_segments() -> Iterator[None]:
    """New segments of torch's allocator do not expand inside; those of other threads neither, which
    does them no harm. One thread at a time, or the second would put back what the first has set.
    All of its settings are set: of those that are left out torch forgets what the user has said.
    """
    import torch

    with _segments:
        told = torch._C._accelerator_getAllocatorSettings()
        ordinary = told.replace(f"{EXPANDABLE}True", f"{EXPANDABLE}False")
        if ordinary != told:
            torch._C._accelerator_setAllocatorSettings(ordinary)
        try:
            yield
        finally:
            if ordinary != told:
                torch._C._accelerator_setAllocatorSettings(told)


def peak_of(name: str) -> float | None:
    """By a device's name, which ends in its memory or form: "NVIDIA H100 80GB HBM3"."""
    known = [
        prefix
        for prefix in PEAK_TFLOPS
        if f"{name} ".startswith(f"{prefix} ") or name.startswith(f"{prefix}-")
    ]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


def default_dtype(kind: str) -> str:
    """Of a trainer's weights, where nobody gave one."""
    return "bf16" if kind == "cuda" else "fp32"


def quickest_dtype(kind: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> Literal["bf16", "fp32"]:
    """bf16, but on a CPU without instructions that multiply it: there products are emulated, ten
    times slower than those of fp32. `cpuinfo`: the kernel's list of what this machine's has.
    """
    if kind == "cuda":
        return "bf16"
    words = cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.exists() else []
    return "fp32" if BF16_OF_CPUS.isdisjoint(words) else "bf16"


def torch_dtype(name: str) -> "torch.dtype":
    """Config spelling ("fp32", "bf16") to torch's dtype."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def attention_dtype(tensor: "torch.Tensor") -> "torch.dtype":
    """What attention over `tensor` computes in: on a CPU always fp32.

    There torch's own backward of it in bf16 takes up to ten times as long, the more the shorter the
    sequences are.
    """
    import torch

    return torch.float32 if tensor.device.type == "cpu" else tensor.dtype


def cached_slices(rows: "torch.Tensor") -> Iterator[slice]:
    """Cuts of [n, width] for operations that follow each other: on a CPU so small that what one
    leaves is still in the cache of a core for the next, elsewhere one.
    """
    few = max(1, HOST_CACHE // max(1, rows.shape[1]))
    step = few if rows.device.type == "cpu" else max(1, len(rows))
    return (slice(at, at + step) for at in range(0, len(rows), step))


def collective_timeout(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def socket_family(address: str) -> socket.AddressFamily:
    """Of what is given as numbers."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def hosted_store(address: str, port: int, timeout: timedelta) -> "TCPStore":
    """Host a store of torch's that listens at `address` alone; torch by itself listens on every
    interface. Port 0: any.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server((address, port), family=socket_family(address))
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def loopback_environment(engines_too: bool) -> dict[str, str]:
    """Environment of ranks that are all on this machine: their groups listen on loopback, unless
    the user chose otherwise.

    `engines_too`: those are here as well; NCCL also leads to them.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if engines_too else ("GLOO_SOCKET_IFNAME",)
    return {name: "lo" for name in names if name not in os.environ}


def network_environment() -> dict[str, str]:
    """What NCCL and gloo were told here, interfaces and adapters, for parts on other machines: a
    Ray there has its own environment.
    """
    return {name: os.environ[name] for name in os.environ if name.startswith(("NCCL_", "GLOO_"))}


def thread_environment(threads: int) -> dict[str, str]:
    """Environment for a child process that may use `threads` cores."""
    return {name: str(threads) for name in THREAD_VARIABLES}


def quiet_environment() -> dict[str, str]:
    """Of ranks and engines, whose first NCCL group would else end the process minutes after any
    other group has seen an error, also one that does no harm (`rft.sync.communicator`).
    """
    return {DUMP: os.environ.get(DUMP, "0")}


def rank_environment(
    kind: str,
    tensor: int,
    context: int,
    capability: int | None,
    environment: Mapping[str, str],
) -> dict[str, str]:
    """What a trainer rank must have in its environment before it uses CUDA, beyond what the user
    has set there. `capability`: the GPU's, the number before the point; None: not known.

    The lengths of microbatches change with every step: segments that expand do not fall to pieces.
    Where tensor- or context-parallel ranks compute and exchange at a time, one queue makes the
    exchange begin first; Megatron's own arguments ask for it up to Hopper, and from Blackwell on it
    would only delay. (It forbids it to FSDP, which rft does not use.)
    """
    if kind != "cuda":
        return {}
    wanted = {}
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        wanted[ALLOCATOR_VARIABLES[-1]] = f"{EXPANDABLE}True"
    if max(tensor, context) > 1 and capability is not None and capability < BLACKWELL:
        wanted[QUEUES] = "1"
    return {name: value for name, value in wanted.items() if name not in environment}


def capability() -> int | None:
    """Of the first GPU of this machine, the number before the point, asked without torch and
    without a context on it; None where the driver's tool is missing or says nothing.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = subprocess.run(
        [tool, "--query-gpu=compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TOOL_S,
    )
    major = asked.stdout.partition(".")[0].strip()
    return int(major) if major.isdigit() else None
