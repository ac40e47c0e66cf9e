"""The order of the things that a step does, which is what a resume relies on."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.checkpoint.records import Committed, SaveFailed
from rft.config import Config, SynchronizerConfig, TrainerConfig
from rft.ground.device import choose
from rft.monitor import trace
from rft.monitor.logs import new_attempt
from rft.sync.style import Cadence
from rft.tools import timeline
from rft.trainer.feed import StepInput
from rft.trainer.gates import Gates
from rft.trainer.reporting import Profiler, SkippedSteps
from rft.trainer.saving import AGAIN_S, DiskPace, SaveTimes, save_times
from rft.trainer.trainer import Trainer

STEPS = 5


class Parts:
    """All of the trainer's parts; each notes what is asked of it."""

    def __init__(
        self,
        alone: bool = False,
        evaluated: int | None = None,
        by_saves: bool = False,
        exports: str = "never",
        ahead: Any = None,
    ) -> None:
        self.exports = exports
        self.check: Callable[[int], None] | None = None
        self.news: list[Committed] = []
        self.events: list[str] = []
        self.asked: list[int] = []
        self.unsaved: dict[int, bool] = {}
        note = self.note
        self.mesh = SimpleNamespace(broadcast=lambda item: item)  # a save needs no other rank
        self.models = SimpleNamespace(
            score=self.score, train_step=self.train_step, vitals=lambda: {"step": 0}
        )
        self.feed = SimpleNamespace(
            ahead=ahead,
            next=lambda step, stopping: StepInput([], {}, []),
            consumed=lambda step: note(f"consumed {step}"),
            mark=lambda: 0,
            retain=lambda loop: None,
            saved=lambda step: note(f"saved {step}"),
        )
        self.publisher = SimpleNamespace(
            start=self.publish,
            rest=lambda: note("rest"),
            wait=lambda: note("published"),
            release=lambda: note("published"),
            pop=dict,
            version=None,
            claim_save=lambda step: by_saves and self.unsaved.pop(step, False),
        )
        self.checkpoints = SimpleNamespace(
            requested=None,
            remembered=None,
            save=self.save,
            copy_now=lambda: note("copy now"),
            before_update=lambda: note("copied"),
            poll=self.poll,
            wait=lambda step: None,
            wait_exports=lambda: None,
            metrics=dict,
            newest=None,
        )
        self.evaluations = SimpleNamespace(
            alone=alone,
            at_startup=lambda version: None,
            at_end=lambda version: None,
            is_due=lambda version: version == evaluated,
            if_due=lambda version: note(f"evaluate {version}"),
        )

    def note(self, event: str) -> None:
        self.events.append(event)

    def publish(self, version: int, due: bool) -> None:
        self.note(f"{'publish' if due else 'offer'} {version}")
        if due:
            self.publisher.version, self.unsaved[version] = version, True

    def save(
        self,
        step: int,
        models: Any,
        loop: dict[str, Any],
        full: bool,
        weights: bool,
        version: bool,
        memory: bool,
        local: dict[str, bytes],
        later: bool,
    ) -> bool:
        kinds = [*["full"] * full, *["weights"] * weights, *["version"] * version]
        kinds += ["memory"] * memory + ["later"] * later
        self.note(" ".join(["save", str(step), *kinds]))
        self.checkpoints.requested = step if full else self.checkpoints.requested
        self.checkpoints.remembered = step if full or memory else self.checkpoints.remembered
        if self.exports == "always":
            done = {"collection": "", "name": "", "seconds": 0.0, "bytes": 0}
            self.news += [Committed(id=str(step), step=step, **done)]
        return True

    def poll(self) -> list[Committed]:
        found, self.news = self.news, []
        return found

    def ask(self, interval: int) -> bool:
        """Explorers that want weights after every fourth step."""
        self.asked.append(interval)
        return len(self.asked) % 4 == 0

    def score(self, part: Any, groups: Any, others: Any) -> tuple[Any, dict[str, float]]:
        self.note("score")
        return part, {}

    def train_step(
        self, part: Any, token_loss: Any, before_update: Any, updates: Any
    ) -> dict[str, float]:
        before_update()
        self.note("update")
        return {"loss": 1.0, "grad_norm": 1.0, "skipped": 0.0}


