"""The ways of saving that `bench.checkpoint` compares with: none, torch's DCP and megatron-core,
behind one small class.

In: a `State` whose tensors change in place. Out: a checkpoint directory per step, loaded back by
the same library. Every mode starts what it needs at `start` or, where its library does so, at the
first save, and ends it at `close`.

Importing this module installs the CPU port, in the ranks and in every child that they spawn (a
spawned child imports its parent's main module, which imports this one): megatron-core's worker
calls torch.cuda.set_device before anything else and dies without it. No other shim is needed.
"""

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from bench.checkpoint_state import State
from rft.megatron import cpu_port

cpu_port.install()


class Mode:
    """One way of saving. The defaults are those of a save that is durable when `save` returns."""

    name = "none"
    kind = "none"  # none | sync | async
    # this mode changes where the tensors live, so it must not share them with the others
    own_state = False

    def __init__(self, root: Path, rank: int, world: int, group: Any) -> None:
        """`group`: a gloo group of all ranks that only checkpoints use."""
        self.root = root / self.name
        self.rank, self.world, self.group = rank, world, group
        self.root.mkdir(parents=True, exist_ok=True)

    def start(self, state: State) -> None:
        pass

    def save(self, step: int, state: State) -> None:
        pass

    def before_update(self) -> None:
        """Weights change when this returns."""

    def poll(self) -> bool:
        """Whether the save is durable; called once a step."""
        return True

    def finish(self) -> None:
        """Wait until it is durable."""

    def durable_at(self) -> float | None:
        """time.perf_counter() of that moment, where it lies before the poll that noticed it."""
        return None

    def load(
        self, step: int, state: State, into: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {}

    def drop(self, step: int) -> None:
        """Rank 0 alone, after all have loaded."""
        shutil.rmtree(self.path(step), ignore_errors=True)

    def close(self) -> None:
        pass

    def path(self, step: int) -> Path:
        return self.root / f"step_{step}"


class NoSave(Mode):
    """Steps alone: what the measurement itself calls lost."""

    STEPS = 4

    def save(self, step: int, state: State) -> None:
        self.polls = 0

    def poll(self) -> bool:
        self.polls += 1
        return self.polls > self.STEPS


class Dcp(Mode):
    """What the modes of torch.distributed.checkpoint share:

    DTensors over the ranks where there are several.
    """

    def start(self, state: State) -> None:
        if self.world > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self.mesh = init_device_mesh("cpu", (self.world,))
        # a model has its DTensors before the first save
        self.listed = self.described(state, state.tensors)

    def described(self, state: State, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        if self.world == 1:
            return dict(tensors)
        from torch.distributed.tensor import DTensor, Shard

        return {
            name: DTensor.from_local(tensor, self.mesh, [Shard(0)], run_check=False)
            if state.sharded(name)
            else tensor
            for name, tensor in tensors.items()
        }

    def load(
        self, step: int, state: State, into: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        import torch.distributed.checkpoint as dcp

        dcp.load(
            self.described(state, into), checkpoint_id=self.path(step), process_group=self.group
        )
        return into


class DcpSync(Dcp):
    name = "dcp_sync"
    kind = "sync"

    def save(self, step: int, state: State) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.listed, checkpoint_id=self.path(step), process_group=self.group)


class DcpAsync(Dcp):
    """DCP's default: a fresh copy inside the call, then a thread that writes."""

    name = "dcp_thread"
    kind = "async"
    process = False

    def stager(self) -> Any:
        return None

    def start(self, state: State) -> None:
        super().start(state)
        self.kept_stager = self.stager()

    def save(self, step: int, state: State) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kinds = AsyncCheckpointerType
        self.ended: float | None = None
        answer = dcp.async_save(
            self.listed,
            checkpoint_id=self.path(step),
            process_group=self.group,
            async_checkpointer_type=kinds.PROCESS if self.process else kinds.THREAD,
            async_stager=self.kept_stager,
        )
        self.staged: Future[None] | None = (
            None if isinstance(answer, Future) else answer.staging_completion
        )
        self.written: Future[Any] = (
            answer if isinstance(answer, Future) else answer.upload_completion
        )
        self.written.add_done_callback(self._note)

    def _note(self, written: Future[Any]) -> None:
        self.ended = time.perf_counter()

    def before_update(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def poll(self) -> bool:
        return self.written.done()

    def finish(self) -> None:
        self.written.result()

    def durable_at(self) -> float | None:
        return self.ended

    def close(self) -> None:
        if self.kept_stager is not None:
            self.kept_stager.close()


class DcpThreadStaged(DcpAsync):
    """The same with memory that is kept, and the copy overlapped with the next step's compute."""

    name = "dcp_thread_staged"

    def stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False)
        )


class DcpProcess(DcpAsync):
    """DCP's process, at its best here: shared memory that is kept and the copy overlapped."""

    name = "dcp_process"
    process = True

    def stager(self) -> Any:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        return DefaultStager(
            StagingOptions(
                False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
            )
        )

    def close(self) -> None:
        from torch.distributed.checkpoint import _async_process_executor as executor

        super().close()
        # its __del__ asks the process to end and joins it; DCP offers no other way
        executor._CHECKPOINT_PROCESS = None


class Megatron(Mode):
    """megatron-core, one strategy object kept for the life of the mode, as Megatron-LM does, so
    that its plan is cached.
    """

    name = "mcore_sync"
    kind = "sync"
    persistent: bool | None = None

    def start(self, state: State) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        self.strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        self.queue = AsyncCallsQueue(persistent=bool(self.persistent))
        self.saves = 0

    def described(self, state: State, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        shard = (0, self.rank, self.world)
        return {
            name: ShardedTensor.from_rank_offsets(name, tensor, shard)
            if state.sharded(name)
            else ShardedTensor.from_rank_offsets(name, tensor, replica_id=self.rank)
            for name, tensor in tensors.items()
        }

    def save(self, step: int, state: State) -> None:
        from megatron.core import dist_checkpointing

        asynchronous = self.persistent is not None
        if self.rank == 0:
            # with a cached plan another rank's writer may be first
            self.path(step).mkdir(exist_ok=True)
        request = dist_checkpointing.save(
            # save changes the dictionary; Megatron-LM makes a new one, too
            self.described(state, state.tensors),
            str(self.path(step)),
            self.strategy,
            # as Megatron-LM: layouts that do not change are checked once
            validate_access_integrity=self.saves == 0,
            async_sharded_save=asynchronous,
        )
        self.saves += 1
        if asynchronous:
            self.queue.schedule_async_request(request)

    def load(
        self, step: int, state: State, into: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load(self.described(state, into), str(self.path(step)))

    def close(self) -> None:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        self.queue.close()
        if (
            filesystem_async._results_queue is not None
        ):  # all modes share its process; who needs it again starts it again
            filesystem_async._results_queue._manager.shutdown()
            filesystem_async._results_queue = None


class MegatronTemporal(Megatron):
    """A fork per save."""

    name = "mcore_temporal"
    kind = "async"
    persistent = False

    def poll(self) -> bool:
        self.queue.maybe_finalize_async_calls(blocking=False)
        return self.queue.get_num_unfinalized_calls() == 0

    def finish(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)


class MegatronPersistent(MegatronTemporal):
    """A worker that lives on. It moves the tensors it is given to shared memory, for good."""

    name = "mcore_persistent"
    persistent = True
    own_state = True


PEERS: list[type[Mode]] = [
    NoSave,
    DcpSync,
    DcpAsync,
    DcpThreadStaged,
    DcpProcess,
    Megatron,
    MegatronTemporal,
    MegatronPersistent,
]
