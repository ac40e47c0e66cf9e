"""Rules of tasksets, batches, the experience buffer and the pipelines.

In: a filled config. Nothing is looked at but the config itself.
"""

import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from rft.agents.workflow import AgentSettings
from rft.algorithm import ALGORITHMS, mixing, recipe
from rft.buffer.experience_file import SUFFIXES, is_file
from rft.buffer.selection import PRIORITIES, LinearDecay, LinearDecayUseCountControl
from rft.config import TRAINING, Config, ExperienceBufferConfig, arguments, get, nearest
from rft.extras.pipeline.worker_process import EXPERIENCES, TASKS
from rft.ground import redact
from rft.ground.errors import problems_of
from rft.ground.experience import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from rft.preflight.rules import SETS, Rule, Says, shown, tasksets
from rft.preflight.rules_trainer import BUFFER, RECIPE, STRATEGY, STRATEGY_ARGS, TYPE
from rft.rollout.environments import EnvironmentSettings
from rft.rollout.workflows import WORKFLOWS
from rft.trainer.feed import is_supervised

BESIDE = "buffer.trainer_input.auxiliary_buffers"
REPLAY, SERVICE = f"{BUFFER}.replay_buffer", "service.data_juicer"
TASKSET, EVALS = "buffer.explorer_input.taskset", "buffer.explorer_input.eval_tasksets"
BATCH = "buffer.train_batch_size"
# workflows of ours whose temperature is not, or need not be, the taskset's
OWN_SAMPLING = ("agent", "environment", "math_eval")
EVAL = "@eval"  # behind the name of an evaluation set that another part of the run has


def has_buffer(c: Config) -> bool:
    """Whether rollouts go through an experience buffer."""
    return not is_supervised(c.algorithm) and c.mode != "bench"


def _buffer(c: Config) -> ExperienceBufferConfig:
    return c.buffer.trainer_input.experience_buffer


# --- tasksets -------------------------------------------------------------------------------------


def names(c: Config) -> list[str]:
    """Of all parts but the tasksets."""
    return [c.explorer.name, c.trainer.name, _buffer(c).name, "synchronizer"]


def _names(c: Config) -> Iterator[str]:
    found = [*names(c), *(str(one.name) for _, one, _ in tasksets(c))]
    if double := next((name for name in found if found.count(name) > 1), None):
        yield (
            f"the name `{double}` is used twice: explorer, trainer, buffer and every taskset need "
            "their own"
        )


def _repeated(c: Config) -> Iterator[str]:
    for key, one, is_eval in tasksets(c):
        if not is_eval and one.repeat_times != c.algorithm.repeat_times:
            yield (
                f"{key}.repeat_times={one.repeat_times} contradicts "
                f"algorithm.repeat_times={c.algorithm.repeat_times}: set only the latter"
            )
        elif one.repeat_times is not None and one.repeat_times < 1:
            yield f"{key}.repeat_times={one.repeat_times}: must be greater than 0"


def _sampling(c: Config) -> Iterator[str]:
    longest = c.model.max_model_len
    for key, taskset, _ in tasksets(c):
        args, key = taskset.rollout_args, f"{key}.rollout_args"
        warmth = args.temperature or 0.0
        if warmth and not LOWEST_TEMPERATURE <= warmth <= HIGHEST_TEMPERATURE:
            yield (
                f"{key}.temperature={warmth:g}: must be 0 (the likeliest token), or from "
                f"{LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, at which engines sample"
            )
        if not 0 < args.top_p <= 1:
            yield f"{key}.top_p={args.top_p:g}: a share above 0, at most 1; 1 takes every token"
        if args.top_k < -1 or args.top_k == 0:
            yield f"{key}.top_k={args.top_k}: give 1 or more, or -1 for every token"
        if longest and args.max_tokens is not None and not 0 < args.max_tokens < longest:
            yield (
                f"{key}.max_tokens={args.max_tokens}: a response and its prompt must fit "
                f"model.max_model_len={longest}; "
                f"give 1 to {longest - 1}, or leave it out for model.max_response_tokens"
            )
        elif args.max_tokens is not None and args.max_tokens < c.model.min_response_tokens:
            yield (
                f"{key}.max_tokens={args.max_tokens} is below model.min_response_tokens="
                f"{c.model.min_response_tokens}: lower that, or leave max_tokens out"
            )


