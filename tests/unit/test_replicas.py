"""Parts of states on two nodes: who holds whose, what is whole, who is believed; nodes that are
lost with their disks.
"""

import mmap
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from states import PATIENCE, Ranks, State, apart, equal, trainer_config, until, whole

from bench.faults.nodes import Cluster
from rft.buffer.journal import Journal, payloads
from rft.checkpoint import fence, grants, journal_copy, kept, replicas
from rft.checkpoint.grants import NodeKnown
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.neighbours import Seat, refusals
from rft.checkpoint.parts import choose
from rft.checkpoint.peers import (
    AgentRefused,
    Offer,
    PeerLine,
    Remembered,
    RunKey,
    Welcome,
    Whole,
    dial,
    greet,
    listen,
    remember,
)
from rft.checkpoint.replicas import (
    Gone,
    Grant,
    Held,
    Look,
    PartTaken,
    Roll,
    There,
    held_by,
    peer_of,
)
from rft.ground.errors import ConfigError
from rft.ground.process import adopt_orphans

TRAINER = Path(__file__).with_name("kept_trainer.py")


def test_every_part_is_held_on_the_next_node() -> None:
    nodes = ["a", "a", "b", "b", "c", "c"]
    assert [peer_of(rank, nodes) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [held_by(rank, nodes) for rank in (0, 2)] == [[4], [0]]
    uneven = ["a", "b", "a", "a"]
    assert [peer_of(rank, uneven) for rank in range(4)] == [1, 0, 1, 1]
    assert held_by(1, uneven) == [0, 2, 3]
    assert peer_of(0, ["a", "a"]) is None
    for rank in range(6):
        assert nodes[peer_of(rank, nodes) or 0] != nodes[rank]


def test_a_state_is_whole_when_every_rank_has_said_so() -> None:
    roll = Roll(2)
    assert roll.hear(1, There("n1", 1, "r1")) is None
    assert roll.hear(1, There("n2", 2, "r1")) is None
    assert roll.hear(0, There("n1", 1, "r0")) == Whole("n1", 1, ["r0", "r1"])
    assert roll.hear(0, Gone("n2")) == Gone("n2") and roll.hear(1, Gone("n2")) is None
    assert roll.hear(0, There("n2", 2, "r0")) == Gone("n2")
    assert roll.hear(0, There("n0", 0, "r0")) is None
    assert roll.newest == Whole("n1", 1, ["r0", "r1"])


def offer(step: int, rank: int, receipt: str, place: str = "", own: bool = True) -> Offer:
    at = (place, 1) if place else None
    return Offer(
        id=f"n{step}", step=step, epoch=1, world=2, rank=rank, receipt=receipt, is_own=own, at=at
    )


def test_the_newest_state_whose_parts_are_all_somewhere_is_chosen() -> None:
    offers = [offer(3, 0, "x", "a"), offer(2, 0, "y", "a"), offer(2, 1, "z", "a", own=False)]
    (found,), said = choose(offers, [])
    assert (found.step, found.receipts, found.at) == (2, ["y", "z"], [[("a", 1)], [("a", 1)]])
    assert said == []


def test_who_tells_another_receipt_is_not_read() -> None:
    true = [offer(2, 0, "y", "a"), offer(2, 1, "z", "b"), offer(2, 1, "z", "a", own=False)]
    lie = offer(2, 0, "other", "b", own=False)
    for order in (true + [lie], [lie] + true):
        (found,), said = choose(order, [])
        assert found.receipts == ["y", "z"] and found.at[0] == [("a", 1)]
        assert len(said) == 1 and "('b', 1) tells another receipt of rank 0's part" in said[0]
    # what agents know to be whole is more than what a rank's own agent tells
    (found,), said = choose(true + [lie], [Whole("n2", 2, ["other", "z"])])
    assert found.receipts == ["other", "z"] and "('a', 1)" in said[0]


def test_memory_that_does_not_do_is_told_of_every_node() -> None:
    def seat(node: str, free: int, wanted: int = 2 * 10**9, held: int = 0) -> Seat:
        return Seat(node, ("10.0.0.1", 1), 10**9, wanted, free, held, None, 0)

    enough = [seat("a", 4 * 10**9), seat("b", 4 * 10**9)]
    assert refusals(enough) == ""
    said = refusals([seat("a", 3 * 10**9), seat("a", 3 * 10**9), seat("b", 10**9)])
    assert "a needs 6.000 GB of memory: 4.000 for what each of its 2 rank(s) stages" in said
    assert "b needs 6.000 GB" in said and "1.000 GB are free" in said
    assert "needs two nodes, and all 2 rank(s) are on a" in refusals([seat("a", 0)] * 2)
    # ranks that come back: their slots are there, and a part that agents before hold goes when the
    # first new one has come
    again = [seat(node, 10**9, wanted=0, held=10**9) for node in "ab"]
    assert refusals(again) == ""
    said = refusals([seat(node, 10**9 - 1, wanted=0, held=10**9) for node in "ab"])
    assert "b needs 2.000 GB" in said and "1.000 GB are free, and 1.000 GB come back" in said


def test_an_agent_of_another_run_is_refused_and_so_is_who_does_not_know_the_secret() -> None:
    run = RunKey.new()
    for other, why in ((RunKey.new(), f"of run {run.name}"), (RunKey(run.name, "0"), "secret")):
        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(dial, server.getsockname(), other, "read", 0, 1)
            line = PeerLine(server.accept()[0])
            with pytest.raises(OSError):
                greet(line, run)
            line.close()
            with pytest.raises(AgentRefused, match=why):
                asked.result(PATIENCE)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1, 1)])
