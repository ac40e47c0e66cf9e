"""Which fields of megatron's dataclasses pass, and what is said of the others."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rft.config import ConfigError, MegatronConfig, TrainerConfig
from rft.megatron import kernels, overrides
from rft.megatron.overrides import DDP, OPTIMIZER, PASSED, TRANSFORMER


def trainer(
    section: str = TRANSFORMER, given: dict[str, Any] | None = None, **keys: Any
) -> TrainerConfig:
    return TrainerConfig(megatron=MegatronConfig(**{section: given or {}}), **keys)


def test_flags_and_recompute_become_fields_of_megatron() -> None:
    fp8 = {"fp8": "hybrid", "fp8_recipe": "blockwise"}
    config = trainer(given=fp8, dtype="bf16", recompute_granularity="full")
    overrides.check(config, 4)
    uniform = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    assert overrides.transformer(config) == uniform | fp8
    assert overrides.optimizer(config) == {"fp8_recipe": "blockwise"}
    config = trainer(
        DDP,
        {"overlap_grad_reduce": True, "grad_reduce_in_fp32": True},
        recompute_granularity="selective",
    )
    overrides.check(config, 4)
    assert overrides.ddp(config) == {"overlap_grad_reduce": True, "grad_reduce_in_fp32": True}
    assert overrides.transformer(config) == {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    }
    assert (
        overrides.transformer(TrainerConfig())
        == overrides.ddp(TrainerConfig())
        == overrides.optimizer(TrainerConfig())
        == {}
    )


def test_every_flag_that_passes_is_one_of_megatron() -> None:
    """Of the version that is installed; a later one may have lost some, which is then said."""
    for section, names in PASSED.items():
        assert set(names) <= overrides.installed(section).keys()


REFUSED = [
    (TRANSFORMER, "fp88", "hybrid", "did you mean `fp8`"),
    (TRANSFORMER, "fp8", "e5m2", "Known: e4m3, hybrid"),
    (TRANSFORMER, "fp8", "hybrid", "set trainer.dtype=bf16"),
    (TRANSFORMER, "fp8_param", True, "weights leave"),
    (TRANSFORMER, "hidden_size", 4096, "config.json"),
    (TRANSFORMER, "num_moe_experts", 8, "config.json"),
    (
        TRANSFORMER,
        "tensor_model_parallel_size",
        2,
        "set trainer.megatron.tensor_model_parallel_size",
    ),
    (TRANSFORMER, "recompute_granularity", "full", "set trainer.recompute_granularity"),
    (TRANSFORMER, "params_dtype", "bf16", "set trainer.dtype"),
    (
        TRANSFORMER,
        "calculate_per_token_loss",
        False,
        "always runs with calculate_per_token_loss=True",
    ),
    (TRANSFORMER, "hidden_dropout", 0.1, "always runs with hidden_dropout=0.0"),
    (TRANSFORMER, "apply_rope_fusion", "yes", "must be of type bool"),
    (TRANSFORMER, "fp8_margin", True, "must be of type int"),
    (DDP, "overlap_grad_reduc", True, "did you mean `overlap_grad_reduce`"),
    (DDP, "overlap_param_gather", True, "engines and checkpoints read the weights"),
    (DDP, "use_distributed_optimizer", False, "always runs with use_distributed_optimizer=True"),
    (DDP, "check_for_nan_in_grad", True, "set trainer.max_skipped_steps"),
    (DDP, "hidden_dropout", 0.0, "is unknown"),
    (OPTIMIZER, "lr", 1e-3, "set algorithm.optimizer.lr"),
    (OPTIMIZER, "clip_grad", 1.0, "set trainer.grad_clip"),
    (OPTIMIZER, "optimizer_cpu_offload", True, "no checkpoint is loaded into"),
    (OPTIMIZER, "optimizer_offload_fraction", 0.5, "HybridDeviceOptimizer"),
    (OPTIMIZER, "use_precision_aware_optimizer", True, "the kernels' own scaled form"),
]


@pytest.mark.parametrize(("section", "name", "value", "message"), REFUSED, ids=lambda v: str(v))
def test_refused_by_name(section: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        overrides.check(trainer(section, {name: value}), 4)
    assert (
        message in str(refused.value)
        and section in str(refused.value)
        and len(str(refused.value).splitlines()) == 1
    )


def test_batched_messages_of_virtual_stages_are_refused() -> None:
    config = trainer(given={"batch_p2p_comm": True})
    overrides.check(config, 4)
    config.megatron.virtual_pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match="one message of a batch for another"):
        overrides.check(config, 4)


def test_a_router_that_chooses_by_itself_is_refused_where_routes_are_replayed() -> None:
    config = trainer(given={"moe_router_fusion": True})
    with pytest.raises(ConfigError, match="trainer.router_replay=false"):
        overrides.check(config, 4)
    config.router_replay = False
    overrides.check(config, 4)
    config.moe_router_bias_update_rate = 1e-3
    with pytest.raises(ConfigError, match="tells nobody which experts it chose"):
        overrides.check(config, 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"recompute_granularity": "ful"}, "did you mean `full`"),
        ({"recompute_method": "uniform"}, "needs trainer.recompute_granularity=full"),
        (
            {"recompute_granularity": "full", "recompute_modules": ["mlp"]},
            "needs trainer.recompute_granularity=selective",
        ),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 1},
            "needs trainer.recompute_granularity=full",
        ),
        ({"recompute_granularity": "full", "recompute_method": "blocks"}, "did you mean `block`"),
        ({"recompute_granularity": "full", "recompute_num_layers": 5}, "give 1 to 4"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_att"]},
            "did you mean `core_attn`",
        ),
    ],
)
def test_recompute_that_cannot_be_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overrides.check(TrainerConfig(**keys), 4)


def test_without_transformer_engine_its_features_are_refused() -> None:
    for config, key in (
        (trainer(given={"fp8": "hybrid"}), "override_transformer_config.fp8"),
        (trainer(given={"moe_permute_fusion": True}), "moe_permute_fusion"),
        (trainer(given={"moe_router_fusion": True}), "moe_router_fusion"),
        (
            trainer(recompute_granularity="selective", recompute_modules=["mlp", "layernorm"]),
            "recompute_modules=layernorm",
        ),
    ):
        with pytest.raises(
            ConfigError, match=f"{key} needs CUDA and Transformer Engine, and this is a desk"
        ):
            overrides.refuse_transformer_engine(config, "this is a desk")
    overrides.refuse_transformer_engine(TrainerConfig(), "this is a desk")


@pytest.mark.parametrize(
    ("pytorch", "told"),
    [
        (None, "`import transformer_engine.pytorch` failed"),
        ("raise FileNotFoundError('no libtransformer_engine.so')", "no libtransformer_engine.so"),
        ("", "`import transformer_engine.pytorch.fp8` failed"),
    ],
)
def test_half_a_transformer_engine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytorch: str | None, told: str
) -> None:
    """Its metapackage alone, its part for PyTorch without its library, and another one's names."""
    kernels.check()  # it is not there at all
    package = tmp_path / "transformer_engine"
    for place, text in ((package, ""), (package / "pytorch", pytorch)):
        if text is not None:
            place.mkdir()
            (place / "__init__.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="half installed.*uninstall transformer-engine") as error:
        kernels.check()
    assert told in str(error.value)
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
