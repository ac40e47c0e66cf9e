"""What a filled `algorithm:` section asks for: which models a step needs, the policy's loss, and what of it cannot work.

The names in the config decide, and nothing else: a critic is there because the advantages need values, a reference because
some term compares with it. Importing this loads no torch.
"""

import inspect
from collections.abc import Callable, Iterable
from math import isfinite
from typing import TYPE_CHECKING, Any

from rft.algorithm import ALGORITHMS, mixing
from rft.algorithm.advantages import ADVANTAGES, TOKEN_ADVANTAGES
from rft.algorithm.kl import ESTIMATORS, KL_COEF
from rft.algorithm.losses import LOSSES, token_loss
from rft.config import AlgorithmConfig, ConfigError, nearest

if TYPE_CHECKING:
    from rft.algorithm.losses import TokenLoss

ENTROPY = ("default", "mix", "none")
SAMPLES = ("default", "warmup", "mix")
MIXED_LOSSES = ("mix", "mix_chord")


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    found = TOKEN_ADVANTAGES.get(str(algorithm.advantage_fn))
    return found is not None and found.needs_critic


def needs_teacher(algorithm: AlgorithmConfig) -> bool:
    found = TOKEN_ADVANTAGES.get(str(algorithm.advantage_fn))
    return found is not None and found.needs_teacher


def needs_pairs(algorithm: AlgorithmConfig) -> bool:
    return algorithm.policy_loss_fn == "dpo"


def needs_proximal(algorithm: AlgorithmConfig) -> bool:
    """Whether the policy scores its batch before it trains on it."""
    return algorithm.proximal_logprobs or needs_pairs(algorithm)


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    return algorithm.kl_loss_fn != "none" or algorithm.kl_penalty_fn != "none" or needs_pairs(algorithm)


def pair_beta(algorithm: AlgorithmConfig) -> float:
    return float(algorithm.policy_loss_fn_args.get("beta", _options(LOSSES["dpo"])["beta"]))


def penalty_coef(algorithm: AlgorithmConfig) -> float:
    return float(algorithm.kl_penalty_fn_args.get("kl_coef", KL_COEF))


def policy_loss(algorithm: AlgorithmConfig) -> "TokenLoss":
    has_entropy = algorithm.entropy_loss_fn != "none"
    return token_loss(
        str(algorithm.policy_loss_fn), algorithm.policy_loss_fn_args, kl=str(algorithm.kl_loss_fn),
        kl_coef=float(algorithm.kl_loss_fn_args.get("kl_coef", KL_COEF)),
        entropy_coef=float(algorithm.entropy_loss_fn_args.get("entropy_coef", 0.0)) if has_entropy else 0.0,
        entropy_of=str(algorithm.entropy_loss_fn),
    )  # fmt: skip


