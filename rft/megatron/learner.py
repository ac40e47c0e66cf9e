"""A network that is trained: gradients of a step, then, when the loop says so, an update; and its
state for checkpoints. And the critic, a second such network beside the policy.

    part ─► forward, backward (PP) ─► reduce
            ─► [the loop waits for whoever still reads the weights] ─► Adam ─► weights

Invariant: the gradient is that of sum_t weight_t * loss_t over all tokens of all ranks. The weights
carry the global counts, so nothing here divides by a number of microbatches, ranks or tokens. The
learning rate is that of `step`, the number of steps so far, whatever updates each was.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rft.algorithm.fields import Fields
from rft.config import CriticConfig, LoraConfig, OptimizerConfig, TrainerConfig
from rft.data.packing import Packed
from rft.ground.protocols import Piece, Snapshot
from rft.megatron import kernels, overrides, replay, state, weights
from rft.megatron.mesh import Mesh
from rft.megatron.network import Micro, Network
from rft.megatron.optimizer import Optimizer
from rft.megatron.totals import Totals
from rft.monitor import trace

if TYPE_CHECKING:
    from rft.algorithm.fields import Losses, TokenLoss


class Learner(Network):
    """`gradients`, then `update`. `total_steps` bounds the learning-rate schedule."""

    def __init__(
        self,
        path: str,
        trainer: TrainerConfig,
        optimizer: OptimizerConfig,
        grad_clip: float,
        mesh: Mesh,
        total_steps: int | None,
        lora_configs: list[LoraConfig] | None = None,
        seed: int = 0,
        expects: bool = False,
    ):
        super().__init__(path, trainer, mesh, lora_configs, seed, expects)
        self.step = 0
        self.optimizer = Optimizer(
            self.ddp, optimizer, grad_clip, total_steps, overrides.optimizer(trainer)
        )
        self._bias_rate = trainer.moe_router_bias_update_rate
        for router in self.routers:
            router.balances = self._bias_rate > 0
        self._shards = weights.shards(self.model, self.dims, mesh.place)
        self._tensors = state.RankTensors(self._shards, self.model, self.optimizer)

    def _wrap(self, trainer: TrainerConfig) -> None:
        fused = kernels.uses_transformer_engine(self.mesh.device)
        overlap = fused and self.mesh.place.copies > 1
        self.ddp = _data_parallel(self.model, overlap, overrides.ddp(trainer))
        if fused and overrides.transformer(trainer).get(kernels.WGRAD, True):
            kernels.fuse_weight_gradients(self.model)

    def begin(self) -> None:
        """There was no state to be read, or none that is whole: the model as it is in its files."""
        if self._built_empty:
            self._load()
            self.optimizer.begin()

    def gradients(self, part: Sequence[Packed], token_loss: "TokenLoss") -> dict[str, float]:
        """Gradients of one step, complete on every rank; metrics, the same on every rank.

        No weight changes.
        """
        device, advised = self.mesh.device.torch, not self.is_critic
        totals = Totals(token_loss, self._counts, device=device, advised=advised)
        for chunk in self.ddp:
            chunk.restore_grad_buffers(synchronize=False)  # where they were given back
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for router in self.routers:
            router.load = None
        self._run(part, partial(self._loss, totals), forward_only=False)
        with trace.span("optimizer"):
            norm = self.optimizer.norm()
        agreed = replay.agreement(self.routers, self.mesh) if self.dims.experts else {}
        return totals.reduce(self.mesh) | {"grad_norm": norm} | agreed

    def warm_up(self, part: Sequence[Packed]) -> None:
        """Do with `part`, whose rows mean nothing, what a step does for the first time: kernels are
        compiled or chosen, communicators opened, memory is taken. Nobody uses its gradients, and
        the next ones are the same bits as without it. Collective.
        """
        before = state.random_state(self.mesh)
        self.gradients(part, _plain)
        state.set_random_state(before, self.mesh)

    def give_back(self) -> None:
        """Let another process have the memory of the gradients, which hold nothing between two
        steps, by megatron's own way, and what torch keeps of this device. `gradients` takes it
        again.
        """
        for chunk in self.ddp:
            chunk.offload_grad_buffers(synchronize=True, empty_cache=False)
        self.mesh.device.give_back()

    @staticmethod
    def is_finite(metrics: dict[str, float]) -> bool:
        """Whether loss and gradient of a step are."""
        return bool(np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]))

    def update(
        self, metrics: dict[str, float], finite: bool, last: bool = True
    ) -> dict[str, float]:
        """The optimizer's step on `gradients`, whose metrics are given back with those of the
        update. `last`: of its training step.

        One that is not `finite` leaves weights and moments as they are and reports skipped=1; so,
        without a word, does one that no token was trained in: moments and decay alone move nothing.
        """
        if finite and metrics["num_tokens"]:
            with trace.span("optimizer"):
                self.optimizer.update(self.step, metrics["grad_norm"])
            if self._bias_rate > 0:
                metrics = metrics | replay.rebalance(
                    self.model, self.dims, self._bias_rate, self.mesh
                )
        report = metrics | {"lr": self.optimizer.rate(self.step), "skipped": float(not finite)}
        self.step += last
        return report

    @property
    def _called(self) -> Sequence[nn.Module]:
        return self.ddp

    @property
    def _counts(self) -> bool:
        """Whether this rank's tokens enter the metrics:
        tensor-parallel ranks all compute the same ones.
        """
        return self.mesh.is_last_stage and self.mesh.tp_rank == 0

    def _loss(self, totals: Totals, micro: Micro, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        loss = totals.add(*self._trained_scores(micro, hidden))
        # Three values make megatron leave the loss as it is; it would divide a pair by the number
        # of microbatches.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), None

    def _trained_scores(self, micro: Micro, hidden: Tensor) -> tuple[Tensor, Fields]:
        """What the loss is a function of, with gradient, and the fields that it may look at."""
        return self._token_scores(micro, hidden), micro.fields

    def _pieces(self) -> list[Piece]:
        return self._tensors.pieces()

    def _counters(self) -> bytes:
        return state.encode(
            {"step": self.step, "updates": self.optimizer.updates, "adapter": self._adapter}
        )

    def vitals(self) -> dict[str, Any]:
        """Counters and a digest of the weights of this rank, taken from the model itself."""
        return {
            "layout": [self.mesh.layout(), str(self.dtype), state.SAMPLED],
            "step": self.step,
            "updates": self.optimizer.updates,
        } | self._tensors.digests()

    @property
    def _adapter(self) -> list[float] | None:
        """What a checkpoint's adapter tensors do not say by their shapes alone."""
        return [self.lora.rank, self.lora.alpha] if self.lora else None

    def _restore_counters(self, data: bytes) -> None:
        values = state.decode(data)
        if (held := values.get("adapter")) != self._adapter:
            raise ValueError(
                f"the checkpoint's adapter has [lora_rank, lora_alpha] = {held}, "
                f"model.lora_configs says {self._adapter}: give it "
                "what it was trained with, or start under another name"
            )
        self.step = values["step"]
        self.optimizer.resume(values["updates"])

    def close(self) -> None:
        """Let go of model and optimizer; the mesh is closed by whoever made it."""
        self._shards = []
        del self.ddp, self.optimizer, self._tensors
        super().close()