def _greedy(c: Config) -> Iterator[str]:
    """An answer that was not sampled is not trained; who asks by himself may say otherwise."""
    for key, taskset, is_eval in tasksets(c):
        flow = taskset.default_workflow_type
        if is_eval or flow not in WORKFLOWS or flow in OWN_SAMPLING:
            continue
        if taskset.rollout_args.temperature == 0:
            yield (
                f"{key}.rollout_args.temperature=0 for tasks that are trained on: the likeliest "
                "tokens are no sample of the policy, and nothing is learned from them; give a "
                "number greater than 0, or leave it out for 1 (eval_tasksets may be greedy)"
            )


def agents(c: Config) -> list[tuple[str, dict[str, Any]]]:
    """(key, workflow_args) of every taskset that agents run."""
    return [
        (f"{key}.workflow_args", dict(one.workflow_args))
        for key, one, _ in tasksets(c)
        if one.default_workflow_type == "agent"
    ]


def environments(c: Config) -> list[tuple[str, dict[str, Any]]]:
    """(key, workflow_args) of every taskset of which an environment has the tasks."""
    return [
        (f"{key}.workflow_args", dict(one.workflow_args))
        for key, one, _ in tasksets(c)
        if one.default_workflow_type == "environment"
    ]


def _environments(c: Config) -> Iterator[str]:
    for key, given in environments(c):
        yield from problems_of(EnvironmentSettings.of, given, key)


def _agents(c: Config) -> Iterator[str]:
    for key, given in agents(c):
        yield from problems_of(AgentSettings.of, given, key)


TASKSETS = (
    Rule("explorer.name", _names, reads=f"{SETS} {BUFFER}.name trainer.name"),
    Rule(f"{TASKSET}.repeat_times algorithm.repeat_times {TYPE}", _repeated, reads=SETS),
    Rule(
        f"{TASKSET}s {TYPE}",
        lambda c: (
            not is_supervised(c.algorithm)
            and c.buffer.explorer_input.taskset is not None
            and c.buffer.explorer_input.tasksets
        ),
        "buffer.explorer_input.taskset and tasksets are both given: write the one into the "
        "list, or leave the list out",
        reads=TASKSET,
    ),
    Rule(
        f"{TASKSET}.path {TYPE} {TASKS} mode",
        lambda c: (
            not is_supervised(c.algorithm)
            and c.mode in ("both", "explore")
            and c.buffer.explorer_input.taskset is None
            and not c.buffer.explorer_input.tasksets
        ),
        "buffer.explorer_input.taskset: mode={mode} needs one; set "
        "buffer.explorer_input.taskset.path=FILE",
        reads=SETS,
    ),
    Rule(
        f"{EVALS} {TYPE} mode",
        lambda c: (
            not is_supervised(c.algorithm)
            and c.mode == "bench"
            and not c.buffer.explorer_input.eval_tasksets
        ),
        "buffer.explorer_input.eval_tasksets: mode=bench needs at least one",
    ),
    Rule(
        f"{TASKSET}.rollout_args model.max_model_len model.min_response_tokens",
        _sampling,
        reads=SETS,
    ),
    Rule(
        f"{TASKSET}.rollout_args mode {TYPE}",
        lambda c: _greedy(c) if c.mode in TRAINING and not is_supervised(c.algorithm) else (),
        reads=SETS,
    ),
    Rule(f"{TASKSET}.workflow_args", _agents, reads=SETS),
    Rule(f"{TASKSET}.workflow_args", _environments, reads=SETS),
)

# --- batches --------------------------------------------------------------------------------------


def expert_rows(c: Config) -> int:
    """Experiences of a batch that are no rollouts."""
    batch = int(c.buffer.train_batch_size or 1)
    return mixing.expert_rows(c.algorithm, batch) if mixing.is_mixed(c.algorithm) else 0


