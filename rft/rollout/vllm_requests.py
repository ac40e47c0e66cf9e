"""Our requests in vLLM's words, and vLLM's outputs in ours; its pause. vLLM is imported where it is
needed only: it is heavy.
"""

from typing import TYPE_CHECKING

import xxhash

from rft.ground.experience import Completion, GenerateRequest, StopReason, VersionSpan
from rft.rollout.adapter_serving import Served

if TYPE_CHECKING:
    from vllm import AsyncLLM, SamplingParams
    from vllm.outputs import CompletionOutput

STOPS: dict[str | None, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def sampling_params(asked: GenerateRequest, room: int) -> "SamplingParams":
    """Our request as vLLM's; `room` is what the context leaves for the response."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = asked.sampling
    return SamplingParams(
        n=asked.n,
        stop_token_ids=asked.stop_token_ids,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_tokens, room),
        min_tokens=min(sampling.min_tokens, room),
        seed=None if sampling.seed is None else spread(sampling.seed),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        stop=asked.stop,
        detokenize=bool(asked.stop),  # nobody reads the text otherwise
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def spread(seed: int) -> int:
    """A 62-bit seed: vLLM gives sample i the seed + i, so neighbouring request seeds must not be
    neighbours there.
    """
    return xxhash.xxh3_64_intdigest(seed.to_bytes(16, "little", signed=True)) >> 2


def completion(engine: str, made: "CompletionOutput", served: Served | None) -> Completion:
    """vLLM's output as our record; raises when vLLM reports an
    error or leaves a token without version.
    """
    stop = STOPS.get(made.finish_reason)
    if stop is None:
        raise RuntimeError(
            f"{engine}: vLLM ended a request with finish reason {made.finish_reason!r}"
        )
    tokens = list(made.token_ids)
    spans = [
        VersionSpan(version=int(s.version), start=s.start, end=s.end)
        for s in made.weight_versions or []
    ]
    if served:  # vLLM's version is that of the base model
        spans = served.spans(len(tokens))
    logprobs = list(made.logprobs.logprobs) if tokens else []  # type: ignore[union-attr]
    if len(logprobs) != len(tokens) or sum(s.end - s.start for s in spans) != len(tokens):
        raise RuntimeError(
            f"{engine}: {len(tokens)} tokens came with {len(logprobs)} logprobs and versions "
            f"{spans}"
        )
    return Completion(tokens=tokens, logprobs=logprobs, versions=spans, stop=stop)


async def pause(llm: "AsyncLLM", clear_cache: bool) -> None:
    """vLLM's `pause_generation(mode="keep")` without its last line, which sleeps for 20 ms so that
    outputs of requests that are aborted reach their callers first. Here none is aborted.
    """
    if clear_cache:
        await llm.renderer.clear_mm_cache_async()
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
