"""Who may import whom, and what must stay light: the arrows of docs/architecture.md."""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rft"
BASE = {
    "experience", "protocols", "names", "adapters", "config", "config_algorithm", "config_buffer", "config_explorer",
    "config_data", "config_sweep", "device", "monitor", "trinity_keys", "hints", "plugins",
}  # fmt: skip
MIDDLE = BASE | {"algorithm", "packing", "buffer"}
TOP = {
    "trainer",
    "feed",
    "control",
    "control_socket",
    "engines",
    "rank",
    "ranks",
    "launch",
    "actors",
    "outer",
    "train",
    "preflight",
    "preflight_agents",
    "preflight_algorithm",
    "preflight_trainer",
    "preflight_sync",
    "preflight_rows",
    "preflight_flows",
    "preflight_limits",
    "preflight_buffer",
    "preflight_colocate",
    "preflight_pipelines",
    "preflight_tinker",
    "on_megatron",
    "on_tinker",
    "cards",
    "modes",
    "models",
    "reporting",
    "processes",
    "skips",
    "profiler",
    "verl_keys",
    "config_file",
    "stages",
    "sweep",
}
ALLOWED = {
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(("algorithm", "packing", "buffer"), MIDDLE),
    **{part: MIDDLE | {part} for part in ("megatron", "rollout", "checkpoint")},
    "pipeline": MIDDLE | {"pipeline", "rollout"},
    "sync": MIDDLE | {"sync", "megatron", "rollout", "checkpoint"},
    "tinker": MIDDLE | {"tinker", "sync", "megatron", "rollout", "checkpoint"},
}


def imports_of(path: Path) -> set[str]:
    """First component below `rft` of every import in the file, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rft":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("rft.")}
    return found


def parts() -> list[tuple[str, Path]]:
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if f != PACKAGE / "__init__.py"]
    return [(f.relative_to(PACKAGE).parts[0].removesuffix(".py"), f) for f in files]


@pytest.mark.parametrize(("part", "path"), parts(), ids=lambda v: str(v) if isinstance(v, str) else v.stem)
def test_imports_follow_the_arrows(part: str, path: Path) -> None:
    if part in ALLOWED:
        assert imports_of(path) <= ALLOWED[part], f"{path} may not import {imports_of(path) - ALLOWED[part]}"
    else:
        assert part in TOP | {"tools", "cli"}, f"{part} has no place in the layout"


def loaded_by(module: str) -> set[str]:
    """Top-level modules in sys.modules after importing `module` in a fresh interpreter."""
    code = f"import sys, {module}; print(' '.join(m.split('.')[0] for m in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rft", {"torch", "megatron", "vllm", "ray", "omegaconf"}),
        ("rft.train", {"torch", "megatron", "vllm", "ray", "transformers"}),
        ("rft.launch", {"torch", "megatron", "vllm"}),
        ("rft.preflight", {"torch", "megatron", "vllm", "ray", "transformers"}),
        ("rft.tools.config", {"torch", "megatron", "vllm", "ray", "transformers"}),
        ("rft.tools.doctor", {"torch", "megatron", "vllm", "ray", "transformers"}),
        ("rft.sync.receiver", {"megatron"}),
        ("rft.names", {"torch", "megatron"}),
        ("rft.experience", {"torch", "numpy"}),
        ("rft.rollout.reward_worker", {"torch", "ray", "vllm"}),
        ("rft.pipeline.worker", {"torch", "ray", "vllm", "transformers"}),
        ("rft.checkpoint.agent", {"torch", "numpy", "megatron", "ray", "omegaconf"}),
        ("rft.checkpoint.export", {"torch", "megatron"}),
        ("rft.tinker.engine", {"torch", "megatron", "vllm", "ray"}),
        ("rft.tinker.publisher", {"megatron", "vllm", "ray"}),
    ],
)
def test_import_stays_light(module: str, absent: set[str]) -> None:
    assert not loaded_by(module) & absent


def test_only_device_decides_about_devices() -> None:
    """No other file compares or names a device kind; the CPU port rewrites Megatron's own text and is the exception."""
    exempt = {
        PACKAGE / "device.py",
        PACKAGE / "megatron" / "cpu_port.py",
        PACKAGE / "config.py",
        PACKAGE / "preflight.py",
    }
    for path in set(PACKAGE.rglob("*.py")) - exempt:
        text = path.read_text(encoding="utf-8")
        assert "torch.cuda" not in text, f"{path} speaks to torch.cuda"


def test_no_file_and_no_function_grows_out_of_sight() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 450, f"{path} is too long"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}:{node.lineno} {node.name} is too long"


def test_every_directory_of_tests_is_collected(request: pytest.FixtureRequest) -> None:
    """pytest's own list of directories to pass over has `dist` in it."""
    passed_over = request.config.getini("norecursedirs")
    directories = [path.name for path in Path(__file__).parents[1].iterdir() if list(path.glob("test_*.py"))]
    assert {"unit", "dist", "e2e", "verify"} <= set(directories)
    assert not [name for name in directories if any(fnmatch(name, pattern) for pattern in passed_over)]
