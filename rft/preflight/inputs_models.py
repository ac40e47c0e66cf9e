"""Rules that look beyond the config: at models, directories, ports, shared memory and cards.

In: a filled config. Out: what is refused, and the values that only these inputs tell: lengths, how
an adapter is handed on. Nothing is started or imported.
"""

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any

from rft.algorithm import recipe
from rft.buffer.experience_file import is_file
from rft.checkpoint.stager import slot_size
from rft.config import (
    TRAINING,
    AuxiliaryModelConfig,
    Config,
    ConfigError,
    checkpoint_root,
    get,
    is_bitwise,
    is_remote,
    job_dir,
)
from rft.config.layout import (
    HELD,
    check_bias_updates,
    check_layout,
    lora_of,
    stored_bytes,
    sync_of,
)
from rft.ground import host_memory, hubs
from rft.ground.adapters import Lora, adapter_names
from rft.ground.device import socket_family
from rft.ground.errors import all_of, problems_of, unreadable
from rft.ground.families import num_experts, rope_of
from rft.ground.names import Dims, architecture_of, hf_names, is_expert, read_hf_config
from rft.megatron import overrides
from rft.preflight import memory_plan
from rft.preflight.rules import Rule
from rft.preflight.rules_run import AUXILIARY
from rft.preflight.rules_trainer import BUFFER, RECIPE, TYPE
from rft.run import cluster
from rft.sync import plan as plans
from rft.trainer.feed import reads_files

RAY_S = 5.0  # for a Ray that is named to answer
SHARED_MEMORY = "/dev/shm"  # where Ray's object store lies
OF_HERE = "listen_address", "give one of this machine's own, or 0.0.0.0 for all of them"
ROUTES = "explorer.rollout_model.enable_return_routed_experts"
MODEL, SERVICE_TRAINS = "model.model_path", "trainer.trainer_type"
BITWISE_FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BITWISE_ROPES = ("default", "llama3")
BITWISE_HEAD = 16  # vLLM itself has none of fewer than 32 on a CPU
BESIDE_POLICY_WITH = {  # model beside the policy, what needs it, and a key that makes it needed
    "model.ref_model_path": (recipe.needs_reference, "algorithm.kl_loss_fn=k2"),
    "model.critic_model_path": (recipe.needs_critic, "algorithm.algorithm_type=ppo"),
    "model.teacher_model_path": (
        recipe.needs_teacher,
        "algorithm.algorithm_type=on_policy_distill",
    ),
}


# --- the policy -----------------------------------------------------------------------------------


def _hf(c: Config) -> dict[str, Any]:
    return read_hf_config(c.model.model_path)


def _lora(c: Config) -> Lora | None:
    return lora_of(c.model.lora_configs, Dims.of(_hf(c)))


def _absent(path: str) -> str:
    """Weights of a directory. Those of a hub have been seen there, and come when everything is
    checked.
    """
    return "" if hubs.is_snapshot(path) else hubs.absent_weights(Path(path))


def _policy(c: Config) -> Iterator[str]:
    path = c.model.model_path
    read_hf_config(path)
    if not (Path(path) / "tokenizer_config.json").exists():
        yield (
            f"model.model_path={path} has no tokenizer_config.json: copy the tokenizer "
            "files of the model there"
        )
    if not is_remote(c) and (absent := _absent(path)):
        yield f"{MODEL}={path} has no {absent}: give a whole checkpoint, its weights as safetensors"


def _cut(c: Config) -> Iterator[str]:
    """As it is now, and as it will be when nodes are lost."""
    if is_remote(c):
        return
    megatron, ranks = c.trainer.megatron, int(c.trainer.num_ranks or 1)
    yield from problems_of(check_layout, _hf(c), megatron, ranks)
    for number, layout in enumerate(c.trainer.layouts):
        other, others = layout.of(megatron), layout.num_ranks
        if (other, others) != (megatron, ranks):
            for said in problems_of(check_layout, _hf(c), other, others):
                yield f"trainer.layouts[{number}]: {said}"


