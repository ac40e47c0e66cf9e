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

from rft.ground.errors import ConfigError, unreadable

VARIABLE = "RFT_PLUGIN_DIRS"
TABLES = {  # kind: where its table lies; imported with the first of its kind
    "workflow": "rft.rollout.workflows:WORKFLOWS",
    "reward": "rft.rollout.rewards:REWARDS",
    "advantage": "rft.algorithm.advantages:ADVANTAGES",
    "token_advantage": "rft.algorithm.token_advantages:TOKEN_ADVANTAGES",
    "policy_loss": "rft.algorithm.losses:LOSSES",
    "algorithm": "rft.algorithm:ALGORITHMS",
    "kl": "rft.algorithm.ratios:ESTIMATORS",
    "sample_strategy": "rft.algorithm.strategies:SAMPLE_STRATEGIES",
    "monitor": "rft.monitor.sinks:SERVICES",
    "selector": "rft.data.selectors:SELECTORS",
    "priority": "rft.buffer.selection:PRIORITIES",
    "row_format": "rft.data.formats:ROW_FORMATS",
    "experience_operator": "rft.extras.pipeline.operators:EXPERIENCE_OPERATORS",
    "task_operator": "rft.extras.pipeline.operators:TASK_OPERATORS",
}
RECORDS = {
    "advantage": "Advantage",
    "token_advantage": "TokenAdvantage",
    "selector": "Selector",
    "row_format": "RowFormat",
}  # beside the table; what a function becomes there
DATA = {"algorithm": "Algorithm"}  # beside the table; what an entry has to be
METHODS = {  # of a class, that it must have
    "monitor": ("log", "table", "histograms", "close"),
    "priority": ("priority", "stays"),
    "experience_operator": ("process",),
    "task_operator": ("process",),
}
_origins: dict[tuple[str, str], str] = {}  # the files of what was registered
T = TypeVar("T")


def register(kind: str, name: str) -> Callable[[T], T]:
    """`@register("reward", "short")` above a function or a class, or
    called with a record of the table: that name in a config means it.
    """
    if kind not in TABLES:
        raise ConfigError(
            f"a plug-in registers {name!r} as {kind!r}: known are {', '.join(TABLES)}"
        )

    origin = str(sys._getframe(1).f_globals.get("__file__"))

    def enter(what: T) -> T:
        table, made = table_of(kind), entry(kind, name, what)
        known = table.get(name)
        if known is not None and _place(known) != _place(made):
            there = _origins.get((kind, name), TABLES[kind].partition(":")[0])
            raise ConfigError(
                f"{kind} {name!r} is registered twice, in {there} and in {origin}: give one "
                "another name"
            )
        table[name], _origins[kind, name] = made, origin
        return what

    return enter


def table_of(kind: str) -> dict[str, Any]:
    module, _, attribute = TABLES[kind].partition(":")
    table: dict[str, Any] = getattr(importlib.import_module(module), attribute)
    return table


def entry(kind: str, name: str, what: Any) -> Any:
    """What the table holds: a record with defaults around a plain
    function, where its entries are records.
    """
    wanted = RECORDS.get(kind) or DATA.get(kind)
    record = wanted and getattr(importlib.import_module(TABLES[kind].partition(":")[0]), wanted)
    if record and isinstance(what, record):
        return what
    if kind in DATA or not callable(what):
        raise ConfigError(
            f"{kind} {name!r} is registered as {type(what).__name__}: register "
            f"{wanted if kind in DATA else 'a function or a class'}"
        )
    lacking = [one for one in METHODS.get(kind, ()) if not hasattr(what, one)]
    if isinstance(what, type) and lacking:
        raise ConfigError(f"{kind} {name!r} has no method {lacking[0]!r}: give it one")
    return record(what) if record else what


def load(directories: Iterable[str] = ()) -> list[str]:
    """Import the plug-ins of these directories, or of RFT_PLUGIN_DIRS; the processes started from
    here load the same.
    """
    paths = list(
        dict.fromkeys(str(Path(one).expanduser().resolve()) for one in directories or named())
    )
    for directory in map(Path, paths):
        if said := unreadable(directory):
            raise ConfigError(f"plugin_dirs: {said}, or correct {VARIABLE}")
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
    if not callable(what):
        return type(what).__module__, repr(what)
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
