"""Which of vLLM's arguments `engine_args` takes: every one has a class, and given ones are judged
before anything starts.
"""

import ast
import importlib.util
import json
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft.config import ModelConfig, RolloutModelConfig, to_config
from rft.config.engine_arguments import COMPARED, EVERY, LAYOUT, OWNED, PARSERS, PASSED, PROOF, VLLM
from rft.preflight.rules import Refusals
from rft.preflight.rules_run import ENGINES
from rft.rollout import engine as engines
from rft.rollout.engine import GIB, RolloutEngine, cache_beside_trainer, environment


def fields_of_vllm() -> set[str]:
    """Of AsyncEngineArgs, read in its source: importing vLLM would take ten seconds."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    classes = {
        node.name: node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    return {
        item.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for item in classes[name].body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def test_every_argument_of_the_installed_vllm_is_in_one_class() -> None:
    there = fields_of_vllm()
    assert len(there) > 200
    assert (sorted(there - EVERY), sorted(EVERY - there)) == ([], []), "came, went"
    classes: list[set[str]] = [set(PASSED), set(OWNED), set(LAYOUT), set(COMPARED)]
    assert sum(map(len, classes)) == len(EVERY), "one is in two classes"


@pytest.mark.parametrize(("folder", "key"), [("tool_parsers", "tool"), ("reasoning", "reasoning")])
def test_parsers_are_those_of_the_installed_vllm(folder: str, key: str) -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations is not None
    source = Path(found.submodule_search_locations[0]) / folder / "__init__.py"
    names = {
        word.value
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.Dict) and len(node.keys) > 20
        for word in node.keys
        if isinstance(word, ast.Constant)
    }
    (known,) = [one for word, one in PARSERS.items() if word.startswith(key)]
    assert set(known) == names and len(names) > 30


def test_the_table_says_which_vllm_it_is_of() -> None:
    (distribution,) = set(packages_distributions()["vllm"])
    assert version(distribution).partition("+")[0] == VLLM


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Of a model what an engine's arguments are made of: its sizes."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 512,
        "num_hidden_layers": 4,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def engine(model: Path, kind: str, colocated: bool = False, **rollout: Any) -> RolloutEngine:
    given = {"dtype": "bf16", "max_num_seqs": 256, "enforce_eager": False, **rollout}
    config = RolloutModelConfig(gpu_memory_utilization=0.5, **given)
    return RolloutEngine(
        "engine_0", ModelConfig(model_path=str(model)), config, 1, 0, kind, 64, colocated=colocated
    )


@pytest.mark.parametrize("colocated", [False, True])
def test_what_rft_passes_itself_is_its_own(
    toy: Path, monkeypatch: pytest.MonkeyPatch, colocated: bool
) -> None:
    """But for vLLM's statistics, which it has no use for and no key, and the order of requests,
    which a user may have otherwise.
    """
    monkeypatch.setattr(engines, "card_bytes", lambda: 80 * GIB)
    passed = engine(toy, "cuda", colocated)._arguments()
    assert set(passed) - set(OWNED) == {"disable_log_stats", "scheduling_policy"}
    assert passed["distributed_executor_backend"] == "uni"
    assert (
        engine(toy, "cuda", tensor_parallel_size=2)._arguments()["distributed_executor_backend"]
        == "mp"
    )


def test_every_seed_that_a_run_may_have_is_one_of_numpys(toy: Path) -> None:
    for seed, passed in ((7, 7), (2**32 + 5, 5), (-1, 2**32 - 1)):
        assert engine(toy, "cuda", seed=seed)._arguments()["seed"] == passed


def test_an_engine_beside_a_trainer_does_not_measure_what_is_free(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's start wants `gpu_memory_utilization` of the card free, and takes what the trainer does
    meanwhile for its own; with the cache's size given it measures nothing.
    """
    monkeypatch.setattr(engines, "card_bytes", lambda: 80 * GIB)
    shared, alone = engine(toy, "cuda", True)._arguments(), engine(toy, "cuda")._arguments()
    assert shared["gpu_memory_utilization"] <= 0.01 and shared["enable_sleep_mode"]
    assert 30 * GIB < shared["kv_cache_memory_bytes"] < 40 * GIB, "of the half that is its share"
    assert "kv_cache_memory_bytes" not in alone and alone["gpu_memory_utilization"] == 0.5
    with pytest.raises(ValueError, match="gpu_memory_utilization=0.5 of a card of 16 GiB"):
        cache_beside_trainer(0.5, 16 * GIB, 7 * GIB, GIB)


def test_an_engine_that_sleeps_has_no_expandable_segments() -> None:
    assert not [name for name in environment("cuda", 1, 1, False) if "ALLOC_CONF" in name]


def test_only_an_eager_engine_of_a_cpu_has_no_compiler() -> None:
    eager, compiled = (environment("cpu", 1, 1, is_eager) for is_eager in (True, False))
    assert (eager.pop("TORCH_COMPILE_DISABLE"), compiled.pop("TORCH_COMPILE_DISABLE")) == ("1", "0")
    assert eager == compiled


def refused(**explorer: Any) -> list[str]:
    config = to_config(
        OmegaConf.create({"name": "run", "model": {"model_path": "/m"}, "explorer": explorer})
    )
    refusals = Refusals()
    refusals.ask(ENGINES, config)
    return refusals.sentences()


def test_names_are_judged_all_at_once() -> None:
    key = "explorer.rollout_model.engine_args"
    judge = {
        "name": "judge",
        "model_path": "/judge",
        "engine_args": {"tokenizer": "/other", "block_size": 32},
    }
    given = {
        "max_num_batched_tokens": 8192,
        "async_scheduling": False,
        "quantization": "fp8",
        "max_num_seqs": 4,
        "max_num_batched_token": 1,
        "zzz": 1,
    }
    assert sorted(refused(rollout_model={"engine_args": given}, auxiliary_models=[judge])) == [
        "explorer.auxiliary_models.0.engine_args.tokenizer is refused: trainer and engines read "
        "the same files, those in model.model_path",
        f"{key}.max_num_batched_token is no argument of vLLM 0.32.0's engine; did you mean "
        "`max_num_batched_tokens`?",
        f"{key}.max_num_seqs is refused: set max_num_seqs beside engine_args",
        f"{key}.quantization is refused {PROOF}: quantized values and their scales are made as "
        "weights load; leave it out",
        f"{key}.zzz is no argument of vLLM 0.32.0's engine; leave it out",
    ]
    assert refused(rollout_model={"engine_args": {"block_size": 32}}) == []


def test_a_failure_of_the_engine_names_the_arguments_that_were_given(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself says what a value may be, and dies of it in many ways."""

    class AsyncEngineArgs:
        def __init__(self, block_size: int = 16, **others: Any):
            raise ValueError(f"1 validation error\nblock_size={block_size}")

    for name, part in {
        "vllm.engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=None)},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**part))
    with pytest.raises(
        RuntimeError,
        match=r"engine_0 did not start with engine_args=\{'block_size': 7\}: 1 validation error "
        "block_size=7",
    ):
        engine(toy, "cpu", engine_args={"block_size": 7})._started()
