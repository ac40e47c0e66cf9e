"""`make verify`: all tests and quick benches, in parts of at most 40 minutes on two quiet cores.

    python tests/verify/parts.py [PART ...]

In: the names of parts (none: all). Out: a table of parts with state and seconds, the exit code, and
.verify/PART.json, which says of what content the part passed last. A part that passed for the
content that is here is not run again (to do so, delete its file), and a failing one does not stop
those after it.
"""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("rft", "tests", "bench", "configs", "launch", "hydra_plugins", "requirements")
PAGES = ("README.md", "docs")
PACKAGE = ("setup.py", "pyproject.toml", "Makefile", "Dockerfile")


class Part(NamedTuple):
    """`commands`: arguments of Python, one list per process. `more`: what else it depends on."""

    commands: list[list[str]]
    more: tuple[str, ...] = ()


def tests(*paths: str, options: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> Part:
    return Part([["-m", "pytest", *options, *(f"tests/{path}" for path in paths)]], more)


def e2e(*names: str) -> Part:
    return tests(*(f"e2e/test_{name}.py" for name in names))


def full(*names: str) -> Part:
    return tests(*(f"verify/test_{name}.py" for name in names))


def benches(*names: str) -> Part:
    return Part([["-m", f"bench.{name}", "--quick"] for name in names])


WAYS = ("sockets", "nccl")  # of weights in tests of whole engines: a CPU's own, and a stand-in
PARTS = {
    "unit": tests("unit", options=("-n", "2", "--dist", "loadfile"), more=(*PAGES, *PACKAGE)),
    "ranks": tests("dist"),
    "gpu_model": tests("gpu_model"),
    "recorded": tests("recorded"),
    "engines": e2e(
        *("engine", "narrow", "turns", "adapter_sync", "sync_methods"),
        *("engines", "pool", "colocate", "sync_style", "commit"),
    ),
    "runs": e2e(
        *("loop", "resume_loop", "failures", "outer", "supervised", "stages_run", "experts"),
        *("flat_file", "debug_task", "sweep_resumes", "hub_run"),
    ),
    "algorithms": e2e("algorithms", "ppo", "row_runs", "tinker_run"),
    "agents": tests(
        *(
            f"e2e/test_{name}.py"
            for name in ("agent_loop", "judges", "tool_use", "explore", "pipelines", "sql_run")
        ),
        "verify/test_agent_framework.py",
    ),
    "environments": full("real_environments", "real_data_juicer"),
    "listeners": full("fuzzed_listeners"),
    "sync-faults": e2e("sync_faults"),
    "weight-sync": Part(
        [["-m", "pytest", "tests/e2e/test_weight_sync.py", "--way", way] for way in WAYS]
    ),
    "sync-delta": full("delta_install"),
    "faults": full("faults_in_full"),
    "resume": full("resume_every_step"),
    "kills": full("quickstart_killed"),
    "starts": full("starts_and_kills"),
    "quickstart": full("quickstart"),
    "demo": full("demo"),
    "docs": tests(
        *(f"verify/test_{name}.py" for name in ("docs_commands_run", "docs_site", "tutorials")),
        more=(*PAGES, "mkdocs.yml"),
    ),
    "mutants": full("mutants"),
    "install": tests(
        "verify/test_installed.py",
        "verify/test_init_runs.py",
        "verify/test_release.py",
        more=PACKAGE,
    ),
    "cluster": full("slurm", "ray_launch", "torchrun_nodes", "kubernetes"),
    "browser": full("studio_browser", "observed_run", "mlflow"),
    "bench-trainer": benches("packing", "logprobs", "train_step", "plan"),
    "bench-storage": benches("checkpoint", "checkpoint_faults", "buffer"),
    "bench-loop": benches("weight_sync", "loop", "observe", "rollout"),
    "bench-chaos": benches("chaos"),
    "bench-scale": Part([["-m", "bench.scale", "--sync", "--quick"]]),
}


def content(root: Path, names: Iterable[str]) -> str:
    """Hash of all files under these: their names and what is in them."""
    digest = hashlib.sha256()
    for name in names:
        top = root / name
        files = [top] if top.is_file() else top.rglob("*")
        for file in sorted(file for file in files if file.is_file()):
            if "__pycache__" not in file.parts:
                data = file.read_bytes()
                digest.update(f"{file.relative_to(root)} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def run(name: str, part: Part, root: Path) -> tuple[str, float]:
    """State and seconds of a part: those of its last run, if it passed for what is here now."""
    memory = root / ".verify" / f"{name}.json"
    here = content(root, SOURCES + part.more)
    if memory.exists():
        last = json.loads(memory.read_text(encoding="utf-8"))
        if last["content"] == here:
            return f"passed before, {last['date']}", last["seconds"]
    begun = time.monotonic()
    codes = [
        subprocess.run([sys.executable, *command], cwd=root).returncode for command in part.commands
    ]
    seconds = round(time.monotonic() - begun, 1)
    if any(codes):
        return f"FAILED, exit code {max(codes, key=abs)}", seconds
    if content(root, SOURCES + part.more) != here:
        return "passed, but its sources changed meanwhile", seconds
    memory.parent.mkdir(exist_ok=True)
    told = {"content": here, "seconds": seconds, "date": time.strftime("%Y-%m-%d")}
    memory.write_text(json.dumps(told) + "\n", encoding="utf-8")
    return "passed", seconds


def main(names: list[str], parts: dict[str, Part] = PARTS, root: Path = ROOT) -> int:
    if unknown := [name for name in names if name not in parts]:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(parts)}", file=sys.stderr)
        return 2
    rows = []
    for name in names or parts:
        print(f"=== {name}", flush=True)
        rows.append((name, *run(name, parts[name], root)))
    print(f"\n{'part':<14} {'seconds':>8}  state")
    for name, state, seconds in rows:
        print(f"{name:<14} {seconds:>8.1f}  {state}")
    return int(any(state.startswith("FAILED") for _, state, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
