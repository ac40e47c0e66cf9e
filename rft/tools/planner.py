"""`rft plan [--cards NAME[:N]] [the words of rft train]`: does it fit, and which layout is the
quickest?

In: the words of `rft train`, and the cards of a cluster, which need not be here: a name of
`rft.tools.figures` and how many. Without them: the cards of this machine, or its cores, measured.
The model is a directory, or one whose published sizes are known (`figures.SHAPES`), by its name or
by that of the recipe in `size=`; nothing is fetched. Out: a table of layouts, the quickest that
fits first, with memory per card and host and the parts of a step; why not the others; one line of
JSON. Exit code 0: what is planned fits, 1: nothing does, 2: the words are no config. The search is
`rft.tools.layout_search`'s. Loads no torch.
"""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rft import config as configs
from rft.config import TRAINING, Config, ConfigError, is_remote
from rft.config import file as config_file
from rft.ground.errors import refuse, refuse_all
from rft.ground.host_memory import available
from rft.ground.names import DTYPES, ITEM_BYTES
from rft.ground.plugins import imported
from rft.preflight.fill import fill_config
from rft.preflight.inputs_models import MODELS
from rft.preflight.memory_plan import cached_bytes, gigabytes, listed, plan
from rft.preflight.rules import Refusals
from rft.run import cards
from rft.tools import config as config_tool
from rft.tools import figures, tables
from rft.tools.figures import Figures
from rft.tools.fit import FULL, short
from rft.tools.layout_search import ENGINE_BESIDE, SIZES, Candidate, Search, Site
from rft.tools.step_time import Seconds

PER_NODE = 8
HOST_GB = 1000.0
DECODED = 0.5  # of a memory's bandwidth, while engines decode
SHOWN = 5  # layouts
LEAST = {"host": 1.0, "network": 0.001, "length": 2.0, "prompt": 0.0}  # of these options
UNSET = "is not set: give it a value"
PARTS = {
    "compute": "compute",
    "tensor": "tensor",
    "context": "context",
    "experts": "experts",
    "stages": "stages",
    "waiting": "waiting",
    "copies": "dp",
    "update": "update",
    "shared": "cores",
}
WORDS = {  # what a part of the time is, in a reason
    "compute": "in computing",
    "tensor": "in exchanges of tensor parallelism",
    "context": "in exchanges of keys and values",
    "experts": "in exchanges of tokens between experts",
    "stages": "in messages between stages",
    "waiting": "in stages that wait for the first and the last microbatch",
    "copies": "in sums of gradients and exchanges of weights",
    "update": "in the optimizer",
    "shared": "in waiting for cores",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rft plan",
        usage="rft plan [--cards NAME[:N]] [experiment=NAME | --config FILE] "
        "[section.key=value ...]",
        description="Does it fit, and which layout is quickest? Nothing is started or fetched.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cards",
        metavar="NAME[:N]",
        help=f"cards of the cluster: {', '.join(figures.CARDS)}; default: this machine",
    )
    parser.add_argument(
        "--host", type=float, metavar="GB", help=f"memory of a host with cards ({HOST_GB:g})"
    )
    parser.add_argument("--network", type=float, metavar="GB/S", help="out of a node, per card")
    parser.add_argument(
        "--length", type=float, metavar="TOKENS", help="of an experience (half of max_model_len)"
    )
    parser.add_argument(
        "--prompt",
        type=float,
        default=0.0,
        metavar="TOKENS",
        help="of its prompt, which its group shares (0: rows count whole)",
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this machine's cores again"
    )
    return parser


def main(argv: list[str]) -> int:
    options, words = parser().parse_known_args(argv)
    try:
        refuse_all(wrong_numbers(options))
        with tempfile.TemporaryDirectory() as directory:
            return plan_words(words, options, Path(directory))
    except ConfigError as error:
        return refuse(config_file.located(error))


