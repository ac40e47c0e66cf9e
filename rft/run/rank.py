"""One trainer rank, from its first line to its last: has its parts built (`rft.run.assembly`), runs
the loop, tells how it ended.

    python -m rft.run.rank RESOLVED_YAML        (started by `rft.run.elastic`, or called by
                                                `rft.train` under an outer torchrun)

In: the resolved config, RANK/WORLD_SIZE/... of the launcher, and at rank 0 the address of the
supervisor's Ray. Out: exit code 0, or a failure record (rank, phase, cause) in the attempt's log
directory and exit code 1, or REFUSED: another start would end in the same way.
"""

import gc
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rft import config as configs
from rft.checkpoint import catalog
from rft.config import Config, beat_s
from rft.ground import device as devices
from rft.ground import plugins, redact
from rft.ground.errors import REFUSED, ConfigError
from rft.ground.process import ShortExit, die_with_parent
from rft.ground.protocols import TrainerMesh
from rft.monitor import logs, trace
from rft.run.backends import TrainBackend, backend_of
from rft.run.recovery import Recovery
from rft.run.stages import bring_models, write_result
from rft.trainer import control

if TYPE_CHECKING:
    from rft.checkpoint.grants import NodeKnown
    from rft.trainer.trainer import Trainer

log = logging.getLogger(__name__)
SETTLE_S = 2.0  # if another part's death is the cause, the sidecar has heard of it by then


@dataclass
class Rank:
    """What this process knows of itself, whatever it is doing."""

    backend: TrainBackend
    # signals received: a clean end at the next step boundary
    stopping: list[int] = field(default_factory=list)
    trainer: "Trainer | None" = None
    complete: bool = False
    waiting_for: str = ""
    recovery: Recovery = field(default_factory=Recovery)

    @property
    def config(self) -> Config:
        return self.backend.config

    @property
    def phase(self) -> str:
        if self.trainer:
            return self.trainer.phase
        return f"waiting for {self.waiting_for}" if self.waiting_for else "starting"

    def stop(self, received: int, _frame: object) -> None:
        """Signal handler: nothing new is begun, and what rank 0 waits for is given up (by a thread:

        Ray may be in a call).
        """
        self.stopping.append(received)
        threading.Thread(target=self._stop_waits, daemon=True).start()

    def _stop_waits(self) -> None:
        self.trainer.evaluations.stop()
        if isinstance(self.trainer.feed.source, control.QueueSource):
            self.trainer.feed.source.stop()


def main(path: str, terminal: int | None = None) -> int:
    """Run this process as a rank of the stage described by `path`; returns its exit code.

    `terminal`: where the first rank that fails says so, when no supervisor will (ranks under an
    outer launcher).
    """
    config = configs.load(path)
    number = int(os.environ.get("RANK", "0"))
    log_dir = Path(os.environ["RFT_LOG_DIR"])
    logs.redirect(log_dir / f"rank_{number}.log", config.log, keep_stdout=number == 0)
    die_with_parent()
    # of the attempt before a restart
    (log_dir / f"failure_rank_{number}.json").unlink(missing_ok=True)
    os.environ.update(environment_of(config))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = devices.choose(config.device, local, config.cluster.threads_per_rank)
    recovery = Recovery.of(log_dir) if number == 0 else Recovery()
    rank = Rank(backend_of(config, device), recovery=recovery)
    try:
        plugins.load(config.plugin_dirs)
        bring_models(config)
        run(rank)
    except Exception as error:
        log.error("rank %d failed while %s\n%s", number, rank.phase, traceback.format_exc())
        logs.flush()
        trace.instant("failed", cause=control.cause(error))
        record = {
            "part": f"trainer rank {number}",
            "phase": rank.phase,
            "cause": control.cause(error),
        }
        try:
            tell(record, log_dir, number, terminal)
            logs.ask_stacks_of_siblings()
            keep_batch(rank)
        finally:
            logs.flush()
            # other threads (gloo, ray) may hang in a peer that is gone; nothing here is left to be
            # saved
            os._exit(REFUSED if isinstance(error, ConfigError) else 1)
    if rank.complete and not (rank.stopping and terminal is not None):
        return 0
    # all ranks end together, whichever of them was told to
    return 128 + (rank.stopping or [signal.SIGTERM])[0]


def environment_of(config: Config) -> dict[str, str]:
    """What must be set before this rank uses CUDA."""
    megatron, cuda = config.trainer.megatron, config.device == "cuda"
    return devices.rank_environment(
        config.device,
        megatron.tensor_model_parallel_size,
        megatron.context_parallel_size,
        devices.capability() if cuda else None,
        os.environ,
    )


