"""docs/algorithms.md: its examples work when they are added as it
says, and its table is the one in the code.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm import ALGORITHMS, Algorithm, credit, recipe
from rft.algorithm.advantages import ADVANTAGES, Advantage
from rft.algorithm.fields import Fields
from rft.algorithm.losses import LOSSES
from rft.config import AlgorithmConfig, ConfigError
from rft.ground.experience import Experience
from rft.preflight.fill import fill_algorithm

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def example(name: str) -> Any:
    """The function of a block whose first line names the file that it goes into."""
    block = re.search(
        rf"```python\n# rft/algorithm/(\w+)\.py\n(def {name}\(.*?)```", PAGE, re.DOTALL
    )
    assert block is not None
    space = dict(vars(import_module(f"rft.algorithm.{block[1]}")))
    exec(compile(block[2], f"{name}.py", "exec"), space)
    return space[name]


def test_an_advantage_is_one_function_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGES, "median", Advantage(example("median")))
    entry = re.search(r'`"median": (Algorithm\(.*?\))`', PAGE)
    assert entry is not None
    monkeypatch.setitem(ALGORITHMS, "median", eval(entry[1], {"Algorithm": Algorithm}))
    algorithm = fill_algorithm(
        AlgorithmConfig(algorithm_type="median", advantage_fn_args={"scale": 2.0})
    )
    recipe.check(algorithm)
    rewards = [0.0, 1.0, 5.0]
    given = [
        Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], group=0, reward=r)
        for r in rewards
    ]
    judged = credit.judge(given, algorithm.advantage_fn, algorithm.advantage_fn_args)
    assert judged.advantages.tolist() == [-2.0, 0.0, 8.0]
    algorithm.advantage_fn_args = {"scael": 2.0}
    with pytest.raises(ConfigError, match="advantage_fn_args.scael is unknown; known: scale"):
        recipe.check(algorithm)


def test_a_loss_is_one_function_and_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "hinge", example("hinge"))
    algorithm = fill_algorithm(
        AlgorithmConfig(policy_loss_fn="hinge", policy_loss_fn_args={"margin": 0.5})
    )
    recipe.check(algorithm)
    ones = torch.ones(2)
    fields = Fields(torch.tensor([0.0, -1.0]), ones, ones, ones > 0)
    losses, metrics = recipe.policy_loss(algorithm)(torch.tensor([0.1, 0.0]), fields)
    assert (
        losses.tolist() == pytest.approx([1 - np.exp(0.1), -0.5], abs=1e-6)
        and "kl/mismatch" in metrics
    )


def test_the_table_is_that_of_the_code() -> None:
    found = {}
    for line in re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE, re.MULTILINE):
        cells = [cell.strip(" `") for cell in line[1].split("|")]
        found[line[0]] = (
            cells[0].split("`")[0],
            cells[1].split("`")[0],
            int(cells[2].split()[0]),
            cells[3],
            cells[4],
        )
    wanted = {
        name: (
            kind.advantage_fn,
            kind.policy_loss_fn,
            kind.repeat_times,
            kind.kl_loss_fn,
            kind.loss_agg_mode,
        )
        for name, kind in ALGORITHMS.items()
        if kind.source == "rollouts" and name in found
    }
    assert found == wanted and len(found) == 19
