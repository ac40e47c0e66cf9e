"""The child process that runs reward functions: `python -m rft.rollout.reward_worker <socket fd>
<parent pid>`.

    pool ── ScoreRequest (a group) ──►  worker:  import the functions ── Loaded ──►  pool
                                                 per item: run it   ── RewardResult ──►  pool
                                                         (in the order of items)

Messages are msgpack, framed, over a socket pair that nothing else of the process uses:
whatever user code prints goes to stderr. Every failure of user code, sys.exit included, is a result
with outcome "error"; a hang is ended by the pool, which kills this process group. The process dies
with its parent: by EOF when idle, else by the kernel.
"""

import functools
import inspect
import math
import socket
import traceback
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Literal

from rft.ground import plugins
from rft.ground.experience import LARGEST_REWARD, Record, Task, decode, encode, is_reward
from rft.ground.process import frame, messages, parents_socket
from rft.monitor import logs
from rft.rollout.rewards import RewardFunction, prepare
from rft.rollout.rewards.data_sources import given_value

# characters of an error message that travel: some exceptions carry whole data sets
MAX_MESSAGE = 2000
UNKNOWN = -1  # number of a response's tokens


Named = tuple[str, dict[str, Any]]  # a reward function: its name, its arguments


class ScoreRequest(Record):
    """Responses to score; each names its task by position, so
    that a group carries its task once. `ahead`: functions to import for requests to come.
    """

    tasks: list[Task] = []
    ahead: list[Named] = []
    items: list[tuple[int, str, int]] = []  # place of the task, response, tokens that it has


class Loaded(Record, tag="loaded"):
    """All reward functions of the request are imported; the clock of the first item starts."""


class RewardResult(Record, tag="result"):
    """One scored response.

    `reward` means something only when `outcome` is "ok"; `metrics` are the parts of a dict.
    """

    reward: float = 0.0
    outcome: Literal["ok", "timeout", "error"] = "ok"
    metrics: dict[str, float] = {}
    message: str = ""


Reply = Loaded | RewardResult


def judge(
    function: RewardFunction, response: str, task: Task, tokens: int = UNKNOWN
) -> RewardResult:
    """Run one reward function; any failure or unusable value becomes outcome "error"."""
    try:
        wants = {"response_tokens": tokens} if takes_tokens(function) else {}
        return judged(
            given_value(function(response, task.truth, task, **wants, **task.reward_args))
        )
    # sys.exit and KeyboardInterrupt of user code too: reported, never obeyed
    except BaseException as error:
        return failure(error)


def judged(value: Any) -> RewardResult:
    """A number, or a dict of numbers whose sum is the reward, or (number, dict of metrics); what is
    none of them is outcome "error".
    """
    try:
        if isinstance(value, tuple):
            reward, beside = value
            metrics = {str(key): number(part) for key, part in beside.items()}
            return RewardResult(reward=number(reward), metrics=metrics)
        if not isinstance(value, dict):
            return RewardResult(reward=number(value))
        parts = {str(key): number(part) for key, part in value.items()}
        if not parts:
            raise ValueError("a reward must have a part, and this dict is empty")
        return RewardResult(reward=number(sum(parts.values())), metrics=parts)
    except (TypeError, ValueError) as error:
        return failure(error)


def takes_tokens(function: RewardFunction) -> bool:
    # other objects that can be called may have no hash
    names = _names_once if isinstance(function, FunctionType) else _names
    return "response_tokens" in names(function)


def _names(function: RewardFunction) -> set[str]:
    return set(inspect.signature(function).parameters)


_names_once = functools.cache(_names)  # it takes longer than a quick reward


def number(value: Any) -> float:
    if value is None or isinstance(value, (str, bytes, list)):
        raise TypeError(f"a reward must be a number, not {value!r:.200}")
    result = float(value)
    if not math.isfinite(result):
        raise ValueError(f"a reward must be finite, not {result}")
    if not is_reward(result):
        raise ValueError(f"a reward must be at most {LARGEST_REWARD:g} in size, not {result:g}")
    return result


def failure(error: BaseException) -> RewardResult:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return RewardResult(
        outcome="error", message=f"{type(error).__name__}: {error}"[:MAX_MESSAGE] + place
    )


def load(named: Iterable[Named]) -> dict[str, RewardFunction | RewardResult]:
    """Import each function; one that cannot be imported maps to the error that its items get."""
    functions: dict[str, RewardFunction | RewardResult] = {}
    for name, arguments in dict(named).items():
        try:
            functions[name] = prepare(name, arguments)
        except BaseException as error:  # the user's module runs at import
            functions[name] = failure(error)
    return functions


def serve(connection: socket.socket) -> None:
    """Answer requests until the pool closes its end."""
    for body in messages(connection):
        request = decode(body, ScoreRequest)
        asked = [request.tasks[position] for position, *_ in request.items]
        functions = load([*request.ahead, *((task.reward, task.reward_args) for task in asked)])
        connection.sendall(frame(encode(Loaded())))
        for position, response, tokens in request.items:
            task = request.tasks[position]
            function = functions[task.reward]
            result = (
                function
                if isinstance(function, RewardResult)
                else judge(function, response, task, tokens)
            )
            connection.sendall(frame(encode(result)))


def main() -> None:
    logs.hide_secrets()
    if (connection := parents_socket()) is None:
        return
    plugins.load()
    serve(connection)


if __name__ == "__main__":
    main()
