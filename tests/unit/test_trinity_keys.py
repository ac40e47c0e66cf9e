"""Every key of Trinity-RFT's config classes, one at a time, alone in a file: at its default it
means what leaving it out means, and off its default the part that uses it receives it, or the start
says why not, by the key's name.

`make test` turns a third of the keys, by a seed that it prints; `make verify` turns all of them.
What a part receives is looked at where it is made: vLLM's arguments, the task and how it is
sampled, the rate of a step, the arguments of the loss, what an actor is made of. A section that a
part gets as a whole counts as received where code outside config and checks reads that key of it.
"""

import ast
import dataclasses
import functools
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trinity_facts import DEFAULTS

import rft
from rft import config as configs
from rft.algorithm import recipe
from rft.config import Config
from rft.config.file import Flat
from rft.config.trinity_defaults import KEPT
from rft.data.packing import cut_of
from rft.data.supervised import row_needs
from rft.megatron import schedule
from rft.preflight.fill import fill_config
from rft.preflight.rules import Refusals
from rft.run import assembly, parts
from rft.run.cards import Card, Machine
from rft.sync.style import Cadence

JUDGE, ADAPTER = "explorer.auxiliary_models", "model.lora_configs"
SET, ROWS = configs.TASKSET_KEY, "buffer.trainer_input.experience_buffer"
POLICY = "explorer.rollout_model"
BASE: dict[str, Any] = {
    "name": "a",
    "checkpoint_root_dir": "runs",
    "model": {"model_path": "m", "max_model_len": 64, "max_response_tokens": 32},
    "buffer": {
        "batch_size": 2,
        "explorer_input": {"taskset": {"path": "ROOT/rows.jsonl", "name": "b"}},
    },
    "explorer": {"auxiliary_models": [{"name": "judge", "model_path": "judge"}]},
}
TRAINS_ROWS = {"algorithm.algorithm_type": "sft", f"{ROWS}.storage_type": "file", f"{ROWS}.path": 1}
# keys that mean something only beside others: the beginning of their names, and those others
BESIDE: dict[str, dict[str, Any]] = {
    f"{ADAPTER}.": {ADAPTER: [{}]},
    "algorithm.optimizer.min_lr_ratio": {"algorithm.optimizer.lr_scheduler_type": "cosine"},
    "trainer.megatron.sequence_parallel": {"trainer.megatron.tensor_model_parallel_size": 2},
    "data_processor.experience_pipeline.save_input": {
        "data_processor.experience_pipeline.operators": [{"name": "reward_filter"}]
    },
    **{f"{ROWS}.{word}": TRAINS_ROWS for word in ("format.", "data_selector.", "split", "subset")},
    "monitor.monitor_args": {"monitor.monitor_type": "wandb"},
    f"{SET}.format.prompt_type": {f"{SET}.format.messages_key": "talk"},
    f"{ROWS}.format.system_prompt": TRAINS_ROWS | {f"{ROWS}.format.prompt_type": "plaintext"},
    f"{ROWS}.format.chosen": TRAINS_ROWS | {"algorithm.algorithm_type": "dpo"},
    f"{ROWS}.format.rejected": TRAINS_ROWS | {"algorithm.algorithm_type": "dpo"},
    f"{ROWS}.format.prompt_key": TRAINS_ROWS | {f"{ROWS}.format.prompt_type": "plaintext"},
    f"{ROWS}.format.response_key": TRAINS_ROWS | {f"{ROWS}.format.prompt_type": "plaintext"},
    f"{SET}.task_selector.seed": {f"{SET}.task_selector.selector_type": "shuffle"},
    f"{SET}.data_selector.seed": {f"{SET}.data_selector.selector_type": "shuffle"},
}
# of which another place says the same: there it is not given
INSTEAD_OF = {
    f"{POLICY}.{word}": f"model.{word}"
    for word in ("model_path", "max_model_len", "max_response_tokens")
}
# what a key is off its default, where its type does not say it
OTHER: dict[str, Any] = {
    "mode": "train",
    "algorithm.algorithm_type": "grpo",
    "algorithm.loss_agg_mode": "seq-mean-token-sum",
    "algorithm.sample_strategy": "staleness_control",
    "algorithm.sample_strategy_args": {"max_staleness": 3},
    "algorithm.advantage_fn": "grpo",
    "algorithm.advantage_fn_args": {"gamma": 0.5},
    "algorithm.kl_penalty_fn": "k2",
    "algorithm.kl_penalty_fn_args": {"kl_coef": 0.5},
    "algorithm.policy_loss_fn": "gspo",
    "algorithm.policy_loss_fn_args": {"clip_range": 0.5},
    "algorithm.kl_loss_fn": "k2",
    "algorithm.kl_loss_fn_args": {"kl_coef": 0.5},
    "algorithm.entropy_loss_fn": "none",
    "algorithm.entropy_loss_fn_args": {"entropy_coef": 0.5},
    "algorithm.rollout_correction": {"rollout_is": "token"},
    "algorithm.optimizer.lr": 0.5,
    "algorithm.optimizer.lr_warmup_steps": 4,
    "algorithm.optimizer.lr_warmup_steps_ratio": 0.5,
    "algorithm.optimizer.min_lr_ratio": 0.5,
    "algorithm.optimizer.lr_scheduler_type": "cosine",
    "algorithm.optimizer.warmup_style": "cosine",
    "algorithm.optimizer.optimizer_type": "sgd",
    "algorithm.optimizer.betas": [0.8, 0.9],
    "data_processor.task_pipeline.inputs": ["a.jsonl"],
    "data_processor.task_pipeline.operators": [{"name": "length_filter"}],
    "data_processor.task_pipeline.output": {"path": "out.jsonl"},
    "data_processor.task_pipeline.top_k": 5,
    "data_processor.experience_pipeline.operators": [{"name": "reward_filter"}],
    "model.lora_configs": [{"lora_rank": 3}],
    "model.top_p": 0.5,
    "model.top_k": 5,
    f"{POLICY}.top_p": 0.5,
    f"{POLICY}.top_k": 5,
    f"{SET}.rollout_args.top_p": 0.5,
    f"{SET}.rollout_args.top_k": 5,
    f"{SET}.path": "ROOT/other.jsonl",
    "model.enable_thinking": False,
    "model.chat_template_path": "ROOT/template",
    f"{POLICY}.enable_thinking": False,
    f"{JUDGE}.enable_thinking": False,
    f"{POLICY}.enable_prompt_truncation": False,
    f"{JUDGE}.enable_prompt_truncation": False,
    f"{POLICY}.extra_engine_args": {"block_size": 16},
    f"{JUDGE}.extra_engine_args": {"block_size": 16},
    f"{POLICY}.dtype": "float32",
    f"{JUDGE}.dtype": "float32",
    f"{POLICY}.gpu_memory_utilization": 0.5,
    f"{JUDGE}.gpu_memory_utilization": 0.5,
    f"{POLICY}.engine_type": "tinker",
    f"{JUDGE}.engine_type": "vllm_async",
    f"{ADAPTER}.target_modules": ["q_proj"],
    "buffer.batch_size": 3,
    "buffer.train_batch_size": 8,
    f"{SET}.storage_type": "sql",
    f"{SET}.task_selector.selector_type": "random",
    f"{SET}.data_selector.selector_type": "random",
    f"{SET}.format.prompt_type": "plaintext",
    f"{SET}.format.system_prompt_key": "system",
    f"{SET}.format.messages_key": "talk",
    f"{SET}.format.tools_key": "calls",
    f"{ROWS}.storage_type": "sql",
    f"{ROWS}.schema_type": "experience",
    f"{ROWS}.format.prompt_type": "plaintext",
    f"{ROWS}.data_selector.selector_type": "shuffle",
    f"{ROWS}.replay_buffer.priority_fn": "linear_decay_use_count_control_randomization",
    "buffer.trainer_input.auxiliary_buffers": {"sft": {"path": "x", "storage_type": "file"}},
    "buffer.explorer_input.tasksets": [{"path": "ROOT/rows.jsonl"}],
    "buffer.explorer_input.eval_tasksets": [{"path": "ROOT/rows.jsonl", "name": "held"}],
    "cluster.ray_address": "127.0.0.1:1",
    "explorer.over_rollout.ratio": 0.5,
    "explorer.listen_address": "127.0.0.2",
    "monitor.monitor_type": "wandb",
    "monitor.monitor_args": {"base_url": "http://127.0.0.1:1"},
    "synchronizer.sync_method": "memory",
    "synchronizer.sync_style": "fully_async",
    "trainer.save_hf_checkpoint": "never",
    "trainer.save_strategy": "single_node",
    "trainer.trainer_type": "tinker",
    "trainer.trainer_config": {"actor_rollout_ref": {"actor": {"grad_clip": 7.0}}},
    "log.level": "DEBUG",
    "stages": [{"stage_name": "one"}],
}


