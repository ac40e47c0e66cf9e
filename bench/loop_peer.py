"""TRL's side of `bench.loop`: its process, and the quickest of its settings.

In: the Python of TRL's environment, a directory with model and tasks. Out: `Measured`, as of our
own runs. The process lives through all rounds, every measurement makes a new trainer in it (see
`bench.loop_trl`).
"""

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

from bench.loop_runs import REPEATS, TASKS, Measured, Sizes

TRL = "trl"
SCRIPT = Path(__file__).with_name("loop_trl.py")
SIZES, FIRST_SIZE = (16, 64, 128), 32  # rows of a microbatch
SETTINGS = tuple((threads, weights) for threads in (1, 2) for weights in ("mixed", "fp32", "bf16"))
# a setting's first step warms it up; one that takes so many times the best is given up
TRY_STEPS, PATIENCE = 2, 2.0
ANSWER_S = 1800.0


class Trl:
    """TRL's process, with the fastest of its settings once `tune` was called."""

    def __init__(self, python: Path, root: Path):
        threads, weights = SETTINGS[0]
        self.setting: dict[str, Any] = {"threads": threads, "weights": weights, "size": FIRST_SIZE}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "HF_HUB_OFFLINE": "1"
        }
        self.process = subprocess.Popen(
            [python, SCRIPT, root / "model", root / "train.jsonl"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(
        self, tokens: int, steps: int, setting: dict[str, Any], limit: float = ANSWER_S
    ) -> dict[str, Any]:
        """Fewer steps than asked for come back when they take longer than `limit` seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = {
            **setting,
            "tasks": TASKS,
            "repeats": REPEATS,
            "tokens": tokens,
            "steps": steps,
            "limit": limit,
        }
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"TRL's process did not answer {asked} in {ANSWER_S:g} s")
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"TRL's process ended with code {self.process.wait()}; run {SCRIPT} by hand to see "
                "why"
            )
        return json.loads(answer)

    def tune(self, tokens: int) -> list[str]:
        """Try threads and weights, then sizes with the quickest of these; tells of every trial."""
        said: list[str] = []
        best = float("inf")
        settings = [
            self.setting | {"threads": threads, "weights": weights} for threads, weights in SETTINGS
        ]
        for at in range(len(settings) + len(SIZES)):
            tried = (
                settings[at]
                if at < len(settings)
                else self.setting | {"size": SIZES[at - len(settings)]}
            )
            found = self.ask(
                tokens, TRY_STEPS, tried, PATIENCE * TRY_STEPS * best if said else ANSWER_S
            )
            step = found["steps"][-1] if len(found["steps"]) == TRY_STEPS else float("inf")
            said.append(
                f"{tried['threads']} threads, {tried['weights']}, {tried['size']} rows {step:.2f}"
            )
            if step < best:
                best, self.setting = step, tried
        return said

    def measure(self, sizes: Sizes) -> Measured:
        found = self.ask(sizes.tokens, sizes.steps, self.setting)
        if len(found["steps"]) != sizes.steps:
            raise RuntimeError(
                f"TRL made {len(found['steps'])} of {sizes.steps} steps in {ANSWER_S:g} s"
            )
        tokens = sizes.steps * TASKS * REPEATS * sizes.tokens
        return Measured(found["wall"], {"trainer": found["busy"]}, found["steps"], tokens=tokens)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
