"""Configs that cannot run: each is refused by the checks themselves, in one line that names the key
and what to do.

`test_config.py` has those of single sections; here are the ranges, the names and the keys that only
make sense together.
"""

import contextlib
import ctypes
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

from rft import config as configs
from rft import preflight, train
from rft.config import Config, ConfigError, keys
from rft.run import cards
from tests.unit.test_config import changed, grpo, of_grpo

TASKSET, EVALS = "buffer.explorer_input.taskset", "buffer.explorer_input.eval_tasksets"
EXP = "data_processor.experience_pipeline"
QUEUE = "buffer.trainer_input.experience_buffer"
SQL = f"{QUEUE}.storage_type=sql {QUEUE}"
ROWS, BESIDE = (
    "buffer.trainer_input.experience_buffer",
    "buffer.trainer_input.auxiliary_buffers.sft_dataset",
)
OF_ROWS = (
    f"mode=train {ROWS}.storage_type=file {ROWS}.path=EVAL {ROWS}.format.prompt_type=plaintext "
    "buffer.batch_size=2"
)
PAIRS = (
    f"algorithm.algorithm_type=dpo {OF_ROWS} {ROWS}.format.chosen_key=response "
    f"{ROWS}.format.rejected_key=response"
)
TEXT = f"algorithm.algorithm_type=cpt {OF_ROWS}"
EXPERT = "{sft_dataset:{storage_type:file,path:EVAL,format:{prompt_type:plaintext}}}"
MIX = f"algorithm.algorithm_type=mix +buffer.trainer_input.auxiliary_buffers={EXPERT}"
LARGE = "trainer.num_ranks=null device=cuda cluster.gpu_per_node=8"
REMOTE = "model.tinker.enable=true model.tinker.base_model=toy trainer.save_hf_checkpoint=never"
BITS = "deterministic=true trainer_engine=bitwise"
TWO = f"{BITS} trainer.num_ranks=2 trainer.megatron"
ENGINE = "explorer.rollout_model"
REFUSED = [  # overrides, the key that the message must name, and some of the fix
    # the run
    ("name=", "name", "letters, digits"),
    ("name=..", "name", "letters, digits"),
    ("name=a//b", "name", "letters, digits"),
    ("project=/abs", "project", "letters, digits"),
    ("mode=explore explorer.name=../../x", "explorer.name='../../x'", "letters, digits"),
    ("name=???", "name is not set", "give it a value"),
    ("checkpoint_root_dir=${oc.env:NO_SUCH}/runs", "checkpoint_root_dir: ", "'NO_SUCH' not found"),
    ("project='a*b'", "project", "letters, digits"),
    ("seed=-1", "seed", "0 or more"),
    ("mode=server", "mode", "Known: bench, both, explore, serve, train"),
    (
        "mode=serve synchronizer.sync_method=nccl",
        "synchronizer.sync_method",
        "there is no trainer here",
    ),
    ("mode=colocate", "mode", "mode=both with cluster.colocate=true"),
    ("shutdown_grace_s=0", "shutdown_grace_s", "greater than 0"),
    ("log.max_mb=inf", "log.max_mb", "give a finite number"),
    ("prepare=nowhere:at_all", "prepare", "module:function"),
    ("group=a", "group", "write the group into project"),
    # algorithm
    ("algorithm.repeat_times=0", "algorithm.repeat_times", "or left out"),
    ("algorithm.repeat_times=-3", "algorithm.repeat_times", "greater than 0"),
    ("algorithm.algorithm_type=dpo", "algorithm.algorithm_type=dpo", "set mode=train"),
    ("algorithm.policy_loss_fn=dpo", "algorithm.policy_loss_fn=dpo", "leave policy_loss_fn out"),
    (f"{PAIRS} algorithm.policy_loss_fn=sft", "algorithm.policy_loss_fn=sft", "algorithm_type=dpo"),
    (f"{PAIRS} algorithm.loss_agg_mode=token-mean", "algorithm.loss_agg_mode", "leave it out"),
    (f"{PAIRS} algorithm.advantage_fn=grpo", "algorithm.advantage_fn", "leave it out"),
    (f"{PAIRS} buffer.train_batch_size=5", "buffer.train_batch_size=5", "give an even number"),
    (f"{PAIRS} {ROWS}.format.chosen_key=chosen", f"{ROWS}.format.chosen_key", "has no 'chosen'"),
    (
        f"{PAIRS} +algorithm.policy_loss_fn_args.betta=1",
        "algorithm.policy_loss_fn_args.betta",
        "known: beta, label_smoothing",
    ),
    (
        f"{PAIRS} {ROWS}.format.chat_template='{{% if %}}'",
        f"{ROWS}.format.chat_template",
        "in line 1",
    ),
    (f"{TEXT} {ROWS}.format.prompt_type=messages", f"{ROWS}.format", "set prompt_type=plaintext"),
    (f"{TEXT} {ROWS}.format.system_prompt=a", f"{ROWS}.format", "without system_prompt"),
    (f"{TEXT} {ROWS}.format.prompt_key=text", f"{ROWS}.format.prompt_key", "has no 'text'"),
    (
        "+algorithm.sample_strategy_args.expert_data_ratio=0.5",
        "sample_strategy_args.expert_data_ratio",
        "it takes none",
    ),
    (
        "algorithm.algorithm_type=mix",
        "auxiliary_buffers.sft_dataset",
        "auxiliary_buffers.sft_dataset.path=FILE",
    ),
    (
        f"{MIX} +algorithm.sample_strategy_args.sft_dataset_name=b",
        "auxiliary_buffers.b",
        "Known: sft_dataset",
    ),
    (
        f"{MIX} +algorithm.sample_strategy_args.expert_data_ratio=1",
        "sample_strategy_args.expert_data_ratio=1",
        "below 1",
    ),
    (f"{MIX} +algorithm.policy_loss_fn_args.mu=2", "algorithm.policy_loss_fn_args.mu=2", "0 to 1"),
    (f"{MIX} algorithm.policy_loss_fn=ppo", "algorithm.sample_strategy=mix", "use both"),
    (f"{MIX} algorithm.advantage_fn=ppo", "advantage_fn=ppo", "use advantage_fn=grpo"),
    (
        f"{MIX} buffer.batch_size=1 buffer.train_batch_size=1",
        "buffer.train_batch_size=1",
        "leave it out for 16",
    ),
    (f"{MIX} {BESIDE}.storage_type=queue", f"{BESIDE}.storage_type", "read from file"),
    (f"{MIX} {BESIDE}.path=nowhere.jsonl", f"{BESIDE}.path", "does not exist"),
    (
        f"{MIX} {BESIDE}.format.response_key=label",
        f"{BESIDE}.format.response_key",
        "has no 'label'",
    ),
    ("algorithm.algorithm_type=jsd", "model.teacher_model_path", "Hugging Face checkpoint"),
    (
        "model.teacher_model_path=DIR",
        "model.teacher_model_path",
        "algorithm_type=on_policy_distill",
    ),
    (
        "algorithm.algorithm_type=on_policy_distill model.teacher_model_path=DIR",
        "model.teacher_model_path",
        "safetensors",
    ),
    ("algorithm.sample_strategy=mix", "algorithm.sample_strategy=mix", "mix_chord"),
    (
        "algorithm.sample_strategy=newest",
        "algorithm.sample_strategy",
        "Known: default, mix, staleness_control, warmup",
    ),
    (
        "algorithm.sample_strategy=staleness_control",
        "algorithm.sample_strategy_args.max_staleness",
        "0 or more",
    ),
    (
        "+algorithm.sample_strategy_args.max_staleness=1",
        "algorithm.sample_strategy_args.max_staleness",
        "it takes none",
    ),
    (
        "algorithm.rollout_correction.rollout_is=tokens",
        "algorithm.rollout_correction.rollout_is",
        "did you mean `token`",
    ),
    (
        "algorithm.rollout_correction.rollout_rs=row",
        "algorithm.rollout_correction.rollout_rs",
        "geometric",
    ),
    (
        "algorithm.rollout_correction.rollout_is=token algorithm.proximal_logprobs=false",
        "proximal_logprobs",
        "leave the former",
    ),
    (
        "algorithm.advantage_fn=clipb algorithm.proximal_logprobs=false",
        "algorithm.proximal_logprobs",
        "leave the former out",
    ),
    (
        (
            "algorithm.rollout_correction.rollout_rs=token "
            "algorithm.rollout_correction.rollout_rs_threshold=0.5"
        ),
        "rollout_rs_threshold",
        "must hold 1 inside",
    ),
    (
        "+algorithm.policy_loss_fn_args.clip_mode=ring",
        "algorithm.policy_loss_fn_args.clip_mode",
        "known: clip_range",
    ),
    (
        f"{TASKSET}.reward_fn_args={{url:x}}",
        f"{TASKSET}.reward_fn_args.url",
        "does not take it",
    ),
    (
        "algorithm.algorithm_type=rec +algorithm.policy_loss_fn_args.clip_mode=rung",
        "clip_mode",
        "did you mean `ring`",
    ),
    (
        "algorithm.algorithm_type=sapo +algorithm.policy_loss_fn_args.tau_neg=0.5",
        "tau_neg",
        "raise it",
    ),
    (
        "+algorithm.policy_loss_fn_args.enable_sequence_masking=1",
        "enable_sequence_masking",
        "true or false",
    ),
    (
        "algorithm.algorithm_type=gigpo algorithm.repeat_times=1",
        "algorithm.repeat_times",
        "set it to 2 or more",
    ),
    (
        "+algorithm.policy_loss_fn_args={clip_range:0.1,clip_range_low:0.2,clip_range_high:0.3}",
        "algorithm.policy_loss_fn_args.clip_range=0.1 beside clip_range_low=0.2",
        "set these, or leave it out",
    ),
    (
        "algorithm.advantage_fn=clipb algorithm.repeat_times=1",
        "algorithm.repeat_times",
        "set it to 2 or more",
    ),
    (
        "algorithm.algorithm_type=dapo algorithm.kl_penalty_fn=k1",
        "algorithm.kl_penalty_fn",
        "rloo, reinforce",
    ),
    (
        "algorithm.advantage_fn=clipb algorithm.kl_penalty_fn=k1",
        "algorithm.kl_penalty_fn",
        "reinforceplusplus",
    ),
    *(
        (
            f"algorithm.algorithm_type={name} algorithm.kl_penalty_fn=k1",
            "algorithm.kl_penalty_fn",
            f"algorithm.advantage_fn={name} looks at no reward: set kl_loss_fn instead",
        )
        for name in ("on_policy_distill", "jsd")
    ),
    (
        "algorithm.kl_loss_fn=k2 +algorithm.kl_loss_fn_args={adaptive:true,horizon:9}",
        "algorithm.kl_loss_fn_args.target_kl",
        "greater than 0",
    ),
    (
        "algorithm.kl_loss_fn=k2 +algorithm.kl_loss_fn_args.target_kl=0.1",
        "algorithm.kl_loss_fn_args",
        "adaptive=true",
    ),
    ("algorithm.optimizer.lr=inf", "algorithm.optimizer.lr", "finite"),
    ("algorithm.optimizer.lr=nan", "algorithm.optimizer.lr", "finite"),
    ("algorithm.optimizer.eps=0", "algorithm.optimizer.eps", "greater than 0"),
    ("algorithm.optimizer.min_lr_ratio=2", "algorithm.optimizer.min_lr_ratio", "between 0 and 1"),
    ("algorithm.optimizer.weight_decay=-1", "algorithm.optimizer.weight_decay", "0 or more"),
    (
        "algorithm.optimizer.lr_warmup_steps=3 algorithm.optimizer.lr_warmup_steps_ratio=0.1",
        "lr_warmup_steps_ratio",
        "only one",
    ),
    (
        "algorithm.optimizer.warmup_style=cosine",
        "algorithm.optimizer.warmup_style",
        "algorithm.optimizer.lr_scheduler_type",
    ),
    (
        "+algorithm.policy_loss_fn_args.clip_range=wide",
        "algorithm.policy_loss_fn_args.clip_range",
        "a number",
    ),
    (
        "algorithm.kl_loss_fn=k2 +algorithm.kl_loss_fn_args.kl_coef=[1]",
        "algorithm.kl_loss_fn_args.kl_coef",
        "a number",
    ),
    (
        "+algorithm.entropy_loss_fn_args.entropy_coef=high",
        "algorithm.entropy_loss_fn_args.entropy_coef",
        "a number",
    ),
    # model
    ("model.max_model_len=0", "model.max_model_len", "or left out"),
    ("model.max_prompt_tokens=0", "model.max_prompt_tokens", "or left out"),
    ("model.max_response_tokens=-1", "model.max_response_tokens", "greater than 0"),
    (
        "model.max_prompt_tokens=20 model.max_model_len=24",
        "model.max_prompt_tokens",
        "must fit model.max_model_len=24",
    ),
    ("model.min_response_tokens=-1", "model.min_response_tokens", "0 or more"),
    (
        f"model.min_response_tokens=6 {TASKSET}.rollout_args.max_tokens=5",
        f"{TASKSET}.rollout_args.max_tokens=5",
        "is below model.min_response_tokens=6: lower that",
    ),
    ("model.custom_chat_template='{% if %}'", "model.custom_chat_template", "line 1"),
    ("model.custom_chat_template='{{ a'", "model.custom_chat_template", "line 1"),
    ("model.temperature=1", "model.temperature", f"{TASKSET}.rollout_args.temperature"),
    ("model.rope_theta=1e6", "model.rope_theta", "config.json"),
    ("model.lora_configs=[{lora_rank:0}]", "model.lora_configs", "greater than 0"),
    (
        "model.lora_configs=[{lora_rnk:1}]",
        "model.lora_configs.lora_rnk",
        "did you mean `model.lora_configs.lora_rank`",
    ),
    # cluster
    ("cluster.node_num=0", "cluster.node_num", "greater than 0"),
    ("cluster.gpu_per_node=-1", "cluster.gpu_per_node", "greater than 0"),
    ("cluster.ray_num_cpus=0", "cluster.ray_num_cpus", "or left out"),
    ("cluster.master_port=70000", "cluster.master_port", "1 to 65535"),
    ("cluster.threads_per_rank=0", "cluster.threads_per_rank", "greater than 0"),
    ("cluster.ray_address=somewhere", "cluster.ray_address", "ray start --head"),
    (
        (
            f"{LARGE} explorer.rollout_model.engine_num=4 "
            f"explorer.auxiliary_models=[{{name:a,model_path:DIR/model,engine_num:4}}]"
        ),
        "explorer.auxiliary_models",
        "leaves 0 to the trainer",
    ),
    (
        f"{LARGE} explorer.rollout_model.engine_num=8",
        "explorer.rollout_model.engine_num",
        "leaves 0 to the trainer",
    ),
    (
        f"{LARGE} trainer.megatron.tensor_model_parallel_size=2 "
        "explorer.rollout_model.engine_num=1",
        "explorer.rollout_model.engine_num",
        "no multiple of the 2",
    ),
    (
        f"{LARGE} cluster.node_num=3 explorer.rollout_model.engine_num=4",
        "engine_num",
        "whole number of nodes",
    ),
    (
        "device=cuda cluster.gpu_per_node=2 trainer.num_ranks=2",
        "trainer.num_ranks",
        "lower explorer.rollout_model.engine_num",
    ),
    # buffer
    ("buffer.batch_size=0", "buffer.batch_size", "greater than 0"),
    ("buffer.total_epochs=0", "buffer.total_epochs", "greater than 0"),
    ("buffer.total_steps=0", "buffer.total_steps", "or left out"),
    ("buffer.train_batch_size=0", "buffer.train_batch_size", "or left out"),
    ("trainer.resume_from_path=nowhere", "trainer.resume_from_path", "give <job>/checkpoints"),
    ("trainer.ppo_epochs=0", "trainer.ppo_epochs", "greater than 0"),
    ("trainer.ppo_mini_batch_size=0", "trainer.ppo_mini_batch_size", "or left out"),
    ("trainer.ppo_mini_batch_size=257", "trainer.ppo_mini_batch_size", "more than the"),
    (f"{PAIRS} trainer.ppo_mini_batch_size=3", "ppo_mini_batch_size=3", "give an even number"),
    (f"{TASKSET}.storage_type=sql", f"{TASKSET}.path", "set storage_type=file"),
    (f"{TASKSET}.storage_type=queue", f"{TASKSET}.storage_type", "set file, or sql"),
    (f"{TASKSET}.format.workflow_key=way", f"{TASKSET}.format.workflow_key", "leave it out"),
    (
        f"{TASKSET}.format.reward_fn_key=response",
        f"{TASKSET}.format.reward_fn_key: unknown reward",
        "known are exact_match",
    ),
    (f"{TASKSET}.default_reward_fn_type=x", f"{TASKSET}.default_reward_fn_type: unknown", "known"),
    (  # once, of two sets
        "buffer.explorer_input.default_reward_fn_type=none "
        f"{EVALS}=[{{name:a,path:EVAL,format:{{prompt_type:plaintext}}}}]",
        "buffer.explorer_input.default_reward_fn_type: unknown reward 'none'",
        "known are exact_match",
    ),
    ("trainer.checkpoint.host_memory_gb=inf", "trainer.checkpoint.host_memory_gb", "finite"),
    (
        f"{TASKSET}.task_selector.selector_type=hard",
        f"{TASKSET}.task_selector.selector_type",
        "Known: difficulty_based, offline",
    ),
    (
        f"{TASKSET}.task_selector.selector_type=offline_easy2hard",
        f"{TASKSET}.task_selector.feature_keys",
        "name at least one",
    ),
    (
        f"{TASKSET}.task_selector={{selector_type:offline_easy2hard,feature_keys:[response]}}",
        f"{TASKSET}.task_selector.feature_keys",
        "must be a number",
    ),
    (
        f"{TASKSET}.task_selector.feature_keys=[level]",
        f"{TASKSET}.task_selector.feature_keys",
        "set selector_type",
    ),
    (
        (
            f"{TASKSET}.task_selector.selector_type=difficulty_based "
            f"+{TASKSET}.task_selector.kwargs.mm=1"
        ),
        f"{TASKSET}.task_selector.kwargs.mm",
        "it takes target_reward",
    ),
    (
        (
            f"{TASKSET}.task_selector.selector_type=difficulty_based "
            f"+{TASKSET}.task_selector.kwargs.lamb=2"
        ),
        f"{TASKSET}.task_selector.kwargs.lamb",
        "from 0 to 1",
    ),
    (
        "buffer.explorer_input.tasksets=[{path:a.jsonl}]",
        "buffer.explorer_input.taskset and tasksets",
        "leave the list out",
    ),
    (f"{TASKSET}.path=DIR {TASKSET}.split=tset", f"{TASKSET}.split", "data files"),
    (
        f"{TASKSET}.format.prompt_type=chat",
        f"{TASKSET}.format.prompt_type",
        "plaintext or messages",
    ),
    (f"{TASKSET}.format.response_key=label", "response_key", "label"),
    (f"{TASKSET}.repeat_times=3", f"{TASKSET}.repeat_times", "set only the latter"),
    (f"{TASKSET}.rollout_args.temperature=0", f"{TASKSET}.rollout_args.temperature=0", "leave it"),
    (
        f"algorithm.algorithm_type=remax {TASKSET}.rollout_args.temperature=0.0",
        f"{TASKSET}.rollout_args.temperature=0",
        "greater than 0",
    ),
    (f"{TASKSET}.rollout_args.temperature=-0.1", f"{TASKSET}.rollout_args.temperature", "to 2, at"),
    (f"{TASKSET}.rollout_args.temperature=0.001", f"{TASKSET}.rollout_args.temperature", "0.01"),
    (f"{TASKSET}.rollout_args.temperature=2.5", f"{TASKSET}.rollout_args.temperature", "to 2, at"),
    (f"{TASKSET}.rollout_args.top_p=0", f"{TASKSET}.rollout_args.top_p", "at most 1"),
    (f"{TASKSET}.rollout_args.top_p=1.1", f"{TASKSET}.rollout_args.top_p", "at most 1"),
    (f"{TASKSET}.rollout_args.top_k=0", f"{TASKSET}.rollout_args.top_k", "-1 for every token"),
    (f"{TASKSET}.rollout_args.max_tokens=24", f"{TASKSET}.rollout_args.max_tokens", "give 1 to 23"),
    (f"{TASKSET}.rollout_args.max_tokens=0", f"{TASKSET}.rollout_args.max_tokens", "give 1 to 23"),
    (f"+{TASKSET}.reward_fn_args.patern=x", f"{TASKSET}.reward_fn_args.patern", "it takes none"),
    (
        f"{TASKSET}.default_reward_fn_type=format +{TASKSET}.reward_fn_args.patern=x",
        "reward_fn_args.patern",
        "pattern, score",
    ),
    (f"{TASKSET}.format.image_key=image", f"{TASKSET}.format.image_key", "images"),
    (f"{TASKSET}.format.chosen_key=a", f"{TASKSET}.format.chosen_key", "algorithm_type=dpo"),
    (
        f"{TASKSET}.format.enable_concatenated_multi_turn=true",
        "enable_concatenated_multi_turn",
        "leave it out",
    ),
    (
        f"{EVALS}=[{{name:a,path:EVAL,repeat_times:-1,format:{{prompt_type:plaintext}}}}]",
        f"{EVALS}.0.repeat_times",
        "greater",
    ),
    (
        f"{EVALS}=[{{name:a,path:nowhere.jsonl,format:{{prompt_type:plaintext}}}}]",
        f"{EVALS}.0.path",
        "does not exist",
    ),
    (f"{EVALS}=[{{name:a,path:EVAL,pth:b}}]", f"{EVALS}.pth", f"did you mean `{TASKSET}.path`"),
    ("buffer.trainer_input.experience_buffer.name=taskset", "taskset", "used twice"),
    (f"{QUEUE}.path=sqlite:///a.db", f"{QUEUE}.path", "storage_type=sql"),
    (f"{QUEUE}.storage_type=sql", f"{QUEUE}.path", "needs a database"),
    (f"{SQL}.path=/a.db", f"{QUEUE}.path", "sqlite:////absolute/file.db"),
    (f"{SQL}.path=mysql://a/b", f"{QUEUE}.path", "postgresql://"),
    (f"{SQL}.path=sqlite:////nowhere/a.db", f"{QUEUE}.path", "the database cannot be used"),
    (
        f"{SQL}.path=postgresql://me:sesame@127.0.0.1:1/a",
        f"{QUEUE}.path",
        "the database cannot be used",
    ),
    (f"{SQL}.path=sqlite:///a.db {QUEUE}.name=a-b", f"{QUEUE}.name", "names of tables"),
    (f"{QUEUE}.lease_s=0", f"{QUEUE}.lease_s", "greater than 0"),
    (f"{QUEUE}.max_experience_mb=0", f"{QUEUE}.max_experience_mb", "greater than 0"),
    (
        f"{QUEUE}.storage_type=file {QUEUE}.path=a.jsonl",
        f"{QUEUE}.storage_type",
        "set storage_type=queue with path=a.jsonl",
    ),
    (f"{QUEUE}.storage_type=file mode=explore", f"{QUEUE}.path", "ends in .jsonl"),
    (
        f"{QUEUE}.storage_type=file mode=train {QUEUE}.path=nowhere.jsonl",
        f"{QUEUE}.path",
        "rft buffer dump",
    ),
    (f"{QUEUE}.storage_type=file mode=train {QUEUE}.path=EVAL", f"{QUEUE}.path", "line 1"),
    (
        f"{QUEUE}.replay_buffer.priority_fn=newest",
        f"{QUEUE}.replay_buffer.priority_fn",
        "linear_decay",
    ),
    (f"+{QUEUE}.replay_buffer.priority_fn_args.dcay=1", "priority_fn_args.dcay", "it takes decay"),
    (f"+{QUEUE}.replay_buffer.priority_fn_args.decay=-1", "priority_fn_args.decay", "0 or more"),
    (
        f"{QUEUE}.replay_buffer.reuse_cooldown_time=-1",
        f"{QUEUE}.replay_buffer.reuse_cooldown_time",
        "leave it out",
    ),
    (f"{QUEUE}.replay_buffer.capacity=0", f"{QUEUE}.replay_buffer.capacity", "greater than 0"),
    (
        (
            f"{QUEUE}.replay_buffer.enable=true explorer.over_rollout.ratio=0.2 "
            "synchronizer.sync_style=fully_async"
        ),
        "explorer.over_rollout.ratio",
        "storage_type=queue",
    ),
    (
        f"{SQL}.path=sqlite:///DIR/b.db {QUEUE}.replay_buffer.enable=true",
        f"{QUEUE}.replay_buffer.enable",
        "only a queue",
    ),
    (
        "buffer.trainer_input.experience_buffer.max_read_timeout=0",
        "experience_buffer.max_read_timeout",
        "greater",
    ),
    (
        "+buffer.trainer_input.auxiliary_buffers={a:{pth:b}}",
        "buffer.trainer_input.auxiliary_buffers",
        "pth",
    ),
    # workflows, rewards, plug-ins
    (
        f"{TASKSET}.default_workflow_type=tool_use +{TASKSET}.workflow_args.max_step_num=0",
        f"{TASKSET}.workflow_args.max_step_num",
        "greater than 0",
    ),
    (
        f"{TASKSET}.default_workflow_type=ruler",
        f"{TASKSET}: workflow ruler asks a judge",
        "explorer.auxiliary_models",
    ),
    (
        f"{EVALS}=[{{name:a,path:EVAL,default_workflow_type:ruler,format:{{prompt_type:plaintext}}}}]",
        f"{EVALS}.0: workflow",
        "add",
    ),
    (
        (
            f"{TASKSET}=null "
            f"{TASKSET}s=[{{path:EVAL,default_workflow_type:ruler,format:{{prompt_type:plaintext}}}}]"
        ),
        f"{TASKSET}s.0: workflow",
        "add one",
    ),
    (
        f"{TASKSET}.default_workflow_type=rubric_judge",
        "workflow rubric_judge asks a judge",
        "add one",
    ),
    (
        f"{TASKSET}.default_workflow_type=tool_use +{TASKSET}.workflow_args.limits.second=3",
        "workflow_args.limits",
        "known are",
    ),
    (
        f"{TASKSET}.default_workflow_type=tool_us",
        "unknown workflow 'tool_us'",
        "did you mean 'tool_use'",
    ),
    (
        f"{TASKSET}.default_reward_fn_type=code_tests +{TASKSET}.reward_fn_args.seconds=30",
        "reward_fn_args.seconds",
        "raise",
    ),
    (
        f"{TASKSET}.default_reward_fn_type=remote_judge +{TASKSET}.reward_fn_args.model=m",
        f"{TASKSET}.reward_fn_args.url",
        "set it",
    ),
    (
        f"{TASKSET}.default_reward_fn_type=math_dapo +{TASKSET}.reward_fn_args.response_tokens=1",
        "response_tokens",
        "it takes",
    ),
    # explorer
    ("explorer.runner_per_model=0", "explorer.runner_per_model", "greater than 0"),
    ("explorer.max_timeout=0", "explorer.max_timeout", "greater than 0"),
    ("explorer.max_retry_times=-1", "explorer.max_retry_times", "0 or more"),
    ("explorer.reward_timeout=1000", "explorer.reward_timeout", "lower it"),
    ("explorer.eval_interval=-1", "explorer.eval_interval", "0 or more"),
    ("+explorer.env_vars.RFT_LOG_DIR=a", "explorer.env_vars.RFT_LOG_DIR", "of your own"),
    (
        "explorer.over_rollout.ratio=0.2",
        "explorer.over_rollout.ratio",
        "trainer_driven or fully_async",
    ),
    (
        "explorer.over_rollout.ratio=1 synchronizer.sync_style=fully_async",
        "explorer.over_rollout.ratio",
        "0 to below 1",
    ),
    ("explorer.over_rollout.ratio=0.2 mode=explore", "explorer.over_rollout.ratio", "set it to 0"),
    (
        "explorer.over_rollout.wait_after_min=-1",
        "explorer.over_rollout.wait_after_min",
        "0 or more",
    ),
    ("explorer.dynamic_timeout.ratio=0", "explorer.dynamic_timeout.ratio", "greater than 0"),
    (
        "explorer.runner_state_report_interval=-1",
        "explorer.runner_state_report_interval",
        "0 or more",
    ),
    ("explorer.auxiliary_models=[a]", "explorer.auxiliary_models", ""),
    (
        "explorer.auxiliary_models=[{name:judge,model_path:/nope}]",
        "explorer.auxiliary_models.0.model_path=/nope: cannot read",
        "give the directory of a Hugging Face checkpoint",
    ),
    (
        "explorer.auxiliary_models=[{nme:a,model_path:x}]",
        "explorer.auxiliary_models.nme",
        "did you mean `explorer.auxiliary_models.name`",
    ),
    (
        "explorer.auxiliary_models=[{name:a/b,model_path:x}]",
        "explorer.auxiliary_models.0.name",
        "letters, digits",
    ),
    (
        "explorer.auxiliary_models=[{name:a,model_path:x,engine_num:0}]",
        "explorer.auxiliary_models.0.engine_num",
        "greater than 0",
    ),
    ("explorer.auxiliary_models=[{name:a,model_path:/nowhere}]", "/nowhere", ""),
    ("explorer.auxiliary_models=[{name:a}]", "explorer.auxiliary_models", "model_path"),
    ("explorer.listen_address=localhost", "explorer.listen_address", "127.0.0.1 for this machine"),
    ("explorer.proxy_port=70000", "explorer.proxy_port", "1 to 65535"),
    ("explorer.agent_processes=0", "explorer.agent_processes", "greater than 0"),
    ("explorer.session_timeout=0", "explorer.session_timeout", "greater than 0"),
    (
        "buffer.explorer_input.default_workflow_type=agent",
        f"{TASKSET}.workflow_args",
        "agent=file.py:function and command",
    ),
    (
        f"buffer.explorer_input.default_workflow_type=agent +{TASKSET}.workflow_args.agent=no.py:f",
        "no.py:f",
        "cannot import",
    ),
    (
        "buffer.explorer_input.default_workflow_type=environment",
        f"{TASKSET}.workflow_args.environment",
        "give one of gymnasium",
    ),
    (
        f"buffer.explorer_input.default_workflow_type=environment +{TASKSET}.workflow_args="
        "{environment:gymnasium,env_id:FrozenLake-v1,python:/no}",
        f"{TASKSET}.workflow_args.python",
        "run `make env-gym`",
    ),
    (
        "device=cpu explorer.rollout_model.kv_cache_gb=1e-5",
        "explorer.rollout_model.kv_cache_gb=1e-05 has no room",
        "max_model_len=24: set it to 0.01, or",
    ),
    (
        "explorer.rollout_model.kv_cache_gb=0",
        "explorer.rollout_model.kv_cache_gb",
        "greater than 0",
    ),
    ("explorer.rollout_model.dtype=fp16", "explorer.rollout_model.dtype", "Known: bf16, fp32"),
    (
        "explorer.rollout_model.gpu_memory_utilization=1.5",
        "explorer.rollout_model.gpu_memory_utilization",
        "at most 1",
    ),
    (
        "explorer.rollout_model.max_num_seqs=0",
        "explorer.rollout_model.max_num_seqs",
        "greater than 0",
    ),
    (
        "explorer.rollout_model.engine_type=external",
        "explorer.rollout_model.engine_type",
        "engines are vLLM's",
    ),
    # synchronizer
    ("synchronizer.sync_timeout=0", "synchronizer.sync_timeout", "greater than 0"),
    ("synchronizer.bucket_bytes=0", "synchronizer.bucket_bytes", "greater than 0"),
    ("synchronizer.max_staleness=-1", "synchronizer.max_staleness", "0 or more"),
    (
        "synchronizer.max_inflight_batches=2",
        "synchronizer.max_inflight_batches",
        "synchronizer.max_staleness",
    ),
    # trainer
    ("trainer.num_ranks=0", "trainer.num_ranks", "or left out"),
    ("trainer.stop_at_loss=0", "trainer.stop_at_loss", "greater than 0"),
    ("trainer.grad_clip=nan", "trainer.grad_clip", "finite"),
    ("trainer.max_token_len_per_gpu=0", "trainer.max_token_len_per_gpu", "greater than 0"),
    ("trainer.param_offload=true", "trainer.param_offload", "trainer.recompute_granularity"),
    ("trainer.profiler=torch trainer.total_steps=2", "trainer.profile_steps", "give earlier ones"),
    ("trainer.collective_timeout=0", "trainer.collective_timeout", "greater than 0"),
    ("trainer.spares=true trainer.max_restarts=0", "trainer.spares=true", "or spares=false"),
    ("trainer.checkpoint.memory=1", "trainer.checkpoint.memory=1: give parts", "1.3 to 2"),
    ("trainer.checkpoint.memory=3", "trainer.checkpoint.memory=3: give parts", "1.3 to 2"),
    ("trainer.checkpoint.lease_s=700", "trainer.checkpoint.lease_s", "lower it"),
    ("trainer.checkpoint.host_memory_gb=0", "trainer.checkpoint.host_memory_gb", "or left out"),
    (
        "trainer.checkpoint.best_metric=eval/a/accuracy",
        "trainer.checkpoint.best_metric",
        "set trainer.checkpoint.keep_best",
    ),
    (
        "trainer.checkpoint.best_metric=eval/a/x trainer.checkpoint.keep_best=1",
        "trainer.checkpoint.best_metric",
        "which is empty",
    ),
    (
        "trainer.megatron.tensor_model_parallel_size=0",
        "trainer.megatron.tensor_model_parallel_size",
        "greater than 0",
    ),
    (  # of the layout that is taken when a node is lost
        "trainer.num_ranks=null "
        "trainer.layouts=[{num_ranks:4},{num_ranks:5,tensor_model_parallel_size:5}]",
        "trainer.layouts[1]: trainer.megatron.tensor_model_parallel_size=5",
        "does not divide the model's 4 attention heads; use 1, 2, 4",
    ),
    (
        "trainer.recompute_granularity=full trainer.recompute_num_layers=3",
        "trainer.recompute_num_layers=3 with trainer.recompute_method=uniform",
        "or set trainer.recompute_method=block",
    ),
    (
        "trainer.megatron.context_parallel_size=-1",
        "trainer.megatron.context_parallel_size",
        "greater than 0",
    ),
    # a model at a service
    (
        "trainer.trainer_type=tinker model.tinker.base_model=toy",
        "trainer.save_hf_checkpoint=last",
        "set it to never",
    ),
    ("trainer.trainer_type=tinkr", "trainer.trainer_type", "Known: megatron, tinker"),
    (
        f"{REMOTE} model.tinker.base_model=null",
        "model.tinker.base_model is not set",
        "like Qwen/Qwen3-8B",
    ),
    (
        f"{REMOTE} model.tinker.base_url=localhost:8000",
        "model.tinker.base_url",
        "http://127.0.0.1:8000",
    ),
    (f"{REMOTE} model.tinker.rank=0", "model.tinker.rank", "greater than 0"),
    (f"{REMOTE} model.tinker.timeout=-1", "model.tinker.timeout", "greater than 0"),
    (
        (
            f"{REMOTE} model.tinker.train_mlp=false model.tinker.train_attn=false "
            "model.tinker.train_unembed=false"
        ),
        "model.tinker.train_mlp",
        "nothing would be trained",
    ),
    (
        "explorer.rollout_model.engine_type=tinker",
        "engine_type=tinker",
        "set trainer.trainer_type=tinker too",
    ),
    (
        f"{REMOTE} explorer.rollout_model.engine_type=vllm",
        "explorer.rollout_model.engine_type=vllm",
        "set it to tinker",
    ),
    (
        f"{REMOTE} synchronizer.sync_method=nccl",
        "synchronizer.sync_method=nccl",
        "by their path; set it to checkpoint",
    ),
    (f"{REMOTE} trainer.num_ranks=2", "trainer.num_ranks=2", "leave it out"),
    (
        "device=cuda cluster.gpu_per_node=8 trainer.num_ranks=2 trainer.dtype=fp32 "
        "trainer.megatron.context_parallel_size=2",
        "trainer.dtype=fp32 with trainer.megatron.context_parallel_size=2",
        "set trainer.dtype=bf16",
    ),
    (f"{REMOTE} device=cuda", "device=cuda", "leave it out"),
    (
        f"{REMOTE} algorithm.optimizer.optimizer_type=sgd",
        "algorithm.optimizer.optimizer_type=sgd",
        "set it to adam",
    ),
    (f"{REMOTE} +model.lora_configs=[{{lora_rank:8}}]", "model.lora_configs", "model.tinker.rank"),
    (
        f"{REMOTE} trainer.megatron.tensor_model_parallel_size=2",
        "trainer.megatron.tensor_model_parallel_size=2",
        "leave it out",
    ),
    (
        f"{REMOTE} trainer.checkpoint.keep_every=5",
        "trainer.checkpoint.keep_every=5",
        "leave it out",
    ),
    (
        f"{REMOTE} explorer.rollout_model.kv_cache_gb=2",
        "explorer.rollout_model.kv_cache_gb=2",
        "sampled by the service",
    ),
    (f"{REMOTE} deterministic=true", "deterministic", "leave it out"),
    (f"{REMOTE} model.min_response_tokens=2", "model.min_response_tokens=2", "leave it out"),
    (
        f"{REMOTE} algorithm.algorithm_type=ppo algorithm.repeat_times=1",
        "advantage_fn=ppo needs a critic",
        "set advantage_fn=grpo",
    ),
    (
        f"{REMOTE} algorithm.algorithm_type=jsd",
        "advantage_fn=jsd needs a teacher",
        "train with Megatron",
    ),
    (
        f"{REMOTE} +algorithm.entropy_loss_fn_args.entropy_coef=0.1",
        "entropy_coef needs entropies",
        "leave it out",
    ),
    (
        f"{REMOTE} {TASKSET}.rollout_args.temperature=0.7",
        f"{TASKSET}.rollout_args.temperature=0.7",
        "leave it out for 1",
    ),
    (
        f"{REMOTE} {TASKSET}.rollout_args.top_k=20",
        f"{TASKSET}.rollout_args.top_k=20",
        "leave it out for -1",
    ),
    (f"{REMOTE} mode=explore", "mode=explore", "set mode=both"),
    (
        f"{REMOTE} mode=train",
        "mode=train and a buffer of storage_type=queue",
        "mode=train with a file",
    ),
    (f"{REMOTE} trainer_engine=bitwise", "trainer_engine", "leave it out"),
    # the same bits in trainer and engine
    ("trainer_engine=bitwise", "deterministic=false", "set deterministic=true, or trainer_engine"),
    (f"{BITS} trainer.dtype=bf16", "trainer.dtype=bf16", "set trainer.dtype=fp32"),
    (f"{BITS} {ENGINE}.dtype=bf16", f"{ENGINE}.dtype=bf16", f"set {ENGINE}.dtype=fp32"),
    (f"{TWO}.tensor_model_parallel_size=2", "tensor_model_parallel_size=2", "parallel_size=1"),
    (f"{TWO}.context_parallel_size=2", "context_parallel_size=2", "set trainer.megatron.context"),
    (f"{BITS} {ENGINE}.tensor_parallel_size=2", "tensor_parallel_size=2", "another order"),
    (f"{BITS} cluster.threads_per_engine=2", "cluster.threads_per_engine=2", "_engine=1"),
    (f"{BITS} cluster.threads_per_rank=2", "cluster.threads_per_rank=2", "_rank=1"),
    (f"{BITS} model.lora_configs=[{{lora_rank:4}}]", "model.lora_configs", "leave it out"),
    (f"{BITS} model.min_response_tokens=2", "model.min_response_tokens=2", "hides the end token"),
    (f"{BITS} {TASKSET}.rollout_args.top_p=0.9", f"{TASKSET}.rollout_args.top_p", "leave it out"),
    (
        f"{BITS} +{ENGINE}.engine_args.kv_cache_dtype=fp8",
        f"{ENGINE}.engine_args.kv_cache_dtype",
        "of vLLM's arguments only max_num_batched_tokens, block_size",
    ),
    # pipelines: the rest of them is in test_task_pipeline.py and test_experience_operators.py
    (
        f"{EXP}.operators=[{{name:reward_filtre}}]",
        f"{EXP}.operators.0.name",
        "did you mean `reward_filter`",
    ),
    (f"{EXP}.operators=[{{nam:reward_filter}}]", f"{EXP}.operators", "nam"),
    (
        f"{EXP}.operators=[{{name:reward_filter,args:{{treshold:1}}}}]",
        f"{EXP}.operators.0.args.treshold",
        "it takes threshold",
    ),
    (f"{EXP}.operators=[{{name:nowhere.py:Own}}]", f"{EXP}.operators", "name"),
    (
        f"{EXP}.operators=[{{name:data_juicer,args:{{config_path:a}}}}]",
        f"{EXP}.operators.0",
        "service.data_juicer.auto_start=true",
    ),
    (f"{EXP}.timeout=0", f"{EXP}.timeout", "greater than 0"),
    (f"{EXP}.max_dropped_groups=0", f"{EXP}.max_dropped_groups", "greater than 0"),
    (f"{EXP}.input_save_path=a.jsonl", f"{EXP}.input_save_path", "set save_input=true"),
    (
        f"{EXP}.save_input=true {EXP}.input_save_path=sqlite:///a.db",
        f"{EXP}.input_save_path",
        "name it .jsonl",
    ),
    (f"+{EXP}.output.path=a", f"{EXP}.output", "leave it out"),
    (
        "service.data_juicer.server_url=localhost:5005",
        "service.data_juicer.server_url",
        "http://127.0.0.1:5005",
    ),
    *(
        (f"service.data_juicer.server_url='{url}'", "service.data_juicer.server_url", "is no URL")
        for url in ("http://[::1", "http://host:port")
    ),
    *(
        (f"service.data_juicer.command='serve {{port}} {end}'", "command=serve {port}", "quotes")
        for end in ('"', "{x}", "{0}")
    ),
    ("service.data_juicer.start_timeout=0", "service.data_juicer.start_timeout", "greater than 0"),
    ("service.data_juicer.timeout=-1", "service.data_juicer.timeout", "greater than 0"),
    (
        "data_processor.task_pipeline.num_process=0",
        "data_processor.task_pipeline.num_process",
        "greater than 0",
    ),
    # what rft leaves to others
    ("monitor.monitor_type=swanlab", "monitor.monitor_type", "not in rft yet"),
    ("+monitor.monitor_args.uri=a", "monitor.monitor_args.uri", "it takes none"),
    (
        "monitor=wandb +monitor.monitor_args.key=a",
        "monitor.monitor_args.key",
        "it takes mode, base_url, api_key",
    ),
    (
        "monitor=mlflow +monitor.monitor_args.url=a",
        "monitor.monitor_args.url",
        "it takes uri, username, password",
    ),
    (
        "monitor=wandb monitor.monitor_args.mode=onlin",
        "monitor.monitor_args.mode",
        "offline, online, disabled",
    ),
    ("monitor.num_samples=-1", "monitor.num_samples", "0 or more"),
    ("log.level=info", "log.level", "INFO"),
    # stages
    ("+stages=[{stage_name:a},{stage_name:a}]", "stages", "its own stage_name"),
    ("+stages=[{mode:train}]", "stages", "its own stage_name"),
    ("+stages=[{stage_name:a/b}]", "stages", "letters, digits"),
    (
        "+stages=[{stage_name:a,trainer:{totl_steps:1}}]",
        "trainer.totl_steps",
        "trainer.total_steps",
    ),
    ("+stages=[{stage_name:a,stages:[{stage_name:b}]}]", "stages", "of its own"),
    ("+stages=[a]", "stages", "its keys"),
    (
        "+stages=[{stage_name:a}] +every_stage.trainer.totl_steps=1",
        "every_stage: unknown key `trainer.totl",
        "trainer.total_steps",
    ),
    ("+every_stage.stages=[]", "every_stage.stages", "like every_stage.trainer.total_steps"),
]


