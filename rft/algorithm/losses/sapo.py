"""Soft adaptive policy optimisation: a smooth gate instead of a clip."""

from typing import TYPE_CHECKING

from rft.algorithm.losses.fields import Fields, limited, versus_engine

if TYPE_CHECKING:
    from torch import Tensor


def sapo(
    logprobs: "Tensor", fields: Fields, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple["Tensor", dict[str, "Tensor"]]:
    """-A f(r), f(r) = sigmoid(tau (r - 1)) 4 / tau, with tau_neg where A <= 0 (arXiv:2511.20347).

    The gradient goes through r: df/dlogprobs = 4 p (1 - p) r with p the sigmoid, which is 1 at r = 1 and vanishes for large r.
    """
    ratio = limited(logprobs - fields.old).exp()
    tau = fields.advantage.new_full((), tau_neg).where(fields.advantage <= 0, fields.advantage.new_full((), tau_pos))
    gate = (tau * (ratio - 1)).sigmoid() * 4 / tau
    return -fields.advantage * gate, {"gate/mean": gate.detach(), **versus_engine(logprobs, fields)}
