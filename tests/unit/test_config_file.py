"""A flat file of Trinity-RFT's keys is a config: what is not rft's is translated or refused, and
nothing is ignored.
"""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft import config as configs
from rft import train
from rft.config import Config, ConfigError
from rft.config import file as config_file
from rft.config import trinity as trinity_keys
from rft.config.file import Flat
from rft.config.trinity import KEYS, NAMES, RENAMED

FLAT = Path(__file__).parent / "flat"


@pytest.fixture(autouse=True)
def places(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ROOT", tmp_path), ("MODEL", assets / "model"), ("DATA", assets)):
        monkeypatch.setenv(f"FLAT_{name}", str(value))


def prepared(file: Path | str, *overrides: str) -> list[Config]:
    arguments = config_file.registered(["--config", str(file), "device=cpu", *overrides])
    configs.check_overrides(arguments)
    return train.prepared_stages(configs.compose(arguments))


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return str(tmp_path / "run.yaml")


def test_a_whole_file_runs_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config,) = prepared(FLAT / "both.yaml")
    assert (config.project, config.name, config.mode) == ("flat", "both", "both")
    assert (
        config.trainer.trainer_type == "megatron" and config.trainer.max_token_len_per_gpu == 16384
    )
    assert config.algorithm.optimizer.lr_scheduler_type == "constant"
    given = config.buffer.explorer_input
    assert given.taskset is not None and given.taskset.default_workflow_type == "single_turn"
    assert given.eval_tasksets[0].default_workflow_type == "math_think"
    assert [t.default_reward_fn_type for t in (given.taskset, *given.eval_tasksets)] == [
        "accuracy_reward",
        "accuracy_reward",
    ]
    assert (
        given.default_reward_fn_type == "math_reward"
        and given.eval_tasksets[0].rollout_args.temperature == 0.1
    )
    assert config.buffer.trainer_input.experience_buffer.path is None
    assert (config.synchronizer.sync_interval, config.synchronizer.max_staleness) == (10, 9)
    said = capsys.readouterr().err
    for name in (
        "trainer.trainer_type=verl",
        "trainer.trainer_strategy=fsdp",
        "experience_buffer.path=sqlite:///",
        "buffer.default_workflow_type=simple_workflow",
    ):
        assert name in said, "what means something else here is said"
    assert "planted" not in said


def test_types_that_differ_in_where_they_compute_are_one_here(tmp_path: Path) -> None:
    """Row W55: a type that computes the advantages of another one elsewhere is that one."""
    text = (FLAT / "both.yaml").read_text(encoding="utf-8")
    assert "algorithm_type: grpo" in text
    (config,) = prepared(
        written(tmp_path, text.replace("algorithm_type: grpo", "algorithm_type: grpo_verl"))
    )
    assert (config.algorithm.algorithm_type, config.algorithm.advantage_fn) == ("grpo", "grpo")


def test_stages_of_a_file_are_translated_and_inherit(tmp_path: Path) -> None:
    warmup, tuned = prepared(FLAT / "stages.yaml", "buffer.batch_size=2")
    assert (warmup.mode, tuned.mode) == ("train", "both")
    assert (
        warmup.algorithm.optimizer.lr_scheduler_type == "cosine" and warmup.trainer.grad_clip == 0.5
    )
    assert (warmup.buffer.total_steps, tuned.buffer.total_steps) == (3, 5)
    assert warmup.buffer.batch_size == tuned.buffer.batch_size == 2, (
        "the command line wins, in every stage"
    )
    assert tuned.algorithm.optimizer.lr_scheduler_type == "constant", (
        "and a stage inherits nothing from another"
    )


def test_explore_alone(tmp_path: Path) -> None:
    (config,) = prepared(FLAT / "explore.yaml")
    assert (config.synchronizer.sync_method, config.synchronizer.sync_interval) == ("checkpoint", 2)
    assert (
        config.algorithm.proximal_logprobs
        and config.model.max_prompt_tokens == config.model.max_response_tokens == 12
    )


def test_a_flat_file_and_overrides_are_the_same_config(assets: Path, tmp_path: Path) -> None:
    keys = [
        "mode=explore",
        "project=flat",
        "name=explore",
        f"checkpoint_root_dir={tmp_path}",
        "algorithm.algorithm_type=ppo",
        "algorithm.repeat_times=2",
        "algorithm.proximal_logprobs=true",
        f"model.model_path={assets / 'model'}",
        "model.max_model_len=24",
        "cluster.gpu_per_node=8",
        "buffer.batch_size=2",
        "synchronizer.sync_interval=2",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
        "experiment=grpo",
        "buffer.trainer_input.experience_buffer.name=experiences",
        "explorer.rollout_model.engine_num=2",
        "synchronizer.sync_method=checkpoint",
        "device=cpu",
        "synchronizer.max_staleness=null",
        "trainer.save_interval=0",
        "buffer.explorer_input.default_reward_fn_type=exact_match",
    ]
    assert train.prepared_stages(configs.compose(keys)) == prepared(FLAT / "explore.yaml")


