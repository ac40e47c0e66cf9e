"""What newer versions of veRL call otherwise, or have besides: sections that moved, and rows of
keys that say how its own engines work.

In: keys by any version's names. Out: the same by the names of the tables (`rft.config.verl_run`),
and what each was called, so that sentences say what was written. Invariant: where a key is given
by both names the older one counts, as in veRL.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rft.config.foreign import ForeignKey, Note

MOVED = {  # a key, or a section: what the tables call it
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager.source": "reward_model.reward_loop_source",
    "reward.reward_manager.module.path": "reward_model.reward_loop_module_path",
    "reward.reward_manager.module.name": "reward_model.reward_loop_class_name",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model": "reward_model",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward_manager.name": "reward_model.reward_manager",
    "reward_manager.source": "reward_model.reward_loop_source",
    "reward_manager.module.path": "reward_model.reward_loop_module_path",
    "reward_manager.module.name": "reward_model.reward_loop_class_name",
    "sandbox_fusion": "reward_model.sandbox_fusion",
    "critic.fsdp": "critic.model.fsdp_config",
}
OF_BLOCK = {  # of trainer.trainer_config
    **{one: f"actor_rollout_ref.{one}" for one in ("model", "actor", "ref")},
    "critic.fsdp": "critic.model.fsdp_config",
}
# sections of each role, and what they say where they are off, which is the only way that is taken
OFF = {
    "qat.enable": "weights are trained as they are",
    "megatron.use_megatron_fsdp": "Megatron's distributed optimizer shards over all ranks",
    "megatron.dynamic_context_parallel": "set trainer.megatron.context_parallel_size",
    "optim.use_layer_wise_distributed_optimizer": "Adam is AdamW here",
}
HINTS = {
    "nothing here depends on it": (
        "megatron.max_seqlen_per_dp_cp_rank",
        "megatron.dist_ckpt_optim_fully_reshardable",
        "megatron.distrib_optim_fully_reshardable_mem_efficient",
        "megatron.entropy_from_logits_with_chunking",
        "megatron.entropy_from_logits_chunk_size",
        "megatron.pad_bshd_to_minibatch_max",
        "megatron.pad_to_length",
        "megatron.pad_to_length_bucket",
        "megatron.router_replay.record_file",
        "megatron.router_replay.replay_file",
    ),
    "set trainer.megatron.override_optimizer_config": (
        "optim.use_precision_aware_optimizer",
        "optim.main_grads_dtype",
        "optim.exp_avg_dtype",
        "optim.exp_avg_sq_dtype",
    ),
}
POLICY = "actor_rollout_ref.actor"
ROLES = (POLICY, "actor_rollout_ref.ref", "critic")
AS_POLICY = "reference and critic choose their experts anew"
REPLAY = ForeignKey(
    "",
    "what is replayed is what the engines chose, which is R3: set that",
    to="trainer.router_replay",
    convert="R3".__eq__,
    only=("disabled", "R3"),
)
ENGINES = "the trainer is Megatron; trainer.megatron.*_size cut the model"
OTHERS = ("veomni", "torchtitan", "engine", "fsdp_config.turbo_config")  # of engines of its own
CUT = ("", ".fsdp_config", ".megatron")  # of a role: where its weights are said to be quantized


def rows() -> dict[str, ForeignKey]:
    found = {
        f"{role}.{name}": ForeignKey("", why, takes_any=True)
        for role in ROLES
        for why, names in HINTS.items()
        for name in names
    }
    found |= {
        f"{role}.{name}": ForeignKey("", why, only=(False,))
        for role in ROLES
        for name, why in OFF.items()
    }
    for role in ROLES:
        only_here = REPLAY if role == POLICY else ForeignKey("", AS_POLICY, takes_any=True)
        found[f"{role}.megatron.router_replay.mode"] = only_here
    return found | {
        f"{role}.qat.enable": ForeignKey("", OFF["qat.enable"], only=(False,)) for role in _cut()
    }


def skipped() -> dict[str, str]:
    """Sections that say nothing, because what switches them on is refused."""
    others = [name_of(f"{role}.{one}") for role in ROLES for one in OTHERS]
    others.append("critic.model.fsdp_config.turbo_config")
    return {
        **{f"{role}.qat": OFF["qat.enable"] for role in _cut()},
        **dict.fromkeys(others, ENGINES),
    }


def _cut() -> list[str]:
    where = [f"{role}{part}" for role in ROLES for part in CUT]
    return [MOVED.get(one, one) for one in where] + ["critic.model.fsdp_config"]


class Listed(NamedTuple):
    """`given`: by the tables' names; `called`: of those that were given by another, that one;
    `notes`: names that do not count, because the older one of the same was given too.
    """

    given: dict[str, Any]
    called: dict[str, str]
    notes: list[Note]

    def as_given(self, text: str) -> str:
        """A text with the names that were written, and not the tables'."""
        for name, written in self.called.items():
            text = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w.])", written, text)
        return text


def listed(given: dict[str, Any], moved: Mapping[str, str] = MOVED) -> Listed:
    found = Listed({}, {}, [])
    names = {name: name_of(name, moved) for name in given}
    older = {name for name, value in given.items() if name == names[name] and value is not None}
    for name, value in given.items():
        known = names[name]
        if known != name and known in older:
            if value is not None and value != given[known]:
                found.notes.append(Note(name, value, "", f"{known} is given too, and wins in veRL"))
        elif value is not None or known not in found.given:
            found.given[known] = value
            if known != name:
                found.called[known] = name
    return found


def name_of(name: str, moved: Mapping[str, str] = MOVED) -> str:
    section = next((one for one in moved if f"{name}.".startswith(f"{one}.")), None)
    return name if section is None else moved[section] + name.removeprefix(section)
