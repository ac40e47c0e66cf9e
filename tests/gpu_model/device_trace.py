"""One scoring and one training step of a real model's configuration, as a GPU's process would make
them, traced.

    python tests/gpu_model/device_trace.py MODEL STAGE

In: the name of a model below, and "first" or "last" stage. Two layers per stage at the model's own
widths, in bf16, over tensor, pipeline, context and expert parallel ranks of which this process is
one. Out: a line of JSON: who waited for the card, how often, and how much memory the tiles of the
log-probabilities took. `tests/gpu_model/te` must be on the path.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import kernel_shapes
import numpy as np
from device_stand_in import Card, plain_generators, standing_in

LAYERS = 2  # per stage
WORLD, TP, PP, CP = 64, 8, 2, 2
TOKENS = 8192  # of a microbatch, over both context-parallel ranks
MICROBATCHES = 3
MANY = 32768  # tokens whose log-probabilities are measured
COMMON = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "num_hidden_layers": LAYERS * PP}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "qwen3-235b-a22b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def rows(count: int, length: int) -> list[Any]:
    from rft.data.packing import Row

    trained = np.zeros(length, dtype=np.float32)
    trained[length // 2 :] = 1
    fields = dict.fromkeys(("behaviour", "advantage", "weight"), trained)
    return [Row(tokens=np.ones(length, dtype=np.int64), trained=trained, **fields)] * count


def trace(model: str, stage: str) -> dict[str, Any]:
    hf = COMMON | MODELS[model]
    routed = TOKENS // CP // TP * hf.get("num_experts_per_tok", 0)
    card = Card(routed)
    rank = 0 if stage == "first" else WORLD // PP
    with tempfile.TemporaryDirectory() as path, standing_in(card, rank, WORLD):
        (Path(path) / "config.json").write_text(json.dumps(hf), encoding="utf-8")
        policy = policy_of(path, 8 if "num_experts" in hf else 1)
        return step(policy, card)


def policy_of(path: str, ep: int) -> Any:
    kernel_shapes.put_in_place()
    from megatron.core.tensor_parallel import random

    from rft.config import MegatronConfig, ModelConfig, OptimizerConfig, TrainerConfig
    from rft.ground.device import Device
    from rft.megatron import policy, weights
    from rft.megatron.mesh import Mesh

    plain_generators(random)
    weights.load_hf = lambda *args: None
    policy._seed = lambda seed: random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    Mesh._join = lambda self: None  # it has been
    # nothing comes through fake groups: every rank says what this one does
    Mesh.gather = lambda self, item: [item] * self.world if self.rank == 0 else None
    sizes = MegatronConfig(TP, PP, CP, True, None, ep, 1 if ep > 1 else None)
    mesh = Mesh(sizes, Device("cuda", 0, "fake", 1, True))
    trainer = TrainerConfig(megatron=sizes, dtype="bf16", grad_clip=1.0)
    return policy.Policy(ModelConfig(model_path=path), trainer, OptimizerConfig(), mesh, 0, 10)


def step(policy: Any, card: Card) -> dict[str, Any]:
    from rft.algorithm.losses import token_loss
    from rft.data.packing import pack

    mesh = policy.mesh
    part = pack(rows(4 * MICROBATCHES * mesh.dp, TOKENS // 4), mesh.dp, TOKENS, policy.multiple)[0]
    assert len(part) == MICROBATCHES
    card.waits.clear()
    policy.score(part)
    scored = counted(card)
    policy.train_step(part, token_loss("ppo", {}), lambda: None)
    trained = counted(card)
    tiles = memory_of_tiles(policy, card) if mesh.is_last_stage else 0
    return {"layers": policy.describe(), "score": scored, "train": trained, "tiles": tiles}


def counted(card: Card) -> list[list[Any]]:
    found = [[*wait, count] for wait, count in sorted(card.waits.items())]
    card.waits.clear()
    return found


def memory_of_tiles(policy: Any, card: Card) -> int:
    """Bytes that log-probabilities and their gradients take at most, beside what they are given and
    give: of so many tokens, all of them trained.
    """
    import torch

    from rft.megatron.logprobs import _LabelLogprobs
    from rft.megatron.model import output_weight

    weight = output_weight(policy.model[-1]).detach().requires_grad_()
    hidden = torch.empty(MANY, weight.shape[1], dtype=weight.dtype, device="cuda")
    labels = torch.empty(MANY, dtype=torch.int64, device="cuda")
    warm = torch.ones(MANY, dtype=torch.float32, device="cuda")
    given = (hidden.requires_grad_(), weight, labels, warm, len(weight), policy.mesh.tp_group)
    with card.metered() as peak:
        torch.stack(_LabelLogprobs.apply(*given)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return peak[0] - hidden.grad.nbytes - weight.grad.nbytes


if __name__ == "__main__":
    print(json.dumps(trace(*sys.argv[1:])))
