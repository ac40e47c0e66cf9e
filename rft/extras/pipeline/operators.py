"""Operators by name: the two tables, what an operator has to be, and how one is made from a config.

    async process(items) -> (items, metrics)        required; a plain `def` is called just the same
    async prepare()                                  before the first items
    async close()                                    at the end

In: a name and arguments. Out: an object with these methods, or a ConfigError that names the key and
what is known. An operator of `experience_pipeline` gets the experiences of one group, and gives
back those that stay, changed or not. One of `task_pipeline` gets rows (dicts) and gives back rows:
chunk by chunk in several processes, or all at once if it says `whole = True`. A parameter called
`service` is filled with the Data-Juicer service of the config; all others come from `args`.
"""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from rft.config import ConfigError, DataJuicerConfig, OperatorConfig, nearest
from rft.extras.pipeline.data_juicer import DataJuicer
from rft.extras.pipeline.experience_operators import (
    DropRepeats,
    DynamicSampling,
    InvalidRewardFilter,
    LengthFilter,
    MaskTruncated,
    PassRate,
    RewardFilter,
    RewardShaping,
    RewardStdFilter,
)
from rft.extras.pipeline.task_operators import (
    Curriculum,
    DifficultyFilter,
    DropSameRows,
    LLMDifficulty,
    PassRateFilter,
    RequiredFields,
    TextLengthFilter,
)
from rft.extras.pipeline.worker_process import TASKS
from rft.ground.errors import after
from rft.rollout.rewards import lookup

Metrics = dict[str, float]
SERVICE = "service"  # a parameter that the config fills


class Operator(Protocol):
    def process(self, items: list[Any]) -> Any:
        """(items, metrics), or something to await that gives it."""


EXPERIENCE_OPERATORS: dict[str, Callable[..., Operator]] = {
    "reward_shaping_mapper": RewardShaping,
    "reward_filter": RewardFilter,
    "reward_std_filter": RewardStdFilter,
    "dapo_dynamic_sampling": DynamicSampling,
    "mask_response_truncated": MaskTruncated,
    "pass_rate_calculator": PassRate,
    "invalid_reward_filter": InvalidRewardFilter,
    "length_filter": LengthFilter,
    "dedupe": DropRepeats,
    "data_juicer": DataJuicer,
}
TASK_OPERATORS: dict[str, Callable[..., Operator]] = {
    "llm_difficulty_score_filter": LLMDifficulty,
    "difficulty_filter": DifficultyFilter,
    "difficulty_curriculum": Curriculum,
    "length_filter": TextLengthFilter,
    "pass_rate_filter": PassRateFilter,
    "dedupe": DropSameRows,
    "required_fields": RequiredFields,
}


def table_of(key: str) -> dict[str, Callable[..., Operator]]:
    """`key`: of the pipeline's section."""
    return TASK_OPERATORS if key == TASKS else EXPERIENCE_OPERATORS


def make(key: str, number: int, given: OperatorConfig, service: DataJuicerConfig) -> Operator:
    """Operator `number` of the pipeline `key`.

    Constructors look at the values of their arguments and raise ValueError.
    """
    where, table = f"{key}.operators.{number}", table_of(key)
    if given.name not in table and ":" not in given.name:
        raise ConfigError(
            nearest(given.name, table, f"{where}.name")
            + " Your own is package.module:Class or path/to/file.py:Class."
        )
    constructor = lookup(f"{where}.name: operator", given.name, table)
    parameters = inspect.signature(constructor).parameters
    _check_args(where, given, parameters)
    arguments = dict(given.args) | ({SERVICE: service} if SERVICE in parameters else {})
    try:
        operator = constructor(**arguments)
    except ConfigError as error:
        raise ConfigError(*(after(f"{where}: ", one) for one in error.problems)) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{where}.args: {given.name} refuses {given.args}: {error}; correct it"
        ) from error
    if not callable(getattr(operator, "process", None)):
        raise ConfigError(
            f"{where}.name={given.name}: what it makes has no method `process`; write a class that "
            "has one"
        )
    return operator


def _check_args(where: str, given: OperatorConfig, parameters: Any) -> None:
    known = [name for name in parameters if name != SERVICE]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in given.args:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ConfigError(f"{where}.args.{name}: {given.name} does not take it; {takes}")
    needed = [
        name
        for name in known
        if parameters[name].default is parameters[name].empty and name not in given.args
    ]
    if needed:
        raise ConfigError(f"{where}.args.{needed[0]} is not set: {given.name} needs it")


def build(key: str, given: list[OperatorConfig], service: DataJuicerConfig) -> list[Operator]:
    return [make(key, number, one, service) for number, one in enumerate(given)]


def is_whole(operator: Operator) -> bool:
    """Whether a task operator has to see all rows at once."""
    return bool(getattr(operator, "whole", False))


async def call(operator: Operator, method: str, *arguments: Any) -> Any:
    """`operator.method(*arguments)`, sync or async; None if it has no such method."""
    function = getattr(operator, method, None)
    result = function(*arguments) if function is not None else None
    return await result if inspect.isawaitable(result) else result
