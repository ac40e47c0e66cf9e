"""Every key that the reference documents has a home: the same section and name, or a line that says
what it is instead.
"""

from rft import config as configs
from rft.config.trinity import KEYS, SHARED
from rft.tools.docs_tables import features

T, B = "buffer.explorer_input.taskset", "buffer.trainer_input.experience_buffer"
ROWS = {  # by section of the reference; the blocks of veRL's keys are in test_verl_keys.py
    "A": "project name group mode checkpoint_root_dir continue_from_checkpoint ray_namespace",
    "B": "algorithm.algorithm_type algorithm.repeat_times algorithm.optimizer.lr "
    "algorithm.optimizer.warmup_style "
    "algorithm.optimizer.lr_scheduler_type algorithm.optimizer.lr_warmup_steps "
    "algorithm.optimizer.lr_warmup_steps_ratio "
    "algorithm.optimizer.min_lr_ratio algorithm.optimizer.optimizer_type algorithm.optimizer.betas "
    "algorithm.optimizer.weight_decay algorithm.optimizer.clip_grad algorithm.sample_strategy "
    "algorithm.sample_strategy_args "
    "algorithm.advantage_fn algorithm.advantage_fn_args algorithm.kl_penalty_fn "
    "algorithm.kl_penalty_fn_args "
    "algorithm.kl_loss_fn algorithm.kl_loss_fn_args algorithm.entropy_loss_fn "
    "algorithm.entropy_loss_fn_args "
    "algorithm.policy_loss_fn algorithm.policy_loss_fn_args algorithm.loss_agg_mode "
    "algorithm.enable_router_replay "
    "algorithm.bypass_old_logprobs "
    "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold "
    "algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold "
    "algorithm.rollout_correction.rollout_rs_threshold_lower "
    "algorithm.rollout_correction.rollout_token_veto_threshold",
    "C": (
        "monitor.monitor_type monitor.monitor_args monitor.enable_ray_timeline "
        "monitor.detailed_stats"
    ),
    "D": "model.model_path model.critic_model_path model.custom_chat_template "
    "model.chat_template_path model.max_model_len "
    "model.max_prompt_tokens model.max_response_tokens model.min_response_tokens "
    "model.enable_prompt_truncation "
    "model.temperature model.top_p model.top_k model.logprobs model.lora_configs "
    "model.rope_scaling model.rope_theta "
    "model.tinker.enable model.tinker.rank model.tinker.seed model.tinker.train_mlp "
    "model.tinker.train_attn "
    "model.tinker.train_unembed model.external_model.enable "
    "model.enable_thinking model.trust_remote_code",
    "E": "cluster.node_num cluster.gpu_per_node",
    "F": "buffer.batch_size buffer.train_batch_size buffer.total_epochs buffer.total_steps "
    "buffer.default_workflow_type buffer.default_reward_fn_type buffer.explorer_input.tasksets "
    "buffer.explorer_input.eval_tasksets buffer.explorer_input.default_workflow_type "
    "buffer.explorer_input.default_eval_workflow_type buffer.explorer_input.default_reward_fn_type "
    f"{T}.name {T}.storage_type {T}.path {T}.subset_name {T}.split {T}.repeat_times "
    f"{T}.rollout_args.temperature "
    f"{T}.rollout_args.top_p {T}.rollout_args.top_k {T}.rollout_args.logprobs "
    f"{T}.rollout_args.max_tokens {T}.rollout_args.n "
    f"{T}.default_workflow_type {T}.default_reward_fn_type {T}.workflow_args {T}.reward_fn_args "
    f"{T}.format.workflow_key "
    f"{T}.format.reward_fn_key {B}.name {B}.storage_type {B}.path {B}.max_read_timeout "
    f"{B}.replay_buffer.enable "
    f"{B}.replay_buffer.reuse_cooldown_time {B}.replay_buffer.priority_fn "
    f"{B}.replay_buffer.priority_fn_args "
    f"{T}.task_selector.selector_type {T}.task_selector.seed {T}.task_selector.feature_keys "
    f"{T}.task_selector.kwargs "
    "buffer.trainer_input.auxiliary_buffers "
    + " ".join(
        f"{where}.format.{key}"
        for where in (T, B)
        for key in (
            "prompt_type",
            "prompt_key",
            "response_key",
            "system_prompt_key",
            "system_prompt",
            "messages_key",
            "tools_key",
            "chosen_key",
            "rejected_key",
            "enable_concatenated_multi_turn",
            "chat_template",
        )
    ),
    "G": "explorer.name explorer.runner_per_model explorer.max_timeout explorer.max_retry_times "
    "explorer.env_vars "
    "explorer.rollout_model.engine_type explorer.rollout_model.engine_num "
    "explorer.rollout_model.tensor_parallel_size "
    "explorer.rollout_model.enable_history explorer.rollout_model.enable_openai_api "
    "explorer.rollout_model.enable_return_routed_experts "
    "explorer.auxiliary_models "
    "explorer.eval_interval explorer.eval_on_startup "
    "explorer.over_rollout.ratio explorer.over_rollout.wait_after_min "
    "explorer.dynamic_timeout.enable "
    "explorer.dynamic_timeout.ratio explorer.runner_state_report_interval "
    "explorer.bench_on_latest_checkpoint "
    "explorer.rollout_model.enable_openai_api explorer.over_rollout.return_partial_tasks",
    "H": "synchronizer.sync_method synchronizer.sync_interval synchronizer.explorer_sync_interval "
    "synchronizer.trainer_sync_interval synchronizer.sync_offset synchronizer.sync_timeout "
    "synchronizer.sync_style "
    "synchronizer.max_inflight_batches",
    "I": "trainer.name trainer.trainer_type trainer.trainer_strategy trainer.total_steps "
    "trainer.save_interval "
    "trainer.save_strategy trainer.save_hf_checkpoint trainer.grad_clip trainer.use_dynamic_bsz "
    "trainer.max_token_len_per_gpu "
    "trainer.ulysses_sequence_parallel_size trainer.trainer_config "
    "trainer.megatron.tensor_model_parallel_size "
    "trainer.megatron.pipeline_model_parallel_size "
    "trainer.megatron.virtual_pipeline_model_parallel_size "
    "trainer.megatron.expert_model_parallel_size trainer.megatron.expert_tensor_parallel_size "
    "trainer.megatron.context_parallel_size trainer.megatron.sequence_parallel "
    "trainer.param_offload trainer.optimizer_offload "
    "trainer.grad_offload trainer.offload_policy trainer.critic_warmup trainer.balance_batch "
    "trainer.max_checkpoints_to_keep trainer.enable_preview",
    "J": "service.data_juicer.server_url service.data_juicer.auto_start service.data_juicer.port "
    "data_processor.task_pipeline.num_process data_processor.task_pipeline.operators "
    "data_processor.task_pipeline.inputs "
    "data_processor.task_pipeline.target_fields data_processor.task_pipeline.output.path "
    "data_processor.task_pipeline.config_path "
    "data_processor.task_pipeline.priority_weights data_processor.task_pipeline.top_k "
    "data_processor.experience_pipeline.operators data_processor.experience_pipeline.save_input "
    "data_processor.experience_pipeline.input_save_path data_processor.experience_pipeline.inputs "
    "data_processor.experience_pipeline.output log.level log.group_by_node stages stage_name",
}


def test_every_documented_key_has_a_home() -> None:
    homes = {*configs.leaf_keys(), *KEYS}
    homeless = {
        section: lost
        for section, keys in ROWS.items()
        if (lost := [key for key in keys.split() if key not in homes])
    }
    assert not homeless, f"neither in rft/config/schema.py nor in rft/config/trinity.py: {homeless}"


def test_no_line_of_the_table_is_without_a_row() -> None:
    listed = {key for keys in ROWS.values() for key in keys.split()}
    numbers = {row for key in KEYS.values() for row in key.row.split(", ")}
    assert numbers <= set(features())
    assert listed - set(KEYS) == SHARED
