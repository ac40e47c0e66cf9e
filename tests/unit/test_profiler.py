"""What is recorded, of which steps, on which ranks."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from rft.config import ConfigError, TrainerConfig
from rft.ground.device import Device, choose
from rft.trainer.reporting import Profiler


def profiler(root: Path, rank: int = 0, **keys: object) -> Profiler:
    config = TrainerConfig(**{"profiler": "torch", "profile_steps": [2, 3]} | keys)  # type: ignore[arg-type]
    return Profiler(config, rank, choose("cpu"), root / "profile")


def run(found: Profiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        found.begin(step)
        with found.span(f"work_{step}"):
            pass
        found.end(step)
    found.close(last)


def names(file: Path) -> set[str]:
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return {event["name"] for event in events if event.get("name", "").startswith("work_")}


def test_the_trace_holds_the_parts_of_those_steps_only(tmp_path: Path) -> None:
    run(profiler(tmp_path), 1, 5)
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "steps_2_3_rank_0.json" and names(file) == {"work_2", "work_3"}


def test_a_run_that_begins_or_ends_inside_leaves_what_there_was(tmp_path: Path) -> None:
    run(profiler(tmp_path), 3, 9)
    run(profiler(tmp_path, profile_steps=[2, 30]), 1, 4)
    files = {file.name: names(file) for file in (tmp_path / "profile").iterdir()}
    assert files == {
        "steps_3_3_rank_0.json": {"work_3"},
        "steps_2_4_rank_0.json": {"work_2", "work_3", "work_4"},
    }


@pytest.mark.parametrize(
    ("rank", "keys"), [(1, {}), (0, {"profiler": None}), (0, {"profile_steps": [6, 9]})]
)
def test_nothing_is_left_where_nothing_was_asked_for(
    tmp_path: Path, rank: int, keys: dict[str, object]
) -> None:
    run(profiler(tmp_path, rank, **keys), 1, 5)
    assert not list(tmp_path.iterdir())


def test_nsys_needs_cuda_and_gets_ranges_through_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="needs CUDA"):
        profiler(tmp_path, profiler="nsys")
    heard: list[object] = []
    monkeypatch.setattr(Device, "capture", lambda self, on: heard.append(on))
    monkeypatch.setattr(Device, "range", lambda self, name: heard.append(name) or nullcontext())
    config = TrainerConfig(profiler="nsys", profile_steps=[2, 3])
    run(Profiler(config, 0, Device("cuda", 0, "nccl", 1, True), tmp_path / "profile"), 1, 5)
    assert heard == [True, "work_2", "work_3", False]
