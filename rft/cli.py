"""The `rft` command. `rft train ...` is `python -m rft.train ...`; `rft ckpt ...` looks after checkpoints, `rft engines ...` after
the engines of a run that is under way, `rft sweep-report ...` tells how a sweep stands."""

import sys

USAGE = """usage: rft train experiment=NAME [section.key=value ...]
       rft ckpt ls|show|verify|diff|tag|untag|export|import ...      (rft ckpt -h)
       rft engines RUN_DIR [--add N | --remove NAME]                 (rft engines -h)
       rft sweep-report SWEEP_DIR                                    (rft sweep-report -h)"""


def main() -> None:
    command, *rest = sys.argv[1:] or ["--help"]
    if command == "ckpt":
        from rft.tools.ckpt import main as ckpt

        sys.exit(ckpt(rest))
    if command == "engines":
        from rft.tools.engines import main as engines

        sys.exit(engines(rest))
    if command == "sweep-report":
        from rft.tools.sweep_report import main as sweep_report

        sys.exit(sweep_report(rest))
    if command != "train":
        sys.exit(USAGE if command in ("-h", "--help") else f"rft: unknown command `{command}`\n{USAGE}")
    sys.argv = ["rft train", *rest]
    from rft.train import main as train

    train()
