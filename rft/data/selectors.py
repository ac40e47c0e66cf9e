"""Which rows of a training set become tasks, and in which order. Pure: numbers in, row numbers out,
no files, no clock.

    sequential          the rows as they stand
    shuffle             a permutation per epoch, of (seed, epoch)
    random              every batch drawn anew, of (seed, epoch, batch): a row may come again before
                        others came at all
    offline_easy2hard   by `feature_keys`, larger is easier, the easiest first
    difficulty_based    by what the model is thought to achieve, learned from the rewards of earlier
                        tasks

The first four are functions of (epoch, position). The last one is a function of that and of what it
was told, and of nothing else: batch b is drawn with what the batches up to b - 2 - lag told, in the
order of the tasks, whenever that was heard. So a run that was killed draws what an unbroken one
draws, as long as everything that was told is told again (`recall`). So that this does not grow for
ever, what was learned of it (`belief`) may take its place (`believe`).
"""

import random
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from rft.config import TaskSelectorConfig, arguments, nearest
from rft.ground.errors import refuse_all

LEARNING = "difficulty_based"
BELIEF_EVERY = 64  # lessons, at least
RANGES = (("lamb", 0, 1), ("rho", 0, 1), ("tau", 0, 1e9), ("m", 1e-9, 1e9))  # of its options


def check_selector(config: TaskSelectorConfig, key: str) -> None:
    """Raise ConfigError for everything that no selector takes. `key`: the taskset's."""
    refuse_all(_problems(config, key))


def _problems(config: TaskSelectorConfig, key: str) -> Iterator[str]:
    kind, at = config.selector_type, f"{key}.task_selector"
    if kind is not None and kind not in SELECTORS:
        yield nearest(kind, SELECTORS, f"{at}.selector_type")
        return
    if kind == "offline_easy2hard" and not config.feature_keys:
        yield (
            f"{at}.feature_keys: offline_easy2hard sorts by columns of numbers; name at least one"
        )
    if kind == LEARNING and len(config.feature_keys) > 2:
        yield (
            f"{at}.feature_keys: difficulty_based takes none, one pass rate, or two (weak and "
            "strong model)"
        )
    selector = SELECTORS[kind or "sequential"]
    if config.feature_keys and not selector.takes_features:
        yield (
            f"{at}.feature_keys: {kind} does not look at the rows; set "
            "selector_type=offline_easy2hard"
        )
    known = arguments.options(selector.function)
    for name, value in config.kwargs.items():
        if not arguments.takes(selector.function, name):
            yield (
                f"{at}.kwargs.{name}: {kind} does not take it; it takes "
                f"{', '.join(known) or 'none'}"
            )
        elif kind == LEARNING and not isinstance(value, int | float):
            yield f"{at}.kwargs.{name}={value!r}: give a number"
        elif kind != LEARNING and name in known:
            yield from arguments.wrong_value(f"{at}.kwargs.{name}", value, known[name])
    for name in arguments.missing(config.kwargs, known):
        yield f"{at}.kwargs.{name} is not set: {kind} needs it"
    for name, low, high in RANGES if kind == LEARNING else ():
        value = config.kwargs.get(name, low)
        if isinstance(value, int | float) and not low <= value <= high:
            yield f"{at}.kwargs.{name}={value}: give a number from {low:g} to {high:g}"


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count) that depends on (seed, epoch) only."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def drawn(count: int, seed: int, epoch: int, batch_size: int) -> list[int]:
    """Batches without a row twice, each independent of the others."""
    starts = range(0, count, batch_size)
    return [
        row
        for batch, start in enumerate(starts)
        for row in random.Random(f"{seed}/{epoch}/{batch}").sample(
            range(count), min(batch_size, count - start)
        )
    ]


def easy_to_hard(features: Sequence[Sequence[float]]) -> list[int]:
    """By the first column, then the next; equal rows stay in their order."""
    return sorted(range(len(features)), key=lambda row: tuple(-value for value in features[row]))


@dataclass(frozen=True)
class Rows:
    """What a selector is made of: how many rows there are, the batches that are drawn of them, how
    many of those may be under way beyond the one that is drawn (`lag`), and the columns of numbers
    that the config names, row by row.
    """

    count: int
    batch_size: int
    seed: int
    lag: int = 1
    features: Sequence[Sequence[float]] = ()


