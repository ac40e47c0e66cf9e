"""What a workflow may do, and what all workflows of one explorer share: tokenizer, engines, reward
workers, the endpoint of OpenAI's API.

    workflow, judge, tool, agent ──► WorkflowContext ──► render, generate, decode, score
                                           ├──► ask, openai: auxiliary models, clients of the API
                                           └──► open_session: an agent's run, as its calls come

In: a task and token ids from a workflow. Out: rendered prompts, completions of the engine pool,
scored responses; sessions for agents, addresses and keys for clients. Invariants: a prompt over the
limit never reaches an engine; every request of a deterministic run has a seed of its own, made of
the run's seed, the task, the attempt and the request's number, whichever engine answers it and
whenever; sessions and history end with the attempt that they belong to.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash

from rft.config import ExplorerConfig, ModelConfig
from rft.data.chat import end_of_turn, load_tokenizer, render_follow_up, render_prompt
from rft.ground.columns import Ids, behind
from rft.ground.experience import (
    LOWEST_TEMPERATURE,
    Completion,
    Experience,
    GenerateRequest,
    Sampling,
    Task,
)
from rft.rollout.answers import RunAnswers
from rft.rollout.environments import Environments
from rft.rollout.pool import EngineHandle, EnginePool
from rft.rollout.reward_pool import RewardPool
from rft.rollout.reward_worker import UNKNOWN, Named, RewardResult

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class Access(NamedTuple):
    """What a client of OpenAI's API is told."""

    base_url: str
    api_key: str


class RecordedSession(Protocol):
    """What was asked under one key, as its answers grow into experiences."""

    id: str
    calls: list[Any]
    feedback: Any
    too_long: Any

    def experiences(self, merge: bool = True) -> list[Experience]: ...
    def forget(self) -> None: ...


@dataclass(frozen=True)
class AgentSession:
    """A session as a workflow holds it. `was_rewarded`: a reward was posted."""

    session: RecordedSession
    access: Access
    was_rewarded: asyncio.Event

    def take_score(self, result: RewardResult) -> RewardResult:
        """What the task's reward function says of the last answer is the session's reward."""
        feedback = self.session.feedback
        feedback.reward, feedback.metrics = result.reward, {**feedback.metrics, **result.metrics}
        return result

    def experiences(
        self, who: str, sample: int, result: RewardResult | None, merge: bool
    ) -> list[Experience]:
        """Those of run `sample` of `who`; `result`: of the reward function, where that was asked.
        Raises ValueError if there are none.
        """
        made = self.session.experiences(merge)
        if not made:
            raise ValueError(
                f"{who} asked the model for nothing: give its client base_url and api_key"
            )
        for one in made:
            one.sample = sample
            if result is not None and result.outcome != "ok":
                one.reward_outcome = result.outcome
                one.info = {**one.info, "reward_message": result.message}
        return made


class AuxiliaryModel(Protocol):
    async def say(
        self, request_id: str, messages: list[dict[str, Any]], sampling: Sampling
    ) -> str: ...


class Endpoint(Protocol):
    """The explorer's address of OpenAI's API; `rft.agents.endpoint.server` has one."""

    url: str

    @property
    def others(self) -> Mapping[str, AuxiliaryModel]: ...
    def base_url(self, session: str, model: str = "") -> str: ...
    def open_session(
        self, sampling: Sampling, may_reward: bool = False, answers: RunAnswers | None = None
    ) -> AgentSession: ...
    def close_session(self, session: str) -> None: ...
    def stats(self) -> dict[str, float]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class TokenLimits:
    """Lengths that a prompt and a response must keep, in tokens."""

    max_prompt_tokens: int
    max_model_len: int


class Shared:
    """One per explorer; `seed` is that of a deterministic run."""

    def __init__(
        self,
        config: ExplorerConfig,
        model: ModelConfig,
        engines: dict[str, EngineHandle],
        seed: int | None,
    ):
        self.model = model
        self.seed = seed
        self.pool = EnginePool(engines)
        self.rewards = RewardPool(config.reward_workers, config.reward_timeout)
        self.counts = Counter({"prompts_too_long": 0, "prompts_cut": 0})
        self.keeps_history = config.rollout_model.enable_history
        self.agent_processes = asyncio.Semaphore(config.agent_processes)
        self.environments = Environments(self.count)
        self.endpoint: Endpoint | None = None  # where the run has one

    async def load(self, quick: bool = False, ahead: Sequence[Named] = ()) -> None:
        """Load the tokenizer, start the reward workers, unless all rewards that are foreseen are
        `quick`; those `ahead` are imported there meanwhile.
        """
        self.tokenizer = load_tokenizer(self.model)
        self.stop_token = end_of_turn(self.tokenizer, self.model.custom_chat_template)
        self.limits = TokenLimits(self.model.max_prompt_tokens or 0, self.model.max_model_len or 0)
        if not quick:
            await self.rewards.start(ahead)

    async def close(self) -> None:
        """End the endpoint, the environments and the reward workers."""
        if self.endpoint is not None:
            await self.endpoint.close()
        await self.environments.close()
        await self.rewards.close()

    def count(self, name: str, what: str) -> None:
        """The first one is told in words, all are in the metrics."""
        self.counts[name] += 1
        if self.counts[name] == 1:
            log.warning("%s; later ones are only counted, as rollout/%s", what, name)

    def stats(self) -> dict[str, float]:
        return self.endpoint.stats() if self.endpoint is not None else {}


