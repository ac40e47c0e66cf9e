"""Composition of stages, derived values, and every refusal: one message with the key and the fix,
before anything starts.
"""

import functools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from rft import config as configs
from rft import train
from rft.algorithm import ALGORITHMS, recipe
from rft.checkpoint import writer
from rft.config import Config, ConfigError, keys
from rft.config.choices import fill_choices
from rft.config.compose import CONFIG_DIR
from rft.config.layout import stored_bytes
from rft.data import packing
from rft.megatron import schedule
from rft.run.parts import engine_spec
from rft.tools import docs_tables


def composed(overrides: list[str]) -> Any:
    configs.check_overrides(overrides)
    return configs.compose(overrides)


def of_grpo(assets: Path) -> list[str]:
    return [
        "experiment=grpo",
        f"model.model_path={assets / 'model'}",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
        "model.max_prompt_tokens=16",
        "model.max_response_tokens=8",
    ]


@functools.cache
def composed_grpo(assets: Path) -> DictConfig:
    return configs.compose(of_grpo(assets))


def changed(base: DictConfig, words: list[str]) -> DictConfig:
    """What composing the recipe with these overrides gives, without reading it again."""
    configs.check_overrides(words)
    raw = base.copy()
    for override in OverridesParser.create().parse_overrides(words):
        if (Path(CONFIG_DIR) / override.key_or_group).is_dir():
            group = Path(CONFIG_DIR) / override.key_or_group / f"{override.value()}.yaml"
            raw = OmegaConf.merge(raw, {override.key_or_group: OmegaConf.load(group)})
        else:
            OmegaConf.update(raw, override.key_or_group, override.value(), force_add=True)
    return raw


def grpo(assets: Path, tmp_path: Path, *overrides: str) -> list[Config]:
    words = [f"checkpoint_root_dir={tmp_path}", *overrides]
    return train.prepared_stages(changed(composed_grpo(assets), words))


def test_defaults_follow_the_algorithm_and_the_data(assets: Path, tmp_path: Path) -> None:
    (config,) = grpo(assets, tmp_path)
    assert config.algorithm.repeat_times == 8 and config.algorithm.advantage_fn == "grpo"
    assert config.buffer.train_batch_size == 32 * 8
    assert config.trainer.total_steps == (8100 - 16) // 32
    assert config.trainer.max_token_len_per_gpu == 48, "twice the longest sequence"
    (halved,) = grpo(assets, tmp_path, "trainer.megatron.context_parallel_size=2")
    assert halved.trainer.max_token_len_per_gpu == 24
    assert config.model.max_model_len == 24 and config.explorer.rollout_model.dtype == "fp32"


def test_ppo_brings_a_critic_and_a_reference(assets: Path, tmp_path: Path) -> None:
    ppo = ["algorithm.algorithm_type=ppo", "algorithm.repeat_times=null"]
    (config,) = grpo(assets, tmp_path, *ppo, "trainer.critic_warmup=2")
    filled = config.algorithm
    assert (filled.advantage_fn, filled.kl_loss_fn, filled.repeat_times) == ("ppo", "k2", 1)
    assert recipe.needs_critic(config.algorithm) and recipe.needs_reference(config.algorithm)
    assert (config.critic.optim.lr, config.critic.cliprange_value, config.critic.grad_clip) == (
        1e-5,
        0.5,
        1.0,
    )
    (config,) = grpo(assets, tmp_path, "algorithm.algorithm_type=ppo", "algorithm.kl_loss_fn=none")
    assert not recipe.needs_reference(config.algorithm)
    (config,) = grpo(assets, tmp_path)
    assert not recipe.needs_critic(config.algorithm) and not recipe.needs_reference(
        config.algorithm
    )


