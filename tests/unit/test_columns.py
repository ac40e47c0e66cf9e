"""Columns: what goes over the wire comes back, whatever it is; lists and older records are taken;
what is no column is refused.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.buffer.delivery import facts_of
from rft.buffer.experience_file import _decoder, _encoder
from rft.ground import columns
from rft.ground.columns import LONGEST, Flags, Ids, LogProbs, TokenRewards, column
from rft.ground.experience import Experience, VersionSpan, decode, encode

FLOATS = st.floats(-(2.0**99), 0, width=32)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    prompt = draw(st.integers(1, 5))
    response = draw(st.integers(0, 300))

    def listed(of: st.SearchStrategy[Any], size: int) -> list[Any]:
        return draw(st.lists(of, min_size=size, max_size=size))

    found = Experience(
        tokens=listed(st.integers(0, 2**31 - 1), prompt + response),
        prompt_length=prompt,
        action_mask=listed(st.integers(0, 1), response),
        logprobs=listed(FLOATS, response) if draw(st.booleans()) else [],
        token_rewards=listed(st.floats(-1e6, 1e6), response) if draw(st.booleans()) else [],
        versions=[VersionSpan(version=3, start=0, end=response)],
        reward=draw(st.floats(-1e6, 1e6)),
    )
    found.as_columns()
    return found


@settings(deadline=None)
@given(experiences())
def test_an_experience_comes_back_as_it_was(given: Experience) -> None:
    for again in (
        decode(encode(given), Experience),
        _decoder.decode(_encoder.encode(given)),
        decode(encode(as_lists(given)), Experience),
    ):
        assert again == given
        assert [again.tokens.dtype, again.action_mask.dtype] == [np.int32, np.bool_]
        assert [again.logprobs.dtype, again.token_rewards.dtype] == [np.float32, np.float64]
        again.logprobs[:] = 0  # the reader's own


def as_lists(given: Experience) -> Experience:
    """As a user's own code gives it."""
    return msgspec.structs.replace(
        given, **{name: getattr(given, name).tolist() for name in ("tokens", "action_mask")}
    )


def test_a_record_of_an_older_rft_is_read() -> None:
    """Lists of numbers, as journals of the first round hold them."""
    old = msgspec.msgpack.encode(
        [
            {
                "tokens": [5, 6, 70_000],
                "prompt_length": 1,
                "action_mask": [1, 0],
                "logprobs": [-0.5, 0.0],
                "token_rewards": [0.1, 2.0],
                "versions": [{"version": 2, "start": 0, "end": 2}],
                "reward": 1.0,
            }
        ]
    )
    (found,) = decode(old, list[Experience])
    assert found.tokens.tolist() == [5, 6, 70_000] and found.action_mask.tolist() == [True, False]
    assert found.logprobs.tolist() == [-0.5, 0.0] and found.token_rewards.tolist() == [0.1, 2.0]
    assert facts_of(old)[0].versions == facts_of(encode([found]))[0].versions


def test_a_column_takes_its_own_bytes() -> None:
    """Ids and log-probabilities four, a mask its runs: no more than a few bytes beside them."""
    made = Experience(
        tokens=np.arange(4096, dtype=np.int32),
        prompt_length=96,
        action_mask=np.ones(4000, dtype=bool),
        logprobs=np.zeros(4000, dtype=np.float32),
    )
    assert len(encode(made)) < 4 * 4096 + 4 * 4000 + 120


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        (Ids, [1.5], "float64 instead"),
        (Ids, [2**31], "not from"),
        (Ids, ["a"], "instead of numbers"),
        (Ids, [[1], [2]], "2 dimensions"),
        (Ids, [True], "bool instead"),
        (Flags, [0, 2], "not from 0 to 1"),
        (Flags, [0.5], "float64 instead"),
        (LogProbs, [None], "object instead"),
        (TokenRewards, "abc", "0 dimensions"),
    ],
)
def test_what_is_no_column_is_refused(kind: Any, values: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        column(kind, values)


@pytest.mark.parametrize("field", ["tokens", "logprobs", "action_mask"])
def test_bytes_that_are_no_column_are_refused(field: str) -> None:
    good = {"tokens": [1, 2], "prompt_length": 1, "action_mask": [1], "logprobs": [-1.0]}
    for bad in (b"\x01\x02\x03", [[1]], {"a": 1}, "text", None):
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode({**good, field: bad}), Experience)


@pytest.mark.parametrize("runs", [[LONGEST, 1], [-1, 2], [2**31 - 1] * 4])
def test_a_few_bytes_cannot_ask_for_all_memory(runs: list[int]) -> None:
    with pytest.raises(ValueError, match="runs"):
        columns.unpacked(Flags, np.array(runs, dtype=np.int32).tobytes())


def test_a_record_that_differs_in_one_token_is_another() -> None:
    one = Experience(
        tokens=np.array([1, 2], np.int32), prompt_length=1, action_mask=np.ones(1, bool)
    )
    assert one == msgspec.structs.replace(one)
    assert one != msgspec.structs.replace(one, tokens=np.array([1, 3], np.int32))


def test_arrays_of_another_dtype_become_columns_and_are_never_sent_as_they_are() -> None:
    def made(**other: Any) -> Experience:
        given = {"tokens": [1, 2], "action_mask": [1], "logprobs": [-0.5]} | other
        return Experience(prompt_length=1, **given)

    wide = made(tokens=np.array([1, 2]), action_mask=np.array([1]), logprobs=np.array([-0.5]))
    assert wide.as_columns() == ["tokens", "action_mask", "logprobs"] and wide.as_columns() == []
    plain = made()
    plain.as_columns()
    assert decode(encode(wide), Experience) == plain
    with pytest.raises(TypeError, match="no column of int64"):
        encode(made(tokens=np.array([1, 2])))
