"""What a config asks of a service that speaks Tinker's API, and what of it such a service cannot do. Called by `preflight`.

In: a config as it was composed (`fill_tinker`), then a filled one (`check_tinker`). Out: one switch instead of three; or a
ConfigError for the first key that belongs to a model on the user's own machines, or that asks for more than log-probabilities of
tokens.
"""

import importlib.util
import os
from dataclasses import fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rft.algorithm import recipe
from rft.config import Config, ConfigError, get

TINKER = "tinker"
CREDENTIALS = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
STORED = Path("~/.tinker/credentials.json")
THERE = "the model is at the service, which cuts and keeps it as it likes"
SAMPLER = "responses are sampled by the service"
BY_PATH = "the service hands weights on by their path"
IDLE = {  # keys of a model on one's own machines, and why they mean nothing here
    "trainer.megatron": THERE, "trainer.dtype": THERE, "trainer.trainer_config": THERE, "trainer.checkpoint": THERE,
    "trainer.save_strategy": THERE, "trainer.profiler": THERE, "trainer.peak_tflops": THERE,
    "trainer.recompute_granularity": THERE, "trainer.recompute_method": THERE, "trainer.recompute_num_layers": THERE,
    "trainer.recompute_modules": THERE, "trainer.use_remove_padding": THERE, "cluster.colocate": THERE,
    "model.lora_configs": "the adapter is described by model.tinker.rank and model.tinker.train_*",
    "model.ref_model_path": "a KL term compares with model.tinker.base_model",
    "model.min_response_tokens": "the service knows no shortest response",
    "deterministic": "nobody promises that the service computes the same twice",
    "synchronizer.bucket_bytes": BY_PATH, "synchronizer.receive": BY_PATH, "synchronizer.kv": BY_PATH,
    "synchronizer.lora_sync": BY_PATH,
    "explorer.rollout_model.tensor_parallel_size": SAMPLER, "explorer.rollout_model.dtype": SAMPLER,
    "explorer.rollout_model.max_num_seqs": SAMPLER, "explorer.rollout_model.enable_prefix_caching": SAMPLER,
    "explorer.rollout_model.kv_cache_gb": SAMPLER, "explorer.rollout_model.gpu_memory_utilization": SAMPLER,
    "explorer.rollout_model.enforce_eager": SAMPLER,
}  # fmt: skip


def is_remote(config: Config) -> bool:
    return config.trainer.trainer_type == TINKER


def fill_tinker(config: Config) -> None:
    """`model.tinker.enable` and `trainer.trainer_type=tinker` are one switch, and the engines follow it."""
    rollout = config.explorer.rollout_model
    if config.model.tinker.enable:
        config.trainer.trainer_type = TINKER
    if not is_remote(config):
        rollout.engine_type = rollout.engine_type or "vllm"
        if rollout.engine_type == TINKER:
            raise ConfigError(
                "explorer.rollout_model.engine_type=tinker: such an engine samples what its own service has trained; set "
                "trainer.trainer_type=tinker too"
            )
        return
    config.model.tinker.enable, rollout.engine_type = True, rollout.engine_type or TINKER
    defaults = Config()
    for key, why in IDLE.items():
        if name := _changed(get(config, key), get(defaults, key), key):
            raise ConfigError(f"{name}={get(config, name)} with trainer.trainer_type=tinker: {why}; leave it out")
    _check_choices(config)
    config.device = "cpu"
    config.synchronizer.sync_method = "checkpoint"


def _changed(value: Any, default: Any, key: str) -> str | None:
    """The first key, of a section its first, that is not as it would be by itself."""
    if is_dataclass(value):
        found = (_changed(getattr(value, f.name), getattr(default, f.name), f"{key}.{f.name}") for f in fields(value))
        return next(filter(None, found), None)
    return None if value == default else key