def test_there_are_many() -> None:
    assert len(REFUSED) >= 60 and len({row[0] for row in REFUSED}) == len(REFUSED)


@pytest.mark.parametrize(("overrides", "key", "fix"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused(
    base: DictConfig,
    assets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: str,
    key: str,
    fix: str,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-a-test")
    words = [
        re.sub("(?<=[=:])DIR", str(assets), word.replace("EVAL", str(assets / "eval.jsonl")))
        for word in split(overrides)
    ]
    with pytest.raises(ConfigError) as refused:
        train.prepared_stages(changed(base, [f"checkpoint_root_dir={tmp_path}", *words]))
    said = str(refused.value)
    assert key in said and fix in said, said
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.rglob("resolved.yaml")), "nothing has begun"


@pytest.mark.parametrize(
    "words",
    [
        [f"{TASKSET}.rollout_args.temperature=0", f"{TASKSET}.default_workflow_type=math_eval"],
        [f"{TASKSET}.rollout_args.temperature=0", "mode=explore"],
        [
            "buffer.explorer_input.eval_tasksets=[{name:a,path:EVAL,format:{prompt_type:plaintext},"
            "rollout_args:{temperature:0}}]"
        ],
    ],
)
def test_greedy_answers_are_taken_where_nobody_learns_from_them(
    base: DictConfig, assets: Path, tmp_path: Path, words: list[str]
) -> None:
    words = [word.replace("EVAL", str(assets / "eval.jsonl")) for word in words]
    train.prepared_stages(changed(base, [f"checkpoint_root_dir={tmp_path}", *words]))


def test_experiences_that_do_not_say_how_likely_they_were_need_a_loss_that_does_not_ask(
    base: DictConfig, tmp_path: Path
) -> None:
    file = tmp_path / "made.jsonl"
    line = {"tokens": [5, 6, 7], "prompt_length": 1, "action_mask": [1, 1], "group": 0}
    file.write_text("".join(json.dumps(line | {"group": at}) + "\n" for at in range(200)))
    words = f"mode=train {QUEUE}.storage_type=file {QUEUE}.path={file} buffer.batch_size=2".split()
    words = [*words, f"checkpoint_root_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=r"line 1: no logprobs of its 2 tokens"):
        train.prepared_stages(changed(base, words))
    train.prepared_stages(changed(base, [*words, "algorithm.algorithm_type=opmd"]))


def test_groups_without_a_greedy_response_are_refused_where_it_is_the_baseline(
    base: DictConfig, tmp_path: Path
) -> None:
    file = tmp_path / "made.jsonl"
    line = {"tokens": [5, 6], "prompt_length": 1, "action_mask": [1], "logprobs": [-0.5]}
    greedy = {"info": {"baseline": True}}
    lines = [line | {"group": at} | more for at in range(200) for more in ({}, greedy)]
    words = f"mode=train {QUEUE}.storage_type=file {QUEUE}.path={file} buffer.batch_size=2".split()
    words = [*words, f"checkpoint_root_dir={tmp_path}", "algorithm.algorithm_type=remax"]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines[:-1]))
    with pytest.raises(ConfigError, match=r"group 199 and 0 more have no greedy response"):
        train.prepared_stages(changed(base, words))
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    train.prepared_stages(changed(base, words))


@pytest.fixture(scope="module")
def base(assets: Path) -> DictConfig:
    """A recipe that can run, with few rows: composed once."""
    few = assets / "few.jsonl"
    lines = (assets / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    few.write_text("".join(lines[:200]), encoding="utf-8")
    return configs.compose([*of_grpo(assets), f"{TASKSET}.path={few}"])


def split(overrides: str) -> list[str]:
    """Words at spaces that are not quoted for Hydra."""
    return re.findall(r"(?:[^\s']|'[^']*')+", overrides)


CLOSED = [  # the key of a path that this user may not read, what else is needed, what the key says
    ("checkpoint_root_dir", "", "checkpoint_root_dir: cannot write to"),
    ("checkpoint_root_dir", "continue_from_checkpoint=false", "checkpoint_root_dir: cannot write"),
    ("model.model_path", "", "model.model_path=CLOSED: cannot read config.json"),
    ("model.chat_template_path", "", "model.chat_template_path: CLOSED cannot be read"),
    ("model.ref_model_path", "algorithm.kl_loss_fn=k2", "model.ref_model_path: CLOSED"),
    ("plugin_dirs.0", "plugin_dirs=[CLOSED]", "plugin_dirs: CLOSED"),
    (f"{TASKSET}.path", "", f"{TASKSET}.path: CLOSED"),
    (f"{ROWS}.path", f"algorithm.algorithm_type=sft {OF_ROWS}", f"{ROWS}.path: CLOSED"),
    (f"{ROWS}.path", f"mode=train {ROWS}.storage_type=file", f"{ROWS}.path: CLOSED"),
    (f"{ROWS}.path", f"mode=explore {ROWS}.storage_type=file", f"{ROWS}.path: cannot write to"),
    (f"{ROWS}.path", "mode=both", f"{ROWS}.path: cannot write to"),
]
REFUSED_EACH = """
import json, sys
from rft import config as configs, train
configs.register_schema()
for words in json.load(sys.stdin):
    try:
        train.prepared_stages(configs.compose(words))
    except configs.ConfigError as error:
        print(error)
"""


def without_privileges() -> None:
    """What is to run next obeys permissions, though it be root's."""
    for capability in (1, 2):  # DAC_OVERRIDE, DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_a_path_that_this_user_may_not_read_is_refused_by_its_key(
    assets: Path, tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    asked = []
    for key, more, _ in CLOSED:
        path = closed / "a.jsonl"
        words = more.replace("EVAL", str(assets / "eval.jsonl")).replace("CLOSED", str(path))
        own = [] if "[" in more else [f"{key}={path}"]
        root = f"checkpoint_root_dir={tmp_path}"
        asked.append([*of_grpo(assets), "device=cpu", "monitor=none", root, *words.split(), *own])
    closed.chmod(0)
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_EACH],
        input=json.dumps(asked),
        preexec_fn=without_privileges,
        capture_output=True,
        text=True,
    )
    closed.chmod(0o700)
    said = done.stdout.splitlines()
    assert done.returncode == 0 and len(said) == len(CLOSED), (said, done.stderr)
    for line, (_, _, start) in zip(said, CLOSED, strict=True):
        assert line.startswith(start.replace("CLOSED", str(closed / "a.jsonl"))), line
        assert "Permission denied" in line


