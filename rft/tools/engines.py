"""`rft engines`: which engines a run that is under way has; add one, remove one.

In: the directory of a run, or of one of its stages. Out: a table, or what was begun; exit code 1
when the run refuses, 2 when nothing answers there or the input is wrong. Everything is done by the
run's supervisor (`rft.run.control_socket`).
"""

import argparse
import sys
from typing import Any

from rft.run.control_socket import NobodyAnswers, ask
from rft.tools.places import InputError, find_control
from rft.tools.tables import table

# the supervisor asks its engines, those that load do not answer it, and another caller may come
# first
ANSWER_S = 30.0
COLUMNS = ("name", "state", "version", "restarts", "requests", "tokens", "active")
MOST = 64  # engines added at once: more is a slip of the finger


def main(arguments: list[str]) -> int:
    """Exit code: 0 good, 1 refused by the run, 2 wrong input or nobody there."""
    options = _parser().parse_args(arguments)
    try:
        reply = ask(find_control(options.run_dir), question(options), ANSWER_S)
    except (InputError, NobodyAnswers, TimeoutError, PermissionError) as error:
        why = f"no answer in {ANSWER_S:g} s" if isinstance(error, TimeoutError) else error
        print(f"rft engines: {why}", file=sys.stderr)
        return 2
    if "error" in reply:
        print(f"rft engines: {reply['error']}", file=sys.stderr)
        return 1
    if "engines" in reply:
        print(table([_row(engine) for engine in reply["engines"]]))
    else:
        print("\n".join(begun(options, reply["begun"])))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rft engines",
        description=(
            "The engines of a run that is under way, with `python -m rft.train` or under torchrun."
        ),
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", help="of a run, or of the stage that is under way"
    )
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--add", metavar="N", type=int, help="start so many more")
    change.add_argument(
        "--remove", metavar="NAME", help="let this one finish what it has, and end it"
    )
    return parser


def question(options: argparse.Namespace) -> dict[str, Any]:
    if options.add is not None:
        if not 1 <= options.add <= MOST:
            raise InputError(f"--add {options.add}: give a number from 1 to {MOST}")
        return {"add": options.add}
    return {"remove": options.remove} if options.remove is not None else {}


def _row(engine: dict[str, Any]) -> dict[str, Any]:
    return {column: engine.get(column, "-") for column in COLUMNS} | {
        "last end": engine.get("poisoned") or engine["cause"]
    }


def begun(options: argparse.Namespace, names: list[str]) -> list[str]:
    if options.add is not None:
        return [
            f"{name}: starting; it gets requests when it holds the run's version" for name in names
        ]
    return [f"{name}: leaving; it ends when its requests are finished" for name in names]
