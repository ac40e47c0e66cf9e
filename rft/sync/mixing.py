"""The checksum of device memory (`rft.sync.buckets.Checksum`) as one kernel of Triton's.

In: words of a card, int64. Out: what they add to two sums, there. Invariant: the same sums as
torch's operations give, whatever the order in which blocks are done: addition of whole numbers that
wrap has none. One pass over the memory; torch's operations take twenty, of slices that must stay
small, and a thousand launches for a bucket of 256 MiB (H200: 8.5 ms).

Loaded on a card alone, for Triton is not everywhere else.
"""

import torch
import triton
import triton.language as tl

WORDS = 2048  # that a program takes at a time
PROGRAMS = 1024  # a few for every multiprocessor of any card


@triton.jit
def _mix(
    words,
    factor_0: tl.constexpr,
    factor_1: tl.constexpr,
    shift_0: tl.constexpr,
    shift_1: tl.constexpr,
    shift_2: tl.constexpr,
):
    words = (words ^ (words >> shift_0)) * factor_0
    words = (words ^ (words >> shift_1)) * factor_1
    return words ^ (words >> shift_2)


@triton.jit(do_not_specialize=["count", "first", "second"])
def _kernel(
    words,
    sums,
    count,
    first,
    second,
    odd_0: tl.constexpr,
    odd_1: tl.constexpr,
    factor_0: tl.constexpr,
    factor_1: tl.constexpr,
    shift_0: tl.constexpr,
    shift_1: tl.constexpr,
    shift_2: tl.constexpr,
    size: tl.constexpr,
):
    lanes = tl.arange(0, size)
    sum_0 = tl.zeros((size,), tl.uint64)
    sum_1 = tl.zeros((size,), tl.uint64)
    for start in range(tl.program_id(0) * size, count, tl.num_programs(0) * size):
        at = start + lanes
        inside = at < count
        word = tl.load(words + at, mask=inside, other=0).to(tl.uint64)
        place = (at + 1).to(tl.uint64)
        one = word + place * odd_0 + first.to(tl.uint64)
        two = word + place * odd_1 + second.to(tl.uint64)
        one = _mix(one, factor_0, factor_1, shift_0, shift_1, shift_2)
        two = _mix(two, factor_0, factor_1, shift_0, shift_1, shift_2)
        sum_0 += tl.where(inside, one, 0)
        sum_1 += tl.where(inside, two, 0)
    tl.atomic_add(sums, tl.sum(sum_0, 0).to(tl.int64))
    tl.atomic_add(sums + 1, tl.sum(sum_1, 0).to(tl.int64))


def add(
    words: torch.Tensor,
    sums: torch.Tensor,
    seeds: tuple[int, int],
    odd: tuple[int, int],
    mixing: tuple[tuple[int, int], ...],
) -> None:
    """To `sums`, int64 [2], on this thread's stream; `seeds` are signed, of 64 bits."""
    (shift_0, factor_0), (shift_1, factor_1), (shift_2, _) = mixing
    _kernel[(min(PROGRAMS, triton.cdiv(len(words), WORDS)),)](
        words, sums, len(words), *seeds, *odd, factor_0, factor_1, shift_0, shift_1, shift_2, WORDS
    )
