"""The whole system as a newcomer runs it, once, and what it leaves; then the other modes on what a
run has left.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rft.buffer.progress import Issued, Stored
from rft.checkpoint.catalog import committed, step_of
from rft.checkpoint.storage import VERSIONS, open_storage
from rft.ground.experience import Experience, decode
from rft.tools import ckpt
from rft.tools.buffer import from_journal, versions_of

from runs import LETTERS, History, checkpoints, metrics, overrides, step_rows, train, write_assets

STEPS = {"sft_warmup": 6, "rft": 5}
TASKS, REPEATS = 8, 4
MAX_STALENESS = 1
TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32
SMALL = [  # the quickstart, cut short
    "experiment=quickstart",
    "monitor=none",
    f"stages.0.trainer.total_steps={STEPS['sft_warmup']}",
    "stages.0.trainer.stop_at_loss=null",
    "stages.0.buffer.train_batch_size=16",
    f"stages.1.trainer.total_steps={STEPS['rft']}",
    "stages.1.trainer.save_interval=2",
    "stages.1.trainer.checkpoint.versions=all",
    f"stages.1.buffer.batch_size={TASKS}",
    f"stages.1.algorithm.repeat_times={REPEATS}",
    "explorer.rollout_model.kv_cache_gb=0.25",
    f"stages.1.buffer.explorer_input.default_reward_fn_type={LETTERS}",
    f"stages.1.buffer.explorer_input.eval_tasksets.0.default_reward_fn_type={LETTERS}",
]

pytestmark = pytest.mark.timeout(600)


@dataclass
class Whole:
    """The run that all tests of it share, at its end."""

    command: list[str]
    code: int
    lines: list[str]
    errors: str
    root: Path

    def job(self, stage: str) -> Path:
        return self.root / "rft" / "quickstart" / stage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    root = tmp_path_factory.mktemp("loop")
    command = [*SMALL, f"checkpoint_root_dir={root}"]
    with train(*command) as run:
        code = run.end(timeout=400)
        yield Whole(command, code, run.lines, run.errors(), root)


def test_it_ends_well_and_says_only_what_a_user_reads(whole: Whole) -> None:
    assert (whole.code, whole.errors) == (0, "")
    assert list(json.loads(whole.lines[-1])["quickstart"]) == ["eval_sft", "eval_rft", "seconds"]
    known = (
        "sft_warmup: ",
        "rft: ",
        "device: ",
        "weights over ",
        "trainer: ",
        "[",
        "curves ",
        "model ",
        "{",
        "stage ",
        "---",
        "sft_warmup ",
        "rft ",
        "",
    )
    assert [
        line for line in whole.lines if not line.strip().startswith(known[:-1]) and line.strip()
    ] == []
    picture = (whole.root / "rft" / "quickstart" / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.parametrize("stage", STEPS)
def test_every_step_is_written_once(whole: Whole, stage: str) -> None:
    assert [row["step"] for row in step_rows(whole.job(stage))] == list(range(1, STEPS[stage] + 1))
    assert checkpoints(whole.job(stage))[-1] == STEPS[stage]


def test_every_step_says_how_many_a_crash_would_cost(whole: Whole) -> None:
    """Saved is every second step, and written beside the next ones: which was the last to be there
    is a matter of time.
    """
    last = [row["step"] - row["checkpoint/behind_steps"] for row in step_rows(whole.job("rft"))]
    assert last[:2] == [0, 0] and set(last) <= {0, 2, 4} and last == sorted(last), last


def test_steps_say_how_idle_the_engines_were(whole: Whole) -> None:
    said = [row for row in step_rows(whole.job("rft")) if "explorer/engine_idle_frac" in row]
    assert said, "no step said it"
    for row in said:
        assert 0 <= row["explorer/engine_idle_frac"] <= row["explorer/engine_idle_frac_max"] <= 1
    assert any(row["explorer/engine_idle_frac"] < 1 for row in said), "never a request under way"


def test_rollouts_are_fresh_and_agree_with_the_trainer(whole: Whole) -> None:
    rows = step_rows(whole.job("rft"))
    assert max(row["staleness/max"] for row in rows) <= MAX_STALENESS
    fresh = [row["logprob_diff/max"] for row in rows if row["staleness/max"] == 0]
    assert fresh and max(fresh) < TOLERANCE
    assert all(row["grad_norm"] > 0 for row in rows)
    samples = [
        json.loads(line) for line in (whole.job("rft") / "samples.jsonl").read_text().splitlines()
    ]
    assert {row["step"] for row in samples if row["table"] == "samples"} == set(
        range(1, STEPS["rft"] + 1)
    )
    history = History(whole.job("rft") / "buffer" / "experience_buffer")
    history.check_exactly_once(STEPS["rft"])
    assert len(history.of(Issued)) == STEPS["rft"] * TASKS


def test_the_same_command_again_starts_nothing(whole: Whole) -> None:
    with train(*whole.command) as run:
        assert (run.end(), run.errors()) == (0, "")
    assert [line for line in run.lines if "already finished" in line] == run.lines[:2]
    assert run.lines[-1] == whole.lines[-1]
    assert [p.name for p in (whole.job("rft") / "logs").glob("attempt_*")] == ["attempt_1"]


def test_the_export_is_the_model_that_was_trained(whole: Whole) -> None:
    """transformers loads it; that vLLM answers as at the end of the run is the next test."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = whole.job("rft") / "huggingface" / f"step_{STEPS['rft']:08d}"
    _, loading = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(loading.values()), loading
    assert AutoTokenizer.from_pretrained(export).chat_template


