"""Writes values.tsv: what each key takes. `python -m tests.recorded.make_values`, run at 8c2d7f2.

In: the keys of the schema with their types, and a few values for each type, right ones and wrong
ones. Out: the table that `test_values.py` reads.
"""

import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import entry, values
from tests.recorded.values import ROWS, TASKS, Row

BY_TYPE: dict[Any, str] = {  # separated by spaces
    int: "3 '3' 3.0 '3.0' 0 -1 null x true [3]",
    float: "0.5 2 '0.5' 0 -1 nan null x true [1]",
    bool: "true false 1 'true' yes 2 null x [true]",
    str: "abc 123 1.5 true '' null [a]",
    list[str]: "[] [a] [1] a null {a:1}",
    list[int]: "[] [1,2] ['1'] [1.5] [x] 1 null",
    list[float]: "[] [0.5,1] ['0.5'] [x] 1 null",
    dict: "{} {zz:1} [1] 3 x null",
    list: "[] [{zz:1}] [3] 3 x null",
}
# beside the words of a key that has a list of them, and one that is in none
ANOTHER = "123 null '' [a]"
WORDS = {
    "mode": "both train explore bench serve",
    "device": "auto cpu",
    "trainer.trainer_type": "megatron tinker",
    "trainer.dtype": "fp32 bf16 fp16",
    "trainer.save_hf_checkpoint": "last always never",
    "trainer.save_strategy": "unrestricted single_node single_process single_thread",
    "trainer.checkpoint.staging": "lazy eager auto",
    "trainer.checkpoint.when_busy": "wait skip newest_wins",
    "trainer.checkpoint.best_mode": "max min",
    "trainer.profiler": "torch nsys",
    "trainer.recompute_granularity": "selective full",
    "trainer.recompute_method": "uniform block",
    "algorithm.optimizer.optimizer_type": "adam sgd adamw",
    "algorithm.optimizer.lr_scheduler_type": "constant linear cosine wsd",
    "algorithm.optimizer.lr_decay_style": "linear cosine minus_sqrt exponential",
    "algorithm.algorithm_type": "grpo ppo sft dpo mix opmd rloo dapo gspo",
    "algorithm.advantage_fn": "grpo ppo rloo",
    "algorithm.policy_loss_fn": "ppo gspo sapo dpo",
    "algorithm.sample_strategy": "default warmup staleness_control mix",
    "algorithm.loss_agg_mode": (
        "token-mean seq-mean-token-mean seq-mean-token-sum seq-mean-token-sum-norm"
    ),
    "algorithm.kl_loss_fn": "none k1 k2 k3 low_var_kl abs corrected_k3",
    "algorithm.kl_penalty_fn": "none k1 k2 abs",
    "algorithm.entropy_loss_fn": "default mix none",
    "algorithm.rollout_correction.rollout_is": "none token sequence geometric",
    "algorithm.rollout_correction.rollout_rs": "none token sequence geometric",
    "critic.optim.optimizer_type": "adam sgd",
    "critic.optim.lr_scheduler_type": "constant linear cosine wsd",
    "critic.optim.lr_decay_style": "linear cosine",
    "synchronizer.sync_method": "nccl checkpoint memory online offline",
    "synchronizer.lora_sync": "adapter merged",
    "synchronizer.sync_style": (
        "fixed dynamic_by_explorer explorer_driven trainer_driven fully_async dynamic_by_trainer"
    ),
    "synchronizer.receive": "staged direct",
    "synchronizer.kv": "recompute keep",
    "explorer.rollout_model.engine_type": "vllm vllm_async tinker",
    "explorer.rollout_model.dtype": "fp32 bf16 fp16",
    "monitor.monitor_type": "tensorboard wandb mlflow none swanlab",
    "log.level": "DEBUG INFO WARNING ERROR info",
    "sweep.value": "last best",
    "sweep.direction": "maximize minimize",
    f"{ROWS}.storage_type": "queue sql file",
    f"{ROWS}.replay_buffer.priority_fn": (
        "linear_decay linear_decay_use_count_control_randomization decay_limit_randomization"
    ),
    f"{ROWS}.format.prompt_type": "plaintext messages",
    f"{TASKS}.taskset.format.prompt_type": "plaintext messages",
    f"{TASKS}.taskset.storage_type": "file sql",
    f"{TASKS}.default_workflow_type": "single_turn math_workflow",
    f"{TASKS}.taskset.task_selector.selector_type": (
        "sequential shuffle random offline_easy2hard difficulty_based"
    ),
    f"{TASKS}.default_reward_fn_type": "exact_match math",
    f"{TASKS}.taskset.default_reward_fn_type": "exact_match math",
}
PATHS = {  # one that is there, beside those that are not
    "model.model_path": "MODEL",
    "model.ref_model_path": "MODEL",
    "model.teacher_model_path": "MODEL",
    "model.critic_model_path": "MODEL",
    "model.chat_template_path": "TRAIN",
    f"{TASKS}.taskset.path": "TRAIN EVAL ROOT",
    f"{ROWS}.path": "TRAIN EVAL ROOT",
    "checkpoint_root_dir": "ROOT/other",
    "trainer.checkpoint.storage": "file:///nowhere s3://a/b",
    "plugin_dirs": "[ROOT]",
    "data_processor.task_pipeline.inputs": "[TRAIN]",
    "data_processor.experience_pipeline.input_save_path": "ROOT/given.jsonl",
}
WITH = {  # the base that a key, or what begins so, has a meaning with
    "critic.": "ppo",
    "trainer.critic_warmup": "ppo",
    "model.critic_model_path": "ppo",
    "model.tinker.": "tinker",
    f"{ROWS}.replay_buffer.": "replay",
    f"{ROWS}.format.": "sft",
    f"{ROWS}.path": "sft",
    f"{ROWS}.shuffle": "sft",
    "buffer.trainer_input.auxiliary_buffers": "mix",
    "algorithm.optimizer.lr_decay": "wsd",
    "trainer.recompute_": "recompute",
    "algorithm.rollout_correction.": "correction",
    "explorer.over_rollout.": "async",
    "data_processor.task_pipeline.": "rows_first",
}
INNER = {  # keys of items of lists, and a few values of each
    "model.lora_configs[].lora_rank": "4 '4' 4.0 0 x null",
    "model.lora_configs[].lora_alpha": "8 0 x null",
    "model.lora_configs[].target_modules": "[q_proj] [zz] q_proj [1] [] null",
    "model.lora_configs[].zz": "1",
    "explorer.auxiliary_models[].name": "abc 123 '' null",
    "explorer.auxiliary_models[].model_path": "MODEL x null",
    "explorer.auxiliary_models[].engine_num": "2 '2' 2.0 0 x null",
    "explorer.auxiliary_models[].dtype": "fp32 fp12 null",
    "explorer.auxiliary_models[].max_model_len": "32 0 x null",
    "explorer.auxiliary_models[].engine_type": "vllm zz null",
    "explorer.auxiliary_models[].trust_remote_code": "true x null",
    "explorer.auxiliary_models[].zz": "1",
    f"{TASKS}.eval_tasksets[].path": "EVAL x null",
    f"{TASKS}.eval_tasksets[].name": "abc 123 '' null",
    f"{TASKS}.eval_tasksets[].repeat_times": "3 '3' 3.0 0 x null",
    f"{TASKS}.eval_tasksets[].split": "test 1 null",
    f"{TASKS}.eval_tasksets[].rollout_args": (
        "{temperature:0.5} {temperature:x} {temperature:-1} {zz:1} {top_p:0} 3 null"
    ),
    f"{TASKS}.eval_tasksets[].format": (
        "{prompt_type:plaintext} {prompt_type:zz} {prompt_key:zz} {zz:1} 3 null"
    ),
    f"{TASKS}.eval_tasksets[].zz": "1",
    "data_processor.experience_pipeline.operators[].name": "reward_filter zz 1 null",
    "data_processor.experience_pipeline.operators[].args": "{} {zz:1} 3 null",
    "data_processor.task_pipeline.operators[].name": "length_filter zz 1 null",
    "data_processor.task_pipeline.operators[].args": "{} {zz:1} 3 null",
    "buffer.trainer_input.auxiliary_buffers.sft_dataset.path": "TRAIN x null",
    "buffer.trainer_input.auxiliary_buffers.sft_dataset.storage_type": "file queue zz null",
    "buffer.trainer_input.auxiliary_buffers.sft_dataset.shuffle": "true x null",
    "buffer.trainer_input.auxiliary_buffers.sft_dataset.lease_s": "3 x null",
    "buffer.trainer_input.auxiliary_buffers.sft_dataset.format.prompt_type": "plaintext zz null",
    "+stages": "[{stage_name:a}] [{stage_name:a,trainer:{total_steps:2}}] "
    "[{stage_name:a,trainer:{total_steps:x}}] "
    "[{stage_name:a,trainer:{total_steps:0}}] [{stage_name:a,trainer:{zz:2}}] "
    "[{stage_name:a,mode:zz}] [{stage_name:1}] [1]",
    "+every_stage.trainer.total_steps": "2 x 0",
    "+every_stage.zz": "1",
    "+zz": "1",
    "zz": "1",
    "+trainer.zz": "1",
    "trainer": "x null",
    "algorithm": "grpo ppo zz",
    "monitor": "none zz",
    "experiment": "zz",
    "+trainer.megatron.zz": "1",
    "+explorer.env_vars.A": "b 1 null [1]",
    "+data_processor.task_pipeline.priority_weights.a": "0.5 x null",
    "+trainer.megatron.override_transformer_config.attention_dropout": "0.1 x",
    "+monitor.monitor_args.zz": "1",
    "+trainer.megatron.override_ddp_config.overlap_grad_reduce": "true x",
    "+algorithm.kl_loss_fn_args.kl_coef": "0.1 x",
}
# only root may open that one
LEFT_OUT = {("cluster.master_port", "3"), ("cluster.master_port", "'3'")}


def of_type(kind: Any) -> Any:
    """The entry of BY_TYPE: what is optional takes the same, and
    what is in a dictionary is not looked at.
    """
    if typing.get_origin(kind) is typing.Union:
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    if kind in BY_TYPE:
        return kind
    return typing.get_origin(kind)


def pairs() -> Iterator[tuple[str, str]]:
    for key, kind in entry.schema():
        plus = "+" if of_type(kind) is dict else ""
        listed = f"{WORDS[key]} zz {ANOTHER}" if key in WORDS else BY_TYPE[of_type(kind)]
        for value in [*PATHS.get(key, "").split(), *listed.split()]:
            if (key, value) not in LEFT_OUT:
                yield (plus if value.startswith("{") else "") + key, value
    for key, listed in INNER.items():
        yield from ((key, value) for value in listed.split())


def base(key: str) -> str:
    return next((name for begin, name in WITH.items() if key.lstrip("+").startswith(begin)), "grpo")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        root = Path(directory)
        entry.leave_the_machine(patch, root)
        entry.write_assets(root)
        values.write([values.judged(Row(base(key), key, value), root) for key, value in pairs()])


if __name__ == "__main__":
    main()
