"""The recipes of configs/size: each is accepted on the machine that it is for, with the real
config.json of its model, and fits cards of 80 GB and a host of a terabyte.

What a rank holds follows from the layout: 2 bytes of weights and 4 of gradients for each parameter
on it, 12 of optimizer state (an fp32 copy and Adam's moments) cut over the ranks that hold the same
parameter. Activations: what each layer keeps of a token (`layer_bytes`), or its input where layers
are recomputed, and one layer whole; cut by tensor and sequence parallelism. Logits: tiles of 2^14
columns at most.
"""

import json
import socket
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rft import config as configs
from rft import train
from rft.config import Config
from rft.ground import host_memory
from rft.ground.names import Dims, architecture_of, hf_names, is_expert, read_hf_config
from rft.preflight.memory_plan import plan
from rft.run import cards
from rft.tools.figures import SHAPES

from box import MEMORY_MIB, FakeBox

CARD, HOST = MEMORY_MIB * 2**20, 1e12
SPARE = 0.9  # of a card: NCCL's buffers, the weight stream's, what the allocator cannot use
ENGINE = 6e9  # of vLLM beside weights and cache: graphs, activations
COMMON = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


def dense(hidden: int, ffn: int, heads: int, layers: int, tied: bool) -> dict[str, Any]:
    return COMMON | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }


EXPERTS = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
SIZES = {  # recipe, model, parameters in billions, GPUs of the machine that trains, all GPUs
    "qwen3_0_6b_1gpu": (dense(1024, 3072, 16, 28, True), 0.6, 1, 1),
    "qwen3_8b_8gpu": (dense(4096, 12288, 32, 36, False), 8.2, 8, 8),
    "qwen3_30b_a3b_16gpu": (EXPERTS, 30.5, 8, 16),
}
FAR = {  # trainers of several nodes, of eight GPUs each
    "llama3_70b_64gpu": (SHAPES["meta-llama/Llama-3.1-70B"], 70.55, 8, 64),
    "qwen3_235b_a22b_192gpu": (SHAPES["Qwen/Qwen3-235B-A22B"], 235.1, 8, 192),
}
LARGE = {"llama3_70b_64gpu": 4, "qwen3_235b_a22b_192gpu": 16}


