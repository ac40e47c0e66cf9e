"""Log-probabilities and entropies in tiles against their closed form
over whole logits, with every gradient.
"""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from grids import sampled
from logprobs_jobs import HIDDEN, ROWS, TOKENS, problem
from rows import make_rows

from rft.algorithm.fields import Fields
from rft.algorithm.losses import token_loss
from rft.megatron.totals import Totals

from ranks import Ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "sp": True},
}
TILES = {"one column": 1, "five columns": 5 * TOKENS, "all columns": 2**20}
VOCABULARIES = {"padded": 37, "a shard of padding": 20}


def closed_form(dtype: str, kept: str, vocab: int, rounded: str = "") -> dict[str, np.ndarray]:
    """Whole logits, plain autograd, only the trained tokens and the true vocabulary.

    `rounded`: what h and W pass through.
    """
    given = problem(dtype, kept)
    if rounded:
        given |= {
            name: given[name].to(getattr(torch, rounded)).to(given[name])
            for name in ("hidden", "weight")
        }
    hidden, weight, trained = (
        given["hidden"].requires_grad_(),
        given["weight"].requires_grad_(),
        given["trained"],
    )
    z = hidden[trained] @ weight[:vocab].t() / given["temperature"][trained, None]
    logp = torch.log_softmax(z, -1)
    found = logp.gather(1, given["labels"][trained, None]).squeeze(1)
    entropy = -(logp.exp() * logp).sum(1)
    (given["of_logprob"][trained] * found + given["of_entropy"][trained] * entropy).sum().backward()
    whole = {name: np.zeros(TOKENS) for name in ("logprobs", "entropy")}
    whole["logprobs"][trained.numpy()] = found.detach().numpy()
    whole["entropy"][trained.numpy()] = entropy.detach().numpy()
    return whole | {"hidden": hidden.grad.numpy(), "weight": weight.grad.numpy()}


def assert_equal(
    results: list[dict[str, Any]], wanted: dict[str, np.ndarray], sp: bool, error: float
) -> None:
    for result in results:
        for name in ("logprobs", "entropy"):
            np.testing.assert_allclose(
                result[name], wanted[name], rtol=error, atol=error, err_msg=name
            )
    copies = (
        [np.concatenate([result["hidden"] for result in results])]
        if sp
        else [r["hidden"] for r in results]
    )
    for found in copies:
        np.testing.assert_allclose(found, wanted["hidden"], rtol=error, atol=error)
    found = np.concatenate([result["weight"] for result in results])
    np.testing.assert_allclose(found, wanted["weight"], rtol=error, atol=error)


@pytest.mark.parametrize(
    ("layout", "tile", "padding"),
    sampled(
        product(LAYOUTS, TILES, VOCABULARIES),
        axes=lambda case: dict(enumerate(case)),
        interact=range(3),
    ),
)
def test_tiles_give_the_closed_form_in_double(
    ranks: Ranks, layout: str, tile: str, padding: str
) -> None:
    sizes, vocab = LAYOUTS[layout], VOCABULARIES[padding]
    for kept in ("all", "some"):
        results = ranks.run(
            "logprobs_jobs:label_logprobs",
            sizes.get("tp", 1),
            dtype="float64",
            kept=kept,
            vocab=vocab,
            tile=TILES[tile],
            **sizes,
        )
        assert_equal(results, closed_form("float64", kept, vocab), "sp" in sizes, 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_give_the_closed_form_in_single(ranks: Ranks, layout: str) -> None:
    """Also without a mask, as scoring calls it."""
    sizes = LAYOUTS[layout]
    for mask in (True, False):
        results = ranks.run(
            "logprobs_jobs:label_logprobs",
            sizes.get("tp", 1),
            dtype="float32",
            kept="all",
            vocab=37,
            tile=5 * TOKENS,
            mask=mask,
            **sizes,
        )
        assert results[0]["logprobs"].dtype == np.float32
        assert_equal(results, closed_form("float32", "all", 37), "sp" in sizes, 2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_trained_gives_zeros_everywhere(ranks: Ranks, layout: str) -> None:
    """Every gradient is there, so that pipeline and data-parallel peers get what they wait for."""
    sizes = LAYOUTS[layout]
    for result in ranks.run(
        "logprobs_jobs:label_logprobs",
        sizes.get("tp", 1),
        dtype="float32",
        kept="none",
        vocab=37,
        tile=70,
        **sizes,
    ):
        assert all(not result[name].any() for name in ("logprobs", "entropy", "hidden", "weight"))


def test_bf16_agrees_up_to_its_rounding(ranks: Ranks) -> None:
    wanted = closed_form("float64", "all", 37, rounded="bfloat16")
    result = ranks.run("logprobs_jobs:bf16", 1, vocab=37, tile=5 * TOKENS)[0]
    for name, value in wanted.items():
        error = np.linalg.norm(result[name] - value) / np.linalg.norm(value)
        assert error <= 3e-2, f"{name}: {error}"


def test_no_tensor_is_as_large_as_the_logits(ranks: Ranks) -> None:
    result = ranks.run(
        "logprobs_jobs:label_logprobs", 1, dtype="float32", kept="all", vocab=ROWS, tile=3 * TOKENS
    )[0]
    assert result["widest"] <= TOKENS * HIDDEN < TOKENS * ROWS


@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 2, "sp": True}, {"pp": 2}], ids=["alone", "tp2-sp", "pp2"]
)
def test_no_step_makes_all_logits(
    ranks: Ranks, checkpoints: dict[str, Path], sizes: dict[str, Any]
) -> None:
    world = sizes.get("tp", 1) * sizes.get("pp", 1)
    for family in ("qwen2", "qwen3-untied"):
        results = ranks.run(
            "logprobs_jobs:widest_of_a_step",
            world,
            path=str(checkpoints[family]),
            tile=700,
            **sizes,
        )
        assert results[-1]
        for seen in results:
            assert not seen or 0 < seen["elements"] <= 700 < seen["tokens"] * seen["width"] / 2


