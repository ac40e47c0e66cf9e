"""Layers of Transformer Engine in torch: names, shapes, marks and collectives of its modules.

Weights are marked for tensor and sequence parallelism as TE's `reset_parameters` marks them, and
with `fuse_wgrad_accumulation` their gradients go to `main_grad`, where DDP waits for them.
"""

from abc import ABC
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .functions import COMPUTED as FUNCTIONS
from .functions import get_dummy_wgrad


class TransformerEngineBaseModule(nn.Module, ABC):
    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self.fp8_meta: dict[str, Any] = {}
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self._starts: dict[str, Callable[[Tensor], Any]] = {}

    def register_parameter(self, name: str, param: Any, **kwargs: Any) -> None:
        super().register_parameter(name, param)
        if kwargs.get("init_fn"):
            self._starts[name] = kwargs["init_fn"]

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        for name, start in self._starts.items():
            with torch.no_grad():
                start(getattr(self, name))

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None: ...

    def backward_dw(self) -> None: ...

    def _join(self, tp_group: Any, tp_size: int, sequence_parallel: bool) -> None:
        self.tp_size = dist.get_world_size(tp_group) if tp_group is not None else tp_size
        assert tp_group is not None or self.tp_size == 1, "the group must be known"
        self.set_tensor_parallel_group(tp_group)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel


def _divide(size: int, parts: int) -> int:
    assert size % parts == 0, f"{size} cannot be cut into {parts}"
    return size // parts


def _mark(weight: Tensor, dim: int) -> None:
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1


class _Gather(torch.autograd.Function):
    """Rows of all ranks; backward: the sum of gradients, this rank's rows of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = rows.new_empty(rows.shape[0] * dist.get_world_size(group), *rows.shape[1:])
        dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad, ctx.group), None


class _SumRows(torch.autograd.Function):
    """The sum over ranks, this rank's rows of it; backward: the gradients of all rows."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _sum_rows(whole, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(grad, ctx.group), None


def _sum_rows(whole: Tensor, group: Any) -> Tensor:
    rows = whole.new_empty(_divide(whole.shape[0], dist.get_world_size(group)), *whole.shape[1:])
    dist.reduce_scatter_tensor(rows, whole.contiguous(), group=group)
    return rows


class _Copy(torch.autograd.Function):
    """The same on every rank; backward: the sum of gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _sum(part: Tensor, group: Any) -> Tensor:
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole


class _Product(torch.autograd.Function):
    """x @ weight.T. With `fused`, the gradient of the weight is added to its `main_grad`, and what
    autograd gets is None, or, where DDP asks by its mark, memory that nobody wrote.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.fused = weight, fused
        return x @ weight.detach().T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        below = grad @ weight.detach() if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return below, None, None
        own = grad.flatten(0, -2).T @ x.flatten(0, -2)
        if not ctx.fused:
            return below, own, None
        weight.main_grad.add_(own.to(weight.main_grad.dtype))
        if not hasattr(weight, "grad_added_to_main_grad"):
            return below, None, None
        weight.grad_added_to_main_grad = True
        zero = getattr(weight, "zero_out_wgrad", False)
        return below, get_dummy_wgrad(list(weight.shape), weight.dtype, zero=zero), None


class _Projection(TransformerEngineBaseModule):
    """What Linear and LayerNormLinear share: weight, bias and collectives."""

    def _begin(self, given: dict[str, Any]) -> None:
        TransformerEngineBaseModule.__init__(self, given["name"])
        assert given["parallel_mode"] in (None, "column", "row")
        assert not given["parameters_split"] and not given["delay_wgrad_compute"]
        self._join(given["tp_group"], given["tp_size"], given["sequence_parallel"])
        self.parallel_mode = given["parallel_mode"]
        self.in_features, self.out_features = given["in_features"], given["out_features"]
        self.fuse_wgrad_accumulation = given["fuse_wgrad_accumulation"]
        self.use_bias, self.return_bias = given["bias"], given["return_bias"]
        if self.parallel_mode == "column":
            self.out_features = _divide(self.out_features, self.tp_size)
        elif self.parallel_mode == "row":
            self.in_features = _divide(self.in_features, self.tp_size)

    def _make_weight(self, given: dict[str, Any]) -> None:
        where = {"device": given["device"], "dtype": given["params_dtype"]}
        weight = torch.full((self.out_features, self.in_features), torch.nan, **where)
        self.register_parameter("weight", nn.Parameter(weight), init_fn=given["init_method"])
        if self.use_bias:
            bias = nn.Parameter(torch.zeros(self.out_features, **where))
            self.register_parameter("bias", bias)
        else:
            self.bias = torch.empty(0, **where)

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        _mark(self.weight, 1 if self.parallel_mode == "row" else 0)
        if self.use_bias and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel
        elif self.use_bias and self.parallel_mode == "column":
            _mark(self.bias, 0)

    def _project(self, x: Tensor) -> Any:
        group = self.tp_group
        if self.parallel_mode == "column" and self.tp_size > 1:
            x = _Gather.apply(x, group) if self.sequence_parallel else _Copy.apply(x, group)
        assert x.shape[-1] == self.in_features, "GEMM not possible"
        out = _Product.apply(x, self.weight, self.fuse_wgrad_accumulation)
        if self.parallel_mode == "row" and self.tp_size > 1:
            out = _SumRows.apply(out, group) if self.sequence_parallel else _Sum.apply(out, group)
        if self.use_bias and not self.return_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class Linear(_Projection):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        given = locals()
        self._begin(given)
        self.save_original_input = save_original_input
        self._make_weight(given)
        self.reset_parameters()

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        return self._project(inp)


