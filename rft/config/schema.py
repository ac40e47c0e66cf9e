"""The schema: every key that rft understands, with its type, allowed values, bounds, default and
meaning, in one place. Pure data.

A key is one field, `name: Annotated[type, meaning] = default`; the larger sections are in the
modules beside this one. Everything else is made of it: the config that Hydra composes over and what
is said of a value that a key cannot hold (`rft.config.compose`), the tables of docs/configure.md,
the fields of the studio and `rft config --explain` (`rft.config.keys`). What only several keys
together show is refused by `rft.preflight`.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from omegaconf import MISSING

from rft.config.algorithm import AlgorithmConfig, OptimizerConfig
from rft.config.buffer import BufferConfig
from rft.config.data import DataProcessorConfig, ServiceConfig
from rft.config.explorer import ExplorerConfig
from rft.config.values import (
    Bool,
    FiniteNonNegFloat,
    FinitePosFloat,
    Float,
    Int,
    NonNegFloat,
    NonNegInt,
    Parts,
    PosFloat,
    PosInt,
    RunPort,
    Seconds,
    Section,
    Str,
)


@dataclass
class LoraConfig(Section):
    lora_rank: Annotated[Int, "rank of the adapter"] = 32
    lora_alpha: Annotated[Float, "the adapter is scaled by lora_alpha / lora_rank"] = 32.0
    target_modules: Annotated[list[Str], "or q_proj, k_proj ...; experts only by name"] = field(
        default_factory=lambda: ["all-linear"]
    )


@dataclass
class TinkerConfig(Section):
    enable: Annotated[
        Bool, "train and sample at a service that speaks Tinker's API: docs/tinker.md"
    ] = False
    base_model: Annotated[Str | None, "what the service calls the model"] = None
    base_url: Annotated[
        Str | None, "of the service; default: $TINKER_BASE_URL, else Tinker's own"
    ] = None
    rank: Annotated[Int, "of the adapter that is trained"] = 32
    seed: Annotated[Int | None, "of its first weights; default: that of the run"] = None
    train_mlp: Annotated[Bool, "an adapter in the MLP layers"] = True
    train_attn: Annotated[Bool, "the same for attention"] = True
    train_unembed: Annotated[Bool, "the same for the output layer"] = True
    timeout: Annotated[Seconds, "seconds for one answer of the service"] = 1800.0


@dataclass
class ModelConfig(Section):
    model_path: Annotated[
        Str, "directory of a Hugging Face checkpoint, or a hub's org/name, org/name@revision"
    ] = MISSING
    ref_model_path: Annotated[
        Str | None, "what a KL term compares with; default: model_path, as it was at the start"
    ] = None
    teacher_model_path: Annotated[
        Str | None, "of on_policy_distill and jsd: a frozen model with the same vocabulary"
    ] = None
    critic_model_path: Annotated[
        Str | None, "what the critic's trunk begins as; default: model_path"
    ] = None
    custom_chat_template: Annotated[Str | None, "Jinja; default: the tokenizer's own"] = None
    chat_template_path: Annotated[Str | None, "file; wins over custom_chat_template"] = None
    enable_thinking: Annotated[
        Bool | None, "what templates know by this name, if a request does not say; default: nothing"
    ] = None
    max_model_len: Annotated[PosInt | None, "default: max_prompt_tokens + max_response_tokens"] = (
        None
    )
    max_prompt_tokens: Annotated[
        PosInt | None, "of a prompt; default: what max_response_tokens leaves"
    ] = None
    enable_prompt_truncation: Annotated[
        Bool, "a longer one keeps its end; false: it trains nothing, counted"
    ] = False
    max_response_tokens: Annotated[
        PosInt | None, "of a response; default: what max_prompt_tokens leaves"
    ] = None
    min_response_tokens: Annotated[NonNegInt, "a response does not end before it has so many"] = 0
    trust_remote_code: Annotated[Bool, "run code that comes with the model"] = False
    lora_configs: Annotated[list[LoraConfig], "one: train this adapter and nothing else"] = field(
        default_factory=list
    )
    tinker: TinkerConfig = field(default_factory=TinkerConfig)


@dataclass
class CardsConfig(Section):
    """Set by rft: who has which GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""

    ranks: Annotated[list[Str], "set by rft: of trainer ranks, one each"] = field(
        default_factory=list
    )
    engines: Annotated[dict[str, Str], "set by rft: of each engine"] = field(default_factory=dict)
    spare: Annotated[list[Str], "set by rft: of nobody, for `rft engines --add`"] = field(
        default_factory=list
    )


