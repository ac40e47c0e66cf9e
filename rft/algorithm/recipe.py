"""What a filled `algorithm:` section asks for: which models a step needs, the policy's loss, and what of it cannot work.

The names in the config decide, and nothing else: a critic is there because the advantages need values, a reference because
some term compares with it. Importing this loads no torch.
"""

import inspect
from collections.abc import Callable, Iterable
from math import isfinite
from typing import TYPE_CHECKING, Any

from rft.algorithm.advantages import ADVANTAGES, TOKEN_ADVANTAGES
from rft.algorithm.kl import ESTIMATORS, KL_COEF
from rft.algorithm.losses import LOSSES, token_loss
from rft.config import AlgorithmConfig, ConfigError, nearest

if TYPE_CHECKING:
    from rft.algorithm.losses import TokenLoss

ENTROPY = ("default", "none")


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    found = TOKEN_ADVANTAGES.get(str(algorithm.advantage_fn))
    return found is not None and found.needs_critic


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    return algorithm.kl_loss_fn != "none" or algorithm.kl_penalty_fn != "none"


def penalty_coef(algorithm: AlgorithmConfig) -> float:
    return float(algorithm.kl_penalty_fn_args.get("kl_coef", KL_COEF))


def policy_loss(algorithm: AlgorithmConfig) -> "TokenLoss":
    has_entropy = algorithm.entropy_loss_fn != "none"
    return token_loss(
        str(algorithm.policy_loss_fn), algorithm.policy_loss_fn_args, kl=str(algorithm.kl_loss_fn),
        kl_coef=float(algorithm.kl_loss_fn_args.get("kl_coef", KL_COEF)),
        entropy_coef=float(algorithm.entropy_loss_fn_args.get("entropy_coef", 0.0)) if has_entropy else 0.0,
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
    if algorithm.advantage_fn is None and (needs_reference(algorithm) or algorithm.proximal_logprobs):
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
