"""Every documented key of a veRL trainer config does here what the table says: set a key of ours,
pass, or be refused by name.
"""

import copy
from dataclasses import asdict
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft import config as configs
from rft.config import Config, ConfigError, TrainerConfig, get
from rft.config import verl as verl_keys
from rft.config.verl import KEYS

A, M, R, C = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.ref", "critic"
REQUIRED = {"name": "run", "model": {"model_path": "somewhere"}}
STATE = ["model", "optimizer", "extra"]
FLAGS = f"{A}.megatron.override_transformer_config"
SET: list[tuple[str, Any, str, Any]] = [  # veRL's key and value, ours and what it becomes
    (f"{M}.enable_gradient_checkpointing", True, "trainer.recompute_granularity", "full"),
    (f"{M}.enable_gradient_checkpointing", False, "trainer.recompute_granularity", None),
    (f"{M}.use_remove_padding", False, "trainer.use_remove_padding", False),
    (f"{A}.ppo_micro_batch_size_per_gpu", 8, "trainer.ppo_micro_batch_size_per_gpu", 8),
    (f"{A}.use_dynamic_bsz", False, "trainer.use_dynamic_bsz", False),
    (f"{A}.ppo_epochs", 4, "trainer.ppo_epochs", 4),
    (
        "trainer.resume_from_path",
        "/x/global_step_5",
        "trainer.resume_from_path",
        "/x/global_step_5",
    ),
    ("trainer.resume_from_path", "", "trainer.resume_from_path", None),
    (f"{A}.shuffle", True, "trainer.ppo_shuffle", True),
    (f"{C}.ppo_epochs", 4, "trainer.ppo_epochs", 4),
    (f"{C}.shuffle", True, "trainer.ppo_shuffle", True),
    (f"{A}.ppo_max_token_len_per_gpu", 4096, "trainer.max_token_len_per_gpu", 4096),
    (f"{A}.grad_clip", 0.5, "trainer.grad_clip", 0.5),
    (f"{A}.checkpoint.save_contents", [*STATE, "hf_model"], "trainer.save_hf_checkpoint", "always"),
    (f"{A}.checkpoint.save_contents", STATE, "trainer.save_hf_checkpoint", "last"),
    (f"{A}.optim.lr", 2e-6, "algorithm.optimizer.lr", 2e-6),
    (f"{A}.optim.lr_warmup_steps_ratio", 0.1, "algorithm.optimizer.lr_warmup_steps_ratio", 0.1),
    (f"{A}.optim.min_lr_ratio", 0.01, "algorithm.optimizer.min_lr_ratio", 0.01),
    (f"{A}.optim.warmup_style", "cosine", "algorithm.optimizer.lr_scheduler_type", "cosine"),
    (f"{A}.optim.total_training_steps", 7, "trainer.total_steps", 7),
    (f"{A}.optim.total_training_steps", -1, "trainer.total_steps", None),
    ("trainer.balance_batch", False, "trainer.balance_batch", False),
    ("trainer.total_training_steps", 9, "trainer.total_steps", 9),
    ("trainer.default_hdfs_dir", "hdfs://a/b", "trainer.checkpoint.storage", "hdfs://a/b"),
    ("trainer.remove_previous_ckpt_in_save", True, "trainer.max_checkpoints_to_keep", 1),
    ("trainer.remove_previous_ckpt_in_save", False, "trainer.max_checkpoints_to_keep", 2),
    ("trainer.max_actor_ckpt_to_keep", 5, "trainer.max_checkpoints_to_keep", 5),
    ("trainer.max_critic_ckpt_to_keep", 5, "trainer.max_checkpoints_to_keep", 5),
    (f"{C}.optim.lr", 2e-5, "critic.optim.lr", 2e-5),
    (f"{C}.optim.lr_warmup_steps_ratio", 0.1, "critic.optim.lr_warmup_steps_ratio", 0.1),
    (f"{C}.optim.min_lr_ratio", 0.01, "critic.optim.min_lr_ratio", 0.01),
    (f"{C}.optim.warmup_style", "cosine", "critic.optim.lr_scheduler_type", "cosine"),
    (f"{C}.optim.total_training_steps", 7, "trainer.total_steps", 7),
    (f"{C}.grad_clip", 0.5, "critic.grad_clip", 0.5),
    (f"{C}.cliprange_value", 0.2, "critic.cliprange_value", 0.2),
    ("trainer.critic_warmup", 3, "trainer.critic_warmup", 3),
    ("actor_rollout_ref.nccl_timeout", 60, "trainer.collective_timeout", 60.0),
    (f"{A}.checkpoint.save_contents", ["hf_model"], "trainer.save_hf_checkpoint", "always"),
    (f"{A}.ulysses_sequence_parallel_size", 2, "trainer.megatron.context_parallel_size", 2),
    *(
        (f"{A}.megatron.{size}", 2, f"trainer.megatron.{size}", 2)
        for size in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
        )
    ),
    (f"{A}.megatron.sequence_parallel", True, "trainer.megatron.sequence_parallel", True),
    (f"{FLAGS}.recompute_granularity", "full", "trainer.recompute_granularity", "full"),
    (f"{FLAGS}.recompute_method", "block", "trainer.recompute_method", "block"),
    (f"{FLAGS}.recompute_num_layers", 3, "trainer.recompute_num_layers", 3),
    (f"{FLAGS}.recompute_modules", ["mlp"], "trainer.recompute_modules", ["mlp"]),
    *(
        row
        for role, to in ((A, "algorithm.optimizer"), (C, "critic.optim"))
        for row in (
            (f"{role}.optim.lr_warmup_steps", 5, f"{to}.lr_warmup_steps", 5),
            (f"{role}.optim.lr_warmup_steps", -1, f"{to}.lr_warmup_steps", 0),
            (f"{role}.optim.lr_scheduler_type", "cosine", f"{to}.lr_scheduler_type", "cosine"),
            (f"{role}.optim.lr_decay_style", "linear", f"{to}.lr_scheduler_type", "linear"),
            (f"{role}.optim.weight_decay", 0.1, f"{to}.weight_decay", 0.1),
            (f"{role}.optim.betas", [0.8, 0.9], f"{to}.betas", [0.8, 0.9]),
        )
    ),
    *(
        row
        for role in (A, C)
        for row in (
            (f"{role}.ppo_epochs", 4, "trainer.ppo_epochs", 4),
            (f"{role}.shuffle", True, "trainer.ppo_shuffle", True),
        )
    ),
    (f"{A}.optim.clip_grad", 0.5, "trainer.grad_clip", 0.5),
    (f"{C}.optim.clip_grad", 0.5, "critic.grad_clip", 0.5),
]
# key, a value that says what we do, one that does not, what is said of it
ONLY: list[tuple[str, Any, Any, str]] = [
    ("actor_rollout_ref.hybrid_engine", True, False, "always parts of one run"),
    (f"{M}.external_lib", None, "my_lib", "without libraries"),
    (f"{M}.override_config", {}, {"rope_theta": 1e6}, "edit that of model.model_path"),
    (f"{M}.use_fused_kernels", False, "maybe", "tile by tile"),
    (f"{M}.fused_kernel_options.impl_backend", "torch", "cuda", "tile by tile"),
    (f"{M}.fused_kernel_options.impl_backend", "None", "cuda", "tile by tile"),
    (f"{A}.strategy", "fsdp", "deepspeed", "the trainer is Megatron"),
    (f"{A}.checkpoint.load_contents", ["optimizer", "model"], ["weights"], "a resume needs"),
    (f"{A}.checkpoint.save_contents", ["model"], "model", "a resume needs"),
    ("trainer.resume_mode", "auto", "disable", "continue_from_checkpoint=false"),
    ("trainer.del_local_ckpt_after_load", False, True, "max_checkpoints_to_keep"),
    (f"{R}.strategy", "megatron", "deepspeed", "the trainer is Megatron"),
    (f"{C}.strategy", "fsdp2", "deepspeed", "the trainer is Megatron"),
    (f"{C}.model.override_config", {}, {"rope_theta": 1e6}, "edit that of model.critic_model_path"),
    (f"{C}.model.external_lib", None, "my_lib", "without libraries"),
    (f"{C}.checkpoint.load_contents", [], ["weights"], "a resume needs"),
    (f"{C}.checkpoint.save_contents", ["extra"], ["weights"], "a resume needs"),
    *(
        (f"{role}.fsdp_config.{key}", good, bad, said)
        for role in (A, R, f"{C}.model")
        for key, good, bad, said in (
            ("model_dtype", "fp32", "fp16", "keeps fp32 masters"),
            ("dtype", "bfloat16", "float16", "trainer.dtype"),
            ("strategy", "fsdp2", "ddp", "the trainer is Megatron"),
            ("mixed_precision.param_dtype", "bf16", "fp16", "trainer.dtype"),
            ("mixed_precision.reduce_dtype", "fp32", "bf16", "reduced in fp32"),
            ("ulysses_sequence_parallel_size", 1, 2, ".ulysses_sequence_parallel_size"),
            ("full_determinism", False, True, "set deterministic"),
        )
    ),
    *(
        (f"{role}.megatron.{key}", good, bad, said)
        for role in (A, R, C)
        for key, good, bad, said in (
            ("dist_checkpointing_path", None, "/dist", "convert them"),
            ("dtype", "bfloat16", "float16", "trainer.dtype"),
            ("override_mcore_model_config", {}, {"a": 1}, "what its config.json says"),
        )
    ),
    *(
        (f"{role}.optim.{key}", good, bad, said)
        for role in (A, C)
        for key, good, bad, said in (
            ("lr_warmup_init", 0.0, 1e-7, "rises from 0"),
            ("lr_decay_steps", None, 10, "ends with the run"),
            ("lr_wsd_decay_steps", None, 10, "algorithm.optimizer.lr_decay_steps"),
            ("num_cycles", 0.5, 2, "half a wave"),
            ("min_lr", 0.0, 1e-7, "min_lr_ratio"),
            ("optimizer", "AdamW", "Lion", "Adam"),
            ("optimizer_impl", "torch.optim", "bnb", "Adam"),
            ("weight_decay_incr_style", "constant", "linear", "it stays"),
        )
    ),
]
PLAIN = configs.to_config(REQUIRED)
NAMED = {name for name, *_ in (*SET, *ONLY)}


