"""What the rank processes do: build a policy on a mesh, use it, return numpy arrays."""

import dataclasses
import datetime
import importlib.util
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import CUTS, RATES, SHARED, make_group_rows, make_rows

from rft.algorithm.losses import token_loss
from rft.checkpoint.sharding import claim_of
from rft.config import LoraConfig, MegatronConfig, ModelConfig, OptimizerConfig, TrainerConfig
from rft.data.packing import BY_TOKENS, PackingPolicy, Row, stack
from rft.data.updates import RowPacking
from rft.ground import device as devices
from rft.megatron.mesh import Mesh
from rft.megatron.policy import Policy

TIMEOUT_S = 60.0


def device_here() -> devices.Device:
    """The CPU; where the rank has the stand-in for Transformer Engine on its path, also the one for
    a GPU that lies beside it.
    """
    if importlib.util.find_spec("modelled_card"):
        return importlib.import_module("modelled_card").ModelledCard()
    return devices.choose("cpu")


@contextmanager
def mesh_of(sizes: MegatronConfig) -> Iterator[Mesh]:
    device = device_here()
    device.activate()
    mesh = Mesh(sizes, device, TIMEOUT_S)
    try:
        yield mesh
    finally:
        mesh.close()


@contextmanager
def policy_on(
    path: str,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    sp: bool = False,
    dtype: str = "fp32",
    clip: float = 1e9,
    lr: float = 1e-3,
    seed: int = 0,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    lora: dict[str, Any] | None = None,
    optimizer: dict[str, Any] = {},  # noqa: B006
    trainer: dict[str, Any] = {},  # noqa: B006
    megatron: dict[str, Any] = {},  # noqa: B006
) -> Iterator[Policy]:
    sizes = MegatronConfig(tp, pp, cp, sp, vpp, ep, etp, **megatron)
    with mesh_of(sizes) as mesh:
        given = TrainerConfig(megatron=sizes, dtype=dtype, grad_clip=clip, **trainer)
        model = ModelConfig(model_path=str(path), lora_configs=[LoraConfig(**lora)] if lora else [])
        yield Policy(model, given, OptimizerConfig(lr=lr, **optimizer), mesh, seed, 10)


def part_of(
    policy: Policy, rows: list[Row], max_tokens: int = 128, cut: PackingPolicy = BY_TOKENS
) -> list[Any]:
    mesh = policy.mesh
    return mesh.scatter_parts(
        stack(rows, mesh.dp, max_tokens, policy.multiple, cut=cut) if mesh.rank == 0 else None
    )


def made_up(policy: Policy) -> list[Any]:
    """What a policy warms up with: some of it is padding."""
    packing = RowPacking(policy.mesh.dp, 128 * policy.mesh.cp, policy.multiple)
    return packing.made_up(rows=3, longest=19, vocab=policy.dims.vocab)


def gathered(policy: Policy) -> dict[str, torch.Tensor]:
    """Whole Hugging Face tensors at rank 0, of the blocks that all ranks send; NaN where there was
    none. Nothing on other ranks.
    """
    own = [
        [b.name, b.dtype, b.shape, b.dim, b.start, b.stop, value.reshape(-1).view(torch.uint8)]
        for b, value in zip(policy.blocks(), policy.read_blocks(), strict=True)
    ]
    whole: dict[str, torch.Tensor] = {}
    for blocks in policy.mesh.gather([[*cut, data.numpy().tobytes()] for *cut, data in own]) or []:
        for name, dtype, shape, dim, start, stop, data in blocks:
            kind = getattr(torch, dtype)
            tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=kind))
            place = tensor.narrow(dim, start, stop - start)
            place.copy_(torch.frombuffer(bytearray(data), dtype=kind).view(place.shape))
    return whole


def weights_of(policy: Policy) -> dict[str, np.ndarray]:
    return {name: value.float().numpy() for name, value in gathered(policy).items()}


def pieces_of(policy: Policy, kind: str = "") -> list[tuple[Any, ...]]:
    """(claim, values) of every piece of this rank."""
    return [
        (claim_of(p), p.tensor.float().numpy().copy())
        for p in policy.snapshot().pieces
        if p.key.startswith(kind)
    ]


def train(
    path: str,
    rows: int = 24,
    steps: int = 1,
    loss: str = "ppo",
    gives_back: bool = False,
    **layout: Any,
) -> dict[str, Any]:
    """Train; weights at rank 0, first moments from every rank, metrics from every rank.
    `gives_back`: others have the memory of the gradients between two steps.
    """
    with policy_on(path, **layout) as policy:
        part = part_of(policy, make_rows(rows))
        before, metrics = [], []
        for _ in range(steps):
            metrics.append(
                policy.train_step(part, token_loss(loss, {}), lambda: before.append(policy.step))
            )
            if gives_back:
                policy.give_back()
                buffers = [buffer for chunk in policy.ddp for buffer in chunk.buffers]
                assert not any(one.grad_data.untyped_storage().size() for one in buffers)
        assert before == list(range(steps))
        return {
            "metrics": metrics,
            "weights": weights_of(policy),
            "moments": pieces_of(policy, "exp_avg/"),
            "micros": len(part),
        }


