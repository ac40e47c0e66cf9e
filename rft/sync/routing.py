"""Which experts an engine on a CPU sends the tokens of its requests through: what router replay
wants to know. On a GPU vLLM tells it by itself.

    router of layer l ──set_capture_fn──► this step's routes [tokens, layers, top_k]
        ──when the model is through──► those of every request, by position,
            and of every slot of the cache

In: vLLM's model runner, in the worker's process. Out: `RoutedExperts` of requests that have ended.
Tokens whose keys and values a request finds in the cache go through no router for it: their routes
are those that lie in the slots of the cache, of the request that computed them. What is computed
again (after a preemption, or over new weights) is told as it was computed last. Only hooks that
vLLM and torch offer are used.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from rft.ground.experience import NO_EXPERT, RoutedExperts, route_dtype

ENDED = 1024  # requests that ended and that nobody has asked for yet; the oldest are forgotten


class Route:
    """Of one request, [positions, layers, top_k], as far as it is known."""

    def __init__(self) -> None:
        self.length, self._held = 0, np.zeros((0, 0, 0), np.uint8)

    def put(self, first: int, routes: np.ndarray) -> None:
        end = first + len(routes)
        if end > len(self._held):
            held = np.empty((max(end, 2 * len(self._held)), *routes.shape[1:]), routes.dtype)
            if self.length:
                held[: self.length] = self._held[: self.length]
            self._held = held
        self._held[first:end] = routes
        self.length = max(self.length, end)

    def told(self, tokens: int) -> RoutedExperts:
        """Of the first `tokens` at most."""
        return RoutedExperts.of(self._held[: min(tokens, self.length)])


class RouteCapture:
    """From now on routes are kept. Raises ValueError where a router tells nothing."""

    def __init__(self, runner: Any):
        self.runner = runner
        layers = routers(runner.get_model())
        self.shape = len(layers), layers[0].top_k
        dtype = np.dtype(route_dtype(layers[0].global_num_experts))
        self._none = NO_EXPERT[dtype.name]
        self._step = np.zeros((0, *self.shape), dtype)
        self._group, size = cache_of(runner)
        self._slots = np.full((size, *self.shape), self._none, dtype)
        self._routes: dict[str, Route] = {}
        for number, router in enumerate(layers):
            router.set_capture_fn(partial(self._take, number))
        runner.get_model().register_forward_hook(lambda *_: self._file())

    def _take(self, number: int, experts: Any) -> None:
        """Of layer `number`, in a step: experts [tokens, top_k]."""
        if len(experts) != len(self._step):
            self._step = np.full((len(experts), *self.shape), self._none, self._step.dtype)
        self._step[:, number] = experts.numpy()

    def _file(self) -> None:
        """The step's tokens lie in the order of the batch: of each request those behind what it
        has computed before.
        """
        batch = self.runner.input_batch
        bounds = pairwise(self.runner.query_start_loc.np[: len(batch.req_ids) + 1].tolist())
        done = batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist()
        steps = [
            (at, name, first, self._step[start:stop])
            for at, (name, first, (start, stop)) in enumerate(
                zip(batch.req_ids, done, bounds, strict=True)
            )
        ]
        # all of them first: a request may find in the cache what another one computes in this step
        for at, _, first, routes in steps:
            self._slots[self._at(at, first, first + len(routes))] = routes
        for at, name, first, routes in steps:
            route = self._routes.setdefault(asked_as(name), Route())
            if route.length < first:
                known = route.length
                route.put(known, self._slots[self._at(at, known, first)])
            route.put(first, routes)

    def _at(self, row: int, first: int, end: int) -> np.ndarray:
        """Slots of these positions of the request in this row of the batch."""
        table = self.runner.input_batch.block_table[self._group]
        positions, size = np.arange(first, end), table.block_size
        found: np.ndarray = table.block_table.np[row][positions // size] * size + positions % size
        return found

    def ended(self, requests: dict[str, int]) -> list[RoutedExperts | None]:
        """Of requests that have ended, by name, so many tokens of each; none of those who never
        began.
        """
        found = [
            route.told(tokens) if (route := self._routes.pop(name, None)) is not None else None
            for name, tokens in requests.items()
        ]
        live = {asked_as(name) for name in self.runner.requests}
        left = [name for name in self._routes if name not in live]
        for name in left[: max(0, len(left) - ENDED)]:  # nobody asked, as where a call was given up
            del self._routes[name]
        return found


def routers(model: Any) -> list[Any]:
    """Of the layers that have experts, in their order."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    layers = [module for module in model.modules() if isinstance(module, MoERunner)]
    layers.sort(key=lambda layer: int(layer.layer_id))
    for layer in layers:
        if layer.is_monolithic or not isinstance(layer.router, BaseRouter):
            raise ValueError(f"vLLM's kernel of layer {layer.layer_id} chooses experts by itself")
    if not layers:
        raise ValueError("vLLM has no layer of experts for this model")
    return [layer.router for layer in layers]


def cache_of(runner: Any) -> tuple[int, int]:
    """Number of a group of the cache whose layers see all tokens, and how many slots it has."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = runner.kv_cache_config
    for number, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number, config.num_blocks * group.kv_cache_spec.block_size
    raise ValueError("no layer sees all tokens before its own, so none says what is cached")


def asked_as(name: str) -> str:
    """What a request was called before vLLM made its name unique, by eight characters."""
    return name.rpartition("-")[0]
