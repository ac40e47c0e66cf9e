"""The silent-fault drill: faults planted one at a time into a short run of the real loop over real
Megatron, each seen by the gate that docs/observe.md names; and runs without any, of which none
warns.

The twelfth of the drill, keys and values kept over new weights, is one of a real engine's cache:
what it says is compared with transformers on the weights that it has.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rft.rollout import engine_weights
from rft.rollout.engine import RolloutEngine
from tests.dist.ranks import Ranks

HERE = Path(__file__).parent
SEEN_BY = {
    "a stale buffer in a save": "resume",
    "a row of QKV swapped": "engine",
    "off-by-one in labels": "engine",
    "a zero reward for a failed sample": "rewards",
    "a dropped microbatch": "tokens",
    "wrong rope base": "engine",
    "mask shifted": "engine",
    "tied embedding not tied": "engine",
    "expert bias lost": "resume",
    "LR schedule not restored": "resume",
    "wrong temperature in log-probabilities": "engine",
    "one seed for a whole group": "answers",
}
UNDISTURBED = 10


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(HERE, HERE.parent / "dist")
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def model(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drill") / "model"
    ranks.run("drill_jobs:write", 1, path=str(path))
    return path


def drilled(ranks: Ranks, model: Path, root: Path, fault: str = "", seed: int = 0) -> list[str]:
    [warned] = ranks.run(
        "drill_jobs:drilled", 1, path=str(model), root=str(root), fault=fault, seed=seed
    )
    return warned


@pytest.mark.verify
@pytest.mark.parametrize("fault", SEEN_BY)
def test_a_silent_fault_is_seen(ranks: Ranks, model: Path, tmp_path: Path, fault: str) -> None:
    warned = drilled(ranks, model, tmp_path, fault)
    print(f"{fault}: {', '.join(warned)}")
    assert SEEN_BY[fault] in warned


@pytest.mark.verify
@pytest.mark.parametrize("seed", range(UNDISTURBED))
def test_nobody_is_warned_where_nothing_is_wrong(
    ranks: Ranks, model: Path, tmp_path: Path, seed: int
) -> None:
    assert drilled(ranks, model, tmp_path, seed=seed) == []


# --- of a real engine -----------------------------------------------------------------------------


class Careless(RolloutEngine):
    """Keeps its cache over new weights, once it is told to."""

    is_careless = False

    async def forget_to_clear(self) -> None:
        self.is_careless = True

    async def _install(self, coming: Any) -> Any:
        if not self.is_careless:
            return await super()._install(coming)
        kept = partial(engine_weights.pause, clear_cache=False)
        careless = mock.patch.object(engine_weights, "pause", lambda llm, clear_cache: kept(llm))
        with careless:
            return await super()._install(coming)


CONTEXT = 512


@pytest.fixture
def engine(ranks: Ranks, tmp_path: Path) -> Iterator[Any]:
    import ray

    from rft.config import ModelConfig, RolloutModelConfig

    for seed in (1, 2):
        path = str(tmp_path / str(seed))
        ranks.run("drill_jobs:write", 1, path=path, seed=seed, context=CONTEXT)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    rollout = RolloutModelConfig(dtype="fp32", kv_cache_gb=0.25, enforce_eager=True)
    model = ModelConfig(model_path=str(tmp_path / "1"))
    actor = ray.remote(Careless).options(max_concurrency=100)
    handle = actor.remote("engine_0", model, rollout, 1, 0, "cpu", CONTEXT)
    ray.get(handle.start.remote(), timeout=240)
    yield handle
    ray.get(handle.shutdown.remote(), timeout=60)
    ray.shutdown()


def warned_of(engine: Any, weights: Path, version: int, before: list[int]) -> set[str]:
    """What the gates say of answers to a long prompt that was asked before these weights came."""
    import ray
    import torch
    import transformers

    from rft.algorithm.ratios import mismatch
    from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
    from rft.trainer.gates import ERROR, Gates

    def asked(name: str) -> list[Completion]:
        sampling = Sampling(temperature=1.0, max_tokens=16, seed=version)
        request = GenerateRequest(request_id=name, prompt=before, n=4, sampling=sampling)
        return decode(ray.get(engine.generate.remote(encode(request))), list[Completion])

    asked(f"before {version}")
    ray.get(engine.load_weights_from.remote(str(weights), version), timeout=60)
    judge = transformers.AutoModelForCausalLM.from_pretrained(weights).float().eval()
    errors = []
    for made in asked(f"behind {version}"):
        tokens = torch.tensor([[*before, *made.ids]])
        with torch.no_grad():
            said = torch.log_softmax(judge(tokens).logits[0, len(before) - 1 : -1], -1)
        own = said.gather(1, torch.tensor(made.ids)[:, None])[:, 0]
        errors += mismatch(own - torch.tensor(made.logprobs))[ERROR].tolist()
    gates = Gates(is_fp32=True)
    fresh = {"staleness/token_max": 0.0, "staleness/unversioned_tokens": 0.0}
    gates.after(version, fresh | {ERROR: sum(errors) / len(errors)})
    return gates.warned


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_keys_and_values_kept_over_new_weights_are_seen(engine: Any, tmp_path: Path) -> None:
    import ray

    prompt = [8 + 7 * n % 50 for n in range(400)]  # blocks of it are in the prefix cache
    assert warned_of(engine, tmp_path / "2", 1, prompt) == set()
    ray.get(engine.forget_to_clear.remote())
    assert warned_of(engine, tmp_path / "1", 2, prompt) == {"engine"}


@pytest.mark.verify
def test_every_fault_has_a_gate(ranks: Ranks) -> None:
    assert ranks.run("drill_jobs:faults", 1) == [list(SEEN_BY)]
