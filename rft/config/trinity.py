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
from rft.config.trinity_data import ADAPTER, DATA, ITSELF
from rft.config.trinity_flows import IMAGES, WORKFLOWS


def opposite(value: Any) -> Any:
    return not value


def samples(value: Any) -> int:
    """Rollouts of a step that are written down."""
    return 4 if value else 0


YET = "not in rft yet"
RECORDED = "log-probabilities of what was sampled are always recorded"
PENALTY = (
    "a penalty changes what is sampled, and the trainer computes the log-probabilities without one"
)
NOT_ASKED = "no model behind an API is asked"
OFFLOAD = "nothing is offloaded: use more ranks, or trainer.recompute_granularity"
EXPERIENCES_COME = (
    "experiences come from the explorer and go to the buffer of the trainer: leave it out"
)
MODEL_SAYS = "the model is what its config.json says: edit that of model.model_path"
EACH_SET = f"each taskset that leaves it out has it, as {TASKSET}.rollout_args.{{}} here"
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
    "algorithm.enable_router_replay": ForeignKey("B11", to="trainer.router_replay"),
    "algorithm.bypass_old_logprobs": ForeignKey(
        "B11", to="algorithm.proximal_logprobs", convert=opposite
    ),
    # C: monitor
    "monitor.enable_ray_timeline": ForeignKey("C6", to="monitor.trace"),
    "monitor.detailed_stats": ForeignKey("C9", to="monitor.detailed"),
    # D: model
    "model.logprobs": ForeignKey("D11", RECORDED, takes_any=True),
    "model.repetition_penalty": ForeignKey("D11", PENALTY, only=(1.0, 1)),
    "model.fully_sharded_loras": ForeignKey("D11", "adapters are whole in engines", only=(False,)),
    "model.max_cpu_loras": ForeignKey("D11", "it follows from synchronizer.max_staleness"),
    "model.rope_scaling": ForeignKey("D11", MODEL_SAYS),
    "model.rope_theta": ForeignKey("D11", MODEL_SAYS),
    # F: buffer
    "buffer.default_workflow_type": ForeignKey(
        "F19", to="buffer.explorer_input.default_workflow_type"
    ),
    "buffer.default_reward_fn_type": ForeignKey(
        "F19", to="buffer.explorer_input.default_reward_fn_type"
    ),
    f"{TASKSET}.rollout_args.logprobs": ForeignKey("F18", RECORDED, takes_any=True),
    f"{TASKSET}.rollout_args.n": ForeignKey(
        "F18", "repeat_times says how many answers a task gets, there too", takes_any=True
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
    "trainer.enable_preview": ForeignKey("I17", to="monitor.num_samples", convert=samples),
    # J: service, data processor, log
    "data_processor.experience_pipeline.inputs": ForeignKey("J9", EXPERIENCES_COME, only=({},)),
    "data_processor.experience_pipeline.output": ForeignKey("J9", EXPERIENCES_COME),
}
KEYS |= {
    f"{TASKSET}.format.image_key": ForeignKey("F41", IMAGES),
    f"{TASKSET}.format.video_key": ForeignKey("F41", IMAGES),
    f"{TASKSET}.format.chosen_key": ForeignKey(
        "F43", f"tasks have no pairs of answers: {PAIRS}", only=("chosen",)
    ),
    f"{TASKSET}.format.rejected_key": ForeignKey(
        "F43", f"tasks have no pairs of answers: {PAIRS}", only=("rejected",)
    ),
    f"{TASKSET}.format.enable_concatenated_multi_turn": ForeignKey(
        "F44",
        "it says which answers of supervised rows are learned, and a task has none: leave it out",
        only=(False,),
    ),
    f"{TASKSET}.format.chat_template": ForeignKey("F45", to="model.custom_chat_template"),
}

# --- engines: those of the policy, and those of each auxiliary model ------------------------------

POLICY, BESIDE = "explorer.rollout_model", "explorer.auxiliary_models"
NODES = "an engine is on one machine: leave it out"
API = "an endpoint in front of all engines answers OpenAI's API: docs/agents.md"


