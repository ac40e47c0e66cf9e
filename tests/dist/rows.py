"""Random rows that both sides of a test can make: the ranks, and the test that compares with
transformers.
"""

import numpy as np

from rft.data.packing import BY_TOKENS, PackingPolicy, Row, token_weights

CUTS = {
    "tokens-packed": BY_TOKENS,
    "tokens-padded": PackingPolicy(pad=True),
    "rows-packed": PackingPolicy(rows=3),
    "rows-padded": PackingPolicy(rows=3, pad=True),
}
RATES = {"sgd": 0.05, "adam": 1e-3}
# rows of groups, whose prefixes are computed once, and as `make_rows` gives rows without any
SHARED = {"shared": PackingPolicy(share=True), "unrolled": BY_TOKENS}
# what every mesh is compared in: first gradients, two of them of few rows, and optimizers
VARIANTS = [*CUTS, "few", "few-rows", *SHARED, *RATES]


def make_group_rows(seed: int = 0) -> list[Row]:
    """Prompts with several responses, two of them the same; agents whose turns are samples, each
    behind all turns before it, in two branches; rows of no group.
    """
    rng = np.random.default_rng(seed)

    def drawn(low: int, high: int) -> list[int]:
        return rng.integers(5, 90, rng.integers(low, high)).tolist()

    found: list[tuple[list[int], list[int], int]] = []  # tokens, which are trained, group
    for group in range(3):
        prompt = drawn(8, 30)
        responses = [drawn(2, 16) for _ in range(5)]
        responses += [responses[0], responses[1][:1] + drawn(3, 6), responses[2][:-1]]
        for response in responses:
            found.append((prompt + response, [0] * len(prompt) + [1] * len(response), group))
    for group in (3, 4):
        prompt = drawn(4, 12)
        for _ in range(2):
            history, seen = prompt, [0] * len(prompt)
            for _ in range(3):
                turn, observation = drawn(2, 8), drawn(1, 6)
                found.append((history + turn, seen + [1] * len(turn), group))
                history = history + turn + observation
                seen = [0] * len(history)
    found += [(tokens, [0] + [1] * (len(tokens) - 1), -1) for tokens in (drawn(3, 9), drawn(3, 9))]
    order = rng.permutation(len(found)).tolist()
    weights = token_weights([sum(found[at][1]) for at in order], "seq-mean-token-mean")
    return [_row(rng, *found[at], weight=weight) for at, weight in zip(order, weights, strict=True)]


def _row(
    rng: np.random.Generator, tokens: list[int], trained: list[int], group: int, weight: float
) -> Row:
    flags = np.array(trained, dtype=np.float32)
    return Row(
        tokens=np.array(tokens, dtype=np.int64),
        trained=flags,
        behaviour=(flags * rng.uniform(-4.7, -4.4, len(tokens))).astype(np.float32),
        advantage=flags * np.float32(rng.normal()),
        weight=flags * np.float32(weight),
        temperature=float(rng.choice([1.0, 0.7])),
        group=group,
    )


def make_rows(count: int, seed: int = 0, longest: int = 40) -> list[Row]:
    """Ragged random rows whose second half is trained, with behaviour close to a random model's
    log-probabilities.
    """
    rng = np.random.default_rng(seed)
    rows, lengths = [], rng.integers(3, longest, count)
    weights = token_weights([int(n) - int(n) // 2 for n in lengths], "seq-mean-token-mean")
    for n, weight in zip(lengths.tolist(), weights, strict=True):
        trained = np.zeros(n, dtype=np.float32)
        trained[n // 2 :] = 1
        rows.append(
            Row(
                tokens=rng.integers(5, 90, n),
                trained=trained,
                behaviour=(trained * rng.uniform(-4.7, -4.4, n)).astype(np.float32),
                advantage=trained * np.float32(rng.normal()),
                weight=trained * np.float32(weight),
                temperature=float(rng.choice([1.0, 0.7])),
            )
        )
    return rows
