"""The training step that megatron-core alone would make: the reference of `bench.train_step`.

In: the microbatches of a `Policy` as tensors on the device, ready before the clock starts. Out:
loss and gradient norm of a step.

The model is the policy's own (its configuration, its layer specification with packed attention, its
rotary angles by position: megatron's own would walk over the sequences in Python, twice per layer)
with a copy of its weights. All else is plain megatron: an output layer that makes all logits,
`vocab_parallel_cross_entropy`, DDP and the distributed optimizer, whose `step` reduces the norm,
clips and updates. The loss is the mean negative log-probability of the trained tokens: the policy's
`sft` loss under `token-mean`, so loss and gradient norm say whether both sides do the same work.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rft.megatron.model import block_spec
from rft.megatron.network import Micro
from rft.megatron.policy import Policy
from rft.megatron.rope import Rotary


class Bare:
    def __init__(self, policy: Policy):
        mesh, dims, given = policy.mesh, policy.dims, policy.optimizer.config
        config = copy.copy(policy.model[0].config)
        config.finalize_model_grads_func = finalize_model_grads
        spec = block_spec(config, mesh, dims, lora=None, number=0)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=dims.padded_vocab(mesh.tp),
            max_sequence_length=int(policy.hf_config["max_position_embeddings"]),
            share_embeddings_and_output_weights=dims.tied,
            position_embedding_type="rope",
        )
        model.rotary_pos_emb = Rotary(config)
        copy_weights(model, policy.model[0])
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
        )
        config.no_sync_func = self.ddp.no_sync
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=given.lr,
                weight_decay=given.weight_decay,
                adam_beta1=given.betas[0],
                adam_beta2=given.betas[1],
                adam_eps=given.eps,
                clip_grad=policy.optimizer.grad_clip,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )
        self.schedule = get_forward_backward_func()

    def step(self, micros: list[Micro]) -> tuple[float, float]:
        """One update. Returns the summed loss and the gradient norm."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.schedule(
            forward_step_func=forward,
            data_iterator=iter(micros),
            model=[self.ddp],
            num_microbatches=len(micros),
            seq_length=micros[0].tokens.shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        return float(sum(losses)), float(norm)


def forward(data: Iterator[Micro], model: nn.Module) -> tuple[Tensor, Any]:
    micro = next(data)
    losses = model(
        micro.tokens,
        micro.positions,
        None,
        labels=micro.labels[None],
        packed_seq_params=micro.packing,
    )

    def total(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sum and number of the trained tokens; megatron divides the gradient by the number of all
        microbatches.
        """
        loss = (losses.view(-1) * micro.fields.mask).sum()
        return loss, micro.fields.mask.sum(dtype=torch.int), loss.detach()

    return losses, total


@torch.no_grad()
def copy_weights(model: nn.Module, other: nn.Module) -> None:
    """With the marks that the policy completes: they say which
    shards count in the norm of the gradient.
    """
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        parameter.copy_(theirs[name])
        for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            if hasattr(theirs[name], mark):
                setattr(parameter, mark, getattr(theirs[name], mark))
    missing = theirs.keys() - dict(model.named_parameters()).keys()
    assert not missing, f"the policy has more parameters: {sorted(missing)}"
