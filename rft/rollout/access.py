"""What a workflow may do with models behind OpenAI's API, and with what it asked: the part of
`rft.rollout.context` that does so.

In: the explorer's endpoint, model calls as they are answered. Out: sessions for agents, addresses
and keys for clients, answers of auxiliary models, and, where that is wanted, every call of the
attempt as an experience. Invariant: sessions and history end with the attempt that they belong to.
"""

import asyncio
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec
import xxhash

from rft.config import ExplorerConfig
from rft.ground.experience import Completion, Experience, Sampling


class OpenSession(Protocol):
    """What was asked under one key, as its answers grow into experiences."""

    id: str
    calls: list[Any]
    feedback: Any
    too_long: Any

    def experiences(self, merge: bool = True) -> list[Experience]: ...
    def forget(self) -> None: ...


class Open(Protocol):
    """A session in the endpoint's registry."""

    session: OpenSession
    rewarded: asyncio.Event


class Endpoint(Protocol):
    """The explorer's address of OpenAI's API, as workflows use it;
    `rft.agents.endpoint.server` is one.
    """

    registry: Any
    others: dict[str, Any]

    @property
    def url(self) -> str: ...
    def base_url(self, session: str, model: str = "") -> str: ...
    async def close(self) -> None: ...


class Access(NamedTuple):
    """What a client of OpenAI's API is told."""

    base_url: str
    api_key: str


class AgentSession:
    """A session as a workflow holds it."""

    def __init__(self, opened: Open, access: Access):
        self._open = opened
        self.access = access

    @property
    def session(self) -> OpenSession:
        return self._open.session

    @property
    def id(self) -> str:
        return self.session.id

    async def rewarded(self) -> None:
        """Return once a reward was posted."""
        await self._open.rewarded.wait()


class Served:
    """What all workflows of an explorer have of it. `endpoint` is there where the run has one."""

    def __init__(self, config: ExplorerConfig):
        self.keeps_history = config.rollout_model.enable_history
        self.agent_processes = asyncio.Semaphore(config.agent_processes)
        self._endpoint: Endpoint | None = None

    def by(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    @property
    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise RuntimeError(
                "there is no OpenAI API in this run: set "
                "explorer.rollout_model.enable_openai_api=true"
            )
        return self._endpoint

    def stats(self) -> dict[str, float]:
        return self._endpoint.registry.stats() if self._endpoint else {}

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()


class ModelAccess:
    """One per attempt, as the context that it is a part of."""

    def __init__(self, served: Served, request: str, stream: str | None):
        """`stream`: of seeds, in a deterministic run."""
        self._served, self._name, self._stream = served, request, stream
        self._asked = 0
        self._history: list[Experience] = []
        self._sessions: list[AgentSession] = []
        self._own: AgentSession | None = None  # of `openai`

    async def ask(
        self, messages: list[dict[str, Any]], model: str = "", sampling: Sampling | None = None
    ) -> str:
        """What an auxiliary model says, the first of them unless one is named; greedily, and as
        long as it likes.
        """
        others = self._served.endpoint.others
        if not others or (model and model not in others):
            self._refuse(model)
        self._asked += 1
        chosen = others[model] if model else next(iter(others.values()))
        return await chosen.say(
            f"{self._name}/ask {self._asked}",
            messages,
            sampling or Sampling(temperature=0.0, max_tokens=0),
        )

    def _refuse(self, model: str) -> NoReturn:
        known = ", ".join(self._served.endpoint.others)
        raise ValueError(
            f"no auxiliary model {model!r}: there are {known or 'none'}; set "
            "explorer.auxiliary_models"
        )

    def open_session(self, sampling: Sampling) -> AgentSession:
        """A session of the endpoint for one run of an agent; closed with this attempt."""
        if self._stream is not None and sampling.seed is None:
            seed = seed_of(f"{self._stream}/session {len(self._sessions)}")
            sampling = msgspec.structs.replace(sampling, seed=seed)
        endpoint = self._served.endpoint
        opened = endpoint.registry.open(sampling=sampling)
        access = Access(endpoint.base_url(opened.id), endpoint.registry.key(opened.id))
        self._sessions.append(AgentSession(endpoint.registry.open_[opened.id], access))
        return self._sessions[-1]

    def openai(self, model: str = "") -> Access:
        """`base_url` and `api_key` for a client: of the policy, whose answers belong to this
        attempt, or of an auxiliary model.
        """
        if model and model not in self._served.endpoint.others:
            self._refuse(model)
        self._own = self._own or self.open_session(Sampling())
        return Access(self._served.endpoint.base_url(self._own.id, model), self._own.access.api_key)

    def agent_slot(self) -> asyncio.Semaphore:
        """Held while a process of an agent runs."""
        return self._served.agent_processes

    def record(self, prompt: list[int], made: list[Completion], sampling: Sampling) -> None:
        """Into the history, if there is one.

        A greedy answer was not sampled, and is not trained.
        """
        if not self._served.keeps_history:
            return
        for one in made:
            self._history.append(
                Experience(
                    tokens=[*prompt, *one.tokens],
                    prompt_length=len(prompt),
                    logprobs=one.logprobs,
                    versions=one.versions,
                    action_mask=[int(sampling.temperature > 0)] * len(one.tokens),
                    temperature=sampling.temperature or 1.0,
                    stop=one.stop,
                    routed_experts=one.routed_experts,
                )
            )

    def extract_experience_from_history(self, clear: bool = True) -> list[Experience]:
        """What the policy was asked in this attempt, call by call, through `generate` and `openai`;
        without rewards yet.
        """
        if not self._served.keeps_history:
            raise RuntimeError(
                "nothing is kept of model calls: set explorer.rollout_model.enable_history=true"
            )
        found = self._history + (self._own.session.experiences() if self._own else [])
        for number, one in enumerate(found):
            one.turn = number
        if clear:
            self._history = []
            if self._own:
                self._own.session.forget()
        return found

    def end_sessions(self) -> None:
        """The attempt is over: its sessions answer nobody any more."""
        for one in self._sessions:
            self._served.endpoint.registry.close(one.id)


def seed_of(text: str) -> int:
    """Unlike Python's own hash, the same in every process; fits a signed 64-bit number."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
