"""The rank's parts where Megatron trains: the mesh, the models on it, checkpoints of their state,
and how weights leave it.

In: a rank's config. Out: what `rft.ground.protocols.TrainBackend` asks for. Order matters: the
device's port of megatron comes before megatron, so nothing of it is imported before `open_mesh`.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rft import config as configs
from rft.config import Config
from rft.monitor import logs
from rft.trainer import control


def open_mesh(config: Config, device: Any) -> Any:
    """Collective."""
    device.activate()
    if device.kind == "cpu":
        from rft.megatron import cpu_port

        cpu_port.install()
    from rft.megatron.mesh import Mesh

    return Mesh(config.trainer.megatron, device, config.trainer.collective_timeout)


def build_models(config: Config, mesh: Any) -> Any:
    """The policy, and beside it what the algorithm needs.

    The policy comes first: it seeds the generators.
    """
    from rft.algorithm import recipe
    from rft.megatron.critic import Critic
    from rft.megatron.network import Reference
    from rft.megatron.policy import Policy
    from rft.trainer.models import Models

    model, trainer, steps = config.model, config.trainer, config.trainer.total_steps
    learning = steps if steps is None else steps - trainer.critic_warmup
    policy = Policy(model, trainer, config.algorithm.optimizer, mesh, config.seed, learning)
    reference = critic = teacher = None
    if recipe.needs_reference(config.algorithm):
        reference = Reference(model.ref_model_path or model.model_path, trainer, mesh)
    if recipe.needs_critic(config.algorithm):
        critic = Critic(
            model.critic_model_path or model.model_path, trainer, config.critic, mesh, steps
        )
    if recipe.needs_teacher(config.algorithm):
        teacher = Reference(str(model.teacher_model_path), trainer, mesh)
    clip = config.critic.cliprange_value
    return Models(policy, reference, critic, config.algorithm, trainer.critic_warmup, clip, teacher)


def build_checkpoints(rank: Any, mesh: Any, epoch: int, models: Any) -> Any:
    from rft.checkpoint import fence
    from rft.checkpoint.manager import CheckpointManager

    config, lora = rank.config, models.policy.lora
    about = {
        "layout": mesh.layout(),
        "model": str(config.model.model_path),
        "dtype": config.trainer.dtype,
    }
    if lora:
        about["adapter"] = lora.as_peft(str(config.model.model_path))
    return CheckpointManager(
        configs.checkpoint_root(config),
        mesh,
        config.trainer,
        control=fence.control_dir(rank.job),
        epoch=epoch,
        device=rank.device,
        about=about,
        log_dir=logs.where(Path(os.environ["RFT_LOG_DIR"]), config.log),
    )


def build_publisher(
    rank: Any, mesh: Any, models: Any, checkpoints: Any, synchronizer: Any | None, epoch: int
) -> Any:
    """How weights go to engines, by `synchronizer.sync_method`.

    `synchronizer`: rank 0's, where engines belong to this run.
    """
    from rft.sync.connection import own_address
    from rft.sync.origins import CheckpointOrigin, MemoryOrigin, StreamOrigin
    from rft.sync.publisher import Probe, Publisher
    from rft.trainer.feed import is_supervised

    config, policy, here = rank.config, models.policy, rank.config.mode == "both"
    size = config.synchronizer.bucket_bytes or rank.device.message_bytes
    sync = replace(config.synchronizer, bucket_bytes=size)
    if is_supervised(config.algorithm):
        return Publisher(None)
    if sync.sync_method == "checkpoint":
        deadline = 2 * config.trainer.checkpoint.agent_deadline_s
        return Publisher(
            CheckpointOrigin(mesh, checkpoints, synchronizer, sync, epoch, deadline, engines=here)
        )
    if not here:
        return Publisher(None)
    source = shown(policy, config)
    if sync.sync_method == "memory":
        return Publisher(MemoryOrigin(mesh, source, control.actor("synchronizer"), sync, epoch))
    address = own_address(config.cluster.ray_address)
    origin = StreamOrigin(mesh, source, synchronizer, sync, epoch, address)
    probe = Probe(policy, mesh, synchronizer, sync.probe_interval, policy.dims.vocab)
    return Publisher(origin, probe.after, takes_turns=config.cluster.colocate)


def shown(policy: Any, config: Config) -> Any:
    """What the engines get of the policy: all of it, an adapter merged, or the adapter alone."""
    return policy.adapter_source() if config.synchronizer.lora_sync == "adapter" else policy
