"""The critic and the reference on every mesh against one rank, one rank against plain torch; and
their checkpoints.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from critic_jobs import PPO, head, rewarded
from grids import by_layout, sampled
from rows import make_rows

from rft.algorithm.token_advantages import gae
from rft.checkpoint.sharding import boxes

from ranks import Ranks

TP2 = {"tp": 2, "sp": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-sp": (2, TP2),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2": (2, {}),
    "tp2-pp2": (4, TP2 | {"pp": 2}),
    "tp2-cp2": (4, TP2 | {"cp": 2}),
    "dp2-pp2": (4, {"pp": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
}
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"ep": 2}),
    "tp2-ep2": (4, TP2 | {"ep": 2}),
}
FAMILY, OTHER = "qwen3", "second"


@pytest.fixture(scope="module")
def paths(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tied policy, and an untied model of one shape with it for critic and reference."""
    from rft.tools.toy import write_model

    root = tmp_path_factory.mktemp("critic")
    shape = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}
    other = write_model(root / "other", "qwen3", seed=7, tied=True, **shape)
    return {"path": str(checkpoints[FAMILY]), "other": str(other)}


@pytest.fixture(scope="module")
def alone(ranks: Ranks, paths: dict[str, str]) -> dict[str, Any]:
    return ranks.run("critic_jobs:step", 1, **paths)[0]


def trunk(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).model


def joined(results: list[dict[str, Any]], name: str, kinds: bool = False) -> dict[str, np.ndarray]:
    """Whole Hugging Face tensors from the pieces of all ranks;
    `kinds`: there are several of each.
    """
    found: dict[str, np.ndarray] = {}
    for claim, values in (piece for result in results for piece in result[name]):
        whole = found.setdefault(
            claim.key if kinds else claim.key.split("/", 1)[1], np.full(claim.global_shape, np.nan)
        )
        for box in boxes(claim):
            cut = tuple(slice(low, low + n) for low, n in zip(box.offset, box.shape, strict=True))
            whole[cut] = values.reshape(-1)[box.start : box.start + whole[cut].size].reshape(
                box.shape
            )
    assert not any(np.isnan(value).any() for value in found.values())
    return found


def scores_of(results: list[dict[str, Any]], name: str) -> dict[int, np.ndarray]:
    """Per row; ranks that hold the same row must say the same, bit by bit."""
    found: dict[int, np.ndarray] = {}
    for row, values in (pair for result in results for pair in result["scores"][name]):
        assert np.array_equal(found.setdefault(row, values), values)
    return found


@pytest.mark.parametrize("family", ["qwen2", "qwen3-untied"])
def test_values_are_the_head_on_the_trunk_of_transformers(
    ranks: Ranks, checkpoints: dict[str, Path], family: str
) -> None:
    (result,) = ranks.run("critic_jobs:values", 1, path=str(checkpoints[family]))
    assert result["new"] == 0.0, "a new critic says 0"
    model, found = trunk(str(checkpoints[family])), dict(result["values"])
    for index, row in enumerate(make_rows(12)):
        with torch.no_grad():
            hidden = model(torch.from_numpy(row.tokens)[None]).last_hidden_state[0]
        wanted = (hidden @ torch.from_numpy(head(hidden.shape[1])).T)[:-1, 0].numpy()
        assert np.abs(found[index] - wanted).max() < 1e-5 and np.abs(wanted).max() > 0.1


def test_gradient_of_the_critic_is_that_of_autograd(
    alone: dict[str, Any], paths: dict[str, str]
) -> None:
    """Through transformers, with the returns that were found: the value loss is (V - R)^2 / 2 as
    long as V has not moved.
    """
    model = trunk(paths["other"])
    weight = torch.from_numpy(head(model.config.hidden_size)).requires_grad_()
    returns = scores_of([alone], "returns")
    loss = torch.zeros(())
    for index, row in enumerate(make_rows(24)):
        values = (model(torch.from_numpy(row.tokens)[None]).last_hidden_state[0] @ weight.T)[:-1, 0]
        misses = (values - torch.from_numpy(returns[index])) ** 2 / 2
        loss = loss + (misses * torch.from_numpy(row.weight[1:])).sum()
    loss.backward()
    wanted = {f"model.{name}": p.grad.numpy() for name, p in model.named_parameters()} | {
        "score.weight": weight.grad.numpy()
    }
    metrics = alone["metrics"][0]
    assert metrics["critic/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(
        np.sqrt(sum((g**2).sum() for g in wanted.values())), rel=1e-5
    )
    assert_close(
        joined([alone], "moments"), {name: value * (1 - 0.9) for name, value in wanted.items()}
    )


