"""The keys of a veRL trainer config, as `trainer.trainer_config` takes them: what each one is here.

In: a nested dictionary by veRL's names. Out: the keys of rft that they stand for, set in the
config, or a ConfigError. Every documented key is one row of `KEYS`, and is either translated, or
accepted with the values that say what rft does anyway, or refused with what to use instead.
Invariant: no key is ignored; null means that a key is not set, as in veRL's own files.

`docs/verl.md` is this table (`python -m rft.tools.docs_tables`).
"""

import difflib
from typing import Any

from rft.config import Config, ConfigError, converted, get
from rft.config.foreign import UNSET, ForeignKey, is_empty_section, leaves
from rft.ground.errors import refuse_all

BLOCK = "trainer.trainer_config"


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
TILES = (
    "log-probabilities and entropies are computed tile by tile, without the logits of a "
    "microbatch, with the same result"
)
CONTENTS = "a checkpoint always holds model, optimizer and everything else that a resume needs"
EITHER = (True, False)
STATE = ["model", "optimizer", "extra"]


def fsdp(prefix: str, row: str, offload_row: str) -> dict[str, ForeignKey]:
    wrap, section = f"{prefix}.fsdp_config.wrap_policy", f"{prefix}.fsdp_config"
    return {
        f"{wrap}.transformer_layer_cls_to_wrap": ForeignKey(row, FSDP),
        f"{wrap}.min_num_params": ForeignKey(row, FSDP, only=(0,)),
        f"{section}.param_offload": ForeignKey(offload_row, OFFLOAD, only=(False,)),
        f"{section}.optimizer_offload": ForeignKey(offload_row, OFFLOAD, only=(False,)),
        f"{section}.fsdp_size": ForeignKey(row, SHARDED, only=(-1,)),
        f"{section}.forward_prefetch": ForeignKey(row, FSDP, only=(False,)),
    }


_ACTOR, _MODEL, _OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.model", "algorithm.optimizer"
KEYS: dict[str, ForeignKey] = {
    "actor_rollout_ref.hybrid_engine": ForeignKey(
        "N1", "engines and trainer are always parts of one run", only=(True,)
    ),
    f"{_MODEL}.external_lib": ForeignKey(
        "N2", "the model is built from its config.json, without libraries of its own"
    ),
    f"{_MODEL}.override_config": ForeignKey(
        "N3", "the model is what its config.json says: edit that of model.model_path", only=({},)
    ),
    f"{_MODEL}.enable_gradient_checkpointing": ForeignKey(
        "N4", to="trainer.recompute_granularity", convert=full_if_true
    ),
    f"{_MODEL}.use_remove_padding": ForeignKey("N5", to="trainer.use_remove_padding"),
    f"{_MODEL}.use_fused_kernels": ForeignKey("N6", TILES, only=EITHER),
    f"{_MODEL}.fused_kernel_options.impl_backend": ForeignKey(
        "N7", TILES + "; there is no triton kernel", only=("torch",)
    ),
    f"{_ACTOR}.strategy": ForeignKey("N8", MEGATRON, only=("megatron",)),
    f"{_ACTOR}.ppo_micro_batch_size": ForeignKey(
        "N9", "veRL itself gave it up: set trainer.ppo_micro_batch_size_per_gpu"
    ),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": ForeignKey(
        "N10", to="trainer.ppo_micro_batch_size_per_gpu"
    ),
    f"{_ACTOR}.use_dynamic_bsz": ForeignKey("N11", to="trainer.use_dynamic_bsz"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": ForeignKey("N12", to="trainer.max_token_len_per_gpu"),
    f"{_ACTOR}.grad_clip": ForeignKey("N13", to="trainer.grad_clip"),
    f"{_ACTOR}.ppo_epochs": ForeignKey("N14", to="trainer.ppo_epochs"),
    f"{_ACTOR}.shuffle": ForeignKey("N15", to="trainer.ppo_shuffle"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": ForeignKey(
        "N16", "set trainer.megatron.context_parallel_size", only=(1,)
    ),
    f"{_ACTOR}.entropy_from_logits_with_chunking": ForeignKey("N17", TILES, only=EITHER),
    f"{_ACTOR}.entropy_checkpointing": ForeignKey("N18", TILES, only=EITHER),
    f"{_ACTOR}.checkpoint.load_contents": ForeignKey("N19", CONTENTS, only=(STATE,)),
    f"{_ACTOR}.checkpoint.save_contents": ForeignKey(
        "N19",
        CONTENTS,
        to="trainer.save_hf_checkpoint",
        convert=always_if_exported,
        only=(STATE, [*STATE, "hf_model"]),
    ),
    f"{_ACTOR}.optim.lr": ForeignKey("N20", to=f"{_OPTIM}.lr"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": ForeignKey(
        "N21", to=f"{_OPTIM}.lr_warmup_steps_ratio"
    ),
    f"{_ACTOR}.optim.min_lr_ratio": ForeignKey("N22", to=f"{_OPTIM}.min_lr_ratio"),
    f"{_ACTOR}.optim.warmup_style": ForeignKey("N23", to=f"{_OPTIM}.lr_scheduler_type"),
    f"{_ACTOR}.optim.total_training_steps": ForeignKey(
        "N24", to="trainer.total_steps", convert=if_positive
    ),
    **fsdp(_ACTOR, "N25, N27, N28", "N26"),
    **fsdp("actor_rollout_ref.ref", "N29", "N29"),
    "trainer.balance_batch": ForeignKey("N42", to="trainer.balance_batch"),
    "trainer.total_training_steps": ForeignKey(
        "N43", to="trainer.total_steps", convert=if_positive
    ),
    "trainer.resume_mode": ForeignKey(
        "N44",
        "a run always goes on from its newest checkpoint; set continue_from_checkpoint=false for a "
        "new one, and "
        "model.model_path to start from the export of another",
        only=("auto",),
    ),
    "trainer.resume_from_path": ForeignKey(
        "N45", "give the export of that run as model.model_path (`rft ckpt export`)", only=("",)
    ),
    "trainer.default_hdfs_dir": ForeignKey("N47", to="trainer.checkpoint.storage"),
    "trainer.remove_previous_ckpt_in_save": ForeignKey(
        "N48", to="trainer.max_checkpoints_to_keep", convert=one_if_true
    ),
    "trainer.del_local_ckpt_after_load": ForeignKey(
        "N49",
        "a resume that fails needs it again; trainer.max_checkpoints_to_keep bounds what stays",
        only=(False,),
    ),
    "trainer.max_actor_ckpt_to_keep": ForeignKey("N50", to="trainer.max_checkpoints_to_keep"),
    "trainer.max_critic_ckpt_to_keep": ForeignKey("N50", to="trainer.max_checkpoints_to_keep"),
}

