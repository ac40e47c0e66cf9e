"""The keys of a Trinity-RFT config that rft does not have under that name: what each one is here.

In: a dotted key, or a key with a value. Out: rft's key and value, or the reason why there is none
and what to use instead. Sections and names of the two systems are the same wherever the meaning is,
so this table is the whole difference. It is read where a flat file is taken (`rft.config.file`) and
where an unknown key or value is refused (`rft.config.unknown`, `rft.config.hints`).

Invariant: no key is ignored. `null` means that a key is not set. `docs/trinity.md` is made of this
table.
"""

import re
from typing import Any

from rft.config.buffer import TASKSET_KEY as TASKSET
from rft.config.foreign import UNSET, ForeignKey
from rft.config.keys import tables


def opposite(value: Any) -> Any:
    return not value


def none_if_false(value: Any) -> Any:
    return UNSET if value else 0


YET = "not in rft yet"
OFFLOAD = "nothing is offloaded: use more ranks, or trainer.recompute_granularity"
EXPERIENCES_COME = (
    "experiences come from the explorer and go to the buffer of the trainer: leave it out"
)
MODEL_SAYS = "the model is what its config.json says: edit that of model.model_path"
SAMPLING = f"it is a key of each taskset: set {TASKSET}.rollout_args"
PAIRS = "set algorithm.algorithm_type=dpo and buffer.trainer_input.experience_buffer.path"

KEYS: dict[str, ForeignKey] = {
    # A: the top level
    "group": ForeignKey(
        "A4",
        "a run lies in <checkpoint_root_dir>/<project>/<name>: write the group into project",
        only=("",),
    ),
    # B: algorithm
    "algorithm.optimizer.warmup_style": ForeignKey(
        "B4", to="algorithm.optimizer.lr_scheduler_type"
    ),
    "algorithm.optimizer.clip_grad": ForeignKey("B4", to="trainer.grad_clip"),
    "algorithm.enable_router_replay": ForeignKey(
        "B11", f"replaying the choice of experts is {YET}", only=(False,)
    ),
    "algorithm.bypass_old_logprobs": ForeignKey(
        "B11", to="algorithm.proximal_logprobs", convert=opposite
    ),
    # C: monitor
    "monitor.enable_ray_timeline": ForeignKey("C6", to="monitor.trace"),
    "monitor.detailed_stats": ForeignKey("C9", to="monitor.detailed"),
    # D: model
    "model.temperature": ForeignKey("D11", f"{SAMPLING}.temperature"),
    "model.top_p": ForeignKey("D11", f"{SAMPLING}.top_p"),
    "model.top_k": ForeignKey("D11", f"{SAMPLING}.top_k"),
    "model.logprobs": ForeignKey(
        "D11", "log-probabilities of what was sampled are always recorded", only=(0,)
    ),
    "model.enable_thinking": ForeignKey(
        "D11", "the chat template decides: give one as model.chat_template_path", only=(False,)
    ),
    "model.rope_scaling": ForeignKey("D11", MODEL_SAYS),
    "model.rope_theta": ForeignKey("D11", MODEL_SAYS),
    "model.external_model": ForeignKey(
        "D11",
        "a model behind an API has no weights to train: leave it out",
        only=({}, {"enable": False}),
    ),
    # F: buffer
    "buffer.default_workflow_type": ForeignKey(
        "F19", to="buffer.explorer_input.default_workflow_type"
    ),
    "buffer.default_reward_fn_type": ForeignKey(
        "F19", to="buffer.explorer_input.default_reward_fn_type"
    ),
    f"{TASKSET}.rollout_args.logprobs": ForeignKey(
        "F18", "log-probabilities of what was sampled are always recorded", only=(0,)
    ),
    f"{TASKSET}.rollout_args.n": ForeignKey(
        "F18", "set algorithm.repeat_times, or repeat_times of an evaluation set", only=(1,)
    ),
    # H: synchronizer
    "synchronizer.explorer_sync_interval": ForeignKey("H4", to="synchronizer.sync_interval"),
    "synchronizer.trainer_sync_interval": ForeignKey("H4", to="synchronizer.sync_interval"),
    "synchronizer.max_inflight_batches": ForeignKey(
        "H10", "set synchronizer.max_staleness: so many versions may rollouts be behind"
    ),
    # I: trainer
    "trainer.trainer_strategy": ForeignKey(
        "I3",
        (
            "the trainer is always Megatron: leave it out, and cut the model by "
            "trainer.megatron.*_size"
        ),
        only=("fsdp", "fsdp2", "megatron"),
    ),
    "trainer.ulysses_sequence_parallel_size": ForeignKey(
        "I15", to="trainer.megatron.context_parallel_size"
    ),
    "trainer.param_offload": ForeignKey("I17", OFFLOAD, only=(False,)),
    "trainer.optimizer_offload": ForeignKey("I17", OFFLOAD, only=(False,)),
    "trainer.grad_offload": ForeignKey("I17", OFFLOAD, only=(False,)),
    "trainer.offload_policy": ForeignKey("I17", OFFLOAD, only=(False,)),
    "trainer.enable_preview": ForeignKey("I17", to="monitor.num_samples", convert=none_if_false),
    # J: service, data processor, log
    "data_processor.experience_pipeline.inputs": ForeignKey("J9", EXPERIENCES_COME, only=({},)),
    "data_processor.experience_pipeline.output": ForeignKey("J9", EXPERIENCES_COME),
}
KEYS |= {
    f"{TASKSET}.format.tools_key": ForeignKey(
        "F42", f"tools of a task are {YET}: write them into the system prompt"
    ),
    f"{TASKSET}.format.chosen_key": ForeignKey("F43", f"tasks have no pairs of answers: {PAIRS}"),
    f"{TASKSET}.format.rejected_key": ForeignKey("F43", f"tasks have no pairs of answers: {PAIRS}"),
    f"{TASKSET}.format.enable_concatenated_multi_turn": ForeignKey(
        "F44",
        "it says which answers of supervised rows are learned, and a task has none: leave it out",
        only=(False,),
    ),
    f"{TASKSET}.format.chat_template": ForeignKey("F45", to="model.custom_chat_template"),
}

