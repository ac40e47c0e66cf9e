"""Runs as a user starts them, and the largest memory of their parts, beside what `rft plan` says.

In: a directory for models, data and runs. Out: plan / measured, by run and part. Memory is PSS,
read of every process of the run a few times a second: private pages, and of shared ones (libraries,
staged checkpoints) each process's part.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

from bench import report
from rft.config import Config
from rft.preflight.memory_plan import ENGINE, RANK, on_host, plan
from rft.tools import planner
from rft.tools.toy import write_model

BAR = 0.15
SAMPLE_S = 0.15
RUN_S = 900.0
PROMPT, ANSWER = 90, 140  # characters, each a token
SIZES = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 1536}
LENGTHS = ("model.max_prompt_tokens=101", "model.max_response_tokens=155")
PARTS = {  # what a process's title tells of who it is
    "rft.run.rank": "rank",
    "rft.checkpoint.agent": "rank",
    "EngineCore": "engine",
    "RolloutEngine": "engine",
}
TP2 = ("tensor_model_parallel_size=2", "sequence_parallel=true")
RUNS = {  # words behind those that all have
    "sft": ["experiment=sft", "buffer.train_batch_size=32"],
    "sft at TP2": [
        *("experiment=sft", "buffer.train_batch_size=16", "trainer.num_ranks=2"),
        *(f"trainer.megatron.{word}" for word in TP2),
    ],
    "dpo": ["experiment=dpo", "buffer.batch_size=16"],
    "grpo": ["experiment=grpo", "buffer.batch_size=4"],
    "ppo, with a critic": [
        *("experiment=ppo", "buffer.batch_size=16", "algorithm.repeat_times=1"),
        "trainer.critic_warmup=0",
    ],
}
QUICK = 1


def measured(root: Path, quick: bool) -> dict[str, float]:
    """plan / measured."""
    model = write_model(root / "model_33m", context=512, tied=False, vocab=8192, **SIZES)
    write_rows(root)
    ratios, rows = {}, []
    for name, words in list(RUNS.items())[: QUICK if quick else None]:
        words = [*words, *common(root, model, name, words[0])]
        options, rest = planner.parser().parse_known_args(words)
        ((_, found),) = planner.searches(rest, options, root)
        assert found.own is not None
        peaks = peaks_of(words, root)
        for part, planned in planned_of(found.own.config).items():
            ratios[f"{name}: {part}"] = planned / peaks[part]
            cells = (planned / 1e9, peaks[part] / 1e9, planned / peaks[part])
            rows.append([f"{name}: {part}", *(f"{cell:.2f}" for cell in cells)])
    report.table("memory", ["run: part", "plan GB", "measured GB", "plan / measured"], rows)
    return ratios


def planned_of(config: Config) -> dict[str, float]:
    """Of one rank; of one engine; of all processes."""
    wanted = plan(config)
    parts = {"rank": float(RANK + wanted.rank + wanted.staging)}
    if config.mode == "both":
        parts["engine"] = float(ENGINE + wanted.engine)
    return parts | {"all": float(sum(on_host(config, wanted, on_cpu=True).values()))}


def write_rows(root: Path) -> None:
    drawn = random.Random(0)

    def text(letters: int) -> str:
        return "".join(drawn.choice("0123456789+") for _ in range(letters))

    files = {
        "sft": lambda: {"prompt": text(PROMPT), "response": text(ANSWER)},
        "dpo": lambda: {"prompt": text(PROMPT), "chosen": text(ANSWER), "rejected": text(ANSWER)},
        "tasks": lambda: {"prompt": text(PROMPT), "response": "7"},
    }
    for name, row in files.items():
        lines = "".join(json.dumps(row()) + "\n" for _ in range(400))
        (root / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def common(root: Path, model: Path, name: str, recipe: str) -> list[str]:
    words = [
        *LENGTHS,
        f"model.model_path={model}",
        f"checkpoint_root_dir={root}",
        f"name={''.join(filter(str.isalnum, name))}",
        "trainer.total_steps=3",
        "trainer.max_token_len_per_gpu=2048",
        "monitor=none",
        "device=cpu",
    ]
    kind = recipe.partition("=")[2]
    if kind in ("sft", "dpo"):
        return [*words, f"buffer.trainer_input.experience_buffer.path={root / f'{kind}.jsonl'}"]
    given = "buffer.explorer_input"
    return [
        *words,
        f"{given}.taskset.path={root / 'tasks.jsonl'}",
        f"{given}.default_reward_fn_type=bench.loop_tasks:reward",
        "explorer.rollout_model.kv_cache_gb=0.5",
        f"model.min_response_tokens={ANSWER}",
    ]


def peaks_of(words: list[str], root: Path) -> dict[str, float]:
    """Bytes: of the fullest rank, of the engine, of all together."""
    log = root / "run.log"
    with open(log, "w", encoding="utf-8") as out:
        run = subprocess.Popen([sys.executable, "-m", "rft.train", *words], stdout=out, stderr=out)
        peaks: dict[int, tuple[str, float]] = {}
        most, deadline = 0.0, time.monotonic() + RUN_S
        try:
            while run.poll() is None:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the run takes longer than {RUN_S:.0f} s: {words}")
                most = max(most, sampled(run.pid, peaks))
                time.sleep(SAMPLE_S)
        finally:
            if run.poll() is None:
                run.terminate()
                run.wait(60)
    if run.returncode:
        said = log.read_text("utf-8")[-2000:]
        raise RuntimeError(f"a run ended with code {run.returncode}: {words}\n{said}")
    ranks = [size for part, size in peaks.values() if part == "rank"]
    count = sum(word.partition("=")[2] == "2" for word in words if "num_ranks" in word) + 1
    engine = [size for part, size in peaks.values() if part == "engine"]
    return {"rank": sum(ranks) / count, "engine": sum(engine), "all": most}


def sampled(launcher: int, peaks: dict[int, tuple[str, float]]) -> float:
    """Of all processes at this moment; `peaks` keeps the largest of each that has a part."""
    total = 0.0
    try:
        family = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        return 0.0
    for pid in (launcher, *(one.pid for one in family)):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            told = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
        except OSError:  # it has ended
            continue
        size = next((int(one.split()[1]) for one in told.splitlines() if one.startswith("Pss:")), 0)
        total += 1024.0 * size
        part = next((name for mark, name in PARTS.items() if mark in title), "")
        if part or pid in peaks:
            kept = peaks.get(pid, (part, 0.0))
            peaks[pid] = (part or kept[0], max(kept[1], 1024.0 * size))
    return total
