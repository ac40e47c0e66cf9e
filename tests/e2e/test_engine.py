"""A real vLLM engine on CPU: what it samples, and how new weights reach it while it decodes.

Two threads stand for two tensor-parallel trainer ranks; each sends its row and column blocks over gloo, exactly as a
Megatron rank does. Transformers on the same weights is the judge of every log-probability.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from rft.config import SynchronizerConfig
from rft.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.protocols import Block
from rft.sync.publisher import Publisher
from rft.sync.synchronizer import Synchronizer

END = 1  # the toy tokenizer's end token
PROMPT = [10, 23, 42, 31, 17, 8]
TOLERANCE = 1e-4  # of one float32 log-probability, vLLM against transformers
BUCKET_BYTES = 64 * 1024  # small: many buckets, and the embedding is cut over several
COLUMN_PARALLEL = ("o_proj", "down_proj")
REPLICATED = ("norm",)
ids = itertools.count()
epochs = itertools.count(1)


# --- the trainer's side, in miniature --------------------------------------------------------------------------------


class Shards:
    """WeightSource of tensor-parallel rank `rank` of 2: half of the rows or columns; rank 0 also owns what is replicated."""

    def __init__(self, path: Path, rank: int):
        self.parts = [part for name, tensor in sorted(load_file(path / "model.safetensors").items())
                      if (part := self._cut(name, tensor, rank))]  # fmt: skip

    def _cut(self, name: str, tensor: torch.Tensor, rank: int) -> tuple[Block, torch.Tensor] | None:
        whole = any(part in name for part in REPLICATED)
        if whole and rank:
            return None
        dim = int(any(part in name for part in COLUMN_PARALLEL))
        half = tensor.shape[dim] // 2
        start, stop = (0, tensor.shape[0]) if whole else ((0, half) if rank == 0 else (half, tensor.shape[dim]))
        block = Block(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), dim, start, stop)
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
                ThreadMesh(rank, slots, barrier), Shards(path, rank), synchronizer if rank == 0 else None, config, epoch
            )
            for rank in range(2)
        ]

    def everywhere(self, act: Callable[[Publisher], Any]) -> list[Any]:
        """`act` on both ranks at once; raises what the lowest failing rank raised."""
        with ThreadPoolExecutor(2) as pool:
            return [job.result() for job in [pool.submit(act, publisher) for publisher in self.publishers]]

    def connect(self) -> "Trainer":
        self.everywhere(lambda publisher: publisher.connect())
        return self

    def start(self, version: int) -> None:
        self.everywhere(lambda publisher: publisher.start(version))

    def wait(self) -> dict[str, float]:
        return self.everywhere(lambda publisher: publisher.wait())[0]


@pytest.fixture(scope="module")
def buffer(ray_session: None) -> Any:
    """The part of the experience buffer that the synchronizer talks to."""

    class Buffer:  # local: travels by value, Ray's workers cannot import test modules
        def __init__(self) -> None:
            self.versions: list[int] = []

        async def published(self, version: int, run_epoch: int) -> None:
            self.versions.append(version)

        async def seen(self) -> list[int]:
            return self.versions

    return ray.remote(Buffer).remote()


@pytest.fixture(scope="module")
def synchronizer(engine: Any, buffer: Any) -> Any:
    return ray.remote(Synchronizer).options(max_concurrency=100).remote({"engine_0": engine}, buffer, 30.0)


@pytest.fixture
def first_weights(engine: Any, model_dirs: tuple[Path, Path]) -> Any:
    """The engine serves the first model as version 0, whatever an earlier test left."""
    ray.get(engine.load_weights_from.remote(str(model_dirs[0]), 0), timeout=60)
    return engine


# --- the judge -------------------------------------------------------------------------------------------------------


def ask(engine: Any, n: int = 1, prompt: list[int] = PROMPT, **sampling: Any) -> Any:
    request = GenerateRequest(request_id=f"r{next(ids)}", prompt=prompt, n=n, sampling=Sampling(**sampling))
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
    """Transformers' log-probability of each response token; the first `min_tokens` cannot be the end token."""
    with torch.no_grad():
        logits = judge(path)(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logits[:min_tokens, END] = -torch.inf
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0]


def assert_sampled_from(
    path: Path, made: Completion, temperature: float, start: int = 0, stop: int | None = None, min_tokens: int = 0
) -> None:
    expected = reference_logprobs(path, PROMPT, made.tokens, temperature, min_tokens)[start:stop]
    assert len(made.tokens) == len(made.logprobs) and len(expected) > 0
    difference = (torch.tensor(made.logprobs)[start:stop] - expected).abs().max()
    assert difference < TOLERANCE, f"tokens [{start}, {stop}): log-probabilities differ by {difference}"


# --- sampling --------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_distribution_sampled_from(first_weights: Any, model_dirs: tuple[Path, Path]) -> None:
    for made in answer(ask(first_weights, n=4, temperature=0.7, max_tokens=40, min_tokens=5, seed=3)):
        assert made.stop in ("stop", "length")
        assert_sampled_from(model_dirs[0], made, 0.7, min_tokens=5)


