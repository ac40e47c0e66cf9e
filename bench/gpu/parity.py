"""Stage 2: the same numbers from Transformer Engine's layers, rft's own, and transformers.

    python -m bench.gpu.parity families|optimizer|checkpoint cuda|cpu

In: a kind of device. Out: see `bench.gpu.checks`. Every way of computing is a process of
its own, for Megatron takes the kernels that it finds as it is imported: "own" finds no Transformer
Engine. On "cpu" there is none for any of them, and torch's fused AdamW stands for its FusedAdam.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = ("llama", "qwen3", "qwen3_moe")
SHAPE = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256}
OWN, TE, PLAIN_ROPE = "own", "te", "te_plain_rope"
OWN_WAYS = ((OWN, "fp32"), (OWN, "bf16"))
TE_WAYS = ((TE, "bf16"), (PLAIN_ROPE, "bf16"))  # where it is installed
ROWS, LONGEST, TOGETHER = 12, 90, 512
FP32_BAR, BF16_BAR, GRADIENT_BAR = 1e-4, 6e-3, 5e-2  # on a CPU 1e-6, 2e-3, 1.5e-2
NO_CLIP = 10.0  # of a few hundred tokens one that is clipped here and not there is 4e-2 of all
STEPS, RATE, WEIGHTS_BAR = 5, 1e-3, 1e-5
WAIT_S = 300.0


def rows_of(seed: int = 0) -> list[Any]:
    """Ragged random rows whose second half is trained; some sampled at another temperature."""
    from rft.data.packing import Row, token_weights

    made, rows = np.random.default_rng(seed), []
    lengths = made.integers(3, LONGEST, ROWS)
    weights = token_weights([int(n) - int(n) // 2 for n in lengths], "seq-mean-token-mean")
    for n, weight in zip(lengths.tolist(), weights, strict=True):
        trained = (np.arange(n) >= n // 2).astype(np.float32)
        behaviour = (trained * made.uniform(-4.7, -4.4, n)).astype(np.float32)
        advantage = trained * np.float32(made.normal())
        temperature = float(made.choice([1.0, 0.7]))
        tokens = made.integers(5, 90, n)
        weighted = trained * np.float32(weight)
        rows.append(Row(tokens, trained, behaviour, advantage, weighted, temperature))
    return rows


@contextmanager
def mesh_on(kind: str) -> Iterator[Any]:
    from rft.ground import device as devices

    device = devices.choose(kind)
    device.activate()
    if kind == "cpu":
        from rft.megatron import cpu_port

        cpu_port.install()
    else:
        from rft.megatron import kernels

        kernels.check()
    from rft.config import MegatronConfig
    from rft.megatron.mesh import Mesh

    mesh = Mesh(MegatronConfig(), device, WAIT_S)
    try:
        yield mesh
    finally:
        mesh.close()


def policy_of(path: Path, mesh: Any, dtype: str, steps: int = 10, **overrides: Any) -> Any:
    from rft.config import MegatronConfig, ModelConfig, OptimizerConfig, TrainerConfig
    from rft.megatron.policy import Policy

    sizes = MegatronConfig(override_transformer_config=overrides)
    trainer = TrainerConfig(megatron=sizes, dtype=dtype, grad_clip=1e9)
    model = ModelConfig(model_path=str(path))
    return Policy(model, trainer, OptimizerConfig(lr=RATE), mesh, 0, steps)


def packed(policy: Any, rows: list[Any], most: int) -> list[Any]:
    from rft.data.packing import pack

    return pack(rows, 1, most, policy.multiple)[0]


# --- one way of computing -------------------------------------------------------------------------


def side(way: str, dtype: str, kind: str, models: Path, out: Path) -> None:
    """Log-probabilities of all rows, packed and one by one, and the first gradient."""
    if way == OWN:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    from rft.algorithm.losses import token_loss

    overrides = {"apply_rope_fusion": False} if way == PLAIN_ROPE else {}
    with mesh_on(kind) as mesh:
        for family in FAMILIES:
            policy = policy_of(models / family, mesh, dtype, **overrides)
            rows, found = rows_of(), {}
            for number, row in enumerate(rows):
                found[f"alone/{number}"] = scores(policy, [row], LONGEST)[0]
            for number, values in scores(policy, rows, TOGETHER).items():
                found[f"packed/{number}"] = values
            loss = token_loss("ppo", {"clip_range": NO_CLIP})
            policy.train_step(packed(policy, rows, TOGETHER), loss, lambda: None)
            found |= gradients_of(policy)
            print(f"{family}: {policy.describe()}", flush=True)
            np.savez(out / f"{family}.npz", layers=np.array(policy.describe()), **found)
            policy.close()


def scores(policy: Any, rows: list[Any], most: int) -> dict[int, np.ndarray]:
    """Per row the log-probability of each of its tokens but the first."""
    part, found = packed(policy, rows, most), {}
    for one, values in zip(part, policy.score(part), strict=True):
        bounds = one.cu_seqlens.tolist()
        for row, start, stop in zip(one.rows, bounds, bounds[1:], strict=False):
            found[int(row)] = np.asarray(values[start : stop - 1], dtype=np.float64)
    return found


def gradients_of(policy: Any) -> dict[str, np.ndarray]:
    """Adam's first moment after one step is a tenth of the gradient."""
    pieces: dict[str, list[Any]] = {}
    for piece in policy.snapshot().pieces:
        if piece.key.startswith("exp_avg/"):
            pieces.setdefault(piece.key, []).append(piece)
    return {
        key.replace("exp_avg/", "gradient/"): np.concatenate(
            [
                one.tensor.float().cpu().numpy().reshape(-1)
                for one in sorted(found, key=lambda one: (one.offset, one.flat or (0, 0)))
            ]
        )
        for key, found in pieces.items()
    }


