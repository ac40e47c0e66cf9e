"""Every argument of vLLM's engine, and what `explorer.rollout_model.engine_args` may do with it.

    PASSED   reaches vLLM as it is given; what its value may be, vLLM says
    OWNED    rft sets it, or rests on it: the key to set instead, or the reason
    LAYOUT   changes where weights lie, or which there are: refused until a test shows for it that
             an engine with installed weights answers as one that was started from them
    COMPARED speculation of the engines that are trained from: passed, and what they tell is
             compared with the trainer's own before the first step (`rft.trainer.speculation`)

In: nothing; vLLM is not imported. Out: one class per argument, and what is wrong with given ones.
Invariant: each field of the AsyncEngineArgs of VLLM is here, once; a test reads them in the
installed vLLM and names what came or went.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rft.config.hints import closest

VLLM = "0.32.0"


def _words(names: str) -> tuple[str, ...]:
    return tuple(names.split())


TOOL_CALL_PARSERS = _words(
    "apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 "
    "deepseek_v4 deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 "
    "granite granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling "
    "internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json "
    "llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral muse_glimmer "
    "olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder qwen3_json "
    "qwen3_xml seed_oss step3 step3p5 xlam"
)
REASONING_PARSERS = _words(
    "cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 "
    "gemma4 glm45 glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 "
    "inkling k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think "
    "minimax_m3 mistral muse_glimmer nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 "
    "seed_oss step3 step3p5"
)
PARSERS = {"tool_call_parser": TOOL_CALL_PARSERS, "reasoning_parser": REASONING_PARSERS}


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


PASSED = frozenset(
    _each(
        "additional_config aggregate_engine_logging allowed_local_media_path "
        "allowed_media_domains async_scheduling attention_backend attention_config block_size "
        "collect_detailed_traces compilation_config cpu_distributed_timeout_seconds "
        "cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets "
        "disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce "
        "disable_hybrid_kv_cache_manager disable_log_stats distributed_timeout_seconds "
        "ec_manager_config enable_batch_sharded_sampling enable_chunked_prefill "
        "enable_flashinfer_autotune enable_layerwise_nvtx_tracing enable_log_requests "
        "enable_logging_iteration_details enable_mamba_cache_stochastic_rounding "
        "enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mm_embeds "
        "enable_mm_processor_stats enable_nccl_comm_suspend enable_prompt_embeds "
        "enable_shm_tensor_arena fail_on_environ_validation gdn_prefill_backend "
        "generation_config ignore_patterns interleave_mm_strings io_processor_plugin "
        "ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend "
        "kda_prefill_backend kv_cache_metrics kv_cache_metrics_sample kv_events_config "
        "kv_sharing_fast_prefill language_model_only limit_mm_per_prompt log_config_file "
        "log_level logging_config long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive mamba_backend mamba_block_size mamba_cache_dtype "
        "mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype "
        "mamba_ssu_algorithm max_cudagraph_capture_size max_logprobs max_num_active_seqs "
        "max_num_batched_tokens max_num_scheduled_tokens max_parallel_loading_workers "
        "media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin "
        "mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm "
        "mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device "
        "mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc "
        "model_loader_extra_config num_gpu_blocks_override numa_bind numa_bind_cpus "
        "numa_bind_nodes optimization_level otlp_traces_endpoint override_generation_config "
        "per_request_spec_decode_metrics performance_mode prefill_schedule_interval "
        "prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit "
        "profiler_config pt_load_map_location reasoning_config reasoning_parser "
        "reasoning_parser_plugin renderer_num_workers replayssm_buffer_len "
        "safetensors_load_strategy safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads scheduler_reserve_full_isl scheduling_policy "
        "served_model_name show_hidden_metrics_for_version skip_mm_profiling "
        "sleep_mode_offload_cudagraph sparse_indexer_topk_backend stream_interval "
        "structured_outputs_config swa_bounded_replay tokens_only use_fp64_gumbel use_replayssm "
        "use_tqdm_on_load video_pruning_method video_pruning_rate watermark",
        "",
    )
)

OWNED = {
    "model": "set model.model_path, or the model_path of the auxiliary model",
    "trust_remote_code": "set model.trust_remote_code, or that of the auxiliary model",
    "max_model_len": "set model.max_model_len, or that of the auxiliary model",
    "dtype": "set dtype beside engine_args",
    "max_num_seqs": "set max_num_seqs beside engine_args",
    "tensor_parallel_size": "set tensor_parallel_size beside engine_args",
    "enforce_eager": "set enforce_eager beside engine_args",
    "enable_prefix_caching": "set enable_prefix_caching beside engine_args",
    "gpu_memory_utilization": "set gpu_memory_utilization beside engine_args",
    "kv_cache_memory_bytes": (
        "set kv_cache_gb (on a CPU) or gpu_memory_utilization (on a GPU) beside engine_args"
    ),
    "seed": "set seed",
    "enable_sleep_mode": "set cluster.colocate",
    "hf_token": "set HF_TOKEN in the environment: a config is written down",
    "logprobs_mode": "the trainer learns from the log-probabilities that were sampled from",
    "distributed_executor_backend": "it follows from tensor_parallel_size",
    "device_ids": "rft gives out the cards: set cluster.gpu_per_node or CUDA_VISIBLE_DEVICES",
    "ray_workers_use_nsight": "an engine's workers are no actors of Ray's",
    "shutdown_timeout": "set shutdown_grace_s",
    "scheduler_cls": "the version of every token comes from vLLM's own scheduler",
    "skip_tokenizer_init": "stop texts need the tokenizer",
    "tokenizer_mode": "the explorer's tokenizer is the model's own, and the engine's is the same",
    "sleep_preserve_parameter_names": "all weights are kept while an engine sleeps",
    "enable_cumem_allocator": "set cluster.colocate: it is for memory that sleeps",
    "disable_sliding_window": "the trainer computes the model as its config.json says",
    **_each(
        "worker_cls worker_extension_cls weight_transfer_config",
        "it is how weights reach the engine",
    ),
    **_each(
        "hf_config_path hf_overrides config_format model_weights tokenizer",
        "trainer and engines read the same files, those in model.model_path",
    ),
    **_each(
        "revision code_revision tokenizer_revision download_dir",
        "write it behind the name: model.model_path=org/name@REVISION",
    ),
    **_each("master_addr master_port nnodes node_rank", "an engine is on one machine"),
    **_each("runner convert pooler_config mm_encoder_only", "engines generate, and nothing else"),
    **_each(
        "logits_processors watermark_config",
        "the trainer would compute other log-probabilities than were sampled from",
    ),
    **_each(
        "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config",
        "what is kept elsewhere would outlive a change of the weights",
    ),
    **_each(
        "enable_return_routed_experts aux_output_config",
        "set explorer.rollout_model.enable_return_routed_experts",
    ),
    **_each(
        "return_sampling_mask enable_trace_replay",
        "nothing here reads what it adds to the output",
    ),
    **_each(
        "max_num_queued_reqs max_num_queued_tokens",
        "set explorer.runner_per_model: a request that is turned away is a failed task",
    ),
    **_each(
        "enable_fault_tolerance fault_tolerance_config",
        "set explorer.rollout_model.max_restarts: the supervisor replaces engines",
    ),
    **_each("_api_process_count _api_process_rank", "it is vLLM's own affair"),
    **_each(
        "enable_lora max_loras max_lora_rank max_cpu_loras lora_target_modules lora_dtype "
        "default_mm_loras enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
        "set model.lora_configs",
    ),
}

LAYOUT = {
    **_each(
        "quantization quantization_config allow_deprecated_quantization kv_cache_dtype "
        "kv_cache_dtype_skip_layers",
        "quantized values and their scales are made as weights load",
    ),
    **_each(
        "moe_backend linear_backend kernel_config",
        "kernels have orders of their own for the weights",
    ),
    **_each(
        "enable_expert_parallel enable_ep_weight_filter all2all_backend enable_eplb eplb_config "
        "expert_placement_strategy enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold",
        "experts lie, and move, in another way than tensor_parallel_size says",
    ),
    **_each(
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
        "dp_sync_interval disable_nccl_for_dp_synchronization",
        "an engine's workers would be more than tensor_parallel_size; set engine_num for copies",
    ),
    **_each(
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size enable_hc_sp",
        "layers or heads lie in another way than tensor_parallel_size says",
    ),
    "diffusion_config": "whole blocks of tokens are made at once",
    **_each(
        "offload_backend cpu_offload_gb cpu_offload_params offload_group_size "
        "offload_num_in_group offload_prefetch_step offload_params",
        "weights would lie in host memory",
    ),
    **_each(
        "load_format model_impl model_class_overrides engram_config",
        "the model is another one than its files in Hugging Face form make of vLLM's own classes",
    ),
    "fully_sharded_loras": "adapters are cut in another way",
}
COMPARED = _each(
    "speculative_config spec_method spec_model spec_tokens",
    "only the log-probabilities of explorer.rollout_model are compared with a trainer's",
)
PROOF = "until a test installs weights with it and compares with a fresh engine"
EVERY = PASSED | OWNED.keys() | LAYOUT.keys() | COMPARED.keys()


def speculation(given: Mapping[str, Any]) -> str | None:
    """The first argument that turns it on."""
    return next((name for name in COMPARED if given.get(name)), None)


def problems(key: str, given: Iterable[str], compared: bool = False) -> Iterator[str]:
    """What is wrong with the names of a mapping at `key`, one sentence each.

    `compared`: a trainer looks at what the engines tell before it learns from them.
    """
    for name in given:
        if name in OWNED:
            yield f"{key}.{name} is refused: {OWNED[name]}"
        elif name in LAYOUT:
            yield f"{key}.{name} is refused {PROOF}: {LAYOUT[name]}; leave it out"
        elif name in COMPARED and not compared:
            yield f"{key}.{name} is refused: {COMPARED[name]}; leave it out"
        elif name not in EVERY:
            known = closest(name, sorted(EVERY))
            hint = f"did you mean `{known}`?" if known else "leave it out"
            yield f"{key}.{name} is no argument of vLLM {VLLM}'s engine; {hint}"
