"""The rank's parts where a service trains that speaks Tinker's API: one rank, without a model of
its own.

In: a rank's config. Out: what `rft.ground.protocols.TrainBackend` asks for. The batch, its
advantages and its loss are made here, by the same code as for Megatron; forward and backward
passes, the optimizer and the weights are the service's.
"""

from typing import Any

from rft.config import Config


def open_mesh(config: Config, device: Any) -> Any:
    """Nothing is computed on a device here but the loss of single tokens."""
    from rft.extras.tinker.remote_policy import LocalMesh

    return LocalMesh()


def build_models(config: Config, mesh: Any) -> Any:
    from rft.algorithm import recipe
    from rft.extras.tinker.remote_policy import RemotePolicy, RemoteReference
    from rft.extras.tinker.service import Service
    from rft.trainer.models import Models

    service, trainer, algorithm = Service(config.model.tinker), config.trainer, config.algorithm
    policy = RemotePolicy(
        service,
        config.model,
        algorithm.optimizer,
        trainer.grad_clip,
        mesh,
        config.seed,
        trainer.total_steps,
    )
    reference = RemoteReference(service) if recipe.needs_reference(algorithm) else None
    return Models(policy, reference, None, algorithm)  # type: ignore[arg-type]


def build_checkpoints(rank: Any, mesh: Any, epoch: int, models: Any) -> Any:
    from rft.extras.tinker.saves import RemoteCheckpoints

    config, sync = rank.config, rank.config.synchronizer
    reach = int(sync.max_staleness or 0) + sync.sync_interval
    return RemoteCheckpoints(
        rank.job / "remote", models.policy, config.trainer.max_checkpoints_to_keep, reach
    )


def build_publisher(
    rank: Any, mesh: Any, models: Any, checkpoints: Any, synchronizer: Any | None, epoch: int
) -> Any:
    from rft.extras.tinker.saves import PathOrigin
    from rft.sync.publisher import Publisher

    return Publisher(
        PathOrigin(mesh, models.policy, checkpoints, synchronizer, rank.config.synchronizer, epoch)
    )
