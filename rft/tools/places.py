"""Which run or checkpoint somebody means: a run, job or checkpoints directory, `RUN@STEP`, one
checkpoint's path, or a URL.

In: what was typed. Out: the storage it lies in, its name there, and the job directory if there is
one; of a run that is under way, the directory with its socket. Whatever does not name exactly one
thing raises `InputError` with what would.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rft import config as configs
from rft.checkpoint import catalog, fence
from rft.checkpoint.catalog import committed, step_of
from rft.checkpoint.records import MANIFEST
from rft.checkpoint.storage import VERSIONS, Storage, open_storage
from rft.config import ConfigError
from rft.run.control_socket import NAME

DEPTH = 3  # directories between what is typed and a job: <root>/<project>/<name>/<stage>


class InputError(ValueError):
    """One line for the user."""


@dataclass(frozen=True)
class Run:
    """Where a run's checkpoints lie. `job` is None when all that is known is a URL."""

    storage: Storage
    job: Path | None

    @property
    def where(self) -> str:
        return self.storage.where


def find_run(text: str) -> Run:
    """The run at `text`; raises InputError when there is none or more than one."""
    if "://" in text:
        return Run(_opened(text), None)
    path = Path(text).resolve()
    if not path.is_dir():
        raise InputError(f"{text}: no such directory")
    if _holds_checkpoints(path):
        return Run(_opened(path), path.parent)
    if run := _job(path):
        return run
    below = [job for job in jobs_below(path) if _job(job)]
    if len(below) == 1:
        run = _job(below[0])
        assert run is not None
        return run
    if below:
        raise InputError(
            f"{text} holds {len(below)} runs, give one: {', '.join(str(job) for job in below[:8])}"
        )
    raise InputError(
        f"{text}: no checkpoints here; give a run directory, or the directory with step_... in it"
    )


def find_checkpoint(text: str, version: int | None = None) -> tuple[Run, str]:
    """One committed checkpoint: a path that ends in its name, RUN@STEP, or RUN for the newest one;
    or, of a RUN, the weights of policy version `version`.
    """
    if version is not None:
        run = find_run(text)
        path = catalog.weights_of(run.storage, version)
        if path is None:
            kept = catalog.named(run.storage, VERSIONS)
            raise InputError(
                f"{run.where}: no weights of version {version}; kept: {ranges(kept) or 'none'}"
            )
        return run, path
    head, _, name = text.rstrip("/").rpartition("/")
    if step_of(name) is not None:
        above, _, collection = head.rpartition("/")
        if (collection, name[:2]) == (VERSIONS, "v_"):  # beside what it may be made of
            head, name = above, f"{collection}/{name}"
        run = Run(_opened(head or "."), _job_above(head))
        if MANIFEST not in run.storage.list(name):
            raise InputError(f"{text} is no committed checkpoint: it has no {MANIFEST}")
        return run, name
    where, _, number = text.rpartition("@")
    if where and number.isdigit():
        run = find_run(where)
        return run, _newest(run, int(number))
    run = find_run(text)
    return run, _newest(run, None)


def ranges(paths: Iterable[str]) -> str:
    """Steps of committed names: 0-12, 14."""
    known = {step for path in paths if (step := step_of(path)) is not None}
    begins = sorted(step for step in known if step - 1 not in known)
    ends = sorted(step for step in known if step + 1 not in known)
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))


def find_control(text: str) -> Path:
    """Return the directory with the socket of the one run that is under way at or below `text`;
    raises InputError when there is none or more.
    """
    path = Path(text).resolve()
    if not path.is_dir():
        raise InputError(f"{text}: no such directory")
    jobs = map(fence.control_dir, [path, *jobs_below(path)])
    found = [control for control in jobs if (control / NAME).is_socket()]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(
            f"{text} holds {len(found)} runs, give one: "
            f"{', '.join(str(c.parent) for c in found[:8])}"
        )
    raise InputError(
        f"{text}: no run is under way here; "
        "give the directory of one that is, like runs/rft/quickstart"
    )


def find_job(text: str) -> Path:
    """Return the control directory of the one run that trains at or below `text`; raises InputError
    when there is none or more.
    """
    path = Path(text).resolve()
    if not path.is_dir():
        raise InputError(f"{text}: no such directory")
    jobs = map(fence.control_dir, [path, *jobs_below(path)])
    found = [control for control in jobs if control.is_dir() and fence.is_owned(control)]
    if len(found) == 1:
        return found[0]
    words = ", ".join(str(control.parent) for control in found[:8])
    raise InputError(
        f"{text} holds {len(found)} runs that train, give one: {words}"
        if found
        else f"{text}: no run trains here; give the directory of one that does"
    )


def jobs_below(path: Path) -> list[Path]:
    """Every directory that may be a job's, nearest first. Not what lies below its checkpoints, a
    hundred thousand versions perhaps.
    """
    level, found = [path], list[Path]()
    for _ in range(DEPTH):
        above = [one for one in level if one.name != "checkpoints"]
        level = [below for one in above for below in sorted(one.glob("*"))]
        found += level
    return found


def _newest(run: Run, step: int | None) -> str:
    entries = catalog.list_entries(run.storage)
    found = [entry for entry in entries if step in (None, entry.step)]
    if not found:
        steps = ", ".join(str(entry.step) for entry in entries[-8:]) or "none"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise InputError(f"{run.where}: {wanted}; committed steps: {steps}")
    return found[-1].path


def _opened(where: str | Path) -> Storage:
    try:
        return open_storage(where)
    except (ImportError, ValueError) as error:
        raise InputError(f"{where} cannot be opened: {error}") from error


def _holds_checkpoints(path: Path) -> bool:
    if path.name == "checkpoints":
        return True
    storage = _opened(path)
    return bool(committed(storage) or catalog.lost(storage))


def _job(path: Path) -> Run | None:
    """The run of which `path` is the job directory: its own
    checkpoints, or the URL that its config names.
    """
    if (path / "checkpoints").is_dir():
        return Run(_opened(path / "checkpoints"), path)
    resolved = path / "resolved.yaml"
    if not resolved.is_file():
        return None
    try:
        config = configs.as_written(resolved)
    except (ConfigError, OSError) as error:
        raise InputError(f"{resolved} cannot be read: {error}") from error
    if not config.trainer.checkpoint.storage:
        return None
    names = filter(None, (config.project, config.name, config.stage_name))
    return Run(_opened("/".join([config.trainer.checkpoint.storage.rstrip("/"), *names])), path)


def _job_above(root: str) -> Path | None:
    return None if "://" in root else Path(root or ".").absolute().parent