# --- critic and reference model -------------------------------------------------------------------

_REF, _CRITIC = "actor_rollout_ref.ref", "critic"
KEYS |= {  # both take the microbatches of the policy, so one set of keys cuts for all
    f"{_REF}.log_prob_micro_batch_size": ForeignKey(
        "N30", "veRL itself gave it up: set trainer.ppo_micro_batch_size_per_gpu"
    ),
    f"{_REF}.log_prob_micro_batch_size_per_gpu": ForeignKey(
        "N31", to="trainer.ppo_micro_batch_size_per_gpu"
    ),
    f"{_REF}.log_prob_use_dynamic_bsz": ForeignKey("N32", to="trainer.use_dynamic_bsz"),
    f"{_REF}.log_prob_max_token_len_per_gpu": ForeignKey("N32", to="trainer.max_token_len_per_gpu"),
    f"{_REF}.ulysses_sequence_parallel_size": ForeignKey(
        "N32", "set trainer.megatron.context_parallel_size", only=(1,)
    ),
    f"{_REF}.entropy_from_logits_with_chunking": ForeignKey("N32", TILES, only=EITHER),
    f"{_REF}.entropy_checkpointing": ForeignKey("N32", TILES, only=EITHER),
    f"{_CRITIC}.strategy": ForeignKey("N33", MEGATRON, only=("megatron",)),
    f"{_CRITIC}.optim.lr": ForeignKey("N34", to="critic.optim.lr"),
    f"{_CRITIC}.optim.lr_warmup_steps_ratio": ForeignKey(
        "N34", to="critic.optim.lr_warmup_steps_ratio"
    ),
    f"{_CRITIC}.optim.min_lr_ratio": ForeignKey("N34", to="critic.optim.min_lr_ratio"),
    f"{_CRITIC}.optim.warmup_style": ForeignKey("N34", to="critic.optim.lr_scheduler_type"),
    f"{_CRITIC}.optim.total_training_steps": ForeignKey(
        "N34", to="trainer.total_steps", convert=if_positive
    ),
    f"{_CRITIC}.model.override_config": ForeignKey(
        "N35",
        "the model is what its config.json says: edit that of model.critic_model_path",
        only=({},),
    ),
    f"{_CRITIC}.model.external_lib": ForeignKey(
        "N35", "the model is built from its config.json, without libraries of its own"
    ),
    f"{_CRITIC}.model.enable_gradient_checkpointing": ForeignKey(
        "N35", to="trainer.recompute_granularity", convert=full_if_true
    ),
    f"{_CRITIC}.model.use_remove_padding": ForeignKey("N35", to="trainer.use_remove_padding"),
    **fsdp(f"{_CRITIC}.model", "N36", "N36"),
    f"{_CRITIC}.ppo_micro_batch_size_per_gpu": ForeignKey(
        "N37", to="trainer.ppo_micro_batch_size_per_gpu"
    ),
    f"{_CRITIC}.forward_micro_batch_size_per_gpu": ForeignKey(
        "N37", to="trainer.ppo_micro_batch_size_per_gpu"
    ),
    f"{_CRITIC}.use_dynamic_bsz": ForeignKey("N38", to="trainer.use_dynamic_bsz"),
    f"{_CRITIC}.ppo_max_token_len_per_gpu": ForeignKey("N38", to="trainer.max_token_len_per_gpu"),
    f"{_CRITIC}.forward_max_token_len_per_gpu": ForeignKey(
        "N38", to="trainer.max_token_len_per_gpu"
    ),
    f"{_CRITIC}.ulysses_sequence_parallel_size": ForeignKey(
        "N39", "set trainer.megatron.context_parallel_size", only=(1,)
    ),
    f"{_CRITIC}.ppo_epochs": ForeignKey("N39", to="trainer.ppo_epochs"),
    f"{_CRITIC}.shuffle": ForeignKey("N39", to="trainer.ppo_shuffle"),
    f"{_CRITIC}.grad_clip": ForeignKey("N40", to="critic.grad_clip"),
    f"{_CRITIC}.cliprange_value": ForeignKey("N41", to="critic.cliprange_value"),
    "trainer.critic_warmup": ForeignKey("N46", to="trainer.critic_warmup"),
}