def engine(key: str) -> dict[str, ForeignKey]:
    """Rows that both have."""
    args = f"{key}.engine_args"
    rows = {
        "use_v1": ForeignKey("G3", "vLLM has one engine, which is its V1", only=(True,)),
        "enable_chunked_prefill": ForeignKey("G3", to=f"{args}.enable_chunked_prefill"),
        "enable_log_requests": ForeignKey("G3", to=f"{args}.enable_log_requests"),
        "extra_engine_args": ForeignKey("G3", to=args),
        "enable_auto_tool_choice": ForeignKey(
            "G9", "calls are parsed wherever a request has tools", only=(True, False)
        ),
        "repetition_penalty": ForeignKey("G3", PENALTY, only=(1.0, 1)),
        "ignore_eos": ForeignKey("G3", "an answer ends where the model ends it", only=(False,)),
        "enable_multimodal": ForeignKey("G3", f"images are {YET}", only=(False,), late=True),
        "base_port": ForeignKey("G9", f"{API}: set explorer.proxy_port"),
        "api_key": ForeignKey("G9", f"{API}; its key is made at the start", only=("EMPTY",)),
        "weight_sync_buffer_size": ForeignKey(
            "H9", "set synchronizer.bucket_bytes: of one message", only=(1024,)
        ),
        "data_parallel_size": ForeignKey("G3", "set engine_num: engines are copies", only=(1,)),
        "pipeline_parallel_size": ForeignKey("G3", "set tensor_parallel_size", only=(1,)),
        "enable_expert_parallel": ForeignKey(
            "G3", "experts are cut by tensor_parallel_size", only=(False,)
        ),
        "rope_scaling": ForeignKey("D11", MODEL_SAYS),
        "rope_theta": ForeignKey("D11", MODEL_SAYS),
        "nnodes": ForeignKey("G3", NODES, only=(1,)),
        "node_rank": ForeignKey("G3", NODES, only=(0,)),
    }
    for word, value in (
        ("gpu_per_engine", 0),
        ("bundle_indices", ""),
        ("engine_id", 0),
        ("ray_namespace", None),
        ("ray_actor_name", None),
        ("sync_method", None),
        ("checkpoint_job_dir", None),
        ("cuda_visible_devices", None),
        ("enable_lora", False),
        ("enable_runtime_lora_updating", False),
        ("lora_modules", None),
        ("lora_kwargs", {}),
    ):
        rows[word] = ForeignKey("G3", ITSELF, only=(value,))
    return {f"{key}.{word}": row for word, row in rows.items()}


KEYS |= engine(POLICY) | engine(BESIDE)
for _word in ("temperature", "top_p", "top_k"):
    KEYS[f"model.{_word}"] = ForeignKey("D11", EACH_SET.format(_word), takes_any=True)
    KEYS[f"{POLICY}.{_word}"] = ForeignKey("G3", EACH_SET.format(_word), takes_any=True)
    KEYS[f"{BESIDE}.{_word}"] = ForeignKey("G3", "who asks the model says how to sample")
for _key in ("model.external_model", *(f"{one}.external_model_config" for one in (POLICY, BESIDE))):
    KEYS |= {
        f"{_key}.enable": ForeignKey(
            "D11", "models have engines here: leave it out", only=(False,), late=True
        ),
        f"{_key}.base_url_env": ForeignKey("D11", NOT_ASKED, takes_any=True),
        f"{_key}.api_key_env": ForeignKey("D11", NOT_ASKED, takes_any=True),
        f"{_key}.model_name": ForeignKey("D11", NOT_ASKED, takes_any=True),
    }
for _key in (POLICY, BESIDE):
    KEYS[f"{_key}.logprobs"] = ForeignKey("G3", RECORDED, takes_any=True)
for _word in (
    "enable_thinking",
    "max_model_len",
    "max_prompt_tokens",
    "max_response_tokens",
    "min_response_tokens",
    "enable_prompt_truncation",
    "trust_remote_code",
):
    KEYS[f"{POLICY}.{_word}"] = ForeignKey("G3", to=f"model.{_word}")
