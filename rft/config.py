"""Structured configuration: every key that rft understands, its type, default and meaning. Pure data and validation.

Sections and key names follow `docs/configure.md`. Hydra composes YAML groups over `Config`; `stage_configs` expands
`stages` into one full config per stage (merged key by key over the global one); `validate` refuses impossible
combinations before anything starts. After that the config is read-only: `save` writes `resolved.yaml`, and ranks and
actors `load` only that file. Each part gets its own section, never the whole config.

Every refusal is a `ConfigError` whose text names the key and the fix.
"""

import re
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from rft import trinity_keys
from rft.config_algorithm import AlgorithmConfig as AlgorithmConfig
from rft.config_algorithm import OptimizerConfig
from rft.config_algorithm import RolloutCorrectionConfig as RolloutCorrectionConfig
from rft.config_buffer import BufferConfig, TasksetConfig
from rft.config_buffer import ExperienceBufferConfig as ExperienceBufferConfig
from rft.config_buffer import ExplorerInputConfig as ExplorerInputConfig
from rft.config_buffer import FormatConfig as FormatConfig
from rft.config_buffer import RolloutArgs as RolloutArgs
from rft.config_buffer import RowFormatConfig as RowFormatConfig
from rft.config_buffer import TaskSelectorConfig as TaskSelectorConfig
from rft.config_data import DataJuicerConfig as DataJuicerConfig
from rft.config_data import DataProcessorConfig, ServiceConfig
from rft.config_data import ExperiencePipelineConfig as ExperiencePipelineConfig
from rft.config_data import OperatorConfig as OperatorConfig
from rft.config_data import TaskPipelineConfig as TaskPipelineConfig
from rft.config_explorer import AuxiliaryModelConfig as AuxiliaryModelConfig
from rft.config_explorer import EngineConfig as EngineConfig
from rft.config_explorer import ExplorerConfig
from rft.config_explorer import RolloutModelConfig as RolloutModelConfig
from rft.config_sweep import SweepConfig
from rft.hints import closest
from rft.hints import nearest as nearest
from rft.monitor import redact


class ConfigError(ValueError):
    """A config that cannot run; the message names the key and the fix."""


@dataclass
class LoraConfig:
    lora_rank: int = 32
    lora_alpha: float = 32.0  # the adapter is scaled by lora_alpha / lora_rank
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])  # or q_proj, k_proj, v_proj, o_proj ...


@dataclass
class TinkerConfig:
    enable: bool = False  # train and sample at a service that speaks Tinker's API: docs/tinker.md
    base_model: Optional[str] = None  # what the service calls the model
    base_url: Optional[str] = None  # of the service; default: $TINKER_BASE_URL, else Tinker's own
    rank: int = 32  # of the adapter that is trained
    seed: Optional[int] = None  # of its first weights; default: that of the run
    train_mlp: bool = True  # adapters in these layers, as in those of the next two
    train_attn: bool = True
    train_unembed: bool = True
    timeout: float = 1800.0  # seconds for one answer of the service


@dataclass
class ModelConfig:
    model_path: str = MISSING  # directory of a Hugging Face checkpoint
    ref_model_path: Optional[str] = None  # what a KL term compares with; default: model_path, as it was at the start
    teacher_model_path: Optional[str] = None  # of on_policy_distill and jsd: a frozen model with the same vocabulary
    critic_model_path: Optional[str] = None  # what the critic's trunk begins as; default: model_path
    custom_chat_template: Optional[str] = None
    chat_template_path: Optional[str] = None  # file; wins over custom_chat_template
    max_model_len: Optional[int] = None  # default: max_prompt_tokens + max_response_tokens
    max_prompt_tokens: Optional[int] = None
    enable_prompt_truncation: bool = False  # a longer one keeps its end; false: it trains nothing, counted
    max_response_tokens: Optional[int] = None
    min_response_tokens: int = 0
    trust_remote_code: bool = False
    lora_configs: list[LoraConfig] = field(default_factory=list)  # one: train this adapter and nothing else
    tinker: TinkerConfig = field(default_factory=TinkerConfig)


@dataclass
class ClusterConfig:
    node_num: int = 1
    gpu_per_node: Optional[int] = None  # default: detected
    ray_address: Optional[str] = None  # host:port of a cluster, or auto: $RAY_ADDRESS; default: a private one here
    ray_num_cpus: Optional[int] = None  # logical CPUs of the private cluster; default: one per actor of the start
    colocate: bool = False  # trainer and engines share GPUs, or cores, and take turns: docs/weight_sync.md
    threads_per_rank: int = 1
    threads_per_engine: int = 1
    master_port: int = 0  # 0: any free port


