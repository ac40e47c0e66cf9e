"""Where the host waits for the card in a step of a real model's configuration for GPUs, and how
much memory the tiles of the log-probabilities take: `device_trace.py`, in a process of its own,
which imports megatron as it is.

`host_waits.tsv` has every wait that there is, with its number in a step of three microbatches and
two layers. One that is new is refused, and so is one that is there no longer: the list may only
shrink. rft's own are once per step.
"""

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_stand_in import Card, watched

HERE = Path(__file__).parent
ALLOWED = HERE / "host_waits.tsv"
NEWEST = Path(sys.prefix) / "newest-megatron"  # which GPUs have
# in `make test`: the stage that has the loss; the others say the same of more
RUNS = [
    ("llama-3.1-70b", "last", "newest"),
    *(
        pytest.param(*run, marks=pytest.mark.verify)
        for run in (
            ("llama-3.1-70b", "first", "newest"),
            ("llama-3.1-70b", "last", "installed"),
            ("qwen3-235b-a22b", "first", "newest"),
            ("qwen3-235b-a22b", "last", "newest"),
            ("qwen3-235b-a22b", "last", "installed"),
        )
    ),
]
# How often rft itself waits at one place: once in a training step; in a scoring for each
# microbatch's scores, when the pipeline is done with all of them.
OWN = {"train": 1, "score": 3}


@functools.cache
def traced(model: str, stage: str, megatron: str) -> dict[str, Any]:
    paths = (*([NEWEST] if megatron == "newest" else []), HERE.parents[1], HERE, HERE / "te")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, str(HERE / "device_trace.py"), model, stage]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "layers of Transformer Engine" in found["layers"] and "bf16" in found["layers"]
    return found


def allowed(*run: str) -> list[list[Any]]:
    rows = [line.split("\t") for line in ALLOWED.read_text(encoding="utf-8").splitlines()[1:]]
    return [
        [place, what, int(count)]
        for *where, place, what, count, _ in rows
        if all(one in (other, "*") for one, other in zip(where, run, strict=True))
    ]


@pytest.mark.parametrize("part", sorted(OWN))
@pytest.mark.parametrize(("model", "stage", "megatron"), RUNS)
def test_the_host_waits_where_it_is_known_to(
    model: str, stage: str, megatron: str, part: str
) -> None:
    found = traced(model, stage, megatron)[part]
    assert sorted(found) == sorted(allowed(model, stage, megatron, part))
    own = [count for place, _, count in found if place.startswith("rft/")]
    assert all(count <= OWN[part] for count in own)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-3.1-70b", "Llama-3.1-70B"),
        pytest.param("qwen3-235b-a22b", "Qwen3-235B-A22B", marks=pytest.mark.verify),
    ],
)
def test_tiles_of_logits_take_what_is_said_of_them(model: str, name: str) -> None:
    text = (HERE.parents[1] / "docs" / "measured.md").read_text(encoding="utf-8")
    said = re.search(rf"([\d.]+) GiB at (?:the widths|those) of {name}", text)
    assert said
    # not less than the two tiles: then nothing was measured
    assert 2.0 < traced(model, "last", "newest")["tiles"] / 2**30 <= float(said[1])


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool((t > 0).any()),
    "float": lambda t: float(t.max()),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "copy": lambda t: torch.zeros(4).copy_(t),
    "nonzero": lambda t: t.nonzero(),
    "where": lambda t: torch.where(t > 0),
    "mask": lambda t: t[t > 0],
    "put": lambda t: t.index_put((t > 0,), torch.ones(4, device="cuda")),
    "list": lambda t: torch.tensor([t.sum(), 1.0]),
}
PASSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda t: t.sum(),
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "fill": lambda t: t.masked_fill(t > 0, 1.0),
    "rows": lambda t: t[torch.tensor([0, 2]).to("cuda")],
    "mask of the host": lambda t: t[torch.tensor([True, False, True, False])],
    "to the card": lambda t: torch.ones(4).to("cuda", non_blocking=True) + t,
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_seen(name: str) -> None:
    card = Card()
    with watched(card):
        WAITS[name](torch.zeros(4, device="cuda"))
    assert sum(card.waits.values()) == 1


@pytest.mark.parametrize("name", PASSES)
def test_what_does_not_wait_passes(name: str) -> None:
    card = Card()
    with watched(card):
        PASSES[name](torch.zeros(4, device="cuda"))
    assert not card.waits


@pytest.mark.parametrize("name", ["masked_select", "unique"])
def test_what_is_as_long_as_its_content_says_is_refused(name: str) -> None:
    with watched(Card()), pytest.raises(NotImplementedError, match="content"):
        t = torch.zeros(4, device="cuda")
        t.masked_select(t > 0) if name == "masked_select" else t.unique()
