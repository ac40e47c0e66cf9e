"""The keys of a veRL trainer config, as `trainer.trainer_config` takes them: what each one is here.

In: a nested dictionary by veRL's names. Out: the keys of rft that they stand for, set in the config, or a ConfigError. Every
documented key is one row of `KEYS`, and is either translated, or accepted with the values that say what rft does anyway, or
refused with what to use instead. Invariant: no key is ignored; null means that a key is not set, as in veRL's own files.

`docs/verl.md` is this table (`python -m rft.tools.config_page`).
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rft.config import Config, ConfigError

BLOCK = "trainer.trainer_config"
UNSET = object()  # what a value that says nothing becomes


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Key:
    """`to`: rft's key, with `convert` from the value. Without: only the values of `only` are taken."""

    row: str  # of the list of veRL's documented keys
    why: str = ""  # a value is refused, and what to use instead
    to: str | None = None
    convert: Callable[[Any], Any] = same
    only: tuple[Any, ...] = ()


def full_if_true(value: Any) -> str | None:
    return "full" if value else None


def if_positive(value: Any) -> Any:
    return UNSET if isinstance(value, int) and value < 0 else value


def one_if_true(value: Any) -> Any:
    return 1 if value else UNSET


def always_if_exported(contents: Any) -> Any:
    return "always" if "hf_model" in contents else UNSET


FSDP = "it belongs to FSDP; here Megatron shards, by trainer.megatron.*_size"
OFFLOAD = "nothing is offloaded here: use more ranks, or trainer.recompute_granularity"
SHARDED = "Megatron's distributed optimizer always shards over all data-parallel ranks"
MEGATRON = "the trainer is Megatron: leave it out, and cut the model by trainer.megatron.*_size"
TILES = "log-probabilities and entropies are computed tile by tile, without the logits of a microbatch, with the same result"
CONTENTS = "a checkpoint always holds model, optimizer and everything else that a resume needs"
EITHER = (True, False)
STATE = ["model", "optimizer", "extra"]


def fsdp(prefix: str, row: str, offload_row: str) -> dict[str, Key]:
    wrap, section = f"{prefix}.fsdp_config.wrap_policy", f"{prefix}.fsdp_config"
    return {
        f"{wrap}.transformer_layer_cls_to_wrap": Key(row, FSDP),
        f"{wrap}.min_num_params": Key(row, FSDP, only=(0,)),
        f"{section}.param_offload": Key(offload_row, OFFLOAD, only=(False,)),
        f"{section}.optimizer_offload": Key(offload_row, OFFLOAD, only=(False,)),
        f"{section}.fsdp_size": Key(row, SHARDED, only=(-1,)),
        f"{section}.forward_prefetch": Key(row, FSDP, only=(False,)),
    }


