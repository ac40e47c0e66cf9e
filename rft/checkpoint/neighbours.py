"""What ranks agree on before anything is saved: that they all mean one place by that of the
checkpoints; and before their agents hold each other's parts: who listens where, who holds whose,
and that the memory of every node is enough.

In: of each rank its node, an address that other nodes reach, the bytes of its part. Out: what its
agent is told (`Replication`), the same run on all of them; ConfigError on every rank, all problems
at once. A run that has had replicas goes on without them where a node is lost. Collective: every
rank calls `agree` at the same point.
"""

import contextlib
import ipaddress
import logging
import secrets
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rft.checkpoint import fence
from rft.checkpoint.peers import Remembered, RunKey, remember, remembered
from rft.checkpoint.records import PROBE, Replication
from rft.checkpoint.replicas import BUFFERS, held_by, peer_of
from rft.checkpoint.storage import Storage
from rft.ground.errors import ConfigError, Late
from rft.ground.protocols import Collective

log = logging.getLogger(__name__)
KEY = "trainer.checkpoint.replicas"
SEEN_S, AGAIN_S = 10.0, 0.2
MOST_BEFORE = 32  # addresses of earlier agents at which a node answers


def leave_mark(storage: Storage) -> str:
    """By rank 0, where checkpoints lie; its name, for `blind_nodes`. Raises OSError."""
    mark = f"{PROBE}{secrets.token_hex(6)}"
    storage.put(mark, b"")
    return mark


def blind_nodes(storage: Storage, ranks: Collective, mark: str, patience_s: float) -> str:
    """What to say where nodes do not see what rank 0 has left: a directory of the same name on a
    node's own disk takes its ranks' parts, and no checkpoint would ever be complete. Collective.
    """
    within_s = min(patience_s, SEEN_S)
    said = ranks.gather([socket.gethostname(), _why_unseen(storage, mark, within_s)])
    if said is None:
        return str(ranks.broadcast(None))
    unseen: dict[str, str] = {}
    for node, why in said:
        if why:
            unseen.setdefault(node, why)
    told = "; ".join(f"{node} does not ({why})" for node, why in unseen.items())
    if told:
        told = (
            f"{storage.where}: {said[0][0]} writes checkpoints there, and not all nodes see them: "
            f"{told}. Mount one file system there on all nodes, or set "
            "trainer.checkpoint.storage to a place that all of them reach, then start again"
        )
    return str(ranks.broadcast(told))


