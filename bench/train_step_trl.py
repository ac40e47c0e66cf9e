"""TRL's GRPO update on a given batch. Runs in TRL's own environment, so it imports nothing of this
repository.

    python bench/train_step_trl.py MODEL_DIRECTORY THREADS

In: lines of JSON on stdin, {"batch": FILE.npz, "size": rows of one microbatch, "weights": "bf16" or
"fp32"}. Out: for each a line with wall clock and processor seconds of one update: all microbatches
of the batch through `GRPOTrainer.training_step`, then gradient clipping and the optimizer step, as
its training loop does them. The batch is padded and cut as TRL does it, before the clock starts.

    weights fp32   TRL's own default: fp32 weights under bf16 autocast
    weights bf16   bf16 weights and moments, no autocast: less precise than ours, which keeps fp32
                   masters
"""

import json
import os
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

LR = 1e-6


class Prepared(GRPOTrainer):
    """Takes inputs as they are, where TRL would generate."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs


def trainer_of(model: str, weights: str, rows: int, directory: str) -> Prepared:
    arguments = GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=rows,
        num_generations=rows,
        learning_rate=LR,
        max_grad_norm=1.0,
        weight_decay=0.01,
        beta=0.0,
        loss_type="dapo",
        bf16=weights == "fp32",
        activation_checkpointing=False,
        use_cpu=True,
        report_to="none",
        max_steps=1000,
    )
    dtype = torch.bfloat16 if weights == "bf16" else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    trainer = Prepared(
        model=loaded,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * rows}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.create_optimizer_and_scheduler(1000)
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(
        trainer.model, trainer.optimizer
    )
    return trainer


def batch_of(path: str) -> dict[str, Any]:
    """Completions padded to the longest of the batch. Prompts are of one length."""
    with np.load(path) as found:
        prompts, flat, lengths = found["prompts"], found["completions"], found["lengths"]
        behaviour, advantages = found["behaviour"], found["advantages"]
    longest = int(lengths.max())
    mask = np.arange(longest) < lengths[:, None]
    ids, old = np.zeros(mask.shape, dtype=np.int64), np.zeros(mask.shape, dtype=np.float32)
    ids[mask], old[mask] = flat, behaviour
    return {
        "prompt_ids": torch.from_numpy(prompts),
        "prompt_mask": torch.ones(prompts.shape, dtype=torch.int64),
        "completion_ids": torch.from_numpy(ids),
        "completion_mask": torch.from_numpy(mask.astype(np.int64)),
        "old_per_token_logps": torch.from_numpy(old),
        "advantages": torch.from_numpy(advantages),
        "num_items_in_batch": torch.tensor(int(lengths.sum())),
    }


def update(trainer: Prepared, micros: list[dict[str, Any]]) -> tuple[float, float]:
    """Wall clock and processor seconds of one optimizer update over all microbatches."""
    steps = len(micros)
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = steps
    began, busy = time.perf_counter(), time.process_time()
    for micro in micros:
        trainer.training_step(trainer.model_wrapped, micro, None)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    trainer.optimizer.zero_grad()
    return time.perf_counter() - began, time.process_time() - busy


def main() -> None:
    model, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is not an answer
    torch.set_num_threads(threads)
    trainers: dict[str, Prepared] = {}
    with tempfile.TemporaryDirectory() as directory:
        for line in sys.stdin:
            asked = json.loads(line)
            batch = batch_of(asked["batch"])
            rows = len(batch["advantages"])
            weights = asked["weights"]
            if weights not in trainers:
                trainers[weights] = trainer_of(model, weights, rows, directory)
            micros = split_tensor_dict(batch, rows // asked["size"])
            answers.write(json.dumps(update(trainers[weights], micros)) + "\n")


if __name__ == "__main__":
    main()