def _batch(c: Config) -> Iterator[str]:
    """Experiences of a step, where those are counted, and of an update."""
    buffer, size = c.buffer, c.trainer.ppo_mini_batch_size
    batch = int(buffer.train_batch_size or 1)
    rollouts = batch - expert_rows(c)
    if not is_supervised(c.algorithm) and rollouts < 1:
        step = buffer.batch_size * int(c.algorithm.repeat_times or 1)
        yield (
            f"{BATCH}={batch}: less its expert rows it holds no rollouts; leave it out for "
            f"{mixing.batch_for(c.algorithm, step)}, or change expert_data_ratio"
        )
    if size is None or c.mode not in TRAINING:
        return
    if size > batch:
        yield (
            f"trainer.ppo_mini_batch_size={size} is more than the {BATCH}={batch} experiences of a "
            "batch: lower it, or leave it out for one update of the whole batch"
        )
    if recipe.needs_pairs(c.algorithm) and size % 2:
        yield (
            f"trainer.ppo_mini_batch_size={size}: a pair is two experiences, and both are of one "
            "update; give an even number"
        )


def _counts(c: Config) -> Iterator[str]:
    """A loss that mixes says the sizes of its parts: they are those of the batch."""
    experts = expert_rows(c)
    there = {"expert": experts, "usual": int(c.buffer.train_batch_size or 1) - experts}
    for part, size in there.items() if mixing.is_mixed(c.algorithm) else ():
        said = c.algorithm.policy_loss_fn_args.get(f"train_batch_size_{part}", size)
        if said != size:
            yield (
                f"algorithm.policy_loss_fn_args.train_batch_size_{part}={said}: of "
                f"{BATCH}={c.buffer.train_batch_size} there are {size}, by {STRATEGY_ARGS}."
                "expert_data_ratio; leave it out, or change one of the two"
            )


def _beside(c: Config) -> Iterator[str]:
    """Rows beside rollouts are there where an algorithm mixes them in."""
    algorithm, given = c.algorithm, c.buffer.trainer_input.auxiliary_buffers
    if not mixing.is_mixed(algorithm):
        return
    name = mixing.argument(algorithm, "sft_dataset_name")
    if name not in given:
        key = f"{STRATEGY_ARGS}.sft_dataset_name"
        known = f"{nearest(name, given, key)} " if given else ""
        yield (
            f"{BESIDE}.{name}: algorithm.sample_strategy=mix learns from expert rows there. "
            f"{known}Set {BESIDE}.{name}.path=FILE and {BESIDE}.{name}.storage_type=file"
        )
        return
    if given[name].schema_type not in (None, "sft"):
        yield (
            f"{BESIDE}.{name}.schema_type={given[name].schema_type}: expert rows are of sft; leave "
            "it out"
        )
    if given[name].storage_type != "file":
        yield (
            f"{BESIDE}.{name}.storage_type={given[name].storage_type}: rows beside rollouts are "
            "read from file"
        )


BATCHES = (
    Rule(
        f"{BATCH} trainer.ppo_mini_batch_size buffer.batch_size algorithm.repeat_times {RECIPE} "
        f"{STRATEGY} {TYPE}",
        _batch,
        reads=f"{STRATEGY_ARGS} mode",
    ),
    Rule(
        f"algorithm.policy_loss_fn_args {BATCH} {STRATEGY_ARGS} {RECIPE} {STRATEGY} {TYPE}", _counts
    ),
    Rule(f"{BESIDE} {STRATEGY} {STRATEGY_ARGS} {RECIPE} {TYPE}", _beside),
)