def _bias_updates(c: Config) -> None:
    if not is_remote(c) and c.trainer.moe_router_bias_update_rate:
        rate = c.trainer.moe_router_bias_update_rate
        check_bias_updates(rate, Dims.of(_hf(c)), bool(c.model.lora_configs))


def _adapter(c: Config) -> Iterator[str]:
    if not is_remote(c) and _lora(c) and c.mode == "bench":
        yield (
            "mode=bench evaluates exported models, and this run exports an adapter: leave "
            "model.lora_configs out"
        )


def _adapter_sync(c: Config) -> None:
    if not is_remote(c):
        sync = c.synchronizer
        sync.lora_sync = sync_of(sync.lora_sync, _lora(c), Dims.of(_hf(c)), c.device)


def _overrides(c: Config) -> Iterator[str]:
    if is_remote(c):
        return
    megatron = c.trainer.megatron
    stages = megatron.pipeline_model_parallel_size * (
        megatron.virtual_pipeline_model_parallel_size or 1
    )
    layers = int(_hf(c)["num_hidden_layers"]) // stages
    yield from problems_of(overrides.check, c.trainer, layers)
    if c.device == "cpu":
        why = "this is device=cpu"
        yield from problems_of(overrides.refuse_transformer_engine, c.trainer, why)


def _routes(c: Config) -> Iterator[str]:
    rollout = c.explorer.rollout_model
    if is_remote(c) or not rollout.enable_return_routed_experts:
        return
    if not num_experts(_hf(c)):
        yield f"{ROUTES}=true: {c.model.model_path} has no experts; leave it out"
    elif c.device == "cuda" and not rollout.enable_prefix_caching:
        yield (
            f"{ROUTES}=true with explorer.rollout_model.enable_prefix_caching=false: on a GPU vLLM "
            "keeps routes with its cache of prefixes only; leave one of them out"
        )


def _engine_cut(c: Config) -> Iterator[str]:
    tp = c.explorer.rollout_model.tensor_parallel_size
    if not is_remote(c) and (problem := plans.obstacle(Dims.of(_hf(c)), tp)):
        yield f"explorer.rollout_model.tensor_parallel_size={tp} {problem}"


def _bitwise(c: Config) -> Iterator[str]:
    """Families whose engine has been given the trainer's own functions."""
    hf = _hf(c)
    family, rope = architecture_of(hf), str(rope_of(hf)["rope_type"])
    if family not in BITWISE_FAMILIES or rope not in BITWISE_ROPES:
        yield (
            f"model.model_path: trainer_engine=bitwise with {family} and rope_type={rope}: only "
            f"{', '.join(BITWISE_FAMILIES)} with {' or '.join(BITWISE_ROPES)} are computed alike "
            "on both sides; use one of them, or trainer_engine=close"
        )
    if (size := Dims.of(hf).head_size) < BITWISE_HEAD:
        yield (
            f"model.model_path: trainer_engine=bitwise with heads of {size} numbers: products of "
            f"fewer than {BITWISE_HEAD} columns add up by how many rows there are; use another "
            "model, or trainer_engine=close"
        )


def _lengths(c: Config) -> Iterator[str]:
    """Rows D5 and D6 of the feature table: what is given wins, the rest follows, nothing exceeds
    the model's context.
    """
    model, context = c.model, int(_hf(c)["max_position_embeddings"])
    prompt, response = model.max_prompt_tokens, model.max_response_tokens
    total = model.max_model_len
    if total is None:
        total = prompt + response if prompt and response else context
    if total > context:
        yield (
            f"model.max_model_len={total} (prompt {prompt} + response {response}) exceeds the "
            f"model's context of {context}: "
            "lower model.max_prompt_tokens or model.max_response_tokens"
        )
        return
    if prompt is None and response is None:
        prompt = total // 2
    prompt = prompt or total - int(response or 0)
    response = response or total - prompt
    if min(prompt, response) < 1 or prompt + response > total:
        yield (
            f"model.max_prompt_tokens={prompt} + model.max_response_tokens={response} must fit "
            f"model.max_model_len={total}, each at least 1"
        )
        return
    if model.min_response_tokens >= response:
        yield (
            f"model.min_response_tokens={model.min_response_tokens} must be below "
            f"max_response_tokens={response}"
        )
    model.max_prompt_tokens, model.max_response_tokens = prompt, response
    model.max_model_len = total