def merged(*given: tuple[str, Any], **trainer: Any) -> Config:
    block: dict[str, Any] = {}
    for name, value in given:
        *sections, word = name.split(".")
        node = block
        for section in sections:
            node = node.setdefault(section, {})
        node[word] = value
    config = copy.deepcopy(PLAIN)
    for word, value in ({"trainer_config": block} | trainer).items():
        setattr(config.trainer, word, value)
    verl_keys.merge(config)
    return config


def test_every_row_is_here() -> None:
    rest = set(KEYS) - NAMED
    assert rest == {name for name in KEYS if KEYS[name].takes_any}, "a row that no test tries"
    numbers = {row.strip() for key in KEYS.values() for row in key.row.split(",") if row}
    assert numbers == {f"N{n}" for n in range(1, 51)}
    wanted = {key.to for key in KEYS.values() if key.to}
    assert wanted <= set(configs.known_keys())


@pytest.mark.parametrize(("name", "value", "to", "becomes"), SET, ids=lambda v: str(v))
def test_translated(name: str, value: Any, to: str, becomes: Any) -> None:
    assert get(merged((name, value)), to) == becomes
    assert get(merged((name, None)), to) == get(Config(), to), "null is not set"


@pytest.mark.parametrize(("name", "good", "bad", "message"), ONLY, ids=lambda v: str(v))
def test_accepted_or_refused(name: str, good: Any, bad: Any, message: str) -> None:
    found, plain = merged((name, good)), merged()
    found.trainer.trainer_config = plain.trainer.trainer_config
    assert found == plain
    assert merged((name, "None")).trainer.megatron == plain.trainer.megatron, "None is nothing"
    with pytest.raises(ConfigError) as refused:
        merged((name, bad))
    assert str(refused.value).startswith(
        f"trainer.trainer_config.{name}={bad} is refused: "
    ) and message in str(refused.value)


