"""The encoder of changed bytes: what comes out is what went in, whatever the bits; and nothing that
only looks like a delta writes a byte.
"""

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.ground import delta

WIDTHS = (1, 2, 4, 8)
seeds = st.integers(0, 2**32 - 1)


def apply(made, into, itemsize):
    delta.read(made, memoryview(into).nbytes // itemsize, itemsize).apply(into, 0)


def versions(seed, count, itemsize, density, run):
    """Random bits, and the same with runs of changed elements."""
    random = np.random.default_rng(seed)
    old = np.frombuffer(random.bytes(count * itemsize), np.uint8).view(f"u{itemsize}").copy()
    new = old.copy()
    for at in np.flatnonzero(random.random(count) < density / run):
        part = new[at : at + run]
        part += (random.integers(1, 4, len(part)) * random.choice((1, 2**6))).astype(new.dtype)
    return old, new


@settings(max_examples=150, deadline=None)
@given(
    seeds,
    st.integers(0, 5000),
    st.sampled_from(WIDTHS),
    st.sampled_from((0.0, 0.001, 0.01, 0.035, 0.3, 1.0)),
    st.sampled_from((1, 3, 200)),
)
def test_what_is_applied_is_what_was_new(seed, count, itemsize, density, run):
    old, new = versions(seed, count, itemsize, density, run)
    made = delta.encode(old, new, itemsize)
    if made is None:
        assert new.nbytes < 200 or (old != new).mean() > 0.05
        return
    assert len(made) <= delta.WORTH * new.nbytes
    into = old.copy()
    apply(made, into, itemsize)
    assert into.tobytes() == new.tobytes()


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 40), st.integers(1, 40), st.sampled_from(WIDTHS))
def test_parts_at_both_ends_may_be_cut_anywhere(seed, cut, piece, itemsize):
    old, new = versions(seed, 4000, itemsize, 0.02, 1)
    encoder = delta.Encoder(new.nbytes, itemsize)
    for before, after in zip(np.array_split(old, cut), np.array_split(new, cut), strict=True):
        encoder.add(before.tobytes(), after.tobytes())
    made, into, at = encoder.finish(), old.copy(), 0
    assert made == delta.encode(old, new, itemsize)
    changes = delta.read(made, len(old), itemsize)
    for part in np.array_split(into, piece):
        changes.apply(part, at)
        at += len(part)
    assert into.tobytes() == new.tobytes()


def test_bits_are_no_floats():
    words = np.array([0x7FC0, 0xFFC1, 0x8000, 0x0000, 0x7F80, 0x0001] * 100, np.uint16)
    old = np.zeros(10_000, np.uint16)
    old[1::2] = 0x8000
    new = old.copy()
    new[: len(words)] = words  # of NaN, -0.0, infinity, the smallest
    made = delta.encode(old, new, 2)
    apply(made, old, 2)
    assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("at", [0, 65_535, 65_536, 65_537, 131_072, 399_999])
def test_gaps_of_any_length(at):
    old = np.zeros(400_000, np.uint16)
    new = old.copy()
    new[at] = new[-1] = 7
    made = delta.encode(old, new, 2)
    assert len(made) < 150
    apply(made, old, 2)
    assert old.tobytes() == new.tobytes()


def test_the_ends_of_what_is_scanned_at_a_time():
    elements = 2 * delta.SCAN * delta.WORD // 2 + 3
    old = np.zeros(elements, np.uint16)
    new = old.copy()
    edge = delta.SCAN * delta.WORD // 2
    new[[0, edge - 1, edge, edge + 1, 2 * edge - 1, 2 * edge, elements - 1]] = 9
    apply(delta.encode(old, new, 2), old, 2)
    assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("density", [0.001, 0.01, 0.035])
