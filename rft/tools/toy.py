"""Tiny models and tasks made from nothing: what the quickstart trains and the tests load.

`write_model` makes a Hugging Face model directory (random weights, character tokenizer, chat
template) that transformers, vLLM and rft all read like any downloaded checkpoint.
`write_arithmetic` makes disjoint training and evaluation files of sums. Both are deterministic in
their seed, do nothing when the files are already there, and give them their names when they are
complete.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

CHARACTERS = (
    "0123456789+-*/=?.,:;!()[]{}<>'\"_ \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "glm4_moe": "Glm4MoeConfig",
    "deepseek_v3": "DeepseekV3Config",
    "gpt_oss": "GptOssConfig",
}


def character_tokenizer() -> Any:
    """One token per character; unknown characters become padding.

    Ends every chat message with <|end|>.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        unk_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[2:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_model(
    path: str | Path,
    family: str = "qwen3",
    seed: int = 0,
    hidden: int = 192,
    layers: int = 4,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 512,
    experts: int = 8,
    experts_per_token: int = 2,
    context: int = 256,
    tied: bool = True,
    vocab: int = 0,
    max_shard_size: str = "5GB",
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a random-weight model directory of `family`, a key of ARCHITECTURES, and return its
    path.

    `ffn` is the MLP's width; that of one expert, of which a mixture has `experts`, is ffn /
    experts_per_token. `vocab`: rows of the embedding, 0 for as many as the tokenizer has tokens.
    `more`: fields of config.json.
    """
    path = Path(path)
    if (path / "config.json").exists():
        return path
    import torch
    import transformers

    tokenizer = character_tokenizer()
    fields = {
        "vocab_size": vocab or len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rms_norm_eps": 1e-6,
        "dtype": "float32",
    }
    fields |= _of_family(family, head_dim, ffn, experts, experts_per_token) | (more or {})
    config = getattr(transformers, ARCHITECTURES[family])(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # one that changes what is chosen
                buffer.normal_(std=0.1)
        for name, parameter in model.named_parameters() if family == "gpt_oss" else ():
            if name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=0.5 if name.endswith("sinks") else 0.05)
    transformers.utils.logging.disable_progress_bar()
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    model.save_pretrained(unfinished, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(path)
    return path


def _of_family(
    family: str, head_dim: int, ffn: int, experts: int, experts_per_token: int
) -> dict[str, Any]:
    """What a family's config.json has beside what all have, or in its place."""
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "norm_topk_prob": True,
        "moe_intermediate_size": ffn // experts_per_token,
    }
    sigmoid = {
        "n_routed_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": ffn // experts_per_token,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    }
    latent = {
        "head_dim": 64,  # the rotated part, which vLLM wants of this size on a CPU, as the ranks
        "num_key_value_heads": None,
        "q_lora_rank": head_dim,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": 64,
        "v_head_dim": head_dim,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0}
    return {
        "qwen3_moe": mixture,
        "gpt_oss": {
            "num_local_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "intermediate_size": ffn // experts_per_token,
            "sliding_window": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": yarn | {"original_max_position_embeddings": 64},
        },
        "deepseek_v3": sigmoid | latent,
        "glm4_moe": sigmoid | {"use_qk_norm": True},
        "qwen2_moe": mixture | {"shared_expert_intermediate_size": ffn},
        "mistral": {"sliding_window": None},
        "mixtral": {
            "sliding_window": None,
            "num_local_experts": experts,
            "num_experts_per_tok": experts_per_token,
            "intermediate_size": ffn // experts_per_token,
        },
    }.get(family, {})


def write_arithmetic(
    directory: str | Path, seed: int = 0, digits: int = 2, num_eval: int = 256
) -> tuple[Path, Path]:
    """Write train.jsonl and eval.jsonl of sums {"prompt": "47+38=", "response": "85"}; no pair is
    in both files.
    """
    directory = Path(directory)
    train, evaluation = directory / "train.jsonl", directory / "eval.jsonl"
    if train.exists() and evaluation.exists():
        return train, evaluation
    low, high = 10 ** (digits - 1), 10**digits
    pairs = [(a, b) for a in range(low, high) for b in range(low, high)]
    random.Random(seed).shuffle(pairs)
    directory.mkdir(parents=True, exist_ok=True)
    for file, part in ((evaluation, pairs[:num_eval]), (train, pairs[num_eval:])):
        rows = (json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a, b in part)
        unfinished = file.with_name(f"{file.name}.tmp-{os.getpid()}")
        unfinished.write_text("\n".join(rows) + "\n", encoding="utf-8")
        unfinished.rename(file)
    return train, evaluation