def _packed_length(c: Config) -> None:
    if c.trainer.max_token_len_per_gpu is None:  # row I14
        cp = c.trainer.megatron.context_parallel_size
        c.trainer.max_token_len_per_gpu = ceil(2 * int(c.model.max_model_len or 0) / cp)


def _host_memory(c: Config) -> Iterator[str]:
    """Of a checkpoint: room for the largest tensor."""
    budget, megatron = c.trainer.checkpoint.host_memory_gb, c.trainer.megatron
    if budget is None:
        return
    hf, lora, tp = _hf(c), _lora(c), megatron.tensor_model_parallel_size
    dims, architecture = Dims.of(hf), architecture_of(hf)
    shapes = adapter_names(dims, architecture, lora) if lora else hf_names(dims, architecture)
    etp = megatron.expert_tensor_parallel_size or tp
    sizes = {
        name: 4 * prod(shape) // (1 if len(shape) == 1 else etp if is_expert(name) else tp)
        for name, shape in shapes.items()
    }
    largest = max(sizes, key=lambda name: sizes[name])
    if slot_size(sizes[largest], budget) < sizes[largest]:
        least = ceil(2 * slot_size(sizes[largest], None) / 1e6) / 1e3
        yield (
            f"trainer.checkpoint.host_memory_gb={budget:g} cannot hold {largest} "
            f"({sizes[largest] / 1e9:.3f} GB) in one half: "
            f"set at least {least:.3f}, or leave it out"
        )


LENGTHS = "model.max_model_len model.max_prompt_tokens model.max_response_tokens"
MODELS = (
    Rule(f"{MODEL} {SERVICE_TRAINS}", _policy),
    Rule(f"trainer.megatron {MODEL} trainer.num_ranks trainer.layouts {SERVICE_TRAINS}", _cut),
    Rule(
        f"trainer.moe_router_bias_update_rate model.lora_configs {MODEL} {SERVICE_TRAINS}",
        _bias_updates,
    ),
    Rule(f"model.lora_configs {MODEL} mode {SERVICE_TRAINS}", _adapter),
    Rule(
        f"synchronizer.lora_sync model.lora_configs {MODEL} device {SERVICE_TRAINS}",
        _adapter_sync,
        derives=True,
    ),
    Rule(
        f"trainer.recompute_granularity {MODEL} trainer.megatron device {SERVICE_TRAINS}",
        _overrides,
        reads="trainer.recompute_method trainer.recompute_modules trainer.recompute_num_layers "
        "trainer.dtype",
    ),
    Rule(f"explorer.rollout_model.tensor_parallel_size {MODEL} {SERVICE_TRAINS}", _engine_cut),
    Rule(
        f"{MODEL} trainer_engine mode",
        _bitwise,
        applies=is_bitwise,
    ),
    Rule(
        f"{ROUTES} explorer.rollout_model.enable_prefix_caching {MODEL} device {SERVICE_TRAINS}",
        _routes,
    ),
    Rule(f"{LENGTHS} model.min_response_tokens {MODEL}", _lengths, derives=True),
    Rule(
        "trainer.max_token_len_per_gpu trainer.megatron.context_parallel_size model.max_model_len",
        _packed_length,
        derives=True,
    ),
    Rule(
        f"trainer.checkpoint.host_memory_gb {MODEL} model.lora_configs trainer.megatron",
        _host_memory,
    ),
)

# --- models beside the policy, and other engines --------------------------------------------------