def test_a_model_beside_the_policy_must_know_its_tokens(assets: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((assets / "model" / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 50}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model.ref_model_path=.* has no \*.safetensors"):
        grpo(assets, tmp_path, "algorithm.kl_loss_fn=k2", f"model.ref_model_path={other}")
    (other / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model.ref_model_path=.*vocab_size is 50"):
        grpo(assets, tmp_path, "algorithm.kl_loss_fn=k2", f"model.ref_model_path={other}")
    with pytest.raises(
        ConfigError,
        match="nothing here uses that model; leave it out, or set algorithm.kl_loss_fn=k2",
    ):
        grpo(assets, tmp_path, f"model.ref_model_path={other}")


# rows or a teacher: test_row_configs.py
NEED_MORE = ("mix", "mix_chord", "on_policy_distill", "jsd")


@pytest.mark.parametrize(
    "name",
    [n for n, kind in ALGORITHMS.items() if kind.source == "rollouts" and n not in NEED_MORE],
)
def test_functions_follow_the_algorithm_and_the_user_wins(
    assets: Path, tmp_path: Path, name: str
) -> None:
    """Row B5, W59 and W61, over every key that an algorithm has a default of."""
    keys = (
        "repeat_times",
        "advantage_fn",
        "policy_loss_fn",
        "loss_agg_mode",
        "kl_loss_fn",
        "entropy_loss_fn",
    )
    kind = f"algorithm.algorithm_type={name}"
    (config,) = grpo(assets, tmp_path, kind, *(f"algorithm.{key}=null" for key in keys))
    defaults = {key: getattr(ALGORITHMS[name], key) for key in keys}
    assert {key: getattr(config.algorithm, key) for key in keys} == defaults
    for key in ("advantage_fn_args", "policy_loss_fn_args"):
        assert getattr(config.algorithm, key) == getattr(ALGORITHMS[name], key)
    other = {"repeat_times": 3, "loss_agg_mode": "seq-mean-token-sum", "kl_loss_fn": "abs"}
    (config,) = grpo(
        assets, tmp_path, kind, *(f"algorithm.{key}={value}" for key, value in other.items())
    )
    assert {key: getattr(config.algorithm, key) for key in keys} == defaults | other


# rows D5 and D6: prompt, response, whole as given; then as they become, in a model with a context
# of 64
LENGTHS = [
    ((16, 8, None), (16, 8, 24)),
    ((16, 8, 30), (16, 8, 30)),
    ((None, 8, 30), (22, 8, 30)),
    ((16, None, 30), (16, 14, 30)),
    ((None, None, 30), (15, 15, 30)),
    ((None, None, 31), (15, 16, 31)),
    ((None, 8, None), (56, 8, 64)),
    ((None, None, None), (32, 32, 64)),
    ((63, None, None), (63, 1, 64)),
    ((64, None, None), None),
    ((16, 16, 31), None),
    ((None, 30, 30), None),
    ((40, 30, None), None),
    ((16, 8, 65), None),
]


@pytest.mark.parametrize(("given", "becomes"), LENGTHS)
def test_lengths(
    assets: Path, tmp_path: Path, given: tuple[Any, ...], becomes: tuple[int, ...] | None
) -> None:
    keys = ("max_prompt_tokens", "max_response_tokens", "max_model_len")
    words = [
        f"model.{key}={'null' if value is None else value}"
        for key, value in zip(keys, given, strict=True)
    ]
    if becomes is None:
        with pytest.raises(ConfigError, match=r"model\.max_"):
            grpo(assets, tmp_path, *words)
    else:
        (config,) = grpo(assets, tmp_path, *words)
        assert tuple(getattr(config.model, key) for key in keys) == becomes


def test_deterministic_decides_what_follows_from_it(assets: Path, tmp_path: Path) -> None:
    """Also over a value that a recipe sets: the quickstart has max_staleness=1."""
    (config,) = grpo(
        assets, tmp_path, "deterministic=true", "device=cpu", "synchronizer.max_staleness=1"
    )
    rollout = config.explorer.rollout_model
    assert (
        rollout.max_num_seqs,
        rollout.enable_prefix_caching,
        config.synchronizer.max_staleness,
    ) == (1, False, 0)
    (config,) = grpo(assets, tmp_path)
    rollout = config.explorer.rollout_model
    assert (
        rollout.max_num_seqs,
        rollout.enable_prefix_caching,
        config.synchronizer.max_staleness,
    ) == (256, True, 1)


def test_engines_with_the_trainers_bits_may_batch_and_cache(assets: Path, tmp_path: Path) -> None:
    given = ("deterministic=true", "trainer_engine=bitwise", "device=cpu")
    (config,) = grpo(assets, tmp_path, *given)
    rollout = config.explorer.rollout_model
    assert (rollout.max_num_seqs, rollout.enable_prefix_caching) == (256, True)
    assert config.synchronizer.max_staleness == 0
    assert engine_spec(config, "engine_0", "a").make.keywords["bitwise"]


@pytest.mark.parametrize(
    ("overrides", "style", "staleness"),
    [
        ("", "fixed", 0),
        ("sync_interval=3 sync_offset=1", "fixed", 3),
        ("sync_style=explorer_driven sync_interval=3", "dynamic_by_explorer", 5),
        ("sync_style=trainer_driven", "trainer_driven", 1),
        ("sync_style=fully_async sync_interval=2", "fully_async", 3),
        ("sync_style=fully_async sync_method=online max_staleness=9", "fully_async", 9),
    ],
)
def test_staleness_follows_from_the_style(
    assets: Path, tmp_path: Path, overrides: str, style: str, staleness: int
) -> None:
    keys = [f"synchronizer.{key}" for key in f"max_staleness=null {overrides}".split()]
    (config,) = grpo(assets, tmp_path, *keys)
    sync = config.synchronizer
    assert (sync.sync_method, sync.sync_style, sync.max_staleness) == ("nccl", style, staleness)


@pytest.mark.parametrize(
    ("overrides", "method"),
    [
        ("", "nccl"),
        ("synchronizer.sync_method=offline", "checkpoint"),
        ("synchronizer.sync_method=memory", "memory"),
        ("mode=train", "checkpoint"),
        ("mode=explore", "checkpoint"),
        ("mode=explore synchronizer.sync_method=checkpoint", "checkpoint"),
    ],
)
def test_the_method_follows_from_the_mode(
    assets: Path, tmp_path: Path, overrides: str, method: str
) -> None:
    (config,) = grpo(assets, tmp_path, *overrides.split())
    assert config.synchronizer.sync_method == method


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [("cpu", None, "fp32"), ("cuda", None, "bf16"), ("cuda", "fp32", "fp32")],
)
def test_precision_follows_the_device_and_engines_follow_the_trainer(
    device: str, given: Any, found: str
) -> None:
    config = Config(device=device)  # type: ignore[arg-type]
    config.trainer.dtype = given
    fill_choices(config)
    assert (config.trainer.dtype, config.explorer.rollout_model.dtype) == (found, found)


def test_memory_holds_two_versions_and_needs_room_for_them(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = grpo(assets, tmp_path, "synchronizer.sync_method=memory")
    (half,) = grpo(assets, tmp_path, "synchronizer.sync_method=memory", "trainer.dtype=bf16")
    model = (assets / "model" / "model.safetensors").stat().st_size
    assert 2 * 0.99 * model < stored_bytes(config) < 2.2 * model
    assert stored_bytes(half) == pytest.approx(stored_bytes(config) / 2, rel=1e-3)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=stored_bytes(config) - 1)
    )
    with pytest.raises(
        ConfigError,
        match="sync_method=memory holds 2 versions of the weights.*/dev/shm.*set synchroni",
    ):
        grpo(assets, tmp_path, "synchronizer.sync_method=memory")


def test_a_stage_inherits_every_key_it_does_not_set(tmp_path: Path) -> None:
    raw = composed(
        [
            "experiment=quickstart",
            "buffer.batch_size=7",
            "trainer.grad_clip=0.5",
            f"checkpoint_root_dir={tmp_path}",
        ]
    )
    warmup, tuned = configs.stage_configs(raw)
    assert (warmup.algorithm.algorithm_type, tuned.algorithm.algorithm_type) == ("sft", "grpo")
    assert (
        warmup.buffer.batch_size == 7 and warmup.trainer.grad_clip == tuned.trainer.grad_clip == 0.5
    )
    assert configs.job_dir(tuned) == tmp_path / "rft" / "quickstart" / "rft"


def test_resolved_config_round_trips_without_secrets(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `save` sets it: taken back after the test
    monkeypatch.setenv("RFT_SECRET_MONITOR_MONITOR_ARGS_API_KEY", "")
    (config,) = grpo(assets, tmp_path, "monitor=wandb", "+monitor.monitor_args.api_key=planted")
    configs.save(config, tmp_path / "resolved.yaml")
    assert "planted" not in (tmp_path / "resolved.yaml").read_text()
    assert configs.load(tmp_path / "resolved.yaml") == config, (
        "the processes of the run have it by their environment"
    )


def test_parts_of_a_run_have_namespaces_of_their_own_in_a_ray_that_they_share(
    assets: Path, tmp_path: Path
) -> None:
    rows = "buffer.trainer_input.experience_buffer"
    shared = [f"{rows}.storage_type=sql", f"{rows}.path=sqlite:///{tmp_path / 'a.db'}", "name=a"]
    evals = f"[{{path:{assets / 'eval.jsonl'},format:{{prompt_type:plaintext}}}}]"
    found = [
        grpo(assets, tmp_path, *shared, *words)[0].ray_namespace
        for words in (
            ("mode=train",),
            ("mode=explore", "explorer.name=one"),
            ("mode=explore", "explorer.name=two"),
            ("mode=bench", f"buffer.explorer_input.eval_tasksets={evals}"),
            ("mode=explore", "ray_namespace=mine"),
            ("mode=both",),
        )
    ]
    own = ["rft/a/explorers/one", "rft/a/explorers/two", "rft/a/bench"]
    assert found == ["rft/a", *own, "mine", "rft/a"]


HARD_TEXTS = ["${seed}", "it costs ${amount}", "${{ m['content'] }}", "${oc.env:HOME}", r"\${a}"]


@settings(max_examples=5, deadline=None, phases=[Phase.generate])
@given(st.lists(st.text(alphabet="${}\\\n '\"a.:"), min_size=20, max_size=40))
def test_every_text_is_read_again_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, made: list[str]
) -> None:
    """A template's `${` is no interpolation, whatever stands around it."""
    path, config, texts = tmp_path_factory.mktemp("texts") / "a.yaml", Config(), HARD_TEXTS + made
    config.name, config.model.model_path = "run", "here"
    config.model.custom_chat_template = "".join(texts)
    config.explorer.env_vars = {f"V{number}": text for number, text in enumerate(texts)}
    config.trainer.trainer_config = {"lr": 1.0, "of": [*texts, "${lr}"]}
    configs.save(config, path)
    assert configs.load(path) == config


def test_no_continuing_gives_the_run_a_new_name(assets: Path, tmp_path: Path) -> None:
    (tmp_path / "rft" / "grpo").mkdir(parents=True)
    (tmp_path / "rft" / "grpo" / "something").touch()
    (config,) = grpo(assets, tmp_path, "continue_from_checkpoint=false")
    assert config.name.startswith("grpo_2")
    (config,) = grpo(assets, tmp_path)
    assert config.name == "grpo"


REFUSED = {  # overrides: what the message must say
    "trainer.totl_steps=3": "trainer.total_steps",
    "+trainer.megatron.tensor_parallel=2": "tensor_model_parallel_size",
    "algoritm.repeat_times=4": "algorithm.repeat_times",
    "algorithm.algorithm_type=grop": "did you mean `grpo`",
    "algorithm.repeat_times=1": "algorithm.repeat_times=1",
    (
        "algorithm.algorithm_type=ppo algorithm.advantage_fn=grpo algorithm.repeat_times=1"
    ): "a group of one",
    "algorithm.algorithm_type=sft": "mode=train",
    "algorithm.advantage_fn=gae": "algorithm.advantage_fn",
    "algorithm.policy_loss_fn=pppo": "did you mean `ppo`",
    "algorithm.loss_agg_mode=mean": "algorithm.loss_agg_mode",
    "+algorithm.policy_loss_fn_args.clip=0.1": "clip_range",
    "+algorithm.advantage_fn_args.lam=0.9": "algorithm.advantage_fn_args.lam is unknown",
    "algorithm.kl_loss_fn=k4": "corrected_k3, k1, k2, k3",
    "+algorithm.kl_loss_fn_args.coef=1": "known: kl_coef",
    "algorithm.kl_penalty_fn=k1": "set kl_loss_fn instead",
    "algorithm.entropy_loss_fn=mixed": "algorithm.entropy_loss_fn=mix",
    "algorithm.kl_loss_fn=k2 model.ref_model_path=/nowhere": "model.ref_model_path=/nowhere",
    (
        "algorithm.algorithm_type=ppo model.critic_model_path=/nowhere"
    ): "model.critic_model_path=/nowhere",
    "algorithm.algorithm_type=ppo critic.optim.lr=0": "critic.optim.lr",
    "algorithm.algorithm_type=ppo critic.optim.lr_scheduler_type=cosin": "cosine",
    "trainer.critic_warmup=3": "algorithm_type=ppo",
    (
        "algorithm.algorithm_type=ppo trainer.critic_warmup=4 trainer.total_steps=4"
    ): "none would train the policy",
    (
        "algorithm.algorithm_type=ppo trainer.critic_warmup=1 trainer.stop_at_loss=1 "
        "trainer.total_steps=4"
    ): "stop_at_loss",
    "algorithm.algorithm_type=ppo trainer.critic_warmup=1 trainer.total_steps=4 "
    "algorithm.optimizer.lr_scheduler_type=wsd "
    "algorithm.optimizer.lr_decay_steps=4": "into 3 steps",
    "+algorithm.kl_loss_fn_args.kl_coef=1": "algorithm.kl_loss_fn=none: there is no such term",
    "trainer.total_steps=0": "trainer.total_steps=0",
    "trainer.num_ranks=-2": "trainer.num_ranks=-2",
    "algorithm.optimizer.lr=0": "algorithm.optimizer.lr",
    "algorithm.optimizer.lr_scheduler_type=cosin": "cosine",
    "algorithm.optimizer.optimizer_type=adamw": "did you mean `adam`",
    "algorithm.optimizer.optimizer_type=sgd algorithm.optimizer.eps=1e-6": "only Adam has one",
    "algorithm.optimizer.betas=[0.9]": "two numbers",
    # of a run that ends when its queue does
    (
        "algorithm.optimizer.betas=[0.9,1] mode=train buffer.explorer_input.taskset=null"
    ): "two numbers",
    "algorithm.optimizer.lr_decay_steps=5": "lr_scheduler_type=wsd",
    (
        "algorithm.optimizer.lr_scheduler_type=wsd algorithm.optimizer.lr_decay_steps=5 "
        "trainer.total_steps=4"
    ): "into 4 steps",
    "mode=bot": "did you mean `both`",
    (
        "synchronizer.receive=direct synchronizer.sync_method=memory"
    ): "set synchronizer.receive=staged",
    "synchronizer.receive=stage": "did you mean `staged`",
    "synchronizer.sync=deltas": "did you mean `delta`",
    "synchronizer.sync=delta synchronizer.full_interval=0": "synchronizer.full_interval=0",
    "synchronizer.sync=delta synchronizer.receive=direct": "with synchronizer.receive=direct",
    "synchronizer.sync=delta synchronizer.sync_method=memory": "synchronizer.sync_method=memory",
    (
        "synchronizer.sync=delta device=cuda cluster.gpu_per_node=2"
    ): "packed there, and go in full; set synchronizer.sync=full",
    "synchronizer.kv=drop": "keep, recompute",
    "synchronizer.probe_interval=-1": "synchronizer.probe_interval=-1",
    "mode=bench": "eval_tasksets",
    "explorer.version=3": "set mode=serve or mode=bench",
    "trainer.checkpoint.versions=each": "all, needed, none",
    ("trainer.checkpoint.versions=needed mode=train"): "set trainer.checkpoint.versions=all",
    "device=tpu": "device=tpu",
    "deterministic=true device=cuda cluster.gpu_per_node=2": "device=cpu",
    "deterministic=true device=cpu synchronizer.sync_interval=2": "synchronizer.sync_interval=1",
    "deterministic=true device=cpu synchronizer.sync_offset=1": "synchronizer.sync_offset=0",
    "model.model_path=/nowhere": "model.model_path",
    "model.max_response_tokens=100": "context of 64",
    "model.max_model_len=10": "max_model_len",
    "model.min_response_tokens=8": "min_response_tokens",
    "model.chat_template_path=/nowhere.jinja": "chat_template_path",
    "trainer.megatron.tensor_model_parallel_size=3": "tensor_model_parallel_size",
    "trainer.megatron.pipeline_model_parallel_size=3": "pipeline_model_parallel_size",
    "trainer.megatron.tensor_model_parallel_size=2 trainer.num_ranks=3": "num_ranks",
    (
        "trainer.use_dynamic_bsz=false trainer.ppo_micro_batch_size_per_gpu=0"
    ): "trainer.ppo_micro_batch_size_per_gpu=0",
    "trainer.recompute_granularity=full trainer.recompute_num_layers=5": "give 1 to 4",
    (
        "+trainer.megatron.override_transformer_config.fp8=hybrid trainer.dtype=bf16 device=cpu"
    ): "this is device=cpu",
    "+trainer.megatron.override_ddp_config.overlap_grad_reduc=true": (
        "did you mean `overlap_grad_reduce`"
    ),
    "trainer.trainer_strategy=fsdp": (
        "trainer.trainer_strategy is no key of rft: the trainer is always Megatron"
    ),
    "+trainer.ulysses_sequence_parallel_size=2": "set trainer.megatron.context_parallel_size",
    "+trainer.trainer_config.actor_rollout_ref.actor.strategy=deepspeed": "the trainer is Megatron",
    "+trainer.trainer_config.actor_rollout_ref.actor.grad_clip=-1": "trainer.grad_clip=-1",
    "trainer.profiler=torhc": "did you mean `torch`",
    "trainer.profiler=nsys device=cpu": "use torch",
    "trainer.profile_steps=[5,3]": "the first step, from 1, and the last",
    "trainer.profile_ranks=[1]": "there are ranks 0 to 0",
    "trainer.peak_tflops=0": "trainer.peak_tflops=0",
    "trainer.dtype=fp64": "trainer.dtype",
    "trainer.trainer_type=verl": "megatron",
    "trainer.save_hf_checkpoint=sometimes": "save_hf_checkpoint",
    "trainer.max_restarts=-1": "max_restarts",
    "trainer.save_strategy=single_proces": "did you mean `single_process`",
    "trainer.checkpoint.staging=lasy": "did you mean `lazy`",
    "trainer.checkpoint.when_busy=newest": "trainer.checkpoint.when_busy",
    "trainer.checkpoint.best_mode=mini": "did you mean `min`",
    "trainer.checkpoint.keep_best=1": "needs trainer.checkpoint.best_metric",
    "trainer.checkpoint.keep_every=-1": "trainer.checkpoint.keep_every=-1",
    "trainer.checkpoint.agent_deadline_s=0": "trainer.checkpoint.agent_deadline_s=0",
    "trainer.checkpoint.storage=githab://bucket": "did you mean `github`",
    "trainer.checkpoint.storage=/data/checkpoints": "set checkpoint_root_dir",
    "trainer.checkpoint.host_memory_gb=0.001": "set at least 0.005, or leave it out",
    "explorer.rollout_model.tensor_parallel_size=3": "explorer.rollout_model.tensor_parallel_size",
    "explorer.rollout_model.engine_num=0": "engine_num",
    "explorer.rollout_model.engine_type=sglang": "engine_type",
    "explorer.name=trainer": "used twice",
    "buffer.explorer_input.taskset.path=/nowhere.jsonl": "buffer.explorer_input.taskset.path",
    "buffer.explorer_input.taskset.format.prompt_key=question": "prompt_key",
    "buffer.explorer_input.taskset.default_workflow_type=singel_turn": "single_turn",
    "buffer.explorer_input.default_reward_fn_type=exact_mach": "exact_match",
    "buffer.batch_size=100000": "buffer.batch_size",
    "buffer.trainer_input.experience_buffer.storage_type=file": "storage_type",
    "synchronizer.sync_interval=4": "set max_staleness to at least 3",
    "synchronizer.sync_interval=2 synchronizer.sync_offset=2": "set max_staleness to at least 3",
    "synchronizer.sync_interval=0 synchronizer.max_staleness=null": "synchronizer.sync_interval=0",
    "synchronizer.sync_offset=-1": "synchronizer.sync_offset=-1",
    "synchronizer.sync_style=fuly_async": "did you mean `fully_async`",
    "synchronizer.sync_style=dynamic_by_trainer": "did you mean `dynamic_by_explorer`",
    "synchronizer.sync_method=carrier_pigeon": "sync_method",
    (
        "synchronizer.sync_method=nccl mode=explore"
    ): "there is no trainer here; set synchronizer.sync_method=checkpoint",
    (
        "synchronizer.sync_method=memory mode=train"
    ): "there is no engine here; set synchronizer.sync_method=checkpoint",
    (
        "synchronizer.sync_method=checkpoint synchronizer.lora_sync=merged "
        "model.lora_configs=[{lora_rank:4}]"
    ): "lora_sync=adapter",
    "monitor.monitor_type=wanb": "wandb",
    "checkpoint_root_dir=/proc/nowhere": "checkpoint_root_dir",
    "cluster.ray_address=127.0.0.1:1": "cluster.ray_address",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_with_key_and_fix(assets: Path, tmp_path: Path, overrides: str) -> None:
    with pytest.raises(ConfigError) as refused:
        grpo(assets, tmp_path, *overrides.split())
    assert REFUSED[overrides] in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel"),
        (None, "config.json"),
    ],
)
def test_a_model_that_cannot_be_trained_is_named(
    assets: Path, tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    model = tmp_path / "other"
    model.mkdir()
    for file in (assets / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    if change is None:
        (model / "config.json").unlink()
    else:
        (model / "config.json").write_text(
            json.dumps(json.loads((model / "config.json").read_text()) | change)
        )
    with pytest.raises(ConfigError, match=message):
        grpo(assets, tmp_path, f"model.model_path={model}")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("tokenizer_config.json", "tokenizer"), ("model.safetensors", "safetensors")],
)
def test_a_model_directory_without_a_part_is_named(
    assets: Path, tmp_path: Path, missing: str, message: str
) -> None:
    model = tmp_path / "other"
    model.mkdir()
    for file in (assets / "model").iterdir():
        if file.name != missing:
            (model / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=message):
        grpo(assets, tmp_path, f"model.model_path={model}")