# defaults that say in words what rft does without: said in full, they are another value of the key
IN_WORDS = {
    "model.temperature",  # 1.0 in training, and evaluations have it anyway
    "algorithm.bypass_old_logprobs",  # true: no proximal ones but where they are needed
    f"{SET}.task_selector.seed",  # of a selector that draws nothing
    f"{SET}.data_selector.seed",
    f"{ROWS}.replay_buffer.priority_fn_args",  # its defaults
    f"{ROWS}.format.messages_key",  # of rows, which a queue has not
    # where a row's prompt and answer are; of a key that is left out, rows themselves say it
    *(f"{SET}.format.{word}" for word in ("prompt_key", "response_key", "tools_key")),
    *(f"{ROWS}.format.{word}" for word in ("prompt_type", "prompt_key", "response_key")),
    f"{ROWS}.format.tools_key",
    f"{ROWS}.total_epochs",  # of rows beside rollouts
    "explorer.proxy_port",  # of mode=serve
    f"{POLICY}.engine_type",
    f"{POLICY}.engine_num",
    f"{POLICY}.gpu_memory_utilization",
    f"{POLICY}.enable_log_requests",  # vLLM's own
    "model.tinker.rank",  # of a service
    "data_processor.experience_pipeline.save_input",  # of operators
    "synchronizer.sync_method",  # by the mode
    f"{SET}.repeat_times",  # that of the algorithm
    *(f"{JUDGE}.{word}" for word in ("enforce_eager", "enable_chunked_prefill", "dtype", "seed")),
    *(f"{JUDGE}.{word}" for word in ("gpu_memory_utilization", "enable_log_requests")),
}
# what a file must give
GIVEN = {"name", "model.model_path", "model.max_model_len", "buffer.batch_size"}
GIVEN |= {f"{SET}.name", f"{SET}.path", f"{JUDGE}.name", f"{JUDGE}.model_path"}
GIVEN |= {"model.max_response_tokens", *INSTEAD_OF, "mode"}
# values off Trinity's default that are rft's anyway
SAME: dict[str, tuple[Any, ...]] = {f"{JUDGE}.enable_prompt_truncation": (False,)}
ENGINE = ("seed", "dtype", "enforce_eager", "enable_prefix_caching", "tensor_parallel_size")
ENGINE += ("gpu_memory_utilization", "engine_args")


