"""What a config asks of agents, the OpenAI API and auxiliary models. Called by `preflight`.

In: a config whose other sections may not be checked yet (`fill_agents`), then a filled one (`check_agents`). Out: the API is on
where something needs it, auxiliary models have their defaults; or a ConfigError for the first thing that cannot work.
"""

import ipaddress
import re
import socket
from pathlib import Path

from rft.config import AuxiliaryModelConfig, Config, ConfigError, nearest
from rft.names import Dims, read_hf_config
from rft.preflight_colocate import ALONE_SHARE
from rft.rollout.agents import Settings
from rft.sync import narrow

AUXILIARY = "explorer.auxiliary_models"
ENGINE_TYPES, DTYPES = ("vllm", "vllm_async"), ("fp32", "bf16")
NAME = re.compile(r"[\w.@-]{1,64}")  # it stands in addresses


def fill_agents(config: Config) -> None:
    explorer = config.explorer
    for one in explorer.auxiliary_models:
        one.dtype = one.dtype or config.trainer.dtype
        one.gpu_memory_utilization = one.gpu_memory_utilization or ALONE_SHARE
    wanted = config.mode == "serve" or bool(explorer.auxiliary_models) or bool(_agents(config))
    explorer.rollout_model.enable_openai_api = explorer.rollout_model.enable_openai_api or wanted


def check_agents(config: Config) -> None:
    for key, given in _agents(config):
        settings = Settings.of(given, f"{key}.workflow_args")
        if settings.agent:
            settings.function()
    _check_address(config)
    for number, one in enumerate(config.explorer.auxiliary_models):
        _check_auxiliary(config, f"{AUXILIARY}.{number}", one)
    names = [one.name for one in config.explorer.auxiliary_models]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{AUXILIARY}: the name `{double}` is used twice: give each model its own")
    if names and config.cluster.colocate:
        raise ConfigError(
            f"{AUXILIARY} with cluster.colocate=true: the cards are the trainer's and the policy's, in turns; leave one of them out"
        )


def _agents(config: Config) -> list[tuple[str, dict[str, object]]]:
    """(key, workflow_args) of every taskset that agents run."""
    given = config.buffer.explorer_input
    sets = [("buffer.explorer_input.taskset", given.taskset)] if given.taskset else []
    sets += [(f"buffer.explorer_input.eval_tasksets.{number}", one) for number, one in enumerate(given.eval_tasksets)]
    return [(key, dict(one.workflow_args)) for key, one in sets if one.default_workflow_type == "agent"]


def _check_address(config: Config) -> None:
    explorer = config.explorer
    try:
        host = ipaddress.ip_address(explorer.listen_address)
    except ValueError:
        raise ConfigError(
            f"explorer.listen_address={explorer.listen_address} is no IP address: give 127.0.0.1 for this machine alone, or one of "
            "its own addresses, or 0.0.0.0 for all"
        ) from None
    if not 0 <= explorer.proxy_port <= 65535:
        raise ConfigError(
            f"explorer.proxy_port={explorer.proxy_port} is no port: give one from 1 to 65535, or 0 for any"
        )
    if explorer.proxy_port and explorer.rollout_model.enable_openai_api and not config.cluster.ray_address:
        with socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((str(host), explorer.proxy_port))
            except OSError as error:
                raise ConfigError(
                    f"explorer.proxy_port={explorer.proxy_port} cannot be had at {host} ({error.strerror}): choose another, or "
                    "0 for any"
                ) from error


def _check_auxiliary(config: Config, key: str, one: AuxiliaryModelConfig) -> None:
    if not NAME.fullmatch(one.name):
        raise ConfigError(f"{key}.name={one.name!r}: use letters, digits and . @ - _, at most 64")
    if one.engine_type not in ENGINE_TYPES:
        raise ConfigError(nearest(one.engine_type, ENGINE_TYPES, f"{key}.engine_type"))
    if one.dtype not in DTYPES:
        raise ConfigError(nearest(str(one.dtype), DTYPES, f"{key}.dtype"))
    if not 0 < float(one.gpu_memory_utilization or 0) <= 1:
        raise ConfigError(f"{key}.gpu_memory_utilization={one.gpu_memory_utilization}: give a share above 0, at most 1")
    for name in ("engine_num", "tensor_parallel_size", "max_num_seqs", "kv_cache_gb"):
        if getattr(one, name) <= 0:
            raise ConfigError(f"{key}.{name}={getattr(one, name)}: must be greater than 0")
    hf = read_hf_config(one.model_path)
    root = Path(one.model_path)
    if not (root / "tokenizer_config.json").exists() or not list(root.glob("*.safetensors")):
        raise ConfigError(
            f"{key}.model_path={one.model_path}: a model directory has tokenizer_config.json and *.safetensors"
        )
    if problem := narrow.obstacle(Dims.of(hf), one.tensor_parallel_size):
        raise ConfigError(f"{key}.tensor_parallel_size={one.tensor_parallel_size} {problem}")
    context = int(hf["max_position_embeddings"])
    one.max_model_len = one.max_model_len or context
    if one.max_model_len > context:
        raise ConfigError(f"{key}.max_model_len={one.max_model_len} exceeds the model's context of {context}: lower it")
