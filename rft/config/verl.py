"""The keys of a veRL config that say how to train, as `trainer.trainer_config` takes them too: what
each one is here.

In: a nested dictionary by veRL's names. Out: the keys of rft that they stand for, set in the
config, or a ConfigError. Every documented key is one row of `KEYS`, and is either translated, or
taken with one line about what rft does anyway, or refused with what to use instead. The rest of a
veRL command line is `rft.config.verl_run`.
Invariants: no key is ignored; null, and the text None, mean that a key is not set, as in veRL's own
files; what only cuts work into parts or saves memory never refuses a file, because no result here
depends on it.

`docs/verl.md` is this table (`python -m rft.tools.docs_tables`).
"""

import difflib
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rft.config import Config, ConfigError, converted, get, verl_newer
from rft.config.foreign import UNSET, ForeignKey, Note, is_empty_section, leaves, nested
from rft.ground.errors import Problem, refuse_all

BLOCK = "trainer.trainer_config"


def full_if_true(value: Any) -> str | None:
    return "full" if value else None


def if_positive(value: Any) -> Any:
    return UNSET if isinstance(value, int) and value < 0 else value


def one_if_true(value: Any) -> Any:
    return 1 if value else UNSET


def unset_if_empty(value: Any) -> Any:
    return value or UNSET


def always_if_exported(contents: Any) -> Any:
    return "always" if "hf_model" in contents else UNSET


NO_DROPOUT = {"attention_dropout": 0, "embd_pdrop": 0, "resid_pdrop": 0, "hidden_dropout": 0}


def only_longer(overrides: Any) -> bool:
    """What changes no number: how long a sequence may be, which is checked here, no dropout, and
    sections that say nothing.
    """
    given = dict(overrides) if isinstance(overrides, dict) else {}
    if given.get("moe_config") in ({}, {"freeze_moe_router": False}):
        del given["moe_config"]
    inner = given.get("model_config", given)
    if not isinstance(overrides, dict) or not isinstance(inner, dict):
        return False
    left = {name for name, value in inner.items() if NO_DROPOUT.get(name, UNSET) != value}
    return left <= {"max_position_embeddings"}


def in_joint(value: Any) -> Any:
    """Of a key whose meaning depends on others: `rft.config.verl_run.JOINTS` sets it."""
    return UNSET


def taken(row: str, why: str) -> ForeignKey:
    """A key whose every value means the same here."""
    return ForeignKey(row, why, takes_any=True)


OFFLOAD = "not offloaded here: use more ranks, or trainer.recompute_granularity"
SHARDED = "Megatron's distributed optimizer shards over all data-parallel ranks"
MEGATRON = "the trainer is Megatron; trainer.megatron.*_size cut the model"
TILES = (
    "log-probabilities and entropies are computed tile by tile, without the logits of a "
    "microbatch, with the same result"
)
CONTENTS = "a checkpoint always holds, and a resume loads, everything that a resume needs"
ROLE = (
    "microbatches are cut once, by the policy's keys: it needs the most memory, and no result "
    "depends on them"
)
CUT = "reference and critic are cut as the policy is"
BATCH = "set it for the actor: critic and policy go through the same mini-batches"
OLD_WORD = (
    "veRL itself gave it up, and no result depends on it: set trainer.ppo_micro_batch_size_per_gpu"
)
READ = "weights are read from the Hugging Face files of model.model_path"
LINEAR = "only the file of the model is read, without libraries of its own"
STATE = ("model", "optimizer", "extra", "hf_model")
STRATEGIES = ("megatron", "fsdp", "fsdp2")
_M = "trainer.megatron"