def off(key: str) -> Any:
    default = DEFAULTS[key]
    if key in OTHER:
        return OTHER[key]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if isinstance(default, dict | list):
        return {"a": 1} if isinstance(default, dict) else ["a"]
    return 7 if default is None else "other"


def put(raw: Any, key: str, value: Any) -> None:
    *sections, word = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        raw = raw[0] if isinstance(raw, list) else raw
    raw[word] = value


# --- what a part receives -------------------------------------------------------------------------


def filled(found: Flat) -> Config:
    config = configs.parsed(found.config)
    config.device = "cuda"
    cards = tuple(Card(number, memory=80 * 2**30) for number in range(8))
    machine = Machine(cards, visible=tuple(str(card.index) for card in cards))
    fill_config(config, Refusals(), machine, asks_ray=False)
    return config


def of_engine(config: Config) -> Any:
    make = parts.engine_spec(config, "engine_0", "n").make
    if configs.is_remote(config):
        return make.func.__name__
    return make()._arguments() | config.explorer.rollout_model.engine_args


def of_judge(config: Config) -> Any:
    judge = config.explorer.auxiliary_models[0]
    return parts.auxiliary_spec(config, judge, 0).make()._arguments() | judge.engine_args


def of_tasks(config: Config) -> Any:
    """Tasks as the explorer draws them."""
    taskset = parts.explorer_spec(config, {}, None, None, None).make.args[2]
    return [msgspec.to_builtins(next(taskset)) for _ in range(4)]


def of_template(config: Config) -> Any:
    return config.model.custom_chat_template


def of_place(config: Config) -> Any:
    return [*configs.job_dir(config).parts, config.ray_namespace]


def of_rate(config: Config) -> Any:
    return [schedule.learning_rate(step, config.algorithm.optimizer, 10) for step in range(10)]


def of_loss(config: Config) -> Any:
    algorithm = config.algorithm
    return [
        recipe.loss_arguments(algorithm),
        algorithm.policy_loss_fn_args.get("loss_agg_mode"),
        recipe.loss_coef(algorithm).value,
        recipe.penalty_coef(algorithm).value,
        algorithm.entropy_loss_fn_args,
        algorithm.advantage_fn_args,
    ]


def of_buffer(config: Config) -> Any:
    return parts.buffer_spec(config).make.args