@pytest.fixture
def ray_there() -> Iterator[str]:
    """An address where something listens, as Ray would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, address: str, *more: str
) -> Config:
    """`experiment=grpo size=NAME`, started on that machine."""
    model, _, gpus, total = {**SIZES, **FAR}[name]
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(model), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (directory / "model.safetensors").touch()
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1+1=", "response": "2"}\n' * 64, encoding="utf-8")
    FakeBox(tmp_path / "box", cards=gpus).enter(monkeypatch)
    monkeypatch.setattr(host_memory, "limit", lambda: int(HOST))
    cards.here.cache_clear()
    words = [
        "experiment=grpo",
        f"size={name}",
        f"model.model_path={directory}",
        f"buffer.explorer_input.taskset.path={tasks}",
        f"checkpoint_root_dir={tmp_path}",
        *([f"cluster.ray_address={address}"] if total > gpus else []),
        *more,
    ]
    (config,) = train.prepared_stages(configs.compose(words))
    return config


@pytest.fixture(autouse=True)
def machine_is_looked_at_anew() -> Iterator[None]:
    yield
    cards.here.cache_clear()


def parameters(config: Config) -> list[tuple[int, int, int]]:
    """(number, into how many parts it is cut, ranks that hold the same part) of each tensor."""
    hf = read_hf_config(config.model.model_path)
    megatron, ranks = config.trainer.megatron, int(config.trainer.num_ranks or 0)
    tp, ep = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    etp = megatron.expert_tensor_parallel_size or tp
    found = []
    for name, shape in hf_names(Dims.of(hf), architecture_of(hf)).items():
        cut = etp * ep if is_expert(name) else tp if len(shape) > 1 else 1
        copies = ranks // (etp * ep) if is_expert(name) else ranks // tp
        found.append((prod(shape), cut, copies))
    return found


def layer_bytes(hf: dict[str, Any]) -> int:
    """In bf16: inputs of two norms and what they give; q and k before and after their norms, k's
    values, what attention gives; gate, up and their product, of every expert that is chosen.
    """
    hidden, q, k = hf["hidden_size"], hf["num_attention_heads"] * 128, 128
    k *= hf["num_key_value_heads"]
    chosen = hf.get("num_experts_per_tok", 0)
    wide = hf["moe_intermediate_size"] * chosen if chosen else hf["intermediate_size"]
    normed = 0 if hf["architectures"] == ["LlamaForCausalLM"] else q + k
    return 2 * (4 * hidden + 2 * (q + k) + normed + 3 * wide + 2 * chosen * hidden)


def rank_bytes(config: Config) -> float:
    held = sum(number / cut * (2 + 4 + 12 / copies) for number, cut, copies in parameters(config))
    hf, trainer = read_hf_config(config.model.model_path), config.trainer
    tokens, layers = int(trainer.max_token_len_per_gpu or 0), hf["num_hidden_layers"]
    tp = trainer.megatron.tensor_model_parallel_size
    kept = layers * layer_bytes(hf)
    if trainer.recompute_granularity == "full":
        kept = layers * 2 * hf["hidden_size"] + layer_bytes(hf)
    logits = min(2**14, 2**28 // tokens) * 10 + 24 * hf["hidden_size"]
    return held + tokens * (kept / tp + logits)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_fits_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_there: str, name: str
) -> None:
    config = prepared(tmp_path, monkeypatch, name, ray_there)
    _, billions, gpus, total = SIZES[name]
    rollout, cluster = config.explorer.rollout_model, config.cluster
    numbers = sum(number for number, _, _ in parameters(config))
    assert numbers == pytest.approx(billions * 1e9, rel=0.02)
    ranks = int(config.trainer.num_ranks or 0)
    workers = int(rollout.engine_num or 0) * rollout.tensor_parallel_size
    assert config.device == "cuda" and (ranks if cluster.colocate else ranks + workers) == total
    assert len(cluster.cards.ranks) == ranks <= gpus

    rank, share = rank_bytes(config), float(rollout.gpu_memory_utilization or 0) * CARD
    assert plan(config).rank == pytest.approx(rank, rel=0.02), "what doctor says of it"
    assert rank + (share if cluster.colocate else 0) < SPARE * CARD, f"{rank / 1e9:.1f} GB"
    weights = 2 * numbers / rollout.tensor_parallel_size
    assert share - weights - ENGINE > 0.25 * CARD, "a quarter of a card is cache at least"

    # two slots of a rank's part: its fp32 weights and its moments
    part = sum(number / cut * (4 + 8 / copies) for number, cut, copies in parameters(config))
    staged = min(2 * part, (config.trainer.checkpoint.host_memory_gb or 1e9) * 1e9)
    beside = 0.0 if config.synchronizer.receive == "direct" else weights
    here = ranks * staged + (workers * beside if total == gpus else 0)
    assert here < 0.5 * HOST and workers * beside < 0.5 * HOST, f"{here / 1e9:.0f} GB"
    assert int(config.model.max_model_len or 0) <= int(config.trainer.max_token_len_per_gpu or 0)


def test_a_trainer_of_two_nodes_takes_less_of_each_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_there: str
) -> None:
    """As TRAINER_NODES=2 starts it: every rank looks at its own node."""
    ranks = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    for variable, value in ranks.items():
        monkeypatch.setenv(variable, value)
    words = ["trainer.num_ranks=16", "explorer.rollout_model.engine_num=4"]
    config = prepared(tmp_path, monkeypatch, "qwen3_30b_a3b_16gpu", ray_there, *words)
    assert rank_bytes(config) < 0.65 * CARD and len(config.cluster.cards.ranks) == 8


@pytest.mark.parametrize(("name", "nodes"), [*LARGE.items()])
def test_a_trainer_of_many_nodes_fits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_there: str, name: str, nodes: int
) -> None:
    """As the recipe's own first lines start it: every rank looks at its own node."""
    world = {"RANK": "0", "WORLD_SIZE": str(8 * nodes), "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    for variable, value in world.items():
        monkeypatch.setenv(variable, value)
    config = prepared(tmp_path, monkeypatch, name, ray_there)
    _, billions, gpus, total = {**SIZES, **FAR}[name]
    rollout, ranks = config.explorer.rollout_model, int(config.trainer.num_ranks or 0)
    workers = int(rollout.engine_num or 0) * rollout.tensor_parallel_size
    assert ranks == 8 * nodes and ranks + workers == total and len(config.cluster.cards.ranks) == 8
    wanted = plan(config)
    assert wanted.parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert wanted.rank < SPARE * CARD, f"{wanted.rank / 1e9:.1f} GB"
    share = float(rollout.gpu_memory_utilization or 0) * CARD
    assert share - wanted.engine_weights - ENGINE > 0.05 * CARD
    assert gpus * wanted.staging < 0.5 * HOST and gpus * wanted.received < 0.5 * HOST
