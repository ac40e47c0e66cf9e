"""How long a training step takes in a layout: counted from shapes, at the rates of `Figures`.

In: a filled config with its layout, config.json, the figures of a rank, how many ranks a node has,
and how long experiences and their prompts are. Out: `Seconds` of one step by what they go to. A
microbatch of t computed tokens per rank (a group's prompt counts once where it is shared) passes a
stage's layers in

    products / rate + attention / rate + bytes touched / bandwidth + launches

forward, and in twice that backward (attention: 2.5), once more where layers are recomputed. Beside
it travel, per layer and direction, with b bytes an element and (g-1)/g of what a group of g holds:

    tensor    2 all-gathers and 2 reduce-scatters of [t, h] over tp, and 2 more gathers backward
    context   keys and values of all cp ranks, [t cp, 2k / tp]
    experts   what a token's chosen experts need, there and back, and once more to each rank that
              shares an expert (on a CPU ranks gather all of each other's tokens)
    pipeline  [t, h] to the next stage

A pipeline of pp stages and m microbatches takes (m + pp - 1) times its slowest stage, whose share
of waiting is (pp - 1) / (m + pp - 1); gradients and weights of a rank pass once, over the ranks
that hold the same ones, beside half of the last backward pass on a card. Ranks that share a CPU's
cores cannot take less than all their work over the cores. An estimate: it orders layouts
(`bench.plan` measures how well), and tells the size of a step. Loads no torch.
"""

from dataclasses import dataclass, fields
from typing import Any

from rft.algorithm import recipe
from rft.config import Config
from rft.data.balance import Cost, projected
from rft.data.packing import cut_of
from rft.ground.names import DTYPES, ITEM_BYTES, Dims, architecture_of
from rft.preflight.memory_plan import (
    GRADIENT,
    held,
    layer_bytes,
    numbers,
    rows_of_rank,
    tokens_of_rank,
)
from rft.tools.figures import Figures

# on a CPU and with fused kernels: how often what a layer keeps is read or written, forward (new
# memory of a CPU also costs page faults), and how many operations it takes; the first of both by
# layers and heads of no size, forward and backward
TOUCHED = {True: 7.0, False: 2.0}
LAUNCHES = {True: 240, False: 45}
OF_EXPERT = 32  # more for each expert of a rank, on a CPU
HEAD_PASSES = 6  # over the logits, in fp32
BACKWARD = 2.0  # times what forward takes
HIDDEN = 0.5  # of a backward pass can hide the gradients' exchange, on a card


@dataclass(frozen=True)
class Seconds:
    """Of one step of the trainer."""

    compute: float
    tensor: float
    context: float
    experts: float
    stages: float
    waiting: float  # of stages, for the first and the last microbatch
    copies: float  # gradients and weights of data-parallel ranks
    update: float
    shared: float = 0.0  # ranks that wait for cores that others use

    @property
    def total(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))

    @property
    def exchanged(self) -> float:
        return self.tensor + self.context + self.experts + self.stages + self.copies


