"""`rft.sync.mixing` beside torch's operations, in a process whose environment says
TRITON_INTERPRET=1 (tests/unit/test_packed_link.py).
"""

import torch

from rft.sync import buckets

SIZES = (8, 4096, 2 * buckets.SLICE + 8)  # bytes
SEEDS = (1, 2**63 + 17, buckets.ODD[0])


def main() -> None:
    host = torch.device("cpu")
    slices, kernel = buckets.Checksum(host), buckets.Checksum(host)
    slices.make()
    buckets.has_kernel = lambda device: True
    kernel.make()
    made = torch.Generator().manual_seed(1)
    for size in SIZES:
        data = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=made)
        for seed in SEEDS:
            told = kernel.of(data, seed)
            assert told == slices.of(data, seed), (size, seed)
            data[size // 2] ^= 1
            assert kernel.of(data, seed) != told, (size, seed)


if __name__ == "__main__":
    main()
