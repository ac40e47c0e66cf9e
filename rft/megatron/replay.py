"""Router replay: tokens go through the experts that an engine has sent them through
(arXiv:2510.11370), and not through those that the trainer's own numbers would choose. And balance:
after an update the correction biases move towards equal load (arXiv:2408.15664).

    Packing.routes, rows ──ReplayedLayer──► ReplayedExperts, a call ──► RouterReplay of its router
                                                       └─ computed again in backward: the same call
    RouterReplay.load of all ranks ──► b_e += rate * sign(mean load - load_e)

In: the routes of a microbatch's tokens on this rank, beside what else every layer must know of it.
Out: the same choice in forward, recompute and backward, whichever microbatches are under way; the
weights of the chosen experts are the trainer's, and have its gradient. A token without a route goes
where the trainer's numbers send it.

megatron asks `router_replay` of a router which experts to take. Its own class of our name is one
list for the whole process, that somebody must switch between microbatches, and again before each is
computed again; here every call of a layer of experts carries its own routes instead, also into the
backward pass.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from rft.ground.names import Dims
from rft.monitor import trace


class RouterReplay:
    """Of the router of expert layer `number`, of `experts`. `given`: the routes of the call under
    way [T, layers, top_k], None: there are none. `rows`: of how many rows each of its tokens is
    [T], None: nobody asks. `counts`: of the training passes, how many of the experts that tokens of
    rows were given the trainer would have chosen, too, and how many those were. `load`: of the same
    passes, where they are to be balanced, tokens of rows that went through each expert [experts].
    """

    def __init__(self, number: int, experts: int):
        self.number = number
        self.experts = experts
        self.given: Tensor | None = None
        self.rows: Tensor | None = None
        self.counts: Tensor | None = None
        self.load: Tensor | None = None
        self.balances = False

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """megatron's question: (scores, numbers) of the experts of each token, [T, topk] both."""
        values, routes = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.given is not None:
            routes = self._replayed(self.given, routes)
            values = scores.gather(1, routes)
        if self.balances and self.rows is not None and torch.is_grad_enabled():
            self._weigh(routes, self.rows)
        return values, routes

    def _replayed(self, routes: Tensor, chosen: Tensor) -> Tensor:
        given = routes[:, self.number].long()
        # what stands for none is beyond the last expert, or below the first
        known = ((given >= 0) & (given < self.experts)).all(1, keepdim=True)
        if self.rows is not None and torch.is_grad_enabled():
            self._count(given, chosen, known[:, 0] * self.rows.double())
        return torch.where(known, given, chosen)

    def _count(self, given: Tensor, chosen: Tensor, rows: Tensor) -> None:
        """`rows`: of how many each token is that was given experts, 0 for one that was not."""
        both = (given[:, :, None] == chosen[:, None, :]).any(2).sum(1)
        found = torch.stack([(both * rows).sum(), rows.sum() * given.shape[1]])
        self.counts = found if self.counts is None else self.counts + found

    def _weigh(self, routes: Tensor, rows: Tensor) -> None:
        found = torch.zeros(self.experts, dtype=torch.float64, device=routes.device)
        found.index_add_(0, routes.flatten(), rows.double().repeat_interleave(routes.shape[1]))
        self.load = found if self.load is None else self.load + found


class ReplayedExperts(nn.Module):
    """In front of megatron's layer of experts. `routes`, `rows`: of the next call. The call is one
    of a copy that shares all but these: what of it is computed again in the backward pass, is by
    the copy, so by the routes of its own microbatch.
    """

    routes: Tensor | None = None
    rows: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(ReplayedExperts, copy.copy(self)).forward(*args, **kwargs)

    def route(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        replay: RouterReplay = self.router.router_replay
        replay.given, replay.rows = self.routes, self.rows
        found: tuple[Tensor, Tensor] = super().route(*args, **kwargs)
        return found


class ReplayedLayer(nn.Module):
    """In front of megatron's transformer layer: hands its experts what is known of the microbatch
    that it is called for.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        packing = kwargs["packed_seq_params"]
        self.mlp.routes, self.mlp.rows = packing.routes, packing.rows
        return super().forward(*args, **kwargs)


def attach(model: nn.Module, dims: Dims) -> list[RouterReplay]:
    """One for every router of this part of the model. Layers become ours here: in a specification
    megatron hands its process groups to no other class than its own.
    """
    numbers = [layer for layer in range(dims.layers) if dims.has_experts(layer)]
    found = []
    for layer in model.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            _put_in_front(ReplayedLayer, layer)
            _put_in_front(ReplayedExperts, layer.mlp)
            replay = RouterReplay(numbers.index(layer.layer_number - 1), dims.experts)
            layer.mlp.router.router_replay = replay
            found.append(replay)
    return found


def _put_in_front(front: type[nn.Module], module: nn.Module) -> None:
    base = type(module)
    module.__class__ = type(f"Replayed{base.__name__}", (front, base), {})


def agreement(replays: list[RouterReplay], mesh: Any) -> dict[str, float]:
    """Over all ranks since the last call, how much of the engine's choice the trainer shares;
    nothing where there was none. A collective.
    """
    counts = [replay.counts for replay in replays if replay.counts is not None]
    for replay in replays:
        replay.counts = None
    with trace.span("agreement"):
        sums = torch.stack(counts).sum(0).cpu() if counts else torch.zeros(2, dtype=torch.float64)
        mesh.reduce(sums, sums[:0])
    both, given = sums.tolist()
    if not given:
        return {}
    return {"routing/agree_frac": both / given, "drift/routed_otherwise": 1 - both / given}


def rebalance(model: Sequence[nn.Module], dims: Dims, rate: float, mesh: Any) -> dict[str, float]:
    """Move the correction biases by what all ranks have counted. A collective.
    `routing/max_load`: of the busiest expert, in mean loads of its layer.
    """
    routers = [
        layer.mlp.router
        for part in model
        for layer in part.decoder.layers
        if isinstance(layer.mlp, MoELayer)
    ]
    layers = sum(dims.has_experts(layer) for layer in range(dims.layers))
    load = torch.zeros(layers, dims.experts, dtype=torch.float64)
    for replay in (router.router_replay for router in routers):
        if replay.load is not None:
            load[replay.number] = replay.load.cpu()
    mesh.reduce(load, load[:0])
    mean = load.mean(1, keepdim=True)
    for router in routers:
        number, bias = router.router_replay.number, router.expert_bias
        moved = rate * torch.sign(mean[number] - load[number])
        bias.data += moved.to(device=bias.device, dtype=bias.dtype)
    return {"routing/max_load": float((load / mean.clamp(min=1)).max())}
