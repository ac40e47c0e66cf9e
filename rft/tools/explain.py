"""What `rft config --explain KEY` says of a key, or, shorter, of every key of a section.

In: a key, and the config that it is asked about, composed (of no words: rft's defaults). Out: type,
bounds, default and meaning out of the schema; what this machine makes of the key and why; its names
and defaults in Trinity-RFT and veRL, out of the tables that read their configs. Invariants: no
model and no data is looked at; what is not known is not said.
"""

import copy
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig

from rft import config as configs
from rft.config import (
    Config,
    ConfigError,
    choices,
    trinity,
    trinity_defaults,
    verl,
    verl_newer,
    verl_run,
)
from rft.config.foreign import UNSET
from rft.config.keys import Setting, setting, shown, tables

MANY = 3  # keys that one was perhaps meant to be


class Meaning(NamedTuple):
    given: Config
    filled: Config


def explained(key: str, raw: DictConfig) -> str:
    found = [one for _, table in tables() for one in table if f"{one.key}.".startswith(f"{key}.")]
    if not found:
        raise ConfigError(unknown(key))
    if (one := setting(key)) is None:
        return "\n".join(of_schema(one) for one in found)
    try:
        found_here = stages(raw)
    except ModuleNotFoundError as error:  # rft is installed without what a run needs
        said = in_full(one, [])
        return f"{said}\n    here: cannot be said, {sys.executable} has no package `{error.name}`"
    return in_full(one, found_here)


def in_full(one: Setting, stages: Sequence[Meaning]) -> str:
    return "\n    ".join((of_schema(one), *here(one, stages), *elsewhere(one.key)))


def of_schema(one: Setting) -> str:
    default = "must be set" if one.default == "required" else f"default {one.default or 'null'}"
    return f"{one.key}: {one.takes}; {default}\n    {one.meaning}"


def unknown(key: str) -> str:
    """The key that another system calls so, or those that are spelt alike."""
    theirs = verl_run.EVERY.get(verl_newer.name_of(key))
    if theirs is not None:
        return f"{key} is a key of veRL: {theirs.instead}"
    said = configs.unknown(key)
    keys = list(configs.leaf_keys())
    near = difflib.get_close_matches(key, keys, n=MANY, cutoff=0.6)
    last = key.rpartition(".")[2]
    near += [one for one in keys if one.rpartition(".")[2] == last and one not in near]
    others = [one for one in near if f"`{one}`" not in said]
    return f"{said} Others like it: {', '.join(others[:MANY])}" if others else said


# --- on this machine ------------------------------------------------------------------------------


def stages(raw: DictConfig) -> list[Meaning]:
    """What was composed, as given and as this machine fills it in."""
    from rft.preflight.fill import fill_config
    from rft.preflight.rules import Refusals

    found = []
    for draft in configs.stage_drafts(raw):
        given = copy.deepcopy(draft.config)
        fill_config(draft.config, Refusals(), asks_ray=False)
        found.append(Meaning(given, draft.config))
    return found


def here(one: Setting, stages: Sequence[Meaning]) -> Iterator[str]:
    """What the key becomes in a run of these words that starts on this machine."""
    for given, filled in stages:
        where = f"here, in stage {given.stage_name}" if given.stage_name else "here"
        said, value = shown(of(given, one.key)), of(filled, one.key)
        why = next((c.why for c in choices.explained(filled) if c.key == one.key), "")
        if said != one.default:
            yield f"{where}: {said or 'null'}, which these words say"
        elif value is None:
            yield f"{where}: not set, and nothing sets it"
        elif why:
            yield f"{where}: {shown(value)} ({filled.device}): {why}"
        elif shown(value) != one.default:
            yield f"{where}: {shown(value)}, by the other keys and this machine"


def of(config: Config, key: str) -> Any:
    """The key's value; None where its whole section is not set."""
    node: Any = config
    for word in key.split("."):
        node = getattr(node, word, None)
    return node


# --- in other systems -----------------------------------------------------------------------------


def elsewhere(key: str) -> Iterator[str]:
    if names := [*trinity_names(key)]:
        yield f"Trinity-RFT {trinity_defaults.VERSION}: {', '.join(names)}{trinity_default(key)}"
    alone, joint = verl_names(key)
    if alone:
        yield f"veRL: {', '.join(alone)}"
    if joint:
        yield f"veRL, these together: {', '.join(joint)}"


def trinity_names(key: str) -> Iterator[str]:
    if key in trinity.SHARED:
        yield "the same name and meaning"
    yield from (name for name, other in trinity.KEYS.items() if other.to == key)


def trinity_default(key: str) -> str:
    """Where it is another than rft's."""
    if (other := trinity_defaults.DEFAULTS.get(key)) is not None:
        return f"; default there {other.shown or plain(other.theirs)}: {other.why}"
    if key in trinity_defaults.KEPT:
        theirs, ours, why = trinity_defaults.KEPT[key]
        return f"; default there {theirs}, and {ours} here: {why}"
    return ""


def verl_names(key: str) -> tuple[list[str], list[str]]:
    """Keys that say it alone, and those that say it with others; with veRL's default, where the
    tables have it.
    """
    alone, joint = [], []
    for name, other in verl_run.EVERY.items():
        if key in (other.to or "").split(", "):
            theirs = verl_run.DEFAULTS.get(name, UNSET)
            said = name if theirs is UNSET else f"{name} (default there {plain(theirs)})"
            (joint if other.convert is verl.in_joint else alone).append(said)
    return alone, joint


def plain(value: Any) -> str:
    return shown(value) or "null"
