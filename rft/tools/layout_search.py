"""Every layout that a model allows on so many ranks: whether it fits, how long a step takes in it.

In: a filled config, where it is to run, and how long experiences are. Out: `Search`: the layouts
that fit, the quickest first; those that do not, and what they lack; what the model refuses.
Invariant: each is asked of `check_layout`, `memory_plan` and `StepTime` as a config of its own, in
which nothing is changed but sizes, `sequence_parallel` with them, and whether layers are
recomputed, where the words leave that open.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from rft.config import Config, MegatronConfig
from rft.config.layout import check_layout
from rft.ground.errors import problems_of
from rft.ground.names import Dims, read_hf_config
from rft.preflight.memory_plan import MemoryPlan, cached_bytes, gigabytes, on_host, plan
from rft.tools.figures import Figures
from rft.tools.fit import FULL
from rft.tools.step_time import Seconds, StepTime

ENGINE_BESIDE = 6e9  # of vLLM on a card: graphs, activations
ALIKE = 1.03  # times the shortest step: the estimate does not tell these apart
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


class Site(NamedTuple):
    """Where it is to run. `host`: bytes of one."""

    figures: Figures
    total: int
    per_node: int
    host: float


@dataclass(frozen=True)
class Candidate:
    """A layout that the model allows."""

    config: Config
    memory: MemoryPlan
    host: dict[str, int]
    seconds: Seconds
    lacks: str  # why it does not fit, or nothing

    @property
    def name(self) -> str:
        return name_of(self.config)


class Search:
    """Every layout of a filled config; `length` and `prompt`: tokens of an experience, and how many
    of these its group shares.
    """

    def __init__(self, config: Config, site: Site, length: float | None, prompt: float):
        self.config, self.site = config, site
        self.hf = read_hf_config(config.model.model_path)
        self.length = length or int(config.model.max_model_len or 2) / 2
        self.prompt = min(prompt, self.length - 1)
        self.ranks = int(config.trainer.num_ranks or 1)
        self.refused: dict[str, set[str]] = {}
        found = sorted(
            (self.weighed(one) for one in self.allowed()), key=lambda one: one.seconds.total
        )
        self.fitting = safest_first([one for one in found if not one.lacks])
        self.lacking = sorted((one for one in found if one.lacks), key=lambda one: one.memory.rank)
        self.own = self.as_configured()

    def allowed(self) -> Iterator[Config]:
        """With layers that are recomputed only where the words say so, or where nothing else
        fits.
        """
        asked = self.config.trainer.recompute_granularity
        sizes = list(self.cuts())
        again = [asked] if asked else [None, "full"]
        for granularity in again:
            yield from (self.with_sizes(cut, granularity) for cut in sizes)

    def cuts(self) -> Iterator[MegatronConfig]:
        world, given = self.ranks, self.config.trainer.megatron
        for tp in divisors(world):
            if tp > self.site.per_node:
                self.refuse(f"tensor_model_parallel_size={tp} would leave its node")
                continue
            for pp in divisors(world // tp):
                for cp in divisors(world // tp // pp):
                    for ep, etp in self.expert_cuts(tp, pp):
                        cut = replace(
                            given,
                            tensor_model_parallel_size=tp,
                            pipeline_model_parallel_size=pp,
                            context_parallel_size=cp,
                            expert_model_parallel_size=ep,
                            expert_tensor_parallel_size=etp,
                            sequence_parallel=tp > 1,
                            virtual_pipeline_model_parallel_size=None,
                        )
                        problems = problems_of(check_layout, self.hf, cut, world)
                        for one in problems:
                            self.refuse(one)
                        if not problems:
                            yield cut

    def expert_cuts(self, tp: int, pp: int) -> Iterator[tuple[int, int | None]]:
        if not Dims.of(self.hf).experts:
            yield 1, None
            return
        for ep in divisors(self.ranks // pp):
            yield ep, None
            if ep > 1 and tp > 1:
                yield ep, 1

    def refuse(self, problem: str) -> None:
        """A reason is kept once, without its fix, with the values that it is told of."""
        said = problem.partition(";")[0].partition(" = ")[0].removeprefix("trainer.megatron.")
        key, equals, rest = said.partition("=")
        value, _, why = rest.partition(" ")
        self.refused.setdefault(f"{key}{equals}{{}} {why}", set()).add(value)

    def with_sizes(self, cut: MegatronConfig, granularity: str | None) -> Config:
        trainer, longest = self.config.trainer, int(self.config.model.max_model_len or 0)
        tokens = trainer.max_token_len_per_gpu or ceil(2 * longest / cut.context_parallel_size)
        more = {"recompute_granularity": granularity, "max_token_len_per_gpu": tokens}
        return replace(self.config, trainer=replace(trainer, megatron=cut, **more))

    def weighed(self, config: Config) -> Candidate:
        memory, site = plan(config), self.site
        host = per_host(config, memory, site)
        timed = self.timed(config)
        lacks = ""
        if site.total and memory.rank > self.card():
            most = max(memory.on_rank, key=lambda name: memory.on_rank[name])
            lacks = (
                f"{gigabytes(memory.rank)} of a card's {gigabytes(self.card())}, "
                f"{gigabytes(memory.on_rank[most])} of it {most.removesuffix(', about')}"
            )
        elif sum(host.values()) > FULL * site.host:
            lacks = f"{gigabytes(sum(host.values()))} of a host's {gigabytes(FULL * site.host)}"
        return Candidate(config, memory, host, timed.seconds(), lacks)

    def timed(self, config: Config) -> StepTime:
        site = self.site
        return StepTime(config, self.hf, site.figures, site.per_node, self.length, self.prompt)

    def card(self) -> float:
        """Bytes that the trainer may plan with."""
        share = float(self.config.explorer.rollout_model.gpu_memory_utilization or 0)
        engine = share if self.config.cluster.colocate and self.config.mode == "both" else 0.0
        return self.site.figures.memory * (FULL - engine)

    def as_configured(self) -> Candidate | None:
        given = self.config.trainer.megatron
        if problems_of(check_layout, self.hf, given, self.ranks):
            return None
        return self.weighed(self.with_sizes(given, self.config.trainer.recompute_granularity))

    def engine_lacks(self) -> str:
        rollout, site = self.config.explorer.rollout_model, self.site
        if self.config.mode != "both" or not site.total:
            return ""
        share = float(rollout.gpu_memory_utilization or FULL) * site.figures.memory
        weights = plan(self.config).engine_weights
        longest = int(self.config.model.max_model_len or 0)
        cached = cached_bytes(self.hf, rollout, longest)
        if weights + ENGINE_BESIDE + cached <= share:
            return ""
        return (
            f"an engine's card holds {gigabytes(weights)} of weights, about "
            f"{gigabytes(ENGINE_BESIDE)} beside them and, of one sequence of {longest:,} tokens, "
            f"{gigabytes(cached)} of keys and values, and may use {gigabytes(share)}: raise "
            "explorer.rollout_model.tensor_parallel_size"
        )


def safest_first(found: list[Candidate]) -> list[Candidate]:
    """Of those about as quick as the quickest, one leads: on cards that with most memory to spare;
    on cores, which others use as well, that which exchanges least, for an exchange also waits until
    both sides have a core.
    """
    alike = [one for one in found if one.seconds.total <= ALIKE * found[0].seconds.total]

    def risk(one: Candidate) -> float:
        return one.seconds.exchanged if one.config.device == "cpu" else one.memory.rank

    first = min(alike, key=risk, default=None)
    return [one for one in found if one is first] + [one for one in found if one is not first]


def divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def per_host(config: Config, memory: MemoryPlan, site: Site) -> dict[str, int]:
    """Of the fullest: all parts on one, or, on several, one full of ranks or of engines."""
    if site.total <= site.per_node:
        return on_host(config, memory, not site.total)
    rollout = config.explorer.rollout_model
    ranks = min(site.per_node, int(config.trainer.num_ranks or 1))
    training = replace(config, mode="train", trainer=replace(config.trainer, num_ranks=ranks))
    sides = [on_host(training, memory, on_cpu=False)]
    if config.mode == "both":
        workers = min(site.per_node, rollout.tensor_parallel_size)  # of a wider one, those here
        engines = min(site.per_node // workers, int(rollout.engine_num or 1))
        model = replace(rollout, engine_num=engines, tensor_parallel_size=workers)
        explorer = replace(config.explorer, rollout_model=model)
        generating = replace(config, mode="explore", explorer=explorer)
        sides.append(on_host(generating, memory, on_cpu=False))
    return max(sides, key=lambda parts: sum(parts.values()))


def name_of(config: Config) -> str:
    """As "tp8 pp2 cp1 dp4": of experts their own sizes behind it."""
    megatron, ranks = config.trainer.megatron, int(config.trainer.num_ranks or 1)
    tp, pp, cp, ep = (getattr(megatron, size) for size in SIZES)
    name = f"tp{tp} pp{pp} cp{cp} dp{ranks // (tp * pp * cp)}"
    if ep > 1 or megatron.expert_tensor_parallel_size:
        name += f" ep{ep} etp{megatron.expert_tensor_parallel_size or tp}"
    return name + (" recompute" if config.trainer.recompute_granularity == "full" else "")
