"""The quickstart, cut short, killed with -9 at random moments of either stage: its curves are those
of one left alone.
"""

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from exact import assert_same, assert_same_curve

from runs import train

ROUNDS, KILLS = 3, 2
STEPS = {"sft_warmup": 30, "rft": 10}
SHORT = [
    "experiment=quickstart",
    "deterministic=true",
    "monitor=none",
    f"stages.0.trainer.total_steps={STEPS['sft_warmup']}",
    "stages.0.trainer.stop_at_loss=null",
    "stages.0.buffer.train_batch_size=32",
    "stages.0.trainer.save_interval=7",
    f"stages.1.trainer.total_steps={STEPS['rft']}",
    "stages.1.trainer.save_interval=3",
    "stages.1.buffer.batch_size=8",
    "stages.1.algorithm.repeat_times=4",
    "stages.1.explorer.eval_interval=4",
    "explorer.rollout_model.kv_cache_gb=0.25",
]

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]


def finish(root: Path) -> float:
    """Run the quickstart in `root` to its end; returns how long that took."""
    begin = time.monotonic()
    with train(*SHORT, f"checkpoint_root_dir={root}") as run:
        assert (run.end(timeout=900), run.errors()) == (0, "")
    return time.monotonic() - begin


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    root = tmp_path_factory.mktemp("left_alone")
    return root, finish(root)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_killed_at_random_it_ends_the_same(
    tmp_path: Path, reference: tuple[Path, float], seed: int
) -> None:
    root, seconds = reference
    moments = [random.Random(f"{seed}/{number}").uniform(0, seconds) for number in range(KILLS)]
    for moment in moments:
        with train(*SHORT, f"checkpoint_root_dir={tmp_path}") as run:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(moment)
            run.kill_everything()
    finish(tmp_path)
    for stage, steps in STEPS.items():
        job, wanted = (place / "rft" / "quickstart" / stage for place in (tmp_path, root))
        if stage == "rft":
            assert_same(job, wanted, steps)
        else:
            assert_same_curve(job, wanted)
    outcomes = [
        json.loads((p / "rft" / "quickstart" / "quickstart.json").read_text())
        for p in (tmp_path, root)
    ]
    for outcome in outcomes:
        del outcome["quickstart"]["seconds"]
    assert outcomes[0] == outcomes[1], f"killed at {moments}"
