"""What a config asks of the experience buffer of rollouts: storage, place, replay. Called by `preflight`.

In: a filled config whose algorithm learns from rollouts. Out: nothing, or a ConfigError for the first thing that cannot work; a
database is spoken to, and a file of experiences read from end to end.
"""

import importlib.util
import math

from rft.buffer.experience_file import SUFFIXES, count_groups, is_file
from rft.buffer.replay import ARGUMENTS, PRIORITIES
from rft.config import Config, ConfigError, ExperienceBufferConfig, nearest
from rft.monitor import redact

KEY = "buffer.trainer_input.experience_buffer"
REPLAY = f"{KEY}.replay_buffer"


def check_buffer(config: Config) -> None:
    buffer = config.buffer.trainer_input.experience_buffer
    if config.mode == "bench":  # there is none
        return
    _check_replay(buffer)
    if config.explorer.over_rollout.ratio > 0 and (buffer.storage_type == "sql" or buffer.replay_buffer.enable):
        raise ConfigError(
            f"explorer.over_rollout.ratio={config.explorer.over_rollout.ratio:g} needs a queue without a replay "
            f"buffer, whose steps wait for certain tasks: set it to 0, or {KEY}.storage_type=queue and {REPLAY}.enable=false"
        )
    if buffer.storage_type == "sql":
        if importlib.util.find_spec("sqlalchemy") is None:
            raise ConfigError(f"{KEY}.storage_type=sql needs SQLAlchemy: pip install rft[sql]")
        from rft.buffer.sql_tables import check_database

        check_database(buffer)
    elif buffer.storage_type == "file":
        _check_file(config, buffer)
    elif "://" in str(buffer.path or ""):
        raise ConfigError(
            f"{KEY}.path={redact.text(str(buffer.path))}: a queue keeps a journal in a directory; leave it out for one in the "
            f"run's own, give a .jsonl for a copy beside it, or set {KEY}.storage_type=sql"
        )


def _check_file(config: Config, buffer: ExperienceBufferConfig) -> None:
    if config.mode == "both":
        raise ConfigError(
            f"{KEY}.storage_type=file with mode=both: a file cannot be written and read at the same time; set storage_type=queue "
            f"with path={buffer.path or 'FILE.jsonl'}, which writes a copy"
        )
    if not is_file(buffer.path):
        raise ConfigError(
            f"{KEY}.path={buffer.path}: storage_type=file needs a file of experiences that ends in {SUFFIXES[0]}"
        )
    if config.mode == "train" and (groups := count_groups(str(buffer.path))) < config.buffer.batch_size:
        raise ConfigError(
            f"{KEY}.path: {buffer.path} has {groups} groups, fewer than buffer.batch_size={config.buffer.batch_size}: lower it"
        )


def _check_replay(buffer: ExperienceBufferConfig) -> None:
    replay = buffer.replay_buffer
    if replay.priority_fn not in PRIORITIES:
        raise ConfigError(nearest(replay.priority_fn, PRIORITIES, f"{REPLAY}.priority_fn"))
    known = ARGUMENTS[replay.priority_fn]
    for name, value in replay.priority_fn_args.items():
        if name not in known:
            raise ConfigError(
                f"{REPLAY}.priority_fn_args.{name}: {replay.priority_fn} does not take it; it takes {', '.join(known)}"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if (
            not number
            or (name != "use_count_limit" and value < 0)
            or (name == "use_count_limit" and value != int(value))
        ):
            raise ConfigError(f"{REPLAY}.priority_fn_args.{name}={value}: give a number, 0 or more")
    cooldown = replay.reuse_cooldown_time
    if cooldown is not None and not (math.isfinite(cooldown) and cooldown >= 0):
        raise ConfigError(
            f"{REPLAY}.reuse_cooldown_time={cooldown}: give seconds, 0 or more, or leave it out for no reuse"
        )
    if replay.capacity < 1:
        raise ConfigError(f"{REPLAY}.capacity={replay.capacity}: must be greater than 0")
    if replay.enable and buffer.storage_type != "queue":
        raise ConfigError(
            f"{REPLAY}.enable=true with storage_type={buffer.storage_type}: only a queue is a replay buffer; set that"
        )
