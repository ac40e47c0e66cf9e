"""Which committed checkpoints may go. A pure function of what is there and what shall stay.

Invariant: the newest one and every tagged one stay, whatever the rules say.
"""

from dataclasses import dataclass

from rft.checkpoint.records import Retention


@dataclass(frozen=True)
class Entry:
    """A committed checkpoint. Later ones have a larger (epoch, step)."""

    path: str
    epoch: int
    step: int
    bytes: int
    tagged: bool = False


def expired(entries: list[Entry], policy: Retention) -> list[Entry]:
    """What may be deleted, oldest first."""
    ordered = sorted(entries, key=lambda entry: (entry.epoch, entry.step))
    if not ordered:
        return []
    keep = {ordered[-1].path} | {entry.path for entry in ordered if entry.tagged}
    wanted = set(keep)
    wanted |= {entry.path for entry in (ordered[-policy.last :] if policy.last else ordered)}
    if policy.every:
        wanted |= {entry.path for entry in ordered if entry.step % policy.every == 0}
    if policy.best:
        wanted |= {entry.path for entry in _best(ordered, policy)}
    if policy.max_bytes:
        total = sum(entry.bytes for entry in ordered if entry.path in wanted)
        for entry in ordered:
            if total > policy.max_bytes and entry.path in wanted - keep:
                wanted.discard(entry.path)
                total -= entry.bytes
    return [entry for entry in ordered if entry.path not in wanted]


def _best(ordered: list[Entry], policy: Retention) -> list[Entry]:
    sign = 1 if policy.best_is_lowest else -1
    scored = [entry for entry in ordered if entry.step in policy.scores]
    return sorted(scored, key=lambda entry: (sign * policy.scores[entry.step], -entry.step))[
        : policy.best
    ]
