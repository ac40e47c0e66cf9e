"""What the rank processes do with rows that say which experts each token went through."""

from dataclasses import replace
from typing import Any

import numpy as np
from jobs import mesh_of, part_of, pieces_of, policy_on
from rows import SHARED, make_group_rows, make_rows

from rft.algorithm.losses import token_loss
from rft.data.packing import Row
from rft.ground.experience import NO_EXPERT
from rft.megatron.policy import Policy

assert mesh_of


def routed(rows: list[Row], layers: int, experts: int, top_k: int, seed: int = 1) -> list[Row]:
    """Each with experts drawn anew, so hardly any are those that the model would choose. Equal
    tokens of a group have equal routes, but in every third row from its fifth token on; the last
    token of a row has none, nor has any of every seventh row.
    """
    found = []
    for at, row in enumerate(rows):
        rng = np.random.default_rng([seed, row.group + 1] if row.group >= 0 else [seed, 99, at])
        given = _drawn(rng, len(row.tokens), layers, experts, top_k)
        if at % 3 == 0:
            own = np.random.default_rng([seed, 77, at])
            given[5:] = _drawn(own, len(row.tokens), layers, experts, top_k)[5:]
        given[-1:] = NO_EXPERT["uint8"]
        found.append(replace(row, routes=None if at % 7 == 6 else given))
    return found


def _drawn(
    rng: np.random.Generator, tokens: int, layers: int, experts: int, top_k: int
) -> np.ndarray:
    scores = rng.random((tokens, layers, experts))
    return scores.argsort(-1)[..., :top_k].astype(np.uint8)


def routing(policy: Policy) -> tuple[int, int, int]:
    """Layers with experts, experts, and how many a token takes."""
    dims, top_k = policy.dims, int(policy.hf_config["num_experts_per_tok"])
    layers = sum(dims.has_experts(layer) for layer in range(dims.layers))
    return layers, dims.experts, top_k


def rows_for(policy: Policy, shared: bool) -> list[Row]:
    return routed(make_group_rows() if shared else make_rows(24), *routing(policy))


def gradient(path: str, cut: str | None = None, free: bool = False, **layout: Any) -> Any:
    """Log-probabilities by row, the first gradient, and metrics. `cut`: of `SHARED`. `free`: the
    same rows without routes.
    """
    with policy_on(path, **layout) as policy:
        rows = rows_for(policy, cut is not None)
        if free:
            rows = [replace(row, routes=None) for row in rows]
        given = {} if cut is None else {"cut": SHARED[cut]}
        part = part_of(policy, rows, **given)
        scores = {}
        for packed, values in zip(part, policy.score(part), strict=True):
            bounds = packed.cu_seqlens.tolist()
            for row, start, stop in zip(packed.rows, bounds, bounds[1:], strict=False):
                if len(values):
                    scores[int(row)] = values[start : stop - 1]
        metrics = policy.train_step(part, token_loss("ppo", {}), lambda: None)
        return {
            "scores": scores,
            "metrics": [metrics],
            "moments": pieces_of(policy, "exp_avg/"),
            "micros": len(part),
            "shared": sum(int(packed.shared.sum()) for packed in part),
        }


def biases(
    path: str, rate: float, trainer: dict[str, Any], cut: str | None = None, **layout: Any
) -> Any:
    """How far a step moves the correction biases that this rank has, by their names, its metrics,
    and what the rows say themselves of every expert's load, [layers, experts].
    """
    trainer = {"moe_router_bias_update_rate": rate} | trainer
    with policy_on(path, trainer=trainer, **layout) as policy:
        rows = [everywhere(row, *routing(policy)) for row in rows_for(policy, cut is not None)]
        before = biases_of(policy)
        given = {} if cut is None else {"cut": SHARED[cut]}
        part = part_of(policy, rows, **given)
        policy.score(part)  # of which nothing is counted
        metrics = policy.train_step(part, token_loss("ppo", {}), lambda: None)
        moved = {name: now - before[name] for name, now in biases_of(policy).items()}
        return {"moved": moved, "metrics": metrics, "load": load_of(rows, policy.dims.experts)}


def everywhere(row: Row, layers: int, experts: int, top_k: int) -> Row:
    """Every token has a route."""
    rng = np.random.default_rng(len(row.tokens))
    drawn = _drawn(rng, len(row.tokens), layers, experts, top_k)
    if row.routes is None:
        return replace(row, routes=drawn)
    nothing = row.routes == NO_EXPERT["uint8"]
    return replace(row, routes=np.where(nothing, drawn, row.routes))


def biases_of(policy: Policy) -> dict[str, np.ndarray]:
    return {
        piece.key: piece.tensor.numpy().copy()
        for piece in policy.snapshot().pieces
        if piece.key.startswith("model/") and piece.key.endswith("e_score_correction_bias")
    }


def load_of(rows: list[Row], experts: int) -> np.ndarray:
    routes = np.concatenate([row.routes for row in rows if row.routes is not None])
    layers = range(routes.shape[1])
    return np.stack([np.bincount(routes[:, n].ravel(), minlength=experts) for n in layers])
