"""What the transfer of weights takes of a GPU, by number of processes."""

import pytest

from rft.sync import buckets, links
from rft.sync.transfer import (
    BOUND,
    LEAST,
    LL128,
    MEBI,
    MOST,
    RECEIVED,
    SENT,
    SLICE,
    at_rank,
    at_worker,
    channels,
    message_bytes,
    most_bytes,
)

LAYOUTS = {  # trainer ranks, engines, workers of one
    "8B on 8": (4, 4, 1),
    "8B on 64": (32, 32, 1),
    "70B on 64": (32, 4, 8),
    "70B on 512": (256, 32, 8),
    "235B on 64": (32, 4, 8),
    "235B on 512": (256, 32, 8),
    "1T on 4096": (2048, 128, 16),
    "one engine": (16, 1, 8),
    "one large engine": (32, 1, 16),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_process_gives_half_a_gibibyte_at_most(layout: tuple[int, int, int]) -> None:
    size = message_bytes(*layout)
    assert LEAST <= size <= MOST
    assert most_bytes(*layout, size) <= BOUND
    assert size == MOST or most_bytes(*layout, 2 * size) > BOUND, "no smaller than it must be"


def test_what_the_numbers_count_is_what_links_and_checksums_make() -> None:
    assert (SENT, SENT) == (links.BUFFERS, links.SLOTS)
    assert buckets.SLICE == SLICE
    one = at_rank(1, MEBI).bytes({}), at_rank(2, MEBI).bytes({})
    assert one[1] - one[0] > SENT * MEBI
    alone, many = at_worker(4, 1, MEBI), at_worker(4, 2, MEBI)
    assert (alone.links, alone.messages, alone.groups) == (4, 4 * RECEIVED, 0)
    assert (many.links, many.groups) == (2, 1)


def test_what_a_user_tells_nccl_is_counted() -> None:
    here = at_rank(8, MEBI)
    assert LL128 > 4 * MEBI, "not small beside the others"
    larger = here.nccl_bytes({"NCCL_BUFFSIZE": str(8 * MEBI)})
    assert larger - here.nccl_bytes({}) == 8 * channels(8) * 4 * MEBI


def test_many_links_have_one_channel_each() -> None:
    assert [channels(n) for n in (1, 2, 4, 8, 16, 256)] == [4, 4, 2, 1, 1, 1]
