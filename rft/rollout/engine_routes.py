"""Which experts each token of an answer went through, told by one vLLM instance.

In: what was asked for, and what vLLM has answered. Out: `RoutedExperts` of every continuation, as
far as its tokens went through the model. On a CPU a capture in the workers tells them
(`rft.sync.routing`), on a GPU vLLM's own option. Invariant: an engine that cannot tell them says so
before it serves: it fails where it was asked to, and otherwise the trainer chooses by itself.
"""

import logging
from typing import TYPE_CHECKING

from rft.ground.experience import GenerateRequest, RoutedExperts, decode, route_dtype
from rft.ground.families import num_experts
from rft.ground.names import Dims, read_hf_config
from rft.rollout.engine_weights import EngineWeights

if TYPE_CHECKING:
    import numpy as np
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import RequestOutput

log = logging.getLogger(__name__)


class EngineRoutes(EngineWeights):
    tells_routes = False  # which experts each token went through

    async def _keep_routes(self) -> None:
        """Raises RuntimeError where workers cannot, and were asked to."""
        assert self.llm
        (why, *_) = await self.llm.collective_rpc("rft_keep_routes")
        if not why:
            return
        self.tells_routes = False
        said = f"{self.name} cannot tell which experts tokens go through: {why}"
        if self._asked_for_routes:
            raise RuntimeError(f"{said}; set rollout_model.enable_return_routed_experts=false")
        log.warning("%s; the trainer chooses by itself", said)

    @property
    def _asked_for_routes(self) -> bool | None:
        """None: it is for the engine to say. Nothing that other models say is trained on."""
        return getattr(self.rollout, "enable_return_routed_experts", False)

    def _tells_routes(self, arguments: "AsyncEngineArgs") -> bool:
        """As asked; or else where the model has experts, and vLLM, on a GPU, runs it in the way
        that it tells them in.
        """
        asked = self._asked_for_routes
        if asked is not None or not num_experts(read_hf_config(self.model.model_path)):
            return bool(asked)
        if self.device_kind == "cpu":
            return True
        can = bool(arguments.create_engine_config().use_v2_model_runner)
        return can and bool(self.rollout.enable_prefix_caching)

    async def _routes(
        self, asked: GenerateRequest, output: "RequestOutput"
    ) -> list[RoutedExperts | None]:
        """Of every continuation, as far as its tokens went through the model: all but the last."""
        counts = [len(asked.prompt) + max(0, len(made.token_ids) - 1) for made in output.outputs]
        if self.device_kind != "cpu":
            hf = read_hf_config(self.model.model_path)
            return [
                told_by_vllm(made.routed_experts, count, Dims.of(hf))
                for made, count in zip(output.outputs, counts, strict=True)
            ]
        # as vLLM calls the continuations of one request
        names = [
            asked.request_id if asked.n == 1 else f"{made.index}_{asked.request_id}"
            for made in output.outputs
        ]
        requests = dict(zip(names, counts, strict=True))
        told = await self._healthy().collective_rpc("rft_ended_routes", args=(requests,))
        return decode(told[0], list[RoutedExperts | None])


def told_by_vllm(routes: "np.ndarray | None", tokens: int, dims: Dims) -> RoutedExperts | None:
    """vLLM's [tokens, all layers, top_k], of the layers that have experts."""
    if routes is None:
        return None
    layers = [layer for layer in range(dims.layers) if dims.has_experts(layer)]
    return RoutedExperts.of(routes[:tokens, layers].astype(route_dtype(dims.experts)))
