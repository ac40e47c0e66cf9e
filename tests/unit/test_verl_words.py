"""A whole veRL command line is understood: every key of it is one of ours, a line, or a refusal."""

import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rft import config as configs
from rft import train
from rft.config import Config, ConfigError, verl_run, verl_words
from rft.config import file as config_file
from rft.config.verl_joints import JOINTS
from rft.tools import config as config_tool

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
SETS, CORR = "buffer.explorer_input", "algorithm.rollout_correction"
# keys as they stand in published scripts, with values of our own
GRPO = f"""
algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_prompt_length=24
data.max_response_length=32 data.filter_overlong_prompts=True data.truncation='error'
data.return_raw_chat=True {A}.optim.lr=3e-6 {M}.use_remove_padding=True {A}.ppo_mini_batch_size=16
{A}.ppo_micro_batch_size_per_gpu=4 {A}.use_kl_loss=True {A}.kl_loss_coef=0.002
{A}.kl_loss_type=low_var_kl {A}.entropy_coeff=0 {M}.enable_gradient_checkpointing=False
{A}.fsdp_config.param_offload=True {A}.fsdp_config.optimizer_offload=True
{R}.log_prob_micro_batch_size_per_gpu=8 {R}.tensor_model_parallel_size=1 {R}.name=vllm {R}.n=5
{R}.gpu_memory_utilization=0.8 {R}.load_format=safetensors {R}.layered_summon=True
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False
trainer.critic_warmup=0 trainer.logger=["console","tensorboard"] trainer.project_name=sums
trainer.experiment_name=small trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.save_freq=20
trainer.test_freq=5 trainer.total_epochs=3
""".split()
PPO = f"""
algorithm.adv_estimator=gae algorithm.gamma=0.9 algorithm.lam=0.8 data.train_batch_size=64
{A}.ppo_mini_batch_size=64 {A}.use_dynamic_bsz=True {A}.ppo_max_token_len_per_gpu=4096
{A}.ppo_epochs=2 {A}.clip_ratio_low=0.1 {A}.clip_ratio_high=0.3 {A}.clip_ratio_c=10.0
critic.optim.lr=2e-5 critic.model.enable_gradient_checkpointing=True critic.cliprange_value=0.4
critic.ppo_max_token_len_per_gpu=8192 algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl
algorithm.kl_ctrl.kl_coef=0.01 algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2
{R}.temperature=0.7 {R}.top_p=0.9 {R}.top_k=20 {R}.val_kwargs.do_sample=True
{R}.val_kwargs.temperature=0.6 {R}.val_kwargs.n=4 {R}.tensor_model_parallel_size=1
data.truncation=left data.shuffle=False data.seed=7 trainer.logger=console {A}.entropy_coeff=0.01
trainer.resume_mode=disable trainer.default_local_dir=/runs/verl_examples/gsm8k
{A}.loss_agg_mode=seq-mean-token-mean trainer.n_gpus_per_node=1 trainer.val_before_train=False
""".split()
MEGATRON = f"""
--config-path=config --config-name='ppo_megatron_trainer.yaml'
{A}.megatron.tensor_model_parallel_size=2 {A}.megatron.pipeline_model_parallel_size=2
+{A}.megatron.override_transformer_config.apply_rope_fusion=True
+{A}.megatron.override_transformer_config.recompute_granularity=full
{A}.megatron.param_offload=True actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
+{R}.engine_kwargs.vllm.block_size=32 {R}.max_num_batched_tokens=4096 algorithm.adv_estimator=rloo
reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
+reward_model.reward_kwargs.overlong_buffer_cfg.len=8
+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5
+reward_model.reward_kwargs.overlong_buffer_cfg.log=False
+algorithm.filter_groups.enable=True +algorithm.filter_groups.metric=acc
+algorithm.filter_groups.max_num_gen_batches=10 {A}.policy_loss.loss_mode=gspo
trainer.nnodes=2 {M}.lora_rank=8 {M}.target_modules=[q_proj,v_proj]
custom_reward_function.path=score.py custom_reward_function.name=mine
+custom_reward_function.reward_kwargs.bonus=0.5 global_profiler.steps=[1,2]
""".split()


def read(*words: str) -> verl_words.VerlRun:
    return verl_words.read(list(words))


def value(run: verl_words.VerlRun, key: str) -> Any:
    node: Any = run.config
    for word in key.split("."):
        node = node[word]
    return node