def vocabulary(path: str) -> dict[str, int]:
    """Ids by token, of a model directory's tokenizer.json, added tokens included; empty where there
    is no such file.
    """
    file = Path(path) / "tokenizer.json"
    if not file.exists():
        return {}
    told = json.loads(file.read_text(encoding="utf-8"))
    words = told["model"].get("vocab", {})
    ids = (
        words
        if isinstance(words, dict)
        else {word: number for number, (word, _) in enumerate(words)}
    )
    return ids | {added["content"]: added["id"] for added in told.get("added_tokens", [])}


def _beside(c: Config, key: str) -> Iterator[str]:
    """A model beside the policy is there where it is needed, cut like it, with its tokens and its
    context.
    """
    needs, with_it = BESIDE_POLICY_WITH[key]
    path, is_needed = get(c, key), needs(c.algorithm)
    if path is None:
        if is_needed and "teacher" in key:
            yield (
                f"{key} is not set: algorithm.advantage_fn={c.algorithm.advantage_fn} learns from "
                "a teacher; give the directory of its Hugging Face checkpoint"
            )
        return
    if not is_needed:
        yield f"{key}={path}: nothing here uses that model; leave it out, or set {with_it}"
        return
    if said := unreadable(path):
        yield f"{key}: {said}"
        return
    if absent := _absent(path):
        yield f"{key}={path} has no {absent}: give the directory of a Hugging Face checkpoint"
        return
    try:
        hf = read_hf_config(path)
        check_layout(hf, c.trainer.megatron, int(c.trainer.num_ranks or 1))
    except ConfigError as error:
        raise ConfigError(*(said.replace(MODEL, key) for said in error.problems)) from error
    for name, wanted in (
        ("vocab_size", _hf(c)["vocab_size"]),
        ("max_position_embeddings", c.model.max_model_len),
    ):
        if int(hf[name]) < int(wanted or 0):
            yield f"{key}={path}: its {name} is {hf[name]}, the policy's tokens need {wanted}"
    if "teacher" in key and vocabulary(path) != vocabulary(c.model.model_path):
        yield (
            f"{key}={path}: its tokenizer has another vocabulary than that of model.model_path, so "
            "it cannot judge the policy's tokens; give a teacher of the same family"
        )


def _auxiliary(c: Config) -> Iterator[str]:
    for number, one in enumerate(c.explorer.auxiliary_models):
        key = f"{AUXILIARY}.{number}"
        for said in all_of(_auxiliary_model(key, one)):  # those of any model are of the policy's
            yield said.replace(MODEL, f"{key}.model_path")


def _auxiliary_model(key: str, one: AuxiliaryModelConfig) -> Iterator[str]:
    root = Path(one.model_path)
    hf = read_hf_config(root)
    absent = _absent(one.model_path)
    if not (root / "tokenizer_config.json").exists() or absent:
        yield (
            f"{key}.model_path={one.model_path}: a model directory has tokenizer_config.json "
            f"and {absent or '*.safetensors'}"
        )
    if problem := plans.obstacle(Dims.of(hf), one.tensor_parallel_size):
        yield f"{key}.tensor_parallel_size={one.tensor_parallel_size} {problem}"
    context = int(hf["max_position_embeddings"])
    prompt, response = one.max_prompt_tokens, one.max_response_tokens
    total = prompt + response if prompt and response else context
    one.max_model_len = one.max_model_len or total
    for name, length in (("max_prompt_tokens", prompt), ("max_response_tokens", response)):
        if length and length >= one.max_model_len:
            yield (
                f"{key}.{name}={length} leaves no room in max_model_len={one.max_model_len}: lower "
                "the one or raise the other"
            )
    if one.max_model_len > context:
        yield (
            f"{key}.max_model_len={one.max_model_len} exceeds the model's context of "
            f"{context}: lower it"
        )


