"""TRL's side of `bench.loop`: its process, and the quickest of its settings, chosen for every size.

In: the Python of TRL's environment, a directory with a model, and tasks. Out: `Measured`, as of our
own runs. The process lives through all rounds, every measurement makes a new trainer in it (see
`bench.loop_trl`).
"""

import json
import os
import select
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.loop_runs import REPEATS, TASKS, Measured, Sizes

# the quickest of all settings, and of those with fp32 weights: ours keeps fp32 masters
TRL, TRL_PRECISE = "trl", "trl, as precise"
PRECISE = ("mixed", "fp32")
SCRIPT = Path(__file__).with_name("loop_trl.py")
SIZES, FIRST_SIZE = (16, 64, 128), 32  # rows of a microbatch
WEIGHTS = ("mixed", "fp32", "bf16")  # the others compute in bf16, which not every core multiplies
TRY_TOKENS = 64  # of a response, at most: in longer ones no setting gains on another
PATIENCE = 2.0  # a setting whose first step takes so many times the best is given up
ANSWER_S = 1800.0


class Trl:
    """TRL's process; `settings`: by way, once `tune` was called."""

    def __init__(self, python: Path, root: Path):
        self.settings: dict[str, dict[str, Any]] = {}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "HF_HUB_OFFLINE": "1"
        }
        self.process = subprocess.Popen(
            [python, SCRIPT, root / "model"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(
        self, sizes: Sizes, steps: int, setting: dict[str, Any], limit: float = ANSWER_S
    ) -> dict[str, Any]:
        """Fewer steps than asked for come back when they take longer than `limit` seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = {
            **setting,
            "rows": str(sizes.rows),
            "tasks": TASKS,
            "repeats": REPEATS,
            "tokens": sizes.tokens,
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

    def tune(self, sizes: Sizes, steps: int) -> list[str]:
        """Try threads and weights, then sizes with the quickest of these, `steps` of each; the last
        one counts, and a step of the first setting warms the process up. Tells of every trial.
        """
        sizes = replace(sizes, tokens=min(sizes.tokens, TRY_TOKENS))
        said: list[str] = []
        found: list[tuple[float, dict[str, Any]]] = []
        kinds = WEIGHTS if sizes.dtype == "bf16" else ("fp32",)
        firsts = [
            {"threads": threads, "weights": weights, "size": FIRST_SIZE}
            for threads in (1, 2)
            for weights in kinds
        ]
        self.ask(sizes, 1, firsts[0])
        for setting in firsts:
            self._try(sizes, steps, setting, found, said)
        for way, weights in ((TRL, None), (TRL_PRECISE, PRECISE)):
            quickest = best(found, weights)
            for size in SIZES:
                setting = quickest | {"size": size}
                if all(setting != tried for _, tried in found):
                    self._try(sizes, steps, setting, found, said)
            self.settings[way] = best(found, weights)
        return said

    def _try(
        self,
        sizes: Sizes,
        steps: int,
        setting: dict[str, Any],
        found: list[tuple[float, dict[str, Any]]],
        said: list[str],
    ) -> None:
        least = min((seconds for seconds, _ in found), default=ANSWER_S)
        answer = self.ask(sizes, steps, setting, min(PATIENCE * least, ANSWER_S))
        step, made = answer["steps"][-1], len(answer["steps"])
        found.append((step, setting))
        threads = f"{setting['threads']} thread{'s' * (setting['threads'] > 1)}"
        said.append(
            f"{threads}, {setting['weights']}, {setting['size']} rows {step:.2f} (busy "
            f"{answer['busy'] / made:.2f})"
        )

    def measure(self, way: str, sizes: Sizes) -> Measured:
        found = self.ask(sizes, sizes.steps, self.settings[way])
        if len(found["steps"]) != sizes.steps:
            raise RuntimeError(
                f"TRL made {len(found['steps'])} of {sizes.steps} steps in {ANSWER_S:g} s"
            )
        tokens = sizes.steps * TASKS * REPEATS * sizes.tokens
        return Measured(
            found["wall"], found["busy"], found["steps"], tokens=tokens, where=found["where"]
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def best(
    found: list[tuple[float, dict[str, Any]]], weights: tuple[str, ...] | None
) -> dict[str, Any]:
    """The quickest of those with such weights, or of all."""
    among = [one for one in found if weights is None or one[1]["weights"] in weights]
    return min(among, key=lambda one: one[0])[1]
