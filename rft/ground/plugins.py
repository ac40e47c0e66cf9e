"""Names for the user's own parts: tables of what rft knows, files that add to them, and look-ups
that name the nearest.

    RFT_PLUGIN_DIRS, plugin_dirs ── load ──► every *.py there (but _*.py) ── @register
            ──► WORKFLOWS, REWARDS, ADVANTAGES, ...

In: directories, and decorators in their files. Out: entries of the tables, which are plain dicts,
in every process that looks names up: supervisor, trainer ranks, explorer, reward workers.
Invariant: a name means one thing; a second registration of it, and a file that cannot be imported,
is refused with its name, and nothing is copied or only warned of (W45).
"""

import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rft.ground.errors import ConfigError

VARIABLE = "RFT_PLUGIN_DIRS"
TABLES = {  # kind: where its table lies; imported with the first of its kind
    "workflow": "rft.rollout.workflows:WORKFLOWS",
    "reward": "rft.rollout.rewards:REWARDS",
    "advantage": "rft.algorithm.advantages:ADVANTAGES",
    "token_advantage": "rft.algorithm.token_advantages:TOKEN_ADVANTAGES",
    "policy_loss": "rft.algorithm.losses:LOSSES",
    "experience_operator": "rft.extras.pipeline.operators:EXPERIENCE_OPERATORS",
    "task_operator": "rft.extras.pipeline.operators:TASK_OPERATORS",
}
RECORDS = {
    "advantage": "Advantage",
    "token_advantage": "TokenAdvantage",
}  # beside the table; what a function becomes there
T = TypeVar("T")


def register(kind: str, name: str) -> Callable[[T], T]:
    """`@register("reward", "short")` above a function or a
    class: that name in a config means it.
    """
    if kind not in TABLES:
        raise ConfigError(
            f"a plug-in registers {name!r} as {kind!r}: known are {', '.join(TABLES)}"
        )

    def enter(what: T) -> T:
        table = table_of(kind)
        known = table.get(name)
        if known is not None and _place(known) != _place(what):
            raise ConfigError(
                f"{kind} {name!r} is registered twice, in {_place(known)[0]} and in "
                f"{_place(what)[0]}: give one another name"
            )
        table[name] = entry(kind, what)
        return what

    return enter


def table_of(kind: str) -> dict[str, Any]:
    module, _, attribute = TABLES[kind].partition(":")
    table: dict[str, Any] = getattr(importlib.import_module(module), attribute)
    return table


def entry(kind: str, what: Any) -> Any:
    """What the table holds: a record with defaults around a plain
    function, where its entries are records.
    """
    if kind not in RECORDS:
        return what
    record = getattr(importlib.import_module(TABLES[kind].partition(":")[0]), RECORDS[kind])
    return what if isinstance(what, record) else record(what)


def load(directories: Iterable[str] = ()) -> list[str]:
    """Import the plug-ins of these directories, or of RFT_PLUGIN_DIRS; the processes started from
    here load the same.
    """
    paths = list(
        dict.fromkeys(str(Path(one).expanduser().resolve()) for one in directories or named())
    )
    for directory in map(Path, paths):
        if not directory.is_dir():
            raise ConfigError(
                f"plugin_dirs: {directory} is no directory; correct it, or {VARIABLE}"
            )
        for file in sorted(directory.glob("*.py")):
            if not file.name.startswith("_"):
                _import(file)
    if paths:
        os.environ[VARIABLE] = os.pathsep.join(paths)
    return paths


def named() -> list[str]:
    return [one for one in os.environ.get(VARIABLE, "").split(os.pathsep) if one]


def _import(file: Path) -> None:
    try:
        load_file(file)
    except ConfigError:
        raise
    except Exception as error:  # a user's file may raise anything
        raise ConfigError(
            f"plug-in {file} cannot be imported: {type(error).__name__}: {error}; correct it, or "
            "rename it _*.py"
        ) from error


def load_file(path: Path) -> ModuleType:
    """The module of a file, imported once."""
    name = "rft_user_" + re.sub(r"\W", "_", str(path.resolve()))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path.resolve()}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a half-executed module is not found by a second try
        raise
    return module


def is_own(name: str) -> bool:
    """Whether `name` is the user's own function or class, by its
    import path, which `lookup` imports.
    """
    return ":" in name


def lookup(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """`table[name]`, or what the import path `name` points to; ConfigError with the nearest name or
    the reason.

    An entry that is a text is such a path itself.
    """
    entry = table.get(name)
    if entry is not None and not isinstance(entry, str):
        return entry
    name = entry or name
    if not is_own(name):
        nearest = difflib.get_close_matches(name, table, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(
            f"unknown {kind} {name!r}: {hint}known are {', '.join(table)}; your own is "
            "'package.module:function' or 'path/to/file.py:function'"
        )
    place, _, attribute = name.rpartition(":")
    try:
        module = load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise ConfigError(f"{kind} {name!r}: cannot import {place!r}: {error}") from error
    target = getattr(module, attribute, None)
    if not callable(target):
        raise ConfigError(f"{kind} {name!r}: {place!r} has no function {attribute!r}")
    return target


def _place(what: Any) -> tuple[str, str]:
    """Where a function or class was written; the same file imported again says the same."""
    what = getattr(what, "function", what)  # of a record
    module = sys.modules.get(what.__module__)
    code = getattr(what, "__code__", None)
    file = code.co_filename if code else getattr(module, "__file__", None)
    return str(file or what.__module__), what.__qualname__


def imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"prepare/finish={path}: {error}; give an importable `module:function`"
        ) from error
