"""`rft workflows [NAME]`: what each workflow and each reward does, and the arguments that it reads.

In: the tables of `rft.rollout`, with the plug-ins of RFT_PLUGIN_DIRS. Out: text. Invariant: what is
said is the class's own docstring and `ARGUMENTS`, or the function's docstring and signature.
"""

import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from rft.ground import plugins
from rft.ground.errors import ConfigError
from rft.rollout import rewards, workflows

GIVEN = "response_tokens"  # by the workflow


def main(arguments: list[str]) -> int:
    if arguments and arguments[0].startswith("-"):
        print("usage: rft workflows [NAME]")
        return 0 if arguments[0] in ("-h", "--help") else 2
    try:
        plugins.load()
        print("\n".join(lines(set(arguments))))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def lines(names: set[str]) -> Iterator[str]:
    known = {*workflows.WORKFLOWS, *rewards.REWARDS}
    if strange := sorted(names - known):
        raise ConfigError(f"no workflow or reward {strange[0]!r}: there are {', '.join(known)}")
    for title, table, arguments in (
        ("workflows (default_workflow_type, workflow_args)", workflows, of_workflow),
        ("rewards (default_reward_fn_type, reward_fn_args)", rewards, of_reward),
    ):
        entries = workflows.WORKFLOWS if table is workflows else rewards.REWARDS
        chosen = [name for name in entries if not names or name in names]
        if chosen:
            yield f"{title}:"
        for name in chosen:
            what = table.resolve(name)
            yield f"  {name}"
            yield textwrap.fill(said(what), 96, initial_indent="    ", subsequent_indent="    ")
            yield from (f"      {line}" for line in arguments(what))


def said(what: Any) -> str:
    first = (inspect.getdoc(what) or "").partition("\n\n")[0]
    return " ".join(first.split()) or "(says nothing)"


def of_workflow(what: Any) -> Iterator[str]:
    for name, kind in getattr(what, "ARGUMENTS", {}).items():
        needed = " (needed)" if name in getattr(what, "REQUIRED", ()) else ""
        yield f"{name}: {getattr(kind, '__name__', kind)}{needed}"


def of_reward(what: Any) -> Iterator[str]:
    for one in inspect.signature(what).parameters.values():
        if one.default is not one.empty and one.name != GIVEN:
            shown = " ".join(repr(one.default).split())
            yield f"{one.name} = {shown if len(shown) < 60 else '...'}"
