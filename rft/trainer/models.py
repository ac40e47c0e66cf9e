"""The models of a step, as one thing to score with, to train and to save: policy, and reference,
critic, teacher where needed.

    part ─► score: proximal, reference, value, teacher ─► token advantages, margins of pairs
            ─► part with scores
         ─► train, once per update: gradients of critic and policy
            ─► before_update, once per step ─► both update

In: the packed microbatches of this rank's data-parallel index. Out: the same with `scores`, on the
ranks that compute losses (the last pipeline stage); metrics, the same on every rank; one `Snapshot`
of everything that is trained. Invariant: all scores of a step are of the weights before it,
whatever updates it makes (only the margins of pairs, which are no ratio to an old policy, are those
before each update); nothing per token leaves the rank that computed it: only sums do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rft.algorithm import outliers, pairs, recipe, token_credit
from rft.algorithm.losses import clipped_value
from rft.algorithm.ratios import Coefficient
from rft.config import AlgorithmConfig
from rft.data.packing import Packed
from rft.data.updates import Update, regrouped
from rft.ground.experience import decode
from rft.ground.protocols import Snapshot
from rft.trainer.gates import VITALS

if TYPE_CHECKING:
    from rft.algorithm.fields import TokenLoss
    from rft.megatron.learner import Critic
    from rft.megatron.mesh import Mesh
    from rft.megatron.network import Network
    from rft.megatron.policy import Policy

KL_COEFFICIENTS = "kl_coefficients"  # what a checkpoint calls them
EVERY_STEP = ("loss", "num_tokens", "grad_norm", "lr", "skipped")


# of these also the first and the last update's: in the first no policy has moved
MOVED = (
    "clip_frac",
    "kl/old",
    "drift/token_mult_prob_error",
    "drift/routed_otherwise",
    "logprob_diff/max",
    "drift/gradient",
)
SUMMED = ("num_tokens",)


def of_step(found: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of several updates as those of their step: means over the updates that changed
    weights, or over all where none did; the step counts as skipped only where one of them was. What
    not every update tells (advantages of equal rewards push nothing) is of those that do.
    """
    made = [one for one in found if not one["skipped"] and one["num_tokens"]]
    told = made or found
    step = {}
    for name in dict.fromkeys(name for one in told for name in one):
        values = [one[name] for one in told if name in one]
        total = sum(values) if name in SUMMED else sum(values) / len(values)
        step[name] = max(values) if name.endswith("/max") else total
        if name in MOVED:
            ends = (("first", told[0]), ("last", told[-1]))
            step |= {f"{name}_{end}": one[name] for end, one in ends if name in one}
    return step | {
        "skipped": max(one["skipped"] for one in told),
        "updates": float(len(made)),
        "skipped_updates": float(sum(one["skipped"] for one in found)),
    }


def nothing() -> None:
    """Weights have begun to change: nobody is waited for again."""


class KLCoefficients:
    """The coefficients of both KL terms, which may move from step to
    step; `responses`: of the step under way.
    """

    def __init__(self, algorithm: AlgorithmConfig):
        self.loss, self.penalty = recipe.loss_coef(algorithm), recipe.penalty_coef(algorithm)
        self.responses = 0

    def after_penalty(self, metrics: dict[str, float]) -> dict[str, float]:
        return self._after(self.penalty, metrics, "kl/penalty", "kl/penalty_coef")

    def after_loss(self, metrics: dict[str, float]) -> dict[str, float]:
        """Nothing moves in a step that is skipped."""
        return (
            {}
            if metrics["skipped"]
            else self._after(self.loss, metrics, "kl/reference", "kl/reference_coef")
        )

    def _after(
        self, coefficient: Coefficient, metrics: dict[str, float], of: str, name: str
    ) -> dict[str, float]:
        if coefficient.target is None or of not in metrics:
            return {}
        used = coefficient.value
        coefficient.after(metrics[of], self.responses)
        return {name: used}

    def state(self) -> dict[str, bytes]:
        """Nothing where nothing moves."""
        if self.loss.target is None and self.penalty.target is None:
            return {}
        return {KL_COEFFICIENTS: msgspec.json.encode([self.loss.value, self.penalty.value])}

    def restore(self, small: dict[str, bytes]) -> None:
        """A coefficient that is fixed keeps the value of the config."""
        if KL_COEFFICIENTS not in small:
            return
        held = msgspec.json.decode(small[KL_COEFFICIENTS], type=tuple[float, float])
        for coefficient, value in zip((self.loss, self.penalty), held, strict=True):
            if coefficient.target is not None:
                coefficient.value = value


