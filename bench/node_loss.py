"""Whole runs that lose a node, with its memory and its disk, in the middle of a step.

    python -m bench.node_loss [--nodes N] [--ranks N] [--count N] [--seed S] [--what node|rank|cut]
                              [--loop] [--keep DIR]

Two machines of one kernel or three (`bench.faults.machines`), each with its own network, name,
processes, shared memory and disk; a trainer rank on each, or several, started by
`launch/torchrun.sh`, replicas between their agents, `trainer.layouts` with one for all ranks and
one for those that are left. What they train on is a journal that a real explorer has left on the
first machine's disk.

    explorer, once ─► journal ─► reference: the run on one rank, undisturbed
                             ─► case: machines ── step k told ── one of them is gone ── the run
                                goes on where the others are ─► judged, step by step

Drawn by a seed: which machine (with the first one go supervisor, Ray, buffer and journal, and the
same command is started on the others), the layout, whether its connections end or go silent,
whether torchrun goes on by itself or the command is given again, the step and the moment in it.
Out: a table, and one last line of JSON. Bars: no state is lost that two nodes had, at most 2 steps
made again, every step on the batch of the reference and with its loss, and the run says so; of 20
runs. `--what rank`: a rank is killed and its machine stays; `cut`: a machine's cable is cut and
mended after a time that is drawn, and a command that has ended by then is given again. `--loop`:
explorer and engine are of the run too (mode=both), where the run is, and every version is kept;
rollouts are then made anew, and no reference says what they are.
"""

import argparse
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from bench import report
from bench.faults.machines import Machine, machines
from rft.buffer.journal import Journal
from rft.buffer.progress import Leased, decode_record
from rft.monitor.run_record import read_lines
from rft.tools.toy import write_arithmetic, write_model

ROOT = Path(__file__).resolve().parents[1]
CLAIMED, AGAIN, STEPS = 20, 2, 14
ALL_DP = "dp"
LAYOUTS = {
    "tp2": "tensor_model_parallel_size:2",
    "pp2": "pipeline_model_parallel_size:2",
    ALL_DP: "tensor_model_parallel_size:1",
}
MODEL = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384}
TASKS, REPEATS = 8, 8
TOLERANCE = 1e-3  # of a loss, in another layout than the reference's
SILENT_S = 20.0  # trainer.collective_timeout: a node that says nothing is found by it alone
BEGIN_S, END_S, LOOK_S = 240.0, 300.0, 0.02
Groups = dict[int, set[tuple[int, ...]]]  # dealt, by step
Rows = dict[int, dict[str, Any]]  # of metrics, by step
Known = tuple[Groups, Rows]  # what the reference has made
JOB = Path("rft", "run")
JOURNAL = JOB / "buffer" / "experience_buffer"
SEGMENT = 64 * 2**20
LOOP = ["mode=both", "synchronizer.max_staleness=1", "trainer.checkpoint.versions=all"]
RAY_PORT = 6379
NODE, RANK, CUT = WHAT = ("node", "rank", "cut")
CUTS_S = (3.0, 12.0, 30.0, 45.0, 60.0)  # below and above what agents and ranks wait for each other
# so that some steps are left when a cut is mended
SLOW = "rft.trainer.saving:SaveTimes.is_due=bool(__import__('time').sleep(3))"
TOLD = re.compile(r"^\[ *(\d+)/\d+ .*loss", re.M)
AGAIN_TOLD = re.compile(r"^trainer: goes on from (\w+) behind step (\d+): (.*) made again$", re.M)
REFUSED = re.compile(r"^rft: .*take_over=true", re.M)