def test_top_k_logprobs_are_renormalised(first_weights: Any, model_dirs: tuple[Path, Path]) -> None:
    one = answer(ask(first_weights, top_k=1, max_tokens=20, seed=3))[0]
    assert one.logprobs == pytest.approx([0.0] * len(one.tokens), abs=1e-6)
    two = answer(ask(first_weights, top_k=2, max_tokens=200, seed=3))[0]
    full = reference_logprobs(model_dirs[0], PROMPT, two.tokens, 1.0)
    assert all(torch.tensor(two.logprobs) > full + 0.1)


def test_greedy_takes_the_most_likely_token(first_weights: Any, model_dirs: tuple[Path, Path]) -> None:
    made = answer(ask(first_weights, temperature=0.0, max_tokens=20))[0]
    with torch.no_grad():
        logits = judge(model_dirs[0])(torch.tensor([PROMPT + made.tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert made.tokens == logits.argmax(-1).tolist()
    assert_sampled_from(model_dirs[0], made, 1.0)


def test_samples_differ_and_a_seed_repeats_them(first_weights: Any) -> None:
    once = [made.tokens for made in answer(ask(first_weights, n=4, max_tokens=30, seed=11))]
    again = [made.tokens for made in answer(ask(first_weights, n=4, max_tokens=30, seed=11))]
    neighbour = [made.tokens for made in answer(ask(first_weights, n=4, max_tokens=30, seed=12))]
    assert once == again
    assert len({tuple(tokens) for tokens in once + neighbour}) == 8


def test_a_response_ends_at_the_end_token(first_weights: Any) -> None:
    made = answer(ask(first_weights, n=16, max_tokens=500, seed=5))
    stopped = [one for one in made if one.stop == "stop"]
    assert stopped, "of 16 responses of a random model some meet the end token"
    assert all(one.tokens[-1] == END and END not in one.tokens[:-1] for one in stopped)


def test_a_prompt_without_room_is_not_asked(engine: Any) -> None:
    made = answer(ask(engine, n=2, prompt=[9] * 1024))
    assert [one.stop for one in made] == ["prompt_too_long"] * 2 and made[0].tokens == []
    last = answer(ask(engine, prompt=[9] * 1023, max_tokens=8))[0]
    assert len(last.tokens) == 1


def test_abort_returns_what_there_is(first_weights: Any) -> None:
    request = GenerateRequest(
        request_id="doomed", prompt=PROMPT, n=2, sampling=Sampling(max_tokens=900, min_tokens=900)
    )
    running = first_weights.generate.remote(encode(request))
    answer(ask(first_weights, max_tokens=5))  # meanwhile the other one has begun
    ray.get(first_weights.abort.remote("doomed"))
    made = answer(running)
    assert [one.stop for one in made] == ["abort", "abort"] and 0 < len(made[0].tokens) < 900


# --- new weights -----------------------------------------------------------------------------------------------------


def test_weights_arrive_while_responses_are_being_made(
    first_weights: Any, synchronizer: Any, buffer: Any, model_dirs: tuple[Path, Path]
) -> None:
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    running = [ask(first_weights, n=4, temperature=0.7, max_tokens=900, min_tokens=900, seed=seed) for seed in range(2)]
    answer(ask(first_weights, max_tokens=20, min_tokens=20))  # when it is done, the long ones have as many tokens
    trainer.start(1)
    numbers = trainer.wait()
    assert ray.get(synchronizer.version.remote()) == 1 and ray.get(first_weights.weight_version.remote()) == 1
    assert ray.get(buffer.seen.remote())[-1] == 1 and numbers["sync/engines"] == 1
    for made in [one for reference in running for one in answer(reference)]:
        assert [span.version for span in made.versions] == [0, 1]
        assert made.versions[0].start == 0 and made.versions[0].end == made.versions[1].start
        assert made.versions[1].end == len(made.tokens) == 900
        split = made.versions[1].start
        assert_sampled_from(model_dirs[0], made, 0.7, stop=split, min_tokens=900)
        assert_sampled_from(model_dirs[1], made, 0.7, start=split, min_tokens=900)


def test_no_token_comes_from_cached_keys_of_old_weights(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    prompt = [10 + i % 80 for i in range(400)]  # several cache blocks
    answer(ask(first_weights, prompt=prompt, max_tokens=5))
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    trainer.start(1)
    trainer.wait()
    made = answer(ask(first_weights, prompt=prompt, max_tokens=20, seed=1))[0]
    expected = reference_logprobs(model_dirs[1], prompt, made.tokens, 1.0)
    assert (torch.tensor(made.logprobs) - expected).abs().max() < TOLERANCE
    assert {span.version for span in made.versions} == {1}


def test_corrupted_bytes_are_refused_and_the_old_weights_serve_on(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    links = trainer.publishers[1]._sender._links  # type: ignore[union-attr]
    links["engine_0/0"] = Corrupting(links["engine_0/0"], bucket=3)
    trainer.start(5)
    with pytest.raises(RuntimeError, match=r"checksum of bucket 3 of stream 1 \(model\."):
        trainer.wait()
    assert ray.get(first_weights.weight_version.remote()) == 0
    made = answer(ask(first_weights, max_tokens=20, seed=1))[0]
    assert {span.version for span in made.versions} == {0}
    assert_sampled_from(model_dirs[0], made, 1.0)
    with pytest.raises(RuntimeError, match="connect anew"):
        ray.get(synchronizer.publish.remote(5))
    again = Trainer(synchronizer, model_dirs[1]).connect()
    again.start(5)
    again.wait()
    assert_sampled_from(model_dirs[1], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)


class Corrupting:
    """A link that flips one bit of one bucket."""

    def __init__(self, link: Any, bucket: int):
        self.link, self.left = link, bucket

    def send(self, data: torch.Tensor) -> Any:
        self.left -= 1
        if self.left == -1:
            data = data.clone()
            data[17] ^= 1
            self.kept = data
        return self.link.send(data)

    def close(self) -> None:
        self.link.close()


def test_a_round_of_another_plan_is_refused(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    trainer = Trainer(synchronizer, model_dirs[1]).connect()
    epoch = trainer.publishers[0].epoch
    with pytest.raises(RuntimeError, match="round follows plan 0000, this engine was connected with"):
        ray.get(first_weights.update_weights.remote(7, {"digest": "0000", "epoch": epoch}))
    assert_sampled_from(model_dirs[0], answer(ask(first_weights, max_tokens=20, seed=1))[0], 1.0)


def test_an_older_epoch_cannot_connect(synchronizer: Any, model_dirs: tuple[Path, Path]) -> None:
    old, new = Trainer(synchronizer, model_dirs[0]), Trainer(synchronizer, model_dirs[1])
    new.connect()
    with pytest.raises(ValueError, match="cannot connect"):
        ray.get(synchronizer.connect.remote({}, [], old.publishers[0].epoch))
    with pytest.raises(ValueError, match="comes from epoch"):
        ray.get(synchronizer.publish.remote(3, old.publishers[0].epoch))


def test_versions_may_go_back_after_a_resume(
    first_weights: Any, synchronizer: Any, model_dirs: tuple[Path, Path]
) -> None:
    for version in (9, 4):
        trainer = Trainer(synchronizer, model_dirs[1]).connect()
        trainer.start(version)
        trainer.wait()
    assert ray.get(first_weights.weight_version.remote()) == ray.get(synchronizer.version.remote()) == 4
    assert ray.get(synchronizer.wait_for.remote(4)) == 4
    with pytest.raises(TimeoutError, match="version 5 not published"):
        ray.get(synchronizer.wait_for.remote(5, 0.01))


def test_a_directory_of_weights_is_loaded_as_a_version(first_weights: Any, model_dirs: tuple[Path, Path]) -> None:
    ray.get(first_weights.load_weights_from.remote(str(model_dirs[1]), 30))
    made = answer(ask(first_weights, max_tokens=20, seed=1))[0]
    assert {span.version for span in made.versions} == {30}
    assert_sampled_from(model_dirs[1], made, 1.0)
    with pytest.raises(RuntimeError, match="holds no"):
        ray.get(first_weights.load_weights_from.remote(str(model_dirs[1] / "nothing"), 31))
    assert ray.get(first_weights.weight_version.remote()) == 30


# --- life ------------------------------------------------------------------------------------------------------------


def test_a_healthy_engine_does_not_end_its_watch(engine: Any) -> None:
    assert ray.wait([engine.watch.remote()], timeout=0.05)[0] == []
    facts = ray.get(engine.stats.remote())
    assert facts["name"] == "engine_0" and facts["poisoned"] is None and facts["active"] == 0


@pytest.mark.verify
def test_a_killed_engine_is_named_and_leaves_no_process(ray_session: None, model_dirs: tuple[Path, Path]) -> None:
    import psutil

    from rft.config import ModelConfig, RolloutModelConfig
    from rft.rollout.engine import RolloutEngine

    model = ModelConfig(model_path=str(model_dirs[0]))
    arguments = ("engine_1", model, RolloutModelConfig(dtype="fp32", kv_cache_gb=0.25), 1, 0, "cpu", 1024)
    before = set(psutil.Process().children(recursive=True))
    doomed = ray.remote(RolloutEngine).options(max_concurrency=100).remote(*arguments)
    watched = doomed.watch.remote()
    ray.get(doomed.start.remote(), timeout=240)
    processes = [p for p in psutil.Process().children(recursive=True) if p not in before and "VLLM" in p.name()]
    running = ask(doomed, max_tokens=900, min_tokens=900)
    answer(ask(doomed, max_tokens=5))
    processes[0].kill()
    with pytest.raises(RuntimeError, match="engine_1: EngineCore was killed by SIGKILL"):
        ray.get(watched, timeout=20)
    with pytest.raises(RuntimeError, match="engine_1 died while it served"):
        ray.get(running, timeout=20)
    ray.get(doomed.shutdown.remote(), timeout=20)
    assert psutil.wait_procs(processes, timeout=20)[1] == []
