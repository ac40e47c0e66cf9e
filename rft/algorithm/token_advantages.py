"""Advantages of tokens: how much better than expected each was. One function each, and one entry in
`TOKEN_ADVANTAGES`.

They are made on the ranks that compute losses, from what models say of each token
(`rft.algorithm.token_credit`). In: a microbatch and its rewards per token [T], aligned with the
predicting position. Out: advantages and returns per token [T]. Invariant: only trained tokens exist
here. Prompts, tokens of an environment and padding carry no reward, no value and no decay: the
token that follows a trained one is the next *trained* one of the same sequence. Arguments with
defaults are the keys of `algorithm.advantage_fn_args`. Pure numpy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rft.algorithm.advantages import Columns, Credit, grpo
from rft.algorithm.ratios import LOG_RATIO_LIMIT
from rft.config.arguments import Fraction, NonNegative
from rft.data.packing import Packed

EPSILON = 1e-8


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    trained: np.ndarray,
    cu_seqlens: np.ndarray,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (arXiv:1506.02438) over the trained tokens of packed
    sequences.

    delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lam A_t+1, both 0 behind the last;
    returns = A + V. fp64.
    """
    index = np.flatnonzero(trained)
    sequence = np.searchsorted(cu_seqlens, index, side="right") - 1
    counts = np.bincount(sequence, minlength=len(cu_seqlens) - 1)
    last = np.cumsum(counts)[sequence] - 1
    # last tokens stand below each other
    column = counts.max(initial=0) - 1 - (last - np.arange(len(index)))
    r, v, a = np.zeros((3, len(counts), counts.max(initial=0) + 1))
    r[sequence, column], v[sequence, column] = rewards[index], values[index]
    for t in reversed(range(v.shape[1] - 1)):
        a[:, t] = r[:, t] + gamma * v[:, t + 1] - v[:, t] + gamma * lam * a[:, t + 1]
    advantages, returns = np.zeros((2, len(trained)))
    advantages[index] = a[sequence, column]
    returns[index] = advantages[index] + v[sequence, column]
    return advantages, returns


def whitened(
    advantages: np.ndarray, trained: np.ndarray, mean: float, variance: float
) -> np.ndarray:
    """Mean 0 and variance 1 over the trained tokens of the whole step, whose `mean` and unbiased
    `variance` are given.
    """
    found: np.ndarray = np.where(trained, (advantages - mean) / np.sqrt(variance + EPSILON), 0.0)
    return found


