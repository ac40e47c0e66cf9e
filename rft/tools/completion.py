"""`rft completion bash|zsh`: a script by which the shell completes `rft`.

In: a shell's name. Out: the script on stdout, with everything that it offers in it: commands, their
sub-commands and options (those that `rft COMMAND --help` names), and, where a command takes the
words of `rft train`, names of the config groups, keys, and the values of keys that take few words.
Invariant: while one types, no Python is started.

    eval "$(rft completion bash)"              in ~/.bashrc; of zsh: in ~/.zshrc, after compinit
"""

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

from rft import config as configs
from rft.config.compose import CONFIG_DIR
from rft.config.keys import tables
from rft.tools import COMMANDS

TAKES_WORDS = ("train", "config", "doctor", "plan", "debug")  # experiment=..., section.key=...
OF_TRAIN = ("--config", "--verl", "-m", "--help")
OPTION = re.compile(r"^  +(?:-\w(?: [\w.]+)?, )?(--[a-z][\w-]*)", re.MULTILINE)
WORD = re.compile(r"^    ([a-z][\w-]*)(?:  |$)", re.MULTILINE)  # a sub-command, by argparse
GROUPS = ("experiment", "size", "algorithm", "monitor", "debug", "sweep")
SCRIPT = """# What {shell} completes `rft` with; made by `rft completion {shell}`.
{begin}_rft() {{
    local line="${{COMP_LINE:0:$COMP_POINT}}" word before stem="" found one
    word="${{line##* }}" before=" rft ${{line#* }}"
    before="${{before% *}} "
    case "$before" in
        *" --config ") found="" ;;
{cases}
        *) found="" ;;
    esac
    case "$word" in
        *=*) stem="${{word%=*}}=" ;;
    esac
    case "$word" in
{values}
    esac
    COMPREPLY=()
    for one in $found; do
        [[ $one != "$word"* ]] || COMPREPLY+=("$one")
    done
    # bash itself completes paths where there is nothing else, with quotes and slashes
    if [[ -z ${{BASH_VERSION:-}} && ${{#COMPREPLY[@]}} -eq 0 ]]; then
        for one in "${{word##*=}}"*; do
            [[ ! -e $one ]] || COMPREPLY+=("$stem$one")
        done
    fi
    # bash has cut the word at its last `=`; behind a key more is to come
    [[ -z ${{BASH_VERSION:-}} ]] || COMPREPLY=("${{COMPREPLY[@]#"$stem"}}")
    [[ "${{COMPREPLY[*]}}" != *= ]] || compopt -o nospace 2>/dev/null || true
}}
complete -o default -F _rft rft
"""
BEGIN = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft completion",
        description="Print what a shell completes `rft` with. "
        'In ~/.bashrc or ~/.zshrc: eval "$(rft completion bash)"',
    )
    parser.add_argument("shell", choices=[*BEGIN])
    print(script(parser.parse_args(argv).shell), end="")
    return 0


def script(shell: str) -> str:
    offered = dict(cases())
    # of two patterns that fit, the shell takes the first: a command's own stands before all others
    lines = [
        f'        *" {where} "*) found="{" ".join(found)}" ;;' for where, found in offered.items()
    ]
    values = [f'        {key}=*) found="{" ".join(found)}" ;;' for key, found in valued()]
    return SCRIPT.format(
        shell=shell, begin=BEGIN[shell], cases="\n".join(lines), values="\n".join(values)
    )


def cases() -> Iterator[tuple[str, list[str]]]:
    """(what stands before the word, what it may be); the longest first."""
    known = {word: module for group in COMMANDS.values() for word, (module, _, _) in group.items()}
    words = [*(f"{group}=" for group, _ in groups()), *(f"{key}=" for key in configs.leaf_keys())]
    for word, module in known.items():
        said = helped(module, []) if module else " ".join(OF_TRAIN)
        options = [*OF_TRAIN] if not module else [*dict.fromkeys(OPTION.findall(said))]
        inner = WORD.findall(said)
        for name in inner:
            more = OPTION.findall(helped(module, [name]))
            yield f"rft {word} {name}", [*dict.fromkeys(more)]
        more = words if word in TAKES_WORDS else [*BEGIN] if word == "completion" else []
        yield f"rft {word}", [*inner, *options, *more]
    yield "rft", [*known, "--help", "--version"]


def helped(module: str, words: list[str]) -> str:
    """What the tool says of itself."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        importlib.import_module(f"rft.tools.{module}").main([*words, "--help"])
    return said.getvalue()


def groups() -> Iterator[tuple[str, list[str]]]:
    """Config groups and the names in them."""
    for name in GROUPS:
        yield name, sorted(path.stem for path in (Path(CONFIG_DIR) / name).glob("*.yaml"))


def valued() -> Iterator[tuple[str, list[str]]]:
    """(key, its words), each with the key before it."""
    for name, found in groups():
        yield name, [f"{name}={one}" for one in found]
    for _, table in tables():
        for one in table:
            words = ("true", "false") if one.type in ("bool", "Bool") else one.choices
            if words:
                yield one.key, [f"{one.key}={word}" for word in words]