@dataclass
class ClusterConfig(Section):
    node_num: Annotated[PosInt, "machines of the run"] = 1
    gpu_per_node: Annotated[PosInt | None, "default: detected"] = None
    ray_address: Annotated[
        Str | None,
        "host:port or [IPv6]:port of a cluster, or auto: $RAY_ADDRESS; default: a private one here",
    ] = None
    ray_num_cpus: Annotated[
        PosInt | None, "logical CPUs of the private cluster; default: one per actor of the start"
    ] = None
    colocate: Annotated[
        Bool | None,
        "trainer and engines take turns on the same GPUs, or cores; default: with one GPU",
    ] = None
    cards: CardsConfig = field(default_factory=CardsConfig)
    threads_per_rank: Annotated[PosInt, "CPU threads of one trainer rank"] = 1
    threads_per_engine: Annotated[PosInt, "CPU threads of one engine"] = 1
    master_port: Annotated[RunPort, "0: any free port"] = 0
    max_restarts: Annotated[
        NonNegInt,
        "how often within an hour each of buffer, explorer and synchronizer is started again; "
        "0: the run ends with its first death",
    ] = 3


@dataclass
class MegatronConfig(Section):
    tensor_model_parallel_size: Annotated[PosInt, "ranks that share every layer"] = 1
    pipeline_model_parallel_size: Annotated[
        PosInt, "groups of ranks that share the layers among them"
    ] = 1
    context_parallel_size: Annotated[PosInt, "ranks that share every sequence"] = 1
    sequence_parallel: Annotated[
        Bool, "activations between tensor-parallel parts are cut as well"
    ] = False
    virtual_pipeline_model_parallel_size: Annotated[
        PosInt | None, "parts of the model per pipeline stage, interleaved"
    ] = None
    expert_model_parallel_size: Annotated[PosInt, "ranks that share the experts among them"] = 1
    expert_tensor_parallel_size: Annotated[PosInt | None, "default: tensor_model_parallel_size"] = (
        None
    )
    override_transformer_config: Annotated[dict[str, Any], "for megatron's TransformerConfig"] = (
        field(default_factory=dict)
    )
    override_ddp_config: Annotated[dict[str, Any], "for its DistributedDataParallelConfig"] = field(
        default_factory=dict
    )
    override_optimizer_config: Annotated[dict[str, Any], "for its OptimizerConfig"] = field(
        default_factory=dict
    )


@dataclass
class LayoutConfig(Section):
    """Sizes that are left out are those of `trainer.megatron`."""

    num_ranks: Annotated[PosInt, "so many are started, on the nodes that are there"] = 1
    tensor_model_parallel_size: Annotated[PosInt | None, "as in trainer.megatron"] = None
    pipeline_model_parallel_size: Annotated[PosInt | None, "as in trainer.megatron"] = None
    context_parallel_size: Annotated[PosInt | None, "as in trainer.megatron"] = None
    expert_model_parallel_size: Annotated[PosInt | None, "as in trainer.megatron"] = None

    def of(self, megatron: MegatronConfig) -> MegatronConfig:
        """`megatron` with the sizes of this layout."""
        sizes = {name: size for name, size in vars(self).items() if size and name != "num_ranks"}
        return replace(megatron, **sizes)


