"""The only file that decides between CPU and CUDA: device, collective backend, dtype, threads.

In: the `device` key of the config ("auto", "cpu", "cuda") and this rank's local index. Out: one frozen `Device` that is
handed to whoever needs it and printed once at start. No other file of rft may name a device or a backend.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Device:
    """What one process computes on. `kind` is "cpu" or "cuda"; `backend` is what torch.distributed takes."""

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

        if self.kind == "cuda":
            torch.cuda.set_device(self.index)
        else:
            torch.set_num_threads(self.threads)

    def describe(self) -> str:
        place = f"{self.kind}:{self.index}" if self.kind == "cuda" else f"cpu, {self.threads} thread(s)"
        return f"{place}, collectives over {self.backend}"


def choose(kind: str = "auto", index: int = 0, threads: int = 1) -> Device:
    """Decide the device of this process. Raises ValueError when CUDA is asked for and absent."""
    if kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={kind}: use auto, cpu or cuda")
    if kind != "cpu":
        import torch

        if torch.cuda.is_available():
            return Device("cuda", index, "nccl", threads, pin_memory=True)
        if kind == "cuda":
            raise ValueError("device=cuda: torch sees no CUDA device here; use device=auto or device=cpu")
    return Device("cpu", 0, "gloo", threads, pin_memory=False)


def torch_dtype(name: str) -> "torch.dtype":
    """Config spelling ("fp32", "bf16") to torch's dtype."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def collective_timeout(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def thread_environment(threads: int) -> dict[str, str]:
    """Environment for a child process that may use `threads` cores."""
    return {name: str(threads) for name in THREAD_VARIABLES}
