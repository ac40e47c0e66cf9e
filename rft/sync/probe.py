"""Do the engines compute what the trainer computes? Asked every n-th time that weights were
synchronized, and the first time.

    rank 0 ── a fixed prompt ──► every engine: greedy tokens, their log-probabilities ──► packed
            ──► the policy's own forward pass

In: a policy whose weights are those that all engines serve. Out: the mean and the largest
difference of a log-probability. Checksums say that bytes arrived; this says that they arrived where
they belong: a transposed block, a wrong norm or an expert at another place has the right bytes.
Invariant: it changes nothing, and every rank comes to the same end.
"""

from typing import Protocol

import numpy as np

from rft.data.packing import Packed, Row, pack
from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.ground.protocols import Mesh
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle

PROMPT_TOKENS, NEW_TOKENS = 16, 16
# nats, mean: half-precision arithmetic differs by a tenth of it, a wrong layout by several
LIMIT = 0.5
ANSWER_S = 60.0


class Scorer(Protocol):
    multiple: int

    def score(self, part: list[Packed], trained_only: bool = False) -> list[np.ndarray]: ...


class Probe:
    """`interval`: every so many versions; 0: never. `vocab`: token ids that the model has."""

    def __init__(
        self,
        policy: Scorer,
        mesh: Mesh,
        synchronizer: SynchronizerHandle | None,
        interval: int,
        vocab: int,
    ):
        self.policy = policy
        self.mesh = mesh
        self.synchronizer = synchronizer
        self.interval = interval
        self.vocab = vocab
        self.passed = 0  # versions since the last one that was probed

    def after(self, version: int) -> dict[str, float]:
        """All engines serve `version`, which are the policy's weights now.

        Collective; raises when they compute something else.
        """
        due = self.interval > 0 and self.passed % self.interval == 0
        self.passed += 1
        if not due:
            return {}
        completions = self._ask(version) if self.synchronizer is not None else []
        parts = self._packed(completions) if self.mesh.rank == 0 else None
        mean, most = self._differences(self.mesh.scatter_parts(parts))
        if mean > LIMIT:
            raise RuntimeError(
                f"the engines do not compute what the trainer does: of version {version} their "
                "log-probabilities differ by "
                f"{mean:.2f} nats on average, {most:.2f} at most, on the same tokens"
            )
        return {"probe_mean_diff": mean, "probe_max_diff": most}

    def _ask(self, version: int) -> list[Completion]:
        import ray

        prompt = [(13 + 7919 * i) % self.vocab for i in range(PROMPT_TOKENS)]
        sampling = Sampling(temperature=0.0, max_tokens=NEW_TOKENS)
        self.request = GenerateRequest(
            request_id=f"probe/{version}", prompt=prompt, sampling=sampling
        )
        answers = ray.get(
            self.synchronizer.ask(Synchronizer.probe, encode(self.request)),  # type: ignore[union-attr]
            timeout=ANSWER_S,
        )
        return [made for answer in answers for made in decode(answer, list[Completion])]

    def _packed(self, completions: list[Completion]) -> list[list[Packed]]:
        rows = [_row(self.request.prompt, made) for made in completions]
        return pack(rows, self.mesh.dp, PROMPT_TOKENS + NEW_TOKENS, self.policy.multiple)

    def _differences(self, part: list[Packed]) -> tuple[float, float]:
        """Mean and maximum over all ranks; ranks that hold the same tokens count them as often."""
        import torch

        sums, maxima = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        found = self.policy.score(part, trained_only=True)
        if self.mesh.is_last_stage:
            for packed, scores in zip(part, found, strict=True):
                differences = np.abs(scores - packed.behaviour)[packed.weight > 0]
                sums += torch.tensor([differences.sum(), len(differences)], dtype=torch.float64)
                maxima = torch.maximum(
                    maxima, torch.tensor([differences.max(initial=0.0)], dtype=torch.float64)
                )
        self.mesh.reduce(sums, maxima)
        return float(sums[0] / max(1.0, float(sums[1]))), float(maxima[0])


def _row(prompt: list[int], made: Completion) -> Row:
    tokens = np.array(prompt + made.tokens, dtype=np.int64)
    trained, behaviour = (
        np.zeros(len(tokens), dtype=np.float32),
        np.zeros(len(tokens), dtype=np.float32),
    )
    trained[len(prompt) :] = 1.0
    behaviour[len(prompt) :] = made.logprobs
    return Row(
        tokens,
        trained,
        behaviour,
        advantage=np.zeros(len(tokens), dtype=np.float32),
        weight=trained,
    )
