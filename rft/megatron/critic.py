"""The critic: a second model of its own weights that says what reward is still to come, before
every token.

In: the same microbatches as the policy. Out: values; gradients and updates by its own optimizer;
checkpoint pieces under `critic.model/<hf name>` and so on, so that nothing of the policy's is
touched and any layout reads them.

The trunk begins as a language model, the head at 0. Then every value is 0 in every layout and for
every seed, the first advantages are plain returns instead of the noise of random weights, and the
first update moves the head alone: there is no gradient of the trunk until the head has learned from
it.
"""

from dataclasses import replace

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from rft.config import CriticConfig, TrainerConfig
from rft.ground.protocols import Snapshot
from rft.megatron.learner import Learner
from rft.megatron.mesh import Mesh
from rft.megatron.network import Micro


class Critic(Learner):
    """`score` gives the value before every label.

    The generators of the rank belong to the policy, which is made first.
    """

    is_critic = True

    def __init__(
        self,
        path: str,
        trainer: TrainerConfig,
        config: CriticConfig,
        mesh: Mesh,
        total_steps: int | None,
    ):
        super().__init__(path, trainer, config.optim, config.grad_clip, mesh, total_steps)

    def _token_scores(self, micro: Micro, hidden: Tensor, wanted: Tensor | None = None) -> Tensor:
        """`hidden` is [1, T, 1] already (`ValueHead`), or this rank's T/tp rows of it."""
        values = hidden.reshape(-1)
        if not self.mesh.sequence_parallel:
            return values
        # Every rank of the group computes the whole loss, so each takes its own rows of the
        # gradient and sums nothing.
        return gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=self.mesh.tp_group
        )

    def snapshot(self) -> Snapshot:
        pieces = [replace(piece, key=f"critic.{piece.key}") for piece in self._pieces()]
        return Snapshot(pieces, {"critic": self._counters()})

    def restore(self, small: dict[str, bytes]) -> None:
        self._restore_counters(small["critic"])