@dataclass(frozen=True)
class Case:
    """What is drawn. `gone`: the machine that is lost, of which the first has rank 0. `elastic`:
    torchrun goes on.
    """

    seed: int
    nodes: int
    ranks: int  # of each
    gone: int
    layout: str
    silent: bool
    elastic: bool
    step: int
    share: float  # of a step, behind the line of the one before
    asked: bool  # whether the command is given without `take_over` first
    what: str = NODE
    cut_s: float = 0.0

    @classmethod
    def drawn(cls, seed: int, nodes: int, ranks: int, what: str) -> "Case":
        chance = random.Random(seed)
        known = [name for name in sorted(LAYOUTS) if name == ALL_DP or nodes * ranks % 2 == 0]
        layout, silent = chance.choice(known), chance.random() < 0.25
        elastic, step = chance.random() < 0.5, chance.randrange(3, STEPS - 3)
        # of more than two nodes most are left, and nobody has to be told that the first is gone
        asked = not elastic and chance.random() < 0.4 and nodes == 2
        gone = 0 if seed % 2 == 1 else 1
        if nodes > 2 and gone:
            gone = chance.randrange(1, nodes)
        share = chance.random()
        case = cls(seed, nodes, ranks, gone, layout, silent, elastic, step, share, asked)
        if what == NODE:
            return case
        case = replace(case, what=what, asked=False)
        if what == CUT:
            case = replace(case, elastic=True, cut_s=chance.choice(CUTS_S))
        return case

    @property
    def first(self) -> bool:
        return self.gone == 0

    @property
    def goes_on(self) -> bool:
        """Nobody gives the command again, but where a cut has ended it."""
        return self.elastic and not (self.first and self.what == NODE)

    @property
    def layouts(self) -> str:
        """Of all ranks, and of those that are left."""
        told = []
        for count in (self.nodes * self.ranks, (self.nodes - 1) * self.ranks):
            sizes = LAYOUTS[self.layout if count % 2 == 0 else ALL_DP]
            told.append(f"{{num_ranks:{count},{sizes}}}" if count > 1 else "{num_ranks:1}")
        return f"[{','.join(told)}]"

    @property
    def words(self) -> str:
        who = "first" if self.first else "other"
        how = "silently" if self.silent else "at once"
        if self.what != NODE:
            how = f"cut for {self.cut_s:g} s" if self.what == CUT else "a rank"
        by = "torchrun" if self.elastic else "by hand"
        return f"{who}, {self.layout}, {how}, {by}"


@dataclass
class Outcome:
    case: Case
    told: int = 0  # the last step that was told before
    phase: str = ""  # of rank 0, when the machine was lost
    had: int = -1  # step of the newest state that two nodes had, as the run had told
    back: int = -1  # step that was gone on from
    seconds: float = 0.0  # to the first step told after
    problems: list[str] = field(default_factory=list)

    @property
    def again(self) -> int:
        return self.told - self.back


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.node_loss")
    parser.add_argument("--nodes", type=int, default=2, choices=(2, 3))
    parser.add_argument("--ranks", type=int, default=1, help="of a node")
    parser.add_argument("--count", type=int, default=CLAIMED)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--what", choices=WHAT, default=NODE, help="what is lost")
    parser.add_argument("--loop", action="store_true", help="with explorer and engine")
    parser.add_argument("--keep", type=Path, help="a directory for what the runs have said")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="node_loss_") as made:
        top = Path(made)
        prepare(top, asked.loop)
        known = None if asked.loop else reference(top)
        found = []
        for seed in range(asked.seed, asked.seed + asked.count):
            case = Case.drawn(seed, asked.nodes, asked.ranks, asked.what)
            found.append(lost(top / str(seed), top, case, known))
            say_one(found[-1])
            if asked.keep:
                logs = asked.keep / str(seed)
                logs.mkdir(parents=True, exist_ok=True)
                for log in (top / str(seed)).glob("*.log"):
                    shutil.copy(log, logs)
            shutil.rmtree(top / str(seed))
    say(found, asked)


# --- what every run begins with -------------------------------------------------------------------


def prepare(top: Path, loop: bool) -> None:
    """The model, and the journal of an explorer with a real engine; of a whole `loop` none."""
    write_model(top / "model", **MODEL)
    write_arithmetic(top, digits=1, num_eval=16)
    if not loop:
        whole([*arguments(top, top / "explored"), "mode=explore"], top / "explored.log")


def reference(top: Path) -> Known:
    """The groups of each step, and its row, of one rank that nobody disturbs."""
    shutil.copytree(top / "explored" / JOURNAL, top / "reference" / JOURNAL)
    words = [*arguments(top, top / "reference"), "mode=train", "trainer.num_ranks=1"]
    whole(words, top / "reference.log")
    return leases(top / "reference" / JOURNAL), rows_of(top / "reference" / JOB)


def whole(words: list[str], log: Path) -> None:
    """A run on the host, to its end."""
    with log.open("wb") as out:
        command = [sys.executable, "-m", "rft.train", *words]
        if subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT).returncode:
            raise SystemExit(f"{' '.join(command)}\n{log.read_text()}")