def matrix(
    path: str,
    variants: list[str],
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    sp: bool = False,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
) -> dict[str, Any]:
    """One mesh: the first gradient, for a way to cut a batch, also of so few rows that ranks go
    without; the weights after three steps, for an optimizer.
    """
    sizes = MegatronConfig(tp, pp, cp, sp, vpp, ep, etp)
    trainer = TrainerConfig(megatron=sizes, dtype="fp32", grad_clip=1e9)
    found: dict[str, Any] = {}
    with mesh_of(sizes) as mesh:
        for name in [name for name in variants if name not in RATES]:
            cut = (CUTS | SHARED | {"few": BY_TOKENS, "few-rows": CUTS["rows-padded"]})[name]
            policy = Policy(ModelConfig(model_path=path), trainer, OptimizerConfig(), mesh, 0, 10)
            few = make_rows(2 if name.startswith("few") else 24)
            part = part_of(policy, make_group_rows() if name in SHARED else few, cut=cut)
            assert any(packed.shared.any() for packed in part) is cut.share
            metrics = policy.train_step(part, token_loss("ppo", {}), lambda: None)
            found[name] = {"metrics": [metrics], "moments": pieces_of(policy, "exp_avg/")}
        for name in [name for name in variants if name in RATES]:
            optimizer = OptimizerConfig(optimizer_type=name, lr=RATES[name], weight_decay=0.1)
            policy = Policy(ModelConfig(model_path=path), trainer, optimizer, mesh, 0, 10)
            part = part_of(policy, make_rows(24))
            for _ in range(3):
                policy.train_step(part, token_loss("ppo", {}), lambda: None)
            found[name] = weights_of(policy)
    return found


def score(path: str, rows: int = 12, **layout: Any) -> list[Any]:
    """Per row index, the log-probability of each of its tokens but the
    first; empty where this rank has none.
    """
    with policy_on(path, **layout) as policy:
        return score_with(policy, rows)


def score_with(policy: Policy, rows: int) -> list[Any]:
    part = part_of(policy, make_rows(rows))
    found = []
    for packed, values in zip(part, policy.score(part), strict=True):
        bounds = packed.cu_seqlens.tolist()
        if len(values):
            found += [
                (int(r), values[a : b - 1])
                for r, a, b in zip(packed.rows, bounds, bounds[1:], strict=False)
            ]
    return found


def convert(path: str, **layout: Any) -> dict[str, Any]:
    """The checkpoint as exported, and the blocks of this rank."""
    with policy_on(path, **layout) as policy:
        blocks = [
            ((b.name, b.dtype, b.shape, b.dim, b.start, b.stop), value.numpy().copy())
            for b, value in zip(policy.blocks(), policy.read_blocks(), strict=True)
        ]
        return {"export": weights_of(policy), "blocks": blocks}


def skip(path: str, **layout: Any) -> dict[str, Any]:
    """A step whose loss is not finite on one data-parallel rank must change nothing on any rank."""
    with policy_on(path, **layout) as policy:
        part = part_of(policy, make_rows(8))
        before = [p.tensor.clone() for p in policy.snapshot().pieces]

        def broken(logprobs: torch.Tensor, fields: Any) -> Any:
            return logprobs * (
                float("nan") if policy.mesh.rank == policy.mesh.world - 1 else 1.0
            ), {}

        metrics = policy.train_step(part, broken, lambda: None)
        same = all(
            torch.equal(a, p.tensor) for a, p in zip(before, policy.snapshot().pieces, strict=True)
        )
        good = policy.train_step(part, token_loss("sft", {}), lambda: None)
        return {"same": same, "skipped": metrics["skipped"], "after": good}


def untaught(path: str, **layout: Any) -> dict[str, Any]:
    """A step, and one of rows without a trained token, or without rows at all: what of it moves."""
    with policy_on(path, **layout) as policy:
        policy.train_step(part_of(policy, make_rows(8)), token_loss("ppo", {}), lambda: None)
        before = [p.tensor.clone() for p in policy.snapshot().pieces]
        rows = [
            dataclasses.replace(row, trained=0 * row.trained, weight=0 * row.weight)
            for row in make_rows(8)
        ]
        told = [
            policy.train_step(part_of(policy, given), token_loss("ppo", {}), lambda: None)
            for given in (rows, [])
        ]
        pieces = policy.snapshot().pieces
        same = all(torch.equal(a, p.tensor) for a, p in zip(before, pieces, strict=True))
        return {"same": same, "told": told, "at": (policy.step, policy.optimizer.updates)}


