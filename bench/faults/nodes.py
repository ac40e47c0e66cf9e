"""Class 7: nodes that are lost with their disks, agents that die and lie, while parts of states go
from node to node.

    Cluster: a real `Agent` per rank, each node with a control directory of its own; the trainer
    here ─► steps ─► a node is lost: its agents are killed, its directory is removed; all ranks end
         ─► what the nodes that are left hold ─► judged, byte by byte

In: a seed. Out: problems, in the words of `judge`. No torch. Invariant: of a case nothing is left.
"""

import contextlib
import mmap
import os
import random
import select
import shutil
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bench.faults.job import PAGE, fork
from bench.faults.judge import Tally
from bench.faults.toy import Cut, plan, settings
from rft.checkpoint import fence, sharding
from rft.checkpoint.agent import Agent
from rft.checkpoint.memory import Memory, states
from rft.checkpoint.peers import Remembered, RunKey, remember
from rft.checkpoint.records import (
    Begin,
    CheckpointSettings,
    Drop,
    Freed,
    Release,
    Replicated,
    Replication,
    SavedPart,
    Window,
)
from rft.checkpoint.storage import Disk, LocalStorage
from rft.checkpoint.wire import Wire
from rft.ground import durable

PATIENCE_S = 20.0
ROOM_S = 0.3
SHAPES = ((1, 1), (2, 2), (1, 1, 1), (2, 1), (2, 2, 2))  # ranks of each node
KINDS = ("node", "node and an agent before", "node, and a lie", "ranks", "ranks, and a lie")


@dataclass
class RankEnd:
    """The trainer's end of one agent."""

    settings: CheckpointSettings
    wire: Wire
    pid: int
    free: list[int] = field(default_factory=lambda: [0, 1])
    kept: list[tuple[str, int]] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)  # of saves whose slots are not free
    is_gone: bool = False


