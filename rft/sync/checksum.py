"""What tells that bytes arrived as they were sent: 128 bits per bucket, seeded with the round that
the bucket belongs to.

Host memory: xxh3-128. Device memory: a mixing reduction in torch's integers, so that no byte has to
leave the device; two sums of the words, each word multiplied by an odd number that depends on its
place and mixed (the finaliser of splitmix64, Steele et al. 2014). Both ends of a stream use the
same one: which, follows from where the weights lie. The seed names plan, version, stream and
bucket: bytes of another round are wrong bytes.
"""

import torch
import xxhash

SIZE = 16  # bytes
ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # of two lanes


def seed_of(digest: str, version: int, stream: int, bucket: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{digest}/{version}/{stream}/{bucket}".encode())


def host(seed: int) -> "xxhash.xxh3_128":
    """To be fed with `update`, piece by piece; `digest()` gives the bytes."""
    return xxhash.xxh3_128(seed=seed)


def device(data: torch.Tensor, seed: int) -> bytes:
    """Of a contiguous uint8 tensor on any device, whose length 8 divides.

    Reads 16 bytes back to the host.
    """
    words = data.view(torch.int64)
    places = torch.arange(1, len(words) + 1, dtype=torch.int64, device=data.device)
    lanes = [_mixed(words + places * _signed(odd) + _signed(seed ^ odd)).sum() for odd in ODD]
    return torch.stack(lanes).cpu().numpy().tobytes()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, zeros coming in: torch's own shift of signed numbers repeats the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number
