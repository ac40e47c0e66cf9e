"""`make verify`: all tests and quick benches, in parts of at most 40 minutes on two quiet cores.

    python tests/verify/parts.py [PART ...]

In: the names of parts (none: all). Out: a table of parts with state and seconds, the exit code, and
.verify/PART.json, which says of what content the part passed last. A part that passed for the
content that is here is not run again (to do so, delete its file), and a failing one does not stop
those after it. What tests skip is said beside their part: among all parts it passes, for a machine
may lack things; one that was asked for by its name does not.
"""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("rft", "tests", "bench", "configs", "launch", "hydra_plugins", "requirements")
PAGES = ("README.md", "docs")
PACKAGE = ("setup.py", "pyproject.toml", "Makefile", "Dockerfile", "LICENSE")


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


LOOP_SIZES = {"57": "57", "256": "256", "3x": "192:64"}  # tokens: a response, its prompt before it
WAYS = ("sockets", "nccl")  # of weights in tests of whole engines: a CPU's own, and a stand-in
PARTS = {
    "unit": tests("unit", options=("-n", "2", "--dist", "loadfile"), more=(*PAGES, *PACKAGE)),
    "ranks": tests("dist"),
    "families": full("family_runs"),
    "gpu_model": tests("gpu_model"),
    "recorded": tests("recorded"),
    "engines": e2e(
        *("engine", "narrow", "turns", "adapter_sync", "sync_methods"),
        *("engines", "pool", "colocate", "sync_style", "commit"),
    ),
    "runs": e2e(
        *("loop", "resume_loop", "failures", "outer", "supervised", "stages_run", "experts"),
        *("routes", "flat_file", "debug_task", "sweep_resumes", "hub_run", "speculation"),
    ),
    "bitwise": e2e("bitwise_engine"),
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
    "faults-store": full("store_faults"),
    "faults-nodes": full("lost_nodes"),
    "resume": full("resume_every_step"),
    "kills": full("quickstart_killed"),
    "starts": full("starts_and_kills"),
    "quickstart": full("quickstart"),
    "demo": full("demo_seeds"),
    "demo-control": full("demo"),
    "docs": tests(
        *(f"verify/test_{name}.py" for name in ("docs_commands_run", "docs_site", "tutorials")),
        more=(*PAGES, "mkdocs.yml"),
    ),
    "mutants": full("mutants"),
    "drill": full("silent_faults"),
    "install": tests("verify/test_installed.py", "verify/test_init_runs.py", more=PACKAGE),
    "release": tests("verify/test_release.py", more=(*PACKAGE, "README.md")),
    "cluster": full("slurm", "ray_launch", "torchrun_nodes", "kubernetes"),
    "browser": full("studio_browser", "observed_run", "mlflow"),
    "bench-trainer": benches("packing", "logprobs", "train_step", "router_replay", "plan"),
    "bench-storage": benches("checkpoint", "checkpoint_faults", "buffer"),
    "bench-versions": Part([["-m", "bench.versions"], ["-m", "bench.save_plan"]]),
    "bench-node-loss": Part(
        [["-m", "bench.node_loss", *more] for more in ([], ["--nodes", "3"], ["--ranks", "2"])]
        + [["-m", "bench.node_loss", "--what", what] for what in ("rank", "cut")]
    ),
    "bench-recovery": benches("recovery", "effective", "every_step"),
    "history": Part([["-m", "bench.history"]]),
    "bench-loop": benches("weight_sync", "observe", "rollout"),
    **{
        f"bench-loop-{name}": Part([["-m", "bench.loop", "--quick", "--sizes", size]])
        for name, size in LOOP_SIZES.items()
    },
    "bench-chaos": benches("chaos"),
    "bench-prefix-64": benches("prefix"),
    "bench-prefix-256": Part([["-m", "bench.prefix", "--only", "768", "256, 8", "agent"]]),
    "bench-first-step": Part([["-m", "bench.first_step"]], (*PACKAGE, "README.md")),
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


def run(name: str, part: Part, root: Path, asked: bool) -> tuple[str, float]:
    """State and seconds of a part: those of its last run, if it passed for what is here now.
    `asked`: by its name, so that all of it is to run.
    """
    memory = root / ".verify" / f"{name}.json"
    memory.parent.mkdir(exist_ok=True)
    here = content(root, SOURCES + part.more)
    if memory.exists():
        last = json.loads(memory.read_text(encoding="utf-8"))
        if last["content"] == here and not (asked and last["skipped"]):
            return f"passed before, {last['date']}{told(last['skipped'])}", last["seconds"]
    begun = time.monotonic()
    codes, skipped = [], []
    for command in part.commands:
        report = memory.with_suffix(".xml")
        more = [f"--junitxml={report}"] if command[:2] == ["-m", "pytest"] else []
        codes.append(subprocess.run([sys.executable, *command, *more], cwd=root).returncode)
        skipped += skips(report) if more else []
    seconds = round(time.monotonic() - begun, 1)
    if any(codes):
        return f"FAILED, exit code {max(codes, key=abs)}", seconds
    if skipped and asked:
        return f"FAILED{told(skipped)}", seconds
    if content(root, SOURCES + part.more) != here:
        return f"passed, but its sources changed meanwhile{told(skipped)}", seconds
    found = {"content": here, "seconds": seconds, "date": time.strftime("%Y-%m-%d")}
    memory.write_text(json.dumps(found | {"skipped": skipped}) + "\n", encoding="utf-8")
    return f"passed{told(skipped)}", seconds


def skips(report: Path) -> list[str]:
    """The reasons of pytest's report, one for each test; the report is gone afterwards."""
    if not report.exists():  # pytest ended before it wrote one, and its exit code says so
        return []
    found = ElementTree.parse(report).iter("skipped")
    report.unlink()
    return [one.get("message", "") for one in found]


def told(skipped: list[str]) -> str:
    return f", {len(skipped)} skipped: {'; '.join(dict.fromkeys(skipped))}" if skipped else ""


def main(names: list[str], parts: dict[str, Part] = PARTS, root: Path = ROOT) -> int:
    if unknown := [name for name in names if name not in parts]:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(parts)}", file=sys.stderr)
        return 2
    rows = []
    for name in names or parts:
        print(f"=== {name}", flush=True)
        rows.append((name, *run(name, parts[name], root, asked=bool(names))))
    print(f"\n{'part':<14} {'seconds':>8}  state")
    for name, state, seconds in rows:
        print(f"{name:<14} {seconds:>8.1f}  {state}")
    return int(any(state.startswith("FAILED") for _, state, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
