"""Rotary positions: `rope_parameters` of a config.json -> inverse frequencies, and what stands in
for megatron's rotary embedding.

In: the Hugging Face config. Out: angles per position as transformers computes them. Invariant: a
microbatch's angles are computed once and serve all layers.
"""

import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rft.ground.families import rope_of, rotated_share
from rft.ground.names import Dims
from rft.megatron.attention import Packing


class Rotary(nn.Module):
    """Stands in for megatron's rotary embedding: angles of exactly the tokens of a microbatch, by
    their positions.

    megatron's own walks over the packed sequences in Python, twice per layer. GPTModel calls the
    two methods below in this order and passes what the first returns to the second; latent
    attention does so by itself, and wants what yarn multiplies cosines and sines by, if it is yarn.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config, self.is_latent = config, config.multi_latent_attention

    def get_rotary_seq_len(
        self, _context: Any, _decoder: Any, _input: Any, _config: Any, packing: Packing
    ) -> Packing:
        return packing

    def forward(self, packing: Packing, **_: Any) -> Tensor | tuple[Tensor, float]:
        angles = packing.frequencies
        assert angles is not None
        if not self.is_latent:
            return angles
        angles = angles.squeeze(1)  # tokens have no dimension of 1 there
        if self.config.rope_type == "rope":
            return angles
        return angles, _yarn_get_concentration_factor_from_config(self.config)


def scale_yarn(config: TransformerConfig, hf: dict[str, Any]) -> None:
    """Let megatron multiply cosines and sines as yarn does: it looks whether its config has these
    fields.
    """
    rope = rope_of(hf)
    if rope["rope_type"] == "yarn":
        own = {"mscale": rope.get("mscale"), "mscale_all_dim": rope.get("mscale_all_dim")}
        fields = own if all(own.values()) else dict.fromkeys(own)
        for name, value in (fields | {"rotary_scaling_factor": float(rope["factor"])}).items():
            setattr(config, f"yarn_{name}", value)


def inverse_frequencies(hf: dict[str, Any]) -> Tensor:
    """Rotary inverse frequencies [d/2] of the `rope_parameters`, as transformers computes them, d
    numbers of a head being rotated.
    """
    rope, dims = rope_of(hf), Dims.of(hf)
    size = dims.latent.rope or int(dims.head_size * rotated_share(hf))
    inverse = 1.0 / (
        float(rope["rope_theta"]) ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    )
    if rope["rope_type"] == "linear":
        return inverse / float(rope["factor"])
    if rope["rope_type"] == "llama3":
        return _llama3(inverse, rope)
    if rope["rope_type"] == "yarn":
        return _yarn(inverse, rope)
    return inverse


def _yarn(inverse: Tensor, rope: dict[str, Any]) -> Tensor:
    """Angles that turn often within the original context are kept, those that turn seldom divided
    by `factor`, between the two goes a ramp over the dimensions (Peng et al. 2023,
    arXiv:2309.00071).
    """
    size, context = 2 * len(inverse), float(rope["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        wavelength = context / (turns * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(float(rope["rope_theta"])))

    low = dimension(float(rope.get("beta_fast") or 32))
    high = dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    steps = torch.arange(len(inverse), dtype=torch.float32)
    kept = 1 - ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return inverse / float(rope["factor"]) * (1 - kept) + inverse * kept


def _llama3(inverse: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    stretched = torch.where(wavelength > context / low, inverse / factor, inverse)
    is_between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(is_between, between, stretched)
