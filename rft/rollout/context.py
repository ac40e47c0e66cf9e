"""What a workflow may do, and what all workflows of one explorer share: tokenizer, engines, reward workers.

In: a task and token ids from a workflow. Out: rendered prompts, completions of the engine pool, scored responses. Invariants: a
prompt over the limit never reaches an engine; every request of a deterministic run has a seed of its own, made of the run's
seed, the task, the attempt and the request's number, whichever engine answers it and whenever; sessions and history end with the
attempt that they belong to.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from rft.buffer.render import end_of_turn, render_prompt
from rft.config import ExplorerConfig, ModelConfig
from rft.experience import Completion, Experience, GenerateRequest, Sampling, Task
from rft.rollout.agents import Access, AgentSession
from rft.rollout.pool import EnginePool
from rft.rollout.reward_pool import RewardPool
from rft.rollout.reward_worker import RewardResult


@dataclass(frozen=True)
class Limits:
    """Lengths that a prompt and a response must keep, in tokens."""

    max_prompt_tokens: int
    max_model_len: int


class Shared:
    """One per explorer; `seed` is that of a deterministic run."""

    def __init__(self, config: ExplorerConfig, model: ModelConfig, engines: dict[str, Any], seed: int | None):
        self.model = model
        self.seed = seed
        self.pool = EnginePool(engines)
        self.rewards = RewardPool(config.reward_workers, config.reward_timeout)
        self.keeps_history = config.rollout_model.enable_history
        self.agent_processes = asyncio.Semaphore(config.agent_processes)
        self.endpoint: Any = None  # an `Endpoint`, where the run has one

    async def load(self) -> None:
        """Load the tokenizer, start the reward workers."""
        from rft.rollout.endpoint.models import load_tokenizer

        self.tokenizer = load_tokenizer(self.model)
        self.stop_token = end_of_turn(self.tokenizer, self.model.custom_chat_template)
        self.limits = Limits(self.model.max_prompt_tokens or 0, self.model.max_model_len or 0)
        await self.rewards.start()

    def served(self) -> Any:
        if self.endpoint is None:
            raise RuntimeError("there is no OpenAI API in this run: set explorer.rollout_model.enable_openai_api=true")
        return self.endpoint


class Context:
    """What a workflow may do: render, generate, decode, score. One per attempt at a task."""

    def __init__(self, shared: Shared, request: str, stream: str):
        self.shared = shared
        self.request = request
        self.stream = stream  # of seeds: the same for every run, engine and start of this attempt
        self.calls = 0
        self._history: list[Experience] = []
        self._sessions: list[AgentSession] = []
        self._own: AgentSession | None = None  # of `openai`

    def render(self, task: Task) -> list[int]:
        return render_prompt(self.shared.tokenizer, task, self.shared.model.custom_chat_template)

    async def generate(self, prompt: list[int], n: int, sampling: Sampling) -> list[Completion]:
        """n continuations; a prompt over the limit comes back as n empty ones with stop "prompt_too_long"."""
        limits = self.shared.limits
        if len(prompt) > limits.max_prompt_tokens or len(prompt) >= limits.max_model_len:
            return [Completion(tokens=[], logprobs=[], versions=[], stop="prompt_too_long") for _ in range(n)]
        self.calls += 1
        if self.shared.seed is not None and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=seed_of(f"{self.stream}/{self.calls}"))
        made = await self.shared.pool.generate(
            GenerateRequest(
                request_id=f"{self.request}/{self.calls}",
                prompt=prompt,
                n=n,
                sampling=sampling,
                stop_token_ids=[self.shared.stop_token],
            )
        )
        if self.shared.keeps_history:
            self._history += [recorded(prompt, one, sampling.temperature, self.calls - 1) for one in made]
        return made

    def decode(self, tokens: list[int]) -> str:
        return self.shared.tokenizer.decode(tokens, skip_special_tokens=True)

    async def score(self, task: Task, responses: list[str]) -> list[RewardResult]:
        return await self.shared.rewards.score([(task, response) for response in responses])

    # --- models behind OpenAI's API ------------------------------------------------------------------------------

    async def ask(self, messages: list[dict[str, Any]], model: str = "", sampling: Sampling | None = None) -> str:
        """What an auxiliary model says, the first of them unless one is named; greedily, and as long as it likes."""
        others = self.shared.served().others
        if not others or (model and model not in others):
            known = f"there are {', '.join(others)}" if others else "there is none"
            raise ValueError(f"no auxiliary model {model!r}: {known}; set explorer.auxiliary_models")
        self.calls += 1
        chosen = others[model] if model else next(iter(others.values()))
        return await chosen.say(
            f"{self.request}/{self.calls}", messages, sampling or Sampling(temperature=0.0, max_tokens=0)
        )

    def open_session(self, sampling: Sampling) -> AgentSession:
        """A session of the endpoint for one run of an agent; closed with this attempt."""
        if self.shared.seed is not None and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=seed_of(f"{self.stream}/session {len(self._sessions)}"))
        endpoint = self.shared.served()
        opened = endpoint.registry.open(sampling=sampling)
        access = Access(endpoint.base_url(opened.id), endpoint.registry.key(opened.id))
        self._sessions.append(AgentSession(endpoint.registry.open_[opened.id], access))
        return self._sessions[-1]

    def openai(self, model: str = "") -> Access:
        """`base_url` and `api_key` for a client: of the policy, whose answers belong to this attempt, or of an auxiliary model."""
        endpoint = self.shared.served()
        if model and model not in endpoint.others:
            raise ValueError(f"no auxiliary model {model!r}: there are {', '.join(endpoint.others) or 'none'}")
        self._own = self._own or self.open_session(Sampling())
        return Access(endpoint.base_url(self._own.id, model), self._own.access.api_key)

    def extract_experience_from_history(self, clear: bool = True) -> list[Experience]:
        """What the policy was asked in this attempt, call by call, through `generate` and `openai`; without rewards yet."""
        if not self.shared.keeps_history:
            raise RuntimeError("nothing is kept of model calls: set explorer.rollout_model.enable_history=true")
        found = self._history + (self._own.session.experiences() if self._own else [])
        if clear:
            self._history = []
            if self._own:
                self._own.session.forget()
        return found

    def agent_slot(self) -> asyncio.Semaphore:
        """Held while a process of an agent runs."""
        return self.shared.agent_processes

    def close(self) -> None:
        """The attempt is over: its sessions answer nobody any more."""
        for one in self._sessions:
            self.shared.served().registry.close(one.id)


def recorded(prompt: list[int], made: Completion, temperature: float, turn: int) -> Experience:
    return Experience(
        tokens=[*prompt, *made.tokens], prompt_length=len(prompt), action_mask=[int(temperature > 0)] * len(made.tokens),
        logprobs=made.logprobs, versions=made.versions, temperature=temperature or 1.0, stop=made.stop, turn=turn,
        routed_experts=made.routed_experts,
    )  # fmt: skip


def seed_of(text: str) -> int:
    """Unlike Python's own hash, the same in every process; fits a signed 64-bit number."""
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
