"""What the transfer of weights takes of a GPU, by number of processes."""

import pytest

from rft.config import Config
from rft.sync import links
from rft.sync.transfer import (
    BOUND,
    LEAST,
    LL128,
    MEBI,
    MOST,
    RECEIVED,
    SENT,
    at_rank,
    at_worker,
    channels,
    message_bytes,
    most_bytes,
    told,
)
from rft.tools.fit import weight_transfer

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


def test_what_the_numbers_count_is_what_links_make() -> None:
    assert (SENT, SENT) == (links.BUFFERS, links.SLOTS)
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


def test_a_run_on_cards_tells_it_and_one_on_a_cpu_has_nothing_to_tell() -> None:
    config = Config()
    config.mode, config.device = "both", "cuda"
    config.synchronizer.sync_method, config.trainer.num_ranks = "nccl", 32
    rollout = config.explorer.rollout_model
    rollout.engine_num, rollout.tensor_parallel_size = 4, 8
    said = str(told(config))
    assert "messages of 16 MiB" in said and "(8 links)" in said and "(8 links, a group)" in said
    (fits,) = weight_transfer(config)
    assert (fits.level, fits.said) == ("ok", said)
    config.synchronizer.bucket_bytes = 128 * MEBI
    (found,) = weight_transfer(config)
    assert found.level == "warn" and "synchronizer.bucket_bytes" in found.fix
    config.device = "cpu"
    assert told(config) is None and list(weight_transfer(config)) == []


def test_many_links_have_one_channel_each() -> None:
    assert [channels(n) for n in (1, 2, 4, 8, 16, 256)] == [4, 4, 2, 1, 1, 1]