def test_tiles_ask_a_device_for_no_value(ranks: Ranks) -> None:
    assert ranks.run("logprobs_jobs:nowhere", 1, vocab=37) == ["meta"]


def test_entropy_of_a_step_is_that_of_transformers(
    ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    """The mean over the trained tokens, at each row's temperature."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints["qwen2"], dtype=torch.float32
    )
    found: list[float] = []
    for row in make_rows(12):
        ids = torch.from_numpy(row.tokens)
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1]
        found += (-(logp.exp() * logp).sum(-1))[torch.from_numpy(row.weight[1:] != 0)].tolist()
    metrics = ranks.run("jobs:train", 1, path=str(checkpoints["qwen2"]), rows=12)[0]["metrics"][0]
    assert metrics["entropy/mean"] == pytest.approx(np.mean(found), rel=1e-5)


def test_entropy_is_counted_where_tokens_are_trained() -> None:
    totals = Totals(token_loss("sft", {}), counts=True)
    weight = torch.tensor([1.0, 0.0, 1.0])
    for entropy in ([1.0, 50.0, 3.0], [5.0, 50.0, 7.0]):
        totals.add(
            torch.zeros(3),
            Fields(weight, weight, weight, weight > 0, entropy=torch.tensor(entropy)),
        )
    mesh: Any = SimpleNamespace(reduce=lambda sums, maxima: None)
    assert totals.reduce(mesh)["entropy/mean"] == 4.0


COMPARED: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-cp2": (4, {"tp": 2, "cp": 2, "sp": True}),
    "pp2-dp2": (4, {"pp": 2}),
}


@pytest.mark.parametrize("layout", COMPARED)
def test_an_engine_is_compared_in_every_layout(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str
) -> None:
    """One log-probability of 1,152 that is off by a little more than the bar ends every rank."""
    world, sizes = COMPARED[layout]
    arguments = {"path": str(checkpoints["qwen3"]), **sizes}
    assert ranks.run("logprobs_jobs:compared", world, off=0.0, **arguments) == [""] * world
    (sentence, *others) = ranks.run("logprobs_jobs:compared", world, off=2e-3, **arguments)
    assert others == [sentence] * (world - 1)
    assert "differ from the trainer's by 2.0e-03 at most" in sentence
    assert "1 of them by more than 1.0e-03" in sentence


@pytest.mark.parametrize("tp", [1, 2])
def test_a_policy_whose_kernel_is_wrong_does_not_begin(ranks: Ranks, tp: int) -> None:
    assert ranks.run("logprobs_jobs:checked", tp, wrong=False, tp=tp) == [""] * tp
    for said in ranks.run("logprobs_jobs:checked", tp, wrong=True, tp=tp):
        assert "log-probabilities are off by" in said and "before anything was trained" in said