def wrong_numbers(options: argparse.Namespace) -> Iterator[str]:
    for name, least in LEAST.items():
        given = getattr(options, name)
        if given is not None and not least <= given < inf:
            yield f"--{name} {given:g}: give a number of at least {least:g}"


def plan_words(words: list[str], options: argparse.Namespace, directory: Path) -> int:
    fitting = True
    for model, found in searches(words, options, directory):
        print("\n".join(text(found, model)))
        print(json.dumps({"plan": record(found)}))
        fitting &= bool(found.fitting) and not found.engine_lacks()
    return int(not fitting)


def searches(
    words: list[str], options: argparse.Namespace, directory: Path
) -> Iterator[tuple[str, Search]]:
    """(name of the model, what was found) of every stage. `directory`: for config.json of a model
    that is not here.
    """
    raw = OmegaConf.merge(config_tool.composed(words))
    assert isinstance(raw, DictConfig)
    model = named_model(raw, words, directory)
    for draft in configs.stage_drafts(raw):
        refuse_all(one.sentence for one in draft.problems if UNSET not in one.sentence)
        config = draft.config
        if config.prepare and not Path(config.model.model_path, "config.json").exists():
            imported(config.prepare)(config)
        remote = is_remote(config) or config.model.tinker.enable
        if remote or config.mode not in TRAINING:
            where = "a Tinker service trains" if remote else f"mode={config.mode} trains nothing"
            raise ConfigError(f"{where}, so nothing is laid out here: plan mode=both or mode=train")
        site = site_of(config, options)
        fill(config, site)
        longest = int(config.model.max_model_len or 0)
        if options.length and options.length > longest:
            raise ConfigError(
                f"--length {options.length:g} is more than model.max_model_len={longest}: lower it"
            )
        yield (
            model or Path(config.model.model_path).name,
            Search(config, site, options.length, options.prompt),
        )


# --- what is asked about --------------------------------------------------------------------------


def named_model(raw: DictConfig, words: list[str], directory: Path) -> str | None:
    """The published model that is meant, whose sizes are then read as those of a directory."""
    missing = OmegaConf.is_missing(raw.model, "model_path") or not raw.model.model_path
    given = None if missing else str(raw.model.model_path).partition("@")[0]
    size = next((word.partition("=")[2] for word in words if word.startswith("size=")), "")
    if given is None:
        given = next((name for stem, name in figures.SIZES.items() if size.startswith(stem)), None)
        if given is None:
            raise ConfigError(
                "model.model_path is not set: give a directory, or one of "
                f"{', '.join(figures.SHAPES)}"
            )
    if given not in figures.SHAPES:
        return None
    (directory / "config.json").write_text(json.dumps(figures.SHAPES[given]), encoding="utf-8")
    raw.model.model_path = str(directory)
    return given


def site_of(config: Config, options: argparse.Namespace) -> Site:
    cluster, asked = config.cluster, options.cards
    here = cards.here()
    if not asked and here.cards and config.device != "cpu":
        asked = here.cards[0].name
        cluster.gpu_per_node = cluster.gpu_per_node or len(here.visible)
    if not asked:
        if config.device == "cuda":
            raise ConfigError("device=cuda, and this machine shows no cards: give --cards NAME:N")
        config.device = "cpu"
        dtype, threads = config.trainer.dtype or "fp32", cluster.threads_per_rank
        cores = len(os.sched_getaffinity(0))
        known = figures.measured(dtype, threads, cores, options.calibrate)
        return Site(known, 0, PER_NODE, float(available()))
    name, _, number = asked.partition(":")
    if number and not re.fullmatch("[1-9][0-9]*", number):
        raise ConfigError(f"--cards {asked}: write the number of cards behind the name, as h100:64")
    known = figures.of_card(name)
    if options.network:
        known = replace(known, far=figures.STREAMED * options.network * 1e9)
    per_node = cluster.gpu_per_node or min(int(number or PER_NODE), PER_NODE)
    total = int(number or cluster.node_num * per_node)
    if total % per_node:
        raise ConfigError(
            f"--cards {asked}: no whole number of nodes of {per_node}: change it, or set "
            "cluster.gpu_per_node"
        )
    config.device, cluster.gpu_per_node, cluster.node_num = "cuda", per_node, total // per_node
    return Site(known, total, per_node, (options.host or HOST_GB) * 1e9)


