"""Which attempt goes on, where nodes share no control directory: the one that most agents of the
last attempt have granted.

    rank 0 of a new attempt ── attempt 4, of this caller ──► every agent of the last one
                            ◄── granted: it publishes nothing of older ones │ another caller has it
                            nobody listens there any more: granted too │ no answer: nobody knows
         more than half granted, or the operator says that the others are lost ─► it goes on

In: what the nodes of the new attempt remember of earlier ones. Out: nothing, or a ConfigError that
says which nodes did not answer. Invariant: of two halves of a network at most one goes on by
itself; an agent grants a number to one caller.
"""

import contextlib
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from rft.checkpoint import fence
from rft.checkpoint.peers import Remembered, dial, remembered
from rft.checkpoint.replicas import Grant, PartTaken
from rft.ground.errors import ConfigError, Late

log = logging.getLogger(__name__)
KEY = "trainer.checkpoint.take_over"
Address = tuple[str, int]


class NodeKnown(msgspec.Struct, frozen=True):
    """What a rank's node has seen of this run. `newest`: number of an attempt."""

    newest: int
    last: Remembered | None

    @classmethod
    def of(cls, control: Path) -> "NodeKnown":
        last = remembered(control)
        return cls(max(fence.newest_epoch(control), last.epoch if last else 0), last)


def require(control: Path, epoch: int, nodes: list[NodeKnown], takes_over: bool) -> None:
    """Attempt `epoch`, which this control directory has given, may go on; `nodes`: of every rank,
    in their order. Raises ConfigError.
    """
    known = max((one.last for one in nodes if one.last), key=lambda one: one.epoch, default=None)
    if known is None or not known.at:
        return
    if known.is_shared and nodes[0].last == known:  # the directory decides
        return
    token = secrets.token_hex(8)
    fence.sign_epoch(control, epoch, token)
    with ThreadPoolExecutor(max(1, len(known.at))) as pool:
        said = list(pool.map(lambda at: _asked(known, at, epoch, token), known.at))
    if other := [why for why in said if why]:
        raise ConfigError(Late(f"attempt {epoch} of this run does not go on: {other[0]}"))
    answers = zip(known.at, said, strict=True)
    silent = [f"{host}:{port}" for (host, port), why in answers if why is None]
    if 2 * len(silent) < len(said):
        return
    lost = f"{len(silent)} of {len(said)} agents do not answer ({', '.join(silent)})"
    if not takes_over:
        raise ConfigError(
            Late(
                f"{lost}: their nodes may be lost, or only cut off, and train on. See to it that "
                f"they do not, then start with {KEY}=true"
            )
        )
    log.warning("%s; %s=true: this attempt goes on all the same", lost, KEY)


def _asked(known: Remembered, at: Address, epoch: int, token: str) -> str | None:
    """Empty: granted; None: no answer; else why not."""
    try:
        line, _ = dial(at, known.run, "read", -1, epoch)
        with contextlib.closing(line):
            line.send(Grant(epoch, token))
            return line.receive(PartTaken).refused
    except ConnectionRefusedError:  # its node says that it has ended
        return ""
    except OSError as error:
        log.warning("the agent at %s:%d grants nothing: %s", *at, error)
        return None