# --- and what they give, side by side -------------------------------------------------------------


def families(checks: Any) -> None:
    from rft.tools.toy import write_model

    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory)
        for family in FAMILIES:
            write_model(models / family, family, tied=family == "qwen3", **SHAPE)
        kind = checks.device.kind
        wanted = {family: of_transformers(models / family, kind) for family in FAMILIES}
        found: dict[tuple[str, str], dict[str, Any]] = {}
        has_te = checks.fake or importlib.util.find_spec("transformer_engine") is not None
        for way, dtype in OWN_WAYS + (TE_WAYS if has_te else ()):
            out = models / f"{way}_{dtype}"
            out.mkdir()
            command = [sys.executable, "-m", "bench.gpu.parity", "side", way, dtype, kind]
            subprocess.run([*command, str(models), str(out)], check=True, timeout=WAIT_S)
            found[way, dtype] = {one: dict(np.load(out / f"{one}.npz")) for one in FAMILIES}
        for (way, dtype), numbers in found.items():
            apart = [logprobs_apart(one, dtype, numbers[one], wanted[one]) for one in FAMILIES]
            bar = FP32_BAR if dtype == "fp32" else BF16_BAR
            checks.most(f"{way} {dtype} log-probabilities", max(apart), bar)
            apart = [distance(numbers[one], found[OWN, "fp32"][one]) for one in FAMILIES]
            print(f"{way} {dtype} gradients of {', '.join(FAMILIES)}: {apart}")
            checks.most(f"{way} {dtype} gradients", max(apart), GRADIENT_BAR)
            if not checks.fake:
                told = {str(one["layers"]) for one in numbers.values()}
                fits = all(("layers of Transformer Engine" in one) == (way != OWN) for one in told)
                checks.true(f"{way} {dtype}: the layers that are meant", fits)


