"""What memory there is: of the machine, of containers with control groups of both versions, and who
asks for it.
"""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from states import OneRank, State

from rft import preflight
from rft.checkpoint import manager, sharding
from rft.checkpoint.manager import CheckpointManager
from rft.checkpoint.sharding import Claim
from rft.checkpoint.stager import Room, slot_size
from rft.config import CheckpointConfig, ConfigError, TrainerConfig
from rft.ground import host_memory
from rft.ground.host_memory import available, limit
from rft.preflight import memory_plan
from rft.tools import fit
from tests.unit.test_config import grpo

GB = 10**9
UNLIMITED = 9223372036854771712  # as version 1 says it


def tree(root: Path, own: str, groups: dict[str, dict[str, object]]) -> Path:
    """A machine of 100 GB, 80 of them free; `groups`: files by directory of /sys/fs/cgroup."""
    files = {
        "proc/meminfo": f"MemTotal: {100 * GB // 1024} kB\nMemFree: 9 kB\nHugePages_Total: 0\n"
        f"MemAvailable: {80 * GB // 1024} kB\n",
        "proc/self/cgroup": own,
    }
    for directory, found in groups.items():
        for name, said in found.items():
            files[f"sys/fs/cgroup/{directory}/{name}"] = f"{said}\n"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


def v2(most: object, used: int, *cached: int) -> dict[str, object]:
    names = ("active_file", "inactive_file", "shmem")
    stat = "\n".join(
        ["anon 5", *(f"{name} {size}" for name, size in zip(names, cached, strict=False))]
    )
    return {"memory.max": most, "memory.current": used, "memory.stat": stat}


def v1(most: int, used: int, cached: int = 0) -> dict[str, object]:
    stat = f"active_file 1\ninactive_file 1\ntotal_active_file 0\ntotal_inactive_file {cached}"
    return {
        "memory.limit_in_bytes": most,
        "memory.usage_in_bytes": used,
        "memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("own", "groups", "there", "free"),
    [
        ("0::/\n", {}, 100, 80),
        # Docker and Kubernetes, version 2: the container's own group is the top one
        ("0::/\n", {".": v2(64 * GB, 30 * GB)}, 64, 34),
        ("0::/\n", {".": v2("max", 30 * GB)}, 100, 80),
        # what was read of files is given back, what lies in files in memory is not
        ("0::/\n", {".": v2(64 * GB, 63 * GB, 10 * GB, 20 * GB, 30 * GB)}, 64, 31),
        ("0::/\n", {".": v2(200 * GB, 0)}, 100, 80),
        ("0::/\n", {".": v2(8 * GB, 9 * GB)}, 8, 0),
        # Slurm, version 2: the limit is that of a group around the task
        (
            "0::/slurm/job_1/step_0/task_3\n",
            {
                "slurm/job_1": v2(40 * GB, 10 * GB),
                "slurm/job_1/step_0": v2("max", 10 * GB),
                "slurm/job_1/step_0/task_3": v2(48 * GB, 4 * GB),
            },
            40,
            30,
        ),
        # out of a namespace of groups
        ("0::/../../other\n", {".": v2(32 * GB, 2 * GB)}, 32, 30),
        # version 1: by name, or where the container does not see its group's name
        (
            "4:memory:/docker/abc\n3:cpu:/\n",
            {"memory/docker/abc": v1(16 * GB, 6 * GB), "memory": v1(UNLIMITED, 0)},
            16,
            10,
        ),
        ("4:cpu,memory:/docker/abc\n0::/\n", {"memory": v1(16 * GB, 6 * GB, 2 * GB)}, 16, 12),
        ("4:memory:/a\n", {"memory/a": v1(UNLIMITED, 6 * GB)}, 100, 80),
    ],
)
def test_the_smallest_limit_counts(
    tmp_path: Path, own: str, groups: dict[str, dict[str, object]], there: int, free: int
) -> None:
    root = tree(tmp_path, own, groups)
    assert (round(limit(root) / GB), round(available(root) / GB)) == (there, free)


def test_it_is_known_here() -> None:
    assert 0 < available() <= limit()