def of_synchronizer(config: Config) -> Any:
    return parts.synchronizer_spec(config, None).make.args, Cadence(  # type: ignore[arg-type]
        config.synchronizer, ask=bool
    ).__dict__


def of_feed(config: Config) -> Any:
    return cut_of(config.trainer), assembly.rule_of(config)


def of_columns(config: Config) -> Any:
    kind = "dpo" if config.algorithm.algorithm_type == "dpo" else "sft"
    return row_needs(config.buffer.trainer_input.experience_buffer.format, ROWS, kind)


# the beginning of a key of rft: what its part receives; the first that fits. None: its section
RECEIVERS: dict[str, Callable[[Config], Any] | None] = {
    **{f"{POLICY}.{word}": of_engine for word in ENGINE},
    **{f"{JUDGE}.{word}": of_judge for word in (*ENGINE, "model_path", "trust", "max_model_len")},
    "model.chat_template_path": of_template,
    "trainer.dtype": None,  # of Megatron: tests/unit/test_models.py
    **dict.fromkeys(("model.model_path", "model.max_model_len", "model.trust"), of_engine),
    **dict.fromkeys(("model.max_response", "model.min_response"), of_tasks),
    **dict.fromkeys((f"{SET}.split", f"{SET}.subset_name", f"{SET}.storage_type"), None),
    **dict.fromkeys((f"{SET}.task_selector.kwargs", f"{SET}.task_selector.feature"), None),
    f"{SET}.": of_tasks,
    "buffer.explorer_input.default_eval": None,
    "buffer.explorer_input.default": of_tasks,
    **dict.fromkeys(("project", "name", "checkpoint_root_dir", "ray_namespace"), of_place),
    **dict.fromkeys(("algorithm.optimizer.lr", "algorithm.optimizer.min_lr"), of_rate),
    **{f"algorithm.{word}_args": of_loss for word in ("policy_loss_fn", "kl_loss_fn")},
    **{f"algorithm.{word}_args": of_loss for word in ("kl_penalty_fn", "entropy_loss_fn")},
    "algorithm.advantage_fn_args": of_loss,
    "algorithm.repeat_times": of_tasks,
    "buffer.batch_size": of_buffer,
    **dict.fromkeys((f"{ROWS}.format.enable", f"{ROWS}.format.chat"), None),
    f"{ROWS}.format.system_prompt_key": of_columns,
    f"{ROWS}.format.system_prompt": None,
    f"{ROWS}.format.": of_columns,
    f"{ROWS}.": of_buffer,
    "explorer.over_rollout": of_buffer,
    **dict.fromkeys(("synchronizer.sync_i", "synchronizer.sync_o"), of_synchronizer),
    "synchronizer.sync_timeout": of_synchronizer,
    **dict.fromkeys(("trainer.use_dynamic_bsz", "trainer.use_remove_padding"), of_feed),
    "trainer.balance_batch": of_feed,
}
# of which the part receives what is made of the value, and not the value
MADE_OF = (of_rate, of_feed, of_synchronizer)
MADE = (f"{POLICY}.dtype", f"{JUDGE}.dtype", f"{SET}.path", f"{SET}.format", f"{SET}.task_selector")
MADE += ("model.chat_template_path", f"{SET}.default", "buffer.explorer_input.default")
MADE += (f"{ROWS}.format.prompt_type", f"{ROWS}.format.tools_key")


@functools.cache
def words_read() -> set[str]:
    """Attributes that code reads which is neither of the config nor of its checks and tools."""
    found = set[str]()
    root = Path(rft.__file__).parent
    for file in root.rglob("*.py"):
        if file.relative_to(root).parts[0] not in ("config", "preflight", "tools"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found |= {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute)}
    return found


def is_nested(node: Any) -> bool:
    return isinstance(node, dict | list | tuple) or dataclasses.is_dataclass(node)


