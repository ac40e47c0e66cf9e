"""Which GPUs there are, and who of a run gets which: found once and dealt once, by the supervisor.

    look ──► Machine ──► device_of, fill_numbers, deal ──► config.device, cluster.cards
                         (before anything starts)          (in resolved.yaml; read by all parts)

In: `nvidia-smi`, or the device files where it is not there; the environment of the process that the
user started; a stage's config. Out: of the config `device`, `cluster.gpu_per_node`,
`cluster.colocate`, the numbers of ranks and engines where the user left them out, and
`cluster.cards`: each part's GPUs, named as CUDA_VISIBLE_DEVICES names them. Loads no torch.
Invariants: a GPU is one part's, unless `cluster.colocate` says that a rank and an engine take turns
on it; whoever starts a part passes on what is written there and decides nothing; where a Ray that
exists gives out the engines' GPUs, or a launcher those of the ranks, nothing is written for them.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from rft.config import TRAINING, CardsConfig, Config, ConfigError

ASK_S = 30.0  # for the driver, which may have to wake its GPUs; for a Ray, to answer
MIB = 2**20
QUESTION = ("index", "name", "uuid", "memory.total", "memory.used", "driver_version")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Card:
    """One GPU, as its driver tells of it; sizes in bytes, 0 where they are not told."""

    index: int
    name: str = ""
    uuid: str = ""
    memory: int = 0
    used: int = 0


@dataclass(frozen=True)
class Machine:
    """What the process that the user started finds around itself.

    `visible`: what CUDA_VISIBLE_DEVICES names, or all cards where it is not set (`restricted`: it
    is). `launcher`: who started this process as one rank of many, of `local_ranks` on this node.
    `trouble`: what the driver's tool said instead of an answer.
    """

    cards: tuple[Card, ...] = ()
    driver: str = ""
    source: str = ""  # "nvidia-smi" or "device files"; "" where there is no GPU
    visible: tuple[str, ...] = ()
    restricted: bool = False
    launcher: str | None = None
    local_ranks: int = 0
    trouble: str = ""

    @property
    def shares_cards(self) -> bool:
        """Whether ranks that somebody else started see the GPUs of each other."""
        return self.launcher is None or len(self.visible) >= self.local_ranks

    def describe(self) -> str:
        names = sorted({card.name or "GPU" for card in self.cards})
        found = f"{len(self.cards)} x {', '.join(names)}" if self.cards else "no GPU"
        known = f", driver {self.driver}" if self.driver else ""
        limits = f", {VISIBLE}={','.join(self.visible)}" if self.restricted else ""
        return found + known + (f" ({self.source}{limits})" if self.source or limits else "")


# --- what there is -------------------------------------------------------------------------------


def look(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Machine:
    """`root`: where `dev` and `proc` are."""
    cards, driver, trouble = _asked(environment)
    source = "nvidia-smi" if cards else ""
    if not cards:
        files = (path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*"))
        # a container may have the sixth one alone: to CUDA that is the first
        cards = tuple(map(Card, range(sum(map(str.isdigit, files)))))
        source = "device files" if cards else ""
        driver = driver or _loaded_driver(root / "proc/driver/nvidia/version")
    told = environment.get(VISIBLE)
    launcher = launched(environment)
    return Machine(
        cards,
        driver,
        source,
        tuple(str(card.index) for card in cards) if told is None else _named(told, cards),
        told is not None,
        launcher,
        _local_ranks(environment) if launcher else 0,
        trouble,
    )


@cache
def here() -> Machine:
    """Of this process; found once."""
    return look()


def _asked(environment: Mapping[str, str]) -> tuple[tuple[Card, ...], str, str]:
    """The cards, the driver's version, and what is wrong, from the driver's own tool."""
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if tool is None:
        return (), "", ""
    command = [tool, f"--query-gpu={','.join(QUESTION)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stdout + error.stderr).split())
        return (), "", f"{tool}: {said or error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), "", f"{tool}: {error}"
    rows = [row for row in csv.reader(told.stdout.splitlines(), skipinitialspace=True) if row]
    cards = tuple(
        Card(int(index), name, uuid, _mib(total), _mib(used))
        for index, name, uuid, total, used, _ in rows
    )
    return cards, rows[0][-1] if rows else "", "" if rows else f"{tool}: no GPU"


def _mib(told: str) -> int:
    """Bytes; some GPUs do not tell ("[N/A]")."""
    return int(told) * MIB if told.isdigit() else 0


def _loaded_driver(version: Path) -> str:
    found = re.search(r"\d+\.\d+(\.\d+)?", version.read_text("utf-8")) if version.exists() else None
    return found.group() if found else ""


def _named(told: str, cards: Sequence[Card]) -> tuple[str, ...]:
    """As CUDA reads it: up to the first name that no GPU has, like -1, none or NoDevFiles."""
    names = map(str.strip, told.split(","))
    return tuple(takewhile(lambda name: _is_one(name, cards), names))


def _is_one(name: str, cards: Sequence[Card]) -> bool:
    """By its number or the beginning of its UUID; that of a part of a GPU, or where the driver has
    no tool, is not known here.
    """
    if re.fullmatch(r"-?\d+", name):
        return 0 <= int(name) < len(cards)
    if name.startswith("GPU-") and any(card.uuid for card in cards):
        return any(card.uuid.startswith(name) for card in cards)
    return bool(cards) and name.startswith(("GPU-", "MIG-"))


def launched(environment: Mapping[str, str] = os.environ) -> str | None:
    """Who started this process as one rank of many: "torchrun", "slurm", or None for a plain start.

    srun sets no WORLD_SIZE; a batch script's own shell has SLURM_PROCID but no step, and is a plain
    start.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return "torchrun"
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return "slurm"
    return None