def fill(config: Config, site: Site) -> None:
    """Numbers and lengths that the words leave out, as for a run; what a start would refuse of
    files and services is not asked here.
    """
    rollout, refusals = config.explorer.rollout_model, Refusals()
    size = rollout.tensor_parallel_size
    if site.total and config.mode == "both" and not config.cluster.colocate and site.total > 1:
        ranks = config.trainer.num_ranks
        if rollout.engine_num is None:
            free = site.total - ranks if ranks else site.total // 2
            rollout.engine_num = max(1, free // size)
        left = site.total - cards.engine_cards(config)
        config.trainer.num_ranks = ranks or left
        if min(left, left - int(ranks or 0) + 1) < 1:
            raise ConfigError(
                f"trainer.num_ranks={ranks} and engines on {cards.engine_cards(config)} cards are "
                f"more than the {site.total} there: lower one of them, or set "
                "cluster.colocate=true"
            )
    elif site.total:
        config.trainer.num_ranks = config.trainer.num_ranks or site.total
    if int(config.trainer.num_ranks or 1) > site.total > 0:
        raise ConfigError(
            f"trainer.num_ranks={config.trainer.num_ranks} is more than the {site.total} cards "
            "there: lower it, or give more behind --cards"
        )
    packed = config.trainer.max_token_len_per_gpu
    fill_config(config, refusals, machine=cards.Machine(), asks_ray=False)
    refusals.ask([rule for rule in MODELS if rule.derives], config)
    config.trainer.max_token_len_per_gpu = packed
    if not config.model.max_model_len:
        refuse_all(refusals.sentences())


# --- as text --------------------------------------------------------------------------------------


def text(found: Search, model: str) -> Iterator[str]:
    config, site = found.config, found.site
    memory, rollout = plan(config), config.explorer.rollout_model
    where = f"{found.ranks} trainer ranks"
    where += f" of {site.total} x {site.figures.name}" if site.total else " on this machine"
    if config.mode == "both":
        where += f", {rollout.engine_num} engine(s) of {rollout.tensor_parallel_size}"
    stage = f"{config.stage_name}: " if config.stage_name else ""
    yield f"{stage}{model}, {short(memory.parameters)} parameters; {where}"
    shared = f" ({found.prompt:,.0f} of the prompt)" if found.prompt else ""
    yield (
        f"a step: {config.buffer.train_batch_size} experiences of {found.length:,.0f} tokens"
        f"{shared}, microbatches of at most {most_tokens(found)} a rank"
    )
    if not found.fitting:
        yield "nothing fits."
    else:
        yield tables.table(rows(found), ruled=True)
        yield from chosen_lines(found, found.fitting[0])
    yield "why not the others:"
    yield from (f"  - {line}" for line in reasons(found))
    if engine := found.engine_lacks():
        yield f"engines do not fit: {engine}"
    yield how_known(site.figures)


def most_tokens(found: Search) -> str:
    given = found.config.trainer.max_token_len_per_gpu
    return f"{given:,}" if given else f"2 x {found.config.model.max_model_len:,} / cp"


def rows(found: Search) -> Iterator[dict[str, Any]]:
    shown = found.fitting[:SHOWN]
    own = found.own
    if own and own.name not in {one.name for one in shown}:
        shown = [*shown, own]
    quickest = found.fitting[0]
    tokens = int(found.config.buffer.train_batch_size or 0) * found.length
    for one in shown:
        marks = ["chosen"] * (one is quickest) + ["as configured"] * same(one, own)
        parts = {
            title: f"{getattr(one.seconds, name):.3g}"
            for name, title in PARTS.items()
            if any(getattr(other.seconds, name) for other in shown)
        }
        row = {
            "layout": one.name,
            "GB a card" if found.site.total else "GB a rank": f"{one.memory.rank / 1e9:.1f}",
            "step s": f"{one.seconds.total:.3g}",
            **parts,
            "tokens/s a rank": f"{tokens / one.seconds.total / found.ranks:,.0f}",
        }
        if share := found.timed(one.config).mfu(one.seconds.total):
            row["MFU"] = f"{share:.2f}"
        yield row | {"": ", ".join(marks) + (": does not fit" if one.lacks else "")}


def same(one: Candidate, other: Candidate | None) -> bool:
    return other is not None and one.name == other.name


def chosen_lines(found: Search, one: Candidate) -> Iterator[str]:
    card = "card" if found.site.total else "rank"
    yield f"memory of a {card}: {gigabytes(one.memory.rank)} ({listed(one.memory.on_rank)})"
    if found.site.total:
        yield f"  of {gigabytes(found.card())}, {FULL:.0%} of what it has, less an engine beside it"
    yield f"memory of a host: {gigabytes(sum(one.host.values()))} ({listed(one.host)})"
    yield f"  of {gigabytes(FULL * found.site.host)}"
    yield f"to run it: {' '.join(words_of(found, one))}"
    if found.config.mode == "both" and found.site.total:
        seconds, sent = rollouts(found), weights(found, one)
        ahead = bool(found.config.synchronizer.max_staleness)
        whole = max(one.seconds.total, seconds) if ahead else one.seconds.total + seconds
        yield (
            f"beside it, roughly: rollouts {seconds:.0f} s, weights to engines {sent:.1f} s; with "
            f"synchronizer.max_staleness={found.config.synchronizer.max_staleness} a step of the "
            f"loop takes about {whole + sent:.0f} s"
        )


def words_of(found: Search, one: Candidate) -> Iterator[str]:
    """Behind the words that were given, they make a run of this layout, with as many engines."""
    config, given = one.config, found.config.trainer.megatron
    megatron = config.trainer.megatron
    yield f"trainer.num_ranks={config.trainer.num_ranks}"
    if config.mode == "both" and found.site.total:
        yield f"explorer.rollout_model.engine_num={config.explorer.rollout_model.engine_num}"
    yield from (f"trainer.megatron.{size}={getattr(megatron, size)}" for size in SIZES)
    for key in (
        "expert_tensor_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "sequence_parallel",
    ):
        value = getattr(megatron, key)
        if value or value != getattr(given, key):
            yield f"trainer.megatron.{key}={json.dumps(value)}"
    if config.trainer.recompute_granularity:
        yield f"trainer.recompute_granularity={config.trainer.recompute_granularity}"


def reasons(found: Search) -> Iterator[str]:
    for why, values in found.refused.items():
        yield "cannot be: " + why.format(", ".join(sorted(values, key=int)))
    if found.lacking:
        least = found.lacking[0]
        yield (
            f"{len(found.lacking)} do not fit: the least of them, {least.name}, wants {least.lacks}"
        )
    if not found.fitting:
        return
    best = found.fitting[0]
    kinds = {
        "a smaller tensor-parallel size": lambda one: size(one, 0) < size(best, 0),
        "a larger tensor-parallel size": lambda one: size(one, 0) > size(best, 0),
        "fewer stages": lambda one: size(one, 1) < size(best, 1),
        "more stages": lambda one: size(one, 1) > size(best, 1),
        "less context parallelism": lambda one: size(one, 2) < size(best, 2),
        "more context parallelism": lambda one: size(one, 2) > size(best, 2),
        "less expert parallelism": lambda one: size(one, 3) < size(best, 3),
        "more expert parallelism": lambda one: size(one, 3) > size(best, 3),
        "layers that are recomputed": lambda one: again(one) and not again(best),
    }
    told: dict[str, tuple[Candidate, list[str]]] = {}
    for what, holds in kinds.items():
        other = next((one for one in found.fitting[1:] if holds(one)), None)
        if other:
            told.setdefault(other.name, (other, []))[1].append(what)
    for name, (other, whats) in told.items():
        yield f"{', '.join(whats)}, at best {name}: {compared(other.seconds, best.seconds)}"


def size(one: Candidate, number: int) -> int:
    return int(getattr(one.config.trainer.megatron, SIZES[number]))


def again(one: Candidate) -> bool:
    return one.config.trainer.recompute_granularity == "full"


def compared(other: Seconds, best: Seconds) -> str:
    more = {one.name: getattr(other, one.name) - getattr(best, one.name) for one in fields(other)}
    most = max(more, key=lambda name: more[name])
    longer = 100 * (other.total / best.total - 1)
    part = f"+{longer:.0f} %" if longer >= 0.5 else "about as quick"
    return f"{part}, {more[most]:.3g} s more {WORDS[most]}" if more[most] > 0 else part


def how_known(known: Figures) -> str:
    if known.on_cpu:
        return (
            f"times: {known.products / 1e9:.0f} GFLOP/s a rank and {known.near / 1e9:.1f} GB/s "
            f"between ranks, measured here ({figures.cache()}; --calibrate measures again)"
        )
    return (
        f"times: an estimate from the card's data sheet, {figures.REACHED:.0%} of "
        f"{known.peak / 1e12:.0f} TFLOP/s in products, {known.near / 1e9:.0f} GB/s inside a node, "
        f"{known.far / 1e9:.0f} out of it (--network); no card was asked"
    )


# --- beside the trainer ---------------------------------------------------------------------------


def rollouts(found: Search) -> float:
    """Seconds to generate a step's experiences: a decoding step reads an engine's weights, and the
    keys and values of what it has under way, which are as many as fit, once.
    """
    config, known = found.config, found.site.figures
    rollout, memory = config.explorer.rollout_model, plan(config)
    each = cached_bytes(found.hf, rollout, found.length)
    share = float(rollout.gpu_memory_utilization or FULL) * known.memory
    room = max(1.0, (share - memory.engine_weights - ENGINE_BESIDE) / each)
    rows = int(config.buffer.train_batch_size or 1) / int(rollout.engine_num or 1)
    at_once = min(rows, room, float(rollout.max_num_seqs or rows))
    read = (memory.engine_weights + at_once * each) / (DECODED / figures.STREAMED * known.stream)
    return ceil(rows / at_once) * found.length * read


def weights(found: Search, one: Candidate) -> float:
    """Seconds of a publication: every block leaves its owner once."""
    config, known = found.config, found.site.figures
    workers = cards.engine_cards(config)
    item = ITEM_BYTES[DTYPES[str(config.trainer.dtype)]]
    rate = known.far if found.site.total > found.site.per_node else known.near
    return one.memory.trained * item / (rate * min(found.ranks, workers))


def record(found: Search) -> dict[str, Any]:
    best = found.fitting[0] if found.fitting else None
    return {
        "fits": best is not None and not found.engine_lacks(),
        "ranks": found.ranks,
        "cards": found.site.figures.name if found.site.total else None,
        "layouts": {"fit": len(found.fitting), "do_not": len(found.lacking)},
        "chosen": best and told(found, best),
        "configured": found.own and told(found, found.own) | {"fits": not found.own.lacks},
    }


def told(found: Search, one: Candidate) -> dict[str, Any]:
    return {
        "layout": one.name,
        "words": list(words_of(found, one)),
        "rank_gb": round(one.memory.rank / 1e9, 3),
        "host_gb": round(sum(one.host.values()) / 1e9, 3),
        "step_s": round(one.seconds.total, 4),
        "parts": {part.name: round(getattr(one.seconds, part.name), 4) for part in fields(Seconds)},
    }
