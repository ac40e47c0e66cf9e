"""Where the policy learns, by `trainer.trainer_type`: Megatron on these ranks, or a service that
speaks Tinker's API.

In: a rank's config, its job's directory and its device. Out: the parts of the rank that depend on
it (`TrainBackend`); the loop (`rft.trainer.trainer`) is the same over all of them. Order matters:
the device's port of megatron comes before megatron, so nothing of it is imported before
`import_parts`. With a service the batch, its advantages and its loss are made here, by the same
code as for Megatron; forward and backward passes, the optimizer and the weights are the service's.
"""

import importlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rft import config as configs
from rft.config import Config
from rft.data.updates import RowPacking
from rft.ground.device import Device
from rft.ground.families import routing_of
from rft.ground.names import read_hf_config
from rft.ground.protocols import TrainerMesh
from rft.ground.rounds import STREAM
from rft.monitor import logs
from rft.trainer import control
from rft.trainer.feed import reads_files

if TYPE_CHECKING:
    from rft.checkpoint.manager import CheckpointManager
    from rft.extras.tinker.saves import RemoteCheckpoints
    from rft.sync.publisher import Publisher
    from rft.sync.synchronizer import SynchronizerHandle
    from rft.trainer.models import Models

    Saves = CheckpointManager | RemoteCheckpoints


# what every rank of Megatron's needs, sooner or later; the second is what torch's optimizers import
LATE = (
    "rft.megatron.policy",
    "torch._dynamo",
    "rft.checkpoint.manager",
    "rft.sync.origins",
    "rft.sync.publisher",
)


@dataclass(frozen=True)
class TrainBackend(ABC):
    """The parts of a trainer rank that depend on where the policy learns. Every rank calls every
    method, in this order.
    """

    config: Config
    job: Path
    device: Device

    def import_parts(self) -> None:
        """Have the code that the others run, so that none of them waits for it; twice is once."""
        self.import_code()

    @abstractmethod
    def import_code(self) -> None:
        """The same without touching a device: a process may do it long before it is a rank
        (`rft.run.spare`).
        """

    @abstractmethod
    def open_mesh(self) -> TrainerMesh:
        """Who trains together. Collective."""

    @abstractmethod
    def build_models(self, mesh: TrainerMesh) -> "Models":
        """The policy, which scores the tokens of microbatches and makes a step of them, and beside
        it what the algorithm needs.
        """

    @abstractmethod
    def build_checkpoints(self, mesh: TrainerMesh, models: "Models", epoch: int) -> "Saves":
        """Saves and loads the policy together with the loop's own state."""

    @abstractmethod
    def build_publisher(
        self,
        mesh: TrainerMesh,
        models: "Models",
        checkpoints: "Saves",
        synchronizer: "SynchronizerHandle | None",
        epoch: int,
    ) -> "Publisher":
        """Brings versions of the policy to the engines. `synchronizer`: rank 0's, where engines
        belong to this run.
        """

    @abstractmethod
    def warm_up(self, models: "Models", packing: RowPacking) -> None:
        """While engines start: what the first step would otherwise do for the first time, so far as
        it changes nothing. Collective.
        """