def fsdp(prefix: str, row: str, offload_row: str) -> dict[str, ForeignKey]:
    section = f"{prefix}.fsdp_config"
    return {
        f"{section}.wrap_policy.transformer_layer_cls_to_wrap": taken(row, MEGATRON),
        f"{section}.wrap_policy.min_num_params": taken(row, MEGATRON),
        f"{section}.param_offload": taken(offload_row, OFFLOAD),
        f"{section}.optimizer_offload": taken(offload_row, OFFLOAD),
        f"{section}.offload_policy": taken("", OFFLOAD),
        f"{section}.reshard_after_forward": taken("", SHARDED),
        f"{section}.fsdp_size": taken(row, SHARDED),
        f"{section}.forward_prefetch": taken(row, MEGATRON),
        f"{section}.use_orig_params": taken("", MEGATRON),
        f"{section}.forward_only": taken("", MEGATRON),
        f"{section}.strategy": ForeignKey("", MEGATRON, only=STRATEGIES),
        f"{section}.model_dtype": ForeignKey(
            "",
            "trainer.dtype decides, and its bf16 keeps fp32 masters",
            only=("fp32", "float32", "bf16", "bfloat16"),
        ),
        f"{section}.dtype": ForeignKey(
            "", "set trainer.dtype", only=("bfloat16", "bf16", "fp32", "float32")
        ),
        f"{section}.mixed_precision.param_dtype": ForeignKey(
            "", "set trainer.dtype", only=("bfloat16", "bf16")
        ),
        f"{section}.mixed_precision.reduce_dtype": ForeignKey(
            "", "gradients are reduced in fp32", only=("fp32", "float32")
        ),
        f"{section}.mixed_precision.buffer_dtype": taken("", MEGATRON),
        f"{section}.ulysses_sequence_parallel_size": ForeignKey(
            "", f"set {prefix.removesuffix('.model')}.ulysses_sequence_parallel_size", only=(1,)
        ),
        f"{section}.entropy_from_logits_with_chunking": taken("", TILES),
        f"{section}.entropy_checkpointing": taken("", TILES),
        f"{section}.entropy_from_logits_chunk_size": taken("", TILES),
        f"{section}.pad_to_length": taken("", MEGATRON),
        f"{section}.pad_to_length_bucket": taken("", MEGATRON),
        f"{section}.use_torch_compile": taken("", MEGATRON),
        f"{section}.seed": taken("", "set seed: it is the run's"),
        f"{section}.full_determinism": ForeignKey("", "set deterministic", only=(False,)),
    }


SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
OVERRIDES = ("override_transformer_config", "override_ddp_config")


def megatron(prefix: str, is_policy: bool) -> dict[str, ForeignKey]:
    section = f"{prefix}.megatron"
    flags = f"{section}.override_transformer_config"
    return {
        **{
            f"{section}.{name}": ForeignKey("", to=f"{_M}.{name}") if is_policy else taken("", CUT)
            for name in SIZES
        },
        **{
            f"{flags}.{name}": ForeignKey("", to=f"trainer.{name}") if is_policy else taken("", CUT)
            for name in RECOMPUTE
        },
        f"{flags}.attention_backend": taken("", "each device has its own kernel here"),
        **{
            f"{section}.{name}_offload": taken("", OFFLOAD)
            for name in ("param", "grad", "optimizer")
        },
        f"{section}.use_distributed_optimizer": taken("", SHARDED),
        f"{section}.use_mbridge": taken("", READ),
        f"{section}.vanilla_mbridge": taken("", READ),
        f"{section}.use_dist_checkpointing": taken("", READ),
        f"{section}.dist_checkpointing_path": ForeignKey(
            "", f"{READ}: convert them, and leave it out", only=("",)
        ),
        f"{section}.dist_checkpointing_prefix": taken("", READ),
        f"{section}.use_remove_padding": taken("", "set trainer.use_remove_padding"),
        f"{section}.forward_only": taken("", MEGATRON),
        f"{section}.dtype": ForeignKey("", "set trainer.dtype", only=("bfloat16", "bf16")),
        f"{section}.seed": taken("", "set seed: it is the run's"),
        f"{section}.override_mcore_model_config": ForeignKey(
            "", "the model is what its config.json says", only=({},)
        ),
    }


