"""A rollout engine whose model is at a service: token ids in, token ids with log-probabilities and
weight versions out.

    generate(GenerateRequest) ──► the sampling client of the version that is served ──► [Completion]
    stage(Round) ──► a sampling client on that version's path, beside the one that serves
            commit(Round) ──► it serves

The supervisor wraps the class as a Ray actor; the calls are those of
`rft.rollout.engine.RolloutEngine`. Invariant: every token of a completion is of exactly the version
that it carries: a request stays with the client that it began with, and a client's weights never
change.
"""

import asyncio
import os
import time
from typing import Any

from rft.config import ModelConfig
from rft.extras.tinker.service import Service, end_tokens, in_a_line
from rft.ground import hubs
from rft.ground.columns import Ids, LogProbs, column
from rft.ground.experience import Completion, GenerateRequest, VersionSpan, decode, encode
from rft.ground.rounds import (
    BROKEN,
    UNREACHABLE,
    AtPath,
    Holding,
    Installed,
    Received,
    Round,
    RoundFailed,
    TrainerInfo,
    WorkerOffer,
)
from rft.monitor.logs import STACKS_SIGNAL
from rft.rollout.engine import EngineUnavailable
from rft.rollout.engine_weights import IdleClock


class SamplerEngine:
    def __init__(self, name: str, model: ModelConfig, max_model_len: int):
        self.name = name
        self.model = model
        self.max_model_len = max_model_len
        hubs.bring(model.model_path, weights=False, code=model.trust_remote_code)
        self.ends = end_tokens(model.model_path)
        self.requests = self.tokens = 0
        self._service: Service | None = None
        self._serving: tuple[int, Any] | None = None  # version, client
        self._staged: tuple[int, Any] | None = None
        self._holding = Holding()
        self._running: dict[str, asyncio.Future[Any]] = {}
        self._idle = IdleClock()

    async def start(self, version: int = 0) -> dict[str, Any]:
        """Connect. There is nothing to sample from before the first round."""
        began = time.monotonic()
        self._service = await asyncio.to_thread(Service, self.model.tinker)
        return {
            "service": self.model.tinker.base_url or "Tinker",
            "start_s": round(time.monotonic() - began, 2),
        }

    async def generate(self, request: bytes) -> bytes:
        """Encoded `GenerateRequest` in, encoded `list[Completion]` (n
        of them) out, when all are finished.
        """
        asked = decode(request, GenerateRequest)
        room = self.max_model_len - len(asked.prompt)
        if room <= 0:
            return encode([_empty("prompt_too_long")] * asked.n)
        if self._serving is None:
            raise EngineUnavailable(f"{self.name} has no weights yet")
        version, client = self._serving
        self._running[asked.request_id] = future = asyncio.wrap_future(
            _sample(client, asked, room, self.ends).future()
        )
        self._idle.note(True)
        try:
            response = await future
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return encode([_empty("abort")] * asked.n)
        finally:
            del self._running[asked.request_id]
            self._idle.note(bool(self._running))
        completions = [self._completion(sequence, version) for sequence in response.sequences]
        self.requests += 1
        self.tokens += sum(len(sequence.tokens) for sequence in completions)
        return encode(completions)

    def _completion(self, sequence: Any, version: int) -> Completion:
        tokens = column(Ids, sequence.tokens)
        logprobs = column(LogProbs, sequence.logprobs or [])
        if len(logprobs) != len(tokens):
            raise RuntimeError(
                f"{self.name}: {len(tokens)} tokens came with {len(logprobs)} logprobs"
            )
        spans = [VersionSpan(version=version, start=0, end=len(tokens))] if len(tokens) else []
        return Completion(
            tokens=tokens, logprobs=logprobs, versions=spans, stop=sequence.stop_reason
        )

    async def finished(self, asked: dict[str, list[int]]) -> bytes:
        """As `RolloutEngine.finished`; nothing is known before the service's whole answer."""
        return encode({})

    async def abort(self, request_id: str) -> None:
        """End a request now; its `generate` returns without a token, with stop "abort": the service
        gives no half answers.
        """
        if (future := self._running.get(request_id)) is not None:
            future.cancel()

    async def idleness(self) -> tuple[float, float]:
        """Seconds in which nothing was asked for, and all seconds, since this was made."""
        return self._idle.seconds()

    # --- weights ----------------------------------------------------------------------------------

    async def worker_offers(self) -> list[WorkerOffer]:
        """None: a service has no workers that could pass weights on."""
        return []

    async def init_weights(self, info: TrainerInfo) -> None:
        """A trainer is here; where its weights are, every round says."""

    async def stage(self, coming: Round) -> Received:
        assert self._service is not None and isinstance(coming.location, AtPath)
        version, path, client = coming.version, coming.location.path, self._service.client
        try:
            async with asyncio.timeout(coming.timeout):
                request = await asyncio.to_thread(client.create_sampling_client, model_path=path)
                self._staged = (version, await request)
        except Exception as error:
            blame = UNREACHABLE if isinstance(error, TimeoutError) else BROKEN
            raise RoundFailed(
                f"{self.name}: version {version} is not at {path}: {in_a_line(error)}", blame
            ) from error
        return Received()

    async def commit(self, coming: Round) -> Installed:
        assert self._staged is not None and self._staged[0] == coming.version, (
            "commit of what was not staged"
        )
        self._serving, self._staged = self._staged, None
        self._holding = Holding(mark=(coming.epoch, coming.version), digest=coming.digest)
        return Installed(version=coming.version, digest=coming.digest)

    async def holding(self) -> Holding:
        """What a new synchronizer must know."""
        return self._holding

    async def weight_version(self) -> int:
        return self._serving[0] if self._serving else 0

    # --- life -------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Never returns: this process holds nothing that could end before it does."""
        await asyncio.Event().wait()

    async def is_silent(self) -> bool:
        """A service's answers have deadlines of their own."""
        return False

    async def dump_stacks(self) -> None:
        """Every thread of this process, into its log."""
        os.kill(os.getpid(), STACKS_SIGNAL)

    async def stats(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": await self.weight_version(),
            "requests": self.requests,
            "tokens": self.tokens,
            "active": len(self._running),
        }

    async def shutdown(self) -> None:
        if self._service is not None:
            service, self._service = self._service, None
            await asyncio.to_thread(service.close)


def _sample(client: Any, asked: GenerateRequest, room: int, ends: list[int]) -> Any:
    """`ends`: of the model; naming own ones takes their place at the service."""
    from tinker import ModelInput, SamplingParams

    sampling = asked.sampling
    if asked.stop or sampling.min_tokens or sampling.structured:
        raise ValueError(
            "a Tinker service ends a response at tokens or at its length: give stop_token_ids "
            "instead of stop, and neither min_tokens nor a form of the answer"
        )
    params = SamplingParams(
        max_tokens=min(sampling.max_tokens, room),
        seed=None if sampling.seed is None else sampling.seed + asked.first,
        stop=sorted({*ends, *asked.stop_token_ids}),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
    return client.sample(ModelInput.from_ints(asked.prompt), asked.n, params)


def _empty(stop: Any) -> Completion:
    return Completion.empty(stop)