def test_a_busy_port_is_refused(assets: Path, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cluster.master_port={port} is in use"):
            grpo(assets, tmp_path, f"cluster.master_port={port}")


def test_the_command_line_says_it_in_one_line_and_with_code_2(assets: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rft.train",
        "experiment=grpo",
        f"model.model_path={assets / 'model'}",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
        f"checkpoint_root_dir={tmp_path}",
        "trainer.total_steps=x",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(CONFIG_DIR).parent)
    assert done.returncode == 2 and done.stderr.startswith(
        "rft: config refused: trainer.total_steps"
    )
    assert len(done.stderr.splitlines()) == 1


def test_every_key_is_documented() -> None:
    page = (Path(CONFIG_DIR).parent / "docs" / "configure.md").read_text(encoding="utf-8")
    leaves = [
        k
        for k in configs.known_keys()
        if not any(other.startswith(k + ".") for other in configs.known_keys())
    ]
    missing = [
        k for k in leaves if f"`{k.rsplit('.', 1)[-1]}`" not in page and f"`{k}`" not in page
    ]
    assert not missing, f"docs/configure.md lacks {missing}"


def test_the_tables_of_keys_are_those_of_the_code() -> None:
    for page, text in docs_tables.pages().items():
        assert page.read_text(encoding="utf-8") == text, (
            f"{page}: run `python -m rft.tools.docs_tables`"
        )


def test_the_schema_allows_what_there_is() -> None:
    """Words that parts have tables of are in the schema too, which imports none of them."""
    for key, words in {
        "trainer.save_strategy": writer.STRATEGIES,
        "algorithm.loss_agg_mode": packing.AGGREGATIONS,
        "algorithm.optimizer.lr_scheduler_type": schedule.SCHEDULERS,
        "critic.optim.lr_scheduler_type": schedule.SCHEDULERS,
    }.items():
        setting = keys.setting(key)
        assert setting is not None and setting.choices == words


def test_every_key_has_a_meaning_and_a_default_that_it_takes() -> None:
    assert [one.key for _, table in keys.tables() for one in table if not one.meaning] == []
    configs.parsed(asdict(Config()))


VALUES = [  # key, given, what it becomes; None: refused
    ("name", 123, "123"),
    ("name", True, "True"),
    ("name", [1], None),
    ("trainer.num_ranks", "3", 3),
    ("trainer.num_ranks", 3.0, None),
    ("trainer.num_ranks", "3.0", None),
    ("trainer.num_ranks", True, None),
    ("trainer.num_ranks", None, None),
    ("buffer.batch_size", None, ConfigError),
    ("trainer.grad_clip", 2, 2.0),
    ("trainer.grad_clip", "0.5", 0.5),
    ("trainer.grad_clip", True, None),
    ("deterministic", "yes", True),
    ("deterministic", 2, True),
    ("deterministic", "maybe", None),
    ("deterministic", 1.0, None),
    ("algorithm.optimizer.betas", ["0.5", 1], [0.5, 1.0]),
    ("algorithm.optimizer.betas", "x", None),
    ("trainer.profile_ranks", [1.5], None),
    ("explorer.env_vars", {"A": 1}, {"A": "1"}),
    ("explorer.env_vars", {"A": None}, None),
    ("trainer.trainer_config", {1: 2}, None),
]


@pytest.mark.parametrize(("key", "given", "becomes"), VALUES, ids=str)
def test_text_is_taken_from_numbers_and_numbers_from_text_that_is_one(
    key: str, given: Any, becomes: Any
) -> None:
    setting = keys.setting(key)
    assert setting is not None
    if becomes in (None, ConfigError) and not (given is None and setting.is_optional):
        with pytest.raises(ConfigError, match=re.escape(f"{key}")) as refused:
            configs.converted(key, given)
        assert "pydantic" not in str(refused.value)
    else:
        converted = configs.converted(key, given)
        assert (type(converted), converted) == (type(becomes), becomes)


def test_eight_problems_are_told_in_one_start() -> None:
    wrong = [
        "trainer.totl_steps=1",
        "+trainer.megatron.tensor_parallel=2",
        "algoritm.repeat_times=4",
        "monitor.typ=none",
        "model.lora_configs=[{lora_rnk:1}]",
        "trainer.total_steps=x",
        "mode=bot",
        "buffer.batch_size=0",
    ]
    with pytest.raises(ConfigError) as refused:
        configs.compose(["experiment=grpo", *wrong])
    said = refused.value.problems
    assert len(said) == len(wrong)
    for key in ("trainer.total_steps=x", "mode=bot", "buffer.batch_size=0"):
        assert any(problem.startswith(key) for problem in said)


def test_known_keys_need_no_plus() -> None:
    """Also in sections that are not there yet, and in dictionaries of any keys."""
    words = [
        "buffer.explorer_input.taskset.rollout_args.top_k=3",
        "buffer.explorer_input.taskset.workflow_args.any=1",
        "critic.optim.lr=1e-3",
    ]
    raw = configs.compose(words)
    taskset = raw.buffer.explorer_input.taskset
    assert (taskset.rollout_args.top_k, taskset.rollout_args.top_p) == (3, 1.0)
    assert taskset.workflow_args == {"any": 1} and raw.critic.optim.lr == 1e-3


def test_interpolations_are_values_of_their_key_once_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKS", "2")
    given = ["model.model_path=here", "trainer.num_ranks=${oc.env:RANKS}", "seed=${oc.env:SEED_}"]
    with pytest.raises(ConfigError, match="SEED_"):
        configs.stage_configs(configs.compose(given))
    monkeypatch.setenv("SEED_", "-1")
    with pytest.raises(ConfigError, match="seed=-1: must be 0 or more"):
        configs.stage_configs(configs.compose(given))
    monkeypatch.setenv("SEED_", "1")
    (config,) = configs.stage_configs(configs.compose(given))
    assert (config.trainer.num_ranks, config.seed) == (2, 1)
