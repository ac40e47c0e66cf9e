"""`rft doctor [experiment=NAME | --config FILE] [section.key=value ...]`: would this config run on
this machine?

In: the command line of `rft train`; without any, only the machine is looked at. Out: a table of ok
/ warn / fail lines, each with what to do, and exit code 1 where something fails (2 where the words
are no config at all). Where `cluster.ray_address` is given,
or in the shell of a Slurm job, every machine of it looks at itself (`rft.tools.machine_check`), and
what all say is said once. It is for a minute before a job is queued: two small processes per
machine meet as trainer ranks do, and nothing else is started. Where a recipe has a `prepare`
function, that writes its model and data, as the run would.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rft import train
from rft.config import ConfigError
from rft.config import file as config_file
from rft.ground.errors import refuse
from rft.ground.protocols import ActorHandle
from rft.run import cards
from rft.tools import config as config_tool
from rft.tools import machine_check, tables
from rft.tools.fit import FAIL, OK, WARN, Finding, of_config
from rft.tools.machine_check import MachineLook

DEPTHS = ("*", "*/*", "*/*/*")  # project, name, stage
NODE_S = 300.0  # for another machine to look at itself
HERE = socket.gethostname()
# one node's findings; of this machine first
Looks = dict[str, list[Finding]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft doctor",
        usage="rft doctor [experiment=NAME | --config FILE] [section.key=value ...]",
        allow_abbrev=False,
        description=(
            "Look at this machine, at the others of the job and, where words are given, at the "
            "config that they mean, before a job is queued."
        ),
    )
    _, words = parser.parse_known_args(argv)
    try:
        looks = findings(words)
    except ConfigError as error:  # before any check: these words are no config
        return refuse(config_file.located(error))
    print(table(looks))
    return int(any(one.level == FAIL for found in looks.values() for one in found))


def findings(words: list[str]) -> Looks:
    raw = config_tool.composed(words) if words else None
    asked = str(raw.device) if raw is not None else "auto"
    found, met = machine_check.findings(asked)
    looks = {HERE: found} | others(asked, raw.cluster.ray_address if raw is not None else None)
    if raw is not None:
        said = {one.said for one in found}
        found += [one for one in of_words(raw, met) if not any(text in one.said for text in said)]
    return looks


def of_words(raw: Any, met: machine_check.Met) -> Iterator[Finding]:
    with left_as_it_was(Path(raw.checkpoint_root_dir)):
        try:
            stages = train.prepared_stages(raw)
        except ConfigError as error:
            for said in config_file.located(error).problems:
                yield Finding(FAIL, "config", said, "as it says")
            return
        for config in stages:
            where = f"{config.stage_name}: " if config.stage_name else ""
            dealt = "\n".join(cards.table(config, cards.here()))
            yield Finding(OK, f"{where}who computes where", dealt)
            for one in of_config(config, met):
                yield Finding(one.level, where + one.what, one.said, one.fix)


# --- the other machines of the job ----------------------------------------------------------------


def others(asked: str, ray_address: str | None) -> Looks:
    """Those of the Ray that the config names, or of the Slurm job that this is the shell of."""
    if ray_address:
        return of_ray(asked, ray_address)
    if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 and "SLURM_STEP_ID" not in os.environ:
        return of_slurm(asked)
    return {}


def of_slurm(asked: str) -> Looks:
    look = [sys.executable, "-m", "rft.tools.machine_check", asked]
    srun = [
        "srun",
        "--overlap",
        "--ntasks-per-node=1",
        f"--ntasks={os.environ['SLURM_JOB_NUM_NODES']}",
    ]
    done = subprocess.run([*srun, *look], capture_output=True, text=True, timeout=NODE_S)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    looks = {one["node"]: as_findings(one) for one in told if one["node"] != HERE}
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        fix = "see that this Python and rft are at the same place on every node"
        looks["srun"] = [Finding(FAIL, "other nodes", said, fix)]
    return looks


def of_ray(asked: str, address: str) -> Looks:
    """Each node looks at itself, in an actor that takes nothing of what Ray gives out."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address, log_to_driver=False, logging_level="ERROR")
    try:
        asked_of = {}
        for node in ray.nodes():
            name, there = node["NodeManagerHostname"], node["NodeID"]
            if node["Alive"] and name != HERE:
                strategy = NodeAffinitySchedulingStrategy(there, soft=False)
                actor_class = ray.remote(MachineLook).options(
                    num_cpus=0, scheduling_strategy=strategy
                )
                looks = ActorHandle[MachineLook](actor_class.remote())
                asked_of[name] = looks.ask(MachineLook.told, asked)
        return {name: of_node(reference) for name, reference in asked_of.items()}
    finally:
        ray.shutdown()


def of_node(reference: Any) -> list[Finding]:
    import ray

    try:
        return as_findings(ray.get(reference, timeout=NODE_S))
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines()[-1]
        fix = "see that rft can be imported there: the same Python and PYTHONPATH as here"
        return [Finding(FAIL, "node", said, fix)]


def as_findings(told: Mapping[str, Any]) -> list[Finding]:
    return [Finding(*one) for one in told["found"]]


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


# --- as text --------------------------------------------------------------------------------------


def table(looks: Looks) -> str:
    """With several machines, what all of them say is said once."""
    where: dict[Finding, list[str]] = {}
    for node, found in looks.items():
        for one in found:
            where.setdefault(one, []).append(node)
    rows = [
        {
            "level": f"{one.level:<4}",
            "node": f"all {len(looks)}" if len(nodes) == len(looks) else ",".join(nodes),
            "what": one.what,
            "said": one.said + (f"\n-> {one.fix}" if one.fix else ""),
        }
        for one, nodes in where.items()
    ]
    if len(looks) == 1:
        rows = [{name: text for name, text in row.items() if name != "node"} for row in rows]
    counts = Counter(one.level for one in where)
    told = ", ".join(f"{counts[level]} {level}" for level in (OK, WARN, FAIL))
    return f"{tables.table(rows, headed=False)}\n{told}"
