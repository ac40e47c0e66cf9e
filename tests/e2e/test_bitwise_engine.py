"""`trainer_engine=bitwise`: what a real vLLM engine says of every token it samples, and what the
trainer says of it, have the same bits; and so through 200 steps of a run that is killed.

The trainer's half alone is in `tests/dist/test_bitwise.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from exact import EVERYTHING, RANK, assert_same, deterministic, run_killed, run_whole
from miniature import answer, ask

from rft.config import ModelConfig, RolloutModelConfig
from rft.data.packing import Row
from rft.ground.experience import Completion
from rft.rollout.engine import RolloutEngine
from rft.tools.toy import write_model
from tests.conftest import with_rope

from ranks import Ranks
from runs import step_rows, write_assets

CONTEXT, CHUNK, SEQUENCES, STEPS = 512, 256, 64, 200
SHAPE: dict[str, Any] = {"hidden": 192, "layers": 3, "heads": 6, "kv_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {  # tied and not; words that are no multiple of anything
    "qwen3": {"ffn": 200},
    "qwen2": {"ffn": 256, "vocab": 1003, "tied": False},
    "llama": {"ffn": 192, "tied": False, "vocab": 257},
}

pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


def models(root: Path, family: str) -> list[Path]:
    """Two of one shape."""
    made = []
    for seed in (1, 2):
        path = root / str(seed)
        write_model(path, family, seed=seed, context=CONTEXT, **SHAPE, **FAMILIES[family])
        made.append(with_rope(path, LLAMA3) if family == "llama" else path)
    return made


def sampled(engine: Any, temperature: float) -> list[tuple[list[int], Completion]]:
    """Of short prompts in groups, of long ones that begin alike, all at once, and of what has just
    been said: in chunks, and from the cache.
    """
    rng = np.random.default_rng(0)

    def drawn(n: int) -> list[int]:
        found: list[int] = rng.integers(5, 60, n).tolist()
        return found

    long = drawn(300)
    prompts = [drawn(int(rng.integers(1, 60))) for _ in range(14)]
    prompts += [long, long, [*long[:200], *drawn(77)]]
    common: dict[str, Any] = {"n": 6, "max_tokens": 40, "temperature": temperature}
    first = [(one, ask(engine, prompt=one, **common)) for one in prompts]
    found = [(prompt, made) for prompt, asked in first for made in answer(asked)]
    more = [[*prompt, *made.ids] for prompt, made in found[::7]]
    again = [(one, ask(engine, prompt=one, **common)) for one in more]
    return found + [(prompt, made) for prompt, asked in again for made in answer(asked)]


def row_of(prompt: list[int], made: Completion, temperature: float) -> Row:
    """Of one group with all others of the prompt, whose prefix is then computed once."""
    tokens = np.array([*prompt, *made.ids])
    trained = (np.arange(len(tokens)) >= len(prompt)).astype(np.float32)
    behaviour = np.zeros(len(tokens), dtype=np.float32)
    behaviour[len(prompt) :] = made.logprobs
    return Row(
        tokens, trained, behaviour, trained, trained, temperature, group=abs(hash(tuple(prompt)))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_token_in_chunks_from_the_cache_and_in_batches_of_64(
    ray_session: None, ranks: Ranks, tmp_path: Path, family: str
) -> None:
    first, second = models(tmp_path, family)
    rollout = RolloutModelConfig(
        dtype="fp32", kv_cache_gb=0.1, enforce_eager=True, max_num_seqs=SEQUENCES
    )
    rollout.engine_args = {"max_num_batched_tokens": CHUNK, "enable_chunked_prefill": True}
    actor = ray.remote(RolloutEngine).options(max_concurrency=1000)
    name, model = f"engine_{family}", ModelConfig(model_path=str(first))
    engine = actor.remote(name, model, rollout, 1, 0, "cpu", CONTEXT, bitwise=True)
    ray.get(engine.start.remote(), timeout=240)
    try:
        for path, temperature in ((first, 1.0), (second, 0.7)):
            if path is second:
                ray.get(engine.load_weights_from.remote(str(second), 1), timeout=60)
            rows = [row_of(*one, temperature) for one in sampled(engine, temperature)]
            (found,) = ranks.run("bitwise_jobs:answers", 1, path=str(path), rows=rows)
            told = np.concatenate([row.behaviour[row.trained != 0] for row in rows])
            said = np.concatenate(found)
            assert len(told) > 1000
            apart = np.flatnonzero(told.view(np.int32) != said.view(np.int32))
            assert not len(apart), f"{len(apart)} of {len(told)} tokens of version {path.name}"
        assert ray.get(engine.stats.remote())["cached"] > 1000
    finally:
        ray.get(engine.shutdown.remote(), timeout=60)


def test_over_200_steps_through_kills(tmp_path: Path) -> None:
    """And the run is that of one that was left alone, though requests are decoded together."""
    settings = ("trainer_engine=bitwise", f"trainer.total_steps={STEPS}")
    settings += ("trainer.save_interval=25", "explorer.eval_interval=50")
    assets = write_assets(tmp_path / "assets")
    jobs = {name: tmp_path / "rft" / name for name in ("whole", "killed")}
    run_whole(deterministic(tmp_path, "whole", assets, *settings))
    run_killed(
        deterministic(tmp_path, "killed", assets, *settings), [(60, RANK), (130, EVERYTHING)]
    )
    for job in jobs.values():
        rows = step_rows(job)
        assert len(rows) == STEPS
        assert [row["logprob_diff/max"] for row in rows] == [0.0] * STEPS
    assert_same(jobs["killed"], jobs["whole"], STEPS)
