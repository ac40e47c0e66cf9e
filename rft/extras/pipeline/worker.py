"""The child process that runs operators: `python -m rft.extras.pipeline.worker <socket fd> <parent
pid>`.

In: `Setup`, then `Work` after `Work` (`rft.extras.pipeline.worker_process`). Out: what the
operators made of each, or which of them failed and how. Operators keep what they remember between
two pieces of work. Whatever user code does is an answer, also sys.exit; a hang is ended by the
parent, which kills this process group. Invariant: what leaves here was looked at after every
operator: experiences that the trainer can learn from, in which no token was changed, or rows that
are JSON.
"""

import asyncio
import socket
import time
import traceback
from math import isfinite
from typing import Any

import msgspec

from rft.config import ConfigError, DataJuicerConfig, OperatorConfig
from rft.extras.pipeline.operators import Operator, build, call
from rft.extras.pipeline.output import GroupRecorder
from rft.extras.pipeline.worker_process import (
    TASKS,
    Answer,
    Broken,
    CloseWorker,
    Done,
    Entered,
    Question,
    Setup,
    Work,
    WorkerReady,
)
from rft.ground import plugins
from rft.ground.experience import Experience, decode, encode, is_reward
from rft.ground.process import frame, messages, parents_socket
from rft.monitor import logs
from rft.rollout.workflows import problem

MAX_MESSAGE = 2000  # characters of an error message that travel
TEXTS = ("prompt_text", "response_text")  # in `info` while operators run


class InvalidResult(ValueError):
    """What an operator gave back cannot be used."""


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.setup: Setup | None = None
        self.operators: list[Operator] = []
        self.recorder: GroupRecorder | None = None
        self.doing = "setting up"  # for messages

    async def serve(self) -> None:
        """Answer until the parent closes its end."""
        for body in messages(self.connection):
            question = decode(body, Question)
            try:
                answer = await self._answer(question)
            # sys.exit and KeyboardInterrupt of user code too: reported, never obeyed
            except BaseException as error:
                answer = Broken(operator=self.doing, message=told(error))
            self._say(answer)

    async def _answer(self, question: Any) -> Answer:
        match question:
            case Setup():
                return await self._set_up(question)
            case Work():
                return await self._work(question)
            case CloseWorker():
                for name, operator in self._chosen(None):
                    self._enter(name)
                    await call(operator, "close")
                return WorkerReady()
        raise AssertionError("a question of no known kind")

    async def _set_up(self, setup: Setup) -> Answer:
        self.setup = setup
        given = [OperatorConfig(name=name, args=args) for name, args in setup.operators]
        self.operators = build(setup.key, given, DataJuicerConfig(**setup.service))
        for name, operator in self._chosen(None):
            self._enter(name)
            await call(operator, "prepare")
        if setup.record is not None:
            self._enter("save_input")
            self.recorder = GroupRecorder(setup.record)
        return WorkerReady()

    async def _work(self, work: Work) -> Answer:
        is_rows = self._setup.key == TASKS
        items: list[Any] = msgspec.json.decode(work.payload) if is_rows else self._received(work)
        done = Done(payload=b"", metrics=[], seconds=[], counts=[])
        tokens = None if is_rows else {experience.token_bytes for experience in items}
        for name, operator in self._chosen(work.chosen):
            self._enter(name)
            began, greedy = time.perf_counter(), [] if is_rows else baselines(items)
            items, metrics = checked(await call(operator, "process", items), tokens)
            items = beside(items, greedy) if greedy else items
            done.metrics.append((name, metrics))
            done.seconds.append(time.perf_counter() - began)
            done.counts.append(len(items))
            if not items:
                done.dropped_by = name
                break
        self.doing = "giving back the result"
        done.payload = (
            msgspec.json.encode(items) if is_rows else encode([without_texts(one) for one in items])
        )
        return done

    def _received(self, work: Work) -> list[Experience]:
        experiences = decode(work.payload, list[Experience])
        if self.recorder is not None:
            self._enter("save_input")
            self.recorder.write(work.group, work.prompt, experiences)
        for experience, texts in zip(experiences, work.texts, strict=True):
            experience.info |= dict(zip(TEXTS, texts, strict=True))
        return experiences

    def _chosen(self, numbers: list[int] | None) -> list[tuple[str, Operator]]:
        named = [
            (name, operator)
            for (name, _), operator in zip(self._setup.operators, self.operators, strict=True)
        ]
        return named if numbers is None else [named[number] for number in numbers]

    @property
    def _setup(self) -> Setup:
        assert self.setup is not None, "the first question sets up"
        return self.setup

    def _enter(self, operator: str) -> None:
        self.doing = operator
        self._say(Entered(operator))

    def _say(self, answer: Answer) -> None:
        self.connection.sendall(frame(encode(answer)))


def baselines(experiences: list[Experience]) -> list[Experience]:
    return [one for one in experiences if one.info.get("baseline")]


def beside(kept: list[Experience], greedy: list[Experience]) -> list[Experience]:
    """Responses that others are only compared with stay as long as one of these does, whatever an
    operator thinks of them.
    """
    still = baselines(kept)
    if len(still) == len(kept):
        return []
    return kept if still else [*kept, *greedy]


def checked(result: Any, tokens: set[tuple[int, ...]] | None) -> tuple[list[Any], dict[str, float]]:
    """(items, metrics) of an operator, if they are that.

    `tokens`: of the experiences that there were; None: these are rows.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], list):
        raise InvalidResult(
            f"process must return (a list, a dict of metrics), not {str(result)[:80]}"
        )
    items, metrics = result
    kind = dict if tokens is None else Experience
    for item in items:
        if not isinstance(item, kind):
            raise InvalidResult(
                f"process returned {str(item)[:80]} among its items, which is no {kind.__name__}"
            )
    if tokens is not None:
        check_experiences(items, tokens)
    if not isinstance(metrics, dict):
        raise InvalidResult(
            f"process returned {str(metrics)[:80]} as its metrics, which is no dict"
        )
    numbers = {
        str(name): value for name, value in metrics.items() if isinstance(value, int | float)
    }
    return items, {name: float(value) for name, value in numbers.items() if isfinite(value)}


def check_experiences(experiences: list[Experience], tokens: set[bytes]) -> None:
    for position, experience in enumerate(experiences):
        try:
            experience.as_columns()
        except ValueError as error:
            raise InvalidResult(f"experience {position}: {error}") from error
        if experience.token_bytes not in tokens:
            raise InvalidResult(
                f"experience {position} has tokens that no engine sampled for this group"
            )
        if wrong := problem(experience):
            raise InvalidResult(f"experience {position}: {wrong}")


def without_texts(experience: Experience) -> Experience:
    """As it is stored.

    Its texts are in its tokens; a reward that is no number would poison its whole group.
    """
    if not is_reward(experience.reward):
        raise InvalidResult(
            f"a reward is {experience.reward} behind the last operator: put invalid_reward_filter "
            "in front"
        )
    for name in TEXTS:
        experience.info.pop(name, None)
    return experience


def told(error: BaseException) -> str:
    """One line, with the place in the code that raised it."""
    # of a task group: the first thing that went wrong in it
    if isinstance(error, BaseExceptionGroup):
        return told(error.exceptions[0])
    if isinstance(error, InvalidResult | ConfigError):
        return str(error)[:MAX_MESSAGE]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE] + place


def main() -> None:
    logs.hide_secrets()
    if (connection := parents_socket()) is None:
        return
    plugins.load()
    asyncio.run(Worker(connection).serve())


if __name__ == "__main__":
    main()