def notes(c: Config) -> Iterator[str]:
    """What is taken, and means something else or nothing here: a line each for the start."""
    loss, given = c.algorithm.policy_loss_fn_args, c.buffer.trainer_input.auxiliary_buffers
    if mixing.is_mixed(c.algorithm):
        if counts := [name for name in mixing.COUNTS if name in loss]:
            yield (
                f"algorithm.policy_loss_fn_args: {', '.join(counts)} say nothing here: rollouts "
                "and expert rows are each divided by their own counts over the whole batch"
            )
        read = {mixing.argument(c.algorithm, "sft_dataset_name")}
    else:
        read = set()
    for name in given.keys() - read:
        yield (
            f"{BESIDE}.{name} is not read: algorithm.sample_strategy={c.algorithm.sample_strategy} "
            + (f"takes expert rows from {', '.join(read)}" if read else "takes rollouts only")
        )
    if "loss_agg_mode" in loss and (c.algorithm.kl_loss_fn != "none"):
        yield (
            "algorithm.policy_loss_fn_args.loss_agg_mode is algorithm.loss_agg_mode here: the KL "
            "and entropy terms of the loss become one number in the same way"
        )
    if c.buffer.total_steps not in (None, c.trainer.total_steps):
        yield (
            f"buffer.total_steps={c.buffer.total_steps} is not read: "
            f"trainer.total_steps={c.trainer.total_steps} says how many steps there are"
        )
    if c.trainer.share_prefixes and (cp := c.trainer.megatron.context_parallel_size) > 1:
        yield (
            "trainer.share_prefixes: every row is computed whole, as "
            f"trainer.megatron.context_parallel_size={cp} cuts each over ranks"
        )
    for key, one, is_eval in tasksets(c):
        given_name, mark, _ = str(one.name).partition(EVAL)
        if is_eval and mark:
            yield f"{key}.name={given_name}: it is {one.name} here, as another part has that name"


# --- the experience buffer ------------------------------------------------------------------------


def _priority(c: Config) -> Iterator[str]:
    replay = _buffer(c).replay_buffer
    if not has_buffer(c):
        return
    make, given = PRIORITIES[replay.priority_fn], replay.priority_fn_args
    known = arguments.options(make)
    for name, value in given.items():
        key = f"{REPLAY}.priority_fn_args.{name}"
        if not arguments.takes(make, name):
            yield (
                f"{key}: {replay.priority_fn} does not take it; it "
                f"takes {', '.join(known) or 'none'}"
            )
        elif name not in known:
            continue
        elif make not in (LinearDecay, LinearDecayUseCountControl):
            yield from arguments.wrong_value(key, value, known[name])
        elif any(arguments.wrong_value(key, value, known[name])) or (
            value != int(value) if name == "use_count_limit" else value < 0
        ):
            yield f"{key}={value}: give a number, 0 or more"
    for name in arguments.missing(given, known):
        yield f"{REPLAY}.priority_fn_args.{name} is not set: {replay.priority_fn} needs it"


def _of_buffer(keys: str, test: Callable[[ExperienceBufferConfig], Any], says: Says) -> Rule:
    """A rule of a buffer of rollouts."""
    return Rule(
        f"{keys} {BUFFER}.storage_type {TYPE} mode",
        lambda c: has_buffer(c) and test(_buffer(c)),
        says,
    )


def _no_seconds(seconds: float | None) -> bool:
    return seconds is not None and not (math.isfinite(seconds) and seconds >= 0)


def _of_rows(c: Config) -> Iterator[str]:
    """Keys of an auxiliary buffer, of the one that the trainer learns from."""
    buffer, held = _buffer(c), ALGORITHMS[c.algorithm.algorithm_type]
    kind = held.schema if held.source == "rows" else "experience"
    if buffer.schema_type not in (None, kind):
        yield (
            f"{BUFFER}.schema_type={buffer.schema_type}: algorithm.algorithm_type="
            f"{c.algorithm.algorithm_type} learns from {kind}; leave it out"
        )
    if buffer.total_epochs not in (None, c.buffer.total_epochs):
        yield (
            f"{BUFFER}.total_epochs={buffer.total_epochs} contradicts "
            f"buffer.total_epochs={c.buffer.total_epochs}: set only the latter"
        )