def _check_choices(config: Config) -> None:
    """Keys that have one value here."""
    rollout, trainer = config.explorer.rollout_model, config.trainer
    if rollout.engine_type != TINKER:
        raise ConfigError(
            f"explorer.rollout_model.engine_type={rollout.engine_type} with trainer.trainer_type=tinker: the weights never leave "
            "the service; set it to tinker, or leave it out"
        )
    if config.synchronizer.sync_method not in (None, "checkpoint", "offline"):
        raise ConfigError(
            f"synchronizer.sync_method={config.synchronizer.sync_method} with trainer.trainer_type=tinker: {BY_PATH}; set it to "
            "checkpoint, or leave it out"
        )
    if config.device not in ("auto", "cpu"):
        raise ConfigError(
            f"device={config.device} with trainer.trainer_type=tinker: nothing is computed here; leave it out"
        )
    if trainer.num_ranks not in (None, 1):
        raise ConfigError(
            f"trainer.num_ranks={trainer.num_ranks} with trainer.trainer_type=tinker: {THERE}; leave it out"
        )
    if trainer.save_hf_checkpoint != "never":
        raise ConfigError(
            f"trainer.save_hf_checkpoint={trainer.save_hf_checkpoint} with trainer.trainer_type=tinker: the weights stay at the "
            "service, and `tinker checkpoint download` fetches them; set it to never"
        )
    if config.algorithm.optimizer.optimizer_type != "adam":
        raise ConfigError(
            f"algorithm.optimizer.optimizer_type={config.algorithm.optimizer.optimizer_type} with trainer.trainer_type=tinker: "
            "the service's optimizer is AdamW; set it to adam"
        )


def check_tinker(config: Config) -> None:
    """Called in the place of everything that is checked of a model and its layout."""
    given = config.model.tinker
    if not given.base_model:
        raise ConfigError(
            "model.tinker.base_model is not set: give the service's name of the model, like Qwen/Qwen3-8B; model.model_path is the "
            "local directory of its tokenizer and config.json"
        )
    if given.base_url is not None and not given.base_url.startswith(("http://", "https://")):
        raise ConfigError(f"model.tinker.base_url={given.base_url}: give an address like http://127.0.0.1:8000")
    for name in ("rank", "timeout"):
        if not getattr(given, name) > 0 or not isfinite(getattr(given, name)):
            raise ConfigError(f"model.tinker.{name}={getattr(given, name)}: must be greater than 0")
    if not (given.train_mlp or given.train_attn or given.train_unembed):
        raise ConfigError(
            "model.tinker.train_mlp, train_attn and train_unembed are all false: nothing would be trained"
        )
    storage = config.buffer.trainer_input.experience_buffer.storage_type
    if config.mode not in ("both", "train") or (config.mode == "train" and storage != "file"):
        what = f"mode={config.mode}" + (f" and a buffer of storage_type={storage}" if config.mode == "train" else "")
        raise ConfigError(
            f"{what} with trainer.trainer_type=tinker: explorers of another run do not find the service's weights; set "
            "mode=both, or mode=train with a file"
        )
    _check_terms(config)
    _check_sampling(config)
    if importlib.util.find_spec("tinker") is None:
        raise ConfigError("trainer.trainer_type=tinker needs the service's client: pip install tinker")
    if not any(os.environ.get(name) for name in CREDENTIALS) and not STORED.expanduser().exists():
        raise ConfigError("trainer.trainer_type=tinker: the service wants a key; set the variable TINKER_API_KEY")


def _check_terms(config: Config) -> None:
    """The service tells log-probabilities of single tokens, of the policy and of the model that it began as."""
    algorithm = config.algorithm
    why = None
    if recipe.needs_critic(algorithm):
        why = f"advantage_fn={algorithm.advantage_fn} needs a critic", "set advantage_fn=grpo, or another without one"
    elif recipe.needs_teacher(algorithm):
        why = f"advantage_fn={algorithm.advantage_fn} needs a teacher", "train with Megatron, or set another one"
    elif recipe.needs_entropy(algorithm):
        why = f"advantage_fn={algorithm.advantage_fn} needs entropies", "train with Megatron, or set another one"
    elif algorithm.entropy_loss_fn != "none" and float(algorithm.entropy_loss_fn_args.get("entropy_coef", 0.0)):
        why = "entropy_loss_fn_args.entropy_coef needs entropies", "leave it out"
    if why is not None:
        raise ConfigError(
            f"algorithm.{why[0]} with trainer.trainer_type=tinker, whose service gives log-probabilities alone: {why[1]}"
        )


def _check_sampling(config: Config) -> None:
    """What is trained must be sampled from the distribution that the service computes log-probabilities of."""
    given = config.buffer.explorer_input
    sets = [("buffer.explorer_input.taskset", given.taskset)] if given.taskset else []
    sets += [(f"buffer.explorer_input.tasksets.{number}", one) for number, one in enumerate(given.tasksets)]
    for key, taskset in sets:
        for name, neutral in (("temperature", 1.0), ("top_p", 1.0), ("top_k", -1)):
            value = getattr(taskset.rollout_args, name)
            if value not in (None, neutral):
                raise ConfigError(
                    f"{key}.rollout_args.{name}={value} with trainer.trainer_type=tinker, whose service gives log-probabilities of "
                    f"the plain distribution only: leave it out for {neutral:g}"
                )
