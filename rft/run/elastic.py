"""Start a stage's trainer ranks under torch's elastic launcher and tell how they ended.

    python -m rft.run.elastic RESOLVED_YAML

In: the resolved config (`trainer.num_ranks`, `trainer.max_restarts`, `cluster.master_port`). Out:
exit code 0, or 1 with `failure.json` (part, phase, cause) in the attempt's log directory. A process
of its own, so that the supervisor stays free of torch; SIGTERM is passed on to the ranks, which end
cleanly at their next step boundary.
"""

import contextlib
import json
import math
import os
import signal
import sys
from pathlib import Path

from rft import config as configs
from rft.config import Config
from rft.ground import device, redact
from rft.ground.process import ShortExit, die_with_parent, ending
from rft.monitor import logs

CONSEQUENCES = (
    signal.SIGTERM,
    signal.SIGABRT,
)  # torch's launcher ends the peers of a failed rank; libraries abort at lost ones


def main(path: str) -> int:
    config = configs.load(path)
    log_dir = Path(os.environ["RFT_LOG_DIR"])
    # ranks inherit stdout: rank 0 talks
    logs.redirect(log_dir / "launcher.log", config.log, keep_stdout=True)
    die_with_parent()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run(config, "-m", "rft.run.rank", path)
    except ChildFailedError as error:
        ended = {number: failure.exitcode for number, failure in error.failures.items()}
        (log_dir / "failure.json").write_text(
            redact.text(json.dumps(root_cause(log_dir, ended))), encoding="utf-8"
        )
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


def run(config: Config, *words: str) -> None:
    """Run the ranks, each this interpreter with `words`, until all have ended well, or one failed
    once too often.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from rft.run import loopback

    loopback.register()
    os.environ.update(device.loopback_environment(engines_too=config.cluster.ray_address is None))
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(config.trainer.num_ranks or 1),
        run_id=config.name.replace("/", "_"),  # a trial of a sweep has a path for a name
        rdzv_backend=loopback.BACKEND,
        rdzv_endpoint=f"{loopback.HOST}:{config.cluster.master_port}",
        max_restarts=config.trainer.max_restarts,
        monitor_interval=0.1,
        local_addr=loopback.HOST,
        shutdown_timeout=math.ceil(config.shutdown_grace_s),
    )
    elastic_launch(launch, sys.executable)(*words)


def root_cause(log_dir: Path, ended: dict[int, int]) -> dict[str, str]:
    """The failure that was there first. `ended`: exit codes of the ranks that failed.

    A rank that was killed could not say so, and its peers only met a closed connection; a rank that
    raised left a record.
    """
    killed = [
        number for number, code in sorted(ended.items()) if code < 0 and -code not in CONSEQUENCES
    ]
    records = sorted(log_dir.glob("failure_rank_*.json"), key=os.path.getmtime)
    for record in records if not killed else ():
        with contextlib.suppress(ValueError):  # of a rank that met a full disk there is half a word
            return json.loads(record.read_text(encoding="utf-8"))
    number = killed[0] if killed else min(ended)
    return {
        "part": f"trainer rank {number}",
        "phase": phase(log_dir, number),
        "cause": ending(ended[number]),
    }


def phase(log_dir: Path, number: int) -> str:
    """What a rank that cannot tell any more was doing: the last that it wrote down."""
    path = log_dir / f"phase_rank_{number}"
    return path.read_text(encoding="utf-8").strip() if path.exists() else "starting"


if __name__ == "__main__":
    end = ShortExit()
    end.code = main(sys.argv[1])