@dataclass
class MegatronConfig:
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    virtual_pipeline_model_parallel_size: Optional[int] = None  # parts of the model per pipeline stage, interleaved
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: Optional[int] = None  # default: tensor_model_parallel_size
    override_transformer_config: dict[str, Any] = field(default_factory=dict)  # for megatron's TransformerConfig
    override_ddp_config: dict[str, Any] = field(default_factory=dict)  # for its DistributedDataParallelConfig
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)  # for its OptimizerConfig


@dataclass
class CheckpointConfig:
    storage: Optional[str] = None  # URL that fsspec knows, like s3://bucket/prefix; default: <job>/checkpoints
    staging: str = "auto"  # lazy: beside the next step | eager: before it | auto: measured over the first saves
    when_busy: str = "wait"  # wait | skip | newest_wins: what a save does while both slots are in use
    host_memory_gb: Optional[float] = None  # for staging, per rank; default: twice the rank's part of a checkpoint
    rate_limit_mb: float = 0.0  # MB/s that one rank writes at most; 0: no limit
    agent_deadline_s: float = 600.0  # for writing one checkpoint, also after the trainer is gone
    lease_s: float = 5.0  # after this the next rank's agent commits what the one before has not
    keep_every: int = 0  # also keep checkpoints of steps that this divides; 0: none
    keep_best: int = 0  # also keep the best ones by best_metric
    best_metric: Optional[str] = None  # a metric of evaluations, like eval/held_out/accuracy
    best_mode: str = "max"  # max | min
    max_gb: float = 0.0  # all checkpoints together; 0: no limit


@dataclass
class TrainerConfig:
    name: str = "trainer"
    trainer_type: str = "megatron"  # megatron | tinker: a service, docs/tinker.md
    num_ranks: Optional[int] = None  # default: the fewest that the sizes of trainer.megatron need
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    dtype: str = "fp32"  # fp32 | bf16 (bf16 keeps fp32 masters)
    total_steps: Optional[int] = None  # stop after this many steps; default: when the data ends
    stop_at_loss: Optional[float] = None  # stop early, once the mean loss of the last 5 steps is at most this
    grad_clip: float = 1.0
    critic_warmup: int = 0  # steps at the start that train only the critic
    max_skipped_steps: int = 5  # so many in a row whose loss or gradient is not finite end the run; 0: none do
    recompute_granularity: Optional[str] = None  # selective | full: activations computed again in the backward pass
    recompute_method: Optional[str] = None  # full: uniform | block; default: uniform
    recompute_num_layers: Optional[int] = None  # full: of a unit (uniform), of a stage (block); default: 1
    recompute_modules: Optional[list[str]] = None  # selective: core_attn, mlp, layernorm, moe ...; default: core_attn
    use_dynamic_bsz: bool = True  # microbatches of so many tokens; false: of so many rows
    max_token_len_per_gpu: Optional[int] = None  # those tokens, of one rank; default: 2 x max_model_len / cp
    ppo_micro_batch_size_per_gpu: int = 4  # those rows
    use_remove_padding: bool = True  # false: every sequence of a microbatch is padded to its longest
    balance_batch: bool = True  # ranks get rows of equal cost; false: as many each, in order
    save_interval: int = 0  # steps; 0: only at the end
    save_strategy: str = "unrestricted"  # | single_node | single_process | single_thread: who writes at a time
    max_checkpoints_to_keep: int = 2  # 0: all
    save_hf_checkpoint: str = "last"  # last | always | never
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: Optional[str] = None  # torch: a Chrome trace in <job>/profile | nsys: ranges for Nsight Systems
    profile_steps: list[int] = field(default_factory=lambda: [3, 5])  # first and last
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    peak_tflops: Optional[float] = None  # of one device, for perf/mfu; default: known for bf16 on common GPUs
    trainer_config: Optional[dict[str, Any]] = field(default_factory=dict)  # a block of veRL's keys: docs/verl.md
    max_restarts: int = 0  # how often dead ranks are started again
    collective_timeout: float = 1800.0  # seconds


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    lr: float = 1e-5


@dataclass
class CriticConfig:
    optim: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    grad_clip: float = 1.0
    cliprange_value: float = 0.5  # how far a value may move from what it was before the step