class Critic(Learner):
    """A second model of its own weights that says what reward is still to come: `score` gives the
    value before every label.

    Its checkpoint pieces are `critic.model/<hf name>` and so on, so that nothing of the policy's is
    touched and any layout reads them. The generators of the rank belong to the policy, which is
    made first.

    The trunk begins as a language model, the head at 0. Then every value is 0 in every layout and
    for every seed, the first advantages are plain returns instead of the noise of random weights,
    and the first update moves the head alone: there is no gradient of the trunk until the head has
    learned from it.
    """

    is_critic = True
    replays = False

    def __init__(
        self,
        path: str,
        trainer: TrainerConfig,
        config: CriticConfig,
        mesh: Mesh,
        total_steps: int | None,
        expects: bool = False,
    ):
        optimizer, clip = config.optim, config.grad_clip
        super().__init__(path, trainer, optimizer, clip, mesh, total_steps, expects=expects)

    def _token_scores(self, micro: Micro, hidden: Tensor, wanted: Tensor | None = None) -> Tensor:
        """`hidden` is [1, T, 1] already (`ValueHead`), or this rank's T/tp rows of it."""
        values = hidden.reshape(-1)
        if self.mesh.sequence_parallel:
            # Every rank of the group computes the whole loss, so each takes its own rows of the
            # gradient and sums nothing.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.mesh.tp_group
            )
        return values if micro.source is None else values.index_select(0, micro.source)

    def snapshot(self) -> Snapshot:
        pieces = [replace(piece, key=f"critic.{piece.key}") for piece in self._pieces()]
        return Snapshot(pieces, {"critic": self._counters()})

    def restore(self, small: dict[str, bytes]) -> None:
        self._restore_counters(small["critic"])


def _plain(scores: Tensor, _: Fields) -> "Losses":
    """A loss that looks at nothing else."""
    return scores, {}


def _data_parallel(
    model: list[GPTModel], overlap: bool, more: dict[str, Any]
) -> list[DistributedDataParallel]:
    """megatron's DDP with the hooks that its schedules call.

    Gradients are summed, in fp32, never averaged. `overlap`: beside the backward pass.
    """
    fields = {
        "overlap_grad_reduce": overlap,
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": True,
        "overlap_param_gather": False,
    }
    settings, config = DistributedDataParallelConfig(**(fields | more)), model[0].config
    ddp = [DistributedDataParallel(config, settings, part) for part in model]
    config.no_sync_func = [part.no_sync for part in ddp] if len(ddp) > 1 else ddp[0].no_sync
    # num_tokens stays None: finalize_model_grads would divide by it, and the token weights already
    # hold the counts.
    config.finalize_model_grads_func = lambda chunks, _tokens=None, **kwargs: finalize_model_grads(
        chunks, None, **kwargs
    )
    return ddp