def keep_batch(rank: Rank) -> None:
    """Rank 0 leaves the batch of the step that failed, as of one that was skipped."""
    if rank.trainer is not None and rank.trainer.feed.current is not None:
        path = rank.trainer.skips.keep(rank.trainer.feed.current)
        log.error("the batch of the step that failed is in %s", path)


def tell(record: dict[str, str], log_dir: Path, number: int, terminal: int | None) -> None:
    """Leave the failure record; under an outer launcher also tell the user, unless a part that
    failed earlier is told of.
    """
    is_first = not list(log_dir.glob("failure_rank_*.json"))
    (log_dir / f"failure_rank_{number}.json").write_text(
        redact.text(json.dumps(record)), encoding="utf-8"
    )
    if terminal is None or not is_first:
        return
    time.sleep(SETTLE_S)
    if not (log_dir / "failure.json").exists():
        message = (
            f"rft: {record['part']} failed while {record['phase']}: {record['cause']}; logs "
            f"in {log_dir}\n"
        )
        os.write(terminal, redact.text(message).encode())


def run(rank: Rank) -> None:
    """Build the parts, resume, train, close."""
    config = rank.config
    rank.backend.import_parts()
    importlib.import_module("rft.run.assembly")
    gc.freeze()  # code stays: no collection while parts are built looks through it
    rank.recovery.mark("imports")
    mesh = rank.backend.open_mesh()
    rank.recovery.mark("groups")
    # there every rank leaves its own weights
    leads = mesh.rank == 0 or config.synchronizer.sync_method == "memory"
    talks = leads and "RFT_RAY_ADDRESS" in os.environ
    if talks:
        control.connect(os.environ["RFT_RAY_ADDRESS"], os.environ["RFT_RAY_NAMESPACE"])
    try:
        _train(rank, mesh)
    finally:
        mesh.close()
    if talks:
        control.disconnect()


def _train(rank: Rank, mesh: TrainerMesh) -> None:
    config = rank.config
    if config.cluster.colocate:  # engines measure the card's free memory as they start
        rank.waiting_for = "the engines to start"
        explorer = control.actor(config.explorer.name) if mesh.rank == 0 else None
        control.await_engines(explorer, False, mesh.broadcast, beat_s(config))
        rank.waiting_for = ""
    from rft.run import assembly

    tokenizer = assembly.begin_tokenizer(config) if mesh.rank == 0 else None
    with trace.span("build models"):
        models = rank.backend.build_models(mesh)
    rank.recovery.mark("build")
    log.info("rank %d of %d: %s", mesh.rank, mesh.world, models.policy.describe())
    epoch = take_epoch(rank, mesh)
    built = assembly.assemble(
        rank.backend, mesh, models, epoch, lambda: bool(rank.stopping), rank.recovery, tokenizer
    )
    trainer = rank.trainer = built.trainer
    # until now there was nothing to save
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, rank.stop)
    logs.show_stacks_when_stopped()
    devices.freeze_loaded()
    reached = trainer.fit(built.start)
    trainer.phase = "closing"
    trainer.feed.close()
    trainer.checkpoints.close()
    trainer.publisher.close()
    rank.complete = trainer.complete
    if built.reporter is not None:
        built.reporter.close()
        write_result(config, reached, rank.complete)
    models.close()


def take_epoch(rank: Rank, mesh: TrainerMesh) -> int:
    """Let the agents of the last attempt finish what they hold, then begin a new one: above all
    that any rank's node knows of, for the first node may be a new one. Collective.
    """
    from rft.checkpoint import fence, grants

    control = fence.control_dir(rank.backend.job)
    nodes = mesh.gather(msgspec.to_builtins(grants.NodeKnown.of(control)))
    if nodes is None:
        return int(mesh.broadcast(None))
    return int(mesh.broadcast(_new_epoch(rank, msgspec.convert(nodes, list[grants.NodeKnown]))))


def _new_epoch(rank: Rank, nodes: "list[NodeKnown]") -> int:
    from rft.checkpoint import fence, grants
    from rft.checkpoint.storage import open_storage

    rank.waiting_for = "the last attempt's checkpoint"
    control, checkpoint = fence.control_dir(rank.backend.job), rank.config.trainer.checkpoint
    fence.await_agents(control, checkpoint.agent_deadline_s, log.warning)
    rank.waiting_for = ""
    written = catalog.list_entries(open_storage(configs.checkpoint_root(rank.config)))
    known = [entry.epoch for entry in written] + [node.newest for node in nodes]
    epoch = fence.take_epoch(control, above=max(known))
    if checkpoint.replicas:
        grants.require(control, epoch, nodes, checkpoint.take_over)
    return epoch


if __name__ == "__main__":
    end = ShortExit()
    end.code = main(sys.argv[1])