@dataclass
class SynchronizerConfig:
    sync_method: Optional[str] = None  # nccl: streams | checkpoint: saves | memory; default: by the mode
    sync_style: str = "fixed"  # fixed | dynamic_by_explorer (alias explorer_driven) | trainer_driven | fully_async
    sync_interval: int = 1  # steps from one published version to the next
    sync_offset: int = 0  # no version is published up to this step, and intervals are counted from it
    max_staleness: Optional[int] = None  # 0: synchronous; n: rollouts may be n versions behind; default: by the style
    sync_timeout: float = 600.0  # seconds for one round
    bucket_bytes: Optional[int] = None  # of one message; default: 16 MiB from memory to memory, 128 MiB between GPUs
    receive: str = "staged"  # beside the decoding, into memory of its own | direct: while engines pause
    kv: str = "recompute"  # dropped when weights change | keep: requests in flight go on over it, nobody else
    probe_interval: int = 25  # published versions from one comparison of log-probabilities to the next; 0: none
    lora_sync: Optional[str] = None  # adapter: engines get the adapter alone | merged; default: adapter where vLLM can


@dataclass
class MonitorConfig:
    monitor_type: str = "tensorboard"  # tensorboard | wandb | mlflow | none; console and metrics.jsonl are always on
    monitor_args: dict[str, Any] = field(default_factory=dict)  # the service's own: docs/observe.md
    num_samples: int = 4  # rollouts written to samples.jsonl per step
    detailed: bool = False  # also histograms: of rewards, lengths, staleness and the engines' log-probabilities
    other_names: bool = False  # metrics also under their names in other systems: docs/observe.md
    trace: bool = True  # the run's timeline, for `rft trace`: what every process does when


@dataclass
class LogConfig:
    level: str = "INFO"
    max_mb: float = 64.0  # of one log file; then it becomes <part>.log.1, and what was that one is gone; 0: no limit
    group_by_node: bool = False  # logs/attempt_<n>/<node>/<part>.log