@pytest.mark.verify
def test_every_version_is_kept_and_has_sampled_what_the_journal_says(whole: Whole) -> None:
    """The tokens of a version have, under its weights as they are exported, the log-probability
    that the engine gave them, and another one under those of the version before.
    """
    import torch
    from transformers import AutoModelForCausalLM

    job = whole.job("rft")
    storage = open_storage(job / "checkpoints")
    kept = [step_of(path) for path in committed(storage, VERSIONS)]
    assert kept == list(range(STEPS["rft"] + 1))
    tokens = versions_of(str(job), "experience_buffer")
    assert set(tokens) <= set(kept)
    found = sampled_whole(job)
    last, off = max(found), {}
    for version in (last, last - 1):
        target = whole.root / f"version_{version}"
        assert ckpt.main(["export", str(job), str(target), "--version", str(version)]) == 0
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        off[version] = max(
            float((scores(model, row) - torch.tensor(row.logprobs)).abs().max())
            for row in found[last]
        )
    assert off[last] < TOLERANCE < off[last - 1], off


def sampled_whole(job: Path) -> dict[int, list[Experience]]:
    """What the journal holds that one version sampled from beginning to end, by versions. A loaded
    host may have none of the run's last ones.
    """
    found: dict[int, list[Experience]] = {}
    for part in from_journal(str(job), "experience_buffer"):
        for row in decode(part.experiences, list[Experience]):
            if len(versions := {span.version for span in row.versions}) == 1:
                found.setdefault(versions.pop(), []).append(row)
    return found