# --- data: tasksets, buffers, adapters ------------------------------------------------------------

QUEUE = "buffer.trainer_input.experience_buffer"
BY_ITSELF = "Trinity-RFT sets it itself: leave it out"
ADAPTER = "model.lora_configs"


def unless_sequential(selector: Any) -> bool:
    return selector not in (None, "sequential")


for _key in (TASKSET, QUEUE):
    KEYS |= {
        f"{_key}.enable_progress_bar": ForeignKey(
            "F3", "rows are read before the first step; the log says how many", takes_any=True
        ),
        f"{_key}.max_retry_times": ForeignKey(
            "F11", "a database is asked again while it is busy", takes_any=True
        ),
        f"{_key}.max_retry_interval": ForeignKey(
            "F11", "a database is asked again while it is busy", takes_any=True
        ),
        f"{_key}.index": ForeignKey("F3", "a resume finds its place by itself", only=(0,)),
        f"{_key}.batch_size": ForeignKey("F3", BY_ITSELF, only=(0,)),
        f"{_key}.total_steps": ForeignKey("F4", "set buffer.total_steps"),
        f"{_key}.ray_namespace": ForeignKey("A4", "set ray_namespace"),
        f"{_key}.format.reply_prefix": ForeignKey(
            "F39", "an answer begins where the chat template lets it begin: write it there"
        ),
        f"{_key}.format.enable_thinking": ForeignKey(
            "F45", "set model.enable_thinking, or write it into format.chat_template"
        ),
    }
for _word in ("selector_type", "seed", "feature_keys", "kwargs"):
    KEYS[f"{TASKSET}.data_selector.{_word}"] = ForeignKey(
        "F30", to=f"{TASKSET}.task_selector.{_word}"
    )
