"""Start a stage's trainer ranks (`rft.run.children`) and tell how they ended.

    python -m rft.run.elastic RESOLVED_YAML

In: the resolved config (`trainer.num_ranks`, `trainer.max_restarts`, `cluster.master_port`). Out:
exit code 0, or 1 with `failure.json` (part, phase, cause) in the attempt's log directory. Ranks
that failed are started again, all of them, as often within an hour as they may, each time with a
line that says why. A process of its own, so that the supervisor stays free of torch; SIGTERM is
passed on to the ranks, which end cleanly at their next step boundary.
"""

import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rft import config as configs
from rft.config import Config
from rft.ground import device, redact
from rft.ground.errors import REFUSED
from rft.ground.process import ShortExit, die_with_parent, ending
from rft.monitor import logs
from rft.run import recovery
from rft.run.restarts import Restarts
from rft.run.spare import Spares

CONSEQUENCES = (
    signal.SIGTERM,
    signal.SIGABRT,
)  # peers of a failed rank are ended; libraries abort at lost ones
# ranks that failed may only have met the end of another part: if that ends the run, it ends them by
# then; a rank that was killed has met nothing
PAUSE_S = 1.0
DEATHS = "trainer_deaths.json"  # of ranks and launchers of this attempt: one budget for both


def main(path: str) -> int:
    config = configs.load(path)
    log_dir = Path(os.environ["RFT_LOG_DIR"])
    # ranks inherit stdout: rank 0 talks
    logs.redirect(log_dir / "launcher.log", config.log, keep_stdout=True)
    die_with_parent()
    from torch.distributed.elastic.multiprocessing.api import SignalException

    count = int(config.trainer.num_ranks or 1)

    def start() -> None:
        spares.refill()
        with recovery.RankWatch(log_dir, count, apart=spares.pids):
            run(config, "-m", "rft.run.rank", path, spares=spares)

    try:
        with Spares(path, log_dir, count if config.trainer.spares else 0) as spares:
            failed = until_ended(
                start,
                Restarts(config.trainer.max_restarts, kept=log_dir / DEATHS),
                log_dir,
                lambda line: print(redact.text(line), flush=True),
            )
    except SignalException as stop:
        return 128 + int(stop.sigval)
    if failed is None:
        return 0
    (log_dir / "failure.json").write_text(redact.text(json.dumps(failed)), encoding="utf-8")
    return 1


def until_ended(
    start: Callable[[], None], restarts: Restarts, log_dir: Path, say: Callable[[str], None]
) -> dict[str, str] | None:
    """Run the ranks until all have ended well: None; or until they have failed once too often: the
    failure that was there first.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    while True:
        for left in (*log_dir.glob("failure_rank_*.json"), *log_dir.glob("phase_rank_*")):
            left.unlink()  # of the start before
        try:
            start()
            return None
        except ChildFailedError as error:
            ended = {number: failure.exitcode for number, failure in error.failures.items()}
        failed = root_cause(log_dir, ended)
        line = as_line(**failed)
        # what is refused once is refused again: a key, a row, a service's model
        if REFUSED in ended.values():
            return failed
        if not restarts.allow(line):
            first = of_line(restarts.first)
            return first | {"cause": restarts.cause() if restarts.limit else first["cause"]}
        time.sleep(0.0 if -signal.SIGKILL in ended.values() else PAUSE_S)
        say(f"{line}; the ranks are started again ({restarts.told()})")


def as_line(part: str, phase: str, cause: str) -> str:
    return f"{part} failed while {phase}: {cause}"


def of_line(line: str) -> dict[str, str]:
    """What `as_line` was given; of an earlier launcher, maybe."""
    part, _, rest = line.partition(" failed while ")
    phase, _, cause = rest.partition(": ")
    return {"part": part, "phase": phase, "cause": cause}


def run(config: Config, *words: str, spares: Spares | None = None) -> None:
    """Run the ranks, each this interpreter with `words`, until all have ended well, or one failed:
    torch's ChildFailedError.
    """
    from rft.run import children

    os.environ.update(device.loopback_environment(engines_too=config.cluster.ray_address is None))
    children.run(
        words,
        int(config.trainer.num_ranks or 1),
        config.name.replace("/", "_"),  # a trial of a sweep has a path for a name
        config.cluster.master_port,
        math.ceil(config.shutdown_grace_s),
        spares.take if spares else lambda command, environment: None,
    )


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