def _why_unseen(storage: Storage, mark: str, within_s: float) -> str:
    """Empty: it is there. A file system may take a while to show what another node has made."""
    end = time.monotonic() + within_s
    while True:
        try:
            storage.get(mark)
            return ""
        except OSError as error:
            if time.monotonic() > end:
                return str(error)
        time.sleep(AGAIN_S)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is. `journal`: directory of the one that travels along; empty: none does."""

    node: str = field(default_factory=socket.gethostname)
    address: str = "127.0.0.1"
    journal: str = ""


class Seat(msgspec.Struct, frozen=True):
    """A rank before the first save. `wanted`: bytes that it will take for itself; `free`: of its
    node; `held`: what agents of the attempt before hold there for others until a newer state is
    there; `run`: what this node remembers, and of which attempt.
    """

    node: str
    at: tuple[str, int]
    part: int
    wanted: int
    free: int
    held: int
    run: RunKey | None
    epoch: int


def agree(
    ranks: Collective,
    control: Path,
    epoch: int,
    place: RankPlace,
    sizes: tuple[int, int, int, int],
) -> Replication | None:
    """`sizes`: bytes of this rank's part, those that it takes for itself, what is free, and what
    comes free. None: of a run that goes on, without what it needs for replicas.
    """
    before = remembered(control)
    own = before.own if before else []
    listener = socket.create_server((place.address, 0), backlog=128)
    seat = Seat(
        place.node,
        listener.getsockname()[:2],
        *sizes,
        before.run if before else None,
        before.epoch if before else 0,
    )
    said = ranks.gather(msgspec.to_builtins(seat))
    mark = control / "replicas" / f"seen-{epoch}"
    found = None
    if said is not None:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        found = _agreed(msgspec.convert(said, list[Seat]))
    why, name, secret, nodes, at = ranks.broadcast(found)
    if why:
        listener.close()
        if not name:
            raise ConfigError(Late(why))
        if ranks.rank == 0:
            log.error("states are on one node alone from now on: %s", why)
            mark.unlink(missing_ok=True)
        if nodes.index(place.node) == ranks.rank:
            remember(control, Remembered(RunKey(name, secret), epoch, [], own=own))
        return None
    at = [(str(host), int(port)) for host, port in at]
    sees = ranks.gather(mark.exists())
    sees = ranks.broadcast(sees)
    is_first = nodes.index(place.node) == ranks.rank
    if is_first:  # of its node
        fence.note_epoch(control, epoch)
        here = [one for one, node in zip(at, nodes, strict=True) if node == place.node]
        known = [*own, *here][-MOST_BEFORE:]
        remember(control, Remembered(RunKey(name, secret), epoch, at, all(sees), known))
    mark.unlink(missing_ok=True)
    holder = peer_of(0, nodes)
    # where the holder sees this directory, the journal lies on no node's own disk
    journal = "" if holder is None or sees[holder] else place.journal
    return Replication(
        run=name,
        secret=secret,
        nodes=list(nodes),
        at=at,
        listener=listener.detach(),
        journal=journal,
        before=own if is_first and not all(sees) else [],
    )


def _agreed(seats: list[Seat]) -> list[Any]:
    """[what is wrong, run, secret, nodes, addresses], as rank 0 has it; no run: it is a new one,
    with which something is wrong.
    """
    known = max((one for one in seats if one.run), key=lambda one: one.epoch, default=None)
    why = refusals(seats)
    run = known.run if known and known.run else RunKey("", "") if why else RunKey.new()
    at = [one.at for one in seats]
    return [why, run.name, run.secret, [one.node for one in seats], at]


def refusals(seats: list[Seat]) -> str:
    """All that is wrong, a line for each; empty: nothing."""
    nodes = [one.node for one in seats]
    if len(set(nodes)) < 2:
        return (
            f"{KEY}=1 needs two nodes, and all {len(seats)} rank(s) are on {nodes[0]}: start ranks "
            f"on another node too, or set {KEY}=0"
        )
    found = []
    for node in dict.fromkeys(nodes):
        here = [rank for rank, other in enumerate(nodes) if other == node]
        own = sum(seats[rank].wanted for rank in here)
        others = sum(BUFFERS * seats[held].part for rank in here for held in held_by(rank, nodes))
        free = min(seats[rank].free for rank in here)
        held = max(seats[rank].held for rank in here)
        # the first part of each comes beside what is held, which then goes
        if own + max(others - held, others // BUFFERS) > free:
            back = f", and {held / 1e9:.3f} GB come back" if held else ""
            found.append(
                f"{node} needs {(own + others) / 1e9:.3f} GB of memory: {own / 1e9:.3f} for what "
                f"each of its {len(here)} rank(s) stages, {others / 1e9:.3f} for two of each "
                f"part that it holds for others; {free / 1e9:.3f} GB are free{back}"
            )
        for rank in here:
            with contextlib.suppress(ValueError):
                if ipaddress.ip_address(seats[rank].at[0]).is_loopback and not _all_here(seats):
                    found.append(
                        f"rank {rank} on {node} has no address that other nodes reach: name the "
                        "first node by one (MASTER_ADDR), and not by loopback"
                    )
    if not found:
        return ""
    return "; ".join(found) + f". Use more nodes, or set {KEY}=0"


def _all_here(seats: list[Seat]) -> bool:
    """Nodes that are one machine, for tests: all have the same address."""
    return len(Counter(one.at[0] for one in seats)) == 1
