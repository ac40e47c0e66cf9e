"""The budget of restarts."""

from pathlib import Path

from rft.run.restarts import HOUR_S, Restarts


def test_so_many_within_any_hour_and_the_first_cause_is_told() -> None:
    now = [0.0]
    restarts = Restarts(2, lambda: now[0])
    assert restarts.allow("a full disk")
    now[0] = HOUR_S / 2
    assert restarts.allow("no buffer")
    now[0] = HOUR_S  # the first is an hour ago
    assert restarts.allow("no buffer")
    assert not restarts.allow("no engine")
    assert restarts.cause() == (
        "it died 3 times within an hour; the first cause: no buffer; the last: no engine"
    )


def test_a_budget_of_none_tells_the_cause_alone() -> None:
    restarts = Restarts(0)
    assert not restarts.allow("killed by SIGKILL")
    assert restarts.cause() == "killed by SIGKILL"


def test_processes_that_follow_each_other_count_on(tmp_path: Path) -> None:
    now = [0.0]

    def next_one() -> Restarts:
        return Restarts(2, lambda: now[0], tmp_path / "deaths.json")

    assert next_one().allow("a full disk")
    now[0] = HOUR_S / 2
    assert next_one().allow("no engine")
    assert not (last := next_one()).allow("no buffer")
    assert last.first == "a full disk"
    now[0] = HOUR_S
    assert not next_one().allow("no buffer")
    now[0] = 2 * HOUR_S
    assert next_one().allow("no buffer")
