"""What a filled `algorithm:` section asks for: which models a step needs, the policy's loss, and
what of it cannot work.

The names in the config decide, and nothing else: a critic is there because the advantages need
values, a reference because some term compares with it. Importing this loads no torch.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rft.algorithm import ALGORITHMS, mixing
from rft.algorithm.advantages import ADVANTAGES
from rft.algorithm.losses import LOSSES, token_loss
from rft.algorithm.pairs import BETA
from rft.algorithm.ratios import (
    BUDGETS,
    ESTIMATORS,
    KL_COEF,
    MASKS,
    WEIGHTS,
    Coefficient,
    Correction,
)
from rft.algorithm.token_advantages import TOKEN_ADVANTAGES, TokenAdvantage
from rft.config import AlgorithmConfig, RolloutCorrectionConfig, nearest
from rft.config.arguments import NonNegative, Options, missing, options, wrong_value
from rft.data.packing import AGGREGATIONS
from rft.ground.errors import refuse_all

if TYPE_CHECKING:
    from rft.algorithm.fields import TokenLoss

ENTROPY = ("default", "mix", "none")
MIXED_LOSSES = ("mix", "mix_chord")

# of LOSSES those whose gradient is -advantage where the ratio is 1, with a margin around it
PLAIN = ("ppo", "cispo", "dppo_tv", "dppo_kl", "sapo", "sppo", "topr", "importance_sampling")
PUSHED = (*PLAIN, "gspo", "opmd", "rec")  # those that are 0 where advantages are
WITHOUT_RATIO = ("opmd", "sft", "sft_is", "sft_phi", "dpo")


def needs_critic(algorithm: AlgorithmConfig) -> bool:
    return (kind := _of_tokens(algorithm)) is not None and kind.needs_critic


def needs_teacher(algorithm: AlgorithmConfig) -> bool:
    return (kind := _of_tokens(algorithm)) is not None and kind.needs_teacher


def needs_pairs(algorithm: AlgorithmConfig) -> bool:
    return algorithm.policy_loss_fn == "dpo"


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    return (
        algorithm.kl_loss_fn != "none"
        or algorithm.kl_penalty_fn != "none"
        or needs_pairs(algorithm)
    )


def pair_beta(algorithm: AlgorithmConfig) -> float:
    return float(algorithm.policy_loss_fn_args.get("beta", BETA))


def needs_entropy(algorithm: AlgorithmConfig) -> bool:
    """Whether the advantages look at the policy's entropy before the step."""
    return (kind := _of_tokens(algorithm)) is not None and kind.measured is not None


def needs_baseline(algorithm: AlgorithmConfig) -> bool:
    """Whether every task needs a greedy response to compare the others with."""
    return (kind := _of_tokens(algorithm)) is not None and kind.needs_baseline


def needs_proximal(algorithm: AlgorithmConfig) -> bool:
    """Whether something works only with the policy's own
    log-probabilities at the start of the step.
    """
    return (
        is_corrected(algorithm.rollout_correction)
        or needs_entropy(algorithm)
        or needs_pairs(algorithm)
    )


def needs_sampler(algorithm: AlgorithmConfig) -> bool:
    """Whether something compares with the log-probabilities that tokens were sampled with."""
    old = (
        algorithm.policy_loss_fn not in WITHOUT_RATIO
        or algorithm.kl_loss_fn == "corrected_k3"
        or algorithm.kl_penalty_fn != "none"
        or needs_teacher(algorithm)
    )
    return (
        (old and not algorithm.proximal_logprobs)
        or is_corrected(algorithm.rollout_correction)
        or bool(algorithm.advantage_fn_args.get("rank_penalty"))
    )


def is_corrected(wanted: RolloutCorrectionConfig) -> bool:
    return (
        wanted.rollout_is != "none"
        or wanted.rollout_rs != "none"
        or wanted.rollout_token_veto_threshold is not None
    )


