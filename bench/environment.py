"""Does a policy learn from an environment's rewards what it never saw? The whole loop, over
FrozenLake of gymnasium, or over an environment package of verifiers.

    python -m bench.environment [lakes | words] [--seeds 0 1 2] [--steps N] [--shuffled]

In: a tiny model of random weights (qwen3, 4 layers, 128 wide, 0.8M parameters) and the tasks of
`bench.environments`, some of them held out; the virtual environment of `make env-gym` or `make
env-verifiers`. As in the quickstart a short supervised warm-up goes before: the form of an answer,
many of them wrong. Out: the mean reward of sampled episodes (temperature 1) of held-out tasks,
which is the share that succeeds, before and after. `--shuffled`: training is rewarded by coin flips
instead.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from bench.environments import lakes, words
from rft.monitor.run_record import RunRecord
from rft.tools.toy import write_model

REPOSITORY = Path(__file__).resolve().parents[1]
GAMES = {"lakes": lakes, "words": words}
WARM_STEPS, WARM_ROWS, HELD = 100, 64, 256
SIZE = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384}


def write_assets(game: ModuleType, place: Path, seed: int) -> None:
    write_model(place / "model", "qwen3", seed, **SIZE)
    rows = game.tasks(seed)
    _write(place / "held_out.jsonl", rows[:HELD])
    _write(place / "train.jsonl", rows[HELD:])
    _write(place / "dialogues.jsonl", game.dialogues(rows[HELD:], WARM_STEPS * WARM_ROWS, seed))


def _write(file: Path, rows: Iterable[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def changes(
    game: ModuleType, place: Path, seed: int, steps: int, shuffled: bool
) -> dict[str, object]:
    """What differs from the quickstart's two stages."""
    warm, rl = "stages.0.", "stages.1."

    def tasks(name: str, coins: bool) -> dict[str, object]:
        return {
            "name": name,
            "path": str(place / f"{name}.jsonl"),
            "format": {"prompt_type": "plaintext"},
            "default_workflow_type": "environment",
            "workflow_args": game.arguments(coins),
            "rollout_args": {"temperature": 1.0},
        }

    return {
        **{"monitor": "none", "prepare": None, "finish": None, "name": "loop", "seed": seed},
        "checkpoint_root_dir": str(place),
        "model.model_path": str(place / "model"),
        "model.max_prompt_tokens": 32,
        "model.max_response_tokens": game.ANSWER_TOKENS,
        "model.max_model_len": 256,
        "explorer.rollout_model.kv_cache_gb": 0.25,
        f"{warm}trainer.total_steps": WARM_STEPS,
        f"{warm}trainer.stop_at_loss": None,
        f"{warm}algorithm.optimizer.lr": 1e-3,
        f"{warm}buffer.train_batch_size": WARM_ROWS,
        f"{warm}buffer.trainer_input.experience_buffer.path": str(place / "dialogues.jsonl"),
        f"{warm}buffer.trainer_input.experience_buffer.format": {
            "prompt_type": "messages",
            "enable_concatenated_multi_turn": True,
        },
        f"{rl}trainer.total_steps": steps,
        f"{rl}algorithm.optimizer.lr": 6e-4,
        f"{rl}buffer.batch_size": 16,
        f"{rl}explorer.eval_interval": steps,
        f"{rl}buffer.explorer_input.taskset": tasks("train", shuffled),
        f"{rl}buffer.explorer_input.eval_tasksets": [tasks("held_out", False)],
    }


def run(game: ModuleType, place: Path, seed: int, steps: int, shuffled: bool) -> dict[str, float]:
    write_assets(game, place, seed)
    began = time.monotonic()
    given = changes(game, place, seed, steps, shuffled)
    subprocess.run(
        [
            *(sys.executable, "-m", "rft.train", "experiment=quickstart"),
            *(f"{key}={word(value)}" for key, value in given.items()),
        ],
        cwd=REPOSITORY,
        check=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    scores = dict(RunRecord(place / "rft" / "loop" / "rft").series("eval/held_out/reward/mean"))
    first, *_, last = [scores[step] for step in sorted(scores)]
    seconds = round(time.monotonic() - began, 1)
    return {"seed": seed, "before": first, "after": last, "seconds": seconds}


def word(value: object) -> str:
    """As Hydra's command line writes it."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{word(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(word, value))}]"
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.environment")
    parser.add_argument("game", nargs="?", choices=GAMES, default="lakes")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of GRPO; default: the game's")
    parser.add_argument("--shuffled", action="store_true", help="coin flips for rewards")
    parser.add_argument("--place", type=Path, help="keep the runs here")
    options = parser.parse_args()
    game, learned = GAMES[options.game], []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as directory:
            place = (options.place or Path(directory)) / f"seed_{seed}"
            place.mkdir(parents=True, exist_ok=True)
            found = run(game, place, seed, options.steps or game.STEPS, options.shuffled)
        print(json.dumps({"game": options.game, **found, "shuffled": options.shuffled}), flush=True)
        learned.append(found["after"] >= found["before"] + 0.2)
    good = not any(learned) if options.shuffled else all(learned)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