def arguments(top: Path, place: Path) -> list[str]:
    return [
        "experiment=grpo",
        "name=run",
        "device=cpu",
        "monitor=none",
        f"checkpoint_root_dir={place}",
        f"model.model_path={top / 'model'}",
        "model.max_prompt_tokens=16",
        "model.max_response_tokens=16",
        f"algorithm.repeat_times={REPEATS}",
        "algorithm.optimizer.lr=1e-4",
        f"buffer.batch_size={TASKS}",
        "buffer.total_epochs=1000",
        f"buffer.explorer_input.default_reward_fn_type={ROOT}/tests/e2e/letters.py:reward",
        f"buffer.explorer_input.taskset.path={top / 'train.jsonl'}",
        "explorer.rollout_model.kv_cache_gb=0.25",
        "trainer.max_token_len_per_gpu=4096",
        f"trainer.total_steps={STEPS}",
        "cluster.threads_per_rank=1",
    ]


def leases(journal: Path) -> Groups:
    """The groups of each step, as often as they were dealt."""
    opened, found = Journal(str(journal), SEGMENT), Groups()
    for _, payload in opened.records():
        record = decode_record(payload)
        if isinstance(record, Leased):
            found.setdefault(record.step, set()).add(tuple(record.groups))
    opened.close()
    return found


def rows_of(job: Path) -> Rows:
    found = read_lines(job / "metrics.jsonl") if (job / "metrics.jsonl").exists() else []
    return {row["step"]: row for row in found if "time/step_s" in row}


# --- one run --------------------------------------------------------------------------------------


def lost(top: Path, given: Path, case: Case, known: Known | None) -> Outcome:
    disk, checkpoints = top / "disk", top / "checkpoints"
    disk.mkdir(parents=True)
    checkpoints.mkdir()
    with machines(case.nodes, disk) as nodes:
        for node in nodes:
            node.bind(checkpoints, disk / JOB / "checkpoints")
        if known is not None:
            shutil.copytree(given / "explored" / JOURNAL, nodes[0].see(disk / JOURNAL))
        return Nodes(top, given, case, nodes, known).run()


