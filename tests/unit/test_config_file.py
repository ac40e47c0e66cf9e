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
from rft.config.trinity_defaults import DEFAULTS, EVALUATED, OTHERWISE, SETS
from rft.ground.errors import Late

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


ITEM = "explorer.auxiliary_models"
BARE = {"name": "judge", "model_path": "judge"}
ITEMS = {  # a file of nothing but an item, by the list that has it
    ITEM: {"explorer": {"auxiliary_models": [BARE]}},
    "model.lora_configs": {"model": {"lora_configs": [{}]}},
}


def list_of(key: str) -> str:
    """The list that has items with this key."""
    return next((one for one in ITEMS if key.startswith(f"{one}.")), "")


def numbered(key: str) -> str:
    """The key of the first item."""
    return key.replace(f"{list_of(key)}.", f"{list_of(key)}.0.") if list_of(key) else key


def nested(key: str, value: Any) -> str:
    """A file of this one key, with rft's defaults; an item of a list has what it must have."""
    inner = key.removeprefix(f"{list_of(key)}.")
    node = value
    for word in reversed(inner.split(".")):
        node = {word: node}
    if inner != key:
        ((section, lists),) = ITEMS[list_of(key)].items()
        node = {section: {word: [items[0] | node] for word, items in lists.items()}}
    return OmegaConf.to_yaml(OmegaConf.create({"defaults": "rft"} | node))


def here(found: Flat, key: str) -> Any:
    """The value of rft's key; of an item the one of the first."""
    node: Any = found.config
    for word in numbered(key).split("."):
        node = node[int(word)] if isinstance(node, list) else node[word]
    return node


VALUES = {  # that a key with a type of its own can hold
    "algorithm.optimizer.warmup_style": "cosine",
    "trainer.enable_preview": 0,
    "explorer.rollout_model.extra_engine_args": {"block_size": 16},
    f"{ITEM}.extra_engine_args": {"block_size": 16},
    f"{configs.TASKSET_KEY}.data_selector.feature_keys": ["a"],
    f"{configs.TASKSET_KEY}.data_selector.kwargs": {"m": 1},
}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_taken_or_refused_and_never_ignored(tmp_path: Path, name: str) -> None:
    key = KEYS[name]
    empty = Flat(written(tmp_path, nested(name, None))).config
    assert empty == ITEMS.get(list_of(name), {}), "null is not set"
    if key.to is not None:
        value = VALUES.get(name, key.only[0] if key.only else 1)
        found = Flat(written(tmp_path, nested(name, value)))
        assert not found.problems and here(found, key.to) == key.convert(value)
        assert found.notes and key.to in found.notes[0].line
        of_vllm = key.to.rpartition(".")[0].endswith("engine_args")
        assert of_vllm or key.to in {*configs.known_keys(), *configs.item_keys()}
        return
    for value in key.only:
        found = Flat(written(tmp_path, nested(name, value)))
        assert found.config == empty and not found.problems
    odd, place = "something else", numbered(name)
    found = Flat(written(tmp_path, nested(name, odd)))
    if key.takes_any:
        assert [note.line for note in found.notes] == [f"{place}={odd}: {key.why}"]
        assert not found.problems
    else:
        (problem,) = found.problems
        assert f"{place}={odd} is refused: {key.why}" in problem.sentence and key.why
        assert isinstance(problem.sentence, Late) == key.late


@pytest.mark.parametrize("name", [one for one in KEYS if not list_of(one)])
def test_the_command_line_refuses_it_with_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configs.check_overrides([f"+{name}=1"])
    assert str(refused.value) == f"{name} is no key of rft: {KEYS[name].instead}"