# --- from the block to the config -----------------------------------------------------------------


def merge(config: Config) -> None:
    """Set what `trainer.trainer_config` says; raises ConfigError with all that it cannot say.

    A key of rft that was given another value itself contradicts, and is refused.
    """
    default, problems = Config(), list[str]()
    given: dict[str, tuple[str, Any]] = {}  # rft's key: veRL's key and the value
    for name, value in leaves(config.trainer.trainer_config or {}, KEYS.__contains__):
        problem = refused(name, value)
        to, wanted = (None, UNSET) if problem else translated(name, value)
        if problem:
            problems.append(problem)
        if to is None or wanted is UNSET:
            continue
        before, there = given.get(to), get(config, to)
        if before is not None and before[1] != wanted:
            problems.append(
                f"{BLOCK}.{name}={value} contradicts {BLOCK}.{before[0]}: both are {to}, set only "
                "one"
            )
        if there not in (get(default, to), wanted):
            problems.append(f"{BLOCK}.{name}={value} contradicts {to}={there}: set only one")
        given[to] = name, wanted
    for to, (name, wanted) in given.items():
        section, _, word = to.rpartition(".")
        try:
            setattr(get(config, section), word, converted(to, wanted))
        except ConfigError as error:
            problems.append(f"{BLOCK}.{name}={wanted}: {error}")
    refuse_all(problems)


def refused(name: str, value: Any) -> str | None:
    """Why a key, or its value, cannot be taken; None where it can."""
    if name in KEYS:
        is_taken = value is None or KEYS[name].takes(value)
        return None if is_taken else f"{BLOCK}.{name}={value} is refused: {KEYS[name].instead}"
    if is_empty_section(name, value, KEYS):
        return None
    match = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.6)
    hint = f"; did you mean `{BLOCK}.{match[0]}`?" if match else "; see docs/verl.md"
    return f"unknown key `{BLOCK}.{name}`{hint}"


def translated(name: str, value: Any) -> tuple[str | None, Any]:
    """(rft's key, its value); (None, UNSET) where there is nothing to set."""
    key = KEYS.get(name)
    if key is None or key.to is None or value is None:
        return None, UNSET
    return key.to, key.convert(value)
