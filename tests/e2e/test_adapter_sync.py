"""Adapters in a real vLLM engine on CPU: registered from memory under versions, beside a base model
that nothing touches.

Transformers with W + alpha/r B A in its weights is the judge of every log-probability.
"""

import functools
import itertools
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import save_file

from rft.config import LoraConfig, ModelConfig, RolloutModelConfig, SynchronizerConfig
from rft.config.layout import lora_of
from rft.ground.adapters import adapter_names
from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.ground.names import Dims, architecture_of, hf_names, read_hf_config
from rft.ground.protocols import ActorHandle, Block
from rft.ground.rounds import AdapterOrder
from rft.rollout.engine import RolloutEngine
from rft.sync.origins import StreamOrigin
from rft.sync.publisher import Publisher
from rft.sync.synchronizer import Synchronizer

END = 1  # the toy tokenizer's end token
PROMPT = [10, 23, 42, 31, 17, 8]
LONG_PROMPT = [10 + i % 80 for i in range(400)]  # several blocks of the prefix cache
TOLERANCE = 1e-4  # of one float32 log-probability, vLLM against transformers
LORA = LoraConfig(lora_rank=6, lora_alpha=9.0)  # no rank of vLLM's; a scale that is not 1
KEPT = 3
CONTEXT = 1024
ZEROS = 0  # the seed of an adapter with B = 0, as it begins
ids, versions = itertools.count(), itertools.count(1)

pytestmark = (
    pytest.mark.verify
)  # `test_weight_sync` has the rounds, `unit/test_adapter_serving.py` adapters


@pytest.fixture(scope="module")
def engine(ray_session: None, model_dirs: tuple[Path, Path]) -> Iterator[Any]:
    """An engine of its own: one that takes adapters is another vLLM."""
    model = ModelConfig(model_path=str(model_dirs[0]), lora_configs=[LORA])
    rollout = RolloutModelConfig(
        dtype="fp32", kv_cache_gb=0.25, enforce_eager=True, max_num_seqs=256
    )
    actor = ray.remote(RolloutEngine).options(max_concurrency=1000)
    handle = actor.remote("engine_lora", model, rollout, 1, 0, "cpu", CONTEXT, KEPT)
    ray.get(handle.start.remote(), timeout=240)
    yield handle
    ray.get(handle.shutdown.remote(), timeout=60)


# --- adapters and their judge ---------------------------------------------------------------------


def shapes_of(base: Path) -> dict[str, tuple[int, ...]]:
    hf = read_hf_config(base)
    lora = lora_of([LORA], Dims.of(hf))
    assert lora is not None
    return adapter_names(Dims.of(hf), architecture_of(hf), lora)


@functools.cache
def adapter(base: Path, seed: int) -> dict[str, torch.Tensor]:
    """Large enough to change every log-probability."""
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: 0.1 * torch.randn(shape, generator=generator)
        for name, shape in shapes_of(base).items()
    }
    return {
        n: torch.zeros_like(t) if seed == ZEROS and "lora_B" in n else t for n, t in found.items()
    }


@functools.cache
def judge(base: Path, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = adapter(base, seed)
    with torch.no_grad():
        for name in (name for name in tensors if "lora_A" in name):
            weight = model.get_parameter(
                name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            )
            delta = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            weight += LORA.lora_alpha / LORA.lora_rank * delta
    return model


def error_of(
    base: Path, seed: int, made: Completion, prompt: list[int] = PROMPT, min_tokens: int = 0
) -> float:
    """The largest difference between the engine's log-probabilities and those of the base model
    with this adapter.
    """
    with torch.no_grad():
        logits = judge(base, seed)(torch.tensor([prompt + made.ids])).logits[
            0, len(prompt) - 1 : -1
        ]
    logits[:min_tokens, END] = -torch.inf
    wanted = logits.log_softmax(-1).gather(1, torch.tensor(made.ids)[:, None])[:, 0]
    return float((torch.tensor(made.logprobs) - wanted).abs().max())


def install(engine: Any, base: Path, seed: int, where: Path, version: int | None = None) -> int:
    """The adapter of `seed` as the next version, or as this one,
    out of a directory as PEFT has it.
    """
    where.mkdir(exist_ok=True)
    save_file(adapter(base, seed), where / "adapter_model.safetensors")
    version = next(versions) if version is None else version
    ray.get(engine.load_weights_from.remote(str(where), version), timeout=60)
    return version


def ask(engine: Any, n: int = 1, prompt: list[int] = PROMPT, **sampling: Any) -> Any:
    request = GenerateRequest(
        request_id=f"a{next(ids)}", prompt=prompt, n=n, sampling=Sampling(**sampling)
    )
    return engine.generate.remote(encode(request))


def answer(reference: Any) -> list[Completion]:
    return decode(ray.get(reference, timeout=120), list[Completion])


def spans(made: Completion) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in made.versions]


