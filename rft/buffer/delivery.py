"""A step's batch on its way from a buffer to the trainer, its experiences still as they were
stored.

In: at the buffer, the stored bytes of every group of a lease. Out: at the trainer, a `Batch` whose
experiences carry the group and the run epoch that they come from. Invariant: between `put` and the
trainer an experience is decoded once, at the trainer: the buffer is one process, and everything
that is learned from goes through it.
"""

import math

import msgspec

from rft.ground.experience import Batch, Experience, Record, VersionSpan, decode


class StoredGroup(Record, kw_only=True):
    """One group.

    `uses`: how often it is trained on with this batch, where groups may be trained on again.
    """

    group: int
    timeline: int
    experiences: memoryview  # an encoded list: bytes, or of what was received a part of its message
    uses: int = 0


class Delivery(Record, kw_only=True):
    """The batch of `step`; without parts the run is over.

    `replayed`: it was leased before a restart.
    """

    step: int
    parts: list[StoredGroup] = []
    replayed: bool = False
    waited_s: float = 0.0


class Facts(msgspec.Struct):
    """What a buffer wants to know of an experience: reading these
    alone takes a quarter of the time.
    """

    reward: float = 0.0
    versions: list[VersionSpan] = []
    info: dict[str, msgspec.Raw] = {}


_facts = msgspec.msgpack.Decoder(list[Facts])


def facts_of(experiences: bytes) -> list[Facts]:
    """Of an encoded list of experiences."""
    return _facts.decode(experiences)


def oldest_version(rows: list[Facts]) -> int | None:
    return min((span.version for row in rows for span in row.versions), default=None)


def trained(rows: list[Facts]) -> int:
    """How many of them a step trains on: all but those that others are only compared with."""
    return sum("baseline" not in row.info for row in rows)


def bad_reward(rows: list[Facts]) -> str:
    """Why a group cannot be trained on; empty if it can."""
    bad = next((row.reward for row in rows if not math.isfinite(row.reward)), None)
    return "" if bad is None else f"its reward is {bad}, which is no number to learn from"


def opened(data: bytes) -> Batch:
    """The batch of an encoded `Delivery`."""
    found = decode(data, Delivery)
    experiences = []
    for part in found.parts:
        for experience in decode(part.experiences, list[Experience]):
            experience.group, experience.timeline = part.group, part.timeline
            if part.uses:
                experience.info["use_count"] = part.uses
            experiences.append(experience)
    return Batch(
        step=found.step, experiences=experiences, replayed=found.replayed, waited_s=found.waited_s
    )