BESIDE_POLICY = (
    *(
        Rule(
            f"{key} {RECIPE} {TYPE} {MODEL} {LENGTHS} trainer.megatron trainer.num_ranks",
            partial(_beside, key=key),
            reads="algorithm",
        )
        for key in BESIDE_POLICY_WITH
    ),
    Rule(AUXILIARY, _auxiliary, derives=True),
)

# --- places, ports and cards ----------------------------------------------------------------------


def _directory(c: Config) -> None:
    _try_out(job_dir(c), "checkpoint_root_dir")


def _stored(c: Config) -> None:
    """Where experiences are written, if that is said."""
    buffer = c.buffer.trainer_input.experience_buffer
    if buffer.path and buffer.storage_type != "sql" and c.mode != "bench" and not reads_files(c):
        place = Path(buffer.path)
        _try_out(place.parent if is_file(buffer.path) else place, f"{BUFFER}.path")


def _try_out(directory: Path, key: str) -> None:
    """Nothing is left behind: a config may be refused for other reasons."""
    nearest = directory
    try:
        while not nearest.exists():
            nearest = nearest.parent
        probe = nearest / f".probe-{uuid.uuid4().hex[:12]}"
        probe.write_bytes(os.urandom(16))
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot write to {directory}: {error.strerror}; choose another directory"
        ) from error


def _bind(host: str, port: int) -> None:
    """Raises OSError for a port that cannot be had."""
    with socket.socket(socket_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _master_port(c: Config) -> None:
    try:
        if c.cluster.master_port and c.mode in TRAINING:
            _bind("127.0.0.1", c.cluster.master_port)
    except OSError as error:
        raise ConfigError(
            f"cluster.master_port={c.cluster.master_port} is in use: choose another, or 0 for any"
        ) from error


def _listens(c: Config) -> Iterator[str]:
    """The API is where the explorer is; one of a stage that trains alone is another run's."""
    explorer = c.explorer
    is_here = c.mode != "train" and not c.cluster.ray_address
    if not (is_here and explorer.rollout_model.enable_openai_api):
        return
    for port in sorted({0, explorer.proxy_port}):
        try:
            _bind(explorer.listen_address, port)
        except OSError as error:
            key, fix = ("proxy_port", "choose another, or 0 for any") if port else OF_HERE
            yield f"explorer.{key}={getattr(explorer, key)} cannot be had ({error.strerror}): {fix}"
            return


def _ray(c: Config) -> None:
    address = c.cluster.ray_address
    if address and (why := cluster.silence(address, RAY_S)):
        raise ConfigError(
            f"cluster.ray_address={address}: no Ray answers there ({why}); start one with "
            "`ray start --head`, or leave the key out for a private cluster"
        )


def _token(c: Config) -> Iterator[str]:
    """A private Ray has one."""
    said = "" if c.cluster.ray_address else cluster.token_refused(Path.home(), os.environ)
    yield from filter(None, (said,))


def _objects(c: Config) -> None:
    """Tried out as the first save would: rights, bucket, what the store promises of a put."""
    storage = c.trainer.checkpoint.storage
    if not storage or c.mode not in TRAINING:
        return
    from rft.checkpoint.objects import try_out  # with the driver

    key = f"trainer.checkpoint.storage={storage}"
    try:
        is_conditional = try_out(checkpoint_root(c))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{key}: {error}; make the bucket, or correct its name and AWS_ENDPOINT_URL"
        ) from error
    except PermissionError as error:
        raise ConfigError(
            f"{key}: {error}; the credentials that are found here (AWS_PROFILE, AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, a role) must be allowed to get, put, list and delete below "
            "it"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{key}: {error}; give credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY), the address in AWS_ENDPOINT_URL where it is not AWS, and the "
            "driver: pip install 'rft[s3]'"
        ) from error
    if not is_conditional and c.trainer.checkpoint.unconditional_store == "refuse":
        raise ConfigError(
            f"{key}: the store ignores If-None-Match (a second put under one name was taken), so "
            "nothing keeps two runs apart that write to one place; choose another store, or set "
            "trainer.checkpoint.unconditional_store=accept and see to that yourself"
        )