def is_plain(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss is that of a policy alone, and one that has REINFORCE's gradient as long as
    the policy is the one that sampled.
    """
    return (
        algorithm.policy_loss_fn in PLAIN
        and algorithm.kl_loss_fn == "none"
        and not is_corrected(algorithm.rollout_correction)
        and not any(algorithm.entropy_loss_fn_args.values())
    )


def loss_coef(algorithm: AlgorithmConfig) -> Coefficient:
    return _coefficient(**of_coefficient(algorithm.kl_loss_fn_args))


def penalty_coef(algorithm: AlgorithmConfig) -> Coefficient:
    return _coefficient(**of_coefficient(algorithm.kl_penalty_fn_args))


def of_coefficient(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in options(_coefficient)}


def of_estimator(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the function itself takes, beside those of its coefficient."""
    return {name: value for name, value in given.items() if name not in options(_coefficient)}


def loss_arguments(algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Those that the loss itself takes: neither loss_agg_mode, which is a key of its own, nor the
    counts of a loss that mixes.
    """
    elsewhere = {"loss_agg_mode", *(mixing.COUNTS if _mixes(algorithm) else ())}
    given = algorithm.policy_loss_fn_args.items()
    return {name: value for name, value in given if name not in elsewhere}


def _mixes(algorithm: AlgorithmConfig) -> bool:
    return algorithm.policy_loss_fn in MIXED_LOSSES


def policy_loss(
    algorithm: AlgorithmConfig, kl_coef: Coefficient | None = None, several: bool = False
) -> "TokenLoss":
    """`kl_coef`: of the KL in the loss, where somebody moves it. `several`: a step may make more
    than one update, and it is told how far each has moved the policy.
    """
    has_entropy = algorithm.entropy_loss_fn != "none"
    return token_loss(
        str(algorithm.policy_loss_fn),
        loss_arguments(algorithm),
        kl=str(algorithm.kl_loss_fn),
        kl_args=of_estimator(algorithm.kl_loss_fn_args),
        kl_coef=kl_coef or loss_coef(algorithm),
        entropy_coef=_entropy(**algorithm.entropy_loss_fn_args) if has_entropy else 0.0,
        entropy_of=str(algorithm.entropy_loss_fn),
        correction=_correction(algorithm.rollout_correction),
        moved=several and algorithm.advantage_fn is not None,
    )


def check(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for every name and argument that is unknown, or that something else must go
    with.
    """
    names = list(_names(algorithm))
    arguments = list(_arguments(algorithm))
    refuse_all((*names, *arguments, *(() if names else _together(algorithm, not arguments))))


def check_given(algorithm: AlgorithmConfig) -> None:
    """As `check`, of an algorithm whose type or strategy nobody knows: names and arguments that
    were given say for themselves what is wrong with them.
    """
    refuse_all((*_names(algorithm), *_arguments(algorithm)))


def _names(algorithm: AlgorithmConfig) -> Iterator[str]:
    for word, known in (
        ("policy_loss_fn", LOSSES),
        ("kl_loss_fn", ESTIMATORS),
        ("kl_penalty_fn", ESTIMATORS),
        ("entropy_loss_fn", ENTROPY),
        ("advantage_fn", (*ADVANTAGES, *TOKEN_ADVANTAGES)),
        ("loss_agg_mode", AGGREGATIONS),
    ):
        if (name := getattr(algorithm, word)) is not None:
            yield from _among(f"algorithm.{word}", name, known)
    wanted, key = algorithm.rollout_correction, "algorithm.rollout_correction"
    yield from _among(f"{key}.rollout_is", wanted.rollout_is, WEIGHTS)
    yield from _among(f"{key}.rollout_rs", wanted.rollout_rs, MASKS)


def _arguments(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Those of functions that there are."""
    advantages = {name: found.function for name, found in (ADVANTAGES | TOKEN_ADVANTAGES).items()}
    for key, functions in (("advantage_fn", advantages), ("policy_loss_fn", LOSSES)):
        if (name := str(getattr(algorithm, key))) in functions:
            of_loss = key == "policy_loss_fn"
            given = loss_arguments(algorithm) if of_loss else algorithm.advantage_fn_args
            yield from _known(f"{key}_args", given, options(functions[name]))
    for term in ("kl_loss", "kl_penalty", "entropy_loss"):
        arguments, name = getattr(algorithm, f"{term}_fn_args"), getattr(algorithm, f"{term}_fn")
        if term == "entropy_loss":
            known = options(_entropy)
        else:
            known = options(_coefficient) | options(ESTIMATORS.get(str(name), ESTIMATORS["none"]))
        wrong = list(_known(f"{term}_fn_args", arguments, known))
        yield from wrong
        if any(arguments.values()) and not wrong and name == "none":  # one of weight 0 is none
            yield (
                f"algorithm.{term}_fn_args={arguments} with algorithm.{term}_fn=none: there is no "
                "such term; name its function, or "
                "leave the arguments out"
            )


def _together(algorithm: AlgorithmConfig, can_compare: bool) -> Iterator[str]:
    """`can_compare`: all arguments are of the kind that their functions take."""
    yield from _check_rows(algorithm)
    mode = algorithm.policy_loss_fn_args.get("loss_agg_mode", algorithm.loss_agg_mode)
    if mode != algorithm.loss_agg_mode:
        yield (
            f"algorithm.policy_loss_fn_args.loss_agg_mode={mode} contradicts "
            f"algorithm.loss_agg_mode={algorithm.loss_agg_mode}, which is the same: set only one"
        )
    if can_compare:
        yield from _check_mixing(algorithm)
        yield from _check_adaptive("kl_loss_fn_args", algorithm.kl_loss_fn_args)
        yield from _check_adaptive("kl_penalty_fn_args", algorithm.kl_penalty_fn_args)
        yield from _check_clips(algorithm)
    yield from _check_penalty(algorithm)
    yield from _check_sampled(algorithm)
    yield from _check_correction(algorithm.rollout_correction)


def _check_penalty(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_penalty_fn == "none":
        return
    if algorithm.advantage_fn is None:
        yield (
            f"algorithm.kl_penalty_fn={algorithm.kl_penalty_fn} comes off rewards, and "
            f"algorithm.algorithm_type={algorithm.algorithm_type} learns from rows, which have "
            "none: leave it out"
        )
        return
    functions = ADVANTAGES | TOKEN_ADVANTAGES
    found = functions.get(str(algorithm.advantage_fn))
    if found is None or not found.takes_penalty:
        taking = [name for name, one in functions.items() if one.takes_penalty]
        why = "looks at no reward" if needs_teacher(algorithm) else "needs them before"
        yield (
            f"algorithm.kl_penalty_fn={algorithm.kl_penalty_fn} changes rewards on the trainer's "
            "ranks, and algorithm.advantage_fn="
            f"{algorithm.advantage_fn} {why}: set kl_loss_fn instead, or an "
            f"advantage_fn of {', '.join(taking)}"
        )


def _check_adaptive(key: str, given: dict[str, Any]) -> Iterator[str]:
    target, horizon = given.get("target_kl"), given.get("horizon")
    if given.get("adaptive"):
        coef = given.get("kl_coef", KL_COEF)  # which is only ever multiplied
        for name, value in (("target_kl", target), ("horizon", horizon), ("kl_coef", coef)):
            if value is None or value <= 0:
                yield (
                    f"algorithm.{key}.{name}={value} with adaptive=true: give a number greater "
                    "than 0"
                )
    elif target is not None or horizon is not None:
        yield (
            f"algorithm.{key}: target_kl and horizon move an adaptive coefficient: set "
            "adaptive=true, or leave them out"
        )


def _check_clips(algorithm: AlgorithmConfig) -> Iterator[str]:
    given = algorithm.policy_loss_fn_args
    both = [name for name in ("clip_range_low", "clip_range_high") if given.get(name) is not None]
    if "clip_range" in given and len(both) == 2:
        yield (
            f"algorithm.policy_loss_fn_args.clip_range={given['clip_range']} beside "
            f"clip_range_low={given['clip_range_low']} and clip_range_high="
            f"{given['clip_range_high']}, which are used instead: set these, or leave it out"
        )
    bad, good = given.get("tau_neg", 1.05), given.get("tau_pos", 1.0)
    if algorithm.policy_loss_fn == "sapo" and bad < good:
        yield (
            f"algorithm.policy_loss_fn_args.tau_neg={bad} is below tau_pos={good}: bad "
            "responses would keep their gradient for longer than good ones; raise it"
        )


def _check_sampled(algorithm: AlgorithmConfig) -> Iterator[str]:
    """What asks who sampled a token, and with which probability."""
    key, corrected = "algorithm.rollout_correction", is_corrected(algorithm.rollout_correction)
    of_rows, name = (
        algorithm.advantage_fn is None,
        f"algorithm.algorithm_type={algorithm.algorithm_type}",
    )
    if needs_pairs(algorithm) and corrected:
        yield f"{key} with {name}: no engine has sampled the tokens of rows; leave it out"
    asks = corrected or algorithm.proximal_logprobs or algorithm.kl_loss_fn != "none"
    if of_rows and asks and not needs_pairs(algorithm):
        yield (
            f"{name} learns from rows, whose tokens no policy has sampled: leave "
            "kl_loss_fn, proximal_logprobs and rollout_correction out"
        )
    if needs_proximal(algorithm) and not algorithm.proximal_logprobs:
        what = f"algorithm.advantage_fn={algorithm.advantage_fn}"
        what = key if corrected else "algorithm.policy_loss_fn=dpo" if of_rows else what
        yield (
            f"algorithm.proximal_logprobs=false, but {what} needs what the policy says of its "
            "batch before the step: leave the former out"
        )


def _check_correction(wanted: RolloutCorrectionConfig) -> Iterator[str]:
    key = "algorithm.rollout_correction"
    yield from _check_thresholds(wanted)
    correction = _correction(wanted)
    if correction is None:
        return
    if correction.mask in BUDGETS:
        yield from _check_budget(wanted, correction)
    elif correction.mask != "none" and not (
        0 <= correction.lower < 1 < correction.upper and correction.cap > 0
    ):
        yield (
            f"{key}: rollout_is_threshold={correction.cap} must be greater than 0, and the range "
            f"[{correction.lower:g}, "
            f"{correction.upper:g}] of rollout_rs_threshold_lower and rollout_rs_threshold must "
            "hold 1 inside"
        )
        return
    if not correction.cap > 0:
        yield f"{key}.rollout_is_threshold={correction.cap} must be greater than 0"


def _check_thresholds(wanted: RolloutCorrectionConfig) -> Iterator[str]:
    """Those that would do nothing, or leave every response out."""
    key, veto = "algorithm.rollout_correction", wanted.rollout_token_veto_threshold
    if wanted.rollout_rs == "none":
        for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
            if (given := getattr(wanted, name)) is not None:
                yield (
                    f"{key}.{name}={given:g} with rollout_rs=none: nothing is masked; name a mask "
                    "in rollout_rs, or leave it out"
                )
    if veto is not None and not 0 <= veto < 1:
        yield (
            f"{key}.rollout_token_veto_threshold={veto:g}: below which ratio of a token its "
            "response is left out; 0 to below 1, like 1e-4"
        )


def _check_budget(wanted: RolloutCorrectionConfig, correction: Correction) -> Iterator[str]:
    key, kind = "algorithm.rollout_correction", wanted.rollout_rs
    if not 0 < correction.upper < float("inf"):
        yield (
            f"{key}.rollout_rs_threshold={correction.upper:g} with rollout_rs={kind}: it is a "
            f"budget, greater than 0; leave it out for {BUDGETS[kind]}"
        )
    if wanted.rollout_rs_threshold_lower is not None:
        yield (
            f"{key}.rollout_rs_threshold_lower={wanted.rollout_rs_threshold_lower} with "
            f"rollout_rs={kind}, which has no lower end: leave it out"
        )


def _check_rows(algorithm: AlgorithmConfig) -> Iterator[str]:
    kind, name = (
        ALGORITHMS[algorithm.algorithm_type],
        f"algorithm.algorithm_type={algorithm.algorithm_type}",
    )
    if kind.source == "rows" and algorithm.advantage_fn is not None:
        yield (
            f"algorithm.advantage_fn={algorithm.advantage_fn}: {name} learns from rows, which have "
            "no rewards; leave it out"
        )
    elif kind.source == "rows" and kind.schema != "dpo" and algorithm.policy_loss_fn in PUSHED:
        yield (
            f"algorithm.policy_loss_fn={algorithm.policy_loss_fn} with {name}: rows have no "
            "advantages, without which it learns nothing; use sft, sft_is or sft_phi"
        )
    if (kind.schema == "dpo") != needs_pairs(algorithm):
        yield (
            f"algorithm.policy_loss_fn={algorithm.policy_loss_fn} with {name}: the loss of pairs "
            "is dpo, and rows that are pairs "
            "are those of algorithm_type=dpo; leave policy_loss_fn out"
        )
    if needs_pairs(algorithm) and algorithm.loss_agg_mode != kind.loss_agg_mode:
        yield (
            f"algorithm.loss_agg_mode={algorithm.loss_agg_mode}: the loss of dpo is a mean over "
            "pairs, which is "
            f"{kind.loss_agg_mode}; leave it out"
        )


def _check_mixing(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Expert rows need a loss that knows them, and advantages that
    are known before any token is scored.
    """
    mixed = mixing.is_mixed(algorithm)
    if mixed != _mixes(algorithm):
        yield (
            f"algorithm.sample_strategy={algorithm.sample_strategy} with "
            f"policy_loss_fn={algorithm.policy_loss_fn}: expert rows "
            "come by sample_strategy=mix, and the losses that learn from them are mix and "
            "mix_chord; use both, as "
            "algorithm_type=mix does"
        )
    if not mixed:
        return
    ratio = mixing.argument(algorithm, "expert_data_ratio")
    if not 0 < ratio < 1:
        yield (
            f"algorithm.sample_strategy_args.expert_data_ratio={ratio}: a share of the batch above "
            "0 and below 1"
        )
    if algorithm.advantage_fn not in ADVANTAGES or algorithm.kl_penalty_fn != "none":
        yield (
            f"algorithm.sample_strategy=mix with advantage_fn={algorithm.advantage_fn}, "
            f"kl_penalty_fn={algorithm.kl_penalty_fn}: "
            "expert rows have no rewards per token; use advantage_fn=grpo and kl_loss_fn"
        )


def outlier_budget(wanted: RolloutCorrectionConfig) -> float:
    """Of a mask of `BUDGETS`: as given, or as published."""
    given = wanted.rollout_rs_threshold
    return BUDGETS[wanted.rollout_rs] if given is None else given


def _correction(wanted: RolloutCorrectionConfig) -> Correction | None:
    if not is_corrected(wanted):
        return None
    cap, veto = wanted.rollout_is_threshold, wanted.rollout_token_veto_threshold
    if wanted.rollout_rs in BUDGETS:
        budget = outlier_budget(wanted)
        return Correction(wanted.rollout_is, cap, wanted.rollout_rs, 0.0, budget, veto)
    upper = cap if wanted.rollout_rs_threshold is None else wanted.rollout_rs_threshold
    inverse = 1 / upper if upper > 0 else 0.0
    lower = (
        inverse if wanted.rollout_rs_threshold_lower is None else wanted.rollout_rs_threshold_lower
    )
    return Correction(wanted.rollout_is, cap, wanted.rollout_rs, lower, upper, veto)


def _coefficient(
    kl_coef: NonNegative = KL_COEF,
    adaptive: bool = False,
    target_kl: float | None = None,
    horizon: float | None = None,
) -> Coefficient:
    """What an estimate of the KL is multiplied by, whichever function makes it."""
    if adaptive and target_kl is not None and horizon is not None:
        return Coefficient(float(kl_coef), float(target_kl), float(horizon))
    return Coefficient(float(kl_coef))


def _entropy(entropy_coef: float = 0.0) -> float:
    return float(entropy_coef)


def _of_tokens(algorithm: AlgorithmConfig) -> TokenAdvantage | None:
    return TOKEN_ADVANTAGES.get(str(algorithm.advantage_fn))


def _among(key: str, value: str, choices: Iterable[str]) -> Iterator[str]:
    if value not in choices:
        yield (nearest(value, choices, key))


def _known(key: str, given: dict[str, Any], known: Options) -> Iterator[str]:
    for name, value in given.items():
        if name not in known:
            takes = f"known: {', '.join(known)}" if known else "it takes none"
            yield f"algorithm.{key}.{name} is unknown; {takes}"
        else:
            yield from wrong_value(f"algorithm.{key}.{name}", value, known[name])
    for name in missing(given, known):
        yield f"algorithm.{key}.{name} is not set: {key.removesuffix('_args')} needs it"
