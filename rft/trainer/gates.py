"""Does the run still do what it says? Rules over the numbers of every step, and over what a resume
finds, for faults that end no process and lower no reward at once.

    metrics of a step ──► Gates.after ──► drift/alarms; a warning, once per gate
    vitals kept by a checkpoint ─┬──► Gates.resumed ──► the same
    vitals after it was read ────┘

In: metrics that are the same on every rank, so that all come to the same end. Out: a warning with
cause and page; with `trainer.on_drift=stop` the loop ends with a checkpoint and `Drifted`, which no
restart would cure. Invariant: a limit is the user's, or has a source in `GATES`; where a run has no
such number, nobody is warned of it. What is noisy is judged by the median of the last steps, what
is exact by every step.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import median
from typing import Any

from rft.config import ConfigError, DriftConfig

log = logging.getLogger(__name__)
WINDOW = 5  # steps; a single spike that is gone at once is none (NeMo-RL, the page named below)
PAGE = "docs/observe.md#gates"
ERROR = "drift/token_mult_prob_error"
ROUTED = "drift/routed_otherwise"
APART = "logprob_diff/max"
GRADIENT = "drift/gradient"
TENSORS = ("weights", "moments")  # how the names of their digests end
SUMS = ("weight", "advantage")  # over trained tokens; of advantages, as in `credit.sums`
VITALS = "vitals"  # of each rank, among what a save keeps of it alone; of rank 0 in its loop state
# limits where none is given: where both compute in fp32, and elsewhere
UNGIVEN = {ERROR: (1.001, 1.05), GRADIENT: (0.2, 0.5)}


class Drifted(ConfigError):
    """A gate was passed under `trainer.on_drift=stop`; the run has ended with a checkpoint."""


@dataclass(frozen=True)
class Limit:
    """`metric` may not be above its limit: the key `limit` of `trainer.drift`, or `most` where that
    is empty, since the number is exact, but for what fp32 rounds.
    """

    name: str
    metric: str
    limit: str
    cause: str
    source: str
    most: float = 0.0


GATES = (
    Limit(
        "engine",
        ERROR,
        "token_mult_prob_error",
        "engine and trainer compute different things of the same weights: a layout, a name, rope, "
        "a mask or a temperature of one of them, or experts that route otherwise",
        "NeMo-RL, docs/guides/dtensor-tp-accuracy.md: over 1.05 a framework issue; in fp32 the "
        "noise is below 1e-5, docs/observe.md",
    ),
    Limit(
        "stale engine",
        ERROR,
        "stale_token_mult_prob_error",
        "the policy has left the one that sampled: lower max_staleness or lr, or correct for it",
        "NeMo-RL's loosest nightly gate (FP8 KV cache): 2.0",
    ),
    Limit(
        "clipped",
        "clip_frac",
        "clip_frac",
        "most of what is clipped is not learned from: too many updates of a batch, or too old ones",
        "twice GSPO's share, the largest that was published of a healthy run (arXiv:2507.18071)",
    ),
    Limit(
        "bits",
        APART,
        "",
        "trainer_engine=bitwise, and a token has another log-probability in the trainer than in "
        "its engine: a layer, a number of threads or a library that is not the same on both sides",
        "exact",
    ),
    Limit(
        "answers",
        "drift/equal_answers",
        "equal_answers",
        "answers of a group are equal more often than their own probabilities say: one seed for "
        "several, or log-probabilities that are not those of the sampler",
        "Hoeffding 1963, section 5b: over 0 by chance once in a million steps",
    ),
    Limit(
        "experts",
        ROUTED,
        "routed_otherwise",
        "engine and trainer choose other experts for the same tokens: a router, its bias or what "
        "comes before it is not the same in both",
        "twice the share of routers that choose otherwise in a healthy run (arXiv:2510.11370)",
    ),
    Limit(
        "tokens",
        "drift/lost_tokens",
        "",
        "the loss has seen other tokens than the batch has: a microbatch was left out, or twice in",
        "exact",
    ),
    Limit(
        "weights",
        "drift/lost_weight",
        "",
        "the loss has seen its tokens with other weights or advantages than the batch gave them, "
        "or weights do not add up to what loss_agg_mode says",
        "exact",
        most=1e-3,
    ),
    Limit(
        "gradient",
        GRADIENT,
        "gradient",
        "the loss does not push log-probabilities as advantages say: a sign, a mask or a clip",
        "of fresh tokens every policy loss has REINFORCE's gradient (Williams 1992), so 0; in fp32 "
        "the noise is below 1e-3, docs/observe.md",
    ),
    Limit(
        "advantages",
        "drift/misjudged",
        "",
        "a response has a lower advantage than one of its group that has a lower reward",
        "exact",
    ),
    Limit(
        "rewards",
        "drift/failed_trained",
        "",
        "responses whose reward failed are learned from, as if they had earned it, or others are "
        "left out as if theirs had",
        "exact",
    ),
)


@dataclass
class Gates:
    """`stop`: trainer.on_drift. `is_fp32`: trainer and engines compute in it. `is_plain`: the loss
    has no other term than the policy's. `is_bitwise`: trainer and engines compute to the same bits.
    `tripped`: why the run is to end, if it is.
    """

    config: DriftConfig = field(default_factory=DriftConfig)
    stop: bool = False
    is_fp32: bool = False
    is_plain: bool = False
    is_bitwise: bool = False
    tripped: str = ""
    warned: set[str] = field(default_factory=set)
    recent: dict[str, deque[float]] = field(default_factory=dict)

    def after(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """What is told of the step: how many gates it has passed."""
        passed = 0
        for gate in GATES:
            value = _value(gate, metrics)
            if value is None or not self._is_asked(gate):
                continue
            limit = self._limit(gate)
            if gate.limit:
                values = self.recent.setdefault(gate.name, deque(maxlen=WINDOW))
                values.append(value)
                value = median(values)
            else:
                value = abs(value)
            # a number that is none is no good one
            if not value <= limit:
                passed += 1
                self._alarm(
                    gate.name,
                    f"step {step}: {gate.metric} is {value:.4g}, over {limit:g} ({gate.source}): "
                    f"{gate.cause}",
                )
        return {"drift/alarms": float(passed)}

    def state(self) -> dict[str, list[float]]:
        """What a resume must find again: the numbers that the next medians are of. Not those that a
        gate has ended the run for: whoever goes on has mended what they tell of.
        """
        return {} if self.tripped else {name: list(one) for name, one in self.recent.items()}

    def restore(self, kept: Mapping[str, Sequence[float | None]]) -> None:
        """What `state` gave; JSON has null for what is no number."""
        for name, values in kept.items():
            numbers = (nan if value is None else value for value in values)
            self.recent[name] = deque(numbers, maxlen=WINDOW)

    def _is_asked(self, gate: Limit) -> bool:
        """Whether the number means something in this run."""
        return {GRADIENT: self.is_plain, APART: self.is_bitwise}.get(gate.metric, True)

    def _limit(self, gate: Limit) -> float:
        given = getattr(self.config, gate.limit) if gate.limit else gate.most
        if given is None:
            in_fp32, in_any = UNGIVEN[gate.metric]
            return in_fp32 if self.is_fp32 else in_any
        return float(given)

    def resumed(self, kept: Any, now: Sequence[Mapping[str, Any]] | None) -> None:
        """`kept`: what a checkpoint says of every rank; `now`: what they hold after reading it. At
        rank 0; nothing elsewhere.
        """
        for sentence in differences(kept, now) if kept and now else ():
            self._alarm("resume", f"after reading the checkpoint {sentence}")

    def _alarm(self, name: str, sentence: str) -> None:
        if name not in self.warned:
            log.warning("gate %r: %s. %s", name, sentence, PAGE)
        self.warned.add(name)
        if self.stop and not self.tripped:
            self.tripped = f"gate {name!r}: {sentence}"

    def refuse(self) -> None:
        """Raise Drifted where the run is to end."""
        if self.tripped:
            raise Drifted(
                f"trainer.on_drift=stop: {self.tripped}. The last checkpoint is of this step; see "
                f"{PAGE}, raise its limit in trainer.drift, or set trainer.on_drift=warn"
            )


def _value(gate: Limit, metrics: Mapping[str, float]) -> float | None:
    """Of the ratio that of the first update, where there are several: there the policy has not
    moved yet, and what that update does not tell of is known of none.
    """
    if gate.metric not in (ERROR, ROUTED, GRADIENT, APART):
        return metrics.get(gate.metric)
    found = metrics.get(f"{gate.metric}_first" if "updates" in metrics else gate.metric)
    if found is None:
        return None
    # whose tokens nobody knows the version of may be anybody's
    if metrics.get("staleness/unversioned_tokens", 1.0):
        return None
    is_fresh = metrics.get("staleness/token_max", 1.0) <= 0
    if gate.metric in (ROUTED, GRADIENT, APART):
        return found if is_fresh else None
    return found if is_fresh == (gate.limit == "token_mult_prob_error") else None


def lost(metrics: Mapping[str, float]) -> dict[str, float]:
    """Trained tokens of the batch that the loss has not seen, and how far the sums of their weights
    and weighted advantages are from those of the batch, as a share of what is added up. An update
    that was skipped tells of none, and several have weights of their own.
    """
    if "sample/trained_tokens" not in metrics or metrics.get("skipped_updates"):
        return {}
    found = {"drift/lost_tokens": metrics["sample/trained_tokens"] - metrics["num_tokens"]}
    if "sample/weight" in metrics and "loss/weight" in metrics and "updates" not in metrics:
        weights, pushes = (abs(metrics[f"sample/{one}"] - metrics[f"loss/{one}"]) for one in SUMS)
        size = max(metrics["sample/weight"], metrics["sample/advantage_size"])
        found["drift/lost_weight"] = max(weights / metrics["sample/weight"], pushes / size)
    return found


def differences(kept: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """Counters are compared always, tensors where the same ranks hold the same parts, and the same
    elements of them are looked at.
    """
    same = [one.get("layout") for one in kept] == [one.get("layout") for one in now]
    found = []
    for rank, (then, here) in enumerate(zip(kept, now, strict=False)):
        for name in sorted(set(then) & set(here) - {"layout"}):
            if then[name] != here[name] and (same or not name.endswith(TENSORS)):
                found.append(
                    f"rank {rank} has {name}={here[name]}, and had {then[name]} when it was saved: "
                    "the save or the restore has lost something"
                )
    return found
