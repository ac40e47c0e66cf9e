"""Every documented key of a veRL trainer config does here what the table says: set a key of ours,
pass, or be refused by name.
"""

from dataclasses import asdict
from typing import Any

import pytest

from rft import config as configs
from rft.config import Config, ConfigError, TrainerConfig, get
from rft.config import verl as verl_keys
from rft.config.verl import KEYS

A, M, R, C = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.ref", "critic"
REQUIRED = {"name": "run", "model": {"model_path": "somewhere"}}
STATE = ["model", "optimizer", "extra"]
SET: list[tuple[str, Any, str, Any]] = [  # veRL's key and value, ours and what it becomes
    (f"{M}.enable_gradient_checkpointing", True, "trainer.recompute_granularity", "full"),
    (f"{M}.enable_gradient_checkpointing", False, "trainer.recompute_granularity", None),
    (f"{M}.use_remove_padding", False, "trainer.use_remove_padding", False),
    (f"{A}.ppo_micro_batch_size_per_gpu", 8, "trainer.ppo_micro_batch_size_per_gpu", 8),
    (f"{A}.use_dynamic_bsz", False, "trainer.use_dynamic_bsz", False),
    (f"{A}.ppo_epochs", 4, "trainer.ppo_epochs", 4),
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
    (f"{R}.log_prob_micro_batch_size_per_gpu", 2, "trainer.ppo_micro_batch_size_per_gpu", 2),
    (f"{R}.log_prob_use_dynamic_bsz", False, "trainer.use_dynamic_bsz", False),
    (f"{R}.log_prob_max_token_len_per_gpu", 99, "trainer.max_token_len_per_gpu", 99),
    (f"{C}.optim.lr", 2e-5, "critic.optim.lr", 2e-5),
    (f"{C}.optim.lr_warmup_steps_ratio", 0.1, "critic.optim.lr_warmup_steps_ratio", 0.1),
    (f"{C}.optim.min_lr_ratio", 0.01, "critic.optim.min_lr_ratio", 0.01),
    (f"{C}.optim.warmup_style", "cosine", "critic.optim.lr_scheduler_type", "cosine"),
    (f"{C}.optim.total_training_steps", 7, "trainer.total_steps", 7),
    (f"{C}.model.enable_gradient_checkpointing", True, "trainer.recompute_granularity", "full"),
    (f"{C}.model.use_remove_padding", False, "trainer.use_remove_padding", False),
    (f"{C}.ppo_micro_batch_size_per_gpu", 2, "trainer.ppo_micro_batch_size_per_gpu", 2),
    (f"{C}.forward_micro_batch_size_per_gpu", 2, "trainer.ppo_micro_batch_size_per_gpu", 2),
    (f"{C}.use_dynamic_bsz", False, "trainer.use_dynamic_bsz", False),
    (f"{C}.ppo_max_token_len_per_gpu", 99, "trainer.max_token_len_per_gpu", 99),
    (f"{C}.forward_max_token_len_per_gpu", 99, "trainer.max_token_len_per_gpu", 99),
    (f"{C}.grad_clip", 0.5, "critic.grad_clip", 0.5),
    (f"{C}.cliprange_value", 0.2, "critic.cliprange_value", 0.2),
    ("trainer.critic_warmup", 3, "trainer.critic_warmup", 3),
]
FSDP: list[tuple[str, Any, Any]] = [  # what passes, what is refused
    ("wrap_policy.transformer_layer_cls_to_wrap", None, ["Qwen3DecoderLayer"]),
    ("wrap_policy.min_num_params", 0, 10),
    ("param_offload", False, True),
    ("optimizer_offload", False, True),
    ("fsdp_size", -1, 8),
    ("forward_prefetch", False, True),
]
# key, a value that says what we do, one that does not, what is said of it
ONLY: list[tuple[str, Any, Any, str]] = [
    ("actor_rollout_ref.hybrid_engine", True, False, "always parts of one run"),
    (f"{M}.external_lib", None, "my_lib", "without libraries"),
    (f"{M}.override_config", {}, {"rope_theta": 1e6}, "edit that of model.model_path"),
    (f"{M}.use_fused_kernels", False, "maybe", "tile by tile"),
    (f"{M}.fused_kernel_options.impl_backend", "torch", "triton", "no triton kernel"),
    (f"{A}.strategy", "megatron", "fsdp", "the trainer is Megatron"),
    (f"{A}.ppo_micro_batch_size", None, 4, "set trainer.ppo_micro_batch_size_per_gpu"),
    (f"{A}.ulysses_sequence_parallel_size", 1, 2, "trainer.megatron.context_parallel_size"),
    (f"{A}.entropy_from_logits_with_chunking", True, "yes", "tile by tile"),
    (f"{A}.entropy_checkpointing", False, 3, "tile by tile"),
    (f"{A}.checkpoint.load_contents", ["optimizer", "model", "extra"], ["model"], "a resume needs"),
    (f"{A}.checkpoint.save_contents", STATE, ["model"], "a resume needs"),
    *((f"{A}.fsdp_config.{key}", good, bad, "") for key, good, bad in FSDP),
    *((f"{R}.fsdp_config.{key}", good, bad, "") for key, good, bad in FSDP),
    ("trainer.resume_mode", "auto", "disable", "continue_from_checkpoint=false"),
    ("trainer.resume_from_path", "", "/x/global_step_5", "model.model_path"),
    ("trainer.del_local_ckpt_after_load", False, True, "max_checkpoints_to_keep"),
    (f"{R}.log_prob_micro_batch_size", None, 4, "set trainer.ppo_micro_batch_size_per_gpu"),
    (f"{R}.ulysses_sequence_parallel_size", 1, 2, "trainer.megatron.context_parallel_size"),
    (f"{R}.entropy_from_logits_with_chunking", True, "yes", "tile by tile"),
    (f"{R}.entropy_checkpointing", False, 3, "tile by tile"),
    (f"{C}.strategy", "megatron", "fsdp2", "the trainer is Megatron"),
    (f"{C}.model.override_config", {}, {"rope_theta": 1e6}, "edit that of model.critic_model_path"),
    (f"{C}.model.external_lib", None, "my_lib", "without libraries"),
    *((f"{C}.model.fsdp_config.{key}", good, bad, "") for key, good, bad in FSDP),
    (f"{C}.ulysses_sequence_parallel_size", 1, 2, "trainer.megatron.context_parallel_size"),
]