class LayerNormLinear(_Projection):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-05,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        given = locals()
        self._begin(given)
        assert normalization == "RMSNorm" and not zero_centered_gamma
        self.eps, self.normalization = eps, normalization
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        norm = torch.empty(in_features, device=device, dtype=params_dtype)
        self.register_parameter("layer_norm_weight", nn.Parameter(norm), init_fn=nn.init.ones_)
        self.layer_norm_bias = None
        self._make_weight(given)
        self.reset_parameters()

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init=defer_init)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        normed = rms_norm(inp, self.layer_norm_weight, self.eps)
        out = self._project(normed)
        if not self.return_layernorm_output:
            return out
        if self.return_layernorm_output_gathered and self.sequence_parallel:
            normed = _Gather.apply(normed, self.tp_group)
        return (*out, normed) if self.return_bias else (out, normed)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In fp32, weight included, as TE's kernel; rounded once."""
    return nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


class _Norm(nn.Module):
    def _make(self, normalized_shape: Any, eps: float, given: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self.eps, self.sequence_parallel = eps, given["sequence_parallel"]
        assert not given["zero_centered_gamma"]
        assert (normalized_shape is None) != (given["hidden_size"] is None)
        size = given["hidden_size"] if normalized_shape is None else normalized_shape
        where = {"device": given["kwargs"].get("device"), "dtype": given["params_dtype"]}
        self.register_parameter("weight", nn.Parameter(torch.ones(size, **where)))
        self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        if self.sequence_parallel is not None:
            self.weight.sequence_parallel = self.sequence_parallel


class RMSNorm(_Norm):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-05,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._make(normalized_shape, eps, locals())

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return rms_norm(input, self.weight, self.eps)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        assert not (bias or delay_wgrad_compute or single_grouped_weight or use_grouped_tensor)
        self._join(tp_group, tp_size, sequence_parallel)
        self.num_gemms, self.use_bias, self.parallel_mode = num_gemms, bias, parallel_mode
        self.in_features, self.out_features = in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.save_original_input = save_original_input
        self.single_grouped_weight = self.single_grouped_bias = False
        if parallel_mode == "column":
            self.out_features = _divide(out_features, self.tp_size)
        elif parallel_mode == "row":
            self.in_features = _divide(in_features, self.tp_size)
        for i in range(num_gemms):
            shape = (self.out_features, self.in_features)
            weight = torch.full(shape, torch.nan, device=device, dtype=params_dtype)
            self.register_parameter(f"weight{i}", nn.Parameter(weight), init_fn=init_method)
        self.reset_parameters()
        self.set_tensor_parallel_attributes()

    def set_tensor_parallel_attributes(self, defer_init: bool = False) -> None:
        for i in range(self.num_gemms):
            _mark(getattr(self, f"weight{i}"), 1 if self.parallel_mode == "row" else 0)

    def forward(
        self,
        inp: Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        """Tokens in the order of their experts."""
        sizes = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        assert len(sizes) == self.num_gemms and sum(sizes) == inp.shape[0]
        assert out is None and dgrad_out is None and inp.shape[-1] == self.in_features
        fused = self.fuse_wgrad_accumulation
        return torch.cat(
            [
                _Product.apply(rows, getattr(self, f"weight{i}"), fused)
                for i, rows in enumerate(inp.split(sizes))
            ]
        )


BASE = {"TransformerEngineBaseModule": TransformerEngineBaseModule}
COMPUTED = {
    "pytorch": {item.__name__: item for item in (Linear, LayerNormLinear, GroupedLinear, RMSNorm)},
    "pytorch.module.base": FUNCTIONS["pytorch.module.base"] | BASE,
}