class Models:
    """`critic_warmup`: training steps at the start in which only the critic learns; `policy.step`
    does not count them.
    """

    def __init__(
        self,
        policy: "Policy",
        reference: "Network | None",
        critic: "Critic | None",
        algorithm: AlgorithmConfig,
        critic_warmup: int = 0,
        cliprange_value: float = 0.5,
        teacher: "Network | None" = None,
    ):
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.teacher = teacher
        self.algorithm = algorithm
        self.critic_warmup = critic_warmup
        self.value_loss = partial(clipped_value, cliprange_value=cliprange_value)
        self.kl = KLCoefficients(algorithm)
        # what a save saw of this rank, in the layout that wrote it
        self.kept_vitals: dict[str, Any] | None = None

    def score(
        self,
        part: Sequence[Packed],
        groups: Sequence[int] = (),
        others: Sequence[tuple[int, float]] = (),
    ) -> tuple[Sequence[Packed], dict[str, float]]:
        """`part` with what the models say of it before the step, with advantages where they need
        that, and with the tokens that the step leaves out.

        `groups`: of every row of the step; `others`: (group, reward) of what these are compared
        with beside each other.
        """
        self.kl.responses = len(groups)
        part, metrics = self._credited(part, groups, others)
        correction = self.algorithm.rollout_correction
        if correction.rollout_rs != outliers.MASK:
            return part, metrics
        budget = recipe.outlier_budget(correction)
        part, more = outliers.judged(part, budget, self._counts, self._summed)
        return part, metrics | more

    def _credited(
        self, part: Sequence[Packed], groups: Sequence[int], others: Sequence[tuple[int, float]]
    ) -> tuple[Sequence[Packed], dict[str, float]]:
        if recipe.needs_entropy(self.algorithm):
            logprobs, entropies = self.policy.uncertainty(part)
            part = self._scored(self._scored(part, "proximal", logprobs), "entropy", entropies)
        elif self.algorithm.proximal_logprobs:
            part = self._scored(part, "proximal", self.policy.score(part, trained_only=True))
        if self.reference is not None:
            part = self._scored(part, "reference", self.reference.score(part, trained_only=True))
        if recipe.needs_pairs(self.algorithm):
            return pairs.credited(
                part, recipe.pair_beta(self.algorithm), self._counts, self._summed
            )
        if self.teacher is not None:
            part = self._scored(part, "teacher", self.teacher.score(part, trained_only=True))
            return token_credit.distilled(part, self.algorithm, self._counts, self._summed)
        if self.critic is not None:
            part = self._scored(part, "value", self.critic.score(part))
        if not token_credit.is_needed(self.algorithm):
            return part, {}
        part, metrics = token_credit.credited(
            part, self.algorithm, self._counts, self._summed, groups, self.kl.penalty.value, others
        )
        return part, metrics | self.kl.after_penalty(metrics)

    def train_step(
        self,
        part: Sequence[Packed],
        token_loss: "TokenLoss",
        before_update: Callable[[], None],
        updates: Sequence[Update] = (),
    ) -> dict[str, float]:
        """The step's updates of each model that learns in it; none given: the whole part is one.
        `before_update` is called once, before any weight changes.
        """
        if not updates:
            metrics = self._update(part, token_loss, before_update)
            return metrics | self.kl.after_loss(metrics)
        found, last = [], len(updates) - 1
        for number, update in enumerate(updates):
            own = regrouped(
                part, update.bins[self._mesh.dp_rank], update.weights, self.policy.multiple
            )
            if number and recipe.needs_pairs(self.algorithm):
                own = self._with_margins(own, update.rows)
            wait = nothing if number else before_update
            found.append(self._update(own, token_loss, wait, last=number == last))
        metrics = of_step(found)
        return metrics | self.kl.after_loss(metrics)

    def _update(
        self,
        part: Sequence[Packed],
        token_loss: "TokenLoss",
        before_update: Callable[[], None],
        last: bool = True,
    ) -> dict[str, float]:
        """One update of each model that learns.

        While only the critic learns, the numbers that every step has are its own. If one of the two
        is not finite, neither changes.
        """
        if self.critic is None:
            return self.policy.train_step(part, token_loss, before_update, last)
        waiting = self.critic.step < self.critic_warmup
        of_critic = self.critic.gradients(part, self.value_loss)
        of_policy = {} if waiting else self.policy.gradients(part, token_loss)
        finite = self.critic.is_finite(of_critic) and (waiting or self.policy.is_finite(of_policy))
        before_update()
        of_critic = self.critic.update(of_critic, finite, last)
        of_policy = (
            {name: of_critic[name] for name in EVERY_STEP}
            if waiting
            else self.policy.update(of_policy, finite, last)
        )
        return of_policy | {
            f"critic/{name}": value for name, value in of_critic.items() if name != "num_tokens"
        }

    def _with_margins(self, part: Sequence[Packed], members: Sequence[int]) -> Sequence[Packed]:
        """Those of the weights as they are now; `members`: rows of this update."""
        part = self._scored(part, "proximal", self.policy.score(part, trained_only=True))
        beta = recipe.pair_beta(self.algorithm)
        return pairs.credited(part, beta, self._counts, self._summed, members)[0]

    def warm_up(self, part: Sequence[Packed]) -> None:
        """As `Learner.warm_up`, of every model that a step computes with."""
        for frozen in (self.reference, self.teacher):
            if frozen is not None:
                frozen.score(part, trained_only=True)
        for learner in (self.critic, self.policy):
            if learner is not None:
                learner.warm_up(part)

    def snapshot(self) -> Snapshot:
        snapshot = self.policy.snapshot()
        snapshot = replace(snapshot, small=snapshot.small | self.kl.state())
        if self.critic is None:
            return snapshot
        beside = self.critic.snapshot()
        return replace(
            snapshot, pieces=snapshot.pieces + beside.pieces, small=snapshot.small | beside.small
        )

    def restore(self, small: dict[str, bytes]) -> None:
        self.kept_vitals = decode(small[VITALS], dict[str, Any]) if VITALS in small else None
        self.policy.restore(small)
        self.kl.restore(small)
        if self.critic is not None:
            self.critic.restore(small)

    def begin(self) -> None:
        """There was no state to be read."""
        for model in (self.policy, self.critic):
            if model is not None:
                model.begin()

    def vitals(self) -> dict[str, Any]:
        """What a resume must find again of this rank: see `rft.trainer.gates`."""
        found = self.policy.vitals()
        beside = {} if self.critic is None else self.critic.vitals()
        return found | {f"critic {k}": v for k, v in beside.items() if k != "layout"}

    def give_back(self) -> None:
        """What no model needs of its device until the next step."""
        for model in (self.policy, self.critic):
            if model is not None:
                model.give_back()

    def close(self) -> None:
        for model in (self.policy, self.reference, self.critic, self.teacher):
            if model is not None:
                model.close()

    @property
    def _mesh(self) -> "Mesh":
        return self.policy.mesh

    @property
    def _counts(self) -> bool:
        """Tensor- and context-parallel ranks and all stages hold the same
        microbatches: one of each is counted.
        """
        return self._mesh.is_last_stage and self._mesh.tp_rank == 0 and self._mesh.cp_rank == 0

    def _summed(self, numbers: list[float]) -> list[float]:
        """Each added up over all ranks."""
        import torch

        sums = torch.tensor(numbers, dtype=torch.float64)
        self._mesh.reduce(sums, sums[:0])
        totals: list[float] = sums.tolist()
        return totals

    def _scored(
        self, part: Sequence[Packed], name: str, arrays: list[np.ndarray]
    ) -> Sequence[Packed]:
        """With one more score, where this rank has any."""
        if not self._mesh.is_last_stage:
            return part
        return [
            replace(p, scores=p.scores | {name: values})
            for p, values in zip(part, arrays, strict=True)
        ]
