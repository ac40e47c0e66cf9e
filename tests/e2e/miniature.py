"""A trainer in miniature, and the judge of what an engine samples: shared by the tests of one
engine.

Two threads stand for two tensor-parallel trainer ranks; each serves its row and column blocks,
exactly as a Megatron rank does. Transformers on the same weights is the judge of every
log-probability.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file

from rft.config import SynchronizerConfig
from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.ground.protocols import ActorHandle, Block
from rft.ground.rounds import Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.origins import StreamOrigin
from rft.sync.publisher import Publisher

END = 1  # the toy tokenizer's end token
PROMPT = [10, 23, 42, 31, 17, 8]
TOLERANCE = 1e-4  # of one float32 log-probability, vLLM against transformers
BUCKET_BYTES = 64 * 1024  # small: many buckets, and the embedding is cut over several
COLUMN_PARALLEL = ("o_proj", "down_proj")
REPLICATED = ("norm",)
ids = itertools.count()
epochs = itertools.count(1)


# --- the trainer's side, in miniature -------------------------------------------------------------


class Shards:
    """WeightSource of tensor-parallel rank `rank` of 2: half of the rows or columns; rank 0 also
    owns what is replicated.
    """

    def __init__(self, path: Path, rank: int):
        self.parts = [
            part
            for name, tensor in sorted(load_file(path / "model.safetensors").items())
            if (part := self._cut(name, tensor, rank))
        ]

    def _cut(self, name: str, tensor: torch.Tensor, rank: int) -> tuple[Block, torch.Tensor] | None:
        whole = any(part in name for part in REPLICATED)
        if whole and rank:
            return None
        dim = int(any(part in name for part in COLUMN_PARALLEL))
        half = tensor.shape[dim] // 2
        start, stop = (
            (0, tensor.shape[0])
            if whole
            else ((0, half) if rank == 0 else (half, tensor.shape[dim]))
        )
        block = Block(
            name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), dim, start, stop
        )
        return block, tensor.narrow(dim, start, stop - start).contiguous()

    def blocks(self) -> list[Block]:
        return [block for block, _ in self.parts]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return (tensor for _, tensor in self.parts)


class ThreadMesh:
    """Collectives among threads of this process."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier):
        self.rank, self.world, self.slots, self._barrier = rank, len(slots), slots, barrier

    def gather(self, item: Any) -> list[Any] | None:
        self.slots[self.rank] = item
        self._barrier.wait(60)
        items = list(self.slots)
        self._barrier.wait(60)
        return items if self.rank == 0 else None

    def broadcast(self, item: Any) -> Any:
        if self.rank == 0:
            self.slots[0] = item
        self._barrier.wait(60)
        item = self.slots[0]
        self._barrier.wait(60)
        return item

    def barrier(self, name: str) -> None:
        self._barrier.wait(60)


class Trainer:
    """Two trainer ranks with the weights of `path`."""

    def __init__(self, synchronizer: Any, path: Path):
        slots, barrier = [None, None], threading.Barrier(2)
        config = SynchronizerConfig(sync_timeout=30.0, bucket_bytes=BUCKET_BYTES)
        epoch = next(epochs)
        self.publishers = [
            Publisher(
                StreamOrigin(
                    ThreadMesh(rank, slots, barrier),
                    Shards(path, rank),
                    ActorHandle(synchronizer) if rank == 0 else None,
                    config,
                    epoch,
                )
            )
            for rank in range(2)
        ]

    def everywhere(self, act: Callable[[Publisher], Any]) -> list[Any]:
        """`act` on both ranks at once; raises what the lowest failing rank raised."""
        with ThreadPoolExecutor(2) as pool:
            return [
                job.result()
                for job in [pool.submit(act, publisher) for publisher in self.publishers]
            ]

    def connect(self) -> "Trainer":
        self.everywhere(lambda publisher: publisher.connect())
        return self

    def info(self) -> TrainerInfo:
        """As the synchronizer tells an engine."""
        streams = [publisher.origin.sender.endpoint for publisher in self.publishers]
        plan = plans.encode(self.publishers[0].origin.plan)
        epoch = self.publishers[0].origin.epoch
        return TrainerInfo(epoch=epoch, timeout=30.0, plan=plan, streams=streams, engine="engine_0")

    def round(self, version: int, direct: bool = False) -> Round:
        origin = self.publishers[0].origin
        return Round(
            version=version, epoch=origin.epoch, digest=origin.digest, timeout=30.0, direct=direct
        )

    def start(self, version: int) -> None:
        self.everywhere(lambda publisher: publisher.start(version))

    def start_offered(self, version: int) -> None:
        """The weights are `version` now; nobody has to take it."""
        self.everywhere(lambda publisher: publisher.start(version, due=False))

    def wait(self) -> dict[str, float]:
        """The numbers of the round."""
        self.everywhere(lambda publisher: publisher.release())
        return self.publishers[0].last


# --- the judge ------------------------------------------------------------------------------------


def ask(engine: Any, n: int = 1, prompt: list[int] = PROMPT, **sampling: Any) -> Any:
    request = GenerateRequest(
        request_id=f"r{next(ids)}", prompt=prompt, n=n, sampling=Sampling(**sampling)
    )
    return engine.generate.remote(encode(request))


def answer(reference: Any) -> list[Completion]:
    return decode(ray.get(reference, timeout=120), list[Completion])


@functools.cache
def judge(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def reference_logprobs(
    path: Path, prompt: list[int], response: list[int], temperature: float, min_tokens: int = 0
) -> torch.Tensor:
    """Transformers' log-probability of each response token; the first
    `min_tokens` cannot be the end token.
    """
    response = list(map(int, response))
    with torch.no_grad():
        logits = judge(path)(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logits[:min_tokens, END] = -torch.inf
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def assert_sampled_from(
    path: Path,
    made: Completion,
    temperature: float,
    start: int = 0,
    stop: int | None = None,
    min_tokens: int = 0,
) -> None:
    expected = reference_logprobs(path, PROMPT, made.tokens, temperature, min_tokens)[start:stop]
    assert len(made.tokens) == len(made.logprobs) and len(expected) > 0
    difference = (torch.tensor(made.logprobs)[start:stop] - expected).abs().max()
    assert difference < TOLERANCE, (
        f"tokens [{start}, {stop}): log-probabilities differ by {difference}"
    )
