"""The order of the things that a step does, which is what a resume relies on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.checkpoint.records import Committed
from rft.config import SynchronizerConfig, TrainerConfig
from rft.ground.device import choose
from rft.monitor import trace
from rft.monitor.logs import new_attempt
from rft.sync.style import Cadence
from rft.tools import timeline
from rft.trainer.feed import StepInput
from rft.trainer.reporting import Profiler, SkippedSteps
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
    ) -> None:
        self.exports = exports
        self.news: list[Committed] = []
        self.events: list[str] = []
        self.asked: list[int] = []
        self.unsaved: dict[int, bool] = {}
        note = self.note
        self.mesh = SimpleNamespace(broadcast=lambda item: item)
        self.models = SimpleNamespace(score=self.score, train_step=self.train_step)
        self.feed = SimpleNamespace(
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
            save=self.save,
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

    def save(self, step: int, models: Any, loop: dict[str, Any], full: bool, weights: bool) -> None:
        self.note(" ".join(["save", str(step), *["full"] * full, *["weights"] * weights]))
        self.checkpoints.requested = step if full else self.checkpoints.requested
        if self.exports == "always":
            done = {"collection": "", "name": "", "seconds": 0.0, "bytes": 0}
            self.news += [Committed(id=str(step), step=step, **done)]

    def poll(self) -> list[Committed]:
        found, self.news = self.news, []
        return found

    def ask(self, interval: int) -> bool:
        """Explorers that want weights after every fourth step."""
        self.asked.append(interval)
        return len(self.asked) % 4 == 0

    def score(self, part: Any, groups: Any) -> tuple[Any, dict[str, float]]:
        self.note("score")
        return part, {}

    def train_step(
        self, part: Any, token_loss: Any, before_update: Any, updates: Any
    ) -> dict[str, float]:
        before_update()
        self.note("update")
        return {"loss": 1.0, "grad_norm": 1.0, "skipped": 0.0}


def trained(parts: Parts, **sync: Any) -> list[str]:
    """What the parts are asked for while the trainer makes STEPS steps."""
    trainer = Trainer(
        config=TrainerConfig(total_steps=STEPS, save_interval=1, save_hf_checkpoint=parts.exports),
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
    )  # type: ignore[arg-type]
    assert trainer.fit(0) == STEPS
    return parts.events


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


@pytest.mark.parametrize(
    ("exports", "expected"),
    [("never", []), ("last", [STEPS]), ("always", list(range(1, STEPS + 1)))],
)
def test_what_is_exported(exports: str, expected: list[int]) -> None:
    """Row P20: each checkpoint once it is there, or the end of the run."""
    events = trained(Parts(exports=exports))
    assert [event for event in events if "export" in event] == [f"export {n}" for n in expected]


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