class Nodes:
    """A run on machines, and its end on all but one. `known`: none of a whole loop."""

    def __init__(
        self, top: Path, given: Path, case: Case, nodes: list[Machine], known: Known | None
    ):
        self.top, self.given, self.case, self.nodes, self.known = top, given, case, nodes, known
        self.disk = top / "disk"
        self.logs = [top / f"node{number}.log" for number in range(case.nodes)]
        self.left = [
            number for number in range(case.nodes) if case.what != NODE or number != case.gone
        ]
        self.environment = {
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RANKS": str(case.ranks),
        }
        if case.what == CUT:
            self.environment["PYTHONPATH"] += f":{ROOT / 'tests/verify/planted'}"
            self.environment["RFT_PLANTED"] = SLOW
        self.found = Outcome(case)
        self.late: list[int] = []  # nodes where the command was given again

    def run(self) -> Outcome:
        case, found = self.case, self.found
        try:
            self.ray(0)
            self.runs = {
                number: self.start(number, log, case.nodes, number, 0)
                for number, log in enumerate(self.logs)
            }
            self.lose(case.gone)
            before = self.rows_before
            began = time.monotonic()
            if not case.goes_on:
                for one in self.left:
                    self.await_that(lambda one=one: self.has_ended(one), "the others end")
                self.again()
            self.await_that(self.is_back, "a step is told again")
            found.seconds = time.monotonic() - began
            self.await_that(self.is_over, "the run ends")
            codes = {one: self.runs[one].returncode for one in self.left}
            if case.what == CUT and not all(codes.values()):
                codes = {}  # where torchrun comes back to a run that is over, it fails
            found.problems += [f"exit code {code} of node {n}" for n, code in codes.items() if code]
            self.judge(before)
        except TimeoutError as error:
            found.problems.append(str(error))
        return found

    def is_over(self) -> bool:
        """Whether all have ended; one that the cut has ended is started again, as schedulers do."""
        for one in self.left if self.case.what == CUT else ():
            if self.runs[one].poll() and self.told() < STEPS and self.log_of(one) == self.logs[one]:
                self.late.append(one)
                self.runs[one] = self.start(one, self.log_of(one), self.case.nodes, one, 0)
        return all(self.has_ended(one) for one in self.left)

    def has_ended(self, number: int) -> bool:
        return self.runs[number].poll() is not None

    def log_of(self, number: int) -> Path:
        """What the last command on this node has said."""
        return self.top / f"again{number}.log" if number in self.late else self.logs[number]

    def told(self) -> int:
        """The last step that the last commands have told."""
        return max(self.told_in(self.log_of(one)) for one in self.left)

    def is_back(self) -> bool:
        """Whether a step is told behind what the run says it goes on from, for one more may have
        been told in the moment of the loss; a cut may be mended before anybody has noticed.
        """
        if self.case.what == CUT and self.told() > self.found.told:
            return True
        texts = (self.log_of(one).read_text() for one in self.left)
        return any(
            (line := AGAIN_TOLD.search(text)) and TOLD.search(text, line.end()) for text in texts
        )

    def await_that(self, is_so: Callable[[], bool], what: str) -> None:
        await_that(is_so, END_S, what, self.log_of(self.left[0]))

    # --- what is started --------------------------------------------------------------------------

    def ray(self, number: int) -> None:
        """What `launch/ray.sh` does on the first node."""
        words = ["--head", f"--node-ip-address={self.nodes[number].address}", "--num-cpus=8"]
        words += [f"--port={RAY_PORT}", "--include-dashboard=false", "--disable-usage-stats"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words]
        log = self.top / f"ray{number}.log"
        node = self.nodes[number]
        started = node.start(*command, directory=self.top, log=log, **self.environment)
        if started.wait(BEGIN_S):
            raise TimeoutError(log.read_text())

    def start(
        self, number: int, log: Path, count: int, rank: int, first: int, *more: str
    ) -> "subprocess.Popen[bytes]":
        """The command, the same on every node of `count`. `first`: the node where all meet."""
        at, case = self.nodes[first].address, self.case
        nodes = f"{case.nodes - 1}:{case.nodes}" if case.elastic else str(count)
        command = [
            str(ROOT / "launch" / "torchrun.sh"),
            *arguments(self.given, self.disk),
            *(LOOP if self.known is None else ["mode=train"]),
            f"trainer.layouts={case.layouts}",
            "trainer.memory_interval=1",
            f"trainer.save_interval={10**6}",
            "trainer.checkpoint.replicas=1",
            f"trainer.collective_timeout={SILENT_S:g}",
            f"cluster.ray_address={at}:{RAY_PORT}",
            *(["trainer.checkpoint.take_over=true"] if case.elastic and case.nodes == 2 else []),
            *more,
        ]
        meet = {"NNODES": nodes, "NODE_RANK": str(rank), "MASTER_ADDR": f"node{first}"}
        return self.nodes[number].start(
            *command, directory=self.top, log=log, **self.environment, **meet
        )

    def again(self) -> None:
        """The same command on the nodes that are left: first as it was, which of one node alone is
        refused.
        """
        lead, count = self.left[0], len(self.left)
        if self.case.first and self.case.what == NODE:
            self.ray(lead)
        if self.case.asked:
            refused = self.top / "refused.log"
            self.start(lead, refused, count, 0, lead).wait(END_S)
            if not REFUSED.search(refused.read_text()):
                self.found.problems.append("goes on without take_over")
        over = ["trainer.checkpoint.take_over=true"] if count == 1 else []
        self.late = list(self.left)
        self.runs = {
            number: self.start(number, self.log_of(number), count, rank, lead, *over)
            for rank, number in enumerate(self.left)
        }

    # --- the loss ---------------------------------------------------------------------------------

    def lose(self, gone: int) -> None:
        """Behind the line of the step that was drawn, in the middle of the next."""
        case, found, log = self.case, self.found, self.logs[0]
        job = self.nodes[0].see(self.disk / JOB)
        await_that(lambda: self.told_in(log) >= case.step, BEGIN_S, "the run begins", log)
        self.rows_before = rows_of(job)
        step_s = min(row["time/step_s"] for row in self.rows_before.values())
        time.sleep(case.share * step_s)
        found.phase = (job / "logs" / "latest" / "phase_rank_0").read_text().strip()
        if case.what == NODE:
            self.nodes[gone].lose(case.silent)
        elif case.what == RANK:
            psutil.Process(ranks_of(self.runs[gone].pid)[0]).kill()
        else:
            self.nodes[gone].cut(True)
        found.told = self.told_in(log)
        if case.what == CUT:
            time.sleep(case.cut_s)
            self.nodes[gone].cut(False)

    def told_in(self, log: Path) -> int:
        told = TOLD.findall(log.read_text())
        return int(told[-1]) if told else 0

    # --- what came of it --------------------------------------------------------------------------

    def judge(self, before: Rows) -> None:
        found, problems = self.found, self.found.problems
        jobs = [self.nodes[one].see(self.disk / JOB) for one in self.left]
        found.had = int(max(row["checkpoint/replicated"] for row in before.values()))
        # the first is that of the loss: a run that grows again goes on once more
        logs = [*self.logs, *sorted(self.top.glob("again*.log"))]
        told_again = AGAIN_TOLD.search("\n".join(log.read_text() for log in logs))
        if told_again is None and (self.case.what != CUT or self.late):  # else unnoticed
            problems.append("LOST nothing came back, or it does not say which steps are made again")
            return
        found.back = int(told_again[2]) if told_again else found.told
        if found.back < found.had:
            problems.append(f"LOST step {found.had}, which two nodes had; {found.back} came back")
        if found.again > AGAIN:
            problems.append(f"{found.again} steps made again")
        told = [rows_of(job) for job in jobs]
        after = {step: row for rows in told for step, row in rows.items()}
        if missing := set(range(found.back + 1, STEPS + 1)) - set(after):
            problems.append(f"steps {sorted(missing)} are not told")
        dealt: Groups = {}
        for number, job in enumerate(jobs):
            if (job / "buffer" / JOURNAL.name).exists():
                shutil.copytree(job / "buffer", self.top / f"left{number}")
                dealt = max(dealt, leases(self.top / f"left{number}" / JOURNAL.name), key=len)
        groups, rows = self.known or (dealt, after | before)
        for step in range(STEPS):
            if dealt.get(step) != groups[step] or len(groups[step]) != 1:
                problems.append(f"WRONG step {step + 1} on groups {dealt.get(step)}")
        for some in [before, *(told if self.known else ())]:
            for step, row in some.items():
                problems += differs(step, row, rows[step])


