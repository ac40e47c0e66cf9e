"""Whole runs at a service that speaks Tinker's API: killed with -9 and continued, nothing is
trained twice, and they learn.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.tinker_service import BASE, KEY, Service, Trainee, serving

from runs import START_S, History, is_one_line, metrics, step_rows, train, write_assets

SAVE_INTERVAL = 4
KILLED_AT = 6  # updates: two behind the newest save

pytestmark = pytest.mark.verify  # `tests/unit/test_tinker.py` has the client and the service


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("tinker"))


@pytest.fixture
def service(assets: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Service, list[str]]]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with serving(str(assets / "model")) as (found, where):
        remote = {"base_url": where, "base_model": BASE, "rank": 8, "enable": "true"}
        saves = ["trainer.save_hf_checkpoint=never", f"trainer.save_interval={SAVE_INTERVAL}"]
        yield found, [f"model.tinker.{name}={value}" for name, value in remote.items()] + saves


def common(root: Path, name: str, assets: Path, remote: list[str]) -> list[str]:
    return [
        f"name={name}",
        f"checkpoint_root_dir={root}",
        "monitor=none",
        f"model.model_path={assets / 'model'}",
        "model.max_prompt_tokens=16",
        "model.max_response_tokens=8",
        *remote,
    ]


def rows_of(root: Path, name: str, assets: Path, remote: list[str]) -> list[str]:
    return [
        "experiment=sft",
        *common(root, name, assets, remote),
        "buffer.train_batch_size=8",
        "algorithm.optimizer.lr=2e-3",
        f"buffer.trainer_input.experience_buffer.path={assets / 'train.jsonl'}",
    ]


def rollouts(root: Path, name: str, assets: Path, remote: list[str]) -> list[str]:
    return [
        "experiment=tinker",
        *common(root, name, assets, remote),
        "algorithm.repeat_times=4",
        "buffer.batch_size=4",
        "buffer.total_epochs=1000",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
    ]


def killed_and_continued(
    service: Service, job: Path, arguments: list[str]
) -> list[dict[str, float]]:
    """The run's first attempt ends in the middle of an update;
    returns the steps that it had told of.
    """
    reached, go = threading.Event(), threading.Event()

    def hold(trainee: Trainee) -> None:
        if trainee.updates == KILLED_AT:
            reached.set()
            go.wait(START_S)

    service.before_update = hold
    with train(*arguments) as run:
        assert reached.wait(START_S), run.errors()
        run.kill_everything()
    service.before_update = lambda trainee: None
    go.set()
    assert [path.name for path in (job / "remote").iterdir()] == [f"step_{SAVE_INTERVAL:08d}.json"]
    told = step_rows(job)
    with train(*arguments) as run:
        assert (run.end(), run.errors()) == (0, "")
    return told


def check_every_step_once(
    service: Service, job: Path, told: list[dict[str, float]], steps: int
) -> None:
    rows = step_rows(job)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["step"] for row in told] == list(range(1, KILLED_AT + 1))
    for before, after in zip(told, rows, strict=False):
        for name in ("loss", "grad_norm", "lr", "num_tokens"):
            assert before[name] == after[name], (
                f"step {before['step']} is another one after the resume"
            )
    states = {
        path: saved["updates"]
        for path, saved in service.saved.items()
        if path.split("/")[3] == "weights"
    }
    final = [updates for path, updates in states.items() if path.endswith(f"step_{steps:08d}")]
    assert final == [steps], "every update was made once on the line that survives"


def test_rows_are_learned_and_a_killed_run_goes_on_exactly(
    service: tuple[Service, list[str]], assets: Path, tmp_path: Path
) -> None:
    fake, remote = service
    steps, job = 10, tmp_path / "rft" / "rows"
    arguments = [*rows_of(tmp_path, "rows", assets, remote), f"trainer.total_steps={steps}"]
    told = killed_and_continued(fake, job, arguments)
    check_every_step_once(fake, job, told, steps)
    losses = [row["loss"] for row in step_rows(job)]
    assert losses[-1] < 0.7 * losses[0]


def test_rollouts_are_learned_and_none_is_trained_twice(
    service: tuple[Service, list[str]], assets: Path, tmp_path: Path
) -> None:
    fake, remote = service
    steps, job = 14, tmp_path / "rft" / "rollouts"
    digits = tmp_path / "digits.py"
    digits.write_text(
        "def reward(response, truth, task):\n    return sum(map(str.isdigit, response)) / 8\n"
    )
    held_out = (
        f"{{name:held_out,path:{assets / 'eval.jsonl'},format:{{prompt_type:plaintext}},"
        "default_reward_fn_type:exact_match}"
    )
    arguments = [
        *rollouts(tmp_path, "rollouts", assets, remote),
        "algorithm.optimizer.lr=1e-2",
        f"trainer.total_steps={steps}",
        f"buffer.explorer_input.default_reward_fn_type={digits}:reward",
        f"buffer.explorer_input.eval_tasksets=[{held_out}]",
        "synchronizer.max_staleness=0",
    ]
    told = killed_and_continued(fake, job, arguments)
    check_every_step_once(fake, job, told, steps)
    History(job / "buffer" / "experience_buffer").check_exactly_once(steps)
    rows = step_rows(job)
    assert all(
        row["staleness/max"] == 0 and row["staleness/unversioned_tokens"] == 0 for row in rows
    )
    assert max(row["logprob_diff/max"] for row in rows) < 1e-4, (
        "what is trained is what was sampled"
    )
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    assert [row["step"] for row in metrics(job) if "eval/held_out/accuracy" in row] == [0, steps]


def test_what_the_service_refuses_ends_the_run_with_its_words(
    service: tuple[Service, list[str]], assets: Path, tmp_path: Path
) -> None:
    arguments = rows_of(tmp_path, "refused", assets, service[1])
    with train(*arguments, "model.tinker.base_model=another") as run:
        assert run.end() == 10
        assert is_one_line(
            run.errors(),
            "trainer rank 0 failed",
            "model.tinker.base_model=another: the service has toy",
        )
