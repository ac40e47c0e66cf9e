"""Stages: what one inherits, which model it begins with, what cannot be handed over, and that a
failed one, or a signal, ends the run.
"""

import json
import logging
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft import config as configs
from rft import preflight
from rft.config import Config, ConfigError
from rft.run import launch, stages
from rft.run.supervisor import Event

GLOBAL = {
    "name": "run",
    "model": {"model_path": "base", "max_response_tokens": 8},
    "algorithm": {"optimizer": {"lr": 1e-5, "weight_decay": 0.1}},
    "buffer": {
        "batch_size": 7,
        "total_epochs": 3,
        "explorer_input": {"default_reward_fn_type": "math"},
    },
    "explorer": {"runner_per_model": 5},
    "trainer": {"grad_clip": 0.5, "save_interval": 9},
}


def staged(root: Path, *own: dict[str, Any]) -> list[Config]:
    numbered = [{"stage_name": f"s{number}", **keys} for number, keys in enumerate(own)]
    return configs.stage_configs(
        OmegaConf.create({**GLOBAL, "checkpoint_root_dir": str(root), "stages": numbered})
    )


def finish(config: Config) -> str:
    """What a finished stage leaves; returns its export."""
    export = configs.job_dir(config) / "huggingface" / "step_00000003"
    export.mkdir(parents=True)
    result = {"version": 3, "complete": True, "asked": 3, "huggingface": str(export)}
    (configs.job_dir(config) / "result.json").write_text(json.dumps(result))
    return str(export)


def test_a_stage_that_sets_one_key_of_a_section_inherits_the_others(tmp_path: Path) -> None:
    warmup, tuned = staged(
        tmp_path,
        {
            "mode": "train",
            "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 1e-3}},
            "buffer": {"total_steps": 100},
            "trainer": {"grad_clip": 2.0},
        },
        {
            "algorithm": {"algorithm_type": "ppo"},
            "explorer": {"runner_per_model": 6},
            "buffer": {"explorer_input": {"taskset": {"path": "x"}}},
        },
    )
    assert (warmup.mode, warmup.algorithm.algorithm_type, warmup.algorithm.optimizer.lr) == (
        "train",
        "sft",
        1e-3,
    )
    assert warmup.algorithm.optimizer.weight_decay == 0.1 and warmup.explorer.runner_per_model == 5
    assert (warmup.buffer.total_steps, warmup.buffer.batch_size, warmup.buffer.total_epochs) == (
        100,
        7,
        3,
    )
    assert (warmup.trainer.grad_clip, warmup.trainer.save_interval) == (2.0, 9)
    assert (tuned.mode, tuned.algorithm.algorithm_type, tuned.algorithm.optimizer.lr) == (
        "both",
        "ppo",
        1e-5,
    )
    assert (
        tuned.explorer.runner_per_model == 6
        and tuned.buffer.total_steps is None
        and tuned.trainer.grad_clip == 0.5
    )
    assert tuned.buffer.explorer_input.default_reward_fn_type == "math"
    assert (
        tuned.buffer.explorer_input.taskset is not None
        and tuned.buffer.explorer_input.taskset.path == "x"
    )


def test_each_stage_begins_with_the_export_of_the_one_before(tmp_path: Path) -> None:
    found = staged(tmp_path, {}, {}, {"mode": "explore"}, {"model": {"model_path": "other"}}, {})
    first, second = finish(found[0]), finish(found[1])
    finish(found[3])
    begins = [stages.with_model(found, index).model.model_path for index in range(5)]
    assert begins == ["base", first, second, "other", second], (
        "exploring exports nothing, and another model is another line"
    )
    assert [config.model.model_path for config in found] == [
        "base",
        "base",
        "base",
        "other",
        "base",
    ], "configs stay as given"


def test_complete_exports_are_found_the_newest_last(tmp_path: Path) -> None:
    (config,) = staged(tmp_path, {})
    job = configs.job_dir(config)
    assert stages.exports(job) == []
    with pytest.raises(ConfigError, match="mode=bench: no Hugging Face export"):
        stages.check_exports(config)
    finish(config)
    for name in ("step_00000010", ".step_00000011.draft", "step_00000012.draft"):
        (job / "huggingface" / name).mkdir()
    assert stages.exports(job) == [(n, stages.export_dir(job, n)) for n in (3, 10)]
    stages.check_exports(config)