def said(run: verl_words.VerlRun) -> str:
    return " ".join(problem.sentence for problem in run.problems)


EXPECTED: list[tuple[list[str], dict[str, Any]]] = [
    (
        GRPO,
        {
            "project": "sums",
            "name": "small",
            "checkpoint_root_dir": "checkpoints",
            "algorithm.algorithm_type": "grpo",
            "algorithm.repeat_times": 5,
            "algorithm.optimizer.lr": 3e-6,
            "algorithm.kl_loss_fn": "low_var_kl",
            "algorithm.kl_loss_fn_args": {"kl_coef": 0.002},
            "algorithm.kl_penalty_fn": "none",
            "algorithm.entropy_loss_fn": "none",
            "algorithm.proximal_logprobs": True,
            "buffer.batch_size": 64,
            "buffer.total_epochs": 3,
            "trainer.ppo_mini_batch_size": 80,  # of prompts there, of experiences here
            "trainer.ppo_micro_batch_size_per_gpu": 4,
            "trainer.use_dynamic_bsz": False,
            "trainer.recompute_granularity": None,
            "trainer.save_interval": 20,
            "trainer.max_checkpoints_to_keep": 0,
            "trainer.num_ranks": 2,
            "cluster.colocate": True,
            "explorer.eval_interval": 5,
            "explorer.rollout_model.engine_num": 2,
            "explorer.rollout_model.gpu_memory_utilization": 0.6,
            "model.enable_prompt_truncation": False,
            "model.max_prompt_tokens": 24,
            "model.max_response_tokens": 32,
            "monitor.monitor_type": "tensorboard",
            f"{SETS}.taskset.default_reward_fn_type": "verl",
            f"{SETS}.taskset.format.messages_key": "prompt",
        },
    ),
    (
        PPO,
        {
            "algorithm.algorithm_type": "ppo",
            "algorithm.advantage_fn_args": {"gamma": 0.9, "lam": 0.8},
            "algorithm.policy_loss_fn_args": {
                "clip_range_low": 0.1,
                "clip_range_high": 0.3,
                "clip_ratio_c": 10.0,
            },
            "algorithm.loss_agg_mode": "seq-mean-token-mean",
            "algorithm.kl_loss_fn": "none",
            "algorithm.kl_penalty_fn": "k1",
            "algorithm.kl_penalty_fn_args": {
                "kl_coef": 0.01,
                "adaptive": True,
                "target_kl": 0.2,
                "horizon": 10000,
            },
            "algorithm.entropy_loss_fn_args": {"entropy_coef": 0.01},
            "trainer.ppo_epochs": 2,
            "trainer.max_token_len_per_gpu": 4096,
            "critic.optim.lr": 2e-5,
            "critic.cliprange_value": 0.4,
            f"{SETS}.taskset.shuffle": False,
            f"{SETS}.taskset.task_selector.seed": 7,
            f"{SETS}.taskset.rollout_args": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
            "model.enable_prompt_truncation": True,
            "checkpoint_root_dir": "/runs",
            "project": "verl_examples",
            "name": "gsm8k",
            "continue_from_checkpoint": False,
            "monitor.monitor_type": "none",
            "explorer.eval_on_startup": False,
        },
    ),
    (
        MEGATRON,
        {
            "algorithm.algorithm_type": "rloo",
            "algorithm.policy_loss_fn": "gspo",
            "algorithm.loss_agg_mode": "seq-mean-token-mean",
            "trainer.megatron.tensor_model_parallel_size": 2,
            "trainer.megatron.pipeline_model_parallel_size": 2,
            "trainer.megatron.sequence_parallel": True,
            "trainer.megatron.override_transformer_config": {"apply_rope_fusion": True},
            "trainer.recompute_granularity": "full",
            "explorer.rollout_model.engine_args": {
                "block_size": 32,
                "max_num_batched_tokens": 4096,
            },
            "model.lora_configs": [
                {"lora_rank": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
            ],
            "cluster.node_num": 2,
            "data_processor.experience_pipeline.operators": [
                {"name": "dapo_dynamic_sampling", "args": {"metric_key": "acc"}}
            ],
            f"{SETS}.taskset.reward_fn_args": {
                "path": "score.py",
                "function": "mine",
                "kwargs": {"bonus": 0.5},
                "overlong": 8,
                "penalty_factor": 0.5,
                "max_response_tokens": 512,
            },
        },
    ),
]


@pytest.mark.parametrize(("words", "expected"), EXPECTED, ids=["grpo", "ppo", "megatron"])
def test_a_command_line_is_understood(words: list[str], expected: dict[str, Any]) -> None:
    run = read(*words)
    assert said(run) == ""
    assert {key: value(run, key) for key in expected} == expected
    told = " ".join(note.line for note in run.notes)
    for word in words:
        key = word.lstrip("+").split("=")[0]
        row = verl_run.EVERY.get(key)
        if row is not None and row.takes_any and not word.endswith("=False"):
            assert f"{key}=" in told, "what changes nothing here is said"


def test_evaluation_is_sampled_as_asked() -> None:
    [greedy] = value(read(*GRPO), f"{SETS}.eval_tasksets")
    assert (greedy["rollout_args"], greedy["repeat_times"]) == ({"temperature": 0.0}, 1)
    [sampled] = value(read(*PPO), f"{SETS}.eval_tasksets")
    assert sampled["rollout_args"]["temperature"] == 0.6 and sampled["repeat_times"] == 4


def test_several_files_are_several_sets() -> None:
    run = read("data.train_files=[a/train.parquet,b/train.parquet]", "data.val_files=[a/t.parquet]")
    assert [one["path"] for one in value(run, f"{SETS}.tasksets")] == [
        "a/train.parquet",
        "b/train.parquet",
    ]
    run = read("data.val_files=[a/test.parquet,b/test.parquet]")
    assert [one["name"] for one in value(run, f"{SETS}.eval_tasksets")] == ["a_test", "b_test"]


@pytest.mark.parametrize("joint", JOINTS, ids=lambda joint: joint.make.__name__)
def test_joints_are_of_keys_that_there_are(joint: Any) -> None:
    known = set(configs.known_keys())
    assert set(joint.sets.split()) <= known
    assert all(name in verl_run.EVERY for name in joint.reads.split())


def test_every_row_goes_to_a_key_that_there_is() -> None:
    known = set(configs.known_keys())
    for name, key in verl_run.EVERY.items():
        for to in (key.to or "").split(", ") if key.to else ():
            assert to in known or to.startswith("explorer.rollout_model.engine_args."), name
        assert key.why or key.to, name


REFUSED = [  # a word, and what is said of it
    ("algorithm.adv_estimator=gpg", "use one of gae, grpo"),
    (f"{A}.policy_loss.loss_mode=geo_mean", "use one of vanilla, gspo"),
    (f"{A}.clip_ratio=0.3", "clip_ratio_low and clip_ratio_high"),
    (f"{A}.kl_loss_type=full", ""),
    (f"{R}.name=sglang", "engines are vLLM's"),
    (f"{R}.multi_turn.enable=True", "docs/agents.md"),
    (f"{R}.ignore_eos=True", "where the model ends it"),
    (f"{R}.prompt_length=7", "set only that"),
    ("data.truncation=middle", "set left"),
    ("data.train_max_samples=100", "cut the file"),
    ("data.sampler.class_path=x.py", "a plug-in"),
    ("reward_model.enable=True", "custom_reward_function.path"),
    ("reward_model.reward_manager=batch", "use one of naive, dapo"),
    ("critic.ppo_mini_batch_size=3", "go through the same mini-batches"),
    (f"{A}.ppo_mini_batch_size=2048", "lower it"),
    ("trainer.logger=[wandb,mlflow]", "one service"),
    ("trainer.resume_mode=resume_path", "set trainer.resume_from_path"),
    (f"{R}.tensor_model_parallel_size=3", "does not divide"),
    (f"{R}.tensor_model_parallel_size=0", "give 1 or more"),
    ("trainer.device=npu", "on GPUs or CPUs"),
    (f"+{M}.lora.target_modules=[linear_qkv]", "name others in target_modules"),
    (f"{CORR}.rollout_is_threshold=0_2", "greater than 0"),
    (f"{CORR}.rollout_is_threshold=some", "like 0.5_2.0"),
    (f"{M}.override_config.attention_dropout=0.1", "edit that of model.model_path"),
    ("trainer.nnodes=many", "of another type"),
    ("trainer.total_epochs=many", "give a whole number"),
    ("trainer.totl_epochs=3", "did you mean `trainer.total_epochs`"),
    ("--config-name=mine", "--verl FILE.yaml"),
    ("none.yaml", "No such file"),
    ("data.seed=1,2", "is a sweep"),
    ("word", "cannot be read"),
    ("critic.optim.lr=${nowhere.at.all}", "nowhere"),
]


def test_everything_is_refused_in_one_start() -> None:
    words = [word for word, _ in REFUSED]
    assert said(read(f"+{M}.override_config.attention_dropout=0.", "critic.optim.min_lr=0")) == ""
    alone = {word: said(read(word)) for word in words}
    alone[f"{A}.kl_loss_type=full"] = said(read(f"{A}.kl_loss_type=full", f"{A}.use_kl_loss=True"))
    assert [word for word, message in REFUSED if message not in alone[word]] == []
    assert [word for word in words if not alone[word]] == []
    apart = ("seed", "nnodes", "clip_ratio", "reward_manager", "logger", "adv_est", "resume")
    some = [word for word in words if any(part in word for part in apart)]
    assert len(read(*some).problems) >= len(some)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (  # k1 there is the engine's log-probability minus the policy's
            ["rollout_rs=token_k1", "rollout_rs_threshold=0.5_4.0"],
            {
                "rollout_rs": "token",
                "rollout_rs_threshold": 2.0,
                "rollout_rs_threshold_lower": 0.25,
            },
        ),
        (
            ["rollout_rs=seq_mean_k1", "rollout_rs_threshold=1.25"],
            {"rollout_rs": "geometric", "rollout_rs_threshold": 1.25},
        ),
        (  # older names are of policy / engine, as rft's
            ["rollout_rs=token", "rollout_rs_threshold=4", "rollout_rs_threshold_lower=0.5"],
            {"rollout_rs": "token", "rollout_rs_threshold": 4.0, "rollout_rs_threshold_lower": 0.5},
        ),
        (  # weights outside of a range are 0
            ["rollout_is=token", "rollout_is_threshold=0.5_4.0"],
            {
                "rollout_is": "token",
                "rollout_is_threshold": 4.0,
                "rollout_rs": "token",
                "rollout_rs_threshold": 4.0,
                "rollout_rs_threshold_lower": 0.5,
            },
        ),
        (["rollout_is=token", "bypass_mode=True"], {"rollout_is": "none"}),
    ],
)
def test_a_range_of_veRL_is_the_same_range_here(words: list[str], expected: dict[str, Any]) -> None:
    run = read(*(f"{CORR}.{word}" for word in words))
    assert said(run) == ""
    usual = {"rollout_is": "none", "rollout_is_threshold": 2.0}
    assert value(run, CORR) == usual | expected