def test_returns_follow_from_values_rewards_and_penalty(alone: dict[str, Any]) -> None:
    """Row by row, with nothing packed; and the advantages are white over the whole step."""
    scores = {name: scores_of([alone], name) for name in alone["scores"]}
    everything = []
    for index, row in enumerate(rewarded(24)):
        trained = row.weight[1:] != 0
        old, reference, value = (
            scores[name][index].astype(np.float64) for name in ("proximal", "reference", "value")
        )
        rewards = row.scores["reward"][1:] - 0.1 * (old - reference) * trained
        advantage, returns = gae(
            rewards, value, trained, np.array([0, len(trained)]), **PPO.advantage_fn_args
        )
        assert np.abs(scores["returns"][index] - returns).max() < 1e-5
        everything.append(advantage[trained])
    flat = np.concatenate(everything)
    for index, row in enumerate(rewarded(24)):
        wanted = (everything[index] - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
        assert np.abs(scores["advantage"][index][row.weight[1:] != 0] - wanted).max() < 1e-5


def assert_close(
    found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], apart: float = 1e-4
) -> None:
    assert found.keys() == wanted.keys()
    scale = max(np.linalg.norm(value) for value in wanted.values())
    for name, value in wanted.items():
        error = np.linalg.norm(found[name] - value)
        assert error <= apart * np.linalg.norm(value) + 1e-6 * scale, (
            f"{name}: {error / np.linalg.norm(value)}"
        )


@pytest.mark.parametrize("layout", sampled(LAYOUTS, **by_layout(LAYOUTS)))
def test_a_step_with_a_critic_is_the_same_on_every_mesh(
    ranks: Ranks, paths: dict[str, str], alone: dict[str, Any], layout: str
) -> None:
    world, sizes = LAYOUTS[layout]
    assert_same_step(ranks.run("critic_jobs:step", world, **paths, **sizes), alone)


@pytest.fixture(scope="module")
def several_alone(ranks: Ranks, paths: dict[str, str]) -> dict[str, Any]:
    return ranks.run("critic_jobs:several", 1, **paths)[0]


@pytest.mark.parametrize("layout", sampled(LAYOUTS, **by_layout(LAYOUTS)))
def test_several_updates_of_a_batch_are_the_same_on_every_mesh(
    ranks: Ranks, paths: dict[str, str], several_alone: dict[str, Any], layout: str
) -> None:
    """Two epochs of three mini-batches, in each of which every row is dealt anew."""
    world, sizes = LAYOUTS[layout]
    results = ranks.run("critic_jobs:several", world, **paths, **sizes)
    assert several_alone["metrics"]["updates"] == 6
    assert_same_updates(results, several_alone)


def test_several_updates_over_shared_prefixes_are_those_of_whole_rows(
    ranks: Ranks, paths: dict[str, str]
) -> None:
    """Values, old and reference log-probabilities and entropies of labels that one hidden state
    serves, and microbatches that are put together anew.
    """
    (wanted,) = ranks.run("critic_jobs:several", 1, **paths, rows=None)
    found = ranks.run("critic_jobs:several", 1, **paths, rows=None, share=True)
    assert_same_updates(found, wanted)


def test_values_over_shared_prefixes_are_those_of_whole_rows(
    ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    path = str(checkpoints["qwen3"])
    (alone,) = ranks.run("critic_jobs:values", 1, path=path, rows=None)
    found = ranks.run("critic_jobs:values", 2, path=path, rows=None, share=True, tp=2, sp=True)
    wanted, given = dict(alone["values"]), dict(found[-1]["values"])
    assert given.keys() == wanted.keys()
    assert max(np.abs(given[row] - wanted[row]).max() for row in wanted) < 1e-5


def assert_same_updates(results: list[dict[str, Any]], several_alone: dict[str, Any]) -> None:
    metrics, wanted = results[0]["metrics"], several_alone["metrics"]
    assert all(result["metrics"] == metrics for result in results)
    assert wanted["kl/old_last"] != wanted["kl/old_first"]
    assert {k for k, v in wanted.items() if metrics[k] != pytest.approx(v, rel=1e-3, abs=1e-5)} == (
        set()
    )
    # Adam's steps are as long where a gradient is only rounding: 1.8e-4 apart without AVX-512
    for name in ("policy", "critic"):
        assert_close(joined(results, name), joined([several_alone], name), apart=5e-4)


@pytest.mark.parametrize("layout", sampled(EXPERTS, **by_layout(EXPERTS)))
def test_a_critic_of_experts_is_the_same_on_every_mesh(
    ranks: Ranks, checkpoints: dict[str, Path], layout: str
) -> None:
    world, sizes = EXPERTS[layout]
    path = str(checkpoints["moe"])
    (alone,) = ranks.run("critic_jobs:step", 1, path=path, other=path)
    assert_same_step(ranks.run("critic_jobs:step", world, path=path, other=path, **sizes), alone)


def assert_same_step(results: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert all(result["metrics"] == results[0]["metrics"] for result in results), (
        "ranks report different metrics"
    )
    assert all(result["scored"] == results[0]["scored"] for result in results)
    assert results[0]["scored"] == pytest.approx(alone["scored"], rel=1e-4, abs=1e-5)
    for name in alone["scores"]:
        found, wanted = scores_of(results, name), scores_of([alone], name)
        assert found.keys() == wanted.keys() and len(wanted) == 24
        assert max(np.abs(found[row] - wanted[row]).max() for row in wanted) < (
            1e-4 if name == "advantage" else 1e-5
        )
    assert_close(joined(results, "moments"), joined([alone], "moments"))
    for mine, theirs in zip(results[0]["metrics"], alone["metrics"], strict=True):
        for name in (
            "critic/loss",
            "critic/grad_norm",
            "loss",
            "grad_norm",
            "kl/reference",
            "entropy/mean",
        ):
            assert mine.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-4, abs=1e-6), name
    for name in ("after", "policy"):
        found, wanted = joined(results, name), joined([alone], name)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            # Adam's first steps are lr * sign(gradient): elements whose gradient is noise may go
            # either way, the others not.
            moved = np.abs(found[key] - value) > 1e-5
            assert moved.mean() < 0.02, f"{key}: {moved.mean()} of the elements differ"


def test_the_policy_waits_while_the_critic_warms_up(alone: dict[str, Any]) -> None:
    first, second = alone["metrics"]
    assert not any(values.any() for _, values in alone["untouched"]), "a moment of the policy moved"
    assert any(values.any() for _, values in alone["second"])
    assert first["loss"] == first["critic/loss"] and "clip_frac" not in first
    assert second["loss"] != second["critic/loss"]
    # It is still the policy that scored the batch: measured against that, no ratio is clipped;
    # against the engine some would be.
    assert second["clip_frac"] == 0.0 and abs(second["ratio/mean"] - 1) > 1e-3
    assert alone["micros"] > 2


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen2", None), ("qwen3-untied", "tp2-sp"), ("qwen3", "pp2")]
)
def test_the_reference_says_what_the_first_version_said(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, layout: str | None
) -> None:
    world, sizes = LAYOUTS[layout] if layout else (1, {})
    result = ranks.run("critic_jobs:reference", world, path=str(checkpoints[family]), **sizes)[-1]
    fresh, later, frozen, trained = (
        dict(result[name]) for name in ("fresh", "later", "reference", "trained")
    )
    for index, row in enumerate(make_rows(12)):
        assert np.array_equal(fresh[index], frozen[index])
        assert np.abs(fresh[index] - later[index]).max() > 1e-3
        mask = row.weight[1:] != 0
        assert (
            np.abs(trained[index][mask] - fresh[index][mask]).max() < 1e-5
            and not trained[index][~mask].any()
        )