@dataclass
class CheckpointConfig(Section):
    storage: Annotated[
        Str | None, "URL that fsspec knows, like s3://bucket/prefix; default: <job>/checkpoints"
    ] = None
    unconditional_store: Annotated[
        Literal["refuse", "accept"],
        "one that ignores If-None-Match: refused at the start, or names alone keep saves apart",
    ] = "refuse"
    staging: Annotated[
        Literal["lazy", "eager", "auto"],
        "lazy: beside the next step, eager: before it, auto: measured",
    ] = "auto"
    when_busy: Annotated[
        Literal["wait", "skip", "newest_wins"], "what a save does while both slots are in use"
    ] = "wait"
    memory: Annotated[
        Parts | None,
        "host memory for staging, in parts of a rank; 2: the newest state stays whole in it, less: "
        "what is on disk is written over; default: 2 where that fits, else 1.3",
    ] = None
    host_memory_gb: Annotated[
        FinitePosFloat | None, "the same in GB per rank; default: what memory says"
    ] = None
    rate_limit_mb: Annotated[NonNegFloat, "MB/s that one rank writes at most; 0: no limit"] = 0.0
    agent_deadline_s: Annotated[
        Seconds, "for writing one checkpoint, also after the trainer is gone"
    ] = 600.0
    staging_patience_s: Annotated[
        Seconds, "the longest that training waits for an agent or a disk that does not get on"
    ] = 30.0
    lease_s: Annotated[
        Seconds, "after this the next rank's agent commits what the one before has not"
    ] = 5.0
    keep_every: Annotated[
        NonNegInt, "also keep checkpoints of steps that this divides; 0: none"
    ] = 0
    keep_best: Annotated[NonNegInt, "also keep the best ones by best_metric"] = 0
    best_metric: Annotated[Str | None, "a metric of evaluations, like eval/held_out/accuracy"] = (
        None
    )
    best_mode: Annotated[Literal["max", "min"], "which values of best_metric are the best"] = "max"
    max_gb: Annotated[FiniteNonNegFloat, "all checkpoints together; 0: no limit"] = 0.0
    versions: Annotated[
        Literal["none", "needed", "all"],
        "which published versions are kept; needed: of which data may still be trained",
    ] = "none"
    replicas: Annotated[
        NonNegInt,
        "of every state in memory, on the next node: 0 | 1; needs memory_interval and two nodes",
    ] = 0
    take_over: Annotated[
        Bool,
        "with replicas: half of the nodes, or more, do not answer, and the operator has seen to it "
        "that they are lost: go on without them",
    ] = False


@dataclass
class DriftConfig(Section):
    """Limits of the gates of `rft.trainer.gates`, which has the source of each."""

    token_mult_prob_error: Annotated[
        FinitePosFloat | None,
        "mean of exp |trainer - engine| of tokens of the newest version; default: 1.05, where both "
        "compute in fp32 1.001",
    ] = None
    stale_token_mult_prob_error: Annotated[
        FinitePosFloat, "the same of steps with older tokens, in which the policy has moved too"
    ] = 2.0
    clip_frac: Annotated[FiniteNonNegFloat, "share of tokens that the loss clips"] = 0.3
    routed_otherwise: Annotated[
        FiniteNonNegFloat,
        "share of the engine's experts that the trainer would not choose, on fresh tokens",
    ] = 0.2
    gradient: Annotated[
        FinitePosFloat | None,
        "how far the loss's gradient is from that of REINFORCE, as a share of it, on fresh tokens; "
        "default: 0.5, where both compute in fp32 0.2",
    ] = None
    equal_answers: Annotated[
        FiniteNonNegFloat,
        "share of pairs of equal answers in a group, over what their probabilities and chance say",
    ] = 0.0