class Cluster:
    """`shape`: ranks of each node. `room_s`: that a state waits for a slot."""

    def __init__(self, top: Path, shape: tuple[int, ...], scale: int = 1, room_s: float = ROOM_S):
        self.top, self.scale, self.epoch, self.room_s = top, scale, 1, room_s
        self.nodes = [f"node{n}" for n, count in enumerate(shape) for _ in range(count)]
        self.world = len(self.nodes)
        self.run, self.step, self.whole = RunKey.new(), 0, 0
        self.size = max(sharding.extent(one) for one in self.regions)
        self.slot_bytes = -(-self.size // PAGE) * PAGE
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in self.nodes]
        at = [one.getsockname()[:2] for one in listeners]
        (top / "disk").mkdir(parents=True)
        for node in set(self.nodes):
            fence.note_epoch(self.control(node), self.epoch)
            remember(self.control(node), Remembered(self.run, self.epoch, at))
        self.ranks: list[RankEnd] = []
        self._listeners = [one.detach() for one in listeners]
        for rank, node in enumerate(self.nodes):
            slots = [os.memfd_create("rft-checkpoint-slot") for _ in range(2)]
            for slot in slots:
                os.ftruncate(slot, self.slot_bytes)
            told = settings(
                str(top / "disk"),
                str(self.control(node)),
                rank,
                self.world,
                self.epoch,
                slots,
                self.slot_bytes,
            )
            replicas = Replication(
                run=self.run.name,
                secret=self.run.secret,
                nodes=self.nodes,
                at=at,
                listener=self._listeners[rank],
            )
            told = msgspec.structs.replace(told, replicas=replicas)
            self.ranks.append(RankEnd(told, *self._start(told)))

    @property
    def regions(self) -> list[list[Any]]:
        return plan(self.scale, self.world)

    def control(self, node: str) -> Path:
        return self.top / node / "control"

    def _start(self, told: CheckpointSettings) -> tuple[Wire, int]:
        ours, theirs = socket.socketpair()
        others = [one.wire.end for one in self.ranks]

        def serve() -> None:
            for end in (ours, *others):
                end.close()
            slots = [slot for one in self.ranks for slot in one.settings.slots]
            for number in {*self._listeners, *slots} - set(told.inherited):
                with contextlib.suppress(OSError):  # as a program that is started has its own alone
                    os.close(number)
            lock = fence.lock_path(Path(told.control), told.epoch, told.rank)
            held = durable.lock(lock, wait_s=PATIENCE_S) if lock.exists() else fence.hold(lock)
            assert held is not None
            Agent(Wire.of_agent(theirs), told, LocalStorage(Path(told.root), Disk())).run()

        pid = fork(serve)
        theirs.close()
        return Wire.of_trainer(ours), pid

    # --- steps ------------------------------------------------------------------------------------

    def hear(self, within_s: float) -> bool:
        """One report of any agent, if one comes."""
        ends = {rank.wire.end: rank for rank in self.ranks if not rank.is_gone}
        ready = select.select(list(ends), [], [], within_s)[0] if ends else []
        for end in ready:
            rank, report = ends[end], ends[end].wire.receive()
            if report is None:
                rank.is_gone = True
            elif isinstance(report, Freed):
                if report.slot >= 0 and report.slot not in rank.free:
                    rank.free.append(report.slot)
                    rank.told = [one for one in rank.told if one[1].slot != report.slot]
            elif isinstance(report, Replicated):
                self.whole = max(self.whole, report.step)
        return bool(ready)

    def hear_all(self, within_s: float = 0.0) -> None:
        while self.hear(within_s):
            within_s = 0.0

    def stage(self, rank: RankEnd, step: int) -> bool:
        """As `KeptStates` does; False: the state was left out."""
        while len(rank.kept) > 1:
            rank.wire.send(Release(id=rank.kept.pop(0)[0]))
        end = time.monotonic() + self.room_s
        while not rank.free and not rank.is_gone and time.monotonic() < end:
            self.hear(0.02)
        regions = self.regions[rank.settings.rank]
        identity, count = f"e{self.epoch:04d}n{step:04d}", sharding.extent(regions)
        layout = sharding.digest(self.regions)
        lead = rank.settings.rank == 0
        begin = Begin(
            id=identity,
            step=step,
            outputs=[],
            small={"rng": b"s%d" % step},
            local={},
            loop={"step": step, "variant": 0, "scale": self.scale} if lead else None,
            about={"toy": True} if lead else None,
            kept=SavedPart(regions=regions, layout=layout, bytes=count),
        )
        rank.wire.send(begin)
        if not rank.free:
            rank.wire.send(Drop(id=identity, why="both slots are in use"))
            return False
        slot = rank.free.pop(0)
        with mmap.mmap(rank.settings.slots[slot], self.slot_bytes) as place:
            place[:count] = Cut(step, 0, self.scale).file(regions)
        window = Window(id=identity, slot=slot, start=0, stop=count, last=True)
        rank.wire.send(window)
        rank.told.append((begin, window))
        rank.kept.append((identity, step))
        return True

    def make_step(self) -> int:
        """All ranks stage a state; how many did."""
        self.step += 1
        return sum(self.stage(rank, self.step) for rank in self.ranks)

    def await_whole(self, step: int, within_s: float = PATIENCE_S) -> bool:
        end = time.monotonic() + within_s
        while self.whole < step and time.monotonic() < end:
            self.hear(0.05)
        return self.whole >= step

    # --- faults -----------------------------------------------------------------------------------

    def replace_agent(self, rank: RankEnd) -> None:
        """It dies; the next one is told what the link tells it."""
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
        rank.wire.close()
        rank.wire, rank.pid = self._start(rank.settings)
        kept = {identity for identity, _ in rank.kept}
        for begin, window in rank.told:
            rank.wire.send(begin)
            rank.wire.send(window)
            if begin.id not in kept:
                rank.wire.send(Release(id=begin.id))
        rank.is_gone = False

    def lose(self, node: str) -> None:
        for rank in self.ranks:
            if self.nodes[rank.settings.rank] == node:
                os.kill(rank.pid, signal.SIGKILL)
        for rank in self.ranks:
            if self.nodes[rank.settings.rank] == node:
                os.waitpid(rank.pid, 0)
                os.close(rank.settings.replicas.listener)  # type: ignore[union-attr]
                rank.pid = 0
        shutil.rmtree(self.top / node)

    def end_ranks(self) -> None:
        for rank in self.ranks:
            rank.wire.close()
            rank.is_gone = True

    def living(self) -> list[str]:
        return [one for one in dict.fromkeys(self.nodes) if self.control(one).exists()]

    def lie(self, chance: random.Random, node: str) -> None:
        """A byte of a part that is held on `node` changes."""
        pids = [rank.pid for rank in self.ranks if self.nodes[rank.settings.rank] == node]
        names = ("rft-checkpoint-replica", "rft-checkpoint-slot")
        for link in sorted(Path(f"/proc/{chance.choice(pids)}/fd").iterdir()):
            with contextlib.suppress(OSError):
                if any(name in os.readlink(link) for name in names[: chance.choice((1, 1, 2))]):
                    with link.open("r+b") as file:
                        file.seek(chance.randrange(self.size))
                        byte = file.read(1) or b"\0"
                        file.seek(-1, 1)
                        file.write(bytes([byte[0] ^ 0xFF]))

    def close(self) -> None:
        for rank in self.ranks:
            if rank.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
                os.close(rank.settings.replicas.listener)  # type: ignore[union-attr]
            rank.wire.close()
            for slot in rank.settings.slots:
                os.close(slot)
        shutil.rmtree(self.top, ignore_errors=True)

    # --- what is left -----------------------------------------------------------------------------

    def found(self, nodes: list[str]) -> tuple[int, list[str]]:
        """Step of the newest state that comes back on a rank of every one of `nodes`, and what is
        wrong with it.
        """
        memories, problems = [Memory(self.control(node)) for node in nodes], []
        for memory, node in zip(memories, nodes, strict=True):
            left = fence.await_agents(self.control(node), PATIENCE_S, lambda line: None)
            problems += [f"{path.name} does not come to rest" for path in left]
            memory.look()
        told = [memory.told() for memory in memories]
        step = 0
        try:
            for others in (False, True):
                for state in states(memories[0], told, others)[0]:
                    if all(self._is_read(memory, state, problems) for memory in memories):
                        return state.step, problems
        finally:
            for memory in memories:
                memory.end(0, 1)
        return step, problems

    def _is_read(self, memory: Memory, state: Any, problems: list[str]) -> bool:
        from rft.checkpoint.chunks import Damaged

        try:
            files = memory.parts(state, self.run)
            for rank, regions in enumerate(self.regions):
                data = bytearray(files[rank].bytes)
                files[rank].fill([(0, memoryview(data))])
                if data != Cut(state.step, 0, self.scale).file(regions):
                    problems.append(f"WRONG rank {rank}'s part of step {state.step}")
            if files[0].receipt.loop != {"step": state.step, "variant": 0, "scale": self.scale}:
                problems.append(f"WRONG loop state of step {state.step}")
        except (Damaged, OSError):
            return False
        return True