def scores(model: Any, row: Experience) -> Any:
    """Log-probabilities of the response's tokens, at the temperature that sampled them."""
    import torch

    ids = torch.tensor([[int(token) for token in row.tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0, row.prompt_length - 1 : -1] / row.temperature
    found = torch.log_softmax(logits, dim=-1)
    return found.gather(-1, ids[0, row.prompt_length :, None])[:, 0]


@pytest.mark.verify
def test_mode_bench_answers_exactly_as_the_run_evaluated(whole: Whole) -> None:
    assets = whole.root / "rft" / "quickstart" / "assets"
    evaluation = (
        f"{{name: held_out, path: {assets / 'eval.jsonl'}, format: {{prompt_type: plaintext}}}}"
    )
    before = whole.job("sft_warmup") / "huggingface" / f"step_{STEPS['sft_warmup']:08d}"
    arguments = [
        "experiment=grpo",
        "mode=bench",
        "name=quickstart",
        "stage_name=rft",
        f"checkpoint_root_dir={whole.root}",
        f"model.model_path={before}",
        "model.max_prompt_tokens=16",
        "model.max_response_tokens=8",
        "device=cpu",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
        "monitor=none",
        f"buffer.explorer_input.eval_tasksets=[{evaluation}]",
        "explorer.rollout_model.kv_cache_gb=0.25",
        f"buffer.explorer_input.default_reward_fn_type={LETTERS}",
    ]
    with train(*arguments) as run:
        assert (run.end(), run.errors()) == (0, "")
    told = {
        row["step"]: row for row in (json.loads(line) for line in run.lines if line.startswith("{"))
    }
    rows = [row for row in metrics(whole.job("rft")) if "eval/held_out/accuracy" in row]
    for step in (0, STEPS["rft"]):
        in_the_run = next(row for row in rows if row["step"] == step)
        assert in_the_run["eval/held_out/response_length/mean"] > 0
        for name in ("accuracy", "response_length/mean"):
            assert told[step][f"bench/held_out/{name}"] == in_the_run[f"eval/held_out/{name}"]
    assert len(metrics(whole.job("rft") / "bench")) == len(told)
    with train(*arguments, "explorer.version=3") as run:  # of which there is no export
        assert (run.end(), run.errors()) == (0, "")
    (one,) = (json.loads(line) for line in run.lines if line.startswith("{"))
    assert one["step"] == 3 and "bench/held_out/accuracy" in one


APART_STEPS = 3


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("apart")


@pytest.mark.verify  # `test_sync_methods` has the engine that reads saved weights
def test_explore_then_train(apart: Path) -> None:
    """Runs of one name meet in the journal; the trainer ends by
    itself when it has trained on all of it.
    """
    assets, job, steps = write_assets(apart / "assets"), apart / "rft" / "apart", APART_STEPS
    with train(
        *overrides(apart, "apart", assets, "mode=explore", f"trainer.total_steps={steps}")
    ) as run:
        assert (run.end(), run.errors()) == (0, "")
    assert "engines serve the model as given" in run.lines
    explored = History(job / "buffer" / "experience_buffer")
    rows = [
        e for record in explored.of(Stored) for e in decode(record.experiences, list[Experience])
    ]
    with train(*overrides(apart, "apart", assets, "mode=train", "trainer.total_steps=50")) as run:
        assert (run.end(), run.errors()) == (0, "")
    trained = History(job / "buffer" / "experience_buffer")
    trained.check_exactly_once(steps)
    assert trained.of(Issued) == explored.of(Issued) and trained.of(Stored) == explored.of(Stored)
    assert [row["step"] for row in step_rows(job)] == list(range(1, steps + 1))
    assert sum(row["num_tokens"] for row in step_rows(job)) == sum(e.response_length for e in rows)
    assert not list((job / "logs" / "latest").glob("engine*"))


@pytest.mark.verify  # `test_sync_methods` has an engine that follows what a trainer saves elsewhere
def test_explorers_serve_what_the_trainer_saved(apart: Path) -> None:
    """After the test above.

    What was saved for explorers is what the next one samples from, from its first request on (W20).
    """
    job = apart / "rft" / "apart"
    before = len(History(job / "buffer" / "experience_buffer").of(Stored))
    more = [f"trainer.total_steps={APART_STEPS + 1}", "mode=explore"]
    with train(*overrides(apart, "apart", apart / "assets", *more)) as run:
        assert (run.end(), run.errors()) == (0, "")
    assert f"engines serve saved version {APART_STEPS}" in run.lines
    stored = History(job / "buffer" / "experience_buffer").of(Stored)[before:]
    late = [e for record in stored for e in decode(record.experiences, list[Experience])]
    assert late and {span.version for e in late for span in e.versions} == {APART_STEPS}
