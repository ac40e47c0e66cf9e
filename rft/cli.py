"""The `rft` command:

`rft train ...` is `python -m rft.train ...`; every other word is a tool of `rft.tools`.
"""

import importlib
import sys

from rft.ground.shipped import shipped

USAGE = f"""usage: rft train experiment=NAME [section.key=value ...]
       rft train --config FILE [section.key=value ...]
       rft train --verl FILE | key=value ...                   veRL's own words: docs/verl.md
       rft config [--all] [experiment=NAME | --config FILE] [section.key=value ...]
       rft config --explain KEY                                what a key takes and means
       rft workflows [NAME]
            what each workflow and reward does, and its arguments
       rft doctor [experiment=NAME | --config FILE] [section.key=value ...]
       rft studio [--port N]
            a page on which a config is put together
       rft debug [--set NAME] [--row N] experiment=NAME ...
            one task on a real engine, every token of it
       rft view JOB_DIR | FILE.jsonl
            its experiences in the browser, token by token
       rft ckpt ls|show|verify|diff|tag|untag|export|import ... (rft ckpt -h)
       rft buffer dump RUN_DIR -o FILE.jsonl                   (rft buffer dump -h)
       rft engines RUN_DIR [--add N | --remove NAME]           (rft engines -h)
       rft environment check|rows NAME [ID] ...                (rft environment -h)
       rft sweep-report SWEEP_DIR                              (rft sweep-report -h)
       rft report RUN_DIR
            one page about a run, also while it is under way
       rft trace RUN_DIR                                       its timeline, for Perfetto
scripts for torchrun, Slurm, Ray and Kubernetes: {shipped("launch")}"""
TOOLS = {  # word: module of rft.tools
    "buffer": "buffer",
    "ckpt": "ckpt",
    "config": "config",
    "doctor": "doctor",
    "debug": "debug",
    "engines": "engines",
    "environment": "environment",
    "sweep-report": "sweep_report",
    "report": "report",
    "studio": "studio",
    "trace": "timeline",
    "view": "view",
    "workflows": "workflows",
}


def main() -> None:
    command, *rest = sys.argv[1:] or ["--help"]
    if command in TOOLS:
        sys.exit(importlib.import_module(f"rft.tools.{TOOLS[command]}").main(rest))
    if command != "train":
        sys.exit(
            USAGE if command in ("-h", "--help") else f"rft: unknown command `{command}`\n{USAGE}"
        )
    sys.argv = ["rft train", *rest]
    from rft.train import main as train

    train()