@pytest.mark.parametrize("value", [True, 7, "some"])
def test_a_hint_is_taken_and_said_whatever_it_is(value: Any) -> None:
    names = [name for name in KEYS if KEYS[name].takes_any]
    found, plain = merged(*((name, value) for name in names)), merged()
    said = " ".join(note.line for note in verl_keys.of_block(found.trainer.trainer_config).notes)
    assert [name for name in names if f"{name}={value}" not in said] == []
    found.trainer.trainer_config = plain.trainer.trainer_config
    assert found == plain


def test_a_role_s_own_cut_does_not_contradict_the_policy_s() -> None:
    config = merged(
        (f"{A}.ppo_max_token_len_per_gpu", 100), (f"{C}.ppo_max_token_len_per_gpu", 200)
    )
    assert config.trainer.max_token_len_per_gpu == 100


def test_flags_of_megatron_go_where_its_flags_are() -> None:
    config = merged((f"{FLAGS}.apply_rope_fusion", True), (f"{FLAGS}.bias_dropout_fusion", True))
    flags = config.trainer.megatron.override_transformer_config
    assert flags == {"apply_rope_fusion": True, "bias_dropout_fusion": True}


def test_a_reference_inside_the_block_means_the_block() -> None:
    block = {
        "critic": {"optim": {"lr": "${actor_rollout_ref.actor.optim.lr}"}},
        "actor_rollout_ref": {
            "actor": {"optim": {"lr": 3e-6, "weight_decay": "${oc.select:critic.decay,0.2}"}},
            "model": {"use_remove_padding": "${trainer.balance_batch}"},
        },
    }
    trainer = {"balance_batch": False, "trainer_config": block}
    config = configs.to_config(REQUIRED | {"trainer": trainer})
    verl_keys.merge(config)
    assert config.critic.optim.lr == 3e-6 == config.algorithm.optimizer.lr
    assert config.algorithm.optimizer.weight_decay == 0.2
    assert config.trainer.use_remove_padding is False, "else a key of the whole config"


