"""`trainer_engine=bitwise`, the trainer's half: a token's log-probability has the same bits in
whatever company it is computed. `tests/e2e/test_bitwise_engine.py` has the engine's half, and both.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from rft.megatron import bitwise
from rft.megatron.elementwise import gated, root_mean_square
from rft.tools.toy import write_model

from ranks import Ranks

WIDTHS = (48, 64, 250)  # numbers of a row, not all of them a multiple of what a processor takes
COUNTS = [*range(1, 40), 63, 64, 65, 100, 127, 128, 200]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(width: int) -> None:
    drawn = torch.Generator().manual_seed(width)
    x, both = (torch.randn(200, n, generator=drawn) for n in (width, 2 * width))
    weight = torch.randn(101, width, generator=drawn) * 0.3
    labels = torch.randint(0, 101, (200,), generator=drawn)
    heat = torch.full((200,), 0.7)
    functions = {
        "norm": lambda n: root_mean_square(x[:n], weight[0], 1e-6),
        "gate": lambda n: gated(both[:n]),
        "product": lambda n: bitwise.product(x[:n], weight, weight[:, 0]),
        "log-softmax": lambda n: bitwise.product(x[:n], weight).log_softmax(-1),
        "label": lambda n: bitwise.label_logprobs(x[:n], weight, labels[:n], heat[:n]),
    }
    differ = {
        name: found
        for name, function in functions.items()
        if (found := [n for n in COUNTS if not torch.equal(function(n), function(200)[:n])])
    }
    assert not differ


@pytest.mark.parametrize(("heads", "groups", "size"), [(6, 2, 32), (8, 2, 64), (4, 4, 128)])
def test_a_query_attends_with_the_same_bits_alone_in_chunks_and_beside_others(
    heads: int, groups: int, size: int
) -> None:
    drawn = torch.Generator().manual_seed(heads)
    n, scale = 150, size**-0.5
    query = torch.randn(1, heads, n, size, generator=drawn)
    key, value = (torch.randn(1, groups, n, size, generator=drawn) for _ in range(2))
    hidden = torch.ones(1, n, n, dtype=torch.bool).triu(1)
    whole = bitwise.attend(query, key, value, hidden, scale)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(whole, plain, atol=2e-6, rtol=1e-5)
    for first, last in [(0, 1), (5, 6), (63, 64), (64, 65), (149, 150), (40, 90), (0, 17)]:
        # three of them side by side, over longer memory in which others' keys stand
        keys, values = (
            torch.cat([one[:, :, :last], torch.randn(1, groups, 37, size)], 2).expand(3, -1, -1, -1)
            for one in (key, value)
        )
        unseen = torch.cat([hidden[:, first:last, :last], hidden.new_ones(1, last - first, 37)], 2)
        some = query[:, :, first:last].expand(3, -1, -1, -1)
        found = bitwise.attend(some, keys, values, unseen, scale)
        assert all(torch.equal(one, whole[0, :, first:last]) for one in found), (first, last)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_whatever_they_are_packed_with_and_behind_shared_prefixes(
    ranks: Ranks, tmp_path: Path, family: str
) -> None:
    path = write_model(tmp_path / family, family, hidden=96, layers=2, heads=3, kv_heads=1, ffn=128)
    (found,) = ranks.run("bitwise_jobs:packings", 1, path=str(path))
    for name, rows in found.items():
        for row, alone in zip(rows, found["alone"], strict=True):
            assert np.array_equal(row.view(np.int32), alone.view(np.int32)), name


def test_the_gradient_is_that_of_any_run(ranks: Ranks, checkpoints: dict[str, Path]) -> None:
    exact, usual = (
        ranks.run("bitwise_jobs:moments", 1, path=str(checkpoints["qwen2"]), bitwise=on)[0]
        for on in (True, False)
    )
    for one, other in zip(exact, usual, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max(), rtol=1e-4)
