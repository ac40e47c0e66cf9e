"""TRL's GRPOTrainer end to end: prompts in, generation, reward, update. Runs in TRL's own
environment, so it imports nothing of this repository.

    python bench/loop_trl.py MODEL_DIRECTORY

In: lines of JSON on stdin, {"rows", "steps", "tasks", "repeats", "tokens", "size", "weights",
"threads", "limit"}; "rows": a file of tasks. Out: for each a line {"wall", "busy", "steps",
"where"}: seconds from the beginning of the first step to the end of the last one, processor seconds
of the process meanwhile, the wall clock of every step, and processor seconds by what they were for.
After `limit` seconds no further step is begun.

Generation is that of transformers: TRL's other one, vLLM, needs a GPU there. Every completion has
exactly `tokens` tokens.

    size           rows of one microbatch
    weights fp32   fp32 weights, no autocast
    weights mixed  TRL's own default: fp32 weights under bf16 autocast
    weights bf16   bf16 weights and moments, no autocast: less precise than ours, which keeps fp32
                   masters
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

LR = 1e-6


class Where:
    """Processor seconds of this process by row; what is inside another row counts for itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.rows, self.since = ["rest"], time.process_time()

    def begin(self, row: str) -> None:
        self._count()
        self.rows.append(row)

    def end(self) -> None:
        self._count()
        self.rows.pop()

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def _count(self) -> None:
        now = time.process_time()
        row = self.rows[-1]
        self.seconds[row] = self.seconds.get(row, 0.0) + now - self.since
        self.since = now


class Watched(GRPOTrainer):
    """The trainer as it is, with a look at the clock around its parts."""

    where: Where

    def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
        with self.where.row("sampling"):
            return super()._generate_single_turn(*given, **named)

    def _calculate_rewards(self, *given: Any, **named: Any) -> Any:
        with self.where.row("rewards"):
            return super()._calculate_rewards(*given, **named)

    def _generate_and_score_completions(self, *given: Any, **named: Any) -> Any:
        with self.where.row("pack"):
            return super()._generate_and_score_completions(*given, **named)

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        with self.where.row("forward"):
            return super().compute_loss(*given, **named)

    def training_step(self, *given: Any, **named: Any) -> Any:
        with self.where.row("backward"):
            return super().training_step(*given, **named)

    def watch(self, where: Where) -> None:
        """Within generation, what the model computes is decoding."""
        self.where = where
        self.model.register_forward_pre_hook(
            lambda *_: where.begin("decode" if where.rows[-1] == "sampling" else where.rows[-1])
        )
        self.model.register_forward_hook(lambda *_: where.end())


class Clock(TrainerCallback):
    """Wall clock and processor time at the beginning and after every step; ends a training that
    takes too long.
    """

    def __init__(self, limit: float, where: Where) -> None:
        self.limit = limit
        self.where = where
        self.marks: list[tuple[float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))
        self.where.since = time.process_time()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.where.begin("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.where.end()

    def on_step_end(self, _arguments: Any, _state: Any, control: Any, **_: Any) -> None:
        self.marks.append((time.perf_counter(), time.process_time()))
        control.should_training_stop |= self.marks[-1][0] - self.marks[0][0] > self.limit


class Reward:
    """Share of digits, as in `bench/loop_tasks.py`; refuses
    completions of another length than asked for.
    """

    __name__ = "digits"

    def __init__(self, tokens: int):
        self.tokens = tokens

    def __call__(
        self, completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        wrong = {len(ids) for ids in completion_ids} - {self.tokens}
        if wrong:
            raise ValueError(
                f"TRL generated completions of {sorted(wrong)} tokens, not {self.tokens}"
            )
        return [
            sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions
        ]


def measure(model: str, asked: dict[str, Any], directory: str) -> dict[str, Any]:
    """Train `steps` steps from the model as it lies on the disk."""
    torch.set_num_threads(asked["threads"])
    with open(asked["rows"], encoding="utf-8") as file:
        prompts = [{"prompt": json.loads(line)["prompt"]} for line in file]
    batch, size = asked["tasks"] * asked["repeats"], asked["size"]
    arguments = GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=batch // size,
        num_generations=asked["repeats"],
        max_steps=asked["steps"],
        max_completion_length=asked["tokens"],
        generation_kwargs={"min_new_tokens": asked["tokens"]},
        temperature=1.0,
        learning_rate=LR,
        max_grad_norm=1.0,
        weight_decay=0.01,
        beta=0.0,
        loss_type="dapo",
        bf16=asked["weights"] == "mixed",
        use_vllm=False,
        activation_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=10**6,
        disable_tqdm=True,
    )
    dtype = torch.bfloat16 if asked["weights"] == "bf16" else torch.float32
    where = Where()
    clock = Clock(asked["limit"], where)
    trainer = Watched(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
        reward_funcs=Reward(asked["tokens"]),
        args=arguments,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[clock],
    )
    trainer.watch(where)
    trainer.train()
    walls = [wall for wall, _ in clock.marks]
    return {
        "wall": walls[-1] - walls[0],
        "busy": clock.marks[-1][1] - clock.marks[0][1],
        "steps": [after - before for before, after in zip(walls, walls[1:], strict=False)],
        "where": where.seconds,
    }


def main() -> None:
    model = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is not an answer
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            answers.write(json.dumps(measure(model, json.loads(line), directory)) + "\n")


if __name__ == "__main__":
    main()
