"""The quickstart's own two functions: what it needs before the run, and what it shows after it.

`prepare` writes a tiny random model and disjoint arithmetic files into the run's `assets/`.
`finish` reads the stages' metrics, prints a table, draws the curves and ends with one line of JSON.
"""

import json
import time
from pathlib import Path
from statistics import fmean as mean

from rft import config as configs
from rft.config import Config
from rft.ground import durable
from rft.monitor.run_record import RunRecord
from rft.run.stages import result
from rft.tools import curves
from rft.tools.tables import table
from rft.tools.toy import write_arithmetic, write_model

EVAL_SET = "held_out"
NUM_EVAL = 256


def prepare(config: Config) -> None:
    """Write model and tasks for `config.seed` unless an earlier attempt did; remember when the run
    first started.
    """
    _prepare(config, "qwen3", layers=6, ffn=512)


def prepare_experts(config: Config) -> None:
    """The same with a mixture of experts."""
    _prepare(config, "qwen3_moe", layers=4, ffn=512, experts=8, experts_per_token=2)


def _prepare(config: Config, family: str, **sizes: int) -> None:
    assets = Path(config.model.model_path).parent
    write_model(
        config.model.model_path, family, seed=config.seed, hidden=192, heads=6, kv_heads=2, **sizes
    )
    write_arithmetic(assets, seed=config.seed, num_eval=NUM_EVAL)
    started = assets / "started"
    if not started.exists():
        started.write_text(str(time.time()), encoding="utf-8")


def finish(stages: list[Config]) -> None:
    """Table, picture, JSON line.

    `seconds` counts from the first attempt's start, and stands still once written.
    """
    root = configs.job_dir(stages[0]).parent
    warmup, tuned = stages[0], stages[-1]
    records = [RunRecord(configs.job_dir(stage)) for stage in (warmup, tuned)]
    scores = dict(records[-1].series(f"eval/{EVAL_SET}/accuracy"))
    first = scores.pop(0, None)  # of what the warm-up left; None: nothing was evaluated there
    last = scores.get(max(scores, default=0))
    names = [str(stage.stage_name) for stage in (warmup, tuned)]
    print(table(table_rows((warmup, records[0], first), (tuned, records[1], last)), ruled=True))
    outcome = {
        "eval_sft": None if first is None else round(first, 4),
        "eval_rft": None if last is None else round(last, 4),
    }
    close(root, "quickstart", outcome, list(zip(names, records, strict=True)), tuned)


def close(
    root: Path,
    recipe: str,
    outcome: dict[str, float | None],
    records: list[tuple[str, RunRecord]],
    tuned: Config,
) -> None:
    """What a recipe ends with: its picture, where its model is, and `outcome` in one line of JSON
    with the seconds since its first attempt, as it was told at its first end.

    A disk that is full costs the two files, and neither the lines nor a good end.
    """
    summary, picture = root / f"{recipe}.json", root / "curves.png"
    try:
        curves.draw(records, picture)
        print(f"curves   {picture}")
    except OSError as error:
        print(f"curves   not drawn: {error}")
    print(f"model    {result(tuned).huggingface}   (transformers and vLLM load it)")
    if summary.exists():
        print(summary.read_text(encoding="utf-8"), flush=True)
        return
    started = float((root / "assets" / "started").read_text(encoding="utf-8"))
    said = json.dumps({recipe: outcome | {"seconds": round(time.time() - started, 1)}})
    try:
        durable.put(summary, said)
    except OSError as error:
        print(f"{summary} is not written: {error}")
    print(said, flush=True)


def table_rows(*stages: tuple[Config, RunRecord, float | None]) -> list[dict[str, str]]:
    """Return a row per stage: steps, how they were spent, and accuracy on the held-out tasks after
    it.
    """
    return [
        {
            "stage": str(config.stage_name),
            "algorithm": config.algorithm.algorithm_type,
            "steps": str(record.timed[-1]["step"]),
            "seconds": f"{record.seconds:.0f}",
            "tokens/s": f"{mean(row['tokens_per_s'] for row in record.timed):,.0f}",
            f"accuracy on {NUM_EVAL} held-out tasks": "-" if score is None else f"{score:.3f}",
        }
        for config, record, score in stages
    ]