def nested(key: str, value: Any) -> str:
    node = value
    for word in reversed(key.split(".")):
        node = {word: node}
    return OmegaConf.to_yaml(OmegaConf.create(node))


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_taken_or_refused_and_never_ignored(tmp_path: Path, name: str) -> None:
    key = KEYS[name]
    assert Flat(written(tmp_path, nested(name, None))).config == {}, "null is not set"
    if key.to is not None:
        value = {"algorithm.optimizer.warmup_style": "cosine", "trainer.enable_preview": 0}.get(
            name, 1
        )
        found = Flat(written(tmp_path, nested(name, value)))
        assert OmegaConf.select(OmegaConf.create(found.config), key.to) == key.convert(value)
        assert found.notes and key.to in found.notes[0]
        assert key.to in configs.known_keys()
        return
    for value in key.only:
        assert Flat(written(tmp_path, nested(name, value))).config == {}
    odd = "something else"
    if key.takes_any:
        assert Flat(written(tmp_path, nested(name, odd))).notes == [f"{name}={odd}: {key.why}"]
    else:
        with pytest.raises(ConfigError) as refused:
            config_file.registered(["--config", written(tmp_path, nested(name, odd))])
        assert f"{name}={odd} is refused: {key.why}" in str(refused.value) and key.why


@pytest.mark.parametrize("name", KEYS)
def test_the_command_line_refuses_it_with_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configs.check_overrides([f"+{name}=1"])
    assert str(refused.value) == f"{name} is no key of rft: {KEYS[name].instead}"
    assert name not in configs.known_keys(), (
        f"rft has {name} now: take it out of rft/config/trinity.py"
    )


def test_renamed_values_are_of_keys_that_exist() -> None:
    assert {*RENAMED, *NAMES} <= set(configs.known_keys())


def test_names_of_the_reference_are_refused_with_the_reason() -> None:
    for key, (names, why) in NAMES.items():
        for name in names:
            assert why in configs.nearest(
                name, ["something"], key
            ) and f"{key}={name}" in configs.nearest(name, [], key)
    assert trinity_keys.of_value("stages.0.monitor.monitor_type", "swanlab")


REFUSED = {
    "trainer: {totl_steps: 3}": "did you mean `trainer.total_steps`",
    "stages: [{stage_name: a, buffer: {batch_siz: 3}}]": "did you mean `buffer.batch_size`",
    (
        "stages: [{stage_name: a, synchronizer: {max_inflight_batches: 2}}]"
    ): "stages.0.synchronizer.max_inflight_batches=2 is refused",
    (
        "buffer: {explorer_input: {eval_tasksets: [{path: a, format: {image_key: image}}]}}"
    ): "eval_tasksets.0.format.image_key=image",
    "buffer: {explorer_input: {eval_tasksets: [a.jsonl]}}": "eval_tasksets.0 is 'a.jsonl'",
    (
        "buffer: {explorer_input: {tasksets: [{path: a, format: {image_key: image}}]}}"
    ): "tasksets.0.format.image_key=image",
    (
        "algorithm: {optimizer: {warmup_style: cosine, lr_scheduler_type: linear}}"
    ): "both are algorithm.optimizer.lr_scheduler_type",
    "defaults: [a]": "unknown key `defaults`",
    "- a": "a section of keys",
    "a: [": "is no YAML",
    "algorithm: {bypass_old_logprobs: '${oc.env:NOT_SET_ANYWHERE}'}": "NOT_SET_ANYWHERE",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_that_cannot_be_taken_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        config_file.registered(["--config", file])
    assert REFUSED[text] in str(refused.value) and file in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_every_wrong_key_and_value_of_a_file_is_told_in_one_start(tmp_path: Path) -> None:
    text = """
trainer: {totl_steps: 3, total_steps: x, param_offload: true}
buffer: {batch_siz: 3, explorer_input: {eval_tasksets: [{pth: a}]}}
stages: [{stage_name: a, trainr: {x: 1}, mode: bot}]
monitor: {num_samples: -1}
"""
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        config_file.registered(["--config", file, "trainer.gradclip=1"])
    *of_the_file, of_the_command = refused.value.problems
    assert len(of_the_file) == 8 and all(problem.startswith(file) for problem in of_the_file)
    for said in (
        "mode=bot is unknown",
        "trainer.total_steps=x",
        "monitor.num_samples=-1",
        "`trainr.x`",
    ):
        assert any(said in problem for problem in of_the_file), said
    assert "did you mean `trainer.grad_clip`" in of_the_command


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLAT_MODEL")
    with pytest.raises(ConfigError, match="FLAT_MODEL"):
        prepared(FLAT / "both.yaml")


def test_file_and_recipe_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="experiment=grpo: a file is a whole config"):
        config_file.registered(["--config=run.yaml", "experiment=grpo"])
    with pytest.raises(ConfigError, match="nowhere.yaml: No such file"):
        config_file.registered(["--config", "nowhere.yaml"])
    with pytest.raises(ConfigError, match="needs a file"):
        config_file.registered(["--config"])
    assert config_file.registered(["--config-dir", "a", "b=c"]) == ["--config-dir", "a", "b=c"]
