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

PartKey = tuple[int, int, int]


class StoredGroup(Record, kw_only=True):
    """One group.

    `uses`: how often it is trained on with this batch, where groups may be trained on again.
    Without experiences: whoever gets it has them.
    """

    group: int
    timeline: int
    experiences: memoryview  # an encoded list: bytes, or of what was received a part of its message
    uses: int = 0

    @property
    def key(self) -> PartKey:
        """Parts of one key hold the same, every bit."""
        return self.group, self.timeline, self.uses


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


def opened(data: bytes, seen: dict[PartKey, list[Experience]] | None = None) -> Batch:
    """The batch of an encoded `Delivery`. `seen`: experiences of parts that were delivered before,
    which this one may leave out; those of this one are added.
    """
    found, seen = decode(data, Delivery), {} if seen is None else seen
    for part in found.parts:
        if len(part.experiences):
            seen[part.key] = _experiences(part)
    return Batch(
        step=found.step,
        experiences=[one for part in found.parts for one in seen[part.key]],
        replayed=found.replayed,
        waited_s=found.waited_s,
    )


def _experiences(part: StoredGroup) -> list[Experience]:
    made = decode(part.experiences, list[Experience])
    for experience in made:
        experience.group, experience.timeline = part.group, part.timeline
        if part.uses:
            experience.info["use_count"] = part.uses
    return made
