"""The keys of a veRL command line that say what runs: data, rewards, rollouts, algorithm, machines.

In: dotted keys of veRL's trainer config with their values, its own defaults where a key is left out
(`DEFAULTS`). Out: rft's keys, by one row of `RUN` per key, or, where only several keys together
have a meaning, by `rft.config.verl_joints`. How to train is in `rft.config.verl`; all tables
together (`EVERY`) are what `rft train --verl` reads (`rft.config.verl_words`). Invariant: as there,
no key is ignored, and each has one row.
"""

from typing import Any

from rft.config import verl_newer
from rft.config.foreign import UNSET, ForeignKey
from rft.config.verl import CONTENTS, KEYS, ROLE, TILES, in_joint, taken, unset_if_empty
from rft.config.verl_joints import ENGINE, JOINTS, whole_path

_A, _R, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_RM, _CORR = "reward_model", "algorithm.rollout_correction"


def zero_if_negative(value: Any) -> Any:
    return max(0, value) if isinstance(value, int) else value


def thinks(arguments: dict[str, Any]) -> Any:
    said = arguments.get("enable_thinking")
    return UNSET if said is None else said


def dtype_of(value: Any) -> str:
    return {"bfloat16": "bf16", "bf16": "bf16"}.get(value, "fp32")


def usual(why: str, **only: Any) -> dict[str, ForeignKey]:
    """Keys that are taken with veRL's own default alone; `__` stands for a dot."""
    return {
        name.replace("__", "."): ForeignKey(
            "", why, only=value if isinstance(value, tuple) else (value,)
        )
        for name, value in only.items()
    }


def inside(section: str, rows: dict[str, ForeignKey]) -> dict[str, ForeignKey]:
    return {f"{section}.{name}": key for name, key in rows.items()}


def hints(why: str, words: str) -> dict[str, ForeignKey]:
    return {word: taken("", why) for word in words.split()}


NOWHERE = "nothing here depends on it"
PROFILED = "set trainer.profiler"
NO_MODEL = "without reward_model.enable there is no reward model"
IMAGES = "only text is trained on; rows with images are refused"
TURNS = "set buffer.explorer_input.default_workflow_type: docs/environments.md, docs/agents.md"
LOADED = "engines get their weights from the trainer"
OWN_CODE = "code of your own is a plug-in here: docs/plugins.md"
WITHOUT_TURNS = "it says nothing without multi_turn.enable, which is refused"
SET_BY_VERL = "veRL itself sets it: set trainer.total_training_steps"
MUON = "of an optimizer that is refused by its name"
MUON_WORDS = (
    "muon_momentum",
    "muon_nesterov",
    "muon_split_qkv",
    "muon_scale_mode",
    "muon_coefficient_type",
    "muon_num_ns_steps",
    "muon_tp_mode",
    "muon_fp32_matmul_prec",
    "muon_extra_scale_factor",
    "muon_scalar_optimizer",
    "muon_match_adamw_update_rms",
)