def test_tables_are_of_keys_that_exist() -> None:
    known = {*configs.known_keys(), *configs.item_keys()}
    assert not known.intersection(KEYS), "rft has it now: take it out of rft/config/trinity.py"
    sets = {f"{configs.TASKSET_KEY}.{word}" for word in (*SETS, *EVALUATED)}
    plain = {one for one in DEFAULTS if "_args." not in one}
    assert {*RENAMED, *NAMES, *OTHERWISE, *sets, *plain} <= known


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
    "defaults: [a]": "defaults=['a']: keys that are left out have the defaults of",
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
        ":4: unknown key `stages.0.trainr.x`",
    ):
        assert any(said in problem for problem in of_the_file), said
    assert "did you mean `trainer.grad_clip`" in of_the_command


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.algorithm_type",
        f"{trinity_keys.TASKSET}s",
        "buffer.explorer_input.eval_tasksets",
        "buffer.trainer_input.auxiliary_buffers",
        "stages",
        "trainer.trainer_config",
        "algorithm",
    ],
)
@pytest.mark.parametrize("value", [7, True, [1], ["x"], [[]]], ids=str)
def test_a_value_of_another_type_is_refused_in_a_sentence(
    tmp_path: Path, key: str, value: Any
) -> None:
    """Of keys by which defaults of others are found."""
    raw = OmegaConf.create({"explorer": {"max_timeout": 5}})
    OmegaConf.update(raw, key, value, force_add=True)
    file = written(tmp_path, OmegaConf.to_yaml(raw))
    for words in ([], ["algorithm.algorithm_type=dpo"]):
        found = Flat(file, words)
        is_text = key == "algorithm.algorithm_type" and not isinstance(value, list)
        assert is_text or any(key in one.sentence for one in found.problems)


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


FAULTS = """\
project: [x]
name: many
checkpoint_root_dir: runs
mode: both
defaults_: 3
seed: -1
algorithm:
  advantage_fm: grpo
  repeat_times: 0
  optimizer:
    warmup_styl: cosine
    lr: fast
model:
  model_path: /nowhere
  max_model_len: 24
  enabl_thinking: false
buffer:
  batch_size: two
  explorer_input:
    taskset:
      path: /nowhere/train.jsonl
      format: {prompt_typ: x}
    eval_tasksets:
      - path: ${oc.env:NOT_SET_ANYWHERE}
        repeat_tims: 3
      - path: b
        format: {reward_fn_key: [1]}
explorer:
  rollout_model:
    tensor_parallel_size: 0
    gpu_memory_utilization: 3
  auxiliary_models:
    - {name: a, model_path: b}
    - {name: b, model_path: b, dtyp: c}
trainer:
  trainer_type: verl2
  param_offload: true
  trainer_config:
    actor_rollout_ref: {actor: {ppo_epoch: 2}}
monitor: {num_samples: -1}
synchronizer:
  sync_style: odd
"""
LINES = {  # of each fault, and what is said there
    1: "project=['x']: give a text",
    5: "unknown key `defaults_`",
    6: "seed=-1: must be 0",
    8: "did you mean `algorithm.advantage_fn`",
    9: "algorithm.repeat_times=0",
    11: "`algorithm.optimizer.warmup_style`? Of that: set algorithm.optimizer.lr_scheduler_type",
    12: "algorithm.optimizer.lr=fast: give a number",
    14: "model.model_path=/nowhere",
    16: "did you mean `model.enable_thinking`",
    18: "buffer.batch_size=two: give a whole number",
    22: "did you mean `buffer.explorer_input.taskset.format.prompt_type`",
    24: "NOT_SET_ANYWHERE",
    25: "unknown key `buffer.explorer_input.eval_tasksets.0.repeat_tims`",
    27: "buffer.explorer_input.eval_tasksets.1.format.reward_fn_key=[1]: give a text",
    30: "explorer.rollout_model.tensor_parallel_size=0",
    31: "explorer.rollout_model.gpu_memory_utilization=3",
    34: "unknown key `explorer.auxiliary_models.1.dtyp`",
    36: "trainer.trainer_type=verl2 is unknown",
    37: "trainer.param_offload=True is refused",
    39: "unknown key `trainer.trainer_config.actor_rollout_ref.actor.ppo_epoch`",
    40: "monitor.num_samples=-1",
    42: "synchronizer.sync_style=odd is unknown",
}


