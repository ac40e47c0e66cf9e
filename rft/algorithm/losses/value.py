"""The critic's loss."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value(
    values: "Tensor", fields: Fields, cliprange_value: float = 0.5
) -> tuple["Tensor", dict[str, "Tensor"]]:
    """max((V - R)^2, (clip(V, V_old +- range) - R)^2) / 2: a value moves by at most the range per step."""
    assert fields.value is not None and fields.returns is not None
    bounded = values.clamp(fields.value - cliprange_value, fields.value + cliprange_value)
    plain, clipped = (values - fields.returns) ** 2, (bounded - fields.returns) ** 2
    return plain.maximum(clipped) / 2, {"clip_frac": (clipped > plain).float()}
