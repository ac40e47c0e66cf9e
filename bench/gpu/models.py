"""Models of published shapes with random weights, written in bf16 and file by file, so that no hub
is asked and no memory holds a whole one.

In: a name of `SHAPES`, a kind of device that makes the numbers. Out: a directory that transformers,
vLLM and rft read, with the toy tokenizer: its ids are the first of the vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rft.ground.names import Dims, architecture_of, hf_names, read_hf_config
from rft.tools.toy import ARCHITECTURES, character_tokenizer

FILE_BYTES = 4 * 2**30
SPREAD = 0.02
CONTEXT = 4096


def shape(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int = 151936,
) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
    }


def experts(count: int, per_token: int, ffn: int) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": ffn,
        "norm_topk_prob": True,
    }


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "toy": ("qwen3", shape(64, 2, 2, 2, 32, 128, 256) | {"tie_word_embeddings": True}),
    "toy_experts": ("qwen3_moe", shape(64, 2, 2, 2, 32, 128, 256) | experts(8, 2, 64)),
    "qwen3_0_6b": ("qwen3", shape(1024, 28, 16, 8, 128, 3072) | {"tie_word_embeddings": True}),
    "qwen3_8b": ("qwen3", shape(4096, 36, 32, 8, 128, 12288)),
    # 16 of the 48 layers of Qwen3-30B-A3B: a whole one is trained on two nodes
    "qwen3_30b_a3b_third": ("qwen3_moe", shape(2048, 16, 32, 4, 128, 6144) | experts(128, 8, 768)),
}


def write(path: Path, name: str, kind: str) -> Path:
    import transformers

    family, sizes = SHAPES[name]
    tokenizer = character_tokenizer()
    config = getattr(transformers, ARCHITECTURES[family])(
        architectures=[ARCHITECTURES[family].replace("Config", "ForCausalLM")],
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rms_norm_eps=1e-6,
        dtype="bfloat16",
        **({"tie_word_embeddings": False} | sizes),
    )
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    hf = read_hf_config(path)
    made = torch.Generator(kind).manual_seed(0)
    files: dict[str, str] = {}
    part: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        file = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(part, path / file, {"format": "pt"})
        files.update(dict.fromkeys(part, file))
        part.clear()

    for tensor, extent in hf_names(Dims.of(hf), architecture_of(hf)).items():
        if tensor.endswith("norm.weight"):
            part[tensor] = torch.ones(extent, dtype=torch.bfloat16)
        else:
            values = torch.empty(extent, dtype=torch.bfloat16, device=kind)
            part[tensor] = values.normal_(0, SPREAD, generator=made).cpu()
        size += part[tensor].nbytes
        if size >= FILE_BYTES:
            flush()
            size = 0
    if part:
        flush()
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path