KEYS |= {
    f"{TASKSET}.is_eval": ForeignKey("F3", BY_ITSELF, only=(False,)),
    f"{TASKSET}.total_epochs": ForeignKey("F3", "set buffer.total_epochs", only=(1,)),
    f"{QUEUE}.tokenizer_path": ForeignKey("F3", BY_ITSELF),
    f"{QUEUE}.capacity": ForeignKey(
        "F22", "synchronizer.max_staleness bounds what waits for the trainer", takes_any=True
    ),
    f"{QUEUE}.data_selector.selector_type": ForeignKey(
        "F30", to=f"{QUEUE}.shuffle", convert=unless_sequential, only=("sequential", "shuffle")
    ),
    f"{QUEUE}.data_selector.seed": ForeignKey("F30", "set seed: that of the run"),
    f"{QUEUE}.data_selector.feature_keys": ForeignKey("F30", "rows are shuffled", only=([],)),
    f"{QUEUE}.data_selector.kwargs": ForeignKey("F30", "rows are shuffled", only=({},)),
    f"{ADAPTER}.name": ForeignKey(
        "D9", "there is one adapter, and engines know it by its version", takes_any=True
    ),
    f"{ADAPTER}.path": ForeignKey(
        "D9", "an adapter begins as nothing: merge the old one into model.model_path first"
    ),
    f"{ADAPTER}.base_model_name": ForeignKey("D9", "it is model.model_path: leave it out"),
    f"{ADAPTER}.lora_dtype": ForeignKey("D9", "it is trainer.dtype", only=("auto",)),
    f"{ADAPTER}.exclude_modules": ForeignKey("D9", f"set {ADAPTER}[0].target_modules"),
    f"{ADAPTER}.is_dummy": ForeignKey("D9", BY_ITSELF, only=(False,)),
}