def forwards(path: str, **layout: Any) -> float:
    """How often a layer attends for one microbatch of a step."""
    with policy_on(path, **layout) as policy:
        part, calls = part_of(policy, make_rows(6)), []
        attention = policy.ddp[0].module.decoder.layers[-1].self_attention.core_attention
        attention.register_forward_hook(lambda *_: calls.append(1))
        policy.train_step(part, token_loss("sft", {}), lambda: None)
        return len(calls) / len(part)


def ddp_config(path: str, **layout: Any) -> dict[str, Any]:
    """The configuration that megatron's DDP was built with."""
    with policy_on(path, **layout) as policy:
        return dataclasses.asdict(policy.ddp[0].ddp_config)


def control_plane() -> list[Any]:
    """What broadcast, gather and scatter give on this rank of a DP mesh."""
    with mesh_of(MegatronConfig()) as mesh:
        parts = stack(make_rows(9), mesh.dp, 64, 1) if mesh.rank == 0 else None
        part = mesh.scatter_parts(parts)
        mesh.barrier("test")
        seen = sorted(int(r) for packed in part for r in packed.rows)
        return [
            mesh.broadcast({"a": [1, None], "b": b"x"} if mesh.rank == 0 else None),
            mesh.gather(mesh.rank),
            seen,
        ]


def sockets() -> tuple[int, int]:
    """Open in this process: when the ranks have met, and when all that a mesh does between them has
    been done.
    """
    with mesh_of(MegatronConfig()) as mesh:
        met = _open_sockets()
        mesh.scatter_parts([[] for _ in range(mesh.dp)] if mesh.rank == 0 else None)
        mesh.broadcast("x" * 2**20 if mesh.rank == 0 else None)
        mesh.gather("x" * 2**16)
        mesh.reduce(torch.ones(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64))
        mesh.longest([mesh.rank] * 2**10)
        mesh.barrier("test")
        return met, _open_sockets()


def socket_threads() -> int:
    """Of gloo in this process."""
    with mesh_of(MegatronConfig()):
        names = [entry.read_text() for entry in Path("/proc/self/task").glob("*/comm")]
        return sum(name.startswith("gloo_tcp_loop") for name in names)


def late() -> str:
    """What a barrier says at this rank to which rank 1 does not come."""
    with mesh_of(MegatronConfig()) as mesh:
        store = torch.distributed.distributed_c10d._get_default_store()
        if mesh.rank == 1:
            store.wait(["over"])
            return ""
        mesh.timeout = datetime.timedelta(seconds=1)
        try:
            mesh.barrier("room")
        except RuntimeError as error:
            return str(error)
        finally:
            store.set("over", "")
        return "passed"


def _open_sockets() -> int:
    return sum(entry.is_socket() for entry in Path("/proc/self/fd").iterdir())


def state(path: str, **layout: Any) -> list[tuple[Any, ...]]:
    """All pieces of this rank after a step."""
    with policy_on(path, **layout) as policy:
        policy.train_step(part_of(policy, make_rows(10)), token_loss("ppo", {}), lambda: None)
        return pieces_of(policy)


def cached_bytecode() -> list[str]:
    """Modules of megatron.core that this process rewrote and whose
    cached bytecode is the rewritten one.
    """
    import megatron.core.jit
    import megatron.core.parallel_state

    assert hasattr(megatron.core.parallel_state, "_rft_cuda")
    assert megatron.core.jit.jit_fuser is megatron.core.jit.noop_decorator
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith("megatron.core") and file:
            cache = Path(importlib.util.cache_from_source(file))
            if cache.exists() and b"_rft_cuda" in cache.read_bytes():
                found.append(name)
    return found


def within() -> tuple[list[bool], int]:
    """Each of the optimizer's two collectives beside torch's own, on what this rank drew; and how
    many pages they made.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    with mesh_of(MegatronConfig()):
        size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        drawn = torch.randn(size * 2**20, generator=torch.Generator().manual_seed(rank))
        wholes = [drawn.clone() for _ in range(4)]
        shards = [whole.chunk(size)[rank] for whole in wholes]
        group = torch.distributed.group.WORLD
        torch.distributed.reduce_scatter_tensor(shards[0], wholes[0])
        torch.distributed.all_gather_into_tensor(wholes[1], shards[1])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        op = torch.distributed.ReduceOp.SUM
        buffers.dist_reduce_scatter_func(shards[2], wholes[2], op=op, group=group, async_op=False)
        buffers.dist_all_gather_func(wholes[3], shards[3], group=group, async_op=False)
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        same = [torch.equal(shards[0], shards[2]), torch.equal(wholes[1], wholes[3])]
        return same, pages


def megatron() -> tuple[str, str]:
    """Version and place of the megatron.core that this process uses."""
    import megatron.core

    return megatron.core.__version__, str(megatron.core.__file__)