def ppo(
    packed: Packed, rewards: np.ndarray, gamma: Fraction = 1.0, lam: Fraction = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """`gae` over the critic's values."""
    return gae(rewards, packed.scores["value"], packed.weight != 0, packed.cu_seqlens, gamma, lam)


def reinforceplusplus(
    packed: Packed, rewards: np.ndarray, gamma: Fraction = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """REINFORCE++: the return from each token on, whitened over the whole step instead of over a
    group.

    A_t = r_t + gamma A_t+1 (Hu et al. 2025, arXiv:2501.03262), then whitened over all trained
    tokens of the step.

    This is `gae` where every value is 0 and lambda is 1.
    """
    return gae(rewards, np.zeros(packed.length), packed.weight != 0, packed.cu_seqlens, gamma, 1.0)


def remax(packed: Packed, rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ReMax: the reward of the greedy response is the baseline of the sampled ones.

    A_t = sum of the rewards from t on - R(greedy response) (Li et al. 2023, arXiv:2310.10505).

    The explorer makes one greedy response per task, which is not trained on; its reward is the
    score `baseline` of every token.
    """
    trained = packed.weight != 0
    returns, _ = gae(rewards, np.zeros(packed.length), trained, packed.cu_seqlens)
    # a step in which nothing is trained has none
    baseline = packed.scores.get("baseline", np.zeros(packed.length))
    return np.where(trained, returns - baseline, 0.0), returns


def clipb(
    packed: Packed, rewards: np.ndarray, mean: float, std: float, mu: NonNegative = 2.5
) -> tuple[np.ndarray, np.ndarray]:
    """Clip-B: GRPO without the tokens that would change the entropy most.

    A, but 0 where A < 0 and S - mean < -mu std: bad tokens whose punishment would lower the entropy
    most ("On the Entropy Dynamics in Reinforcement Fine-Tuning of Large Language Models",
    arXiv:2602.03392).

    In: a microbatch with GRPO's advantages and the trainer's own `proximal` and `entropy`, and the
    moments of S (`entropy_change`) over all trained tokens of the step. Out: the same advantages, 0
    at the tokens that are clipped: they have no gradient, and still count.
    """
    is_clipped = (packed.advantage < 0) & (entropy_change(packed) - mean < -mu * std)
    return np.where(is_clipped, 0.0, packed.advantage), packed.advantage


def entropy_change(packed: Packed) -> np.ndarray:
    """S = p (H + l) of every token, with p the probability of the sampled token, l its logarithm
    and H the entropy there: how a step on this token changes the entropy. It raises the entropy
    less, the more likely the token is.
    """
    logprobs = packed.scores["proximal"].astype(np.float64)
    found: np.ndarray = np.exp(logprobs) * (packed.scores["entropy"] + logprobs)
    return found


def on_policy_distill(
    packed: Packed, rewards: np.ndarray, kl_coef: NonNegative = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """A teacher's opinion of every token that the policy sampled, as its advantage.

    A_t = c (teacher - old): one sample of c times the reverse KL's negative, token by token
    (arXiv:2306.13649).

    `teacher` are log-probabilities of the frozen teacher; `old` those of the policy that sampled,
    or of the policy at the start of the step where that scores its batch. Rewards have no part.
    """
    teacher, old = _teacher_and_old(packed)
    return _of_trained(packed, kl_coef * (teacher - old))


def jsd(
    packed: Packed, rewards: np.ndarray, lambda_coef: Fraction = 0.5, kl_coef: NonNegative = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Down the generalised Jensen-Shannon divergence b KL(teacher | m) + (1 - b) KL(old | m), m =
    (1 - b) old + b teacher, as probabilities (arXiv:2306.13649, eq. 1; b: lambda_coef): A_t = -c (1
    - b) (old - log m).

    That is its exact gradient, in expectation over what the policy samples: the teacher's term
    moves with m alone, and what m adds to both sums up to 0. (Trinity-RFT takes -c (b (teacher -
    log m) + (1 - b) (old - log m)), which for b = 1/2 cannot tell a token that the teacher likes
    from one that it does not, and for b = 1 leads away from it.) At the ends, where the divergence
    vanishes, b = 0 is KL(old | teacher), A_t = c (teacher - old), and b = 1 is KL(teacher | old),
    A_t = c (teacher / old - 1).
    """
    teacher, old = _teacher_and_old(packed)
    if lambda_coef == 0.0:
        found = teacher - old
    elif lambda_coef == 1.0:
        found = np.expm1(np.minimum(teacher - old, LOG_RATIO_LIMIT))
    else:
        middle = np.logaddexp(old + np.log1p(-lambda_coef), teacher + np.log(lambda_coef))
        found = (1 - lambda_coef) * (middle - old)
    return _of_trained(packed, kl_coef * found)


def _teacher_and_old(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    old = packed.scores.get("proximal", packed.behaviour)
    return packed.scores["teacher"].astype(np.float64), old.astype(np.float64)


def _of_trained(packed: Packed, advantages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(packed.weight != 0, advantages, 0.0), np.zeros(packed.length)


@dataclass(frozen=True)
class TokenAdvantage:
    """`function(packed, rewards, **args)` -> (advantages, returns), [T] each."""

    function: Callable[..., tuple[np.ndarray, np.ndarray]]
    needs_critic: bool = False
    needs_teacher: bool = False
    is_whitened: bool = False  # to mean 0 and variance 1 over all trained tokens of the step
    needs_baseline: bool = False  # a greedy response per task, whose reward is the score `baseline`
    # begins with these advantages of responses, and not with rewards
    over: Callable[[Columns], Credit] | None = None
    # of `proximal` and `entropy`; `function` gets its `mean` and `std`
    measured: Callable[[Packed], np.ndarray] | None = None

    @property
    def fewest(self) -> int:
        """Responses to a task that they need at least."""
        return 1 if self.over is None else 2

    @property
    def takes_penalty(self) -> bool:
        """Whether they are made of rewards, which a KL penalty may be taken off."""
        return self.over is None and not self.needs_teacher


TOKEN_ADVANTAGES = {
    "ppo": TokenAdvantage(ppo, needs_critic=True, is_whitened=True),
    "reinforceplusplus": TokenAdvantage(reinforceplusplus, is_whitened=True),
    "remax": TokenAdvantage(remax, needs_baseline=True),
    "clipb": TokenAdvantage(clipb, over=grpo, measured=entropy_change),
    "on_policy_distill": TokenAdvantage(on_policy_distill, needs_teacher=True),
    "jsd": TokenAdvantage(jsd, needs_teacher=True),
}