def of_transformers(path: Path, kind: str) -> list[np.ndarray]:
    """The same, in fp32."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(kind)
    found = []
    for row in rows_of():
        ids = torch.from_numpy(row.tokens).to(kind).long()
        with torch.no_grad():
            told = torch.log_softmax(model(ids[None]).logits[0] / row.temperature, -1)[:-1]
        found.append(told.gather(1, ids[1:, None])[:, 0].double().cpu().numpy())
    return found


def logprobs_apart(
    family: str, dtype: str, found: dict[str, Any], wanted: list[np.ndarray]
) -> float:
    """In fp32 the worst token, in bf16 the mean: a router that hesitates may choose another expert.
    Of packed rows or single ones, whichever are farther.
    """
    worst = 0.0
    for way in ("packed", "alone"):
        apart = np.concatenate([np.abs(found[f"{way}/{n}"] - w) for n, w in enumerate(wanted)])
        worst = max(worst, float(apart.max() if dtype == "fp32" else apart.mean()))
        print(f"{family} {dtype} {way}: at most {apart.max():.2e}, mean {apart.mean():.2e}")
    return worst


def distance(found: dict[str, Any], truth: dict[str, Any]) -> float:
    """Of all gradients together, in parts of their norm."""
    keys = [key for key in truth if key.startswith("gradient/")]
    assert keys and set(keys) == {key for key in found if key.startswith("gradient/")}
    off = sum(float(((found[key] - truth[key]) ** 2).sum()) for key in keys)
    return (off / sum(float((truth[key] ** 2).sum()) for key in keys)) ** 0.5


# --- optimizer and checkpoint ---------------------------------------------------------------------


def optimizer(checks: Any) -> None:
    """The same gradients for both."""
    import torch

    kind = checks.device.kind
    settings: dict[str, Any] = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    made = torch.Generator().manual_seed(3)
    first = [torch.randn(n, 64, generator=made).to(kind) for n in (1, 64, 999)]
    sides = [[torch.nn.Parameter(one.clone()) for one in first] for _ in range(2)]
    if checks.fake:
        fused: Any = torch.optim.AdamW(sides[0], fused=True, **settings)
    else:
        from transformer_engine.pytorch.optimizers import FusedAdam

        fused = FusedAdam(sides[0], adam_w_mode=True, **settings)
    plain = torch.optim.AdamW(sides[1], foreach=False, **settings)
    for _ in range(STEPS):
        for ours, theirs in zip(*sides, strict=True):
            ours.grad = torch.randn(ours.shape, generator=made).to(kind)
            theirs.grad = ours.grad.clone()
        fused.step(), plain.step()
    apart = max(float((a - b).detach().abs().max()) for a, b in zip(*sides, strict=True))
    checks.most(f"weights after {STEPS} steps", apart, WEIGHTS_BAR)


def checkpoint(checks: Any) -> None:
    """Into a policy of other weights, which then trains on as the first one does."""
    from rft.tools.toy import write_model

    dtype = "bf16"
    with tempfile.TemporaryDirectory() as directory, mesh_on(checks.device.kind) as mesh:
        root = Path(directory)
        models = [write_model(root / str(seed), seed=seed, **SHAPE) for seed in (1, 2)]
        first = policy_of(models[0], mesh, dtype)
        steps(first, range(2))
        manager = manager_at(root, mesh)
        manager.start(first)
        checks.true("the save began", manager.save(2, first, {"step": 2}))
        manager.before_update()
        manager.wait(2)
        manager.close()
        wanted = steps(first, range(2, 4)), state_of(first)
        first.close()
        second = policy_of(models[1], mesh, dtype)
        manager = manager_at(root, mesh)
        manager.load(second)
        found = steps(second, range(2, 4)), state_of(second)
        checks.tell("losses of two steps more", found[0], "equal", found[0] == wanted[0])
        differ = sum(found[1].get(key) != told for key, told in wanted[1].items())
        checks.most("tensors that differ after them", differ, 0)
        checks.least("tensors", len(found[1]), 10)
        second.close()


def manager_at(root: Path, mesh: Any) -> Any:
    from rft.checkpoint.manager import CheckpointManager
    from rft.config import TrainerConfig

    trainer = TrainerConfig(dtype="bf16")
    return CheckpointManager(str(root / "run"), mesh, trainer, about={"layout": mesh.layout()})


def steps(policy: Any, numbers: range) -> list[float]:
    from rft.algorithm.losses import token_loss

    return [
        policy.train_step(
            packed(policy, rows_of(number), TOGETHER), token_loss("ppo", {}), lambda: None
        )["loss"]
        for number in numbers
    ]


def state_of(policy: Any) -> dict[Any, bytes]:
    import torch

    return {
        (p.key, p.offset, p.flat): p.tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
        .tobytes()
        for p in policy.snapshot().pieces
    }  # fmt: skip


CHECKS = {"families": families, "optimizer": optimizer, "checkpoint": checkpoint}

if __name__ == "__main__":
    if sys.argv[1] == "side":
        way, dtype, kind, *paths = sys.argv[2:]
        side(way, dtype, kind, *map(Path, paths))
        sys.stdout.flush()
        os._exit(0)  # collectives' threads make no difference
    from bench.gpu.checks import main

    main(CHECKS)