def test_a_stage_whose_model_is_gone_says_so(tmp_path: Path) -> None:
    found = staged(tmp_path, {}, {})
    Path(finish(found[0])).rmdir()
    with pytest.raises(
        ConfigError, match="s1 goes on from .*step_00000003, which is gone: export it again"
    ):
        stages.with_model(found, 1)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            {"model": {"lora_configs": [{"lora_rank": 4}]}},
            {},
            "s1 would go on from s0, which exports an adapter",
        ),
        (
            {"trainer": {"save_hf_checkpoint": "never"}},
            {},
            "which exports nothing: .*set trainer.save_hf_checkpoint=last in s0",
        ),
        ({}, {"mode": "bench"}, "s1 has mode=bench, .*set explorer.eval_interval"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_before_anything_starts(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        stages.check(staged(tmp_path, first, second))
    stages.check(staged(tmp_path, first, {"model": {"model_path": "other"}}))


def test_a_key_that_every_stage_sets_is_refused_on_the_command_line() -> None:
    raw = OmegaConf.create(
        {"stages": [{"trainer": {"total_steps": 1}, "seed": 0}, {"trainer": {"total_steps": 2}}]}
    )
    with pytest.raises(
        ConfigError,
        match="trainer.total_steps is set by every stage.*stages.0.trainer.total_steps or stages.1",
    ):
        configs.check_stage_overrides(raw, ["experiment=x", "trainer.total_steps=5"])
    configs.check_stage_overrides(
        raw, ["seed=1", "stages.0.trainer.total_steps=5", "trainer.grad_clip=1"]
    )
    configs.check_stage_overrides(OmegaConf.create({"stages": [], "seed": 0}), ["seed=1"])


def test_debug_fast_reaches_every_stage() -> None:
    """Also a stage that sets the key for itself; what it would hide is refused."""
    raw = configs.compose(["experiment=quickstart", "debug=fast"])
    found = configs.stage_configs(raw)
    assert [config.trainer.total_steps for config in found] == [3, 3]
    assert [config.trainer.save_interval for config in found] == [100, 25], "the rest stays"
    assert not found[1].explorer.eval_on_startup and not found[1].every_stage
    for key in ("trainer.total_steps", "stages.1.trainer.total_steps"):
        with pytest.raises(
            ConfigError, match=f"^{key}: every_stage.trainer.total_steps wins over it"
        ):
            configs.check_stage_overrides(raw, [f"{key}=5"])
    configs.check_stage_overrides(
        raw, ["every_stage.trainer.total_steps=5", "stages.1.trainer.save_interval=2"]
    )
    (alone,) = configs.stage_configs(
        configs.compose(["debug=fast", "trainer.total_steps=5", "model.model_path=base"])
    )
    assert alone.trainer.total_steps == 5


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run does to the root logger ends with the test."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)


def test_every_stage_has_a_log_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_logging: None
) -> None:
    found = staged(tmp_path, {}, {})

    def run(stage: launch.StageRun) -> None:
        logging.getLogger("rft.run.launch").info("this is %s", stage.config.stage_name)
        finish(stage.config)

    monkeypatch.setattr(launch.StageRun, "run", run)
    assert launch.run_stages(found, preflight.check) == 0
    for config in found:
        told = (configs.job_dir(config) / "supervisor.log").read_text()
        assert told.count("\n") == 1 and told.endswith(f"this is {config.stage_name}\n")


def test_a_failed_stage_ends_the_run_with_its_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own_logging: None,
) -> None:
    found = staged(tmp_path, {}, {}, {})
    finish(found[0])
    began: list[str | None] = []

    def run(stage: launch.StageRun) -> None:
        began.append(stage.config.stage_name)
        raise launch.StageFailed(11, "engine_0 failed while decoding: gone")

    monkeypatch.setattr(launch.StageRun, "run", run)
    assert launch.run_stages(found, preflight.check) == 11 and began == ["s1"]
    told = capsys.readouterr()
    assert told.err == "rft: engine_0 failed while decoding: gone\n" and told.out.startswith(
        "s0: already finished"
    )


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        ("serve", signal.SIGTERM, 0),
        ("serve", signal.SIGINT, 0),
        ("serve", signal.SIGUSR1, 138),  # launch/slurm.sh puts such a job back into the queue
        ("explore", signal.SIGTERM, 143),
        ("explore", signal.SIGUSR1, 138),
    ],
)
def test_a_signal_ends_the_run_and_not_its_stage_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    own_logging: None,
    mode: str,
    number: signal.Signals,
    code: int,
) -> None:
    """A closing function is for runs whose stages have all come to their end."""
    found = staged(tmp_path, {"mode": mode}, {})
    began: list[Any] = []

    def run(stage: launch.StageRun) -> None:
        began.append(stage.config.stage_name)
        event = Event("user", signal=number)
        stage.supervisor = SimpleNamespace(  # type: ignore[assignment]
            first_event=lambda: event, is_ready=True
        )
        stage._wait()

    monkeypatch.setattr(launch.StageRun, "run", run)
    found[0].finish = "recipe:close"
    monkeypatch.setattr(launch, "imported", lambda name: began.append)
    assert launch.run_stages(found, preflight.check) == code and began == ["s0"]
    told = capsys.readouterr()
    assert f"stopped by {number.name}" in (told.err if code else told.out)

    if mode == "serve":
        began.clear()
        assert launch.run_stages(found[:1], preflight.check) == code
        assert began == ["s0"] + [found[:1]] * (code == 0), "the last stage has come to its end"
