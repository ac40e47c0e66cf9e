"""Who may import whom, and what must stay light: the arrows of docs/architecture.md."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rft"
# From the ground up: a package may import those on floors below its own, and, on its own floor,
# those before it.
FLOORS = (
    ("ground",),
    ("config",),
    ("monitor", "data", "algorithm", "buffer"),
    ("megatron",),
    ("rollout",),
    ("checkpoint",),
    ("agents", "sync"),
    ("trainer",),
    ("extras",),
    ("run",),
    ("preflight",),
    ("train",),
    ("tools",),
    ("cli",),
)
BESIDE = ({"megatron", "rollout", "checkpoint"}, {"agents", "sync"})  # never each other
ORDER = [package for floor in FLOORS for package in floor]


def may_import(package: str) -> set[str]:
    below = set(ORDER[: ORDER.index(package) + 1])
    return below - set().union(*(group - {package} for group in BESIDE if package in group))


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


MODULES = {module_of(path): path for path in files()}


def imports_of(path: Path) -> set[str]:
    """Modules of rft that a file imports, wherever the import stands: at its top, in a function, or
    for types only.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rft":
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in named}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("rft.")}
    return found - {"rft"}


def test_imports_follow_the_arrows() -> None:
    against = {}
    for path in files():
        package = module_of(path).split(".")[1]
        assert package in ORDER, f"{path} has no floor"
        allowed = may_import(package)
        if strange := {name for name in imports_of(path) if name.split(".")[1] not in allowed}:
            against[str(path)] = sorted(strange)
    assert not against, "these may not import that"


def test_no_module_imports_itself_through_others() -> None:
    """Also not in a function, nor for types."""
    arrows = {name: imports_of(path) & set(MODULES) - {name} for name, path in MODULES.items()}
    while leaves := [name for name, targets in arrows.items() if not targets & set(arrows)]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"among these is a circle: {', '.join(sorted(arrows))}"


def test_the_root_holds_entries_and_packages_only() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "cli.py", "train.py"}


def loaded_by(module: str) -> set[str]:
    """Top-level modules in sys.modules after importing `module` in a fresh interpreter."""
    code = f"import sys, {module}; print(' '.join(m.split('.')[0] for m in sys.modules))"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rft", {"torch", "megatron", "vllm", "ray", "omegaconf", "openai"}),
        ("rft.cli", {"torch", "megatron", "vllm", "ray", "transformers", "openai"}),
        ("rft.train", {"torch", "megatron", "vllm", "ray", "transformers", "openai"}),
        ("rft.run.launch", {"torch", "megatron", "vllm", "openai"}),
        ("rft.run.actors", {"openai"}),
        ("rft.agents.endpoint", {"openai", "vllm", "ray"}),
        ("rft.preflight", {"torch", "megatron", "vllm", "ray", "transformers", "openai"}),
        ("rft.tools.config", {"torch", "megatron", "vllm", "ray", "transformers", "openai"}),
        ("rft.tools.planner", {"torch", "megatron", "vllm", "ray", "transformers", "openai"}),
        ("rft.tools.doctor", {"torch", "megatron", "vllm", "ray", "transformers", "openai"}),
        ("rft.sync.worker", {"megatron", "torch", "vllm"}),
        ("rft.sync.receiver", {"megatron"}),
        ("rft.ground.names", {"torch", "megatron"}),
        ("rft.ground.experience", {"torch", "ray", "vllm", "megatron"}),
        ("rft.rollout.reward_worker", {"torch", "ray", "vllm"}),
        ("rft.extras.pipeline.worker", {"torch", "ray", "vllm", "transformers"}),
        ("rft.checkpoint.agent", {"torch", "numpy", "megatron", "ray", "omegaconf"}),
        ("rft.checkpoint.export", {"torch", "megatron"}),
        ("rft.extras.tinker.sampler", {"torch", "megatron", "vllm", "ray"}),
        ("rft.extras.tinker.saves", {"megatron", "vllm", "ray"}),
    ],
)
def test_import_stays_light(module: str, absent: set[str]) -> None:
    assert not loaded_by(module) & absent


def test_no_class_has_the_name_of_another() -> None:
    places: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_actors_are_asked_through_typed_handles() -> None:
    """Ray's own `handle.method.remote(...)` names a method in a string that nothing checks; only
    classes, which `ray.remote(Class)` makes actors of, are called that way.
    """
    by_name = [
        f"{path}:{node.lineno}"
        for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "ground" / "protocols.py"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr == "remote"
        and not (isinstance(node.value, ast.Name) and node.value.id in {"ray", "actor_class"})
    ]
    assert not by_name, "ask through rft.ground.protocols.ActorHandle"


def test_only_device_decides_about_devices() -> None:
    """No other file compares or names a device kind; the CPU port rewrites Megatron's own text and
    is the exception.
    """
    exempt = {
        PACKAGE / "ground" / "device.py",
        PACKAGE / "ground" / "streams.py",
        PACKAGE / "megatron" / "cpu_port.py",
        PACKAGE / "config" / "schema.py",
    }
    for path in set(PACKAGE.rglob("*.py")) - exempt:
        text = path.read_text(encoding="utf-8")
        assert "torch.cuda" not in text, f"{path} speaks to torch.cuda"


