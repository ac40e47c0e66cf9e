"""The feed: one step's experiences, taken once at rank 0, handed to every rank as its own packed
microbatches.

In: a `BatchSource` at rank 0 (the durable queue behind Ray, or supervised rows). Out: `StepInput`
on every rank: the part that its data-parallel index trains on, the batch's metrics, and the group
of every row. Invariant: all global counts are taken here, before the batch is cut; every rank
calls `next` once per step, in step order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rft.algorithm import ALGORITHMS, credit, mixing, recipe, token_credit
from rft.algorithm.advantages import ADVANTAGES
from rft.algorithm.strategies import SAMPLE_STRATEGIES
from rft.config import AlgorithmConfig, Config
from rft.data.packing import (
    BY_TOKENS,
    Cost,
    Cut,
    Packed,
    PackingPolicy,
    Row,
    free_tokens,
    work_of,
)
from rft.data.runs import nonzero
from rft.data.updates import ONE_UPDATE, RowPacking, Update, UpdateRule, planned
from rft.ground.errors import refuse_all
from rft.ground.experience import Batch, Experience
from rft.ground.host_memory import give_back
from rft.ground.protocols import TrainerMesh
from rft.trainer.looking import ReadAhead, ShowsNext

WAITS = "rank 0 waits for its batch"  # what others hear of it, so that they wait on


class BatchSource(Protocol):
    """Where rank 0 gets batches.

    `take` blocks until step's batch is complete; an empty batch ends the run.
    """

    def take(self, step: int) -> Batch: ...
    def consumed(self, step: int) -> None: ...
    def wants_weights(self, interval: int) -> bool: ...
    def mark(self) -> int: ...
    def saved(self, step: int) -> None: ...
    def retain(self, loop: dict[str, Any]) -> int | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class StepInput:
    part: Sequence[Packed]
    metrics: dict[str, float]
    experiences: list[Experience]  # rank 0 only: what the samples table shows
    groups: list[int] = field(default_factory=list)  # of every row of the step, on every rank
    updates: list[Update] = field(default_factory=list)  # none: the whole part is one
    # (group, reward) of responses that rows are compared with on the ranks, and that are none
    others: list[tuple[int, float]] = field(default_factory=list)


# of a step: metrics, the group of every row, and what rows are compared with beside these
Told = tuple[dict[str, float], list[int], list[tuple[int, float]]]
# what every rank is told, updates with it; and the microbatches
MadeStep = tuple[tuple[Told, list[Any]], Cut]


class Feed:
    def __init__(
        self,
        source: BatchSource | None,
        ranks: TrainerMesh,
        algorithm: AlgorithmConfig,
        max_tokens: int,
        multiple: int,
        cost: Cost,
        cut: PackingPolicy = BY_TOKENS,
        longest: int = 1,
        experts: BatchSource | None = None,
        rule: UpdateRule = ONE_UPDATE,
        replays: bool = False,
        vocab: int = 2**31,
    ):
        """`longest`: response that a config allows; one way to aggregate the loss divides by it.
        `experts`: rows that go into every batch beside what `source` gives. `rule`: what a batch
        is cut into. `replays`: tokens go through the experts that the engine has sent them through.
        `vocab`: how many token ids the model has.
        """
        self.source = source
        self.ranks = ranks
        self.algorithm = algorithm
        self.cost = cost
        self.packing = RowPacking(ranks.dp, max_tokens, multiple, cost, cut)
        self.rule = rule
        self.replays = replays
        self.vocab = vocab
        self.longest = longest
        self.experts = experts
        self.current: Batch | None = None  # rank 0: taken and not consumed yet
        # rows that come beside are dealt when a step begins: nothing is made before
        is_shown = isinstance(source, ShowsNext) and experts is None
        self.ahead = ReadAhead(source, self._made) if is_shown else None

    def next(self, step: int, stopping: bool) -> StepInput | None:
        """Step's input on every rank, or None on every rank: the data
        ended, or rank 0 was asked to stop.
        """
        # asked before the others are leased: where the rows have an end, the run has
        beside = self.experts.take(step).experiences if self.experts else []
        is_over = stopping or (self.experts is not None and not beside)
        seen = self.ahead.end() if self.ahead else None
        batch = (
            self.source.take(step)
            if self.source and not is_over
            else Batch(step=step, experiences=[])
        )
        experiences = batch.experiences
        told = parts = None
        if experiences:
            told, parts = (seen and seen(batch)) or self._made(batch, beside)
        del seen  # which holds the microbatches, too: they are freed below
        self.current = batch if experiences else None
        told = self.ranks.broadcast(told)
        while told == WAITS:
            told = self.ranks.broadcast(None)
        if told is None:
            return None
        (metrics, groups, others), cut = told
        part = self.ranks.scatter_parts(parts)
        if parts is not None:
            freed = parts.nbytes
            del parts
            give_back(freed)
        if self.ahead:
            self.ahead.begin(step + 1)
        updates = [Update(*one) for one in cut]
        return StepInput(part, metrics, experiences, groups, updates, others)

    def close(self) -> None:
        """No step will be asked for, and what the source was told is done."""
        if self.ahead:
            self.ahead.close()
        if self.source:
            self.source.close()

    def consumed(self, step: int) -> None:
        self.current = None
        if self.source:
            self.source.consumed(step)

    def wants_weights(self, interval: int) -> bool:
        """Whether explorers ask for newer weights, at the latest after `interval` steps' worth of
        groups; a collective.
        """
        asked: bool = self.ranks.broadcast(
            self.source.wants_weights(interval) if self.source else None
        )
        return asked

    def mark(self) -> int | None:
        """Where the source's journal stands: a checkpoint stores it."""
        return self.source.mark() if self.source else None

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is complete: no other trainer may get the batches before it."""
        if self.source:
            self.source.saved(step)

    def retain(self, loop: dict[str, Any] | None) -> int | None:
        """`loop` is the loop state of the oldest retained checkpoint: the source may forget what
        only older ones need. Returns the oldest version that it has tokens of, if it knows.
        """
        return self.source.retain(loop) if self.source and loop else None

    def _made(self, batch: Batch, beside: Sequence[Experience] = ()) -> MadeStep:
        """What every rank is told of the step, and its microbatches; `beside` joins the batch."""
        metrics = credit.metrics(batch.experiences, batch.step)
        batch.experiences += beside
        refuse_all(_foreign(batch.experiences, self.vocab))
        (metrics, groups, others), rows = self._rows(batch, metrics)
        modes = mixing.modes(self.algorithm)
        if self.replays:
            metrics |= free_tokens(rows)
        else:
            rows = [row if row.routes is None else replace(row, routes=None) for row in rows]
        if recipe.needs_pairs(self.algorithm):
            rows = [replace(row, group=at // 2) for at, row in enumerate(rows)]
        parts, updates = planned(rows, self.rule, batch.step, self.packing, modes, self.longest)
        metrics |= work_of(parts, self.cost)
        trained = sum(nonzero(row.weight) for row in rows)
        metrics["sample/trained_tokens"] = float(trained * self.rule.epochs)
        cut = [(update.bins, update.weights) for update in updates]
        return ((metrics, groups, others), cut), parts

    def _rows(self, batch: Batch, metrics: dict[str, float]) -> tuple[Told, list[Row]]:
        """What every rank is told of the step, and its rows."""
        algorithm, step = self.algorithm, batch.step
        metrics = metrics | {"sample/replayed": float(batch.replayed)}
        fresh, dropped = self._fresh(batch)
        scored = credit.scored(fresh)
        lost, fresh = credit.left_out(fresh, scored), scored
        if mixing.is_mixed(algorithm):
            judged, rows = mixing.rows(fresh, algorithm, step, self.longest)
            return (
                metrics | mixing.metrics(fresh, algorithm, step) | judged.metrics,
                judged.groups,
                judged.others,
            ), rows
        judged = credit.judge(
            fresh,
            algorithm.advantage_fn,
            algorithm.advantage_fn_args,
            step,
            penalised=token_credit.is_penalised(algorithm),
        )
        rows = credit.rows(judged, str(algorithm.loss_agg_mode), self.longest)
        failed = sum(experience.failed for experience in judged.experiences)
        metrics |= {"drift/failed_trained": float(failed + lost)}
        if algorithm.advantage_fn in ADVANTAGES and not token_credit.is_needed(algorithm):
            metrics |= credit.sums(judged, str(algorithm.loss_agg_mode), self.longest)
            metrics |= credit.misjudged(
                judged, str(algorithm.advantage_fn), algorithm.advantage_fn_args
            )
        return (metrics | dropped | judged.metrics, judged.groups, judged.others), rows

    def _fresh(self, batch: Batch) -> tuple[list[Experience], dict[str, float]]:
        """What `sample_strategy` leaves of a batch."""
        kept = SAMPLE_STRATEGIES[self.algorithm.sample_strategy or "default"]
        return kept(batch.experiences, batch.step, **self.algorithm.sample_strategy_args)


def _foreign(experiences: Sequence[Experience], vocab: int) -> Iterator[str]:
    """What the model cannot have sampled or read: its kernels would take other rows, or fail."""
    unknown = [
        one
        for one in experiences
        if len(one.tokens) and not 0 <= np.min(one.tokens) <= np.max(one.tokens) < vocab
    ]
    if unknown:
        ids = np.asarray(unknown[0].tokens)
        yield (
            f"model.model_path: {len(unknown)} of the step's {len(experiences)} experiences have "
            f"token ids that its config.json has not (vocab_size={vocab}), like "
            f"{ids[(ids < 0) | (ids >= vocab)][0]} of task {unknown[0].task!r}: they are of "
            "another tokenizer, or tokens were added to it and not to the weights; use the one "
            "that belongs to the model, or resize the model's embeddings"
        )
    odd = [one for one in experiences if not 0 < one.temperature < np.inf]
    if odd:
        yield (
            f"{len(odd)} of the step's {len(experiences)} experiences have no temperature that "
            f"tokens are sampled at, like {odd[0].temperature:g} of task {odd[0].task!r}: give "
            "the one of their logprobs, 1.0 where nothing was sampled"
        )


def is_supervised(algorithm: AlgorithmConfig) -> bool:
    return ALGORITHMS[algorithm.algorithm_type].source == "rows"


def reads_files(config: Config) -> bool:
    """Whether rank 0 reads its batches from files by itself, so that the ranks are all that there
    is of the stage.
    """
    storage = config.buffer.trainer_input.experience_buffer.storage_type
    return config.mode == "train" and (is_supervised(config.algorithm) or storage == "file")
