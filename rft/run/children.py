"""One start of the trainer ranks of this machine: torch's processes, and its watch over them.

    launcher (`rft.run.elastic`) ──► run: a store on loopback, a process per rank
            RankProcesses._start ──► take(command, environment): one that is there already
                         ──► None: a new one
            the first that fails ──► the others are ended ──► ChildFailedError, with all exit codes

In: the words of a rank's command. Out: when all have ended well, nothing. Invariants: no rank lives
when `run` is left, however that is; ranks that come back never meet the addresses of those that
died; nothing that the store holds is unpickled (`--standalone` of torchrun does).
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from rft.ground.device import hosted_store
from rft.run.loopback import HOST, TIMEOUT_S

# of a command and an environment: a process that is this rank from now on; None: there is none
Take = Callable[[Sequence[str], dict[str, str]], "subprocess.Popen[bytes] | None"]
# 1, as under torchrun: an error of NCCL's ends the process
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
LOOK_S = 0.1  # at whether a rank has ended


class RankHandler(SubprocessHandler):
    """Of a rank whose process may be there already."""

    def __init__(self, take: Take, **given: Any):
        self._take = take
        super().__init__(numa_options=None, **given)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> "subprocess.Popen[bytes]":
        return self._take(args, env) or super()._popen(args, env)


class RankProcesses(SubprocessContext):
    """Torch's, with such handlers."""

    def __init__(self, take: Take, **given: Any):
        super().__init__(**given)
        self._take = take

    def _start(self) -> None:
        self.subprocess_handlers = {
            rank: RankHandler(
                self._take,
                entrypoint=self.entrypoint,
                args=self.args[rank],
                env=self.envs[rank],
                stdout=self.stdouts[rank],
                stderr=self.stderrs[rank],
                local_rank_id=rank,
            )
            for rank in range(self.nprocs)
        }


def run(words: Sequence[str], count: int, name: str, port: int, grace_s: int, take: Take) -> None:
    """Run `count` ranks, each this interpreter with `words`, until all have ended well; raises
    ChildFailedError when one has not, SignalException when this process is to end.

    `name`: of the run. `port`: of the store, 0: any. `grace_s`: for ranks to end when this process
    is to end.
    """
    store = hosted_store(HOST, port, timedelta(seconds=TIMEOUT_S))
    common = {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": str(count),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        NCCL_ERRORS: os.environ.get(NCCL_ERRORS, "1"),
    }
    every = range(count)
    with tempfile.TemporaryDirectory(prefix="rft-ranks-") as errors:
        ranks = RankProcesses(
            take,
            name="trainer",
            entrypoint=sys.executable,
            args=dict.fromkeys(every, tuple(words)),
            envs={rank: common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in every},
            logs_specs=DefaultLogsSpecs(log_dir=errors),
        )
        try:
            ranks.start()
            result: RunProcsResult | None = ranks.wait(period=LOOK_S)
        except SignalException as stop:
            ranks.close(stop.sigval, timeout=grace_s)
            raise
        finally:
            ranks.close(timeout=grace_s)
    if result is not None and result.is_failed():
        raise ChildFailedError("trainer", result.failures)