def test_bypass_mode_has_the_loss_that_veRL_has_for_it() -> None:
    given = [f"{A}.policy_loss.loss_mode=gspo", f"{CORR}.rollout_is=token"]
    run = read(*given, f"{CORR}.bypass_mode=True")
    assert value(run, "algorithm.policy_loss_fn") == "ppo"
    assert value(run, "algorithm.proximal_logprobs") is False
    told = [note.place for note in run.notes]
    assert f"{A}.policy_loss.loss_mode" in told and f"{CORR}.rollout_is" in told


def test_the_floor_of_a_rate_is_a_share_of_it() -> None:
    run = read(f"{A}.optim.lr=4e-6", f"{A}.optim.min_lr=1e-6", "critic.optim.min_lr=1e-6")
    assert said(run) == ""
    assert value(run, "algorithm.optimizer.min_lr_ratio") == 0.25
    assert value(run, "critic.optim.min_lr_ratio") == pytest.approx(0.1), "of veRL's own 1e-5"
    assert said(read(f"{A}.optim.lr=0", f"{A}.optim.min_lr=1e-6")) != ""


def test_how_many_prompts_a_step_has_is_what_the_loader_draws() -> None:
    given = ["data.train_batch_size=512", "+data.gen_batch_size=1536", f"{R}.n=4"]
    assert value(read(*given), "buffer.batch_size") == 1536
    filtered = read(*given, "+algorithm.filter_groups.enable=True")
    assert value(filtered, "buffer.batch_size") == 512, "until so many are kept"


