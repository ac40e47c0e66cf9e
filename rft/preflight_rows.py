"""What a config asks of data rows: those that a run learns from, and those that stand beside rollouts. Called by `preflight`.

In: a config as it is filled (`fill_rows`), then a filled one (`check_main`, `check_auxiliary`). Raises ConfigError for the first
thing that cannot work. Reads the files of the rows; loads no tokenizer.
"""

from rft.algorithm import ALGORITHMS, mixing
from rft.buffer.sft_rows import check_supervised, rows_per_step
from rft.buffer.taskset import Taskset
from rft.config import Config, ConfigError, TasksetConfig, nearest

MAIN, BESIDE = "buffer.trainer_input.experience_buffer", "buffer.trainer_input.auxiliary_buffers"


def fill_rows(config: Config) -> None:
    """How many experiences a step takes, and the names of auxiliary buffers."""
    algorithm, buffer = config.algorithm, config.buffer
    defaults = ALGORITHMS[algorithm.algorithm_type]
    if defaults.schema == "dpo":
        algorithm.repeat_times = 2  # a pair is two experiences, whatever was asked for (B2)
    if buffer.train_batch_size is None:
        rollouts = buffer.batch_size * int(algorithm.repeat_times or 1)
        mixed = mixing.is_mixed(algorithm) and 0 < mixing.argument(algorithm, "expert_data_ratio") < 1
        buffer.train_batch_size = mixing.batch_for(algorithm, rollouts) if mixed else rollouts
    for name, beside in buffer.trainer_input.auxiliary_buffers.items():
        if beside.name == type(beside).name:
            beside.name = name


def check_main(config: Config) -> None:
    """The rows of a supervised run."""
    schema = ALGORITHMS[config.algorithm.algorithm_type].schema
    rows = config.buffer.trainer_input.experience_buffer
    check_supervised(rows, f"{MAIN}.path", int(config.buffer.train_batch_size or 1), schema)


def steps_of_rows(config: Config) -> int:
    """Of `total_epochs` passes, whose last short batches are left out."""
    rows, schema = config.buffer.trainer_input.experience_buffer, ALGORITHMS[config.algorithm.algorithm_type].schema
    total = Taskset.count(TasksetConfig(name=rows.name, path=str(rows.path), split=rows.split), MAIN)
    return config.buffer.total_epochs * (total // rows_per_step(int(config.buffer.train_batch_size or 1), schema))


def rollouts_per_step(config: Config) -> int:
    """Experiences of a batch that are no expert rows."""
    batch = int(config.buffer.train_batch_size or 1)
    return batch - (mixing.expert_rows(config.algorithm, batch) if mixing.is_mixed(config.algorithm) else 0)


def check_auxiliary(config: Config) -> None:
    """Rows beside rollouts are there where an algorithm mixes them in, and can be read."""
    algorithm, given = config.algorithm, config.buffer.trainer_input.auxiliary_buffers
    if not mixing.is_mixed(algorithm):
        if given:
            raise ConfigError(
                f"{BESIDE}.{next(iter(given))}: algorithm.sample_strategy={algorithm.sample_strategy} takes no rows beside "
                "rollouts; leave it out, or use algorithm_type=mix or mix_chord"
            )
        return
    name = mixing.argument(algorithm, "sft_dataset_name")
    if name not in given:
        known = f"{nearest(name, given, 'algorithm.sample_strategy_args.sft_dataset_name')} " if given else ""
        raise ConfigError(
            f"{BESIDE}.{name}: algorithm.sample_strategy=mix learns from expert rows there. {known}Set {BESIDE}.{name}.path=FILE "
            f"and {BESIDE}.{name}.storage_type=file"
        )
    if unused := next((other for other in given if other != name), None):
        raise ConfigError(
            f"{BESIDE}.{unused}: expert rows are taken from {name}; leave it out, or set sft_dataset_name"
        )
    if given[name].storage_type != "file":
        raise ConfigError(
            f"{BESIDE}.{name}.storage_type={given[name].storage_type}: rows beside rollouts are read from file"
        )
    batch = int(config.buffer.train_batch_size or 1)
    check_supervised(given[name], f"{BESIDE}.{name}.path", mixing.expert_rows(algorithm, batch))