def check(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for the first name or argument that is unknown, or that something else must go with."""
    advantages = ADVANTAGES | {name: found.function for name, found in TOKEN_ADVANTAGES.items()}
    _among("algorithm.policy_loss_fn", str(algorithm.policy_loss_fn), LOSSES)
    _among("algorithm.kl_loss_fn", str(algorithm.kl_loss_fn), ESTIMATORS)
    _among("algorithm.kl_penalty_fn", algorithm.kl_penalty_fn, ESTIMATORS)
    _among("algorithm.entropy_loss_fn", str(algorithm.entropy_loss_fn), ENTROPY)
    if algorithm.advantage_fn is not None:
        _among("algorithm.advantage_fn", algorithm.advantage_fn, advantages)
        _known("advantage_fn_args", algorithm.advantage_fn_args, _options(advantages[algorithm.advantage_fn]))
    _known("policy_loss_fn_args", algorithm.policy_loss_fn_args, _options(LOSSES[str(algorithm.policy_loss_fn)]))
    _known("kl_loss_fn_args", algorithm.kl_loss_fn_args, {"kl_coef": KL_COEF})
    _known("kl_penalty_fn_args", algorithm.kl_penalty_fn_args, {"kl_coef": KL_COEF})
    _known("entropy_loss_fn_args", algorithm.entropy_loss_fn_args, {"entropy_coef": 0.0})
    for term in ("kl_loss", "kl_penalty", "entropy_loss"):
        arguments = getattr(algorithm, f"{term}_fn_args")
        if arguments and getattr(algorithm, f"{term}_fn") == "none":
            raise ConfigError(
                f"algorithm.{term}_fn_args={arguments} with algorithm.{term}_fn=none: there is no such term; name its function, or "
                "leave the arguments out"
            )
    _check_rows(algorithm)
    _check_mixing(algorithm)
    of_rows = algorithm.advantage_fn is None and not needs_pairs(algorithm)
    if of_rows and (needs_reference(algorithm) or algorithm.proximal_logprobs):
        raise ConfigError(
            f"algorithm.algorithm_type={algorithm.algorithm_type} learns from rows, whose tokens no policy has sampled: leave "
            "kl_loss_fn, kl_penalty_fn and proximal_logprobs out"
        )
    if algorithm.kl_penalty_fn != "none" and not needs_critic(algorithm):
        raise ConfigError(
            f"algorithm.kl_penalty_fn={algorithm.kl_penalty_fn} changes the reward of every token, and "
            f"algorithm.advantage_fn={algorithm.advantage_fn} knows one reward per response: set algorithm.kl_loss_fn instead"
        )
    if algorithm.policy_loss_fn_args.get("importance_cap") is not None and not algorithm.proximal_logprobs:
        raise ConfigError(
            "algorithm.policy_loss_fn_args.importance_cap weighs tokens by the policy at the start of the step: set "
            "algorithm.proximal_logprobs=true, or leave the cap out"
        )


def _check_rows(algorithm: AlgorithmConfig) -> None:
    kind, name = ALGORITHMS[algorithm.algorithm_type], f"algorithm.algorithm_type={algorithm.algorithm_type}"
    if kind.source == "rows" and algorithm.advantage_fn is not None:
        raise ConfigError(
            f"algorithm.advantage_fn={algorithm.advantage_fn}: {name} learns from rows, which have no rewards; leave it out"
        )
    if (kind.schema == "dpo") != needs_pairs(algorithm):
        raise ConfigError(
            f"algorithm.policy_loss_fn={algorithm.policy_loss_fn} with {name}: the loss of pairs is dpo, and rows that are pairs "
            "are those of algorithm_type=dpo; leave policy_loss_fn out"
        )
    if needs_pairs(algorithm) and algorithm.loss_agg_mode != kind.loss_agg_mode:
        raise ConfigError(
            f"algorithm.loss_agg_mode={algorithm.loss_agg_mode}: the loss of dpo is a mean over pairs, which is "
            f"{kind.loss_agg_mode}; leave it out"
        )


def _check_mixing(algorithm: AlgorithmConfig) -> None:
    """Expert rows need a loss that knows them, and advantages that are known before any token is scored."""
    _among("algorithm.sample_strategy", str(algorithm.sample_strategy), SAMPLES)
    mixed = mixing.is_mixed(algorithm)
    _known("sample_strategy_args", algorithm.sample_strategy_args, mixing.DEFAULTS if mixed else {})
    if mixed != (algorithm.policy_loss_fn in MIXED_LOSSES):
        raise ConfigError(
            f"algorithm.sample_strategy={algorithm.sample_strategy} with policy_loss_fn={algorithm.policy_loss_fn}: expert rows "
            "come by sample_strategy=mix, and the losses that learn from them are mix and mix_chord; use both, as "
            "algorithm_type=mix does"
        )
    if not mixed:
        return
    ratio = mixing.argument(algorithm, "expert_data_ratio")
    if not 0 < ratio < 1:
        raise ConfigError(
            f"algorithm.sample_strategy_args.expert_data_ratio={ratio}: a share of the batch above 0 and below 1"
        )
    for name in ("mu", "mu_peak", "mu_valley"):
        if not 0 <= (mu := algorithm.policy_loss_fn_args.get(name, 0.1)) <= 1:
            raise ConfigError(
                f"algorithm.policy_loss_fn_args.{name}={mu}: the weight of expert rows is a share, 0 to 1"
            )
    if algorithm.advantage_fn not in ADVANTAGES or algorithm.kl_penalty_fn != "none":
        raise ConfigError(
            f"algorithm.sample_strategy=mix with advantage_fn={algorithm.advantage_fn}, kl_penalty_fn={algorithm.kl_penalty_fn}: "
            "expert rows have no rewards per token; use advantage_fn=grpo and kl_loss_fn"
        )


def _among(key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(nearest(value, choices, key))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value))


def _known(key: str, given: dict[str, Any], options: dict[str, Any]) -> None:
    for name in given:
        if name not in options:
            known = f"known: {', '.join(options)}" if options else "it takes none"
            raise ConfigError(f"algorithm.{key}.{name} is unknown; {known}")
        value, default = given[name], options[name]
        if isinstance(default, int | float | None) and not isinstance(default, bool) and not _is_number(value):
            raise ConfigError(f"algorithm.{key}.{name}={value}: give a number, like {default or 1}")


def _options(function: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of `function` that have a default, with it: those that a config may set."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}
