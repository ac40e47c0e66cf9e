"""Keys of the section `explorer`: who runs tasks, on which engines, and when they are evaluated."""

from dataclasses import dataclass, field
from typing import Optional

from omegaconf import MISSING


@dataclass
class EngineConfig:
    """vLLM instances of one model."""

    engine_type: str = "vllm"  # vllm (vllm_async is the same)
    engine_num: int = 1
    tensor_parallel_size: int = 1
    dtype: Optional[str] = None  # default: trainer.dtype
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    kv_cache_gb: float = 1.0  # CPU only
    gpu_memory_utilization: Optional[float] = None  # GPU only; default: 0.9, or 0.5 with cluster.colocate
    enforce_eager: bool = True


@dataclass
class RolloutModelConfig(EngineConfig):
    engine_type: Optional[str] = None  # vllm (vllm_async is the same) | tinker; default: by the trainer
    max_restarts: int = 3  # how often each engine that died is started again; 0: the run ends with the first
    enable_openai_api: bool = False  # agents reach the engines as OpenAI's API: docs/agents.md; on where it is needed
    enable_history: bool = False  # a workflow's model calls are kept until its end: docs/agents.md


@dataclass
class AuxiliaryModelConfig(EngineConfig):
    """A model beside the policy, with engines of its own and weights that never change."""

    name: str = MISSING  # what workflows and clients call it
    model_path: str = MISSING
    max_model_len: Optional[int] = None  # default: the model's own
    custom_chat_template: Optional[str] = None
    trust_remote_code: bool = False


@dataclass
class OverRolloutConfig:
    ratio: float = 0.0  # a step waits for (1 - ratio) x batch_size groups only; needs a sync_style other than fixed
    wait_after_min: float = 30.0  # seconds for the others, once those are there; then they are cancelled and counted
    return_partial_tasks: bool = False  # a task of which some runs are finished is taken with these


@dataclass
class DynamicTimeoutConfig:
    enable: bool = False  # after the first step's worth of tasks; never longer than max_timeout
    ratio: float = 3.0  # times the mean seconds of the tasks that succeeded


@dataclass
class ExplorerConfig:
    name: str = "explorer"  # several explorers on one buffer need a name each
    runner_per_model: int = 8  # groups in flight per engine
    max_timeout: float = 900.0  # seconds for one task, all attempts together
    max_retry_times: int = 2  # further attempts after one that failed, inside max_timeout
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    runner_state_report_interval: float = 0.0  # seconds, for lines in explorer.log of what each does; 0: none
    env_vars: dict[str, str] = field(default_factory=dict)  # environment of workflows and rewards
    reward_workers: int = 1
    reward_timeout: float = 10.0  # seconds for one reward; then its worker is killed
    rollout_model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    auxiliary_models: list[AuxiliaryModelConfig] = field(default_factory=list)  # judges and the like: docs/agents.md
    agent_processes: int = 16  # of agents that are commands or plain functions, at a time
    listen_address: str = "127.0.0.1"  # of the OpenAI API; other machines reach it under another one, and need the key
    proxy_port: int = 0  # of the OpenAI API; 0: any free one
    session_timeout: float = 3600.0  # mode=serve: seconds without use until a session without reward is forgotten
    eval_interval: int = 0  # policy versions between evaluations; 0: only at start and end
    eval_on_startup: bool = True
    bench_on_latest_checkpoint: bool = False
