"""The `rft` command: a word, and what follows it.

In: the command line. Out: the exit code of the tool that the word names (0 for a question about
itself, 2 for a word that there is not, 141 where nobody reads the answer to its end). `rft train
...` is `python -m rft.train ...`; every other word is a tool of `rft.tools`. Invariant: nothing is
imported before its word is given, so that `rft --help` answers on a Python that has none of the
packages.
"""

import difflib
import importlib
import os
import sys
from typing import Any

from rft import __version__
from rft.ground.shipped import shipped
from rft.tools import COMMANDS

TOOLS = {  # word: module of rft.tools
    word: module for group in COMMANDS.values() for word, (module, _, _) in group.items() if module
}
CLOSED = 141  # as a shell says of a program that SIGPIPE has ended
MORE = f"""`rft COMMAND --help` has all of one. Other ways to say what is run:
  rft train --config FILE             a file of keys, also one of Trinity-RFT: docs/trinity.md
  rft train --verl key=value ...      veRL's own words: docs/verl.md
  rft train -m key=1,2 ...            a sweep: docs/sweep.md
  rft config --explain KEY            what a key takes and means, and its default here
scripts for torchrun, Slurm, Ray and Kubernetes: {shipped("launch")}"""


def usage() -> str:
    lines = ["usage: rft COMMAND ...", ""]
    for title, group in COMMANDS.items():
        lines.append(f"{title}:")
        for word, (_, follows, does) in group.items():
            lines += (
                [f"  {f'rft {word} {follows}':<50}  {does}"]
                if len(follows) < 40
                else [
                    f"  rft {word} {follows}",
                    f"{'':<54}{does}",
                ]
            )
        lines.append("")
    return "\n".join(lines) + MORE


USAGE = usage()


def main() -> None:
    command, *rest = sys.argv[1:] or [""]
    if command == "train":
        sys.argv = ["rft train", *rest]
        loaded("rft.train", command).main()
        return
    try:
        try:
            code = answer(command, rest)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # `rft ... | head`: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = CLOSED
    sys.exit(code)


def answer(command: str, rest: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(f"rft {__version__}")
        return 0
    if command in TOOLS:
        code: int = loaded(f"rft.tools.{TOOLS[command]}", command).main(rest)
        return code
    print(refused(command), file=sys.stderr)
    return 2


def refused(command: str) -> str:
    if not command:
        return USAGE
    near = difflib.get_close_matches(command, ["train", *TOOLS], n=1)
    hint = f"did you mean `rft {near[0]}`? " if near else ""
    return f"rft: unknown command `{command}`; {hint}`rft --help` has them all"


def loaded(module: str, command: str) -> Any:
    """The module; where a package is not installed, what to do is said in a line."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "rft"):
            raise
        sys.exit(
            f"rft {command} wants the package `{package}`, and {sys.executable} has none: "
            "`make setup` in a checkout, or `pip install rft`, installs what rft needs"
        )