def trained(
    parts: Parts,
    save_times: SaveTimes | None = None,
    versions: str = "none",
    gates: Gates | None = None,
    **sync: Any,
) -> list[str]:
    """What the parts are asked for while the trainer makes STEPS steps."""
    config = TrainerConfig(total_steps=STEPS, save_hf_checkpoint=parts.exports)
    config.checkpoint.versions = versions  # type: ignore[assignment]
    trainer = Trainer(
        config=config,
        mesh=parts.mesh,
        models=parts.models,
        feed=parts.feed,
        publisher=parts.publisher,
        checkpoints=parts.checkpoints,
        cadence=Cadence(SynchronizerConfig(**{"max_staleness": 9, **sync}), ask=parts.ask),
        evaluations=parts.evaluations,
        skips=SkippedSteps(Path(), 1, True, parts.note),
        profiler=Profiler(TrainerConfig(), 0, choose("cpu"), Path()),
        log_step=lambda step, metrics, experiences: parts.note(f"log {step}"),
        token_loss=None,
        run_epoch=1,
        stopping=lambda: False,
        on_phase=lambda phase: None,
        export=lambda step: parts.note(f"export {step}"),
        save_times=save_times or SaveTimes(1, 0.0, share=lambda item: item),
        check=parts.check,
        gates=gates or Gates(),
    )  # type: ignore[arg-type]
    assert trainer.fit(0) == STEPS
    return parts.events


def test_engines_that_speculate_are_judged_between_their_weights_and_the_first_step() -> None:
    parts = Parts()
    parts.check = lambda version: parts.note(f"check {version}")
    events = trained(parts)
    assert events[:4] == ["publish 0", "published", "check 0", "rest"]
    assert sum(event.startswith("check") for event in events) == 1


def second(events: list[str]) -> list[str]:
    """Those of the second step."""
    return events[events.index("evaluate 1") + 1 : events.index("evaluate 2") + 1]


def test_what_a_step_tells_is_written_before_its_checkpoint_can_exist() -> None:
    """A process killed between the two would resume behind the
    step, and nobody would ever tell of it.
    """
    assert second(trained(Parts())) == [
        "rest",
        "score",
        "published",
        "copied",
        "update",
        "publish 2",
        "consumed 1",
        "log 2",
        "save 2 full",
        "evaluate 2",
    ]


def test_a_deterministic_run_evaluates_the_version_it_has_published() -> None:
    found = second(trained(Parts(alone=True)))
    assert found[found.index("publish 2") + 1 :] == [
        "consumed 1",
        "log 2",
        "save 2 full",
        "published",
        "evaluate 2",
    ]


def test_a_thread_that_reads_ahead_comes_before_the_copies_of_a_save() -> None:
    """Three that want two cores: who holds the interpreter's lock would wait for one with it."""
    ahead = SimpleNamespace(over=None)
    parts = Parts(ahead=ahead)
    assert "save 2 full later" in trained(parts)
    ahead.over()
    assert parts.events[-1] == "copy now"
    waiting = trained(Parts(ahead=ahead, by_saves=True))
    assert "save 2 full weights" in waiting, "engines wait for these"


def publications(events: list[str]) -> list[int]:
    return [int(event.split()[1]) for event in events if event.startswith("publish ")]


def test_the_style_decides_what_is_published_and_the_end_is_in_any_case() -> None:
    assert publications(trained(Parts(), sync_interval=2)) == [0, 2, 4, 5]
    assert publications(trained(Parts(), sync_interval=2, sync_offset=1)) == [0, 3, 5]
    assert publications(trained(Parts(), sync_interval=100, max_staleness=1)) == [0, 2, 4, 5]


def test_what_is_evaluated_is_published_first() -> None:
    """Engines that hold version 2 would say what version 3 can do, under its name."""
    events = trained(Parts(evaluated=3), sync_interval=2)
    assert publications(events) == [0, 2, 3, 4, 5]
    assert events.index("publish 3") < events.index("evaluate 3")


