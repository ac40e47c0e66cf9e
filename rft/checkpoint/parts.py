"""Which state in memory a start may go on from, and where each of its parts lies.

    offers of all agents that were found ─► states whose every part is somewhere, newest first
    what agents know to be whole         ─► which receipts are believed, and who tells others

In: `Offer`s and `Whole`s, from this node and others. Out: `Chosen` states; words about whoever
contradicts. Pure functions, no torch. Invariants: of one state there is one receipt for each rank;
who tells another one is told of and not read; the order of what comes in does not matter.
"""

from collections import Counter, defaultdict

import msgspec

from rft.checkpoint.peers import Offer, Whole


class ChosenState(msgspec.Struct, frozen=True):
    """`receipts`: sha256 of each rank's; `at`: for each rank, agents that nodes can ask for it."""

    id: str
    step: int
    epoch: int
    world: int
    receipts: list[str]
    at: list[list[tuple[str, int]]]


def choose(offers: list[Offer], known: list[Whole]) -> tuple[list[ChosenState], list[str]]:
    """States of which every rank's part is somewhere, newest first; and who contradicts."""
    by_state: dict[tuple[int, int, str, int], list[Offer]] = defaultdict(list)
    for offer in offers:
        by_state[offer.epoch, offer.step, offer.id, offer.world].append(offer)
    found, said = [], []
    for (epoch, step, identity, world), held in sorted(by_state.items(), reverse=True):
        receipts, lies = _believed(held, [one for one in known if one.id == identity], world)
        said += lies
        if len(receipts) < world:
            continue
        at: list[list[tuple[str, int]]] = [[] for _ in range(world)]
        # a rank's own agent first
        for one in sorted(held, key=lambda one: (not one.is_own, one.at or ("", 0))):
            is_good = 0 <= one.rank < world and receipts[one.rank] == one.receipt
            if is_good and one.at is not None and tuple(one.at) not in at[one.rank]:
                at[one.rank].append(tuple(one.at))
        digests = [receipts[rank] for rank in range(world)]
        found.append(ChosenState(identity, step, epoch, world, digests, at))
    return found, said


def newest_offered(offers: list[Offer]) -> tuple[int, int]:
    return max(((one.epoch, one.step) for one in offers), default=(0, 0))


def _believed(
    held: list[Offer], known: list[Whole], world: int
) -> tuple[dict[int, str], list[str]]:
    """The receipt of each rank: what most agents know of a whole state, where it is one; else what
    the rank's own agent tells, else most of those that hold a replica.
    """
    vouched = Counter(tuple(one.receipts) for one in known if len(one.receipts) == world)
    agreed = max(vouched, key=lambda told: (vouched[told], told)) if vouched else None
    believed, said = {}, []
    for rank in range(world):
        told = [one for one in held if one.rank == rank]
        if not told:
            continue
        own = [one for one in told if one.is_own]
        counts = Counter(one.receipt for one in own or told)
        wanted = agreed[rank] if agreed else max(counts, key=lambda one: (counts[one], one))
        for one in told:
            if one.receipt != wanted:
                said.append(
                    f"the agent at {one.at or 'this host'} tells another receipt of rank {rank}'s "
                    f"part of step {one.step} than others, and is not read for it"
                )
        if any(one.receipt == wanted for one in told):
            believed[rank] = wanted
    return believed, said
