"""What vLLM finds of us in its processes: a weight transfer backend, and methods for its workers.

In: the package's `vllm.general_plugins` entry point; calls of the engine's actor
(`rft.rollout.engine_weights`), records as their msgpack. Out: the same calls of
`rft.sync.install.StreamedWeights`. vLLM is not imported here: this is read before its environment
is set.
"""

import multiprocessing
import os

from rft.ground.experience import decode, encode
from rft.ground.process import die_with_parent
from rft.ground.rounds import AdapterOrder, Round
from rft.monitor import logs

BACKEND = "rft"
BITWISE = "RFT_BITWISE"  # in the environment of engines that are to have the trainer's bits


def register() -> None:
    """Entry point `vllm.general_plugins`: make "rft" a weight transfer backend.

    Called in every vLLM process, repeatedly.
    """
    if "RFT_LOG_FILE" in os.environ and multiprocessing.parent_process() is not None:
        die_with_parent()  # vLLM's own processes outlive an engine actor that was killed
    logs.show_stacks_on_signal()
    if BITWISE in os.environ:
        from rft.sync import bitwise

        bitwise.register()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rft.sync.install", "StreamedWeights")


class WorkerExtension:
    """Methods that vLLM adds to its workers, for `collective_rpc`; `rft.rollout.engine` names this
    class to vLLM. Records of `rft.ground.rounds` come and go as their msgpack.
    """

    def rft_weight_state(self) -> bytes:
        """What this worker holds."""
        return encode(self.weight_transfer_engine.state())  # type: ignore[attr-defined]

    def rft_listen(self, path: str, word: str) -> None:
        """From now on receive rounds beside the decoding, as the engine actor orders at the socket
        `path`, where workers begin with `word`.
        """
        self.weight_transfer_engine.listen(path, word)  # type: ignore[attr-defined]

    def rft_count_time(self) -> None:
        """From now on the timeline tells what model and sampler take."""
        from rft.sync.decoding_time import DecodingTime

        DecodingTime(self.model_runner)  # type: ignore[attr-defined]

    def rft_keep_routes(self) -> str:
        """From now on it is known which experts a request's tokens went through: at the first of
        the engine's workers, since routers are whole at each. Returns why not, where that is so.
        """
        from rft.sync.routing import RouteCapture

        if not self.rank:  # type: ignore[attr-defined]
            try:
                self.rft_routes = RouteCapture(self.model_runner)  # type: ignore[attr-defined]
            except ValueError as error:
                return str(error)
        return ""

    def rft_ended_routes(self, requests: dict[str, int]) -> bytes:
        """`RouteCapture.ended`, at the first worker; nothing at others."""
        return encode([] if self.rank else self.rft_routes.ended(requests))  # type: ignore[attr-defined]

    def rft_relay(self, cluster: str | None) -> bytes:
        """Be there for workers of other engines of the run in this Ray, None: in one of its own;
        returns a `WorkerOffer`.
        """
        return encode(self.weight_transfer_engine.relay(cluster))  # type: ignore[attr-defined]

    def rft_disband(self, generation: int) -> None:
        """No group of `generation` or before comes together any more."""
        self.weight_transfer_engine.disband(generation)  # type: ignore[attr-defined]

    def rft_install(self, coming: bytes) -> bytes:
        """vLLM's start, update and finish of new weights in one call, which keeps the pause short.

        Returns the state.
        """
        self.start_weight_update()  # type: ignore[attr-defined]
        self.update_weights({"coming": decode(coming, Round)})  # type: ignore[attr-defined]
        self.finish_weight_update()  # type: ignore[attr-defined]
        return self.rft_weight_state()

    def rft_install_adapter(self, coming: bytes, order: bytes) -> bytes:
        """Register a staged adapter, between two steps. Returns the state."""
        self.weight_transfer_engine.install_adapter(  # type: ignore[attr-defined]
            decode(coming, Round), decode(order, AdapterOrder)
        )
        return self.rft_weight_state()