def ranks_of(torchrun: int) -> list[int]:
    """Processes of the ranks that were started by that of process `torchrun`."""
    family = psutil.Process(torchrun).children(recursive=True)
    parents = {one.pid for one in family if "torch.distributed.run" in one.cmdline()}
    return [one.pid for one in family if one.ppid() in parents and "rft.train" in one.cmdline()]


def differs(step: int, row: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in ("num_tokens", "reward/mean"):
        if row.get(name) != wanted.get(name):
            yield f"WRONG step {step}: {name} {row.get(name)}, not {wanted.get(name)}"
    if abs(row["loss"] - wanted["loss"]) > TOLERANCE:
        yield f"WRONG step {step}: loss {row['loss']}, not {wanted['loss']}"


def await_that(is_so: Callable[[], bool], within_s: float, what: str, log: Path) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {within_s:g} s: {what}\n{log.read_text()[-3000:]}")
        time.sleep(LOOK_S)


# --- what is told ---------------------------------------------------------------------------------


def say_one(one: Outcome) -> None:
    came = f"two nodes had {one.had}, {one.back} came back, {one.again} again"
    words = f"{one.told} told, lost while {one.phase}; {came}; {one.seconds:.1f} s"
    print(f"{one.case.seed}: {one.case.words}; {words}", *one.problems, sep="\n  ", flush=True)


def say(found: list[Outcome], asked: argparse.Namespace) -> None:
    kinds = sorted({one.case.words for one in found})
    table = []
    for kind in kinds:
        mine = [one for one in found if one.case.words == kind]
        row = [kind, str(len(mine)), str(max(one.again for one in mine))]
        row += [f"{report.median([one.seconds for one in mine]):.1f}"]
        table.append([*row, str(sum(bool(one.problems) for one in mine))])
    report.table(
        "whole runs that lost a node", ("which, how", "runs", "again", "seconds", "bad"), table
    )
    words = [problem for one in found for problem in one.problems]
    counts = {
        "runs": len(found),
        "lost": sum(one.startswith("LOST") for one in words),
        "wrong": sum(one.startswith("WRONG") for one in words),
        "other": sum(not one.startswith(("LOST", "WRONG")) for one in words),
        "again": max(one.again for one in found),
    }
    report.last_line(
        "node_loss",
        {},
        counts,
        {
            "steps": STEPS,
            "nodes": asked.nodes,
            "ranks": asked.nodes * asked.ranks,
            "load": round(os.getloadavg()[0], 1),
        },
        report.versions("torch", "megatron-core", "ray"),
        not words and asked.count >= CLAIMED,
    )


if __name__ == "__main__":
    main()
