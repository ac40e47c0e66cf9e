"""What a workflow may do, and what all workflows of one explorer share: tokenizer, engines, reward
workers.

In: a task and token ids from a workflow. Out: rendered prompts, completions of the engine pool,
scored responses. Invariants: a prompt over the limit never reaches an engine; every request of a
deterministic run has a seed of its own, made of the run's seed, the task, the attempt and the
request's number, whichever engine answers it and whenever.
"""

import logging
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rft.config import ExplorerConfig, ModelConfig
from rft.data.chat import end_of_turn, render_follow_up, render_prompt
from rft.ground.experience import Completion, GenerateRequest, Sampling, Task
from rft.rollout.access import ModelAccess, Served, seed_of
from rft.rollout.pool import EnginePool
from rft.rollout.reward_pool import RewardPool
from rft.rollout.reward_worker import UNKNOWN, RewardResult

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Limits:
    """Lengths that a prompt and a response must keep, in tokens."""

    max_prompt_tokens: int
    max_model_len: int


class Shared:
    """One per explorer; `seed` is that of a deterministic run."""

    def __init__(
        self, config: ExplorerConfig, model: ModelConfig, engines: dict[str, Any], seed: int | None
    ):
        self.model = model
        self.seed = seed
        self.pool = EnginePool(engines)
        self.rewards = RewardPool(config.reward_workers, config.reward_timeout)
        self.counts = Counter({"prompts_too_long": 0, "prompts_cut": 0})
        self.served = Served(config)

    async def load(self) -> None:
        """Load the tokenizer, start the reward workers."""
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(
            self.model.model_path, trust_remote_code=self.model.trust_remote_code
        )
        self.stop_token = end_of_turn(self.tokenizer, self.model.custom_chat_template)
        self.limits = Limits(self.model.max_prompt_tokens or 0, self.model.max_model_len or 0)
        await self.rewards.start()

    def count(self, name: str, what: str) -> None:
        """The first one is told in words, all are in the metrics."""
        self.counts[name] += 1
        if self.counts[name] == 1:
            log.warning("%s; later ones are only counted, as rollout/%s", what, name)


class Context(ModelAccess):
    """What a workflow may do: render, generate, decode, score.

    One per attempt at a task, or per run of one.
    """

    def __init__(self, shared: Shared, request: str, stream: str):
        super().__init__(shared.served, request, stream if shared.seed is not None else None)
        self.shared = shared
        self.request = request
        self.stream = stream  # of seeds: the same for every run, engine and start of this attempt
        self.calls = 0
        # run of the task, where the workflow says of which one
        self.calls_of: Counter[int] = Counter()
        self.doing = "in the workflow"
        self.closed = False

    def close(self) -> None:
        """The task is given up: whoever still asks is refused."""
        self.closed = True

    def render(self, task: Task) -> list[int]:
        """With model.enable_prompt_truncation a prompt that is too long keeps its end, where the
        question is.
        """
        tokens = render_prompt(self.shared.tokenizer, task, self.shared.model.custom_chat_template)
        most = self.shared.limits.max_prompt_tokens
        if self.shared.model.enable_prompt_truncation and len(tokens) > most:
            told = (
                f"the prompt of task {task.id} has {len(tokens)} tokens: cut to the last {most} "
                "(model.max_prompt_tokens)"
            )
            self.shared.count("prompts_cut", told)
            return tokens[-most:]
        return tokens

    def follow(self, messages: list[dict[str, Any]]) -> list[int]:
        return render_follow_up(
            self.shared.tokenizer, messages, self.shared.model.custom_chat_template
        )

    async def generate(
        self,
        prompt: list[int],
        n: int,
        sampling: Sampling,
        prompt_length: int | None = None,
        run: int | None = None,
    ) -> list[Completion]:
        """n continuations; a prompt over the limit comes back as n empty ones with stop
        "prompt_too_long".
        """
        limits = self.shared.limits
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
            return [
                Completion(tokens=[], logprobs=[], versions=[], stop="prompt_too_long")
                for _ in range(n)
            ]
        self.calls += 1
        number = f"{self.calls}"
        if run is not None:
            self.calls_of[run] += 1
            number = f"r{run}/{self.calls_of[run]}"
        if self.shared.seed is not None and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=seed_of(f"{self.stream}/{number}"))
        request = GenerateRequest(
            request_id=f"{self.request}/{number}",
            prompt=prompt,
            n=n,
            sampling=sampling,
            stop_token_ids=[self.shared.stop_token],
        )
        made = await self._doing("generating", self.shared.pool.generate(request))
        self.record(prompt, made, sampling)
        return made

    def decode(self, tokens: list[int]) -> str:
        return self.shared.tokenizer.decode(tokens, skip_special_tokens=True)

    async def score(
        self, task: Task, responses: list[str], tokens: list[int] | None = None
    ) -> list[RewardResult]:
        counts = tokens or [UNKNOWN] * len(responses)
        items = [(task, response, count) for response, count in zip(responses, counts, strict=True)]
        return await self._doing("scoring", self.shared.rewards.score(items))

    async def _doing(self, what: str, answer: Coroutine[Any, Any, Answer]) -> Answer:
        if self.closed:
            answer.close()
            raise RuntimeError(f"{self.request} was given up: its time is over")
        self.doing = what
        try:
            return await answer
        finally:
            self.doing = "in the workflow"
