"""What a config asks of the trainer: weights, layout, models beside the policy, optimizer, profiler. Called by `preflight`.

In: a filled config. Raises ConfigError for the first thing that cannot work.
"""

import json
from pathlib import Path
from typing import Any

from rft.adapters import lora_of, sync_of
from rft.algorithm import recipe
from rft.config import Config, ConfigError, OptimizerConfig
from rft.megatron import overrides, schedule
from rft.names import Dims, check_layout, read_hf_config
from rft.sync import narrow

WITH = {
    "model.ref_model_path": "algorithm.kl_loss_fn=k2",
    "model.critic_model_path": "algorithm.algorithm_type=ppo",
    "model.teacher_model_path": "algorithm.algorithm_type=on_policy_distill",
}


def vocabulary(path: str) -> dict[str, int]:
    """Ids by token, of a model directory's tokenizer.json, added tokens included; empty where there is no such file."""
    file = Path(path) / "tokenizer.json"
    if not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    words = found["model"].get("vocab", {})
    ids = words if isinstance(words, dict) else {word: number for number, (word, _) in enumerate(words)}
    return ids | {added["content"]: added["id"] for added in found.get("added_tokens", [])}


def check_megatron(config: Config, hf: dict[str, Any]) -> None:
    """The policy's weights are here, and its layout fits it. `hf`: its config.json."""
    model = config.model
    if not list(Path(model.model_path).glob("*.safetensors")):
        raise ConfigError(
            f"model.model_path={model.model_path} has no *.safetensors: convert the weights to safetensors first"
        )
    check_layout(hf, config.trainer.megatron, int(config.trainer.num_ranks or 1))
    lora = lora_of(model.lora_configs, Dims.of(hf))
    config.synchronizer.lora_sync = sync_of(config.synchronizer.lora_sync, lora, Dims.of(hf), config.device)
    if lora and config.mode == "bench":
        raise ConfigError(
            "mode=bench evaluates exported models, and this run exports an adapter: leave model.lora_configs out"
        )
    megatron = config.trainer.megatron
    stages = megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)
    overrides.check(config.trainer, int(hf["num_hidden_layers"]) // stages)
    if config.device == "cpu" or lora:
        why = "this is device=cpu" if config.device == "cpu" else "adapters are layers of rft's own"
        overrides.refuse_transformer_engine(config.trainer, why)
    tp = config.explorer.rollout_model.tensor_parallel_size
    if problem := narrow.obstacle(Dims.of(hf), tp):
        raise ConfigError(f"explorer.rollout_model.tensor_parallel_size={tp} {problem}")


def check_beside(config: Config) -> None:
    """Models beside the policy: there where they are needed, cut like it, with its tokens and its context."""
    needs_critic = recipe.needs_critic(config.algorithm)
    asked = {
        "model.ref_model_path": (config.model.ref_model_path, recipe.needs_reference(config.algorithm)),
        "model.critic_model_path": (config.model.critic_model_path, needs_critic),
        "model.teacher_model_path": (config.model.teacher_model_path, recipe.needs_teacher(config.algorithm)),
    }
    if asked["model.teacher_model_path"] == (None, True):
        raise ConfigError(
            f"model.teacher_model_path is not set: algorithm.advantage_fn={config.algorithm.advantage_fn} learns from a teacher; "
            "give the directory of its Hugging Face checkpoint"
        )
    own = read_hf_config(config.model.model_path)
    for key, (path, is_needed) in asked.items():
        if path is None:
            continue
        if not is_needed:
            with_it = WITH[key]
            raise ConfigError(f"{key}={path}: nothing here uses that model; leave it out, or set {with_it}")
        if not list(Path(path).glob("*.safetensors")):
            raise ConfigError(f"{key}={path} has no *.safetensors: give the directory of a Hugging Face checkpoint")
        try:
            hf = read_hf_config(path)
            check_layout(hf, config.trainer.megatron, int(config.trainer.num_ranks or 1))
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.model_path", key)) from error
        for name, wanted in (
            ("vocab_size", own["vocab_size"]),
            ("max_position_embeddings", config.model.max_model_len),
        ):
            if int(hf[name]) < int(wanted or 0):
                raise ConfigError(f"{key}={path}: its {name} is {hf[name]}, the policy's tokens need {wanted}")
        if "teacher" in key and vocabulary(path) != vocabulary(config.model.model_path):
            raise ConfigError(
                f"{key}={path}: its tokenizer has another vocabulary than that of model.model_path, so it cannot judge the "
                "policy's tokens; give a teacher of the same family"
            )
    if config.trainer.critic_warmup and not needs_critic:
        raise ConfigError(
            f"trainer.critic_warmup={config.trainer.critic_warmup}: algorithm.advantage_fn={config.algorithm.advantage_fn} has "
            "no critic; set it to 0, or use algorithm_type=ppo"
        )


def check_profiler(config: Config) -> None:
    trainer, ranks = config.trainer, int(config.trainer.num_ranks or 1)
    if len(trainer.profile_steps) != 2 or not 1 <= trainer.profile_steps[0] <= trainer.profile_steps[1]:
        raise ConfigError(f"trainer.profile_steps={trainer.profile_steps}: give the first step, from 1, and the last")
    strange = [rank for rank in trainer.profile_ranks if not 0 <= rank < ranks]
    if strange:
        raise ConfigError(f"trainer.profile_ranks={trainer.profile_ranks}: there are ranks 0 to {ranks - 1}")
    if trainer.profiler == "nsys" and config.device == "cpu":
        raise ConfigError("trainer.profiler=nsys with device=cpu: Nsight Systems looks at CUDA, use torch")


def check_optimizers(config: Config) -> None:
    """Called when the number of steps is known."""
    warmup, steps = config.trainer.critic_warmup, int(config.trainer.total_steps or 0)
    if warmup and warmup >= steps:
        raise ConfigError(
            f"trainer.critic_warmup={warmup}: the run has {steps} steps, none would train the policy; lower it"
        )
    if warmup and config.trainer.stop_at_loss is not None:
        raise ConfigError(
            f"trainer.stop_at_loss with trainer.critic_warmup={warmup}: while only the critic learns, the loss is its own; "
            "set one of the two"
        )
    check_optimizer(config.algorithm.optimizer, steps - warmup)
    if recipe.needs_critic(config.algorithm):
        check_optimizer(config.critic.optim, steps, "critic.optim")


def check_optimizer(optimizer: OptimizerConfig, total_steps: int, key: str = "algorithm.optimizer") -> None:
    schedule.check(optimizer, total_steps, key)
    adam = OptimizerConfig()
    for name in ("betas", "eps"):
        if optimizer.optimizer_type == "sgd" and getattr(optimizer, name) != getattr(adam, name):
            raise ConfigError(
                f"{key}.{name}={getattr(optimizer, name)} with optimizer_type=sgd: only Adam has one, leave it out"
            )
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        raise ConfigError(f"{key}.betas={optimizer.betas}: give two numbers from 0 to below 1")