KEYS |= {
    f"{POLICY}.model_path": ForeignKey("G3", to="model.model_path"),
    f"{POLICY}.name": ForeignKey("G3", "the policy's name at its API is its model's"),
    f"{POLICY}.chat_template": ForeignKey("G3", to="model.custom_chat_template"),
    f"{BESIDE}.chat_template": ForeignKey("G3", to=f"{BESIDE}.custom_chat_template"),
    f"{BESIDE}.enable_openai_api": ForeignKey("G9", API, only=(True, False)),
    f"{BESIDE}.min_response_tokens": ForeignKey("G3", "who asks the model says it", only=(0,)),
    f"{BESIDE}.enable_prompt_truncation": ForeignKey(
        "G3", "a question that is too long is refused, and none is cut", only=(False, True)
    ),
    f"{BESIDE}.enable_history": ForeignKey("G9", "nothing of it is trained on", only=(False,)),
    f"{BESIDE}.enable_return_routed_experts": ForeignKey(
        "B11", "nothing of it is trained on", only=(False,)
    ),
    # explorer, cluster, trainer and what Trinity sets itself
    "explorer.max_repeat_times_per_runner": ForeignKey(
        "G2", "a group's runs are under way at the same time, whatever runs them", takes_any=True
    ),
    "explorer.concurrent_mode": ForeignKey(
        "G2",
        "a group's runs are under way at the same time; a workflow's object belongs to one run",
        only=("sequential", "asynchronous", "multi-threading"),
    ),
    "explorer.runner_num": ForeignKey("G2", "set explorer.runner_per_model"),
    "explorer.runner_prepare_concurrency": ForeignKey("G2", "runners are tasks", only=(8,)),
    "explorer.runner_prepare_max_retries": ForeignKey("G2", "runners are tasks", only=(2,)),
    "explorer.service_status_check_interval": ForeignKey(
        "G9", "a dead engine is seen at once, and started again", takes_any=True
    ),
    "explorer.min_running_model_num": ForeignKey(
        "G9", "requests wait while no engine runs", only=(1,)
    ),
    "explorer.db_url": ForeignKey("G9", "requests are kept in the run's directory: docs/agents.md"),
    "explorer.dynamic_timeout.warmup_min_steps": ForeignKey(
        "G7", "it begins after the first step's worth of tasks", only=(1,)
    ),
    "explorer.max_inflight_batches": ForeignKey(
        "H10", "set synchronizer.max_staleness: so many versions may rollouts be behind", only=(2,)
    ),
    "trainer.ppo_max_token_len_per_gpu": ForeignKey(
        "I13", "veRL's name of it", to="trainer.max_token_len_per_gpu"
    ),
    "trainer.fix_actor_microbatch_loss_scale": ForeignKey(
        "I13", "microbatches are weighed by their tokens, so cuts change no loss", only=(False,)
    ),
    "trainer.trainer_config_path": ForeignKey(
        "I16", "write the block of that file below trainer.trainer_config", only=("",)
    ),
    "trainer.trust_remote_code": ForeignKey("D11", to="model.trust_remote_code"),
    "ignore_validator_suggestions": ForeignKey(
        "A4", "what does not fit is refused, and nothing is suggested", only=(True, False)
    ),
    "synchronizer.group_name": ForeignKey("H4", ITSELF, only=("rollout_weight_sync",)),
    "synchronizer.wait_for_checkpoint": ForeignKey(
        "H4", "a version is published when it is whole", only=(True, False)
    ),
}
for _key, _value in (
    ("checkpoint_job_dir", ""),
    ("monitor.cache_dir", ""),
    ("log.save_dir", ""),
    ("synchronizer.explorer_world_size", None),
    ("synchronizer.ray_namespace", ""),
    ("buffer.explorer_output", None),
    ("buffer.tokenizer_path", None),
    ("buffer.cache_dir", None),
    *(
        (f"cluster.{_one}_gpu_num", 0)
        for _one in ("total", "rollout", "auxiliary_model", "explorer")
    ),
    *((f"cluster.trainer_{_one}", 0) for _one in ("gpu_num", "node_num", "gpu_num_per_node")),
):
    KEYS[_key] = ForeignKey("A4", ITSELF, only=(_value,))
KEYS |= DATA

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
        "model.enable_thinking",
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
        "buffer.explorer_input.taskset.format.tools_key",
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
        "explorer.rollout_model.enable_return_routed_experts",
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
_DTYPES = {
    "bfloat16": ("bf16", ""),
    "float32": ("fp32", ""),
    "float": ("fp32", ""),
    "auto": (UNSET, "engines have the type of the weights that the trainer sends"),
}
for _key in (POLICY, BESIDE):
    RENAMED[f"{_key}.dtype"] = _DTYPES
for _key in (
    f"{TASKSET}.default_workflow_type",
    "buffer.explorer_input.default_workflow_type",
    "buffer.explorer_input.default_eval_workflow_type",
):
    RENAMED[_key] = WORKFLOWS
RENAMED[f"{ADAPTER}.target_modules"] = {"all-linear": (["all-linear"], "")}
# what YAML reads as a text where nothing was meant; of a key that knows the word it is that word
NOTHING: dict[str, set[str]] = {
    one.key: {"None", "none"} - {*re.findall(r"\w+", one.meaning)}
    for _, table in tables()
    for one in table
    if one.is_optional
}
NOTHING |= {f"{BESIDE}.{word}": {"None", "none"} for word in ("custom_chat_template", "name")}

# names that the reference knows: said only of one that rft does not know
NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "mode": (("colocate",), "sharing GPUs is mode=both with cluster.colocate=true"),
    "algorithm.algorithm_type": (
        ("m2po",),
        "set algorithm_type=grpo, and in rollout_correction rollout_rs=second_moment with "
        "m2_threshold as rollout_rs_threshold",
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
    f"{POLICY}.dtype": (("float16", "half"), "there is no trainer of float16: set bfloat16"),
    f"{BESIDE}.dtype": (("float16", "half"), f"it is {YET}: set bfloat16"),
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
