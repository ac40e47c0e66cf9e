"""Tokens go through the experts that they are told to, in every layout, and so when activations
are computed again.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grids import by_layout, sampled
from replay_jobs import routed
from rows import make_rows
from test_families import EXPERTS as FAMILY_LAYOUTS
from test_families import SMALL
from test_newest_megatron import newest_megatron
from test_parity import EXPERTS, LAYOUTS, assert_gradients_match, gradients, hf_model
from test_recompute import KINDS, assert_equal

from rft.ground.experience import NO_EXPERT
from rft.tools.toy import write_model

from ranks import Ranks

RATE = 0.01
PIPED = ("pp2", "cp2", "tp2", "tp2-pp2", "pp2-vpp2", "tp2-cp2", "cp2-pp2")
CASES = [(cut, layout) for layout in (*EXPERTS, *PIPED) for cut in ("", "shared")]
CASES = [case for case in CASES if not (case[0] and "cp" in LAYOUTS[case[1]][1])]
CASES = [case for case in CASES if LAYOUTS[case[1]][1].get("sp") or "tp" not in LAYOUTS[case[1]][1]]


def run(ranks: Ranks, path: Path, layout: str | None = None, **more: Any) -> list[dict[str, Any]]:
    world, sizes = LAYOUTS[layout] if layout else (1, {})
    return ranks.run("replay_jobs:gradient", world, path=str(path), **sizes, **more)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {cut: run(ranks, checkpoints["moe"], cut=cut or None)[0] for cut in ("", "unrolled")}


def test_it_is_what_transformers_gives_whose_router_is_told_the_same(
    checkpoints: dict[str, Path], alone: dict[str, dict[str, Any]]
) -> None:
    model = hf_model(checkpoints["moe"])
    config, told = model.config, {}
    for number, layer in enumerate(model.model.layers):

        def hook(_module: Any, _given: Any, output: Any, number: int = number) -> Any:
            logits, _, chosen = output
            given = told["routes"][:, number].long()
            chosen = torch.where(given == NO_EXPERT["uint8"], chosen, given)
            weights = torch.softmax(logits.float(), -1).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        layer.mlp.gate.register_forward_hook(hook)
    rows = routed(
        make_rows(24), config.num_hidden_layers, config.num_experts, config.num_experts_per_tok
    )
    for at, row in enumerate(rows):
        nothing = np.full((len(row.tokens), config.num_hidden_layers, 1), 255, dtype=np.uint8)
        told["routes"] = torch.from_numpy(nothing if row.routes is None else row.routes)
        ids = torch.from_numpy(row.tokens)
        with torch.no_grad():
            wanted = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1]
        wanted = wanted.gather(1, ids[1:, None]).squeeze(1).numpy()
        assert np.abs(wanted - alone[""]["scores"][at]).max() < 1e-5


def test_without_routes_the_same_rows_go_elsewhere(
    ranks: Ranks, checkpoints: dict[str, Path], alone: dict[str, dict[str, Any]]
) -> None:
    free = run(ranks, checkpoints["moe"], free=True)[0]
    apart = [np.abs(free["scores"][at] - alone[""]["scores"][at]).max() for at in range(24)]
    assert all((distance == 0) == (at % 7 == 6) for at, distance in enumerate(apart))
    assert "routing/agree_frac" not in free["metrics"][0]
    # of experts that were drawn, the trainer would choose top_k / experts
    assert 0.15 < alone[""]["metrics"][0]["routing/agree_frac"] < 0.35


@pytest.mark.parametrize(
    ("cut", "layout"),
    sampled(
        CASES,
        **by_layout(LAYOUTS, lambda case: {"cut": case[0]}),
        interact=("tp", "pp", "cp", "ep", "vpp", "cut"),
    ),
)
def test_every_layout_routes_as_it_is_told(
    ranks: Ranks, checkpoints: dict[str, Path], alone: dict[str, Any], cut: str, layout: str
) -> None:
    found = run(ranks, checkpoints["moe"], layout, cut=cut or None)
    wanted = alone["unrolled" if cut else ""]
    assert bool(cut) is bool(found[0]["shared"])
    scores = {row: values for one in found for row, values in one["scores"].items()}
    assert scores.keys() == wanted["scores"].keys()
    assert max(np.abs(scores[row] - wanted["scores"][row]).max() for row in scores) < 1e-5
    for name, value in found[0]["metrics"][0].items():
        assert value == pytest.approx(wanted["metrics"][0][name], rel=1e-4, abs=1e-6), name
    assert_gradients_match(gradients(found), gradients([wanted]))


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("pp2", "moe"), ("pp2", "full")]
    + [
        pytest.param(layout, kind, marks=pytest.mark.verify)
        for layout in ("pp2-vpp2-ep2", "tp2-ep2-etp1", "cp2-ep2")
        for kind in ("moe", "full", "block")
    ],
)
def test_what_is_computed_again_is_routed_again(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str, kind: str
) -> None:
    """With several microbatches under way in a pipeline the last that was called is not the one
    that is computed again.
    """
    plain = run(ranks, checkpoints["moe"], layout)
    again = run(ranks, checkpoints["moe"], layout, trainer=KINDS[kind])
    assert plain[0]["micros"] > 2
    assert_equal(gradients(again), gradients(plain))
    assert again[0]["metrics"] == plain[0]["metrics"]


@pytest.mark.parametrize(
    ("layout", "cut", "kind"),
    [(None, "", None), (None, "shared", "full"), ("tp2-ep2-etp1", "shared", None)]
    + [
        pytest.param(layout, cut, kind, marks=pytest.mark.verify)
        for layout, cut, kind in (
            ("pp2-vpp2-ep2", "shared", "moe"),
            ("cp2-ep2", "", "full"),
            ("dp2", "shared", None),
        )
    ],
)
def test_biases_move_towards_equal_load_of_all_rows(
    ranks: Ranks, tmp_path: Path, layout: str | None, cut: str, kind: str | None
) -> None:
    """A token that is computed once for several rows counts in each, one that is computed again or
    only scored does not, and padding never.
    """
    path = write_model(tmp_path / "toy", "glm4_moe", tied=False, **SMALL)
    world, sizes = FAMILY_LAYOUTS[layout] if layout else (1, {})
    given = {"rate": RATE, "trainer": KINDS[kind] if kind else {}, "cut": cut or None}
    found = ranks.run("replay_jobs:biases", world, path=str(path), **given, **sizes)
    load = found[0]["load"].astype(float)
    wanted = RATE * np.sign(load.mean(1, keepdims=True) - load)
    moved = {name: values for one in found for name, values in one["moved"].items()}
    assert len(moved) == len(load) and (wanted > 0).any() and (wanted < 0).any()
    ordered = sorted(moved, key=lambda name: int(name.split(".")[2]))
    np.testing.assert_allclose([moved[name] for name in ordered], wanted, atol=1e-6)
    busiest = (load / load.mean(1, keepdims=True)).max()
    assert found[0]["metrics"]["routing/max_load"] == pytest.approx(busiest)


def test_the_newest_megatron_routes_the_same(
    checkpoints: dict[str, Path], alone: dict[str, dict[str, Any]]
) -> None:
    pool = Ranks(newest_megatron())
    try:
        found = run(pool, checkpoints["moe"], "ep2", trainer=KINDS["moe"])
    finally:
        pool.stop()
    assert_gradients_match(gradients(found), gradients([alone[""]]))