# --- the tests ------------------------------------------------------------------------------------


def test_every_version_is_the_merged_model_and_the_base_stays(
    engine: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    base = model_dirs[0]
    first = answer(ask(engine, max_tokens=30, min_tokens=30, seed=1))[0]
    for seed in (1, 2, ZEROS):
        version = install(engine, base, seed, tmp_path)
        made = answer(ask(engine, n=2, max_tokens=30, seed=1))
        assert all(spans(one) == [(version, 0, len(one.tokens))] for one in made)
        assert max(error_of(base, seed, one) for one in made) < TOLERANCE
        assert ray.get(engine.weight_version.remote()) == version
    assert answer(ask(engine, max_tokens=30, min_tokens=30, seed=1))[0].ids == first.ids
    assert error_of(base, 1, made[0]) > 0.1, "the judge can tell one adapter from another"


def test_requests_in_flight_keep_their_version_while_new_ones_take_the_next(
    engine: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    base = model_dirs[0]
    old = install(engine, base, 1, tmp_path)
    running = ask(engine, n=4, max_tokens=900, min_tokens=900, seed=5)
    # when it is done, the long ones have as many tokens
    answer(ask(engine, max_tokens=20, min_tokens=20))
    new = install(engine, base, 2, tmp_path)
    # in one batch with the old ones
    between = answer(ask(engine, n=2, max_tokens=30, min_tokens=30, seed=6))
    newest = install(engine, base, 3, tmp_path)  # now the old one is kept for its requests alone
    last = answer(ask(engine, max_tokens=30, min_tokens=30, seed=6))
    assert not ray.wait([running], timeout=0)[0]
    for made, seed, version, length in [
        *((one, 2, new, 30) for one in between),
        *((one, 3, newest, 30) for one in last),
        *((one, 1, old, 900) for one in answer(running)),
    ]:
        assert spans(made) == [(version, 0, length)]
        assert error_of(base, seed, made, min_tokens=length) < TOLERANCE


def test_aborted_requests_leave_no_trace_of_their_adapter(
    engine: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    """A worker that steps with an adapter that was dropped would look for its file and die."""
    for seed in (1, 2, 1, 2):
        install(engine, model_dirs[0], seed, tmp_path)
        doomed = GenerateRequest(
            request_id="doomed",
            prompt=PROMPT,
            n=4,
            sampling=Sampling(max_tokens=900, min_tokens=900),
        )
        running = engine.generate.remote(encode(doomed))
        answer(ask(engine, max_tokens=5))  # meanwhile the other one has begun
        aborted = engine.abort.remote("doomed")
        following = [ask(engine, max_tokens=5) for _ in range(8)]
        assert {made.stop for made in answer(running)} == {"abort"}
        ray.get([aborted, *following], timeout=60)
    assert ray.get(engine.stats.remote())["active"] == 0


def test_no_adapter_meets_cached_keys_of_another(
    engine: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    version = next(versions)
    for seed in (1, 2):  # the same version again, as after a resume
        install(engine, model_dirs[0], seed, tmp_path, version)
        for _ in range(2):  # the second time from the cache of its own version
            made = answer(ask(engine, prompt=LONG_PROMPT, max_tokens=20, seed=seed))[0]
            assert error_of(model_dirs[0], seed, made, LONG_PROMPT) < TOLERANCE


def test_an_adapter_that_is_not_whole_is_refused_and_the_last_one_serves_on(
    engine: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    version = install(engine, model_dirs[0], 1, tmp_path)
    tensors = dict(adapter(model_dirs[0], 2))
    del tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    for _ in range(KEPT + 1):  # a failed round leaves no place taken
        with pytest.raises(
            RuntimeError, match=r"lacks A or B of \['model.layers.1.self_attn.k_proj'\]"
        ):
            ray.get(engine.load_weights_from.remote(str(tmp_path), 99), timeout=60)
    made = answer(ask(engine, max_tokens=20, seed=1))[0]
    assert spans(made)[0][0] == version and error_of(model_dirs[0], 1, made) < TOLERANCE


def test_an_adapter_does_not_live_in_the_memory_that_it_came_in(
    model_dirs: tuple[Path, Path],
) -> None:
    from vllm.config.lora import LoRAConfig

    from rft.sync import lora as loras

    manager = SimpleNamespace(
        lora_config=LoRAConfig(max_lora_rank=8, lora_dtype=torch.float32), model=None
    )
    order = AdapterOrder(
        number=1, drop=[], rank=LORA.lora_rank, alpha=LORA.lora_alpha, projections=["q_proj"]
    )
    tensors = {name: tensor.clone() for name, tensor in adapter(model_dirs[0], 1).items()}
    lora = loras._model_of(manager, order, tensors)  # type: ignore[arg-type]
    for layer in lora.loras.values():
        layer.optimize()  # vLLM's: the scale goes into B
    assert all(
        torch.equal(tensor, adapter(model_dirs[0], 1)[name]) for name, tensor in tensors.items()
    )


def test_old_adapters_leave_the_workers(
    engine: Any, model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    install(engine, model_dirs[0], 1, tmp_path)
    again = [
        engine.load_weights_from.remote(str(tmp_path), next(versions)) for _ in range(KEPT + 1)
    ]
    found = [ray.get(one).adapters for one in again]
    assert all(len(numbers) == 2 for numbers in found), found
    assert found[0][-1] < found[-1][0]


class Alone:
    """The mesh of a trainer of one rank."""

    rank = 0

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item


class Source:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.tensors = tensors

    def blocks(self) -> list[Block]:
        return [
            Block(name, "float32", tuple(t.shape), 0, 0, t.shape[0])
            for name, t in self.tensors.items()
        ]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors.values())


def test_the_stream_has_the_adapter_and_nothing_else(
    engine: Any, model_dirs: tuple[Path, Path]
) -> None:
    class Buffer:  # local: travels by value, Ray's workers cannot import test modules
        async def published(self, version: int, run_epoch: int) -> None:
            pass

    base = model_dirs[0]
    buffer = ActorHandle(ray.remote(Buffer).remote())
    synchronizer = ray.remote(Synchronizer).options(max_concurrency=100).remote(buffer, 30.0)
    ray.get(synchronizer.join.remote("engine_0", ActorHandle(engine)))
    source = Source(adapter(base, 2))
    config = SynchronizerConfig(sync_timeout=30.0, bucket_bytes=2**20)
    publisher = Publisher(StreamOrigin(Alone(), source, ActorHandle(synchronizer), config, 1))
    publisher.connect()
    version = next(versions)
    running = ask(engine, n=4, max_tokens=600, min_tokens=600, seed=5)
    publisher.start(version)
    publisher.release()
    numbers = publisher.last
    publisher.close()
    made = answer(ask(engine, max_tokens=20, seed=1))[0]
    assert spans(made) == [(version, 0, len(made.tokens))] and error_of(base, 2, made) < TOLERANCE
    answer(running)
    hf = read_hf_config(base)
    merged = sum(4 * prod(shape) for shape in hf_names(Dims.of(hf), architecture_of(hf)).values())
    assert (
        numbers["sync/bytes"]
        == sum(4 * prod(shape) for shape in shapes_of(base).values())
        < merged / 10
    )
    print(
        f"\n{numbers['sync/bytes'] / 1e6:.2f} MB of adapter, merged weights have "
        f"{merged / 1e6:.2f} MB"
    )