@dataclass(frozen=True)
class Exchange:
    """Seconds of messages within one group of ranks, `stride` apart. Where it spans nodes, those of
    its members that share a node share their adapters as well.
    """

    figures: Figures
    group: int
    stride: int
    per_node: int

    @property
    def leaves_node(self) -> float:
        """Share of a message to everybody that does."""
        here = min(self.group, max(1, self.per_node // self.stride))
        return 1 - here / self.group

    def gathered(self, size: float) -> float:
        """`size`: bytes of all members together, of which each gets what it has not."""
        if self.group == 1:
            return 0.0
        rate = self.figures.near
        if self.leaves_node:
            rate = min(rate, self.figures.far * max(1, self.per_node // self.stride))
        return size * (self.group - 1) / self.group / rate + self.latency

    def dealt(self, size: float) -> float:
        """`size`: bytes that a member has for all of them, in equal parts."""
        if self.group == 1:
            return 0.0
        near = size * (self.group - 1) / self.group / self.figures.near
        return max(near, size * self.leaves_node / self.figures.far) + self.latency

    @property
    def latency(self) -> float:
        return (self.group - 1) * self.figures.message


class StepTime:
    """`length`: tokens of an experience, on average; `prompt`: of these, those that come before
    what is trained, and that all rows of a group begin with.
    """

    def __init__(
        self,
        config: Config,
        hf: dict[str, Any],
        figures: Figures,
        per_node: int,
        length: float,
        prompt: float = 0.0,
    ):
        self.config, self.hf, self.figures, self.per_node = config, hf, figures, per_node
        self.dims, self.cost, self.length = Dims.of(hf), Cost.of(hf), length
        self.numbers = numbers(self.dims, architecture_of(hf))
        megatron = config.trainer.megatron
        self.tp, self.pp = (
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
        )
        self.cp, self.ep = megatron.context_parallel_size, megatron.expert_model_parallel_size
        self.etp = megatron.expert_tensor_parallel_size or self.tp
        self.ranks = int(config.trainer.num_ranks or 1)
        self.copies = self.ranks // (self.tp * self.pp)
        self.item = ITEM_BYTES[DTYPES[str(config.trainer.dtype)]]
        pairs = recipe.needs_pairs(config.algorithm)
        alike = 2 if pairs else int(config.algorithm.repeat_times or 1)
        times = 1 - 1 / alike if cut_of(config.trainer).share else 0.0
        computed = length - times * prompt  # of a row: its group's prompt is computed once
        self.seen = (length**2 - times * prompt**2) / computed  # twice the keys that a token sees
        tokens = rows_of_rank(config) * computed
        most = min(tokens_of_rank(config) * self.cp, tokens)
        self.micros = max(1, round(-(-tokens // most)))
        self.tokens = tokens / self.micros / self.cp  # of a rank in a microbatch
        self.labels = self.tokens * (length - prompt) / computed

    # --- one microbatch ---------------------------------------------------------------------------

    def rate(self, width: float) -> float:
        return self.figures.products / (1 + self.figures.half_width / max(1.0, width))

    def layer(self) -> float:
        """Forward, without messages."""
        dims, t, figures = self.dims, self.tokens, self.figures
        q, k = dims.heads * dims.head_size, dims.groups * dims.head_size
        products = 2 * t * projected(dims) / self.tp / self.rate((q + 2 * k) / self.tp)
        chosen = int(self.hf["num_experts_per_tok"]) if dims.experts else 0
        mixed = sum(map(dims.has_experts, range(dims.layers))) / dims.layers  # of the layers
        # experts have other ranks' tokens as well, so a rank has its share of them however cut
        for width, share, cut in (
            (dims.ffn, 1 - mixed, self.tp),
            (dims.expert_ffn, mixed * chosen, self.etp),
            (dims.shared_ffn, mixed, self.tp),
        ):
            products += 6 * t * dims.hidden * width * share / self.tp / self.rate(width / cut)
        masked = 2 if figures.on_cpu and self.cp > 1 else 1  # there all keys are computed with
        attention = 2 * q * self.seen * t * masked / self.tp / figures.attention
        outside, inside = layer_bytes(self.hf, self.item, figures.on_cpu)
        parallel = self.config.trainer.megatron.sequence_parallel
        kept = outside / (self.tp if parallel else 1) + inside / self.tp
        if dims.experts and figures.on_cpu:  # all tokens that were gathered are looked at
            kept += (self.ep * self.etp - 1) * self.item * dims.hidden / self.tp
        touched = TOUCHED[figures.on_cpu] * t * kept
        experts = OF_EXPERT * dims.experts // self.ep if figures.on_cpu else 0
        launches = (LAUNCHES[figures.on_cpu] + experts) * figures.launch
        return products + attention + touched / figures.stream + launches

    def head(self) -> float:
        """Forward."""
        rows, tokens = self.dims.vocab / self.tp, self.labels
        products = 2 * tokens * self.dims.hidden * rows / self.rate(min(rows, self.dims.hidden))
        passes = HEAD_PASSES * 4 * tokens * rows / self.figures.stream
        return products + passes + LAUNCHES[self.figures.on_cpu] * self.figures.launch

    def group(self, size: int, stride: int) -> Exchange:
        return Exchange(self.figures, size, stride, self.per_node)

    def messages(self) -> dict[str, tuple[float, float]]:
        """(forward, backward) of one layer, by what they are for."""
        t, h, item = self.tokens, self.dims.hidden, self.item
        one = self.group(self.tp, 1).gathered(t * h * item)
        wide = 2 * self.dims.groups * self.dims.head_size / min(self.tp, self.dims.groups)
        keys = self.group(self.cp, self.tp).gathered(t * self.cp * wide * item)
        experts = 0.0
        if self.dims.experts and self.figures.on_cpu:
            every = self.group(self.ep * self.etp, 1)
            experts = 2 * every.gathered(t / self.tp * h * item * every.group)
        elif self.dims.experts:
            sent = t / self.tp * h * item * int(self.hf["num_experts_per_tok"])
            cut = self.group(self.etp, 1).gathered(sent * self.etp)
            experts = 2 * (self.group(self.ep, self.etp).dealt(sent) + cut)
        return {
            "tensor": (4 * one, 6 * one),
            "context": (keys, keys),
            "experts": (experts, experts),
        }

    # --- a step -----------------------------------------------------------------------------------

    def passes(self) -> tuple[float, float]:
        """(forward passes that only score, passes that train) of a step, in those of the policy."""
        algorithm = self.config.algorithm
        critic = int(recipe.needs_critic(algorithm))
        scored = int(bool(algorithm.proximal_logprobs)) + int(recipe.needs_reference(algorithm))
        updates = self.config.trainer.ppo_epochs
        size, rows = self.config.trainer.ppo_mini_batch_size, self.config.buffer.train_batch_size
        if size and rows:
            updates *= -(-int(rows) // size)
        return float(scored + critic), float((1 + critic) * updates)

    def seconds(self) -> Seconds:
        scored, trained = self.passes()
        again = 1.0 if self.config.trainer.recompute_granularity == "full" else 0.0
        forward, backward = scored + trained * (1 + again), trained
        layers = self.dims.layers / self.pp
        compute = self.layer() * layers * (forward + BACKWARD * backward)
        # what is left of a head is its second making of the logits, backward
        head = self.head() * (forward - again * trained + (BACKWARD + 1) * backward)
        sent = {
            name: layers * (forward * there + backward * back)
            for name, (there, back) in self.messages().items()
        }
        hop = self.group(2, self.ranks // self.pp)
        cut = self.tp if self.config.trainer.megatron.sequence_parallel else 1
        hidden = self.tokens * self.dims.hidden * self.item / cut
        sent["stages"] = hop.gathered(2 * hidden) * (forward + backward) if self.pp > 1 else 0.0
        slowest = compute + head + sum(sent.values())
        parts = {name: self.micros * one for name, one in sent.items()}
        copies = self.exchange() * self.updates()
        if not self.figures.on_cpu:
            copies = max(0.0, copies - HIDDEN * BACKWARD * self.layer() * layers)
        whole = Seconds(
            compute=self.micros * (compute + head),
            waiting=(self.pp - 1) * slowest,
            copies=copies,
            update=self.update() * self.updates(),
            **parts,
        )
        return self.on_shared_cores(whole, head)

    def updates(self) -> float:
        critic = 1 + int(recipe.needs_critic(self.config.algorithm))
        return self.passes()[1] / critic * critic

    def on_shared_cores(self, alone: Seconds, head: float) -> Seconds:
        """All ranks' work over the cores, where that is more than the longest way through it. Only
        the last stage has a head.
        """
        threads = self.config.cluster.threads_per_rank
        if not self.figures.on_cpu or self.ranks * threads <= self.figures.cores:
            return alone
        idle = alone.waiting + self.micros * head * (1 - 1 / self.pp)
        busy = (alone.total - idle) * self.ranks * threads / self.figures.cores
        shared = max(0.0, busy - alone.total)
        return Seconds(**{**vars(alone), "shared": shared})

    def exchange(self) -> float:
        """Gradients to those who update them, and weights back."""
        mine = held(self.numbers, self.config)
        experts = held({k: n for k, n in self.numbers.items() if k.expert}, self.config)
        each = GRADIENT + self.item
        found = self.group(self.copies, self.tp).gathered((mine - experts) * each)
        cut = self.etp * self.ep
        return found + self.group(max(1, self.ranks // cut // self.pp), cut).gathered(
            experts * each
        )

    def update(self) -> float:
        return held(self.numbers, self.config, once=True) * self.figures.update

    def mfu(self, seconds: float) -> float:
        """Share of the peak that the model's own operations take, as `perf/mfu` counts them."""
        rows = int(self.config.buffer.train_batch_size or 0)
        flops = 3 * rows * (self.cost.linear + self.cost.attention * self.length) * self.length
        return flops / seconds / self.ranks / self.figures.peak if self.figures.peak else 0.0