def test_explorers_are_asked_after_every_step_in_the_one_style_that_does() -> None:
    """Also after a step that is published for another reason: the
    answer is a collective of all ranks.
    """
    parts = Parts(evaluated=3)
    assert publications(trained(parts, sync_style="dynamic_by_explorer", sync_interval=7)) == [
        0,
        3,
        4,
        5,
    ]
    assert parts.asked == [7] * STEPS
    parts = Parts()
    trained(parts, sync_style="fully_async")
    assert parts.asked == []


def saves(events: list[str]) -> list[str]:
    return [event.removeprefix("save ") for event in events if event.startswith("save ")]


def test_weights_for_engines_and_a_checkpoint_of_one_step_are_one_save() -> None:
    """Row P18.

    What is due is saved before anybody waits for the engines to have it: they take it from there.
    """
    events = trained(Parts(by_saves=True, alone=True), sync_interval=2)
    assert saves(events) == [
        "0 weights",
        "1 full",
        "2 full weights",
        "3 full",
        "4 full weights",
        "5 full",
        "5 weights",
    ]
    assert events.index("save 0 weights") < events.index("published")
    assert events[events.index("save 2 full weights") :][1] == "published"
    assert saves(trained(Parts(by_saves=False), sync_interval=2)) == [
        "1 full",
        "2 full",
        "3 full",
        "4 full",
        "5 full",
    ]


def test_every_published_version_is_kept_once() -> None:
    """With whatever else is due at that step, of one staging."""
    events = trained(Parts(), SaveTimes(4, 0.0, share=lambda item: item), "all", sync_interval=2)
    assert saves(events) == ["0 version", "2 version", "4 full version", "5 full version"]
    for step in (0, 2, 4):
        assert events.index(f"save {step}" + " full" * (step == 4) + " version") < events.index(
            "copied", events.index(f"publish {step}")
        )


@pytest.mark.parametrize(
    ("exports", "expected"),
    [("never", []), ("last", [STEPS]), ("always", list(range(1, STEPS + 1)))],
)
def test_what_is_exported(exports: str, expected: list[int]) -> None:
    """Row P20: each checkpoint once it is there, or the end of the run."""
    events = trained(Parts(exports=exports))
    assert [event for event in events if "export" in event] == [f"export {n}" for n in expected]


class Clock:
    """Advances by `step_s` whenever it is looked at."""

    def __init__(self, step_s: float):
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def same(item: Any) -> Any:
    return item


def paced(interval: int, step_s: float, save_s: float, skips: bool = False) -> list[str]:
    """What is said of forty saves to a disk that takes `save_s`, one behind the other, with two
    slots: whoever has none waits, or skips.
    """
    now, said, ends = [0.0], list[str](), list[float]()
    pace = DiskPace(said.append, clock=lambda: now[0])
    for step in range(1, 40 * max(1, interval) + 1):
        now[0] += step_s
        pace.steps += 1
        if step % max(1, interval):
            continue
        is_full = len(ends) > 1 and ends[-2] > now[0]
        if is_full and skips:
            pace.lost += 1
            continue
        with pace.waiting():
            now[0] = max(now[0], ends[-2]) if is_full else now[0]
        pace.begun(interval, is_behind=bool(ends) and ends[-1] > now[0])
        ends.append(max(now[0], ends[-1] if ends else 0.0) + save_s)
    return said


def test_an_interval_that_the_disk_cannot_follow_is_said_with_one_that_it_can() -> None:
    for interval, step_s, save_s in ((1, 2.0, 1.9), (5, 2.0, 9.9), (1, 2.0, 0.1)):
        assert paced(interval, step_s, save_s) == []
    for skips in (False, True):
        (said,) = paced(1, 2.0, 8.2, skips)
        assert "a checkpoint takes 8." in said and "trainer.save_interval=5 is what" in said
    assert "save_interval=6 is what it sustains" in paced(5, 2.0, 11.0)[0]
    assert "trainer.save_minutes=0.2 is what" in paced(0, 2.0, 8.2)[0]


def test_without_an_interval_a_checkpoint_is_due_after_so_many_minutes() -> None:
    now = [0.0]
    times = SaveTimes(0, 10.0, same, clock=lambda: now[0])
    due = []
    for step in range(1, 40):
        now[0] += 100.0
        if times.is_due(step):
            times.begun(step, 0)
            due.append(step)
    assert due == [6, 12, 18, 24, 30, 36]