def case(top: Path, seed: int) -> tuple[str, int, int, list[str]]:
    """(kind, last step, step that came back, problems)"""
    chance = random.Random(seed)
    kind, shape = chance.choice(KINDS), chance.choice(SHAPES)
    scale = chance.choice((1, 1, 3, 700))
    cluster = Cluster(top / str(seed), shape, scale)
    lost, problems = chance.choice(sorted(set(cluster.nodes))), []
    try:
        for _ in range(chance.randrange(1, 7)):
            cluster.make_step()
            if chance.random() < 0.5:
                cluster.hear_all(chance.choice((0.0, 0.002, 0.02, 0.05)))
        if kind == "node and an agent before":
            cluster.replace_agent(chance.choice(cluster.ranks))
            for _ in range(3):  # what it held for others comes again with a state
                cluster.make_step()
                if cluster.await_whole(cluster.step, PATIENCE_S / 4):
                    break
            else:
                problems.append("no state is whole after an agent's death")
        if kind.endswith("lie") and not cluster.await_whole(1):
            problems.append("no state is ever whole")
        if chance.random() < 0.5:  # in the middle of a step
            cluster.step += 1
            for rank in cluster.ranks[: chance.randrange(1, cluster.world + 1)]:
                cluster.stage(rank, cluster.step)
        time.sleep(chance.choice((0.0, 0.0, 0.001, 0.01, 0.05)))
        cluster.hear_all()
        acknowledged = cluster.whole
        if kind.startswith("node"):
            cluster.lose(lost)
        cluster.end_ranks()
        left = cluster.living()
        if kind.endswith("lie"):  # of what has its hash
            for node in left:
                fence.await_agents(cluster.control(node), PATIENCE_S, lambda line: None)
            cluster.lie(chance, chance.choice(left))
        # ranks come back on all nodes that are left, or on some
        come = chance.sample(left, chance.randrange(1, len(left) + 1))
        step, wrong = cluster.found(sorted(come))
        problems += wrong
        # with one node gone there is one copy of some parts, and a lie may be of that one
        if step < acknowledged and kind != "node, and a lie":
            problems.append(f"LOST step {acknowledged}, which two nodes had; {step} came back")
    finally:
        cluster.close()
    return f"{kind}, {len(set(cluster.nodes))} nodes", cluster.step, step, problems


def run(top: Path, count: int, seed: int) -> Tally:
    """Says, too, how many steps are made again after a state that came back."""
    tally, again = Tally("lost nodes"), Counter[int]()
    for number in range(seed, seed + count):
        kind, last, step, problems = case(top, number)
        tally.note(kind, f"seed {number}", problems)
        again[last - step if step else -1] += 1
    told = ", ".join(f"{steps}: {cases}" for steps, cases in sorted(again.items()))
    print(f"steps made again (-1: none came back): cases: {told}", flush=True)
    return tally