def test_seconds_that_somebody_waits_are_finite() -> None:
    """A lock, a clock and a date of the standard library take no infinity."""
    waits = re.compile(r"(^|\.)(\w*timeout|\w+_s|wait_after_min|\w+_report_interval)$")
    seconds = [key for key in keys.leaf_keys() if waits.search(key)]
    assert {"shutdown_grace_s", "trainer.checkpoint.lease_s", f"{QUEUE}.lease_s"} < {*seconds}
    taken = []
    for key in seconds:
        for value in (float("inf"), float("nan")):
            with contextlib.suppress(ConfigError):
                taken.append((key, configs.converted(key, value)))
    assert not taken


@pytest.mark.verify
@pytest.mark.parametrize("row", REFUSED[::20], ids=[row[0] for row in REFUSED[::20]])
def test_the_command_refuses_it(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: tuple[str, str, str]
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-a-test")
    overrides, key, _ = row
    words = [
        re.sub("(?<=[=:])DIR", str(assets), word.replace("EVAL", str(assets / "eval.jsonl")))
        for word in split(overrides)
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rft.train",
            *of_grpo(assets),
            f"checkpoint_root_dir={tmp_path}",
            *words,
        ],
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2
        and done.stderr.startswith("rft: config refused")
        and key in done.stderr
    )