class RowOrder:
    """What says which row comes next; one that learns is told of tasks, and overrides what follows
    `row`.
    """

    learns = False

    def row(self, epoch: int, index: int, draw: int) -> int:
        """Of the task at `index` of `epoch`, which is task `draw` of all epochs."""
        raise NotImplementedError

    def is_waiting(self, draw: int) -> bool:
        """Whether this draw depends on a task that still runs."""
        return False

    def tell(self, draw: int, row: int, value: float | None) -> None:
        """The mean reward of a task, or None: it failed."""

    def recall(self, told: list[tuple[int, int, float]], running: list[int]) -> None:
        """Begin anew with all that was ever told as (draw, row, value), and the draws that have
        still to be told of.
        """

    def belief(self, draw: int) -> tuple[int, bytes] | None:
        """What was learned of all tasks before a draw, and that draw: it is kept with the lesson of
        task `draw`, in place of theirs. None: nothing needs to be.
        """
        return None

    def believe(self, belief: bytes) -> None:
        """Begin with an earlier `belief`; `recall` was called with the lessons behind it."""


class FixedOrder(RowOrder):
    """`order(epoch)`: the rows of a whole epoch."""

    def __init__(self, order: Callable[[int], list[int]]):
        self._make = order
        self._epoch, self._order = -1, [0]

    def row(self, epoch: int, index: int, draw: int) -> int:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._make(epoch)
        return self._order[index]


class DifficultyBased(RowOrder):
    """A Beta(alpha, beta) belief about every row's chance of success; rows whose mean is near
    `target_reward` are preferred.

    A task's mean reward r counts as `m` trials: alpha += (1 - rho) m r, beta += (1 - rho) m (1 -
    r), after what was believed faded towards Beta(1, 1) by `lamb`. With feature columns rows that
    were not drawn learn too, with weight rho: from a weak and a strong model's pass rates (w, s)
    row j is expected to reach w_j + a (s_j - w_j), with the a that fits the batch's mean reward;
    from one pass rate x it is x_j + (mean reward - mean x), both cut to [0, 1] (after BOTS,
    Bayesian selection). Rows are sampled by softmax(-|target_reward - mean| / tau) without
    replacement; tau=0 takes the nearest. `do_sample`: a sample of each belief instead of its mean
    (Thompson).
    """

    learns = True

    def __init__(
        self,
        rows: Rows,
        target_reward: float = 1.0,
        tau: float = 1.0,
        m: float = 16,
        lamb: float = 0.2,
        rho: float = 0.2,
        do_sample: float = False,
    ):
        # a set of a mixture may be smaller than a batch
        self.batch_size = min(rows.batch_size, rows.count)
        self.seed, self.lag = rows.seed, rows.lag
        known = len(rows.features)
        self.features = np.array(rows.features, dtype=np.float64) if known else None
        self.target, self.tau, self.trials = target_reward, tau, m
        self.fade, self.rho, self.do_sample = lamb, rho, do_sample
        self.rows = rows.count
        self.recall([], [])

    def recall(self, told: list[tuple[int, int, float]], running: list[int]) -> None:
        """Begin anew with all that was ever told as (draw, row, value), and the draws that have
        still to be told of.
        """
        self.alpha, self.beta = np.ones(self.rows), np.ones(self.rows)
        self.learned = 0  # batches whose rewards are in the beliefs
        self._unkept = len(told)  # lessons since the beliefs were kept
        self._heard = sorted(tuple(item) for item in told)
        self._open = set(running)
        self._batch, self._drawn = -1, [0]

    def row(self, epoch: int, index: int, draw: int) -> int:
        batch = draw // self.batch_size
        if batch != self._batch:
            self._learn(batch)
            self._batch, self._drawn = batch, self._draw(batch)
        self._open.add(draw)
        return self._drawn[draw % self.batch_size]

    def tell(self, draw: int, row: int, value: float | None) -> None:
        """The mean reward of a task, or None: it failed, and nothing is learned of it."""
        self._open.discard(draw)
        if value is not None:
            self._unkept += 1
            insort(self._heard, (draw, row, value))

    def belief(self, draw: int) -> tuple[int, bytes] | None:
        """As often as makes it no larger than the lessons. Only with a task of the batch that was
        drawn last: who goes on from there draws nothing that is to know less.
        """
        if self._unkept < max(self.rows, BELIEF_EVERY) or draw // self.batch_size != self._batch:
            return None
        self._unkept = 0
        found = (self.learned, self.alpha.tobytes(), self.beta.tobytes())
        return self.learned * self.batch_size, msgspec.msgpack.encode(found)

    def believe(self, belief: bytes) -> None:
        self.learned, *counts = msgspec.msgpack.decode(belief, type=tuple[int, bytes, bytes])
        self.alpha, self.beta = (np.frombuffer(one, np.float64).copy() for one in counts)

    def is_waiting(self, draw: int) -> bool:
        """Whether this draw begins a batch that depends on a task which still runs."""
        horizon = self._horizon(draw // self.batch_size) * self.batch_size
        return draw // self.batch_size != self._batch and any(
            open_ < horizon for open_ in self._open
        )

    def _horizon(self, batch: int) -> int:
        """Rewards of batches before this one are known when `batch` is drawn."""
        return max(0, batch - 1 - self.lag)

    def _learn(self, batch: int) -> None:
        while self.learned < self._horizon(batch):
            self.learned += 1
            end = (self.learned * self.batch_size,)
            count = sum(item < end for item in self._heard)
            self._update(self._heard[:count])
            del self._heard[:count]

    def _update(self, told: list[tuple[int, int, float]]) -> None:
        if not told:
            return
        rows = np.array([row for _, row, _ in told])
        values = np.clip([value for _, _, value in told], 0.0, 1.0)
        share = 1.0
        if self.features is not None:
            share = 1.0 - self.rho
            expected = self._expected(rows, float(values.mean()))
            self._add(
                slice(None),
                self.rho * self.trials * expected,
                self.rho * self.trials * (1 - expected),
            )
        for row, value in zip(rows, values, strict=True):  # one by one: a row may be there twice
            self._add(
                row,
                share * self.trials * value,
                share * self.trials * (1 - value),
                fade=self.features is None,
            )

    def _add(self, rows: Any, good: Any, bad: Any, fade: bool = True) -> None:
        kept = 1.0 - self.fade if fade else 1.0
        self.alpha[rows] = kept * self.alpha[rows] + (1 - kept) + good
        self.beta[rows] = kept * self.beta[rows] + (1 - kept) + bad

    def _expected(self, rows: Any, mean: float) -> Any:
        assert self.features is not None
        weak, strong = self.features[:, 0], self.features[:, -1]
        if self.features.shape[1] == 1:
            return np.clip(weak + mean - weak[rows].mean(), 0.0, 1.0)
        gap = strong[rows].mean() - weak[rows].mean()
        share = float(np.clip((mean - weak[rows].mean()) / gap, 0.0, 1.0)) if gap else 0.5
        return np.clip(weak + share * (strong - weak), 0.0, 1.0)

    def _draw(self, batch: int) -> list[int]:
        rng = np.random.default_rng([self.seed, batch])
        believed = (
            rng.beta(self.alpha, self.beta)
            if self.do_sample
            else self.alpha / (self.alpha + self.beta)
        )
        scores = -np.abs(self.target - believed)
        # the largest of score/tau + noise: softmax sampling without replacement
        noise = rng.gumbel(size=self.rows)
        order = (
            np.argsort(-(scores / self.tau + noise)) if self.tau else np.lexsort((noise, -scores))
        )
        return [int(row) for row in order[: self.batch_size]]


