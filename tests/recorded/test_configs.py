"""Every recipe means what it meant at 8c2d7f2: each key that there was has the value that it had.

Keys may have come since.
"""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import entry
from tests.recorded.make_configs import DATA, RECIPES, UNFINISHED, found

# keys that were composed with a value, and follow from the device and from the GPUs that there are
# (`rft.config.choices`, `rft.run.cards`): in the stages they have the value that they had
LEFT_OPEN = (
    "cluster.colocate",
    "explorer.rollout_model.engine_num",
    "explorer.rollout_model.enforce_eager",
    "explorer.rollout_model.max_num_seqs",
    "explorer.runner_per_model",
    "trainer.dtype",
)
# what these are where they are left out
USUAL = {"format.prompt_key": "prompt", "format.response_key": "response"}
USUAL |= {"format.prompt_type": "messages"}  # of whoever names neither of the two
# defaults that were decided anew, since then: (then, now)
DECIDED = {
    "trainer.max_restarts": (0, 3),  # what dies comes back by itself
    "trainer.total_steps": (0, None),  # without a taskset: as many as there is data for
    # beside a trainer of the run, in a Ray that both may have
    "0.ray_namespace": ("rft/serve", "rft/serve/explorers/explorer"),
}
RECORDED = json.loads(lzma.decompress(DATA.read_bytes()))


@pytest.fixture(autouse=True)
def nothing_of_the_machine(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry.leave_the_machine(monkeypatch, recipes)


@pytest.mark.parametrize("words", [*RECIPES, *UNFINISHED])
def test_a_recipe_means_what_it_meant(recipes: Path, words: str) -> None:
    assert (
        list(differences(RECORDED[words], found(words, recipes, whole=words in RECIPES), "")) == []
    )


def is_meant(key: str, then: Any, now: Any) -> bool:
    """Whether a value may be another."""
    last = ".".join(key.split(".")[-2:])
    is_open = key.removeprefix(".composed.") in LEFT_OPEN or USUAL.get(last) == then
    return DECIDED.get(last) == (then, now) or (now is None and is_open)


def differences(then: Any, now: Any, key: str) -> Iterator[str]:
    """A line for each value that is another, or is gone."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name, value in then.items():
            if name in now:
                yield from differences(value, now[name], f"{key}.{name}")
            else:
                yield f"{key}.{name} is gone"
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for number, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, f"{key}.{number}")
    elif is_meant(key, then, now):
        return
    elif (type(then), then) != (type(now), now):
        yield f"{key} was {then!r} and is {now!r}"
