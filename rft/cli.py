"""The `rft` command. `rft train ...` is `python -m rft.train ...`."""

import sys

USAGE = "usage: rft train experiment=NAME [section.key=value ...]"


def main() -> None:
    command, *rest = sys.argv[1:] or ["--help"]
    if command != "train":
        sys.exit(USAGE if command in ("-h", "--help") else f"rft: unknown command `{command}`\n{USAGE}")
    sys.argv = ["rft train", *rest]
    from rft.train import main as train

    train()
