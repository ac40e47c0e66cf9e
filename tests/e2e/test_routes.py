"""A real vLLM engine on CPU tells which experts each token went through: in chunks of a prompt,
behind a cached prefix, in batches, and after new weights.

Transformers on the same weights is the judge.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from miniature import answer, judge

from rft.ground.experience import NO_EXPERT, Completion, GenerateRequest, Sampling, encode

EXPERTS, TOP_K, LAYERS, CONTEXT = 32, 4, 3, 512
CHUNK = 64  # tokens of a step
ids = itertools.count()

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from rft.tools.toy import write_model

    root = tmp_path_factory.mktemp("mixtures")
    shape: dict[str, Any] = {"hidden": 64, "layers": LAYERS, "heads": 4, "kv_heads": 2, "ffn": 128}
    shape |= {"experts": EXPERTS, "experts_per_token": TOP_K, "context": CONTEXT}
    first, second = (
        write_model(root / str(seed), "qwen3_moe", tied=False, head_dim=32, seed=seed, **shape)
        for seed in (1, 2)
    )
    return first, second


@pytest.fixture(scope="module")
def engine(ray_session: None, mixtures: tuple[Path, Path]) -> Iterator[Any]:
    from rft.config import ModelConfig, RolloutModelConfig
    from rft.rollout.engine import RolloutEngine

    rollout = RolloutModelConfig(dtype="fp32", kv_cache_gb=0.1, enforce_eager=True, max_num_seqs=16)
    rollout.engine_args = {"max_num_batched_tokens": CHUNK, "enable_chunked_prefill": True}
    model = ModelConfig(model_path=str(mixtures[0]))
    actor = ray.remote(RolloutEngine).options(max_concurrency=1000)
    handle = actor.remote("engine_moe", model, rollout, 1, 0, "cpu", CONTEXT)
    facts = ray.get(handle.start.remote(), timeout=240)
    assert facts["tells_routes"]
    yield handle
    ray.get(handle.shutdown.remote(), timeout=60)


def ask(engine: Any, prompt: list[int], n: int = 1, **sampling: Any) -> Any:
    name = f"routes_{next(ids)}"
    request = GenerateRequest(request_id=name, prompt=prompt, n=n, sampling=Sampling(**sampling))
    return engine.generate.remote(encode(request))


def drawn(length: int) -> list[int]:
    found: list[int] = np.random.default_rng(length).integers(5, 60, length).tolist()
    return found


def assert_routed_as_transformers(path: Path, prompt: list[int], made: Completion) -> None:
    """Every token but the last, which goes through no router."""
    tokens = prompt + made.ids
    assert made.routed_experts is not None and made.routed_experts.dtype == "uint8"
    told = made.routed_experts.array(len(tokens))
    assert (told[-1] == NO_EXPERT["uint8"]).all()
    model, chosen = judge(path), []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    wanted = torch.stack(chosen, 1).numpy()[:-1]
    assert np.array_equal(np.sort(told[:-1], -1), np.sort(wanted, -1))


def test_of_many_requests_at_once_in_chunks_and_behind_what_is_cached(
    engine: Any, mixtures: tuple[Path, Path]
) -> None:
    base = drawn(150)
    prompts = [base[: 90 + 7 * number] + drawn(5 + number) for number in range(8)]
    waiting = [
        ask(engine, prompt, 1 + number % 4, max_tokens=20 + number, min_tokens=8)
        for number, prompt in enumerate(prompts)
    ]
    for prompt, reference in zip(prompts, waiting, strict=True):
        for made in answer(reference):
            assert_routed_as_transformers(mixtures[0], prompt, made)
    before = ray.get(engine.stats.remote())["cached"]
    for made in answer(ask(engine, prompts[-1], 2, max_tokens=9)):
        assert_routed_as_transformers(mixtures[0], prompts[-1], made)
    assert ray.get(engine.stats.remote())["cached"] > before + 100


def test_of_the_weights_that_it_has_now(engine: Any, mixtures: tuple[Path, Path]) -> None:
    prompt = drawn(120)
    for version, path in ((1, mixtures[1]), (2, mixtures[0])):
        ray.get(engine.load_weights_from.remote(str(path), version), timeout=60)
        for made in answer(ask(engine, prompt, 2, max_tokens=12)):
            assert_routed_as_transformers(path, prompt, made)


def test_of_what_there_is_of_a_request_that_was_aborted(
    engine: Any, mixtures: tuple[Path, Path]
) -> None:
    prompt = drawn(70)
    sampling = Sampling(max_tokens=400, min_tokens=400)
    request = GenerateRequest(request_id="doomed", prompt=prompt, sampling=sampling)
    running = engine.generate.remote(encode(request))
    answer(ask(engine, prompt, max_tokens=5))
    ray.get(engine.abort.remote("doomed"))
    (made,) = answer(running)
    assert made.stop == "abort" and 0 < len(made.tokens) < 400
    assert_routed_as_transformers(mixtures[0], prompt, made)