def test_steps_of_an_optimizer_are_veRL_s_own() -> None:
    run = read(f"{A}.optim.total_training_steps=7", "critic.optim.total_training_steps=7")
    assert said(run) == "" and "total_steps" not in run.config["trainer"]
    assert "total_training_steps" in " ".join(note.place for note in run.notes)


def test_replayed_experts() -> None:
    there = f"{R}.enable_rollout_routing_replay=True"
    for section in (A, f"{A}.megatron"):
        run = read(f"{section}.router_replay.mode=R3", there)
        assert said(run) == "" and value(run, "trainer.router_replay") is True
        assert value(run, "explorer.rollout_model.enable_return_routed_experts") is True
        off = read(f"{section}.router_replay.mode=disabled")
        assert value(off, "trainer.router_replay") is False
        assert "R3: set that" in said(read(f"{section}.router_replay.mode=R2"))


def test_a_section_of_an_engine_s_argument_stays_one() -> None:
    name = f"{R}.engine_kwargs.vllm.compilation_config"
    run = read(f"+{name}.cudagraph_mode=FULL", f"+{name}.level=3")
    found = value(run, "explorer.rollout_model.engine_args")
    assert found == {"compilation_config": {"cudagraph_mode": "FULL", "level": 3}}


NEWER = f"""
model_engine=megatron {A}.megatron.tensor_model_parallel_size=2
ray_kwargs.ray_init.runtime_env.py_executable=null ray_kwargs.ray_init.num_gpus=8
reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True
+reward.reward_kwargs.overlong_buffer_cfg.len=8 +reward.reward_kwargs.max_resp_len=64
+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 reward.num_workers=4
reward.custom_reward_function.path=score.py reward.custom_reward_function.name=mine
critic.fsdp.param_offload=True {A}.checkpoint.strict=False trainer.logger=['console','file']
trainer.use_v1=True trainer.v1.trainer_mode=sync {A}.qat.enable=False distillation.enabled=False
""".split()


