"""Do engines that speculate tell the log-probabilities of what they sample? Compared with the
trainer's own before anything is learned from them.

    texts that repeat themselves ─► engines, which speculate ─► responses ┐
    one token behind parts of these ─► engines, which cannot ─► the noise ┴─► rows
        ─► the trainer's scores, in its own layout ─► largest differences ─► refused, or not

In: at rank 0, who asks the engines; on every rank, the policy and how rows are packed for it. Out:
nothing, or a `ConfigError` on every rank, with a sentence at rank 0's and the others'. Invariant:
the engines serve the weights that score. A request for one token is answered by the pass over its
prompt, for which nothing is proposed: what it differs by is the noise of dtypes and kernels, the
same engine's without speculation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rft.config import ConfigError
from rft.data.packing import Row
from rft.data.updates import ONE_UPDATE, RowPacking, planned
from rft.ground.columns import behind
from rft.ground.experience import Completion, GenerateRequest, Sampling
from rft.ground.protocols import TrainerMesh

if TYPE_CHECKING:
    from rft.megatron.policy import Policy

BAR = 1e-3  # of a log-probability, in nats
NOISE = 4.0  # times the largest difference without speculation: that is of fewer tokens
TEXTS = 16
REPEATED = 6  # times, in a prompt: what a proposal is found in
PROMPT, RESPONSE = 96, 64  # tokens at most
ALONE = 8  # tokens of each response that are sampled a second time, without speculation
# (policy version, requests) -> one answer to each, of engines that serve that version
Ask = Callable[[int, list[GenerateRequest]], list[Completion]]


@dataclass(frozen=True)
class SpeculationCheck:
    """`key`: what turned speculation on. `ask` and `encode` (text to ids): rank 0's."""

    key: str
    mesh: TrainerMesh
    policy: "Policy"
    packing: RowPacking
    context: int  # tokens of prompt and response
    ask: Ask | None
    encode: Callable[[str], list[int]] | None
    seeded: bool = False

    def __call__(self, version: int) -> None:
        """Collective; raises ConfigError on every rank."""
        parts, speculated = None, 0
        if self.mesh.rank == 0:
            rows, speculated = self._rows(version)
            parts, _ = planned(rows, ONE_UPDATE, version, self.packing, ("token-mean",) * 2)
        found = self.mesh.gather(self._differences(self.mesh.scatter_parts(parts)))
        why = ""
        if found is not None:
            of_rows = [pair for one in found for pair in one]
            with_it = [x for row, values in of_rows if row < speculated for x in values]
            without = [x for row, values in of_rows if row >= speculated for x in values]
            why = judged(self.key, with_it, without)
        if why := self.mesh.broadcast(why):
            raise ConfigError(why)

    def _rows(self, version: int) -> tuple[list[Row], int]:
        """What the engines sampled, and how many rows of it with speculation; the others follow."""
        assert self.ask is not None and self.encode is not None, "rank 0 asks"
        room = max(1, min(PROMPT, self.context // 2))
        prompts = [self.encode(text)[:room] for text in texts()]
        longest = max(1, min(RESPONSE, self.context - room))
        answers = self.ask(version, self._requests("speculated", prompts, longest))
        begun = [
            prompt + answer.ids[:at]
            for prompt, answer in zip(prompts, answers, strict=True)
            for at in np.linspace(0, len(answer.tokens) - 1, ALONE, dtype=int).tolist()
        ]
        beside = self.ask(version, self._requests("alone", begun, 1))
        rows = [
            row_of(prompt, answer)
            for prompt, answer in zip(prompts + begun, answers + beside, strict=True)
        ]
        return rows, len(prompts)

    def _requests(self, kind: str, prompts: list[list[int]], longest: int) -> list[GenerateRequest]:
        return [
            GenerateRequest(
                request_id=f"check-{kind}-{number}",
                prompt=prompt,
                sampling=Sampling(max_tokens=longest, seed=number if self.seeded else None),
            )
            for number, prompt in enumerate(prompts)
        ]

    def _differences(self, part: list[Any]) -> list[tuple[int, list[float]]]:
        """(row, engine less trainer of every sampled token) of this rank's rows, where it is the
        one of those with the same that tells.
        """
        scores = self.policy.score(part, trained_only=True)
        mesh = self.mesh
        if not (mesh.is_last_stage and mesh.tp_rank == 0 and mesh.cp_rank == 0):
            return []
        found = []
        for packed, own in zip(part, scores, strict=True):
            bounds = packed.cu_seqlens.tolist()
            for row, start, stop in zip(packed.rows.tolist(), bounds, bounds[1:], strict=False):
                sampled = packed.weight[start:stop] != 0
                less = (packed.behaviour[start:stop] - own[start:stop])[sampled]
                found.append((row, less.tolist()))
        return found


def texts() -> list[str]:
    """Which say the same again and again, as what n-grams and drafts guess well does."""
    return [f"{n} and {n + 3} make {2 * n + 3}. " * REPEATED for n in range(1, TEXTS + 1)]


def row_of(prompt: list[int], answer: Completion) -> Row:
    """Its sampled tokens are what is scored; raises ValueError when there are none."""
    if not len(answer.tokens):
        raise ValueError(f"an engine answered {len(prompt)} tokens with none: {answer.stop}")
    size = len(prompt), len(answer.tokens)
    sampled = np.repeat(np.float32([0, 1]), size)
    return Row(
        tokens=behind(prompt, answer.tokens),
        trained=sampled,
        behaviour=np.concatenate([np.zeros(size[0]), answer.logprobs]).astype(np.float32),
        advantage=np.zeros_like(sampled),
        weight=sampled,
    )


def judged(key: str, with_it: list[float], without: list[float]) -> str:
    """Why speculation is refused, or nothing; both: engine less trainer, of every sampled token.

    The largest difference decides: one wrong token in a thousand would hide in a mean.
    """
    told, noise = (np.abs(np.nan_to_num(x, nan=np.inf)) for x in (with_it, without))
    bar = max(BAR, NOISE * float(noise.max()))
    wrong, worst = int((told > bar).sum()), float(told.max())
    compared = (
        f"{key}: the engines' log-probabilities of {len(told)} tokens sampled at temperature 1 "
        f"differ from the trainer's by {worst:.1e} at most, and without speculation by "
        f"{noise.max():.1e}"
    )
    if np.isfinite(bar) and not wrong:
        print(f"speculation: {compared}", flush=True)
        return ""
    return (
        f"{compared}: {wrong} of them by more than {bar:.1e}, so that what is learned from them "
        f"would be wrong; leave {key} out"
    )