def test_what_only_rank_0_can_know_is_the_same_on_every_rank() -> None:
    words: list[bool] = []

    def told(item: bool) -> bool:
        words.append(item)
        return item

    lead = SaveTimes(0, 10.0, told, clock=Clock(400.0))
    other = SaveTimes(0, 10.0, lambda item: words[-1], clock=lambda: 1e9)
    for step in range(1, 9):
        is_due = lead.is_due(step)
        assert other.is_due(step) == is_due
        if is_due:
            lead.begun(step, 0), other.begun(step, 0)
    assert True in words and False in words


@pytest.mark.parametrize(
    "change, minutes",
    [
        ({}, 10.0),
        ({"save_interval": 5}, 0.0),
        ({"deterministic": True}, 0.0),
        ({"save_minutes": 0.0}, 0.0),
        ({"save_minutes": 2.5}, 2.5),
    ],
)
def test_minutes_are_off_with_an_interval_and_in_a_run_to_be_repeated(
    change: dict[str, Any], minutes: float
) -> None:
    config = Config()
    for key, value in change.items():
        setattr(config if key == "deterministic" else config.trainer, key, value)
    times = save_times(config, same)
    assert (times.interval, times.minutes) == (config.trainer.save_interval, minutes)


def test_a_save_that_failed_is_tried_again_after_a_while_and_only_the_last() -> None:
    now = [0.0]
    times = SaveTimes(1000, 0.0, same, clock=lambda: now[0])
    times.begun(5, 0)
    times.hear(SaveFailed(id="x", step=4, cause="given up for the newer save of step 5"))
    now[0] = AGAIN_S
    assert not times.is_due(6)
    times.hear(SaveFailed(id="y", step=5, cause="no slot came back"))
    now[0] = AGAIN_S - 1
    assert not times.is_due(7)
    now[0] = AGAIN_S
    assert times.is_due(8)
    times.begun(8, 0)
    assert not times.is_due(9) and times.is_due(1000)


def test_the_trainer_saves_by_time_and_at_the_end() -> None:
    # looked at: at the start, at each step's end, at each save
    times = SaveTimes(0, 1.0, same, clock=Clock(25.0))
    assert saves(trained(Parts(), times)) == ["3 full", "5 full"]


@pytest.mark.parametrize("times, comes", [(1, True), (2, False)])
def test_the_last_checkpoint_is_tried_once_more(times: int, comes: bool) -> None:
    parts, failures = Parts(), [RuntimeError("checkpoint of step 5 failed: full")] * times

    def wait(step: int) -> None:
        if failures:
            raise failures.pop()

    parts.checkpoints.wait = wait
    if comes:
        assert saves(trained(parts))[-2:] == ["5 full", "5 full"]
    else:
        with pytest.raises(RuntimeError, match="full"):
            trained(parts)


def test_a_rank_that_alone_has_failed_says_so_and_begins_no_save() -> None:
    parts = Parts()
    parts.mesh.broadcast = lambda item: False

    def wait(step: int) -> None:
        raise RuntimeError("checkpoint of step 5 failed: mine")

    parts.checkpoints.wait = wait
    with pytest.raises(RuntimeError, match="mine"):
        trained(parts)
    assert saves(parts.events)[-2:] == ["4 full", "5 full"]


def test_every_phase_of_a_step_is_on_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir = new_attempt(tmp_path)
    monkeypatch.setenv(trace.DIRECTORY, str(log_dir / "trace"))
    trace.start("rank_0")
    trained(Parts())
    trace.stop()
    (track,) = timeline.load(tmp_path)
    done = [name for name, *_ in track.spans()]
    assert {
        name: done.count(name)
        for name in ("wait_batch", "score", "train", "sync_wait", "staging_wait")
    } == dict.fromkeys(("wait_batch", "score", "train", "sync_wait", "staging_wait"), STEPS)
    versions = [event["name"] for event in track.events if event["name"].startswith("version ")]
    assert versions == [f"version {step}" for step in range(STEPS + 1)]
