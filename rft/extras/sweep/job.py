"""One trial, as Hydra's launchers call it: find its directory, run it unless it has finished,
return its objective.

    Hydra launcher ──► run_trial ──► python -m rft.tools.trial
            (own OS session; ends when this process does)

In: the trial's composed config and, from Hydra, its overrides and the sweep directory. Out: the
objective as a number, None when none is asked for, or `TrialFailed`: never a number for a trial
that did not finish. Signals to the sweep are passed on to the trial, which saves and ends; then the
sweep ends with the signal's code.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, OmegaConf

from rft import config as configs
from rft.config import ConfigError, check_stage_overrides, grace_of
from rft.extras.sweep import trial_records
from rft.extras.sweep.trial_records import Trial
from rft.ground import durable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# on top of a trial's own shutdown, for one that an earlier sweep left behind to end
MARGIN_S = 30.0


class TrialFailed(CompactHydraException):
    """A trial that did not finish.

    Hydra tells the message, without a traceback, when all trials have had their turn.
    """


def run_trial(raw: DictConfig) -> float | None:
    hydra = HydraConfig.get()
    sweep_dir = Path(hydra.runtime.output_dir)
    overrides = [str(line) for line in OmegaConf.to_container(hydra.overrides.task)]  # type: ignore[union-attr]
    try:
        trial = trial_records.claim(sweep_dir, overrides)
    except ConfigError as error:
        raise TrialFailed(f"rft: {error}") from error
    try:
        config = of_trial(raw, trial.directory)
        stages = configs.stage_configs(config)
        check_stage_overrides(config, overrides)
        trial_records.check_objective(stages[0].sweep)
        if trial.state != "finished":
            watched = (
                os.getppid()
                if "joblib" in str(OmegaConf.select(hydra, "launcher._target_"))
                else None
            )
            trial = attempt(trial, config, [stage.stage_name or "" for stage in stages], watched)
        value = trial_records.objective_of(trial, stages[0].sweep)
    except ConfigError as error:
        raise TrialFailed(f"rft: trial {trial.number}: {error}") from error
    print(
        f"sweep: trial {trial.number} {trial.state}{_worth(stages[0].sweep.objective, value)}",
        flush=True,
    )
    return value


def of_trial(raw: DictConfig, directory: Path) -> DictConfig:
    """The same config under the trial's own name: its run directory is the trial's directory."""
    config = raw.copy()
    base = Path(config.checkpoint_root_dir).absolute() / config.project
    if not directory.is_relative_to(base):
        raise ConfigError(
            f"hydra.sweep.dir must lie in {base}: set checkpoint_root_dir, project or name instead"
        )
    if not config.continue_from_checkpoint:
        raise ConfigError(
            "continue_from_checkpoint=false: a sweep goes on where it stood; to begin anew give it "
            "another name"
        )
    config.name = str(directory.relative_to(base))
    return config


def attempt(trial: Trial, config: DictConfig, stages: list[str], watched: int | None) -> Trial:
    """Run or continue the trial; returns its record when it has finished.

    `watched`: a process to end with.
    """
    wait_s = 2 * float(config.shutdown_grace_s or grace_of(os.environ)) + MARGIN_S
    if trial_records.is_running(trial.directory):
        print(
            (
                f"sweep: trial {trial.number} still runs for an earlier sweep: waiting for its "
                "end, "
                f"{wait_s:g} s at most"
            ),
            flush=True,
        )
    lock = trial_records.lock(trial.directory, wait_s)
    if lock is None:
        raise TrialFailed(
            f"rft: trial {trial.number} is run by another process: end that sweep first"
        )
    trial = trial_records.read(trial.directory)  # as the one who had the lock left it
    if trial.state == "finished":
        os.close(lock)
        return trial
    trial.state, trial.code, trial.stages, trial.attempts = (
        "running",
        None,
        stages,
        trial.attempts + 1,
    )
    trial.write()
    print(f"sweep: trial {trial.number}, attempt {trial.attempts}: {chosen(trial)}", flush=True)
    started = time.monotonic()
    child = start(config, lock)
    durable.sign(lock, str(child.pid))  # who runs the trial
    received: list[int] = []
    try:
        with signals_passed_on(child, received), ended_with(watched, child):
            child.wait()
    finally:  # also when a launcher's own signal handler ends this process
        code = end(child)
        trial.code, trial.seconds = code, trial.seconds + time.monotonic() - started
        trial.state = "finished" if code == 0 else "stopped" if received or code > 128 else "failed"
        trial.write()
        os.close(lock)
    if trial.state == "finished":
        return trial
    if received:
        print(
            (
                f"rft: sweep stopped by {signal.Signals(received[0]).name} in trial "
                f"{trial.number}; "
                "the same command goes on"
            ),
            file=sys.stderr,
        )
        raise SystemExit(128 + received[0])
    raise TrialFailed(
        f"rft: trial {trial.number} {trial.state} with exit code {code}: {chosen(trial)}; logs in "
        f"{trial.directory}"
    )


def start(config: DictConfig, lock: int) -> "subprocess.Popen[bytes]":
    """The trial's supervisor.

    Its standard input stays open until this process ends, in whatever way.
    """
    command = [sys.executable, "-m", "rft.tools.trial", str(lock)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=(lock,), start_new_session=True, env=environment()
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and its exit code says how
        child.stdin.write(json.dumps(OmegaConf.to_container(config)).encode() + b"\n")
        child.stdin.flush()
    return child


def environment() -> dict[str, str]:
    """A trial finds rft where the sweep found it, and is nobody's rank."""
    paths = [
        str(Path(__file__).resolve().parents[3]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def end(child: "subprocess.Popen[bytes]") -> int:
    """Its exit code; a trial that still runs is asked to save and end, which takes its
    shutdown_grace_s at most.
    """
    if child.poll() is None:
        child.terminate()
    code = child.wait()
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()  # type: ignore[union-attr]
    return code


@contextlib.contextmanager
def signals_passed_on(child: "subprocess.Popen[bytes]", received: list[int]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGUSR1 go to the trial too, unless a launcher (submitit) has given them
    another meaning.
    """

    def pass_on(number: int, _frame: Any) -> None:
        received.append(number)
        child.send_signal(number)

    free = [
        n for n in SIGNALS if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)
    ]
    if threading.current_thread() is not threading.main_thread():
        free = []  # Python lets only the main thread listen
    previous = [signal.signal(number, pass_on) for number in free]
    try:
        yield
    finally:
        for number, handler in zip(free, previous, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def ended_with(watched: int | None, child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """A launcher's worker process may outlive the sweep: end the trial when `watched` is gone."""
    if watched is None:
        yield
        return
    descriptor = os.pidfd_open(watched)
    done, leave = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([descriptor, done], [], [])
        if descriptor in ready:
            child.terminate()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        os.close(leave)
        watcher.join()
        os.close(descriptor)
        os.close(done)


def chosen(trial: Trial) -> str:
    """What the sweep chose for this trial: what does not stand on the command line as it is."""
    return " ".join([line for line in trial.overrides if line not in sys.argv] or trial.overrides)


def _worth(metric: str | None, value: float | None) -> str:
    return "" if value is None else f": {metric}={value:g}"
