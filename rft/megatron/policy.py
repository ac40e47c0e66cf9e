"""The trained model behind one facade: score, train one step, show its weights, save and restore its state.

In: packed microbatches of this rank's data-parallel index, and a loss per token. Out: metrics, the same on every rank.

    part ─slice_cp─► microbatches ─megatron schedule (PP)─► gradients ─reduce─► [before_update] ─► Adam ─► weights

Invariant: the gradient is that of sum_t weight_t * loss_t over all tokens of all ranks. The weights carry the global
counts, so nothing here divides by a number of microbatches, ranks or tokens. All ranks call every method together,
except `blocks`, `read_blocks` and `snapshot`, which are local.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rft.config import ModelConfig, OptimizerConfig, TrainerConfig
from rft.device import torch_dtype
from rft.megatron import model as models
from rft.megatron import overrides, paths, state, weights
from rft.megatron.logprobs import label_logprobs
from rft.megatron.mesh import Mesh
from rft.megatron.metrics import Totals
from rft.megatron.optimizer import Optimizer
from rft.names import Dims, check_layout, read_hf_config
from rft.packing import Packed, cp_index, empty, slice_cp
from rft.protocols import Block, Snapshot

TokenLoss = Callable[[Tensor, "Fields"], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Fields:
    """What a token loss may look at, aligned with its log-probabilities [T]; `mask` is True where a token is trained."""

    behaviour: Tensor
    advantage: Tensor
    weight: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Micro:
    """One microbatch on the device, sliced for this context-parallel rank."""

    tokens: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    labels: Tensor  # [T], as are the fields
    temperature: Tensor
    fields: Fields
    packing: PackedSeqParams


class Policy:
    """A model on a mesh. `total_steps` bounds the learning-rate schedule; `seed` sets every generator of this rank."""

    def __init__(
        self, model: ModelConfig, trainer: TrainerConfig, optimizer: OptimizerConfig, mesh: Mesh, seed: int, total_steps: int | None
    ):  # fmt: skip
        self.mesh = mesh
        self.hf_config = read_hf_config(model.model_path)
        check_layout(self.hf_config, trainer.megatron, mesh.world)
        self.dims = Dims.of(self.hf_config)
        more = overrides.transformer(trainer)
        if not models.uses_transformer_engine(mesh):
            overrides.refuse_transformer_engine(trainer, "rft's own layers are used here")
        self.multiple = (mesh.tp if mesh.sequence_parallel else 1) * (overrides.FP8_TOKENS if more.get("fp8") else 1)
        self.step = 0
        _seed(seed)
        self.model = models.build(self.hf_config, mesh, torch_dtype(trainer.dtype), more)
        weights.load_hf(self.model, model.model_path, self.hf_config, mesh.place)
        self.ddp = _data_parallel(self.model, overrides.ddp(trainer))
        self.optimizer = Optimizer(self.ddp, optimizer, trainer.grad_clip, total_steps, overrides.optimizer(trainer))
        self._shards = weights.shards(self.model, self.dims, mesh.place)
        self._slabs = weights.slabs(self.model, self.hf_config, mesh.place)
        self._path = paths.describe(mesh, trainer, self.optimizer)

    def describe(self) -> str:
        """Which kernels compute, and why those."""
        return self._path

    @torch.no_grad()
    def score(self, part: list[Packed]) -> list[np.ndarray]:
        """Log-probability of every label, one array [T] per microbatch; empty arrays on all but the last stage."""
        found = self._run(part, lambda micro, hidden: self._logprobs(micro, hidden)[0], forward_only=True)
        if not self.mesh.is_last_stage:
            return [np.zeros(0, dtype=np.float32) for _ in part]
        return [self._whole(packed, local) for packed, local in zip(part, found, strict=False)]

    def train_step(
        self, part: list[Packed], token_loss: TokenLoss, before_update: Callable[[], None]
    ) -> dict[str, float]:
        """One optimizer update; `before_update` is called after the gradients are complete and before weights change.

        A loss or gradient that is not finite leaves weights and moments as they are and reports skipped=1.
        """
        totals = Totals(token_loss, self._counts)
        for part_of_model in self.ddp:
            part_of_model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(part, partial(self._loss, totals), forward_only=False)
        metrics = totals.reduce(self.mesh)
        metrics["grad_norm"] = self.optimizer.norm()
        finite = bool(np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"]))
        before_update()
        if finite:
            self.optimizer.update(self.step, metrics["grad_norm"])
        metrics |= {"lr": self.optimizer.rate(self.step), "skipped": float(not finite)}
        self.step += 1
        return metrics

    @property
    def _counts(self) -> bool:
        """Whether this rank's tokens enter the metrics: tensor-parallel ranks all compute the same ones."""
        return self.mesh.is_last_stage and self.mesh.tp_rank == 0

    def _loss(self, totals: Totals, micro: Micro, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        loss = totals.add(*self._logprobs(micro, hidden, micro.fields.mask), micro.fields)
        # Three values make megatron leave the loss as it is; it would divide a pair by the number of microbatches.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), None

    def _logprobs(self, micro: Micro, hidden: Tensor, trained: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [T]; those of tokens that are not `trained` are 0 and cost nothing."""
        return label_logprobs(
            hidden.squeeze(0), models.output_weight(self.model[-1]), micro.labels, micro.temperature, self.dims.vocab,
            self.mesh.tp_group, self.mesh.sequence_parallel, trained,
        )  # fmt: skip

    def _run(self, part: list[Packed], use: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Megatron's schedule over the microbatches; `use(micro, hidden)` is called on the last stage."""
        micros = self._micros(part)

        def forward(data: Iterator[Micro], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro = next(data)
            output = model(micro.tokens, micro.positions, None, packed_seq_params=micro.packing)
            return output, lambda hidden, non_loss_data=False: use(micro, hidden)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micros) for _ in self.ddp],
            model=self.ddp,
            num_microbatches=len(micros),
            seq_length=micros[0].tokens.shape[1] * self.mesh.cp,  # megatron divides it again
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _micros(self, part: list[Packed]) -> list[Micro]:
        """Slice for this context-parallel rank and pad to the lengths that ranks must have in common.

        Pipeline stages exchange activations of one length; ranks that share experts gather tokens of one length each.
        Interleaved stages want a multiple of their number of microbatches: the last ones are padding.
        """
        mesh = self.mesh
        sliced = [slice_cp(packed, mesh.cp_rank, mesh.cp, self.multiple) for packed in part]
        if mesh.vpp > 1:
            sliced += [empty(self.multiple)] * (-len(sliced) % mesh.pp)
        lengths = [packed.length for packed in sliced]
        if mesh.ep > 1:
            lengths = mesh.longest(lengths)
        if mesh.pp > 1:
            lengths = [max(lengths)] * len(lengths)
        return [
            self._micro(slice_cp(p, 0, 1, self.multiple, length)) for p, length in zip(sliced, lengths, strict=True)
        ]

    def _micro(self, packed: Packed) -> Micro:
        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(self.mesh.device.torch)

        weight = tensor(packed.weight)
        return Micro(
            tokens=tensor(packed.tokens)[None],
            positions=tensor(packed.positions)[None],
            labels=tensor(packed.labels),
            temperature=tensor(packed.temperature),
            fields=Fields(tensor(packed.behaviour), tensor(packed.advantage), weight, weight != 0),
            packing=models.packing_of(packed, self.model[0], self.mesh),
        )

    def _whole(self, packed: Packed, local: Tensor) -> np.ndarray:
        """Put the context-parallel slices of one microbatch back into its own order."""
        index = cp_index(packed, self.mesh.cp_rank, self.mesh.cp)
        held = index >= 0
        values = torch.zeros(packed.length, dtype=torch.float32, device=local.device)
        values[torch.from_numpy(index[held])] = local[: len(index)][torch.from_numpy(held)]
        if self.mesh.cp > 1:
            torch.distributed.all_reduce(values, group=self.mesh.cp_group)
        return values.cpu().numpy()

    def snapshot(self) -> Snapshot:
        """This rank's training state: big tensors by reference, valid until the next update."""
        counters = state.encode({"step": self.step, "updates": self.optimizer.updates})
        generators = state.encode(state.random_state(self.mesh))
        found = state.pieces(self._shards, self.optimizer, self.dims)
        return Snapshot(found, {"policy": counters}, {"generators": generators})

    def restore(self, small: dict[str, bytes]) -> None:
        """Take over counters and generators after every tensor of `snapshot().pieces` was filled in place.

        In another layout than the one that was saved, generators keep the state that they were seeded with.
        """
        values = state.decode(small["policy"])
        self.step = values["step"]
        self.optimizer.resume(values["updates"])
        if "generators" in small:
            state.set_random_state(state.decode(small["generators"]), self.mesh)

    def blocks(self) -> list[Block]:
        return [slab.block for slab in self._slabs]

    def read_blocks(self) -> Iterator[Tensor]:
        return (slab.read() for slab in self._slabs)

    def export_hf(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) at rank 0; every rank must exhaust the iterator."""
        return weights.export_hf(self._slabs, self.hf_config, self.mesh)

    def close(self) -> None:
        """Let go of model and optimizer; the mesh is closed by whoever made it."""
        self._shards, self._slabs = [], []
        del self.ddp, self.optimizer, self.model


def _data_parallel(model: list[GPTModel], more: dict[str, Any]) -> list[DistributedDataParallel]:
    """megatron's DDP with the hooks that its schedules call. Gradients are summed, in fp32, never averaged."""
    fields = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "overlap_param_gather": False}
    settings, config = DistributedDataParallelConfig(**(fields | more)), model[0].config
    ddp = [DistributedDataParallel(config, settings, part) for part in model]
    config.no_sync_func = [part.no_sync for part in ddp] if len(ddp) > 1 else ddp[0].no_sync
    # num_tokens stays None: finalize_model_grads would divide by it, and the token weights already hold the counts.
    config.finalize_model_grads_func = lambda chunks, _tokens=None, **kwargs: finalize_model_grads(
        chunks, None, **kwargs
    )
    return ddp


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed + 1, force_reset_rng=True)
