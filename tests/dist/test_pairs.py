"""DPO on every mesh: against autograd through transformers, pair by pair, and against one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from grids import by_layout, sampled
from pairs_jobs import BETA, SMOOTHING, paired
from rows import CUTS
from test_parity import assert_gradients_match, gradients, gradients_in_files, hf_model
from torch.nn.functional import logsigmoid

from ranks import Ranks

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "cp2": (2, {"cp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2-cp2": (4, {"tp": 2, "cp": 2, "sp": True}),
    "dp2-pp2": (4, {"pp": 2}),
}
VARIANTS = [*CUTS, "few"]
FAMILY = "qwen3-untied"


@pytest.fixture(scope="module")
def paths(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A policy, and another model of its vocabulary as the reference."""
    from rft.tools.toy import write_model

    shape = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
    other = write_model(
        tmp_path_factory.mktemp("pairs") / "other", "qwen3", seed=7, tied=True, **shape
    )
    return {"path": str(checkpoints[FAMILY]), "other": str(other)}


@pytest.fixture(scope="module")
def alone(ranks: Ranks, paths: dict[str, str]) -> dict[str, Any]:
    return ranks.run("pairs_jobs:step", 1, **paths, variants=VARIANTS)[0]


def test_the_gradient_is_that_of_autograd_through_every_pair(
    alone: dict[str, Any], paths: dict[str, str]
) -> None:
    model, reference = hf_model(Path(paths["path"])), hf_model(Path(paths["other"]))
    ratios = []
    for row in paired(24):
        ids = torch.from_numpy(row.tokens)
        trained = torch.from_numpy(row.trained[1:])
        with torch.no_grad():
            held = torch.log_softmax(reference(ids[None]).logits[0] / row.temperature, -1)[
                :-1
            ].gather(1, ids[1:, None])
        said = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1].gather(
            1, ids[1:, None]
        )
        ratios.append(((said - held)[:, 0] * trained).sum())
    margins = BETA * (torch.stack(ratios[0::2]) - torch.stack(ratios[1::2]))
    loss = (-(1 - SMOOTHING) * logsigmoid(margins) - SMOOTHING * logsigmoid(-margins)).mean()
    loss.backward()
    metrics = alone["tokens-packed"]["metrics"][0]
    assert alone["tokens-packed"]["micros"] > 2
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["rewards/margin"] == pytest.approx(float(margins.detach().mean()), rel=1e-4)
    assert metrics["rewards/accuracy"] == float((margins > 0).double().mean())
    assert_gradients_match(gradients([alone["tokens-packed"]]), gradients_in_files(model))


@pytest.mark.parametrize(
    ("variant", "layout"),
    sampled(
        [(variant, layout) for layout in LAYOUTS for variant in VARIANTS],
        **by_layout(LAYOUTS, lambda case: {"variant": case[0]}),
    ),
)
def test_no_layout_and_no_cut_changes_it(
    ranks: Ranks, paths: dict[str, str], alone: dict[str, Any], variant: str, layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    results = ranks.run("pairs_jobs:step", world, **paths, variants=[variant], **sizes)
    wanted = alone["few" if variant == "few" else "tokens-packed"]
    found = [result[variant] for result in results]
    assert all(part["metrics"] == found[0]["metrics"] for part in found), (
        "ranks report other metrics"
    )
    for name, value in found[0]["metrics"][0].items():
        assert value == pytest.approx(wanted["metrics"][0][name], rel=1e-4, abs=1e-5), name
    assert_gradients_match(gradients(found), gradients([wanted]))
