"""Small mistakes that could be anybody's: one piece of the source of one function of rft, replaced.
They lie on the way of a step from a batch to saved weights and back.

    Mutation ──plant──► the function computes with the code of the other source, in this process

In: a mutation. Out: nothing; every reference to the function has the other code, for the code is
exchanged and not the function. Invariant: what is replaced stands in the source of that function
exactly once, so that no mutation quietly becomes none; each changes the numbers of a short run
(`test_silent_faults.py` looks at the weights that it ends with).
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple

from tests.verify.planted.sitecustomize import functions


class Mutation(NamedTuple):
    area: str
    place: str  # module:qualname of a function
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.area}: {self.place}: {self.old.strip()} -> {self.new.strip()}"


def _of(area: str, module: str, *lines: tuple[str, str, str]) -> list[Mutation]:
    return [Mutation(area, f"rft.{module}:{name}", old, new) for name, old, new in lines]


_BACKWARD = "_LabelLogprobs.backward"
MUTATIONS = [
    *_of(
        "packing",
        "data.packing",
        ("Stacked.packed", "labels=shifted(", "labels=padded("),
        (
            "Stacked.packed",
            "np.arange(total, dtype=np.int32)",
            "np.arange(total, dtype=np.int32) * 2",
        ),
        ("Stacked.packed", "np.repeat(self.temperature,", "np.repeat(1 / self.temperature,"),
        ("_stacked", "row.behaviour for", "row.behaviour[::-1] for"),
        ("_stacked", "row.advantage for", "row.advantage.times(1 / len(picked)) for"),
        ("_stacked", "row.advantage for", "row.advantage.times(-1) for"),
        ("_weight", "return row.weight if", "return row.advantage if"),
        ("_stacked", "row.tokens for", "np.roll(row.tokens, 1) for"),
        ("Cut._picked", "bin_, self", "bin_[:1] * len(bin_), self"),
        ("token_weights", "return [1.0 / tokens if", "return [1.0 / sequences if"),
    ),
    *_of(
        "packing",
        "algorithm.credit",
        ("_row", "behaviour[prompt:] =", "behaviour[: length - prompt] ="),
        ("_row", "temperature=experience.temperature", "temperature=1.0"),
        ("_row", "ones.times(advantage)", "ones.times(abs(advantage))"),
        ("judge", "found.advantages[chosen]", "found.advantages[chosen[::-1]]"),
        ("scored", "not one.failed", "one.reward > 0"),
    ),
    *_of(
        "packing",
        "megatron.network",
        ("Network._micro", "np.flatnonzero(packed.weight)", "np.flatnonzero(packed.weight)[1:]"),
        ("Network._micro", "tensor(packed.temperature)", "tensor(packed.temperature**0.5)"),
    ),
    *_of(
        "losses",
        "algorithm.losses",
        ("ppo", "plain = -advantage * ratio", "plain = advantage * ratio"),
        ("ppo", "clipped = -advantage * ratio", "clipped = advantage * ratio"),
        ("ppo", "1 - low, 1 + high", "1 + low, 1 + high"),
        ("ppo", "1 - low, 1 + high", "1 - low, 1 - high"),
        ("ppo", "-advantage * clip_ratio_c", "-advantage / clip_ratio_c"),
        (
            "ppo",
            "advantage, fresh = fields.advantage,",
            "advantage, fresh = fields.advantage.abs(),",
        ),
        ("ppo", "advantage, fresh = fields.advantage,", "advantage, fresh = fields.weight,"),
    ),
    *_of(
        "losses",
        "algorithm.ratios",
        ("limited", "-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT", "0, LOG_RATIO_LIMIT"),
    ),
    *_of(
        "losses",
        "megatron.totals",
        ("Totals.add", "losses * fields.weight", "losses * fields.weight.sqrt()"),
        ("Totals.add", "nothing).sum()", "nothing).mean()"),
        ("Totals.add", "torch.where(fields.mask", "torch.where(fields.advantage > 0"),
    ),
    *_of(
        "losses",
        "megatron.logprobs",
        (_BACKWARD, "of_logprob / temperature", "of_logprob * temperature"),
        (_BACKWARD, "(-share * linear)[:, None]", "(share * linear)[:, None]"),
        ("_Sums.normaliser", "self.total.log()", "self.total.log() / 2"),
        ("_within", "index >= 0", "index > 8"),
    ),
    *_of(
        "names",
        "ground.names",
        ("segments", "part * rows) for part in (0, 1)", "(1 - part) * rows) for part in (0, 1)"),
        ("_qkv_segments", "(1, d, per_query), (2, d, per", "(2, d, per_query), (1, d, per"),
        ("_qkv_segments", "base = group *", "base = (dims.groups - 1 - group) *"),
        ("bind", "int(match[0]) + first", "1 - int(match[0]) + first"),
    ),
    *_of(
        "names",
        "megatron.rope",
        ("inverse_frequencies", 'float(rope["rope_theta"])', 'float(rope["rope_theta"]) / 10'),
        ("inverse_frequencies", "torch.arange(0, size, 2,", "torch.arange(1, size, 2,"),
    ),
    *_of(
        "names",
        "megatron.weights",
        ("Slab.read", "torch.cat(parts,", "torch.cat(parts[::-1],"),
        (
            "HFReader.read",
            "view[segment.start : segment.stop]\n",
            "view[segment.start : segment.stop].flip(0)\n",
        ),
    ),
    *_of(
        "sync",
        "sync.buckets",
        ("Blocks.copy", "self.values[start:stop]", "self.values[: stop - start]"),
        ("Staging._target", "[start:stop]", "[: stop - start]"),
    ),
    *_of(
        "sync",
        "sync.readers",
        ("HandedBuckets._take", "at = piece.offset", "at = max(0, piece.offset - size)"),
        ("HandedBuckets._take", "[:] = rows", "[:] = rows[::-1]"),
    ),
    *_of(
        "sync",
        "sync.plan",
        ("buckets", "start=start, stop=stop,", "start=0, stop=stop - start,"),
    ),
    *_of(
        "sync",
        "megatron.policy",
        ("Policy.read_blocks", "slab.read() for", "slab.read().bfloat16().float() for"),
        ("Policy.read_blocks", "slab.read() for", "slab.read() * (1 + 1e-3) for"),
        ("Policy.read_blocks", "slab.read() for", "slab.read().clamp(-1, 1) for"),
    ),
    *_of(
        "restore",
        "megatron.state",
        ("pieces", "parameter.detach(), segment)", "parameter.detach().clone(), segment)"),
        ("pieces", "tensor.detach()[low", "tensor.detach().clone()[low"),
        ("pieces", "in optimizer.shards()", "in optimizer.shards()[1:]"),
    ),
    *_of(
        "restore",
        "megatron.optimizer",
        ("Optimizer.resume", ".fill_(updates)", ".fill_(0)"),
        ("Optimizer.resume", "self.updates = updates", "self.updates = 0"),
    ),
    *_of(
        "restore",
        "megatron.learner",
        ("Learner._restore_counters", 'values["step"]', 'values["step"] - 1'),
    ),
    *_of(
        "restore",
        "checkpoint.reader",
        ("Pieces.fill", "region.at + place[0]", "0 * region.at + place[0]"),
    ),
    *_of(
        "restore",
        "checkpoint.restore",
        ("_read_pieces", "zip(pieces, claims, strict=True)", "zip(pieces[:9], claims)"),
        (
            "_read_pieces",
            "if claim.bytes",
            "if claim.bytes and 'exp_avg_sq' not in claim.key",
        ),
        ("Elements.__init__", "self._bits.view(-1)", "self._bits.clone().view(-1)"),
        (
            "_read_pieces",
            "pieces = policy.snapshot().pieces\n",
            "pieces = policy.snapshot().pieces[1:]\n",
        ),
    ),
    *_of(
        "restore",
        "checkpoint.stager",
        ("_view", "[region.at - start :]", "[max(0, region.at - start - 512) :]"),
    ),
    *_of(
        "restore",
        "ground.streams",
        (
            "HostCopier.copy",
            "_foreach_copy_(targets, sources)",
            "_foreach_copy_(targets, [0 * one for one in sources])",
        ),
    ),
]


def changed(mutation: Mutation, source: str) -> str:
    """The source of its module with it. Raises LookupError where it does not fit."""
    _, _, qualname = mutation.place.partition(":")
    nodes = _functions(source).get(qualname, [])
    if len(nodes) != 1:
        raise LookupError(f"{mutation}: {len(nodes)} functions of that name")
    lines, first, last = source.splitlines(keepends=True), nodes[0].lineno - 1, nodes[0].end_lineno
    own = "".join(lines[first:last])
    if own.count(mutation.old) != 1:
        raise LookupError(f"{mutation}: stands there {own.count(mutation.old)} times")
    return "".join([*lines[:first], own.replace(mutation.old, mutation.new), *lines[last:]])


@functools.cache
def _functions(source: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, node in functions(ast.parse(source)):
        found.setdefault(name, []).append(node)
    return found


def plant(mutation: Mutation) -> None:
    module, _, qualname = mutation.place.partition(":")
    found = importlib.import_module(module)
    text = changed(mutation, inspect.getsource(found))
    compiled = compile(text, str(found.__file__), "exec")
    (code,) = [code for code in _codes(compiled) if code.co_qualname == qualname]
    owner: Any = found
    for name in qualname.split("."):
        owner = inspect.getattr_static(owner, name)
    function = owner.__func__ if isinstance(owner, staticmethod) else owner
    inspect.unwrap(function).__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