def test_newer_names_mean_what_older_ones_do() -> None:
    run = read(*NEWER)
    assert said(run) == ""
    assert value(run, f"{SETS}.taskset.reward_fn_args") == {
        "path": "score.py",
        "function": "mine",
        "overlong": 8,
        "penalty_factor": 0.5,
        "max_response_tokens": 64,
    }
    assert value(run, "trainer.megatron.sequence_parallel") is True, "model_engine=megatron"
    assert value(run, "monitor.monitor_type") == "none"
    told = " ".join(note.line for note in run.notes)
    assert "critic.fsdp.param_offload=True" in told and "reward.num_workers=4" in told


def test_a_newer_name_is_told_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("reward:\n  reward_model:\n    enable: true\n", encoding="utf-8")
    _, problems = config_file.read_file([verl_words.FLAG, str(file)])
    [told] = config_file.located(ConfigError(*(one.sentence for one in problems))).problems
    assert told.startswith(f"{file}:3") and "reward.reward_model.enable=True is refused" in told
    assert not read("reward.reward_manager.name=remote").problems, "in processes, as here always"
    both = read("reward.reward_manager.name=naive", "reward_model.reward_manager=dapo")
    [line] = [note.line for note in both.notes if note.place == "reward.reward_manager.name"]
    assert "reward_model.reward_manager is given too" in line
    [told] = read("model_engine=veomni", f"{A}.veomni.fsdp_size=8").problems
    assert told.sentence.startswith("model_engine=veomni is refused")
    [told] = read("distillation.enabled=True", "distillation.nnodes=1").problems
    assert "on_policy_distill" in told.sentence


def test_a_key_of_veRL_is_used_by_reference_and_taken_away(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "defaults: [ppo_trainer]\ndata: {max_prompt_length: 40, seed: 3}\n"
        "actor_rollout_ref:\n"
        "  rollout: {prompt_length: '${data.max_prompt_length}', _target_: a.B}\n"
        "  model: {override_config: {}, external_lib: null, path: '???'}\n"
        "critic: {optim: {lr: '${actor_rollout_ref.actor.optim.lr}'}}\n"
    )
    run = read(str(file), "data.max_prompt_length=50", "~data.seed")
    assert said(run) == ""
    assert value(run, "model.max_prompt_tokens") == 50
    assert value(run, "critic.optim.lr") == 1e-6, "veRL's default of the other key"
    assert "task_selector" not in value(run, f"{SETS}.taskset")