def merged(*given: tuple[str, Any], **trainer: Any) -> Config:
    block: dict[str, Any] = {}
    for name, value in given:
        *sections, word = name.split(".")
        node = block
        for section in sections:
            node = node.setdefault(section, {})
        node[word] = value
    config = configs.to_config(REQUIRED | {"trainer": {"trainer_config": block, **trainer}})
    verl_keys.merge(config)
    return config


def test_every_row_is_here() -> None:
    assert {name for name, *_ in (*SET, *ONLY)} == set(KEYS)
    numbers = {row.strip() for key in KEYS.values() for row in key.row.split(",")}
    assert numbers == {f"N{n}" for n in range(1, 51)}
    assert {key.to for key in KEYS.values() if key.to} <= set(configs.known_keys())


@pytest.mark.parametrize(("name", "value", "to", "becomes"), SET, ids=lambda v: str(v))
def test_translated(name: str, value: Any, to: str, becomes: Any) -> None:
    assert get(merged((name, value)), to) == becomes
    assert get(merged((name, None)), to) == get(Config(), to), "null is not set"


@pytest.mark.parametrize(("name", "good", "bad", "message"), ONLY, ids=lambda v: str(v))
def test_accepted_or_refused(name: str, good: Any, bad: Any, message: str) -> None:
    found, plain = merged((name, good)), merged()
    found.trainer.trainer_config = plain.trainer.trainer_config
    assert found == plain
    with pytest.raises(ConfigError) as refused:
        merged((name, bad))
    assert str(refused.value).startswith(
        f"trainer.trainer_config.{name}={bad} is refused: "
    ) and message in str(refused.value)


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
            (f"{C}.model.enable_gradient_checkpointing", True),
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