@dataclass
class TrainerConfig(Section):
    name: Annotated[Str, "of the trainer in logs and traces"] = "trainer"
    trainer_type: Annotated[
        Literal["megatron", "tinker"], "who trains; tinker: a service, docs/tinker.md"
    ] = "megatron"
    num_ranks: Annotated[
        PosInt | None,
        "default: all GPUs that engines leave; on a CPU the fewest that the layout needs",
    ] = None
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    layouts: Annotated[
        list[LayoutConfig],
        "under torchrun and srun: the first with as many ranks as were started, so that a run goes "
        "on when nodes are lost",
    ] = field(default_factory=list)
    dtype: Annotated[
        Literal["fp32", "bf16", "auto"] | None,
        "of the weights in training; bf16 keeps fp32 masters; default: bf16 on a GPU, fp32 on a "
        "CPU; auto: bf16 on a CPU too, where it multiplies that",
    ] = None
    total_steps: Annotated[
        PosInt | None, "stop after this many steps; default: when the data ends"
    ] = None
    stop_at_loss: Annotated[
        PosFloat | None, "stop early, once the mean loss of the last 5 steps is at most this"
    ] = None
    grad_clip: Annotated[FiniteNonNegFloat, "norm that gradients are cut to; 0: they are not"] = 1.0
    critic_warmup: Annotated[NonNegInt, "steps at the start that train only the critic"] = 0
    on_drift: Annotated[
        Literal["warn", "stop"],
        "a gate is passed (docs/observe.md): warn once, or end the run with a checkpoint",
    ] = "warn"
    drift: DriftConfig = field(default_factory=DriftConfig)
    max_skipped_steps: Annotated[
        NonNegInt, "so many in a row whose loss or gradient is not finite end the run; 0: none do"
    ] = 5
    recompute_granularity: Annotated[
        Str | None, "selective | full: activations computed again in the backward pass"
    ] = None
    recompute_method: Annotated[Str | None, "full: uniform | block; default: uniform"] = None
    recompute_num_layers: Annotated[
        Int | None, "full: of a unit (uniform), of a stage (block); default: 1"
    ] = None
    recompute_modules: Annotated[
        list[Str] | None, "selective: core_attn, mlp, layernorm, moe ...; default: core_attn"
    ] = None
    ppo_epochs: Annotated[PosInt, "how often a batch is trained on: docs/algorithms.md"] = 1
    ppo_mini_batch_size: Annotated[
        PosInt | None, "experiences of one optimizer update, at most; default: the whole batch"
    ] = None
    ppo_shuffle: Annotated[
        Bool, "mini-batches are dealt anew in every epoch; false: they follow the batch's order"
    ] = False
    use_dynamic_bsz: Annotated[Bool, "microbatches of so many tokens; false: of so many rows"] = (
        True
    )
    max_token_len_per_gpu: Annotated[
        PosInt | None, "those tokens, of one rank; default: 2 x max_model_len / cp"
    ] = None
    ppo_micro_batch_size_per_gpu: Annotated[PosInt, "those rows"] = 4
    use_remove_padding: Annotated[
        Bool, "false: every sequence of a microbatch is padded to its longest"
    ] = True
    balance_batch: Annotated[
        Bool, "ranks get rows of equal cost; false: as many each, in order"
    ] = True
    share_prefixes: Annotated[
        Bool,
        "what rows of a group begin with alike (prompts, turns) is computed once: "
        "docs/algorithms.md; false: in every row",
    ] = True
    router_replay: Annotated[
        Bool,
        "tokens go through the experts that the engine has sent them through, where it tells them: "
        "docs/algorithms.md; false: through those that the trainer would choose",
    ] = True
    moe_router_bias_update_rate: Annotated[
        FiniteNonNegFloat,
        "how far an update moves the correction bias of each expert towards equal load, in models "
        "that have one: docs/algorithms.md; 0: not at all",
    ] = 0.0
    save_interval: Annotated[NonNegInt, "steps; 0: by save_minutes, and at the end"] = 0
    save_minutes: Annotated[
        FiniteNonNegFloat,
        "without save_interval, minutes between checkpoints, at a step's end; 0: only at the end. "
        "Off with deterministic=true",
    ] = 10.0
    spares: Annotated[
        Bool,
        "keep for each rank a process that has imported what a rank imports, for ranks that come "
        "back; not under an outer launcher",
    ] = False
    memory_interval: Annotated[
        NonNegInt,
        "steps between states that agents keep in memory alone, for ranks that come back; every "
        "checkpoint is kept there too; 0: none is",
    ] = 0
    save_strategy: Annotated[
        Literal["unrestricted", "single_node", "single_process", "single_thread"],
        "who writes at a time",
    ] = "unrestricted"
    max_checkpoints_to_keep: Annotated[NonNegInt, "0: all"] = 2
    save_hf_checkpoint: Annotated[
        Literal["last", "always", "never"], "which checkpoints are also exported for Hugging Face"
    ] = "last"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resume_from_path: Annotated[
        Str | None, "another run's checkpoint that a new run begins from: docs/checkpoints.md"
    ] = None
    profiler: Annotated[
        Literal["torch", "nsys"] | None,
        "torch: a Chrome trace in <job>/profile, nsys: ranges for Nsight Systems",
    ] = None
    profile_steps: Annotated[list[Int], "first and last"] = field(default_factory=lambda: [3, 5])
    profile_ranks: Annotated[list[Int], "ranks that are profiled"] = field(
        default_factory=lambda: [0]
    )
    peak_tflops: Annotated[
        PosFloat | None, "of one device, for perf/mfu; default: known for bf16 on common GPUs"
    ] = None
    trainer_config: Annotated[dict[str, Any] | None, "a block of veRL's keys: docs/verl.md"] = (
        field(default_factory=dict)
    )
    max_restarts: Annotated[
        NonNegInt,
        "how often within an hour ranks that died, or their launcher, are started again; 0: the "
        "run ends with the first. Under torchrun its own --max-restarts counts",
    ] = 3
    collective_timeout: Annotated[
        Seconds,
        "seconds that a rank waits for the others; a batch, engines that start, or an evaluation "
        "may take longer",
    ] = 1800.0


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    lr: Annotated[FinitePosFloat, "the learning rate after the warm-up"] = 1e-05