@dataclass
class Config:
    project: str = "rft"
    name: str = MISSING
    mode: str = "both"  # both | train | explore | bench | serve
    seed: int = 0
    deterministic: bool = False  # repeatable and resumable bit by bit, and slow: see docs/deterministic.md
    device: str = "auto"  # auto | cpu | cuda
    checkpoint_root_dir: str = "runs"
    continue_from_checkpoint: bool = True
    shutdown_grace_s: Optional[float] = None  # for saving and ending, after a signal; default: 20, in a Slurm job 120
    ray_namespace: Optional[str] = None
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)  # of algorithms that need values, like ppo
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    data_processor: DataProcessorConfig = field(default_factory=DataProcessorConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    plugin_dirs: list[str] = field(default_factory=list)  # every *.py there registers parts; default: $RFT_PLUGIN_DIRS
    prepare: Optional[str] = None  # "module:function" called with the config before validation; writes model and data
    finish: Optional[str] = None  # "module:function" called with the list of stage configs after success
    stages: list[Any] = field(default_factory=list)
    every_stage: dict[str, Any] = field(default_factory=dict)  # merged over every stage, by debug=fast
    stage_name: Optional[str] = None  # set by `stage_configs`


TASKSET_KEY = "buffer.explorer_input.taskset"
AUXILIARY_BUFFERS = "buffer.trainer_input.auxiliary_buffers"


# --- composition: from one config with stages to full, filled, checked stage configs --------------------------------


def to_config(raw: DictConfig | dict[str, Any]) -> Config:
    """Typed config objects out of OmegaConf (interpolations resolved); raises ConfigError for wrong keys or types."""
    try:
        return _objects(OmegaConf.merge(OmegaConf.structured(Config), raw))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def _objects(typed: Any) -> Config:
    """`typed`: what a merge over the schema made."""
    try:
        return OmegaConf.to_object(typed)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def explain(error: Exception, inside: str = "") -> str:
    """One line out of an OmegaConf or Hydra exception, with the nearest key when one is unknown. `inside`: the list it is in."""
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    if key and inside.rpartition(".")[2] and not str(key).startswith(inside.split(".")[0]):
        key = f"{inside}.{key}"
    text = " ".join(str(error).split("\n\n")[0].split("full_key:")[0].split())
    if "is not a subclass of ExperienceBufferConfig" in text:
        return f"{AUXILIARY_BUFFERS}: give one in one piece, +...auxiliary_buffers={{{key}: {{path: FILE}}}}"
    if key and isinstance(error, MissingMandatoryValue):
        return f"{key} is not set: give it a value"
    if key and "not in" in text:
        inner = re.sub(r"^stages\[\d+\]\.", "", str(key))
        if inner in known_keys():
            return f"{key}: this stage does not set it: put a + before the override, or set {inner} for all stages"
        return unknown(inner)
    return f"{key}: {text}" if key else text


def unknown(key: str) -> str:
    """What to say of a key that the schema does not have."""
    if (other := trinity_keys.instead(key)) is not None:
        return f"{key} is no key of rft: {other}"
    if inside := _free_part(key):
        return f"{key} is not set yet, and {inside} takes keys of any name: put a + before the override"
    listed = [f"model.lora_configs.{item.name}" for item in fields(LoraConfig)]
    listed += [f"explorer.auxiliary_models.{item.name}" for item in fields(AuxiliaryModelConfig)]
    hint = closest(trinity_keys.canonical(key), [*known_keys(), *listed])
    return f"unknown key `{key}`" + (f"; did you mean `{hint}`?" if hint else "; see docs/configure.md")


def known_keys(node: Any = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the schema; list elements and free dictionaries end where they start."""
    found = []
    for item in fields(node):
        name = f"{prefix}{item.name}"
        found.append(name)
        inner = item.default_factory if callable(item.default_factory) else item.type
        if name == TASKSET_KEY:
            inner = TasksetConfig
        if is_dataclass(inner):
            found += known_keys(inner, name + ".")
    return found


def leaf_keys() -> list[str]:
    """Those that hold a value, a list or a free dictionary, and no section."""
    keys = known_keys()
    sections = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in sections]


def _free_part(key: str) -> str:
    """The dictionary of any keys that `key` is inside of, empty where there is none."""
    schema = Config()
    schema.buffer.explorer_input.taskset = TasksetConfig()
    free = [name for name in leaf_keys() if name != AUXILIARY_BUFFERS and isinstance(get(schema, name), dict)]
    return next((name for name in free if key.startswith(f"{name}.")), "")


def get(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def job_dir(config: Config) -> Path:
    """<checkpoint_root_dir>/<project>/<name>[/<stage_name>], absolute."""
    parts = [config.project, config.name, config.stage_name or ""]
    return Path(config.checkpoint_root_dir).absolute().joinpath(*filter(None, parts))


def checkpoint_root(config: Config) -> str:
    """One place per job: beside its other files, or under that name in an object store."""
    storage = config.trainer.checkpoint.storage
    if not storage:
        return str(job_dir(config) / "checkpoints")
    return "/".join([storage.rstrip("/"), *filter(None, (config.project, config.name, config.stage_name))])


def stage_configs(raw: DictConfig) -> list[Config]:
    """One full config per stage: each stage's keys are merged, key by key, over the global ones, and `every_stage` over
    that. No stages: one config."""
    base = OmegaConf.merge(OmegaConf.structured(Config), raw)
    stages, over = list(base.stages), base.every_stage.copy()
    base.stages, base.every_stage = [], {}
    if strange := next((key for key in ("stages", "every_stage", "stage_name") if key in over), None):
        raise ConfigError(
            f"every_stage.{strange}: a stage has none; give keys of a stage, like every_stage.trainer.total_steps"
        )
    if not stages:
        return [_objects(base)]
    if strange := next((stage for stage in stages if not isinstance(stage, DictConfig) or "stages" in stage), None):
        raise ConfigError(
            f"stages: {strange} is no section of keys, or has stages of its own: give each a stage_name and its keys"
        )
    names = [str(stage.get("stage_name")) for stage in stages]
    if len(set(names)) != len(names) or "None" in names:
        raise ConfigError(f"stages: every stage needs its own stage_name, got {names}")
    try:
        merged = [OmegaConf.merge(base, stage) for stage in stages]
    except OmegaConfBaseException as error:
        raise ConfigError("stages: " + explain(error)) from error
    return [_objects(_over(stage, over)) for stage in merged]


def _over(stage: Any, over: DictConfig) -> Any:
    try:
        return OmegaConf.merge(stage, over)
    except OmegaConfBaseException as error:
        raise ConfigError("every_stage: " + explain(error)) from error


def save(config: Config, path: Path) -> None:
    """Write the resolved config that ranks and actors read; of a secret only the name of the variable that brings it to them."""
    container = redact.passed_on(OmegaConf.to_container(OmegaConf.structured(config), resolve=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(container)), encoding="utf-8")


def load(path: str | Path) -> Config:
    return to_config(OmegaConf.load(path))  # type: ignore[arg-type]
