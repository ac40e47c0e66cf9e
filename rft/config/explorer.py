"""Keys of the section `explorer`: who runs tasks, on which engines, and when they are evaluated."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from omegaconf import MISSING

from rft.config.values import (
    AnyPort,
    Bool,
    FiniteNonNegFloat,
    FinitePosFloat,
    Int,
    NonNegInt,
    PosFloat,
    PosInt,
    Seconds,
    Section,
    Share,
    SharePart,
    Str,
)


@dataclass
class EngineConfig(Section):
    """vLLM instances of one model."""

    engine_type: Annotated[Literal["vllm", "vllm_async"], "the two are the same"] = "vllm"
    engine_num: Annotated[PosInt, "engines of this model"] = 1
    tensor_parallel_size: Annotated[PosInt, "GPUs, or processes, of one engine"] = 1
    dtype: Annotated[
        Literal["fp32", "bf16"] | None, "of the engines' weights; default: trainer.dtype"
    ] = None
    max_num_seqs: Annotated[
        PosInt | None,
        "requests that an engine decodes at a time; default: 256, on a GPU up to 1024, as many as "
        "max_staleness admits",
    ] = None
    enable_prefix_caching: Annotated[Bool, "prompts that begin alike are computed once"] = True
    kv_cache_gb: Annotated[FinitePosFloat, "CPU only"] = 1.0
    gpu_memory_utilization: Annotated[
        Share | None, "GPU only; default: 0.9, or 0.5 with cluster.colocate"
    ] = None
    enforce_eager: Annotated[
        Bool | None,
        "without CUDA graphs, on a CPU without compiling; default: false on a GPU, true on a CPU",
    ] = None
    seed: Annotated[Int | None, "of what the engines sample; default: that of the run"] = None
    tool_call_parser: Annotated[
        Str | None, "vLLM's name of how the model writes calls; default: as Hermes, Qwen, Llama"
    ] = None
    reasoning_parser: Annotated[
        Str | None, "vLLM's name of how it writes thoughts; default: they stay in the text"
    ] = None
    engine_args: Annotated[
        dict[str, Any], "for vLLM's AsyncEngineArgs: what rft does not set itself"
    ] = field(default_factory=dict)


@dataclass
class RolloutModelConfig(EngineConfig):
    engine_type: Annotated[
        Literal["vllm", "vllm_async", "tinker"] | None,
        "vllm_async is vllm; default: by the trainer",
    ] = None
    engine_num: Annotated[  # type: ignore[assignment]
        PosInt | None,
        "engines of the policy; default: 1, on GPUs as many as the trainer leaves, about half",
    ] = None
    max_restarts: Annotated[
        NonNegInt,
        "how often within an hour each engine that died is started again; 0: the run ends with the "
        "first",
    ] = 3
    enable_return_routed_experts: Annotated[
        Bool | None,
        "engines tell which experts each token went through, for trainer.router_replay; default: "
        "where the model has experts and vLLM can",
    ] = None
    enable_openai_api: Annotated[
        Bool, "agents reach the engines as OpenAI's API: docs/agents.md; on where it is needed"
    ] = False
    enable_history: Annotated[
        Bool, "a workflow's model calls are kept until its end: docs/agents.md"
    ] = False


@dataclass
class AuxiliaryModelConfig(EngineConfig):
    """A model beside the policy, with engines of its own and weights that never change."""

    name: Annotated[
        Str | None, "what workflows and clients call it; default: the last part of model_path"
    ] = None
    model_path: Annotated[
        Str, "directory of a Hugging Face checkpoint, or a hub's org/name, org/name@revision"
    ] = MISSING
    max_model_len: Annotated[
        Int | None, "default: max_prompt_tokens + max_response_tokens, or the model's own"
    ] = None
    max_prompt_tokens: Annotated[PosInt | None, "a longer one is refused"] = None
    max_response_tokens: Annotated[
        PosInt | None, "of an answer for which nobody says how long it may be"
    ] = None
    custom_chat_template: Annotated[Str | None, "Jinja; default: the model's own"] = None
    trust_remote_code: Annotated[Bool, "run code that comes with the model"] = False
    enable_thinking: Annotated[Bool | None, "as that of model"] = None


@dataclass
class OverRolloutConfig(Section):
    ratio: Annotated[
        SharePart, "a step waits for (1 - ratio) x batch_size groups; not with sync_style=fixed"
    ] = 0.0
    wait_after_min: Annotated[
        FiniteNonNegFloat,
        "seconds for the others, once those are there; then they are cancelled and counted",
    ] = 30.0
    return_partial_tasks: Annotated[
        Bool, "a task of which some runs are finished is taken with these"
    ] = False


@dataclass
class DynamicTimeoutConfig(Section):
    enable: Annotated[
        Bool, "after the first step's worth of tasks; never longer than max_timeout"
    ] = False
    ratio: Annotated[PosFloat, "times the mean seconds of the tasks that succeeded"] = 3.0


@dataclass
class ExplorerConfig(Section):
    name: Annotated[Str, "several explorers on one buffer need a name each"] = "explorer"
    runner_per_model: Annotated[
        PosInt | None,
        "groups in flight per engine; default: 8, on a GPU as many as fill max_num_seqs",
    ] = None
    max_timeout: Annotated[Seconds, "seconds for one task, all attempts together"] = 900.0
    max_retry_times: Annotated[
        NonNegInt, "further attempts after one that failed, inside max_timeout"
    ] = 2
    over_rollout: OverRolloutConfig = field(default_factory=OverRolloutConfig)
    dynamic_timeout: DynamicTimeoutConfig = field(default_factory=DynamicTimeoutConfig)
    runner_state_report_interval: Annotated[
        FiniteNonNegFloat, "seconds, for lines in explorer.log of what each does; 0: none"
    ] = 0.0
    env_vars: Annotated[dict[str, Str], "environment of workflows and rewards"] = field(
        default_factory=dict
    )
    passed_variables: Annotated[
        list[Str],
        "names of variables of your environment that rewards, agents, environments and operators "
        "of pipelines get; others like PATH and HF_HOME they have, keys and tokens not: "
        "docs/security.md",
    ] = field(default_factory=list)
    reward_workers: Annotated[PosInt, "processes that compute rewards"] = 1
    reward_timeout: Annotated[Seconds, "seconds for one reward; then its worker is killed"] = 10.0
    rollout_model: RolloutModelConfig = field(default_factory=RolloutModelConfig)
    auxiliary_models: Annotated[
        list[AuxiliaryModelConfig], "judges and the like: docs/agents.md"
    ] = field(default_factory=list)
    agent_processes: Annotated[
        PosInt, "of agents that are commands or plain functions, at a time"
    ] = 16
    listen_address: Annotated[
        Str, "of the OpenAI API; other machines need another one, and the key"
    ] = "127.0.0.1"
    proxy_port: Annotated[AnyPort, "of the OpenAI API; 0: any free one"] = 0
    session_timeout: Annotated[
        Seconds, "mode=serve: seconds without use until a session without reward is forgotten"
    ] = 3600.0
    eval_interval: Annotated[
        NonNegInt, "policy versions between evaluations; 0: only at start and end"
    ] = 0
    eval_on_startup: Annotated[Bool, "evaluate before the first step"] = True
    version: Annotated[
        NonNegInt | None,
        "mode=serve, mode=bench: this policy version that the run has kept, not the newest",
    ] = None
    bench_on_latest_checkpoint: Annotated[
        Bool, "mode=bench: the newest checkpoint alone, not all"
    ] = False