@dataclass
class CriticConfig(Section):
    optim: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)
    grad_clip: Annotated[NonNegFloat, "norm that gradients are cut to; 0: they are not"] = 1.0
    cliprange_value: Annotated[
        PosFloat, "how far a value may move from what it was before the step"
    ] = 0.5


@dataclass
class SynchronizerConfig(Section):
    sync_method: Annotated[
        Literal["nccl", "checkpoint", "memory", "online", "offline"] | None,
        "nccl, or online: streams, checkpoint, or offline: saves | memory; default: by the mode",
    ] = None
    sync_style: Annotated[Str, "fixed | dynamic_by_explorer | trainer_driven | fully_async"] = (
        "fixed"
    )
    sync_interval: Annotated[PosInt, "steps from one published version to the next"] = 1
    sync_offset: Annotated[
        NonNegInt, "no version is published up to this step, and intervals are counted from it"
    ] = 0
    max_staleness: Annotated[
        NonNegInt | None,
        "0: synchronous; n: rollouts may be n versions behind; default: by the style",
    ] = None
    sync_timeout: Annotated[Seconds, "seconds for one round"] = 600.0
    bucket_bytes: Annotated[
        PosInt | None,
        "of one message; default: 16 MiB from host memory, 2 to 32 MiB between GPUs",
    ] = None
    receive: Annotated[
        Literal["staged", "direct"],
        "staged: beside the decoding, into memory of its own, direct: while engines pause",
    ] = "staged"
    sync: Annotated[
        Literal["full", "delta"],
        "delta: engines get what has changed since the version that they have, where that is less",
    ] = "full"
    full_interval: Annotated[
        PosInt, "with sync=delta, versions from one that goes in full to the next"
    ] = 20
    kv: Annotated[
        Literal["recompute", "keep"],
        "recompute: dropped when weights change, keep: requests in flight go on over it",
    ] = "recompute"
    probe_interval: Annotated[
        NonNegInt,
        "published versions from one comparison of log-probabilities to the next; 0: none",
    ] = 25
    lora_sync: Annotated[
        Literal["adapter", "merged"] | None,
        "adapter: engines get the adapter alone; default: adapter where vLLM can",
    ] = None