def test_three_bytes_for_an_element_are_enough(density):
    """Of a bfloat16 that moves to a neighbour, as under a small learning rate; 2 % of them move
    anywhere."""
    random = np.random.default_rng(3)
    old = random.integers(0, 2**16, 2**20, dtype=np.uint16)
    new = old.copy()
    places = np.flatnonzero(random.random(len(old)) < density)
    new[places] += random.choice(np.array([1, 2**16 - 1], np.uint16), len(places))
    new[places[::50]] = random.integers(0, 2**16, len(places[::50]), dtype=np.uint16)
    made = delta.encode(old, new, 2)
    assert len(made) <= 2 * len(places)
    assert len(made) <= 2.5 * density * new.nbytes


@pytest.mark.parametrize("itemsize", WIDTHS)
def test_all_changed_is_not_worth_it_and_nothing_is(itemsize):
    old = np.random.default_rng(0).integers(0, 2**8, 100_000, np.uint8).view(f"u{itemsize}")
    new = ~old
    assert delta.encode(old, new, itemsize) is None
    encoder = delta.Encoder(new.nbytes, itemsize, densest=0.1)
    encoder.add(old, new)
    assert encoder.is_dense and encoder.finish() is None
    assert len(delta.encode(old, old, itemsize)) < 60
    assert delta.encode(b"", b"", itemsize) is None


@settings(max_examples=400, deadline=None)
@given(st.data(), seeds, st.sampled_from(WIDTHS))
def test_a_damaged_delta_is_refused_or_stays_within(data, seed, itemsize):
    old, new = versions(seed, 3000, itemsize, 0.02, 1)
    made = bytearray(delta.encode(old, new, itemsize))
    kind = data.draw(st.sampled_from(("flip", "cut", "more", "sizes", "any")))
    if kind == "flip":
        for at in data.draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=8)):
            made[at] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        del made[data.draw(st.integers(0, len(made) - 1)) :]
    elif kind == "more":
        made += data.draw(st.binary(min_size=1, max_size=50))
    elif kind == "sizes":
        at = data.draw(st.integers(0, delta.HEAD.size + 4 * (2 + itemsize) - 4))
        made[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, 2**32 - 1)))
    else:
        made = bytearray(data.draw(st.binary(max_size=200)))
    room = np.full(3000 + 256, 0xA5, old.dtype)  # with a margin on both sides
    into = room[128:-128]
    into[:] = old
    try:
        apply(bytes(made), into, itemsize)
    except ValueError:
        assert into.tobytes() == old.tobytes()
    assert (room[:128] == 0xA5).all() and (room[-128:] == 0xA5).all()


def hostile(planes, total=1000, told=10):
    sizes = b"".join(struct.pack("<I", len(plane)) for plane in planes)
    return delta.HEAD.pack(total, told, 2) + sizes + b"".join(planes)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (b"", "cannot be"),
        (hostile([b""] * 4, told=1001), "is none of"),
        (hostile([b""] * 4, total=2**62), "is none of"),
        (hostile([b"\xff" * 10, b"", b"", b""]), "reaches to"),
        (hostile([bytes([1000 % 256]), bytes([1000 // 256]), b"", b""], told=1), "element 1000 of"),
        (hostile([b"\x00" * 9, b"", b"", b""]), "cannot be read|has not"),
        (hostile([zstandard.compress(bytes(2**24)), b"", b"", b""]), "has not 10 bytes"),
        (hostile([b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8, b"", b"", b""]), "has not|cannot be read"),
        (hostile([zstandard.compress(bytes(10)) + b"x", b"", b"", b""]), "cannot be read"),
    ],
    ids=lambda _: "",
)
def test_hostile_bytes_are_refused_by_name(made, why):
    into = np.zeros(1000, np.uint16)
    with pytest.raises(ValueError, match=why):
        apply(made, into, 2)
    assert not into.any()


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="no elements of 2"):
        delta.encode(b"123", b"123", 2)
    with pytest.raises(ValueError, match="became"):
        delta.encode(b"1234", b"12", 2)
    with pytest.raises(ValueError, match="no element has 3"):
        delta.encode(b"123", b"123", 3)
    with pytest.raises(ValueError, match="of 4 elements were given"):
        delta.Encoder(8, 2).finish()
