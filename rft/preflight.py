"""Fill what the user left out and refuse what cannot run, before anything expensive starts.

In: one stage's `Config`. Out: the same config with every derived value set (`fill`), or a `ConfigError` that names the key
and the fix (`check`). Reads config.json, the tokenizer's files and the task files; loads neither torch nor megatron nor vllm.
"""

import os
import socket
import uuid
from collections.abc import Mapping
from math import ceil, lcm, prod
from pathlib import Path

import fsspec

from rft import cards, verl_keys
from rft.adapters import adapter_names, lora_of
from rft.algorithm import ALGORITHMS
from rft.buffer.experience_file import count_groups
from rft.buffer.taskset import Taskset, check_taskset
from rft.checkpoint.gate import STRATEGIES
from rft.checkpoint.staging import slot_size
from rft.config import (
    TASKSET_KEY,
    Config,
    ConfigError,
    MegatronConfig,
    ModelConfig,
    TasksetConfig,
    get,
    job_dir,
    nearest,
)
from rft.feed import reads_files
from rft.megatron import schedule
from rft.names import Dims, architecture_of, hf_names, is_expert, read_hf_config
from rft.packing import AGGREGATIONS
from rft.pipeline.output import place
from rft.preflight_agents import DTYPES, ENGINE_TYPES, check_agents, fill_agents
from rft.preflight_algorithm import check_algorithm, fill_algorithm
from rft.preflight_buffer import check_buffer
from rft.preflight_colocate import check_colocate, fill_colocate
from rft.preflight_flows import check_flows
from rft.preflight_limits import check_given, check_limits
from rft.preflight_pipelines import check_pipelines
from rft.preflight_rows import check_auxiliary, check_main, fill_rows, steps_of_rows
from rft.preflight_sync import check_sync, fill_sync
from rft.preflight_tinker import TINKER, check_tinker, fill_tinker, is_remote
from rft.preflight_trainer import check_beside, check_megatron, check_optimizers, check_profiler