def test_a_node_that_is_lost_costs_no_state_that_two_nodes_have(
    shape: tuple[int, ...], memory_path: Path
) -> None:
    cluster = Cluster(memory_path / "c", shape, room_s=PATIENCE)
    try:
        for step in (1, 2, 3):
            assert cluster.make_step() == cluster.world and cluster.await_whole(step)
        cluster.lose("node0")
        cluster.end_ranks()
        assert cluster.found(cluster.living()) == (3, [])
    finally:
        cluster.close()


def test_bytes_that_have_changed_are_taken_from_another_node(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(memory_path / "c", (1, 1), room_s=PATIENCE)
    try:
        assert cluster.make_step() == 2 and cluster.await_whole(1)
        cluster.end_ranks()
        cluster.lie(random.Random(0), "node1")
        assert cluster.found(["node1"]) == (1, [])
        assert "was changed" in caplog.text
    finally:
        cluster.close()


def test_a_part_that_never_comes_holds_no_slot_for_ever(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank's agent has died before it said so: nobody else knows."""
    monkeypatch.setattr(replicas, "HELD_S", 0.5)
    cluster = Cluster(memory_path / "c", (1, 1), room_s=PATIENCE)
    try:
        assert cluster.make_step() == 2 and cluster.await_whole(1)
        cluster.step = 2
        assert cluster.stage(cluster.ranks[0], 2)
        assert cluster.make_step() == 2 and cluster.await_whole(3)
    finally:
        cluster.close()


def test_a_peer_without_room_holds_no_slot_for_ever(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the first state, and refuses each one behind it, again and again."""
    room = iter((2**40,))
    monkeypatch.setattr(replicas, "STALLED_S", 2 * replicas.AGAIN_S)
    monkeypatch.setattr(replicas.host_memory, "available", lambda: next(room, 0))
    cluster = Cluster(memory_path / "c", (1, 1), room_s=PATIENCE)
    try:
        assert cluster.make_step() == 2 and cluster.await_whole(1)
        assert [cluster.make_step() for _ in range(3)] == [2, 2, 2]
    finally:
        cluster.close()


def test_nodes_without_ranks_are_asked_before_a_step_is_made_again(memory_path: Path) -> None:
    cluster = Cluster(memory_path / "c", (1, 1, 1), room_s=PATIENCE)
    try:
        for step in (1, 2):
            assert cluster.make_step() == 3 and cluster.await_whole(step)
        rank = cluster.ranks[1]  # its part lies on node2, too
        [slot] = [window.slot for begin, window in rank.told if begin.step == 2]
        cluster.end_ranks()
        with mmap.mmap(rank.settings.slots[slot], cluster.slot_bytes) as place:
            place[0] ^= 0xFF
        assert cluster.found(["node0", "node1"]) == (2, [])
    finally:
        cluster.close()


def granting(run: RunKey, control: Path, ends: ExitStack) -> tuple[str, int]:
    """Where somebody listens who grants attempts as an agent does."""
    server = ends.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve(line: PeerLine, _: Any) -> None:
        line.send(Welcome())
        asked = line.receive(Grant)
        line.send(PartTaken(fence.grant(control, asked.epoch, asked.token)))

    listen(server, run, serve)
    return server.getsockname()


def test_an_attempt_goes_on_that_most_agents_have_granted(tmp_path: Path) -> None:
    run, stranger = RunKey.new(), RunKey.new()
    starts = [tmp_path / name for name in ("one", "other", "new")]
    with ExitStack() as ends:
        agents = [granting(run, tmp_path / f"node{n}", ends) for n in range(2)]
        silent = granting(stranger, tmp_path / "cut off", ends)
        with socket.create_server(("127.0.0.1", 0)) as ended:
            gone = ended.getsockname()
        for control in starts[:2]:
            remember(control, Remembered(run, 1, [*agents, silent]))
            assert fence.take_epoch(control, above=1) == 2
        first, other, new = (NodeKnown.of(control) for control in starts)
        assert [first.newest, new.newest, new.last] == [2, 0, None]
        grants.require(starts[0], 2, [first], takes_over=False)
        # another start has the same number, and comes too late, whatever its operator says; also
        # one whose first node is new, and knows nothing itself
        assert fence.take_epoch(starts[2], above=1) == 2
        for control, nodes in ((starts[1], [other]), (starts[2], [new, other])):
            with pytest.raises(ConfigError, match="attempt 2 of this run does not go on: .* anoth"):
                grants.require(control, 2, nodes, takes_over=True)
        # the agents publish nothing of the attempt before
        assert [fence.newest_epoch(tmp_path / f"node{n}") for n in range(2)] == [2, 2]
        for at, is_enough in (([agents[0], silent], False), ([gone, gone, silent], True)):
            remember(starts[0], Remembered(run, 2, at))
            nodes = [NodeKnown.of(starts[0])]
            if not is_enough:
                with pytest.raises(ConfigError, match="1 of 2 agents do not answer .*take_over"):
                    again = fence.take_epoch(starts[0])
                    grants.require(starts[0], again, nodes, takes_over=False)
            again = fence.take_epoch(starts[0])
            grants.require(starts[0], again, nodes, takes_over=not is_enough)
        # where all nodes had one directory it decides, if the first node still sees it
        remember(starts[0], Remembered(run, 9, [silent], is_shared=True))
        seen = NodeKnown.of(starts[0])
        grants.require(starts[0], 10, [seen, new], takes_over=False)
        with pytest.raises(ConfigError, match="1 of 1 agents do not answer"):
            grants.require(starts[2], 10, [new, seen], takes_over=False)


def test_a_node_that_was_cut_off_hears_that_the_others_have_gone_on(
    memory_path: Path, tmp_path: Path
) -> None:
    """It asks where agents were before; those have ended, and newer ones answer there."""
    cluster = Cluster(memory_path / "c", (1, 1), room_s=PATIENCE)
    try:
        with socket.create_server(("127.0.0.1", 0)) as ended:
            at = ended.getsockname()
        known = NodeKnown(0, Remembered(cluster.run, 0, [at]))
        epoch = fence.take_epoch(tmp_path)
        grants.require(tmp_path, epoch, [known], takes_over=False)  # nobody is there
        rank = cluster.ranks[1]
        told = msgspec.structs.replace(rank.settings.replicas, before=[at])
        rank.settings = msgspec.structs.replace(rank.settings, replicas=told)
        cluster.replace_agent(rank)

        def is_refused() -> bool:
            try:
                grants.require(tmp_path, epoch, [known], takes_over=True)
            except ConfigError as error:
                return "does not go on: attempt 1 is another start's" in str(error)
            return False

        until(is_refused, "the newer agent answers")
        line, _ = dial(at, cluster.run, "read", 0, 1)
        line.send(Look())
        assert line.receive(Held) == Held(is_resting=True)  # nothing of the earlier one
        line.close()
        assert cluster.make_step() == 2 and cluster.await_whole(1)
    finally:
        cluster.close()


def test_word_of_an_older_state_that_comes_late_changes_nothing(memory_path: Path) -> None:
    """Two threads of the first agent write on one line."""
    cluster, heard = Cluster(memory_path / "c", (1, 1), room_s=PATIENCE), list[Any]()
    try:
        one = replicas.Replicas(cluster.ranks[1].settings, heard.append, lambda identity: None)
        for word in (Whole("n2", 2, []), Whole("n1", 1, [])):
            one._hear(word)
        assert [word.id for word in one.held().whole] == ["n2"] and len(heard) == 1
    finally:
        cluster.close()


def copied(
    journal: Path, control: Path, position: int, known: dict[str, tuple[int, int]] | None = None
) -> int:
    """Bytes that went over the connection. `known`: of one that goes on."""
    ours, theirs = socket.socketpair()
    sender, taker = PeerLine(ours), PeerLine(theirs)
    sent, send_bytes = [], sender.send_bytes
    for line in (sender, taker):
        line.limit = 2**20

    class Counting(PeerLine):
        def send_bytes(self, data: Any) -> None:
            sent.append(len(data))
            send_bytes(data)

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(
            lambda: journal_copy.take(
                taker, taker.receive(journal_copy.JournalFiles), journal_copy.directory(control)
            )
        )
        counting = Counting(ours)
        counting.limit = 2**20
        journal_copy.send(counting, journal, position, known)
        told.result(PATIENCE)
    for line in (sender, taker):
        line.close()
    return sum(sent)


def test_the_journal_travels_piece_by_piece_and_takes_its_place(tmp_path: Path) -> None:
    control, place = tmp_path / "control", tmp_path / "b" / "journal"
    journal = Journal(tmp_path / "a", segment_bytes=4000)
    first = [b"%d" % n * 100 for n in range(60)]
    for record in first:
        journal.append([record])
    journal.sync()
    position = journal.position
    journal.append([b"not durable"])
    size = copied(journal.directory, control, position)
    assert size == position and copied(journal.directory, control, position) == 0
    with pytest.raises(journal_copy.JournalMissing, match="is durable up to"):
        journal_copy.files_of(journal.directory, journal.position + 1)
    # a compaction drops files; what is sent is what is new
    cut = journal.cut(position)
    assert cut is not None
    journal.install(journal.write_base(cut, [b"kept"]))
    journal.append([b"more"])
    journal.sync()
    assert copied(journal.directory, control, position) < size / 2
    wanted = list(payloads(journal.directory))
    assert wanted[0] == b"kept" and wanted[-1] == b"more"
    assert journal_copy.bring_back(control, place) == journal.position
    assert journal_copy.bring_back(control, place) is None  # one is there
    assert list(payloads(place)) == wanted
    opened = Journal(place)
    assert opened.position == journal.position and opened.append([b"on"])
    for one in (journal, opened):
        one.close()
    # the run was on this node, then on another one, which has brought its journal here: the own one
    # is older, however long it is
    os.utime(place / "durable", ns=(1, 1))
    assert journal_copy.bring_back(control, place) is not None
    assert list(payloads(place)) == wanted
    aside = place.with_name(f"{place.name}{journal_copy.OLD}")
    assert list(payloads(aside)) == [*wanted, b"on"]


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("size", [10, 20, 40])
def test_what_a_journal_that_was_moved_away_has_left_is_no_part_of_the_new_ones_copy(
    tmp_path: Path, size: int, goes_on: bool
) -> None:
    """Which is shorter, as long, or longer, and has files of the same names; for a connection that
    goes on as for a new one.
    """
    known = dict[str, tuple[int, int]]() if goes_on else None
    control, place, names = tmp_path / "control", tmp_path / "b" / "journal", list[set[str]]()
    for word, count in ((b"old", 20), (b"new", size)):
        journal = Journal(tmp_path / word.decode(), segment_bytes=1000)
        for number in range(count):
            journal.append([b"%s %3d" % (word, number) * 20])
        journal.sync()
        assert copied(journal.directory, control, journal.position, known) == journal.position
        names.append({path.name for path in journal.directory.glob("*.log")})
        journal.close()
    assert len(names[0] & names[1]) > 1
    told = journal_copy.bring_back(control, place)
    journal = Journal(place)
    assert journal.position == told
    journal.close()
    assert list(payloads(place)) == list(payloads(tmp_path / "new"))


def test_a_connection_compares_what_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, digest, known = list[int](), journal_copy._digest, dict[str, tuple[int, int]]()

    def counted(descriptor: int, count: int) -> str:
        compared.append(count)
        return digest(descriptor, count)

    monkeypatch.setattr(journal_copy, "_digest", counted)
    journal = Journal(tmp_path / "a")
    for number in range(3):
        journal.append([b"%d" % number * 100])
        journal.sync()
        copied(journal.directory, tmp_path / "control", journal.position, known)
    assert not compared, "what this connection has sent"
    assert copied(journal.directory, tmp_path / "control", journal.position, {}) == 0
    assert compared == [journal.position] * 2, "by both ends"
    journal.close()


def test_a_copy_that_breaks_off_opens_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the buffer is lost while a compacted journal is on its way."""
    control = tmp_path / "control"
    journal = Journal(tmp_path / "a", segment_bytes=4000)
    for number in range(30):
        journal.append([b"%d" % number * 100])
    journal.sync()
    copied(journal.directory, control, journal.position)
    before = list(payloads(journal.directory))
    journal.append([b"behind the copy" * 400])
    cut = journal.cut(journal.position)
    assert cut is not None
    journal.install(journal.write_base(cut, [b"kept" * 100, b"too"]))
    journal.append([b"more"])
    journal.sync()
    monkeypatch.setattr(journal_copy, "SYNC_S", 0.1)  # for word from whoever is gone
    take_piece = journal_copy._piece
    for whole_pieces in (0, 1):  # of the base, of the log behind it
        left = iter(range(whole_pieces))

        def piece(line: PeerLine, descriptor: int, size: int, left: Any = left) -> int:
            if next(left, None) is None:
                os.write(descriptor, b"torn")
                raise ConnectionError("its node is gone")
            return take_piece(line, descriptor, size)

        monkeypatch.setattr(journal_copy, "_piece", piece)
        with pytest.raises(OSError):
            copied(journal.directory, control, journal.position)
        place = tmp_path / f"b{whole_pieces}" / "journal"
        assert journal_copy.bring_back(control, place) is not None
        opened = Journal(place)
        assert list(payloads(place)) == before and opened.append([b"on"])
        opened.close()
    journal.close()


def test_a_new_run_without_a_second_node_is_refused(memory_path: Path) -> None:
    config = trainer_config(memory_interval=1, replicas=1)
    manager = CheckpointManager(memory_path / "c", Ranks(1).member(0), config)
    with pytest.raises(ConfigError, match="replicas=1 needs two nodes, and all 1 rank"):
        manager.start(whole())


@pytest.fixture
def root(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(kept, "RELEASE_S", PATIENCE)  # agents get a core when they get one
    adopt_orphans()
    yield memory_path / "c"
    for control in memory_path.glob("node*/control"):
        for lock in fence.living_agents(control):
            psutil.Process(fence.holder(lock)).kill()
        until(lambda control=control: fence.living_agents(control) == [], "no agent is left")


def replicas_of(pid: int) -> int:
    """Whose memory a process holds."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    held = [link for link in links if "rft-checkpoint-replica" in os.readlink(link)]
    return len({link.stat().st_ino for link in held})


def test_a_run_goes_on_in_another_layout_on_the_node_that_is_left(root: Path) -> None:
    command = [sys.executable, str(TRAINER), str(root), "2", "1", "apart"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"staged\n"
        trainer.kill()
    lost = root.parent / "node0"
    os.kill(fence.holder(fence.lock_path(lost / "control", 1, 0)), 9)
    shutil.rmtree(lost)
    for path in root.glob("step_*/*.bin"):
        path.write_bytes(b"")  # whoever reads the disk finds damage
    config, state = trainer_config(memory_interval=1, replicas=1), whole()
    where = apart(root, 1)
    manager = CheckpointManager(root, Ranks(1).member(0), config, epoch=2, **where)
    holder = fence.holder(fence.lock_path(where["control"], 1, 1))
    assert replicas_of(holder) == 2
    loop: Any = manager.load(state)
    assert replicas_of(holder) == replicas_of(os.getpid()) == 1  # of the state that was read
    assert (loop["step"], loop["seen"]) == (3, 3)
    assert equal(state, whole().fill(3)) and isinstance(state, State)
    assert manager.reached == 3
    manager.start(state)  # without replicas, as there is no other node
    assert "checkpoint/replicated" not in manager.metrics()
    old = fence.lock_path(where["control"], 1, 1)
    for step in (4, 5):  # until both slots hold newer ones, all that there is is with it
        assert old in fence.living_agents(where["control"])
        manager.save(step, state.fill(step), {}, full=False, memory=True)
        manager.before_update()
    manager.save(6, state.fill(6), {}, full=False, memory=True)
    until(lambda: old not in fence.living_agents(where["control"]), "the agent before is gone")
    manager.close(PATIENCE)