@pytest.mark.parametrize("layout", ["one", "one-bf16", "tp2-pp2", "dp2", "dp2-cut"])
def test_resume_with_a_critic_is_bitwise(
    ranks: Ranks, paths: dict[str, str], tmp_path: Path, layout: str
) -> None:
    world, sizes = {
        "one": (1, {}),
        "one-bf16": (1, {"dtype": "bf16"}),
        "dp2-cut": (2, {"is_cut": True}),
    }.get(layout) or LAYOUTS[layout]
    for rank, result in enumerate(
        ranks.run("critic_jobs:resumed", world, **paths, root=str(tmp_path), **sizes)
    ):
        found, wanted = result["found"], result["wanted"]
        assert found["metrics"] == wanted["metrics"], f"rank {rank}"
        assert found["pieces"].keys() == wanted["pieces"].keys()
        assert [
            key for key, value in wanted["pieces"].items() if found["pieces"][key] != value
        ] == []
        assert found["small"] == wanted["small"]
    keys = {key for key, *_ in wanted["pieces"]}
    assert {
        "critic.model/score.weight",
        "critic.exp_avg/model.embed_tokens.weight",
    } <= keys or world > 1
    assert not any(key.startswith("critic.") and "lm_head" in key for key in keys)


@pytest.fixture(scope="module")
def saved(
    ranks: Ranks, paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """A checkpoint with a critic, of TP2 x PP2, and one without."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(
        "critic_jobs:write", 4, **paths, root=str(root / "with"), with_critic=True, tp=2, pp=2
    )
    ranks.run("critic_jobs:write", 1, **paths, root=str(root / "without"), with_critic=False)
    return str(root / "with"), str(root / "without")


@pytest.mark.parametrize("layout", ["one", "cp2", "dp2-pp2"])
def test_a_critic_loads_into_another_layout(
    ranks: Ranks, paths: dict[str, str], saved: tuple[str, str], layout: str
) -> None:
    wanted = joined(
        ranks.run("critic_jobs:read", 4, **paths, root=saved[0], tp=2, pp=2), "pieces", kinds=True
    )
    world, sizes = LAYOUTS.get(layout, (1, {}))
    results = ranks.run("critic_jobs:read", world, **paths, root=saved[0], **sizes)
    assert all(result["steps"] == (1, 2) for result in results)
    found = joined(results, "pieces", kinds=True)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], value) for name, value in wanted.items())


def test_a_checkpoint_without_a_critic_is_refused_by_name(
    ranks: Ranks, paths: dict[str, str], saved: tuple[str, str]
) -> None:
    (result,) = ranks.run("critic_jobs:read", 1, **paths, root=saved[1])
    assert "holds no critic" in result["refused"] and "another name" in result["refused"]
    (result,) = ranks.run("critic_jobs:read", 1, **paths, root=saved[0], with_critic=False)
    assert result["steps"] == (1, None), "a critic that nobody asks for is left where it is"
