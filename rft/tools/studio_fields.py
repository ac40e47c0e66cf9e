"""The fields of the config studio: every key of the schema, where it stands on the page, and when
it is of any use.

In: the keys of the schema. Out: `Field`s by part, for a beginner the few that a run is made of, for
an expert all of them. Invariant: a key that is added to the schema is on the page; nothing is
listed twice.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rft.config import TRAINING
from rft.config.keys import Setting, tables
from rft.ground import plugins

BASIC, IMPORTANT = "Basic", "Important"
PARTS = {  # of the expert mode: what a key begins with
    "Run": ("", "stages", "sweep.", "log."),
    "Model": ("model.",),
    "Algorithm": ("algorithm.",),
    "Buffer": ("buffer.", "data_processor.", "service."),
    "Explorer & Synchronizer": ("explorer.", "synchronizer."),
    "Trainer": ("trainer.", "critic."),
    "Cluster & Monitor": ("cluster.", "monitor."),
}
TASKSET = "buffer.explorer_input.taskset"
BEGINNER = {
    BASIC: (
        "name",
        "model.model_path",
        f"{TASKSET}.path",
        f"{TASKSET}.format.prompt_type",
        f"{TASKSET}.format.prompt_key",
        f"{TASKSET}.format.response_key",
        f"{TASKSET}.format.messages_key",
        "buffer.explorer_input.default_reward_fn_type",
        "buffer.trainer_input.experience_buffer.path",
        "cluster.node_num",
        "cluster.gpu_per_node",
        "explorer.rollout_model.engine_num",
    ),
    IMPORTANT: (
        "algorithm.optimizer.lr",
        "algorithm.repeat_times",
        "buffer.batch_size",
        "buffer.train_batch_size",
        "buffer.total_epochs",
        "trainer.total_steps",
        "model.max_prompt_tokens",
        "model.max_response_tokens",
        "synchronizer.max_staleness",
        "explorer.eval_interval",
        "trainer.save_interval",
        "trainer.megatron.tensor_model_parallel_size",
        "trainer.dtype",
        "monitor.monitor_type",
        "checkpoint_root_dir",
    ),
}
KINDS = {  # keys that end so name entries of these tables
    "algorithm_type": ("algorithm",),
    "advantage_fn": ("advantage", "token_advantage"),
    "policy_loss_fn": ("policy_loss",),
    "sample_strategy": ("sample_strategy",),
    "kl_loss_fn": ("kl",),
    "kl_penalty_fn": ("kl",),
    "monitor_type": ("monitor",),
    "selector_type": ("selector",),
    "priority_fn": ("priority",),
    "prompt_type": ("row_format",),
    "reward_fn_type": ("reward",),
    "workflow_type": ("workflow",),
}
ONLY_NAMED = ("algorithm.algorithm_type", "monitor.monitor_type")  # nothing else will do
NOT_SET_HERE = ("stage_name", "prepare", "finish")  # a recipe's own business
VISIBLE = (  # (keys that begin so, are of use where this key, is one of these)
    ("critic.", "algorithm.algorithm_type", ("ppo",)),
    ("model.critic_model_path", "algorithm.algorithm_type", ("ppo",)),
    ("trainer.critic_warmup", "algorithm.algorithm_type", ("ppo",)),
    ("buffer.explorer_input.", "mode", ("both", "explore", "bench")),
    ("explorer.", "mode", ("both", "explore", "bench")),
    ("synchronizer.", "mode", ("both", "explore")),
    ("trainer.", "mode", TRAINING),
    ("algorithm.optimizer.", "mode", TRAINING),
    ("buffer.trainer_input.experience_buffer.path", "mode", ("train",)),
    (f"{TASKSET}.format.prompt_key", f"{TASKSET}.format.prompt_type", ("plaintext",)),
    (f"{TASKSET}.format.response_key", f"{TASKSET}.format.prompt_type", ("plaintext",)),
    (f"{TASKSET}.format.messages_key", f"{TASKSET}.format.prompt_type", ("messages",)),
    ("algorithm.optimizer.lr_decay_", "algorithm.optimizer.lr_scheduler_type", ("wsd",)),
    ("trainer.recompute_method", "trainer.recompute_granularity", ("full",)),
    ("trainer.recompute_num_layers", "trainer.recompute_granularity", ("full",)),
    ("trainer.recompute_modules", "trainer.recompute_granularity", ("selective",)),
    ("trainer.ppo_micro_batch_size_per_gpu", "trainer.use_dynamic_bsz", ("false",)),
    ("trainer.max_token_len_per_gpu", "trainer.use_dynamic_bsz", ("true",)),
    ("trainer.profile_", "trainer.profiler", ("torch", "nsys")),
)


@dataclass(frozen=True)
class Field:
    """One key as the page shows it.

    `choices`: the only values; `suggested`: names that rft knows, others may be the user's own.
    """

    key: str
    part: str
    type: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()
    suggested: tuple[str, ...] = ()


def fields() -> list[Field]:
    """Every key that holds a value, in the order of the schema."""
    return [
        Field(
            one.key,
            part_of(one.key),
            one.takes,
            one.default,
            one.meaning,
            choices(one),
            suggested(one.key),
        )
        for _, settings in tables()
        for one in settings
        if one.key not in NOT_SET_HERE
    ]


def part_of(key: str) -> str:
    return next(
        (part for part, starts in PARTS.items() if key.startswith(tuple(filter(None, starts)))),
        "Run",
    )


def choices(setting: Setting) -> tuple[str, ...]:
    if setting.type == "bool":
        return ("true", "false")
    if setting.key in ONLY_NAMED:
        return named(setting.key)
    return (
        ("null", *setting.choices) if setting.is_optional and setting.choices else setting.choices
    )


def suggested(key: str) -> tuple[str, ...]:
    return () if key in ONLY_NAMED else named(key)


def named(key: str) -> tuple[str, ...]:
    """The entries of its tables: rft's own, and those of plug-ins that this process has loaded."""
    kinds = next((kinds for end, kinds in KINDS.items() if key.endswith(end)), ())
    return tuple(name for kind in kinds for name in plugins.table_of(kind))


def is_visible(key: str, values: dict[str, Any]) -> bool:
    """Whether the key can matter next to these values; a value
    that is not among them decides nothing.
    """
    rules = [(other, allowed) for start, other, allowed in VISIBLE if key.startswith(start)]
    return all(
        str(values[other]).lower() in allowed
        for other, allowed in rules
        if values.get(other) is not None
    )


def searched(text: str, among: Iterable[str]) -> str | None:
    """The key that a message names first; if none, that of which it names an item or a part."""
    keys = list(among)
    for behind in (r"(?![\w]|\.\w)", r"(?=\.\w)"):
        places = {key: re.search(rf"(?<![\w.]){re.escape(key)}{behind}", text) for key in keys}
        found = {key: place.start() for key, place in places.items() if place is not None}
        if found:
            return min(found, key=lambda key: found[key])
        keys = [key for key in keys if "." in key]  # `name.jsonl` is none
    return None
