"""The trained model behind one facade: score, train one step, show its weights, save and restore
its state.

In: packed microbatches of this rank's data-parallel index, and a loss per token. Out: metrics, the
same on every rank. How a step is made is in `learner`, how tokens are scored in `network`; here is
what the policy alone has: the generators of the rank, and weights that others want to see. All
ranks call every method together, except `blocks`, `read_blocks`, `adapter_source` and `snapshot`,
which are local.
"""

import importlib.metadata
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch import Tensor

from rft.algorithm.fields import Fields
from rft.config import ModelConfig, OptimizerConfig, TrainerConfig
from rft.data.packing import Packed
from rft.ground.protocols import Block, Snapshot, WeightSource
from rft.megatron import kernels, state, weights
from rft.megatron.learner import Learner
from rft.megatron.mesh import Mesh
from rft.megatron.network import Micro
from rft.megatron.optimizer import Optimizer

if TYPE_CHECKING:
    from rft.algorithm.fields import TokenLoss


class Policy(Learner):
    """A model on a mesh.

    `total_steps` bounds the learning-rate schedule; `seed` sets every generator of this rank.
    """

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        optimizer: OptimizerConfig,
        mesh: Mesh,
        seed: int,
        total_steps: int | None,
        expects: bool = False,
    ):
        _seed(seed)
        super().__init__(
            model.model_path,
            trainer,
            optimizer,
            trainer.grad_clip,
            mesh,
            total_steps,
            model.lora_configs,
            seed,
            expects,
        )
        slabs = weights.slabs(self.model, self.hf_config, mesh.place)
        self._sent = weights.shared(slabs, mesh.place)
        self._path = _describe(self, trainer)

    def describe(self) -> str:
        """Which kernels compute, and why those."""
        return self._path

    def train_step(
        self,
        part: Sequence[Packed],
        token_loss: "TokenLoss",
        before_update: Callable[[], None],
        last: bool = True,
    ) -> dict[str, float]:
        """One optimizer update; `before_update` is called after the gradients are complete and
        before weights change. `last`: of its training step.
        """
        metrics = self.gradients(part, token_loss)
        before_update()
        return self.update(metrics, self.is_finite(metrics), last)

    def _trained_scores(self, micro: Micro, hidden: Tensor) -> tuple[Tensor, Fields]:
        logprobs, entropy = self._logprobs(micro, hidden, micro.trained)
        return logprobs, replace(micro.fields, entropy=entropy)

    def snapshot(self) -> Snapshot:
        """This rank's training state: big tensors by reference, valid until the next update."""
        generators = state.encode(state.random_state(self.mesh))
        return Snapshot(self._pieces(), {"policy": self._counters()}, {"generators": generators})

    def restore(self, small: dict[str, bytes]) -> None:
        """Take over counters and generators after every tensor of `snapshot().pieces` was filled in
        place.

        In another layout than the one that was saved, generators keep the state that they were
        seeded with.
        """
        self._restore_counters(small["policy"])
        if "generators" in small:
            state.set_random_state(state.decode(small["generators"]), self.mesh)

    def blocks(self) -> list[Block]:
        return [slab.block for slab in self._sent]

    def read_blocks(self) -> Iterator[Tensor]:
        return (slab.read() for slab in self._sent)

    def adapter_source(self) -> WeightSource:
        """The adapter alone, in PEFT's names, for engines that keep the base model.

        The policy itself shows it merged.
        """
        assert self.lora is not None, "a policy without adapter has no blocks of one"
        place = self.mesh.place
        held = weights.adapter_slabs(self.model, self.hf_config, place, self.lora)
        return weights.AdapterSource(weights.shared(held, place))

    def close(self) -> None:
        self._sent = []
        super().close()


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 1, force_reset_rng=True)


def _describe(policy: Policy, trainer: TrainerConfig) -> str:
    """Say which of several ways of computing a run takes, and why, in one line."""
    megatron = importlib.metadata.version("megatron-core")
    parts = [
        policy.mesh.device.describe(),
        policy.dtype,
        f"megatron-core {megatron}",
        kernels.describe(policy.mesh.device, _fused(policy)),
        _optimizer(policy.optimizer),
    ]
    fp8 = trainer.megatron.override_transformer_config.get("fp8")
    recipe = trainer.megatron.override_transformer_config.get("fp8_recipe", "delayed")
    parts.append(f"fp8 {fp8} ({recipe})" if fp8 else "no fp8 (not asked for)")
    if trainer.recompute_granularity:
        parts.append(f"{trainer.recompute_granularity} recompute")
    return "; ".join(parts)


def _fused(policy: Policy) -> dict[str, bool]:
    config = policy.model[0].config
    names = ("apply_rope_fusion", "bias_activation_fusion", "moe_permute_fusion")
    modules = (module for part in policy.model for module in part.modules())
    wgrad = any(getattr(module, "fuse_wgrad_accumulation", False) for module in modules)
    overlap = policy.ddp[0].ddp_config.overlap_grad_reduce
    return {name: getattr(config, name) for name in names} | {
        kernels.WGRAD: wgrad,
        "overlap_grad_reduce": overlap,
    }


def _optimizer(optimizer: Optimizer) -> str:
    """Transformer Engine's and Apex' kernels are taken by megatron where they are installed."""
    kinds = {type(part.optimizer) for part in optimizer.parts}
    names = sorted(f"{kind.__name__} of {kind.__module__.split('.')[0]}" for kind in kinds)
    return f"distributed optimizer over {', '.join(names) or 'no parameters on this rank'}"