def _store(c: Config) -> Iterator[str]:
    """Ray would go on without room in shared memory, at a tenth of the speed."""
    needed = stored_bytes(c)
    free = shutil.disk_usage(SHARED_MEMORY).free if needed else 0
    if needed > free and not c.cluster.ray_address:
        yield (
            f"synchronizer.sync_method=memory holds {HELD} versions of the weights, "
            f"{needed / 1e9:.2f} GB, in {SHARED_MEMORY}, "
            f"where {free / 1e9:.2f} GB are free: make it larger, or set "
            "synchronizer.sync_method=nccl"
        )


def _fits(c: Config) -> Iterator[str]:
    """What is sure to be taken: estimates are `rft doctor`'s. Where parts are on several hosts, who
    gets which is not known here.
    """
    if is_remote(c) or c.cluster.node_num != 1 or c.cluster.ray_address:
        return
    parts = memory_plan.on_host(c, memory_plan.plan(c), c.device == "cpu")
    parts = {name: size for name, size in parts.items() if name not in memory_plan.ESTIMATES}
    wanted, there = sum(parts.values()), host_memory.limit()
    if wanted > there:
        yield (
            "trainer.checkpoint.host_memory_gb, explorer.rollout_model.kv_cache_gb: container "
            f"memory below the plan: {wanted / 1e9:.2f} GB wanted ({memory_plan.listed(parts)}), "
            f"{there / 1e9:.2f} GB is the limit: raise it, lower these keys, "
            "explorer.rollout_model.engine_num or trainer.num_ranks, or set "
            "synchronizer.receive=direct"
        )


PLACES = (  # tried at a start only
    Rule("checkpoint_root_dir project name stage_name", _directory),
    Rule(f"{BUFFER}.path {BUFFER}.storage_type mode {SERVICE_TRAINS}", _stored, reads="algorithm"),
    Rule("cluster.master_port mode", _master_port),
    Rule(
        f"explorer.rollout_model.kv_cache_gb {AUXILIARY} {LENGTHS} {MODEL} device mode "
        f"{SERVICE_TRAINS}",
        memory_plan.small_caches,
        reads="explorer.rollout_model",
    ),
    Rule(
        "explorer.proxy_port explorer.listen_address cluster.ray_address mode",
        _listens,
        reads="explorer.rollout_model.enable_openai_api",
    ),
    Rule("cluster.ray_address", _ray, late=True),
    Rule("cluster.ray_address", _token, late=True),
    Rule(
        "trainer.checkpoint.storage trainer.checkpoint.unconditional_store mode project name "
        "stage_name",
        _objects,
        late=True,
    ),
    Rule(
        "trainer.checkpoint.host_memory_gb trainer.checkpoint.memory trainer.num_ranks "
        "trainer.dtype trainer.megatron device mode cluster.node_num cluster.ray_address "
        "cluster.colocate explorer.rollout_model "
        f"synchronizer.sync_method synchronizer.receive model.lora_configs {MODEL} {AUXILIARY} "
        f"{SERVICE_TRAINS} "
        "trainer.max_token_len_per_gpu model.teacher_model_path model.ref_model_path "
        "model.critic_model_path",
        _fits,
        reads="algorithm trainer.recompute_granularity trainer.recompute_method "
        "trainer.recompute_num_layers trainer.ppo_mini_batch_size "
        "buffer.batch_size buffer.train_batch_size model.max_model_len "
        "synchronizer.lora_sync synchronizer.sync synchronizer.bucket_bytes "
        "trainer.checkpoint.versions trainer.checkpoint.replicas trainer.spares",
    ),
)
MEMORY_AND_CARDS = (
    Rule(
        f"synchronizer.sync_method synchronizer.lora_sync model.lora_configs {MODEL} "
        "trainer.dtype cluster.ray_address",
        _store,
    ),
)