# bodies of threads that do not enter a device, and why they need not
NO_DEVICE = {
    "sync/communicator.py _run": "the guard polls wires",
    "sync/connection.py _listen": "accepts connections",
    "sync/connection.py _handshake": "its last call is `WeightSender._serve`, which enters",
    "sync/publisher.py _renew": "asks the synchronizer",
    "checkpoint/link.py _watchdog": "looks at the agent's process",
    "checkpoint/link.py _listen": "reads what the agent reports",
    "checkpoint/wire.py _run": "sends messages that are encoded",
    "checkpoint/agent.py _watch": "the agent's process loads no torch",
    "checkpoint/agent.py loop": "the agent's process loads no torch",
    "checkpoint/agent.py _export": "the agent's process loads no torch",
    "checkpoint/peers.py accept": "the agent's process loads no torch",
    "checkpoint/peers.py attend": "the agent's process loads no torch",
    "checkpoint/replicas.py loop": "the agent's process loads no torch",
    "checkpoint/replicas.py lose": "the agent's process loads no torch",
}
ENTERED_LATER = ("sync/sender.py", "_serve")


def thread_bodies(tree: ast.AST) -> set[str]:
    """Names of the functions that `threading.Thread(target=...)` of a file are given."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    targets = [
        word.value
        for call in calls
        if ast.unparse(call.func).endswith("Thread")
        for word in call.keywords
        if word.arg == "target"
    ]
    return {ast.unparse(target).split("(")[-1].rpartition(".")[2] for target in targets}


def enters_first(function: ast.FunctionDef) -> bool:
    body = function.body[ast.get_docstring(function) is not None :]
    return ast.unparse(body[0]).partition("(")[0].rpartition(".")[2] == "enter_thread"


def test_threads_enter_their_device_before_all_else() -> None:
    """CUDA's current card is per thread: a thread that has not chosen makes a context on the first
    one, half a gigabyte for every rank and worker of the machine.
    """
    outside = set()
    for path in chain((PACKAGE / "sync").glob("*.py"), (PACKAGE / "checkpoint").glob("*.py")):
        tree, place = ast.parse(path.read_text("utf-8")), str(path.relative_to(PACKAGE))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for name in thread_bodies(tree):
            found = [function for function in functions if function.name == name]
            if not found or not all(map(enters_first, found)):
                outside.add(f"{place} {name}")
        if place == ENTERED_LATER[0]:
            assert [f.name for f in functions if enters_first(f)] == [ENTERED_LATER[1]]
    assert outside == set(NO_DEVICE), "call rft.ground.streams.enter_thread first, or say why not"


def test_a_stream_is_made_where_its_owner_is_made() -> None:
    """Torch has 32 of them, and its allocator keeps what each has freed for it alone."""
    makers = {
        f"{path.relative_to(PACKAGE)} {function.name}"
        for path in PACKAGE.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(function, ast.FunctionDef)
        and "torch.cuda.Stream(" in ast.unparse(function)
        and path.name != "cpu_port.py"
    }
    assert makers == {"ground/streams.py __init__"}


def test_everything_imported_is_declared() -> None:
    """In pyproject.toml, as what a user needs, or as an extra; what adapters of environments import
    is in the locks of those (`test_adapters_import_what_their_lock_has`).
    """
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    words = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = (re.match(r"[\w-]+", word) for word in words)
    declared = {name[0].lower().replace("-", "_") for name in names if name}
    distributions = packages_distributions()
    imported = {
        module.split(".")[0]
        for path in (*files(), *(PACKAGE.parent / "hydra_plugins").rglob("*.py"))
        if path.parent != PACKAGE / "extras" / "environments"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    } - sys.stdlib_module_names
    missing = {
        module
        for module in imported - {"rft", "hydra_plugins"}
        if not declared
        & {name.lower().replace("-", "_") for name in (module, *distributions.get(module, []))}
    }
    assert not missing, "pyproject.toml does not say that these are needed"


def test_no_file_and_no_function_grows_out_of_sight() -> None:
    """A function's signature and docstring are not counted: they are what is to be said in full."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 600, f"{path} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[ast.get_docstring(node) is not None :] or node.body
                length = (node.end_lineno or 0) - first[0].lineno
                assert length < 60, f"{path}:{node.lineno} {node.name} is too long"


def outside(node: ast.AST) -> Iterator[ast.AST]:
    """All that is in it, and in no function or class."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from outside(child)


def names_in(path: Path) -> set[str]:
    """That other modules may import from it."""
    found = set()
    for node in outside(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
    return found


def test_benchmarks_import_what_is_there() -> None:
    """Most of them are started by hand alone."""
    missing = []
    for path in sorted((PACKAGE.parent / "bench").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rft."):
                where = MODULES.get(node.module or "")
                beside = {one.name for one in node.names if f"{node.module}.{one.name}" in MODULES}
                have = beside | (names_in(where) if where else set())
                missing += [
                    f"{path.name}: {node.module}.{one.name}"
                    for one in node.names
                    if one.name not in have
                ]
    assert missing == []


def test_the_docs_name_files_that_are_there() -> None:
    """The lives of a task, a tensor and a checkpoint consist of them."""
    root = PACKAGE.parent
    missing = [
        f"{page.name}: {name}"
        for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))
        for name in re.findall(r"`(rft/[\w/]+\.py)`", page.read_text(encoding="utf-8"))
        if not (root / name).exists()
    ]
    assert not missing


def test_every_directory_of_tests_is_collected(request: pytest.FixtureRequest) -> None:
    """pytest's own list of directories to pass over has `dist` in it."""
    passed_over = request.config.getini("norecursedirs")
    directories = [
        path.name for path in Path(__file__).parents[1].iterdir() if list(path.glob("test_*.py"))
    ]
    assert {"unit", "dist", "e2e", "verify"} <= set(directories)
    assert not [
        name for name in directories if any(fnmatch(name, pattern) for pattern in passed_over)
    ]