_ACTOR, _MODEL, _OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.model", "algorithm.optimizer"
KEYS: dict[str, Key] = {
    "actor_rollout_ref.hybrid_engine": Key("N1", "engines and trainer are always parts of one run", only=(True,)),
    f"{_MODEL}.external_lib": Key("N2", "the model is built from its config.json, without libraries of its own"),
    f"{_MODEL}.override_config": Key("N3", "the model is what its config.json says: edit that of model.model_path", only=({},)),
    f"{_MODEL}.enable_gradient_checkpointing": Key("N4", to="trainer.recompute_granularity", convert=full_if_true),
    f"{_MODEL}.use_remove_padding": Key("N5", to="trainer.use_remove_padding"),
    f"{_MODEL}.use_fused_kernels": Key("N6", TILES, only=EITHER),
    f"{_MODEL}.fused_kernel_options.impl_backend": Key("N7", TILES + "; there is no triton kernel", only=("torch",)),
    f"{_ACTOR}.strategy": Key("N8", MEGATRON, only=("megatron",)),
    f"{_ACTOR}.ppo_micro_batch_size": Key("N9", "veRL itself gave it up: set trainer.ppo_micro_batch_size_per_gpu"),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": Key("N10", to="trainer.ppo_micro_batch_size_per_gpu"),
    f"{_ACTOR}.use_dynamic_bsz": Key("N11", to="trainer.use_dynamic_bsz"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": Key("N12", to="trainer.max_token_len_per_gpu"),
    f"{_ACTOR}.grad_clip": Key("N13", to="trainer.grad_clip"),
    f"{_ACTOR}.ppo_epochs": Key("N14", "a batch is trained on once: raise buffer.total_epochs", only=(1,)),
    f"{_ACTOR}.shuffle": Key("N15", "a batch is one update, so its order says nothing", only=(False,)),
    f"{_ACTOR}.ulysses_sequence_parallel_size": Key("N16", "set trainer.megatron.context_parallel_size", only=(1,)),
    f"{_ACTOR}.entropy_from_logits_with_chunking": Key("N17", TILES, only=EITHER),
    f"{_ACTOR}.entropy_checkpointing": Key("N18", TILES, only=EITHER),
    f"{_ACTOR}.checkpoint.load_contents": Key("N19", CONTENTS, only=(STATE,)),
    f"{_ACTOR}.checkpoint.save_contents": Key(
        "N19", CONTENTS, to="trainer.save_hf_checkpoint", convert=always_if_exported,
        only=(STATE, [*STATE, "hf_model"]),
    ),
    f"{_ACTOR}.optim.lr": Key("N20", to=f"{_OPTIM}.lr"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": Key("N21", to=f"{_OPTIM}.lr_warmup_steps_ratio"),
    f"{_ACTOR}.optim.min_lr_ratio": Key("N22", to=f"{_OPTIM}.min_lr_ratio"),
    f"{_ACTOR}.optim.warmup_style": Key("N23", to=f"{_OPTIM}.lr_scheduler_type"),
    f"{_ACTOR}.optim.total_training_steps": Key("N24", to="trainer.total_steps", convert=if_positive),
    **fsdp(_ACTOR, "N25, N27, N28", "N26"),
    **fsdp("actor_rollout_ref.ref", "N29", "N29"),
    "trainer.balance_batch": Key("N42", to="trainer.balance_batch"),
    "trainer.total_training_steps": Key("N43", to="trainer.total_steps", convert=if_positive),
    "trainer.resume_mode": Key(
        "N44", "a run always goes on from its newest checkpoint; set continue_from_checkpoint=false for a new one, and "
        "model.model_path to start from the export of another", only=("auto",),
    ),
    "trainer.resume_from_path": Key("N45", "give the export of that run as model.model_path (`rft ckpt export`)", only=("",)),
    "trainer.default_hdfs_dir": Key("N47", to="trainer.checkpoint.storage"),
    "trainer.remove_previous_ckpt_in_save": Key("N48", to="trainer.max_checkpoints_to_keep", convert=one_if_true),
    "trainer.del_local_ckpt_after_load": Key(
        "N49", "a resume that fails needs it again; trainer.max_checkpoints_to_keep bounds what stays", only=(False,)
    ),
    "trainer.max_actor_ckpt_to_keep": Key("N50", to="trainer.max_checkpoints_to_keep"),
    "trainer.max_critic_ckpt_to_keep": Key("N50", to="trainer.max_checkpoints_to_keep"),
}  # fmt: skip

# --- critic and reference model -----------------------------------------------------------------------------------------

_REF, _CRITIC = "actor_rollout_ref.ref", "critic"
KEYS |= {  # both take the microbatches of the policy, so one set of keys cuts for all
    f"{_REF}.log_prob_micro_batch_size": Key("N30", "veRL itself gave it up: set trainer.ppo_micro_batch_size_per_gpu"),
    f"{_REF}.log_prob_micro_batch_size_per_gpu": Key("N31", to="trainer.ppo_micro_batch_size_per_gpu"),
    f"{_REF}.log_prob_use_dynamic_bsz": Key("N32", to="trainer.use_dynamic_bsz"),
    f"{_REF}.log_prob_max_token_len_per_gpu": Key("N32", to="trainer.max_token_len_per_gpu"),
    f"{_REF}.ulysses_sequence_parallel_size": Key("N32", "set trainer.megatron.context_parallel_size", only=(1,)),
    f"{_REF}.entropy_from_logits_with_chunking": Key("N32", TILES, only=EITHER),
    f"{_REF}.entropy_checkpointing": Key("N32", TILES, only=EITHER),
    f"{_CRITIC}.strategy": Key("N33", MEGATRON, only=("megatron",)),
    f"{_CRITIC}.optim.lr": Key("N34", to="critic.optim.lr"),
    f"{_CRITIC}.optim.lr_warmup_steps_ratio": Key("N34", to="critic.optim.lr_warmup_steps_ratio"),
    f"{_CRITIC}.optim.min_lr_ratio": Key("N34", to="critic.optim.min_lr_ratio"),
    f"{_CRITIC}.optim.warmup_style": Key("N34", to="critic.optim.lr_scheduler_type"),
    f"{_CRITIC}.optim.total_training_steps": Key("N34", to="trainer.total_steps", convert=if_positive),
    f"{_CRITIC}.model.override_config": Key(
        "N35", "the model is what its config.json says: edit that of model.critic_model_path", only=({},)
    ),
    f"{_CRITIC}.model.external_lib": Key("N35", "the model is built from its config.json, without libraries of its own"),
    f"{_CRITIC}.model.enable_gradient_checkpointing": Key("N35", to="trainer.recompute_granularity", convert=full_if_true),
    f"{_CRITIC}.model.use_remove_padding": Key("N35", to="trainer.use_remove_padding"),
    **fsdp(f"{_CRITIC}.model", "N36", "N36"),
    f"{_CRITIC}.ppo_micro_batch_size_per_gpu": Key("N37", to="trainer.ppo_micro_batch_size_per_gpu"),
    f"{_CRITIC}.forward_micro_batch_size_per_gpu": Key("N37", to="trainer.ppo_micro_batch_size_per_gpu"),
    f"{_CRITIC}.use_dynamic_bsz": Key("N38", to="trainer.use_dynamic_bsz"),
    f"{_CRITIC}.ppo_max_token_len_per_gpu": Key("N38", to="trainer.max_token_len_per_gpu"),
    f"{_CRITIC}.forward_max_token_len_per_gpu": Key("N38", to="trainer.max_token_len_per_gpu"),
    f"{_CRITIC}.ulysses_sequence_parallel_size": Key("N39", "set trainer.megatron.context_parallel_size", only=(1,)),
    f"{_CRITIC}.ppo_epochs": Key("N39", "a batch is trained on once: raise buffer.total_epochs", only=(1,)),
    f"{_CRITIC}.shuffle": Key("N39", "a batch is one update, so its order says nothing", only=(False,)),
    f"{_CRITIC}.grad_clip": Key("N40", to="critic.grad_clip"),
    f"{_CRITIC}.cliprange_value": Key("N41", to="critic.cliprange_value"),
    "trainer.critic_warmup": Key("N46", to="trainer.critic_warmup"),
}  # fmt: skip

# --- from the block to the config ----------------------------------------------------------------------------------------


def merge(config: Config) -> None:
    """Set what `trainer.trainer_config` says. A key of rft that was given another value itself contradicts, and is refused."""
    if not config.trainer.trainer_config:
        return
    default, node = OmegaConf.structured(Config), OmegaConf.structured(config)
    given: dict[str, tuple[str, Any]] = {}  # rft's key: veRL's key and the value
    for name, value in leaves(config.trainer.trainer_config):
        to, wanted = translated(name, value)
        if to is None or wanted is UNSET:
            continue
        before, there = given.get(to), OmegaConf.select(node, to)
        if before is not None and before[1] != wanted:
            raise ConfigError(f"{BLOCK}.{name}={value} contradicts {BLOCK}.{before[0]}: both are {to}, set only one")
        if there not in (OmegaConf.select(default, to), wanted):
            raise ConfigError(f"{BLOCK}.{name}={value} contradicts {to}={there}: set only one")
        given[to] = name, wanted
    for to, (name, wanted) in given.items():
        section, _, word = to.rpartition(".")
        try:
            OmegaConf.update(node, to, wanted)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{BLOCK}.{name}={wanted}: {str(error).splitlines()[0]}") from error
        target: Any = config
        for part in section.split("."):
            target = getattr(target, part)
        setattr(target, word, OmegaConf.select(node, to))


def leaves(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in the block; a documented key may itself be a dictionary."""
    for word, value in block.items():
        name = f"{prefix}{word}"
        if value is None and is_section(name):
            continue
        if isinstance(value, dict) and name not in KEYS and (value or is_section(name)):
            yield from leaves(value, name + ".")
        else:
            yield name, value


def is_section(name: str) -> bool:
    return any(key.startswith(name + ".") for key in KEYS)


def translated(name: str, value: Any) -> tuple[str | None, Any]:
    """(rft's key, its value); (None, UNSET) where there is nothing to set. Raises ConfigError."""
    if name not in KEYS:
        match = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.6)
        hint = f"; did you mean `{BLOCK}.{match[0]}`?" if match else "; see docs/verl.md"
        raise ConfigError(f"unknown key `{BLOCK}.{name}`{hint}")
    key = KEYS[name]
    if value is None:
        return None, UNSET
    if (key.only or key.to is None) and not is_one_of(value, key.only):
        raise ConfigError(f"{BLOCK}.{name}={value} is refused: {key.why}")
    return (key.to, key.convert(value)) if key.to else (None, UNSET)


def is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """As YAML means it: True is not 1, and a list of names has no order."""
    if isinstance(value, list):
        return any(isinstance(one, list) and sorted(map(str, value)) == sorted(one) for one in allowed)
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
