"""A model and its tokenizer out of a GGUF file, as a Hugging Face directory in fp32.

    python rft/extras/environments/gguf_model.py FILE.gguf DIRECTORY

In: a file of architecture `llama` with a byte-pair tokenizer, quantised or not. Out: config.json,
model.safetensors and the tokenizer's files; the directory gets its name when it is complete.
Invariant: every number is the one that the `gguf` library reads, but the rows of query and key
projections, which llama.cpp stores with the two halves of a rotary pair side by side, are back in
the order that transformers has them. Refused with what can be done: another architecture, another
tokenizer, a tensor that nobody knows.

A script of its own, which imports nothing of rft: it runs by a Python that has `gguf`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL, OWN = 3, 4  # token types of GGUF: special ones, and those that a model added
DIGITS = ("smollm",)  # kinds of tokenizers that split numbers into digits
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Unreadable(ValueError):
    """The message says what is in the file instead."""


def main(source: str, target: str) -> None:
    try:
        write(Path(source), Path(target))
    except Unreadable as error:
        sys.exit(f"{source}: {error}")


def write(source: Path, target: Path) -> None:
    """Does nothing where `target` is there."""
    if target.exists():
        return
    reader = GGUFReader(str(source))
    said = {name: field.contents() for name, field in reader.fields.items()}
    if said["general.architecture"] != "llama":
        raise Unreadable(
            f"its architecture is {said['general.architecture']!r}, and only 'llama' can be read"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as made:
        directory = Path(made) / target.name
        directory.mkdir()
        config = config_of(said)
        tensors = dict(tensor(one, config) for one in reader.tensors)
        config["tie_word_embeddings"] = "lm_head.weight" not in tensors
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        write_json(directory / "config.json", config)
        write_tokenizer(said, directory)
        os.rename(directory, target)


def config_of(said: dict[str, Any]) -> dict[str, Any]:
    """config.json of a Llama."""
    hidden, heads = said["llama.embedding_length"], said["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("llama.attention.head_count_kv", heads),
        "head_dim": said.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": float(np.float32(said["llama.attention.layer_norm_rms_epsilon"])),
        "rope_theta": said.get("llama.rope.freq_base", 10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": said.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "pad_token_id": said.get("tokenizer.ggml.padding_token_id"),
    }


def tensor(stored: Any, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """Name and fp32 values as transformers has them."""
    *block, kind, part = stored.name.split(".")
    if kind not in NAMES or part != "weight" or (block and block[0] != "blk"):
        raise Unreadable(f"it has a tensor {stored.name!r}, which a Llama has not")
    values = dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
    values = values.reshape([int(size) for size in reversed(stored.shape)])
    if kind in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        pairs = values.reshape(heads, -1, 2, values.shape[1])
        values = pairs.swapaxes(1, 2).reshape(values.shape)
    place = f"model.layers.{block[1]}." if block else ""
    return f"{place}{NAMES[kind]}.weight", np.ascontiguousarray(values)


def write_tokenizer(said: dict[str, Any], directory: Path) -> None:
    """tokenizer.json and its config, with the chat template."""
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    split = said.get("tokenizer.ggml.pre")
    if said["tokenizer.ggml.model"] != "gpt2" or split not in DIGITS:
        raise Unreadable(
            f"its tokenizer is of the kind {said['tokenizer.ggml.model']}/{split}, and only "
            f"{', '.join(f'gpt2/{kind}' for kind in DIGITS)} can be read"
        )
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    named = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, OWN)
    ]
    core.add_tokens(named)
    core.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": said["llama.context_length"],
        "chat_template": said["tokenizer.chat_template"],
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (number := said.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            settings[f"{role}_token"] = tokens[number]
    write_json(directory / "tokenizer_config.json", settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