SHARED = frozenset(
    (  # keys that both systems have, with the same meaning
        "project",
        "name",
        "mode",
        "checkpoint_root_dir",
        "continue_from_checkpoint",
        "ray_namespace",
        "algorithm.algorithm_type",
        "log.group_by_node",
        "algorithm.sample_strategy",
        "algorithm.sample_strategy_args",
        "algorithm.repeat_times",
        "algorithm.optimizer.lr",
        "algorithm.optimizer.lr_scheduler_type",
        "algorithm.optimizer.lr_warmup_steps",
        "algorithm.optimizer.lr_warmup_steps_ratio",
        "algorithm.optimizer.min_lr_ratio",
        "algorithm.optimizer.optimizer_type",
        "algorithm.optimizer.betas",
        "algorithm.optimizer.weight_decay",
        "algorithm.advantage_fn",
        "algorithm.advantage_fn_args",
        "algorithm.kl_penalty_fn",
        "algorithm.kl_penalty_fn_args",
        "algorithm.kl_loss_fn",
        "algorithm.kl_loss_fn_args",
        "algorithm.entropy_loss_fn",
        "algorithm.entropy_loss_fn_args",
        "algorithm.policy_loss_fn",
        "algorithm.policy_loss_fn_args",
        "algorithm.loss_agg_mode",
        "algorithm.sample_strategy",
        "algorithm.sample_strategy_args",
        "monitor.monitor_type",
        "algorithm.rollout_correction.rollout_is",
        "algorithm.rollout_correction.rollout_is_threshold",
        "algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.rollout_rs_threshold",
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "monitor.monitor_args",
        "model.model_path",
        "model.critic_model_path",
        "model.custom_chat_template",
        "model.chat_template_path",
        "model.max_model_len",
        "model.max_prompt_tokens",
        "model.max_response_tokens",
        "model.min_response_tokens",
        "model.lora_configs",
        "model.tinker.enable",
        "model.tinker.rank",
        "model.tinker.seed",
        "model.tinker.train_mlp",
        "model.tinker.train_attn",
        "model.tinker.train_unembed",
        "model.trust_remote_code",
        "cluster.node_num",
        "cluster.gpu_per_node",
        "buffer.batch_size",
        "buffer.train_batch_size",
        "buffer.total_epochs",
        "buffer.total_steps",
        "buffer.explorer_input.eval_tasksets",
        "buffer.explorer_input.default_workflow_type",
        "buffer.explorer_input.default_eval_workflow_type",
        "buffer.explorer_input.default_reward_fn_type",
        "buffer.explorer_input.taskset.name",
        "buffer.explorer_input.taskset.storage_type",
        "buffer.explorer_input.taskset.path",
        "buffer.explorer_input.taskset.subset_name",
        "buffer.explorer_input.taskset.split",
        "buffer.explorer_input.taskset.repeat_times",
        "buffer.explorer_input.taskset.rollout_args.temperature",
        "buffer.explorer_input.taskset.rollout_args.top_p",
        "buffer.explorer_input.taskset.rollout_args.top_k",
        "buffer.explorer_input.taskset.rollout_args.max_tokens",
        "buffer.explorer_input.taskset.default_workflow_type",
        "buffer.explorer_input.taskset.default_reward_fn_type",
        "buffer.explorer_input.taskset.workflow_args",
        "buffer.explorer_input.taskset.reward_fn_args",
        "buffer.trainer_input.experience_buffer.name",
        "buffer.trainer_input.experience_buffer.storage_type",
        "buffer.trainer_input.experience_buffer.path",
        "buffer.trainer_input.auxiliary_buffers",
        "buffer.trainer_input.experience_buffer.max_read_timeout",
        "buffer.trainer_input.experience_buffer.replay_buffer.enable",
        "buffer.trainer_input.experience_buffer.replay_buffer.reuse_cooldown_time",
        "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn",
        "buffer.trainer_input.experience_buffer.replay_buffer.priority_fn_args",
        "buffer.explorer_input.taskset.format.prompt_type",
        "buffer.explorer_input.taskset.format.prompt_key",
        "buffer.explorer_input.taskset.format.response_key",
        "buffer.explorer_input.taskset.format.system_prompt_key",
        "buffer.explorer_input.taskset.format.system_prompt",
        "buffer.explorer_input.taskset.format.messages_key",
        "buffer.trainer_input.experience_buffer.format.prompt_type",
        "buffer.trainer_input.experience_buffer.format.prompt_key",
        "buffer.trainer_input.experience_buffer.format.response_key",
        "buffer.trainer_input.experience_buffer.format.system_prompt_key",
        "buffer.trainer_input.experience_buffer.format.system_prompt",
        "buffer.trainer_input.experience_buffer.format.messages_key",
        "buffer.trainer_input.experience_buffer.format.tools_key",
        "buffer.trainer_input.experience_buffer.format.chosen_key",
        "buffer.trainer_input.experience_buffer.format.rejected_key",
        "buffer.trainer_input.experience_buffer.format.enable_concatenated_multi_turn",
        "buffer.trainer_input.experience_buffer.format.chat_template",
        "explorer.over_rollout.ratio",
        "explorer.over_rollout.wait_after_min",
        "explorer.over_rollout.return_partial_tasks",
        "explorer.dynamic_timeout.enable",
        "explorer.dynamic_timeout.ratio",
        "explorer.runner_state_report_interval",
        "explorer.env_vars",
        "model.enable_prompt_truncation",
        "buffer.explorer_input.tasksets",
        "buffer.explorer_input.taskset.task_selector.selector_type",
        "buffer.explorer_input.taskset.task_selector.seed",
        "buffer.explorer_input.taskset.task_selector.feature_keys",
        "buffer.explorer_input.taskset.task_selector.kwargs",
        "buffer.explorer_input.taskset.format.workflow_key",
        "buffer.explorer_input.taskset.format.reward_fn_key",
        "explorer.name",
        "explorer.runner_per_model",
        "explorer.max_timeout",
        "explorer.max_retry_times",
        "explorer.rollout_model.engine_type",
        "explorer.rollout_model.engine_num",
        "explorer.rollout_model.tensor_parallel_size",
        "explorer.rollout_model.enable_history",
        "explorer.rollout_model.enable_openai_api",
        "explorer.auxiliary_models",
        "explorer.eval_interval",
        "explorer.eval_on_startup",
        "explorer.bench_on_latest_checkpoint",
        "synchronizer.sync_method",
        "synchronizer.sync_interval",
        "synchronizer.sync_offset",
        "synchronizer.sync_timeout",
        "synchronizer.sync_style",
        "trainer.name",
        "trainer.trainer_type",
        "trainer.total_steps",
        "trainer.save_interval",
        "trainer.save_strategy",
        "trainer.save_hf_checkpoint",
        "trainer.grad_clip",
        "trainer.use_dynamic_bsz",
        "trainer.max_token_len_per_gpu",
        "trainer.trainer_config",
        "trainer.megatron.tensor_model_parallel_size",
        "trainer.megatron.pipeline_model_parallel_size",
        "trainer.megatron.virtual_pipeline_model_parallel_size",
        "trainer.megatron.expert_model_parallel_size",
        "trainer.megatron.expert_tensor_parallel_size",
        "trainer.megatron.context_parallel_size",
        "trainer.megatron.sequence_parallel",
        "trainer.critic_warmup",
        "trainer.balance_batch",
        "trainer.max_checkpoints_to_keep",
        "service.data_juicer.server_url",
        "service.data_juicer.auto_start",
        "service.data_juicer.port",
        "data_processor.task_pipeline.num_process",
        "data_processor.task_pipeline.operators",
        "data_processor.task_pipeline.inputs",
        "data_processor.task_pipeline.target_fields",
        "data_processor.task_pipeline.output.path",
        "data_processor.task_pipeline.config_path",
        "data_processor.task_pipeline.priority_weights",
        "data_processor.task_pipeline.top_k",
        "data_processor.experience_pipeline.operators",
        "data_processor.experience_pipeline.save_input",
        "data_processor.experience_pipeline.input_save_path",
        "log.level",
        "stages",
        "stage_name",
    )
)