def checkpoint(prefix: str, is_policy: bool, row: str) -> dict[str, ForeignKey]:
    section = f"{prefix}.checkpoint"
    export = {"to": "trainer.save_hf_checkpoint", "convert": always_if_exported}
    return {
        f"{section}.load_contents": ForeignKey(row, CONTENTS, each_of=STATE),
        f"{section}.save_contents": ForeignKey(
            row, CONTENTS, each_of=STATE, **(export if is_policy else {})
        ),
        f"{section}.async_save": taken("", "checkpoints are written beside the training"),
    }


def optimizer(prefix: str, to: str, rows: Mapping[str, str], clip: str) -> dict[str, ForeignKey]:
    section = f"{prefix}.optim"
    offloaded = ("optimizer_cpu_offload", "optimizer_offload_fraction")
    hints = (*offloaded, "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
    return {
        f"{section}.lr": ForeignKey(rows["lr"], to=f"{to}.lr"),
        f"{section}.lr_warmup_steps_ratio": ForeignKey(
            rows["ratio"], to=f"{to}.lr_warmup_steps_ratio"
        ),
        f"{section}.lr_warmup_steps": ForeignKey(
            "", to=f"{to}.lr_warmup_steps", convert=if_positive
        ),
        f"{section}.lr_warmup_init": ForeignKey("", "the rate rises from 0", only=(0,)),
        f"{section}.min_lr_ratio": ForeignKey(rows["min"], to=f"{to}.min_lr_ratio"),
        f"{section}.warmup_style": ForeignKey(rows["style"], to=f"{to}.lr_scheduler_type"),
        f"{section}.lr_scheduler_type": ForeignKey("", to=f"{to}.lr_scheduler_type"),
        f"{section}.lr_decay_style": ForeignKey("", to=f"{to}.lr_scheduler_type"),
        f"{section}.lr_decay_steps": ForeignKey("", "the decay ends with the run"),
        f"{section}.num_cycles": ForeignKey("", "cosine is half a wave", only=(0.5,)),
        f"{section}.weight_decay": ForeignKey("", to=f"{to}.weight_decay"),
        f"{section}.betas": ForeignKey("", to=f"{to}.betas"),
        f"{section}.clip_grad": ForeignKey("", to=clip),
        f"{section}.min_lr": ForeignKey("", "set min_lr_ratio, a share of lr", only=(0,)),
        f"{section}.optimizer": ForeignKey("", "Adam is AdamW here", only=("AdamW", "adam")),
        f"{section}.optimizer_impl": ForeignKey("", "Adam is AdamW here", only=("torch.optim",)),
        f"{section}.weight_decay_incr_style": ForeignKey("", "it stays", only=("constant",)),
        f"{section}.lr_wsd_decay_style": taken("", "set algorithm.optimizer.lr_decay_style"),
        f"{section}.lr_wsd_decay_steps": ForeignKey("", "set algorithm.optimizer.lr_decay_steps"),
        f"{section}.use_checkpoint_opt_param_scheduler": taken("", "a resume goes on as it was"),
        f"{section}.total_training_steps": ForeignKey(
            rows["steps"], to="trainer.total_steps", convert=if_positive
        ),
        **{f"{section}.override_optimizer_config.{name}": taken("", OFFLOAD) for name in hints},
    }


_ACTOR, _MODEL, _OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.model", "algorithm.optimizer"
_REF, _CRITIC = "actor_rollout_ref.ref", "critic"
KEYS: dict[str, ForeignKey] = {
    "actor_rollout_ref.hybrid_engine": ForeignKey(
        "N1", "engines and trainer are always parts of one run", only=(True,)
    ),
    "actor_rollout_ref.nccl_timeout": ForeignKey("", to="trainer.collective_timeout"),
    f"{_MODEL}.external_lib": ForeignKey("N2", LINEAR),
    f"{_MODEL}.override_config": ForeignKey(
        "N3",
        "the model is what its config.json says, and lengths must fit it: edit that of "
        "model.model_path",
        only=({},),
        fits=only_longer,
    ),
    f"{_MODEL}.enable_gradient_checkpointing": ForeignKey(
        "N4", to="trainer.recompute_granularity", convert=full_if_true
    ),
    f"{_MODEL}.enable_activation_offload": taken("", OFFLOAD),
    f"{_MODEL}.use_remove_padding": ForeignKey("N5", to="trainer.use_remove_padding"),
    f"{_MODEL}.use_fused_kernels": ForeignKey("N6", TILES, only=(True, False)),
    f"{_MODEL}.fused_kernel_options.impl_backend": ForeignKey(
        "N7", TILES, only=("torch", "triton")
    ),
    f"{_MODEL}.use_liger": taken("", "kernels are Megatron's own, with the same result"),
    f"{_MODEL}.use_shm": taken("", READ),
    f"{_MODEL}.tiled_mlp.enabled": taken("", OFFLOAD),
    f"{_MODEL}.tiled_mlp.num_shards": taken("", OFFLOAD),
    f"{_ACTOR}.strategy": ForeignKey("N8", MEGATRON, only=STRATEGIES),
    f"{_ACTOR}.ppo_micro_batch_size": taken("N9", OLD_WORD),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": ForeignKey(
        "N10", to="trainer.ppo_micro_batch_size_per_gpu"
    ),
    f"{_ACTOR}.use_dynamic_bsz": ForeignKey("N11", to="trainer.use_dynamic_bsz"),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": ForeignKey("N12", to="trainer.max_token_len_per_gpu"),
    f"{_ACTOR}.grad_clip": ForeignKey("N13", to="trainer.grad_clip"),
    f"{_ACTOR}.ppo_epochs": ForeignKey("N14", to="trainer.ppo_epochs"),
    f"{_ACTOR}.shuffle": ForeignKey("N15", to="trainer.ppo_shuffle"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": ForeignKey("N16", to=f"{_M}.context_parallel_size"),
    f"{_ACTOR}.entropy_from_logits_with_chunking": taken("N17", TILES),
    f"{_ACTOR}.entropy_checkpointing": taken("N18", TILES),
    **checkpoint(_ACTOR, True, "N19"),
    **optimizer(
        _ACTOR,
        _OPTIM,
        {"lr": "N20", "ratio": "N21", "min": "N22", "style": "N23", "steps": "N24"},
        "trainer.grad_clip",
    ),
    **fsdp(_ACTOR, "N25, N27, N28", "N26"),
    **megatron(_ACTOR, True),
    **fsdp(_REF, "N29", "N29"),
    **megatron(_REF, False),
    "trainer.balance_batch": ForeignKey("N42", to="trainer.balance_batch"),
    "trainer.total_training_steps": ForeignKey(
        "N43", to="trainer.total_steps", convert=if_positive
    ),
    "trainer.resume_mode": ForeignKey(
        "N44",
        "a run always goes on from its newest checkpoint; set continue_from_checkpoint=false for a "
        "new one, and trainer.resume_from_path to go on from another's",
        only=("auto",),
    ),
    "trainer.resume_from_path": ForeignKey(
        "N45", to="trainer.resume_from_path", convert=unset_if_empty
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

KEYS |= {  # both take the microbatches of the policy, so one set of keys cuts for all
    f"{_REF}.strategy": ForeignKey("", MEGATRON, only=STRATEGIES),
    f"{_REF}.log_prob_micro_batch_size": taken("N30", OLD_WORD),
    f"{_REF}.log_prob_micro_batch_size_per_gpu": taken("N31", ROLE),
    f"{_REF}.log_prob_use_dynamic_bsz": taken("N32", ROLE),
    f"{_REF}.log_prob_max_token_len_per_gpu": taken("N32", ROLE),
    f"{_REF}.ulysses_sequence_parallel_size": taken("N32", CUT),
    f"{_REF}.entropy_from_logits_with_chunking": taken("N32", TILES),
    f"{_REF}.entropy_checkpointing": taken("N32", TILES),
    f"{_CRITIC}.strategy": ForeignKey("N33", MEGATRON, only=STRATEGIES),
    **optimizer(
        _CRITIC,
        "critic.optim",
        dict.fromkeys(("lr", "ratio", "min", "style", "steps"), "N34"),
        "critic.grad_clip",
    ),
    f"{_CRITIC}.model.override_config": ForeignKey(
        "N35",
        "the model is what its config.json says: edit that of model.critic_model_path",
        only=({},),
        fits=only_longer,
    ),
    f"{_CRITIC}.model.external_lib": ForeignKey("N35", LINEAR),
    f"{_CRITIC}.model.enable_gradient_checkpointing": taken("N35", ROLE),
    f"{_CRITIC}.model.use_remove_padding": taken("N35", ROLE),
    f"{_CRITIC}.model.enable_activation_offload": taken("", OFFLOAD),
    f"{_CRITIC}.model.use_shm": taken("", READ),
    **fsdp(f"{_CRITIC}.model", "N36", "N36"),
    **megatron(_CRITIC, False),
    **checkpoint(_CRITIC, False, ""),
    f"{_CRITIC}.ppo_micro_batch_size": taken("", OLD_WORD),
    f"{_CRITIC}.ppo_micro_batch_size_per_gpu": taken("N37", ROLE),
    f"{_CRITIC}.forward_micro_batch_size": taken("", ROLE),
    f"{_CRITIC}.forward_micro_batch_size_per_gpu": taken("N37", ROLE),
    f"{_CRITIC}.use_dynamic_bsz": taken("N38", ROLE),
    f"{_CRITIC}.ppo_max_token_len_per_gpu": taken("N38", ROLE),
    f"{_CRITIC}.forward_max_token_len_per_gpu": taken("N38", ROLE),
    f"{_CRITIC}.ulysses_sequence_parallel_size": taken("N39", CUT),
    f"{_CRITIC}.ppo_epochs": ForeignKey("N39", to="trainer.ppo_epochs"),
    f"{_CRITIC}.shuffle": ForeignKey("N39", to="trainer.ppo_shuffle"),
    f"{_CRITIC}.grad_clip": ForeignKey("N40", to="critic.grad_clip"),
    f"{_CRITIC}.cliprange_value": ForeignKey("N41", to="critic.cliprange_value"),
    "trainer.critic_warmup": ForeignKey("N46", to="trainer.critic_warmup"),
}
FREE = {  # sections whose keys are another system's: where they go, None: as the policy's
    f"{_ACTOR}.optim.override_optimizer_config": f"{_M}.override_optimizer_config",
    f"{_CRITIC}.optim.override_optimizer_config": None,
    **{f"{_ACTOR}.megatron.{name}": f"{_M}.{name}" for name in OVERRIDES},
    **{f"{role}.megatron.{name}": None for role in (_REF, _CRITIC) for name in OVERRIDES},
}

# --- from veRL's keys to rft's --------------------------------------------------------------------


@dataclass
class Translation:
    """What keys of veRL say: `values` by rft's keys, each with the key that said it (`said_by`);
    `hints`: the keys that change nothing here, by the reason; `problems`: one per key that cannot
    be taken; `called`: names that were given, of those that the tables call otherwise.
    """

    keys: Mapping[str, ForeignKey]
    prefix: str = ""
    free: Mapping[str, str | None] = field(default_factory=lambda: FREE)
    skipped: Mapping[str, str] = field(default_factory=dict)  # sections of hints, with the reason
    values: dict[str, Any] = field(default_factory=dict)
    said_by: dict[str, str] = field(default_factory=dict)
    hints: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    called: Mapping[str, str] = field(default_factory=dict)

    def take(self, node: dict[str, Any]) -> "Translation":
        for name, value in leaves(node, self.keys.__contains__):
            value = None if value in ("None", "???") else value
            section = next((one for one in self.free if name.startswith(f"{one}.")), None)
            hint = next((one for one in self.skipped if name.startswith(f"{one}.")), None)
            if name.endswith("_target_"):  # the name of veRL's own class for the section
                continue
            if name in self.keys:
                self._known(name, self.keys[name], value)
            elif section is not None:
                self._flag(section, name, value)
            elif hint is not None:
                self._hint(name, value, self.skipped[hint])
            elif not is_empty_section(name, value, (*self.keys, *self._sections)):
                self._refuse(None, self._unknown(name))
        return self

    @property
    def _sections(self) -> list[str]:
        return [f"{one}." for one in (*self.free, *self.skipped)]

    def _known(self, name: str, key: ForeignKey, value: Any) -> None:
        if value is None:
            return
        if not key.takes(value):
            self._refuse(key.to, f"{self.place(name)}={value} is refused: {key.instead}")
        elif key.to is not None:
            self.set(key.to, key.convert(value), name)
        if key.takes(value) and key.why and not (value in (False, "", {}) or key.is_usual(value)):
            self._hint(name, value, key.why)

    def _flag(self, section: str, name: str, value: Any) -> None:
        to = self.free[section]
        if value is None:
            return
        if to is None:
            self._hint(name, value, CUT)
            return
        node = self.values.setdefault(to, {})
        *inside, word = name.removeprefix(f"{section}.").split(".")
        for one in inside:
            node = node.setdefault(one, {})
        node[word] = value
        self.said_by[to] = section

    def set(self, to: str, wanted: Any, name: str) -> None:
        if wanted is UNSET:
            return
        before = self.values.get(to, wanted)
        if before != wanted:
            self._refuse(
                to,
                f"{self.place(name)}={wanted} contradicts {self.place(self.said_by[to])}: both "
                f"are {to}, set only one",
            )
        self.values[to], self.said_by[to] = wanted, self.said_by.get(to, name)

    @property
    def notes(self) -> list[Note]:
        """One for each reason."""
        return [
            Note(self.prefix + ", ".join(said[:-1] + [name]), value, "", why)
            for why, said in self.hints.items()
            for name, _, value in [said[-1].partition("=")]
        ]

    def _hint(self, name: str, value: Any, why: str) -> None:
        self.hints.setdefault(why, []).append(f"{self.called.get(name, name)}={value}")

    def _refuse(self, key: str | None, sentence: str) -> None:
        self.problems.append(Problem(key or "", sentence))

    def _unknown(self, name: str) -> str:
        match = difflib.get_close_matches(name, self.keys, n=1, cutoff=0.6)
        hint = f"; did you mean `{self.prefix}{match[0]}`?" if match else "; see docs/verl.md"
        return f"unknown key `{self.place(name)}`{hint}"

    def place(self, name: str) -> str:
        """The key as it was written."""
        return self.prefix + self.called.get(name, name)


# of a block only: a command line says it together with others (`rft.config.verl_joints`)
IN_BLOCK = {
    "algorithm.rollout_correction.bypass_mode": ForeignKey(
        "", to="algorithm.proximal_logprobs", convert=operator.not_
    )
}


def of_block(block: dict[str, Any] | None) -> Translation:
    """Sections may be named without actor_rollout_ref before them, as Trinity-RFT takes them."""
    keys = KEYS | IN_BLOCK
    is_end = {*keys, *map(_flat, keys)}.__contains__
    given = block if isinstance(block, dict) else {}  # what is none is refused by its type
    found = verl_newer.listed(dict(leaves(given, is_end)), verl_newer.OF_BLOCK)
    return Translation(keys, f"{BLOCK}.", called=found.called).take(nested(found.given))


def _flat(name: str) -> str:
    return name.removeprefix("actor_rollout_ref.")


def merge(config: Config) -> None:
    """Set what `trainer.trainer_config` says; raises ConfigError with all that it cannot say.

    A key of rft that was given another value itself contradicts, and is refused.
    """
    found, default = of_block(config.trainer.trainer_config), Config()
    problems = [problem.sentence for problem in found.problems]
    for to, wanted in found.values.items():
        said, there = found.place(found.said_by[to]), get(config, to)
        try:
            wanted = converted(to, wanted)
        except ConfigError as error:
            problems.append(f"{said}={wanted}: {error}")
            continue
        if there not in (get(default, to), wanted):
            problems.append(f"{said}={wanted} contradicts {to}={there}: set only one")
        section, _, word = to.rpartition(".")
        setattr(get(config, section), word, wanted)
    refuse_all(problems)
