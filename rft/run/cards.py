"""Which GPUs of this machine the trainer ranks see, and which the engines: decided once, by the
supervisor.

In: a config and what CUDA_VISIBLE_DEVICES says. Out: `Cards`, or None where there are none to give
out. Trainer ranks get the first ones, engines the rest through Ray; with `cluster.colocate` both
get the same, and Ray, which cannot count a GPU twice, hears of none. Invariant: no device is given
to two parts unless the config says that they share it.
"""

from dataclasses import dataclass

from rft.config import Config, ConfigError


@dataclass(frozen=True)
class Cards:
    ranks: list[str]
    engines: list[str]
    per_engine: int
    shared: bool

    @property
    def for_ray(self) -> int:
        """How many GPUs Ray has to give out."""
        return 0 if self.shared else len(self.engines)

    def of_engine(self, number: int) -> str:
        """What engine `number` sees where Ray does not decide: its
        workers lie on the cards of as many ranks.
        """
        return ",".join(self.engines[number * self.per_engine : (number + 1) * self.per_engine])


def engine_cards(config: Config) -> int:
    """GPUs of the policy's engines and of those of auxiliary models."""
    explorer = config.explorer
    models = [explorer.rollout_model, *explorer.auxiliary_models]
    return sum(one.engine_num * one.tensor_parallel_size for one in models)


def ranks_left(config: Config, fewest: int) -> int:
    """Trainer ranks where nobody gives their number: all GPUs that the engines leave, in whole
    copies of the model, and in whole nodes if it is more than one; `fewest`, which one copy needs,
    where the number of GPUs is not told or there are none.
    """
    cluster = config.cluster
    if (
        config.device == "cpu"
        or not cluster.gpu_per_node
        or config.mode not in ("both", "train")
        or fewest < 1
    ):
        return fewest
    engines = engine_cards(config) if config.mode == "both" else 0
    if config.cluster.colocate:
        return engines
    total = cluster.node_num * cluster.gpu_per_node
    left = total - engines
    given = "explorer.rollout_model.engine_num x tensor_parallel_size"
    given += " and those of explorer.auxiliary_models" if config.explorer.auxiliary_models else ""
    told = f"cluster.node_num x gpu_per_node = {total} GPUs, less {given} = {engines},"
    if left < fewest:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, which needs {fewest}: lower engine_num, or "
            "trainer.megatron's sizes"
        )
    if left > cluster.gpu_per_node and left % cluster.gpu_per_node:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, no whole number of nodes of "
            f"{cluster.gpu_per_node}: change "
            "explorer.rollout_model.engine_num, or set trainer.num_ranks"
        )
    if left % fewest:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, no multiple of the {fewest} that its layout "
            "needs: change "
            "explorer.rollout_model.engine_num or trainer.megatron's sizes, or set "
            "trainer.num_ranks"
        )
    return left


def split(config: Config, visible: str) -> Cards | None:
    """`visible`: CUDA_VISIBLE_DEVICES, empty when it is not set."""
    devices = [device for device in visible.split(",") if device]
    count = config.cluster.gpu_per_node or len(devices)
    if config.device == "cpu" or not count or config.mode != "both":
        return None
    devices = devices or [str(number) for number in range(count)]
    ranks, rollout = int(config.trainer.num_ranks or 1), config.explorer.rollout_model
    wanted = ranks + engine_cards(config)
    if config.cluster.colocate:
        check_same_cards(config)
        wanted = ranks
    if wanted > len(devices):
        needs = "" if config.cluster.colocate else " plus engine_num x tensor_parallel_size"
        raise ConfigError(
            f"trainer.num_ranks={ranks}{needs} = {wanted} GPUs, but {len(devices)} are visible: "
            "lower "
            "explorer.rollout_model.engine_num or the trainer's layout"
        )
    if config.cluster.colocate:
        return Cards(devices[:ranks], devices[:ranks], rollout.tensor_parallel_size, shared=True)
    return Cards(devices[:ranks], devices[ranks:], rollout.tensor_parallel_size, shared=False)


def check_same_cards(config: Config) -> None:
    """On CPUs any number of ranks and engines takes turns; on GPUs every card has one rank and one
    engine worker.
    """
    ranks, rollout = int(config.trainer.num_ranks or 1), config.explorer.rollout_model
    workers = rollout.engine_num * rollout.tensor_parallel_size
    if ranks != workers:
        raise ConfigError(
            f"cluster.colocate=true with trainer.num_ranks={ranks} and engine_num x "
            f"tensor_parallel_size = {workers}: they share "
            "the same GPUs, so set explorer.rollout_model.engine_num or tensor_parallel_size so "
            "that both numbers are equal"
        )