# key: its value there, what it is here, and what is said of it
RENAMED: dict[str, dict[str, tuple[Any, str]]] = {
    "trainer.trainer_type": {"verl": ("megatron", "the trainer is Megatron")},
    "algorithm.kl_penalty_fn": {"": ("none", "")},
    "algorithm.algorithm_type": {"grpo_verl": ("grpo", "advantages are made in one place")},
    "algorithm.advantage_fn": {
        "grpo_verl": ("grpo", ""),
        "opmd_verl": ("opmd", ""),
        "asymre_verl": ("asymre", ""),
    },
}
_WORKFLOWS = {
    "simple_workflow": ("single_turn", ""),
    "async_simple_workflow": ("single_turn", ""),
    "math_workflow": ("math", ""),
    "async_math_workflow": ("math", ""),
    "math_boxed_workflow": ("single_turn", "name the reward math_boxed beside it"),
    "rubric_judge_workflow": ("rubric_judge", ""),
    "async_rubric_judge_workflow": ("rubric_judge", ""),
    "math_ruler_workflow": ("ruler", ""),
    "async_math_ruler_workflow": ("ruler", ""),
}
_REWARDS = {
    "math_reward": ("math", "right answers give 1, and form gives nothing"),
    "math_boxed_reward": ("math_boxed", "right answers give 1, and form gives nothing"),
    "countdown_reward": ("countdown", ""),
    "math_dapo_reward": ("math_dapo", ""),
    "format_reward": ("format", "1 for the form, else 0"),
    "accuracy_reward": ("accuracy", ""),
}
for _key in ("buffer.explorer_input", TASKSET):
    RENAMED |= {
        f"{_key}.default_workflow_type": _WORKFLOWS,
        f"{_key}.default_reward_fn_type": _REWARDS,
    }
RENAMED["buffer.explorer_input.default_eval_workflow_type"] = _WORKFLOWS
RENAMED[f"{ADAPTER}.target_modules"] = {"all-linear": (["all-linear"], "")}
for _setting in (one for _, table in tables() for one in table if one.is_optional):
    RENAMED[_setting.key] = {
        **RENAMED.get(_setting.key, {}),
        **{
            word: (None, "YAML's nothing is `null`")
            for word in ("None", "none")
            if word not in re.findall(r"\w+", _setting.meaning)
        },
    }

# names that the reference knows: said only of one that rft does not know
NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "mode": (("colocate",), "sharing GPUs is mode=both with cluster.colocate=true"),
    "algorithm.algorithm_type": (
        ("grpo_verl",),
        f"it is {YET}",
    ),
    "algorithm.advantage_fn": (
        ("clipv",),
        f"it is {YET}",
    ),
    "monitor.monitor_type": (("swanlab",), f"it is {YET}"),
    "explorer.rollout_model.engine_type": (
        ("sglang", "external"),
        "engines are vLLM's, or a Tinker service's",
    ),
    "trainer.trainer_type": (("verl",), "the trainer is Megatron"),
}


def canonical(key: str) -> str:
    """Tasksets for evaluation, and several for training, have the keys of the one, and a stage
    those of the whole.
    """
    key = re.sub(r"^stages(\[\d+\]|\.\d+)\.", "", key)
    return re.sub(
        r"^buffer\.explorer_input\.(?:eval_)?tasksets(\[\d+\]|\.\d+)?\.", f"{TASKSET}.", key
    )


def instead(key: str) -> str | None:
    """What to use instead of a key, or of a section, of the reference; None for one that it does
    not have either.
    """
    key = canonical(key)
    related = (
        other.instead
        for name, other in KEYS.items()
        if f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")
    )
    return KEYS[key].instead if key in KEYS else next(related, None)


def of_value(key: str, value: str) -> str | None:
    """What to say of a name that the reference knows and rft does not."""
    names, why = NAMES.get(canonical(key), ((), ""))
    return why if value in names else None
