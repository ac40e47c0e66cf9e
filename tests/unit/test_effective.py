"""What `bench.effective` makes of the lines of a run: no second is lost, and none twice."""

from collections import Counter

import pytest

from bench.effective import EACH, FIRST, KINDS, Failure, costs, drawn

STEP_S = 2.0


@pytest.mark.parametrize("seed", range(20))
def test_every_hand_has_every_part_once(seed: int) -> None:
    parts = [one.part for one in drawn(seed, 3)]
    hands = [parts[at : at + len(KINDS)] for at in range(0, len(parts), len(KINDS))]
    assert all(Counter(hand) == Counter(KINDS) for hand in hands) and len(hands) == 3
    assert drawn(seed, 3) == drawn(seed, 3)


def test_seconds_of_a_failure_are_those_of_its_ten_steps() -> None:
    """A rank dies in step 17, one of a clean second in, after 5 s step 16 is told again; then an
    engine, for which step 26 waits 3 s.
    """
    steps, now = [], 100.0
    for step in range(1, FIRST + 4 * EACH + 1):
        now += 3 * STEP_S if step <= FIRST else STEP_S
        if step == 17:
            failure = Failure("rank", 3, 0.5, 0, now - STEP_S + 1)
            now += 5
            steps.append((now - STEP_S, 16))
        if step == 26:
            now += 3
        steps.append((now, step))
    clean, told, effective = costs(steps, [failure, Failure("engine", 2, 0.5, 0, 0.0)])
    assert clean == STEP_S
    assert [(one.part, one.seconds, one.again) for one in told] == [
        ("none", 0.0, 0),
        ("rank", 5.0, 1),
        ("engine", 3.0, 0),
        ("none", 0.0, 0),
    ]
    assert [one.thrown for one in told] == [0, 1.5, 0, 0]
    assert effective == pytest.approx(40 / 48)
