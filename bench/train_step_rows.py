"""The batch of `bench.train_step`: completions of log-normal lengths, the same for every side.

In: a seed and sizes. Out: token ids, lengths, log-probabilities and advantages, as arrays that any
trainer can take.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rft.data.packing import Row, token_weights

LR = 1e-6
FIRST, LAST = 5, 90  # tokens that are drawn: those of the toy tokenizer that are not special
# as megatron pads it at any world here; padding would add logits to the bare loop's loss
ROWS_OF_EMBEDDING = 256
# what a model without any knowledge gives every token
BEHAVIOUR = -float(np.log(ROWS_OF_EMBEDDING))
GROUP = 8  # completions of one prompt, for the advantages


@dataclass(frozen=True)
class Shape:
    rows: int = 32
    prompt: int = 32
    median: float = 140.0
    sigma: float = 0.9
    longest: int = 1024
    budget: int = 2048  # tokens of a packed microbatch


def completions(shape: Shape, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.clip(
        rng.lognormal(np.log(shape.median), shape.sigma, shape.rows), 1, shape.longest
    ).astype(int)
    return [rng.integers(FIRST, LAST, n) for n in lengths]


def prompts(shape: Shape, seed: int) -> list[np.ndarray]:
    """One for each completion; the completions of a group share it."""
    rng = np.random.default_rng(seed + 1)
    drawn = [rng.integers(FIRST, LAST, shape.prompt) for _ in range(-(-shape.rows // GROUP))]
    return [drawn[i // GROUP] for i in range(shape.rows)]


def advantages(shape: Shape, seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 2).normal(size=shape.rows).astype(np.float32)


def rows_of(shape: Shape, seed: int) -> list[Row]:
    """Prompts are not trained."""
    answers, asked, credit = completions(shape, seed), prompts(shape, seed), advantages(shape, seed)
    weights = token_weights([len(answer) for answer in answers], "token-mean")
    rows = []
    for prompt, answer, advantage, weight in zip(asked, answers, credit, weights, strict=True):
        trained = np.concatenate([np.zeros(len(prompt)), np.ones(len(answer))]).astype(np.float32)
        rows.append(
            Row(
                tokens=np.concatenate([prompt, answer]),
                trained=trained,
                behaviour=trained * np.float32(BEHAVIOUR),
                advantage=trained * advantage,
                weight=trained * np.float32(weight),
            )
        )
    return rows


def save_batch(shape: Shape, seed: int, path: Path) -> None:
    """The same rows as plain arrays, for a trainer that lives in another environment."""
    answers = completions(shape, seed)
    lengths = np.array([len(answer) for answer in answers])
    behaviour = np.full(lengths.sum(), BEHAVIOUR, dtype=np.float32)
    np.savez(
        path,
        prompts=np.stack(prompts(shape, seed)),
        completions=np.concatenate(answers),
        lengths=lengths,
        behaviour=behaviour,
        advantages=advantages(shape, seed),
    )