@dataclass
class MonitorConfig(Section):
    monitor_type: Annotated[
        Str, "tensorboard | wandb | mlflow | none: where metrics go; metrics.jsonl is always there"
    ] = "tensorboard"
    monitor_args: Annotated[dict[str, Any], "the service's own: docs/observe.md"] = field(
        default_factory=dict
    )
    num_samples: Annotated[NonNegInt, "rollouts written to samples.jsonl per step"] = 4
    detailed: Annotated[
        Bool, "also histograms: of rewards, lengths, staleness and the engines' log-probabilities"
    ] = False
    other_names: Annotated[
        Bool, "metrics also under their names in other systems: docs/observe.md"
    ] = False
    trace: Annotated[Bool, "the run's timeline, for `rft trace`: what every process does when"] = (
        True
    )


@dataclass
class LogConfig(Section):
    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], "the least that is logged"] = (
        "INFO"
    )
    max_mb: Annotated[
        FiniteNonNegFloat,
        "of one log file; then it becomes <part>.log.1, which is replaced; 0: no limit",
    ] = 64.0
    group_by_node: Annotated[Bool, "logs/attempt_<n>/<node>/<part>.log"] = False


@dataclass
class SweepConfig(Section):
    objective: Annotated[
        Str | None,
        "a metric of metrics.jsonl, of the last stage that has it: eval/held_out/accuracy",
    ] = None
    value: Annotated[Str, "last | best: which of the metric's values is the trial's"] = "last"
    direction: Annotated[Str, "maximize | minimize"] = "maximize"


@dataclass
class Config(Section):
    project: Annotated[Str, "directory of the run: <checkpoint_root_dir>/<project>/<name>"] = "rft"
    name: Annotated[Str, "of the run"] = MISSING
    mode: Annotated[
        Literal["both", "train", "explore", "bench", "serve"],
        "train and explore: one half of both | bench: evaluate exports | serve: answer clients",
    ] = "both"
    seed: Annotated[NonNegInt, "of everything that is random"] = 0
    deterministic: Annotated[
        Bool, "repeatable and resumable bit by bit, and slow: see docs/deterministic.md"
    ] = False
    trainer_engine: Annotated[
        Literal["close", "bitwise"],
        "how alike their log-probabilities are; bitwise: in every bit, with deterministic=true: "
        "docs/deterministic.md",
    ] = "close"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        "what ranks and engines compute on; auto: cuda where there is a GPU, found at the start",
    ] = "auto"
    checkpoint_root_dir: Annotated[Str, "directory of all runs"] = "runs"
    continue_from_checkpoint: Annotated[
        Bool, "go on with the run of this name; false: a new one, with the time in its name"
    ] = True
    shutdown_grace_s: Annotated[
        Seconds | None, "for saving and ending, after a signal; default: 20, in a Slurm job 120"
    ] = None
    ray_namespace: Annotated[
        Str | None,
        "default: <project>/<name>; of explore, serve and bench with /explorers/<name> or /bench",
    ] = None
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    synchronizer: SynchronizerConfig = field(default_factory=SynchronizerConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    data_processor: DataProcessorConfig = field(default_factory=DataProcessorConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    commits: Annotated[
        dict[str, Str], "set by rft: what names of a hub meant when the run began; it keeps to them"
    ] = field(default_factory=dict)
    plugin_dirs: Annotated[
        list[Str], "every *.py there registers parts; default: $RFT_PLUGIN_DIRS"
    ] = field(default_factory=list)
    prepare: Annotated[
        Str | None,
        "module:function called with the config before validation; writes model and data",
    ] = None
    finish: Annotated[
        Str | None, "module:function called with the list of stage configs after success"
    ] = None
    stages: Annotated[
        list[Any],
        "runs one after another: each a stage_name and the keys that it has another value of",
    ] = field(default_factory=list)
    every_stage: Annotated[dict[str, Any], "merged over every stage, by debug=fast"] = field(
        default_factory=dict
    )
    stage_name: Annotated[Str | None, "set for each stage by rft"] = None
