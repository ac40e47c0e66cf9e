"""What the device decides where a config leaves it open, and what the start of a run says of it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft.config import Config, choices, to_config
from rft.config.choices import explained, fill_choices, start_lines
from rft.ground.device import quickest_dtype

ENGINE = "explorer.rollout_model"


def filled(**overrides: Any) -> Config:
    words = {
        "name": "run",
        "model.model_path": "/m",
        "model.max_model_len": 4096,
        "trainer.dtype": "bf16",
        "algorithm.repeat_times": 8,
        "synchronizer.max_staleness": 1,
        "buffer.batch_size": 64,
        "explorer.auxiliary_models": [{"name": "judge", "model_path": "/j"}],
        **overrides,
    }
    config = to_config(OmegaConf.from_dotlist([f"{k}={v}" for k, v in words.items()]))
    fill_choices(config)
    return config


def values(config: Config) -> dict[str, Any]:
    return {one.key.removeprefix("explorer."): one.value for one in explained(config)}


def test_on_a_cpu_everything_is_as_it_was() -> None:
    engine = {"dtype": "bf16", "enforce_eager": True, "max_num_seqs": 256}
    config = filled(device="cpu")
    expected = {
        f"{model}.{key}": value
        for model in ("rollout_model", "auxiliary_models.0")
        for key, value in engine.items()
    }
    found = values(config)
    assert {key: found[key] for key in expected} == expected
    assert found["runner_per_model"] == 8


@pytest.mark.parametrize(("flags", "dtype"), [("avx2 fma", "fp32"), ("avx2 avx512_bf16", "bf16")])
def test_a_cpu_is_asked_for_bf16_where_it_multiplies_that(
    flags: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n", encoding="utf-8")
    here = partial(quickest_dtype, cpuinfo=tmp_path / "cpuinfo")
    assert (here("cpu"), here("cuda")) == (dtype, "bf16")
    monkeypatch.setattr(choices, "quickest_dtype", here)
    left = filled(device="cpu", **{"trainer.dtype": "auto"})
    assert (left.trainer.dtype, left.explorer.rollout_model.dtype) == (dtype, dtype)
    assert filled(device="cuda", **{"trainer.dtype": "auto"}).trainer.dtype == "bf16"
    assert start_lines(left) == []
    said = " ".join(start_lines(filled(device="cpu")))
    assert ("trainer.dtype, explorer.rollout_model.dtype" in said) == (dtype == "fp32")
    assert start_lines(filled(device="cpu", **{"trainer.dtype": "fp32"})) == []


@pytest.mark.parametrize(
    ("overrides", "sequences", "runners"),
    [
        ({}, 1024, 128),  # 2 x 64 groups of 8 are 1024 sequences
        ({f"{ENGINE}.engine_num": 2}, 512, 64),
        ({"buffer.batch_size": 4}, 256, 8),  # more groups than that are never admitted
        ({"buffer.batch_size": 4096}, 1024, 128),
        ({"algorithm.repeat_times": 3, "buffer.batch_size": 60}, 360, 120),
        ({"mode": "serve"}, 256, 32),
        ({f"{ENGINE}.max_num_seqs": 64}, 64, 8),  # as it was given
        ({"explorer.runner_per_model": 5}, 1024, 5),
    ],
)
def test_runners_fill_an_engine_on_a_gpu(
    overrides: dict[str, Any], sequences: int, runners: int
) -> None:
    explorer = filled(device="cuda", **overrides).explorer
    assert (explorer.rollout_model.max_num_seqs, explorer.runner_per_model) == (sequences, runners)
    assert explorer.auxiliary_models[0].max_num_seqs == 256
    assert explorer.rollout_model.enforce_eager is False
    assert explorer.auxiliary_models[0].enforce_eager is False


def test_what_was_given_stays_and_is_told_apart() -> None:
    config = filled(device="cuda", **{f"{ENGINE}.enforce_eager": True, f"{ENGINE}.dtype": "fp32"})
    told = {one.key: (one.value, one.why) for one in explained(config)}
    assert told[f"{ENGINE}.enforce_eager"] == (True, "set; the default here is False")
    assert told[f"{ENGINE}.dtype"][0] == "fp32"
    assert told["explorer.auxiliary_models.0.enforce_eager"][1].startswith("CUDA graphs")


def test_the_start_says_each_key_once_and_what_recomputing_costs() -> None:
    config = filled(device="cuda")
    *rows, cost = start_lines(config)
    assert [row.split("=")[0].strip() for row in rows] == [one.key for one in explained(config)]
    assert "1024 x 4096 = 4,194,304 tokens" in cost and "kv=keep" in cost
    for silent in ({"synchronizer.kv": "keep"}, {"synchronizer.max_staleness": 0}):
        assert "recompute" not in "".join(start_lines(filled(device="cuda", **silent)))
    for mode, part in (("train", "trainer."), ("bench", "explorer.")):
        rows = start_lines(filled(device="cuda", mode=mode))
        assert rows and all(row.strip().startswith(part) for row in rows)
