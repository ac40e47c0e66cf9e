"""What rft makes of Transformer Engine's layers, over a stand-in that has their names, parameters
and marks (`te/`): the model that transformers has, adapters too, on several ranks.

Here is what `make test` has time for; test_te_full.py has the tests of rft's own layers.
"""

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from te_record import RECORD, differences, record
from test_families import SMALL, TOYS
from test_lora import ATTENTION, GATHERS, LORA, assert_formula, on_experts
from test_newest_megatron import newest_megatron
from test_parity import (
    LAYOUTS,
    assert_gradient_of_transformers,
    assert_gradients_match,
    gradients,
)

from rft.tools.toy import write_model

from ranks import Ranks

WHEEL = "transformer-engine==2.20.2"
VERIFY = pytest.mark.verify


def test_the_stand_in_has_the_recorded_parameters() -> None:
    assert differences() == []


@VERIFY
def test_the_record_is_of_its_wheel_and_of_both_megatrons(tmp_path: Path) -> None:
    fetch = ["pip", "download", "-q", "--no-deps", "-d", str(tmp_path), WHEEL]
    subprocess.run([sys.executable, "-m", *fetch], check=True)
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path)
    oldest = Path(str(distribution("megatron-core").locate_file("megatron/core")))
    found = record(tmp_path, [oldest, newest_megatron() / "megatron" / "core"])
    assert found == RECORD.read_text(encoding="utf-8")


def test_its_layers_are_used(ranks: Ranks, checkpoints: dict[str, Path]) -> None:
    (told,) = ranks.run("te_jobs:layers", 1, path=str(checkpoints["moe"]), lora=ATTENTION)
    assert told["describe"].count("layers of Transformer Engine 2.20.2")
    assert {
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
        "TEDotProductAttention",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
        "LoraColumn",
        "LoraRow",
    } <= told["classes"]
    assert not {"PackedAttention", "RowParallelLinear"} & told["classes"]


@pytest.mark.parametrize(("family", "layout"), [("moe", "tp2-ep2-etp1"), ("qwen2", "cp2")])
def test_gradient_is_that_of_transformers(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, layout: str
) -> None:
    """Names, marks of tensor and sequence parallelism, packed attention over two ranks with padding
    at the end, tokens exchanged between experts, gradients that go past autograd.
    """
    world, sizes = LAYOUTS[layout]
    results = ranks.run("jobs:train", world, path=str(checkpoints[family]), **sizes)
    assert_gradient_of_transformers(results, checkpoints[family])


@VERIFY
@pytest.mark.parametrize("toy", ["mixtral", "qwen2-moe-mixed", "glm4-moe", "deepseek"])
def test_gradients_of_other_families_are_those_of_transformers(
    ranks: Ranks, tmp_path: Path, toy: str
) -> None:
    """What the stand-in has: neither a window nor sinks."""
    path = write_model(tmp_path / toy, tied=False, **(SMALL | TOYS[toy][0]))
    world, sizes = LAYOUTS["tp2-ep2-etp1"]
    results = ranks.run("jobs:train", world, path=str(path), **sizes)
    assert_gradient_of_transformers(results, path)


def test_a_microbatch_of_padding_alone_is_a_sequence_over_all_context_ranks(
    ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    """One row for two data-parallel indices: the other has none."""
    path = str(checkpoints["qwen2"])
    wanted = ranks.run("jobs:train", 1, path=path, rows=1)
    found = ranks.run("jobs:train", 4, path=path, rows=1, cp=2)
    assert_gradients_match(gradients(found), gradients(wanted))


@pytest.mark.parametrize(("family", "layout"), [("moe", "tp2-ep2-etp1")])
def test_rows_that_share_prefixes_have_the_gradient_of_whole_rows(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, layout: str
) -> None:
    """Queries are the last of longer keys, and positions go on behind a prefix."""
    world, sizes = LAYOUTS[layout]
    path = str(checkpoints[family])
    (wanted,) = ranks.run("jobs:matrix", 1, path=path, variants=["unrolled"])
    found = ranks.run("jobs:matrix", world, path=path, variants=["shared"], **sizes)
    assert_gradients_match(
        gradients([one["shared"] for one in found]), gradients([wanted["unrolled"]])
    )


def test_virtual_stages_do_not_mix_their_messages(
    ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    world, sizes = LAYOUTS["pp2-vpp2"]
    results = ranks.run("jobs:train", world, path=str(checkpoints["qwen2"]), **sizes)
    assert_gradient_of_transformers(results, checkpoints["qwen2"])


@pytest.mark.parametrize(
    ("family", "lora"), [("qwen3", LORA), pytest.param("moe", ATTENTION, marks=VERIFY)]
)
def test_an_adapter_beside_its_layers_is_the_formula(
    ranks: Ranks, checkpoints: dict[str, Path], family: str, lora: dict[str, Any]
) -> None:
    path = checkpoints[family]
    results = ranks.run("lora_jobs:tuned", 2, path=str(path), lora=lora, tp=2, sp=True)
    assert_formula(results, path, lora)


@pytest.mark.verify
def test_adapters_of_all_experts_beside_one_grouped_layer_are_the_formula(
    ranks: Ranks, checkpoints: dict[str, Path]
) -> None:
    """Also where experts are spread and each is cut, and their gradient is that of one rank."""
    path = checkpoints["moe"]
    given: dict[str, Any] = {"path": str(path), "lora": on_experts(path)}
    (wanted,) = ranks.run("lora_jobs:pushed", 1, **given)
    assert_formula([wanted], path, given["lora"])
    world, sizes = LAYOUTS["tp2-ep2"]
    found = ranks.run("lora_jobs:pushed", world, **given, **sizes, megatron=GATHERS)
    assert_gradients_match(gradients(found), gradients([wanted]), limit=2e-5)
    norms = [one["metrics"][0]["grad_norm"] for one in (found[0], wanted)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
