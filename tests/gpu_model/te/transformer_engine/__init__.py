"""A stand-in for Transformer Engine 2.20.2 on a CPU: its modules, names and parameters as its wheel
declares them (`te.tsv`, written by `te_record.py`), computed with torch by `layers.py`,
`attention.py` and `functions.py`.

On the path only of tests that want to see what rft and megatron make of Transformer Engine. A name
that is recorded and not computed here says so when it is used. Not told by it: kernels, their
precision, and which of them TE takes for which type (real TE has none for fp32 attention under
context parallelism).
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "te.tsv"
VERSION = "2.20.2"


def _missing(module: str, name: str, is_class: bool) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{module}.{name} is not computed by the stand-in in tests")

    return type(name, (), {"__init__": refuse, "__module__": module}) if is_class else refuse


def _modules() -> dict[str, types.ModuleType]:
    rows = [line.split("\t") for line in RECORD.read_text(encoding="utf-8").splitlines()]
    found: dict[str, types.ModuleType] = {}
    for module, name, what in rows:
        if not name and what == "module":
            parts = module.split(".")
            for depth in range(2, len(parts) + 1):
                full = ".".join(parts[:depth])
                found.setdefault(full, types.ModuleType(full)).__path__ = []
    for module, name, what in rows:
        if module in found and name and "." not in name and what not in ("absent", "module"):
            setattr(found[module], name, _missing(module, name, what.startswith("class")))
    return found


def _install() -> None:
    made = _modules()
    sys.modules.update(made)
    for full, module in made.items():
        parent, _, name = full.rpartition(".")
        setattr(sys.modules[parent], name, module)
    for file in ("functions", "layers", "attention"):
        for place, objects in importlib.import_module(f"{__name__}.{file}").COMPUTED.items():
            for name, value in objects.items():
                setattr(made[f"{__name__}.{place}"], name, value)


__version__ = VERSION
_install()
