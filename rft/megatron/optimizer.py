"""megatron's distributed optimizer, cut open where the loop needs to step in: after the gradients,
before the weights.

In: the DDP-wrapped model with reduced gradients. Out: the gradient norm, then, if wanted, updated
weights on all ranks. The learning rate is a function of the step number alone. Optimizer state
exists from construction on, so that a checkpoint can be read into it before the first step.
"""

from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rft.config import OptimizerConfig
from rft.megatron import schedule

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 16  # elements of fp32 in a line of a cache


def zeros_like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """On a CPU parts of one block that the kernel gives as zeros when it is first used: a state
    that is read into it is the first to touch it, by large pages, for which numpy asks where a
    block has 4 MiB.
    """
    if any(one.device.type != "cpu" or one.dtype != torch.float32 for one in tensors):
        return [torch.zeros_like(one) for one in tensors]
    lengths = [-(-one.numel() // ALIGNED) * ALIGNED for one in tensors]
    block = torch.from_numpy(np.zeros(sum(lengths), np.float32))
    return [
        part[: one.numel()].view(one.shape)
        for part, one in zip(block.split(lengths), tensors, strict=True)
    ]


class Optimizer:
    """`norm` after the backward pass, then `update` or nothing."""

    def __init__(
        self,
        model: list[DistributedDataParallel],
        config: OptimizerConfig,
        grad_clip: float,
        total_steps: int | None,
        more: dict[str, Any],
    ):
        self.config = config
        self.grad_clip = grad_clip
        self.total_steps = total_steps
        self.updates = 0
        fields = {
            "optimizer": "adam",
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "adam_beta1": config.betas[0],
            "adam_beta2": config.betas[1],
            "adam_eps": config.eps,
            "clip_grad": grad_clip,
            "bf16": model[0].config.bf16,
            "params_dtype": model[0].config.params_dtype,
            "use_distributed_optimizer": True,
        }
        self.chain: ChainedOptimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(**(fields | more)), model, use_gloo_process_groups=False
        )
        schedule.check(config, total_steps)
        self.parts: list[DistributedOptimizer] = [
            p for p in self.chain.chained_optimizers if not p.is_stub_optimizer
        ]
        for part in self.parts:
            self._materialise(part) if config.optimizer_type == "adam" else self._put_sgd(part)

    @staticmethod
    def _materialise(part: DistributedOptimizer) -> None:
        """Zero moments for every shard; torch's Adam also wants its step tensors.

        One fused kernel per shard on any device.
        """
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            groups = part.optimizer.param_groups
            for group in groups:
                group["foreach"], group["fused"] = False, True
            parameters = [parameter for group in groups for parameter in group["params"]]
            for name in MOMENTS:
                zeros = zeros_like([parameter.data for parameter in parameters])
                for parameter, moment in zip(parameters, zeros, strict=True):
                    part.optimizer.state[parameter][name] = moment
            for parameter in parameters:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                part.optimizer.state[parameter]["step"] = step
        part.init_state_fn(part.optimizer, part.config)  # of those of TE and Apex

    @staticmethod
    def _put_sgd(part: DistributedOptimizer) -> None:
        """Plain SGD over the same shards. megatron insists on Adam while it cuts them, for the sake
        of checkpoints of its own; afterwards it only asks its inner optimizer for `param_groups`,
        `step` and `zero_grad`.
        """
        of_adam = part.optimizer.defaults.keys() - {"lr", "weight_decay"}
        groups = [
            {k: v for k, v in group.items() if k not in of_adam}
            for group in part.optimizer.param_groups
        ]
        sgd = torch.optim.SGD([torch.zeros(0)])  # shards are views, which its constructor refuses
        sgd.param_groups = [sgd.defaults | group for group in groups]
        part.optimizer = sgd

    def zero_grad(self) -> None:
        self.chain.zero_grad()

    def norm(self) -> float:
        """Norm of the whole gradient over all ranks; also readies the gradients for `update`."""
        self.chain.prepare_grads()
        return float(self.chain.get_grad_norm())

    def rate(self, step: int) -> float:
        return schedule.learning_rate(step, self.config, self.total_steps)

    def update(self, step: int, grad_norm: float) -> None:
        """Clip and apply at the rate of `step`; afterwards the
        parameters are complete on every rank.
        """
        for part in self.parts:
            if self.grad_clip > 0:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self.grad_clip, grad_norm)
            for group in part.param_groups:
                group["lr"] = self.rate(step)
                group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
        self.chain.step_with_ready_grads()
        self.updates += 1

    @torch.no_grad()
    def begin(self) -> None:
        """As if it had just been made of the weights as they are now."""
        self.chain.reload_model_params()
        for part in self.parts:
            for state in part.optimizer.state.values():
                for name in MOMENTS:
                    if name in state:
                        state[name].zero_()

    def resume(self, updates: int) -> None:
        """Go on after that many updates: Adam's bias correction depends on the number."""
        self.updates = updates
        for part in self.parts:
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(updates)
            if not isinstance(
                part.optimizer, torch.optim.Adam | torch.optim.AdamW | torch.optim.SGD
            ):
                # Transformer Engine's and Apex' Adam count per group, and have no counter before
                # their first step.
                for group in part.optimizer.param_groups:
                    group["step"] = updates

    def held(self) -> list[torch.Tensor]:
        """All that the next update depends on, beside gradients and weights."""
        states = [state for part in self.parts for state in part.optimizer.state.values()]
        return [one for state in states for one in state.values() if torch.is_tensor(one)]

    def mains(self) -> list[torch.Tensor]:
        """What it updates: of bf16 weights fp32 ones of its own, else the weights."""
        groups = [group for part in self.parts for group in part.optimizer.param_groups]
        return [one for group in groups for one in group["params"]]

    def shards(self) -> list[tuple[torch.nn.Parameter, tuple[int, int], dict[str, torch.Tensor]]]:
        """Per model parameter of which this rank updates a range: (parameter, [start, stop), named
        state of that range).

        `master` is listed only where it is memory of its own: an fp32 parameter is updated in
        place.
        """
        ranges = []
        for part in self.parts:
            pairs = (
                (part.model_float16_groups, part.shard_fp32_from_float16_groups, True),
                (part.model_fp32_groups, part.shard_fp32_groups, False),
            )
            for models, mains, has_master in pairs:
                for model_group, main_group in zip(models, mains, strict=True):
                    for parameter, main in zip(model_group, main_group, strict=True):
                        place = part._get_model_param_range_map(parameter)["param"]
                        state = {
                            k: v
                            for k, v in part.optimizer.state.get(main, {}).items()
                            if k in MOMENTS
                        }
                        if has_master:
                            state["master"] = main
                        ranges.append((parameter, (place.start, place.end), state))
        return ranges
