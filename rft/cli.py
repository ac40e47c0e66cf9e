"""The `rft` command. `rft train ...` is `python -m rft.train ...`; `rft ckpt ...` looks after checkpoints, `rft engines ...` after
the engines of a run that is under way, `rft report ...` and `rft trace ...` show what a run did."""

import sys

USAGE = """usage: rft train experiment=NAME [section.key=value ...]
       rft ckpt ls|show|verify|diff|tag|untag|export|import ...      (rft ckpt -h)
       rft engines RUN_DIR [--add N | --remove NAME]                 (rft engines -h)
       rft report RUN_DIR         one page about a run, also while it is under way
       rft trace RUN_DIR          its timeline, for Perfetto"""


def main() -> None:
    command, *rest = sys.argv[1:] or ["--help"]
    if command == "ckpt":
        from rft.tools.ckpt import main as ckpt

        sys.exit(ckpt(rest))
    if command == "report":
        from rft.tools.report import main as report

        sys.exit(report(rest))
    if command == "trace":
        from rft.tools.timeline import main as trace

        sys.exit(trace(rest))
    if command == "engines":
        from rft.tools.engines import main as engines

        sys.exit(engines(rest))
    if command != "train":
        sys.exit(USAGE if command in ("-h", "--help") else f"rft: unknown command `{command}`\n{USAGE}")
    sys.argv = ["rft train", *rest]
    from rft.train import main as train

    train()