@pytest.mark.parametrize(
    ("nodes", "per_node", "engines", "tp", "mode", "ranks"),
    [
        (1, 8, 2, 1, "both", 6),
        (1, 8, 1, 4, "both", 4),
        (2, 8, 8, 1, "both", 8),
        (4, 8, 4, 4, "both", 16),
        (1, 8, 2, 1, "train", 8),
        (1, None, 2, 1, "both", 2),
        (1, 8, 2, 1, "explore", 2),
    ],
)
def test_the_trainer_gets_what_the_engines_leave(
    nodes: int, per_node: int | None, engines: int, tp: int, mode: str, ranks: int
) -> None:
    config = Config(mode=mode, device="cuda")
    config.cluster.node_num, config.cluster.gpu_per_node = nodes, per_node
    config.explorer.rollout_model.engine_num, config.explorer.rollout_model.tensor_parallel_size = (
        engines,
        tp,
    )
    config.trainer.megatron.tensor_model_parallel_size = 2
    fewest = preflight.fewest_ranks(config.trainer.megatron)
    assert cards.ranks_left(config, fewest) == ranks
    config.device = "cpu"
    assert cards.ranks_left(config, fewest) == 2


@pytest.mark.parametrize("more", ["format.prompt_type=messages", "format.system_prompt=Hi"])
def test_messages_without_a_chat_template_are_refused(
    assets: Path, tmp_path: Path, more: str
) -> None:
    model = tmp_path / "base"
    shutil.copytree(assets / "model", model)
    told = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    told.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(told), encoding="utf-8")
    for extra in model.glob("*.jinja"):
        extra.unlink()
    row = {"prompt": "1+1", "response": "2", "messages": [{"role": "user", "content": "1+1"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    data = tmp_path / "chat.jsonl"
    words = [
        f"model.model_path={model}",
        f"{TASKSET}.{more}",
        f"{TASKSET}.path={data}",
        "buffer.batch_size=1",
    ]
    with pytest.raises(
        ConfigError, match=r"taskset.format has chat messages.*set model.chat_template_path"
    ):
        grpo(assets, tmp_path, *words)
    grpo(assets, tmp_path, *words, "model.custom_chat_template='{{ messages[0].content }}'")
    own = tmp_path / "own.jinja"
    own.write_text("{% generation %}{{ messages }}{%- endgeneration -%}", encoding="utf-8")
    (config,) = grpo(
        assets,
        tmp_path,
        *words,
        "model.custom_chat_template=other",
        f"model.chat_template_path={own}",
    )
    assert config.model.custom_chat_template == own.read_text(encoding="utf-8"), (
        "the file wins (D4)"
    )


def test_bits_of_a_family_that_engines_compute_their_own_way(assets: Path, tmp_path: Path) -> None:
    model = tmp_path / "other"
    shutil.copytree(assets / "model", model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    config["rope_parameters"]["original_max_position_embeddings"] = 32
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = (f"model.model_path={model}", "device=cpu", *BITS.split())
    with pytest.raises(ConfigError, match=r"rope_type=yarn: only LlamaForCausalLM.*trainer_engine"):
        grpo(assets, tmp_path, *words)