class MegatronBackend(TrainBackend):
    """The mesh, the models on it, checkpoints of their state, and how weights leave it."""

    def import_parts(self) -> None:
        self.device.activate()
        self.import_code()

    def import_code(self) -> None:
        if self.device.kind == "cpu":
            from rft.megatron import cpu_port

            cpu_port.install()
        for name in LATE:
            importlib.import_module(name)

    def open_mesh(self) -> TrainerMesh:
        self.import_parts()
        if self.device.kind == "cuda":
            from rft.megatron import kernels

            kernels.check()
        from rft.megatron import mesh

        trainer, is_bitwise = self.config.trainer, configs.is_bitwise(self.config)
        if is_bitwise:
            self.device.order_sums()
        to_the_bit = is_bitwise and self.device.kind == "cpu"
        return mesh.Mesh(trainer.megatron, self.device, trainer.collective_timeout, to_the_bit)

    def build_models(self, mesh: TrainerMesh) -> "Models":
        """The policy comes first: it seeds the generators."""
        from rft.algorithm import recipe
        from rft.checkpoint import fence
        from rft.megatron.learner import Critic
        from rft.megatron.logprobs import check_label_logprobs
        from rft.megatron.network import Reference
        from rft.megatron.policy import Policy
        from rft.trainer.models import Models

        config, model, trainer = self.config, self.config.model, self.config.trainer
        steps = trainer.total_steps
        learning = steps if steps is None else steps - trainer.critic_warmup
        check_label_logprobs(mesh.tp_group, mesh.device.torch)
        control = fence.control_dir(self.job)
        # of an attempt before: what they have written, or keep, is read
        comes_back = bool(fence.living_agents(control) or fence.resting(control))
        optimizer = config.algorithm.optimizer
        policy = Policy(model, trainer, optimizer, mesh, config.seed, learning, comes_back)
        reference = critic = teacher = None
        if recipe.needs_reference(config.algorithm):
            path = model.ref_model_path or model.model_path
            routed = routing_of(read_hf_config(path)) == routing_of(policy.hf_config)
            reference = Reference(path, trainer, mesh, replays=routed)
        if recipe.needs_critic(config.algorithm):
            critic = Critic(
                model.critic_model_path or model.model_path,
                trainer,
                config.critic,
                mesh,
                steps,
                comes_back,
            )
        if recipe.needs_teacher(config.algorithm):
            teacher = Reference(str(model.teacher_model_path), trainer, mesh, replays=False)
        return Models(
            policy,
            reference,
            critic,
            config.algorithm,
            trainer.critic_warmup,
            config.critic.cliprange_value,
            teacher,
        )

    def build_checkpoints(
        self, mesh: TrainerMesh, models: "Models", epoch: int
    ) -> "CheckpointManager":
        from rft.buffer.store import journal_of
        from rft.checkpoint import fence
        from rft.checkpoint.manager import CheckpointManager
        from rft.checkpoint.neighbours import RankPlace
        from rft.sync.connection import own_address

        config, lora = self.config, models.policy.lora
        about = {
            "layout": mesh.layout(),
            "model": str(config.model.model_path),
            "dtype": config.trainer.dtype,
        }
        if lora:
            about["adapter"] = lora.as_peft(str(config.model.model_path))
        buffer = config.buffer.trainer_input.experience_buffer
        first = os.environ.get("MASTER_ADDR", "127.0.0.1")  # of the ranks' store
        is_queue = buffer.storage_type == "queue" and not reads_files(config)
        place = RankPlace(
            address=own_address(f"{first}:0"),
            journal=journal_of(buffer, self.job) if is_queue else "",
        )
        saves = CheckpointManager(
            configs.checkpoint_root(config),
            mesh,
            config.trainer,
            control=fence.control_dir(self.job),
            epoch=epoch,
            device=self.device,
            about=about,
            log_dir=logs.where(Path(os.environ["RFT_LOG_DIR"]), config.log),
            place=place,
        )
        assert saves.agent_log is not None
        logs.keep_small(saves.agent_log, config.log)
        return saves

    def build_publisher(
        self,
        mesh: TrainerMesh,
        models: "Models",
        checkpoints: "Saves",
        synchronizer: "SynchronizerHandle | None",
        epoch: int,
    ) -> "Publisher":
        """By `synchronizer.sync_method`."""
        from rft.sync import transfer
        from rft.sync.connection import own_address
        from rft.sync.origins import CheckpointOrigin, MemoryOrigin, StreamOrigin
        from rft.sync.publisher import Probe, Publisher
        from rft.trainer.feed import is_supervised

        config, policy, here = self.config, models.policy, self.config.mode == "both"
        ends = transfer.of_config(config)
        size = ends[0].message_bytes if ends else None
        size = size or config.synchronizer.bucket_bytes or self.device.message_bytes
        if config.synchronizer.sync_method == STREAM:
            # of a plan; each of an engine's workers gets its share of one
            size *= config.explorer.rollout_model.tensor_parallel_size
        sync = replace(config.synchronizer, bucket_bytes=size)
        if is_supervised(config.algorithm):
            return Publisher(None)
        if sync.sync_method == "checkpoint":
            deadline = 2 * config.trainer.checkpoint.agent_deadline_s
            return Publisher(
                CheckpointOrigin(
                    mesh, checkpoints, synchronizer, sync, epoch, deadline, engines=here
                )
            )
        if not here:
            return Publisher(None)
        # all of it, an adapter merged, or the adapter alone
        source = policy.adapter_source() if sync.lora_sync == "adapter" else policy
        if sync.sync_method == "memory":
            every = control.actor("synchronizer")
            return Publisher(MemoryOrigin(mesh, source, every, sync, epoch))
        address = own_address(config.cluster.ray_address)
        origin = StreamOrigin(mesh, source, synchronizer, sync, epoch, address)
        probe = Probe(policy, mesh, synchronizer, sync.probe_interval, policy.dims.vocab)
        turns = config.cluster.colocate
        return Publisher(origin, probe.after, takes_turns=turns, give_back=models.give_back)

    def warm_up(self, models: "Models", packing: RowPacking) -> None:
        """Not on a CPU, whose cores the engines' start has; nor where engines have their memory on
        these cards; nor in fp8, whose scales follow from the numbers of microbatches before.
        """
        from rft.megatron import overrides

        config = self.config
        fp8 = overrides.transformer(config.trainer).get("fp8")
        if self.device.kind == "cpu" or config.cluster.colocate or fp8:
            return
        rows = -(-int(config.buffer.train_batch_size or 1) // packing.dp)
        longest = int(config.model.max_model_len or 1)
        models.warm_up(packing.made_up(rows, longest, models.policy.dims.vocab))


class TinkerBackend(TrainBackend):
    """One rank, without a model of its own."""

    def import_code(self) -> None:
        importlib.import_module("rft.extras.tinker.remote_policy")

    def open_mesh(self) -> TrainerMesh:
        """Nothing is computed on a device here but the loss of single tokens."""
        from rft.extras.tinker.remote_policy import LocalMesh

        return LocalMesh()

    def build_models(self, mesh: TrainerMesh) -> "Models":
        from rft.algorithm import recipe
        from rft.extras.tinker.remote_policy import RemotePolicy, RemoteReference
        from rft.extras.tinker.service import Service
        from rft.trainer.models import Models

        config, trainer, algorithm = self.config, self.config.trainer, self.config.algorithm
        service = Service(config.model.tinker)
        policy = RemotePolicy(
            service,
            config.model,
            algorithm.optimizer,
            trainer.grad_clip,
            mesh,  # type: ignore[arg-type]
            config.seed,
            trainer.total_steps,
        )
        reference = RemoteReference(service) if recipe.needs_reference(algorithm) else None
        return Models(policy, reference, None, algorithm)  # type: ignore[arg-type]

    def build_checkpoints(
        self, mesh: TrainerMesh, models: "Models", epoch: int
    ) -> "RemoteCheckpoints":
        from rft.extras.tinker.saves import RemoteCheckpoints

        sync = self.config.synchronizer
        reach = int(sync.max_staleness or 0) + sync.sync_interval
        keep = self.config.trainer.max_checkpoints_to_keep
        return RemoteCheckpoints(self.job / "remote", models.policy, keep, reach)  # type: ignore[arg-type]

    def build_publisher(
        self,
        mesh: TrainerMesh,
        models: "Models",
        checkpoints: "Saves",
        synchronizer: "SynchronizerHandle | None",
        epoch: int,
    ) -> "Publisher":
        from rft.extras.tinker.saves import PathOrigin
        from rft.sync.publisher import Publisher

        sync = self.config.synchronizer
        return Publisher(PathOrigin(mesh, models.policy, checkpoints, synchronizer, sync, epoch))  # type: ignore[arg-type]

    def warm_up(self, models: "Models", packing: RowPacking) -> None:
        """The service's models are."""


BACKENDS: dict[str, type[TrainBackend]] = {"megatron": MegatronBackend, "tinker": TinkerBackend}


def backend_of(config: Config, device: Device) -> TrainBackend:
    """Where the policy of this run learns."""
    return BACKENDS[config.trainer.trainer_type](config, configs.job_dir(config), device)
