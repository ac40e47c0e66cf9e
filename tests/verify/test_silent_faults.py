"""The silent-fault drill: faults planted one at a time into a short run of the real loop over real
Megatron, each seen by the gate that docs/observe.md names; and runs without any, of which none
warns.

Keys and values kept over new weights want a real engine's cache, so that one is planted into a
whole run.
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft.run.supervisor import EXIT_CODES
from tests.dist.ranks import Ranks
from tests.verify.mutants import PLANTED
from tests.verify.mutations import MUTATIONS

from runs import TASKS, overrides, step_rows, train

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
DRAWN, LEAST = 24, 22  # mutations of a drill, and those of them that are to be seen


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
    [(warned, _)] = ranks.run(
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


@pytest.mark.verify
def test_every_fault_has_a_gate(ranks: Ranks) -> None:
    assert ranks.run("drill_jobs:faults", 1) == [list(SEEN_BY)]


@pytest.mark.verify
@pytest.mark.timeout(1200)
def test_mutations_by_a_printed_seed_are_seen(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """DRILL_SEED draws the same ones again; DRILL_ALL=1 takes all of them."""
    seed = int(os.environ.get("DRILL_SEED") or random.randrange(10**6))
    print(f"DRILL_SEED={seed} draws these")
    numbers = range(len(MUTATIONS))
    if not os.environ.get("DRILL_ALL"):
        numbers = random.Random(seed).sample(numbers, DRAWN)
    [(_, undisturbed)] = ranks.run(
        "drill_jobs:drilled", 1, path=str(model), root=str(tmp_path / "undisturbed")
    )
    missed, none = [], []
    for number in numbers:
        root = str(tmp_path / str(number))
        [(seen, end)] = ranks.run(
            "drill_jobs:mutated", 1, path=str(model), root=root, number=number
        )
        print(f"{number:<3} {MUTATIONS[number]}: {', '.join(dict.fromkeys(seen)) or 'NOT SEEN'}")
        if not seen:
            (none if end == undisturbed else missed).append(number)
    assert not none, f"change nothing: {none}"
    print(f"{len(numbers) - len(missed)} of {len(numbers)} were seen")
    assert len(missed) <= len(numbers) - round(LEAST / DRAWN * len(numbers)), missed


@pytest.mark.verify
def test_every_mutation_can_be_planted(ranks: Ranks) -> None:
    assert ranks.run("drill_jobs:planted", 1) == [len(MUTATIONS)]


KEEPS = (
    "rft.rollout.engine_weights:pause="
    "await llm.engine_core.pause_scheduler_async(mode='keep', clear_cache=False)"
)
BLOCK = 32  # tokens that the engine caches together


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_kv_kept_over_weights_is_seen(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Every step asks the same tasks again, each longer than a block of the cache."""
    prompts = [str(number) * (2 * BLOCK) for number in range(TASKS)]
    tasks = [{"prompt": prompt, "response": "1"} for prompt in prompts]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    ranks.run("drill_jobs:write", 1, path=str(tmp_path / "model"), head=32)
    if kept:
        monkeypatch.setenv("PYTHONPATH", str(PLANTED))
        monkeypatch.setenv("RFT_PLANTED", KEEPS)
    given = [
        f"explorer.rollout_model.engine_args={{block_size:{BLOCK}}}",
        f"model.max_prompt_tokens={3 * BLOCK}",
        "algorithm.optimizer.lr=3e-3",
        "synchronizer.max_staleness=0",
        "trainer.total_steps=6",
        "trainer.on_drift=stop",
    ]
    with train(*overrides(tmp_path, "drilled", tmp_path, *given)) as run:
        code, said = run.end(timeout=400), run.errors()
    rows = step_rows(tmp_path / "rft" / "drilled")
    print([row["drift/token_mult_prob_error"] for row in rows])
    assert (code, "gate 'engine'" in said) == (
        (EXIT_CODES["trainer"], True) if kept else (0, False)
    ), said
    assert [bool(row["drift/alarms"]) for row in rows] == [False] * (len(rows) - kept) + [
        True
    ] * kept
