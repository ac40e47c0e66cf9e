"""FrozenLake through the whole loop: does a policy learn from an environment's rewards to cross
lakes that it never saw?

    python -m bench.environment [--seeds 0 1 2] [--steps N] [--shuffled]

In: a tiny model of random weights, every solvable lake of 3 x 4 fields with 1 to 3 holes, some of
them held out; gymnasium in the virtual environment of `make env-gym`. As in the quickstart a short
supervised warm-up goes before: one letter is an answer, and half of its moves are good ones. Out:
the share of sampled episodes (temperature 1) that cross held-out lakes, before and after.
`--shuffled`: training is rewarded by coin flips instead.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from rft.monitor.run_record import RunRecord
from rft.tools.toy import write_model

REPOSITORY = Path(__file__).resolve().parents[1]
HEIGHT, WIDTH, TURNS = 3, 4, 8
HOLES = 3  # at most
MOST_HELD = 64
MOVES = {"l": (0, -1), "d": (1, 0), "r": (0, 1), "u": (-1, 0)}
GOOD = 0.5  # share of the warm-up's moves that lead to the other side; the others are random
COINS = Path(__file__).with_name("environment_coins.py")
Lake = tuple[str, ...]


def lakes() -> list[Lake]:
    """All that can be crossed and have some holes."""
    free = HEIGHT * WIDTH - 2
    found = []
    for letters in product("FH", repeat=free):
        text = f"S{''.join(letters)}G"
        lake = tuple(text[at : at + WIDTH] for at in range(0, len(text), WIDTH))
        if 1 <= letters.count("H") <= HOLES and is_crossed(lake):
            found.append(lake)
    return found


def is_crossed(lake: Lake) -> bool:
    return (0, 0) in distances(lake)


def distances(lake: Lake) -> dict[tuple[int, int], int]:
    """Moves from each field, that is no hole, to the other side."""
    goal = (HEIGHT - 1, WIDTH - 1)
    found, todo = {goal: 0}, [goal]
    for at in todo:
        for move in MOVES.values():
            there = moved(at, move)
            if there not in found and lake[there[0]][there[1]] != "H":
                found[there] = found[at] + 1
                todo.append(there)
    return found


def moved(at: tuple[int, int], move: tuple[int, int]) -> tuple[int, int]:
    y, x = at[0] + move[0], at[1] + move[1]
    return max(0, min(HEIGHT - 1, y)), max(0, min(WIDTH - 1, x))


def shown(lake: Lake, at: tuple[int, int]) -> str:
    """As the environment shows it."""
    return "\n".join(
        "".join("P" if (y, x) == at else letter for x, letter in enumerate(row))
        for y, row in enumerate(lake)
    )


def walks(all_: list[Lake], count: int, seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Dialogues of moves, of which the last one is learned: half of them good, half random."""
    draw = random.Random(seed)
    for _ in range(count):
        yield {"messages": _walk(draw, all_)}


def _walk(draw: random.Random, all_: list[Lake]) -> list[dict[str, str]]:
    turns = draw.randrange(1, TURNS)
    while True:
        lake, at, messages = draw.choice(all_), (0, 0), []
        while lake[at[0]][at[1]] not in "HG":
            letter = draw.choice("ldru")
            if draw.random() < GOOD:
                letter = best(draw, lake, at)
            messages += [
                {"role": "user", "content": shown(lake, at)},
                {"role": "assistant", "content": letter},
            ]
            if len(messages) == 2 * turns:
                return messages
            at = moved(at, MOVES[letter])


def best(draw: random.Random, lake: Lake, at: tuple[int, int]) -> str:
    far = distances(lake)
    return draw.choice([m for m in MOVES if far.get(moved(at, MOVES[m]), 99) < far[at]])


def write_assets(place: Path, seed: int) -> None:
    write_model(
        *(place / "model", "qwen3", seed),
        **{"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384},
    )
    all_ = lakes()
    random.Random(seed).shuffle(all_)
    held = min(MOST_HELD, len(all_) // 5)
    for name, part in (("held_out", all_[:held]), ("train", all_[held:])):
        rows = [
            {"prompt": "lake", "response": "", "env_args": {"desc": list(lake)}} for lake in part
        ]
        _write(place / f"{name}.jsonl", rows)
    _write(place / "walks.jsonl", list(walks(all_[held:], 4000, seed)))


def _write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def command(place: Path, name: str, seed: int, steps: int, shuffled: bool) -> list[str]:
    """The quickstart's two stages, over lakes."""
    environment = f"{COINS}:Coins" if shuffled else "gymnasium"
    args = (
        f"{{environment: ENV, env_id: FrozenLake-v1, python: gym, max_step_num: {TURNS}, "
        "episodes: 256, env_args: {is_slippery: false, instructions: ''}}"
    )
    form = "format: {prompt_type: plaintext}"
    flow = "default_workflow_type: environment"
    sets = {
        "taskset": f"{{name: lakes, path: {place}/train.jsonl, {form}, {flow}, workflow_args: "
        f"{args.replace('ENV', environment)}, rollout_args: {{temperature: 1.0}}}}",
        "eval_tasksets": f"[{{name: held_out, path: {place}/held_out.jsonl, {form}, {flow}, "
        f"workflow_args: {args.replace('ENV', 'gymnasium')}, repeat_times: 4, "
        "rollout_args: {temperature: 1.0}}]",
    }
    return [
        *(sys.executable, "-m", "rft.train", "experiment=quickstart", "monitor=none"),
        *(f"name={name}", f"seed={seed}", f"checkpoint_root_dir={place}", "prepare=null"),
        *("finish=null", f"model.model_path={place}/model", "model.max_prompt_tokens=32"),
        *("model.max_response_tokens=2", "model.max_model_len=256"),
        "stages.0.trainer.total_steps=500",
        "stages.0.trainer.stop_at_loss=null",
        "stages.0.buffer.train_batch_size=64",
        f"stages.0.buffer.trainer_input.experience_buffer.path={place}/walks.jsonl",
        "stages.0.buffer.trainer_input.experience_buffer.format="
        "{prompt_type: messages, messages_key: messages}",
        f"stages.1.trainer.total_steps={steps}",
        "stages.1.algorithm.optimizer.lr=3.0e-4",
        "stages.1.buffer.batch_size=16",
        f"stages.1.explorer.eval_interval={steps}",
        *(f"stages.1.buffer.explorer_input.{name}={value}" for name, value in sets.items()),
        "explorer.rollout_model.kv_cache_gb=0.25",
    ]


def run(seed: int, steps: int, shuffled: bool, place: Path) -> dict[str, float]:
    write_assets(place, seed)
    name, began = f"lake_{seed}", time.monotonic()
    subprocess.run(
        command(place, name, seed, steps, shuffled),
        cwd=REPOSITORY,
        check=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    scores = dict(RunRecord(place / "rft" / name / "rft").series("eval/held_out/reward/mean"))
    first, *_, last = [scores[step] for step in sorted(scores)]
    seconds = round(time.monotonic() - began, 1)
    return {"seed": seed, "before": first, "after": last, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.environment")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--shuffled", action="store_true", help="coin flips for rewards")
    parser.add_argument("--place", type=Path, help="keep the runs here")
    options = parser.parse_args()
    learned = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as directory:
            place = (options.place or Path(directory)) / f"seed_{seed}"
            place.mkdir(parents=True, exist_ok=True)
            found = run(seed, options.steps, options.shuffled, place)
        print(json.dumps({**found, "shuffled": options.shuffled}), flush=True)
        learned.append(found["after"] >= found["before"] + 0.2)
    good = not any(learned) if options.shuffled else all(learned)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