def test_slots_of_checkpoints_that_the_container_has_no_room_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager.host_memory, "available", lambda: 10**7)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    state = State({"model/weight": torch.zeros(10**6)})
    told = r"0.01 GB of host memory for each of 2 rank\(s\) .* 0.01 GB are free: start fewer"
    with pytest.raises(ValueError, match=told):
        CheckpointManager(tmp_path, OneRank(), TrainerConfig()).start(state)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (30, ["versions", "memory", "host_memory_gb"]),
        (24, ["memory", "host_memory_gb"]),
        (9, ["host_memory_gb"]),
        (5, []),
    ],
)
def test_what_a_refusal_of_slots_advises_is_accepted(
    free: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """14 GB a rank, of which 2 are weights: two of these are kept where versions are."""
    size = 25 * 10**7
    claims = [Claim(f"w{n}", "float32", (size,), (0,), (size,), None) for n in range(14)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    room = Room(sharding.place(claims), free * 10**9, beside=4 * 10**9)
    with pytest.raises(ValueError, match=r"4\.00 of it for versions") as refused:
        room.check(slot_size(14 * 10**9, None))
    said = str(refused.value)
    advised = re.findall(r"trainer.checkpoint.(\w+)(?:=| to at most )([\w.]+\d|none)", said)
    for key, value in advised:
        if key == "versions":
            replace(room, beside=0).check(slot_size(14 * 10**9, None))
        else:
            config = CheckpointConfig(**{key: float(value)})
            room.check(room.slot_size(config, 0, is_whole=False))
    assert [key for key, _ in advised] == expected, said
    assert ("start fewer ranks" in said) == (not advised)


def test_doctor_counts_what_engines_receive(assets: Path, tmp_path: Path) -> None:
    (config,) = grpo(assets, tmp_path, "explorer.rollout_model.engine_num=3")
    wanted = memory_plan.plan(config)
    assert wanted.received == 4 * wanted.parameters
    parts = memory_plan.on_host(config, wanted, on_cpu=False)
    assert parts["weights that engines receive"] == 3 * wanted.received
    assert (
        f"engines receive {3 * wanted.received / 1e9:.2f} GB"
        in fit.host_memory(config, wanted, on_cpu=False).said
    )

    (config,) = grpo(assets, tmp_path, "explorer.rollout_model.tensor_parallel_size=2")
    assert memory_plan.plan(config).received == wanted.received // 2
    (config,) = grpo(assets, tmp_path, "synchronizer.receive=direct")
    assert memory_plan.plan(config).received == 0
    (config,) = grpo(assets, tmp_path, "model.lora_configs=[{lora_rank: 4}]")
    wanted = memory_plan.plan(config)
    assert wanted.received == 4 * wanted.trained
    parts = memory_plan.on_host(config, wanted, on_cpu=False)
    assert "weights that engines have" not in parts
    (config,) = grpo(assets, tmp_path, "synchronizer.sync=delta", "device=cpu")
    wanted = memory_plan.plan(config)
    parts = memory_plan.on_host(config, wanted, on_cpu=True)
    assert parts["weights that engines have"] == 4 * wanted.parameters
    (config,) = grpo(assets, tmp_path, "synchronizer.sync_method=memory")
    parts = memory_plan.on_host(config, memory_plan.plan(config), on_cpu=False)
    assert parts["versions of weights in memory"] > 3 * 4 * wanted.parameters
    (config,) = grpo(assets, tmp_path, "cluster.colocate=true", "synchronizer.max_staleness=0")
    parts = memory_plan.on_host(config, memory_plan.plan(config), on_cpu=False)
    assert parts["engines that sleep"] == 4 * wanted.parameters


def test_a_plan_above_the_containers_limit_is_refused(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = grpo(assets, tmp_path, "device=cpu", "explorer.rollout_model.kv_cache_gb=0.1")
    parts = memory_plan.on_host(config, memory_plan.plan(config), on_cpu=True)
    sure = sum(size for name, size in parts.items() if name not in memory_plan.ESTIMATES)
    assert sure < sum(parts.values())
    monkeypatch.setattr(host_memory, "limit", lambda: sure)
    preflight.check(config)
    monkeypatch.setattr(host_memory, "limit", lambda: sure - 1)
    told = (
        r"host_memory_gb, .*kv_cache_gb: container memory below the plan: 0.\d\d GB wanted "
        r"\(staging of checkpoints .*engines .*\), 0.\d\d GB is the limit: .*receive=direct"
    )
    with pytest.raises(ConfigError, match=told):
        preflight.check(config)
    preflight.check(config, at_start=False)


STEPS = """
import ctypes, resource
from rft.ground.host_memory import give_back, keep_blocks

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: pages are small ones

def pages(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        held = [b"x" * 2**25 for _ in range(2)]
        del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages(1)
before = pages(4)
keep_blocks()
pages(1)
since = pages(4)
give_back(2**26)
print(before, since, pages(1))
"""


def test_a_step_that_keeps_its_blocks_makes_no_pages_anew() -> None:
    """Each step of 16,384 pages in two blocks: before, every time; since, no more, until somebody
    asks to give them back.
    """
    done = subprocess.run(
        [sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, timeout=60
    )
    before, since, given_back = map(int, done.stdout.split())
    assert before > 4 * 16_000
    assert since < 500
    assert given_back > 8_000
