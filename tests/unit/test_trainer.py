"""The order of the things that a step does, which is what a resume relies on."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rft.config import TrainerConfig
from rft.device import choose
from rft.feed import StepInput
from rft.profiler import Profiler
from rft.skips import SkippedSteps
from rft.trainer import Trainer

STEPS = 2


class Parts:
    """All of the trainer's parts; each notes what is asked of it."""

    def __init__(self, alone: bool) -> None:
        self.events: list[str] = []
        note = self.note
        self.mesh = SimpleNamespace(broadcast=lambda item: item)
        self.models = SimpleNamespace(score=self.score, train_step=self.train_step)
        self.feed = SimpleNamespace(
            next=lambda step, stopping: StepInput([], {}, []), consumed=lambda step: note(f"consumed {step}"),
            mark=lambda: 0, retain=lambda loop: None,
        )  # fmt: skip
        self.publisher = SimpleNamespace(
            start=lambda version, due: note(f"publish {version}"),
            wait=lambda: note("published"),
            release=lambda: note("published"),
            last={},
            version=STEPS,
        )
        self.checkpoints = SimpleNamespace(
            requested=None, save=lambda step, *_: note(f"save {step}"), before_update=lambda: note("copied"), poll=list,
            wait=lambda step: None, wait_exports=lambda: None, metrics=dict,
        )  # fmt: skip
        self.evaluations = SimpleNamespace(
            alone=alone, at_startup=lambda version: None, at_end=lambda version: None,
            if_due=lambda version: note(f"evaluate {version}"),
        )  # fmt: skip

    def note(self, event: str) -> None:
        self.events.append(event)

    def score(self, part: Any) -> tuple[Any, dict[str, float]]:
        self.note("score")
        return part, {}

    def train_step(self, part: Any, token_loss: Any, before_update: Any) -> dict[str, float]:
        before_update()
        self.note("update")
        return {"loss": 1.0, "grad_norm": 1.0, "skipped": 0.0}


def events(alone: bool = False) -> list[str]:
    """Of the second step."""
    parts = Parts(alone)
    trainer = Trainer(
        config=TrainerConfig(total_steps=STEPS, save_interval=1, save_hf_checkpoint="never"), mesh=parts.mesh,
        models=parts.models, feed=parts.feed, publisher=parts.publisher, checkpoints=parts.checkpoints,
        evaluations=parts.evaluations, skips=SkippedSteps(Path(), 1, True, parts.note),
        profiler=Profiler(TrainerConfig(), 0, choose("cpu"), Path()),
        log_step=lambda step, metrics, experiences: parts.note(f"log {step}"),
        token_loss=None, sync_interval=1, run_epoch=1, stopping=lambda: False, on_phase=lambda phase: None,
        export=lambda step: None,
    )  # type: ignore[arg-type]  # fmt: skip
    assert trainer.fit(0) == STEPS
    begin, end = parts.events.index("save 1") + 1, parts.events.index("save 2") + 1
    return parts.events[begin:end]


def test_what_a_step_tells_is_written_before_its_checkpoint_can_exist() -> None:
    """A process killed between the two would resume behind the step, and nobody would ever tell of it."""
    assert events() == [
        "score",
        "published",
        "copied",
        "update",
        "publish 2",
        "consumed 1",
        "log 2",
        "evaluate 2",
        "save 2",
    ]


def test_a_deterministic_run_evaluates_the_version_it_has_published() -> None:
    found = events(alone=True)
    assert found[found.index("publish 2") + 1 :] == ["consumed 1", "log 2", "published", "evaluate 2", "save 2"]
