"""Run epochs: which attempt of a job may publish. No torch.

    <control>/epochs/<n>            taken by exclusive creation: two attempts never share a number
    <control>/agents/e<n>-r<rank>   locked (flock) by the agent of that rank for as long as it lives
    <control>/states/<host>/e<n>-r<rank>    there while it rests: its rank is gone, it writes
                                    nothing more, and has a state in memory
    <control>/states/over           the newest attempt that no other will follow

A new attempt waits, within bounds, for the agents of older ones to finish what they write, then
takes its epoch, then moves their drafts away. That order is the fence: an old agent that was paused
over all of it finds its draft gone, for publishing is a rename of the draft; whatever it creates
afterwards is checked against the newer epoch before it is published.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

from rft.ground import durable

NUMBER = re.compile(r"[1-9]\d{0,17}", re.ASCII)
LOOK_S = 0.05  # between looks at locks; nothing tells when another process's lock goes
# locks of who starts ranks again, below the control directory and beside it
OWNER, SIDECAR = "owners/trainer", "sidecar.lock"


def control_dir(job: Path) -> Path:
    return job / "control"


def newest_epoch(control: Path) -> int:
    """Files with other names are not ours."""
    directory = control / "epochs"
    names = os.listdir(directory) if directory.is_dir() else []
    return max((int(name) for name in names if NUMBER.fullmatch(name)), default=0)


def take_epoch(control: Path, above: int = 0) -> int:
    """A number that no earlier attempt of this job had.

    `above`: the newest that a checkpoint tells of, if `control` is new.
    """
    directory = control / "epochs"
    directory.mkdir(parents=True, exist_ok=True)
    number = max(newest_epoch(control), above) + 1
    while True:
        try:
            (directory / str(number)).open("x").close()
            durable.sync_directory(directory)  # or a number could come twice, after a power loss
            return number
        except FileExistsError:
            number += 1


def note_epoch(control: Path, epoch: int) -> None:
    """On a node that has a control directory of its own: the number that another one has taken."""
    directory = control / "epochs"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / str(epoch)).touch()


def sign_epoch(control: Path, epoch: int, token: str) -> None:
    """Whose the number is that `take_epoch` has given."""
    durable.put(control / "epochs" / str(epoch), token)


def grant(control: Path, epoch: int, token: str) -> str:
    """Give the number to who calls itself `token`; why not, if that cannot be."""
    path = control / "epochs" / str(epoch)
    if (newest := newest_epoch(control)) > epoch:
        return f"attempt {newest} has begun"
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("x").close()
        durable.put(path, token)
    owner = path.read_text(encoding="ascii")
    return "" if owner == token else f"attempt {epoch} is another start's"


def lock_path(control: Path, epoch: int, rank: int) -> Path:
    return control / "agents" / f"e{epoch:04d}-r{rank:05d}"


def hold(path: Path) -> int:
    """Lock `path` until this process ends; writes its process number there.

    Raises BlockingIOError if another has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = durable.lock(path)
    if descriptor is None:
        raise BlockingIOError(f"{path} is held by process {durable.signed_by(path)}")
    with contextlib.suppress(OSError):  # a full disk; the lock is what counts
        durable.sign(descriptor, str(os.getpid()))
    return descriptor


def holder(path: Path) -> int:
    """Process number of the agent that has locked `path`; 0 where nothing tells.

    A full disk takes the lock and not the number: then the kernel is asked.
    """
    signed = durable.signed_by(path)
    return int(signed) if NUMBER.fullmatch(signed) else durable.locker(path)


def living_agents(control: Path) -> list[Path]:
    directory = control / "agents"
    return (
        [path for path in sorted(directory.glob("e*-r*")) if durable.is_locked(path)]
        if directory.is_dir()
        else []
    )


def state_path(control: Path, epoch: int, rank: int) -> Path:
    """The socket of that rank's agent on this host, once it rests."""
    return control / "states" / socket.gethostname() / lock_path(control, epoch, rank).name


def resting(control: Path) -> list[Path]:
    """Sockets of agents that rest, of all hosts; of one that was killed it is still there."""
    return sorted((control / "states").glob("*/e*-r*"))


def end_rest(control: Path) -> None:
    """No attempt follows the newest one: who keeps a state for it may end."""
    directory = control / "states"
    if directory.is_dir():  # else nobody has ever rested here
        with contextlib.suppress(OSError):  # a full disk; they end with their owner
            durable.put(directory / "over", str(newest_epoch(control)))


def is_over(control: Path, epoch: int) -> bool:
    """Whether it was said that no attempt follows `epoch`."""
    over = control / "states" / "over"
    return over.exists() and epoch <= int(over.read_text(encoding="ascii"))


def is_owned(control: Path) -> bool:
    """Whether somebody lives who may start ranks again."""
    return durable.is_locked(control / OWNER) or durable.is_locked(control.parent / SIDECAR)


def busy_agents(control: Path) -> list[Path]:
    """Locks of the agents that live and do not rest."""
    at_rest = {path.name for path in resting(control)}
    return [path for path in living_agents(control) if path.name not in at_rest]


def await_agents(control: Path, deadline_s: float, say: Callable[[str], None]) -> list[Path]:
    """Wait until no agent of an earlier attempt writes any more; returns those that still do at the
    deadline.
    """
    end = time.monotonic() + deadline_s
    announced = False
    while (alive := busy_agents(control)) and time.monotonic() < end:
        if not announced:
            say(
                f"waiting up to {deadline_s:g} s for {len(alive)} agent(s) of the last attempt to "
                "finish its checkpoint"
            )
            announced = True
        time.sleep(LOOK_S)
    there = living_agents(control)
    names = {path.name for path in there}
    left = [path for path in (control / "agents").glob("e*-r*") if path not in there]
    for path in (*left, *(path for path in resting(control) if path.name not in names)):
        path.unlink(missing_ok=True)
    return alive