def nodes_of(environment: Mapping[str, str]) -> int:
    """How many the launcher has put ranks on."""
    if "SLURM_STEP_NUM_NODES" in environment and "TORCHELASTIC_RUN_ID" not in environment:
        return int(environment["SLURM_STEP_NUM_NODES"])
    return int(environment["WORLD_SIZE"]) // int(
        environment.get("LOCAL_WORLD_SIZE", environment["WORLD_SIZE"])
    )


def ranks_of(environment: Mapping[str, str]) -> int:
    """How many the launcher has started."""
    return int(environment.get("WORLD_SIZE") or environment["SLURM_STEP_NUM_TASKS"])


def _local_ranks(environment: Mapping[str, str]) -> int:
    return -(-ranks_of(environment) // nodes_of(environment))


@cache
def ray_gpus(address: str) -> int:
    """How many GPUs the Ray at `address` has, asked in a process of its own: this one loads Ray
    later, or never.
    """
    question = (
        "import json, ray, sys; ray.init(sys.argv[1], log_to_driver=False, logging_level='ERROR');"
        "print(json.dumps(ray.cluster_resources().get('GPU', 0)))"
    )
    command = [sys.executable, "-c", question, address]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except subprocess.SubprocessError as error:
        raise ConfigError(
            f"cluster.ray_address={address}: it does not say how many GPUs it has; give "
            "device=cuda or device=cpu, or look at it with `ray status`"
        ) from error
    return int(json.loads(told.stdout.splitlines()[-1]))


# --- who gets what -------------------------------------------------------------------------------


def auxiliary_cards(config: Config) -> int:
    """GPUs of the engines of auxiliary models."""
    return sum(
        one.engine_num * one.tensor_parallel_size for one in config.explorer.auxiliary_models
    )


def engine_cards(config: Config) -> int:
    """GPUs of the policy's engines and of those of auxiliary models."""
    rollout = config.explorer.rollout_model
    return int(rollout.engine_num or 1) * rollout.tensor_parallel_size + auxiliary_cards(config)


def device_of(config: Config, machine: Machine, asks_ray: bool) -> str:
    """What all parts compute on. `asks_ray`: also where that takes seconds."""
    asked, cluster = config.device, config.cluster
    if asked != "auto":
        return asked
    if machine.visible:
        return "cuda"
    if asks_ray and cluster.ray_address and config.mode not in TRAINING:
        return "cuda" if ray_gpus(cluster.ray_address) else "cpu"
    return "cpu"


def fill_numbers(config: Config, machine: Machine, fewest: int) -> None:
    """Numbers of GPUs, ranks and engines, and whether they share, where the user left them out.

    `fewest`: ranks that one copy of the model needs; less than 1: not known.
    """
    cluster, rollout = config.cluster, config.explorer.rollout_model
    if config.device == "cuda" and machine.visible:
        cluster.gpu_per_node = cluster.gpu_per_node or len(machine.visible)
    total = cluster.gpu_per_node or 0
    is_one_machine = cluster.node_num == 1 and cluster.ray_address is None
    deals = config.device == "cuda" and is_one_machine and machine.launcher is None
    if cluster.colocate is None:
        cluster.colocate = deals and config.mode == "both" and total == 1
        if cluster.colocate:  # whoever waits for its turn is not ahead: within any bound
            config.synchronizer.max_staleness = 0
    if rollout.engine_num is None:
        rollout.engine_num = _engines_left(config, total, fewest) if deals and total else 1
    if config.trainer.num_ranks is None:
        config.trainer.num_ranks = ranks_left(config, fewest)


def _engines_left(config: Config, total: int, fewest: int) -> int:
    """Of `total` GPUs: all where nobody trains or both take turns, what the ranks leave, or the
    number nearest to half of them; always one that gives the trainer whole copies of the model.
    """
    size = config.explorer.rollout_model.tensor_parallel_size
    ranks, total = config.trainer.num_ranks, total - auxiliary_cards(config)
    if config.mode == "train":
        return 1
    if config.mode != "both":
        return max(1, total // size)
    if config.cluster.colocate:
        whole = [
            count for count in range(1, total // size + 1) if count * size % max(fewest, 1) == 0
        ]
        return max(1, ranks // size) if ranks else max(whole, default=1)
    if ranks is not None:
        return max(1, (total - ranks) // size)
    fits = [
        count
        for count in range(1, total // size + 1)
        if (left := total - count * size) >= fewest >= 1 and left % fewest == 0
    ]
    return min(fits, key=lambda count: abs(2 * count * size - total), default=1)


def ranks_left(config: Config, fewest: int) -> int:
    """Trainer ranks where nobody gives their number: all GPUs that the engines leave, in whole
    copies of the model, and in whole nodes if it is more than one; `fewest`, which one copy needs,
    where the number of GPUs is not told or there are none.
    """
    cluster = config.cluster
    if (
        config.device == "cpu"
        or not cluster.gpu_per_node
        or config.mode not in TRAINING
        or fewest < 1
    ):
        return fewest
    engines = engine_cards(config) if config.mode == "both" else 0
    if cluster.colocate:
        return engines - auxiliary_cards(config)
    total = cluster.node_num * cluster.gpu_per_node
    if cluster.ray_address and cluster.node_num == 1:
        engines = 0  # of that Ray
    left = total - engines
    given = "explorer.rollout_model.engine_num x tensor_parallel_size"
    given += " and those of explorer.auxiliary_models" if config.explorer.auxiliary_models else ""
    told = f"cluster.node_num x gpu_per_node = {total} GPUs, less {given} = {engines},"
    if left < fewest:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, which needs {fewest}: lower engine_num or "
            "trainer.megatron's sizes, or let both take turns on the same GPUs with "
            "cluster.colocate=true"
        )
    if left > cluster.gpu_per_node and left % cluster.gpu_per_node:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, no whole number of nodes of "
            f"{cluster.gpu_per_node}: change "
            "explorer.rollout_model.engine_num, or set trainer.num_ranks"
        )
    if left % fewest:
        raise ConfigError(
            f"{told} leaves {left} to the trainer, no multiple of the {fewest} that its layout "
            "needs: change "
            "explorer.rollout_model.engine_num or trainer.megatron's sizes, or set "
            "trainer.num_ranks"
        )
    return left


def deal(config: Config, machine: Machine) -> CardsConfig:
    """Every part's GPUs on this machine; raises ConfigError for what cannot be, with what can.

    What is planned for another machine (`device=cuda cluster.gpu_per_node=8` where there is none)
    gets the numbers 0 to 7.
    """
    if config.device != "cuda":
        return CardsConfig()
    if config.cluster.colocate and config.mode == "both":
        check_same_cards(config)
    there = machine.visible or tuple(map(str, range(config.cluster.gpu_per_node or 0)))
    there = there[: config.cluster.gpu_per_node]
    ranks = _rank_cards(config, machine, there)
    if config.cluster.ray_address or config.mode == "train":
        return CardsConfig(ranks=ranks)
    if not machine.shares_cards:
        raise ConfigError(
            f"{VISIBLE}={','.join(machine.visible)}: the launcher shows every rank GPUs of its "
            "own, so none is left for engines here: let every task see all GPUs of its node "
            "(srun --gpu-bind=none), or give engines a Ray with cluster.ray_address"
        )
    return _with_engines(config, ranks, list(there))


def _rank_cards(config: Config, machine: Machine, there: tuple[str, ...]) -> list[str]:
    if config.mode not in TRAINING or not machine.shares_cards:
        return []
    wanted = machine.local_ranks or int(config.trainer.num_ranks or 1)
    if machine.launcher is None and wanted > len(there) and config.cluster.node_num > 1:
        return list(there)  # planned: a launcher starts them on several nodes
    if wanted > len(there):
        raise ConfigError(
            f"trainer.num_ranks={config.trainer.num_ranks}: {wanted} ranks here need a GPU each, "
            f"but {len(there)} are visible: lower it or trainer.megatron's sizes, start the ranks "
            "of several nodes with launch/slurm.sh or launch/torchrun.sh, or set device=cpu"
        )
    return list(there[:wanted])


def _with_engines(config: Config, ranks: list[str], there: list[str]) -> CardsConfig:
    """Engines after the ranks, or on their GPUs; those of auxiliary models, which never sleep,
    have GPUs of their own.
    """
    rollout, shares = config.explorer.rollout_model, config.cluster.colocate
    free = there[len(ranks) :]
    wanted = auxiliary_cards(config) if shares else engine_cards(config)
    if wanted > len(free) and config.cluster.node_num == 1:
        needs = "engines of explorer.auxiliary_models" if shares else "engines"
        way = (
            "lower their number"
            if shares
            else "lower explorer.rollout_model.engine_num or tensor_parallel_size, or "
            "trainer.num_ranks"
        )
        if config.mode == "both" and not shares:
            way += ", or let ranks and engines take turns with cluster.colocate=true"
        raise ConfigError(
            f"{needs} need {wanted} GPUs beside trainer.num_ranks={len(ranks)}, but {len(there)} "
            f"are visible: {way}"
            if ranks
            else f"{needs} need {wanted} GPUs, but {len(there)} are visible: {way}"
        )
    pool, size = (ranks if shares else free), rollout.tensor_parallel_size
    count = int(rollout.engine_num or 1)
    engines = {
        f"engine_{number}": ",".join(pool[number * size : (number + 1) * size])
        for number in range(count)
    }
    rest = free if shares else free[count * size :]
    for model in config.explorer.auxiliary_models:
        for number in range(model.engine_num):
            size = model.tensor_parallel_size
            engines[auxiliary_name(model.name, number)] = ",".join(rest[:size])
            rest = rest[size:]
    return CardsConfig(ranks=ranks, engines=engines, spare=rest)


def auxiliary_name(model: str, number: int) -> str:
    """Of an engine of an auxiliary model."""
    return f"engine_of_{model}_{number}"


def check_same_cards(config: Config) -> None:
    """On CPUs any number of ranks and engines takes turns; on GPUs every card has one rank and one
    engine worker.
    """
    ranks, rollout = int(config.trainer.num_ranks or 1), config.explorer.rollout_model
    workers = int(rollout.engine_num or 1) * rollout.tensor_parallel_size
    if ranks != workers:
        raise ConfigError(
            f"cluster.colocate=true with trainer.num_ranks={ranks} and engine_num x "
            f"tensor_parallel_size = {workers}: they share "
            "the same GPUs, so set explorer.rollout_model.engine_num or tensor_parallel_size so "
            "that both numbers are equal"
        )


class Seats:
    """GPUs of this machine for engines, which come and go while a run goes on: one that is started
    again has its own, one that is added takes spare ones or those of one that was removed.
    """

    def __init__(self, dealt: CardsConfig):
        self.of_engine = dict(dealt.engines)
        self._all = [card for names in dealt.engines.values() for card in names.split(",")]
        self._all += dealt.spare

    def free(self, living: Iterable[str]) -> list[str]:
        """`living`: names of the engines that are there."""
        taken = {card for one in living for card in self.of_engine.get(one, "").split(",")}
        return [card for card in self._all if card not in taken]

    def take(self, engine: str, size: int, living: Iterable[str]) -> None:
        """Nothing where this machine has no GPUs for engines."""
        if self._all and engine not in self.of_engine:
            self.of_engine[engine] = ",".join(self.free(living)[:size])


# --- what is told --------------------------------------------------------------------------------


def table(config: Config, machine: Machine) -> Iterator[str]:
    """For whoever started the run: who computes on what."""
    if config.device == "cpu":
        yield f"device: cpu ({machine.describe()})"
        return
    yield f"device: cuda ({machine.describe()})"
    dealt, cluster = config.cluster.cards, config.cluster
    if config.mode in TRAINING:
        ranks = f"{config.trainer.num_ranks} trainer rank(s)"
        yield f"  {ranks:<24}{' '.join(dealt.ranks) or 'the GPU that the launcher shows it'}"
    for engine, names in dealt.engines.items():
        shared = "  (in turns with the rank there)" if _is_shared(names, dealt) else ""
        yield f"  {engine:<24}{names.replace(',', ' ')}{shared}"
    if cluster.ray_address and config.mode != "train":
        size = config.explorer.rollout_model.tensor_parallel_size
        count = config.explorer.rollout_model.engine_num
        yield f"  {f'{count} engine(s)':<24}{size} each, from the Ray at {cluster.ray_address}"
    if dealt.spare:
        yield f"  {'idle':<24}{' '.join(dealt.spare)}"


def _is_shared(names: str, dealt: CardsConfig) -> bool:
    return bool(set(names.split(",")) & set(dealt.ranks))
