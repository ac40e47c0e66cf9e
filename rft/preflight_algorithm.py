"""The section `algorithm`: what the chosen algorithm fills in, and what cannot work together.

In: the config. Out: the same, filled, or a ConfigError. Invariant: a value that the user gave is never replaced.
"""

from rft.algorithm import ALGORITHMS, mixing, recipe
from rft.algorithm.advantages import ADVANTAGES
from rft.config import AlgorithmConfig, Config, ConfigError, nearest

STRATEGIES = {"default": (), "warmup": (), "staleness_control": ("max_staleness",), "mix": tuple(mixing.DEFAULTS)}


def fill_algorithm(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    if algorithm.algorithm_type not in ALGORITHMS:
        raise ConfigError(nearest(algorithm.algorithm_type, ALGORITHMS, "algorithm.algorithm_type"))
    defaults = ALGORITHMS[algorithm.algorithm_type]
    algorithm.repeat_times = algorithm.repeat_times or defaults.repeat_times
    algorithm.advantage_fn = algorithm.advantage_fn or defaults.advantage_fn
    algorithm.policy_loss_fn = algorithm.policy_loss_fn or defaults.policy_loss_fn
    algorithm.loss_agg_mode = algorithm.loss_agg_mode or defaults.loss_agg_mode
    algorithm.kl_loss_fn = algorithm.kl_loss_fn or defaults.kl_loss_fn
    algorithm.sample_strategy = algorithm.sample_strategy or defaults.sample_strategy
    algorithm.entropy_loss_fn = algorithm.entropy_loss_fn or defaults.entropy_loss_fn
    if algorithm.advantage_fn == defaults.advantage_fn:  # arguments of another function would mean nothing to it
        algorithm.advantage_fn_args = defaults.advantage_fn_args | algorithm.advantage_fn_args
    if algorithm.policy_loss_fn == defaults.policy_loss_fn:
        algorithm.policy_loss_fn_args = defaults.policy_loss_fn_args | algorithm.policy_loss_fn_args
    if algorithm.proximal_logprobs is None:
        algorithm.proximal_logprobs = recipe.needs_proximal(algorithm)
    return algorithm


def check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    found = ADVANTAGES.get(str(algorithm.advantage_fn))
    if found is not None and int(algorithm.repeat_times or 0) < found.fewest:
        raise ConfigError(
            f"algorithm.repeat_times={algorithm.repeat_times} with advantage_fn={algorithm.advantage_fn}: a group of one has no "
            f"baseline to compare with; set it to {found.fewest} or more"
        )
    _check_strategy(algorithm)
    recipe.check(algorithm)


def _check_strategy(algorithm: AlgorithmConfig) -> None:
    strategy, given = str(algorithm.sample_strategy), algorithm.sample_strategy_args
    if strategy not in STRATEGIES:
        raise ConfigError(nearest(strategy, STRATEGIES, "algorithm.sample_strategy"))
    known = STRATEGIES[strategy]
    if strange := given.keys() - set(known):
        raise ConfigError(
            f"algorithm.sample_strategy_args.{min(strange)} is unknown to sample_strategy={strategy}; "
            + (f"known: {', '.join(known)}" if known else "it takes none")
        )
    limit = given.get("max_staleness")
    if strategy == "staleness_control" and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise ConfigError(
            f"algorithm.sample_strategy_args.max_staleness={limit}: staleness_control needs a whole number of versions, 0 or more"
        )
    if strategy == "staleness_control" and ALGORITHMS[algorithm.algorithm_type].source == "rows":
        raise ConfigError(
            f"algorithm.sample_strategy=staleness_control with algorithm_type={algorithm.algorithm_type}: rows have no age; leave "
            "it out"
        )
