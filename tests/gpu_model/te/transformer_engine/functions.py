"""Functions of Transformer Engine that are no layers, in torch: contexts of FP8 (never on here),
products, permutations of tokens for experts, and optimizers.
"""

import contextlib
import enum
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        return None

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        return False

    @classmethod
    def reset(cls) -> None: ...


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    assert not enabled, "the stand-in knows no FP8"
    yield


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    assert not enabled, "the stand-in knows no FP8"
    yield


class Format(enum.Enum):
    E4M3, HYBRID, E5M2 = range(3)


@contextlib.contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    yield


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    for name in ("distribute_saved_activations", "tp_group", "get_rng_state_tracker"):
        kwargs.pop(name, None)
    reentrant = kwargs.pop("use_reentrant", True)
    return torch.utils.checkpoint.checkpoint(
        functools.partial(function, **kwargs), *args, use_reentrant=reentrant
    )


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, Any]:
    assert not enabled
    return contextlib.nullcontext(), lambda tensor: tensor


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def in_fp8_activation_recompute_phase() -> bool:
    return False


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Real TE's has memory that nobody wrote: who reads it shall see that."""
    return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype)


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
) -> tuple[Any, ...]:
    """cuBLAS counts columns first: TN is B @ A.T in torch's order, NN is B @ A, NT is B.T @ A."""
    assert out is None and not gelu and not accumulate and alpha == 1.0
    left, right = (B.T if layout[1] == "T" else B), (A.T if layout[0] == "T" else A)
    product = left.to(out_dtype or A.dtype) @ right.to(out_dtype or A.dtype)
    if bias is not None and not grad:
        product = product + bias
    return product, None, None, None


def _rows(routing_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted by expert, then by token: (token, expert) of each row, and TE's map [T, 2 * E + 1] of
    destinations, experts and their number per token.
    """
    expert, token = routing_map.bool().T.nonzero(as_tuple=True)
    tokens, experts = routing_map.shape
    table = torch.full((tokens, 2 * experts + 1), -1, dtype=torch.int32)
    table[:, -1] = 0
    for row, (t, e) in enumerate(zip(token.tolist(), expert.tolist(), strict=True)):
        count = int(table[t, -1])
        table[t, count], table[t, experts + count], table[t, -1] = row, e, count + 1
    return token, expert, table


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    assert map_type == "mask" and num_out_tokens > 0
    token, _, table = _rows(routing_map)
    assert len(token) == num_out_tokens
    return inp[token], table


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    token, expert, table = _rows(routing_map)
    assert len(token) == num_out_tokens > 0
    return inp[token], probs[token, expert], table


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    assert map_type == "mask" and probs is None and pad_offsets is None
    experts = (row_id_map.shape[1] - 1) // 2
    used = torch.arange(experts) < row_id_map[:, -1:]
    token = used.nonzero()[:, 0]
    rows = inp[row_id_map[:, :experts][used].long()]
    if merging_probs is not None:
        weight = merging_probs[token, row_id_map[:, experts:-1][used].long()]
        rows = (rows * weight[:, None]).to(inp.dtype)
    return inp.new_zeros(restore_shape or inp.shape).index_add(0, token, rows)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    chunks = torch.split(inp, split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    sizes, order = split_sizes, sorted_index
    return moe_sort_chunks_by_index(inp, sizes, order), moe_sort_chunks_by_index(
        probs, sizes, order
    )


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose groups count their own steps."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        assert adam_w_mode and bias_correction and not (amsgrad or capturable or master_weights)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, False)
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.float()
                mean = state["exp_avg"].lerp_(grad, 1 - first) / (1 - first ** group["step"])
                square = state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
                root = (square / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                param.add_(mean / root + group["weight_decay"] * param, alpha=-group["lr"])


def multi_tensor_applier(op: Any, noop_flag_buffer: Tensor, tensor_lists: Any, *args: Any) -> Any:
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: Any, per_tensor: bool = False
) -> tuple[Tensor, None]:
    assert not per_tensor
    return torch.stack([t.float().norm() for t in lists[0]]).norm()[None], None


def multi_tensor_scale(chunk: int, noop: Tensor, lists: Any, scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def _named(*objects: Any) -> dict[str, Any]:
    return {item.__name__: item for item in objects}


COMPUTED = {
    "pytorch": _named(fp8_autocast, fp8_model_init),
    "pytorch.fp8": _named(FP8GlobalStateManager, fp8_autocast, fp8_model_init),
    "common.recipe": _named(Format),
    "pytorch.distributed": _named(
        activation_recompute_forward,
        checkpoint,
        is_fp8_activation_recompute_enabled,
        in_fp8_activation_recompute_phase,
    ),
    "pytorch.cpu_offload": _named(get_cpu_offload_context),
    "pytorch.module.base": _named(get_dummy_wgrad),
    "pytorch.cpp_extensions": _named(general_gemm),
    "pytorch.permutation": _named(
        moe_permute,
        moe_permute_with_probs,
        moe_unpermute,
        moe_sort_chunks_by_index,
        moe_sort_chunks_by_index_with_probs,
    ),
    "pytorch.optimizers": _named(
        FusedAdam, multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale
    ),
}
