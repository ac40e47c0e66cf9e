"""`make gpu` without a GPU: its table, what it skips and why, where it stops, what it writes; and,
marked, all of its stages over stand-ins.
"""

import ast
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu.__main__ import Here, chosen, lacking, look, run_all
from bench.gpu.stages import STAGES, Stage
from rft.ground.errors import ConfigError
from rft.ground.process import adopt_orphans

from box import FakeBox

ROOT = Path(__file__).resolve().parents[2]
HERE = Here(1, "1 x a card", fake=False, date="2026-01-02", versions={"torch": "2.13.0"})
FAKE = replace(HERE, cards=8, hardware="no GPU", fake=True)
SAYS = 'print(\'{"bench": "b", "ratios": {"apart": 0.25}, "meets": %s}\')'


def stage(name: str, code: str = "print(1)", **more: object) -> Stage:
    plain = Stage(name, f"what {name} is", f"bar of {name}", 60, (), ("-c", code))
    return replace(plain, **more)  # type: ignore[arg-type]


def checks_of(program: str) -> set[str]:
    """Names in its `CHECKS`, or in the table that those are made of."""
    tree = ast.parse((ROOT / "bench" / "gpu" / f"{program}.py").read_text(encoding="utf-8"))
    tables = {
        str(getattr(target, "id", "")): node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    found = tables["CHECKS"] if isinstance(tables["CHECKS"], ast.Dict) else tables["FORMS"]
    assert isinstance(found, ast.Dict)
    return {str(ast.literal_eval(key)) for key in found.keys if key is not None}


def test_the_table_names_programs_that_are_there() -> None:
    wrong, asked = [], set()
    for one in STAGES:
        if not (one.what and one.bar and one.needs and (one.by_hand or one.seconds > 0)):
            wrong.append(f"{one.name} says too little")
        for command in filter(None, (one.command, one.stand_in)):
            module = command[1] if command[0] == "-m" else ""
            if module and not (ROOT / f"{module.replace('.', '/')}.py").exists():
                wrong.append(f"{one.name}: there is no {module}")
            if module.startswith("bench.gpu."):
                asked.add((module.rpartition(".")[2], command[2]))
    there = {(p, check) for p in ("device", "parity", "engine", "runs") for check in checks_of(p)}
    assert not wrong and asked == there
    order = [int(one.name.partition(".")[0]) for one in STAGES]
    assert order == sorted(order) and set(order) == set(range(11))
    assert len({one.name for one in STAGES}) == len(STAGES)
    torch_alone = {one.name for one in STAGES if one.needs == ("torch",)}
    assert torch_alone >= {"1.ipc", "1.nccl", "1.copier", "1.checksum", "1.guard"}


def test_stages_are_chosen_by_the_beginning_of_their_names() -> None:
    assert [one.name for one in chosen(["10", "3.eager"])] == ["3.eager", "10.resume"]
    assert {one.name[:2] for one in chosen(["1"])} == {"1."} and chosen([]) == list(STAGES)
    with pytest.raises(ConfigError, match="no stage is called 11; there are 0.doctor, 1.ipc"):
        chosen(["11"])


def test_what_is_not_here_is_skipped_with_the_reason(tmp_path: Path) -> None:
    reasons = {
        "packages": stage("1.a", needs=("torch", "no-such-wheel")),
        "cards": stage("1.b", cards=2),
        "tool": stage("1.c", tool="no-such-tool"),
        "hand": stage("1.d", by_hand="sbatch me"),
    }
    assert {name: lacking(one, HERE) for name, one in reasons.items()} == {
        "packages": "needs no-such-wheel, not installed here: make setup DEVICE=cuda",
        "cards": "needs 2 cards, here is 1",
        "tool": "needs the program no-such-tool, not on PATH here",
        "hand": "type: sbatch me",
    }
    assert lacking(stage("1.b", cards=2), FAKE) == ""
    outcomes = run_all(list(reasons.values()), HERE, tmp_path, print)
    assert [one.state for one in outcomes] == ["skipped"] * 4


def test_it_stops_at_the_first_that_fails_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    said: list[str] = []
    stages = [
        stage("0.a", SAYS % "true"),
        stage("1.b", cards=2),
        stage("2.c", "print(*range(100), sep='\\n'); import sys; sys.exit('it broke')"),
        stage("3.d"),
    ]
    outcomes = run_all(stages, HERE, tmp_path, said.append)
    assert [one.state for one in outcomes] == ["passed", "skipped", "FAILED"]
    assert outcomes[2].why == "exit code 1"
    end = said[-1].splitlines()
    assert end[0] == f"the end of {tmp_path / '2.c.log'}:" and end[-1] == "it broke"
    assert "99" in end and "60" not in end
    told = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert (told["fake"], told["meets"], told["not_reached"]) == (False, False, ["3.d"])
    assert told["stages"][0]["found"] == {"apart": 0.25} and told["stages"][2]["state"] == "FAILED"
    table = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "`make gpu`, 2026-01-02; 1 x a card; torch 2.13.0." in table
    assert re.search(r"\| 0.a: what 0.a is \| bar of 0.a \| apart 0.25 \| \d+ \| passed \|", table)
    assert "| skipped: needs 2 cards, here is 1 |" in table and "Not reached: 3.d." in table
    assert "fake" not in table.lower()


def test_a_bar_a_silence_and_a_deadline_are_failures(tmp_path: Path) -> None:
    adopt_orphans()
    missed = stage("1.a", SAYS % "false")
    hangs = "import os, signal; os.fork() or os.setsid(); print(os.getpid(), flush=True); "
    hangs += "signal.pause()"
    cases = [missed, stage("1.b", "pass"), stage("1.c", hangs, seconds=0.3)]
    why = [run_all([one], HERE, tmp_path, print)[0].why for one in cases]
    assert why == ["a bar was missed", "it said nothing", "not done after 0.3 s"]
    for number in map(int, (tmp_path / "1.c.log").read_text(encoding="utf-8").split()):
        assert not Path(f"/proc/{number}").exists(), "left running"


def test_what_is_only_slow_does_not_keep_the_next_stage_from_running(tmp_path: Path) -> None:
    slow, dies = SAYS % "false", SAYS % "true" + "; raise SystemExit(1)"
    stages = [stage("1.a", slow, claims=True), stage("1.b", dies, claims=True), stage("1.c")]
    outcomes = run_all(stages, HERE, tmp_path, print)
    assert [one.state for one in outcomes] == ["SLOW", "FAILED"]
    assert outcomes[0].why == "a bar was missed"
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["meets"] is False


def test_stand_ins_are_never_taken_for_a_measurement(tmp_path: Path) -> None:
    said: list[str] = []
    compares = stage("1.a", SAYS % "false", claims=True)
    assert run_all([compares], HERE, tmp_path, print)[0].state == "SLOW"
    assert run_all([compares, stage("1.b")], FAKE, tmp_path, said.append)[0].state == "ran"
    told = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert (told["fake"], told["meets"]) == (True, False)
    table = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert table.startswith("### FAKE: no card, no measurement")
    rows = [line for line in table.splitlines() if line.startswith("| 1.")]
    assert len(rows) == 2 and all(row.endswith("| fake, ran |") for row in rows)
    assert all(line.startswith("fake ") for line in said)


def test_cards_that_are_here_are_told_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeBox(tmp_path / "box", cards=2).enter(monkeypatch)
    here = look()
    assert (here.cards, here.fake, here.kind) == (2, False, "cuda")
    assert "2 x NVIDIA H100 80GB HBM3, driver 580.65.06" in here.hardware
    assert here.versions["vllm"] == "0.32.0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert look().cards == 1
    FakeBox(tmp_path / "broken", driver=None).enter(monkeypatch)
    with pytest.raises(ConfigError, match="couldn't communicate with the NVIDIA driver"):
        look()


def test_calls_that_wait_are_read_from_nsight_systems_sums() -> None:
    from bench.gpu.runs import waits

    report = """Processing [run.sqlite] with [cuda_api_sum.py]...

Time (%),Total Time (ns),Num Calls,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
61.0,9000,12,750.0,700.0,600,900,10.0,cudaStreamSynchronize
30.0,4000,900,4.4,4.0,3,9,1.0,cudaLaunchKernel
9.0,1000,3,333.3,300.0,200,500,9.0,cudaEventSynchronize
"""
    assert waits(report) == {"cudaStreamSynchronize": 12, "cudaEventSynchronize": 3}
    with pytest.raises(AssertionError, match="no table of calls"):
        waits("nothing was captured")


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_every_stage_runs_over_stand_ins(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "bench.gpu", "--out", tmp_path], cwd=ROOT)
    told = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    states = {one["name"]: one["state"] for one in told["stages"]}
    assert done.returncode == 0 and told["fake"] and not told["not_reached"]
    skipped = {one.name for one in STAGES if lacking(one, FAKE)}
    assert {name for name, state in states.items() if state == "skipped"} == skipped
    assert set(states.values()) <= {"ran", "skipped"}
    assert skipped <= {"8.nsys", "9.nodes"} and set(states) == {one.name for one in STAGES}