def test_a_file_with_many_faults_is_told_all_of_them_with_their_lines(tmp_path: Path) -> None:
    file = written(tmp_path, FAULTS)
    with pytest.raises(ConfigError) as refused:
        train.readable(["--config", file, "device=cpu"])
    problems = config_file.located(refused.value).problems
    for line, said in LINES.items():
        (found,) = [one for one in problems if one.startswith(f"{file}:{line}:")]
        assert said in found
    assert len(problems) == len(LINES), "and in the order of the file"
    numbers = [int(one.removeprefix(f"{file}:").partition(":")[0]) for one in problems]
    assert numbers == sorted(numbers)


def test_what_is_not_here_is_told_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "rft.preflight.rules_machine.missing_here", lambda stages: [Late("device: no card")]
    )
    text = (FLAT / "both.yaml").read_text(encoding="utf-8") + "trainr: {x: 1}\n"
    with pytest.raises(ConfigError) as refused:
        train.readable(["--config", written(tmp_path, text), "device=cpu"])
    first, last = config_file.located(refused.value).problems
    assert "unknown key `trainr.x`" in first and last == "device: no card"


STAGES = """
checkpoint_root_dir: ${oc.env:FLAT_ROOT}
algorithm: {algorithm_type: grpo, repeat_times: 4, optimizer: {lr: 0.1}}
model: {model_path: m, temperature: 0.7}
explorer: {max_timeout: 100, max_retry_times: 1}
buffer: {batch_size: 4, explorer_input: {eval_tasksets: [{path: a}], taskset: {path: a}}}
stages:
  - stage_name: first
    mode: train
    algorithm: {algorithm_type: sft}
  - stage_name: second
"""


def test_what_a_file_leaves_out_has_the_defaults_of_its_system(tmp_path: Path) -> None:
    found = Flat(written(tmp_path, STAGES))
    assert not found.problems
    algorithm, given = found.config["algorithm"], found.config["buffer"]["explorer_input"]
    assert algorithm["kl_loss_fn"] == "k2" and algorithm["optimizer"]["min_lr_ratio"] == 0.01
    assert found.config["explorer"]["max_timeout"] == 200.0, "of one attempt there"
    assert found.config["model"]["enable_prompt_truncation"] is True
    for taskset in (given["taskset"], *given["eval_tasksets"]):
        assert taskset["rollout_args"]["temperature"] == 0.7
        assert taskset["format"]["messages_key"] == "message"
    assert given["taskset"]["task_selector"]["selector_type"] == "sequential"
    first, second = found.config["stages"]
    assert first["algorithm"]["optimizer"]["lr"] == 1e-6, "a section of a stage begins anew"
    assert first["algorithm"]["repeat_times"] == 1 and "kl_loss_fn" not in second
    assert first["algorithm"]["kl_loss_fn"] is None
    assert {one.place for one in found.taken} >= {
        "algorithm.kl_loss_fn",
        "synchronizer.sync_timeout",
    }
    bare = Flat(written(tmp_path, f"defaults: rft{STAGES}"))
    assert "kl_loss_fn" not in bare.config["algorithm"] and bare.taken == [
        one for one in found.taken if one.place.endswith("rollout_args.temperature")
    ]
    assert bare.config["explorer"]["max_timeout"] == 100.0


@pytest.mark.parametrize(
    ("given", "mode"),
    [("{}", "offline"), ("{api_key: k}", "online"), ("{mode: disabled}", "disabled")],
)
def test_wandb_is_online_where_there_is_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, mode: str
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = written(tmp_path, f"monitor: {{monitor_type: wandb, monitor_args: {given}}}")
    assert Flat(file).config["monitor"]["monitor_args"]["mode"] == mode