BUFFERS = (
    Rule(f"{BUFFER}.schema_type {BUFFER}.total_epochs {TYPE}", _of_rows, reads="buffer"),
    _of_buffer(
        f"{REPLAY}.priority_fn",
        lambda buffer: buffer.replay_buffer.priority_fn not in PRIORITIES,
        lambda c: nearest(get(c, f"{REPLAY}.priority_fn"), PRIORITIES, f"{REPLAY}.priority_fn"),
    ),
    Rule(f"{REPLAY}.priority_fn_args {REPLAY}.priority_fn {TYPE} mode", _priority),
    _of_buffer(
        f"{REPLAY}.reuse_cooldown_time",
        lambda buffer: _no_seconds(buffer.replay_buffer.reuse_cooldown_time),
        shown(f"{REPLAY}.reuse_cooldown_time")
        + ": give seconds, 0 or more, or leave it out for no reuse",
    ),
    _of_buffer(
        f"{REPLAY}.capacity",
        lambda buffer: buffer.replay_buffer.capacity < 1,
        shown(f"{REPLAY}.capacity") + ": must be greater than 0",
    ),
    _of_buffer(
        f"{REPLAY}.enable",
        lambda buffer: buffer.replay_buffer.enable and buffer.storage_type != "queue",
        f"{REPLAY}.enable=true with storage_type={{{BUFFER}.storage_type}}: only a queue is a "
        "replay buffer; set that",
    ),
    _of_buffer(
        f"{BUFFER}.path",
        lambda buffer: buffer.storage_type == "queue" and "://" in str(buffer.path or ""),
        lambda c: (
            f"{BUFFER}.path={redact.text(str(_buffer(c).path))}: a queue keeps a journal in a "
            "directory; leave it out for one in the run's own, give a .jsonl for a copy beside "
            f"it, or set {BUFFER}.storage_type=sql"
        ),
    ),
    Rule(
        f"{BUFFER}.storage_type {TYPE} mode",
        lambda c: has_buffer(c) and _buffer(c).storage_type == "file" and c.mode == "both",
        lambda c: (
            f"{BUFFER}.storage_type=file with mode=both: a file cannot be written and read at the "
            f"same time; set storage_type=queue with path={_buffer(c).path or 'FILE.jsonl'}, "
            "which writes a copy"
        ),
        reads=f"{BUFFER}.path",
    ),
    _of_buffer(
        f"{BUFFER}.path",
        lambda buffer: buffer.storage_type == "file" and not is_file(buffer.path),
        shown(f"{BUFFER}.path")
        + f": storage_type=file needs a file of experiences that ends in {SUFFIXES[0]}",
    ),
)

# --- pipelines and their service ------------------------------------------------------------------


def _is_no_url(c: Config) -> bool:
    given = c.service.data_juicer.server_url
    try:
        parts = urlsplit("http://left.out" if given is None else given)
        return parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # of brackets, or of the port
        return True


def _is_no_command(c: Config) -> bool:
    try:
        return not shlex.split((c.service.data_juicer.command or "a").format(port=1, python="a"))
    except (ValueError, LookupError):  # of quotes and braces
        return True


PIPELINES = (
    Rule(
        f"{SERVICE}.server_url",
        _is_no_url,
        f"{SERVICE}.server_url={{service.data_juicer.server_url}} is no URL like "
        "http://127.0.0.1:5005",
    ),
    Rule(
        f"{SERVICE}.command",
        lambda c: (
            c.service.data_juicer.command is not None
            and "{port}" not in c.service.data_juicer.command
        ),
        f"{SERVICE}.command does not say where the port goes: write {{{{port}}}} in it",
    ),
    Rule(
        f"{SERVICE}.command",
        _is_no_command,
        f"{SERVICE}.command={{{SERVICE}.command}} is no command: close its quotes, and write each "
        "brace twice but for {{port}} and {{python}}",
    ),
    Rule(
        f"{EXPERIENCES}.input_save_path",
        lambda c: (
            c.data_processor.experience_pipeline.input_save_path is not None
            and not c.data_processor.experience_pipeline.save_input
        ),
        f"{EXPERIENCES}.input_save_path={{{EXPERIENCES}.input_save_path}} with save_input=false: "
        "nothing is written there; set save_input=true, or leave the path out",
        reads=f"{EXPERIENCES}.save_input",
    ),
    Rule(
        f"{EXPERIENCES}.input_save_path",
        lambda c: (
            not (c.data_processor.experience_pipeline.input_save_path or ".jsonl").endswith(
                ".jsonl"
            )
        ),
        f"{EXPERIENCES}.input_save_path={{{EXPERIENCES}.input_save_path}}: it is JSON lines; name "
        "it .jsonl",
    ),
    Rule(
        f"{TASKS}.inputs",
        lambda c: (
            not c.data_processor.task_pipeline.inputs
            and (
                c.data_processor.task_pipeline.operators
                or c.data_processor.task_pipeline.config_path
            )
        ),
        f"{TASKS}.inputs is empty: give the data files that the operators read",
        reads=TASKS,
    ),
)
