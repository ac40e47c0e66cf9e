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
# what every mesh is compared in: first gradients, two of them of few rows, and optimizers
VARIANTS = [*CUTS, "few", "few-rows", *RATES]


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
