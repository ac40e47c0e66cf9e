"""The faults that `bench.chaos` deals: nothing is left to luck but the order."""

from itertools import islice

import pytest

from bench.chaos import uncovered
from bench.chaos_faults import CUT, DISK, OF_DISK, OF_PARTS, PARTS, RESET, UNCONNECTED, Fault, deck
from bench.chaos_run import Outcome

HAND = len(PARTS) + len(OF_DISK)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("number", [0, 1, 3])
def test_every_hand_has_every_part_and_kind(seed: int, number: int) -> None:
    cards = list(islice(deck(seed, True, number), 4 * HAND))
    for start in range(0, len(cards), HAND):
        hand = cards[start : start + HAND]
        assert {part for _, part in hand} == {*PARTS, DISK}
        assert {kind for kind, _ in hand} == {*OF_PARTS, *OF_DISK}
        assert any(kind == RESET and part not in UNCONNECTED for kind, part in hand)
    assert {*cards} >= {(kind, part) for kind in OF_PARTS for part in PARTS}
    assert cards == list(islice(deck(seed, True, number), 4 * HAND))


def test_only_parts_that_were_asked_for_are_hit() -> None:
    cards = list(islice(deck(1, False, 0, ["rank", "buffer"]), 8))
    assert {part for _, part in cards} == {"rank", "buffer"}


def test_what_was_not_hit_is_told() -> None:
    faults = [Fault("kill", "rank"), Fault(RESET, "engine", words="process 1, the kernel refused")]
    left = uncovered(Outcome(0, faults=faults), False, ["rank", "engine", "buffer"])
    assert left == ["buffer", RESET, "stop 10 s", "stop 45 s"]
    faults[1].words = f"process 1, {CUT} 5 to 6"
    assert RESET not in uncovered(Outcome(0, faults=faults), False, ["rank"])