def test_defaults_of_veRL_are_said() -> None:
    taken = {one.place: one.here for one in read("data.train_batch_size=512").taken}
    assert taken["trainer.total_epochs"] == "buffer.total_epochs=30"
    [kind] = [here for place, here in taken.items() if place.startswith("algorithm.adv_estimator")]
    assert kind.startswith("algorithm.algorithm_type=ppo")
    [batch] = [here for place, here in taken.items() if f"{R}.n" in place.split(", ")]
    assert "algorithm.repeat_times=1" in batch, "also where another key of the same meaning is set"
    again = read("trainer.total_epochs=2", f"{R}.n=2").taken
    assert not any({"trainer.total_epochs", f"{R}.n"} & {*one.place.split(", ")} for one in again)


def prepared(assets: Path, *words: str) -> Config:
    arguments = train.readable(["--verl", *words, "--", "device=cpu"])
    [config] = train.prepared_stages(configs.compose(arguments))
    return config


def places(assets: Path, tmp_path: Path) -> list[str]:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n}+1="}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        }
        for n in range(64)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    file, model = tmp_path / "rows.parquet", assets / "model"
    local = f"trainer.default_local_dir={tmp_path}"
    return [f"data.train_files={file}", f"data.val_files={file}", f"{M}.path={model}", local]


def test_a_command_line_passes_every_check_of_a_start(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared(assets, *GRPO, *places(assets, tmp_path))
    assert config.trainer.ppo_mini_batch_size == 80 and config.buffer.batch_size == 64
    said = capsys.readouterr().err
    assert "left out, so as in veRL: " in said and "not offloaded here" in said
    bad = [*GRPO, *places(assets, tmp_path), "data.max_response_length=4096", f"{R}.name=hf"]
    with pytest.raises(ConfigError) as refused:
        prepared(assets, *bad)
    told = str(refused.value)
    assert f"{R}.name=hf is refused" in told and "4096" in told, "rules of rft in the same start"


def test_the_tool_shows_what_it_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config_tool.main(["--verl", *GRPO, f"{M}.path=some", "--", "seed=4"]) == 0
    out, err = capsys.readouterr()
    assert re.search(
        r"trainer.max_actor_ckpt_to_keep \(left out\) .*max_checkpoints_to_keep=0", err
    )
    assert "seed: 4" in out and "repeat_times: 5" in out
    (tmp_path / "again.yaml").write_text(out)
    again = configs.compose(config_file.registered(["--config", str(tmp_path / "again.yaml")]))
    assert again.algorithm.repeat_times == 5 and again.trainer.ppo_mini_batch_size == 80
    assert config_tool.main(["--verl", "trainer.nnodes=x", "experiment=sft"]) == 2


def test_thinking_reaches_the_template_and_other_arguments_are_refused() -> None:
    name = "data.apply_chat_template_kwargs"
    said = verl_words.read([f"{M}.path=m", f"+{name}.enable_thinking=False"])
    assert said.config["model"]["enable_thinking"] is False and not said.problems
    said = verl_words.read([f"{M}.path=m", f"+{name}.other=1"])
    assert [one.sentence.partition("=")[0] for one in said.problems] == [name]


@pytest.mark.parametrize("share, is_lowered", [(0.6, False), (0.8, True)])
def test_an_engines_share_is_not_lowered_without_a_word(share: float, is_lowered: bool) -> None:
    name = f"{R}.gpu_memory_utilization"
    run = verl_words.read([f"{M}.path=m", f"{name}={share}"])
    assert run.config["explorer"]["rollout_model"]["gpu_memory_utilization"] == 0.6
    assert any(one.place == name for one in run.notes) is is_lowered


def test_problems_of_a_file_have_its_lines(tmp_path: Path) -> None:
    """A key that a word gives again is the word's."""
    file = tmp_path / "run.yaml"
    text = f"data:\n  train_files: /nowhere/a.parquet\n{A}.optim.lr: -1\n{R}.name: sglang\n"
    file.write_text(f"{text}{R}.nn: 1\n{R}.dtype: int3\n", encoding="utf-8")
    _, problems = config_file.read_file([verl_words.FLAG, str(file), f"{R}.dtype=int4"])
    by_a_rule = f"{SETS}.taskset.path: /nowhere/a.parquet does not exist"
    told = ConfigError(*(one.sentence for one in problems), by_a_rule)
    said = config_file.located(told).problems
    for line, key in enumerate(("data.train_files", f"{A}.optim.lr", f"{R}.name"), 2):
        assert [one for one in said if one.startswith(f"{file}:{line}") and key in one]
    assert [one for one in said if one.startswith(f"{file}:5") and "unknown" in one]
    assert [one for one in said if one.startswith(f"{R}.dtype=int4")]