def leaves(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        node = {one.name: getattr(node, one.name) for one in dataclasses.fields(node)}
    if isinstance(node, tuple) or (isinstance(node, list) and any(map(is_nested, node))):
        node = dict(enumerate(node))
    if isinstance(node, dict) and node:
        for word, value in node.items():
            yield from leaves(value, f"{place}.{word}".strip("."))
    else:
        yield place, node


# --- one key at a time ----------------------------------------------------------------------------


class Files:
    """Files with one key turned, and what is wrong with what comes of them."""

    def __init__(self, root: Path) -> None:
        self.root, self._left_out = root, dict[str, tuple[Flat, Config]]()
        row = {"prompt": "p", "response": "r", "other": "o", "question": "q", "system": "s"}
        row |= {"talk": [{"role": "user", "content": "t"}], "calls": [{"name": "call"}]}
        text = "".join(json.dumps(row | {"a": n}) + "\n" for n in range(8))
        (root / "rows.jsonl").write_text(text, encoding="utf-8")
        (root / "other.jsonl").write_text(text.replace('"p"', '"p2"'), encoding="utf-8")
        (root / "template").write_text("{{ messages }}", encoding="utf-8")

    def taken(self, key: str, *value: Any) -> Flat:
        raw = json.loads(json.dumps(BASE))
        for word, beside in BESIDE.items():
            for name, given in beside.items() if key.startswith(word) else ():
                put(raw, name, given)
        if key in INSTEAD_OF and value:
            section, _, word = INSTEAD_OF[key].rpartition(".")
            del raw[section][word]
        for one in value:
            put(raw, key, one)
        text = json.dumps(raw).replace("ROOT", str(self.root))
        (self.root / "run.yaml").write_text(text, encoding="utf-8")
        return Flat(str(self.root / "run.yaml"))

    def left_out(self, key: str) -> Flat:
        """What the file means without the key."""
        like = ",".join(word for word in BESIDE if key.startswith(word))
        if like not in self._left_out:
            self._left_out[like] = self.taken(key)
        return self._left_out[like]

    def at_default(self, key: str) -> str | None:
        if key in GIVEN:
            return None
        found, without = self.taken(key, DEFAULTS[key]), self.left_out(key)
        if found.problems:
            return f"{key}={DEFAULTS[key]} is refused: {found.problems}"
        if key in {*IN_WORDS, *KEPT}:
            return None
        same = configs.parsed(found.config) == configs.parsed(without.config)
        return None if same else f"{key}={DEFAULTS[key]} is not what leaving it out is"

    def off_default(self, key: str) -> str | None:
        value = off(key)
        found, without = self.taken(key, value), self.left_out(key)
        if found.problems:
            named = any(is_named(key, one.sentence) for one in found.problems)
            return None if named else f"{key}={value} is refused by other names: {found.problems}"
        before, after = dict(leaves(without.config)), dict(leaves(found.config))
        changed = {one: made for one, made in after.items() if before.get(one) != made}
        if not changed:
            said = any(is_named(key, one.line) for one in found.notes)
            return None if said or value in SAME.get(key, ()) else f"{key}={value} is ignored"
        wrong = [self.unheard(one, made, found, without) for one, made in changed.items()]
        return next(filter(None, wrong), None)

    def unheard(self, place: str, value: Any, found: Flat, without: Flat) -> str | None:
        """What is wrong with what the part receives of a key of rft."""
        name = place.replace(".0.", ".")
        receiver = next((one for word, one in RECEIVERS.items() if name.startswith(word)), None)
        if receiver is None:
            words = [one for one in name.split(".") if one in words_read()]
            is_read = name.rpartition(".")[2] in words or len(words) > 1
            return None if is_read else f"nobody reads {name}"
        get = [dict(leaves(receiver(filled(one)))) for one in (without, found)]
        if get[0] == get[1]:
            return f"{name}={value} changes nothing of what {receiver.__name__} looks at"
        values = [*get[1].values(), *(one for made in get[1].values() for one in listed(made))]
        if receiver in MADE_OF or name.startswith(MADE) or value in values or str(value) in values:
            return None
        return f"{name}={value} is not what the part receives: {get[1]}"


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_named(key: str, sentence: str) -> bool:
    said = sentence.replace(".0.", ".").replace("[0].", ".")
    return any(f"{key}{mark}" in said for mark in ("=", ":", " ", "`", "."))


SEED = int(time.time()) // 86400


def keys_of(third: int | None) -> list[str]:
    """All keys, or every third of them, beginning with the `third` one."""
    keys = list(DEFAULTS)
    random.Random(0).shuffle(keys)
    return keys if third is None else keys[third % 3 :: 3]


@pytest.mark.parametrize(
    "third", [SEED % 3, pytest.param(None, marks=pytest.mark.verify, id="every one")]
)
def test_a_key_is_received_or_refused_or_said(tmp_path: Path, third: int | None) -> None:
    """One at a time, at its default and off it."""
    print(f"keys {third} of 3")
    files = Files(tmp_path)
    wrong = [
        judge(key) for key in keys_of(third) for judge in (files.at_default, files.off_default)
    ]
    assert [one for one in wrong if one] == []