def as_they_stand(rows: Rows) -> RowOrder:
    return FixedOrder(partial(always, list(range(rows.count))))


def permuted(rows: Rows) -> RowOrder:
    return FixedOrder(partial(shuffled, rows.count, rows.seed))


def at_random(rows: Rows) -> RowOrder:
    return FixedOrder(partial(drawn, rows.count, rows.seed, batch_size=rows.batch_size))


def easiest_first(rows: Rows) -> RowOrder:
    return FixedOrder(partial(always, easy_to_hard(rows.features)))


def always(order: list[int], epoch: int) -> list[int]:
    return order


@dataclass(frozen=True)
class Selector:
    """`function(rows, **kwargs)` makes a `RowOrder`. `repeats`: a row may come twice in an
    epoch.
    """

    function: Callable[..., RowOrder]
    takes_features: bool = True
    repeats: bool = True


SELECTORS = {
    "sequential": Selector(as_they_stand, takes_features=False, repeats=False),
    "shuffle": Selector(permuted, takes_features=False, repeats=False),
    "random": Selector(at_random, takes_features=False),
    "offline_easy2hard": Selector(easiest_first, repeats=False),
    LEARNING: Selector(DifficultyBased),
}


def repeats(config: TaskSelectorConfig) -> bool:
    return config.selector_type is not None and SELECTORS[config.selector_type].repeats


def build(
    config: TaskSelectorConfig,
    shuffle: bool,
    rows: int,
    batch_size: int,
    seed: int,
    lag: int,
    features: Callable[[], list[list[float]]],
) -> RowOrder:
    """`features` reads the columns that the config names; only called where they are needed."""
    kind = config.selector_type or ("shuffle" if shuffle else "sequential")
    seed = seed if config.seed is None else config.seed
    found = features() if config.feature_keys else ()
    return SELECTORS[kind].function(Rows(rows, batch_size, seed, lag, found), **config.kwargs)
