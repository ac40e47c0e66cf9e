"""A model on a mesh that says something about every token of packed microbatches. Not trained here:
see `learner`.

    part ─slice_cp─► microbatches ─megatron schedule (PP)─► last stage: one score per token
            ─► whole microbatches again

In: packed microbatches of this rank's data-parallel index. Out: float32 [T] per microbatch, aligned
like its fields, the same on every tensor- and context-parallel rank of the last stage and empty on
the stages before it. Nothing is gathered anywhere else. All ranks call every method together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rft.algorithm.fields import Fields
from rft.config import LoraConfig, TrainerConfig
from rft.config.layout import check_layout, lora_of
from rft.data.context_parallel import cp_index, slice_cp
from rft.data.packing import Packed, empty, lengthened, multiple_of
from rft.data.prefixes import Computed, computed_of
from rft.ground.device import default_dtype, torch_dtype
from rft.ground.errors import ConfigError
from rft.ground.families import routing_of
from rft.ground.names import Dims, read_hf_config
from rft.megatron import bitwise, kernels, overrides, replay, weights
from rft.megatron import model as models
from rft.megatron.logprobs import label_logprobs
from rft.megatron.lora_layers import freeze_all_but_adapters
from rft.megatron.mesh import Mesh
from rft.monitor import trace


@dataclass(frozen=True)
class Micro:
    """One microbatch on the device, sliced for this context-parallel rank: T tokens that are
    computed, L labels; as many, where no prefix is shared.
    """

    tokens: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    labels: Tensor  # [L], as are the fields
    temperature: Tensor
    trained: Tensor  # int64: which tokens are, found on the host, which then waits for no device
    fields: Fields
    packing: PackedSeqParams
    source: Tensor | None = None  # int64 [L]: which token predicts each label; None: its own


class Network:
    """The model of a Hugging Face directory, forward only; it scores a token by its
    log-probability.
    """

    is_critic = False
    replays = True  # it is the model, or nearly, whose engine has chosen the routes of its tokens

    def __init__(
        self,
        path: str,
        trainer: TrainerConfig,
        mesh: Mesh,
        lora_configs: list[LoraConfig] | None = None,
        seed: int = 0,
        expects: bool = False,
    ):
        """`expects`: a saved state will be read into it, as it seems; else it is to `begin`."""
        self.mesh = mesh
        self.dtype = trainer.dtype or default_dtype(mesh.device.kind)
        self.hf_config = read_hf_config(path)
        check_layout(self.hf_config, trainer.megatron, mesh.world)
        self.dims = Dims.of(self.hf_config)
        more = overrides.transformer(trainer)
        self.multiple = multiple_of(
            mesh.tp if mesh.sequence_parallel else 1,
            mesh.cp,
            overrides.FP8_TOKENS if more.get("fp8") else bitwise.ROWS if mesh.bitwise else 1,
        )
        self.lora = lora_of(lora_configs or [], self.dims)
        if not kernels.uses_transformer_engine(mesh.device):
            overrides.refuse_transformer_engine(trainer, "rft's own layers are used here")
            if "mla" in self.dims.features and mesh.device.kind != "cpu":
                raise ConfigError(
                    "model.model_path: on a GPU Megatron computes latent attention with "
                    "Transformer Engine only, which is not installed (docs/install.md)"
                )
        self.model = models.build(
            self.hf_config, mesh, torch_dtype(self.dtype), more, self.is_critic, self.lora
        )
        self.routers = [one for part in self.model for one in replay.attach(part, self.dims)]
        if self.lora:
            freeze_all_but_adapters(self.model)
        self._wrap(trainer)
        self._origin = (path, seed)
        # states hold all of a model, but nothing of one under an adapter; nor does fp8 begin empty
        self._built_empty = expects and not self.lora and not more.get("fp8")
        if self._built_empty:
            weights.clear_padding(self.model, self.dims, mesh.place)
        else:
            self._load()

    def _load(self) -> None:
        path, seed = self._origin
        weights.load_hf(self.model, path, self.hf_config, self.mesh.place)
        if self.lora:
            weights.initialise_adapters(self.model, self.dims, self.mesh.place, seed)

    def _wrap(self, trainer: TrainerConfig) -> None:
        """What moves parameters to memory of its own does so before they are filled: memory that
        nothing was written to costs nothing.
        """

    @torch.no_grad()
    def score(self, part: Sequence[Packed], trained_only: bool = False) -> list[np.ndarray]:
        """The score of every label, one array [T] per microbatch; empty arrays on all but the last
        stage.

        `trained_only`: log-probabilities of other tokens may be left out, as 0.
        """

        def use(micro: Micro, hidden: Tensor) -> Tensor:
            return self._token_scores(micro, hidden, micro.trained if trained_only else None)

        outputs = self._run(part, use, forward_only=True)
        if not self.mesh.is_last_stage:
            return [np.zeros(0, dtype=np.float32) for _ in part]
        return [self._whole(packed, local) for packed, local in zip(part, outputs, strict=False)]

    @torch.no_grad()
    def uncertainty(self, part: Sequence[Packed]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probabilities of the trained labels and entropies there, as `score` gives them."""

        def use(micro: Micro, hidden: Tensor) -> Tensor:
            return torch.stack(self._logprobs(micro, hidden, micro.trained))

        outputs = self._run(part, use, forward_only=True)
        if not self.mesh.is_last_stage:
            return [np.zeros(0, dtype=np.float32) for _ in part], [
                np.zeros(0, dtype=np.float32) for _ in part
            ]
        pairs = list(zip(part, outputs, strict=False))
        return [self._whole(packed, local[0]) for packed, local in pairs], [
            self._whole(packed, local[1]) for packed, local in pairs
        ]

    def _token_scores(self, micro: Micro, hidden: Tensor, wanted: Tensor | None = None) -> Tensor:
        return self._logprobs(micro, hidden, wanted)[0]

    def _logprobs(
        self, micro: Micro, hidden: Tensor, trained: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [T]; those of tokens that are not `trained` are 0 and
        cost nothing.
        """
        return label_logprobs(
            hidden.squeeze(0),
            models.output_weight(self.model[-1]),
            micro.labels,
            micro.temperature,
            self.dims.vocab,
            self.mesh.tp_group,
            self.mesh.sequence_parallel,
            trained,
            micro.source,
            self.mesh.bitwise,
        )

    @property
    def _called(self) -> Sequence[nn.Module]:
        """What megatron's schedule calls: the parts of the
        model, or what is wrapped around them.
        """
        return self.model

    def _run(
        self, part: Sequence[Packed], use: Callable[..., Any], forward_only: bool
    ) -> list[Any]:
        """Megatron's schedule over the microbatches, each of which is laid out when it begins;
        `use(micro, hidden)` is called on the last stage.
        """
        if self._meets_others:
            part = list(part)  # for it is looked at twice
        lengths = self._lengths(part)

        def forward(data: Iterator[Micro], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            with trace.span("lay out"):
                micro = next(data)

            def used(hidden: Tensor, non_loss_data: bool = False) -> Any:
                with trace.span("forward"):
                    return use(micro, hidden)

            with trace.span("forward"):
                output = model(micro.tokens, micro.positions, None, packed_seq_params=micro.packing)
            return output, used

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[self._micros(part, lengths) for _ in self._called],
            model=list(self._called),
            num_microbatches=len(lengths),
            seq_length=lengths[0] * self.mesh.cp,  # megatron divides it again
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    @property
    def _meets_others(self) -> bool:
        """Whether ranks must have lengths in common."""
        return self.mesh.place.ep > 1 or self.mesh.pp > 1

    def _lengths(self, part: Sequence[Packed]) -> list[int]:
        """To what each microbatch is padded at least, as ranks must have it in common; 0: to
        nothing.

        Pipeline stages exchange activations of one length; ranks that share experts gather tokens
        of one length each. Interleaved stages want a multiple of their number of microbatches: the
        last ones are padding.
        """
        mesh = self.mesh
        count = len(part) + (-len(part) % mesh.pp if mesh.vpp > 1 else 0)
        if not self._meets_others:
            return [0] * count
        lengths = [self._computed(self._sliced(packed)).length for packed in part]
        lengths += [self.multiple] * (count - len(part))
        if mesh.place.ep > 1:
            lengths = mesh.longest(lengths)
        return [max(lengths)] * count if mesh.pp > 1 else lengths

    def _micros(self, part: Sequence[Packed], lengths: list[int]) -> Iterator[Micro]:
        for number, length in enumerate(lengths):
            yield self._micro(
                part[number] if number < len(part) else empty(self.multiple, part[0].scores),
                length,
            )

    def _sliced(self, packed: Packed) -> Packed:
        """For this context-parallel rank."""
        return slice_cp(packed, self.mesh.cp_rank, self.mesh.cp, self.multiple)

    def _computed(self, packed: Packed, length: int = 0) -> Computed:
        arrays = packed.tokens, packed.positions, packed.cu_seqlens, packed.shared
        return computed_of(*arrays, self.multiple, length)

    def _micro(self, whole: Packed, length: int) -> Micro:
        """`length`: tokens that are computed, padding included."""
        packed = self._sliced(whole)
        if not packed.shared.any() and packed.length < length:
            packed = slice_cp(packed, 0, 1, self.multiple, length)
        computed = self._computed(packed, length)
        routes = self._routes(packed, computed)
        is_counted = routes is not None or any(one.balances for one in self.routers)
        tensor = self.mesh.device.bring
        return Micro(
            tokens=tensor(computed.tokens)[None].long(),
            positions=tensor(computed.positions)[None].long(),
            labels=tensor(packed.labels).long(),
            temperature=tensor(packed.temperature),
            trained=tensor(np.flatnonzero(packed.weight)),
            fields=Fields.of(
                packed, tensor, self.mesh.sum_over_context if self.mesh.cp > 1 else None
            ),
            packing=models.packing_of(
                computed,
                self.model[0],
                self.mesh,
                routes,
                self._rows(whole, computed) if is_counted else None,
            ),
            source=None if computed.source is None else tensor(computed.source),
        )

    def _rows(self, whole: Packed, computed: Computed) -> np.ndarray:
        """Of how many rows each token is that is computed, float32 [T]; padding is of none."""
        if computed.source is not None:
            sources = computed.source[: int(whole.cu_seqlens[-1])]
            return np.bincount(sources, minlength=computed.length).astype(np.float32)
        held = cp_index(whole, self.mesh.cp_rank, self.mesh.cp) >= 0
        found = np.zeros(computed.length, dtype=np.float32)
        found[: len(held)] = held
        return found

    def _routes(self, packed: Packed, computed: Computed) -> np.ndarray | None:
        """Of the tokens that are computed. Raises ValueError for those of another model."""
        routes = packed.routes
        if routes is None or not self.replays:
            return None
        wanted = routing_of(self.hf_config)[:2]
        if routes.shape[1:] != wanted:
            raise ValueError(
                f"the engine's routes are of (layers, experts per token) = {routes.shape[1:]}, and "
                f"the model has {wanted}: are these experiences of another model? "
                "trainer.router_replay=false trains without them"
            )
        if computed.places is not None:
            routes = routes[computed.places]
        return lengthened(routes, computed.length)

    def _whole(self, packed: Packed, local: Tensor) -> np.ndarray:
        """Put the context-parallel slices of one microbatch back into its own order."""
        index = cp_index(packed, self.mesh.cp_rank, self.mesh.cp)
        held, bring = np.flatnonzero(index >= 0), self.mesh.device.bring
        values = torch.zeros(packed.length, dtype=torch.float32, device=local.device)
        values[bring(index[held])] = local[bring(held)]
        if self.mesh.cp > 1:
            torch.distributed.all_reduce(values, group=self.mesh.cp_group)
        return values.cpu().numpy()

    def close(self) -> None:
        """Let go of the model; the mesh is closed by whoever made it."""
        del self.model


class Reference(Network):
    """The frozen model that a run is held near to: its log-probabilities, and neither gradients nor
    an optimizer. `replays`: tokens go through the same experts as the policy's.
    """

    def __init__(self, path: str, trainer: TrainerConfig, mesh: Mesh, replays: bool = True):
        super().__init__(path, trainer, mesh)
        self.replays = replays
        for chunk in self.model:
            chunk.requires_grad_(False)