class WorkflowContext:
    """One per attempt at a task, or per run of one."""

    def __init__(
        self, shared: Shared, request: str, stream: str, answers: RunAnswers | None = None
    ):
        """`answers`: to whom those of this run's requests are told, and who knows them again."""
        self.shared = shared
        self.answers = answers
        self.request = request
        self.stream = stream  # of seeds: the same for every run, engine and start of this attempt
        self.calls = 0
        # run of the task, where the workflow says of which one
        self.calls_of: Counter[int] = Counter()
        self.doing = "in the workflow"
        self.closed = False
        self._asked = 0
        self._history: list[Experience] = []
        self._sessions: list[AgentSession] = []
        self._own: AgentSession | None = None  # of `openai`

    def close(self) -> None:
        """The task is given up: whoever still asks is refused."""
        self.closed = True

    # --- tokens -----------------------------------------------------------------------------------

    def render(self, task: Task) -> list[int]:
        """Token ids of the task's prompt, chat template applied. With
        model.enable_prompt_truncation one that is too long keeps its end, where the question is.
        """
        return self._cut(
            render_prompt(self.shared.tokenizer, task, self.shared.model.custom_chat_template)
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt without a chat template, cut as that of `render`."""
        return self._cut(list(self.shared.tokenizer.encode(text)))

    def tokens(self, text: str) -> list[int]:
        """Ids of this text alone, to stand among others."""
        return list(self.shared.tokenizer.encode(text, add_special_tokens=False))

    def _cut(self, tokens: list[int]) -> list[int]:
        most = self.shared.limits.max_prompt_tokens
        if self.shared.model.enable_prompt_truncation and len(tokens) > most:
            told = (
                f"the prompt of {self.request} has {len(tokens)} tokens: cut to the last {most} "
                "(model.max_prompt_tokens)"
            )
            self.shared.count("prompts_cut", told)
            return tokens[-most:]
        return tokens

    def follow(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids behind an assistant's words: the end of its turn, these messages, and where the
        assistant speaks again.
        """
        return render_follow_up(
            self.shared.tokenizer, messages, self.shared.model.custom_chat_template
        )

    def decode(self, tokens: Sequence[int] | Ids) -> str:
        """Text of response tokens, without special ones."""
        return self.shared.tokenizer.decode(
            np.asarray(tokens, dtype=np.int64).tolist(), skip_special_tokens=True
        )

    # --- the policy and its rewards ---------------------------------------------------------------

    async def generate(
        self,
        prompt: Sequence[int] | Ids,
        n: int,
        sampling: Sampling,
        prompt_length: int | None = None,
        run: int | None = None,
    ) -> list[Completion]:
        """`n` continuations of the same ids, from one request; of a prompt over the limit `n` empty
        ones, with stop "prompt_too_long".

        `prompt_length`: of a dialogue under way, how many ids are the task's own; the others only
        have to fit the model. `run`: which run of the task asks, where several do at once; seeds of
        a deterministic run depend on that, not on time.
        """
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:  # what is sampled so is not recorded so
            raise ValueError(
                f"temperature={sampling.temperature:g}: give 0, or {LOWEST_TEMPERATURE:g} and more"
            )
        limits = self.shared.limits
        prompt = np.asarray(prompt, dtype=np.int64).tolist()
        if (prompt_length or len(prompt)) > limits.max_prompt_tokens or len(
            prompt
        ) >= limits.max_model_len:
            told = (
                f"the prompt of request {self.request} has {len(prompt)} tokens, more than "
                "model.max_prompt_tokens or its "
            )
            # else a dialogue that fills its context: it ends there
            if prompt_length in (None, len(prompt)):
                self.shared.count("prompts_too_long", told + "context hold: it trains nothing")
            return [Completion.empty("prompt_too_long") for _ in range(n)]
        self.calls += 1
        number = f"{self.calls}"
        if run is not None:
            self.calls_of[run] += 1
            number = f"r{run}/{self.calls_of[run]}"
        sampling = self._seeded(sampling, number)
        request = GenerateRequest(
            request_id=f"{self.request}/{number}",
            prompt=prompt,
            n=n,
            sampling=sampling,
            stop_token_ids=[self.shared.stop_token],
        )
        # of a first request nobody knows whether another one follows
        several = prompt_length is not None or self.calls > 1
        made = await self._doing("generating", self._complete(request, several, run))
        if self.shared.keeps_history:
            self._history += [recorded(prompt, one, sampling) for one in made]
        return made

    async def _complete(
        self, request: GenerateRequest, several: bool, run: int | None
    ) -> list[Completion]:
        """`several`: this run has asked before, or asks on."""
        if self.answers is None:
            return await self.shared.pool.generate(request)
        answers = self.answers if run is None else self.answers.part(f"r{run}")
        return await answers.complete(request, ahead=several)

    async def score(
        self, task: Task, responses: list[str], tokens: list[int] | None = None
    ) -> list[RewardResult]:
        """Run the task's reward function on each response, in killable processes.

        `tokens`: how many each response has.
        """
        counts = tokens or [UNKNOWN] * len(responses)
        items = [(task, response, count) for response, count in zip(responses, counts, strict=True)]
        return await self._doing("scoring", self.shared.rewards.score(items))

    def extract_experience_from_history(self, clear: bool = True) -> list[Experience]:
        """With `explorer.rollout_model.enable_history`: what the policy was asked in this attempt,
        call by call, through `generate` and `openai`; without rewards yet.
        """
        if not self.shared.keeps_history:
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

    async def _doing(self, what: str, answer: Coroutine[Any, Any, Answer]) -> Answer:
        if self.closed:
            answer.close()
            raise RuntimeError(f"{self.request} was given up: its time is over")
        self.doing = what
        try:
            return await answer
        finally:
            self.doing = "in the workflow"

    def _seeded(self, sampling: Sampling, request: str) -> Sampling:
        """With a seed of this request's own, in a deterministic run."""
        if self.shared.seed is None or sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(sampling, seed=seed_of(f"{self.stream}/{request}"))

    # --- OpenAI's API -----------------------------------------------------------------------------

    async def ask(
        self, messages: list[dict[str, Any]], model: str = "", sampling: Sampling | None = None
    ) -> str:
        """What an auxiliary model says, the first of them unless one of
        explorer.auxiliary_models is named; greedily, and as long as it likes.
        """
        others = self._endpoint.others
        if not others or (model and model not in others):
            self._refuse(model)
        self._asked += 1
        chosen = others[model] if model else next(iter(others.values()))
        return await chosen.say(
            f"{self.request}/ask {self._asked}",
            messages,
            sampling or Sampling(temperature=0.0, max_tokens=0),
        )

    def openai(self, model: str = "") -> Access:
        """`base_url` and `api_key` for a client: of the policy, whose answers belong to this
        attempt, or of an auxiliary model.
        """
        if model and model not in self._endpoint.others:
            self._refuse(model)
        self._own = self._own or self.open_session(Sampling())
        return Access(
            self._endpoint.base_url(self._own.session.id, model), self._own.access.api_key
        )

    def open_session(self, sampling: Sampling, may_reward: bool = False) -> AgentSession:
        """A session of the endpoint for one run of an agent; closed with this attempt.
        `may_reward`: its key posts its reward.
        """
        name = f"session {len(self._sessions)}"
        sampling = self._seeded(sampling, name)
        answers = None if self.answers is None else self.answers.part(name)
        self._sessions.append(self._endpoint.open_session(sampling, may_reward, answers))
        return self._sessions[-1]

    def agent_slot(self) -> asyncio.Semaphore:
        """Held while a process of an agent runs: `explorer.agent_processes`."""
        return self.shared.agent_processes

    def end_sessions(self) -> None:
        """The attempt is over: its sessions answer nobody any more."""
        for one in self._sessions:
            self._endpoint.close_session(one.session.id)

    @property
    def _endpoint(self) -> Endpoint:
        if self.shared.endpoint is None:
            raise RuntimeError(
                "there is no OpenAI API in this run: set "
                "explorer.rollout_model.enable_openai_api=true"
            )
        return self.shared.endpoint

    def _refuse(self, model: str) -> NoReturn:
        known = ", ".join(self._endpoint.others)
        raise ValueError(
            f"no auxiliary model {model!r}: there are {known or 'none'}; set "
            "explorer.auxiliary_models"
        )


def recorded(prompt: list[int], made: Completion, sampling: Sampling) -> Experience:
    """A call of the policy, without reward. A greedy answer was not sampled, and is not trained."""
    return Experience(
        tokens=behind(prompt, made.tokens),
        prompt_length=len(prompt),
        logprobs=made.logprobs,
        versions=made.versions,
        action_mask=made.chosen(sampling),
        temperature=sampling.temperature or 1.0,
        stop=made.stop,
        routed_experts=made.routed_experts,
    )


def seed_of(text: str) -> int:
    """Unlike Python's own hash, the same in every process; fits a signed 64-bit number."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
