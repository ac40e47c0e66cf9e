"""Where ranks meet that torchrun starts on one machine: a store of torch's that listens on
loopback, a new one for every start of the ranks. Those that rft starts have such a store too
(`rft.run.children`).

    python -m rft.run.loopback OPTIONS -m rft.train ...       torchrun with its options, and this
                                                              rendezvous

torch's own for one machine (`--standalone`, c10d) unpickles what its store holds, and that store
listens on every interface. Invariants: nothing that a store holds is unpickled; ranks that come
back never meet the addresses of those that died.
"""

import os
import signal
import sys

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rft.ground.device import hosted_store, loopback_environment

BACKEND = "rft_loopback"
HOST = "127.0.0.1"
TIMEOUT_S = 600  # for an answer of the store; torch's own


class Loopback(StaticTCPRendezvous):
    """The rendezvous of one launcher with itself; the ranks are
    clients of the store that it hosts.
    """

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None  # its port is free again
        self._store = hosted_store(HOST, self.master_port, self.timeout)
        return RendezvousInfo(
            HashStore(), self.rank, self.world_size, RendezvousStoreInfo(HOST, self._store.port)
        )

    def shutdown(self) -> bool:
        """The ranks of this start have ended; the next ones may want the same port."""
        self._store = None
        return True


def _handler(params: RendezvousParameters) -> Loopback:
    if params.max_nodes != 1:
        raise ValueError(
            f"{BACKEND} is the rendezvous of one machine: launch/torchrun.sh has that of several"
        )
    port = parse_rendezvous_endpoint(params.endpoint, default_port=0)[1]
    return Loopback(HOST, port, 0, 1, params.run_id, TIMEOUT_S)


def main(words: list[str]) -> int:
    """Exit code; that of a signal as a run that starts its own ranks has it."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException

    rendezvous_handler_registry.register(BACKEND, _handler)
    os.environ.update(loopback_environment(engines_too=False))
    try:
        run.main([f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={HOST}:0", *words])
    except SignalException as stop:  # the ranks have ended, and have told where they stood
        told = f"stopped by {signal.Signals(stop.sigval).name}; run the same command again to go on"
        print(f"rft: {told}", file=sys.stderr, flush=True)
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