def test_a_stage_has_references_of_its_own() -> None:
    base: dict[str, Any] = {"trainer": {"trainer_config": {"critic": {"grad_clip": 0.5}}}}
    actor = {"actor_rollout_ref": {"actor": {"grad_clip": "${critic.grad_clip}"}}}
    stage = {"stage_name": "one", "trainer": {"trainer_config": actor}}
    [config] = configs.stage_configs(OmegaConf.create(REQUIRED | base | {"stages": [stage]}))
    verl_keys.merge(config)
    assert config.trainer.grad_clip == 0.5


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="did you mean `trainer.trainer_config.actor_rollout_ref.actor.grad_clip`"
    ):
        merged((f"{A}.grad_clp", 1.0))
    with pytest.raises(
        ConfigError, match="unknown key `trainer.trainer_config.reward_model`; see docs/verl.md"
    ):
        merged(("reward_model", {}))


def test_an_empty_section_says_nothing() -> None:
    assert (
        merged((R, None)).trainer.ppo_micro_batch_size_per_gpu
        == TrainerConfig().ppo_micro_batch_size_per_gpu
    )


def test_two_words_for_one_key_must_agree() -> None:
    assert merged((f"{A}.grad_clip", 0.5), grad_clip=0.5).trainer.grad_clip == 0.5
    with pytest.raises(ConfigError, match="contradicts trainer.grad_clip=0.3"):
        merged((f"{A}.grad_clip", 0.5), grad_clip=0.3)
    with pytest.raises(ConfigError, match="both are trainer.max_checkpoints_to_keep"):
        merged(("trainer.max_actor_ckpt_to_keep", 5), ("trainer.max_critic_ckpt_to_keep", 3))
    with pytest.raises(ConfigError, match="both are trainer.recompute_granularity"):
        merged(
            (f"{M}.enable_gradient_checkpointing", False),
            (f"{FLAGS}.recompute_granularity", "full"),
        )


def test_a_value_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="ppo_max_token_len_per_gpu=many"):
        merged((f"{A}.ppo_max_token_len_per_gpu", "many"))


def test_merging_twice_changes_nothing() -> None:
    config = merged(*((name, value) for name, value, *_ in SET[:6]))
    again = configs.to_config(asdict(config))
    verl_keys.merge(again)
    assert again == config


def test_without_a_block_nothing_happens() -> None:
    assert merged().trainer == TrainerConfig()
    config = configs.to_config(REQUIRED | {"trainer": {"trainer_config": None}})
    verl_keys.merge(config)
    assert config.trainer == TrainerConfig(trainer_config=None)