RUN: dict[str, ForeignKey] = {
    # data
    **inside(
        "data",
        {
            **hints(
                NOWHERE,
                "val_batch_size return_raw_input_ids return_raw_chat "
                "return_full_prompt return_multi_modal_inputs filter_overlong_prompts_workers "
                "dataloader_num_workers validation_shuffle use_shm trust_remote_code "
                "image_patch_size",
            ),
            **hints(IMAGES, "image_key video_key audio_key"),
            **usual(IMAGES, mm_processor_kwargs={}),
            **usual("cut the file: every row is used", train_max_samples=-1, val_max_samples=-1),
            **usual(
                OWN_CODE,
                sampler__class_path=(),
                sampler__class_name=(),
                datagen__path=(),
                datagen__name=(),
                custom_cls__path=(),
                custom_cls__name=(),
            ),
            "tokenizer": ForeignKey("", "the tokenizer is that of model.model_path"),
            "tool_config_path": ForeignKey("", TURNS),
            "function_tool_path": ForeignKey("", TURNS),
            "apply_chat_template_kwargs": ForeignKey(
                "",
                "of these rft has enable_thinking: write others into model.chat_template_path",
                to="model.enable_thinking",
                convert=thinks,
                only=({}, *({"enable_thinking": value} for value in (True, False, None))),
            ),
        },
    ),
    # the model
    **inside(
        _M,
        {
            "path": ForeignKey("", to="model.model_path", convert=whole_path),
            "trust_remote_code": ForeignKey("", to="model.trust_remote_code"),
            "custom_chat_template": ForeignKey("", to="model.custom_chat_template"),
            "hf_config_path": ForeignKey("", "it is read from model.model_path"),
            "tokenizer_path": ForeignKey("", "it is read from model.model_path"),
            "exclude_modules": ForeignKey("", "name those that train in target_modules"),
            "lora_adapter_path": ForeignKey("", "an adapter starts new, or goes on by a resume"),
            "lora.merge": taken("", "set synchronizer.lora_sync"),
            **usual("an adapter is plain LoRA", lora__type="lora", lora__dropout=0.0),
            **hints(NOWHERE, "lora.lora_A_init_method lora.lora_B_init_method lora.dtype"),
            **hints(NOWHERE, "lora.dropout_position lora.a2a_experimental"),
            **hints(IMAGES, "lora.freeze_vision_model lora.freeze_vision_projection"),
            "lora.freeze_language_model": taken("", "an adapter is trained, and nothing beside it"),
            "lora.target_modules": ForeignKey(
                "",
                "all linear layers: name others in target_modules, as the model's files do",
                only=(["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "all-linear"),
            ),
            "lora.exclude_modules": ForeignKey("", "all linear layers", only=([],)),
            "lora.adapter_path": ForeignKey("", "an adapter starts new, or goes on by a resume"),
            **usual("there is no such head here", mtp__enable=False),
        },
    ),
    # the policy's training
    **inside(
        _A,
        {
            **hints(
                NOWHERE,
                "use_torch_compile calculate_entropy data_loader_seed load_weight "
                "use_fused_kernels use_remove_padding rollout_n calculate_sum_pi_squared "
                "sum_pi_squared_checkpointing",
            ),
            **hints(IMAGES, "freeze_vision_tower"),
            **usual("the loss has no such part here", use_prefix_grouper=False),
            "loss_scale_factor": ForeignKey("", "the divisor is the longest response"),
            **hints(
                "they are of a loss that is refused by its name",
                "policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub "
                "policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef policy_loss.dro_beta",
            ),
            **hints(SET_BY_VERL, "optim.total_training_steps"),
            **hints(NOWHERE, "optim.zero_indexed_step checkpoint.strict checkpoint.mbridge_config"),
            **hints(TILES, "entropy_from_logits_chunk_size"),
            **hints(MUON, f"optim.{' optim.'.join(MUON_WORDS)}"),
            **hints(NOWHERE, "pad_to_length"),
            "router_replay.mode": verl_newer.REPLAY,
            **hints(NOWHERE, "router_replay.record_file router_replay.replay_file"),
        },
    ),
    **inside(
        "actor_rollout_ref.ref",
        {
            **hints(NOWHERE, "use_torch_compile rollout_n load_weight"),
            **hints(NOWHERE, "router_replay.mode router_replay.record_file"),
            **hints(NOWHERE, "router_replay.replay_file"),
            "model.path": ForeignKey("", to="model.ref_model_path", convert=whole_path),
            **hints(TILES, "entropy_from_logits_chunk_size"),
            **hints(NOWHERE, "pad_to_length"),
        },
    ),
    # engines
    **inside(
        _R,
        {
            "name": ForeignKey("", "engines are vLLM's", only=("vllm",)),
            "dtype": ForeignKey(
                "",
                "engines compute in bf16 or fp32",
                to=f"{ENGINE}.dtype",
                only=("bfloat16", "bf16", "float32", "fp32"),
                convert=dtype_of,
            ),
            "enforce_eager": ForeignKey("", to=f"{ENGINE}.enforce_eager"),
            "max_num_seqs": ForeignKey("", to=f"{ENGINE}.max_num_seqs"),
            "max_model_len": ForeignKey("", to="model.max_model_len"),
            "enable_prefix_caching": ForeignKey("", to=f"{ENGINE}.enable_prefix_caching"),
            **{
                word: ForeignKey("", to=f"{ENGINE}.engine_args.{word}")
                for word in (
                    "max_num_batched_tokens",
                    "enable_chunked_prefill",
                    "scheduling_policy",
                    "cudagraph_capture_sizes",
                    "disable_log_stats",
                )
            },
            **hints(LOADED, "load_format layered_summon checkpoint_engine.backend"),
            **hints(LOADED, "checkpoint_engine.update_weights_bucket_megabytes"),
            **hints(LOADED, "checkpoint_engine.engine_kwargs multi_stage_wake_up"),
            **hints(LOADED, "layer_name_map.qkv_layer_name layer_name_map.gate_proj_layer_name"),
            **hints(
                ROLE,
                "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
                "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu",
            ),
            **hints(
                "engines answer one request at a time, and their log-probabilities are kept",
                "mode calculate_log_probs skip_tokenizer_init agent.num_workers",
            ),
            **hints("engines that share cards sleep while the trainer works", "free_cache_engine"),
            **hints(NOWHERE, "trace.backend trace.token2text skip_dump_dir served_model_name"),
            **hints(NOWHERE, "trace.max_samples_per_step_per_worker quantization_config_file mtp"),
            **hints(NOWHERE, "prometheus.enable prometheus.port prometheus.file"),
            **hints(NOWHERE, "prometheus.served_model_name"),
            **hints("engines are vLLM's", "engine_kwargs.sglang engine_kwargs.trtllm"),
            **usual(
                "an engine's workers are its tensor_parallel_size; set engine_num for copies",
                data_parallel_size=1,
                expert_parallel_size=1,
                pipeline_model_parallel_size=1,
            ),
            **usual("a response ends where the model ends it", ignore_eos=False),
            **usual("responses are sampled; set temperature", do_sample=True),
            **usual(
                "the trainer's log-probabilities are of what was sampled from",
                logprobs_mode="processed_logprobs",
            ),
            **usual("set explorer.over_rollout.ratio", over_sample_rate=0),
            **usual("every step is sampled", skip_rollout=False),
            "seed": ForeignKey("", to=f"{ENGINE}.seed"),
            **usual("set deterministic", full_determinism=False),
            **usual("set cluster.* for engines with cards of their own", nnodes=0),
            **hints("trainer.n_gpus_per_node says it", "n_gpus_per_node"),
            **usual("an engine fills its cache itself", disaggregation__enabled=False),
            **hints(NOWHERE, "moe_load_balance_metrics_interval qat"),
            **hints(NOWHERE, "trace.project_name trace.experiment_name"),
            **hints(LOADED, "checkpoint_engine.custom_backend_module"),
            "multi_turn.function_tool_path": taken("", WITHOUT_TURNS),
            "enable_rollout_routing_replay": ForeignKey(
                "", to=f"{ENGINE}.enable_return_routed_experts", convert=unset_if_empty
            ),
            "quantization": ForeignKey("", "engines have the trainer's weights as they are"),
            "agent.default_agent_loop": ForeignKey("", TURNS, only=("single_turn_agent",)),
            "agent.agent_loop_config_path": ForeignKey("", TURNS),
            "agent.custom_async_server.path": ForeignKey("", OWN_CODE),
            "agent.custom_async_server.name": ForeignKey("", OWN_CODE),
            "multi_turn.enable": ForeignKey("", TURNS, only=(False,)),
            **inside(
                "multi_turn",
                hints(
                    WITHOUT_TURNS,
                    "max_assistant_turns tool_config_path max_user_turns max_parallel_calls "
                    "max_tool_response_length tool_response_truncate_side interaction_config_path "
                    "use_inference_chat_template tokenization_sanity_check_mode format "
                    "num_repeat_rollouts",
                ),
            ),
        },
    ),
    # the critic
    **inside(
        "critic",
        {
            "model.path": ForeignKey("", to="model.critic_model_path", convert=whole_path),
            "model.tokenizer_path": taken("", "the tokenizer is that of model.model_path"),
            **hints(NOWHERE, "model.trust_remote_code enable data_loader_seed load_weight"),
            **hints(NOWHERE, "nccl_timeout rollout_n model.target_modules model.lora_alpha"),
            **hints(NOWHERE, "model.tiled_mlp.enabled model.tiled_mlp.num_shards"),
            **usual("the critic is trained whole", model__lora_rank=0, model__lora__rank=0),
            **usual("the critic's loss is a mean over tokens", loss_agg_mode="token-mean"),
            **hints(NOWHERE, "loss_scale_factor"),
            **hints(SET_BY_VERL, "optim.total_training_steps"),
            **hints(NOWHERE, "optim.zero_indexed_step checkpoint.strict checkpoint.mbridge_config"),
            **hints(MUON, f"optim.{' optim.'.join(MUON_WORDS)}"),
            **hints(TILES, "model.use_liger model.use_fused_kernels"),
            **hints(TILES, "model.fused_kernel_options.impl_backend"),
            **hints("it is read from model.critic_model_path", "model.hf_config_path"),
            **hints(NOWHERE, "model.custom_chat_template model.exclude_modules"),
            **hints(NOWHERE, "model.lora_adapter_path"),
        },
    ),
    # the algorithm
    **inside(
        "algorithm",
        {
            **usual("rows are not weighed again", use_pf_ppo=False),
            **hints(NOWHERE, "pf_ppo.reweight_method pf_ppo.weight_pow"),
            **hints("tasks are drawn until a step is full", "filter_groups.max_num_gen_batches"),
            **hints(NOWHERE, "filter_groups.max_inflight_gen_batches"),
            **usual(
                "set algorithm.policy_loss_fn",
                rollout_correction__loss_type="ppo_clip",
                rollout_correction__rollout_is_batch_normalize=False,
            ),
            "rollout_correction.rollout_token_veto_threshold": ForeignKey(
                "", to="algorithm.rollout_correction.rollout_token_veto_threshold"
            ),
        },
    ),
    # rewards: what is of a reward model says nothing where there is none, and that is refused
    **inside(
        _RM,
        {
            **hints(
                NO_MODEL,
                "enable_resource_pool n_gpus_per_node nnodes micro_batch_size "
                "micro_batch_size_per_gpu max_length use_dynamic_bsz forward_max_token_len_per_gpu "
                "strategy ulysses_sequence_parallel_size nccl_timeout load_weight",
            ),
            **hints("explorer.reward_workers score", "launch_reward_fn_async num_workers"),
            **hints(
                "explorer.reward_workers score",
                "use_reward_loop reward_kwargs.overlong_buffer_cfg.log",
            ),
            **hints(
                "explorer.reward_workers score", "overlong_buffer.log sandbox_fusion.max_concurrent"
            ),
            **hints("explorer.reward_workers score", "sandbox_fusion.memory_limit_mb"),
            "sandbox_fusion.url": ForeignKey(
                "", "set the reward code_tests, which has its own cells"
            ),
            **usual(OWN_CODE, reward_loop_source="register"),
            "reward_loop_module_path": ForeignKey("", OWN_CODE),
            "reward_loop_class_name": ForeignKey("", OWN_CODE, only=("custom_reward_manager",)),
        },
    ),
    # the run
    **inside(
        "trainer",
        {
            "total_epochs": ForeignKey("", to="buffer.total_epochs"),
            "test_freq": ForeignKey("", to="explorer.eval_interval", convert=zero_if_negative),
            "val_before_train": ForeignKey("", to="explorer.eval_on_startup"),
            "val_only": ForeignKey("", "set mode=bench on an export", only=(False,)),
            "device": ForeignKey(
                "", "ranks and engines compute on GPUs or CPUs", to="device", only=("cuda", "cpu")
            ),
            **hints("rollouts of every step are in samples.jsonl", "log_val_generations"),
            **hints("rollouts of every step are in samples.jsonl", "rollout_data_dir"),
            **hints("rollouts of every step are in samples.jsonl", "validation_data_dir"),
            **hints(NOWHERE, "esi_redundant_time ray_wait_register_center_timeout"),
            **hints(NOWHERE, "use_legacy_worker_impl use_v1"),
            **usual(
                "set synchronizer.max_staleness: so many versions may rollouts be behind",
                v1__trainer_mode="sync",
            ),
            "checkpoint.save_contents": taken("", CONTENTS),
            "max_ckpt_to_keep": ForeignKey("", to="trainer.max_checkpoints_to_keep"),
        },
    ),
    "ray_kwargs.ray_init.num_cpus": ForeignKey("", to="cluster.ray_num_cpus"),
    "ray_kwargs.timeline_json_file": ForeignKey("", "set monitor.trace"),
    **usual(
        "give algorithm.algorithm_type=on_policy_distill and model.teacher_model_path behind --",
        distillation__enabled=False,
    ),
    **usual(
        "every step is sampled",
        **{f"skip__{one}__enable": False for one in ("rollout", "rollout_tq", "async_rollout")},
    ),
}
FREE = {f"{_R}.engine_kwargs.vllm": f"{ENGINE}.engine_args"}
SKIPPED = {  # sections in which every key is a hint
    "global_profiler": PROFILED,
    **{f"{one}.profiler": PROFILED for one in (_A, _R, "actor_rollout_ref.ref", "critic", _RM)},
    "actor_rollout_ref.profiler": PROFILED,
    f"{_M}.mtp": "there is no such head here",
    f"{_RM}.model": NO_MODEL,
    f"{_RM}.rollout": NO_MODEL,
    f"{_RM}.megatron": NO_MODEL,
    "critic.model.lora": "the critic is trained whole",
    f"{_R}.engine_kwargs.sglang": "engines are vLLM's",
    f"{_R}.engine_kwargs.trtllm": "engines are vLLM's",
    f"{_R}.disaggregation": "an engine fills its cache itself",
    "critic.model.mtp": "there is no such head here",
    "ray_kwargs.ray_init": "Ray is started by rft: set variables in the shell",
    "transfer_queue": NOWHERE,
    "trainer.v1": "of a mode that is refused",
    "distillation": "without distillation.enabled nothing is distilled",
    "skip": "every step is sampled",
    **verl_newer.skipped(),
}
OPEN = ("custom_reward_function.reward_kwargs",)  # read by a joint, of any name

_OVER = (
    "trainer.resume_mode",
    "trainer.resume_from_path",
    f"{_A}.megatron.sequence_parallel",
    f"{_A}.optim.min_lr",
    "critic.optim.min_lr",
)
EVERY: dict[str, ForeignKey] = {
    **KEYS,
    **{
        name: ForeignKey("", to=", ".join(joint.sets.split()), convert=in_joint)
        for joint in JOINTS
        for name in joint.reads.split()
        if name not in KEYS or name in _OVER
    },
    **RUN,
    **verl_newer.rows(),
}
# veRL's defaults that are others than rft's, or that a joint reads
DEFAULTS: dict[str, Any] = {
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "data.shuffle": True,
    "data.truncation": "error",
    "data.filter_overlong_prompts": False,
    f"{_A}.strategy": "fsdp",
    f"{_A}.ppo_mini_batch_size": 256,
    f"{_A}.use_dynamic_bsz": False,
    f"{_A}.clip_ratio": 0.2,
    f"{_A}.clip_ratio_low": 0.2,
    f"{_A}.clip_ratio_high": 0.2,
    f"{_A}.clip_ratio_c": 3.0,
    f"{_A}.tau_pos": 1.0,
    f"{_A}.tau_neg": 1.05,
    f"{_A}.policy_loss.loss_mode": "vanilla",
    f"{_A}.loss_agg_mode": "token-mean",
    f"{_A}.entropy_coeff": 0,
    f"{_A}.use_kl_loss": False,
    f"{_A}.kl_loss_coef": 0.001,
    f"{_A}.kl_loss_type": "low_var_kl",
    f"{_A}.optim.lr": 1e-6,
    f"{_A}.optim.weight_decay": 0.01,
    f"{_A}.grad_clip": 1.0,
    f"{_M}.enable_gradient_checkpointing": True,
    f"{_M}.lora_rank": 0,
    f"{_M}.lora_alpha": 16,
    f"{_M}.lora.alpha": 32,
    f"{_M}.target_modules": "all-linear",
    f"{_R}.n": 1,
    f"{_R}.temperature": 1.0,
    f"{_R}.top_p": 1.0,
    f"{_R}.top_k": -1,
    f"{_R}.tensor_model_parallel_size": 2,
    f"{_R}.gpu_memory_utilization": 0.5,
    f"{_R}.val_kwargs.temperature": 0.0,
    f"{_R}.val_kwargs.top_p": 1.0,
    f"{_R}.val_kwargs.top_k": -1,
    f"{_R}.val_kwargs.n": 1,
    f"{_R}.val_kwargs.do_sample": False,
    "critic.optim.lr": 1e-5,
    "critic.cliprange_value": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    f"{_CORR}.rollout_is_threshold": 2.0,
    f"{_CORR}.bypass_mode": False,
    f"{_RM}.enable": False,
    f"{_RM}.reward_manager": "naive",
    "custom_reward_function.name": "compute_score",
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.logger": ["console", "wandb"],
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.resume_mode": "auto",
    "trainer.max_actor_ckpt_to_keep": 0,  # null there: every one is kept
}