MODES = ("both", "train", "explore", "bench", "serve")
CHOICES = {
    "mode": MODES,
    "device": ("auto", "cpu", "cuda"),
    "trainer.trainer_type": ("megatron", TINKER),
    "trainer.dtype": ("fp32", "bf16"),
    "trainer.save_hf_checkpoint": ("last", "always", "never"),
    "trainer.save_strategy": STRATEGIES,
    "trainer.checkpoint.staging": ("lazy", "eager", "auto"),
    "trainer.checkpoint.when_busy": ("wait", "skip", "newest_wins"),
    "trainer.checkpoint.best_mode": ("max", "min"),
    "algorithm.optimizer.optimizer_type": ("adam", "sgd"),
    "algorithm.optimizer.lr_scheduler_type": schedule.SCHEDULERS,
    "critic.optim.optimizer_type": ("adam", "sgd"),
    "critic.optim.lr_scheduler_type": schedule.SCHEDULERS,
    "trainer.profiler": (None, "torch", "nsys"),
    "algorithm.loss_agg_mode": AGGREGATIONS,
    "synchronizer.sync_method": ("nccl", "checkpoint", "memory"),
    "synchronizer.lora_sync": (None, "adapter", "merged"),
    "synchronizer.receive": ("staged", "direct"),
    "synchronizer.kv": ("recompute", "keep"),
    "explorer.rollout_model.engine_type": (*ENGINE_TYPES, TINKER),
    "explorer.rollout_model.dtype": DTYPES,
    "buffer.trainer_input.experience_buffer.storage_type": ("queue", "sql", "file"),
    "monitor.monitor_type": ("tensorboard", "wandb", "mlflow", "none"),
    "log.level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}
POSITIVE = (
    "buffer.batch_size", "buffer.total_epochs", "explorer.runner_per_model", "explorer.max_timeout", "explorer.reward_workers",
    "explorer.reward_timeout", "explorer.dynamic_timeout.ratio", "explorer.agent_processes", "explorer.session_timeout",
    "explorer.rollout_model.engine_num", "explorer.rollout_model.tensor_parallel_size",
    "explorer.rollout_model.max_num_seqs", "trainer.max_token_len_per_gpu", "trainer.ppo_micro_batch_size_per_gpu",
    "trainer.peak_tflops", "trainer.collective_timeout", "trainer.total_steps", "trainer.num_ranks",
    "trainer.megatron.tensor_model_parallel_size", "trainer.megatron.pipeline_model_parallel_size",
    "trainer.megatron.context_parallel_size", "trainer.megatron.virtual_pipeline_model_parallel_size",
    "trainer.megatron.expert_model_parallel_size", "trainer.megatron.expert_tensor_parallel_size",
    "synchronizer.sync_interval", "synchronizer.sync_timeout",
    "synchronizer.bucket_bytes", "shutdown_grace_s", "cluster.threads_per_rank", "cluster.threads_per_engine",
    "algorithm.optimizer.lr", "buffer.trainer_input.experience_buffer.max_read_timeout",
    "buffer.trainer_input.experience_buffer.lease_s", "buffer.trainer_input.experience_buffer.max_experience_mb",
    "trainer.checkpoint.agent_deadline_s", "trainer.checkpoint.lease_s", "critic.optim.lr", "critic.cliprange_value",
)  # fmt: skip
NOT_NEGATIVE = (
    "explorer.max_retry_times", "explorer.eval_interval", "explorer.over_rollout.wait_after_min",
    "explorer.runner_state_report_interval", "trainer.save_interval", "trainer.max_checkpoints_to_keep",
    "trainer.max_restarts", "explorer.rollout_model.max_restarts", "trainer.grad_clip", "trainer.max_skipped_steps",
    "synchronizer.sync_offset", "synchronizer.max_staleness", "synchronizer.probe_interval", "algorithm.optimizer.weight_decay",
    "algorithm.optimizer.lr_warmup_steps", "monitor.num_samples", "log.max_mb", "cluster.master_port",
    "trainer.checkpoint.rate_limit_mb", "trainer.checkpoint.keep_every", "trainer.checkpoint.keep_best",
    "trainer.checkpoint.max_gb", "trainer.critic_warmup", "critic.grad_clip", "critic.optim.weight_decay",
    "critic.optim.lr_warmup_steps",
)  # fmt: skip


def fill(config: Config) -> Config:
    """Set every value that follows from others; the user's own value always wins. Changes and returns `config`."""
    verl_keys.merge(config)
    check_given(config)
    place(config)
    fill_tinker(config)
    fill_algorithm(config.algorithm)
    fill_rows(config)
    config.trainer.num_ranks = config.trainer.num_ranks or cards.ranks_left(
        config, fewest_ranks(config.trainer.megatron)
    )
    rollout = config.explorer.rollout_model
    rollout.dtype = rollout.dtype or config.trainer.dtype
    if config.cluster.ray_address == "auto":
        config.cluster.ray_address = ray_of(os.environ)
    config.ray_namespace = config.ray_namespace or f"{config.project}/{config.name}"
    if config.shutdown_grace_s is None:
        config.shutdown_grace_s = grace_of(os.environ)
    _fill_tasksets(config)
    _fill_template(config.model)
    fill_sync(config)
    fill_colocate(config)
    fill_agents(config)
    if config.deterministic:
        _fill_deterministic(config)
    return config


def ray_of(environment: Mapping[str, str]) -> str:
    """The cluster that this process was started in: Ray names it to the jobs that are submitted to it."""
    if address := environment.get("RAY_ADDRESS"):
        return address
    raise ConfigError("cluster.ray_address=auto, but RAY_ADDRESS is not set here: give the address as host:port")


def grace_of(environment: Mapping[str, str]) -> float:
    """Before a terminal somebody waits; a Slurm job may have a large model to save."""
    return 120.0 if "SLURM_JOB_ID" in environment else 20.0


def fewest_ranks(megatron: MegatronConfig) -> int:
    """That these sizes need: layers of experts are cut in another way than the others, over the same ranks."""
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    experts = (megatron.expert_tensor_parallel_size or tp) * megatron.expert_model_parallel_size
    return lcm(tp * megatron.context_parallel_size, experts) * pp


def check(config: Config) -> None:
    """Raise ConfigError for the first thing that cannot work. Call after `fill`."""
    _check_values(config)
    _check_model(config)
    _check_checkpoints(config)
    check_profiler(config)
    _check_algorithm(config)
    to_be_made = check_pipelines(config)  # the rows that the stage reads, by its task pipeline
    _check_data(config, to_be_made)
    _check_deterministic(config)
    check_limits(config)
    check_sync(config)
    check_colocate(config)
    check_agents(config)
    if config.cluster.node_num == 1 and config.cluster.ray_address is None:
        cards.split(config, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    _check_places(config)
    if config.trainer.total_steps is None and (config.buffer.total_steps or not to_be_made):
        config.trainer.total_steps = count_steps(config)
    if config.mode in ("both", "train") and config.trainer.total_steps is not None:
        check_optimizers(config)


def _check_values(config: Config) -> None:
    for key, choices in CHOICES.items():
        if get(config, key) not in choices:
            raise ConfigError(nearest(str(get(config, key)), tuple(filter(None, choices)), key))
    for key in POSITIVE:
        if (value := get(config, key)) is not None and value <= 0:
            raise ConfigError(f"{key}={value}: must be greater than 0")
    for key in NOT_NEGATIVE:
        if get(config, key) < 0:
            raise ConfigError(f"{key}={get(config, key)}: must be 0 or more")
    names = [
        config.explorer.name,
        config.trainer.name,
        config.buffer.trainer_input.experience_buffer.name,
        "synchronizer",
    ]
    names += [str(t.name) for _, t, _ in _tasksets(config)]
    double = next((n for n in names if names.count(n) > 1), None)
    if double:
        raise ConfigError(
            f"the name `{double}` is used twice: explorer, trainer, buffer and every taskset need their own"
        )


def _check_model(config: Config) -> None:
    model = config.model
    hf = read_hf_config(model.model_path)
    if not (Path(model.model_path) / "tokenizer_config.json").exists():
        raise ConfigError(
            f"model.model_path={model.model_path} has no tokenizer_config.json: copy the tokenizer files of the model there"
        )
    if is_remote(config):
        check_tinker(config)
    else:
        check_megatron(config, hf)
    _check_lengths(model, int(hf["max_position_embeddings"]))
    if config.trainer.max_token_len_per_gpu is None:  # row I14
        cp = config.trainer.megatron.context_parallel_size
        config.trainer.max_token_len_per_gpu = ceil(2 * int(model.max_model_len or 0) / cp)


def _check_checkpoints(config: Config) -> None:
    """What saving needs: a metric to be best by, a storage that somebody can open, memory for the largest tensor."""
    checkpoint = config.trainer.checkpoint
    if checkpoint.keep_best and not checkpoint.best_metric:
        raise ConfigError(
            f"trainer.checkpoint.keep_best={checkpoint.keep_best} needs trainer.checkpoint.best_metric, "
            "like eval/<taskset>/accuracy"
        )
    if checkpoint.storage is not None:
        scheme, found, _ = checkpoint.storage.partition("://")
        if not found:
            raise ConfigError(
                f"trainer.checkpoint.storage={checkpoint.storage} is no URL like s3://bucket/prefix; for a directory set "
                "checkpoint_root_dir"
            )
        known = fsspec.available_protocols()
        if scheme not in known:
            raise ConfigError(nearest(scheme, known, "trainer.checkpoint.storage"))
    budget, tp = checkpoint.host_memory_gb, config.trainer.megatron.tensor_model_parallel_size
    if budget is not None:
        hf = read_hf_config(config.model.model_path)
        dims, architecture = Dims.of(hf), architecture_of(hf)
        lora = lora_of(config.model.lora_configs, dims)
        shapes = adapter_names(dims, architecture, lora) if lora else hf_names(dims, architecture)
        etp = config.trainer.megatron.expert_tensor_parallel_size or tp
        cut = {name: 1 if len(shape) == 1 else etp if is_expert(name) else tp for name, shape in shapes.items()}
        sizes = {name: 4 * prod(shape) // cut[name] for name, shape in shapes.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        if slot_size(sizes[largest], budget) < sizes[largest]:
            least = ceil(2 * slot_size(sizes[largest], None) / 1e6) / 1e3
            raise ConfigError(
                f"trainer.checkpoint.host_memory_gb={budget:g} cannot hold {largest} ({sizes[largest] / 1e9:.3f} GB) in one half: "
                f"set at least {least:.3f}, or leave it out"
            )


def _check_lengths(model: ModelConfig, context: int) -> None:
    """Rows D5 and D6 of the feature table: what is given wins, the rest follows, nothing exceeds the model's context."""
    prompt, response, total = model.max_prompt_tokens, model.max_response_tokens, model.max_model_len
    if total is None:
        total = prompt + response if prompt and response else context
    if total > context:
        raise ConfigError(
            f"model.max_model_len={total} (prompt {prompt} + response {response}) exceeds the model's context of {context}: "
            "lower model.max_prompt_tokens or model.max_response_tokens"
        )
    if prompt is None and response is None:
        prompt = total // 2
    prompt = prompt or total - int(response or 0)
    response = response or total - prompt
    if min(prompt, response) < 1 or prompt + response > total:
        raise ConfigError(
            f"model.max_prompt_tokens={prompt} + model.max_response_tokens={response} must fit model.max_model_len={total}, "
            "each at least 1"
        )
    if model.min_response_tokens >= response:
        raise ConfigError(
            f"model.min_response_tokens={model.min_response_tokens} must be below max_response_tokens={response}"
        )
    model.max_prompt_tokens, model.max_response_tokens, model.max_model_len = prompt, response, total


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    kind = ALGORITHMS[algorithm.algorithm_type]
    check_algorithm(config)
    check_beside(config)
    storage = config.buffer.trainer_input.experience_buffer.storage_type
    if kind.source == "rows" and (config.mode != "train" or storage != "file"):
        raise ConfigError(
            f"algorithm.algorithm_type={algorithm.algorithm_type} learns from rows: set mode=train and "
            "buffer.trainer_input.experience_buffer.storage_type=file with a path"
        )


def _check_data(config: Config, to_be_made: bool) -> None:
    """`to_be_made`: the rows of the stage are not there yet; they are looked at when they are."""
    rows = config.buffer.trainer_input.experience_buffer
    check_auxiliary(config)
    if ALGORITHMS[config.algorithm.algorithm_type].source == "rollouts":
        check_buffer(config)
    elif rows.storage_type == "file":
        if not to_be_made:
            check_main(config)
        return
    given = config.buffer.explorer_input
    if given.taskset is not None and given.tasksets:
        raise ConfigError(
            "buffer.explorer_input.taskset and tasksets are both given: write the one into the list, or leave the list out"
        )
    if config.mode in ("both", "explore") and given.taskset is None and not given.tasksets:
        raise ConfigError(
            f"buffer.explorer_input.taskset: mode={config.mode} needs one; set buffer.explorer_input.taskset.path=FILE"
        )
    if config.mode == "bench" and not config.buffer.explorer_input.eval_tasksets:
        raise ConfigError("buffer.explorer_input.eval_tasksets: mode=bench needs at least one")
    for key, taskset, is_eval in _tasksets(config):
        readable = is_eval or not to_be_made
        if readable:
            check_taskset(taskset, f"{key}.path")
        check_flows(config, key, taskset, readable)


def _check_deterministic(config: Config) -> None:
    if not config.deterministic:
        return
    for key, only in (("device", "cpu"), ("synchronizer.sync_interval", 1), ("synchronizer.sync_offset", 0)):
        if get(config, key) != only:
            raise ConfigError(
                f"deterministic=true with {key}={get(config, key)}: it is only kept with {key}={only}, set that"
            )


def _check_places(config: Config) -> None:
    """The run directory can be written; a fixed port is free; a named Ray cluster answers."""
    directory = job_dir(config)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".probe-{uuid.uuid4().hex[:12]}"
        probe.write_bytes(os.urandom(16))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"checkpoint_root_dir: cannot write to {directory}: {error.strerror}; choose another directory"
        ) from error
    if config.cluster.master_port:
        with socket.socket() as probe_socket:
            probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe_socket.bind(("127.0.0.1", config.cluster.master_port))
            except OSError as error:
                raise ConfigError(
                    f"cluster.master_port={config.cluster.master_port} is in use: choose another, or 0 for any"
                ) from error
    if config.cluster.ray_address:
        host, _, port = config.cluster.ray_address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cluster.ray_address={config.cluster.ray_address}: no Ray answers there ({error}); start one with "
                "`ray start --head`, or leave the key out for a private cluster"
            ) from error


def count_steps(config: Config) -> int:
    """Steps of a run that ends with its data: total_steps if given, else total_epochs over whole batches."""
    buffer = config.buffer
    if buffer.total_steps is not None:
        return buffer.total_steps
    rows = buffer.trainer_input.experience_buffer
    if reads_files(config):
        if ALGORITHMS[config.algorithm.algorithm_type].source == "rollouts":
            return buffer.total_epochs * (count_groups(str(rows.path)) // buffer.batch_size)
        return steps_of_rows(config)
    sets, per_step = [(key, one) for key, one, is_eval in _tasksets(config) if not is_eval], buffer.batch_size
    total = sum(Taskset.count(one, key) for key, one in sets)
    if sets and total < per_step:
        paths = ", ".join(str(one.path) for _, one in sets)
        raise ConfigError(f"buffer.batch_size={per_step} is more than the {total} rows of {paths}: lower it")
    return buffer.total_epochs * (total // per_step)


def _tasksets(config: Config) -> list[tuple[str, TasksetConfig, bool]]:
    """(config key, taskset, is evaluation) of every taskset."""
    given = config.buffer.explorer_input
    found = [(TASKSET_KEY, given.taskset, False)] if given.taskset else []
    found += [(f"{TASKSET_KEY}s.{i}", t, False) for i, t in enumerate(given.tasksets)]
    return [*found, *((f"buffer.explorer_input.eval_tasksets.{i}", t, True) for i, t in enumerate(given.eval_tasksets))]


def _fill_tasksets(config: Config) -> None:
    """Workflow and reward: the set's own, else the section's default for its kind (F7-F9, F17-F19)."""
    given = config.buffer.explorer_input
    for key, taskset, is_eval in _tasksets(config):
        own = "taskset" if key == TASKSET_KEY else f"{'eval_' if is_eval else ''}taskset_{key.rsplit('.', 1)[1]}"
        taskset.name = taskset.name or own
        kind = (given.default_eval_workflow_type if is_eval else None) or given.default_workflow_type
        taskset.default_workflow_type = taskset.default_workflow_type or kind
        taskset.default_reward_fn_type = taskset.default_reward_fn_type or given.default_reward_fn_type
        if is_eval:
            taskset.repeat_times = taskset.repeat_times or 1
        elif taskset.repeat_times not in (None, config.algorithm.repeat_times):
            raise ConfigError(
                f"{key}.repeat_times={taskset.repeat_times} contradicts algorithm.repeat_times={config.algorithm.repeat_times}: "
                "set only the latter"
            )
        else:
            taskset.repeat_times = config.algorithm.repeat_times


def _fill_deterministic(config: Config) -> None:
    """What makes a response depend on nothing but weights, prompt and seed, whatever else runs; the one key wins here.

    Floating-point sums change with the batch that a sequence is computed in and with a prefix taken from the cache, and with
    staleness it would be a matter of time which version samples a group.
    """
    rollout = config.explorer.rollout_model
    rollout.max_num_seqs, rollout.enable_prefix_caching = 1, False
    config.synchronizer.max_staleness = 0


def _fill_template(model: ModelConfig) -> None:
    """chat_template_path wins over custom_chat_template (D4)."""
    if model.chat_template_path:
        path = Path(model.chat_template_path)
        if not path.is_file():
            raise ConfigError(f"model.chat_template_path={path}: no such file")
        model.custom_chat_template = path.read_text(encoding="utf-8")
